//! What a member says of its store.

use node_proto::musterpb::store_claim::About;
use node_proto::musterpb::{StoreAnswer, StoreClaim, StoreQuestion};

use crate::mvcc::{KeyValueHash, ReadError, Store, StoreError, View};

/// How far the store of whoever asks is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Question {
    /// The last entry that it has applied.
    pub index: u64,
    /// Its newest revision.
    pub revision: i64,
    /// Its last compaction.
    pub compacted: i64,
}

impl Question {
    /// About `view`.
    #[must_use]
    pub fn of(view: &View) -> Self {
        let index = view.applied().index;
        Self { index, revision: view.revision(), compacted: view.compacted() }
    }

    /// As it goes to another member.
    #[must_use]
    pub fn to_wire(self) -> StoreQuestion {
        let Self { index, revision, compacted } = self;
        StoreQuestion { index, revision, compacted }
    }

    /// `None`: it is none. Other requests of members leave these fields out, and a store that has applied
    /// nothing asks nothing.
    #[must_use]
    pub fn from_wire(request: StoreQuestion) -> Option<Self> {
        let StoreQuestion { index, revision, compacted } = request;
        (index > 0).then_some(Self { index, revision, compacted })
    }
}

/// What a claim is about. Members of one cluster that make claims about the same subject must say the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// Whether a store that has applied an entry, and maybe more since, is at least so far.
    Progress(Question),
    /// What is there up to a revision, as a compaction has left it.
    Data {
        /// Up to which.
        revision: i64,
        /// Which compaction; -1: none.
        compacted: i64,
    },
    /// What a compaction found, of which a little more counts than otherwise (as in etcd).
    Compaction {
        /// Its revision.
        revision: i64,
        /// The one before it; -1: none.
        previous: i64,
    },
    /// How far a store is that has applied this entry, and no more.
    Entry(u64),
}

/// What is said about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Value {
    /// It is, or isn't.
    Reached(bool),
    /// Nobody knows: the store can't be read.
    Unreadable,
    /// The checksum.
    Hash(u32),
    /// The newest revision and the last compaction.
    Stands(i64, i64),
}

/// One thing that a member says of its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// What it is about.
    pub subject: Subject,
    /// What it says.
    pub value: Value,
}

impl Claim {
    fn hash(hash: KeyValueHash) -> Self {
        let KeyValueHash { hash, compact_revision: compacted, revision } = hash;
        Self { subject: Subject::Data { revision, compacted }, value: Value::Hash(hash) }
    }

    fn kept(hash: KeyValueHash) -> Self {
        let KeyValueHash { hash, compact_revision: previous, revision } = hash;
        Self { subject: Subject::Compaction { revision, previous }, value: Value::Hash(hash) }
    }

    /// Of a store that can't be read.
    #[must_use]
    pub fn unreadable(question: Question) -> Self {
        Self { subject: Subject::Progress(question), value: Value::Unreadable }
    }

    fn to_wire(self) -> StoreClaim {
        let (about, index, revision, compacted) = match self.subject {
            Subject::Progress(Question { index, revision, compacted }) => {
                (About::Progress, index, revision, compacted)
            }
            Subject::Data { revision, compacted } => (About::Data, 0, revision, compacted),
            Subject::Compaction { revision, previous } => {
                (About::Compaction, 0, revision, previous)
            }
            Subject::Entry(index) => (About::Entry, index, 0, 0),
        };
        let about = about.into();
        let claim = StoreClaim { about, index, revision, compacted, ..StoreClaim::default() };
        match self.value {
            Value::Reached(reached) => StoreClaim { reached, ..claim },
            Value::Unreadable => StoreClaim { about: About::Unreadable.into(), ..claim },
            Value::Hash(hash) => StoreClaim { hash, ..claim },
            Value::Stands(revision, compacted) => StoreClaim { revision, compacted, ..claim },
        }
    }

    /// `None`: it is about something that this build doesn't know.
    fn from_wire(said: StoreClaim) -> Option<Self> {
        let StoreClaim { about: _, index, revision, compacted, reached, hash } = said;
        let question = Question { index, revision, compacted };
        let hash = KeyValueHash { hash, compact_revision: compacted, revision };
        let (subject, value) = match said.about() {
            About::Unknown => return None,
            About::Progress => (Subject::Progress(question), Value::Reached(reached)),
            About::Unreadable => return Some(Self::unreadable(question)),
            About::Data => return Some(Self::hash(hash)),
            About::Compaction => return Some(Self::kept(hash)),
            About::Entry => (Subject::Entry(index), Value::Stands(revision, compacted)),
        };
        Some(Self { subject, value })
    }
}

/// Claims, as they go to another member.
#[must_use]
pub fn to_wire(claims: Vec<Claim>) -> StoreAnswer {
    StoreAnswer { claims: claims.into_iter().map(Claim::to_wire).collect() }
}

/// As they came from it.
#[must_use]
pub fn from_wire(answer: StoreAnswer) -> Vec<Claim> {
    answer.claims.into_iter().filter_map(Claim::from_wire).collect()
}

/// What `store` holds in `view`, as far as that answers `question`; nothing of a store that is not as
/// far yet. Reads every record: call it where it may block.
///
/// # Errors
/// If the store can't be read.
pub fn claims(store: &Store, view: &View, question: Question) -> Result<Vec<Claim>, StoreError> {
    // Where compactions follow each other so fast that nobody's store stands still for long enough,
    // what each of them met is compared.
    let mut claims: Vec<Claim> = store.kept_hashes().into_iter().map(Claim::kept).collect();
    let own = Question::of(view);
    if own.index < question.index {
        return Ok(claims);
    }
    let reached = own.revision >= question.revision && own.compacted >= question.compacted;
    let value = Value::Reached(reached);
    claims.push(Claim { subject: Subject::Progress(question), value });
    if own.index == question.index {
        let value = Value::Stands(own.revision, own.compacted);
        claims.push(Claim { subject: Subject::Entry(own.index), value });
    }
    match store.hash_undisturbed(view, question.revision) {
        Ok(hash) => claims.push(Claim::hash(hash)),
        Err(ReadError::Store(error)) => return Err(error),
        // A compaction came in between, or it was said already that this store is not so far.
        Err(ReadError::Compacted | ReadError::Superseded | ReadError::Future) => {}
    }
    Ok(claims)
}
