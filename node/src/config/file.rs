//! `--config-file`: etcd's file, in YAML or JSON, which is a part of it. Its keys are the names of
//! flags, but for those that etcd keeps in [`SECTIONS`] (`configYAML` in server/embed/config.go). A key
//! that nobody knows is an error here, where etcd passes over it: what was mistyped would be left out.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{
    LowArgs, Remark,
    flags::{FLAGS, Flag, Kind, find},
    low::nearest,
    validate::ConfigError,
    yaml::{self, Entry, Node, Problem},
};

pub(super) const CONFIG_FILE: &str = "config-file";
const VARIABLE: &str = "ETCD_CONFIG_FILE";
/// The most that a file may hold.
const MAX_BYTES: u64 = 1 << 20;

/// Keys that stand below another one, and the flags that they are.
const SECTIONS: &[(&str, &[(&str, &str)])] = &[
    (
        "client-transport-security",
        &[
            ("cert-file", "cert-file"),
            ("key-file", "key-file"),
            ("client-cert-file", "client-cert-file"),
            ("client-key-file", "client-key-file"),
            ("client-cert-auth", "client-cert-auth"),
            ("trusted-ca-file", "trusted-ca-file"),
            ("auto-tls", "auto-tls"),
            ("allowed-hostname", "client-cert-allowed-hostname"),
        ],
    ),
    (
        "peer-transport-security",
        &[
            ("cert-file", "peer-cert-file"),
            ("key-file", "peer-key-file"),
            ("client-cert-file", "peer-client-cert-file"),
            ("client-key-file", "peer-client-key-file"),
            ("client-cert-auth", "peer-client-cert-auth"),
            ("trusted-ca-file", "peer-trusted-ca-file"),
            ("auto-tls", "peer-auto-tls"),
            ("allowed-cn", "peer-cert-allowed-cn"),
            ("allowed-hostname", "peer-cert-allowed-hostname"),
            ("skip-client-san-verification", "peer-skip-client-san-verification"),
        ],
    ),
    (
        "socket-options",
        &[("reuse-port", "socket-reuse-port"), ("reuse-address", "socket-reuse-address")],
    ),
    ("discovery-config", &[("token", "discovery-token")]),
];

/// Keys of etcd's proxy of long ago, which its sample file still has.
const PROXY: &[&str] = &[
    "proxy",
    "proxy-failure-wait",
    "proxy-refresh-interval",
    "proxy-dial-timeout",
    "proxy-write-timeout",
    "proxy-read-timeout",
];

/// Flags whose values a file may also give one by one.
const LISTS: &[&str] = &[
    "cipher-suites",
    "log-outputs",
    "client-cert-allowed-hostname",
    "peer-cert-allowed-cn",
    "peer-cert-allowed-hostname",
];

