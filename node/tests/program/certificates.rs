//! Tests with client certificates as operators make them with openssl. All of them are accepted by
//! Go. The tests check which ones this node accepts, and how its log explains a refusal. The client
//! is etcdctl.

use std::path::Path;
use std::process::Command;

use crate::common::{TestMember, etcdctl, eventually, free_ports, report_skip};

const EC: &str = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
const SIGNED: &str = "openssl req -x509 -CA ca.crt -CAkey ca.key -days 30";
const NO_CA: &str = "-addext basicConstraints=critical,CA:FALSE";

/// Runs openssl commands in `dir`; false if there is no openssl.
fn openssl(dir: &Path, commands: &str) -> bool {
    for line in commands.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let output = Command::new("sh").args(["-c", line]).current_dir(dir).output().unwrap();
        if output.status.code() == Some(127) {
            report_skip("openssl is not installed");
            return false;
        }
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    }
    true
}

/// Creates a CA and a server certificate signed by it. Returns false without openssl.
fn make_ca_and_server_certificate(dir: &Path) -> bool {
    openssl(
        dir,
        &format!(
            "openssl req -x509 {EC} -keyout ca.key -out ca.crt -days 30 -subj /CN=ca
             {SIGNED} {EC} -keyout s.key -out s.crt -subj /CN=s {NO_CA} -addext \
             subjectAltName=IP:127.0.0.1"
        ),
    )
}

/// Returns a member that serves TLS and requires client certificates. It isn't started yet.
fn member(dir: &Path) -> TestMember {
    let [peer, client] = free_ports();
    let mut member =
        TestMember::new(dir, "one", peer, client, &format!("one=http://127.0.0.1:{peer}"));
    for arg in &mut member.args {
        *arg = arg
            .replace(&format!("http://127.0.0.1:{client}"), &format!("https://127.0.0.1:{client}"));
    }
    member.client_url = format!("https://127.0.0.1:{client}");
    let file = |name: &str| dir.join(name).display().to_string();
    member.args.extend([
        format!("--cert-file={}", file("s.crt")),
        format!("--key-file={}", file("s.key")),
        format!("--trusted-ca-file={}", file("ca.crt")),
        "--client-cert-auth".to_owned(),
    ]);
    member
}

/// Whether etcdctl can write with the certificate `client.crt`. Returns `None` without etcdctl. If
/// a refusal is expected, etcdctl tries for 3 s only.
fn is_let_in(dir: &Path, member: &TestMember, is_expected: bool) -> Option<bool> {
    let file = |name: &str| dir.join(name).display().to_string();
    let (ca, cert, key) = (file("ca.crt"), file("client.crt"), file("client.key"));
    let args = ["--cacert", &ca, "--cert", &cert, "--key", &key];
    let patience = ["--dial-timeout=3s", "--command-timeout=3s"];
    let patience = if is_expected { &[][..] } else { &patience[..] };
    let args = [&args[..], patience, &["put", "a", "b"]].concat();
    etcdctl(&member.client_url, &args).map(|(done, _)| done)
}

const RSA: &str = "-newkey rsa:2048 -nodes";

/// Returns openssl commands that make a client certificate. Each comes with the reason that the log
/// must give for refusing the certificate, or `None` if it must be accepted.
fn client_certificate_kinds() -> Vec<(String, Option<&'static str>)> {
    let client = "-keyout client.key -out client.crt -subj /CN=somebody";
    let usage = "-addext extendedKeyUsage";
    let request = "openssl req -new -keyout client.key -out client.csr -subj /CN=somebody";
    let sign = "openssl x509 -req -in client.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 \
                -out client.crt";
    vec![
        (format!("{SIGNED} {EC} {client} {NO_CA}"), None),
        (format!("{SIGNED} {RSA} {client} {NO_CA} {usage}=clientAuth"), None),
        (format!("{SIGNED} {EC} {client} {NO_CA} {usage}=anyExtendedKeyUsage"), None),
        (format!("{SIGNED} {EC} {client} {NO_CA} {usage}=serverAuth,anyExtendedKeyUsage"), None),
        (format!("{request} {EC}\n{sign}"), Some("X.509 version 1")),
        (format!("{SIGNED} {EC} {client}"), Some("CA:TRUE")),
        (
            format!(
                "openssl req -x509 -days 30 {EC} {client}\ncp ca.crt old.crt\ncp client.crt ca.crt"
            ),
            Some("CA:TRUE"),
        ),
        (
            format!("{SIGNED} -newkey rsa:1024 -nodes {client} {NO_CA}"),
            Some("its RSA key has 1024 bits"),
        ),
        (
            format!(
                "{SIGNED} -newkey ec -pkeyopt ec_paramgen_curve:secp521r1 -nodes {client} {NO_CA}"
            ),
            Some("ECDSA P-256 or P-384"),
        ),
        (format!("{SIGNED} {EC} {client} {NO_CA} {usage}=serverAuth"), Some("lacks clientAuth")),
    ]
}

