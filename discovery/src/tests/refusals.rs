//! Tests of refused requests: each refusal has the right code and uses up no token.

use std::sync::Arc;

use discovery_types::admin::{Admin, AdminChain, AdminOperation};
use discovery_types::api::{
    AbandonRequest, ClusterQuery, ClusterState, GrantQuery, NackReason, NackRequest,
};
use discovery_types::client::ClientError;
use discovery_types::digest::{Digest, Nonce};
use discovery_types::jws::Jws;
use discovery_types::key::SigningKey;
use discovery_types::problem::{Code, Problem};
use discovery_types::proposal::Ack;
use discovery_types::record::SignedRecord;
use discovery_types::redeem::Redeem;
use discovery_types::retire::Retire;
use discovery_types::role::Role;
use discovery_types::token::Token;

use super::agent::{TestAgent, form};
use super::support::TestInstallation;

async fn keys_used(world: &TestInstallation) -> i64 {
    sqlx::query_scalar("SELECT count(*) FROM agents")
        .fetch_one(&mut world.database.connect().await)
        .await
        .unwrap()
}

#[tokio::test]
async fn invalid_tokens_are_refused_and_nothing_is_used_up() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let other = world.cluster(&admin, "other", 1).await;
    let agent =
        |statement: &_, token: &Token| TestAgent::new(&world, &service, statement, token, 1);

    // Case: the token has no grant at the service.
    let (unknown, _) = world.grant(&admin, &statement);
    let refused = agent(&statement, &unknown).redeem().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::GrantUnknown));
    // Case: the token is for another cluster.
    let foreign = world.token(&admin, &other).await;
    let refused = agent(&statement, &foreign).redeem().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::GrantUnknown));
    // Case: the token has expired.
    let (token, grant) = world.short_lived(&admin, || world.grant(&admin, &statement)).await;
    while admin.show_grant(grant.id).await.unwrap().state
        != discovery_types::api::GrantState::Expired
    {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    let refused = agent(&statement, &token).redeem().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::GrantExpired));
    // Case: the token was revoked.
    let token = world.token(&admin, &statement).await;
    admin.revoke_grant(token.id()).await.unwrap();
    let refused = agent(&statement, &token).redeem().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::GrantRevoked));
    // Case: the token is bound to another network than the host's.
    let (token, mut grant) = world.grant(&admin, &statement);
    grant.cidrs = vec!["10.0.0.0/8".parse().unwrap()];
    admin.put_grant(&grant.sign(&world.owner)).await.unwrap();
    let refused = agent(&statement, &token).redeem().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::GrantBinding));
    // Case: the record's addresses are in the bound network, but the request comes from outside.
    let mut elsewhere = agent(&statement, &token);
    elsewhere.record.peer_urls = vec!["https://10.0.0.1:2001".parse().unwrap()];
    elsewhere.record.client_urls = vec!["https://10.0.0.1:3001".parse().unwrap()];
    let refused = elsewhere.redeem().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::GrantBinding));
    // Case: the token is bound to another name.
    let (token, mut grant) = world.grant(&admin, &statement);
    grant.name = Some("db-1".parse().unwrap());
    admin.put_grant(&grant.sign(&world.owner)).await.unwrap();
    let refused = agent(&statement, &token).redeem().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::GrantBinding));

    assert_eq!(keys_used(&world).await, 0);
    service.stop().await;
}

#[tokio::test]
async fn a_redeem_for_another_service_or_by_another_connection_is_refused() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    let agent = TestAgent::new(&world, &service, &statement, &token, 1);
    let thief = world.client(&service, Some(&Arc::new(SigningKey::generate())));
    let refused = thief.redeem(&[agent.envelope()]).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::RecordRefused));
    let mut elsewhere = Redeem {
        service: Digest::of(b"another"),
        cluster: statement.cluster,
        statement: statement.sign(&world.owner).hash(),
        signed: agent.record.sign(&agent.key, token.key()),
        boot: 1,
        nonce: Nonce::random(),
        highest_epoch: 0,
        identity: None,
    };
    let refused = agent.client.redeem(&[elsewhere.sign(&agent.key)]).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::RecordRefused));
    // Case: another token than the one that the record names signed the endorsement.
    elsewhere.service = world.context.pins[0];
    elsewhere.signed = agent.record.sign(&agent.key, &SigningKey::generate());
    let refused = agent.client.redeem(&[elsewhere.sign(&agent.key)]).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::GrantUnknown));
    assert_eq!(keys_used(&world).await, 0);
    service.stop().await;
}

