//! Looks after the cluster that this host's node is a voter of, as far as people have signed what is
//! to be done: carries out intents, and keeps the statement chain in the cluster's own store.
//!
//! Only the agent beside the leader acts, on its own node, by the Cluster API, one change at a time;
//! what became of a newcomer that leads itself is told by the others.
//! Discovery hands out what is to be done; whether it may be done follows from signatures alone, and
//! whether it was done is asked of the cluster before each step. Nothing here begins without a signed
//! intent, and a node serves whether or not this works.

mod chain;
mod decide;
mod progress;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use discovery_types::api::{IntentState, IntentView, Outcome, OutcomeRequest, WaitRequest};
use discovery_types::client::{Client, ClientError};
use discovery_types::digest::{self, OperationId};
use discovery_types::intent::{Errand, Step, VerifiedIntent};
use tokio::sync::Notify;
use tokio::time::sleep;
use uuid::Uuid;

pub(crate) use self::chain::{RECOVERIES, Statements};
use self::decide::{Act, Sight, is_unhealthy, may_pass, refused};
use self::progress::Progress;
use crate::bootstrap::cut;
use crate::cluster::{Carrying, Change, Cluster, ClusterError, MemberId, Members, NodeStatus};
use crate::crash;
use crate::exit::chain as causes;
use crate::retry::Retry;

/// How often intents are looked at while there are some.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// The shortest time between two reasons to wait that discovery is told of one intent.
const TELL_EVERY: Duration = Duration::from_secs(5);
/// How often a node that is down is asked whether it leads.
const ASK_NODE_EVERY: Duration = Duration::from_secs(1);

/// What it works with.
pub(crate) struct Steward {
    /// The service.
    pub client: Arc<Client>,
    /// The cluster, in discovery's words.
    pub cluster: Uuid,
    /// This host's own node.
    pub node: Cluster,
    /// Who may sign what.
    pub statements: Statements,
    /// Told when the members are probably others than before.
    pub hint: Arc<Notify>,
    /// The intents that were handed out last: one that came further, or is gone, has changed members.
    standing: BTreeMap<OperationId, IntentState>,
    /// What was seen of intents that are under way.
    seen: BTreeMap<OperationId, Seen>,
    retry: Retry,
    said: String,
}

/// What this agent has seen of one intent: nothing that the next one couldn't do without.
#[derive(Default)]
struct Seen {
    progress: Progress,
    added_before: bool,
    old_is_down: bool,
    said: String,
    /// The reason to wait that discovery heard last, and when.
    told: String,
    told_at: Option<Instant>,
}

impl Steward {
    /// Over a node that runs.
    pub(crate) fn new(
        client: Arc<Client>,
        cluster: Uuid,
        node: Cluster,
        statements: Statements,
        hint: Arc<Notify>,
    ) -> Self {
        Self {
            client,
            cluster,
            node,
            statements,
            hint,
            standing: BTreeMap::new(),
            seen: BTreeMap::new(),
            retry: Retry::default(),
            said: String::new(),
        }
    }

    /// Does it for as long as the node runs.
    pub(crate) async fn run(mut self) -> Infallible {
        let mut known = None;
        loop {
            let status = match self.node.status().await {
                Ok(status) => status,
                Err(error) => {
                    tracing::debug!(error = causes(&error), "the node can't be asked");
                    sleep(ASK_NODE_EVERY).await;
                    continue;
                }
            };
            let leads = status.leader == Some(status.member_id);
            if leads && let Err(error) = self.statements.keep(&self.node).await {
                self.complain(&format!(
                    "the statement chain can't be kept in the cluster: {error}"
                ));
            }
            let list = match self.client.intents(self.cluster, known, false).await {
                Ok(list) => list,
                Err(error) => {
                    self.unanswered(&error).await;
                    continue;
                }
            };
            self.retry.succeeded();
            let each = list.intents.iter().map(|view| (view.intent.operation, view.state));
            let before = std::mem::replace(&mut self.standing, each.collect());
            if before != self.standing {
                self.hint.notify_one();
            }
            // An owner may have taken somebody's word away: every agent learns that at once, and whoever
            // leads puts it into the cluster.
            let learnt = self.statements.learn(&self.client, self.cluster, &list.statement).await;
            if let Err(error) = &learnt {
                self.complain(&format!("the newest statement can't be taken: {error}"));
            }
            // While there is something to do, and for whoever may come to lead, look again soon.
            known = list.intents.is_empty().then_some(list.rev);
            self.seen.retain(|id, _| self.standing.contains_key(id));
            if list.intents.is_empty() {
                continue;
            }
            if learnt.is_ok()
                && let Some(leader) = status.leader
                && let Err(error) = self.carry_out(&list.intents, &status, leader).await
            {
                self.complain(&format!("intents can't be carried out now: {error}"));
            }
            sleep(LOOK_EVERY).await;
        }
    }

