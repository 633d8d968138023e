//! Tests of attacks by an intruder in the database, or by an agent with a seat.

use data_encoding::BASE64URL_NOPAD;
use discovery_types::api::{ClusterState, ReportRequest};
use discovery_types::digest::Nonce;
use discovery_types::features::AgentBuild;
use discovery_types::grant::{Grant, ISSUER_SKEW_SECONDS, TokenKind};
use discovery_types::jws::{Jws, JwsType};
use discovery_types::key::SigningKey;
use discovery_types::problem::Code;
use discovery_types::proposal::{Ack, Release};
use discovery_types::record::{Endorsement, SignedRecord};
use discovery_types::redeem::Redeem;
use discovery_types::statement::Statement;
use discovery_types::token::Token;
use sqlx::{Connection, PgConnection};

use super::agent::{TestAgent, form};
use super::support::{TestInstallation, get};

#[tokio::test]
async fn changing_an_expired_tokens_row_does_not_revive_it() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let (token, grant) = world.short_lived(&admin, || world.grant(&admin, &statement)).await;
    sqlx::raw_sql("UPDATE grants SET expires_us = expires_us + 3600000000, uses = 9")
        .execute(&mut world.database.connect().await)
        .await
        .unwrap();
    world.wait_until_expired(&admin, &grant).await;
    let refused =
        TestAgent::new(&world, &service, &statement, &token, 1).redeem().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::GrantExpired), "{refused}");
    service.stop().await;
}

#[tokio::test]
async fn the_signed_number_of_uses_counts_and_not_the_number_in_the_row() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 2).await;
    let (token, mut grant) = world.grant(&admin, &statement);
    grant.uses = 1;
    admin.put_grant(&grant.sign(&world.owner)).await.unwrap();
    sqlx::raw_sql("UPDATE grants SET uses = 9")
        .execute(&mut world.database.connect().await)
        .await
        .unwrap();
    for number in 1..=2 {
        TestAgent::new(&world, &service, &statement, &token, number).redeem().await.unwrap();
    }
    let shown = admin.show_cluster(statement.cluster).await.unwrap().summary;
    assert_eq!((shown.seated, shown.standbys), (1, 1), "one use is one seat");
    service.stop().await;
}

#[tokio::test]
async fn a_join_ticket_that_somebody_wrote_into_the_table_admits_nobody() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let (token, mut grant) = world.grant(&admin, &statement);
    (grant.kind, grant.uses, grant.expires_at) = (TokenKind::Join, 1, grant.issued_at + 900);
    write_boot_grant(&world, &grant).await;
    let refused =
        TestAgent::new(&world, &service, &statement, &token, 1).redeem().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::GrantUnknown), "{refused}");
    service.stop().await;
}

/// Inserts a boot token's grant as a row, without the service's checks.
async fn write_boot_grant(world: &TestInstallation, grant: &Grant) {
    let jws = grant.sign(&world.owner);
    sqlx::query(
        "INSERT INTO grants (id, cluster_id, kind, hash, token_key, jws, uses, expires_us,
             issued_by, stored_us) VALUES ($1, $2, 'boot', $3, $4, $5, 1, $6, 'owner', now_us())",
    )
    .bind(grant.id.to_string())
    .bind(grant.cluster)
    .bind(&jws.hash().0[..])
    .bind(&grant.key.as_bytes()[..])
    .bind(jws.as_str())
    .bind(i64::MAX)
    .execute(&mut world.database.connect().await)
    .await
    .unwrap();
}

/// Inserts a row of an agent into `statement`'s cluster, without the service's checks.
async fn write_agent(
    world: &TestInstallation,
    (statement, token): (&Statement, &Token),
    key: &SigningKey,
    signed: &SignedRecord,
) {
    sqlx::query(
        "INSERT INTO agents (cluster_id, size, key, grant_id, record, token_record, lease_us,
             highest_epoch, counts, held_us, redeemed_us)
         VALUES ($1, $2, $3, $4, $5, $6, now_us() + 3600000000, 0, 0, 0, now_us())",
    )
    .bind(statement.cluster)
    .bind(i16::from(statement.size))
    .bind(&key.public().as_bytes()[..])
    .bind(token.id().to_string())
    .bind(signed.record.as_str())
    .bind(signed.endorsement.as_str())
    .execute(&mut world.database.connect().await)
    .await
    .unwrap();
}

