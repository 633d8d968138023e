//! Tests of lists that are committed in one transaction.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use data_encoding::HEXLOWER;
use discovery_types::client::{ClientConfig, DiscoveryClient};
use discovery_types::document::VerifiedDocument;
use discovery_types::jws::Jws;
use discovery_types::key::SigningKey;
use discovery_types::proposal::{Ack, VerifiedProposal};
use discovery_types::statement::StatementChain;
use futures_util::future::join_all;
use secrecy::ExposeSecret;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::agent::TestAgent;
use super::support::{TestInstallation, serve_args, wait_until};
use crate::server::{RunningService, ServeArgs, start};

/// Number of clusters that are committed together.
const CLUSTERS: usize = 6;
/// Name of the ignored test in which a process dies, and of the variable with its instructions.
const DYING_PROCESS: &str = "tests::batch_commits::a_process_that_dies_in_a_batch_of_commits";
const INSTRUCTIONS: &str = "MUSTER_TEST_BATCH";

/// An agent whose signature is the last one that its cluster's list needs.
struct LastSigner {
    agent: TestAgent,
    ack: Jws,
}

impl LastSigner {
    /// Makes clusters of one member each, whose agents haven't signed yet.
    async fn make(world: &TestInstallation, service: &RunningService) -> Vec<LastSigner> {
        let admin = world.owner(service);
        let mut signers = Vec::new();
        for number in 0..CLUSTERS {
            let statement = world.cluster(&admin, &format!("demo-{number}"), 1).await;
            let token = world.token(&admin, &statement).await;
            let agent = TestAgent::new(world, service, &statement, &token, 1);
            agent.redeem().await.unwrap();
            let seen = agent.poll_until(|seen| seen.proposal.is_some()).await;
            agent.probe(&seen).await.unwrap();
            let chain = StatementChain::verify_links(&seen.statements).unwrap();
            let proposal = seen.proposal.as_ref().unwrap();
            let h = VerifiedProposal::verify(proposal, &chain).unwrap().hash();
            let ack = Ack { cluster: proposal.cluster, epoch: proposal.epoch, h };
            signers.push(LastSigner { ack: ack.sign(&agent.key), agent });
        }
        signers
    }

    fn cluster(&self) -> Uuid {
        self.agent.record.cluster
    }

    /// Sends the signature. Returns the commit document, or the refusal.
    async fn sign(&self) -> Result<VerifiedDocument, String> {
        let seen = self.agent.client.ack(self.cluster(), &self.ack).await;
        seen.map(|seen| self.agent.document(&seen)).map_err(|error| error.to_string())
    }
}

/// Sends all signatures, and applies them once all of them wait.
async fn sign_together(
    service: &RunningService,
    signers: &[LastSigner],
) -> Vec<Result<VerifiedDocument, String>> {
    let app = service.app();
    wait_until("no transaction runs", async || app.pause_batches()).await;
    let signed = join_all(signers.iter().map(LastSigner::sign));
    let resume = async {
        wait_until("all wait", async || app.waiting_requests() == signers.len()).await;
        app.resume_batches();
    };
    tokio::join!(signed, resume).0
}

/// Returns the ids of the committed clusters, and the number of transactions that committed them.
async fn read_commits(world: &TestInstallation) -> (Vec<Uuid>, i64) {
    let sql = "SELECT coalesce(array_agg(cluster_id ORDER BY cluster_id), '{}'),
                   count(DISTINCT xmin::text) FROM commits";
    sqlx::query_as(sql).fetch_one(&mut world.database.connect().await).await.unwrap()
}

/// Checks that the ledger has the document of each of these clusters.
fn check_ledger(service: &RunningService, signers: &[&LastSigner]) {
    let ledger = service.app().store.ledger();
    for signer in signers {
        let commit = ledger.commit_with_document(signer.cluster()).unwrap();
        assert!(commit.is_some(), "the ledger has the document of {}", signer.cluster());
    }
}

#[tokio::test]
async fn lists_of_many_clusters_are_committed_in_one_transaction() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let signers = LastSigner::make(&world, &service).await;
    let signed = sign_together(&service, &signers).await;
    for (signer, document) in signers.iter().zip(&signed) {
        let document = document.as_ref().unwrap();
        assert_eq!(document.proposal().proposal().cluster, signer.cluster());
        let seen = signer.agent.poll(None).await.unwrap();
        assert!(seen.document.unwrap().leaves.is_some(), "the member gets its certificates");
    }
    let (committed, transactions) = read_commits(&world).await;
    assert_eq!((committed.len(), transactions), (CLUSTERS, 1));
    check_ledger(&service, &signers.iter().collect::<Vec<_>>());
    service.stop().await;
}

