//! TLS settings from flags: files, versions and cipher suites.
//!
//! As in etcd, the flags for a certificate have no effect if all URLs that would use it are http.

use std::path::PathBuf;

use node_engine::tls::{
    GoCipherSuite, TlsFiles, TlsPolicy, TlsVersion, go_cipher_suite, is_of_tls_1_2,
};
use rustls::CipherSuite;

use super::{
    Config, ConfigError, ListenUrl, PeerUrl, RawFlags, Remark,
    raw_flags::parse_bool,
    resolve::{boolean, list},
};

/// Flags for client connections that have no effect while all client URLs are http.
const CLIENT_FLAGS: [&str; 6] = [
    "cert-file",
    "key-file",
    "client-cert-auth",
    "trusted-ca-file",
    "client-crl-file",
    "client-cert-allowed-hostname",
];

/// Flags for peer connections that have no effect while all peer URLs are http.
const PEER_FLAGS: [&str; 7] = [
    "peer-cert-file",
    "peer-key-file",
    "peer-client-cert-auth",
    "peer-trusted-ca-file",
    "peer-crl-file",
    "peer-cert-allowed-cn",
    "peer-cert-allowed-hostname",
];

/// Returns whether any listener for clients uses TLS.
pub(super) fn is_used_by_clients(config: &Config) -> bool {
    [&config.listen_client_urls, &config.listen_client_http_urls, &config.listen_metrics_urls]
        .into_iter()
        .flatten()
        .any(ListenUrl::is_https)
}

/// Returns whether any peer URL is https: of this member, or of a first member of the cluster. A
/// member document always means TLS.
pub(super) fn is_used_by_peers(config: &Config) -> bool {
    let first_members = config.initial_cluster.iter().flat_map(|(_, urls)| urls);
    config.document.is_some()
        || config.listen_peer_urls.iter().any(ListenUrl::is_https)
        || config.advertise_peer_urls.iter().chain(first_members).any(PeerUrl::is_https)
}

/// Returns the TLS files of the client listeners, or `None` if no listener for clients uses TLS.
pub(super) fn client_files(
    flags: &RawFlags,
    config: &Config,
    remarks: &mut Vec<Remark>,
) -> Option<TlsFiles> {
    if is_used_by_clients(config) {
        return files(flags, "");
    }
    remarks.extend(ineffective_flag_remarks(flags, &CLIENT_FLAGS, "no client URL is https"));
    None
}

/// Returns the TLS files for connections between peers. If all peer URLs are http, the files are
/// used only if the set is complete. Other members may get https URLs later.
pub(super) fn peer_files(
    flags: &RawFlags,
    config: &Config,
    remarks: &mut Vec<Remark>,
) -> Option<TlsFiles> {
    let files = files(flags, "peer-");
    let is_complete = files.as_ref().is_some_and(|files| files.trusted_ca.is_some());
    if is_used_by_peers(config) || is_complete {
        return files;
    }
    remarks.extend(ineffective_flag_remarks(flags, &PEER_FLAGS, "no peer URL is https"));
    None
}

fn ineffective_flag_remarks(
    flags: &RawFlags,
    names: &[&'static str],
    because: &'static str,
) -> Vec<Remark> {
    names
        .iter()
        .filter(|flag| is_given(flags, flag))
        .map(|flag| Remark::Ignored { flag, because })
        .collect()
}

/// Returns whether a flag was given with a value that is neither empty nor false.
pub(super) fn is_given(flags: &RawFlags, flag: &str) -> bool {
    flags.given(flag).is_some_and(|value| !value.is_empty() && parse_bool(value) != Some(false))
}

fn files(flags: &RawFlags, prefix: &str) -> Option<TlsFiles> {
    let value = |name: &str| flags.value(&format!("{prefix}{name}"));
    let path = |name| Some(value(name)).filter(|v| !v.is_empty()).map(PathBuf::from);
    let (cert, key) = (path("cert-file")?, path("key-file")?);
    let client = prefix.is_empty();
    Some(TlsFiles {
        cert,
        key,
        trusted_ca: path("trusted-ca-file"),
        crl: path(if client { "client-crl-file" } else { "crl-file" }),
        allowed_cn: if client { Vec::new() } else { list(value("cert-allowed-cn")) },
        allowed_hostname: list(value(if client {
            "client-cert-allowed-hostname"
        } else {
            "cert-allowed-hostname"
        })),
        names_users: client && boolean(flags, "client-cert-auth"),
    })
}

/// Returns the TLS versions and cipher suites to offer to clients.
pub(super) fn policy(
    flags: &RawFlags,
    config: &Config,
    remarks: &mut Vec<Remark>,
) -> Result<TlsPolicy, ConfigError> {
    let version = |text, otherwise| match text {
        "TLS1.2" => TlsVersion::V12,
        "TLS1.3" => TlsVersion::V13,
        _ => otherwise,
    };
    let max = version(flags.value("tls-max-version"), TlsVersion::V13);
    let suites = cipher_suites(flags, remarks)?;
    let is_usable =
        |suites: &[CipherSuite]| suites.iter().any(|s| max == TlsVersion::V13 || is_of_tls_1_2(*s));
    let is_named = !list(flags.value("cipher-suites")).is_empty();
    if is_named && !is_usable(&suites) && is_used_by_clients(config) {
        return Err(ConfigError::NoCipherSuite(flags.value("cipher-suites").to_owned()));
    }
    let min = version(flags.value("tls-min-version"), TlsVersion::V12);
    Ok(TlsPolicy { min, max, cipher_suites: suites })
}

/// Returns those suites of `--cipher-suites` that rustls supports. A remark names suites that only
/// Go supports.
fn cipher_suites(
    flags: &RawFlags,
    remarks: &mut Vec<Remark>,
) -> Result<Vec<CipherSuite>, ConfigError> {
    let (mut offered, mut passed_over) = (Vec::new(), Vec::new());
    for name in list(flags.value("cipher-suites")) {
        match go_cipher_suite(&name) {
            Some(GoCipherSuite::Offered(suite)) => offered.push(suite),
            Some(GoCipherSuite::Unsupported) => passed_over.push(name),
            None => return Err(ConfigError::CipherSuite(name)),
        }
    }
    if !passed_over.is_empty() {
        remarks.push(Remark::CipherSuites(passed_over));
    }
    Ok(offered)
}
