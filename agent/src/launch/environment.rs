//! The short list of environment variables that the agent passes on to the node.
//!
//! etcd reads each of its flags from an `ETCD_*` variable as well. Such a variable, set on the host
//! for another purpose, would override the flags that the agent reserves for itself. For example,
//! `ETCD_FORCE_NEW_CLUSTER` turns a member into a second cluster with the first one's identity. The
//! node doesn't need the secrets in the agent's environment either.

use std::ffi::OsString;

/// Environment variables that the node inherits. With some of them, a program finds files and its
/// locale. The others tune a runtime without changing its behaviour.
const INHERITED_VARIABLES: [&str; 9] = [
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

/// Returns the environment variables with which a node is started.
pub fn node_variables() -> Vec<(OsString, OsString)> {
    inherited_variables(std::env::vars_os())
}

/// Returns the names of etcd's variables in the agent's environment. They are not passed on to the
/// node.
pub fn withheld_variables() -> Vec<String> {
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    names.filter(|name| name.starts_with("ETCD_")).collect()
}

fn inherited_variables(
    all: impl Iterator<Item = (OsString, OsString)>,
) -> Vec<(OsString, OsString)> {
    all.filter(|(name, _)| {
        // The launcher has test failpoints too, so debug builds pass on the variable
        // `MUSTER_CRASH_AT`. Release builds have no failpoints.
        let failpoint = cfg!(debug_assertions) && name == "MUSTER_CRASH_AT";
        failpoint || INHERITED_VARIABLES.iter().any(|passed| name == passed)
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
        let chosen =
            inherited_variables(all.into_iter().map(|(name, value)| (name.into(), value.into())));
        let names: Vec<_> = chosen.iter().filter_map(|(name, _)| name.to_str()).collect();
        assert_eq!(names, ["PATH", "GOMEMLIMIT"]);
    }
}
