//! The statement chain in the cluster's own store.
//!
//! The newest statement says who may sign what. Discovery could withhold it, and thereby hide that
//! an admin was removed. So the chain is in the cluster's own store as well, where it is read
//! linearizably before any action. The longer of discovery's chain and the cluster's is valid. Only
//! an owner's signature can make a chain longer, whoever writes it to the store. Each agent also
//! journals the longest chain that it has seen. Of all these chains the longest is valid.

use discovery_types::client::DiscoveryClient;
use discovery_types::digest::Digest;
use discovery_types::jws::Jws;
use discovery_types::statement::StatementChain;
use tokio::sync::watch;
use uuid::Uuid;

use crate::cluster::ClusterApiClient;
use crate::exit::error_chain as causes;

/// Key of the statement chain. Keys that begin with `muster/` are Muster's own.
pub(crate) const STATEMENTS: &str = "muster/v1/statements";
/// Key of the document with which the cluster was founded.
const DOCUMENT: &str = "muster/v1/document";
/// Key of the recovery statements (how this cluster came from the founded one); read by joining
/// hosts.
pub(crate) const RECOVERIES: &str = "muster/v1/recoveries";

/// The longest statement chain that this agent knows, and the other signed texts that it keeps in
/// the store.
pub(crate) struct Statements {
    pin: Digest,
    chain: StatementChain,
    document: Jws,
    recoveries: Vec<Jws>,
    /// Tells the task that writes the journal of each longer chain.
    longest: watch::Sender<Vec<Jws>>,
}

impl Statements {
    /// Begins with the journal's `chain`; longer chains are sent to `longest`.
    pub(crate) fn new(
        pin: Digest,
        chain: StatementChain,
        document: Jws,
        recoveries: Vec<Jws>,
        longest: watch::Sender<Vec<Jws>>,
    ) -> Self {
        Self { pin, chain, document, recoveries, longest }
    }

    pub(crate) fn chain(&self) -> &StatementChain {
        &self.chain
    }

    /// Fetches discovery's chain if `newest`, its newest statement, is not in this one; adopts it
    /// if it is longer.
    pub(super) async fn fetch_newer(
        &mut self,
        client: &DiscoveryClient,
        cluster: Uuid,
        newest: &Digest,
    ) -> Result<(), String> {
        if self.chain.position(newest).is_some() {
            return Ok(());
        }
        let list = client.statements(cluster).await.map_err(|error| causes(&error))?;
        self.adopt_if_longer(&list.statements).map(drop).map_err(|error| error.to_string())
    }

    /// Adopts the store's chain if it is longer, and writes this one to the store if that is
    /// longer. Also keeps the recovery statements and the document there.
    pub(super) async fn sync_store(&mut self, node: &ClusterApiClient) -> Result<(), String> {
        self.write_recoveries(node).await?;
        let stored = node.read_key(STATEMENTS).await.map_err(|error| causes(&error))?;
        let found: Option<Vec<Jws>> =
            stored.value.as_ref().and_then(|bytes| serde_json::from_slice(bytes).ok());
        match self.adopt_if_longer(found.as_deref().unwrap_or_default()) {
            Ok(ChainOrder::Same | ChainOrder::Longer) => return Ok(()),
            Err(ChainError::Branch) => return Err(format!("{STATEMENTS}: {}", ChainError::Branch)),
            // Every client with write access to the store may write this key. So a value that is
            // not a chain of this cluster is ignored, and is replaced.
            Err(ChainError::Invalid(why)) => tracing::warn!("{STATEMENTS} is replaced: {why}"),
            Ok(ChainOrder::Shorter) => {}
        }
        let text = serde_json::to_vec(&self.chain.jws()).expect("texts always serialise");
        // If another agent has written first, nothing is replaced, and the next pass reads its
        // value.
        node.replace_key_if_unchanged(STATEMENTS, &stored, &text)
            .await
            .map_err(|error| causes(&error))?;
        let stored = node.read_key(DOCUMENT).await.map_err(|error| causes(&error))?;
        if stored.value.is_none() {
            let text = self.document.as_str().as_bytes();
            node.replace_key_if_unchanged(DOCUMENT, &stored, text)
                .await
                .map_err(|error| causes(&error))?;
        }
        Ok(())
    }

    /// Writes the recovery statements to the store. A Raft cluster has one sequence of them, which
    /// each member knows from its own journal. A different value is from before the last recovery,
    /// or from another client, and is replaced.
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

    /// Compares `found` with the known chain, and adopts it if it is a longer one.
    fn adopt_if_longer(&mut self, found: &[Jws]) -> Result<ChainOrder, ChainError> {
        let known = self.chain.jws();
        if known == found {
            return Ok(ChainOrder::Same);
        }
        if known.starts_with(found) {
            return Ok(ChainOrder::Shorter);
        }
        let verified = StatementChain::verify_from_pin(found, &self.pin);
        let verified = verified.map_err(|error| ChainError::Invalid(causes(&error)))?;
        if !found.starts_with(&known) {
            return Err(ChainError::Branch);
        }
        self.chain = verified;
        self.longest.send_replace(self.chain.jws());
        Ok(ChainOrder::Longer)
    }
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
}

#[cfg(test)]
mod tests {
    use discovery_types::fixtures::ClusterFixture;
    use discovery_types::statement::Statement;

    use super::*;

    fn next(world: &ClusterFixture, last: &Jws, seconds: u64) -> Jws {
        let claims = &world.statement;
        Statement {
            seq: claims.seq + 1,
            previous: Some(last.hash()),
            deadline_seconds: claims.deadline_seconds + seconds,
            ..claims.clone()
        }
        .sign(&world.owner)
    }

    #[test]
    fn the_longer_chain_counts_whoever_shows_it() {
        let world = ClusterFixture::new(1);
        let first = world.chain().jws();
        let pin = first[0].hash();
        let longer = [first.clone(), vec![next(&world, &first[0], 1)]].concat();
        let (longest, mut journalled) = watch::channel(first.clone());
        let mut statements =
            Statements::new(pin, world.chain(), first[0].clone(), Vec::new(), longest);
        assert!(!journalled.has_changed().unwrap());
        assert_eq!(statements.adopt_if_longer(&longer), Ok(ChainOrder::Longer));
        assert_eq!(statements.chain().jws(), longer);
        assert!(journalled.has_changed().unwrap());
        assert_eq!(*journalled.borrow_and_update(), longer);
        // A service that hides a removal shows an older chain; that changes nothing.
        assert_eq!(statements.adopt_if_longer(&first), Ok(ChainOrder::Shorter));
        assert_eq!(statements.chain().jws(), longer);
        assert_eq!(statements.adopt_if_longer(&longer), Ok(ChainOrder::Same));
        let other = [first, vec![next(&world, &longer[0], 2)]].concat();
        assert_eq!(statements.adopt_if_longer(&other), Err(ChainError::Branch));
        let foreign = ClusterFixture::new(1).chain().jws();
        assert!(matches!(statements.adopt_if_longer(&foreign), Err(ChainError::Invalid(_))));
        assert_eq!(statements.chain().jws(), longer);
        assert!(!journalled.has_changed().unwrap(), "nothing else goes into the journal");
    }
}
