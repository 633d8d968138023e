//! Tests of service statements: discovery keeps the newest one that an owner of the cluster signed,
//! and hands it to the cluster's agents.

use discovery_types::admin::Admin;
use discovery_types::digest::Digest;
use discovery_types::jws::Jws;
use discovery_types::key::SigningKey;
use discovery_types::problem::Code;
use discovery_types::role::Role;
use discovery_types::service::{MAX_SEQUENCE, ServiceStatement};
use discovery_types::statement::Statement;
use uuid::Uuid;

use super::{CommittedCluster, code};

impl CommittedCluster {
    fn says(&self, sequence: u64) -> ServiceStatement {
        ServiceStatement {
            version: 1,
            cluster: self.statement.cluster,
            sequence,
            urls: vec!["https://new.example:8443".parse().unwrap()],
            pins: vec![Digest::of(b"key")],
            issued_at: 1_700_000_000,
        }
    }

    /// Returns the service statement that an agent gets with the intents.
    async fn handed_out(&self) -> Option<Jws> {
        let intents = self.agents[0].client.intents(self.statement.cluster, None, false).await;
        intents.unwrap().service
    }
}

#[tokio::test]
async fn agents_get_the_newest_service_statement_as_soon_as_it_is_stored() {
    let running = CommittedCluster::of(1).await;
    let (cluster, agent) = (running.statement.cluster, &running.agents[0].client);
    assert_eq!(running.handed_out().await, None);
    let rev = agent.intents(cluster, None, false).await.unwrap().rev;
    let polled = agent.intents(cluster, Some(rev), false);
    let first = running.says(1).sign(&running.world.owner);
    let (polled, put) = tokio::join!(polled, running.admin.put_service(cluster, &first));
    assert_eq!(polled.unwrap().service.as_ref(), Some(&first));
    assert_eq!(put.unwrap().service.as_ref(), Some(&first));

    let second = running.says(2).sign(&running.world.owner);
    running.admin.put_service(cluster, &second).await.unwrap();
    running.admin.put_service(cluster, &second).await.unwrap();
    assert_eq!(running.handed_out().await.as_ref(), Some(&second));
    let list = agent.statements(cluster).await.unwrap();
    assert_eq!((list.statements.len(), list.service), (1, Some(second)));
    let timeline = running.admin.show_cluster(cluster).await.unwrap().timeline;
    let told = timeline.iter().filter(|moment| moment.event == "service_announced").count();
    assert_eq!(told, 2, "a repeated statement is no event");
}

#[tokio::test]
async fn a_service_statement_that_agents_would_not_take_is_refused() {
    let running = CommittedCluster::of(1).await;
    let (cluster, owner) = (running.statement.cluster, &running.world.owner);
    let put = async |jws: &Jws| code(running.admin.put_service(cluster, jws).await);
    let stranger = running.says(1).sign(&SigningKey::generate());
    assert_eq!(put(&stranger).await, Code::StatementRefused);
    let agents = running.says(1).sign(&running.agents[0].key);
    assert_eq!(put(&agents).await, Code::StatementRefused);
    let elsewhere = ServiceStatement { cluster: Uuid::now_v7(), ..running.says(1) };
    assert_eq!(put(&elsewhere.sign(owner)).await, Code::StatementRefused);
    let none = ServiceStatement { urls: Vec::new(), ..running.says(1) };
    assert_eq!(put(&none.sign(owner)).await, Code::StatementRefused);
    assert_eq!(running.handed_out().await, None);

    let kept = running.says(2).sign(owner);
    running.admin.put_service(cluster, &kept).await.unwrap();
    assert_eq!(put(&running.says(1).sign(owner)).await, Code::Conflict);
    let other = ServiceStatement { issued_at: 7, ..running.says(2) };
    assert_eq!(put(&other.sign(owner)).await, Code::Conflict);
    assert_eq!(running.handed_out().await, Some(kept.clone()));
    let agent = &running.agents[0].client;
    let next = running.says(3).sign(owner);
    assert_eq!(code(agent.put_service(cluster, &next).await), Code::Forbidden);
}

#[tokio::test]
async fn issuers_and_former_owners_cannot_announce_the_service() {
    let running = CommittedCluster::of(1).await;
    let (cluster, world) = (running.statement.cluster, &running.world);
    let (owner, issuer) = (SigningKey::generate(), SigningKey::generate());
    let high = running.says(MAX_SEQUENCE).sign(&world.owner);
    running.admin.put_service(cluster, &high).await.unwrap();
    let admin = |key: &SigningKey, name: &str, role| Admin {
        key: *key.public(),
        name: name.parse().unwrap(),
        roles: vec![role],
    };
    let next = Statement {
        seq: 1,
        previous: Some(running.chain().newest_hash()),
        admins: vec![admin(&owner, "ada", Role::Owner), admin(&issuer, "ian", Role::Issuer)],
        ..running.statement.clone()
    };
    running.admin.put_statement(cluster, &next.sign(&world.owner)).await.unwrap();
    assert_eq!(running.handed_out().await, Some(high), "it stays until there is another");
    let put = async |jws: &Jws| code(running.admin.put_service(cluster, jws).await);
    assert_eq!(put(&running.says(1).sign(&issuer)).await, Code::NotInStatement);
    assert_eq!(put(&running.says(1).sign(&world.owner)).await, Code::NotInStatement);
    let first = running.says(1).sign(&owner);
    running.admin.put_service(cluster, &first).await.unwrap();
    assert_eq!(running.handed_out().await, Some(first), "a former owner's number doesn't count");
}

#[tokio::test]
async fn a_cluster_that_forms_has_no_service_statement() {
    let world = crate::tests::support::TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let said = ServiceStatement {
        version: 1,
        cluster: statement.cluster,
        sequence: 1,
        urls: vec!["https://new.example:8443".parse().unwrap()],
        pins: vec![Digest::of(b"key")],
        issued_at: 1_700_000_000,
    };
    let put = admin.put_service(statement.cluster, &said.sign(&world.owner)).await;
    assert_eq!(code(put), Code::WrongState);
}
