//! Tests of clusters in which an issuer approves each host before it can be a founder.

use discovery_types::approval::Approval;
use discovery_types::key::SigningKey;
use discovery_types::problem::Code;
use uuid::Uuid;

use super::agent::TestAgent;
use super::support::TestInstallation;

#[tokio::test]
async fn a_list_has_approved_hosts_alone_and_comes_with_their_approvals() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let mut statement = world.draft(&admin, "demo", 2).await;
    statement.needs_approval = true;
    let cluster = statement.cluster;
    admin.put_statement(cluster, &statement.sign(&world.owner)).await.unwrap();
    let token = world.token(&admin, &statement).await;
    let make = |seat| TestAgent::new(&world, &service, &statement, &token, seat);
    let agents = [make(1), make(2), make(3)];
    for agent in &agents {
        agent.redeem().await.unwrap();
    }
    let shown = admin.explain(cluster).await.unwrap();
    assert!(shown.explain.iter().any(|line| line.code == "approvals_missing"), "{shown:?}");
    let approved = |shown: &discovery_types::api::ExplainResponse| {
        shown.seats.iter().filter(|seat| seat.is_approved == Some(true)).count()
    };
    assert_eq!(approved(&shown), 0);
    let key = |agent: &TestAgent| *agent.key.public();
    let approve = |agent| Approval { cluster, agent };

    // An approval for another cluster, by an unknown key, or of an unknown agent is refused.
    let foreign = Approval { cluster: Uuid::now_v7(), agent: key(&agents[0]) };
    for refused in
        [foreign.sign(&world.owner), approve(key(&agents[0])).sign(&SigningKey::generate())]
    {
        let error = admin.approve_host(cluster, &refused).await.unwrap_err();
        assert_eq!(error.code(), Some(Code::RecordRefused));
    }
    let unknown = approve(*SigningKey::generate().public()).sign(&world.owner);
    let error = admin.approve_host(cluster, &unknown).await.unwrap_err();
    assert_eq!(error.code(), Some(Code::UnknownKey));

    // The third host is approved first, and takes the seat of a host without an approval.
    for agent in [&agents[2], &agents[0]] {
        admin.approve_host(cluster, &approve(key(agent)).sign(&world.owner)).await.unwrap();
    }
    let poll = agents[0].poll_until(|poll| poll.proposal.is_some()).await;
    let chain = discovery_types::statement::StatementChain::verify_from_owners(
        &poll.statements,
        &[*world.owner.public()],
    );
    let chain = chain.unwrap();
    let mut listed: Vec<_> =
        poll.approvals.iter().map(|jws| Approval::verify(jws, &chain).unwrap().agent).collect();
    let mut expected = vec![key(&agents[0]), key(&agents[2])];
    listed.sort_by_key(|key| *key.as_bytes());
    expected.sort_by_key(|key| *key.as_bytes());
    assert_eq!(listed, expected);
    assert_eq!(approved(&admin.explain(cluster).await.unwrap()), 2);
    service.stop().await;
}

/// A forged row is no approval: the signature is checked whenever the row is read.
#[tokio::test]
async fn an_approval_that_somebody_wrote_into_the_database_does_not_count() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let mut statement = world.draft(&admin, "demo", 1).await;
    statement.needs_approval = true;
    let cluster = statement.cluster;
    admin.put_statement(cluster, &statement.sign(&world.owner)).await.unwrap();
    let token = world.token(&admin, &statement).await;
    let agent = TestAgent::new(&world, &service, &statement, &token, 1);
    agent.redeem().await.unwrap();
    let forged = Approval { cluster, agent: *agent.key.public() }.sign(&SigningKey::generate());
    sqlx::query("UPDATE agents SET approval = $1")
        .bind(forged.as_str())
        .execute(&mut world.database.connect().await)
        .await
        .unwrap();
    let poll = agent.poll(None).await.unwrap();
    assert!(poll.proposal.is_none());
    assert!(poll.explain.iter().any(|line| line.code == "approvals_missing"), "{poll:?}");
    service.stop().await;
}
