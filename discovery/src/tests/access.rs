//! Tests of authentication and authorisation.

use std::sync::Arc;

use discovery_types::access::{AccessToken, Assertion, JWT_BEARER};
use discovery_types::admin::{Admin, AdminChain, AdminOperation};
use discovery_types::api::{ClusterQuery, TokenRequest, TokenResponse};
use discovery_types::jws::JwsType;
use discovery_types::key::SigningKey;
use discovery_types::problem::{Code, Problem};
use discovery_types::role::Role;
use tokio::io::AsyncWriteExt;

use super::malformed::{CallerKind, connect, read_answer};
use super::support::{TestInstallation, send_with};
use crate::server::{RunningService, start};

async fn exchange(
    world: &TestInstallation,
    service: &RunningService,
    tls: &SigningKey,
    assertion: &discovery_types::jws::Jws,
) -> (u16, String) {
    let form = format!("grant_type={}&assertion={assertion}", JWT_BEARER.replace(':', "%3A"));
    let kind = "application/x-www-form-urlencoded";
    let headers = [("content-type", kind)];
    send_with(world, service, Some(tls), "POST", "/v1/token", &headers, form).await
}

/// Returns the value of an `Authorization` header for the owner.
pub(super) async fn owner_authorization(
    world: &TestInstallation,
    service: &RunningService,
) -> String {
    let issuer = world.owner(service).context().await.unwrap().issuer;
    let assertion = Assertion::sign(&world.owner, &issuer, service.app().clock.seconds());
    let (_, body) = exchange(world, service, &world.owner, &assertion).await;
    let token: TokenResponse = serde_json::from_str(&body).unwrap();
    format!("Bearer {}", token.access_token)
}

fn code(body: &str) -> Code {
    serde_json::from_str::<Problem>(body).unwrap_or_else(|_| panic!("{body}")).code
}

/// Two processes get one assertion many times at the same time: each request has a connection of
/// its own, and is sent once all connections are open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_assertion_gives_one_token_however_often_it_is_sent() {
    const SENT: usize = 100;
    let world = TestInstallation::new().await;
    let services = [world.serve().await, start(world.args("ledger-2")).await.unwrap()];
    let issuer = world.owner(&services[0]).context().await.unwrap().issuer;
    let assertion = Assertion::sign(&world.owner, &issuer, services[0].app().clock.seconds());
    let form = format!("grant_type={}&assertion={assertion}", JWT_BEARER.replace(':', "%3A"));
    let request = format!(
        "POST /v1/token HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\
         content-type: application/x-www-form-urlencoded\r\n\r\n{form}",
        form.len()
    );
    let caller = CallerKind { key: Some(world.owner.clone()), authorization: None };
    let mut connections = Vec::new();
    for number in 0..SENT {
        connections.push(connect(&world, &services[number % 2], &caller).await);
    }
    let answers = connections.iter_mut().map(async |connection| {
        connection.write_all(request.as_bytes()).await.unwrap();
        read_answer(connection, true).await.unwrap()
    });
    let answers = futures_util::future::join_all(answers).await;
    let won = answers.iter().filter(|answer| answer.status == 200).count();
    assert_eq!(won, 1, "{:?}", answers.iter().map(|answer| answer.status).collect::<Vec<_>>());
    for lost in answers.iter().filter(|answer| answer.status != 200) {
        assert_eq!((lost.status, code(&lost.body)), (401, Code::AssertionRefused));
    }
    for service in services {
        service.stop().await;
    }
}

/// Sets the database's clock ahead by `ahead_us` microseconds, and lets the service read it.
async fn set_clock(world: &TestInstallation, service: &RunningService, ahead_us: i64) {
    let sql = format!(
        "CREATE OR REPLACE FUNCTION now_us() RETURNS bigint LANGUAGE sql VOLATILE AS
         'SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint + {ahead_us}'"
    );
    let mut connection = world.database.connect().await;
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
    service.app().sweep().await.unwrap();
}