    async fn unanswered(&mut self, error: &ClientError) {
        tracing::debug!(error = causes(error), "discovery doesn't hand out intents now");
        sleep(self.retry.next_pause()).await;
    }

    /// Says it once.
    fn complain(&mut self, what: &str) {
        if self.said != what {
            tracing::warn!("{what}");
            what.clone_into(&mut self.said);
        }
    }

    async fn carry_out(
        &mut self,
        intents: &[IntentView],
        status: &NodeStatus,
        leader: MemberId,
    ) -> Result<(), String> {
        let concern = |view: &&IntentView| {
            leader == status.member_id || newcomer(view).is_some_and(|id| id.get() == leader.0)
        };
        let intents: Vec<&IntentView> = intents.iter().filter(concern).collect();
        if intents.is_empty() {
            return Ok(());
        }
        // What the cluster itself knows counts for more than what discovery shows.
        self.statements.keep(&self.node).await?;
        for view in intents {
            match VerifiedIntent::verify(&view.intent, self.statements.chain()) {
                Ok(intent) => {
                    let members = self.node.list().await.map_err(|error| causes(&error))?;
                    self.step(&intent, view, &members, status, leader).await;
                }
                Err(error) => {
                    let why = causes(&error);
                    self.complain(&format!(
                        "discovery hands out a change ({}) that is refused: {why}",
                        view.intent.operation
                    ));
                    if leader == status.member_id && view.state == IntentState::Open {
                        self.refuse(view, &why, status).await;
                    }
                }
            }
        }
        Ok(())
    }

    /// Ends an intent whose signatures this cluster doesn't take, such as one by an operator who was
    /// removed since: nobody will carry it out.
    async fn refuse(&self, view: &IntentView, why: &str, status: &NodeStatus) {
        let reason = cut(format!(
            "{why}. Whoever signed it may not order this by the cluster's newest statement: order \
             it again"
        ));
        let request = OutcomeRequest {
            outcome: Outcome::Refused { reason },
            raft_term: status.raft_term,
            raft_index: status.raft_index,
        };
        let operation = view.intent.operation;
        if let Err(error) = self.client.report_outcome(self.cluster, operation, &request).await {
            tracing::debug!(error = causes(&error), "discovery doesn't hear of a refusal");
        }
    }

    /// One look at one intent, and what follows from it.
    async fn step(
        &mut self,
        intent: &VerifiedIntent,
        view: &IntentView,
        members: &Members,
        status: &NodeStatus,
        leader: MemberId,
    ) {
        let clock = |seconds: i64| u64::try_from(seconds).unwrap_or(0);
        let service = clock(self.client.service_now_ms().div_euclid(1000));
        let own = clock(jiff::Timestamp::now().as_second());
        let seen = self.seen.entry(intent.operation).or_default();
        if let Errand::Add { record, .. } = intent.errand() {
            seen.progress.look(&self.node, record, members, status).await;
        }
        let sight = Sight {
            intent,
            state: view.state,
            told: newcomer(view),
            members,
            own: status.member_id,
            leader,
            untimely: intent.untimely(service, own),
            stalled: seen.progress.is_stalled(),
            added_before: seen.added_before,
            old_is_down: seen.old_is_down,
        };
        match sight.decide() {
            Act::Wait(why) if leader == status.member_id => self.wait(intent, &why).await,
            Act::Wait(why) => self.log_wait(intent, &why),
            Act::HandOver => self.hand_over(intent, members, status).await,
            Act::Tell(outcome) => self.tell(intent, outcome).await,
            Act::Change(change, step) => self.change(intent, &change, step, members).await,
        }
    }