/// A commit can be refused by the SQL statement that writes it, or by a check at COMMIT. The CA's
/// key of a cluster can be unreadable. In each case the other clusters' lists are committed.
#[tokio::test]
async fn a_faulty_cluster_fails_no_other_commit_of_the_batch() {
    let refuse = |timing: &str| {
        format!(
            "CREATE FUNCTION refuse_one() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 IF NEW.cluster_id = 'FAULTY' THEN
                     RAISE EXCEPTION 'refused' USING ERRCODE = 'restrict_violation';
                 END IF;
                 RETURN NULL;
             END $$;
             CREATE CONSTRAINT TRIGGER one_is_refused AFTER INSERT ON commits {timing}
                 FOR EACH ROW EXECUTE FUNCTION refuse_one()"
        )
    };
    let faults = [
        refuse("NOT DEFERRABLE"),
        refuse("DEFERRABLE INITIALLY DEFERRED"),
        "UPDATE authorities SET wrapped_key = '\\x00' WHERE cluster_id = 'FAULTY'".to_owned(),
        "DELETE FROM authorities WHERE cluster_id = 'FAULTY' AND purpose = 'client'".to_owned(),
    ];
    for fault in faults {
        let world = TestInstallation::new().await;
        let service = world.serve().await;
        let signers = LastSigner::make(&world, &service).await;
        let faulty = signers[2].cluster();
        let sql = sqlx::AssertSqlSafe(fault.replace("FAULTY", &faulty.to_string()));
        sqlx::raw_sql(sql).execute(&mut world.database.connect().await).await.unwrap();
        let signed = sign_together(&service, &signers).await;
        let (whole, others): (Vec<_>, Vec<_>) =
            signers.iter().zip(&signed).partition(|(signer, _)| signer.cluster() != faulty);
        for (_, signed) in &whole {
            assert_eq!(signed.as_ref().err(), None, "{fault}");
        }
        assert!(others.iter().all(|(_, signed)| signed.is_err()), "{fault}");
        let (committed, _) = read_commits(&world).await;
        assert_eq!(committed.len(), CLUSTERS - 1, "{fault}");
        assert!(!committed.contains(&faulty), "{fault}");
        check_ledger(&service, &whole.iter().map(|(signer, _)| *signer).collect::<Vec<_>>());
        assert!(!service.app().store.ledger().contains(faulty), "{fault}");
        let seen = others[0].0.agent.poll(None).await.unwrap();
        assert!(seen.proposal.is_some() && seen.document.is_none(), "{fault}: it is still forming");
        let explained = world.owner(&service).explain(faulty).await.unwrap().explain;
        let error = explained[0].last_error.clone().unwrap_or_default();
        let is_explained = error.contains("can't commit the list");
        assert_eq!(is_explained, fault.contains("authorities"), "{fault}: {error}");
        service.stop().await;
    }
}

/// The machine's list and the one that was signed could differ only if rows or the program are
/// wrong. Then the request gets the store's error, which doesn't end the other requests' task.
#[tokio::test]
async fn a_list_that_is_not_the_signed_one_is_not_committed() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    let agent = TestAgent::new(&world, &service, &statement, &token, 1);
    agent.redeem().await.unwrap();
    agent.poll_until(|seen| seen.proposal.is_some()).await;
    let app = service.app();
    let ids = [statement.cluster];
    let mut transaction = app.store.begin_batch(&ids, &[], None).await.unwrap();
    let authorities = transaction.authorities(&ids).await.unwrap();
    let loaded = &transaction.clusters[&statement.cluster];
    let authorities = &authorities[&statement.cluster];
    let other = discovery_formation::Hash([7; 32]);
    let refused = app.build_commit(loaded, other, None, authorities).unwrap_err();
    let text = refused.to_string();
    assert!(refused.is_damage() && text.contains(&statement.cluster.to_string()), "{text}");
    assert!(text.contains("isn't the one that was signed") && text.contains("abandon"), "{text}");
    drop(transaction);
    service.stop().await;
}

/// Instructions for a process that is to die in a batch.
#[derive(Serialize, Deserialize)]
struct DyingProcess {
    keys: PathBuf,
    ledger: PathBuf,
    database: String,
    pin: String,
    signers: Vec<DyingSigner>,
}

