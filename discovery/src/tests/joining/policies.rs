//! Tests of replacement policies: who may make them, and the hosts that wait under them.

use discovery_types::admin::Admin;
use discovery_types::api::{EventQuery, GrantQuery, GrantState, IntentState, Outcome};
use discovery_types::client::DiscoveryClient;
use discovery_types::digest::MemberId;
use discovery_types::grant::{Grant, ReplacementLimits, TokenKind};
use discovery_types::intent::{IntentChange, Verb, VerifiedIntent};
use discovery_types::key::SigningKey;
use discovery_types::problem::Code;
use discovery_types::role::Role;
use discovery_types::statement::Statement;
use discovery_types::token::Token;

use super::present::{founders, report_all, silence};
use super::{CommittedCluster, added, code};
use crate::tests::agent::{TestAgent, form};
use crate::tests::support::TestInstallation;

/// Makes a policy without sending it.
fn policy_grant(
    world: &TestInstallation,
    admin: &DiscoveryClient,
    statement: &Statement,
) -> (Token, Grant) {
    let token = Token::generate(TokenKind::Heal);
    let (_, grant) = world.grant(admin, statement);
    let limits = ReplacementLimits { after_seconds: 600, at_most: 3, per_seconds: 86_400 };
    let grant = Grant {
        version: 2,
        id: token.id(),
        kind: TokenKind::Heal,
        key: *token.public(),
        expires_at: grant.issued_at + 90 * 86_400,
        replacement: Some(limits),
        ..grant
    };
    (token, grant)
}

/// Makes a policy whose token can be redeemed.
pub(super) async fn policy(cluster: &CommittedCluster) -> (Token, Grant) {
    let (token, grant) = policy_grant(&cluster.world, &cluster.admin, &cluster.statement);
    cluster.admin.put_grant(&grant.sign(&cluster.world.owner)).await.unwrap();
    (token, grant)
}

impl CommittedCluster {
    fn standby(&self, token: &Token, number: u16) -> TestAgent {
        TestAgent::new(&self.world, &self.service, &self.statement, token, number)
    }

    /// Sets the time at which each standby was last heard of back by `seconds`.
    async fn age_standbys(&self, seconds: i64) {
        sqlx::query("UPDATE intents SET seen_us = seen_us - $1")
            .bind(seconds * 1_000_000)
            .execute(&mut self.world.database.connect().await)
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn one_bundle_forms_a_cluster_and_later_lets_hosts_wait_for_a_place() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 2).await;
    let (token, grant) = policy_grant(&world, &admin, &statement);
    admin.put_grant(&grant.sign(&world.owner)).await.unwrap();
    let agent = |number| TestAgent::new(&world, &service, &statement, &token, number);
    let mut founders = vec![agent(1), agent(2)];
    form(&mut founders).await;

    let late = agent(9);
    assert_eq!(code(late.redeem().await), Code::BootClosed);
    let shown = admin.show_cluster(statement.cluster).await.unwrap();
    assert!(shown.asking.is_empty(), "it needs no ticket: {:?}", shown.asking);
    let joined = late.join().await.unwrap();
    assert_eq!((joined.intent.state, joined.intent.policy), (IntentState::Open, Some(grant.id)));

    let list = founders[0].client.intents(statement.cluster, None, false).await.unwrap();
    let [policy] = &list.policies[..] else { panic!("{:?}", list.policies) };
    assert!(policy.grant == grant.sign(&world.owner) && !policy.is_revoked);
    let [view] = &list.intents[..] else { panic!("{:?}", list.intents) };
    let chain = joined.statements;
    let chain =
        discovery_types::statement::StatementChain::verify_from_pin(&chain, &late.statement)
            .unwrap();
    let intent = VerifiedIntent::verify(&view.intent, &chain).unwrap();
    let IntentChange::Add { record, replaces } = intent.change() else { panic!("{intent:?}") };
    assert_eq!((record.agent_key, *replaces), (late.record.agent_key, None));
    assert_eq!((intent.verb, intent.policy().unwrap().id), (Verb::Replace, grant.id));
    let member = MemberId::new(5);
    assert_eq!(intent.with_replaced_member(member).leaving_member(), Some(member));
    assert_eq!(late.join().await.unwrap().intent, *view, "the same key, the same answer");
    service.stop().await;
}