#[tokio::test]
async fn a_clock_that_was_ahead_for_a_while_lets_no_assertion_be_used_twice() {
    const TEN_MINUTES: i64 = 600_000_000;
    let world = TestInstallation::new().await;
    let mut args = world.args("ledger");
    args.times.sweep = std::time::Duration::from_secs(3_600);
    let service = crate::server::start(args).await.unwrap();
    let issuer = service.app().issuer.to_string();
    let now = service.app().clock.seconds();
    let assertion = Assertion::sign(&world.owner, &issuer, now);
    assert_eq!(exchange(&world, &service, &world.owner, &assertion).await.0, 200);
    set_clock(&world, &service, TEN_MINUTES).await;
    set_clock(&world, &service, 0).await;
    let (status, body) = exchange(&world, &service, &world.owner, &assertion).await;
    assert_eq!((status, code(&body)), (401, Code::AssertionRefused), "{body}");
    // An assertion that was used while the clock was ahead can't be used after the clock was set
    // back.
    set_clock(&world, &service, TEN_MINUTES).await;
    let ahead = Assertion::sign(&world.owner, &issuer, service.app().clock.seconds());
    assert_eq!(exchange(&world, &service, &world.owner, &ahead).await.0, 200);
    set_clock(&world, &service, 0).await;
    let (status, body) = exchange(&world, &service, &world.owner, &ahead).await;
    assert_eq!((status, code(&body)), (401, Code::AssertionRefused), "{body}");
    service.stop().await;
}

#[tokio::test]
async fn a_token_is_refused_with_another_client_key_or_without_one() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let bearer = owner_authorization(&world, &service).await;
    let headers = [("authorization", bearer.as_str())];
    let ask = async |key: Option<&SigningKey>| {
        let answer = send_with(&world, &service, key, "GET", "/v1/clusters", &headers, "".into());
        answer.await
    };
    assert_eq!(ask(Some(&world.owner)).await.0, 200);
    let thief = SigningKey::generate();
    let (status, body) = ask(Some(&thief)).await;
    assert_eq!((status, code(&body)), (401, Code::TokenInvalid));
    let (status, body) = ask(None).await;
    assert_eq!((status, code(&body)), (401, Code::ClientKeyMissing));
    service.stop().await;
}

#[tokio::test]
async fn invalid_assertions_and_forged_tokens_are_refused() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let now = service.app().clock.seconds();
    let issuer = service.app().issuer.to_string();
    let nobody = SigningKey::generate();
    let mut timed = 0;
    for (key, assertion, wanted) in [
        (&nobody, Assertion::sign(&nobody, &issuer, now), Code::UnknownKey),
        (&nobody, Assertion::sign(&world.owner, &issuer, now), Code::AssertionRefused),
        (&world.owner, Assertion::sign(&world.owner, "urn:another", now), Code::AssertionRefused),
        (&world.owner, Assertion::sign(&world.owner, &issuer, now - 61), Code::AssertionRefused),
        (&world.owner, Assertion::sign(&world.owner, &issuer, now + 30), Code::AssertionRefused),
    ] {
        let (status, body) = exchange(&world, &service, key, &assertion).await;
        assert_eq!((status, code(&body)), (401, wanted), "{body}");
        let problem: Problem = serde_json::from_str(&body).unwrap();
        let clock = problem.detail.contains("not valid at this time");
        assert_eq!(problem.retryable, clock, "{body}");
        timed += u32::from(clock);
    }
    assert_eq!(timed, 2, "a clock that is wrong may be right the next time");
    // The owner signs an access token itself, in place of the service.
    let good = service
        .app()
        .issue_access_token(world.owner.public(), discovery_types::access::ClientKind::Admin);
    let claims: AccessToken = good.access_token.claims_unverified(JwsType::Access).unwrap();
    let forged = format!("Bearer {}", claims.sign(&world.owner));
    for (bearer, wanted) in [
        (forged.as_str(), Code::TokenInvalid),
        ("Bearer e30.e30.e30", Code::TokenInvalid),
        ("Basic YTpi", Code::TokenMissing),
    ] {
        let headers = [("authorization", bearer)];
        let key = Some(&*world.owner);
        let answer = send_with(&world, &service, key, "GET", "/v1/admins", &headers, "".into());
        let (status, body) = answer.await;
        assert_eq!((status, code(&body)), (401, wanted), "{body}");
    }
    let _ = TokenRequest { grant_type: String::new(), assertion: good.access_token };
    service.stop().await;
}

