//! Tests of operators' orders and of the limit on pending changes.

use std::sync::Arc;

use discovery_types::admin::Admin;
use discovery_types::api::{IntentState, Outcome};
use discovery_types::digest::{MemberId, Nonce};
use discovery_types::intent::{IntentChange, Verb, VerifiedIntent};
use discovery_types::key::SigningKey;
use discovery_types::order::Order;
use discovery_types::problem::Code;
use discovery_types::role::Role;

use super::{CommittedCluster, added, code, remove};
use crate::tests::agent::{TestAgent, form};
use crate::tests::support::{TestInstallation, send};

#[tokio::test]
async fn only_operators_and_owners_can_order_a_change() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let keys: Vec<Arc<SigningKey>> = (0..3).map(|_| Arc::new(SigningKey::generate())).collect();
    let roles = [Role::Issuer, Role::Operator, Role::Auditor];
    let mut statement = world.draft(&admin, "demo", 1).await;
    for (key, role) in keys.iter().zip(roles) {
        let name = role.as_str().parse().unwrap();
        statement.admins.push(Admin { key: *key.public(), name, roles: vec![role] });
    }
    admin.put_statement(statement.cluster, &statement.sign(&world.owner)).await.unwrap();
    let token = world.token(&admin, &statement).await;
    let mut agents = vec![TestAgent::new(&world, &service, &statement, &token, 1)];
    let seen = form(&mut agents).await;
    let h = agents[0].document(&seen).hash();
    let cluster = CommittedCluster { world, service, admin, statement, agents, token, h };
    let order = cluster.order(remove(MemberId::new(7)));
    // An order must be signed by an operator or owner, even if an owner sends it. An agent can't
    // send one.
    for (key, role) in keys.iter().zip(roles) {
        let answer = cluster.admin.put_order(&order.sign(key)).await;
        match role {
            Role::Operator => assert_eq!(answer.unwrap().by, "operator"),
            _ => assert_eq!(code(answer), Code::NotInStatement, "{role}"),
        }
    }
    let own = order.sign(&cluster.agents[0].key);
    assert_eq!(code(cluster.agents[0].client.put_order(&own).await), Code::Forbidden);
    let forged = order.sign(&SigningKey::generate());
    assert_eq!(code(cluster.admin.put_order(&forged).await), Code::OrderRefused);
    cluster.service.stop().await;
}

#[tokio::test]
async fn an_order_is_accepted_once_before_it_expires_and_can_be_withdrawn() {
    let cluster = CommittedCluster::of(1).await;
    let id = cluster.statement.cluster;
    let order = cluster.order(remove(MemberId::new(7)));
    let intent = cluster.put(&order).await.unwrap();
    assert_eq!((intent.intent.verb, intent.subject.as_str()), (Verb::Remove, "0000000000000007"));
    assert_eq!(cluster.put(&order).await.unwrap(), intent, "the same order again");
    let verified = VerifiedIntent::verify(&intent.intent, &cluster.chain()).unwrap();
    assert!(matches!(verified.change(), IntentChange::Remove { .. }));

    let withdrawn = cluster.admin.withdraw_intent(id, intent.intent.operation).await.unwrap();
    assert_eq!(withdrawn.state, IntentState::Withdrawn);
    assert_eq!(cluster.put(&order).await.unwrap().state, IntentState::Withdrawn, "and stays so");
    // A reported outcome overrides a withdrawal, because the agent can have made the change just
    // before.
    let member = MemberId::new(7);
    let agent = &cluster.agents[0];
    let done =
        cluster.report_outcome(agent, &intent, Outcome::Removed { member }, 9).await.unwrap();
    assert_eq!(done.state, IntentState::Removed);
    let late = cluster.admin.withdraw_intent(id, intent.intent.operation).await;
    assert_eq!(code(late), Code::WrongState);

    let old = Order {
        issued_at: order.issued_at - 950,
        expires_at: order.issued_at - 50,
        ..order.clone()
    };
    assert_eq!(code(cluster.put(&old).await), Code::OrderRefused);
    let future = Order {
        issued_at: order.issued_at + 500,
        expires_at: order.issued_at + 900,
        ..order.clone()
    };
    assert_eq!(code(cluster.put(&future).await), Code::OrderRefused);
    let mut seconds = 2;
    let mut waited = loop {
        let ending = Order {
            id: Nonce::random(),
            issued_at: order.issued_at - 10,
            expires_at: cluster.admin.service_now_ms().unsigned_abs() / 1_000 + seconds,
            ..order.clone()
        };
        match cluster.put(&ending).await {
            Ok(view) => break view,
            // On a slow machine the order can expire before it arrives. Then try again with a later
            // expiry.
            Err(error) if seconds > 60 => panic!("{error}"),
            Err(_) => seconds *= 2,
        }
    };
    // A long poll of an intent must also end when the intent expires, although no other change ends
    // it.
    while waited.state == IntentState::Open {
        let operation = waited.intent.operation;
        waited = agent.client.intent(id, operation, Some(waited.rev)).await.unwrap();
    }
    assert_eq!(waited.state, IntentState::Expired);
    assert_eq!(waited.explain[0].code, "expired");
    cluster.service.stop().await;
}

