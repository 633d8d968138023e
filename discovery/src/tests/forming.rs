//! Tests of clusters that form.

use std::time::Duration;

use discovery_types::api::{ClusterState, ReportRequest, Standing};
use discovery_types::features::AgentBuild;
use discovery_types::problem::Code;
use discovery_types::statement::StatementChain;

use super::agent::{TestAgent, form, sign};
use super::support::{TestInstallation, WAIT_TIMEOUT, stored_document, with_long_polls};

#[tokio::test]
async fn three_agents_become_one_cluster_with_certificates_of_its_own_cas() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 3).await;
    let token = world.token(&admin, &statement).await;
    let mut agents: Vec<TestAgent> =
        (1..=3).map(|i| TestAgent::new(&world, &service, &statement, &token, i)).collect();
    let last = form(&mut agents).await;
    assert_eq!(last.state, ClusterState::Committed);
    let jwks = admin.jwks().await.unwrap();
    let keys: Vec<_> = jwks.keys.iter().map(|key| key.public_key().unwrap()).collect();
    for agent in &agents {
        let seen = agent.poll(None).await.unwrap();
        let document = agent.document(&seen);
        let seat = document.proposal().seat_of(agent.key.public()).unwrap();
        assert_eq!(seen.standing, Standing::Member(seat));
        let delivered = seen.document.unwrap();
        let chain = StatementChain::verify_links(&delivered.statements).unwrap();
        discovery_types::document::VerifiedDocument::verify_received(
            &delivered.document,
            &chain,
            &keys,
        )
        .unwrap();
        let node_key = agent.record.csr.verify().unwrap().node_key;
        delivered.leaves.unwrap().verify(&node_key, chain.newest()).unwrap();
        assert_eq!(
            Some(&delivered.document),
            stored_document(&world.database, statement.cluster).await.as_ref()
        );
    }
    let ledger = service.app().store.ledger();
    assert!(
        ledger.commit_with_document(statement.cluster).unwrap().is_some(),
        "it left, so the ledger has it"
    );

    for agent in &agents[..2] {
        let seen = agent.poll(None).await.unwrap();
        let report = ReportRequest {
            session: agent.session(),
            h: agent.document(&seen).hash(),
            raft_cluster_id: "00000000deadbeef".into(),
            member_id: "0000000000000001".into(),
            leader_id: None,
            raft_term: 2,
            raft_index: 4,
            membership: None,
            cas: None,
        };
        agent.client.report(statement.cluster, &report, &AgentBuild::own()).await.unwrap();
    }
    let shown = admin.show_cluster(statement.cluster).await.unwrap();
    assert_eq!(shown.summary.state, ClusterState::Formed);
    assert_eq!(shown.raft_cluster_id.as_deref(), Some("00000000deadbeef"));
    let timeline: Vec<&str> = shown.timeline.iter().map(|m| m.event.as_str()).collect();
    assert_eq!(timeline, ["open", "full", "preparing", "committed", "formed"]);
    service.stop().await;
}

#[tokio::test]
async fn a_fourth_agent_is_a_standby_and_refused_after_the_commit() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 3).await;
    let token = world.token(&admin, &statement).await;
    let mut agents: Vec<TestAgent> =
        (1..=4).map(|i| TestAgent::new(&world, &service, &statement, &token, i)).collect();
    for agent in &agents {
        agent.redeem().await.unwrap();
    }
    let late = agents.pop().unwrap();
    assert_eq!(late.poll(None).await.unwrap().standing, Standing::Standby(0));
    sign(&mut agents).await;
    let refused = late.poll(None).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::BootClosed));
    service.stop().await;
}

