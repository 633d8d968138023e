//! Explains every wait of a cluster: what is missing, which agents block it, the last error, the
//! time of the next try, and the remedy.

use std::collections::BTreeMap;

use crate::fitness;
use crate::service::cluster::{Cluster, EndCause, FrozenList, Phase, Seating};
use crate::service::links;
use crate::service::settings::FormationSettings;
use crate::service::time::next_deadline;
use crate::values::{AgentKey, UnixMicros};

/// Prefix of a nack by an agent that waits for releases (rule S6 of `agent/sign.rs`), as the API
/// writes it.
const UNRELEASED_PREFIX: &str = "unreleased: ";

/// One reason why the cluster waits, or why it will never go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitReason {
    /// Stable name of the reason, for programs.
    pub code: &'static str,
    /// Agents for which the cluster is waiting.
    pub blocking_agents: Vec<AgentKey>,
    /// Sentence with names that says what is missing.
    pub explanation: String,
    /// Last error of the cluster, if any.
    pub last_error: Option<String>,
    /// Time at which the cluster is tried or judged again.
    pub next_try: Option<UnixMicros>,
    /// Command to run, or a description of another remedy. `NAME` is a placeholder for the
    /// cluster's name, which isn't known here.
    pub remedy: String,
}

/// Returns the reasons why `cluster` waits, most important first; empty once it is formed.
#[must_use]
pub fn explain(
    cluster: &Cluster,
    settings: &FormationSettings,
    now: UnixMicros,
) -> Vec<WaitReason> {
    let mut lines = Vec::new();
    let undo_until = cluster.undo_until(settings).filter(|until| *until >= now);
    let next = next_deadline(cluster, settings, now);
    let writer = Explainer { cluster, next, now, undo_until };
    lines.extend(writer.split());
    lines.extend(writer.unsettled());
    match cluster.phase {
        Phase::Open => {
            lines.extend(writer.free_seats());
            lines.extend(writer.held_back());
            lines.extend(writer.unapproved());
        }
        Phase::Preparing => {
            if let Some(frozen) = &cluster.frozen {
                lines.extend(writer.unreached(frozen));
                lines.extend(writer.acks_missing(frozen, settings));
            }
        }
        Phase::Committed => lines.extend(writer.reports_missing()),
        Phase::Formed => {}
        Phase::Expired | Phase::Abandoned | Phase::Retired => lines.push(writer.ended()),
    }
    lines
}

/// Writes the reasons why one cluster waits, in its state at `now`.
struct Explainer<'a> {
    cluster: &'a Cluster,
    next: Option<UnixMicros>,
    now: UnixMicros,
    /// Time until which an owner may still undo the cluster's end.
    undo_until: Option<UnixMicros>,
}

