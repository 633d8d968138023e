//! Tests of the scope of admins: who changes a cluster whose statement doesn't name them.

use std::sync::Arc;

use discovery_types::admin::{Admin, AdminChain, AdminOperation};
use discovery_types::api::{ClusterState, GrantState};
use discovery_types::client::{ClientError, DiscoveryClient};
use discovery_types::grant::{Grant, ReplacementLimits, TokenKind};
use discovery_types::key::SigningKey;
use discovery_types::problem::Code;
use discovery_types::role::Role;
use discovery_types::statement::Statement;
use discovery_types::token::Token;

use super::agent::{TestAgent, form};
use super::support::TestInstallation;
use crate::server::RunningService;

/// An installation with a cluster, and two admins whom no statement names.
struct ScopeWorld {
    world: TestInstallation,
    service: RunningService,
    owner: DiscoveryClient,
    statement: Statement,
    /// Admin with the roles issuer and operator.
    operator: Admin,
    operator_client: DiscoveryClient,
    other_owner: DiscoveryClient,
}

impl ScopeWorld {
    async fn new() -> Self {
        let world = TestInstallation::new().await;
        let service = world.serve().await;
        let owner = world.owner(&service);
        let statement = world.cluster(&owner, "demo", 1).await;
        let mut chain = AdminChain::root(world.owner.public());
        let mut added = Vec::new();
        for (name, roles) in
            [("olga", vec![Role::Issuer, Role::Operator]), ("otto", vec![Role::Owner])]
        {
            let key = Arc::new(SigningKey::generate());
            let admin = Admin { key: *key.public(), name: name.parse().unwrap(), roles };
            let add = chain.sign_next(&world.owner, AdminOperation::Add(admin.clone()));
            owner.put_admin(&add).await.unwrap();
            chain.append(&add).unwrap();
            added.push((admin, world.client(&service, Some(&key))));
        }
        let (_, other_owner) = added.pop().unwrap();
        let (operator, operator_client) = added.pop().unwrap();
        Self { world, service, owner, statement, operator, operator_client, other_owner }
    }

    /// Has the cluster's owner name the operator in a next statement.
    async fn name_operator(&self) {
        let mut next = self.statement.clone();
        next.seq = 1;
        next.previous = Some(self.statement.sign(&self.world.owner).hash());
        next.admins.push(self.operator.clone());
        let jws = next.sign(&self.world.owner);
        self.owner.put_statement(next.cluster, &jws).await.unwrap();
    }

    /// Stores a replacement policy of the cluster.
    async fn policy(&self) -> Grant {
        let token = Token::generate(TokenKind::Heal);
        let limits = ReplacementLimits { after_seconds: 600, at_most: 3, per_seconds: 86_400 };
        let (_, grant) = self.world.grant(&self.owner, &self.statement);
        let grant = Grant {
            version: 2,
            id: token.id(),
            kind: TokenKind::Heal,
            key: *token.public(),
            replacement: Some(limits),
            ..grant
        };
        self.owner.put_grant(&grant.sign(&self.world.owner)).await.unwrap();
        grant
    }
}

/// Checks that a request was refused because of the cluster's statement, and that the error says
/// how to restate the cluster.
fn check_out_of_scope<T: std::fmt::Debug>(answer: Result<T, ClientError>) {
    let refused = answer.unwrap_err();
    assert_eq!(refused.code(), Some(Code::NotInStatement), "{refused}");
    assert!(refused.to_string().contains("cluster restate demo"), "{refused}");
}

#[tokio::test]
async fn an_admin_whom_the_statement_does_not_name_ends_no_cluster_and_no_token() {
    let scope = ScopeWorld::new().await;
    let cluster = scope.statement.cluster;
    let token = scope.world.token(&scope.owner, &scope.statement).await;
    let policy = scope.policy().await;
    check_out_of_scope(scope.operator_client.abandon(cluster, "not mine").await);
    for id in [token.id(), policy.id] {
        check_out_of_scope(scope.operator_client.revoke_grant(id).await);
        check_out_of_scope(scope.operator_client.revoke_grant_and_free_seats(id).await);
        assert_eq!(scope.owner.show_grant(id).await.unwrap().state, GrantState::Valid);
    }
    let shown = scope.operator_client.show_cluster(cluster).await.unwrap();
    assert_eq!(shown.summary.state, ClusterState::Open, "and every admin may look");

    scope.name_operator().await;
    scope.operator_client.revoke_grant(token.id()).await.unwrap();
    scope.operator_client.revoke_grant(policy.id).await.unwrap();
    let ended = scope.operator_client.abandon(cluster, "mine").await.unwrap();
    assert_eq!(ended.state, ClusterState::Abandoned);
    scope.service.stop().await;
}

#[tokio::test]
async fn a_ticket_is_revoked_only_by_an_admin_of_its_cluster_or_an_owner() {
    let scope = ScopeWorld::new().await;
    let boot = scope.world.token(&scope.owner, &scope.statement).await;
    form(&mut [TestAgent::new(&scope.world, &scope.service, &scope.statement, &boot, 1)]).await;
    let ticket = scope.world.ticket(&scope.owner, &scope.statement).await;
    check_out_of_scope(scope.operator_client.revoke_grant(ticket.id()).await);
    assert_eq!(scope.owner.show_grant(ticket.id()).await.unwrap().state, GrantState::Valid);
    let view = scope.other_owner.revoke_grant(ticket.id()).await.unwrap();
    assert_eq!(view.state, GrantState::Revoked);
    // An owner whom the statement doesn't name can't make new CAs. Only an owner who can sign the
    // next statement may, because new CAs replace earlier ones that no statement names yet.
    check_out_of_scope(scope.other_owner.make_cas(scope.statement.cluster).await);
    scope.owner.make_cas(scope.statement.cluster).await.unwrap();
    scope.service.stop().await;
}

#[tokio::test]
async fn an_owner_whom_the_statement_does_not_name_can_end_a_cluster_and_not_reopen_it() {
    let scope = ScopeWorld::new().await;
    let cluster = scope.statement.cluster;
    check_out_of_scope(scope.other_owner.reopen(cluster).await);
    // To reopen a cluster that is open changes nothing.
    assert_eq!(scope.owner.reopen(cluster).await.unwrap().state, ClusterState::Open);
    let token = scope.world.token(&scope.owner, &scope.statement).await;
    let view = scope.other_owner.revoke_grant(token.id()).await.unwrap();
    assert_eq!(view.state, GrantState::Revoked);
    let ended = scope.other_owner.abandon(cluster, "its owner has left").await.unwrap();
    assert_eq!(ended.state, ClusterState::Abandoned);
    scope.service.stop().await;
}
