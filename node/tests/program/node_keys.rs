//! Tests of the keys with which a joining member may connect. Depending on the cluster and the
//! addition, one of these is accepted:
//!
//! - the key given with the addition,
//! - the key of the member's first start,
//! - any key that the peer CA has certified.

use std::path::Path;

use crate::common::{
    TestMember, as_refs, ca::OperatorCa, eventually, free_ports, put_with_retries,
    retry_while_unhealthy, wait_same_hash, wait_settled,
};
use node_proto::etcdserverpb::MemberAddRequest;
use rcgen::{KeyPair, PublicKeyData};
use tonic::Request;

/// Members that use mutual TLS among themselves, and plain HTTP with clients.
struct KeyedCluster {
    ca: OperatorCa,
    members: Vec<TestMember>,
    root: tempfile::TempDir,
}

fn hash_of(key: &KeyPair) -> String {
    node_state::identity::NodeKey::of_spki(&key.subject_public_key_info()).to_string()
}

/// Writes `member`'s TLS files with a certificate of `ca` for `key`, and replaces those that exist.
fn give_key(ca: &OperatorCa, member: &TestMember, key: &KeyPair) {
    let dir = tls_dir(member);
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("peer.key"), key.serialize_pem()).unwrap();
    std::fs::write(dir.join("peer.crt"), ca.leaf(key, false)).unwrap();
    std::fs::write(dir.join("peer-ca.crt"), &ca.pem).unwrap();
}

fn tls_dir(member: &TestMember) -> std::path::PathBuf {
    member.data_dir.with_extension("tls")
}

/// Returns a member with a certificate for `key`, not started yet.
fn member(
    root: &Path,
    ca: &OperatorCa,
    name: &str,
    ports: [u16; 2],
    initial: &str,
    key: &KeyPair,
) -> TestMember {
    let mut member = TestMember::new(root, name, ports[0], ports[1], initial);
    for arg in &mut member.args {
        if arg.contains("peer-urls=") {
            *arg = arg.replace("http://", "https://");
        }
    }
    let dir = tls_dir(&member);
    member.args.extend([
        format!("--peer-cert-file={}", dir.join("peer.crt").display()),
        format!("--peer-key-file={}", dir.join("peer.key").display()),
        format!("--peer-trusted-ca-file={}", dir.join("peer-ca.crt").display()),
        "--peer-client-cert-auth".to_owned(),
    ]);
    give_key(ca, &member, key);
    member
}

fn write_incarnation(member: &TestMember, incarnation: &str) {
    std::fs::create_dir(&member.data_dir).unwrap();
    std::fs::write(member.data_dir.join("muster-incarnation"), format!("{incarnation}\n")).unwrap();
}

impl KeyedCluster {
    /// Starts three members. With `bound`, a member document binds each of them to its key.
    fn start(bound: bool) -> Self {
        let (root, ca) = (tempfile::tempdir().unwrap(), OperatorCa::new());
        let ports: [[u16; 2]; 3] = std::array::from_fn(|_| free_ports());
        let keys: [KeyPair; 3] = std::array::from_fn(|_| KeyPair::generate().unwrap());
        let names = ["a", "b", "c"];
        let url = |n: usize| format!("https://127.0.0.1:{}", ports[n][0]);
        let initial: Vec<String> = (0..3).map(|n| format!("{}={}", names[n], url(n))).collect();
        let new =
            |n: usize| member(root.path(), &ca, names[n], ports[n], &initial.join(","), &keys[n]);
        let mut members: Vec<TestMember> = (0..3).map(new).collect();
        if bound {
            let records: Vec<serde_json::Value> = (0..3)
                .map(|n| {
                    serde_json::json!({
                        "seat": n + 1, "name": names[n], "peer_urls": [url(n)],
                        "client_urls": [&members[n].client_url],
                        "incarnation": format!("{n:032x}"), "node_key": hash_of(&keys[n]),
                    })
                })
                .collect();
            let hash = "ab".repeat(32);
            for (n, member) in members.iter_mut().enumerate() {
                let document = serde_json::json!({
                    "version": 1, "document": hash, "cluster_name": "demo",
                    "self": {"seat": n + 1}, "members": records,
                });
                let path = tls_dir(member).join("document.json");
                std::fs::write(&path, document.to_string()).unwrap();
                member.args.push(format!("--initial-cluster-token={hash}"));
                member.args.push(format!("--muster-document={}", path.display()));
                write_incarnation(member, &format!("{n:032x}"));
            }
        }
        members.iter_mut().for_each(TestMember::start);
        members.iter_mut().for_each(TestMember::wait_ready);
        Self { ca, members, root }
    }

    /// Returns a member that is to join with `key`, neither added nor started yet.
    fn newcomer(&self, name: &str, key: &KeyPair) -> TestMember {
        let ports: [u16; 2] = free_ports();
        let known = self.members.iter().map(|member| (member.name.as_str(), peer_url(member)));
        let initial: Vec<String> = known
            .chain([(name, format!("https://127.0.0.1:{}", ports[0]))])
            .map(|(name, url)| format!("{name}={url}"))
            .collect();
        let mut new = member(self.root.path(), &self.ca, name, ports, &initial.join(","), key);
        new.args.push("--initial-cluster-state=existing".to_owned());
        new
    }

