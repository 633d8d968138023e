//! Output and exit codes of runs in which the program never serves.

use crate::common::{TestMember, node_command_with_timeout};

fn run(args: &[&str], environment: &[(&str, &str)]) -> (Option<i32>, String, String) {
    let output =
        node_command_with_timeout().args(args).envs(environment.iter().copied()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_version_begins_as_etcds_does() {
    for flag in ["--version", "-version"] {
        let (code, out, _) = run(&[flag], &[]);
        assert_eq!(code, Some(0));
        assert!(out.starts_with("etcd Version: 3.6."), "{out}");
        assert!(out.contains("\nMuster Node: "), "{out}");
    }
}

#[test]
fn the_help_is_for_people_and_goes_to_standard_output() {
    let (code, out, err) = run(&["--help"], &[]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert!(out.contains("Clustering:") && out.contains("--initial-cluster NAME=URL"), "{out}");
}

#[test]
fn an_unknown_flag_is_a_usage_error_that_names_the_nearest() {
    let (code, out, err) = run(&["--data-dri=x"], &[]);
    assert_eq!((code, out.as_str()), (Some(2), ""));
    assert!(err.contains("not defined: -data-dri (did you mean --data-dir?)"), "{err}");
}

#[test]
fn an_unsupported_or_incomplete_configuration_is_a_usage_error() {
    for (args, text) in [
        (&["--listen-client-urls=http://127.0.0.1:1"][..], "--advertise-client-urls is required"),
        (&["--discovery=https://d"], "--discovery is not supported"),
        (
            &[
                "--auto-tls",
                "--listen-client-urls=https://127.0.0.1:1",
                "--advertise-client-urls=https://127.0.0.1:1",
            ],
            "--auto-tls is not supported",
        ),
        (
            &[
                "--peer-client-cert-file=c",
                "--listen-peer-urls=https://127.0.0.1:1",
                "--initial-advertise-peer-urls=https://127.0.0.1:1",
                "--initial-cluster=default=https://127.0.0.1:1",
            ],
            "--peer-client-cert-file is not supported",
        ),
        (&["--logger=capnslog"], "for flag -logger: it must be one of zap"),
        (&["--muster-document=/no/such/file"], "--muster-document"),
    ] {
        let (code, _, err) = run(args, &[]);
        assert_eq!(code, Some(2), "{args:?}: {err}");
        assert!(err.contains(text), "{args:?}: {err}");
    }
}

#[test]
fn an_invalid_config_file_is_a_usage_error_with_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("etcd.yml");
    let path = path.to_str().unwrap();
    let variable = [("ETCD_CONFIG_FILE", path)];
    let missing = format!("cannot read --config-file {path}");
    for (content, said) in [
        (None, missing.clone()),
        (Some("name: one\nelection-timeuot: 1000\n"), format!("{path}:2: unknown key")),
        (Some("election-timeout: 1\n"), "--election-timeout[1ms]".to_owned()),
        (Some("listen-client-urls: ftp://127.0.0.1:1\n"), "--listen-client-urls".to_owned()),
    ] {
        if let Some(content) = content {
            std::fs::write(path, content).unwrap();
        }
        for (code, _, err) in
            [run(&["--config-file", path], &[]), run(&["--election-timeout=2"], &variable)]
        {
            assert_eq!(code, Some(2), "{content:?}: {err}");
            assert!(err.contains(&said), "{content:?}: {err}");
        }
    }
}

#[test]
fn variables_are_read_and_the_command_line_counts_first() {
    let variable = [("ETCD_ELECTION_TIMEOUT", "1")];
    let (code, _, err) = run(&[], &variable);
    assert_eq!(code, Some(2));
    assert!(err.contains("--election-timeout[1ms]"), "{err}");
    let (_, _, err) = run(&["--election-timeout=2"], &variable);
    assert!(err.contains("--election-timeout[2ms]"), "{err}");
}

#[test]
fn no_test_gets_a_port_of_another_one() {
    let ports: [[u16; 2]; 500] = std::array::from_fn(|_| crate::common::free_ports());
    let distinct: std::collections::HashSet<u16> = ports.iter().flatten().copied().collect();
    assert_eq!(distinct.len(), 1000);
}

#[test]
fn a_port_that_is_taken_is_an_ordinary_failure() {
    let root = tempfile::tempdir().unwrap();
    let mut member = TestMember::alone(root.path());
    let address = member.client_url.strip_prefix("http://").unwrap().to_owned();
    let _taken = std::net::TcpListener::bind(address).unwrap();
    member.start();
    assert_eq!(member.exit_code(), Some(1));
    assert!(member.log().contains("cannot listen for clients"), "{}", member.log());
    assert!(!member.data_dir.join("member/wal").exists(), "nothing was begun");
}

#[test]
fn joining_a_cluster_that_does_not_answer_creates_no_log() {
    let root = tempfile::tempdir().unwrap();
    let mut member = TestMember::alone(root.path());
    member.args.push("--initial-cluster-state=existing".to_owned());
    member.start();
    assert_eq!(member.exit_code(), Some(1));
    let text = "could not retrieve cluster information from the given URLs";
    assert!(member.log().contains(text), "{}", member.log());
    assert!(!member.data_dir.join("member/wal").exists());
}
