//! Parses the command line and the environment into one string per flag. The rules are those of
//! Go's `flag` package.

use std::collections::BTreeMap;
use std::path::Path;

use node_etcd_config::integers::{parse_int, parse_uint};

use super::{
    Remark, duration,
    file::CONFIG_FILE,
    flags::{FLAGS, Flag, FlagEffect, FlagKind, find_flag},
    validate::ConfigError,
};

/// Reason why a command line can't be parsed: exit code 2.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UsageError {
    /// No flag has this name.
    #[error("flag provided but not defined: -{name}{}", nearest.map(|n| format!(" (did you mean --{n}?)")).unwrap_or_default())]
    Unknown {
        /// Name as typed, without dashes.
        name: String,
        /// Name of the most similar known flag, if one is similar enough.
        nearest: Option<&'static str>,
    },
    /// The last argument is a flag that needs a value.
    #[error("flag needs an argument: -{0}")]
    NoValue(String),
    /// The value is not valid for the kind of the flag.
    #[error("invalid value {value:?} for flag -{flag}: {problem}")]
    Value {
        flag: String,
        /// Value as it was typed.
        value: String,
        /// Description of the problem.
        problem: String,
    },
    /// The argument consists of dashes without a name.
    #[error("bad flag syntax: {0}")]
    Syntax(String),
    /// The argument is not a flag.
    #[error("'{0}' is not a valid flag")]
    NotAFlag(String),
}

/// Values of the flags as typed, by the flags' names. Each value is valid for its flag's kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RawFlags {
    /// Whether `--help` or `-h` was given.
    pub help: bool,
    /// Whether `--version` was given.
    pub version: bool,
    values: BTreeMap<&'static str, String>,
}

impl RawFlags {
    /// Parses a command line, without the program's name.
    ///
    /// # Errors
    /// Fails at the first argument that can't be parsed.
    pub fn parse(args: impl IntoIterator<Item = String>) -> Result<Self, UsageError> {
        let mut flags = Self::default();
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            let Some(body) = arg.strip_prefix("--").or_else(|| arg.strip_prefix('-')) else {
                return Err(UsageError::NotAFlag(arg));
            };
            if arg == "-" {
                return Err(UsageError::NotAFlag(arg));
            }
            if arg == "--" {
                return args.next().map_or(Ok(flags), |rest| Err(UsageError::NotAFlag(rest)));
            }
            let (name, value) = match body.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (body, None),
            };
            if name.is_empty() || name.starts_with('-') {
                return Err(UsageError::Syntax(arg));
            }
            match name {
                "help" | "h" => flags.help = true,
                "version" => flags.version = value.is_none_or(|v| parse_bool(&v) != Some(false)),
                _ => {
                    let flag = find_flag(name).ok_or_else(|| unknown_flag(name))?;
                    let value = match value {
                        Some(value) => value,
                        None if matches!(flag.kind, FlagKind::Bool | FlagKind::OptionalText) => {
                            "true".to_owned()
                        }
                        None => args.next().ok_or_else(|| UsageError::NoValue(name.to_owned()))?,
                    };
                    flags.set(flag, name, value)?;
                }
            }
        }
        Ok(flags)
    }

    /// Adds values from the environment for flags that the command line did not set.
    ///
    /// # Errors
    /// Fails if a variable's value does not fit its flag's kind.
    pub fn add_environment(
        &mut self,
        environment: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Vec<Remark>, ConfigError> {
        let mut remarks = Vec::new();
        let typed: Vec<&'static str> = self.values.keys().copied().collect();
        // Variables are processed in the order of their names. So the result is always the same if
        // two variables name one flag.
        let environment: BTreeMap<String, String> = environment.into_iter().collect();
        for (variable, value) in environment {
            let Some(name) = variable.strip_prefix("ETCD_") else {
                continue;
            };
            let name = name.to_ascii_lowercase().replace('_', "-");
            match find_flag(&name) {
                None => remarks.push(Remark::UnknownVariable { variable }),
                Some(_) if value.is_empty() => {}
                Some(flag) if typed.contains(&flag.name) => {
                    remarks.push(Remark::FlagOverridesVariable { variable });
                }
                Some(flag) => self
                    .set(flag, &name, value)
                    .map_err(|source| ConfigError::Variable { variable, source })?,
            }
        }
        Ok(remarks)
    }

    /// Returns remarks about the given flags that have no effect.
    pub(super) fn ignored_flag_remarks(&self) -> impl Iterator<Item = Remark> {
        FLAGS.iter().filter(|flag| self.values.contains_key(flag.name)).filter_map(
            |flag| match flag.effect {
                FlagEffect::Ignored(because) => Some(Remark::Ignored { flag: flag.name, because }),
                FlagEffect::Effective | FlagEffect::Unsupported(_) => None,
            },
        )
    }

    /// Records the path of the configuration file from which these values come.
    pub(super) fn note_file(&mut self, path: &Path) {
        self.values.insert(CONFIG_FILE, path.display().to_string());
    }

    /// Returns the names of all flags that were given, without dashes.
    pub(super) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.values.keys().copied()
    }

    /// Returns the value of the flag `name`: the given one, or else the default.
    ///
    /// # Panics
    /// Panics if there is no such flag.
    #[must_use]
    pub fn value(&self, name: &str) -> &str {
        self.given(name).unwrap_or_else(|| self.default_of(name))
    }

    /// Returns the default of the flag `name`.
    ///
    /// # Panics
    /// Panics if there is no such flag.
    pub(super) fn default_of(&self, name: &str) -> &'static str {
        find_flag(name).expect("only flags of the table are asked for").default
    }

    /// Returns the value that was given for the flag `name`, if any.
    #[must_use]
    pub fn given(&self, name: &str) -> Option<&str> {
        self.values.get(name).map(String::as_str)
    }

    /// Sets the value of `flag`. Error texts name the flag by `typed`, the name that the user gave.
    pub(super) fn set(
        &mut self,
        flag: &'static Flag,
        typed: &str,
        value: String,
    ) -> Result<(), UsageError> {
        if let Some(problem) = value_problem(flag.kind, &value) {
            return Err(UsageError::Value { flag: typed.to_owned(), value, problem });
        }
        self.values.insert(flag.name, value);
        Ok(())
    }
}

