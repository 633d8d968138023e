//! Checks relations between settings. The error texts are those of etcd's `embed.Config.Validate`.

use std::{io, path::PathBuf, time::Duration};

use node_engine::tls::TlsVersion;
use node_state::{auth::JwtError, identity::DocumentError};

use super::{
    Config, ListenUrl, PeerUrl, RawFlags, Remark, UrlError, UsageError, file::CONFIG_FILE,
    raw_flags::parse_bool, tls,
};

pub(super) const NO_PEER_CERTIFICATE: &str = "TLS key/cert (--peer-cert-file, --peer-key-file) must be provided for peer urls with HTTPS scheme";
const MAX_ELECTION: Duration = Duration::from_millis(50_000);

/// Settings that can be parsed but are invalid, or contradict each other: exit code 2.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A variable's value does not fit its flag's kind.
    #[error("invalid value in {variable}")]
    Variable {
        variable: String,
        #[source]
        source: UsageError,
    },
    /// The configuration file can't be read.
    #[error("cannot read --config-file {}", path.display())]
    FileRead {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A part of the configuration file is invalid.
    #[error("{}:{line}: {problem}", path.display())]
    File {
        path: PathBuf,
        /// Line number, counting from 1.
        line: usize,
        /// Description of the problem.
        problem: String,
    },
    /// A URL of a flag is invalid.
    #[error("--{flag}: {source}")]
    Url {
        /// Name of the flag, without dashes.
        flag: &'static str,
        source: UrlError,
    },
    /// A member of the initial cluster has no URL.
    #[error("empty URL given for \"{0}\"")]
    EmptyUrl(String),
    /// A cipher suite is unknown.
    #[error("unexpected TLS cipher suite \"{0}\"")]
    CipherSuite(String),
    /// The given cipher suites contain none that can be offered to clients.
    #[error(
        "--cipher-suites={0} names no suite that this program offers: name one with ECDHE and GCM, as TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, or leave the flag away"
    )]
    NoCipherSuite(String),
    /// The member document is invalid.
    #[error("--muster-document")]
    Document(#[source] DocumentError),
    /// The keys for signed tokens are missing or unusable.
    #[error(transparent)]
    Tokens(#[from] JwtError),
    /// Two settings contradict each other, or one is out of range.
    #[error("{0}")]
    Relation(String),
}

/// Checks relations between settings that the types can't express.
pub(super) fn validate(config: &Config, flags: &RawFlags) -> Result<(), ConfigError> {
    let checks: [&dyn Fn() -> Result<(), String>; 3] =
        [&|| check_urls(config, flags), &|| check_timeouts(config), &|| check_tls(config, flags)];
    checks.iter().try_for_each(|check| check()).map_err(ConfigError::Relation)
}

fn check_urls(config: &Config, flags: &RawFlags) -> Result<(), String> {
    // As in etcd, the flags are checked in this way only if there is no configuration file.
    if flags.given(CONFIG_FILE).is_none()
        && flags.given("listen-client-urls").is_some()
        && flags.given("advertise-client-urls").is_none()
    {
        return Err(
            "--advertise-client-urls is required when --listen-client-urls is set explicitly"
                .to_owned(),
        );
    }
    let urls = &config.listen_client_urls;
    let is_both = |url: &ListenUrl| {
        let other = |other: &ListenUrl| {
            other.address() == url.address() && other.is_https() != url.is_https()
        };
        urls.iter().any(other)
    };
    if let Some(url) = urls.iter().find(|url| is_both(url)) {
        return Err(format!(
            "--listen-client-urls has {} both with http and with https: give each a port of its own",
            url.address()
        ));
    }
    for (flag, none) in [
        ("listen-peer-urls", config.listen_peer_urls.is_empty()),
        ("listen-client-urls", config.listen_client_urls.is_empty()),
        ("initial-advertise-peer-urls", config.advertise_peer_urls.is_empty()),
        ("advertise-client-urls", config.advertise_client_urls.is_empty()),
    ] {
        if none {
            return Err(format!("--{flag} must not be empty"));
        }
    }
    Ok(())
}

fn check_timeouts(config: &Config) -> Result<(), String> {
    let (heartbeat, election) = (config.heartbeat.as_millis(), config.election_timeout.as_millis());
    if heartbeat == 0 {
        return Err("--heartbeat-interval must be >0 (set to 0ms)".to_owned());
    }
    if election == 0 {
        return Err("--election-timeout must be >0 (set to 0ms)".to_owned());
    }
    if 5 * heartbeat > election {
        return Err(format!(
            "--election-timeout[{election}ms] should be at least as 5 times as --heartbeat-interval[{heartbeat}ms]"
        ));
    }
    if config.election_timeout > MAX_ELECTION {
        return Err(format!(
            "--election-timeout[{election}ms] is too long, and should be set less than {}ms",
            MAX_ELECTION.as_millis()
        ));
    }
    Ok(())
}

fn check_tls(config: &Config, flags: &RawFlags) -> Result<(), String> {
    let (clients, peers) = (tls::is_used_by_clients(config), tls::is_used_by_peers(config));
    for (prefix, is_used) in [("", clients), ("peer-", peers)] {
        let given = |name: &str| !flags.value(&format!("{prefix}{name}")).is_empty();
        if is_used && given("cert-file") != given("key-file") {
            return Err(format!(
                "--{prefix}cert-file and --{prefix}key-file must be given together"
            ));
        }
        let wants = flags.value(&format!("{prefix}client-cert-auth"));
        if is_used && parse_bool(wants) == Some(true) && !given("trusted-ca-file") {
            return Err(format!("--{prefix}client-cert-auth needs --{prefix}trusted-ca-file"));
        }
    }
    let has = |flag: &str| !flags.value(flag).is_empty();
    if clients && has("client-crl-file") && !has("trusted-ca-file") {
        return Err("--client-crl-file needs --trusted-ca-file: without a CA no client is checked"
            .to_owned());
    }
    if clients && config.client_tls.is_none() {
        return Err("TLS key/cert (--cert-file, --key-file) must be provided for client urls with HTTPS scheme".to_owned());
    }
    let listens = config.listen_peer_urls.iter().any(ListenUrl::is_https);
    let advertises = config.advertise_peer_urls.iter().any(PeerUrl::is_https);
    if (listens || advertises) && config.peer_tls.is_none() {
        return Err(NO_PEER_CERTIFICATE.to_owned());
    }
    if config.document.is_some() && config.peer_tls.is_none() {
        return Err("--muster-document binds members to keys, and so needs peer TLS".to_owned());
    }
    if config.peer_tls.as_ref().is_some_and(|files| files.trusted_ca.is_none()) {
        return Err("--peer-cert-file needs --peer-trusted-ca-file".to_owned());
    }
    if config.tls_policy.min > config.tls_policy.max {
        return Err("min version (TLS1.3) is greater than max version (TLS1.2)".to_owned());
    }
    if config.tls_policy.min == TlsVersion::V13 && !config.tls_policy.cipher_suites.is_empty() {
        return Err("cipher suites cannot be configured when only TLS1.3 is enabled".to_owned());
    }
    Ok(())
}

/// Returns a remark if the quota is larger than etcd recommends (server/storage/quota.go).
pub(super) fn large_quota_remark(config: &Config) -> Option<Remark> {
    const SUGGESTED: i64 = 8 << 30;
    let quota = config.quota_backend_bytes;
    (quota > SUGGESTED).then_some(Remark::LargeQuota(quota))
}

/// Returns remarks about http URLs for which a certificate is configured. They are served without
/// TLS.
pub(super) fn plaintext_remarks(config: &Config) -> Vec<Remark> {
    let (clients, peers) = (config.client_tls.is_some(), config.peer_tls.is_some());
    [
        ("listen-client-urls", &config.listen_client_urls, clients),
        ("listen-client-http-urls", &config.listen_client_http_urls, clients),
        ("listen-peer-urls", &config.listen_peer_urls, peers),
    ]
    .into_iter()
    .filter(|(_, _, has_certificate)| *has_certificate)
    .flat_map(|(flag, urls, _)| urls.iter().map(move |url| (flag, url)))
    .filter(|(_, url)| !url.is_https())
    .map(|(flag, url)| Remark::Plaintext { flag, url: url.to_string() })
    .collect()
}

#[cfg(test)]
mod tests;
