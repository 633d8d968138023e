//! Membership changes drawn from a seed: few members, and many requests that must be refused.
//!
//! These are not drawn:
//! - A second voter in a cluster of one. etcd then blocks until that one joins; here it begins as a
//!   learner.
//! - Malformed peer URLs in an update: etcd commits them, and some end the server at its next start.
//! - Peer URLs with a query: etcd accepts them, but never reaches any member there.
//! - Other URLs than its own for a running member: no member could reach it.
//! - Changes that would cost a cluster its quorum.
//! - In the same run, an update to another member's URL and a member that is started again. When etcd
//!   replays its log, it judges refused changes again by the members of that time. It then accepts the URL
//!   if its owner is gone.

use crate::rng::Rng;

/// Member that a request names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Who {
    /// Member with this number, in the order of addition; it may have been removed.
    Member(usize),
    Nobody,
    Stranger,
}

/// A peer URL, before it is converted to text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Url {
    /// URL of the member with this number, which may have been removed.
    Place(usize),
    /// An address at which no member listens.
    Nowhere(u8),
    /// The URL is this text, unchanged.
    Odd(&'static str),
}

/// A request to both clusters, or a start or stop of a member. `at` is the member that is asked.
#[derive(Clone, Debug)]
pub(super) enum Call {
    Add { urls: Vec<Url>, is_learner: bool, at: usize },
    Promote { who: Who, at: usize },
    Update { who: Who, urls: Vec<Url>, at: usize },
    Remove { who: Who, at: usize },
    List { linearizable: bool, at: usize },
    Start(usize),
    Stop(usize),
}

#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) urls: Vec<Url>,
    pub(super) is_learner: bool,
    pub(super) has_started: bool,
    pub(super) runs: bool,
    pub(super) is_gone: bool,
}

/// Present state of both clusters.
#[derive(Clone, Debug)]
pub(super) struct Known {
    pub(super) members: Vec<Member>,
    may_start: bool,
    /// Whether stopped members may be started again. If not, updates may name other members' URLs.
    starts_again: bool,
}

/// Number of addresses at which members can listen.
pub(super) const PLACES: usize = 12;

impl Known {
    pub(super) fn new(members: usize, starts_again: bool) -> Self {
        let member = |place| Member {
            urls: vec![Url::Place(place)],
            is_learner: false,
            has_started: true,
            runs: true,
            is_gone: false,
        };
        let (members, may_start) = ((0..members).map(member).collect(), members > 1);
        Self { members, may_start, starts_again }
    }

    /// Returns the address of the next member.
    fn place(&self) -> Url {
        Url::Place(self.members.len())
    }

    pub(super) fn add(&mut self, urls: &[Url], is_learner: bool) {
        let urls = urls.to_vec();
        self.members.push(Member {
            urls,
            is_learner,
            has_started: false,
            runs: false,
            is_gone: false,
        });
    }

    /// Returns whether any of these URLs is or was a member's.
    pub(super) fn have_been(&self, urls: &[Url]) -> bool {
        self.members.iter().any(|member| member.urls.iter().any(|url| urls.contains(url)))
    }

    pub(super) fn promote(&mut self, who: Who) {
        self.named(who).is_learner = false;
    }

    pub(super) fn update(&mut self, who: Who, urls: &[Url]) {
        self.named(who).urls = urls.to_vec();
    }

    /// Removes a member. Returns its number if its process was running.
    pub(super) fn remove(&mut self, who: Who) -> Option<usize> {
        let member = self.named(who);
        member.is_gone = true;
        let ran = std::mem::take(&mut member.runs);
        let Who::Member(number) = who else { return None };
        ran.then_some(number)
    }

    fn named(&mut self, who: Who) -> &mut Member {
        let Who::Member(number) = who else { panic!("{who:?} was taken for a member") };
        &mut self.members[number]
    }

    pub(super) fn running_voters(&self) -> usize {
        self.members.iter().filter(|member| member.runs && !member.is_learner).count()
    }

    fn voters(&self) -> usize {
        self.members.iter().filter(|member| !member.is_gone && !member.is_learner).count()
    }

    pub(super) fn are(&self, what: impl Fn(&Member) -> bool) -> Vec<usize> {
        (0..self.members.len()).filter(|number| what(&self.members[*number])).collect()
    }
}