/// Redeems a record for an agent, and returns the service's refusal.
async fn refusal(agent: &TestAgent, signed: SignedRecord) -> Problem {
    let redeem = Redeem {
        service: agent.service,
        cluster: agent.record.cluster,
        statement: agent.statement,
        signed,
        boot: agent.boot,
        nonce: agent.nonce,
        highest_epoch: agent.highest_epoch,
        identity: None,
    };
    match agent.client.redeem(&[redeem.sign(&agent.key)]).await.unwrap_err() {
        ClientError::Problem(problem) => *problem,
        other => panic!("not refused by the service: {other}"),
    }
}

/// The answer must not reveal that the token exists, whichever signature is wrong.
#[tokio::test]
async fn wrong_secrets_of_a_token_are_answered_as_an_unknown_token_and_raise_an_alarm() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    let unknown = world.grant(&admin, &statement).0;
    let agent = TestAgent::new(&world, &service, &statement, &unknown, 1);
    let answer = refusal(&agent, agent.record.sign(&agent.key, &agent.token)).await;
    assert_eq!((answer.code, answer.status), (Code::GrantUnknown, 401));
    assert!(!answer.retryable);
    let alarms = || {
        let text = service.app().metrics.text();
        let line = text.lines().find(|line| line.contains("\"token_guessed\"")).unwrap();
        line.rsplit(' ').next().unwrap().to_owned()
    };
    let mut agent = TestAgent::new(&world, &service, &statement, &token, 1);
    let other = SigningKey::generate();
    let wrong_secret = agent.record.sign(&agent.key, &other);
    let mut elsewhere = agent.record.clone();
    elsewhere.peer_urls[0] = "https://192.0.2.1:2380".parse().unwrap();
    let mut bad = agent.record.clone();
    bad.peer_urls.clear();
    let no_endorsement = SignedRecord {
        record: wrong_secret.record.clone(),
        endorsement: wrong_secret.record.clone(),
    };
    let refused = elsewhere.sign(&agent.key, &other);
    // Case: a record with the signature of another record.
    let parts = |jws: &Jws| {
        let (input, signature) = jws.as_str().rsplit_once('.').unwrap();
        (input.to_owned(), signature.to_owned())
    };
    let (input, signature) = (parts(&wrong_secret.record).0, parts(&refused.record).1);
    let wrongly_signed = SignedRecord {
        record: format!("{input}.{signature}").parse().unwrap(),
        endorsement: wrong_secret.endorsement.clone(),
    };
    let guesses =
        [wrongly_signed, refused, bad.sign(&agent.key, &other), no_endorsement, wrong_secret];
    for guess in guesses {
        assert_eq!(alarms(), "0");
        assert_eq!(refusal(&agent, guess).await, answer);
    }
    assert_eq!(alarms(), "1");
    // A holder of the secret is told why its record is refused.
    let told = refusal(&agent, bad.sign(&agent.key, &agent.token)).await;
    assert_eq!(told.code, Code::RecordRefused);
    form(std::slice::from_mut(&mut agent)).await;
    service.stop().await;
}

/// Only a caller who has the token's secret is told why the token isn't valid any more.
#[tokio::test]
async fn a_token_of_a_former_issuer_is_unknown_to_those_without_its_secret() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let issuer = Arc::new(SigningKey::generate());
    let named =
        Admin { key: *issuer.public(), name: "ian".parse().unwrap(), roles: vec![Role::Issuer] };
    let chain = AdminChain::root(world.owner.public());
    let add = chain.sign_next(&world.owner, AdminOperation::Add(named.clone()));
    admin.put_admin(&add).await.unwrap();
    let mut statement = world.draft(&admin, "demo", 1).await;
    statement.admins.push(named);
    admin.put_statement(statement.cluster, &statement.sign(&world.owner)).await.unwrap();
    let client = world.client(&service, Some(&issuer));
    let (token, grant) = world.grant(&client, &statement);
    client.put_grant(&grant.sign(&issuer)).await.unwrap();

    let mut next = statement.clone();
    (next.seq, next.previous) = (1, Some(statement.sign(&world.owner).hash()));
    next.admins.pop();
    admin.put_statement(next.cluster, &next.sign(&world.owner)).await.unwrap();
    let agent = TestAgent::new(&world, &service, &statement, &token, 1);
    let told = refusal(&agent, agent.record.sign(&agent.key, &agent.token)).await;
    assert_eq!(told.code, Code::GrantRefused);
    let guessed = agent.record.sign(&agent.key, &SigningKey::generate());
    assert_eq!(refusal(&agent, guessed).await.code, Code::GrantUnknown);
    service.stop().await;
}

