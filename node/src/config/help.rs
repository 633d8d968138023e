//! The texts of `--help` and `--version`.

use std::fmt::Write;

use super::{
    ETCD_VERSION,
    flags::{FLAGS, FlagEffect},
};

/// Returns the text of `--help`.
#[must_use]
pub fn help() -> String {
    let mut out = String::from(
        "Usage:\n\n  muster-node [flags]\n    Start a member of a replicated key-value store that speaks etcd's v3 API.\n\n\
         \x20 muster-node data status DIR [--json]\n    Show the cluster and member of a data directory, where its log ends, and its problems.\n\n\
         \x20 muster-node snapshot save|status|restore FILE [flags]\n    Save, examine and restore snapshots, in etcd's format: see muster-node snapshot --help.\n\n\
         \x20 muster-node compare --source URLS --target URLS [flags]\n    Compare every key of two running clusters: see muster-node compare --help.\n\n\
         \x20 muster-node move FILE --source URLS --target URLS --initial-cluster NAME=URL,... [flags]\n    Move a running cluster's data to another cluster, step by step: see muster-node move --help.\n\n\
         \x20 muster-node --version\n    Show the version.\n\n\
         A first member, alone:\n\n\
         \x20 muster-node --name one --data-dir ./one\n\n\
         The first of three (the others likewise, with the same --initial-cluster):\n\n\
         \x20 muster-node --name one --data-dir ./one \\\n\
         \x20   --listen-peer-urls http://10.0.0.1:2380 --initial-advertise-peer-urls http://10.0.0.1:2380 \\\n\
         \x20   --listen-client-urls http://10.0.0.1:2379 --advertise-client-urls http://10.0.0.1:2379 \\\n\
         \x20   --initial-cluster one=http://10.0.0.1:2380,two=http://10.0.0.2:2380,three=http://10.0.0.3:2380\n\n\
         When the other members are lost for good (a new cluster, with a new id, from this member's data):\n\n\
         \x20 muster-node --name one --data-dir ./one --force-new-cluster\n\n\
         Each flag may also be given as a variable: --data-dir as ETCD_DATA_DIR. The command line overrides the variable.\n\
         With --config-file only the file is used.\n\
         A flag may be written with one dash or two, its value behind a space or an equals sign; given twice,\n\
         the last one counts.\n",
    );
    let mut group = "";
    for flag in FLAGS.iter().filter(|flag| !matches!(flag.effect, FlagEffect::Ignored(_))) {
        if flag.group != group {
            group = flag.group;
            let _ = write!(out, "\n{group}:\n");
        }
        let _ = match (flag.value, flag.default) {
            ("", default) => write!(out, "  --{} (default {default})", flag.name),
            (value, "") => write!(out, "  --{} {value}", flag.name),
            (value, default) => write!(out, "  --{} {value} (default {default})", flag.name),
        };
        let _ = write!(out, "\n        {}", flag.help);
        let _ = match flag.effect {
            FlagEffect::Unsupported(instead) => writeln!(out, " Not supported: {instead}."),
            FlagEffect::Effective | FlagEffect::Ignored(_) => writeln!(out),
        };
    }
    out.push_str(
        "\nAccepted for the sake of scripts, without effect (the log says so when one is given):\n",
    );
    for flag in FLAGS {
        if let FlagEffect::Ignored(because) = flag.effect {
            let _ = writeln!(out, "  --{}: {because}", flag.name);
        }
    }
    out.push_str(
        "\nFlags that etcd once called --experimental-NAME are taken under both names.\n\n\
         Exit codes: 0 stopped in order, 1 failed, 2 the command line is wrong, 3 do not restart: this member\n\
         was removed from its cluster, or its data directory is not its own.\n",
    );
    out
}

/// Returns the text of `--version`, whose first line etcd's tools parse.
#[must_use]
pub fn version() -> String {
    format!(
        "etcd Version: {ETCD_VERSION}\nMuster Node: {}\nOS/Arch: {}/{}\n",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::OS,
        std::env::consts::ARCH,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_can_read_the_version() {
        assert!(version().starts_with("etcd Version: 3.6.0\nMuster Node: 0.1.0\n"));
    }

    #[test]
    fn the_help_says_which_flags_are_not_supported() {
        let help = help();
        let mut lines = help.lines();
        for name in [
            "discovery",
            "discovery-srv",
            "discovery-token",
            "discovery-endpoints",
            "auto-tls",
            "peer-client-cert-file",
            "peer-client-key-file",
            "peer-auto-tls",
            "proxy",
        ] {
            let is_head = |line: &str| line.split_whitespace().next() == Some(&format!("--{name}"));
            assert!(lines.any(is_head), "{name}");
            let text = lines.next().unwrap();
            assert!(text.contains("Not supported: "), "{name}: {text}");
        }
        let refused = help.matches("Not supported: ").count();
        assert_eq!(refused, 9);
    }

    #[test]
    fn the_help_names_every_flag_once() {
        let help = help();
        for flag in FLAGS {
            let shown = help
                .lines()
                .filter(|line| {
                    line.trim_start()
                        .strip_prefix("--")
                        .and_then(|rest| rest.strip_prefix(flag.name))
                        .is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', ':']))
                })
                .filter(|line| line.starts_with("  --"))
                .count();
            assert_eq!(shown, 1, "{}", flag.name);
        }
    }
}