#[tokio::test]
async fn two_processes_on_one_postgres_serve_one_formation() {
    let world = TestInstallation::new().await;
    let one = world.serve().await;
    // The second process doesn't sweep. So only a notification can end its long poll before the
    // test fails.
    let mut args = with_long_polls(world.args("ledger-2"));
    args.times.sweep = Duration::from_secs(3_600);
    let two = crate::server::start(args).await.unwrap();
    let admin = world.owner(&one);
    let statement = world.cluster(&admin, "demo", 3).await;
    let token = world.token(&admin, &statement).await;
    let mut agents: Vec<TestAgent> = (1..=3)
        .map(|i| TestAgent::new(&world, if i == 2 { &two } else { &one }, &statement, &token, i))
        .collect();
    for agent in &agents[..2] {
        agent.redeem().await.unwrap();
    }
    // The second agent's poll waits at the second process. A redeem at the first process must end
    // it.
    let waiting = agents[1].poll(None).await.unwrap().rev;
    let (woken, _) = tokio::join!(agents[1].poll(Some(waiting)), async {
        agents[2].redeem().await.unwrap();
    });
    assert_ne!(woken.unwrap().rev, waiting);
    let last = sign(&mut agents).await;
    assert_eq!(last.state, ClusterState::Committed);
    let member = agents[1].poll(None).await.unwrap();
    assert_eq!(agents[1].document(&member).hash(), agents[0].document(&last).hash());
    assert!(two.app().store.ledger().commit_with_document(statement.cluster).unwrap().is_some());
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn a_seat_whose_agent_goes_silent_goes_to_the_standby() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 2).await;
    let token = world.token(&admin, &statement).await;
    let mut agents: Vec<TestAgent> =
        (1..=3).map(|i| TestAgent::new(&world, &service, &statement, &token, i)).collect();
    for agent in &agents {
        agent.redeem().await.unwrap();
    }
    // The first agent's lease lapses, so the frozen list is abandoned. The third agent gets the
    // seat.
    sqlx::raw_sql(
        "UPDATE agents SET lease_us = 1, held_us = 1 WHERE seat = 1;
         UPDATE clusters SET next_deadline_us = 1",
    )
    .execute(&mut world.database.connect().await)
    .await
    .unwrap();
    let (second, third) = {
        let [_, second, third] = &agents[..] else { unreachable!() };
        let sits =
            |seen: &discovery_types::api::PollResponse| seen.proposal.is_some() && seen.epoch > 1;
        tokio::join!(second.poll_until(sits), third.poll_until(sits))
    };
    assert!(matches!(second.standing, Standing::Seated(2)));
    assert!(matches!(third.standing, Standing::Seated(1)));
    let last = sign(&mut agents[1..]).await;
    assert_eq!(last.state, ClusterState::Committed);
    service.stop().await;
}

#[tokio::test]
async fn every_request_can_be_repeated_after_a_lost_response() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.draft(&admin, "demo", 1).await;
    let jws = statement.sign(&world.owner);
    for _ in 0..2 {
        admin.put_statement(statement.cluster, &jws).await.unwrap();
    }
    let (token, grant) = world.grant(&admin, &statement);
    let grant = grant.sign(&world.owner);
    for _ in 0..2 {
        admin.put_grant(&grant).await.unwrap();
    }
    let mut agent = TestAgent::new(&world, &service, &statement, &token, 1);
    for _ in 0..2 {
        agent.redeem().await.unwrap();
    }
    let seen = agent.poll_until(|seen| seen.proposal.is_some()).await;
    let first = agent.ack(&seen).await.unwrap();
    let again = agent.ack(&seen).await.unwrap();
    assert_eq!(first.document, again.document);
    assert!(first.document.is_some());
    service.stop().await;
}

