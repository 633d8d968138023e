//! The statement chain in the cluster's own store.
//!
//! The newest statement says who may sign what. Discovery could withhold it, and thereby hide that
//! an admin was removed. So the chain is in the cluster's own store as well, where it is read
//! linearizably before any action. The longer of discovery's chain and the cluster's is valid. Only
//! an owner's signature can make a chain longer, whoever writes it to the store. Each agent also
//! journals the longest chain that it has seen. Of all these chains the longest is valid.
//!
//! A newer Muster may write a chain that this program can't read to its end. If an owner has signed
//! that end, the chain stays in the store as it is. This agent then makes no changes of members:
//! the statements that it can't read may have removed the person who asks for a change.

use std::time::Duration;

use discovery_types::client::DiscoveryClient;
use discovery_types::digest::Digest;
use discovery_types::jws::Jws;
use discovery_types::problem::Code;
use discovery_types::statement::{StatementChain, StatementError};
use tokio::sync::watch;
use tokio::time::Instant;
use uuid::Uuid;

use crate::cluster::ClusterApiClient;
use crate::exit::error_chain as causes;

/// Key of the statement chain. Keys that begin with `muster/` are Muster's own.
pub(crate) const STATEMENTS: &str = "muster/v1/statements";
/// Key of the commit document, with which the cluster was founded.
const DOCUMENT: &str = "muster/v1/document";
/// Key of the recovery statements, which tell how this cluster descends from the founded one.
/// Joining hosts read them.
pub(crate) const RECOVERIES: &str = "muster/v1/recoveries";

/// How often discovery is sent a chain that branches off from its own. Discovery keeps a note of
/// such a chain, but a restore of its database can lose the note.
const BRANCH_SHOW_INTERVAL: Duration = Duration::from_secs(600);

/// The longest statement chain that this agent knows. Also the commit document and the recovery
/// statements, which the agent keeps in the cluster's store as well.
pub(crate) struct Statements {
    pin: Digest,
    chain: StatementChain,
    document: Jws,
    recoveries: Vec<Jws>,
    /// Sends each longer chain to the task that writes the journal.
    longest: watch::Sender<Vec<Jws>>,
    /// When this agent last sent its known chain to discovery, because discovery's chain branches
    /// off from it.
    branch_shown: Option<Instant>,
}

impl Statements {
    /// Begins with `chain`, which is in the journal. Each longer chain will be sent to `longest`.
    pub(crate) fn new(
        pin: Digest,
        chain: StatementChain,
        document: Jws,
        recoveries: Vec<Jws>,
        longest: watch::Sender<Vec<Jws>>,
    ) -> Self {
        Self { pin, chain, document, recoveries, longest, branch_shown: None }
    }

    pub(crate) fn chain(&self) -> &StatementChain {
        &self.chain
    }

    /// Fetches discovery's chain if its newest statement, `newest`, is not in the known chain.
    /// Adopts the fetched chain if it is longer. If the known chain is longer, sends it to
    /// discovery.
    pub(super) async fn fetch_newer(
        &mut self,
        client: &DiscoveryClient,
        cluster: Uuid,
        newest: &Digest,
    ) -> Result<(), String> {
        if *newest == self.chain.newest_hash() {
            return Ok(());
        }
        if self.chain.position(newest).is_some() {
            // The service's database has lost the last statements. Send them: an owner who doesn't
            // see them could sign others with the same numbers, which would split the chain.
            let shown = client.show_statements(cluster, &self.chain.jws()).await;
            shown.map_err(|error| causes(&error))?;
            tracing::info!("discovery had lost the newest statements, and has them again");
            return Ok(());
        }
        let found = fetch_texts(client, cluster).await?;
        let adopted = self.adopt_if_longer(&found);
        // Discovery's chain may branch off before the pinned statement. It then lacks that
        // statement, and counts as invalid. So this agent shows discovery the known chain in this
        // case, too.
        if matches!(adopted, Err(ChainError::Branch | ChainError::Invalid(_))) {
            self.show_branch_if_due(client, cluster).await;
        }
        adopted.map(drop).map_err(|error| error.to_string())
    }

