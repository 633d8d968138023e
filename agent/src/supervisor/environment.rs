//! What the node gets of the agent's environment: nearly nothing.
//!
//! etcd takes each of its flags from `ETCD_*` variables as well. One of them, set on the host for
//! something else, would get past the flags that the agent keeps for itself: with
//! `ETCD_FORCE_NEW_CLUSTER` a member becomes a second cluster of the same identity. And whatever
//! secrets the agent was started with are none of the node's business.

use std::ffi::OsString;

/// What a program needs to find its way, and what tunes a runtime without changing what it does.
const PASSED_ON: [&str; 9] = [
    "PATH",
    "TZ",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "GOGC",
    "GOMAXPROCS",
    "GOMEMLIMIT",
    "MALLOC_ARENA_MAX",
];

/// The variables that a node is started with.
pub fn for_node() -> Vec<(OsString, OsString)> {
    chosen(std::env::vars_os())
}

/// The names of etcd's variables in the agent's own environment, which no node gets to see.
pub fn withheld() -> Vec<String> {
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    names.filter(|name| name.starts_with("ETCD_")).collect()
}

fn chosen(all: impl Iterator<Item = (OsString, OsString)>) -> Vec<(OsString, OsString)> {
    all.filter(|(name, _)| {
        // Failpoints of tests are in the launcher too; a release build has none.
        let failpoint = cfg!(debug_assertions) && name == "MUSTER_CRASH_AT";
        failpoint || PASSED_ON.iter().any(|passed| name == passed)
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neither_etcds_variables_nor_secrets_are_passed_on() {
        let all = [
            ("PATH", "/usr/bin"),
            ("ETCD_FORCE_NEW_CLUSTER", "true"),
            ("MUSTER_ADMIN_KEY", "/root/owner.pem"),
            ("AWS_SECRET_ACCESS_KEY", "x"),
            ("GOMEMLIMIT", "1GiB"),
        ];
        let chosen = chosen(all.into_iter().map(|(name, value)| (name.into(), value.into())));
        let names: Vec<_> = chosen.iter().filter_map(|(name, _)| name.to_str()).collect();
        assert_eq!(names, ["PATH", "GOMEMLIMIT"]);
    }
}
