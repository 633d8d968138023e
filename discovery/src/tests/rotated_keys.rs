//! The service's keys change again and again while a cluster forms.

use discovery_types::access::ClientKind;
use discovery_types::api::ClusterState;
use discovery_types::client::ClientError;
use discovery_types::problem::{Code, Problem};

use super::agent::TestAgent;
use super::support::{TestInstallation, send_with};
use crate::keydir::KeyDirectory;
use crate::server::{RunningService, ServeArgs, start};

/// Stops the service, makes a new signing key and a new key-encryption key, and removes all earlier
/// signing keys, as after a leak. Starts the service again at its address.
async fn restart_with_new_keys(service: RunningService, args: &ServeArgs) -> RunningService {
    service.stop().await;
    let keys = KeyDirectory::load(&args.keys).unwrap();
    let newest = keys.add_signing_key(&args.keys).unwrap();
    keys.add_kek(&args.keys).unwrap();
    for earlier in &keys.signing_keys {
        let name = format!("signing-{}.key", earlier.version);
        fs_err::remove_file(args.keys.join(name)).unwrap();
    }
    let service = start(args.clone()).await.unwrap();
    assert_eq!(service.app().keys.signer().version, newest);
    service
}

/// Repeats a request as an agent does: the service closes connections when it stops.
async fn retried<T>(mut request: impl AsyncFnMut() -> Result<T, ClientError>) -> T {
    loop {
        match request().await {
            Err(error) if error.is_retryable() => {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
            answer => return answer.unwrap(),
        }
    }
}

/// Each of the agents keeps its client, and so an access token that the removed key signed.
#[tokio::test]
async fn a_cluster_forms_while_keys_are_replaced_and_removed_at_each_step() {
    let world = TestInstallation::new().await;
    let mut args = world.args("ledger");
    let hour = std::time::Duration::from_secs(3_600);
    (args.times.lease, args.times.prepare) = (hour, hour);
    // No other test binds this address, so the port stays free while the service is stopped.
    args.listen = vec!["127.0.28.10:0".parse().unwrap()];
    let mut service = start(args.clone()).await.unwrap();
    args.listen = service.addresses.clone();
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 3).await;
    let token = world.token(&admin, &statement).await;
    let mut agents: Vec<TestAgent> =
        (1..=3).map(|n| TestAgent::new(&world, &service, &statement, &token, n)).collect();
    for agent in &agents {
        retried(async || agent.redeem().await).await;
        service = restart_with_new_keys(service, &args).await;
    }
    for agent in &mut agents {
        let seen = loop {
            let seen = retried(async || agent.poll(None).await).await;
            if seen.proposal.is_some() {
                break seen;
            }
        };
        service = restart_with_new_keys(service, &args).await;
        retried(async || agent.probe(&seen).await).await;
        service = restart_with_new_keys(service, &args).await;
        retried(async || agent.ack(&seen).await).await;
        service = restart_with_new_keys(service, &args).await;
    }
    let hash = agents[0].document(&retried(async || agents[0].poll(None).await).await).hash();
    for agent in &agents {
        let seen = retried(async || agent.poll(None).await).await;
        assert_eq!(agent.document(&seen).hash(), hash);
    }
    let shown = retried(async || admin.show_cluster(statement.cluster).await).await;
    assert_eq!(shown.summary.state, ClusterState::Committed);

    let stolen = service.app().issue_access_token(world.owner.public(), ClientKind::Admin);
    let ask = async |service: &RunningService| {
        let bearer = format!("Bearer {}", stolen.access_token);
        let headers = [("authorization", bearer.as_str())];
        let key = Some(&*world.owner);
        send_with(&world, service, key, "GET", "/v1/admins", &headers, String::new()).await
    };
    assert_eq!(ask(&service).await.0, 200);
    service = restart_with_new_keys(service, &args).await;
    let (status, body) = ask(&service).await;
    let problem: Problem = serde_json::from_str(&body).unwrap();
    assert_eq!((status, problem.code), (401, Code::TokenInvalid));
    service.stop().await;
}
