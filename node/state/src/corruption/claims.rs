//! A member's claims about its own store.

use node_proto::musterpb::store_claim::About;
use node_proto::musterpb::{StoreAnswer, StoreClaim, StoreQuestion};

use crate::mvcc::{KeyValueHash, ReadError, Store, StoreError, View};

/// Question that the leader asks all members about their stores. It contains the position of the
/// leader's own store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Question {
    /// Index of the last applied entry.
    pub index: u64,
    /// Newest revision of the store.
    pub revision: i64,
    /// Revision of the last compaction; -1 for none.
    pub compacted: i64,
}

impl Question {
    /// Creates a question about the state that `view` shows.
    #[must_use]
    pub fn of(view: &View) -> Self {
        let index = view.applied().index;
        Self { index, revision: view.revision(), compacted: view.compact_revision() }
    }

    /// Encodes the question for another member.
    #[must_use]
    pub fn encode(self) -> StoreQuestion {
        let Self { index, revision, compacted } = self;
        StoreQuestion { index, revision, compacted }
    }

    /// Decodes a question. Returns `None` if the index is 0, because the message is then a request
    /// of another kind. A question's index is never 0: a store that has applied no entry asks no
    /// question.
    #[must_use]
    pub fn decode(request: StoreQuestion) -> Option<Self> {
        let StoreQuestion { index, revision, compacted } = request;
        (index > 0).then_some(Self { index, revision, compacted })
    }
}

/// Subject of a claim. Members of a cluster that make claims about the same subject must make the
/// same claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ClaimSubject {
    /// Whether a store has reached the question's revision and compaction. A store claims this only
    /// once it has applied the question's entry. A store that can't be read claims
    /// [`ClaimValue::Unreadable`] instead.
    Progress(Question),
    /// The data up to a revision, as a compaction has left it.
    Data {
        /// Newest revision that the data includes.
        revision: i64,
        /// Revision of the last compaction; -1 for none.
        compacted: i64,
    },
    /// The data up to a compaction's revision, before the compaction deleted anything. The hash of
    /// this subject includes changes that the compaction deletes afterwards. The hash of
    /// [`Self::Data`] doesn't include them.
    Compaction {
        /// Revision of the compaction.
        revision: i64,
        /// Revision of the compaction before the one at `revision`; -1 for none.
        previous: i64,
    },
    /// Newest revision and last compaction of a store that has applied the entry with this index,
    /// and none after it.
    Entry(u64),
}

/// Value that a member claims for a subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ClaimValue {
    /// Whether the store has reached the question's revision and compaction.
    Reached(bool),
    /// The store can't be read, so its state is unknown.
    Unreadable,
    /// Hash of the subject's data.
    Hash(u32),
    /// Newest revision and revision of the last compaction.
    Position(i64, i64),
}

/// A member's claim about one subject of its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    pub subject: ClaimSubject,
    pub value: ClaimValue,
}

impl Claim {
    fn data(hash: KeyValueHash) -> Self {
        let KeyValueHash { hash, compact_revision: compacted, revision } = hash;
        Self { subject: ClaimSubject::Data { revision, compacted }, value: ClaimValue::Hash(hash) }
    }

    fn compaction(hash: KeyValueHash) -> Self {
        let KeyValueHash { hash, compact_revision: previous, revision } = hash;
        Self {
            subject: ClaimSubject::Compaction { revision, previous },
            value: ClaimValue::Hash(hash),
        }
    }

    /// Creates the claim of a member whose store can't be read.
    #[must_use]
    pub fn unreadable(question: Question) -> Self {
        Self { subject: ClaimSubject::Progress(question), value: ClaimValue::Unreadable }
    }

    fn encode(self) -> StoreClaim {
        let (about, index, revision, compacted) = match self.subject {
            ClaimSubject::Progress(Question { index, revision, compacted }) => {
                (About::Progress, index, revision, compacted)
            }
            ClaimSubject::Data { revision, compacted } => (About::Data, 0, revision, compacted),
            ClaimSubject::Compaction { revision, previous } => {
                (About::Compaction, 0, revision, previous)
            }
            ClaimSubject::Entry(index) => (About::Entry, index, 0, 0),
        };
        let about = about.into();
        let claim = StoreClaim { about, index, revision, compacted, ..StoreClaim::default() };
        match self.value {
            ClaimValue::Reached(reached) => StoreClaim { reached, ..claim },
            ClaimValue::Unreadable => StoreClaim { about: About::Unreadable.into(), ..claim },
            ClaimValue::Hash(hash) => StoreClaim { hash, ..claim },
            ClaimValue::Position(revision, compacted) => {
                StoreClaim { revision, compacted, ..claim }
            }
        }
    }

    /// Decodes a claim. Returns `None` for a subject that this build does not know.
    fn decode(said: StoreClaim) -> Option<Self> {
        let StoreClaim { about: _, index, revision, compacted, reached, hash } = said;
        let question = Question { index, revision, compacted };
        let hash = KeyValueHash { hash, compact_revision: compacted, revision };
        let (subject, value) = match said.about() {
            About::Unknown => return None,
            About::Progress => (ClaimSubject::Progress(question), ClaimValue::Reached(reached)),
            About::Unreadable => return Some(Self::unreadable(question)),
            About::Data => return Some(Self::data(hash)),
            About::Compaction => return Some(Self::compaction(hash)),
            About::Entry => (ClaimSubject::Entry(index), ClaimValue::Position(revision, compacted)),
        };
        Some(Self { subject, value })
    }
}

/// Encodes claims for another member.
#[must_use]
pub fn encode_claims(claims: Vec<Claim>) -> StoreAnswer {
    StoreAnswer { claims: claims.into_iter().map(Claim::encode).collect() }
}

/// Decodes another member's claims, and leaves out those with an unknown subject.
#[must_use]
pub fn decode_claims(answer: StoreAnswer) -> Vec<Claim> {
    answer.claims.into_iter().filter_map(Claim::decode).collect()
}

/// Returns the claims about the contents of `store` in `view` that answer `question`. If the store
/// has not reached the question's entry yet, only the hashes of past compactions are returned. This
/// reads every record, so call it where blocking is allowed.
///
/// # Errors
/// Fails if the store can't be read.
pub fn make_claims(
    store: &Store,
    view: &View,
    question: Question,
) -> Result<Vec<Claim>, StoreError> {
    // The hashes of past compactions are always included. If compactions follow each other quickly,
    // each store changes too often to be compared in another way.
    let mut claims: Vec<Claim> =
        store.compaction_hashes().into_iter().map(Claim::compaction).collect();
    let own = Question::of(view);
    if own.index < question.index {
        return Ok(claims);
    }
    let reached = own.revision >= question.revision && own.compacted >= question.compacted;
    let value = ClaimValue::Reached(reached);
    claims.push(Claim { subject: ClaimSubject::Progress(question), value });
    if own.index == question.index {
        let value = ClaimValue::Position(own.revision, own.compacted);
        claims.push(Claim { subject: ClaimSubject::Entry(own.index), value });
    }
    match store.hash_for_comparison(view, question.revision) {
        Ok(hash) => claims.push(Claim::data(hash)),
        Err(ReadError::Store(error)) => return Err(error),
        // In two cases there is no hash to claim. Either a compaction began while the hash was
        // computed, or the store has not reached the question's revision. The claim about progress
        // reports the second case.
        Err(ReadError::Compacted | ReadError::Superseded | ReadError::Future) => {}
    }
    Ok(claims)
}