impl Explainer<'_> {
    fn name(&self, key: AgentKey) -> String {
        match self.cluster.agents.get(&key) {
            Some(agent) => format!("{} ({key})", agent.record.name),
            None => key.to_string(),
        }
    }

    fn names(&self, keys: &[AgentKey]) -> String {
        keys.iter().map(|&key| self.name(key)).collect::<Vec<_>>().join(", ")
    }

    fn last_error(&self) -> Option<String> {
        self.cluster.last_error.as_ref().map(|error| match error.key {
            Some(key) => format!("{}: {}", self.name(key), error.text),
            None => error.text.clone(),
        })
    }

    /// Returns `otherwise`, with advice in front of it if an agent waits for the releases of a list
    /// that it signed. The advice comes first because only a person can end that wait.
    fn with_advice(&self, otherwise: &str) -> String {
        let waits =
            self.cluster.last_error.as_ref().filter(|e| e.text.starts_with(UNRELEASED_PREFIX));
        let Some(key) = waits.and_then(|error| error.key) else { return otherwise.to_owned() };
        let agent = self.name(key);
        format!(
            "start the agents again that {agent} waits for or, if those hosts are gone for good, run \
             `muster-agent reset` on it; else {otherwise}"
        )
    }

    fn reason(
        &self,
        code: &'static str,
        who: Vec<AgentKey>,
        what: String,
        way_out: &str,
    ) -> WaitReason {
        WaitReason {
            code,
            blocking_agents: who,
            explanation: what,
            last_error: self.last_error(),
            next_try: self.next,
            remedy: way_out.to_owned(),
        }
    }

    fn split(&self) -> Option<WaitReason> {
        let split = self.cluster.split.as_ref()?;
        Some(self.reason(
            "split",
            Vec::new(),
            format!(
                "a second valid document was shown: {} of epoch {}; nothing is done here any more",
                split.other, split.epoch
            ),
            "find out on the hosts which list runs, stop the other one's nodes, then have an owner \
             run `muster-discovery cluster retire NAME`",
        ))
    }

    fn unsettled(&self) -> Option<WaitReason> {
        let waits = matches!(self.cluster.phase, Phase::Open | Phase::Preparing);
        (self.cluster.is_unsettled && waits).then(|| {
            self.reason(
                "database_changed",
                Vec::new(),
                "this database is not the one that was used before (restored or replaced): nothing \
                 is frozen or committed until every known discovery process has compared its ledger"
                    .to_owned(),
                "start every discovery process that is listed (`muster-discovery process list`), \
                 `process forget` those that are gone, or have an owner run `muster-discovery db \
                 accept`, which abandons every cluster that isn't committed",
            )
        })
    }

    fn free_seats(&self) -> Option<WaitReason> {
        let size = usize::from(self.cluster.statement.size);
        let taken = self.cluster.seats().len();
        if taken == size {
            return None;
        }
        let absent: Vec<AgentKey> = self
            .cluster
            .agents
            .iter()
            .filter(|(_, agent)| agent.seating == Seating::Absent)
            .map(|(&key, _)| key)
            .collect();
        let waiting: Vec<AgentKey> = self.cluster.standbys().into_values().collect();
        let free = size - taken;
        let are = if free == 1 { "is" } else { "are" };
        let mut what = format!("{free} of {size} seats {are} free");
        if !absent.is_empty() {
            what += &format!("; not heard of any more: {}", self.names(&absent));
        }
        let (crowded, waiting): (Vec<AgentKey>, Vec<AgentKey>) =
            waiting.into_iter().partition(|&key| self.is_crowded(key));
        if !waiting.is_empty() {
            what += &format!(
                "; waiting, but with an address, name, machine or token that a seated one uses: {}",
                self.names(&waiting)
            );
        }
        if !crowded.is_empty() {
            what += &format!(
                "; waiting, but their zones have all the seats that they may have: {}",
                self.names(&crowded)
            );
        }
        if self.cluster.statement.spreads_zones {
            what += &format!("; by zone: {}", self.seats_by_zone());
        }
        Some(self.reason(
            "seats_free",
            absent,
            what,
            &self.with_advice(match self.cluster.statement.spreads_zones {
                true => {
                    "start `muster-agent run --zone ZONE` with the bundle on hosts in zones that have \
                     room, or on these again; give up with `muster-discovery cluster abandon NAME`"
                }
                false => {
                    "start `muster-agent run` with the bundle on more hosts, or on these again; give \
                     up with `muster-discovery cluster abandon NAME`"
                }
            }),
        ))
    }

    fn unapproved(&self) -> Option<WaitReason> {
        let seated = self.cluster.seats().into_values();
        let keys: Vec<AgentKey> = seated.filter(|key| !self.cluster.is_approved(*key)).collect();
        if keys.is_empty() {
            return None;
        }
        let names = self.names(&keys);
        let what = format!("an issuer has not approved these hosts yet: {names}");
        Some(self.reason(
            "approvals_missing",
            keys,
            what,
            "compare each host's key with the one that its agent logs, then run \
             `muster-discovery cluster approve NAME`; abandon the cluster if a host isn't yours",
        ))
    }

    /// Whether the zone of the waiting agent `key` has no room for another member.
    fn is_crowded(&self, key: AgentKey) -> bool {
        let cluster = self.cluster;
        let zone = |key: &AgentKey| cluster.agents[key].record.zone.as_deref();
        let seated: Vec<AgentKey> = cluster.seats().into_values().collect();
        let size = usize::from(cluster.statement.size);
        cluster.statement.spreads_zones
            && fitness::check_zone(zone(&key), seated.iter().map(zone), size).is_err()
    }

    /// Formats the number of taken seats of each zone, with the zone's maximum.
    fn seats_by_zone(&self) -> String {
        let mut counts = BTreeMap::<&str, usize>::new();
        for key in self.cluster.seats().into_values() {
            let zone = self.cluster.agents[&key].record.zone.as_deref();
            *counts.entry(zone.unwrap_or("none")).or_default() += 1;
        }
        let max = fitness::max_in_one_zone(usize::from(self.cluster.statement.size));
        let each = counts.iter().map(|(zone, count)| format!("{zone} has {count} of {max}"));
        let others = format!("any other may have {max}");
        each.chain([others]).collect::<Vec<_>>().join(", ")
    }

    fn held_back(&self) -> Option<WaitReason> {
        let held: Vec<AgentKey> = self
            .cluster
            .seats()
            .into_values()
            .filter(|key| self.cluster.agents[key].backoff_until > self.now)
            .collect();
        let until = held.iter().map(|key| self.cluster.agents[key].backoff_until).max()?;
        let mut line = self.reason(
            "held_back",
            held.clone(),
            format!("held back after a failed try: {}", self.names(&held)),
            &self.with_advice(
                "mend what the last error says, or start one more host: a standby takes the seat of \
                 whoever fails twice",
            ),
        );
        line.next_try = Some(until);
        Some(line)
    }

    fn unreached(&self, frozen: &FrozenList) -> Option<WaitReason> {
        let broken = links::find_broken_links(frozen);
        let what = links::describe_links(&broken)?;
        let mut agents: Vec<AgentKey> = broken.iter().flat_map(links::BrokenLink::ends).collect();
        agents.sort_unstable();
        agents.dedup();
        Some(self.reason("unreachable", agents, what, &links::suggest_remedy(&broken)))
    }

    fn acks_missing(
        &self,
        frozen: &FrozenList,
        settings: &FormationSettings,
    ) -> Option<WaitReason> {
        let members = frozen.proposal.records.iter().map(|record| record.key);
        let missing: Vec<AgentKey> = members.filter(|key| !frozen.acks.contains_key(key)).collect();
        let size = frozen.proposal.records.len();
        (!missing.is_empty()).then(|| {
            let mut line = self.reason(
                "acks_missing",
                missing.clone(),
                format!(
                    "epoch {}: {} of {size} have signed; missing: {}",
                    frozen.proposal.epoch,
                    frozen.acks.len(),
                    self.names(&missing)
                ),
                &self.with_advice(
                    "look at `muster-agent status` on these hosts; the list is tried again when its \
                     time is over",
                ),
            );
            line.next_try = Some(frozen.at.after(settings.ack_timeout));
            line
        })
    }

    fn reports_missing(&self) -> Option<WaitReason> {
        let frozen = self.cluster.frozen.as_ref()?;
        let members = frozen.proposal.records.iter().map(|record| record.key);
        let missing: Vec<AgentKey> =
            members.filter(|key| !self.cluster.reports.contains_key(key)).collect();
        Some(self.reason(
            "nodes_not_reported",
            missing.clone(),
            format!(
                "the list is decided; a majority has not yet reported its Raft cluster; missing: {}",
                self.names(&missing)
            ),
            "look at `muster-agent status` on these hosts and start the agents that don't run; one \
             that runs reports again within 10 minutes, also to a service that was restored, or at \
             once if it is restarted (its node goes on running); only if a majority of the hosts is \
             lost for good, have an owner run `muster-discovery cluster retire NAME` and create a \
             new cluster",
        ))
    }

    fn ended(&self) -> WaitReason {
        let ended = self.cluster.ended.as_ref();
        let by = ended.map(|ended| ended.by.clone()).unwrap_or_default();
        let way_out = match ended.map(|ended| ended.cause) {
            Some(EndCause::DatabaseAccepted) => {
                "if a host holds this one's document, its agent brings the cluster back: one that \
                 runs does so within 10 minutes or when it is restarted (its node goes on running), \
                 another when it is started; create a new cluster only if no host does"
            }
            Some(EndCause::Deadline) if self.undo_until.is_some() => {
                "if it should still form, have an owner run `muster-discovery cluster reopen NAME` \
                 before the time that is named here, and start the agents again; their bundles stay \
                 good while their tokens do"
            }
            Some(EndCause::Retire) if self.undo_until.is_some() => {
                "if it should go on, have an owner run `muster-discovery cluster unretire NAME` \
                 before the time that is named here; members that run are not touched either way"
            }
            _ => "create a new cluster with `muster-discovery cluster create NAME`",
        };
        let what = format!("the cluster is {}: {by}", self.cluster.phase.as_str());
        let mut line = self.reason(self.cluster.phase.as_str(), Vec::new(), what, way_out);
        line.next_try = line.next_try.or(self.undo_until);
        line
    }
}
