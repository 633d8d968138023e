//! Reads the settings of a running etcd from its command line and environment, or from its
//! configuration file. Pure.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use discovery_types::adoption;
use discovery_types::name::Name;

use crate::launch::node_command::is_set_by_agent;
use crate::state::addresses::ListenAddresses;
use crate::state::adopted::{AdoptedNode, AdoptionStage, CertificateFiles, WAL_FOLDER};

/// Prefix of etcd's environment variables.
const VARIABLE_PREFIX: &str = "ETCD_";
/// Name of the flag for a configuration file. If it is given, etcd ignores all other flags and its
/// environment variables.
pub(crate) const CONFIG_FILE: &str = "config-file";

/// Flags of an adopted etcd that the agent omits when it starts the etcd. The agent also omits the
/// flags for which it sets values itself ([`is_set_by_agent`]).
const OMITTED_FLAGS: &[&str] = &[
    // etcd has to log to standard error, which goes to the file that the agent reads.
    "log-output",
    "log-outputs",
    // The agent lets etcd log to standard error only, and etcd refuses to rotate a log that isn't a
    // file.
    "enable-log-rotation",
    "log-rotation-config-json",
    // Two names of one flag. The agent itself adds this flag, by the name that the etcd's version
    // knows.
    "experimental-peer-skip-client-san-verification",
    "peer-skip-client-san-verification",
];

/// Why an etcd with `--client-cert-file` is refused. `adopt certificates` can't exchange that
/// certificate, only those that the etcd serves.
const OWN_GATEWAY_CERTIFICATE: &str = "its gateway connects to it with another certificate than \
    --cert-file, which would stay one of the old CA: restart it without --client-cert-file and \
    --client-key-file, with a --cert-file that is valid for clients, too";
/// Why an etcd with `--peer-client-cert-file` is refused.
const OWN_DIALLING_CERTIFICATE: &str = "it connects to its peers with another certificate than \
    --peer-cert-file, which would stay one of the old CA: restart it without \
    --peer-client-cert-file and --peer-client-key-file, with a --peer-cert-file that is valid for \
    clients, too";

/// Flags that keep an etcd from coming under management, each with the reason.
const UNSUPPORTED_FLAGS: &[(&str, &str)] = &[
    ("auto-tls", "it makes its certificates itself: give it certificates of a CA"),
    ("peer-auto-tls", "it makes its certificates itself: give it certificates of a CA"),
    ("force-new-cluster", "it makes a new cluster at each start: start it without this flag"),
    ("proxy", "it is a proxy and no member"),
    ("peer-cert-allowed-cn", "it accepts peers by a name that its new certificates won't have"),
    (
        "peer-cert-allowed-hostname",
        "it accepts peers by a name that its new certificates won't have",
    ),
    (
        "client-cert-allowed-hostname",
        "it accepts clients by a name that new certificates won't have",
    ),
    ("client-cert-file", OWN_GATEWAY_CERTIFICATE),
    ("client-key-file", OWN_GATEWAY_CERTIFICATE),
    ("peer-client-cert-file", OWN_DIALLING_CERTIFICATE),
    ("peer-client-key-file", OWN_DIALLING_CERTIFICATE),
    ("client-crl-file", "it reads a list of revoked certificates, which covers no new ones"),
    ("peer-crl-file", "it reads a list of revoked certificates, which covers no new ones"),
];

/// Values of a Go flag that mean false.
const FALSE_WORDS: &[&str] = &["0", "f", "F", "false", "FALSE", "False"];
/// Value of etcd's flag `--proxy` for a member, which is no proxy. It is the default. etcd has the
/// flag up to 3.5.
const PROXY_OFF: &str = "off";

/// Why an etcd's settings can't be kept. The text says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum EtcdConfigError {
    #[error("this etcd runs with --{flag}, so it can't come under management: {why}")]
    Refused { flag: String, why: &'static str },
    #[error(
        "this etcd runs without --{0}: only a cluster whose peers and clients use TLS can come under \
         management. etcd's guide says how to go from http to https: let each member listen on an \
         https URL, change its peer URL with `etcdctl member update`, and restart it, one after the \
         other"
    )]
    NoTls(&'static str),
    #[error(
        "this etcd runs without --{0}: say it, so that the agent knows the CA that its certificates \
         are verified by"
    )]
    NoCa(&'static str),
    #[error("--{flag} of this etcd has no https URL with an IP address to listen on: {value}")]
    Listen { flag: &'static str, value: String },
    #[error("the name `{0}` of this etcd has no letter or digit that a name at discovery may have")]
    Name(String),
}

/// The settings with which an etcd was started. For a flag that was not given, the value of its
/// environment variable counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EtcdConfig {
    flags: BTreeMap<String, String>,
    /// The directory in which the etcd was started, for relative paths.
    working_directory: PathBuf,
}

