//! Tests of tokens that require an identity document of the host.

use std::sync::Arc;
use std::time::Duration;

use discovery_types::client::{ClientError, DiscoveryClient};
use discovery_types::digest::MemberId;
use discovery_types::grant::{Grant, ReplacementLimits, TokenKind};
use discovery_types::problem::{Code, Problem};
use discovery_types::raft_id;
use discovery_types::statement::Statement;
use discovery_types::token::Token;
use muster_identity::{Cloud, IdentityDocument, Requirement, fixtures};

use super::agent::{TestAgent, form};
use super::support::{TestInstallation, wait_until};
use crate::server::{RunningService, start};

/// Account that the tests' tokens require.
const ACCOUNT: &str = "123456789012";

/// A service that knows the clouds' keys, and one of its clusters.
struct World {
    installation: TestInstallation,
    service: RunningService,
    admin: DiscoveryClient,
    statement: Statement,
}

impl World {
    async fn new(size: u8) -> Self {
        let installation = TestInstallation::new().await;
        let keys = installation.folder.path().join("clouds");
        std::fs::create_dir(&keys).unwrap();
        std::fs::write(keys.join("aws.pem"), fixtures::CERTIFICATE).unwrap();
        let mut args = installation.args("ledger");
        args.identity_keys = Some(keys);
        args.times.lease = Duration::from_secs(3);
        args.times.poll = Duration::from_secs(1);
        let service = start(args).await.unwrap();
        let admin = installation.owner(&service);
        let statement = installation.cluster(&admin, "demo", size).await;
        Self { installation, service, admin, statement }
    }

    /// Makes a token that requires an AWS instance of at most an hour's age.
    async fn token(&self, change: impl Fn(&mut Grant)) -> Token {
        let (token, mut grant) = self.installation.grant(&self.admin, &self.statement);
        grant.require = vec![required(Cloud::Aws)];
        change(&mut grant);
        let token = match grant.kind {
            TokenKind::Boot => token,
            kind => Token::generate(kind),
        };
        (grant.id, grant.key) = (token.id(), *token.public());
        self.admin.put_grant(&grant.sign(&self.installation.owner)).await.unwrap();
        token
    }

    /// Makes a ticket that requires an AWS instance of at most an hour's age.
    async fn ticket(&self, replaces: Option<MemberId>) -> Token {
        self.token(|grant| {
            grant.kind = TokenKind::Join;
            grant.uses = 1;
            grant.expires_at = grant.issued_at + 900;
            grant.replaces = replaces;
        })
        .await
    }

    /// Makes a replacement policy that requires an AWS instance of at most an hour's age.
    async fn policy(&self) -> Token {
        self.token(|grant| {
            grant.version = 2;
            grant.kind = TokenKind::Heal;
            let limits = ReplacementLimits { after_seconds: 600, at_most: 3, per_seconds: 86_400 };
            grant.replacement = Some(limits);
        })
        .await
    }

    fn agent(&self, token: &Token, number: u16, identity: Option<IdentityDocument>) -> TestAgent {
        let (installation, service) = (&self.installation, &self.service);
        let mut agent = TestAgent::new(installation, service, &self.statement, token, number);
        agent.identity = identity;
        agent
    }

    /// Makes an identity document of an instance that started a minute ago.
    fn instance(&self, id: &str) -> Option<IdentityDocument> {
        Some(fixtures::aws(ACCOUNT, id, self.now() - 60))
    }

    fn now(&self) -> u64 {
        self.admin.service_now_ms().unsigned_abs() / 1_000
    }
}

fn required(cloud: Cloud) -> Requirement {
    Requirement {
        cloud,
        accounts: vec![ACCOUNT.to_owned()],
        regions: Vec::new(),
        tenant: None,
        audience: None,
        max_age_seconds: Some(3_600),
    }
}

/// Returns the problem document of a refused request.
fn problem<T: std::fmt::Debug>(answer: Result<T, ClientError>) -> Problem {
    match answer.unwrap_err() {
        ClientError::Problem(problem) => *problem,
        other => panic!("{other}"),
    }
}

/// Asserts that a host was refused for its identity, for this reason.
fn assert_refused<T: std::fmt::Debug>(answer: Result<T, ClientError>, why: &str, retryable: bool) {
    let problem = problem(answer);
    assert_eq!(problem.code, Code::GrantBinding, "{problem}");
    assert!(problem.to_string().contains(why), "{problem}");
    assert_eq!(problem.retryable, retryable, "{problem}");
}

