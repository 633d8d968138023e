//! Tests of the replacement of a cluster's CAs: which statements the service accepts, and which CAs
//! it issues by.

use discovery_types::api::MemberCas;
use discovery_types::context::Context;
use discovery_types::csr::NodeKey;
use discovery_types::features::{AgentBuild, waiting_features};
use discovery_types::leaves::Leaves;
use discovery_types::statement::{CaPair, MAX_CHAIN, RotationStep};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use uuid::Uuid;

use super::*;
use crate::kek::KeyPurpose;

impl CommittedCluster {
    /// Returns the statement for the next step. `new` are the CAs that the step `Begin` adds.
    fn stated(
        &self,
        chain: &StatementChain,
        step: RotationStep,
        new: Option<&CaPair>,
    ) -> Statement {
        let mut next = next(chain);
        match step {
            RotationStep::Begin => next.also_trusted = new.cloned(),
            RotationStep::Switch => {
                let other = next.also_trusted.replace(chain.newest().issuing_cas()).unwrap();
                (next.peer_ca, next.client_ca) = (other.peer, other.client);
            }
            RotationStep::End => next.also_trusted = None,
        }
        next.version = next.format_version();
        next
    }

    /// Signs the statement for the next step, and sends it to the service.
    async fn take(
        &self,
        chain: &mut StatementChain,
        step: RotationStep,
        new: Option<&CaPair>,
    ) -> Result<(), ClientError> {
        let next = self.stated(chain, step, new);
        self.state(chain, &next).await
    }

    /// Signs a statement, and sends it to the service.
    async fn state(&self, chain: &mut StatementChain, next: &Statement) -> Result<(), ClientError> {
        let next = next.sign(&self.world.owner);
        self.admin.put_statement(self.statement.cluster, &next).await?;
        chain.append(&next).unwrap();
        Ok(())
    }

    /// Sends statements that change nothing, until the newest statement has the number `seq`.
    async fn restate_until(&self, chain: &mut StatementChain, seq: u64) {
        while chain.newest().seq < seq {
            let again = next(chain);
            self.state(chain, &again).await.unwrap();
        }
    }

    /// Sends the report of an agent about its member's CAs.
    async fn report_cas(&self, agent: &TestAgent, trusted: u64, certified: Option<u64>) {
        let mut report = self.report_request(self.raft_cluster(), agent, None, 12, &[]);
        report.membership = None;
        report.cas = Some(MemberCas { trusted, certified });
        agent.client.report(self.statement.cluster, &report, &AgentBuild::own()).await.unwrap();
    }

    /// Returns the newest statement that the service has.
    async fn newest(&self) -> Statement {
        let list = self.admin.statements(self.statement.cluster).await.unwrap();
        StatementChain::verify_links(&list.statements).unwrap().newest().clone()
    }

    /// Returns the CAs that the database has for `cluster`. Each row has a label (`issuing` or
    /// `other`, then the purpose), the certificate, and the wrapped key.
    async fn ca_rows(&self, cluster: Uuid) -> Vec<(String, Vec<u8>, Option<Vec<u8>>)> {
        sqlx::query_as(
            "SELECT 'issuing ' || purpose, certificate, wrapped_key FROM authorities
             WHERE cluster_id = $1
             UNION ALL SELECT 'other ' || purpose, certificate, wrapped_key FROM other_authorities
             WHERE cluster_id = $1 ORDER BY 1",
        )
        .bind(cluster)
        .fetch_all(&mut self.world.database.connect().await)
        .await
        .unwrap()
    }

    async fn renewed(&self, agent: &TestAgent) -> Result<Leaves, ClientError> {
        agent.client.renew_leaves(self.statement.cluster, &agent.record.csr).await
    }

    /// Returns how many keys of issuing CAs, and how many keys of other CAs, the database has.
    async fn counts(&self) -> (i64, i64) {
        let count = async |table: &str| {
            let sql = format!("SELECT count(wrapped_key) FROM {table} WHERE cluster_id = $1");
            sqlx::query_scalar(sqlx::AssertSqlSafe(sql))
                .bind(self.statement.cluster)
                .fetch_one(&mut self.world.database.connect().await)
                .await
                .unwrap()
        };
        (count("authorities").await, count("other_authorities").await)
    }
}

