use std::time::Duration;

use super::super::{AutoCompaction, Command, CommandError, Remark, parse};
use crate::{config::Config, identity::InitialCluster};

fn config(args: &[&str]) -> Result<Config, String> {
    match parse(args.iter().map(ToString::to_string), []) {
        Ok(Command::Run(config, _)) => Ok(*config),
        Ok(other) => panic!("it asks for {other:?}"),
        Err(CommandError::Config(error)) => Err(error.to_string()),
        Err(CommandError::Usage(error)) => panic!("{error}"),
    }
}

/// What a member without a log makes of it.
fn bootstrap(args: &[&str]) -> Result<InitialCluster, String> {
    config(args)?.initial().map_err(|error| error.to_string())
}

const THREE: &str = "a=http://h1:2380,b=http://h2:2380,c=http://h3:2380";

#[test]
fn without_any_flag_it_is_etcds_single_node() {
    let config = config(&[]).unwrap();
    assert_eq!(config.name, "default");
    assert_eq!(config.data_dir.to_str(), Some("default.etcd"));
    assert_eq!(config.listen_client_urls[0].address().to_string(), "127.0.0.1:2379");
    // etcd's well-known ids of a node that was started so.
    let initial = config.initial().unwrap();
    assert_eq!(initial.members[0].id.to_string(), "8e9e05c52164694d");
    assert_eq!(initial.id.to_string(), "cdf818194e3a8c32");
}

#[test]
fn a_quota_above_what_etcd_suggests_is_remarked_on() {
    let remarks = |bytes: i64| match parse([format!("--quota-backend-bytes={bytes}")], []) {
        Ok(Command::Run(_, remarks)) => remarks,
        other => panic!("{other:?}"),
    };
    assert_eq!(remarks(8 << 30), [Remark::DefaultName]);
    let large = (8 << 30) + 1;
    assert_eq!(remarks(large), [Remark::DefaultName, Remark::LargeQuota(large)]);
    assert_eq!(remarks(-1), [Remark::DefaultName]);
}

#[test]
fn a_name_alone_renames_the_default_cluster() {
    let config = config(&["--name=x"]).unwrap();
    assert_eq!(config.initial_cluster[0].0, "x");
    assert_eq!(config.data_dir.to_str(), Some("x.etcd"));
}

#[test]
fn members_keep_the_order_of_the_initial_cluster() {
    let config = config(&[
        "--name=b",
        "--initial-cluster",
        "c=http://h3:1,b=http://h2:1,a=http://h1:1,b=http://h2:2",
        "--initial-advertise-peer-urls=http://h2:2,http://h2:1",
    ])
    .unwrap();
    let names: Vec<&str> = config.initial_cluster.iter().map(|(n, _)| n.as_str()).collect();
    assert_eq!(names, ["c", "b", "a"]);
    assert_eq!(config.initial_cluster[1].1.len(), 2);
}

#[test]
fn what_is_compacted_unasked_is_told_as_in_etcd() {
    use AutoCompaction::{Never, Periodic, Revisions};
    let told = |args: &[&str]| config(args).map(|config| config.auto_compaction);
    assert_eq!(told(&[]), Ok(Never));
    let hours = |hours: u64| Ok(Periodic(Duration::from_secs(hours * 3600)));
    let revision = "--auto-compaction-mode=revision";
    for (mode, retention, means) in [
        ("--auto-compaction-mode=periodic", "0", Ok(Never)),
        ("--auto-compaction-mode=periodic", "", Ok(Never)),
        ("--auto-compaction-mode=periodic", "1", hours(1)),
        ("--auto-compaction-mode=periodic", "+24", hours(24)),
        ("--auto-compaction-mode=periodic", "72h", hours(72)),
        ("--auto-compaction-mode=periodic", "1h60m", hours(2)),
        (revision, "0", Ok(Never)),
        (revision, "1000", Ok(Revisions(1_000))),
        (revision, "1us", Ok(Revisions(1_000))),
    ] {
        let retention = format!("--auto-compaction-retention={retention}");
        assert_eq!(told(&[mode, &retention]), means, "{mode} {retention}");
    }
    for wrong in ["-1", "1d", "ten", "9999999999", "1 h"] {
        let refused = told(&[&format!("--auto-compaction-retention={wrong}")]).unwrap_err();
        let error = format!("--auto-compaction-retention={wrong}: give a number");
        assert!(refused.starts_with(&error), "{refused}");
    }
}