/// The file that is to be read, if one is named.
pub(super) fn named(low: &LowArgs, environment: &BTreeMap<String, String>) -> Option<PathBuf> {
    let typed = low.given(CONFIG_FILE).or(environment.get(VARIABLE).map(String::as_str));
    typed.filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Flags and variables that were given beside a file, and so do not count.
pub(super) fn left_out(low: &LowArgs, environment: &BTreeMap<String, String>) -> Vec<String> {
    let flags = low.names().filter(|name| *name != CONFIG_FILE).map(|name| format!("--{name}"));
    let variables = environment.iter().filter(|(name, value)| {
        name.starts_with("ETCD_") && *name != VARIABLE && !value.is_empty()
    });
    flags.chain(variables.map(|(name, _)| name.clone())).collect()
}

/// What the file at `path` gives, by flag. As in etcd nothing else counts then.
///
/// # Errors
/// If it can't be read, or something in it not be understood.
pub(super) fn read(path: &Path, remarks: &mut Vec<Remark>) -> Result<LowArgs, ConfigError> {
    let content = muster_files::read_named(path, MAX_BYTES)
        .and_then(|bytes| String::from_utf8(bytes).map_err(std::io::Error::other));
    let text = content.map_err(|source| ConfigError::FileRead { path: path.to_owned(), source })?;
    let at = |Problem { line, text: problem }| ConfigError::File {
        path: path.to_owned(),
        line,
        problem,
    };
    let mut low = parse(&text, remarks).map_err(at)?;
    low.note_file(path);
    Ok(low)
}

/// For `fuzz/`: a file's text.
#[cfg(fuzzing)]
pub fn fuzz_file(text: &str) {
    let _ = parse(text, &mut Vec::new());
}

fn parse(text: &str, remarks: &mut Vec<Remark>) -> Result<LowArgs, Problem> {
    let mut low = LowArgs::default();
    for entry in yaml::parse(text)? {
        let section = SECTIONS.iter().find(|(name, _)| *name == entry.key);
        match (section, entry.node) {
            (Some((section, keys)), Node::Map(entries)) => {
                for entry in entries {
                    let flag =
                        keys.iter().find(|(key, _)| *key == entry.key).map(|(_, flag)| *flag);
                    let flag = flag.and_then(find).ok_or_else(|| {
                        let known = keys.iter().map(|(key, _)| *key);
                        unknown(&entry, &format!(" in {section}"), known)
                    })?;
                    set(&mut low, flag, entry)?;
                }
            }
            (Some(_), Node::Scalar(None)) => {}
            (Some((section, _)), _) => {
                let text = format!("{section} has to be a mapping of keys");
                return Err(Problem { line: entry.line, text });
            }
            (None, node) => {
                let entry = Entry { node, ..entry };
                if let Some(flag) = PROXY.iter().find(|key| **key == entry.key) {
                    remarks.push(Remark::Ignored { flag, because: "there is no v2 API" });
                    continue;
                }
                let flag = top_level(&entry)?;
                set(&mut low, flag, entry)?;
            }
        }
    }
    Ok(low)
}

fn top_level(entry: &Entry) -> Result<&'static Flag, Problem> {
    let key = &entry.key;
    let elsewhere = SECTIONS.iter().find_map(|(section, keys)| {
        keys.iter().find(|(_, flag)| *flag == key.as_str()).map(|(key, _)| (section, key))
    });
    if let Some((section, key)) = elsewhere {
        let text = format!("{} stands in a section: give {section}: {key}", entry.key);
        return Err(Problem { line: entry.line, text });
    }
    if key == CONFIG_FILE {
        let text = "a file can't name another one".to_owned();
        return Err(Problem { line: entry.line, text });
    }
    let known = FLAGS.iter().map(|flag| flag.name).chain(SECTIONS.iter().map(|(name, _)| *name));
    find(key).ok_or_else(|| unknown(entry, "", known))
}

fn unknown(entry: &Entry, place: &str, known: impl Iterator<Item = &'static str>) -> Problem {
    let nearest = nearest(&entry.key, known).map(|name| format!(" (did you mean {name}?)"));
    let text = format!("unknown key {:?}{place}{}", entry.key, nearest.unwrap_or_default());
    Problem { line: entry.line, text }
}

/// Sets a flag as the file has it; what is empty is left at its default, as in etcd.
fn set(low: &mut LowArgs, flag: &'static Flag, entry: Entry) -> Result<(), Problem> {
    let Entry { key, line, node } = entry;
    let problem = |text: String| Problem { line, text };
    let value = match node {
        Node::Scalar(value) => value.unwrap_or_default(),
        Node::List(values) if LISTS.contains(&flag.name) => {
            if let Some(value) = values.iter().find(|value| value.contains(',')) {
                return Err(problem(format!("a comma can't stand in {key}: {value:?}")));
            }
            values.join(",")
        }
        Node::List(_) | Node::Map(_) => {
            return Err(problem(format!("{key} has to be one value")));
        }
    };
    if value.is_empty() {
        return Ok(());
    }
    low.set(flag, &key, of_kind(flag.kind, value)).map_err(|error| problem(error.to_string()))
}

