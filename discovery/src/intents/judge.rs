//! Decides whether an agent's report about an intent is accepted, and explains why an intent waits.
//! These functions are pure.

use discovery_types::api::{Explanation, IntentState, IntentView, MAX_MEMBERS, Outcome, WaitView};
use discovery_types::digest::{Digest, MemberId};
use discovery_types::grant::Grant;
use discovery_types::intent::Verb;
use discovery_types::jws::JwsType;
use discovery_types::order::Order;
use discovery_types::problem::Code;
use discovery_types::redeem::Redeem;

use super::standby;
use crate::error::ApiError;
use crate::members::directory;
use crate::store::UnixMicros;
use crate::store::changes::{MembershipChanges, MembershipReport, StoredIntent};

/// Maximum number of a cluster's intents that are open or under way.
pub(super) const MAX_LIVE_INTENTS: usize = 16;

/// How long an intent that is under way counts towards [`MAX_LIVE_INTENTS`], in microseconds. A
/// member's agent that reports a false state could otherwise block other intents for ever.
pub(super) const LIVE_WINDOW_US: UnixMicros = 24 * 3_600 * 1_000_000;

/// Decision about a reported outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OutcomeDecision {
    /// The outcome is new and must be stored.
    New,
    /// The intent already has the reported state.
    Same,
}

impl StoredIntent {
    /// State of the intent at `now`: an open intent can have expired by then.
    pub(super) fn state_at(&self, now: UnixMicros) -> IntentState {
        let over = now.unsigned_abs() / 1_000_000 >= self.intent.expires_at;
        match self.state {
            IntentState::Open if over || self.is_standby_gone(now) => IntentState::Expired,
            state => state,
        }
    }

    /// Hash of the newcomer's record, if the intent is a newcomer's.
    pub(super) fn record_hash(&self) -> Option<Digest> {
        let redeem: Redeem =
            self.intent.redeem.as_ref()?.claims_unverified(JwsType::Redeem).ok()?;
        Some(redeem.signed.record.hash())
    }

    /// The member that the newcomer replaces, if any.
    pub(super) fn replaced_member(&self) -> Option<MemberId> {
        if self.replaces.is_some() {
            return self.replaces;
        }
        let grant: Grant = self.intent.authority.claims_unverified(JwsType::Grant).ok()?;
        grant.replaces
    }

    /// The member that the intent removes, moves or replaces.
    pub(super) fn affected_member(&self) -> Option<MemberId> {
        self.ordered_member().or_else(|| self.replaced_member())
    }

    /// The member that the order is about, if the intent is an order.
    fn ordered_member(&self) -> Option<MemberId> {
        let order: Order = self.intent.authority.claims_unverified(JwsType::Order).ok()?;
        Some(order.change.member())
    }
}

fn refused(code: Code, detail: impl Into<String>, next: &str) -> ApiError {
    ApiError::new(code, detail, next)
}

/// Position in the cluster's log from which a member reports, and the position that a quorum has
/// reached. Positions are pairs of Raft term and Raft index.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReportPosition<'a> {
    /// Name of the reporting member.
    pub(super) by: &'a str,
    /// Raft term and index of the reporter's node.
    pub(super) position: (u64, u64),
    /// Position that a quorum of the voters has reached, by their own reports.
    pub(super) reached: Option<(u64, u64)>,
}

impl ReportPosition<'_> {
    /// Whether an outcome of `known` was already reported from a later position. A stored position
    /// beyond the one that a quorum has reached may be wrong, so the quorum's position counts in
    /// its place. A member that reported a wrong position therefore can't block the reports of
    /// other members. If no quorum's position is known, only an outcome that the same member
    /// reported counts.
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

/// Decides whether an outcome is accepted.
pub(super) fn judge(
    known: &StoredIntent,
    outcome: &Outcome,
    reading: ReportPosition<'_>,
) -> Result<OutcomeDecision, ApiError> {
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
        return Ok(OutcomeDecision::Same);
    }
    if reading.is_older_than(known) {
        let detail = "Something newer was said of it: your node has not heard all yet.";
        return Err(refused(Code::Conflict, detail, LOOK));
    }
    if !known.state.may_become(next) {
        let detail = format!("It is {}, and is not {next} any more.", known.state);
        return Err(refused(Code::Conflict, detail, LOOK));
    }
    Ok(OutcomeDecision::New)
}

/// Converts an intent to the API's view at `now`. `name` is the cluster's name.
pub(super) fn view(
    known: &StoredIntent,
    changes: &MembershipChanges,
    name: &str,
    now: UnixMicros,
) -> IntentView {
    let state = known.state_at(now);
    let about = known.affected_member();
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
        explain: explain(known, changes, about_name.as_deref(), (state, now), name),
        about,
        about_name,
        waits: known.wait_reason.as_ref().filter(|_| state.is_live()).map(|waits| WaitView {
            reason: waits.reason.clone(),
            by: waits.by.clone(),
            at_ms: waits.at_us / 1_000,
        }),
        policy: standby::policy_id(known),
    }
}

