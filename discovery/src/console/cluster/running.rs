//! A running cluster: its members, the changes that are under way, and hosts that ask for a place.

use discovery_types::api::{AskingHost, IntentState, IntentView, MemberView, MembersView, Outcome};

use crate::console::text::{Badge, ShownTime, Tone, plain, plain_list};

/// A member of the cluster.
pub(super) struct MemberTableRow {
    pub(super) id: String,
    pub(super) name: String,
    pub(super) role: &'static str,
    pub(super) health: Badge,
    pub(super) heard: Option<ShownTime>,
    pub(super) zone: String,
    pub(super) from: String,
    pub(super) peer_urls: String,
    pub(super) client_urls: String,
    /// Sentences about what is wrong with the member.
    pub(super) notes: Vec<String>,
}

/// A host that asks for a seat with a boot token, although the cluster has all its members.
pub(super) struct AskingRow {
    pub(super) name: String,
    pub(super) from: String,
    pub(super) key: String,
    pub(super) first: ShownTime,
    pub(super) last: ShownTime,
    pub(super) times: u64,
}

/// A change of the members, requested through discovery.
pub(super) struct ChangeRow {
    pub(super) operation: String,
    pub(super) verb: String,
    pub(super) subject: String,
    /// The other member that the change concerns, for example the member to replace.
    pub(super) about: String,
    pub(super) state: Badge,
    pub(super) by: String,
    pub(super) made: ShownTime,
    /// Token of the replacement policy under which a standby waits.
    pub(super) policy: String,
    /// Sentences that say why the change waits, or how it ended.
    pub(super) notes: Vec<String>,
}

pub(super) fn member_rows(present: &MembersView, now_ms: i64) -> Vec<MemberTableRow> {
    present.members.iter().map(|member| member_row(member, now_ms)).collect()
}

fn member_row(member: &MemberView, now_ms: i64) -> MemberTableRow {
    let tone = match member.health_name() {
        "well" => Tone::Good,
        "not heard yet" => Tone::Busy,
        _ => Tone::Bad,
    };
    let or_dash = |text: Option<&str>| text.map_or_else(|| "-".to_owned(), plain);
    let notes = [&member.last_error, &member.disagreement].into_iter().flatten();
    MemberTableRow {
        id: member.id.to_string(),
        name: plain(&member.display_name()),
        role: member.role_name(),
        health: Badge::new(tone, member.health_name()),
        heard: member.last_heard_ms.map(|at| ShownTime::relative(at, now_ms)),
        zone: or_dash(member.zone.as_ref().map(|zone| zone.as_str())),
        from: or_dash(member.source.as_deref()),
        peer_urls: plain_list(&member.peer_urls),
        client_urls: plain_list(&member.client_urls),
        notes: notes.map(|note| plain(note)).collect(),
    }
}

pub(super) fn asking_row(host: &AskingHost, now_ms: i64) -> AskingRow {
    AskingRow {
        name: plain(&host.name),
        from: plain(&host.source),
        key: host.agent.to_string(),
        first: ShownTime::relative(host.first_ms, now_ms),
        last: ShownTime::relative(host.last_ms, now_ms),
        times: host.times,
    }
}

/// Splits intents into the hosts that wait under a replacement policy, and all other changes.
pub(super) fn changes(intents: &[IntentView], now_ms: i64) -> (Vec<ChangeRow>, Vec<ChangeRow>) {
    let is_standby = |view: &&IntentView| view.policy.is_some() && view.state == IntentState::Open;
    let (standbys, others): (Vec<&IntentView>, Vec<&IntentView>) =
        intents.iter().partition(is_standby);
    let rows = |views: Vec<&IntentView>| views.iter().map(|view| row(view, now_ms)).collect();
    (rows(standbys), rows(others))
}

fn row(view: &IntentView, now_ms: i64) -> ChangeRow {
    let about = view.about.map(|id| match &view.about_name {
        Some(name) => format!("{} ({id})", plain(name)),
        None => id.to_string(),
    });
    let mut notes: Vec<String> = view.explain.iter().map(|reason| plain(&reason.missing)).collect();
    if let Some(Outcome::Refused { reason } | Outcome::Stalled { reason, .. }) = &view.outcome {
        notes.push(plain(reason));
    }
    if let Some(waits) = view.waits.as_ref().filter(|_| view.state.is_live()) {
        notes.push(format!("{} says: {}", plain(&waits.by), plain(&waits.reason)));
    }
    ChangeRow {
        operation: view.intent.operation.to_string(),
        verb: view.intent.verb.to_string(),
        subject: plain(&view.subject),
        about: about.unwrap_or_else(|| "-".to_owned()),
        state: Badge::new(tone(view.state), view.state),
        by: plain(&view.by),
        made: ShownTime::relative(view.made_at_ms, now_ms),
        policy: view.policy.map_or_else(|| "-".to_owned(), |policy| policy.to_string()),
        notes,
    }
}

fn tone(state: IntentState) -> Tone {
    match state {
        IntentState::Open | IntentState::Added => Tone::Busy,
        IntentState::Promoted | IntentState::Removed | IntentState::Updated => Tone::Good,
        IntentState::Refused | IntentState::Stalled => Tone::Bad,
        IntentState::Expired | IntentState::Withdrawn => Tone::Ended,
    }
}
