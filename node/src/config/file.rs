//! `--config-file`: etcd's configuration file, in YAML or in JSON, which is a subset of YAML. Keys
//! are names of flags, except in the sections of [`SECTIONS`] (`configYAML` in
//! server/embed/config.go).
//!
//! etcd ignores an unknown key. This node logs it. A key that is similar to a known one is refused,
//! because a mistyped setting would otherwise have no effect.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use node_etcd_config::{
    CLIENT_ALLOWED_CN, SECTIONS, flag_of_key,
    integers::yaml_whole_number,
    yaml::{self, Scalar, YamlEntry, YamlNode, YamlProblem},
};

use super::{
    RawFlags, Remark,
    flags::{FLAGS, Flag, FlagKind, find_flag},
    raw_flags::{nearest, parse_bool},
    validate::ConfigError,
};

pub(super) const CONFIG_FILE: &str = "config-file";
const CONFIG_FILE_VARIABLE: &str = "ETCD_CONFIG_FILE";
/// Maximum size of a configuration file in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// Keys of etcd's sample file before 3.5 that no longer correspond to a flag, with the reason why
/// they are ignored.
const OBSOLETE_KEYS: &[(&str, &str)] = &[
    ("debug", "log-level: debug says it"),
    ("log-output", "log-outputs says it"),
    ("log-package-levels", "there is one level for all packages, which log-level says"),
];

/// Key of the TLS sections before etcd 3.4. Newer versions of etcd ignore it, and then clients need
/// no certificate.
const CA_FILE: &str = "ca-file";

/// Flags whose values a configuration file may also give as a list.
const LIST_FLAGS: &[&str] = &[
    "discovery-endpoints",
    "cipher-suites",
    "log-outputs",
    "client-cert-allowed-hostname",
    "peer-cert-allowed-cn",
    "peer-cert-allowed-hostname",
];

/// Returns the path of the configuration file, if one is given.
pub(super) fn config_file_path(
    flags: &RawFlags,
    environment: &BTreeMap<String, String>,
) -> Option<PathBuf> {
    // As in etcd, the environment variable counts if the flag is given without a value.
    let typed = flags.given(CONFIG_FILE).filter(|path| !path.is_empty());
    let variable = || environment.get(CONFIG_FILE_VARIABLE).map(String::as_str);
    let path = typed.or_else(variable).filter(|path| !path.is_empty());
    path.map(PathBuf::from)
}

/// Returns the flags and variables that are ignored because a configuration file is given.
pub(super) fn ignored_settings(
    flags: &RawFlags,
    environment: &BTreeMap<String, String>,
) -> Vec<String> {
    let given = flags.names().filter(|name| *name != CONFIG_FILE).map(|name| format!("--{name}"));
    let variables = environment.iter().filter(|(name, value)| {
        name.starts_with("ETCD_") && *name != CONFIG_FILE_VARIABLE && !value.is_empty()
    });
    given.chain(variables.map(|(name, _)| name.clone())).collect()
}

/// Reads the configuration file at `path`. As in etcd, all other flags and variables are then
/// ignored.
///
/// # Errors
/// Fails if the file can't be read or parsed.
pub(super) fn read(path: &Path, remarks: &mut Vec<Remark>) -> Result<RawFlags, ConfigError> {
    let content = muster_files::read_named(path, MAX_BYTES)
        .and_then(|bytes| String::from_utf8(bytes).map_err(std::io::Error::other));
    let text = content.map_err(|source| ConfigError::FileRead { path: path.to_owned(), source })?;
    let at = |YamlProblem { line, text: problem }| ConfigError::File {
        path: path.to_owned(),
        line,
        problem,
    };
    let mut flags = parse(&text, remarks).map_err(at)?;
    flags.note_file(path);
    Ok(flags)
}

/// Parses the text of a configuration file, for the fuzz target in `fuzz/`.
#[cfg(fuzzing)]
pub fn fuzz_file(text: &str) {
    let _ = parse(text, &mut Vec::new());
}

