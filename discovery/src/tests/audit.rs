//! Tests of the event chains, as an auditor reads them.

use discovery_types::api::{EventList, EventQuery};
use discovery_types::checkpoint::{HistoryFault, VerifiedCheckpoint};
use discovery_types::client::DiscoveryClient;
use discovery_types::digest::Digest;
use discovery_types::problem::Code;
use uuid::Uuid;

use super::agent::{TestAgent, form};
use super::support::TestInstallation;

async fn read(admin: &DiscoveryClient, stream: Uuid, after: u64, limit: u16) -> EventList {
    let query = EventQuery { stream, after: Some(after), limit: Some(limit) };
    admin.events(&query).await.unwrap()
}

#[tokio::test]
async fn each_event_of_a_cluster_is_read_in_order_and_has_the_hash_of_its_content() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    form(&mut [TestAgent::new(&world, &service, &statement, &token, 1)]).await;
    let all = read(&admin, statement.cluster, 0, 1_000).await;
    assert_eq!(all.last, all.events.len() as u64);
    let kinds: Vec<&str> = all.events.iter().map(|event| event.kind.as_str()).collect();
    assert!(kinds.contains(&"granted") && kinds.contains(&"committed"), "{kinds:?}");
    let mut previous = Digest([0; 32]);
    for (event, number) in all.events.iter().zip(1..) {
        assert_eq!((event.number, event.previous), (number, previous));
        assert_eq!(event.hash, event.computed_hash(&statement.cluster));
        previous = event.hash;
    }
    // Two consecutive pages make up the whole chain.
    let (first, rest) = (
        read(&admin, statement.cluster, 0, 2).await,
        read(&admin, statement.cluster, 2, 1_000).await,
    );
    assert_eq!([first.events, rest.events].concat(), all.events);
    let beyond = read(&admin, statement.cluster, u64::MAX, 10).await;
    assert_eq!((beyond.last, beyond.events.len()), (all.last, 0));
    // The service has a chain of its own. The chain of an unknown cluster is empty.
    assert!(read(&admin, Uuid::nil(), 0, 10).await.last > 0);
    assert_eq!(read(&admin, Uuid::now_v7(), 0, 10).await.last, 0);
    let query = EventQuery { stream: Uuid::nil(), after: None, limit: Some(0) };
    assert_eq!(admin.events(&query).await.unwrap_err().code(), Some(Code::InvalidRequest));
    service.stop().await;
}

/// Requests that are refused because of the caller become events, one for each kind of request.
#[tokio::test]
async fn refused_requests_are_events_of_the_service() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let (unknown, _) = world.grant(&admin, &statement);
    let agent = TestAgent::new(&world, &service, &statement, &unknown, 1);
    for _ in 0..3 {
        assert_eq!(agent.redeem().await.unwrap_err().code(), Some(Code::GrantUnknown));
    }
    let (status, _) = super::support::get(&world, &service, "/v1/clusters").await;
    assert_eq!(status, 401);
    // An unknown path isn't refused because of the caller, so it is no event.
    let (status, _) = super::support::get(&world, &service, "/v1/nothing").await;
    assert_eq!(status, 404);
    service.app().write_refusals().await;
    service.app().write_refusals().await;
    let events = read(&admin, Uuid::nil(), 0, 1_000).await.events;
    let refused: Vec<serde_json::Value> = events
        .iter()
        .filter(|event| event.kind == "refused")
        .map(|event| serde_json::from_str(&event.body).unwrap())
        .collect();
    assert_eq!(refused.len(), 2, "{refused:?}");
    let redeem = refused.iter().find(|body| body["route"] == "/v1/redeem").unwrap();
    assert_eq!((&redeem["code"], &redeem["count"]), (&"grant_unknown".into(), &3.into()));
    assert_eq!(redeem["address"], "127.0.0.1");
    assert_eq!(redeem["key"], agent.key.public().key_id().to_string());
    let list = refused.iter().find(|body| body["route"] == "/v1/clusters").unwrap();
    assert!(list["key"].is_null() && list["count"] == 1, "{list}");
    service.stop().await;
}

/// The checkpoints of one service continue each other. If the database was set back to an older
/// state, a later checkpoint shows that, even when the chain has become as long again.
#[tokio::test]
async fn checkpoints_continue_each_other_unless_the_database_was_set_back() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    // Give another cluster events with the same numbers. A checkpoint must not contain that
    // cluster's events.
    let other = world.cluster(&admin, "other", 1).await;
    for _ in 0..20 {
        world.token(&admin, &other).await;
    }
    let statement = world.cluster(&admin, "demo", 1).await;
    let cluster = statement.cluster;
    let token = world.token(&admin, &statement).await;
    let mut agents = [TestAgent::new(&world, &service, &statement, &token, 1)];
    form(&mut agents).await;
    let [mut agent] = agents;
    let keys = agent.client.jwks().await.unwrap();
    let keys: Vec<_> = keys.keys.iter().filter_map(|key| key.public_key()).collect();
    let fetch = async |agent: &TestAgent, known: u64| {
        let jws = agent.client.checkpoint(cluster, known).await.unwrap();
        VerifiedCheckpoint::verify(&jws, cluster, &keys).unwrap()
    };
    let first = fetch(&agent, 0).await;
    assert_eq!(first.last.number, read(&admin, cluster, 0, 1).await.last);
    assert_eq!(first.earlier, None);
    // Neither an admin nor another cluster's agent gets a checkpoint.
    assert!(admin.checkpoint(cluster, 0).await.is_err());
    let other = agent.client.checkpoint(Uuid::now_v7(), 0).await.unwrap_err();
    assert_eq!(other.code(), Some(Code::Forbidden));
    service.stop().await;
    let backup = world.database.back_up().await;

    let service = world.serve().await;
    agent.connect_to(&world, &service);
    let ticket = world.ticket(&world.owner(&service), &statement).await;
    let second = fetch(&agent, first.last.number).await;
    assert_eq!(second.earlier, Some(first.last));
    assert!(second.last.number > first.last.number);
    assert_eq!(second.check_continues(&first), Ok(()));
    service.stop().await;
    world.database.replace_with(&backup).await;

    let service = world.serve().await;
    agent.connect_to(&world, &service);
    let shorter = fetch(&agent, second.last.number).await;
    assert!(matches!(shorter.check_continues(&second), Err(HistoryFault::Backwards { .. })));
    let admin = world.owner(&service);
    while read(&admin, cluster, 0, 1).await.last <= second.last.number {
        world.ticket(&admin, &statement).await;
    }
    let rewritten = HistoryFault::Rewritten { number: second.last.number };
    let longer = fetch(&agent, second.last.number).await;
    assert_eq!(longer.check_continues(&second), Err(rewritten));
    assert_eq!(fetch(&agent, first.last.number).await.check_continues(&first), Ok(()));
    drop(ticket);
    service.stop().await;
}