#[tokio::test]
async fn the_number_of_a_clusters_pending_changes_is_limited() {
    let cluster = CommittedCluster::of(1).await;
    let joining = cluster.newcomer(8).await.join().await.unwrap().intent;
    cluster.report_outcome(&cluster.agents[0], &joining, added(77), 20).await.unwrap();
    for member in 1..16 {
        cluster.put(&cluster.order(remove(MemberId::new(member)))).await.unwrap();
    }
    let more = cluster.put(&cluster.order(remove(MemberId::new(16)))).await;
    assert_eq!(code(more), Code::Conflict);
    assert_eq!(code(cluster.newcomer(9).await.join().await), Code::Conflict);
    // Make the first intent a day old. After a day, an intent no longer counts towards the limit.
    sqlx::query("UPDATE intents SET made_us = made_us - 86400000000 WHERE verb = 'join'")
        .execute(&mut cluster.world.database.connect().await)
        .await
        .unwrap();
    cluster.put(&cluster.order(remove(MemberId::new(16)))).await.unwrap();
    let more = cluster.put(&cluster.order(remove(MemberId::new(17)))).await;
    assert_eq!(code(more), Code::Conflict);
    cluster.service.stop().await;
}

/// A member that joined by a ticket stays known after more than a thousand later orders.
#[tokio::test]
async fn a_member_that_joined_by_ticket_stays_known_after_many_later_orders() {
    let cluster = CommittedCluster::of(1).await;
    let id = cluster.statement.cluster;
    let newcomer = cluster.newcomer(9).await;
    let intent = newcomer.join().await.unwrap().intent;
    cluster.report_outcome(&cluster.agents[0], &intent, added(77), 20).await.unwrap();
    sqlx::query(
        "INSERT INTO intents (cluster_id, operation, verb, authority, subject, made_us, made_by,
             expires_us, state, rev)
         SELECT cluster_id, decode(lpad(to_hex(n), 32, '0'), 'hex'), 'remove', authority, 'x',
             made_us + n, 'owner', expires_us, 'withdrawn', rev
         FROM intents, generate_series(1, 1001) n",
    )
    .execute(&mut cluster.world.database.connect().await)
    .await
    .unwrap();
    assert!(newcomer.client.intents(id, None, false).await.is_ok());
    assert!(newcomer.client.renew_leaves(id, &newcomer.record.csr).await.is_ok());
    let member = MemberId::new(77);
    let promoted =
        cluster.report_outcome(&cluster.agents[0], &intent, Outcome::Promoted { member }, 30).await;
    assert_eq!(promoted.unwrap().state, IntentState::Promoted);
    cluster.service.stop().await;
}

#[tokio::test]
async fn no_request_changes_a_membership() {
    let cluster = CommittedCluster::of(1).await;
    let id = cluster.statement.cluster;
    let key = &cluster.agents[0].key;
    for (method, path) in [
        ("POST", format!("/v1/clusters/{id}/members")),
        ("DELETE", format!("/v1/clusters/{id}/members/1")),
        ("PUT", format!("/v1/clusters/{id}/members/1")),
        ("POST", format!("/v1/clusters/{id}/members/1/promote")),
    ] {
        let (status, body) =
            send(&cluster.world, &cluster.service, Some(key), method, &path, "{}".into()).await;
        assert_eq!(status, 405, "{method} {path}: {body}");
        assert!(body.contains("muster-agent member") && body.contains("etcdctl"), "{body}");
    }
    cluster.service.stop().await;
}
