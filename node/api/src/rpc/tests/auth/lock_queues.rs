//! Tests of permissions for locks and elections: their operations on keys need the client's
//! permission.

use node_proto::etcdserverpb::AuthUserRevokeRoleRequest;
use node_proto::v3electionpb::election_client::ElectionClient;
use node_proto::v3electionpb::{
    CampaignRequest, LeaderKey, LeaderRequest, ProclaimRequest, ResignRequest,
};
use node_proto::v3lockpb::lock_client::LockClient;
use node_proto::v3lockpb::{LockRequest, UnlockRequest};

use super::*;

/// Makes a node on which the user `some` may read and write keys below `e`, read keys below `f`,
/// and write keys below `g`. Below `h`, that user may use a single key.
async fn with_queue_users() -> (ApiTestNode, [String; 3]) {
    let (node, tokens) = ApiTestNode::with_users().await;
    let root = Some(tokens[0].as_str());
    for (kind, from, to) in [
        (Type::Readwrite, "e/", "e0"),
        (Type::Read, "f/", "f0"),
        (Type::Write, "g/", "g0"),
        (Type::Readwrite, "h/1", ""),
    ] {
        node.allow_range(root, "little", kind, (from, to)).await;
    }
    let mut leases = LeaseClient::new(node.channel.clone());
    for id in [1, 2] {
        leases.lease_grant(with_token(root, LeaseGrantRequest { id, ttl: 1_000 })).await.unwrap();
    }
    (node, tokens)
}

/// Changes the code of an expected error to `Unknown`, as the Lock and Election services do.
fn unknown((_, text): CodeAndText) -> CodeAndText {
    (Code::Unknown, text)
}

impl ApiTestNode {
    fn elections(&self) -> ElectionClient<Channel> {
        ElectionClient::new(self.channel.clone())
    }

    async fn lock(&self, token: Option<&str>, name: &str, lease: i64) -> Result<(), CodeAndText> {
        let asked = with_token(token, LockRequest { name: bytes(name), lease });
        result(LockClient::new(self.channel.clone()).lock(asked).await).map(|_| ())
    }

    async fn unlock(&self, token: &str, key: &str) -> Result<(), CodeAndText> {
        let asked = with_token(Some(token), UnlockRequest { key: bytes(key) });
        result(LockClient::new(self.channel.clone()).unlock(asked).await).map(|_| ())
    }

    async fn campaign(&self, token: Option<&str>, name: &str) -> Result<LeaderKey, CodeAndText> {
        let campaign = CampaignRequest { name: bytes(name), lease: 1, value: bytes("v") };
        let won = result(self.elections().campaign(with_token(token, campaign)).await)?;
        Ok(won.into_inner().leader.unwrap())
    }

    async fn leader(&self, token: &str, name: &str) -> Result<(), CodeAndText> {
        let asked = with_token(Some(token), LeaderRequest { name: bytes(name) });
        result(self.elections().leader(asked).await).map(|_| ())
    }

    async fn observe(&self, token: &str, name: &str) -> Result<Bytes, CodeAndText> {
        let asked = with_token(Some(token), LeaderRequest { name: bytes(name) });
        let mut seen = self.elections().observe(asked).await.unwrap().into_inner();
        let seen = result(seen.message().await)?.unwrap();
        Ok(seen.kv.unwrap().key)
    }

    /// Reads `key` as `root`. Returns the store's revision, and whether the key exists.
    async fn sees(&self, root: &str, key: &str) -> (i64, bool) {
        let found = self.kv().range(with_token(Some(root), range(key))).await.unwrap().into_inner();
        (found.header.unwrap().revision, !found.kvs.is_empty())
    }