fn parse(text: &str, remarks: &mut Vec<Remark>) -> Result<RawFlags, YamlProblem> {
    let mut flags = RawFlags::default();
    let document = yaml::parse(text)?;
    let passed_over = document.ignored.into_iter();
    remarks.extend(
        passed_over.map(|YamlProblem { line, text }| Remark::FilePartIgnored { line, text }),
    );
    for mut entry in document.entries {
        // Compare keys in lower case: etcd reads the file with Go's JSON decoder, which ignores the
        // case of keys.
        entry.key.make_ascii_lowercase();
        let section = SECTIONS.iter().find(|(name, _)| *name == entry.key);
        match (section, entry.node) {
            (Some((section, keys)), YamlNode::Map(entries)) => {
                for entry in entries {
                    set_in_section(&mut flags, section, keys, entry, remarks)?;
                }
            }
            (Some(_), YamlNode::Scalar(None)) => {}
            (Some((section, _)), _) => {
                let text = format!("{section} has to be a mapping of keys");
                return Err(YamlProblem { line: entry.line, text });
            }
            (None, node) => {
                let entry = YamlEntry { node, ..entry };
                match resolve_key(&entry)? {
                    KeyMeaning::Flag(flag) => set(&mut flags, flag, entry)?,
                    KeyMeaning::Ignored(remark) => remarks.push(remark),
                }
            }
        }
    }
    Ok(flags)
}