/// Times in the database are an hour ahead, as if Postgres' clock was wrong and was then corrected.
#[tokio::test]
async fn leases_and_lists_stored_an_hour_ahead_still_end_in_time() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 3).await;
    let token = world.token(&admin, &statement).await;
    let mut agents: Vec<TestAgent> =
        (1..=3).map(|i| TestAgent::new(&world, &service, &statement, &token, i)).collect();
    for agent in &agents {
        agent.redeem().await.unwrap();
    }
    sqlx::raw_sql(
        "UPDATE clusters SET frozen_us = frozen_us + 3600000000,
             next_deadline_us = next_deadline_us + 3600000000;
         UPDATE agents SET lease_us = lease_us + 3600000000, held_us = lease_us + 3600000000",
    )
    .execute(&mut world.database.connect().await)
    .await
    .unwrap();
    let seen = agents[0].poll(None).await.unwrap();
    assert_eq!((seen.state, seen.epoch), (ClusterState::Preparing, 1));
    assert!(seen.lease_ms.is_some_and(|left| left <= 30_000), "{:?}", seen.lease_ms);
    service.stop().await;
    let mut args = world.args("ledger");
    args.times.prepare = Duration::from_secs(1);
    let service = crate::server::start(args).await.unwrap();
    agents[0].connect_to(&world, &service);
    let late = agents[0].poll_until(|seen| seen.epoch > 1);
    tokio::time::timeout(WAIT_TIMEOUT, late).await.expect("given up after a second");
    service.stop().await;
}

/// Hosts with a stolen token have signed a list. Their seats are freed, and the cluster forms with
/// another token, also after a restart of the service.
#[tokio::test]
async fn seats_of_a_compromised_token_are_freed_for_hosts_with_another() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 2).await;
    let stolen = world.token(&admin, &statement).await;
    let agent = |token, number| TestAgent::new(&world, &service, &statement, token, number);
    let mut thieves = [agent(&stolen, 1), agent(&stolen, 2)];
    for thief in &thieves {
        thief.redeem().await.unwrap();
    }
    let seen = thieves[0].poll_until(|seen| seen.proposal.is_some()).await;
    thieves[0].ack(&seen).await.unwrap();
    admin.revoke_grant_and_free_seats(stolen.id()).await.unwrap();
    let late = thieves[1].ack(&seen).await.unwrap_err();
    assert_eq!(late.code(), Some(Code::StaleEpoch));
    service.stop().await;

    let service = world.serve().await;
    let admin = world.owner(&service);
    for thief in &mut thieves {
        thief.connect_to(&world, &service);
        assert_eq!(thief.poll(None).await.unwrap_err().code(), Some(Code::GrantRevoked));
        assert_eq!(thief.redeem().await.unwrap_err().code(), Some(Code::GrantRevoked));
    }
    let token = world.token(&admin, &statement).await;
    let numbers = 3..=4;
    let mut own: Vec<TestAgent> =
        numbers.map(|i| TestAgent::new(&world, &service, &statement, &token, i)).collect();
    form(&mut own).await;
    let events = service.app().store.events(statement.cluster, 100).await.unwrap();
    let freed: Vec<_> = events.iter().filter(|event| event.kind == "seat_freed").collect();
    assert_eq!(freed.len(), 2, "{events:?}");
    assert_eq!(freed[0].body.0["by"], "owner");
    assert_eq!(freed[0].body.0["grant"], stolen.id().to_string());
    // Seats are freed only while the cluster forms. After the commit, this request only revokes the
    // grant.
    admin.revoke_grant_and_free_seats(token.id()).await.unwrap();
    own[0].poll(None).await.unwrap();
    service.stop().await;
}

#[tokio::test]
async fn events_tell_with_which_token_a_host_came_and_who_revoked_it() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 3).await;
    let token = world.token(&admin, &statement).await;
    TestAgent::new(&world, &service, &statement, &token, 1).redeem().await.unwrap();
    admin.revoke_grant(token.id()).await.unwrap();
    let events = service.app().store.events(statement.cluster, 100).await.unwrap();
    let body = |kind: &str| {
        let event = events.iter().find(|event| event.kind == kind);
        event.unwrap_or_else(|| panic!("no event {kind}: {events:?}")).body.0.clone()
    };
    let (joined, revoked) = (body("joined"), body("grant_revoked"));
    assert_eq!(joined["grant"], token.id().to_string(), "{joined}");
    assert_eq!((&joined["name"], &joined["address"]), (&"node-1".into(), &"127.0.0.1".into()));
    assert_eq!(revoked["grant"], token.id().to_string(), "{revoked}");
    assert_eq!(revoked["by"], "owner", "{revoked}");
    service.stop().await;
}