/// A value as a flag would have it: times are nanoseconds in a file, and YAML of etcd's age has more
/// words for yes and no.
fn of_kind(kind: Kind, value: String) -> String {
    match (kind, value.to_ascii_lowercase().as_str()) {
        (Kind::Duration, digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
            format!("{digits}ns")
        }
        (Kind::Bool, "yes" | "y" | "on") => "true".to_owned(),
        (Kind::Bool, "no" | "n" | "off") => "false".to_owned(),
        _ => value,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config::{self, AutoCompaction, Command, Config};

    fn parsed(text: &str) -> LowArgs {
        parse(text, &mut Vec::new())
            .map_err(|Problem { line, text }| format!("{line}: {text}"))
            .unwrap()
    }

    fn refused(text: &str) -> (usize, String) {
        let Problem { line, text } = parse(text, &mut Vec::new()).unwrap_err();
        (line, text)
    }

    fn configured(text: &str) -> (Config, Vec<Remark>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("etcd.yml");
        std::fs::write(&path, text).unwrap();
        let args = [format!("--config-file={}", path.display()), "--name=typed".to_owned()];
        let environment = [("ETCD_MAX_LEARNERS".to_owned(), "7".to_owned())];
        match config::parse(args, environment).unwrap() {
            Command::Run(config, remarks) => (*config, remarks),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_file_counts_alone() {
        let (config, remarks) = configured("name: one\nelection-timeout: 2000\n");
        assert_eq!((config.name.as_str(), config.max_learners), ("one", 1));
        assert_eq!(config.election, Duration::from_millis(2000));
        assert_eq!(config.data_dir.to_str(), Some("one.etcd"));
        assert_eq!(config.initial_cluster[0].0, "one");
        let left_out = ["--name", "ETCD_MAX_LEARNERS"].map(str::to_owned).to_vec();
        assert!(
            matches!(&remarks[..], [Remark::ConfigFile { left_out: found, .. }] if *found == left_out),
            "{remarks:?}"
        );
    }

    #[test]
    fn every_kind_of_value_is_read_as_etcd_reads_it() {
        let (config, _) = configured(
            r#"{"name": "json", "auto-compaction-retention": 1, "listen-client-urls":
                "http://127.0.0.1:1,http://127.0.0.1:2", "watch-progress-notify-interval": 600000000000,
                "grpc-keepalive-interval": "10m", "strict-reconfig-check": no, "initial-cluster-state": "",
                "log-outputs": ["stdout", /a/log], "data-dir": null, "experimental-max-learners": 2,
                "peer-transport-security": {"allowed-cn": ["a", "b"], "cert-file": "c", "key-file": "k",
                "trusted-ca-file": "ca"}, "client-transport-security": null}"#,
        );
        assert_eq!(config.auto_compaction, AutoCompaction::Periodic(Duration::from_secs(3600)));
        assert_eq!(config.listen_client_urls.len(), 2);
        let ten_minutes = Duration::from_secs(600);
        assert_eq!(config.watch_progress_interval, ten_minutes);
        assert_eq!(config.keepalive_interval, ten_minutes);
        assert!(!config.strict_reconfig_check);
        assert_eq!(config.log_outputs.len(), 2);
        assert_eq!((config.data_dir.to_str(), config.max_learners), (Some("json.etcd"), 2));
        let peers = config.peer_tls.unwrap();
        assert_eq!((peers.allowed_cn.len(), peers.cert.to_str()), (2, Some("c")));
        assert!(config.client_tls.is_none());
    }

    #[test]
    fn etcds_sample_is_understood() {
        let (config, remarks) = configured(include_str!("etcd_sample.yml"));
        assert_eq!(
            (config.name.as_str(), config.data_dir.to_str()),
            ("default", Some("default.etcd"))
        );
        assert!(!config.strict_reconfig_check);
        assert_eq!(config.log_level, tracing::Level::DEBUG);
        assert_eq!(config.log_outputs, [config::LogOutput::Stderr]);
        assert_eq!(config.auto_compaction, AutoCompaction::Periodic(Duration::from_secs(3600)));
        assert_eq!(config.tls_policy.cipher_suites.len(), 2);
        assert!(config.client_tls.is_none() && config.peer_tls.is_none());
        let ignored: Vec<&str> = remarks
            .iter()
            .filter_map(|remark| match remark {
                Remark::Ignored { flag, .. } => Some(*flag),
                _ => None,
            })
            .collect();
        let proxy = ignored.iter().filter(|flag| PROXY.contains(flag)).count();
        assert_eq!(proxy, PROXY.len());
        let flags = [
            "snapshot-count",
            "max-snapshots",
            "max-wals",
            "discovery-fallback",
            "self-signed-cert-validity",
            "enable-pprof",
            "logger",
        ];
        assert_eq!(ignored[proxy..], flags);
    }

    #[test]
    fn each_key_of_a_section_is_a_flag_of_its_own() {
        let mut flags = std::collections::BTreeSet::new();
        for (section, keys) in SECTIONS {
            for (key, flag) in *keys {
                let known = find(flag).unwrap_or_else(|| panic!("{flag}"));
                let value = if known.kind == Kind::Bool { "true" } else { "x" };
                let low = parsed(&format!("{section}:\n  {key}: {value}\n"));
                assert_eq!(low.given(flag), Some(value));
                assert!(flags.insert(flag), "{flag} twice");
                let (line, text) = refused(&format!("# here\n{flag}: {value}"));
                assert_eq!(line, 2);
                assert!(text.ends_with(&format!("give {section}: {key}")), "{text}");
            }
        }
        assert!(LISTS.iter().all(|flag| find(flag).is_some()));
    }

    #[test]
    fn what_is_not_understood_is_refused_with_its_line() {
        for (text, line, problem) in [
            ("name: a\ndata-dri: b", 2, "unknown key \"data-dri\" (did you mean data-dir?)"),
            (
                "peer-transport-security:\n  cert-fiel: x",
                2,
                "unknown key \"cert-fiel\" in peer-transport-security (did you mean cert-file?)",
            ),
            ("config-file: other", 1, "a file can't name another one"),
            ("name: a\n\nname: b", 3, "\"name\" stands here a second time"),
            ("name: [a]", 1, "name has to be one value"),
            ("name: {a: b}", 1, "name has to be one value"),
            ("cipher-suites:\n  - 'a,b'", 1, "a comma can't stand in cipher-suites: \"a,b\""),
            (
                "client-transport-security: x",
                1,
                "client-transport-security has to be a mapping of keys",
            ),
            ("pre-vote: maybe", 1, "invalid value \"maybe\" for flag -pre-vote: parse error"),
            ("max-txn-ops: 1.5", 1, "invalid value \"1.5\" for flag -max-txn-ops: parse error"),
            ("- a", 1, "a mapping of keys was expected here"),
            ("just text", 1, "a mapping of keys was expected here"),
            ("a: &x b\nc: *x", 2, "an alias (*) is not supported"),
            ("name: a\n---\nname: b", 2, "there is more than one document"),
            ("log-outputs: [[a]]", 1, "a single value was expected here"),
            ("[a]: b", 1, "a single value was expected here"),
        ] {
            let (found, said) = refused(text);
            assert_eq!((found, said.as_str()), (line, problem), "{text}");
        }
        let (line, text) = refused("name: a\n  b: [\n");
        assert!(line > 1 && !text.is_empty(), "{text}");
    }

    #[test]
    fn nothing_is_no_setting() {
        for text in ["", "# nothing\n", "---\n", "{}", "name:\n", "name: ~", "name: ''"] {
            assert_eq!(parsed(text), LowArgs::default(), "{text}");
        }
        assert_eq!(parsed("name: 'null'").given("name"), Some("null"));
    }
}