#[tokio::test]
async fn a_seat_is_for_a_virtual_machine_that_the_token_requires() {
    let world = World::new(3).await;
    let token = world.token(|_| {}).await;
    let redeem = async |identity| world.agent(&token, 1, identity).redeem().await;
    assert_refused(redeem(None).await, "`--identity-from`", false);
    let foreign = fixtures::aws("999999999999", "i-1", world.now());
    assert_refused(redeem(Some(foreign)).await, "the account 999999999999", false);
    let old = fixtures::aws(ACCOUNT, "i-1", world.now() - 4_000);
    assert_refused(redeem(Some(old)).await, "s ago, and the token is for hosts of", false);
    let early = fixtures::aws(ACCOUNT, "i-1", world.now() + 4_000);
    assert_refused(redeem(Some(early)).await, "in the future", true);
    let mut forged = world.instance("i-1").unwrap();
    let last = forged.text.len() - 20;
    forged
        .text
        .replace_range(last..last + 1, if &forged.text[last..=last] == "A" { "B" } else { "A" });
    let refused = problem(redeem(Some(forged)).await);
    assert!(refused.detail.contains("identity document is refused"), "{refused}");
    let gcp = fixtures::gcp("p", "1", "a", (world.now(), world.now() + 60));
    assert_refused(redeem(Some(gcp)).await, "no key of gcp is trusted here", true);

    let own = world.agent(&token, 1, world.instance("i-1"));
    own.redeem().await.unwrap();
    // A key that redeems again needs no document, because a document can be too old by then.
    let mut again = world.agent(&token, 1, None);
    again = again.copy_with_key(&world.installation, &world.service, Arc::clone(&own.key));
    again.boot = 2;
    again.redeem().await.unwrap();
    let shown = world.admin.redemptions(token.id()).await.unwrap().redemptions;
    assert_eq!(shown.len(), 1);
    assert_eq!(shown[0].instance.as_deref(), Some("aws:i-1"));
    world.service.stop().await;
}

#[tokio::test]
async fn a_document_that_is_shown_again_gives_no_second_seat_while_the_first_host_lives() {
    let world = World::new(3).await;
    let token = world.token(|_| {}).await;
    let own = world.agent(&token, 1, world.instance("i-1"));
    own.redeem().await.unwrap();
    let thief = world.agent(&token, 2, world.instance("i-1"));
    assert_refused(thief.redeem().await, "aws:i-1 takes part already", true);
    world.agent(&token, 3, world.instance("i-2")).redeem().await.unwrap();
    // The host was rebuilt. Its new key gets a seat when the lease of its silent old key has ended.
    wait_until("the old key's lease to end", async || thief.redeem().await.is_ok()).await;
    world.service.stop().await;
}

/// A key that redeemed a token without requirements must meet the requirements of another token.
#[tokio::test]
async fn a_known_key_must_meet_another_tokens_requirements() {
    let world = World::new(3).await;
    let open = world.token(|grant| grant.require = Vec::new()).await;
    let first = world.agent(&open, 1, None);
    first.redeem().await.unwrap();
    let required = world.token(|_| {}).await;
    let with_key = |identity| {
        let again = world.agent(&required, 1, identity);
        let key = Arc::clone(&first.key);
        TestAgent { boot: 2, ..again.copy_with_key(&world.installation, &world.service, key) }
    };
    assert_refused(with_key(None).redeem().await, "`--identity-from`", false);
    with_key(world.instance("i-1")).redeem().await.unwrap();
    let shown = world.admin.redemptions(required.id()).await.unwrap().redemptions;
    assert_eq!(shown[0].instance.as_deref(), Some("aws:i-1"));
    // The virtual machine counts as used, although its key first redeemed a token without the
    // document.
    let other = world.agent(&required, 2, world.instance("i-1"));
    assert_refused(other.redeem().await, "i-1 takes part already", true);
    // A revoked token admits no known key either.
    let revoked = world.token(|grant| grant.require = Vec::new()).await;
    world.admin.revoke_grant(revoked.id()).await.unwrap();
    let again = world.agent(&revoked, 1, None);
    let key = Arc::clone(&first.key);
    let again =
        TestAgent { boot: 3, ..again.copy_with_key(&world.installation, &world.service, key) };
    assert_eq!(problem(again.redeem().await).code, Code::GrantRevoked);
    world.service.stop().await;
}