impl EtcdConfig {
    /// Makes the settings from the command line (`arguments`, without the program's name) and the
    /// environment. `known` lists the flags of the etcd program. etcd ignores an environment
    /// variable for a flag that its program doesn't have.
    pub(crate) fn new(
        arguments: &[String],
        environment: impl IntoIterator<Item = (String, String)>,
        known: &[String],
        working_directory: &Path,
    ) -> Self {
        let mut flags = BTreeMap::new();
        for (variable, value) in environment {
            let Some(name) = variable.strip_prefix(VARIABLE_PREFIX) else { continue };
            let name = name.to_ascii_lowercase().replace('_', "-");
            // etcd's help doesn't list `--config-file` with the other flags, so `known` lacks it.
            let is_known = known.contains(&name) || name == CONFIG_FILE;
            if is_known && !value.is_empty() {
                flags.insert(name, value);
            }
        }
        let named_by_variable: Option<String> = flags.get(CONFIG_FILE).cloned();
        let mut arguments = arguments.iter().peekable();
        while let Some(argument) = arguments.next() {
            let flag = argument.trim_start_matches('-');
            // An argument that is neither a flag nor a flag's value can't occur: etcd refuses to
            // start with it.
            let (name, value) = match flag.split_once('=') {
                Some((name, value)) => (name, value.to_owned()),
                None => match arguments.next_if(|next| !next.starts_with('-')) {
                    Some(value) => (flag, value.clone()),
                    None => (flag, "true".to_owned()),
                },
            };
            flags.insert(name.to_owned(), value);
        }
        // If the flag `--config-file` is given without a value, etcd uses the path in the
        // environment variable `ETCD_CONFIG_FILE`.
        if let Some(path) = named_by_variable
            && flags.get(CONFIG_FILE).is_some_and(String::is_empty)
        {
            flags.insert(CONFIG_FILE.to_owned(), path);
        }
        Self { flags, working_directory: working_directory.to_owned() }
    }

    /// Returns these settings with `flags`, read from a configuration file, in place of all earlier
    /// flags.
    pub(crate) fn with_flags(self, flags: BTreeMap<String, String>) -> Self {
        Self { flags, ..self }
    }

    /// Returns the path of the configuration file, if the etcd was started with one.
    pub(crate) fn config_file(&self) -> Option<PathBuf> {
        self.value(CONFIG_FILE).map(|path| self.path(path))
    }

    fn value(&self, flag: &str) -> Option<&str> {
        self.flags.get(flag).map(String::as_str).filter(|value| !value.is_empty())
    }

    fn is_set(&self, flag: &str) -> bool {
        self.value(flag).is_some_and(|value| {
            let is_off = FALSE_WORDS.contains(&value) || (flag == "proxy" && value == PROXY_OFF);
            !is_off
        })
    }

    /// Returns the value of `--name`, or etcd's default name.
    pub(crate) fn etcd_name(&self) -> &str {
        self.value("name").unwrap_or("default")
    }

    /// Returns the member's name at discovery.
    pub(crate) fn name(&self) -> Result<Name, EtcdConfigError> {
        let name = self.etcd_name();
        adoption::member_name(name).ok_or_else(|| EtcdConfigError::Name(name.to_owned()))
    }

    fn path(&self, path: &str) -> PathBuf {
        self.working_directory.join(path)
    }

