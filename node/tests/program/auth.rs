//! Users, roles and tokens on three members, managed with stock `etcdctl` through any of them.

use std::path::Path;
use std::time::Instant;

use crate::common::{TestMember, as_refs, etcdctl, start_three, wait_settled};
use node_proto::etcdserverpb::auth_client::AuthClient;
use node_proto::etcdserverpb::kv_client::KvClient;
use node_proto::etcdserverpb::{AuthenticateRequest, RangeRequest};
use tonic::{Request, Status};

/// Arguments of etcdctl, and the start of a line of its expected output. The output is that of
/// stock etcd 3.7.3.
const SCRIPT: &[(&str, &str)] = &[
    ("user add root:canary-root", "User root created"),
    ("user add u:canary-u", "User u created"),
    ("user add u:x", "Error: etcdserver: user name already exists"),
    ("role add r", "Role r created"),
    ("role add r", "Error: etcdserver: role name already exists"),
    ("role grant-permission r readwrite k", "Role r updated"),
    ("role grant-permission r read b f", "Role r updated"),
    ("role grant-permission r read f b", "Error: etcdserver: invalid auth management"),
    ("role grant-permission none read a", "Error: etcdserver: role name not found"),
    ("user grant-role u r", "Role r is granted to user u"),
    ("user grant-role u none", "Error: etcdserver: role name not found"),
    ("user grant-role none r", "Error: etcdserver: user name not found"),
    ("put x secret", "OK"),
    ("auth enable", "Authentication Enabled"),
    ("get x", "Error: etcdserver: user name is empty"),
    ("member list", "Error: etcdserver: user name is empty"),
    ("lease grant 100", "Error: failed to grant lease (etcdserver: user name is empty)"),
    ("lease list", "Error: etcdserver: user name is empty"),
    ("alarm list", "Error: etcdserver: user name is empty"),
    ("user list", "Error: etcdserver: user name is empty"),
    ("auth disable", "Error: etcdserver: user name is empty"),
    ("U get x", "Error: etcdserver: permission denied"),
    ("U get k", ""),
    ("U put k v", "OK"),
    ("U put b v", "Error: etcdserver: permission denied"),
    ("U get b f", ""),
    ("U get b g", "Error: etcdserver: permission denied"),
    ("U get k --prefix", "Error: etcdserver: permission denied"),
    ("U get c --from-key", "Error: etcdserver: permission denied"),
    ("U user list", "Error: etcdserver: permission denied"),
    ("U user get u", "Roles: r"),
    ("U user get root", "Error: etcdserver: permission denied"),
    ("U role get r", "Role r"),
    ("U role get root", "Error: etcdserver: permission denied"),
    ("U compact 2", "Error: etcdserver: permission denied"),
    ("U member remove 1", "Error: etcdserver: permission denied"),
    ("U alarm list", ""),
    ("U snapshot save /nowhere/file", "Error: "),
    ("U lease list", "found 0 leases"),
    ("wrong get k", "Error: etcdserver: authentication failed, invalid user ID or password"),
    ("R put x other", "OK"),
    ("R user delete root", "Error: etcdserver: invalid auth management"),
    ("R role delete root", "Error: etcdserver: invalid auth management"),
    ("R user revoke-role root root", "Error: etcdserver: invalid auth management"),
    ("R user revoke-role u none", "Error: etcdserver: role is not granted to the user"),
    ("R role revoke-permission r z", "Error: etcdserver: permission is not granted to the role"),
    ("R role revoke-permission r k", "Permission of key k is revoked from role r"),
    ("U put k v", "Error: etcdserver: permission denied"),
    ("R role delete r", "Role r deleted"),
    ("U get b f", "Error: etcdserver: permission denied"),
    ("R user delete u", "User u deleted"),
    ("U get b f", "Error: etcdserver: authentication failed, invalid user ID or password"),
    ("R user list", "root"),
    ("R auth disable", "Authentication Disabled"),
    ("get x", "x"),
];