fn value_problem(kind: FlagKind, value: &str) -> Option<String> {
    let fits = match kind {
        FlagKind::Text | FlagKind::OptionalText => true,
        FlagKind::Bool => parse_bool(value).is_some(),
        FlagKind::Int => parse_int(value).is_some(),
        FlagKind::Uint => parse_uint(value).is_some(),
        FlagKind::Uint32 => parse_uint(value).is_some_and(|number| u32::try_from(number).is_ok()),
        FlagKind::Duration => duration::parse(value).is_some(),
        FlagKind::OneOf(values) if !values.contains(&value) => return Some(one_of(values)),
        FlagKind::OneOfAnyCase(values) if !values.iter().any(|v| v.eq_ignore_ascii_case(value)) => {
            return Some(one_of(values));
        }
        FlagKind::OneOf(_) | FlagKind::OneOfAnyCase(_) => true,
    };
    (!fits).then(|| "parse error".to_owned())
}

fn one_of(values: &[&str]) -> String {
    let named: Vec<&str> = values.iter().copied().filter(|value| !value.is_empty()).collect();
    format!("it must be one of {}", named.join(", "))
}

/// Parses a boolean like Go's `strconv.ParseBool`.
pub(super) fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

fn unknown_flag(name: &str) -> UsageError {
    let named = FLAGS.iter().filter(|flag| flag.kind != FlagKind::OptionalText);
    let nearest = nearest(name, named.map(|flag| flag.name));
    UsageError::Unknown { name: name.to_owned(), nearest }
}

/// Returns the known name that is most similar to `name`, if one is similar enough.
pub(super) fn nearest(
    name: &str,
    known: impl Iterator<Item = &'static str>,
) -> Option<&'static str> {
    known
        .map(|known| (edit_distance(name, known), known))
        .min()
        .filter(|(distance, known)| *distance <= 1 + known.len() / 5)
        .map(|(_, known)| known)
}