    async fn until(&self, root: &str, key: &str, there: bool) {
        let seen = async {
            while self.sees(root, key).await.1 != there {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        soon(seen).await;
    }
}

#[tokio::test]
async fn a_lock_needs_read_and_write_permission_below_its_name() {
    let (node, [root, some, none]) = with_queue_users().await;
    let (before, _) = node.sees(&root, "e/1").await;
    let wrong = "abcdefghijklmnop.7";
    for (token, name, refused) in [
        (None, "e", empty()),
        (Some(wrong), "e", invalid()),
        (Some(&*none), "e", denied()),
        (Some(&some), "f", denied()),
        (Some(&some), "g", denied()),
        (Some(&some), "h", denied()),
        (Some(&some), "x", denied()),
    ] {
        let refused = unknown(refused);
        assert_eq!(node.lock(token, name, 1).await, Err(refused.clone()), "{name}");
        assert_eq!(node.campaign(token, name).await, Err(refused), "{name}");
    }
    assert_eq!(node.sees(&root, "e/1").await, (before, false), "nothing was written");
    node.lock(Some(&some), "e", 1).await.unwrap();
    assert_eq!(node.unlock(&none, "e/1").await, Err(unknown(denied())));
    assert!(node.sees(&root, "e/1").await.1);
    node.unlock(&some, "e/1").await.unwrap();
    assert!(!node.sees(&root, "e/1").await.1);
}

#[tokio::test]
async fn an_election_needs_permission_below_its_name() {
    let (node, [root, some, none]) = with_queue_users().await;
    let leader = node.campaign(Some(&some), "e").await.unwrap();
    assert_eq!(node.observe(&some, "e").await, Ok(bytes("e/1")));
    assert_eq!(node.observe(&none, "e").await, Err(unknown(denied())));
    assert_eq!(node.leader(&some, "e").await, Ok(()));
    assert_eq!(node.leader(&none, "e").await, Err(unknown(denied())));
    let nobody = (Code::Unknown, "election: no leader".to_owned());
    assert_eq!(node.leader(&some, "f").await, Err(nobody), "it may be read");
    let say = |leader: Option<LeaderKey>| ProclaimRequest { leader, value: bytes("said") };
    let told = node.elections().proclaim(with_token(Some(&none), say(Some(leader.clone())))).await;
    assert_eq!(result(told).map(|_| ()), Err(unknown(denied())));
    // A missing `leader` field is reported before the permission is checked.
    let whose = (Code::Unknown, "\"leader\" field must be provided".to_owned());
    for token in [None, Some("x.1"), Some(&*some)] {
        let told = node.elections().proclaim(with_token(token, say(None))).await;
        assert_eq!(result(told).map(|_| ()), Err(whose.clone()));
        let told = node.elections().resign(with_token(token, ResignRequest { leader: None })).await;
        assert_eq!(result(told).map(|_| ()), Err(whose.clone()));
    }
    node.elections().proclaim(with_token(Some(&some), say(Some(leader.clone())))).await.unwrap();
    let resign = ResignRequest { leader: Some(leader) };
    let told = node.elections().resign(with_token(Some(&none), resign.clone())).await;
    assert_eq!(result(told).map(|_| ()), Err(unknown(denied())));
    assert!(node.sees(&root, "e/1").await.1);
    node.elections().resign(with_token(Some(&some), resign)).await.unwrap();
    assert!(!node.sees(&root, "e/1").await.1);
}

#[tokio::test]
async fn a_waiting_client_that_loses_its_role_or_token_leaves_the_queue() {
    for (change, refused) in [(true, denied()), (false, invalid())] {
        let (node, [root, some, _]) = with_queue_users().await;
        node.lock(Some(&some), "e", 1).await.unwrap();
        let second = with_token(Some(&some), LockRequest { name: bytes("e"), lease: 2 });
        let mut locks = LockClient::new(node.channel.clone());
        let waiting = tokio::spawn(async move { result(locks.lock(second).await).map(|_| ()) });
        node.until(&root, "e/2", true).await;
        let (name, role) = ("some".to_owned(), "little".to_owned());
        if change {
            let revoke = AuthUserRevokeRoleRequest { name, role };
            node.auth().user_revoke_role(with_token(Some(&root), revoke)).await.unwrap();
        } else {
            let password = "new".to_owned();
            let change = AuthUserChangePasswordRequest { name, password, ..Default::default() };
            node.auth().user_change_password(with_token(Some(&root), change)).await.unwrap();
        }
        assert!(!waiting.is_finished(), "it is not looked at before there is something to do");
        node.unlock(&root, "e/1").await.unwrap();
        assert_eq!(soon(waiting).await.unwrap(), Err(unknown(refused)));
        // The member deletes the entry in its own name, since the user has lost the permission.
        node.until(&root, "e/2", false).await;
    }
}