    /// Shows discovery the known chain, which branches off from discovery's. Discovery refuses it,
    /// and notes the split, so that a person can see there who follows which statement.
    async fn show_branch_if_due(&mut self, client: &DiscoveryClient, cluster: Uuid) {
        if self.branch_shown.is_some_and(|shown| shown.elapsed() < BRANCH_SHOW_INTERVAL) {
            return;
        }
        // Set the time even if the request fails, for example because the service gets too many
        // requests. A chain may be long, so it must not be sent again at once.
        self.branch_shown = Some(Instant::now());
        if let Err(error) = client.show_statements(cluster, &self.chain.jws()).await
            && error.code() != Some(Code::Conflict)
        {
            let error = causes(&error);
            tracing::debug!(error, "discovery doesn't hear of the split of the statements");
        }
    }

    /// Fetches discovery's chain, and adopts it if it is longer than the known one.
    pub(super) async fn fetch(
        &mut self,
        client: &DiscoveryClient,
        cluster: Uuid,
    ) -> Result<(), String> {
        let found = fetch_texts(client, cluster).await?;
        self.adopt_if_longer(&found).map(drop).map_err(|error| error.to_string())
    }

    /// Writes the recovery statements to the cluster's store. Then adopts the statement chain in
    /// the store if it is longer than the known one. If the known chain is longer, writes the known
    /// chain there, and the commit document if it is missing.
    ///
    /// # Errors
    /// Fails if the store can't be used, or if the stored chain branches off from the known one or
    /// can't be read to its end.
    pub(super) async fn sync_store(&mut self, node: &ClusterApiClient) -> Result<(), String> {
        self.write_recoveries(node).await?;
        let stored = node.read_key(STATEMENTS).await.map_err(|error| causes(&error))?;
        let found: Option<Vec<String>> =
            stored.value.as_ref().and_then(|bytes| serde_json::from_slice(bytes).ok());
        match self.adopt_if_longer(found.as_deref().unwrap_or_default()) {
            Ok(ChainOrder::Same | ChainOrder::Longer) => return Ok(()),
            Err(error @ (ChainError::Branch | ChainError::Unreadable(_))) => {
                return Err(format!("{STATEMENTS}: {error}"));
            }
            // Every client with write access to the store can write this key. So a value that is
            // not a chain of this cluster is ignored, and is replaced.
            Err(ChainError::Invalid(why)) => tracing::warn!("{STATEMENTS} is replaced: {why}"),
            Ok(ChainOrder::Shorter) => {}
        }
        // Write the commit document before the chain: once the chain is stored, later calls return
        // before this point.
        let document = node.read_key(DOCUMENT).await.map_err(|error| causes(&error))?;
        if document.value.is_none() {
            let text = self.document.as_str().as_bytes();
            node.replace_key_if_unchanged(DOCUMENT, &document, text)
                .await
                .map_err(|error| causes(&error))?;
        }
        let text = serde_json::to_vec(&self.chain.jws()).expect("texts always serialise");
        // If another agent has written first, nothing is replaced, and the next pass over the
        // intents reads that agent's value.
        node.replace_key_if_unchanged(STATEMENTS, &stored, &text)
            .await
            .map_err(|error| causes(&error))?;
        Ok(())
    }

    /// Writes the recovery statements to the store. All members of a Raft cluster have the same
    /// recovery statements in their journals. A different value in the store is replaced: it was
    /// written before the last recovery, or by another client.
    async fn write_recoveries(&self, node: &ClusterApiClient) -> Result<(), String> {
        if self.recoveries.is_empty() {
            return Ok(());
        }
        let text = serde_json::to_vec(&self.recoveries).expect("texts always serialise");
        let stored = node.read_key(RECOVERIES).await.map_err(|error| causes(&error))?;
        if stored.value.as_ref() != Some(&text) {
            node.replace_key_if_unchanged(RECOVERIES, &stored, &text)
                .await
                .map_err(|error| causes(&error))?;
        }
        Ok(())
    }

    /// Compares the chain `found` with the known one, and adopts it if it is longer. If a longer
    /// chain can't be read to its end, adopts the part that can be read.
    fn adopt_if_longer(&mut self, found: &[String]) -> Result<ChainOrder, ChainError> {
        let known = self.chain.jws();
        let same = known.iter().zip(found).take_while(|(a, b)| a.as_str() == b.as_str()).count();
        if same == found.len() {
            return Ok(if same == known.len() { ChainOrder::Same } else { ChainOrder::Shorter });
        }
        let invalid = |error| ChainError::Invalid(causes(&error));
        let common = known[..same].last().and_then(|last| self.chain.up_to(&last.hash()));
        let mut chain = common.ok_or_else(|| invalid(StatementError::NotPinned))?;
        let mut unreadable = None;
        for next in &found[same..] {
            if let Err(error) = chain.append_text(next) {
                if !error.exceeds_this_program() || !chain.is_continued_by(next) {
                    return Err(invalid(error));
                }
                unreadable = Some(ChainError::Unreadable(causes(&error)));
                break;
            }
        }
        if same < known.len() {
            let pinned = chain.position(&self.pin).is_some();
            return Err(if pinned {
                ChainError::Branch
            } else {
                invalid(StatementError::NotPinned)
            });
        }
        if chain.newest_hash() != self.chain.newest_hash() {
            self.chain = chain;
            self.longest.send_replace(self.chain.jws());
        }
        unreadable.map_or(Ok(ChainOrder::Longer), Err)
    }
}