/// Returns the edit distance of two names: the number of characters that must be inserted, deleted
/// or replaced. Only the first 80 bytes of `from` are compared.
fn edit_distance(from: &str, to: &str) -> usize {
    let to: Vec<u8> = to.bytes().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.bytes().take(80).enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in to.iter().enumerate() {
            let replaced = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<RawFlags, String> {
        RawFlags::parse(args.iter().map(ToString::to_string)).map_err(|e| e.to_string())
    }

    #[test]
    fn one_or_two_dashes_and_a_space_or_equals_sign_are_equivalent() {
        for args in [&["--name", "a"][..], &["--name=a"], &["-name", "a"], &["-name=a"]] {
            assert_eq!(parse(args).unwrap().value("name"), "a");
        }
    }

    #[test]
    fn the_last_value_of_a_repeated_flag_counts() {
        assert_eq!(parse(&["--name=a", "--name", "b"]).unwrap().value("name"), "b");
    }

    #[test]
    fn a_bare_boolean_is_true_and_takes_no_value() {
        assert_eq!(parse(&["--pre-vote", "--name=a"]).unwrap().value("pre-vote"), "true");
        assert_eq!(parse(&["--pre-vote=false"]).unwrap().value("pre-vote"), "false");
        assert_eq!(parse(&["--pre-vote", "false"]).unwrap_err(), "'false' is not a valid flag");
    }

    #[test]
    fn both_spellings_of_a_flag_that_was_experimental_are_one_flag() {
        let flags = parse(&["--experimental-watch-progress-notify-interval=5s"]).unwrap();
        assert_eq!(flags.value("watch-progress-notify-interval"), "5s");
        let flags = parse(&["--experimental-max-learners=3", "--max-learners=2"]).unwrap();
        assert_eq!(flags.value("max-learners"), "2");
    }

    #[test]
    fn an_unknown_flag_names_the_nearest_one() {
        assert_eq!(
            parse(&["--data-dri=x"]).unwrap_err(),
            "flag provided but not defined: -data-dri (did you mean --data-dir?)"
        );
        assert_eq!(
            parse(&["--quite-another-thing"]).unwrap_err(),
            "flag provided but not defined: -quite-another-thing"
        );
    }

    #[test]
    fn values_are_checked_against_the_kind() {
        for (args, error) in [
            (&["--name"][..], "flag needs an argument: -name"),
            (&["--pre-vote=maybe"], "invalid value \"maybe\" for flag -pre-vote: parse error"),
            (
                &["--election-timeout=1s"],
                "invalid value \"1s\" for flag -election-timeout: parse error",
            ),
            (
                &["--initial-cluster-state=foo"],
                "invalid value \"foo\" for flag -initial-cluster-state: it must be one of new, existing",
            ),
            (&["---name=a"], "bad flag syntax: ---name=a"),
            (&["name"], "'name' is not a valid flag"),
        ] {
            assert_eq!(parse(args).unwrap_err(), error);
        }
    }

    #[test]
    fn the_command_line_takes_precedence_over_the_environment_with_a_remark() {
        let mut flags = parse(&["--name=flag"]).unwrap();
        let environment = [
            ("ETCD_NAME", "variable"),
            ("ETCD_DATA_DIR", "/d"),
            ("ETCD_LOG_LEVEL", ""),
            ("ETCD_NO_SUCH", "1"),
            ("HOME", "/root"),
        ];
        let remarks =
            flags.add_environment(environment.map(|(k, v)| (k.to_owned(), v.to_owned()))).unwrap();
        assert_eq!((flags.value("name"), flags.value("data-dir")), ("flag", "/d"));
        assert_eq!(flags.value("log-level"), "info");
        let variable = |name: &str| name.to_owned();
        assert!(
            remarks.contains(&Remark::FlagOverridesVariable { variable: variable("ETCD_NAME") })
        );
        assert!(remarks.contains(&Remark::UnknownVariable { variable: variable("ETCD_NO_SUCH") }));
        assert_eq!(remarks.len(), 2);
    }

    #[test]
    fn a_variable_of_the_wrong_kind_is_named() {
        let mut flags = RawFlags::default();
        let error =
            flags.add_environment([("ETCD_PRE_VOTE".to_owned(), "maybe".to_owned())]).unwrap_err();
        assert!(
            matches!(error, ConfigError::Variable { variable, .. } if variable == "ETCD_PRE_VOTE")
        );
    }

    #[test]
    fn a_flag_without_effect_causes_a_remark() {
        let flags = parse(&["--max-wals=3", "--name=a"]).unwrap();
        let remarks: Vec<Remark> = flags.ignored_flag_remarks().collect();
        assert!(matches!(remarks[..], [Remark::Ignored { flag: "max-wals", .. }]));
    }
}
