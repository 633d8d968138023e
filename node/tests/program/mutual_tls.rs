//! Three members with a member document: mutual TLS everywhere, and only the keys in the document
//! are accepted.

use std::path::Path;

use crate::common::{TestMember, ca::OperatorCa, etcdctl, eventually, free_ports};
use rcgen::{KeyPair, PublicKeyData};

struct TlsCluster {
    members: Vec<TestMember>,
    peer_ca: OperatorCa,
    client_ca: OperatorCa,
    root: tempfile::TempDir,
}

/// Returns three members with the files that an agent would write, not started yet.
fn three_tls_members(expired_peer_leaf: Option<usize>) -> TlsCluster {
    let root = tempfile::tempdir().unwrap();
    let (peer_ca, client_ca) = (OperatorCa::new(), OperatorCa::new());
    let ports: [u16; 6] = free_ports();
    let names = ["a", "b", "c"];
    let keys: Vec<KeyPair> = (0..3).map(|_| KeyPair::generate().unwrap()).collect();
    let url = |n: usize| format!("https://127.0.0.1:{}", ports[n]);
    let hash = "ab".repeat(32);
    let records: Vec<serde_json::Value> = (0..3)
        .map(|n| {
            let spki = node_state::identity::NodeKey::of_spki(&keys[n].subject_public_key_info());
            serde_json::json!({
                "seat": n + 1, "name": names[n], "peer_urls": [url(n)], "client_urls": [url(n + 3)],
                "incarnation": format!("{n:032x}"), "node_key": spki.to_string(),
            })
        })
        .collect();
    let initial: Vec<String> = (0..3).map(|n| format!("{}={}", names[n], url(n))).collect();
    let members = (0..3)
        .map(|n| {
            let dir = root.path().join(format!("tls-{n}"));
            std::fs::create_dir(&dir).unwrap();
            let file = |name: &str, text: &str| {
                let path = dir.join(name);
                std::fs::write(&path, text).unwrap();
                path.display().to_string()
            };
            let key = file("node.key", &keys[n].serialize_pem());
            let document = serde_json::json!({
                "version": 1, "document": hash, "cluster_name": "demo", "self": {"seat": n + 1},
                "members": records,
            });
            let mut member =
                TestMember::new(root.path(), names[n], ports[n], ports[n + 3], &initial.join(","));
            for arg in &mut member.args {
                *arg = arg.replace("=http://", "=https://");
            }
            member.client_url = url(n + 3);
            member.args.extend([
                format!("--initial-cluster-token={hash}"),
                format!("--muster-document={}", file("document.json", &document.to_string())),
                format!("--cert-file={}", file("client.crt", &client_ca.leaf(&keys[n], false))),
                format!("--key-file={key}"),
                format!("--trusted-ca-file={}", file("client-ca.crt", &client_ca.pem)),
                "--client-cert-auth".to_owned(),
                format!(
                    "--peer-cert-file={}",
                    file("peer.crt", &peer_ca.leaf(&keys[n], expired_peer_leaf == Some(n)))
                ),
                format!("--peer-key-file={key}"),
                format!("--peer-trusted-ca-file={}", file("peer-ca.crt", &peer_ca.pem)),
                "--peer-client-cert-auth".to_owned(),
            ]);
            // The test writes the incarnation marker itself, as the agent does before it starts the
            // node.
            std::fs::create_dir(&member.data_dir).unwrap();
            let marker = member.data_dir.join("muster-incarnation");
            std::fs::write(marker, format!("{n:032x}\n")).unwrap();
            member
        })
        .collect();
    TlsCluster { members, peer_ca, client_ca, root }
}

impl TlsCluster {
    fn start(&mut self) {
        self.members.iter_mut().for_each(TestMember::start);
        self.members.iter_mut().for_each(TestMember::wait_ready);
    }

    fn tls(&self, n: usize) -> std::path::PathBuf {
        self.root.path().join(format!("tls-{n}"))
    }