#[tokio::test]
async fn a_virtual_machine_that_is_a_member_cannot_join_again() {
    let world = World::new(1).await;
    let token = world.token(|_| {}).await;
    let mut founders = vec![world.agent(&token, 1, world.instance("i-1"))];
    let seen = form(&mut founders).await;
    let founder =
        raft_id::of_founder(&founders[0].document(&seen).hash(), &founders[0].record.peer_urls);
    let ticket = world.ticket(None).await;
    let join = async |token: &Token, identity| world.agent(token, 8, identity).join().await;
    assert_refused(join(&ticket, None).await, "`--identity-from`", false);
    assert_refused(join(&ticket, world.instance("i-1")).await, "is member node-1", false);
    // The refused host has not used the ticket up.
    let newcomer = world.agent(&ticket, 8, world.instance("i-2"));
    newcomer.join().await.unwrap();
    newcomer.join().await.unwrap();
    let other = world.ticket(None).await;
    assert_refused(join(&other, world.instance("i-2")).await, "i-2 waits for a place", true);
    // The ticket of a rebuilt machine replaces the machine's own member.
    let rebuilt = world.ticket(Some(founder)).await;
    world.agent(&rebuilt, 9, world.instance("i-1")).join().await.unwrap();
    world.service.stop().await;
}

#[tokio::test]
async fn the_machine_of_a_removed_member_may_come_back_with_a_ticket() {
    let world = World::new(1).await;
    let token = world.token(|_| {}).await;
    let mut founders = vec![world.agent(&token, 1, world.instance("i-1"))];
    let seen = form(&mut founders).await;
    let h = founders[0].document(&seen).hash();
    let founder = raft_id::of_founder(&h, &founders[0].record.peer_urls);
    sqlx::query(
        "INSERT INTO removed_members (cluster_id, member_id, agent_key, at_us, by)
         VALUES ($1, $2, $3, 1, 'owner')",
    )
    .bind(world.statement.cluster)
    .bind(&founder.0[..])
    .bind(&founders[0].key.public().as_bytes()[..])
    .execute(&mut world.installation.database.connect().await)
    .await
    .unwrap();
    let ticket = world.ticket(None).await;
    world.agent(&ticket, 9, world.instance("i-1")).join().await.unwrap();
    world.service.stop().await;
}

#[tokio::test]
async fn a_standby_under_a_policy_is_a_virtual_machine_that_waits_once() {
    let world = World::new(1).await;
    let policy = world.policy().await;
    let mut founders = vec![world.agent(&policy, 1, world.instance("i-1"))];
    form(&mut founders).await;
    let join = async |number, identity| world.agent(&policy, number, identity).join().await;
    assert_refused(join(7, None).await, "`--identity-from`", false);
    assert_refused(join(7, world.instance("i-1")).await, "is member node-1", false);
    join(8, world.instance("i-2")).await.unwrap();
    assert_refused(join(9, world.instance("i-2")).await, "i-2 waits for a place", true);
    // The first host counts as gone, because it hasn't asked for its intent for five minutes.
    sqlx::query("UPDATE intents SET seen_us = seen_us - 300000000")
        .execute(&mut world.installation.database.connect().await)
        .await
        .unwrap();
    join(9, world.instance("i-2")).await.unwrap();
    world.service.stop().await;
}

#[tokio::test]
async fn keys_are_read_again_and_a_broken_file_leaves_the_last_ones_in_use() {
    let world = World::new(3).await;
    let token = world.token(|grant| grant.require = vec![required(Cloud::Gcp)]).await;
    let mut agent = world.agent(&token, 1, None);
    let audience = muster_identity::audience(&world.statement.cluster, &agent.key.key_id());
    let times = (world.now() - 60, world.now() + 600);
    agent.identity = Some(fixtures::gcp(ACCOUNT, "77", &audience, times));
    assert_refused(agent.redeem().await, "no key of gcp is trusted here", true);
    let folder = world.installation.folder.path().join("clouds");
    std::fs::write(folder.join("gcp.json"), fixtures::jwks()).unwrap();
    let app = world.service.app();
    app.identity_keys.reload(&app.metrics);
    std::fs::write(folder.join("aws.pem"), "junk").unwrap();
    app.identity_keys.reload(&app.metrics);
    // The document is bound to the first agent's key, so another agent can't use it.
    let stolen = world.agent(&token, 2, agent.identity.clone());
    assert_refused(stolen.redeem().await, "for the audience", false);
    agent.redeem().await.unwrap();
    world.service.stop().await;

    let mut args = world.installation.args("ledger");
    args.identity_keys = Some(folder);
    let error = start(args).await.err().unwrap();
    let text =
        format!("{error:#} {:?}", std::error::Error::source(&error).map(ToString::to_string));
    assert!(text.contains("--identity-keys") && text.contains("aws.pem"), "{text}");
}
