//! Tests of tokens that a change of the database makes void, and of their confirmation.

use std::sync::Arc;

use discovery_types::api::GrantState;
use discovery_types::client::DiscoveryClient;
use discovery_types::confirmation::GrantConfirmation;
use discovery_types::grant::Grant;
use discovery_types::jws::Jws;
use discovery_types::key::SigningKey;
use discovery_types::problem::Code;

use super::agent::{TestAgent, form};
use super::set_back::move_elsewhere;
use super::support::{TestInstallation, wait_until};
use crate::server::RunningService;

/// Starts the service on a database that has failed over, and waits until it is settled.
async fn fail_over(world: &TestInstallation) -> (RunningService, DiscoveryClient) {
    move_elsewhere(world).await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    wait_until("settled", async || admin.list_processes().await.unwrap().settled).await;
    (service, admin)
}

/// Signs a confirmation of the token for the last change of the database.
async fn sign_confirmation(admin: &DiscoveryClient, grant: &Grant, signer: &SigningKey) -> Jws {
    let view = admin.show_grant(grant.id).await.unwrap();
    assert_eq!(view.state, GrantState::Void);
    let void_before_us = view.void_before_us.unwrap();
    GrantConfirmation { cluster: grant.cluster, grant: view.jws.hash(), void_before_us }
        .sign(signer)
}

#[tokio::test]
async fn a_void_token_admits_hosts_once_it_is_confirmed_and_until_the_next_failover() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 2).await;
    let (token, grant) = world.grant(&admin, &statement);
    admin.put_grant(&grant.sign(&world.owner)).await.unwrap();
    let first = TestAgent::new(&world, &service, &statement, &token, 1);
    first.redeem().await.unwrap();
    service.stop().await;

    let (service, admin) = fail_over(&world).await;
    let mut agents = [first, TestAgent::new(&world, &service, &statement, &token, 2)];
    agents[0].connect_to(&world, &service);
    agents[0].redeem().await.unwrap();
    let refused = agents[1].redeem().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::GrantVoid), "{refused}");
    assert!(refused.is_retryable(), "the host waits for the confirmation");
    let confirmation = sign_confirmation(&admin, &grant, &world.owner).await;
    let confirmed = admin.confirm_grant(grant.id, &confirmation).await.unwrap();
    assert_eq!((confirmed.state, confirmed.void_before_us), (GrantState::Valid, None));
    admin.confirm_grant(grant.id, &confirmation).await.unwrap();
    let events: i64 =
        sqlx::query_scalar("SELECT count(*) FROM events WHERE kind = 'grant_confirmed'")
            .fetch_one(&mut world.database.connect().await)
            .await
            .unwrap();
    assert_eq!(events, 1, "the second confirmation was the same");
    service.stop().await;

    let (service, admin) = fail_over(&world).await;
    for agent in &mut agents {
        agent.connect_to(&world, &service);
    }
    let refused = agents[1].redeem().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::GrantVoid), "{refused}");
    let refused = admin.confirm_grant(grant.id, &confirmation).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::GrantRefused), "{refused}");
    let confirmation = sign_confirmation(&admin, &grant, &world.owner).await;
    admin.confirm_grant(grant.id, &confirmation).await.unwrap();
    form(&mut agents).await;
    service.stop().await;
}

#[tokio::test]
async fn only_an_issuer_confirms_and_revoked_tokens_stay_revoked() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let grants = [world.grant(&admin, &statement), world.grant(&admin, &statement)];
    for (_, grant) in &grants {
        admin.put_grant(&grant.sign(&world.owner)).await.unwrap();
    }
    service.stop().await;
    let (service, admin) = fail_over(&world).await;
    let [(token, grant), (_, other)] = &grants;

    let thief = Arc::new(SigningKey::generate());
    let forged = sign_confirmation(&admin, grant, &thief).await;
    let of_other = sign_confirmation(&admin, other, &world.owner).await;
    for confirmation in [&forged, &of_other, &grant.sign(&world.owner)] {
        let refused = admin.confirm_grant(grant.id, confirmation).await.unwrap_err();
        assert_eq!(refused.code(), Some(Code::GrantRefused), "{refused}");
    }
    let signed = sign_confirmation(&admin, grant, &world.owner).await;
    let client = world.client(&service, Some(&thief));
    let refused = client.confirm_grant(grant.id, &signed).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::UnknownKey), "{refused}");
    // An intruder in the database can't confirm a token.
    for planted in [forged.as_str(), of_other.as_str(), "no JWS"] {
        sqlx::query("UPDATE grants SET confirmation = $1")
            .bind(planted)
            .execute(&mut world.database.connect().await)
            .await
            .unwrap();
        let host = TestAgent::new(&world, &service, &statement, token, 1);
        let refused = host.redeem().await.unwrap_err();
        assert_eq!(refused.code(), Some(Code::GrantVoid), "{refused}");
    }
    admin.revoke_grant(grant.id).await.unwrap();
    let refused = admin.confirm_grant(grant.id, &signed).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::GrantRevoked), "{refused}");
    service.stop().await;
}

#[tokio::test]
async fn a_join_ticket_is_not_confirmed_and_a_late_host_hears_that_the_cluster_is_complete() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let boot = world.token(&admin, &statement).await;
    form(&mut [TestAgent::new(&world, &service, &statement, &boot, 1)]).await;
    let (_, ticket) = world.join_grant(&admin, &statement);
    admin.put_grant(&ticket.sign(&world.owner)).await.unwrap();
    service.stop().await;
    let (service, admin) = fail_over(&world).await;
    let confirmation = sign_confirmation(&admin, &ticket, &world.owner).await;
    let refused = admin.confirm_grant(ticket.id, &confirmation).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::WrongState), "{refused}");
    let late = TestAgent::new(&world, &service, &statement, &boot, 2);
    let refused = late.redeem().await.unwrap_err();
    assert_ne!(refused.code(), Some(Code::GrantVoid), "{refused}");
    assert!(!refused.is_retryable(), "{refused}");
    service.stop().await;
}