    /// Returns the settings that the agent passes to this etcd. Fails if the etcd can't come under
    /// management.
    pub(crate) fn node(
        &self,
        program: &Path,
        unit: Option<String>,
    ) -> Result<AdoptedNode, EtcdConfigError> {
        for (flag, why) in UNSUPPORTED_FLAGS {
            if self.is_set(flag) {
                return Err(EtcdConfigError::Refused { flag: (*flag).to_owned(), why });
            }
        }
        let tls = |flag| self.value(flag).ok_or(EtcdConfigError::NoTls(flag)).map(|p| self.path(p));
        let ca = |flag| self.value(flag).ok_or(EtcdConfigError::NoCa(flag)).map(|p| self.path(p));
        let (cert, key) = (tls("cert-file")?, tls("key-file")?);
        let certificates = CertificateFiles {
            client_cert: cert.clone(),
            client_key: key.clone(),
            cert,
            key,
            peer_cert: tls("peer-cert-file")?,
            peer_key: tls("peer-key-file")?,
            trusted_ca: ca("trusted-ca-file")?,
            peer_trusted_ca: ca("peer-trusted-ca-file")?,
        };
        self.listen()?;
        let listen = |flag| self.value(flag).unwrap_or_default().to_owned();
        let default_directory = format!("{}.etcd", self.etcd_name());
        let directory = self.path(self.value("data-dir").unwrap_or(&default_directory));
        let wal_directory = self.value("wal-dir").map(|path| self.path(path));
        // A `--wal-dir` that is etcd's default directory for the log needs no flag.
        let wal_directory = wal_directory.filter(|path| *path != directory.join(WAL_FOLDER));
        let kept = self.flags.iter().filter(|(name, _)| {
            let is_refused = UNSUPPORTED_FLAGS.iter().any(|(flag, _)| flag == name);
            !is_set_by_agent(name) && !OMITTED_FLAGS.contains(&name.as_str()) && !is_refused
        });
        Ok(AdoptedNode {
            version: AdoptedNode::version_for(wal_directory.as_deref()),
            stage: AdoptionStage::Enrolled,
            program: program.to_owned(),
            directory,
            wal_directory,
            etcd_name: self.etcd_name().to_owned(),
            listen_peer_urls: listen("listen-peer-urls"),
            listen_client_urls: listen("listen-client-urls"),
            client_cert_auth: self.is_set("client-cert-auth"),
            peer_client_cert_auth: self.is_set("peer-client-cert-auth"),
            flags: kept.map(|(name, value)| format!("--{name}={value}")).collect(),
            certificates,
            unit,
            has_new_certificates: false,
        })
    }

    /// Returns the first peer address and the first client address on which the etcd listens with
    /// TLS.
    pub(crate) fn listen(&self) -> Result<ListenAddresses, EtcdConfigError> {
        let first = |flag: &'static str| {
            let value = self.value(flag).unwrap_or_default();
            let missing = || EtcdConfigError::Listen { flag, value: value.to_owned() };
            value.split(',').find_map(|url| listen_address(url.trim())).ok_or_else(missing)
        };
        let peers = self.value("listen-peer-urls").unwrap_or_default();
        if peers.split(',').any(|url| !url.trim().starts_with("https://")) {
            return Err(EtcdConfigError::Listen {
                flag: "listen-peer-urls",
                value: peers.to_owned(),
            });
        }
        Ok(ListenAddresses {
            peer: first("listen-peer-urls")?,
            client: first("listen-client-urls")?,
        })
    }
}

/// Parses the address in an https listen URL. etcd accepts only IP addresses and `localhost` there.
fn listen_address(url: &str) -> Option<SocketAddr> {
    let authority = url.strip_prefix("https://")?.trim_end_matches('/');
    let (host, port) = authority.rsplit_once(':')?;
    let address = match host.trim_matches(['[', ']']) {
        "localhost" => IpAddr::V4(Ipv4Addr::LOCALHOST),
        host => host.parse().ok()?,
    };
    Some(SocketAddr::new(address, port.parse().ok()?))
}

