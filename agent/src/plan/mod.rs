//! What a change of members would do, worked out from what was seen before anybody does it. Pure.
//!
//! The cluster judges every change itself, and more exactly than can be done from outside: it knows
//! for how long each member has been connected. A plan tells what it will say and what it won't:
//! some changes are allowed, and cost a cluster its safety all the same.

mod progress;
mod replace;
mod rules;
#[cfg(test)]
mod tests;
mod words;

pub(crate) use self::progress::{Pace, Progress};
pub(crate) use self::replace::{Next, next};

use crate::cluster::{Member, MemberId};

/// A learner with this many entries to fetch, or fewer, is in sync, as `muster-node` counts.
pub(crate) const IN_SYNC_ENTRIES: u64 = 1_000;

/// How a member was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It was added and has never run.
    NotStarted,
    /// It doesn't answer.
    Silent,
    /// It answers.
    Answers {
        /// How many entries it has to fetch; unknown while nobody leads.
        behind: Option<u64>,
    },
}

/// A member, and how it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    /// As the cluster lists it.
    pub member: Member,
    /// How it was found.
    pub state: State,
}

impl Seen {
    fn votes(&self) -> bool {
        !self.member.is_learner
    }

    fn answers(&self) -> bool {
        matches!(self.state, State::Answers { .. })
    }

    fn is_in_sync(&self) -> bool {
        matches!(self.state, State::Answers { behind: Some(behind) } if behind <= IN_SYNC_ENTRIES)
    }

    /// Its name, or where it is to be as long as it has none.
    pub(crate) fn label(&self) -> String {
        if self.member.is_started() {
            self.member.name.clone()
        } else {
            format!("{} ({})", self.member.id, self.member.peer_urls.join(","))
        }
    }
}

/// The members, as they were found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sight {
    /// All of them.
    pub members: Vec<Seen>,
    /// Who leads.
    pub leader: Option<MemberId>,
}

impl Sight {
    /// The member of this id.
    pub(crate) fn of_id(&self, id: MemberId) -> Option<&Seen> {
        self.members.iter().find(|seen| seen.member.id == id)
    }

    /// Another member than `but` that is reached at any of these.
    fn at(&self, peer_urls: &[String], but: Option<MemberId>) -> Option<&Seen> {
        self.members.iter().find(|seen| {
            Some(seen.member.id) != but
                && seen.member.peer_urls.iter().any(|url| peer_urls.contains(url))
        })
    }

    /// Another member than `but` that is called so, and is not at `peer_urls`, where it would be the
    /// one that is meant.
    fn named(&self, name: &str, peer_urls: &[String], but: Option<MemberId>) -> Option<&Seen> {
        self.members.iter().find(|seen| {
            seen.member.name == name
                && Some(seen.member.id) != but
                && !seen.member.peer_urls.iter().any(|url| peer_urls.contains(url))
        })
    }

    fn shape(&self) -> Shape {
        let voters = || self.members.iter().filter(|seen| seen.votes());
        Shape {
            voters: voters().count(),
            learners: self.members.len() - voters().count(),
            answering: voters().filter(|seen| seen.answers()).count(),
        }
    }

    /// Whether a quorum answers.
    pub(crate) fn is_well(&self) -> bool {
        self.shape().spare().is_some()
    }

    /// What to do, if too few voters answer for anything to be agreed on.
    pub(crate) fn no_quorum(&self) -> Option<String> {
        let shape = self.shape();
        let away = self.members.iter().filter(|seen| seen.votes() && !seen.answers());
        let away = away.map(Seen::label).collect::<Vec<_>>().join(", ");
        shape.spare().is_none().then(|| {
            format!(
                "{}. Silent: {away}. Start what can be started of them; if most are lost for good: \
                 muster-agent recover --help",
                Objection::NoQuorum(shape)
            )
        })
    }

    /// The other voters that are away or behind, if the cluster would stop with this one. A cluster of
    /// one or two stops with any of them, which is its size's fault and nobody's news.
    pub(crate) fn cannot_spare(&self, id: MemberId) -> Option<Vec<String>> {
        let shape = self.shape();
        let votes = self.of_id(id).is_some_and(Seen::votes);
        let others = self.members.iter().filter(|seen| seen.votes() && seen.member.id != id);
        let (well, away): (Vec<&Seen>, Vec<&Seen>) = others.partition(|seen| seen.is_in_sync());
        let stops = votes && shape.tolerance() > 0 && well.len() < shape.quorum();
        stops.then(|| away.into_iter().map(Seen::label).collect())
    }

    fn started_voters(&self, but: Option<MemberId>) -> usize {
        let voters = self.members.iter().filter(|seen| seen.votes());
        voters.filter(|seen| Some(seen.member.id) != but && seen.member.is_started()).count()
    }
}

/// How many there are of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Members with a vote.
    pub voters: usize,
    /// Members without.
    pub learners: usize,
    /// Voters that answer.
    pub answering: usize,
}

impl Shape {
    /// How many voters have to agree.
    pub(crate) fn quorum(self) -> usize {
        self.voters / 2 + 1
    }

    /// How many voters may fail, if all are well.
    pub(crate) fn tolerance(self) -> usize {
        self.voters.saturating_sub(self.quorum())
    }

    /// How many more may fail now; nothing if there is no quorum now.
    pub(crate) fn spare(self) -> Option<usize> {
        self.answering.checked_sub(self.quorum())
    }
}

