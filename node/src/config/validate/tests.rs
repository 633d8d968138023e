use std::time::Duration;

use node_state::identity::InitialCluster;

use super::super::{AutoCompaction, CommandError, Invocation, Remark, parse};
use crate::config::Config;

fn config(args: &[&str]) -> Result<Config, String> {
    match parse(args.iter().map(ToString::to_string), []) {
        Ok(Invocation::Run(config, _)) => Ok(*config),
        Ok(other) => panic!("it asks for {other:?}"),
        Err(CommandError::Config(error)) => Err(error.to_string()),
        Err(CommandError::Usage(error)) => panic!("{error}"),
    }
}

/// Returns the first configuration of the cluster that these flags give a member without a log.
fn bootstrap(args: &[&str]) -> Result<InitialCluster, String> {
    config(args)?.first_configuration().map_err(|error| error.to_string())
}

const THREE: &str = "a=http://h1:2380,b=http://h2:2380,c=http://h3:2380";

#[test]
fn without_flags_the_configuration_is_etcds_single_node() {
    let config = config(&[]).unwrap();
    assert_eq!(config.name, "default");
    assert_eq!(config.data_dir.to_str(), Some("default.etcd"));
    assert_eq!(config.listen_client_urls[0].address().to_string(), "127.0.0.1:2379");
    // etcd computes the same ids for a node that is started without flags.
    let initial = config.first_configuration().unwrap();
    assert_eq!(initial.members[0].id.to_string(), "8e9e05c52164694d");
    assert_eq!(initial.id.to_string(), "cdf818194e3a8c32");
}

