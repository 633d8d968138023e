//! Relations between settings, with etcd's texts (etcd `embed.Config.Validate`).

use std::{io, path::PathBuf, time::Duration};

use super::{
    Config, LowArgs, PeerUrl, Remark, UrlError, UsageError, file::CONFIG_FILE, low::parse_bool,
};
use crate::{auth::JwtError, identity::DocumentError, tls::TlsVersion};

pub(super) const NO_PEER_CERTIFICATE: &str = "TLS key/cert (--peer-cert-file, --peer-key-file) must be provided for peer urls with HTTPS scheme";
const ONE_KEY: &str =
    "members know each other by one key: give --peer-cert-file and --peer-key-file";
const MAX_ELECTION: Duration = Duration::from_millis(50_000);

/// Settings that can be understood, but not followed: exit code 1.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A variable's value is of the wrong kind.
    #[error("invalid value in {variable}")]
    Variable {
        /// Which.
        variable: String,
        /// What is wrong with it.
        #[source]
        source: UsageError,
    },
    /// The configuration file can't be read.
    #[error("cannot read --config-file {}", path.display())]
    FileRead {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Something in it can't be understood.
    #[error("{}:{line}: {problem}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What.
        problem: String,
    },
    /// A flag's URLs can't be used.
    #[error("--{flag}: {source}")]
    Url {
        /// Which flag.
        flag: &'static str,
        /// Why not.
        source: UrlError,
    },
    /// A member of the initial cluster has no URL.
    #[error("empty URL given for \"{0}\"")]
    EmptyUrl(String),
    /// A cipher suite isn't known, or not safe.
    #[error("unexpected TLS cipher suite \"{0}\"")]
    CipherSuite(String),
    /// The member document can't be used.
    #[error("--muster-document")]
    Document(#[source] DocumentError),
    /// Tokens can't be signed or checked.
    #[error(transparent)]
    Tokens(#[from] JwtError),
    /// Two settings contradict each other, or one is out of bounds.
    #[error("{0}")]
    Relation(String),
}

/// Checks what the types can't say.
pub(super) fn validate(config: &Config, low: &LowArgs) -> Result<(), ConfigError> {
    let checks: [&dyn Fn() -> Result<(), String>; 5] = [
        &|| unsupported(low),
        &|| advertised(config, low),
        &|| times(config),
        &|| limits(config),
        &|| tls(config, low),
    ];
    checks.iter().try_for_each(|check| check()).map_err(ConfigError::Relation)
}

/// What changes behaviour too much to be ignored, and isn't there.
fn unsupported(low: &LowArgs) -> Result<(), String> {
    let set =
        |flag: &str| low.given(flag).is_some_and(|v| !v.is_empty() && parse_bool(v) != Some(false));
    let discovery = ["discovery", "discovery-token", "discovery-endpoints", "discovery-srv"];
    if let Some(flag) = discovery.into_iter().find(|flag| set(flag)) {
        return Err(format!(
            "--{flag} is not supported: muster-agent meets the other members, and starts this program with --initial-cluster"
        ));
    }
    for (flag, instead) in [
        ("auto-tls", "give --cert-file and --key-file"),
        ("peer-auto-tls", "give --peer-cert-file, --peer-key-file and --peer-trusted-ca-file"),
        ("peer-client-cert-file", ONE_KEY),
        ("peer-client-key-file", ONE_KEY),
    ] {
        if set(flag) {
            return Err(format!("--{flag} is not supported: {instead}"));
        }
    }
    Ok(())
}

fn advertised(config: &Config, low: &LowArgs) -> Result<(), String> {
    // Of a file etcd does not ask this.
    if low.given(CONFIG_FILE).is_none()
        && low.given("listen-client-urls").is_some()
        && low.given("advertise-client-urls").is_none()
    {
        return Err(
            "--advertise-client-urls is required when --listen-client-urls is set explicitly"
                .to_owned(),
        );
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

fn times(config: &Config) -> Result<(), String> {
    let (heartbeat, election) = (config.heartbeat.as_millis(), config.election.as_millis());
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
    if config.election > MAX_ELECTION {
        return Err(format!(
            "--election-timeout[{election}ms] is too long, and should be set less than {}ms",
            MAX_ELECTION.as_millis()
        ));
    }
    Ok(())
}

fn limits(config: &Config) -> Result<(), String> {
    let most = crate::driver::MAX_PROPOSAL_BYTES;
    if config.max_request_bytes as usize > most {
        return Err(format!(
            "--max-request-bytes[{}] is more than one entry of the log may hold ({most})",
            config.max_request_bytes
        ));
    }
    if config.max_concurrent_streams == 0 {
        return Err("--max-concurrent-streams must be >0".to_owned());
    }
    Ok(())
}

fn tls(config: &Config, low: &LowArgs) -> Result<(), String> {
    for prefix in ["", "peer-"] {
        let given = |name: &str| !low.value(&format!("{prefix}{name}")).is_empty();
        if given("cert-file") != given("key-file") {
            return Err(format!(
                "--{prefix}cert-file and --{prefix}key-file must be given together"
            ));
        }
        let wants = low.value(&format!("{prefix}client-cert-auth"));
        if parse_bool(wants) == Some(true) && !given("trusted-ca-file") {
            return Err(format!("--{prefix}client-cert-auth needs --{prefix}trusted-ca-file"));
        }
    }
    if !low.value("client-crl-file").is_empty() && low.value("trusted-ca-file").is_empty() {
        return Err("--client-crl-file needs --trusted-ca-file: without a CA no client is checked"
            .to_owned());
    }
    let listens = |urls: &[super::ListenUrl]| urls.iter().any(super::ListenUrl::is_https);
    let clients =
        [&config.listen_client_urls, &config.listen_client_http_urls, &config.listen_metrics_urls];
    if clients.into_iter().any(|urls| listens(urls)) && config.client_tls.is_none() {
        return Err("TLS key/cert (--cert-file, --key-file) must be provided for client urls with HTTPS scheme".to_owned());
    }
    let peers = config.advertise_peer_urls.iter().any(PeerUrl::is_https);
    if (listens(&config.listen_peer_urls) || peers) && config.peer_tls.is_none() {
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

/// More than etcd suggests for a store (server/storage/quota.go).
pub(super) fn large_quota(config: &Config) -> Option<Remark> {
    const SUGGESTED: i64 = 8 << 30;
    let quota = config.quota_backend_bytes;
    (quota > SUGGESTED).then_some(Remark::LargeQuota(quota))
}

/// URLs that are served in plain although there is a certificate for them.
pub(super) fn plaintext(config: &Config) -> Vec<Remark> {
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