    /// Runs etcdctl with a client certificate. Returns `None` if it isn't installed.
    fn etcdctl(&self, n: usize, args: &[&str]) -> Option<(bool, String)> {
        let file = |dir: &Path, name: &str| dir.join(name).display().to_string();
        let dir = self.tls(0);
        let (cert, key, ca) =
            (file(&dir, "client.crt"), file(&dir, "node.key"), file(&dir, "client-ca.crt"));
        let mut all = vec!["--cert", &cert, "--key", &key, "--cacert", &ca];
        all.extend(args);
        etcdctl(&self.members[n].client_url, &all)
    }
}

#[test]
fn members_and_clients_prove_themselves_and_the_cluster_serves() {
    let mut cluster = three_tls_members(None);
    cluster.start();
    for n in 0..3 {
        let Some((done, text)) = cluster.etcdctl(n, &["put", "k", "v"]) else { return };
        assert!(done, "{text}");
        let (done, text) = cluster.etcdctl(n, &["endpoint", "status"]).unwrap();
        assert!(done && text.contains("3.6.0"), "{text}");
    }
    let url = cluster.members[0].client_url.clone();
    let ca = cluster.tls(0).join("client-ca.crt").display().to_string();
    let without = etcdctl(&url, &["--cacert", &ca, "--command-timeout=5s", "get", "k"]);
    assert!(!without.unwrap().0, "a client without a certificate is served");
}

