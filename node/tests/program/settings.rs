//! Effects of flags on a running member.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;

use crate::common::{TestMember, WAIT_LIMIT, ca::OperatorCa, eventually, free_ports};
use rcgen::KeyPair;
use rustls::pki_types::{CertificateDer, pem::PemObject as _};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

/// A TLS client with one connection that stays open.
struct Connection(BufReader<StreamOwned<ClientConnection, TcpStream>>);

impl Connection {
    /// Connects with trust in `ca`, and waits for one answer.
    fn open(member: &TestMember, ca: &OperatorCa) -> Self {
        let mut roots = RootCertStore::empty();
        roots.add(certificate(&ca.pem)).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = "127.0.0.1".try_into().unwrap();
        let tls = ClientConnection::new(Arc::new(config), name).unwrap();
        let address = member.client_url.strip_prefix("https://").unwrap();
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(WAIT_LIMIT)).unwrap();
        let mut connection = Self(BufReader::new(StreamOwned::new(tls, stream)));
        connection.ask();
        connection
    }

    /// Requests `/health` on this connection.
    fn ask(&mut self) {
        self.0.get_mut().write_all(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n").unwrap();
        let (mut head, mut length) = (String::new(), 0);
        while !head.ends_with("\r\n\r\n") {
            let mut line = String::new();
            assert_ne!(self.0.read_line(&mut line).unwrap(), 0, "closed after {head:?}");
            let line = line.to_ascii_lowercase();
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
            head += &line;
        }
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).unwrap();
        assert!(head.starts_with("http/1.1 200 "), "{head}{}", String::from_utf8_lossy(&body));
    }

    /// Returns the certificate that the server presented.
    fn certificate(&self) -> CertificateDer<'static> {
        self.0.get_ref().conn.peer_certificates().unwrap()[0].clone().into_owned()
    }
}

fn certificate(pem: &str) -> CertificateDer<'static> {
    CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
}

#[test]
fn a_certificate_is_replaced_under_a_running_member() {
    let root = tempfile::tempdir().unwrap();
    let ca = OperatorCa::new();
    let (cert_file, key_file) = (root.path().join("cert"), root.path().join("key"));
    let replace = || {
        let key = KeyPair::generate().unwrap();
        let leaf = ca.leaf(&key, false);
        std::fs::write(&cert_file, &leaf).unwrap();
        std::fs::write(&key_file, key.serialize_pem()).unwrap();
        certificate(&leaf)
    };
    let first = replace();
    let mut member = TestMember::alone(root.path());
    let url = member.client_url.replace("http://", "https://");
    member.args.extend([
        format!("--listen-client-urls={url}"),
        format!("--advertise-client-urls={url}"),
        format!("--cert-file={}", cert_file.display()),
        format!("--key-file={}", key_file.display()),
    ]);
    member.client_url = url;
    member.start();
    member.wait_ready();
    let mut old = Connection::open(&member, &ca);
    assert_eq!(old.certificate(), first);

    let second = replace();
    eventually("newcomers are shown the new one", || {
        Connection::open(&member, &ca).certificate() == second
    });
    old.ask();
    assert_eq!(old.certificate(), first);

    // A certificate file that can't be used changes nothing. The log reports the file.
    std::fs::write(&cert_file, "junk").unwrap();
    let stays = "those read before stay in force";
    let before = member.log().matches(stays).count();
    eventually("it was looked at", || {
        assert_eq!(Connection::open(&member, &ca).certificate(), second);
        member.log().matches(stays).count() > before
    });
    old.ask();
}

/// Returns the log levels in the log of a run with these flags.
fn levels(flags: &[&str]) -> BTreeSet<String> {
    let root = tempfile::tempdir().unwrap();
    let mut member = TestMember::alone(root.path());
    member.args.extend(flags.iter().map(ToString::to_string));
    levels_of(&mut member)
}