/// What an operator wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// One more.
    Add {
        /// What it is called.
        name: String,
        /// Where its peers will reach it.
        peer_urls: Vec<String>,
        /// With a vote from the beginning.
        is_voter: bool,
    },
    /// A learner is to vote.
    Promote(MemberId),
    /// A member is to be reached elsewhere.
    Update(MemberId, Vec<String>),
    /// One less.
    Remove(MemberId),
    /// Another in the place of this one.
    Replace {
        /// Who goes.
        old: MemberId,
        /// What the new one is called.
        name: String,
        /// Where its peers will reach it.
        peer_urls: Vec<String>,
    },
}

/// One step of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The cluster agrees on a member.
    Add {
        /// With a vote from the beginning.
        is_voter: bool,
    },
    /// A person starts it.
    Start,
    /// It catches up.
    CatchUp,
    /// It gets its vote.
    Promote,
    /// The member that leads hands over.
    HandOver,
    /// The cluster agrees that a member is gone.
    Remove,
    /// The cluster agrees on other URLs.
    Update,
    /// A person restarts it, with those.
    Restart,
}

/// Why the cluster will say no.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Objection {
    /// Too few voters answer for anything to be agreed on.
    NoQuorum(Shape),
    /// Afterwards, too few voters would have started.
    NotStarted {
        /// How many would have.
        started: usize,
        /// How many must.
        needed: usize,
        /// Who has not.
        who: Vec<String>,
    },
    /// Too few voters answer for this change.
    Unhealthy {
        /// How many do.
        healthy: usize,
        /// How many must.
        needed: usize,
        /// Who doesn't.
        who: Vec<String>,
    },
    /// There is a learner already.
    TooManyLearners(String),
    /// Not a peer URL, as etcd reads them.
    BadUrl(String),
    /// Somebody else is there.
    UrlTaken(String),
    /// Somebody else is called so: a name would mean either. The cluster itself takes any name.
    NameTaken {
        /// What it is to be called.
        name: String,
        /// Who is.
        id: MemberId,
    },
    /// It votes already.
    NotALearner(String),
    /// It has too much to fetch, or is not heard of.
    NotInSync(String, State),
    /// Nobody would be left to vote.
    LastVoter,
}

/// What the cluster will not say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Warning {
    /// An even number of voters tolerates no more than one less.
    EvenSize(usize),
    /// A learner that has no vote yet: nobody promotes it by itself.
    LearnerWaits(String),
    /// Its peers speak TLS, and are to reach it without.
    Plain(String),
    /// A voter that has not started counts as failed until it has.
    CountsAsFailed {
        /// How many may fail until then; nothing if there is no quorum.
        spare: Option<usize>,
    },
    /// It works, and others don't.
    RemovesHealthy {
        /// Who doesn't.
        silent: Vec<String>,
    },
    /// Both of two have to live until it is done.
    OneOfTwo,
    /// Fewer failures are tolerated afterwards.
    LessTolerance(usize, usize),
    /// While it restarts, it counts as failed.
    RestartCosts {
        /// How many may fail until then; nothing if there is no quorum.
        spare: Option<usize>,
    },
    /// The one that is replaced goes first, and why.
    RemovesFirst(&'static str),
}

/// What would happen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// As it is.
    pub before: Shape,
    /// As it would be, with whoever is started by then.
    pub after: Shape,
    /// What would be done, in this order.
    pub steps: Vec<Step>,
    /// Why it would be refused.
    pub objections: Vec<Objection>,
    /// What it costs.
    pub warnings: Vec<Warning>,
}

/// Works out what `wanted` would do.
pub(crate) fn plan(sight: &Sight, wanted: &Wanted) -> Plan {
    let before = sight.shape();
    let (after, steps) = match wanted {
        Wanted::Add { is_voter: true, .. } => {
            let steps = vec![Step::Add { is_voter: true }, Step::Start];
            (one_more(before), steps)
        }
        Wanted::Add { is_voter: false, .. } => {
            let steps =
                vec![Step::Add { is_voter: false }, Step::Start, Step::CatchUp, Step::Promote];
            (one_more(before), steps)
        }
        Wanted::Promote(id) => (promoted(sight, *id), vec![Step::CatchUp, Step::Promote]),
        Wanted::Update(..) => (before, vec![Step::Update, Step::Restart]),
        Wanted::Remove(id) => (one_less(sight, *id), removal(sight, *id)),
        Wanted::Replace { old, peer_urls, .. } => replace::steps(sight, *old, peer_urls),
    };
    let mut objections = rules::objections(sight, wanted);
    if before.spare().is_none() {
        // Whatever else there is to say, this comes first.
        objections.insert(0, Objection::NoQuorum(before));
    }
    let warnings = rules::warnings(sight, wanted, after);
    Plan { before, after, steps, objections, warnings }
}

fn one_more(shape: Shape) -> Shape {
    Shape { voters: shape.voters + 1, answering: shape.answering + 1, ..shape }
}

fn promoted(sight: &Sight, id: MemberId) -> Shape {
    let shape = sight.shape();
    match sight.of_id(id) {
        Some(seen) if !seen.votes() => Shape { learners: shape.learners - 1, ..one_more(shape) },
        _ => shape,
    }
}

fn one_less(sight: &Sight, id: MemberId) -> Shape {
    let left = sight.members.iter().filter(|seen| seen.member.id != id).cloned().collect();
    Sight { members: left, leader: sight.leader }.shape()
}

fn removal(sight: &Sight, id: MemberId) -> Vec<Step> {
    let leads = sight.leader == Some(id) && sight.shape().voters > 1;
    leads.then_some(Step::HandOver).into_iter().chain([Step::Remove]).collect()
}