    /// Logs why an intent waits, and tells discovery, for the operator who looks there.
    async fn wait(&mut self, intent: &VerifiedIntent, why: &str) {
        self.log_wait(intent, why);
        let seen = self.seen.entry(intent.operation).or_default();
        let is_early = seen.told_at.is_some_and(|at| at.elapsed() < TELL_EVERY);
        if is_early || seen.told == why {
            return;
        }
        why.clone_into(&mut seen.told);
        seen.told_at = Some(Instant::now());
        let wait = WaitRequest { reason: cut(why.to_owned()) };
        if let Err(error) = self.client.report_wait(self.cluster, intent.operation, &wait).await {
            tracing::debug!(error = causes(&error), "discovery doesn't hear why an intent waits");
        }
    }

    fn log_wait(&mut self, intent: &VerifiedIntent, why: &str) {
        let seen = self.seen.entry(intent.operation).or_default();
        if seen.said != why {
            tracing::info!(operation = %intent.operation, "{} waits: {why}", intent.verb);
            why.clone_into(&mut seen.said);
        }
    }

    async fn change(
        &mut self,
        intent: &VerifiedIntent,
        change: &Change,
        step: Step,
        members: &Members,
    ) {
        let carrying = Carrying {
            operation: *intent.step(step).as_bytes(),
            planned_at: members.configuration,
        };
        match self.node.carry_out(change, &carrying).await {
            Ok(_) => {
                crash::at(crash::Step::Changed);
                tracing::info!(operation = %intent.operation, "{} is carried out", change.what());
                self.changed(intent, change, step).await;
            }
            Err(ClusterError::CarriedOut { text, .. }) => {
                let seen = self.seen.entry(intent.operation).or_default();
                if step == Step::Add {
                    seen.added_before = true;
                } else {
                    self.wait(intent, &text).await;
                }
            }
            Err(ClusterError::Refused { text, .. }) if may_pass(&text) => {
                let old = intent.leaves().and_then(|id| members.of_id(MemberId(id.get())));
                let old_is_down = match old.filter(|_| step == Step::Add && is_unhealthy(&text)) {
                    Some(old) => self.node.status_of(old).await.is_err(),
                    None => false,
                };
                let seen = self.seen.entry(intent.operation).or_default();
                seen.old_is_down = old_is_down;
                seen.progress.refused(&text);
                self.wait(intent, &text).await;
            }
            // A learner is promoted once it is ready: nothing that the cluster says of it is final.
            Err(ClusterError::Refused { text, .. }) if step != Step::Promote => {
                let Act::Tell(outcome) = refused(text) else { return };
                self.tell(intent, outcome).await;
            }
            // Looked at again, with the list as it is then.
            Err(error) => self.wait(intent, &causes(&error)).await,
        }
    }

    /// A change was made: the next look sees it, but for what a list doesn't show.
    async fn changed(&mut self, intent: &VerifiedIntent, change: &Change, step: Step) {
        let seen = self.seen.entry(intent.operation).or_default();
        seen.added_before |= step == Step::Add;
        if let (Step::TakeOut, Change::Remove(id)) = (step, change) {
            let reason = cut(seen.progress.why_stalled());
            let outcome = Outcome::Stalled { member: digest::MemberId::new(id.0), reason };
            self.tell(intent, outcome).await;
        }
    }

    /// Tells discovery; if it doesn't hear it, the next look comes to the same.
    async fn tell(&mut self, intent: &VerifiedIntent, outcome: Outcome) {
        let Ok(status) = self.node.status().await else { return };
        let state = outcome.state();
        let request =
            OutcomeRequest { outcome, raft_term: status.raft_term, raft_index: status.raft_index };
        match self.client.report_outcome(self.cluster, intent.operation, &request).await {
            Ok(_) => tracing::info!(operation = %intent.operation, "{} is {state}", intent.verb),
            Err(error) => {
                self.log_wait(intent, &format!("discovery doesn't hear of it: {}", causes(&error)))
            }
        }
    }

    async fn hand_over(&mut self, intent: &VerifiedIntent, members: &Members, status: &NodeStatus) {
        let Some(own) = members.of_id(status.member_id) else { return };
        for heir in members.list.iter().filter(|heir| !heir.is_learner && heir.id != own.id) {
            if self.node.status_of(heir).await.is_ok() {
                match self.node.move_leader(own, heir.id).await {
                    Ok(()) => return self.log_wait(intent, &format!("{} leads now", heir.id)),
                    Err(error) => self.wait(intent, &causes(&error)).await,
                }
            }
        }
    }
}

/// Which member discovery says that a newcomer is.
fn newcomer(view: &IntentView) -> Option<digest::MemberId> {
    view.outcome.as_ref().and_then(Outcome::member)
}