#[test]
fn contradictions_are_refused_with_etcds_texts() {
    let b = "--initial-advertise-peer-urls=http://h2:2380";
    for (args, error) in [
        (
            vec!["--listen-client-urls=http://127.0.0.1:1"],
            "--advertise-client-urls is required when --listen-client-urls is set explicitly",
        ),
        (
            vec!["--election-timeout=400"],
            "--election-timeout[400ms] should be at least as 5 times as --heartbeat-interval[100ms]",
        ),
        (
            vec!["--election-timeout=50001"],
            "--election-timeout[50001ms] is too long, and should be set less than 50000ms",
        ),
        (vec!["--heartbeat-interval=0"], "--heartbeat-interval must be >0 (set to 0ms)"),
        (
            vec!["--name=d", "--initial-cluster", THREE],
            "couldn't find local name \"d\" in the initial cluster configuration",
        ),
        (
            vec!["--name=a", "--initial-cluster", "a=http://h1:1,b=http://h1:1"],
            "initial cluster a=http://h1:1,b=http://h1:1 has duplicate url",
        ),
        (
            vec!["--name=a", "--initial-cluster", THREE, b],
            "--initial-cluster has a=http://h1:2380 but missing from --initial-advertise-peer-urls=http://h2:2380",
        ),
        (
            vec![
                "--name=b",
                "--initial-cluster",
                THREE,
                "--initial-advertise-peer-urls=http://h2:2380,http://h2:9",
            ],
            "--initial-advertise-peer-urls has http://h2:9 but missing from --initial-cluster=a=http://h1:2380,b=http://h2:2380,c=http://h3:2380",
        ),
        (vec!["--initial-cluster", "default"], "empty URL given for \"default\""),
        (
            vec!["--listen-peer-urls=http://example.com:1"],
            "--listen-peer-urls: expected IP in URL for binding (http://example.com:1)",
        ),
        (
            vec!["--initial-advertise-peer-urls=garbage"],
            "--initial-advertise-peer-urls: URL scheme must be http, https, unix, or unixs: garbage",
        ),
        (vec!["--cert-file=x"], "--cert-file and --key-file must be given together"),
        (vec!["--peer-client-cert-auth"], "--peer-client-cert-auth needs --peer-trusted-ca-file"),
        (
            vec!["--tls-min-version=TLS1.3", "--tls-max-version=TLS1.2"],
            "min version (TLS1.3) is greater than max version (TLS1.2)",
        ),
        (vec!["--cipher-suites=RC4"], "unexpected TLS cipher suite \"RC4\""),
    ] {
        assert_eq!(bootstrap(&args).unwrap_err(), error);
    }
}

#[test]
fn who_has_a_log_may_be_told_of_any_first_configuration() {
    for list in ["a=http://h1:1,b=http://h1:1", "other=https://h9:1", THREE] {
        assert!(config(&["--name=d", "--initial-cluster", list]).is_ok(), "{list}");
        assert!(bootstrap(&["--name=d", "--initial-cluster", list]).is_err(), "{list}");
    }
}

#[test]
fn what_would_have_to_work_but_does_not_is_refused_rather_than_ignored() {
    for args in [
        ["--discovery=https://d/t"],
        ["--discovery-token=t"],
        ["--auto-tls"],
        ["--peer-auto-tls"],
        ["--peer-client-cert-file=c"],
        ["--peer-client-key-file=k"],
    ] {
        assert!(config(&args).unwrap_err().contains("is not supported"), "{args:?}");
    }
    assert!(config(&["--auto-tls=false"]).is_ok());
}