#[tokio::test]
async fn an_agents_row_that_somebody_wrote_into_the_table_gives_no_access_token() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 2).await;
    let token = world.token(&admin, &statement).await;
    let honest = TestAgent::new(&world, &service, &statement, &token, 1);
    honest.redeem().await.unwrap();
    // The intruder knows the grant and the texts that others have signed, but not the token.
    let intruder = TestAgent::new(&world, &service, &statement, &token, 2);
    let thiefs_token = Token::generate(TokenKind::Boot);
    let others = honest.record.sign(&honest.key, token.key());
    let own = intruder.record.sign(&intruder.key, thiefs_token.key());
    let mixed =
        SignedRecord { record: own.record.clone(), endorsement: others.endorsement.clone() };
    for (number, signed) in (1..).zip([&others, &own, &mixed]) {
        sqlx::query("DELETE FROM agents WHERE key = $1")
            .bind(&intruder.key.public().as_bytes()[..])
            .execute(&mut world.database.connect().await)
            .await
            .unwrap();
        write_agent(&world, (&statement, &token), &intruder.key, signed).await;
        // The error comes from the request for an access token, which the client sends before the
        // poll.
        let refused = intruder.poll(None).await.unwrap_err();
        assert_eq!(refused.code(), Some(Code::Internal), "{refused}");
        assert!(refused.to_string().contains("an agent's row"), "{refused}");
        let (_, metrics) = get(&world, &service, "/metrics").await;
        let alarms = format!(r#"alarms_total{{kind="agent_rows_ignored"}} {number}"#);
        assert!(metrics.contains(&alarms), "{metrics}");
    }
    // A row with the intruder's key is valid if the token signed the row's record.
    sqlx::raw_sql("DELETE FROM agents WHERE seat IS NULL AND standby IS NULL")
        .execute(&mut world.database.connect().await)
        .await
        .unwrap();
    let signed = intruder.record.sign(&intruder.key, token.key());
    write_agent(&world, (&statement, &token), &intruder.key, &signed).await;
    let found = service.app().store.cluster_of_agent(intruder.key.public()).await.unwrap();
    assert_eq!((found.cluster, found.forged), (Some(statement.cluster), vec![]));
    service.stop().await;
}

#[tokio::test]
async fn a_redeemed_ticket_that_somebody_wrote_into_the_table_gives_no_access_token() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    form(&mut [TestAgent::new(&world, &service, &statement, &token, 1)]).await;
    let ticket = world.ticket(&admin, &statement).await;
    let newcomer = TestAgent::new(&world, &service, &statement, &ticket, 2);
    newcomer.join().await.unwrap();
    let store = service.app().store.clone();
    let found = store.cluster_of_agent(newcomer.key.public()).await.unwrap();
    assert_eq!((found.cluster, found.forged), (Some(statement.cluster), vec![]));
    // The intruder's key replaces the newcomer's key in the ticket's row.
    let intruder = std::sync::Arc::new(SigningKey::generate());
    sqlx::query("UPDATE intents SET agent_key = $1")
        .bind(&intruder.public().as_bytes()[..])
        .execute(&mut world.database.connect().await)
        .await
        .unwrap();
    let client = world.client(&service, Some(&intruder));
    let refused = client.intents(statement.cluster, None, false).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::Internal), "{refused}");
    service.stop().await;
}

/// The service stores no grant with a time in the future. Such a row exists only if Postgres' clock
/// was set back after the insert.
#[tokio::test]
async fn a_boot_token_issued_in_the_future_takes_no_seat() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let cases = [(1, ISSUER_SKEW_SECONDS - 60, None), (2, 1_000, Some(Code::GrantRefused))];
    for (number, ahead, expected) in cases {
        let (token, grant) = world.grant(&admin, &statement);
        let grant = Grant { issued_at: grant.issued_at + ahead, ..grant };
        write_boot_grant(&world, &grant).await;
        let agent = TestAgent::new(&world, &service, &statement, &token, number);
        assert_eq!(agent.redeem().await.err().and_then(|refused| refused.code()), expected);
    }
    service.stop().await;
}