    /// Adds `new` as a voter. `metadata` may bind it to a key and an incarnation.
    async fn add(&self, new: &TestMember, metadata: &[(&'static str, &str)]) {
        retry_while_unhealthy(async || {
            let request = MemberAddRequest { peer_ur_ls: vec![peer_url(new)], is_learner: false };
            let mut request = Request::new(request);
            for (name, value) in metadata {
                request.metadata_mut().insert(*name, value.parse().unwrap());
            }
            self.members[0].cluster().member_add(request).await
        })
        .await;
    }

    /// Restarts member `n` with another key, certified by the same CA.
    fn restart_with_another_key(&mut self, n: usize) {
        assert_eq!(self.members[n].stop(), Some(0));
        give_key(&self.ca, &self.members[n], &KeyPair::generate().unwrap());
        self.members[n].start();
    }

    /// Restarts the last member with another key than the one to which it is bound. Asserts that
    /// its log names the bound key, and that the other members refuse it. Then restarts it with
    /// `key`.
    async fn assert_last_member_is_refused_until_it_has_its_key(&mut self, key: &KeyPair) {
        let last = self.members.len() - 1;
        let ready = self.members[last].log().matches("ready to serve").count();
        self.restart_with_another_key(last);
        let bound = hash_of(key);
        eventually("it is told", || {
            let log = self.members[last].log();
            log.contains(&bound) && log.contains("no peer takes it for this member")
        });
        eventually("the others refuse it", || {
            let refused =
                |member: &TestMember| member.log().contains("its key is not the one bound");
            self.members[..last].iter().all(refused)
        });
        put_with_retries(&self.members[0], "meanwhile", "x").await;
        assert_eq!(self.members[last].log().matches("ready to serve").count(), ready);
        self.members[last].kill();
        give_key(&self.ca, &self.members[last], key);
        self.members[last].start();
        self.members[last].wait_ready_after(ready);
        let revision = put_with_retries(&self.members[last], "with its key", "x").await;
        wait_same_hash(&self.members, revision).await;
    }
}

fn peer_url(member: &TestMember) -> String {
    let flag = "--initial-advertise-peer-urls=";
    member.args.iter().find_map(|arg| arg.strip_prefix(flag)).unwrap().to_owned()
}

#[tokio::test]
async fn a_newcomer_is_accepted_only_with_the_key_given_when_it_was_added() {
    let mut cluster = KeyedCluster::start(true);
    let (key, other) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    let mut new = cluster.newcomer("d", &other);
    let incarnation = "d".repeat(32);
    write_incarnation(&new, &incarnation);
    let bound = hash_of(&key);
    cluster.add(&new, &[("muster-node-key", &bound), ("muster-incarnation", &incarnation)]).await;

    new.start();
    assert_eq!(new.exit_code(), Some(1), "another key may be put right: {}", new.log());
    let log = new.log();
    assert!(log.contains(&bound) && log.contains(&hash_of(&other)), "{log}");
    assert!(
        log.contains("start it with the certificate of that key, or remove the member"),
        "{log}"
    );
    assert!(!new.data_dir.join("member").exists(), "it has begun nothing");

    give_key(&cluster.ca, &new, &key);
    new.start();
    eventually("it serves", || new.log().contains("ready to serve client requests"));
    cluster.members.push(new);
    wait_settled(&as_refs(&cluster.members)).await;
    cluster.assert_last_member_is_refused_until_it_has_its_key(&key).await;
}

#[tokio::test]
async fn a_newcomer_that_was_added_without_a_key_is_bound_by_its_first_start() {
    let mut cluster = KeyedCluster::start(true);
    let key = KeyPair::generate().unwrap();
    let mut new = cluster.newcomer("d", &key);
    cluster.add(&new, &[]).await;
    new.start();
    new.wait_ready();
    cluster.members.push(new);
    wait_settled(&as_refs(&cluster.members)).await;
    cluster.assert_last_member_is_refused_until_it_has_its_key(&key).await;
}

#[tokio::test]
async fn without_bindings_a_renewed_certificate_may_have_another_key() {
    let mut cluster = KeyedCluster::start(false);
    let keys: [KeyPair; 2] = std::array::from_fn(|_| KeyPair::generate().unwrap());
    let mut free = cluster.newcomer("d", &keys[0]);
    cluster.add(&free, &[]).await;
    free.start();
    free.wait_ready();
    cluster.members.push(free);
    // A member that is added with a key is bound to that key. This doesn't bind any other member.
    let mut bound = cluster.newcomer("e", &keys[1]);
    cluster.add(&bound, &[("muster-node-key", &hash_of(&keys[1]))]).await;
    bound.start();
    bound.wait_ready();
    cluster.members.push(bound);
    // A member that isn't bound to a key may change its key. Restart two such members with another
    // key: one of the first three members, and the first newcomer.
    for n in [0, 3] {
        cluster.restart_with_another_key(n);
        cluster.members[n].wait_ready();
        let revision = put_with_retries(&cluster.members[n], "renewed", "x").await;
        wait_same_hash(&cluster.members, revision).await;
    }
    cluster.assert_last_member_is_refused_until_it_has_its_key(&keys[1]).await;
}
