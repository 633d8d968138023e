//! The configurations of `cases.txt`, and their forms as flags, as environment variables and as a
//! file.
//!
//! The format of `cases.txt`:
//!
//! - A line is a configuration: flags separated by spaces.
//! - `|` separates values; each value makes a configuration of its own.
//! - Configurations of a single flag are started together. The configuration of a line that begins
//!   with `!` is started alone, because a program refuses it.
//! - A line `file:` begins a configuration file, which consists of the indented lines below it.
//! - Placeholders are replaced at the start. `{ip}` and `{ip2}` are the member's own addresses, and
//!   `{other}` is the address of a member that doesn't run.

use std::fmt::Write as _;

use anyhow::{Result, bail};

/// Form in which a program gets a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConfigSource {
    Flags,
    Environment,
    File,
}

/// A configuration from `cases.txt`, given as flags or as a file.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    settings: CaseSettings,
    /// Whether the configuration must not be started together with others.
    is_alone: bool,
}

#[derive(Clone, Debug)]
enum CaseSettings {
    Flags(Vec<Flag>),
    File(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Flag {
    name: String,
    /// Value after `=`; `None` for a flag without `=`.
    value: Option<String>,
}

/// Flags that every configuration needs. The values are used unless the configuration sets the
/// flags itself.
const BASE_FLAGS: [(&str, &str); 6] = [
    ("data-dir", "{dir}/data"),
    ("listen-client-urls", "http://{ip}:2379"),
    ("advertise-client-urls", "http://{ip}:2379"),
    ("listen-peer-urls", "http://{ip}:2380"),
    ("initial-advertise-peer-urls", "http://{ip}:2380"),
    ("initial-cluster", "default=http://{ip}:2380"),
];

/// Sections of a configuration file; each pair is a key and the flag that it corresponds to.
const SECTIONS: [(&str, &[(&str, &str)]); 3] = [
    (
        "socket-options",
        &[("reuse-port", "socket-reuse-port"), ("reuse-address", "socket-reuse-address")],
    ),
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
];
/// Flags whose value is a list in a configuration file.
const LIST_FLAGS: [&str; 5] = [
    "log-outputs",
    "cipher-suites",
    "client-cert-allowed-hostname",
    "peer-cert-allowed-cn",
    "peer-cert-allowed-hostname",
];
/// Flag with which the first election takes up to a minute.
const LONGEST_ELECTION: &str = "--election-timeout=50000";
/// Lists in a configuration file in which etcd treats a repeated URL as two URLs. etcd then listens
/// twice, or doesn't find the second URL.
const COUNTED_TWICE: [&str; 3] =
    ["listen-peer-urls", "initial-advertise-peer-urls", "listen-metrics-urls"];
/// Flags whose value is a string in a file, even if it looks like a number.
const STRING_FLAGS: [&str; 3] = ["auto-compaction-retention", "initial-cluster-token", "name"];

/// Parses `cases.txt`. An error names a line that is neither a configuration nor a comment.
pub(crate) fn parse_cases(text: &str) -> Result<Vec<(Case, ConfigSource)>> {
    let mut cases = Vec::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if line == "file:" {
            let mut file = String::new();
            while let Some(line) = lines.next_if(|line| line.starts_with("  ")) {
                let _ = writeln!(file, "{}", &line[2..]);
            }
            cases.push((
                Case { settings: CaseSettings::File(file), is_alone: true },
                ConfigSource::File,
            ));
        } else if line.starts_with("--") || line.starts_with("! --") {
            cases.extend(expand(line)?.into_iter().map(|case| (case, ConfigSource::Flags)));
        } else if !line.is_empty() && !line.starts_with('#') {
            bail!("cases.txt: {line:?} is neither a configuration nor a comment");
        }
    }
    Ok(cases)
}

fn expand(line: &str) -> Result<Vec<Case>> {
    let (flags, is_refused) = match line.strip_prefix("! ") {
        Some(flags) => (flags, true),
        None => (line, false),
    };
    let words: Vec<&str> = flags.split_whitespace().collect();
    let is_alone = is_refused || words.len() > 1;
    let mut lists: Vec<Vec<Flag>> = vec![Vec::new()];
    for word in words {
        let Some(flag) = word.strip_prefix("--") else { bail!("cases.txt: {word:?} in {line:?}") };
        let flags: Vec<Flag> = match flag.split_once('=') {
            None => vec![Flag { name: flag.to_owned(), value: None }],
            Some((name, values)) => values
                .split('|')
                .map(|value| Flag { name: name.to_owned(), value: Some(value.to_owned()) })
                .collect(),
        };
        let with =
            |list: &Vec<Flag>, flag: &Flag| [list.as_slice(), std::slice::from_ref(flag)].concat();
        lists =
            lists.iter().flat_map(|list| flags.iter().map(move |flag| with(list, flag))).collect();
    }
    let case = |flags| Case { settings: CaseSettings::Flags(flags), is_alone };
    Ok(lists.into_iter().map(case).collect())
}

impl Case {
    /// Returns the configuration in one line. `docs/differences.md` quotes parts of such lines.
    pub(crate) fn text(&self) -> String {
        match &self.settings {
            CaseSettings::Flags(flags) => {
                flags.iter().map(Flag::typed).collect::<Vec<_>>().join(" ")
            }
            CaseSettings::File(text) => text.trim_end().to_owned(),
        }
    }