#[tokio::test]
async fn an_epoch_that_nobody_proposed_is_refused_and_the_cluster_still_forms() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 2).await;
    let token = world.token(&admin, &statement).await;
    let mut agents: Vec<TestAgent> =
        (1..=2).map(|i| TestAgent::new(&world, &service, &statement, &token, i)).collect();
    agents[0].redeem().await.unwrap();
    for epoch in [u64::MAX, i64::MAX as u64, 1 << 62, 2_000_000] {
        agents[0].highest_epoch = epoch;
        let refused = agents[0].poll(None).await.unwrap_err();
        assert_eq!(refused.code(), Some(Code::VoteRefused), "{refused}");
        let release = Release { cluster: statement.cluster, epoch }.sign(&agents[0].key);
        let refused = agents[0].client.release(statement.cluster, &release).await.unwrap_err();
        assert_eq!(refused.code(), Some(Code::VoteRefused), "{refused}");
    }
    agents[0].highest_epoch = 0;
    assert_eq!(form(&mut agents).await.state, ClusterState::Committed);
    // A boot counter that is too large for the database is refused. It isn't stored as another
    // number.
    agents[0].boot = u64::MAX;
    let refused = agents[0].poll(None).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::InvalidRequest), "{refused}");
    agents[0].boot = 1;
    agents[0].poll(None).await.unwrap();
    service.stop().await;
}

#[tokio::test]
async fn an_agent_restarted_after_the_commit_reports_and_the_cluster_is_formed() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    let mut agents = [TestAgent::new(&world, &service, &statement, &token, 1)];
    let last = form(&mut agents).await;
    let [mut agent] = agents;
    let report = |agent: &TestAgent| ReportRequest {
        session: agent.session(),
        h: agent.document(&last).hash(),
        raft_cluster_id: "00000000deadbeef".into(),
        member_id: "0000000000000001".into(),
        leader_id: None,
        raft_term: 2,
        raft_index: 4,
        membership: None,
        cas: None,
    };
    // The same boot counter with another nonce means that another process uses the key.
    agent.nonce = Nonce::random();
    let build = AgentBuild::own();
    let refused =
        agent.client.report(statement.cluster, &report(&agent), &build).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::KeyElsewhere), "{refused}");
    agent.boot += 1;
    let answer = agent.client.report(statement.cluster, &report(&agent), &build).await.unwrap();
    assert_eq!(answer.state, ClusterState::Formed);
    service.stop().await;
}

/// Pads the payload of `short` with spaces and signs it again. JSON allows such padding, so a
/// signer can use it.
fn padded(short: &Jws, key: &SigningKey, spaces: usize) -> Jws {
    let mut parts = short.as_str().split('.');
    let header = parts.next().unwrap();
    let payload = BASE64URL_NOPAD.decode(parts.next().unwrap().as_bytes()).unwrap();
    let payload = [payload, vec![b' '; spaces]].concat();
    let text = format!("{header}.{}", BASE64URL_NOPAD.encode(&payload));
    let signature = BASE64URL_NOPAD.encode(&key.sign(text.as_bytes()));
    format!("{text}.{signature}").parse().unwrap()
}

#[tokio::test]
async fn an_ack_that_was_padded_is_refused_so_that_the_document_stays_readable() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    let agent = TestAgent::new(&world, &service, &statement, &token, 1);
    let seen = agent.redeem().await.unwrap();
    let h = seen.proposal.as_ref().unwrap().hash();
    let ack = Ack { cluster: statement.cluster, epoch: seen.epoch, h };
    let ack = ack.sign(&agent.key);
    let long = padded(&ack, &agent.key, 900);
    let refused = agent.client.ack(statement.cluster, &long).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::VoteRefused), "{refused}");
    let short = padded(&ack, &agent.key, 9);
    let committed = agent.client.ack(statement.cluster, &short).await.unwrap();
    assert_eq!(committed.state, ClusterState::Committed);
    service.stop().await;
}