#[tokio::test]
async fn added_and_revoked_admins_gain_and_lose_access_at_once() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let auditor = Arc::new(SigningKey::generate());
    let client = world.client(&service, Some(&auditor));
    assert_eq!(
        client.list_clusters(&ClusterQuery::default()).await.unwrap_err().code(),
        Some(Code::UnknownKey)
    );

    let mut chain = AdminChain::root(world.owner.public());
    let named = Admin {
        key: *auditor.public(),
        name: "audrey".parse().unwrap(),
        roles: vec![Role::Auditor],
    };
    let add = chain.sign_next(&world.owner, AdminOperation::Add(named));
    for _ in 0..2 {
        assert_eq!(admin.put_admin(&add).await.unwrap().admins.len(), 2);
    }
    chain.append(&add).unwrap();
    client.list_clusters(&ClusterQuery::default()).await.unwrap();
    let draft = discovery_types::api::DraftRequest { name: "demo".parse().unwrap(), size: 3 };
    assert_eq!(client.create_draft(&draft).await.unwrap_err().code(), Some(Code::Forbidden));

    let revoke = chain.sign_next(&world.owner, AdminOperation::Revoke(*auditor.public()));
    admin.put_admin(&revoke).await.unwrap();
    let refused = client.list_clusters(&ClusterQuery::default()).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::UnknownKey), "its token dies with its role");
    service.stop().await;
}

#[tokio::test]
async fn an_admin_planted_in_the_database_has_no_rights_and_raises_an_alarm() {
    let world = TestInstallation::new().await;
    let mut args = world.args("ledger");
    // Prevent further sweeps: a sweep reads the rows too, and could raise the alarm in place of the
    // request.
    args.times.sweep = std::time::Duration::from_secs(3_600);
    let service = crate::server::start(args).await.unwrap();
    let thief = Arc::new(SigningKey::generate());
    let planted =
        Admin { key: *thief.public(), name: "thief".parse().unwrap(), roles: vec![Role::Owner] };
    let element =
        AdminChain::root(world.owner.public()).sign_next(&thief, AdminOperation::Add(planted));
    sqlx::query("INSERT INTO admin_elements VALUES (1, $1, $2, 0)")
        .bind(&element.hash().0[..])
        .bind(element.as_str())
        .execute(&mut world.database.connect().await)
        .await
        .unwrap();
    let client = world.client(&service, Some(&thief));
    assert_eq!(
        client.list_clusters(&ClusterQuery::default()).await.unwrap_err().code(),
        Some(Code::UnknownKey)
    );
    let (_, metrics) = super::support::get(&world, &service, "/metrics").await;
    assert!(metrics.contains(r#"alarms_total{kind="admin_rows_ignored"} 1"#), "{metrics}");
    assert_eq!(world.owner(&service).list_admins().await.unwrap().admins.len(), 1);
    service.stop().await;
}

/// While a command waits for input at its prompt, the service closes the idle connection, and the
/// client doesn't notice. The next request needs a new connection.
#[tokio::test]
async fn an_admin_who_thinks_for_a_while_can_still_send() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    // The service ends an idle connection after five seconds.
    std::thread::sleep(std::time::Duration::from_secs(7));
    let abandoned = admin.abandon(statement.cluster, "the test").await;
    assert!(abandoned.is_ok(), "{abandoned:?}");
    service.stop().await;
}