#[test]
fn https_without_a_certificate_is_refused() {
    for args in [
        &["--listen-client-urls=https://127.0.0.1:1", "--advertise-client-urls=https://h:1"][..],
        &["--listen-peer-urls=https://127.0.0.1:1"],
        &["--initial-advertise-peer-urls=https://h:1"],
        &["--listen-metrics-urls=https://127.0.0.1:1"],
        &["--listen-client-http-urls=https://127.0.0.1:1"],
    ] {
        assert!(config(args).unwrap_err().contains("HTTPS scheme"), "{args:?}");
    }
}

#[test]
fn a_revocation_list_that_nobody_would_be_checked_against_is_refused() {
    let crl = ["--cert-file=c", "--key-file=k", "--client-crl-file=l"];
    assert!(config(&crl).unwrap_err().contains("--client-crl-file needs --trusted-ca-file"));
    assert!(config(&[&crl[..], &["--trusted-ca-file=ca"]].concat()).is_ok());
}

mod with_a_document {
    use super::*;

    fn start(
        change: impl Fn(&mut serde_json::Value),
        args: &[&str],
    ) -> Result<InitialCluster, String> {
        let mut document = serde_json::json!({
            "version": 1, "document": "ab".repeat(32), "cluster_name": "demo", "self": {"seat": 2},
            "members": [
                {"seat": 1, "name": "a", "peer_urls": ["https://h1:2380"], "client_urls": [],
                 "incarnation": "11".repeat(16), "node_key": "aa".repeat(32)},
                {"seat": 2, "name": "b", "peer_urls": ["https://h2:2380"], "client_urls": [],
                 "incarnation": "22".repeat(16), "node_key": "bb".repeat(32)},
            ],
        });
        change(&mut document);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), document.to_string()).unwrap();
        let path = format!("--muster-document={}", file.path().display());
        let token = format!("--initial-cluster-token={}", "ab".repeat(32));
        let mut all = vec![
            path.as_str(),
            token.as_str(),
            "--name=b",
            "--initial-cluster=a=https://h1:2380,b=https://h2:2380",
            "--initial-advertise-peer-urls=https://h2:2380",
            "--peer-cert-file=c",
            "--peer-key-file=k",
            "--peer-trusted-ca-file=ca",
        ];
        all.extend(args);
        bootstrap(&all)
    }

    #[test]
    fn bindings_reach_the_first_configuration() {
        let initial = start(|_| {}, &[]).unwrap();
        let own = initial.member("b").unwrap();
        assert_eq!(own.incarnation.unwrap().to_string(), "22".repeat(16));
        assert_eq!(own.node_key.unwrap().to_string(), "bb".repeat(32));
    }

    #[test]
    fn one_for_another_member_or_cluster_is_refused() {
        for (pointer, value) in [
            ("/self/seat", serde_json::json!(1)),
            ("/document", serde_json::json!("cd".repeat(32))),
            ("/members/0/name", serde_json::json!("z")),
            ("/members/0/peer_urls", serde_json::json!(["https://h9:2380"])),
        ] {
            let change = |document: &mut serde_json::Value| {
                *document.pointer_mut(pointer).unwrap() = value.clone();
            };
            assert!(start(change, &[]).unwrap_err().contains("--muster-document"), "{pointer}");
        }
    }

    #[test]
    fn another_order_of_seats_is_refused() {
        let turned = ["--initial-cluster=b=https://h2:2380,a=https://h1:2380"];
        assert!(start(|_| {}, &turned).unwrap_err().contains("same order"));
    }
}

#[test]
fn an_address_in_plain_beside_a_certificate_is_remarked_upon() {
    let remarks = |extra: &[&str]| {
        let urls = ["--name=x", "--listen-client-urls=http://127.0.0.1:1,https://127.0.0.1:2"];
        let files = ["--advertise-client-urls=https://h:1", "--cert-file=c", "--key-file=k"];
        let args = urls.iter().chain(&files).chain(extra).map(ToString::to_string);
        match parse(args, []) {
            Ok(Command::Run(_, remarks)) => remarks,
            other => panic!("{other:?}"),
        }
    };
    let flag = "listen-client-urls";
    let plain = Remark::Plaintext { flag, url: "http://127.0.0.1:1".to_owned() };
    assert_eq!(remarks(&[]), [plain]);
    assert!(remarks(&["--listen-client-urls=https://127.0.0.1:2"]).is_empty());
}