#[test]
fn each_kind_of_client_certificate_is_accepted_or_the_log_says_why_not() {
    for (commands, refused) in client_certificate_kinds() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path();
        if !make_ca_and_server_certificate(dir) || !openssl(dir, &commands) {
            return;
        }
        let mut member = member(dir);
        // `ca.crt` may have been replaced by a self-signed client certificate. The server's CA is
        // then in `old.crt`, and the member must trust both.
        let ca = if dir.join("old.crt").exists() { "old.crt" } else { "ca.crt" };
        let both = std::fs::read_to_string(dir.join("ca.crt")).unwrap()
            + &std::fs::read_to_string(dir.join(ca)).unwrap();
        std::fs::write(dir.join("ca.crt"), both).unwrap();
        member.start();
        member.wait_ready();
        let Some(done) = is_let_in(dir, &member, refused.is_none()) else {
            return report_skip("etcdctl is not installed");
        };
        assert_eq!(done, refused.is_none(), "{commands}: {}", member.log());
        let Some(words) = refused else { continue };
        eventually("the log to say why", || member.log().contains(words));
        let log = member.log();
        assert!(!log.contains("OtherError("), "{commands}: {log}");
        if dir.join("old.crt").exists() {
            continue;
        }
        // The log suggests an openssl command. The node must accept the certificate that this
        // command makes.
        if let Some((_, command)) = log.split_once("Make one that works: ") {
            let command = command.split('"').next().unwrap();
            openssl(dir, command);
            assert_eq!(is_let_in(dir, &member, true), Some(true), "{command}: {}", member.log());
        }
    }
}

#[test]
fn an_unusable_certificate_of_the_member_ends_the_start_with_a_reason() {
    let request = "openssl req -new -keyout s.key -out s.csr -subj /CN=server";
    let sign =
        "openssl x509 -req -in s.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -out s.crt";
    for (commands, words) in [
        (format!("{request} {EC}\n{sign}"), "X.509 version 1"),
        (
            format!(
                "{SIGNED} -newkey rsa:1024 -nodes -keyout s.key -out s.crt -subj /CN=server {NO_CA}"
            ),
            "its RSA key has 1024 bits; 2048 to 8192 are needed",
        ),
        (
            format!(
                "{SIGNED} -newkey ec -pkeyopt ec_paramgen_curve:secp521r1 -nodes -keyout s.key -out \
                 s.crt -subj /CN=server {NO_CA}"
            ),
            "its key is of the kind ECDSA with P-521",
        ),
    ] {
        let root = tempfile::tempdir().unwrap();
        if !make_ca_and_server_certificate(root.path()) || !openssl(root.path(), &commands) {
            return;
        }
        let mut member = member(root.path());
        member.start();
        assert_ne!(member.exit_code(), Some(0));
        let log = member.log();
        assert!(log.contains(words) && log.contains("CN=server") && log.contains("s.crt"), "{log}");
        assert!(log.contains("Make one that works: openssl req"), "{log}");
    }
}

#[test]
fn an_unusable_ca_is_reported_at_the_start() {
    let root = tempfile::tempdir().unwrap();
    let weak = "openssl req -x509 -newkey rsa:1024 -nodes -keyout w.key -out w.crt -subj /CN=weak
                cat w.crt >> ca.crt";
    if !make_ca_and_server_certificate(root.path()) || !openssl(root.path(), weak) {
        return;
    }
    let mut member = member(root.path());
    member.start();
    member.wait_ready();
    let log = member.log();
    assert!(log.contains("nobody with a certificate of this CA is let in"), "{log}");
    assert!(log.contains("CN=weak") && log.contains("1024 bits"), "{log}");
}
