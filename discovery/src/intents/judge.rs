//! Whether what an agent says of an intent is taken, and what an intent waits for. Pure.

use discovery_types::api::{Explanation, IntentState, IntentView, MAX_MEMBERS, Outcome, WaitView};
use discovery_types::digest::{Digest, MemberId};
use discovery_types::grant::Grant;
use discovery_types::intent::Verb;
use discovery_types::jws::Typ;
use discovery_types::order::Order;
use discovery_types::problem::Code;
use discovery_types::redeem::Redeem;

use super::directory;
use crate::error::ApiError;
use crate::store::Micros;
use crate::store::intents::{Changes, Said, StoredIntent};

/// Most intents of a cluster that wait or are under way.
pub(super) const MAX_LIVE: usize = 16;

/// One that is under way for longer, in microseconds, keeps no other one out: a member's agent that
/// lied of how far it is can leave it under way for ever.
pub(super) const COUNTS_FOR_US: Micros = 24 * 3_600 * 1_000_000;

/// What to do with an outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// It is stored.
    New,
    /// It was said before.
    Same,
}

impl StoredIntent {
    /// How far it has come at `now`.
    pub(super) fn state_at(&self, now: Micros) -> IntentState {
        let over = now.unsigned_abs() / 1_000_000 >= self.intent.expires_at;
        match self.state {
            IntentState::Open if over => IntentState::Expired,
            state => state,
        }
    }

    /// Hash of the newcomer's record.
    pub(super) fn record_hash(&self) -> Option<Digest> {
        let redeem: Redeem = self.intent.redeem.as_ref()?.claims_unverified(Typ::Redeem).ok()?;
        Some(redeem.signed.record.hash())
    }

    /// The member in whose place the newcomer comes.
    pub(super) fn replaced(&self) -> Option<MemberId> {
        let grant: Grant = self.intent.authority.claims_unverified(Typ::Grant).ok()?;
        grant.replaces
    }

    /// The member that leaves or moves by it.
    pub(super) fn about(&self) -> Option<MemberId> {
        self.ordered_member().or_else(|| self.replaced())
    }

    /// The member that an order is about.
    fn ordered_member(&self) -> Option<MemberId> {
        let order: Order = self.intent.authority.claims_unverified(Typ::Order).ok()?;
        Some(order.change.member())
    }
}

fn refused(code: Code, detail: impl Into<String>, next: &str) -> ApiError {
    ApiError::new(code, detail, next)
}

/// Where in the cluster's log an outcome was read, as (Raft term, Raft index), and what is known of
/// such places.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading<'a> {
    /// The reporter's name.
    pub(super) by: &'a str,
    /// Where the reporter's node was.
    pub(super) position: (u64, u64),
    /// What a quorum of the voters has reached by its own reports.
    pub(super) reached: Option<(u64, u64)>,
}

impl Reading<'_> {
    /// Whether something newer was said of `known`. A position beyond what a quorum has reached
    /// counts as that: a member that lied, or was wrong, doesn't keep the others from speaking.
    fn is_older_than(&self, known: &StoredIntent) -> bool {
        let same = known.reported_by.as_deref() == Some(self.by);
        let last = match (known.position, self.reached) {
            (Some(last), Some(reached)) => Some(last.min(reached)),
            (last, None) if same => last,
            _ => None,
        };
        last.is_some_and(|last| self.position < last)
    }
}

/// Whether an outcome is taken.
pub(super) fn judge(
    known: &StoredIntent,
    outcome: &Outcome,
    reading: Reading<'_>,
) -> Result<Taken, ApiError> {
    const LOOK: &str = "Read the intent, and the cluster's own list.";
    let of_newcomer = matches!(known.intent.verb, Verb::Join | Verb::Replace);
    let fits = match outcome {
        Outcome::Added { .. } | Outcome::Promoted { .. } | Outcome::Stalled { .. } => of_newcomer,
        Outcome::Removed { .. } => known.intent.verb == Verb::Remove,
        Outcome::Updated { .. } => known.intent.verb == Verb::Update,
        Outcome::Refused { .. } => true,
    };
    if !fits {
        let (verb, state) = (known.intent.verb, outcome.state());
        return Err(refused(
            Code::InvalidRequest,
            format!("What was asked is to {verb}: that it is {state} is no answer to it."),
            LOOK,
        ));
    }
    if let Outcome::Added { initial_cluster, .. } = outcome
        && !(1..=MAX_MEMBERS).contains(&initial_cluster.len())
    {
        return Err(refused(Code::InvalidRequest, "A cluster has 1 to 64 members.", LOOK));
    }
    let bound = if of_newcomer { known.member } else { known.ordered_member() };
    if let (Some(bound), Some(said)) = (bound, outcome.member())
        && bound != said
    {
        let detail = format!("The intent is about member {bound}, not {said}.");
        return Err(refused(Code::Conflict, detail, LOOK));
    }
    let next = outcome.state();
    if known.state == next {
        return Ok(Taken::Same);
    }
    if reading.is_older_than(known) {
        let detail = "Something newer was said of it: your node has not heard all yet.";
        return Err(refused(Code::Conflict, detail, LOOK));
    }
    if !known.state.may_become(next) {
        let detail = format!("It is {}, and is not {next} any more.", known.state);
        return Err(refused(Code::Conflict, detail, LOOK));
    }
    Ok(Taken::New)
}