/// Returns a member's name from the confirmed list, or from the last report that has one.
fn name_of(changes: &MembershipChanges, id: MemberId) -> Option<String> {
    let confirmed = changes.confirmed.iter();
    let mut said = confirmed.chain(changes.reports.iter().rev().map(|(_, said)| said));
    let listed = |said: &MembershipReport| {
        let member = said.membership.members.iter().find(|member| member.id == id)?;
        (!member.name.is_empty()).then(|| member.name.clone())
    };
    said.find_map(listed)
}

/// Describes the intent's task, with the names of the affected member and of the newcomer.
fn task(known: &StoredIntent, about_name: Option<&str>) -> String {
    let subject = &known.subject;
    let about = match (known.affected_member(), about_name) {
        (Some(id), Some(name)) => format!("{name} ({id})"),
        (Some(id), None) => id.to_string(),
        (None, _) => String::new(),
    };
    match known.intent.verb {
        Verb::Join => format!("{subject} asks to become a member"),
        Verb::Replace if known.is_standby() => format!(
            "{subject} waits, by {}, for the place of a member that nobody can reach",
            standby::name_policy(known)
        ),
        Verb::Replace if standby::policy_id(known).is_some() => format!(
            "{subject} takes the place of member {about}, by {}",
            standby::name_policy(known)
        ),
        Verb::Replace => format!("{subject} asks to take the place of member {about}"),
        Verb::Remove => format!("member {about} is to be removed"),
        Verb::Update => format!("member {about} is to get other peer URLs"),
    }
}

fn explanation(code: &str, missing: String, held_by: &str, command: Option<String>) -> Explanation {
    Explanation {
        code: code.into(),
        missing,
        held_by: vec![held_by.to_owned()],
        last_error: None,
        next_retry_ms: None,
        command,
    }
}

/// Returns name and id of the leader, according to the members' reports.
fn leader(changes: &MembershipChanges) -> Option<String> {
    let view = directory::view(changes.confirmed.as_ref(), &changes.reports)?;
    let id = view.leader?;
    Some(name_of(changes, id).map_or_else(|| id.to_string(), |name| format!("{name} ({id})")))
}

/// Explains what an open intent waits for.
fn explain_open(
    known: &StoredIntent,
    changes: &MembershipChanges,
    about_name: Option<&str>,
    name: &str,
) -> Explanation {
    let task = task(known, about_name);
    let leader = leader(changes);
    let command = Some(format!("muster-discovery cluster explain {name}"));
    if known.is_standby() && known.wait_reason.is_none() {
        return explanation("standby", task, "nobody", None);
    }
    match &known.wait_reason {
        Some(waits) => Explanation {
            last_error: Some(waits.reason.clone()),
            ..explanation(
                "waits_for_the_cluster",
                format!(
                    "{task}; the agent of {}, beside the leader, waits: {}",
                    waits.by, waits.reason
                ),
                &waits.by,
                command,
            )
        },
        None => explanation(
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
    changes: &MembershipChanges,
    about_name: Option<&str>,
    (state, now): (IntentState, UnixMicros),
    name: &str,
) -> Vec<Explanation> {
    let (verb, subject) = (known.intent.verb, &known.subject);
    let mut lines = Vec::new();
    match (state, &known.outcome) {
        (IntentState::Open, _) => lines.push(explain_open(known, changes, about_name, name)),
        (IntentState::Added, _) => lines.push(Explanation {
            last_error: known.wait_reason.as_ref().map(|waits| waits.reason.clone()),
            ..explanation(
                "catches_up",
                format!(
                    "{}; {subject} is a learner, and becomes a voter when it has caught up",
                    task(known, about_name)
                ),
                subject,
                Some("muster-agent status".into()),
            )
        }),
        (IntentState::Expired, _) if known.is_standby_gone(now) => lines.push(explanation(
            "standby_gone",
            format!("{subject} waited by {}, and asks no more", standby::name_policy(known)),
            subject,
            None,
        )),
        (IntentState::Expired, _) => lines.push(explanation(
            "expired",
            "no agent of the cluster began it in time".into(),
            "admin",
            Some(retry_command(verb, name)),
        )),
        (IntentState::Withdrawn, _) => lines.push(explanation(
            "withdrawn",
            format!("{} took it back", known.reported_by.as_deref().unwrap_or("an admin")),
            "admin",
            Some(retry_command(verb, name)),
        )),
        (
            IntentState::Refused | IntentState::Stalled,
            Some(Outcome::Refused { reason } | Outcome::Stalled { reason, .. }),
        ) => lines.push(explanation(
            state.as_str(),
            reason.clone(),
            "admin",
            Some(retry_command(verb, name)),
        )),
        _ => {}
    }
    if let Some(address) = &known.contested_by {
        lines.push(explanation(
            "ticket_contested",
            format!("another key tried the same ticket, from {address}: somebody copied it"),
            "admin",
            Some(format!("muster-discovery intent withdraw {name} {}", known.intent.operation)),
        ));
    }
    lines
}

/// Returns the command that requests the same change again.
fn retry_command(verb: Verb, name: &str) -> String {
    match verb {
        Verb::Join => format!("muster-discovery token create --cluster {name} --kind join"),
        Verb::Replace => {
            format!("muster-discovery token create --cluster {name} --kind join --replace MEMBER")
        }
        Verb::Remove => format!("muster-discovery intent remove {name} MEMBER"),
        Verb::Update => format!("muster-discovery intent update {name} MEMBER --peer-urls URL"),
    }
}
