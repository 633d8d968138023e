//! Describes the flags for manual pages and completions. Flags are not parsed by this description,
//! because they have etcd's forms, which clap doesn't know.

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, Command};

use super::flags::{FLAGS, Flag, FlagEffect, FlagKind};

/// Adds the flags to a description of the other commands. Flags without an effect are left out.
#[must_use]
pub fn describe(commands: Command) -> Command {
    let flags = FLAGS.iter().filter(|flag| flag.effect == FlagEffect::Effective);
    commands
        .version(env!("CARGO_PKG_VERSION"))
        .about("Member of a replicated key-value store that speaks etcd's v3 API")
        .long_about(
            "Runs a member of a replicated key-value store that speaks etcd's v3 API. Each flag may also \
             be given as a variable: --data-dir as ETCD_DATA_DIR. The command line overrides the \
             variable. With --config-file only the file is used.",
        )
        .subcommand_required(false)
        .args(flags.map(describe_flag))
}

fn describe_flag(flag: &'static Flag) -> Arg {
    let arg = Arg::new(flag.name).long(flag.name).help(flag.help).help_heading(flag.group);
    let arg = match (flag.kind, flag.value) {
        (FlagKind::Bool, _) | (_, "") => return arg.action(ArgAction::SetTrue),
        (FlagKind::OneOf(values) | FlagKind::OneOfAnyCase(values), value) => {
            arg.value_name(value).value_parser(PossibleValuesParser::new(values))
        }
        (_, value) => arg.value_name(value),
    };
    match flag.default {
        "" => arg,
        default => arg.default_value(default),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_description_is_consistent() {
        describe(Command::new("muster-node")).debug_assert();
    }
}