    /// Whether a member with this configuration serves clients soon. False if the member waits for
    /// other members, or if its first election takes a minute.
    pub(crate) fn serves_soon(&self) -> bool {
        !["{other}", LONGEST_ELECTION].iter().any(|words| self.text().contains(words))
    }

    /// Whether the configuration means the same in this form as in flags. An empty variable counts
    /// as unset, and a file has no empty lists. In some lists of a file, etcd treats a repeated URL
    /// as two.
    pub(crate) fn is_equivalent_in(&self, way: ConfigSource) -> bool {
        let CaseSettings::Flags(flags) = &self.settings else { return way == ConfigSource::File };
        let is_doubled = |flag: &Flag| {
            let urls: Vec<&str> = flag.value_or_true().split(',').collect();
            (1..urls.len()).any(|n| urls[..n].contains(&urls[n]))
        };
        let counts_twice =
            |flag: &Flag| COUNTED_TWICE.contains(&flag.name.as_str()) && is_doubled(flag);
        let is_empty = |flag: &Flag| flag.value.as_deref() == Some("");
        way == ConfigSource::Flags
            || !flags
                .iter()
                .any(|flag| is_empty(flag) || (way == ConfigSource::File && counts_twice(flag)))
    }

    /// Adds the settings of another configuration, if both may be started together and set
    /// different flags.
    pub(crate) fn join(&mut self, other: &Self) -> bool {
        let (CaseSettings::Flags(own), CaseSettings::Flags(others)) =
            (&mut self.settings, &other.settings)
        else {
            return false;
        };
        // etcd 3.7 has no experimental flags, so they are never started together with other flags.
        let is_experimental = |flag: &Flag| flag.name.starts_with("experimental-");
        let kind = own.first().map(is_experimental);
        let is_new = |flag: &Flag| {
            own.iter().all(|known| known.name != flag.name) && kind == Some(is_experimental(flag))
        };
        if self.is_alone || other.is_alone || !others.iter().all(is_new) {
            return false;
        }
        own.extend(others.iter().cloned());
        true
    }

    /// Returns the flags as command line arguments; none for a configuration that is a file.
    pub(crate) fn arguments(&self) -> Vec<String> {
        self.flags().iter().map(Flag::typed).collect()
    }