/// Fetches discovery's statement chain. The signatures aren't verified here.
async fn fetch_texts(client: &DiscoveryClient, cluster: Uuid) -> Result<Vec<String>, String> {
    let list = client.statements(cluster).await.map_err(|error| causes(&error))?;
    Ok(list.statements.iter().map(Jws::to_string).collect())
}

/// How a found chain compares with the known one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChainOrder {
    Same,
    /// The found chain is a beginning of the known one, or empty.
    Shorter,
    /// The found chain continues the known one.
    Longer,
}

/// Why a chain can't be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum ChainError {
    /// The chain's signatures or links are invalid for this cluster.
    #[error("it is no chain of this cluster's: {0}")]
    Invalid(String),
    /// The found chain branches off from the known one: owners have signed both.
    #[error(
        "it parts from the chain that is known here, and owners have signed both: nothing is done \
         by either until a person has looked"
    )]
    Branch,
    /// An owner has continued the chain with a statement that this program can't read.
    #[error(
        "an owner has signed a statement that this program can't read ({0}): the chain is left as \
         it is, and this agent changes no members before muster-agent is upgraded"
    )]
    Unreadable(String),
}

#[cfg(test)]
mod tests {
    use discovery_types::client::ClientConfig;
    use discovery_types::fixtures::{ClusterFixture, sign_newer_version};
    use discovery_types::jws::JwsType;
    use discovery_types::key::SigningKey;
    use discovery_types::statement::{MAX_CHAIN, Statement};

    use super::*;

    fn next(world: &ClusterFixture, last: &Jws, seconds: u64) -> Statement {
        let claims = &world.statement;
        Statement {
            seq: claims.seq + 1,
            previous: Some(last.hash()),
            deadline_seconds: claims.deadline_seconds + seconds,
            ..claims.clone()
        }
    }

    fn texts(chain: &[Jws]) -> Vec<String> {
        chain.iter().map(Jws::to_string).collect()
    }

    #[test]
    fn the_longer_chain_is_adopted_from_any_source() {
        let world = ClusterFixture::new(1);
        let first = world.chain().jws();
        let pin = first[0].hash();
        let longer = [first.clone(), vec![next(&world, &first[0], 1).sign(&world.owner)]].concat();
        let (longest, mut journalled) = watch::channel(first.clone());
        let mut statements =
            Statements::new(pin, world.chain(), first[0].clone(), Vec::new(), longest);
        assert!(!journalled.has_changed().unwrap());
        assert_eq!(statements.adopt_if_longer(&texts(&longer)), Ok(ChainOrder::Longer));
        assert_eq!(statements.chain().jws(), longer);
        assert!(journalled.has_changed().unwrap());
        assert_eq!(*journalled.borrow_and_update(), longer);
        // A service that hides a removal sends an older chain, which changes nothing.
        assert_eq!(statements.adopt_if_longer(&texts(&first)), Ok(ChainOrder::Shorter));
        assert_eq!(statements.chain().jws(), longer);
        assert_eq!(statements.adopt_if_longer(&[]), Ok(ChainOrder::Shorter));
        assert_eq!(statements.adopt_if_longer(&texts(&longer)), Ok(ChainOrder::Same));
        let other = [first, vec![next(&world, &longer[0], 2).sign(&world.owner)]].concat();
        assert_eq!(statements.adopt_if_longer(&texts(&other)), Err(ChainError::Branch));
        let foreign = texts(&ClusterFixture::new(1).chain().jws());
        assert!(matches!(statements.adopt_if_longer(&foreign), Err(ChainError::Invalid(_))));
        assert_eq!(statements.chain().jws(), longer);
        assert!(!journalled.has_changed().unwrap(), "nothing else goes into the journal");
    }