/// Returns the flags that `etcd --help` lists.
pub(crate) fn flags_in_help(help: &str) -> Vec<String> {
    let flag = |line: &str| {
        let name = line.trim_start().strip_prefix("--")?;
        let end = name.find(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
        Some(name[..end.unwrap_or(name.len())].to_owned())
    };
    help.lines().filter_map(flag).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TLS: &str = "--cert-file s.crt --key-file s.key --trusted-ca-file ca.crt \
        --peer-cert-file p.crt --peer-key-file p.key --peer-trusted-ca-file /etc/ca.crt \
        --client-cert-auth --peer-client-cert-auth=true";
    const LISTEN: &str = "--listen-peer-urls https://10.0.0.1:2380 \
        --listen-client-urls http://127.0.0.1:2378,https://127.0.0.1:2379";

    fn config(arguments: &str, environment: &[(&str, &str)]) -> EtcdConfig {
        let arguments: Vec<String> = arguments.split_whitespace().map(str::to_owned).collect();
        let environment = environment.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        let known = ["name", "data-dir", "client-cert-auth"].map(str::to_owned);
        EtcdConfig::new(&arguments, environment, &known, Path::new("/srv"))
    }

    fn node(arguments: &str, environment: &[(&str, &str)]) -> Result<AdoptedNode, EtcdConfigError> {
        config(arguments, environment).node(Path::new("/usr/bin/etcd"), None)
    }

    #[test]
    fn settings_are_kept_and_paths_are_made_absolute() {
        let more = "-quota-backend-bytes=1 --heartbeat-interval 50 --enable-pprof \
            --initial-cluster a=https://10.0.0.1:2380 --log-outputs stderr \
            --discovery-endpoints https://disco:2379 --discovery-token t";
        let node = node(&format!("--name Node.1 {TLS} {LISTEN} {more}"), &[]).unwrap();
        assert_eq!(node.directory, Path::new("/srv/Node.1.etcd"));
        assert_eq!(node.certificates.cert, Path::new("/srv/s.crt"));
        assert_eq!(node.certificates.peer_trusted_ca, Path::new("/etc/ca.crt"));
        assert!(node.client_cert_auth && node.peer_client_cert_auth);
        let kept = ["--enable-pprof=true", "--heartbeat-interval=50", "--quota-backend-bytes=1"];
        assert_eq!(node.flags, kept);
    }

    #[test]
    fn a_log_in_a_directory_of_its_own_stays_there() {
        let wal = |arguments: &str| {
            let node = node(&format!("{TLS} {LISTEN} --data-dir d {arguments}"), &[]).unwrap();
            assert!(node.flags.is_empty(), "{:?}", node.flags);
            node.wal_directory
        };
        assert_eq!(wal("--wal-dir wal"), Some(PathBuf::from("/srv/wal")));
        assert_eq!(wal("--wal-dir /srv/d/member/wal"), None);
        assert_eq!(wal(""), None);
    }

    #[test]
    fn an_etcd_that_logs_to_a_rotated_file_logs_to_the_agent_without_rotation() {
        let log = "--log-outputs=/var/log/etcd.log --enable-log-rotation \
            --log-rotation-config-json={\"maxsize\":1} --log-level=warn";
        let node = node(&format!("{TLS} {LISTEN} {log}"), &[]).unwrap();
        assert_eq!(node.flags, ["--log-level=warn"]);
    }

    #[test]
    fn an_empty_value_of_a_flag_is_kept() {
        let typed = format!("{TLS} {LISTEN}");
        let typed = typed.split_whitespace().chain(["--listen-metrics-urls", "", "--name", "a"]);
        let arguments: Vec<String> = typed.map(str::to_owned).collect();
        let config = EtcdConfig::new(&arguments, [], &[], Path::new("/srv"));
        let node = config.node(Path::new("/usr/bin/etcd"), None).unwrap();
        assert_eq!(node.flags, ["--listen-metrics-urls="]);
        assert_eq!(node.etcd_name, "a");
    }

    #[test]
    fn a_flag_wins_over_its_variable_and_unknown_variables_are_ignored() {
        let environment = [
            ("ETCD_NAME", "variable"),
            ("ETCD_DATA_DIR", "/data"),
            ("ETCD_CLIENT_CERT_AUTH", "false"),
            ("ETCD_NOTHING", "x"),
            ("PATH", "/bin"),
        ];
        let tls = TLS.replace("--client-cert-auth ", "");
        let node = node(&format!("--name flag {tls} {LISTEN}"), &environment).unwrap();
        assert_eq!((node.etcd_name.as_str(), node.client_cert_auth), ("flag", false));
        assert_eq!(node.directory, Path::new("/data"));
        assert!(node.flags.is_empty(), "{:?}", node.flags);
    }

    #[test]
    fn a_configuration_file_replaces_all_flags_and_variables() {
        let by_flag = config("--config-file etcd.yml --name flag", &[("ETCD_NAME", "variable")]);
        assert_eq!(by_flag.config_file().unwrap(), Path::new("/srv/etcd.yml"));
        let by_variable = config("", &[("ETCD_CONFIG_FILE", "/etc/etcd.yml")]);
        assert_eq!(by_variable.config_file().unwrap(), Path::new("/etc/etcd.yml"));
        let empty_flag = config("--config-file=", &[("ETCD_CONFIG_FILE", "/etc/etcd.yml")]);
        assert_eq!(empty_flag.config_file().unwrap(), Path::new("/etc/etcd.yml"));
        let both = config("--config-file a.yml", &[("ETCD_CONFIG_FILE", "/etc/etcd.yml")]);
        assert_eq!(both.config_file().unwrap(), Path::new("/srv/a.yml"));
        assert_eq!(config("--name flag --config-file=", &[]).config_file(), None);

        let file = config(&format!("{TLS} {LISTEN} --enable-pprof"), &[]).flags;
        let node = by_flag.with_flags(file).node(Path::new("/usr/bin/etcd"), None).unwrap();
        assert_eq!(node.directory, Path::new("/srv/default.etcd"));
        assert_eq!(node.flags, ["--enable-pprof=true"]);
    }

    #[test]
    fn the_agent_asks_at_the_first_address_with_tls() {
        let listen = config(LISTEN, &[]).listen().unwrap();
        assert_eq!(listen.peer, "10.0.0.1:2380".parse().unwrap());
        assert_eq!(listen.client, "127.0.0.1:2379".parse().unwrap());
        assert_eq!(listen_address("https://localhost:1"), Some(([127, 0, 0, 1], 1).into()));
        assert_eq!(listen_address("https://[::1]:1"), Some("[::1]:1".parse().unwrap()));
        assert_eq!(listen_address("https://name:1"), None);
    }

    #[test]
    fn unsupported_settings_are_refused_with_the_flag() {
        let refused = |arguments: &str| node(arguments, &[]).unwrap_err().to_string();
        assert!(refused(&format!("{TLS} {LISTEN} --auto-tls")).contains("--auto-tls"));
        assert!(node(&format!("{TLS} {LISTEN} --auto-tls=false"), &[]).is_ok());
        assert!(refused(LISTEN).contains("without --cert-file"));
        let plain = LISTEN.replace("https://10", "http://10");
        assert!(refused(&format!("{TLS} {plain}")).contains("--listen-peer-urls"));
        assert!(
            refused(&format!("{} {LISTEN}", TLS.replace("ca-file ca.crt", "ca-file=")))
                .contains("trusted-ca-file")
        );
    }

    #[test]
    fn an_etcd_that_connects_with_a_certificate_of_its_own_is_refused() {
        for flag in
            ["peer-client-cert-file", "peer-client-key-file", "client-cert-file", "client-key-file"]
        {
            let refused = node(&format!("{TLS} {LISTEN} --{flag}=own.pem"), &[]).unwrap_err();
            let text = refused.to_string();
            assert!(text.contains(&format!("--{flag},")) && text.contains("restart it"), "{text}");
            let unused = node(&format!("{TLS} {LISTEN} --{flag}="), &[]).unwrap();
            assert!(unused.flags.is_empty(), "{:?}", unused.flags);
        }
    }

    #[test]
    fn a_proxy_is_refused_and_a_member_whose_proxy_is_off_is_not() {
        let started = |arguments: &str, variable: &str| {
            let typed = format!("{TLS} {LISTEN} {arguments}");
            let arguments: Vec<String> = typed.split_whitespace().map(str::to_owned).collect();
            let environment = [("ETCD_PROXY".to_owned(), variable.to_owned())];
            let known = ["proxy".to_owned()];
            let config = EtcdConfig::new(&arguments, environment, &known, Path::new("/srv"));
            config.node(Path::new("/usr/bin/etcd"), None)
        };
        assert!(started("--proxy=off", "").unwrap().flags.is_empty());
        assert!(started("", "off").is_ok());
        for refused in [started("--proxy=on", ""), started("", "readonly")] {
            assert!(refused.unwrap_err().to_string().contains("--proxy"));
        }
    }

    #[test]
    fn the_flags_of_a_program_are_those_that_its_help_lists() {
        let help =
            "Member:\n  --name 'default'\n    Human-readable --name.\n  --data-dir '${name}'\n";
        assert_eq!(flags_in_help(help), ["name", "data-dir"]);
    }
}