    /// Returns the flags as `ETCD_*` environment variables; none for a configuration that is a
    /// file.
    pub(crate) fn variables(&self) -> Vec<(String, String)> {
        let variable = |flag: &Flag| {
            let name = flag.name.to_ascii_uppercase().replace('-', "_");
            (format!("ETCD_{name}"), flag.value_or_true().to_owned())
        };
        self.flags().iter().map(variable).collect()
    }

    /// Returns the configuration as the text of a `--config-file`.
    pub(crate) fn file(&self) -> String {
        let flags = match &self.settings {
            CaseSettings::File(text) => return file_with_base(text),
            CaseSettings::Flags(_) => self.flags(),
        };
        let mut text = String::new();
        for flag in &flags {
            let in_section = |(_, keys): &(&str, &[(&str, &str)])| {
                keys.iter().any(|(_, name)| *name == flag.name)
            };
            if !SECTIONS.iter().any(in_section) {
                let _ = writeln!(text, "{}: {}", flag.name, flag.yaml());
            }
        }
        for (section, keys) in SECTIONS {
            let mut lines = String::new();
            for (key, name) in keys {
                for flag in flags.iter().filter(|flag| flag.name == *name) {
                    let _ = writeln!(lines, "  {key}: {}", flag.yaml());
                }
            }
            // etcd refuses a section without keys.
            if !lines.is_empty() {
                let _ = write!(text, "{section}:\n{lines}");
            }
        }
        text
    }

    /// Returns the configuration's flags and the missing ones of `BASE_FLAGS`.
    fn flags(&self) -> Vec<Flag> {
        let CaseSettings::Flags(own) = &self.settings else { return Vec::new() };
        let missing =
            BASE_FLAGS.iter().filter(|(name, _)| own.iter().all(|flag| flag.name != *name));
        let base = missing.map(|(name, value)| Flag {
            name: (*name).to_owned(),
            value: Some((*value).to_owned()),
        });
        own.iter().cloned().chain(base).collect()
    }
}

/// Adds the missing settings of `BASE_FLAGS` before the text, so that the text's own settings take
/// precedence.
fn file_with_base(text: &str) -> String {
    let is_missing = |name: &str| !text.to_ascii_lowercase().contains(&format!("{name}:"));
    let base = BASE_FLAGS.iter().filter(|(name, _)| is_missing(name));
    let lines: Vec<String> = base.map(|(name, value)| format!("{name}: {value}\n")).collect();
    lines.concat() + text
}

impl Flag {
    fn typed(&self) -> String {
        match &self.value {
            None => format!("--{}", self.name),
            Some(value) => format!("--{}={value}", self.name),
        }
    }

    /// Returns the flag's value. A flag without a value is a boolean that is true.
    fn value_or_true(&self) -> &str {
        self.value.as_deref().unwrap_or("true")
    }

    /// Returns the value in the syntax of a configuration file: durations in nanoseconds, numbers
    /// and booleans without quotes.
    fn yaml(&self) -> String {
        let value = self.value_or_true();
        let quoted = |text: &str| format!("{text:?}");
        if LIST_FLAGS.contains(&self.name.as_str()) {
            let items: Vec<String> = value.split(',').map(quoted).collect();
            return format!("[{}]", items.join(", "));
        }
        let is_plain = value == "true"
            || value == "false"
            || value.trim_start_matches('-').starts_with(|c: char| c.is_ascii_digit());
        match nanoseconds(value) {
            _ if STRING_FLAGS.contains(&self.name.as_str()) => quoted(value),
            Some(nanoseconds) => nanoseconds.to_string(),
            None if is_plain => value.to_owned(),
            None => quoted(value),
        }
    }
}

/// Parses a duration with a single unit into nanoseconds.
fn nanoseconds(text: &str) -> Option<i64> {
    [("ms", 1_000_000), ("s", 1_000_000_000), ("m", 60_000_000_000), ("h", 3_600_000_000_000)]
        .into_iter()
        .find_map(|(unit, length)| Some(text.strip_suffix(unit)?.parse::<i64>().ok()? * length))
}
