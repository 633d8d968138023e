//! Membership changes drawn from a seed: few members, and many requests that must be refused.
//!
//! Requests that are not drawn:
//! - A second voter in a cluster of one. etcd then blocks until that voter joins; here the new
//!   member begins as a learner.
//! - Malformed peer URLs in an update: etcd commits them, and some end the server at its next
//!   start.
//! - Peer URLs with a query: etcd accepts them, but never reaches any member there.
//! - Updates of a running member to URLs at which it doesn't listen: no member could reach it.
//! - Changes that would cost a cluster its quorum.
//! - A restart of a member, in a run with an update to another member's URL. When etcd restarts, it
//!   replays its log, and judges refused changes again by the members at the time of the restart.
//!   So it accepts the URL if its owner has been removed since.

use crate::rng::Rng;

/// Member that a request names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemberReference {
    /// Member with this number, in the order of addition; it may have been removed.
    Member(usize),
    ZeroId,
    UnknownId,
}

/// A peer URL, before it is converted to text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemberUrl {
    /// URL of the member with this number, which may have been removed.
    OfMember(usize),
    /// An address at which no member listens.
    Unused(u8),
    /// The URL is this text, unchanged.
    Literal(&'static str),
}

/// A request to both clusters, or a start or stop of a member. The field `at` is the member that
/// receives the request.
#[derive(Clone, Debug)]
pub(super) enum MemberCall {
    Add { urls: Vec<MemberUrl>, is_learner: bool, at: usize },
    Promote { who: MemberReference, at: usize },
    Update { who: MemberReference, urls: Vec<MemberUrl>, at: usize },
    Remove { who: MemberReference, at: usize },
    List { linearizable: bool, at: usize },
    Start(usize),
    Stop(usize),
}

#[derive(Clone, Debug)]
pub(super) struct ExpectedMember {
    pub(super) urls: Vec<MemberUrl>,
    pub(super) is_learner: bool,
    pub(super) has_started: bool,
    pub(super) runs: bool,
    pub(super) is_gone: bool,
}

/// Present state of both clusters.
#[derive(Clone, Debug)]
pub(super) struct ExpectedCluster {
    pub(super) members: Vec<ExpectedMember>,
    may_start: bool,
    /// Whether stopped members may be started again in this run. Only in runs without such starts
    /// may an update name another member's URL (see the module's documentation).
    starts_again: bool,
}

/// Number of addresses at which members can listen.
pub(super) const MAX_MEMBERS: usize = 12;

impl ExpectedCluster {
    pub(super) fn new(members: usize, starts_again: bool) -> Self {
        let member = |place| ExpectedMember {
            urls: vec![MemberUrl::OfMember(place)],
            is_learner: false,
            has_started: true,
            runs: true,
            is_gone: false,
        };
        let (members, may_start) = ((0..members).map(member).collect(), members > 1);
        Self { members, may_start, starts_again }
    }

    /// Returns the peer URL for the next member to be added.
    fn next_url(&self) -> MemberUrl {
        MemberUrl::OfMember(self.members.len())
    }

    pub(super) fn add(&mut self, urls: &[MemberUrl], is_learner: bool) {
        let urls = urls.to_vec();
        self.members.push(ExpectedMember {
            urls,
            is_learner,
            has_started: false,
            runs: false,
            is_gone: false,
        });
    }

    /// Returns whether any of these URLs is or was a member's.
    pub(super) fn were_used(&self, urls: &[MemberUrl]) -> bool {
        self.members.iter().any(|member| member.urls.iter().any(|url| urls.contains(url)))
    }

    pub(super) fn promote(&mut self, who: MemberReference) {
        self.member_mut(who).is_learner = false;
    }

    pub(super) fn update(&mut self, who: MemberReference, urls: &[MemberUrl]) {
        self.member_mut(who).urls = urls.to_vec();
    }

    /// Removes a member. Returns its number if its process was running.
    pub(super) fn remove(&mut self, who: MemberReference) -> Option<usize> {
        let member = self.member_mut(who);
        member.is_gone = true;
        let ended_process = std::mem::take(&mut member.runs);
        let MemberReference::Member(number) = who else { return None };
        ended_process.then_some(number)
    }

    fn member_mut(&mut self, who: MemberReference) -> &mut ExpectedMember {
        let MemberReference::Member(number) = who else { panic!("{who:?} was taken for a member") };
        &mut self.members[number]
    }

    pub(super) fn running_voters(&self) -> usize {
        self.members.iter().filter(|member| member.runs && !member.is_learner).count()
    }

    fn voters(&self) -> usize {
        self.members.iter().filter(|member| !member.is_gone && !member.is_learner).count()
    }

    pub(super) fn numbers_where(&self, what: impl Fn(&ExpectedMember) -> bool) -> Vec<usize> {
        (0..self.members.len()).filter(|number| what(&self.members[*number])).collect()
    }
}

pub(super) struct MemberCallGenerator<'r> {
    pub(super) rng: &'r mut Rng,
    pub(super) known: &'r ExpectedCluster,
}

