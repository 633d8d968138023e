//! Reads the settings of a running etcd from its configuration file (`--config-file`), as flags.
//!
//! The functions here take the file's text and have no side effects.
//!
//! etcd ignores all other flags and variables if it has such a file. The etcd under the agent runs
//! with flags, so each setting of the file becomes a flag.

use std::collections::BTreeMap;

use node_etcd_config::integers::yaml_whole_number;
use node_etcd_config::yaml::{self, Scalar, YamlEntry, YamlNode, YamlProblem};
use node_etcd_config::{CLIENT_ALLOWED_CN, DURATION_FLAGS, RENAMED_KEYS, SECTIONS, flag_of_key};

/// Prefix of flags whose form may still change in etcd.
const EXPERIMENTAL: &str = "experimental-";

/// Settings of a configuration file, by the names of the flags that set them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FileSettings {
    pub flags: BTreeMap<String, String>,
    /// Keys in wrong places, which etcd ignores.
    pub misplaced: Vec<String>,
    /// A key in the file that limits which clients etcd serves. No flag can replace such a key.
    pub client_limit: Option<String>,
}

impl FileSettings {
    /// Parses the text of a configuration file. A running etcd has accepted this file before, so
    /// the values are taken as they are.
    ///
    /// # Errors
    /// Fails if the text is not YAML. Then it was changed after the etcd began.
    pub(crate) fn parse(text: &str) -> Result<Self, YamlProblem> {
        let mut settings = Self::default();
        for entry in yaml::parse(text)?.entries {
            // Go's JSON decoder ignores the case of keys.
            let key = entry.key.to_ascii_lowercase();
            let section = SECTIONS.iter().find(|(name, _)| *name == key);
            match (section, entry.node) {
                (Some((section, keys)), YamlNode::Map(entries)) => {
                    for entry in entries {
                        settings.set_in_section(section, keys, entry);
                    }
                }
                (Some(_), _) => {}
                (None, node) if is_ignored_by_etcd(&key) => settings.note_misplaced(key, &node),
                (None, node) => settings.set(flag_of_key(&key), node),
            }
        }
        Ok(settings)
    }

    fn set_in_section(&mut self, section: &str, keys: &[(&str, &str)], entry: YamlEntry) {
        let key = entry.key.to_ascii_lowercase();
        if (section, key.as_str()) == CLIENT_ALLOWED_CN && !entry.node.is_empty() {
            self.client_limit = Some(format!("{section}: {key}"));
            return;
        }
        match keys.iter().find(|(known, _)| *known == key) {
            Some((_, flag)) => self.set(flag, entry.node),
            None => self.note_misplaced(format!("{section}: {key}"), &entry.node),
        }
    }

    fn set(&mut self, flag: &str, node: YamlNode) {
        let value = match node {
            YamlNode::Scalar(scalar) => scalar.map(|scalar| flag_value(flag, scalar)),
            YamlNode::List(nodes) => {
                let values = nodes.into_iter().filter_map(|node| match node {
                    YamlNode::Scalar(Some(scalar)) => Some(scalar.text),
                    _ => None,
                });
                Some(values.collect::<Vec<_>>().join(","))
            }
            YamlNode::Map(_) => return self.misplaced.push(flag.to_owned()),
        };
        // If the file gives a key without a value, etcd keeps its default.
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            self.flags.insert(flag.to_owned(), value);
        }
    }

    fn note_misplaced(&mut self, key: String, node: &YamlNode) {
        if !matches!(node, YamlNode::Scalar(None)) {
            self.misplaced.push(key);
        }
    }
}

/// Returns whether etcd ignores this key at the file's top level, although it is the name of a
/// flag. The file sets some flags by keys of other names, or by keys in a section. etcd ignores
/// `config-file` everywhere in the file.
fn is_ignored_by_etcd(key: &str) -> bool {
    let section_keys = SECTIONS.iter().flat_map(|(_, keys)| keys.iter());
    let mut other_keys = section_keys.chain(RENAMED_KEYS);
    key == super::config::CONFIG_FILE || other_keys.any(|(_, flag)| *flag == key)
}