#[test]
fn a_snapshot_is_saved_over_mutual_tls_only_with_a_certificate() {
    let mut cluster = three_tls_members(None);
    cluster.start();
    let file = |name: &str| cluster.tls(1).join(name).display().to_string();
    let out = cluster.root.path().join("saved.db");
    let url = &cluster.members[0].client_url;
    let (ca, cert, key) = (file("client-ca.crt"), file("client.crt"), file("node.key"));
    let peers = file("peer-ca.crt");
    let save = |more: &[&str]| {
        let args = ["snapshot", "save", "--endpoints", url, out.to_str().unwrap()];
        let output = crate::common::node_command().args(args).args(more).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for (flags, code) in [
        (&["--cacert", ca.as_str()][..], 1),
        (&["--cacert", &peers, "--cert", &cert, "--key", &key], 1),
        (&["--cacert", &ca, "--cert", &cert], 2),
        (&["--cert", &cert, "--key", &key], 2),
    ] {
        let (ended, said) = save(flags);
        assert_eq!(ended, Some(code), "{flags:?}: {said}");
        assert!(!said.is_empty() && !out.exists(), "{flags:?}: {said}");
    }
    let (ended, said) = save(&["--cacert", &ca, "--cert", &cert, "--key", &key]);
    assert_eq!(ended, Some(0), "{said}");
    let status =
        crate::common::node_command().args(["snapshot", "status"]).arg(&out).output().unwrap();
    assert!(status.status.success());
}

#[test]
fn an_expired_certificate_of_a_bound_key_only_causes_an_alarm() {
    let mut cluster = three_tls_members(Some(2));
    cluster.start();
    let said =
        |member: &TestMember| member.log().contains("a peer's certificate is outside its validity");
    eventually("the others say so", || cluster.members[..2].iter().all(said));
}

/// Gives a running cluster's member another key. Asserts that the others refuse the member and go
/// on serving.
fn refuses_another_key(cluster: &mut TlsCluster) {
    cluster.members[2].kill();
    let other = KeyPair::generate().unwrap();
    let dir = cluster.tls(2);
    std::fs::write(dir.join("node.key"), other.serialize_pem()).unwrap();
    std::fs::write(dir.join("peer.crt"), cluster.peer_ca.leaf(&other, false)).unwrap();
    // The node doesn't start if its client certificate and its peer certificate have different
    // keys. So replace the client certificate, too.
    std::fs::write(dir.join("client.crt"), cluster.peer_ca.leaf(&other, false)).unwrap();
    let ready = cluster.members[2].log().matches("ready to serve").count();
    cluster.members[2].start();
    eventually("the others refuse it", || {
        cluster.members[..2].iter().all(|m| m.log().contains("its key is not the one bound"))
    });
    assert_eq!(cluster.members[2].log().matches("ready to serve").count(), ready);
    // If the killed member was the leader, the first put times out and a later one succeeds.
    eventually("the others serve", || {
        let put = ["--command-timeout=1s", "put", "still", "serving"];
        cluster.etcdctl(0, &put).is_none_or(|(done, _)| done)
    });
}

#[test]
fn a_member_of_the_right_ca_with_another_key_is_refused() {
    let mut cluster = three_tls_members(None);
    cluster.start();
    refuses_another_key(&mut cluster);
}

#[test]
fn bindings_stay_in_force_without_the_document() {
    let mut cluster = three_tls_members(None);
    cluster.start();
    for member in &mut cluster.members {
        assert_eq!(member.stop(), Some(0));
        member.args.retain(|arg| !arg.starts_with("--muster-document"));
    }
    cluster.start();
    refuses_another_key(&mut cluster);
}

#[test]
fn a_member_with_another_incarnation_than_in_the_document_never_starts() {
    let mut cluster = three_tls_members(None);
    let marker = cluster.members[1].data_dir.join("muster-incarnation");
    std::fs::write(marker, format!("{}\n", "f".repeat(32))).unwrap();
    cluster.members[1].start();
    assert_eq!(cluster.members[1].exit_code(), Some(3));
    assert!(!cluster.members[1].data_dir.join("member/wal").exists());
}

/// Common name of the certificate, arguments of etcdctl, and the start of a line of its expected
/// output. The output is that of stock etcd 3.7.3.
const CASES_BY_NAME: &[(&str, &str, &str)] = &[
    ("root", "user add root --no-password", "User root created"),
    ("root", "user grant-role root root", "Role root is granted to user root"),
    ("root", "role add r", "Role r created"),
    ("root", "role grant-permission r readwrite b", "Role r updated"),
    ("root", "user add some:s", "User some created"),
    ("root", "user grant-role some r", "Role r is granted to user some"),
    ("root", "user add admin:a", "User admin created"),
    ("root", "user grant-role admin root", "Role root is granted to user admin"),
    ("root", "put x v", "OK"),
    ("root", "auth enable", "Authentication Enabled"),
    ("root", "get x", "x"),
    ("root", "user list", "admin"),
    ("root", "compact 1", "compacted revision 1"),
    ("some", "put b v", "OK"),
    ("some", "get x", "Error: etcdserver: permission denied"),
    ("some", "user list", "Error: etcdserver: permission denied"),
    ("some", "user get some", "Roles: r"),
    ("who", "get b", "Error: etcdserver: permission denied"),
    ("who", "user list", "Error: etcdserver: user name not found"),
    ("who", "lease list", "found 0 leases"),
    ("", "get b", "Error: etcdserver: permission denied"),
    ("", "user list", "Error: etcdserver: user name is empty"),
    // A password takes precedence over a certificate.
    ("root", "--user some:s get x", "Error: etcdserver: permission denied"),
    ("some", "--user admin:a get x", "x"),
    ("root", "auth disable", "Authentication Disabled"),
    ("who", "get x", "x"),
];

#[test]
fn a_certificate_names_its_user_at_every_member() {
    let mut cluster = three_tls_members(None);
    cluster.start();
    let dir = cluster.tls(0);
    let key = KeyPair::generate().unwrap();
    std::fs::write(dir.join("user.key"), key.serialize_pem()).unwrap();
    let file = |name: &str| dir.join(name).display().to_string();
    let (ca, shown, key_file) = (file("client-ca.crt"), file("user.crt"), file("user.key"));
    for (n, (name, said, expected)) in CASES_BY_NAME.iter().enumerate() {
        let named = (!name.is_empty()).then_some(*name);
        std::fs::write(&shown, cluster.client_ca.named(&key, named)).unwrap();
        let mut words = vec!["--cert", &shown, "--key", &key_file, "--cacert", &ca];
        words.extend(said.split(' '));
        let Some((_, text)) = etcdctl(&cluster.members[n % 3].client_url, &words) else { return };
        let as_expected = text.lines().any(|line| line.starts_with(expected));
        assert!(as_expected, "{name}: {said}: {text}");
    }
}