impl MemberCallGenerator<'_> {
    pub(super) fn draw_call(&mut self) -> MemberCall {
        loop {
            let call = self.draw_any();
            if self.is_allowed(&call) {
                return call;
            }
        }
    }

    fn draw_any(&mut self) -> MemberCall {
        let at = self.one_of(&self.known.numbers_where(|member| member.runs));
        match self.rng.range(0, 100) {
            0..32 => MemberCall::Add { urls: self.urls(), is_learner: self.rng.chance(600), at },
            32..46 => MemberCall::Promote { who: self.draw_member(), at },
            46..62 => {
                let who = self.draw_member();
                MemberCall::Update { who, urls: self.urls_for(who), at }
            }
            62..78 => MemberCall::Remove { who: self.draw_member(), at },
            78..88 => MemberCall::List { linearizable: self.rng.chance(500), at },
            88..96 => {
                MemberCall::Start(self.draw_member_where(|member| !member.is_gone && !member.runs))
            }
            _ => MemberCall::Stop(self.draw_member_where(|member| member.runs)),
        }
    }

    fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.rng.pick(choices.len())]
    }

    /// Draws a member that satisfies `which`, or any member if none does.
    fn draw_member_where(&mut self, which: impl Fn(&ExpectedMember) -> bool) -> usize {
        let mut candidates = self.known.numbers_where(which);
        candidates.extend(candidates.is_empty().then_some(0));
        self.one_of(&candidates)
    }

    fn draw_member(&mut self) -> MemberReference {
        match self.rng.range(0, 20) {
            0 => MemberReference::ZeroId,
            1 => MemberReference::UnknownId,
            _ => MemberReference::Member(self.rng.pick(self.known.members.len())),
        }
    }

    fn url(&mut self) -> MemberUrl {
        const ODD: [&str; 11] = [
            "",
            "nonsense",
            "http://",
            "http://127.9.9.9",
            "http://127.9.9.9:2380/path",
            "ftp://127.9.9.9:2380",
            "https://127.9.9.9:2380",
            "http://name.invalid:2380",
            "http://[::1:2380",
            "http://127.9.9.9:port",
            "//127.9.9.9:2380",
        ];
        match self.rng.range(0, 10) {
            0..5 => self.known.next_url(),
            5 => MemberUrl::OfMember(self.rng.pick(self.known.members.len())),
            6..8 => MemberUrl::Unused(u8::try_from(self.rng.range(1, 4)).expect("it is small")),
            _ => MemberUrl::Literal(self.one_of(&ODD)),
        }
    }

    fn urls(&mut self) -> Vec<MemberUrl> {
        match self.rng.range(0, 12) {
            0 => Vec::new(),
            1 => vec![self.known.next_url(), self.url()],
            _ => vec![self.url()],
        }
    }

    /// Draws URLs for an update of a member: its own URLs, an unused address if it has never
    /// started, or the URL of any member.
    fn urls_for(&mut self, who: MemberReference) -> Vec<MemberUrl> {
        let other = MemberUrl::OfMember(self.rng.pick(self.known.members.len()));
        match who {
            MemberReference::Member(number) if self.rng.chance(400) => {
                self.known.members[number].urls.clone()
            }
            MemberReference::Member(number) if !self.known.members[number].has_started => {
                vec![MemberUrl::Unused(u8::try_from(self.rng.range(1, 4)).expect("it is small"))]
            }
            _ => vec![other],
        }
    }

    fn is_allowed(&self, call: &MemberCall) -> bool {
        let known = self.known;
        let quorum = |voters: usize| voters / 2 + 1;
        match call {
            MemberCall::Add { is_learner, .. } => {
                known.members.len() < MAX_MEMBERS && (*is_learner || known.running_voters() > 1)
            }
            MemberCall::Promote { who: MemberReference::Member(number), .. } => {
                // Whether a member that has just stopped counts as in sync depends on chance.
                let member = &known.members[*number];
                member.runs || !member.has_started || member.is_gone
            }
            MemberCall::Update { who: MemberReference::Member(number), urls, .. } => {
                let member = &known.members[*number];
                let taken = |url: &MemberUrl| {
                    known
                        .numbers_where(|other| !other.is_gone && other.urls.contains(url))
                        .iter()
                        .any(|other| other != number)
                };
                member.is_gone
                    || !member.has_started
                    || *urls == member.urls
                    || (!known.starts_again && urls.iter().any(taken))
            }
            MemberCall::Remove { who: MemberReference::Member(number), at } => {
                // A member that is asked to remove itself might end before it answers.
                number != at || known.voters() == 1
            }
            MemberCall::Start(number) => {
                let member = &known.members[*number];
                known.may_start
                    && !member.is_gone
                    && !member.runs
                    && if member.has_started {
                        known.starts_again
                    } else {
                        member.urls == [MemberUrl::OfMember(*number)]
                    }
            }
            MemberCall::Stop(number) => {
                let member = &known.members[*number];
                let remaining = known.running_voters() - usize::from(!member.is_learner);
                member.runs && remaining >= quorum(known.voters()) && remaining > 0
            }
            _ => true,
        }
    }
}