fn levels_of(member: &mut TestMember) -> BTreeSet<String> {
    member.start();
    let address = member.client_url.strip_prefix("http://").unwrap().to_owned();
    eventually("it serves", || {
        TcpStream::connect(&address).is_ok() && member.http("/health").contains(r#""true""#)
    });
    assert_eq!(member.stop(), Some(0));
    let level = |line: &str| {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        value["level"].as_str().unwrap().to_owned()
    };
    member.log().lines().map(level).collect()
}

#[test]
fn no_line_below_the_configured_level_is_logged() {
    // The flag `--logger=zap` has no effect in this node, so it causes a warning.
    for (level, logged) in
        [("info", &["info", "warn"][..]), ("warn", &["warn"]), ("error", &[]), ("fatal", &[])]
    {
        let level = format!("--log-level={level}");
        let found = levels(&[&level, "--logger=zap"]);
        assert!(found.iter().eq(logged), "{level}: {found:?}");
    }
}

#[test]
fn a_config_file_overrides_all_flags() {
    let root = tempfile::tempdir().unwrap();
    let mut member = TestMember::alone(root.path());
    let mut file = String::from("log-level: warn\nlogger: zap\n");
    for arg in std::mem::take(&mut member.args) {
        let (flag, value) = arg.strip_prefix("--").unwrap().split_once('=').unwrap();
        file += &format!("{flag}: {value}\n");
    }
    let path = root.path().join("etcd.yml");
    std::fs::write(&path, file).unwrap();
    member.args = vec![format!("--config-file={}", path.display()), "--name=typed".to_owned()];
    assert_eq!(levels_of(&mut member), BTreeSet::from(["warn".to_owned()]));
    assert!(member.log().contains("--name"), "{}", member.log());
    assert!(member.data_dir.join("member").exists());
}

#[test]
fn json_is_served_apart_from_grpc_if_configured() {
    let root = tempfile::tempdir().unwrap();
    let mut member = TestMember::alone(root.path());
    let [apart, metrics] = free_ports();
    member.args.push(format!("--listen-metrics-urls=http://127.0.0.1:{metrics}"));
    member.args.push(format!("--listen-client-http-urls=http://127.0.0.1:{apart}"));
    member.args.push("--host-whitelist=one.example".to_owned());
    member.start();
    member.wait_ready();
    let refused = member.request("GET", "/version", "");
    assert!(refused.starts_with("HTTP/1.1 404 "), "{refused}");
    let ask_at = |port: u16, path: &str, host: &str| {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let ask = |host: &str| ask_at(apart, "/version", host);
    assert!(ask("one.example:2379").starts_with("HTTP/1.1 200 "), "{}", ask("one.example"));
    let other = ask("other.example");
    assert!(other.starts_with("HTTP/1.1 421 ") && other.contains("--host-whitelist"), "{other}");
    let health = ask_at(metrics, "/health", "other.example");
    assert!(health.starts_with("HTTP/1.1 200 "), "{health}");
}

#[test]
fn a_service_manager_on_an_abstract_socket_is_notified_of_start_life_and_end() {
    let root = tempfile::tempdir().unwrap();
    let mut member = TestMember::alone(root.path());
    let name = format!("muster-settings-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let manager = UnixDatagram::bind_addr(&address).unwrap();
    manager.set_read_timeout(Some(WAIT_LIMIT)).unwrap();
    let hears = || {
        let mut message = [0; 64];
        let length = manager.recv(&mut message).unwrap();
        String::from_utf8_lossy(&message[..length]).into_owned()
    };
    let node = env!("CARGO_BIN_EXE_muster-node").to_owned();
    member.program = Some("/usr/bin/env".into());
    // systemd sets `WATCHDOG_USEC`, in microseconds, if the unit has `WatchdogSec=`.
    let variables = [format!("NOTIFY_SOCKET=@{name}"), "WATCHDOG_USEC=300000".to_owned()];
    member.args.splice(0..0, variables.into_iter().chain([node]));
    member.start();
    let hears_soon =
        |message: &str| std::iter::repeat_with(hears).take(1_000).any(|said| said == message);
    assert!(hears_soon("READY=1\n"));
    for _ in 0..3 {
        assert!(hears_soon("WATCHDOG=1\n"));
    }
    assert_eq!(member.stop(), Some(0));
    assert!(hears_soon("STOPPING=1\n"));
}

#[test]
fn a_path_that_is_not_clean_is_redirected() {
    let root = tempfile::tempdir().unwrap();
    let mut member = TestMember::alone(root.path());
    member.start();
    member.wait_ready();
    for (verb, path, clean) in
        [("POST", "//v3/kv/range", "/v3/kv/range"), ("GET", "//health", "/health")]
    {
        let answer = member.request(verb, path, "{\"key\":\"aw==\"}").to_ascii_lowercase();
        assert!(answer.starts_with("http/1.1 307 "), "{answer}");
        assert!(answer.contains(&format!("location: {clean}\r\n")), "{answer}");
    }
}

#[test]
fn the_api_is_served_as_json_unless_that_is_disabled() {
    for (flag, status) in [(None, "200 OK"), (Some("--enable-grpc-gateway=false"), "404 Not Found")]
    {
        let root = tempfile::tempdir().unwrap();
        let mut member = TestMember::alone(root.path());
        member.args.extend(flag.map(ToOwned::to_owned));
        member.start();
        member.wait_ready();
        let put = member.request("POST", "/v3/kv/put", r#"{"key": "Zm9v", "value": "YmFy"}"#);
        assert!(put.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{put}");
        let got = member.request("POST", "/v3/kv/range", r#"{"key": "Zm9v"}"#);
        assert_eq!(got.contains(r#""value":"YmFy""#), flag.is_none(), "{got}");
    }
}