#[test]
fn a_quota_above_etcds_suggestion_causes_a_remark() {
    let remarks = |bytes: i64| match parse([format!("--quota-backend-bytes={bytes}")], []) {
        Ok(Invocation::Run(_, remarks)) => remarks,
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
fn automatic_compaction_is_configured_as_in_etcd() {
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
        (
            vec!["--cert-file=x", CLIENTS_OVER_TLS, ADVERTISED],
            "--cert-file and --key-file must be given together",
        ),
        (
            vec!["--peer-client-cert-auth", PEERS_OVER_TLS],
            "--peer-client-cert-auth needs --peer-trusted-ca-file",
        ),
        (
            vec!["--peer-cert-file=c", "--peer-key-file=k", PEERS_OVER_TLS],
            "--peer-cert-file needs --peer-trusted-ca-file",
        ),
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
fn an_unusable_initial_cluster_fails_only_a_first_start() {
    for list in ["a=http://h1:1,b=http://h1:1", "other=https://h9:1", THREE] {
        assert!(config(&["--name=d", "--initial-cluster", list]).is_ok(), "{list}");
        assert!(bootstrap(&["--name=d", "--initial-cluster", list]).is_err(), "{list}");
    }
}

const CLIENTS_OVER_TLS: &str = "--listen-client-urls=https://127.0.0.1:1";
const ADVERTISED: &str = "--advertise-client-urls=https://h:1";
const PEERS_OVER_TLS: &str = "--listen-peer-urls=https://127.0.0.1:2";

/// Returns the remarks about a configuration of these flags and a name.
fn remarks(args: &[&str]) -> Vec<Remark> {
    match parse([&["--name=x"], args].concat().iter().map(ToString::to_string), []) {
        Ok(Invocation::Run(_, remarks)) => remarks,
        other => panic!("{args:?}: {other:?}"),
    }
}

#[test]
fn unsupported_flags_that_would_have_an_effect_are_refused() {
    for args in [
        vec!["--discovery=https://d/t"],
        vec!["--discovery-token=t"],
        vec!["--auto-tls", CLIENTS_OVER_TLS, ADVERTISED],
        vec!["--auto-tls", "--listen-metrics-urls=https://127.0.0.1:1"],
        vec!["--peer-auto-tls", PEERS_OVER_TLS],
        vec!["--peer-auto-tls", "--initial-advertise-peer-urls=https://h:1"],
        vec!["--peer-client-cert-file=c", PEERS_OVER_TLS],
        vec!["--peer-client-key-file=k", PEERS_OVER_TLS],
        vec!["--proxy=on"],
    ] {
        assert!(config(&args).unwrap_err().contains("is not supported: "), "{args:?}");
    }
    assert!(config(&["--auto-tls=false", "--proxy=off"]).is_ok());
}

#[test]
fn flags_for_generated_certificates_are_ignored_where_none_is_needed() {
    let clients = [CLIENTS_OVER_TLS, ADVERTISED, "--cert-file=c", "--key-file=k"];
    let peers =
        [PEERS_OVER_TLS, "--peer-cert-file=c", "--peer-key-file=k", "--peer-trusted-ca-file=ca"];
    for (flag, urls, because) in [
        ("auto-tls", &[][..], "no client URL is https"),
        ("auto-tls", &clients[..], "a certificate is given"),
        ("peer-auto-tls", &[], "no peer URL is https"),
        ("peer-auto-tls", &peers, "a certificate is given"),
    ] {
        let auto = format!("--{flag}=true");
        let args = [&[auto.as_str()], urls].concat();
        assert_eq!(remarks(&args), [Remark::Ignored { flag, because }]);
    }
    let same = ["--peer-client-cert-file=c", "--peer-client-key-file=k"];
    assert_eq!(remarks(&[&peers[..], &same].concat()).len(), 2);
}

#[test]
fn flags_of_tls_have_no_effect_while_all_urls_are_http() {
    for flag in ["--cert-file=c", "--client-cert-auth", "--client-crl-file=l"] {
        let name = flag.trim_start_matches('-').split('=').next().unwrap();
        let found = remarks(&[flag]);
        let is_named = matches!(found[..], [Remark::Ignored { flag, .. }] if flag == name);
        assert!(is_named, "{flag}: {found:?}");
        assert!(config(&[flag]).unwrap().client_tls.is_none());
    }
    let without_ca = ["--peer-cert-file=c", "--peer-key-file=k", "--peer-client-cert-auth"];
    assert_eq!(remarks(&without_ca).len(), 3);
    assert!(config(&without_ca).unwrap().peer_tls.is_none());
    // With the CA file, the set of files is complete. So it is kept although all URLs are http:
    // other members may get https URLs later.
    let complete = [&without_ca[..], &["--peer-trusted-ca-file=ca"]].concat();
    assert!(config(&complete).unwrap().peer_tls.is_some());
}

#[test]
fn max_request_bytes_is_limited_to_the_largest_log_entry() {
    let limit = 10 * 1024 * 1024;
    for (given, held, is_remarked) in [
        ("1572864", 1_572_864, false),
        ("10485760", limit, false),
        ("10485761", limit, true),
        ("33554432", limit, true),
        ("10737418240", limit, true),
        ("0x100000", 1 << 20, false),
    ] {
        let flag = format!("--max-request-bytes={given}");
        assert_eq!(config(&[&flag]).unwrap().max_request_bytes, held, "{given}");
        let said = remarks(&[&flag]);
        let found = matches!(said[..], [Remark::LargeRequests { .. }]);
        assert_eq!(found, is_remarked, "{given}: {said:?}");
    }
}

#[test]
fn cipher_suites_that_only_go_has_are_ignored_while_another_is_left() {
    let tls = [CLIENTS_OVER_TLS, ADVERTISED, "--cert-file=c", "--key-file=k"];
    let both =
        "--cipher-suites=TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,TLS_RSA_WITH_AES_256_GCM_SHA384";
    let args = [&tls[..], &[both]].concat();
    assert_eq!(config(&args).unwrap().tls_policy.cipher_suites.len(), 1);
    let passed_over = vec!["TLS_RSA_WITH_AES_256_GCM_SHA384".to_owned()];
    assert_eq!(remarks(&args), [Remark::CipherSuites(passed_over)]);
    let none = "--cipher-suites=TLS_RSA_WITH_AES_256_GCM_SHA384";
    let error = config(&[&tls[..], &[none]].concat()).unwrap_err();
    assert!(error.contains("names no suite that this program offers"), "{error}");
    // A suite of TLS 1.3 can't be offered if the highest version is 1.2.
    let v13 = ["--cipher-suites=TLS_AES_128_GCM_SHA256", "--tls-max-version=TLS1.2"];
    assert!(config(&[&tls[..], &v13].concat()).is_err());
    assert!(config(&[&tls[..], &v13[..1]].concat()).is_ok());
    // Without an https client URL, even a list without a supported suite is accepted.
    assert!(config(&[none]).is_ok());
}

#[test]
fn empty_elements_of_the_initial_cluster_are_ignored() {
    let list = ",a=http://h1:2380,,b=http://h2:2380, ,";
    let config = config(&["--name=a", "--initial-cluster", list]).unwrap();
    let names: Vec<&str> = config.initial_cluster.iter().map(|(n, _)| n.as_str()).collect();
    assert_eq!(names, ["a", "b"]);
    for (list, name) in [("a=http://h1:2380,b", "b"), ("a=,b=http://h2:2380", "a"), ("=", "")] {
        let error = super::super::restored_cluster("a", list, "http://h1:2380", "t").unwrap_err();
        assert_eq!(error.to_string(), format!("empty URL given for \"{name}\""));
    }
    let restored =
        super::super::restored_cluster("a", "a=http://h1:2380,", "http://h1:2380", "t").unwrap();
    assert_eq!(restored.members.len(), 1);
}

#[test]
fn an_empty_list_of_urls_leaves_the_default_in_place() {
    let config = config(&["--listen-client-urls=", "--advertise-client-urls=", "--log-level="]);
    let config = config.unwrap();
    assert_eq!(config.listen_client_urls[0].to_string(), "http://localhost:2379");
    assert_eq!(config.advertised_clients(), ["http://localhost:2379"]);
    assert_eq!(config.log_level, tracing::Level::INFO);
}

#[test]
fn log_levels_may_be_written_in_capitals() {
    for (text, level) in [
        ("WARN", tracing::Level::WARN),
        ("Warning", tracing::Level::WARN),
        ("DEBUG", tracing::Level::DEBUG),
        ("panic", tracing::Level::ERROR),
    ] {
        assert_eq!(config(&[&format!("--log-level={text}")]).unwrap().log_level, level, "{text}");
    }
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
fn a_revocation_list_without_a_trusted_ca_is_refused() {
    let crl =
        [CLIENTS_OVER_TLS, ADVERTISED, "--cert-file=c", "--key-file=k", "--client-crl-file=l"];
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
    fn a_document_for_another_member_or_cluster_is_refused() {
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
fn an_http_url_beside_a_certificate_causes_a_remark() {
    let remarks = |extra: &[&str]| {
        let urls = ["--name=x", "--listen-client-urls=http://127.0.0.1:1,https://127.0.0.1:2"];
        let files = ["--advertise-client-urls=https://h:1", "--cert-file=c", "--key-file=k"];
        let args = urls.iter().chain(&files).chain(extra).map(ToString::to_string);
        match parse(args, []) {
            Ok(Invocation::Run(_, remarks)) => remarks,
            other => panic!("{other:?}"),
        }
    };
    let flag = "listen-client-urls";
    let plain = Remark::Plaintext { flag, url: "http://127.0.0.1:1".to_owned() };
    assert_eq!(remarks(&[]), [plain]);
    assert!(remarks(&["--listen-client-urls=https://127.0.0.1:2"]).is_empty());
}