pub(super) struct Draw<'r> {
    pub(super) rng: &'r mut Rng,
    pub(super) known: &'r Known,
}

impl Draw<'_> {
    pub(super) fn call(&mut self) -> Call {
        loop {
            let call = self.any();
            if self.is_fit(&call) {
                return call;
            }
        }
    }

    fn any(&mut self) -> Call {
        let at = self.one_of(&self.known.are(|member| member.runs));
        match self.rng.range(0, 100) {
            0..32 => Call::Add { urls: self.urls(), is_learner: self.rng.chance(600), at },
            32..46 => Call::Promote { who: self.who(), at },
            46..62 => {
                let who = self.who();
                Call::Update { who, urls: self.urls_for(who), at }
            }
            62..78 => Call::Remove { who: self.who(), at },
            78..88 => Call::List { linearizable: self.rng.chance(500), at },
            88..96 => Call::Start(self.among(|member| !member.is_gone && !member.runs)),
            _ => Call::Stop(self.among(|member| member.runs)),
        }
    }

    fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.rng.pick(of.len())]
    }

    /// Draws a member that satisfies `which`, or any member if none does.
    fn among(&mut self, which: impl Fn(&Member) -> bool) -> usize {
        let mut those = self.known.are(which);
        those.extend(those.is_empty().then_some(0));
        self.one_of(&those)
    }

    fn who(&mut self) -> Who {
        match self.rng.range(0, 20) {
            0 => Who::Nobody,
            1 => Who::Stranger,
            _ => Who::Member(self.rng.pick(self.known.members.len())),
        }
    }

    fn url(&mut self) -> Url {
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
            0..5 => self.known.place(),
            5 => Url::Place(self.rng.pick(self.known.members.len())),
            6..8 => Url::Nowhere(u8::try_from(self.rng.range(1, 4)).expect("it is small")),
            _ => Url::Odd(self.one_of(&ODD)),
        }
    }

    fn urls(&mut self) -> Vec<Url> {
        match self.rng.range(0, 12) {
            0 => Vec::new(),
            1 => vec![self.known.place(), self.url()],
            _ => vec![self.url()],
        }
    }

    /// Draws URLs for an update of a member that runs or may run later: its own, or some that must be
    /// refused.
    fn urls_for(&mut self, who: Who) -> Vec<Url> {
        let other = Url::Place(self.rng.pick(self.known.members.len()));
        match who {
            Who::Member(number) if self.rng.chance(400) => self.known.members[number].urls.clone(),
            Who::Member(number) if !self.known.members[number].has_started => {
                vec![Url::Nowhere(u8::try_from(self.rng.range(1, 4)).expect("it is small"))]
            }
            _ => vec![other],
        }
    }

    fn is_fit(&self, call: &Call) -> bool {
        let known = self.known;
        let quorum = |voters: usize| voters / 2 + 1;
        match call {
            Call::Add { is_learner, .. } => {
                known.members.len() < PLACES && (*is_learner || known.running_voters() > 1)
            }
            Call::Promote { who: Who::Member(number), .. } => {
                // It is random whether a member that has just stopped counts as in sync.
                let member = &known.members[*number];
                member.runs || !member.has_started || member.is_gone
            }
            Call::Update { who: Who::Member(number), urls, .. } => {
                let member = &known.members[*number];
                let taken = |url: &Url| {
                    known
                        .are(|other| !other.is_gone && other.urls.contains(url))
                        .iter()
                        .any(|other| other != number)
                };
                member.is_gone
                    || !member.has_started
                    || *urls == member.urls
                    || (!known.starts_again && urls.iter().any(taken))
            }
            Call::Remove { who: Who::Member(number), at } => {
                // A member that is asked to remove itself might end before it answers.
                number != at || known.voters() == 1
            }
            Call::Start(number) => {
                let member = &known.members[*number];
                known.may_start
                    && !member.is_gone
                    && !member.runs
                    && if member.has_started {
                        known.starts_again
                    } else {
                        member.urls == [Url::Place(*number)]
                    }
            }
            Call::Stop(number) => {
                let member = &known.members[*number];
                let left = known.running_voters() - usize::from(!member.is_learner);
                member.runs && left >= quorum(known.voters()) && left > 0
            }
            _ => true,
        }
    }
}