#[tokio::test]
async fn hosts_under_one_policy_have_changes_of_their_own_up_to_a_limit() {
    let cluster = CommittedCluster::of(1).await;
    let (token, _) = policy(&cluster).await;
    let mut operations = Vec::new();
    for number in 10..18 {
        let joined = cluster.standby(&token, number).join().await.unwrap();
        operations.push(joined.intent.intent.operation);
    }
    operations.sort_unstable();
    operations.dedup();
    assert_eq!(operations.len(), 8);
    let ninth = cluster.standby(&token, 18);
    let refused = ninth.join().await.unwrap_err();
    assert!(refused.code() == Some(Code::Conflict) && refused.is_retryable(), "{refused}");
    // The limit on standbys doesn't hold up tickets.
    cluster.newcomer(30).await.join().await.unwrap();
    cluster.age_standbys(121).await;
    ninth.join().await.unwrap();
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_silent_standby_is_hidden_until_it_asks_again() {
    let cluster = CommittedCluster::of(1).await;
    let id = cluster.statement.cluster;
    let (token, _) = policy(&cluster).await;
    let standby = cluster.standby(&token, 9);
    let operation = standby.join().await.unwrap().intent.intent.operation;
    let listed = async || {
        let list = cluster.agents[0].client.intents(id, None, false).await.unwrap();
        (list.rev, list.intents.len())
    };
    cluster.age_standbys(119).await;
    assert_eq!(listed().await.1, 1);
    cluster.age_standbys(2).await;
    let (rev, count) = listed().await;
    assert_eq!(count, 0);
    let gone = cluster.admin.intent(id, operation, None).await.unwrap();
    assert_eq!((gone.state, gone.explain[0].code.as_str()), (IntentState::Expired, "standby_gone"));
    standby.client.intent(id, operation, None).await.unwrap();
    assert_eq!(listed().await.1, 1);
    assert!(listed().await.0 > rev, "agents that poll learn of it");

    // A standby whose last request is more than a day old is deleted when the next host becomes a
    // standby.
    cluster.age_standbys(86_401).await;
    cluster.standby(&token, 10).join().await.unwrap();
    assert_eq!(code(cluster.admin.intent(id, operation, None).await), Code::NotFound);
    cluster.service.stop().await;
}

#[tokio::test]
async fn the_replaced_member_is_known_by_what_the_clusters_agents_report() {
    let cluster = CommittedCluster::of(1).await;
    let id = cluster.statement.cluster;
    let (token, grant) = policy(&cluster).await;
    let standby = cluster.standby(&token, 9);
    let view = standby.join().await.unwrap().intent;
    assert_eq!(view.about, None);
    let Outcome::Added { member, initial_cluster, .. } = added(77) else { unreachable!() };
    let dead = MemberId::new(5);
    let outcome = Outcome::Added { member, initial_cluster, replaces: Some(dead) };
    let founder = &cluster.agents[0];
    let said = cluster.report_outcome(founder, &view, outcome, 20).await.unwrap();
    assert_eq!(said.about, Some(dead));
    let text = &said.explain[0].missing;
    assert!(text.contains(&format!("by replacement policy {}", grant.id)), "{text}");
    let promoted = Outcome::Promoted { member };
    let said = cluster.report_outcome(founder, &view, promoted, 30).await.unwrap();
    assert_eq!((said.state, said.about), (IntentState::Promoted, Some(dead)));
    let metrics = cluster.service.app().metrics.text();
    for (sample, number) in [
        ("intents_total{verb=\"replace\",state=\"open\"}", 1),
        ("intents_total{verb=\"replace\",state=\"added\"}", 1),
        ("intents_total{verb=\"replace\",state=\"promoted\"}", 1),
        ("policy_replacements_total", 1),
    ] {
        assert!(metrics.contains(&format!("muster_discovery_{sample} {number}\n")), "{metrics}");
    }
    let used = cluster.admin.redemptions(grant.id).await.unwrap().redemptions;
    let [host] = &used[..] else { panic!("{used:?}") };
    assert_eq!((host.name.as_str(), host.member), ("node-9", Some(member)));
    assert_eq!(host.address.as_deref(), Some("127.0.0.1"));
    assert_eq!((host.seat, host.change), (None, Some(IntentState::Promoted)));
    let boot = cluster.admin.redemptions(cluster.token.id()).await.unwrap().redemptions;
    assert_eq!(boot.iter().map(|host| host.seat).collect::<Vec<_>>(), [Some(1)]);
    // The new member may read intents, and doesn't count as a standby.
    assert!(standby.client.intents(id, None, false).await.is_ok());
    cluster.service.stop().await;
}

/// Explanations of newcomers and standbys name the policy's id.
#[tokio::test]
async fn explanations_name_the_policy() {
    let cluster = CommittedCluster::of(3).await;
    let id = cluster.statement.cluster;
    report_all(&cluster, 3, &founders(&cluster)).await;
    silence(&cluster, &[1]).await;
    let explained = async || {
        let told = cluster.admin.explain(id).await.unwrap().explain;
        let of_policies = told.into_iter().filter(|line| line.code.contains("standby"));
        of_policies.map(|line| (line.code, line.missing, line.command)).collect::<Vec<_>>()
    };
    assert!(explained().await.is_empty(), "without a policy, nobody waits for a host");

    let (token, grant) = policy(&cluster).await;
    let policy_id = grant.id.to_string();
    let list = "muster-discovery policy list --cluster demo".to_owned();
    let expect_no_standby = async || {
        let lines = explained().await;
        let [(code, text, command)] = &lines[..] else { panic!("{lines:?}") };
        assert_eq!((code.as_str(), command.as_ref()), ("no_standby", Some(&list)));
        assert!(text.contains(&policy_id), "{text}");
    };
    expect_no_standby().await;

    let host = cluster.standby(&token, 9);
    let view = host.join().await.unwrap().intent;
    let text = &view.explain[0].missing;
    assert!(text.contains(&format!("waits, by replacement policy {policy_id}")), "{text}");
    let lines = explained().await;
    let [(code, text, _)] = &lines[..] else { panic!("{lines:?}") };
    let told = format!("node-9 is a standby by replacement policy {policy_id}: ");
    assert!(code == "standby" && text.starts_with(&told), "{code}: {text}");

    cluster.age_standbys(121).await;
    expect_no_standby().await;
    let gone = cluster.admin.intent(id, view.intent.operation, None).await.unwrap();
    let text = &gone.explain[0].missing;
    assert!(text.contains(&format!("waited by replacement policy {policy_id}")), "{text}");

    cluster.admin.revoke_grant(grant.id).await.unwrap();
    assert!(explained().await.is_empty(), "a revoked policy waits for nobody");
    cluster.service.stop().await;
}

/// The event of a redeemed policy or ticket tells who came with which token, and from where.
#[tokio::test]
async fn the_event_of_a_redeem_names_the_token_the_key_and_the_zone() {
    let cluster = CommittedCluster::of(1).await;
    let (token, grant) = policy(&cluster).await;
    let mut standby = cluster.standby(&token, 9);
    standby.record.zone = Some("zone-a".parse().unwrap());
    let newcomer = cluster.newcomer(30).await;
    for host in [&standby, &newcomer] {
        host.join().await.unwrap();
    }
    let query = EventQuery { stream: cluster.statement.cluster, after: None, limit: Some(1_000) };
    let events = cluster.admin.events(&query).await.unwrap().events;
    let bodies: Vec<serde_json::Value> = events
        .iter()
        .filter(|event| event.kind == "intent")
        .map(|event| serde_json::from_str(&event.body).unwrap())
        .collect();
    let [by_policy, by_ticket] = &bodies[..] else { panic!("{bodies:?}") };
    for (body, host, grant) in
        [(by_policy, &standby, grant.id), (by_ticket, &newcomer, newcomer.record.grant)]
    {
        assert_eq!(body["grant"], grant.to_string(), "{body}");
        assert_eq!(body["key"], host.key.public().key_id().to_string(), "{body}");
        assert_eq!((&body["by"], &body["address"]), (&"owner".into(), &"127.0.0.1".into()));
    }
    assert_eq!((&by_policy["zone"], by_ticket.get("zone")), (&"zone-a".into(), None));
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_revoked_policy_admits_nobody_and_the_agents_are_told() {
    let cluster = CommittedCluster::of(1).await;
    let id = cluster.statement.cluster;
    let (token, grant) = policy(&cluster).await;
    let before = cluster.agents[0].client.intents(id, None, false).await.unwrap();
    let view = cluster.admin.revoke_grant(grant.id).await.unwrap();
    assert_eq!(view.state, GrantState::Revoked);
    let after = cluster.agents[0].client.intents(id, None, false).await.unwrap();
    assert!(after.rev > before.rev && after.policies[0].is_revoked, "{:?}", after.policies);
    assert_eq!(code(cluster.standby(&token, 9).join().await), Code::GrantRevoked);
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_cluster_has_at_most_eight_policies() {
    let cluster = CommittedCluster::of(1).await;
    let mut first = None;
    for _ in 0..8 {
        let (_, grant) = policy(&cluster).await;
        first.get_or_insert(grant);
    }
    let (_, ninth) = policy_grant(&cluster.world, &cluster.admin, &cluster.statement);
    let ninth = ninth.sign(&cluster.world.owner);
    let query = GrantQuery { policies: Some(true), ..GrantQuery::default() };
    let listed = cluster.admin.list_grants(None, &query).await.unwrap().grants;
    assert!(listed.len() == 8 && listed.iter().all(|view| view.grant.kind == TokenKind::Heal));
    assert_eq!(code(cluster.admin.put_grant(&ninth).await), Code::Conflict);
    cluster.admin.revoke_grant(first.unwrap().id).await.unwrap();
    cluster.admin.put_grant(&ninth).await.unwrap();
    cluster.service.stop().await;
}

/// An operator's policy gives no seat in a forming cluster, and an issuer can't sign a policy.
#[tokio::test]
async fn an_operators_policy_gives_no_seat_and_an_issuer_makes_none() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let owner = world.owner(&service);
    let (operator, issuer) = (SigningKey::generate(), SigningKey::generate());
    let mut statement = world.draft(&owner, "demo", 1).await;
    for (key, name, role) in
        [(&operator, "operator", Role::Operator), (&issuer, "issuer", Role::Issuer)]
    {
        let name = name.parse().unwrap();
        statement.admins.push(Admin { key: *key.public(), name, roles: vec![role] });
    }
    owner.put_statement(statement.cluster, &statement.sign(&world.owner)).await.unwrap();
    let (token, grant) = policy_grant(&world, &owner, &statement);
    assert!(owner.put_grant(&grant.sign(&issuer)).await.is_err());
    owner.put_grant(&grant.sign(&operator)).await.unwrap();
    let host = TestAgent::new(&world, &service, &statement, &token, 1);
    assert_eq!(code(host.redeem().await), Code::GrantUnknown);

    let boot = world.token(&owner, &statement).await;
    form(&mut [TestAgent::new(&world, &service, &statement, &boot, 2)]).await;
    host.join().await.unwrap();
    service.stop().await;
}