#[tokio::test]
async fn a_bundle_that_pins_an_unknown_or_foreign_statement_takes_no_seat() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let other = world.cluster(&admin, "other", 1).await;
    let token = world.token(&admin, &statement).await;
    let mut agent = TestAgent::new(&world, &service, &statement, &token, 1);
    let right = agent.statement;
    for wrong in [Digest::of(b"mangled"), other.sign(&world.owner).hash()] {
        agent.statement = wrong;
        let refused = agent.redeem().await.unwrap_err();
        assert_eq!(refused.code(), Some(Code::StatementRefused));
        assert!(refused.to_string().contains("bundle"), "{refused}");
    }
    assert_eq!(keys_used(&world).await, 0);
    // The pinned statement is still accepted after a newer one.
    let mut next = statement.clone();
    (next.seq, next.previous) = (1, Some(right));
    next.permissions.low_ports = true;
    admin.put_statement(next.cluster, &next.sign(&world.owner)).await.unwrap();
    agent.statement = right;
    agent.redeem().await.unwrap();
    service.stop().await;
}

#[tokio::test]
async fn two_hosts_of_one_name_or_address_and_one_key_on_two_hosts_are_refused() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 3).await;
    let token = world.token(&admin, &statement).await;
    let first = TestAgent::new(&world, &service, &statement, &token, 1);
    first.redeem().await.unwrap();
    let mut second = TestAgent::new(&world, &service, &statement, &token, 2);
    second.record.name = first.record.name.clone();
    let refused = second.redeem().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::Conflict));
    assert!(refused.to_string().contains("node-1"), "{refused}");
    second.record.name = "node-2".parse().unwrap();
    second.record.peer_urls = first.record.peer_urls.clone();
    let refused = second.redeem().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::Conflict));
    assert!(refused.to_string().contains("node-1 ("), "{refused}");
    assert_eq!(keys_used(&world).await, 1);
    // A cloned host uses the same key and boot counter, but another nonce.
    let mut clone = first;
    clone.redeem().await.unwrap();
    clone.nonce = Nonce::random();
    assert_eq!(clone.redeem().await.unwrap_err().code(), Some(Code::KeyElsewhere));
    // A restart increments the boot counter, so the service accepts the new session.
    clone.boot += 1;
    clone.redeem().await.unwrap();
    service.stop().await;
}

#[tokio::test]
async fn only_an_issuer_whom_the_statement_names_grants_tokens() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 3).await;
    let issuer = Arc::new(SigningKey::generate());
    let named =
        Admin { key: *issuer.public(), name: "ian".parse().unwrap(), roles: vec![Role::Issuer] };
    let chain = AdminChain::root(world.owner.public());
    let add = chain.sign_next(&world.owner, AdminOperation::Add(named.clone()));
    admin.put_admin(&add).await.unwrap();
    let client = world.client(&service, Some(&issuer));
    client.list_clusters(&ClusterQuery::default()).await.unwrap();
    let (_, grant) = world.grant(&client, &statement);
    let refused = client.put_grant(&grant.sign(&issuer)).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::NotInStatement));
    assert!(refused.to_string().contains("cluster restate demo"), "{refused}");

    let mut next = statement.clone();
    next.seq = 1;
    next.previous = Some(statement.sign(&world.owner).hash());
    next.admins.push(named);
    admin.put_statement(next.cluster, &next.sign(&world.owner)).await.unwrap();
    client.put_grant(&grant.sign(&issuer)).await.unwrap();
    let mut other = next.clone();
    other.seq = 2;
    other.size = 5;
    other.previous = Some(next.sign(&world.owner).hash());
    let refused = admin.put_statement(next.cluster, &other.sign(&world.owner)).await;
    assert_eq!(refused.unwrap_err().code(), Some(Code::StatementRefused));
    service.stop().await;
}

#[tokio::test]
async fn statements_that_do_not_fit_their_draft_are_refused() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let draft = world.draft(&admin, "demo", 3).await;
    let second = world.draft(&admin, "demo", 3).await;
    let mut larger = draft.clone();
    larger.size = 5;
    let mut foreign_ca = draft.clone();
    foreign_ca.peer_ca = second.peer_ca.clone();
    let mut late = draft.clone();
    late.deadline_seconds = 86_401;
    for bad in [larger, foreign_ca, late] {
        let refused = admin.put_statement(draft.cluster, &bad.sign(&world.owner)).await;
        assert_eq!(refused.unwrap_err().code(), Some(Code::StatementRefused));
    }
    let other_owner = SigningKey::generate();
    let mut usurped = draft.clone();
    usurped.admins[0].key = *other_owner.public();
    let refused = admin.put_statement(draft.cluster, &usurped.sign(&other_owner)).await;
    assert_eq!(refused.unwrap_err().code(), Some(Code::StatementRefused));

    admin.put_statement(draft.cluster, &draft.sign(&world.owner)).await.unwrap();
    let refused = admin.put_statement(second.cluster, &second.sign(&world.owner)).await;
    assert_eq!(refused.unwrap_err().code(), Some(Code::NameTaken));
    let gone = uuid::Uuid::now_v7();
    let refused = admin.put_statement(gone, &draft.sign(&world.owner)).await;
    assert_eq!(refused.unwrap_err().code(), Some(Code::DraftGone));
    service.stop().await;
}