fn set_in_section(
    flags: &mut RawFlags,
    section: &str,
    keys: &[(&'static str, &str)],
    mut entry: YamlEntry,
    remarks: &mut Vec<Remark>,
) -> Result<(), YamlProblem> {
    entry.key.make_ascii_lowercase();
    if entry.key == CA_FILE {
        if is_empty_value(&entry.node) {
            return Ok(());
        }
        let text = format!(
            "etcd has not known {CA_FILE} since 3.4: give trusted-ca-file and client-cert-auth in {section}"
        );
        return Err(YamlProblem { line: entry.line, text });
    }
    if (section, entry.key.as_str()) == CLIENT_ALLOWED_CN {
        if entry.node.is_empty() {
            return Ok(());
        }
        let text = format!(
            "{} in {section} is not supported: give allowed-hostname there, or users and roles",
            entry.key
        );
        return Err(YamlProblem { line: entry.line, text });
    }
    let flag = keys.iter().find(|(key, _)| *key == entry.key).and_then(|(_, flag)| find_flag(flag));
    match flag {
        Some(flag) => set(flags, flag, entry),
        None => {
            let known = keys.iter().map(|(key, _)| *key);
            remarks.push(unknown_key_remark(&entry, &format!(" in {section}"), known)?);
            Ok(())
        }
    }
}

/// Meaning of a key that stands outside all sections.
enum KeyMeaning {
    Flag(&'static Flag),
    Ignored(Remark),
}

fn resolve_key(entry: &YamlEntry) -> Result<KeyMeaning, YamlProblem> {
    let key = &entry.key;
    if let Some((flag, because)) = OBSOLETE_KEYS.iter().find(|(old, _)| old == key) {
        return Ok(KeyMeaning::Ignored(Remark::Ignored { flag, because }));
    }
    let elsewhere = SECTIONS.iter().find_map(|(section, keys)| {
        keys.iter().find(|(_, flag)| *flag == key.as_str()).map(|(key, _)| (section, key))
    });
    if let Some((section, key)) = elsewhere {
        let text = format!("{} stands in a section: give {section}: {key}", entry.key);
        let problem = YamlProblem { line: entry.line, text };
        return if is_empty_value(&entry.node) { Ok(ignored_key(problem)) } else { Err(problem) };
    }
    if key == CONFIG_FILE {
        let text = "a file can't name another one".to_owned();
        return Ok(ignored_key(YamlProblem { line: entry.line, text }));
    }
    if let Some(flag) = find_flag(flag_of_key(key)) {
        return Ok(KeyMeaning::Flag(flag));
    }
    let known = FLAGS.iter().map(|flag| flag.name).chain(SECTIONS.iter().map(|(name, _)| *name));
    unknown_key_remark(entry, "", known).map(KeyMeaning::Ignored)
}

fn ignored_key(YamlProblem { line, text }: YamlProblem) -> KeyMeaning {
    KeyMeaning::Ignored(Remark::FilePartIgnored { line, text })
}

/// Returns whether a value is null, empty or false. Then its key has no effect and can be ignored.
fn is_empty_value(node: &YamlNode) -> bool {
    match node {
        YamlNode::Scalar(None) => true,
        YamlNode::Scalar(Some(Scalar { text, .. })) => {
            text.is_empty()
                || parse_bool(&convert_value(FlagKind::Bool, text.clone(), true)) == Some(false)
        }
        YamlNode::List(nodes) => nodes.is_empty(),
        YamlNode::Map(entries) => entries.is_empty(),
    }
}

/// Returns a remark about an unknown key.
///
/// # Errors
/// Fails if the key is similar to a known one.
fn unknown_key_remark(
    entry: &YamlEntry,
    place: &str,
    known: impl Iterator<Item = &'static str>,
) -> Result<Remark, YamlProblem> {
    let (key, line) = (&entry.key, entry.line);
    match nearest(key, known) {
        Some(nearest) => {
            let text = format!("unknown key {key:?}{place} (did you mean {nearest}?)");
            Err(YamlProblem { line, text })
        }
        None => Ok(Remark::FilePartIgnored { line, text: format!("unknown key {key:?}{place}") }),
    }
}

/// Sets a flag to the value in the file. An empty value keeps the flag's default, as in etcd.
fn set(flags: &mut RawFlags, flag: &'static Flag, entry: YamlEntry) -> Result<(), YamlProblem> {
    let YamlEntry { key, line, node } = entry;
    let problem = |text: String| YamlProblem { line, text };
    let value = match node {
        YamlNode::Scalar(None) => String::new(),
        YamlNode::Scalar(Some(Scalar { text, is_plain })) => {
            convert_value(flag.kind, text, is_plain)
        }
        YamlNode::List(nodes) if LIST_FLAGS.contains(&flag.name) => {
            let mut values = Vec::new();
            for node in nodes {
                match node {
                    YamlNode::Scalar(None) => {}
                    YamlNode::Scalar(Some(Scalar { text, .. })) if text.contains(',') => {
                        return Err(problem(format!("a comma can't stand in {key}: {text:?}")));
                    }
                    YamlNode::Scalar(Some(Scalar { text, .. })) => values.push(text),
                    YamlNode::List(_) | YamlNode::Map(_) => {
                        return Err(problem(format!("{key} has to be a list of single values")));
                    }
                }
            }
            values.join(",")
        }
        YamlNode::List(_) | YamlNode::Map(_) => {
            return Err(problem(format!("{key} has to be one value")));
        }
    };
    if value.is_empty() {
        return Ok(());
    }
    flags.set(flag, &key, value).map_err(|error| problem(error.to_string()))
}

/// Converts a value in the file to the flag's syntax. In the file, a duration may be a plain number
/// of nanoseconds. Booleans and integers may have all forms of YAML 1.1, as in etcd.
fn convert_value(kind: FlagKind, text: String, is_plain: bool) -> String {
    let number = || Some(&text).filter(|_| is_plain).and_then(|text| yaml_whole_number(text));
    match kind {
        FlagKind::Duration => {
            number().map(|nanoseconds| format!("{nanoseconds}ns")).unwrap_or(text)
        }
        FlagKind::Int | FlagKind::Uint | FlagKind::Uint32 => number().unwrap_or(text),
        FlagKind::Bool => match text.to_ascii_lowercase().as_str() {
            "yes" | "y" | "on" => "true".to_owned(),
            "no" | "n" | "off" => "false".to_owned(),
            _ => text,
        },
        FlagKind::Text
        | FlagKind::OneOf(_)
        | FlagKind::OneOfAnyCase(_)
        | FlagKind::OptionalText => text,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config::{self, AutoCompaction, Config, Invocation};

    fn parsed(text: &str) -> RawFlags {
        parse(text, &mut Vec::new())
            .map_err(|YamlProblem { line, text }| format!("{line}: {text}"))
            .unwrap()
    }

    fn refused(text: &str) -> (usize, String) {
        let YamlProblem { line, text } = parse(text, &mut Vec::new()).unwrap_err();
        (line, text)
    }

    fn configured(text: &str) -> (Config, Vec<Remark>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("etcd.yml");
        std::fs::write(&path, text).unwrap();
        let args = [format!("--config-file={}", path.display()), "--name=typed".to_owned()];
        let environment = [("ETCD_MAX_LEARNERS".to_owned(), "7".to_owned())];
        match config::parse(args, environment).unwrap() {
            Invocation::Run(config, remarks) => (*config, remarks),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn with_a_config_file_flags_and_variables_are_ignored() {
        let (config, remarks) = configured("name: one\nelection-timeout: 2000\n");
        assert_eq!((config.name.as_str(), config.max_learners), ("one", 1));
        assert_eq!(config.election_timeout, Duration::from_millis(2000));
        assert_eq!(config.data_dir.to_str(), Some("one.etcd"));
        assert_eq!(config.initial_cluster[0].0, "one");
        let left_out = ["--name", "ETCD_MAX_LEARNERS"].map(str::to_owned).to_vec();
        assert!(
            matches!(&remarks[..], [Remark::ConfigFile { ignored_settings: found, .. }] if *found == left_out),
            "{remarks:?}"
        );
    }

    #[test]
    fn an_empty_flag_leaves_the_file_to_the_variable() {
        let pair = (CONFIG_FILE_VARIABLE.to_owned(), "variable.yml".to_owned());
        let (variable, none) = (BTreeMap::from([pair]), BTreeMap::new());
        let path = |arguments: &[&str], environment: &BTreeMap<String, String>| {
            let mut flags = RawFlags::default();
            let flag = find_flag(CONFIG_FILE).unwrap();
            for value in arguments {
                flags.set(flag, CONFIG_FILE, (*value).to_owned()).unwrap();
            }
            config_file_path(&flags, environment)
        };
        assert_eq!(path(&[""], &variable), Some("variable.yml".into()));
        assert_eq!(path(&["typed.yml"], &variable), Some("typed.yml".into()));
        assert_eq!(path(&[], &variable), Some("variable.yml".into()));
        assert_eq!(path(&[""], &none), None);
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
        let flags = [
            "debug",
            "log-package-levels",
            "log-output",
            "snapshot-count",
            "max-snapshots",
            "max-wals",
            "discovery-fallback",
            "self-signed-cert-validity",
            "enable-pprof",
            "logger",
            "proxy-failure-wait",
            "proxy-refresh-interval",
            "proxy-dial-timeout",
            "proxy-write-timeout",
            "proxy-read-timeout",
        ];
        assert_eq!(ignored, flags);
    }

    #[test]
    fn whole_numbers_are_read_in_any_form_of_yaml() {
        let (config, _) = configured(
            "quota-backend-bytes: 8.589934592e+09\nmax-txn-ops: 1_000\nmax-learners: 0x2\n\
             election-timeout: 5e+03\nheartbeat-interval: 0o620\n\
             watch-progress-notify-interval: 6e+11\n",
        );
        assert_eq!(config.quota_backend_bytes, 8 << 30);
        assert_eq!((config.max_txn_ops, config.max_learners), (1_000, 2));
        assert_eq!(config.election_timeout, Duration::from_secs(5));
        assert_eq!(config.heartbeat, Duration::from_millis(400));
        assert_eq!(config.watch_progress_interval, Duration::from_secs(600));
        for wrong in ["1.5", "1e30", "'1e3'", "ten"] {
            let (_, text) = refused(&format!("max-txn-ops: {wrong}"));
            assert!(text.ends_with("parse error"), "{wrong}: {text}");
        }
    }

    #[test]
    fn an_alias_has_the_value_of_its_anchor() {
        let (config, remarks) = configured(
            "x-files: &files\n  cert-file: c\n  key-file: k\n  trusted-ca-file: ca\n\
             name: &name one\ninitial-cluster-token: *name\n\
             client-transport-security: *files\n\
             peer-transport-security:\n  <<: *files\n  key-file: other\n\
             listen-client-urls: https://127.0.0.1:1\n",
        );
        assert_eq!(config.initial_cluster_token, "one");
        let (clients, peers) = (config.client_tls.unwrap(), config.peer_tls.unwrap());
        assert_eq!((clients.cert.to_str(), clients.key.to_str()), (Some("c"), Some("k")));
        assert_eq!((peers.cert.to_str(), peers.key.to_str()), (Some("c"), Some("other")));
        let unknown =
            Remark::FilePartIgnored { line: 1, text: "unknown key \"x-files\"".to_owned() };
        assert!(remarks.contains(&unknown), "{remarks:?}");
    }

    #[test]
    fn a_small_file_that_expands_to_many_values_is_refused() {
        let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for n in 1..6 {
            let lists = vec![format!("*a{}", n - 1); 10].join(", ");
            text.push_str(&format!("a{n}: &a{n} [{lists}]\n"));
        }
        assert_eq!(refused(&text), (5, "there are too many values".to_owned()));
        let deep = format!("a: {}{}", "[".repeat(20), "]".repeat(20));
        assert!(refused(&deep).1.starts_with("there are too many lists"));
        assert_eq!(refused("a: &a [*a]"), (1, "an alias stands in its own value".to_owned()));
    }

    #[test]
    fn parts_that_etcd_ignores_are_ignored_with_a_remark() {
        for (text, line, said) in [
            ("x-common: {a: [b, {c: d}]}", 1, "unknown key \"x-common\""),
            (
                "peer-transport-security:\n  owner: root",
                2,
                "unknown key \"owner\" in peer-transport-security",
            ),
            ("config-file: other", 1, "a file can't name another one"),
            (
                "auto-tls: false",
                1,
                "auto-tls stands in a section: give client-transport-security: auto-tls",
            ),
            ("name: a\nname: b", 1, "\"name\" stands again in line 2, which counts"),
            ("name: b\n---\nname: c", 2, "only the first document counts"),
        ] {
            let mut remarks = Vec::new();
            let flags = parse(text, &mut remarks).map_err(|problem| problem.text).unwrap();
            assert_eq!(
                remarks,
                [Remark::FilePartIgnored { line, text: said.to_owned() }],
                "{text}"
            );
            let named = text.contains("name:").then_some("b");
            assert_eq!(flags.given("name"), named, "{text}");
        }
        assert_eq!(
            parsed("Name: a\nclient-transport-security:\n  ca-file:").given("name"),
            Some("a")
        );
    }

    #[test]
    fn each_key_of_a_section_sets_a_flag_of_its_own() {
        let mut flags = std::collections::BTreeSet::new();
        for (section, keys) in SECTIONS {
            for (key, flag) in *keys {
                let known = find_flag(flag).unwrap_or_else(|| panic!("{flag}"));
                let value = if known.kind == FlagKind::Bool { "true" } else { "x" };
                let parsed_flags = parsed(&format!("{section}:\n  {key}: {value}\n"));
                assert_eq!(parsed_flags.given(flag), Some(value));
                assert!(flags.insert(flag), "{flag} twice");
                let (line, text) = refused(&format!("# here\n{flag}: {value}"));
                assert_eq!(line, 2);
                assert!(text.ends_with(&format!("give {section}: {key}")), "{text}");
            }
        }
        assert!(LIST_FLAGS.iter().all(|flag| find_flag(flag).is_some()));
    }

    #[test]
    fn an_invalid_part_of_the_file_is_refused_with_its_line() {
        for (text, line, problem) in [
            ("name: a\ndata-dri: b", 2, "unknown key \"data-dri\" (did you mean data-dir?)"),
            (
                "peer-transport-security:\n  cert-fiel: x",
                2,
                "unknown key \"cert-fiel\" in peer-transport-security (did you mean cert-file?)",
            ),
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
            (
                "# here\nname:\tn1",
                2,
                "a tab stands between ':' and the value: write a space instead",
            ),
            ("[a]: b", 1, "a single value was expected here"),
            ("log-outputs: [[a]]", 1, "log-outputs has to be a list of single values"),
            (
                "client-transport-security:\n  ca-file: ca.crt",
                2,
                "etcd has not known ca-file since 3.4: give trusted-ca-file and client-cert-auth in client-transport-security",
            ),
        ] {
            let (found, said) = refused(text);
            assert_eq!((found, said.as_str()), (line, problem), "{text}");
        }
        let (line, text) = refused("name: a\n  b: [\n");
        assert!(line > 1 && !text.is_empty(), "{text}");
    }

    #[test]
    fn a_key_that_is_spelt_otherwise_than_its_flag_sets_it() {
        let (config, remarks) = configured("experimental-snapshot-catch-up-entries: 7");
        assert_eq!(config.snapshot_catchup_entries, 7);
        let [Remark::ConfigFile { ignored_settings, .. }, Remark::DefaultName] = &remarks[..]
        else {
            panic!("{remarks:?}");
        };
        assert!(!ignored_settings.iter().any(|name| name.contains("catch")), "{remarks:?}");
    }

    #[test]
    fn common_names_of_clients_are_refused() {
        for names in ["client", "[client]", "'no'", "no"] {
            let (line, text) =
                refused(&format!("client-transport-security:\n  Allowed-CN: {names}"));
            assert_eq!(line, 2);
            assert!(text.starts_with("allowed-cn in client-transport-security is not"), "{text}");
        }
        for nothing in ["", "''", "[]"] {
            parsed(&format!("client-transport-security:\n  allowed-cn: {nothing}"));
        }
    }

    #[test]
    fn empty_files_and_empty_values_set_nothing() {
        for text in ["", "# nothing\n", "---\n", "{}", "name:\n", "name: ~", "name: ''"] {
            assert_eq!(parsed(text), RawFlags::default(), "{text}");
        }
        assert_eq!(parsed("name: 'null'").given("name"), Some("null"));
    }
}