#[tokio::test]
async fn a_seat_that_was_padded_is_refused_so_that_the_document_stays_readable() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    // Pad each JWS to about the maximum length of its kind. Base64 encodes three bytes as four
    // characters.
    let filled = |jws: Jws, key: &SigningKey, length: usize| {
        padded(&jws, key, length.saturating_sub(jws.as_str().len()) * 3 / 4)
    };
    let (token, grant) = world.grant(&admin, &statement);
    admin.put_grant(&filled(grant.sign(&world.owner), &world.owner, 2_000)).await.unwrap();
    let agent = TestAgent::new(&world, &service, &statement, &token, 1);
    let redeem = async |length| {
        let record = agent.record.sign(&agent.key, token.key()).record;
        let record = filled(record, &agent.key, length);
        let (cluster, grant) = (statement.cluster, token.id());
        let endorsement = Endorsement { cluster, grant, record: record.hash() };
        let endorsement = Jws::sign(JwsType::Endorsement, token.key(), &endorsement);
        let redeem = Redeem {
            service: world.context.pins[0],
            cluster,
            statement: agent.statement,
            signed: SignedRecord { record, endorsement: filled(endorsement, token.key(), 2_000) },
            boot: 1,
            nonce: Nonce::random(),
            highest_epoch: 0,
            identity: None,
        };
        agent.client.redeem(&[redeem.sign(&agent.key)]).await
    };
    let refused = redeem(4_000).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::RecordRefused), "{refused}");
    redeem(2_900).await.unwrap();
    service.stop().await;
}

#[tokio::test]
async fn an_ack_of_another_epoch_than_the_list_does_not_count() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 2).await;
    let token = world.token(&admin, &statement).await;
    let mut agents: Vec<TestAgent> =
        (1..=2).map(|i| TestAgent::new(&world, &service, &statement, &token, i)).collect();
    for agent in &agents {
        agent.redeem().await.unwrap();
    }
    let seen = agents[0].poll_until(|seen| seen.proposal.is_some()).await;
    agents[0].ack(&seen).await.unwrap();
    sqlx::raw_sql("UPDATE acks SET epoch = epoch - 1")
        .execute(&mut world.database.connect().await)
        .await
        .unwrap();
    let signed = agents[1].ack(&seen).await.unwrap();
    assert_eq!(signed.state, ClusterState::Preparing, "one of two has signed it");
    service.stop().await;
}

#[tokio::test]
async fn a_refused_revocation_leaves_a_split_clusters_token_valid() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    sqlx::raw_sql("UPDATE clusters SET split_other = sha256('x'), split_epoch = 1")
        .execute(&mut world.database.connect().await)
        .await
        .unwrap();
    let refused = admin.revoke_grant(token.id()).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::Split), "{refused}");
    let shown = admin.show_grant(token.id()).await.unwrap().state;
    assert_eq!(shown, discovery_types::api::GrantState::Valid);
    service.stop().await;
}

#[tokio::test]
async fn an_admin_whom_the_statement_does_not_name_gets_no_client_certificate() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let other = std::sync::Arc::new(SigningKey::generate());
    let named = discovery_types::admin::Admin {
        key: *other.public(),
        name: "olga".parse().unwrap(),
        roles: vec![discovery_types::role::Role::Owner],
    };
    let chain = discovery_types::admin::AdminChain::root(world.owner.public());
    let add = chain.sign_next(&world.owner, discovery_types::admin::AdminOperation::Add(named));
    admin.put_admin(&add).await.unwrap();
    let request = { discovery_types::csr::NodeKey::generate().csr };
    admin.issue_credentials(statement.cluster, &request).await.unwrap();
    let client = world.client(&service, Some(&other));
    let refused = client.issue_credentials(statement.cluster, &request).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::NotInStatement), "{refused}");
    service.stop().await;
}

#[tokio::test]
async fn a_stuck_cluster_does_not_hide_other_due_clusters() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let one = world.cluster(&admin, "one", 1).await.cluster;
    let two = world.cluster(&admin, "two", 1).await.cluster;
    let store = service.app().store.clone();
    let mut connection = world.database.connect().await;
    let mut transaction = sqlx::Connection::begin(&mut connection).await.unwrap();
    sqlx::raw_sql("UPDATE clusters SET next_deadline_us = 1")
        .execute(&mut *transaction)
        .await
        .unwrap();
    transaction.commit().await.unwrap();
    let due = store.due_clusters(&[one]).await.unwrap();
    assert!(!due.contains(&one) && due.iter().all(|id| *id == two), "{due:?}");
    service.stop().await;
}