#[derive(Serialize, Deserialize)]
struct DyingSigner {
    /// The agent's private key, in hex.
    seed: String,
    cluster: Uuid,
    ack: Jws,
}

/// Runs a service in a process of its own, which dies at `point` in a batch of these signatures.
fn die_at(point: &str, world: &TestInstallation, args: &ServeArgs, signers: &[LastSigner]) {
    let instructions = DyingProcess {
        keys: args.keys.clone(),
        ledger: args.ledger.clone(),
        database: world.database.url(),
        pin: world.context.pins[0].to_string(),
        signers: signers
            .iter()
            .map(|signer| DyingSigner {
                seed: HEXLOWER.encode(signer.agent.key.seed().expose_secret()),
                cluster: signer.cluster(),
                ack: signer.ack.clone(),
            })
            .collect(),
    };
    let file = world.folder.path().join("instructions");
    std::fs::write(&file, serde_json::to_vec(&instructions).unwrap()).unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", DYING_PROCESS, "--ignored", "--nocapture"])
        .env(INSTRUCTIONS, &file)
        .env("MUSTER_CRASH_AT", point)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(9), "{point}: {}: {text}", output.status);
}

#[tokio::test]
#[ignore = "run by the test of each crash point, in a process of its own"]
async fn a_process_that_dies_in_a_batch_of_commits() {
    let file = std::env::var_os(INSTRUCTIONS).expect("the other test names the file");
    let told: DyingProcess =
        serde_json::from_slice(&std::fs::read(Path::new(&file)).unwrap()).unwrap();
    let service = start(serve_args(told.keys, told.ledger, told.database)).await.unwrap();
    let app = service.app();
    wait_until("the database is compared", async || app.settled_generation().is_some()).await;
    wait_until("no transaction runs", async || app.pause_batches()).await;
    let sent = told.signers.iter().map(async |signer| {
        let seed = HEXLOWER.decode(signer.seed.as_bytes()).unwrap().try_into().unwrap();
        let client = DiscoveryClient::new(ClientConfig {
            urls: vec![format!("https://{}", service.addresses[0]).parse().unwrap()],
            pins: vec![told.pin.parse().unwrap()],
            key: Some(SigningKey::from_seed(&seed).into()),
        });
        client.unwrap().ack(signer.cluster, &signer.ack).await
    });
    let resume = async {
        wait_until("all wait", async || app.waiting_requests() == told.signers.len()).await;
        app.resume_batches();
    };
    let (answers, ()) = tokio::join!(join_all(sent), resume);
    panic!("the process has survived: {answers:?}");
}

/// The process dies at each step of a batch of commits. Then either all lists are committed or
/// none. The next process delivers each committed document, and its ledger has the commit by then.
#[tokio::test]
async fn a_batch_of_commits_survives_a_crash_at_each_step() {
    for (point, is_committed) in [
        ("before-commit", false),
        ("after-commit", true),
        ("before-ledger", true),
        ("after-ledger", true),
    ] {
        let world = TestInstallation::new().await;
        let service = world.serve().await;
        let mut signers = LastSigner::make(&world, &service).await;
        service.stop().await;
        let args = world.args("ledger");
        die_at(point, &world, &args, &signers);
        let (committed, transactions) = read_commits(&world).await;
        let expected = if is_committed { (CLUSTERS, 1) } else { (0, 0) };
        assert_eq!((committed.len(), transactions), expected, "{point}");

        let service = start(args).await.unwrap();
        let has_documents = |signers: &[LastSigner]| {
            let ledger = service.app().store.ledger();
            let has = |signer: &LastSigner| ledger.commit_with_document(signer.cluster());
            signers.iter().filter(|signer| has(signer).unwrap().is_some()).count()
        };
        let written = if point == "after-ledger" { CLUSTERS } else { 0 };
        assert_eq!(has_documents(&signers), written, "{point}");
        for signer in &mut signers {
            signer.agent.connect_to(&world, &service);
            let document = signer.sign().await.unwrap();
            assert_eq!(document.proposal().proposal().cluster, signer.cluster(), "{point}");
        }
        assert_eq!(has_documents(&signers), CLUSTERS, "{point}");
        assert_eq!(read_commits(&world).await.0.len(), CLUSTERS, "{point}");
        service.stop().await;
    }
}