/// Turns a line of [`SCRIPT`] into arguments of etcdctl. The first word may select a user: `R` is
/// root, `U` is u, and `wrong` is u with a wrong password.
fn words(said: &str) -> Vec<&str> {
    let (who, rest) = said.split_once(' ').unwrap();
    match who {
        "R" => [vec!["--user", "root:canary-root"], rest.split(' ').collect()].concat(),
        "U" => [vec!["--user", "u:canary-u"], rest.split(' ').collect()].concat(),
        "wrong" => [vec!["--user", "u:canary-root"], rest.split(' ').collect()].concat(),
        _ => said.split(' ').collect(),
    }
}

#[tokio::test]
async fn etcdctl_manages_users_and_is_refused_as_by_stock_etcd() {
    let root = tempfile::tempdir().unwrap();
    let members = start_three(root.path());
    wait_settled(&as_refs(&members)).await;
    for (n, (said, expected)) in SCRIPT.iter().enumerate() {
        // Each request goes to another member than the one before. So each change must be visible
        // on all members at once.
        let member = &members[n % members.len()];
        let Some((_, text)) = etcdctl(&member.client_url, &words(said)) else { return };
        let told = text.lines().filter(|line| !line.starts_with('{'));
        let told: Vec<&str> = told.collect();
        let is_as_expected = match *expected {
            "" => !told.iter().any(|line| line.contains("Error")),
            expected => told.iter().any(|line| line.starts_with(expected)),
        };
        assert!(is_as_expected, "{said}: {text}");
    }
    for member in &members {
        assert_no_file_contains(root.path(), "canary");
        assert!(!member.log().contains("canary"));
    }
}

/// Asserts that no file below `folder` contains `text`.
fn assert_no_file_contains(folder: &Path, text: &str) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            assert_no_file_contains(&path, text);
        } else {
            let bytes = std::fs::read(&path).unwrap_or_default();
            let found = bytes.windows(text.len()).any(|window| window == text.as_bytes());
            assert!(!found, "{} holds {text}", path.display());
        }
    }
}

async fn token(member: &TestMember) -> Result<String, Status> {
    let (name, password) = ("root".to_owned(), "canary".to_owned());
    let asked = AuthenticateRequest { name, password };
    Ok(AuthClient::new(member.channel()).authenticate(asked).await?.into_inner().token)
}

async fn read(member: &TestMember, token: &str) -> Result<(), Status> {
    let mut request = Request::new(RangeRequest { key: "k".into(), ..RangeRequest::default() });
    request.metadata_mut().insert("token", token.parse().unwrap());
    KvClient::new(member.channel()).range(request).await.map(|_| ())
}

#[tokio::test]
async fn a_token_of_one_member_is_accepted_by_every_other() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    let leader = wait_settled(&as_refs(&members)).await;
    for said in ["user add root:canary", "auth enable"] {
        let Some((done, text)) = etcdctl(&members[0].client_url, &words(said)) else { return };
        assert!(done, "{said}: {text}");
    }
    for giver in &members {
        let token = token(giver).await.unwrap();
        for taker in &members {
            read(taker, &token).await.unwrap();
        }
        let (letters, _) = token.split_once('.').unwrap();
        assert_no_file_contains(root.path(), letters);
    }
    let follower = (leader + 1) % 3;
    members[follower].kill();
    let meanwhile = token(&members[leader]).await.unwrap();
    members[follower].start();
    members[follower].wait_ready();
    read(&members[follower], &meanwhile).await.unwrap();
    members[leader].kill();
    let other = &members[follower];
    let start = Instant::now();
    let after = loop {
        match token(other).await {
            Ok(token) => break token,
            // Until an election is over, there is no leader and the request fails. It is then
            // repeated.
            Err(error) => assert!(start.elapsed() < crate::common::WAIT_LIMIT, "{error}"),
        }
    };
    read(other, &after).await.unwrap();
    assert_no_file_contains(root.path(), "canary");
}
