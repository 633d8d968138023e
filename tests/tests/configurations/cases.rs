//! The configurations of `cases.txt`, and how each is written as flags, as variables, as a file.
//!
//! A line is a configuration: flags between spaces. `|` separates values, each of which makes a
//! configuration of its own. Configurations of one flag share starts, but for lines that begin with
//! `!`: those that a program refuses. A line `file:` begins a file, of the indented lines below it.
//! `{ip}` and the like are replaced at the start: `{ip}` and `{ip2}` are this member's own addresses,
//! `{other}` is another member's, which isn't there.

use std::fmt::Write as _;

use anyhow::{Result, bail};

/// How a program is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Flags,
    Environment,
    File,
}

/// One configuration, given as flags or as a file.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    settings: Settings,
    /// Started by itself, never joined with other configurations.
    is_alone: bool,
}

#[derive(Clone, Debug)]
enum Settings {
    Flags(Vec<Flag>),
    File(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Flag {
    name: String,
    /// `None`: a flag without `=`.
    value: Option<String>,
}

/// Settings of every configuration that doesn't give these flags itself.
const BASE: [(&str, &str); 6] = [
    ("data-dir", "{dir}/data"),
    ("listen-client-urls", "http://{ip}:2379"),
    ("advertise-client-urls", "http://{ip}:2379"),
    ("listen-peer-urls", "http://{ip}:2380"),
    ("initial-advertise-peer-urls", "http://{ip}:2380"),
    ("initial-cluster", "default=http://{ip}:2380"),
];

/// Keys of a file that stand in a section, and their flags.
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
/// Lists in a file.
const LISTS: [&str; 5] = [
    "log-outputs",
    "cipher-suites",
    "client-cert-allowed-hostname",
    "peer-cert-allowed-cn",
    "peer-cert-allowed-hostname",
];
/// A flag with which the first election takes up to a minute.
const LONGEST_ELECTION: &str = "--election-timeout=50000";
/// Lists in which etcd, told by a file, listens twice on a URL that stands twice, or misses its twin.
const COUNTED_TWICE: [&str; 3] =
    ["listen-peer-urls", "initial-advertise-peer-urls", "listen-metrics-urls"];
/// Text in a file, whatever it looks like.
const TEXTS: [&str; 3] = ["auto-compaction-retention", "initial-cluster-token", "name"];

/// Parses `cases.txt`. Errors name the line that is neither a configuration nor a comment.
pub(crate) fn read(text: &str) -> Result<Vec<(Case, Way)>> {
    let mut cases = Vec::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if line == "file:" {
            let mut file = String::new();
            while let Some(line) = lines.next_if(|line| line.starts_with("  ")) {
                let _ = writeln!(file, "{}", &line[2..]);
            }
            cases.push((Case { settings: Settings::File(file), is_alone: true }, Way::File));
        } else if line.starts_with("--") || line.starts_with("! --") {
            cases.extend(expand(line)?.into_iter().map(|case| (case, Way::Flags)));
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
    let case = |flags| Case { settings: Settings::Flags(flags), is_alone };
    Ok(lists.into_iter().map(case).collect())
}

impl Case {
    /// The configuration in one line, as `docs/differences.md` quotes parts of it.
    pub(crate) fn text(&self) -> String {
        match &self.settings {
            Settings::Flags(flags) => flags.iter().map(Flag::typed).collect::<Vec<_>>().join(" "),
            Settings::File(text) => text.trim_end().to_owned(),
        }
    }

    /// Whether a member serves clients soon: not where it waits for other members, nor where its first
    /// election comes after a minute.
    pub(crate) fn serves_soon(&self) -> bool {
        !["{other}", LONGEST_ELECTION].iter().any(|words| self.text().contains(words))
    }

    /// Whether this way of telling it means the same as flags do: an empty variable is none, and a file
    /// has no empty lists. In some lists of a file, etcd takes a URL that stands twice for two.
    pub(crate) fn can_be_told_by(&self, way: Way) -> bool {
        let Settings::Flags(flags) = &self.settings else { return way == Way::File };
        let is_doubled = |flag: &Flag| {
            let urls: Vec<&str> = flag.shown().split(',').collect();
            (1..urls.len()).any(|n| urls[..n].contains(&urls[n]))
        };
        let counts_twice =
            |flag: &Flag| COUNTED_TWICE.contains(&flag.name.as_str()) && is_doubled(flag);
        let is_empty = |flag: &Flag| flag.value.as_deref() == Some("");
        way == Way::Flags
            || !flags.iter().any(|flag| is_empty(flag) || (way == Way::File && counts_twice(flag)))
    }

    /// Takes the settings of another configuration in, if both are of single flags and of others.
    pub(crate) fn join(&mut self, other: &Self) -> bool {
        let (Settings::Flags(own), Settings::Flags(others)) = (&mut self.settings, &other.settings)
        else {
            return false;
        };
        // etcd 3.7 has no flags whose names begin so.
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

    /// As arguments, where they are flags.
    pub(crate) fn arguments(&self) -> Vec<String> {
        self.flags().iter().map(Flag::typed).collect()
    }

    /// The flags as `ETCD_*` environment variables; none for a configuration that is a file.
    pub(crate) fn variables(&self) -> Vec<(String, String)> {
        let variable = |flag: &Flag| {
            let name = flag.name.to_ascii_uppercase().replace('-', "_");
            (format!("ETCD_{name}"), flag.shown().to_owned())
        };
        self.flags().iter().map(variable).collect()
    }

    /// The configuration as the text of a `--config-file`.
    pub(crate) fn file(&self) -> String {
        let flags = match &self.settings {
            Settings::File(text) => return file_with_base(text),
            Settings::Flags(_) => self.flags(),
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

    /// All flags, those that every configuration needs among them.
    fn flags(&self) -> Vec<Flag> {
        let Settings::Flags(own) = &self.settings else { return Vec::new() };
        let missing = BASE.iter().filter(|(name, _)| own.iter().all(|flag| flag.name != *name));
        let base = missing.map(|(name, value)| Flag {
            name: (*name).to_owned(),
            value: Some((*value).to_owned()),
        });
        own.iter().cloned().chain(base).collect()
    }
}

/// A file with the keys that every configuration needs; they come first, so that an own one counts.
fn file_with_base(text: &str) -> String {
    let is_missing = |name: &str| !text.to_ascii_lowercase().contains(&format!("{name}:"));
    let base = BASE.iter().filter(|(name, _)| is_missing(name));
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

    /// A flag without a value is a boolean one.
    fn shown(&self) -> &str {
        self.value.as_deref().unwrap_or("true")
    }

    /// The value as a file has it: durations in nanoseconds, numbers and booleans without quotes.
    fn yaml(&self) -> String {
        let value = self.shown();
        let quoted = |text: &str| format!("{text:?}");
        if LISTS.contains(&self.name.as_str()) {
            let items: Vec<String> = value.split(',').map(quoted).collect();
            return format!("[{}]", items.join(", "));
        }
        let is_plain = value == "true"
            || value == "false"
            || value.trim_start_matches('-').starts_with(|c: char| c.is_ascii_digit());
        match nanoseconds(value) {
            _ if TEXTS.contains(&self.name.as_str()) => quoted(value),
            Some(nanoseconds) => nanoseconds.to_string(),
            None if is_plain => value.to_owned(),
            None => quoted(value),
        }
    }
}

/// A duration of one unit.
fn nanoseconds(text: &str) -> Option<i64> {
    [("ms", 1_000_000), ("s", 1_000_000_000), ("m", 60_000_000_000), ("h", 3_600_000_000_000)]
        .into_iter()
        .find_map(|(unit, length)| Some(text.strip_suffix(unit)?.parse::<i64>().ok()? * length))
}