    #[test]
    fn a_chain_that_branches_off_before_the_pin_is_invalid() {
        let world = ClusterFixture::new(1);
        let first = world.chain().jws();
        let pinned = next(&world, &first[0], 1).sign(&world.owner);
        let mut chain = world.chain();
        chain.append(&pinned).unwrap();
        let (longest, _journalled) = watch::channel(Vec::new());
        let mut statements =
            Statements::new(pinned.hash(), chain, first[0].clone(), Vec::new(), longest);
        let another = next(&world, &first[0], 2).sign(&world.owner);
        let other = [first, vec![another]].concat();
        let refused = statements.adopt_if_longer(&texts(&other));
        assert!(matches!(refused, Err(ChainError::Invalid(_))), "{refused:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_service_that_does_not_take_the_branch_is_not_sent_it_at_once_again() {
        let world = ClusterFixture::new(1);
        let config = ClientConfig {
            urls: vec!["https://127.0.0.1:1".parse().unwrap()],
            pins: vec![Digest([1; 32])],
            key: None,
        };
        let client = DiscoveryClient::new(config).unwrap();
        let (longest, _journalled) = watch::channel(Vec::new());
        let first = world.chain().jws();
        let (pin, document) = (first[0].hash(), first[0].clone());
        let mut statements = Statements::new(pin, world.chain(), document, Vec::new(), longest);
        let sent = statements.show_branch_if_due(&client, world.statement.cluster);
        // No server listens at the client's URL, so the request fails.
        let _ = tokio::time::timeout(Duration::from_secs(5), sent).await;
        assert!(statements.branch_shown.is_some());
    }

    #[test]
    fn an_unreadable_newer_statement_is_respected_if_an_owner_has_signed_it() {
        let world = ClusterFixture::new(1);
        let first = world.chain().jws();
        let second = next(&world, &first[0], 1).sign(&world.owner);
        let third = Statement { seq: 2, ..next(&world, &second, 2) };
        let by = |key| sign_newer_version(JwsType::Statement, key, &third).to_string();
        let compare = |last: &[String]| {
            let (longest, journalled) = watch::channel(Vec::new());
            let mut statements = Statements::new(
                first[0].hash(),
                world.chain(),
                first[0].clone(),
                Vec::new(),
                longest,
            );
            let found = [&texts(&[first[0].clone(), second.clone()])[..], last].concat();
            let order = statements.adopt_if_longer(&found);
            (order, journalled.borrow().len())
        };
        let unreadable = |last: &[String], why: &str| {
            let (order, journalled) = compare(last);
            let error = order.expect_err("it can't be read");
            assert!(matches!(error, ChainError::Unreadable(_)), "{error}");
            assert!(error.to_string().contains(why), "{error}");
            assert_eq!(journalled, 2, "the readable part is adopted");
        };
        unreadable(&[by(&world.owner)], "made by a newer Muster (version 3)");
        // The statements behind an unreadable statement can't be judged, so they change nothing.
        unreadable(&[by(&world.owner), "x".to_owned()], "made by a newer Muster (version 3)");
        let mut long = serde_json::to_value(&third).unwrap();
        long["more"] = serde_json::json!("x".repeat(30_000));
        let long = Jws::sign(JwsType::Statement, &world.owner, &long).to_string();
        unreadable(&[long], "longer than");

        for stranger in [&world.issuer, &SigningKey::generate()] {
            let (order, journalled) = compare(&[by(stranger)]);
            assert!(matches!(order, Err(ChainError::Invalid(_))), "{order:?}");
            assert_eq!(journalled, 0);
        }
    }

    #[test]
    fn a_chain_longer_than_this_program_reads_is_left_if_an_owner_signed_its_end() {
        let world = ClusterFixture::new(1);
        let mut chain = world.chain();
        while chain.jws().len() < MAX_CHAIN {
            let last = chain.newest().clone();
            let next = Statement { seq: last.seq + 1, previous: Some(chain.newest_hash()), ..last };
            chain.append(&next.sign(&world.owner)).unwrap();
        }
        let known = chain.jws();
        let last = next(&world, &known[MAX_CHAIN - 1], 1);
        let (longest, _journalled) = watch::channel(Vec::new());
        let (pin, document) = (known[0].hash(), known[0].clone());
        let mut statements = Statements::new(pin, chain, document, Vec::new(), longest);
        for (signer, is_left) in [(&world.owner, true), (&world.issuer, false)] {
            let found = [texts(&known), vec![last.sign(signer).to_string()]].concat();
            let error = statements.adopt_if_longer(&found).unwrap_err();
            assert_eq!(matches!(error, ChainError::Unreadable(_)), is_left, "{error}");
        }
    }
}