/// Returns the next statement of a chain, which changes nothing.
fn next(chain: &StatementChain) -> Statement {
    let last = chain.newest();
    Statement { seq: last.seq + 1, previous: Some(chain.newest_hash()), ..last.clone() }
}

fn der(pem: &str) -> Vec<u8> {
    CertificateDer::from_pem_slice(pem.as_bytes()).unwrap().to_vec()
}

#[tokio::test]
async fn the_service_issues_by_the_cas_of_the_newest_statement_and_deletes_the_old_keys() {
    let cluster = CommittedCluster::of(1).await;
    let (id, agent) = (cluster.statement.cluster, &cluster.agents[0]);
    let mut chain = cluster.chain();
    let new = cluster.admin.make_cas(id).await.unwrap();
    assert_ne!(der(&new.peer), der(&cluster.statement.peer_ca));
    let unused = new;
    let new = cluster.admin.make_cas(id).await.unwrap();
    assert_ne!(new, unused);
    let outdated = cluster.take(&mut chain, RotationStep::Begin, Some(&unused)).await;
    assert_eq!(code(outdated), Code::StatementRefused);
    assert_eq!(cluster.counts().await, (2, 2));

    cluster.take(&mut chain, RotationStep::Begin, Some(&new)).await.unwrap();
    assert_eq!(code(cluster.admin.make_cas(id).await), Code::WrongState);
    let explained = cluster.admin.explain(id).await.unwrap().explain;
    assert!(explained.iter().any(|line| line.code == "cas_being_replaced"), "{explained:?}");
    let leaves = cluster.renewed(agent).await.unwrap();
    assert!(leaves.are_by_issuing_cas(&cluster.statement), "the old CAs issue still");

    cluster.take(&mut chain, RotationStep::Switch, None).await.unwrap();
    let leaves = cluster.renewed(agent).await.unwrap();
    assert!(leaves.are_by_issuing_cas(chain.newest()));
    let node_key = agent.record.csr.verify().unwrap().node_key;
    assert!(leaves.verify(&node_key, &cluster.statement).is_err(), "only the new CAs trust it");
    let csr = NodeKey::generate().csr;
    let credentials = cluster.admin.issue_credentials(id, &csr).await.unwrap();
    assert_eq!(der(&credentials.client_ca), der(&new.client));

    // Switch back to the old CAs, and then to the new CAs again.
    for _ in 0..2 {
        cluster.take(&mut chain, RotationStep::Switch, None).await.unwrap();
        let leaves = cluster.renewed(agent).await.unwrap();
        assert!(leaves.are_by_issuing_cas(chain.newest()));
    }
    cluster.take(&mut chain, RotationStep::End, None).await.unwrap();
    assert_eq!(cluster.counts().await, (2, 0));
    let leaves = cluster.renewed(agent).await.unwrap();
    assert!(leaves.are_by_issuing_cas(chain.newest()));
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_statement_with_cas_whose_keys_the_service_lacks_is_refused() {
    let cluster = CommittedCluster::of(1).await;
    let (id, mut chain) = (cluster.statement.cluster, cluster.chain());
    let foreign = CaPair {
        peer: discovery_types::fixtures::TestCa::new("peers").pem,
        client: discovery_types::fixtures::TestCa::new("clients").pem,
    };
    for made in [false, true] {
        if made {
            cluster.admin.make_cas(id).await.unwrap();
        }
        let refused = cluster.take(&mut chain, RotationStep::Begin, Some(&foreign)).await;
        assert_eq!(code(refused), Code::StatementRefused, "{made}");
    }
    // A pair is also refused if the service has made only one of its CAs.
    let new = cluster.admin.make_cas(id).await.unwrap();
    for mixed in [
        CaPair { peer: foreign.peer.clone(), ..new.clone() },
        CaPair { client: foreign.client.clone(), ..new },
    ] {
        let refused = cluster.take(&mut chain, RotationStep::Begin, Some(&mixed)).await;
        assert_eq!(code(refused), Code::StatementRefused);
    }
    // An intruder writes other CAs into the database. The service doesn't give them to an owner to
    // sign.
    for (purpose, pem) in [("peer", &foreign.peer), ("client", &foreign.client)] {
        sqlx::query("UPDATE other_authorities SET certificate = $1 WHERE purpose = $2")
            .bind(der(pem))
            .bind(purpose)
            .execute(&mut cluster.world.database.connect().await)
            .await
            .unwrap();
    }
    let new = cluster.admin.make_cas(id).await.unwrap();
    assert!(new != foreign);
    cluster.take(&mut chain, RotationStep::Begin, Some(&new)).await.unwrap();
    cluster.service.stop().await;
}

/// A database from before the replacement has only the old CAs' keys, but the chain names the new
/// CAs. An owner replaces the CAs again.
#[tokio::test]
async fn after_the_loss_of_the_new_keys_the_cas_can_be_replaced_again() {
    let cluster = CommittedCluster::of(1).await;
    let (id, agent, mut chain) = (cluster.statement.cluster, &cluster.agents[0], cluster.chain());
    let new = cluster.admin.make_cas(id).await.unwrap();
    cluster.take(&mut chain, RotationStep::Begin, Some(&new)).await.unwrap();
    cluster.take(&mut chain, RotationStep::Switch, None).await.unwrap();
    // Make the rows what a restore would make them: the old CAs issue, and there are no other CAs.
    let mut database = cluster.world.database.connect().await;
    for sql in [
        "UPDATE authorities a SET certificate = o.certificate, wrapped_key = o.wrapped_key
         FROM other_authorities o WHERE o.cluster_id = a.cluster_id AND o.purpose = a.purpose",
        "DELETE FROM other_authorities",
    ] {
        sqlx::query(sql).execute(&mut database).await.unwrap();
    }
    assert_eq!(code(cluster.renewed(agent).await), Code::WrongState);
    let csr = NodeKey::generate().csr;
    assert_eq!(code(cluster.admin.issue_credentials(id, &csr).await), Code::WrongState);
    assert_eq!(code(cluster.admin.export_cluster(id).await), Code::WrongState);

    cluster.take(&mut chain, RotationStep::End, None).await.unwrap();
    let newer = cluster.admin.make_cas(id).await.unwrap();
    assert_ne!(newer, new);
    cluster.take(&mut chain, RotationStep::Begin, Some(&newer)).await.unwrap();
    cluster.take(&mut chain, RotationStep::Switch, None).await.unwrap();
    let leaves = cluster.renewed(agent).await.unwrap();
    assert!(leaves.are_by_issuing_cas(chain.newest()));
    cluster.service.stop().await;
}

#[tokio::test]
async fn members_are_shown_with_the_cas_that_they_trust() {
    let cluster = CommittedCluster::of(2).await;
    let (id, mut chain) = (cluster.statement.cluster, cluster.chain());
    let new = cluster.admin.make_cas(id).await.unwrap();
    cluster.take(&mut chain, RotationStep::Begin, Some(&new)).await.unwrap();
    let agent = &cluster.agents[0];
    let own = cluster.id(agent);
    let report = async |trusted, certified| {
        cluster.report_cas(agent, trusted, certified).await;
        let members = cluster.admin.rotation(id).await.unwrap().members;
        assert_eq!(members.len(), 2);
        members.into_iter().find(|member| member.id == own).unwrap().cas
    };
    let expected = MemberCas { trusted: 1, certified: None };
    assert_eq!(report(1, None).await, Some(expected));
    assert_eq!(report(7, None).await, Some(expected), "there is no statement 7");
    let renewed = MemberCas { trusted: 1, certified: Some(1) };
    assert_eq!(report(1, Some(1)).await, Some(renewed));
    assert_eq!(report(1, Some(7)).await, Some(renewed), "there is no statement 7");
    // A member can fall behind: stock etcd is started with older files.
    let behind = MemberCas { trusted: 0, certified: None };
    assert_eq!(report(0, None).await, Some(behind));
    let others = cluster.admin.rotation(id).await.unwrap().members;
    assert!(others.iter().any(|member| member.id != own && member.cas.is_none()));
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_split_of_the_statements_is_explained_with_the_member_that_has_shown_it() {
    let cluster = CommittedCluster::of(2).await;
    let (id, chain) = (cluster.statement.cluster, cluster.chain());
    let sign_next = |more_seconds| {
        let last = chain.newest().clone();
        let next = Statement {
            seq: last.seq + 1,
            previous: Some(chain.newest_hash()),
            deadline_seconds: last.deadline_seconds + more_seconds,
            ..last
        };
        next.sign(&cluster.world.owner)
    };
    let (kept, other) = (sign_next(1), sign_next(2));
    cluster.admin.put_statement(id, &kept).await.unwrap();
    let split = async || {
        let explain = cluster.admin.explain(id).await.unwrap().explain;
        explain.into_iter().find(|line| line.code == "statements_split")
    };
    // No member has reported yet, so the cluster is committed and not formed.
    assert_eq!(split().await, None);
    let agent = &cluster.agents[0];
    let shown = [chain.jws(), vec![other.clone()]].concat();
    for _ in 0..2 {
        assert_eq!(code(agent.client.show_statements(id, &shown).await), Code::Conflict);
        let line = split().await.expect("the split is known");
        let name = agent.record.name.to_string();
        let hashes = [&kept, &other].map(|jws| jws.hash().to_string()[..8].to_owned());
        for part in [&name, &hashes[0], &hashes[1]] {
            assert!(line.missing.contains(part), "{part} is not in {}", line.missing);
        }
    }
    // The second member's agent shows the statement that the service has, so it doesn't count as
    // part of the split.
    let same = [chain.jws(), vec![kept]].concat();
    cluster.agents[1].client.show_statements(id, &same).await.unwrap();
    let line = split().await.expect("the split is known");
    assert!(!line.missing.contains(cluster.agents[1].record.name.as_str()), "{line}");
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_cluster_that_forms_keeps_its_cas() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 3).await;
    assert_eq!(code(admin.make_cas(statement.cluster).await), Code::WrongState);
    service.stop().await;
}

#[tokio::test]
async fn new_cas_are_not_stored_if_an_owner_has_signed_a_statement_meanwhile() {
    let cluster = CommittedCluster::of(1).await;
    let (id, app) = (cluster.statement.cluster, cluster.service.app());
    let make = |purpose| app.make_wrapped_ca(id, "demo", purpose, 1_700_000_000).unwrap();
    let (peer, client) = (make(KeyPurpose::PeerCa), make(KeyPurpose::ClientCa));
    for (newest, is_newest, keys) in [(1, false, 0), (0, true, 2)] {
        let stored = app.store.put_other_authorities(id, newest, [&peer, &client]).await.unwrap();
        assert_eq!(stored, is_newest);
        assert_eq!(cluster.counts().await, (2, keys));
    }
    cluster.service.stop().await;
}

#[tokio::test]
async fn the_replacement_of_one_clusters_cas_leaves_those_of_another_alone() {
    let cluster = CommittedCluster::of(1).await;
    let mut chain = cluster.chain();
    let other = cluster.world.cluster(&cluster.admin, "other", 3).await.cluster;
    sqlx::query(
        "INSERT INTO other_authorities (cluster_id, purpose, certificate, wrapped_key)
         SELECT cluster_id, purpose, decode('01', 'hex'), decode('02', 'hex') FROM authorities
         WHERE cluster_id = $1",
    )
    .bind(other)
    .execute(&mut cluster.world.database.connect().await)
    .await
    .unwrap();
    let before = cluster.ca_rows(other).await;
    assert_eq!(before.len(), 4);
    let new = cluster.admin.make_cas(cluster.statement.cluster).await.unwrap();
    for step in [RotationStep::Begin, RotationStep::Switch, RotationStep::End] {
        cluster.take(&mut chain, step, Some(&new)).await.unwrap();
        assert_eq!(cluster.ca_rows(other).await, before, "{step:?}");
    }
    cluster.service.stop().await;
}

/// A chain has 64 statements. A replacement that is undone after its switch takes four of them.
#[tokio::test]
async fn a_replacement_begins_only_if_the_statements_suffice_to_undo_and_end_it() {
    let cluster = CommittedCluster::of(1).await;
    let (id, mut chain) = (cluster.statement.cluster, cluster.chain());
    cluster.restate_until(&mut chain, MAX_CHAIN as u64 - 5).await;
    cluster.admin.make_cas(id).await.unwrap();
    cluster.restate_until(&mut chain, MAX_CHAIN as u64 - 4).await;
    assert_eq!(code(cluster.admin.make_cas(id).await), Code::WrongState);
    cluster.service.stop().await;
}

#[tokio::test]
async fn the_last_statement_of_a_chain_may_only_end_a_replacement() {
    let cluster = CommittedCluster::of(1).await;
    let (id, mut chain) = (cluster.statement.cluster, cluster.chain());
    let new = cluster.admin.make_cas(id).await.unwrap();
    cluster.take(&mut chain, RotationStep::Begin, Some(&new)).await.unwrap();
    cluster.restate_until(&mut chain, MAX_CHAIN as u64 - 2).await;
    let again = next(&chain);
    assert_eq!(code(cluster.state(&mut chain, &again).await), Code::WrongState);
    let switched = cluster.take(&mut chain, RotationStep::Switch, None).await;
    assert_eq!(code(switched), Code::WrongState);
    cluster.take(&mut chain, RotationStep::End, None).await.unwrap();
    assert_eq!(chain.newest().seq, MAX_CHAIN as u64 - 1);
    cluster.service.stop().await;
}

/// The admin's tool in the hands of an owner.
struct OwnersTool {
    home: String,
    key: String,
}

impl OwnersTool {
    async fn of(cluster: &CommittedCluster) -> Self {
        let folder = cluster.world.folder.path();
        let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
        let tool = Self { home: path("admin"), key: path("owner.pem") };
        cluster.world.owner.save(&folder.join("owner.pem")).unwrap();
        let url = format!("https://{}", cluster.service.addresses[0]).parse().unwrap();
        let context = Context { urls: vec![url], ..cluster.world.context.clone() };
        let line = context.to_string();
        let words = ["context", "add", line.as_str(), "--home", tool.home.as_str()];
        crate::cli::run_quietly(words.map(str::to_owned).to_vec()).unwrap();
        tool
    }

    /// Runs `cluster rotate-ca` without questions, which waits for members for a moment only.
    /// `more` has to name the step, or `--cancel`.
    async fn rotate(&self, more: &[&str]) -> Result<(), String> {
        let words = ["cluster", "rotate-ca", "demo", "--yes", "--timeout", "1ms"];
        let session = ["--home", self.home.as_str(), "--key", self.key.as_str()];
        let words = [&words[..], &session[..], more].concat();
        let words: Vec<String> = words.into_iter().map(str::to_owned).collect();
        tokio::task::spawn_blocking(move || crate::cli::run_quietly(words)).await.unwrap()
    }

    /// Expects that the step that `more` names waits for the member, for the given reason.
    async fn expect_wait(&self, more: &[&str], why: &str) {
        let refused = self.rotate(more).await.unwrap_err();
        assert!(refused.contains(why), "{refused}");
    }
}

/// The statement of step 1 has version 2, which agents of an older version can't read.
#[tokio::test]
async fn the_tool_signs_no_statement_that_a_members_agent_can_not_read() {
    let cluster = CommittedCluster::of(2).await;
    let tool = OwnersTool::of(&cluster).await;
    let [first, second] = &cluster.agents[..] else { panic!("two agents") };
    cluster.report(first, None, 20, &present::founders(&cluster)).await.unwrap();
    let report = |build: &str| {
        let request = cluster.report_request(
            cluster.raft_cluster(),
            second,
            None,
            20,
            &present::founders(&cluster),
        );
        let (client, build) = (&second.client, build.parse::<AgentBuild>().unwrap());
        async move { client.report(cluster.statement.cluster, &request, &build).await.unwrap() }
    };
    report("0.0.9 grant-2").await;
    let shown = cluster.admin.show_cluster(cluster.statement.cluster).await.unwrap().present;
    let lines = waiting_features(&shown.reported_builds());
    assert!(lines.iter().any(|line| line.contains("statement-2")), "{lines:?}");
    tool.expect_wait(&["--step", "1"], "can't read the statement that step 1 signs").await;
    tool.expect_wait(&["--step", "1"], "(0.0.9)").await;
    assert_eq!(cluster.newest().await.seq, 0);

    report(&AgentBuild::own().to_string()).await;
    tool.rotate(&["--step", "1"]).await.unwrap();
    assert_eq!(cluster.newest().await.seq, 1);
    cluster.service.stop().await;
}

#[tokio::test]
async fn the_tool_takes_a_step_once_all_members_have_followed_the_last_one() {
    let cluster = CommittedCluster::of(1).await;
    let (tool, agent) = (OwnersTool::of(&cluster).await, &cluster.agents[0]);
    tool.rotate(&["--step", "1"]).await.unwrap();
    tool.expect_wait(&["--step", "2"], "not all members are ready").await;
    cluster.report_cas(agent, 0, Some(0)).await;
    tool.expect_wait(&["--step", "2"], "doesn't trust the new CAs").await;
    let begun = cluster.newest().await;
    assert_eq!(begun.seq, 1);
    cluster.report_cas(agent, 1, Some(0)).await;
    tool.rotate(&["--step", "2"]).await.unwrap();
    let switched = cluster.newest().await;
    assert_eq!(Some(switched.issuing_cas()), begun.also_trusted);

    tool.expect_wait(&["--step", "3"], "has no certificates").await;
    cluster.report_cas(agent, 1, Some(2)).await;
    tool.rotate(&["--step", "3"]).await.unwrap();
    let ended = cluster.newest().await;
    assert_eq!((ended.seq, &ended.also_trusted), (3, &None));
    assert_eq!(ended.issuing_cas(), switched.issuing_cas());
    // A script that is run again from its first line begins no other replacement.
    let refused = tool.rotate(&["--step", "1"]).await.unwrap_err();
    assert!(refused.contains("--step 1 --again"), "{refused}");
    assert_eq!(cluster.newest().await.seq, 3);
    tool.rotate(&["--step", "1", "--again"]).await.unwrap();
    assert_eq!(cluster.newest().await.seq, 4);
    cluster.service.stop().await;
}

#[tokio::test]
async fn the_tool_waits_for_certificates_of_the_old_cas_only_if_the_new_ones_have_issued() {
    let cluster = CommittedCluster::of(1).await;
    let (tool, agent) = (OwnersTool::of(&cluster).await, &cluster.agents[0]);
    tool.rotate(&["--step", "1"]).await.unwrap();
    cluster.report_cas(agent, 1, None).await;
    tool.rotate(&["--cancel"]).await.unwrap();
    let dropped = cluster.newest().await;
    assert_eq!((dropped.seq, dropped.also_trusted), (2, None));

    tool.rotate(&["--step", "1"]).await.unwrap();
    cluster.report_cas(agent, 3, None).await;
    tool.rotate(&["--step", "2"]).await.unwrap();
    tool.rotate(&["--cancel"]).await.unwrap();
    let back = cluster.newest().await;
    assert_eq!((back.seq, back.issuing_cas()), (5, cluster.statement.issuing_cas()));
    cluster.report_cas(agent, 3, Some(4)).await;
    let drop_new = ["--cancel", "--step", "1"];
    tool.expect_wait(&drop_new, "has no certificates").await;
    cluster.report_cas(agent, 3, Some(5)).await;
    tool.rotate(&["--cancel"]).await.unwrap();
    assert_eq!(cluster.newest().await.seq, 5, "a repeated --cancel undoes no second step");
    for _ in 0..2 {
        tool.rotate(&drop_new).await.unwrap();
        assert_eq!(cluster.newest().await.seq, 6);
    }
    cluster.service.stop().await;
}