#[tokio::test]
async fn votes_about_another_list_are_refused_and_a_nack_opens_the_cluster_again() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 2).await;
    let token = world.token(&admin, &statement).await;
    let agents: Vec<TestAgent> =
        (1..=2).map(|i| TestAgent::new(&world, &service, &statement, &token, i)).collect();
    for agent in &agents {
        agent.redeem().await.unwrap();
    }
    let seen = agents[0].poll_until(|seen| seen.proposal.is_some()).await;
    let h = seen.proposal.as_ref().unwrap().hash();
    let cluster = statement.cluster;
    let ack = |epoch, h, key: &SigningKey| Ack { cluster, epoch, h }.sign(key);
    for (vote, wanted) in [
        (ack(seen.epoch + 1, h, &agents[0].key), Code::StaleEpoch),
        (ack(seen.epoch, Digest::of(b"x"), &agents[0].key), Code::StaleEpoch),
        (ack(seen.epoch, h, &agents[1].key), Code::VoteRefused),
    ] {
        let refused = agents[0].client.ack(cluster, &vote).await.unwrap_err();
        assert_eq!(refused.code(), Some(wanted), "{refused}");
    }
    let nack = NackRequest {
        session: agents[0].session(),
        epoch: seen.epoch,
        h,
        reason: NackReason::ClockSkew,
        detail: "my clock is 40 s\nbehind".into(),
    };
    let open = agents[0].client.nack(cluster, &nack).await.unwrap();
    assert!(open.epoch > seen.epoch);
    let shown = admin.show_cluster(cluster).await.unwrap();
    let why: Vec<_> = shown.seats.iter().filter_map(|seat| seat.last_nack.as_deref()).collect();
    assert_eq!(why, ["clock_skew: my clock is 40 sbehind"]);
    service.stop().await;
}

#[tokio::test]
async fn a_committed_cluster_cant_be_abandoned_but_an_owner_can_retire_it() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    let mut agents = [TestAgent::new(&world, &service, &statement, &token, 1)];
    form(&mut agents).await;
    let abandon = AbandonRequest { reason: "no longer wanted".into() };
    let refused = admin.abandon(statement.cluster, &abandon.reason).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::Committed));
    let too_long = admin.abandon(statement.cluster, &"ü".repeat(251)).await.unwrap_err();
    assert_eq!(too_long.code(), Some(Code::InvalidRequest));
    assert!(too_long.to_string().contains("at most 500 bytes"), "{too_long}");
    let retire = Retire {
        cluster: statement.cluster,
        statement: statement.sign(&world.owner).hash(),
        reason: "moved".into(),
        force: false,
    };
    let forged = admin.retire(statement.cluster, &retire.sign(&SigningKey::generate())).await;
    assert_eq!(forged.unwrap_err().code(), Some(Code::StatementRefused));
    let retired = admin.retire(statement.cluster, &retire.sign(&world.owner)).await.unwrap();
    assert_eq!(retired.state, ClusterState::Retired);
    assert_eq!(agents[0].poll(None).await.unwrap_err().code(), Some(Code::Retired));
    service.stop().await;
}

#[tokio::test]
async fn an_agent_sees_its_own_cluster_and_no_other() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 3).await;
    let other = world.cluster(&admin, "other", 3).await;
    let token = world.token(&admin, &statement).await;
    let agent = TestAgent::new(&world, &service, &statement, &token, 1);
    agent.redeem().await.unwrap();
    agent.client.show_cluster(statement.cluster).await.unwrap();
    let client = &agent.client;
    assert_eq!(client.show_cluster(other.cluster).await.unwrap_err().code(), Some(Code::Forbidden));
    assert_eq!(
        client.list_clusters(&ClusterQuery::default()).await.unwrap_err().code(),
        Some(Code::Forbidden)
    );
    assert_eq!(
        client
            .list_grants(Some(statement.cluster), &GrantQuery::default())
            .await
            .unwrap_err()
            .code(),
        Some(Code::Forbidden)
    );
    service.stop().await;
}
