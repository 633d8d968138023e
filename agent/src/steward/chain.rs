//! The statement chain, as the cluster itself keeps it.
//!
//! Who may sign what is said by the newest statement. Discovery could withhold that one, and with it
//! that an admin was removed. So the chain stands in the cluster's own store as well, where it is
//! read linearizably before anything is done by it; the longer of the two counts. A chain can only be
//! made longer by an owner, whoever writes it.

use discovery_types::client::Client;
use discovery_types::digest::Digest;
use discovery_types::jws::Jws;
use discovery_types::statement::StatementChain;
use tokio::sync::watch;
use uuid::Uuid;

use crate::cluster::Cluster;
use crate::exit::chain as causes;

/// Where it stands. Keys that begin with `muster/` are Muster's own.
pub(crate) const STATEMENTS: &str = "muster/v1/statements";
/// Where the document stands that the cluster was founded on.
const DOCUMENT: &str = "muster/v1/document";
/// Where those stand by which it is no longer the one that was founded: newcomers read them.
pub(crate) const RECOVERIES: &str = "muster/v1/recoveries";

/// The longest chain that this agent knows.
pub(crate) struct Statements {
    pin: Digest,
    chain: StatementChain,
    document: Jws,
    recoveries: Vec<Jws>,
    /// Whoever keeps the journal looks here.
    longest: watch::Sender<Vec<Jws>>,
}

impl Statements {
    /// From the journal's; a longer one is shown in `longest`.
    pub(crate) fn new(
        pin: Digest,
        chain: StatementChain,
        document: Jws,
        recoveries: Vec<Jws>,
        longest: watch::Sender<Vec<Jws>>,
    ) -> Self {
        Self { pin, chain, document, recoveries, longest }
    }

    /// It.
    pub(crate) fn chain(&self) -> &StatementChain {
        &self.chain
    }

    /// Takes discovery's chain, if that is longer.
    pub(super) async fn learn(
        &mut self,
        client: &Client,
        cluster: Uuid,
        newest: &Digest,
    ) -> Result<(), String> {
        if self.chain.position(newest).is_some() {
            return Ok(());
        }
        let list = client.statements(cluster).await.map_err(|error| causes(&error))?;
        self.take(&list.statements).map(drop).map_err(|error| error.to_string())
    }

    /// Takes the cluster's chain, if that is longer, and makes it longer there if this one is; and
    /// keeps there what the cluster was made of.
    pub(super) async fn keep(&mut self, node: &Cluster) -> Result<(), String> {
        self.keep_recoveries(node).await?;
        let stored = node.read(STATEMENTS).await.map_err(|error| causes(&error))?;
        let found: Option<Vec<Jws>> =
            stored.value.as_ref().and_then(|bytes| serde_json::from_slice(bytes).ok());
        match self.take(found.as_deref().unwrap_or_default()) {
            Ok(Relation::Same | Relation::Longer) => return Ok(()),
            Err(Unusable::Branch) => return Err(format!("{STATEMENTS}: {}", Unusable::Branch)),
            // Whoever may write to the cluster may write there, too: what is no chain of this
            // cluster's counts for nothing, and is replaced.
            Err(Unusable::Invalid(why)) => tracing::warn!("{STATEMENTS} is replaced: {why}"),
            Ok(Relation::Shorter) => {}
        }
        let text = serde_json::to_vec(&self.chain.jws()).expect("texts always serialise");
        // If another agent was first, the next look shows with what.
        node.replace(STATEMENTS, &stored, &text).await.map_err(|error| causes(&error))?;
        let stored = node.read(DOCUMENT).await.map_err(|error| causes(&error))?;
        if stored.value.is_none() {
            let text = self.document.as_str().as_bytes();
            node.replace(DOCUMENT, &stored, text).await.map_err(|error| causes(&error))?;
        }
        Ok(())
    }

    /// One Raft cluster has one row of them, which each of its members knows from its own journal: what
    /// else stands there is what was true of the cluster before, or somebody's who may write.
    async fn keep_recoveries(&self, node: &Cluster) -> Result<(), String> {
        if self.recoveries.is_empty() {
            return Ok(());
        }
        let text = serde_json::to_vec(&self.recoveries).expect("texts always serialise");
        let stored = node.read(RECOVERIES).await.map_err(|error| causes(&error))?;
        if stored.value.as_ref() != Some(&text) {
            node.replace(RECOVERIES, &stored, &text).await.map_err(|error| causes(&error))?;
        }
        Ok(())
    }

    /// What `found` is to the chain that is known, which it replaces if it goes further.
    fn take(&mut self, found: &[Jws]) -> Result<Relation, Unusable> {
        let known = self.chain.jws();
        if known == found {
            return Ok(Relation::Same);
        }
        if known.starts_with(found) {
            return Ok(Relation::Shorter);
        }
        let verified = StatementChain::verify_from_pin(found, &self.pin);
        let verified = verified.map_err(|error| Unusable::Invalid(causes(&error)))?;
        if !found.starts_with(&known) {
            return Err(Unusable::Branch);
        }
        self.chain = verified;
        self.longest.send_replace(self.chain.jws());
        Ok(Relation::Longer)
    }
}

/// What a chain is to the one that was known before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Relation {
    Same,
    /// An earlier state of it, or nothing.
    Shorter,
    /// It went on where that one ended.
    Longer,
}

/// Why a chain can't be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum Unusable {
    /// Nobody who may has signed it.
    #[error("it is no chain of this cluster's: {0}")]
    Invalid(String),
    /// Owners have signed two.
    #[error(
        "it parts from the chain that is known here, and owners have signed both: nothing is done \
         by either until a person has looked"
    )]
    Branch,
}

#[cfg(test)]
mod tests {
    use discovery_types::fixtures::World;
    use discovery_types::statement::Statement;

    use super::*;

    fn next(world: &World, last: &Jws, seconds: u64) -> Jws {
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
        let world = World::new(1);
        let first = world.chain().jws();
        let pin = first[0].hash();
        let longer = [first.clone(), vec![next(&world, &first[0], 1)]].concat();
        let (longest, mut journalled) = watch::channel(first.clone());
        let mut statements =
            Statements::new(pin, world.chain(), first[0].clone(), Vec::new(), longest);
        assert!(!journalled.has_changed().unwrap());
        assert_eq!(statements.take(&longer), Ok(Relation::Longer));
        assert_eq!(statements.chain().jws(), longer);
        assert!(journalled.has_changed().unwrap());
        assert_eq!(*journalled.borrow_and_update(), longer);
        // An older one, as a service that withholds a removal shows it, changes nothing.
        assert_eq!(statements.take(&first), Ok(Relation::Shorter));
        assert_eq!(statements.chain().jws(), longer);
        assert_eq!(statements.take(&longer), Ok(Relation::Same));
        let other = [first, vec![next(&world, &longer[0], 2)]].concat();
        assert_eq!(statements.take(&other), Err(Unusable::Branch));
        let foreign = World::new(1).chain().jws();
        assert!(matches!(statements.take(&foreign), Err(Unusable::Invalid(_))));
        assert_eq!(statements.chain().jws(), longer);
        assert!(!journalled.has_changed().unwrap(), "nothing else goes into the journal");
    }
}