#[tokio::test]
async fn a_cluster_that_cant_be_read_does_not_stop_the_sweep_of_others() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let (one, two) = (world.cluster(&admin, "one", 1).await, world.cluster(&admin, "two", 1).await);
    for statement in [&one, &two] {
        let token = world.token(&admin, statement).await;
        TestAgent::new(&world, &service, statement, &token, 1).redeem().await.unwrap();
    }
    sqlx::query(
        "UPDATE clusters SET next_deadline_us = CASE WHEN id = $1 THEN 1 ELSE 2 END,
             frozen_h = CASE WHEN id = $1 THEN sha256('x') ELSE frozen_h END",
    )
    .bind(one.cluster)
    .execute(&mut world.database.connect().await)
    .await
    .unwrap();
    service.app().sweep().await.unwrap();
    let due = service.app().store.due_clusters(&[]).await.unwrap();
    assert_eq!(due, [one.cluster], "the other one's time was set anew");
    service.stop().await;
}

/// Counts the expired assertions. `FOR UPDATE` makes the count wait for a process that is deleting
/// them.
const ASSERTIONS_LEFT: &str =
    "SELECT count(*) FROM (SELECT FROM used_assertions WHERE expires_us = 0 FOR UPDATE) AS kept";

/// Inserts 2,500 assertions that expired long ago.
async fn expired_assertions(connection: &mut PgConnection) {
    sqlx::raw_sql(
        "INSERT INTO used_assertions SELECT sha256('x'), i::text, 0 FROM generate_series(1, 2500) i",
    )
    .execute(connection)
    .await
    .unwrap();
}

#[tokio::test]
async fn every_expired_assertion_is_deleted_at_once() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let mut connection = world.database.connect().await;
    expired_assertions(&mut connection).await;
    service.app().store.delete_expired().await.unwrap();
    let left: i64 = sqlx::query_scalar(ASSERTIONS_LEFT).fetch_one(&mut connection).await.unwrap();
    assert_eq!(left, 0);
    service.stop().await;
}

#[tokio::test]
async fn expired_assertions_that_another_process_deletes_cause_no_error() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let mut another = world.database.connect().await;
    expired_assertions(&mut another).await;
    let mut transaction = another.begin().await.unwrap();
    sqlx::query("DELETE FROM used_assertions WHERE expires_us = 0 AND jti::int <= 1000")
        .execute(&mut *transaction)
        .await
        .unwrap();
    service.app().store.delete_expired().await.unwrap();
    let left: i64 = sqlx::query_scalar(ASSERTIONS_LEFT).fetch_one(&mut *transaction).await.unwrap();
    assert_eq!(left, 0, "the sweep waited for the other one's, or ended with it");
    transaction.commit().await.unwrap();
    service.stop().await;
}

#[tokio::test]
async fn repeated_probes_and_releases_of_an_agent_add_no_events() {
    use discovery_types::api::{ProbeResult, ProbesRequest};
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 2).await;
    let token = world.token(&admin, &statement).await;
    let agents: Vec<TestAgent> =
        (1..=2).map(|i| TestAgent::new(&world, &service, &statement, &token, i)).collect();
    agents[0].redeem().await.unwrap();
    let seen = agents[1].redeem().await.unwrap();
    for attempt in 1..=5 {
        let error = Some(format!("attempt {attempt}"));
        let request = ProbesRequest {
            session: agents[1].session(),
            epoch: seen.epoch,
            h: seen.proposal.as_ref().unwrap().hash(),
            results: vec![ProbeResult { seat: 1, reached: false, error, round_trip_us: None }],
        };
        agents[1].client.send_probe_results(statement.cluster, &request).await.unwrap();
        let release = Release { cluster: statement.cluster, epoch: seen.epoch + attempt };
        let release = release.sign(&agents[0].key);
        agents[0].client.release(statement.cluster, &release).await.unwrap();
    }
    let mut connection = world.database.connect().await;
    for kind in ["probed", "released"] {
        let events: i64 = sqlx::query_scalar("SELECT count(*) FROM events WHERE kind = $1")
            .bind(kind)
            .fetch_one(&mut connection)
            .await
            .unwrap();
        assert_eq!(events, 1, "{kind}");
    }
    let matrix = agents[1].poll(None).await.unwrap().matrix;
    assert_eq!(matrix[0].results[0].error.as_deref(), Some("attempt 5"));
    service.stop().await;
}
