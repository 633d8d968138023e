//! Computes what a membership change would do, from the members' observed state, before anything is
//! done. Pure.
//!
//! The cluster judges every change itself, and more exactly than is possible from outside: it knows
//! for how long each member has been connected. A plan predicts the cluster's refusals. It also
//! warns of changes that the cluster allows although they make it less safe.

mod progress;
mod replace;
mod rules;
#[cfg(test)]
mod tests;
mod words;

pub(crate) use self::progress::{Pace, Progress};
pub(crate) use self::replace::{Next, next};

use crate::cluster::{Member, MemberId};

/// A learner that lacks at most this many entries is in sync, by `muster-node`'s rule.
pub(crate) const IN_SYNC_ENTRIES: u64 = 1_000;

/// Observed state of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// The member was added and has never run.
    NotStarted,
    /// The member has started, but doesn't answer.
    Silent,
    /// The member answers a status request.
    Answers {
        /// Number of entries that the member lacks; unknown while there is no leader.
        behind: Option<u64>,
    },
}

/// A member and its observed state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    /// The member as the cluster lists it.
    pub member: Member,
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

    /// Returns the member's name, or its id and peer URLs if it has not started and so has no name.
    pub(crate) fn label(&self) -> String {
        if self.member.is_started() {
            self.member.name.clone()
        } else {
            format!("{} ({})", self.member.id, self.member.peer_urls.join(","))
        }
    }
}

/// The cluster's members and their observed states.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sight {
    /// All members of the cluster.
    pub members: Vec<Seen>,
    /// The leader, if there is one.
    pub leader: Option<MemberId>,
}

impl Sight {
    /// Returns the member with this id.
    pub(crate) fn of_id(&self, id: MemberId) -> Option<&Seen> {
        self.members.iter().find(|seen| seen.member.id == id)
    }

    /// Returns a member other than `but` that has any of these peer URLs.
    fn at(&self, peer_urls: &[String], but: Option<MemberId>) -> Option<&Seen> {
        self.members.iter().find(|seen| {
            Some(seen.member.id) != but
                && seen.member.peer_urls.iter().any(|url| peer_urls.contains(url))
        })
    }

    /// Returns a member other than `but` that has this name. A member at any of `peer_urls` is left
    /// out, because it is the very member that the change is about.
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

    /// Returns whether a quorum of voters answers.
    pub(crate) fn is_well(&self) -> bool {
        self.shape().spare().is_some()
    }

    /// If there is no quorum, returns advice on what to do.
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

    /// Returns the other voters that are unreachable or behind, if the cluster would stop without
    /// this member. `None` if it can spare the member. Also `None` for one or two voters: such a
    /// cluster is too small to spare any.
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

/// Numbers of voters, learners, and voters that answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Number of members with a vote.
    pub voters: usize,
    /// Number of members without a vote.
    pub learners: usize,
    /// Number of voters that answer.
    pub answering: usize,
}

impl Shape {
    /// Returns the number of voters that have to agree.
    pub(crate) fn quorum(self) -> usize {
        self.voters / 2 + 1
    }

    /// Returns the number of voters that may fail if all work now.
    pub(crate) fn tolerance(self) -> usize {
        self.voters.saturating_sub(self.quorum())
    }

    /// Returns how many more voters may fail now; `None` if there is no quorum.
    pub(crate) fn spare(self) -> Option<usize> {
        self.answering.checked_sub(self.quorum())
    }
}

/// A change that an operator wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Add a new member to the cluster.
    Add {
        /// Name of the new member.
        name: String,
        /// Peer URLs of the new member.
        peer_urls: Vec<String>,
        /// Whether the member votes from the beginning.
        is_voter: bool,
    },
    /// Make a learner a voter.
    Promote(MemberId),
    /// Change a member's peer URLs.
    Update(MemberId, Vec<String>),
    /// Remove a member for ever.
    Remove(MemberId),
    /// Replace a member by a new one.
    Replace {
        /// The member to replace.
        old: MemberId,
        /// Name of the new member.
        name: String,
        /// Peer URLs of the new member.
        peer_urls: Vec<String>,
    },
}

/// One step of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The cluster adds a member.
    Add {
        /// Whether the member votes from the beginning.
        is_voter: bool,
    },
    /// A person starts the new member's node.
    Start,
    /// The new member catches up with the log.
    CatchUp,
    /// The learner becomes a voter.
    Promote,
    /// The leader hands its leadership over.
    HandOver,
    /// The cluster removes a member.
    Remove,
    /// The cluster changes a member's peer URLs.
    Update,
    /// A person restarts the member with its new peer URLs.
    Restart,
}

/// Why the cluster will refuse a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Objection {
    /// Too few voters answer for a quorum.
    NoQuorum(Shape),
    /// After the change, too few of the voters would have started.
    NotStarted {
        /// Number of voters that would have started.
        started: usize,
        /// Number of voters that must have started.
        needed: usize,
        /// Voters that have not started.
        who: Vec<String>,
    },
    /// Too few voters answer for this change.
    Unhealthy {
        /// Number of voters that answer.
        healthy: usize,
        /// Number of voters that must answer.
        needed: usize,
        /// Voters that don't answer.
        who: Vec<String>,
    },
    /// There is a learner already, and only one is allowed by default.
    TooManyLearners(String),
    /// This is not a peer URL by etcd's rules.
    BadUrl(String),
    /// Another member has this peer URL.
    UrlTaken(String),
    /// Another member has this name, so the name would be ambiguous. The cluster itself allows
    /// equal names.
    NameTaken {
        /// Name of the new member.
        name: String,
        /// The member that has the name.
        id: MemberId,
    },
    /// The member to promote is a voter already.
    NotALearner(String),
    /// The learner lacks too many entries, or doesn't answer.
    NotInSync(String, State),
    /// The member is the last voter: the cluster would have none left.
    LastVoter,
}

/// A risk of a change that the cluster allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Warning {
    /// N voters (N even) tolerate no more failures than N-1.
    EvenSize(usize),
    /// A learner without a vote yet: it stays one until a person promotes it.
    LearnerWaits(String),
    /// The URL is without TLS, while other members use TLS.
    Plain(String),
    /// A voter that has not started counts as failed until it serves.
    CountsAsFailed {
        /// How many more voters may fail until then; `None` if there is no quorum.
        spare: Option<usize>,
    },
    /// The member to remove works, while others don't.
    RemovesHealthy {
        /// Voters that don't answer.
        silent: Vec<String>,
    },
    /// The cluster has two voters: both must work until the removal is committed.
    OneOfTwo,
    /// The change lowers the tolerance from the first number of failures to the second.
    LessTolerance(usize, usize),
    /// The member counts as failed while it restarts.
    RestartCosts {
        /// How many more voters may fail until then; `None` if there is no quorum.
        spare: Option<usize>,
    },
    /// The replaced member is removed first; the text says why.
    RemovesFirst(&'static str),
}

/// The effect of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The shape before the change.
    pub before: Shape,
    /// The shape after the change, with the new member started.
    pub after: Shape,
    /// The steps of the change, in order.
    pub steps: Vec<Step>,
    /// Why the cluster would refuse the change.
    pub objections: Vec<Objection>,
    /// Risks of the change.
    pub warnings: Vec<Warning>,
}

/// Computes the plan of the change `wanted`.
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
        // Without a quorum nothing else can be done, so this objection comes first.
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