/// As it is shown at `now`; `name` is the cluster's.
pub(super) fn view(known: &StoredIntent, changes: &Changes, name: &str, now: Micros) -> IntentView {
    let state = known.state_at(now);
    let about = known.about();
    let about_name = about.and_then(|id| name_of(changes, id));
    IntentView {
        intent: known.intent.clone(),
        state,
        rev: known.rev,
        subject: known.subject.clone(),
        by: known.made_by.clone(),
        made_at_ms: known.made_us / 1_000,
        outcome: known.outcome.clone(),
        reported_by: known.reported_by.clone(),
        explain: explain(known, changes, about_name.as_deref(), state, name),
        about,
        about_name,
        waits: known.waits.as_ref().filter(|_| state.is_live()).map(|waits| WaitView {
            reason: waits.reason.clone(),
            by: waits.by.clone(),
            at_ms: waits.at_us / 1_000,
        }),
    }
}

/// A member's name, as somebody reported it last.
fn name_of(changes: &Changes, id: MemberId) -> Option<String> {
    let confirmed = changes.confirmed.iter();
    let mut said = confirmed.chain(changes.said.iter().rev().map(|(_, said)| said));
    let listed = |said: &Said| {
        let member = said.membership.members.iter().find(|member| member.id == id)?;
        (!member.name.is_empty()).then(|| member.name.clone())
    };
    said.find_map(listed)
}

/// What is to be done, with the names of both members.
fn task(known: &StoredIntent, about_name: Option<&str>) -> String {
    let subject = &known.subject;
    let about = match (known.about(), about_name) {
        (Some(id), Some(name)) => format!("{name} ({id})"),
        (Some(id), None) => id.to_string(),
        (None, _) => String::new(),
    };
    match known.intent.verb {
        Verb::Join => format!("{subject} asks to become a member"),
        Verb::Replace => format!("{subject} asks to take the place of member {about}"),
        Verb::Remove => format!("member {about} is to be removed"),
        Verb::Update => format!("member {about} is to get other peer URLs"),
    }
}

fn line(code: &str, missing: String, held_by: &str, command: Option<String>) -> Explanation {
    Explanation {
        code: code.into(),
        missing,
        held_by: vec![held_by.to_owned()],
        last_error: None,
        next_retry_ms: None,
        command,
    }
}

/// Name and id of the member that leads, according to the members' reports.
fn leader(changes: &Changes) -> Option<String> {
    let view = directory::view(changes.confirmed.as_ref(), &changes.said)?;
    let id = view.leader?;
    Some(name_of(changes, id).map_or_else(|| id.to_string(), |name| format!("{name} ({id})")))
}

/// What an intent waits for that nobody has begun.
fn open(
    known: &StoredIntent,
    changes: &Changes,
    about_name: Option<&str>,
    name: &str,
) -> Explanation {
    let task = task(known, about_name);
    let leader = leader(changes);
    let command = Some(format!("muster-discovery cluster explain {name}"));
    match &known.waits {
        Some(waits) => Explanation {
            last_error: Some(waits.reason.clone()),
            ..line(
                "waits_for_the_cluster",
                format!(
                    "{task}; the agent of {}, beside the leader, waits: {}",
                    waits.by, waits.reason
                ),
                &waits.by,
                command,
            )
        },
        None => line(
            "waits_for_an_agent",
            format!(
                "{task}; the agent beside the cluster's leader{} has to do it: it must run, reach \
                 this service, and find the cluster healthy",
                leader.as_ref().map(|leader| format!(", {leader},")).unwrap_or_default()
            ),
            leader.as_deref().unwrap_or("members"),
            command,
        ),
    }
}

fn explain(
    known: &StoredIntent,
    changes: &Changes,
    about_name: Option<&str>,
    state: IntentState,
    name: &str,
) -> Vec<Explanation> {
    let (verb, subject) = (known.intent.verb, &known.subject);
    let mut lines = Vec::new();
    match (state, &known.outcome) {
        (IntentState::Open, _) => lines.push(open(known, changes, about_name, name)),
        (IntentState::Added, _) => lines.push(Explanation {
            last_error: known.waits.as_ref().map(|waits| waits.reason.clone()),
            ..line(
                "catches_up",
                format!(
                    "{}; {subject} is a learner, and becomes a voter when it has caught up",
                    task(known, about_name)
                ),
                subject,
                Some("muster-agent status".into()),
            )
        }),
        (IntentState::Expired, _) => lines.push(line(
            "expired",
            "no agent of the cluster began it in time".into(),
            "admin",
            Some(again(verb, name)),
        )),
        (IntentState::Withdrawn, _) => lines.push(line(
            "withdrawn",
            format!("{} took it back", known.reported_by.as_deref().unwrap_or("an admin")),
            "admin",
            Some(again(verb, name)),
        )),
        (
            IntentState::Refused | IntentState::Stalled,
            Some(Outcome::Refused { reason } | Outcome::Stalled { reason, .. }),
        ) => lines.push(line(state.as_str(), reason.clone(), "admin", Some(again(verb, name)))),
        _ => {}
    }
    if let Some(address) = &known.contested {
        lines.push(line(
            "ticket_contested",
            format!("another key tried the same ticket, from {address}: somebody copied it"),
            "admin",
            Some(format!("muster-discovery intent withdraw {name} {}", known.intent.operation)),
        ));
    }
    lines
}

/// The command that asks for the same once more.
fn again(verb: Verb, name: &str) -> String {
    match verb {
        Verb::Join => format!("muster-discovery token create --cluster {name} --kind join"),
        Verb::Replace => {
            format!("muster-discovery token create --cluster {name} --kind join --replace MEMBER")
        }
        Verb::Remove => format!("muster-discovery intent remove {name} MEMBER"),
        Verb::Update => format!("muster-discovery intent update {name} MEMBER --peer-urls URL"),
    }
}