/// Converts a value in the file to the flag's syntax. Numbers and truth values may have all forms
/// of YAML 1.1, unless they are quoted.
fn flag_value(flag: &str, Scalar { text, is_plain }: Scalar) -> String {
    if !is_plain {
        return text;
    }
    if let Some(number) = yaml_whole_number(&text) {
        let base_name = flag.strip_prefix(EXPERIMENTAL).unwrap_or(flag);
        let unit = if DURATION_FLAGS.contains(&base_name) { "ns" } else { "" };
        return number + unit;
    }
    match text.to_ascii_lowercase().as_str() {
        "yes" | "y" | "on" | "true" => "true".to_owned(),
        "no" | "n" | "off" | "false" => "false".to_owned(),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file as operators write it: etcd's own sample, with the settings of one member.
    const FILE: &str = r#"
# This is the configuration file for the etcd server.
name: 'db-1'
data-dir: /var/lib/etcd
wal-dir: /srv/wal
snapshot-count: 10_000
heartbeat-interval: 100
quota-backend-bytes: 8.589934592e+09
listen-peer-urls: https://10.0.0.1:2380
listen-client-urls: https://10.0.0.1:2379,https://127.0.0.1:2379
cors:
initial-advertise-peer-urls: https://10.0.0.1:2380
advertise-client-urls: https://10.0.0.1:2379
discovery-fallback: 'proxy'
initial-cluster: db-1=https://10.0.0.1:2380
initial-cluster-state: new
strict-reconfig-check: no
grpc-keepalive-interval: 7200000000000
experimental-watch-progress-notify-interval: 5000000000
auto-compaction-retention: "1"
client-transport-security: &tls
  cert-file: /etc/etcd/server.crt
  key-file: /etc/etcd/server.key
  client-cert-auth: true
  trusted-ca-file: /etc/etcd/ca.crt
  auto-tls: false
peer-transport-security:
  <<: *tls
  cert-file: /etc/etcd/peer.crt
  ca-file: /etc/etcd/old.crt
cipher-suites: [
  TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
  TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384
]
cert-file: /in/no/section
log-outputs: [stderr]
"#;

    #[test]
    fn each_setting_of_a_file_becomes_a_flag() {
        let settings = FileSettings::parse(FILE).unwrap();
        for (flag, value) in [
            ("name", "db-1"),
            ("wal-dir", "/srv/wal"),
            ("snapshot-count", "10000"),
            ("quota-backend-bytes", "8589934592"),
            ("strict-reconfig-check", "false"),
            ("grpc-keepalive-interval", "7200000000000ns"),
            ("experimental-watch-progress-notify-interval", "5000000000ns"),
            ("auto-compaction-retention", "1"),
            ("cert-file", "/etc/etcd/server.crt"),
            ("client-cert-auth", "true"),
            ("auto-tls", "false"),
            ("peer-cert-file", "/etc/etcd/peer.crt"),
            ("peer-key-file", "/etc/etcd/server.key"),
            ("peer-client-cert-auth", "true"),
            (
                "cipher-suites",
                "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
            ),
        ] {
            assert_eq!(settings.flags.get(flag).map(String::as_str), Some(value), "{flag}");
        }
        assert!(!settings.flags.contains_key("cors"), "an empty value sets nothing");
        assert_eq!(settings.misplaced, ["peer-transport-security: ca-file", "cert-file"]);
    }

    #[test]
    fn quoted_values_and_json_are_read() {
        let text = r#"{"Name": "on", "max-txn-ops": 0x80, "config-file": "x", "data-dir": null}"#;
        let settings = FileSettings::parse(text).unwrap();
        let flags: Vec<(&str, &str)> =
            settings.flags.iter().map(|(flag, value)| (flag.as_str(), value.as_str())).collect();
        assert_eq!(flags, [("max-txn-ops", "128"), ("name", "on")]);
        assert_eq!(settings.misplaced, ["config-file"]);
        assert_eq!(FileSettings::parse("").unwrap(), FileSettings::default());
    }

    #[test]
    fn a_value_with_the_tag_of_a_text_is_no_number() {
        for (value, text) in [
            ("!!str 010", "010"),
            ("!!str yes", "yes"),
            ("!<tag:yaml.org,2002:str> 1e3", "1e3"),
            ("!!int 010", "8"),
            ("010", "8"),
        ] {
            let settings = FileSettings::parse(&format!("name: {value}\n")).unwrap();
            assert_eq!(settings.flags["name"], text, "{value}");
        }
    }

    #[test]
    fn a_key_that_is_spelt_otherwise_than_its_flag_sets_it() {
        let settings = FileSettings::parse(
            "experimental-snapshot-catch-up-entries: 7\n\
             experimental-snapshot-catchup-entries: 8\n",
        )
        .unwrap();
        assert_eq!(settings.flags["experimental-snapshot-catchup-entries"], "7");
        assert_eq!(settings.misplaced, ["experimental-snapshot-catchup-entries"]);
    }

    #[test]
    fn a_limit_of_clients_that_no_flag_can_keep_is_named() {
        let limit = |text: &str| FileSettings::parse(text).unwrap().client_limit;
        let expected = Some("client-transport-security: allowed-cn".to_owned());
        assert_eq!(limit("client-transport-security:\n  allowed-cn: [client]\n"), expected);
        assert_eq!(limit("Client-Transport-Security: {Allowed-CN: client}"), expected);
        assert_eq!(limit("client-transport-security:\n  allowed-cn: []\n"), None);
        assert_eq!(limit("peer-transport-security:\n  allowed-cn: [peer]\n"), None);
    }

    #[test]
    fn a_text_that_is_no_yaml_is_refused_with_its_line() {
        assert!(FileSettings::parse("name: a\n  b: [\n").unwrap_err().line > 1);
        assert_eq!(FileSettings::parse("just text").unwrap_err().line, 1);
    }
}
