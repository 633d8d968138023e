//! Follows a recovery: an operator has made a new Raft cluster from the data of one member of a
//! lost cluster, the survivor.
//!
//! The agent on the survivor's host sends the signed recovery statements. From then on the list of
//! members, the certificates and the intents are those of the recovered cluster. The lost cluster's
//! members are refused, and its unfinished intents are ended. Sending the statements again changes
//! nothing. A chain of recoveries that competes with the followed one raises an alarm.

use discovery_formation::service::Cluster;
use discovery_types::api::{IntentState, Outcome, RecoveriesResponse};
use discovery_types::digest::MemberId;
use discovery_types::intent::Verb;
use discovery_types::jws::{Jws, JwsType};
use discovery_types::key::PublicKey;
use discovery_types::problem::Code;
use discovery_types::recovery::Recovery;
use discovery_types::statement::StatementChain;
use uuid::Uuid;

use super::admin_name;
use crate::app::App;
use crate::error::ApiError;
use crate::gate::with_timeout;
use crate::members::lineage::{Lineage, LineageRelation};
use crate::members::roster::Roster;
use crate::store::UnixMicros;
use crate::store::changes::{MembershipChanges, StoredIntent};
use crate::store::cluster::ClusterTransaction;
use crate::store::intents::{self, IntentResult, NewRecovery};

impl App {
    /// Follows the recovery statements that the survivor's agent has sent. Raises an alarm if they
    /// compete with the followed ones.
    pub(crate) async fn follow_recoveries(
        &self,
        cluster: Uuid,
        key: &PublicKey,
        shown: &[Jws],
    ) -> Result<RecoveriesResponse, ApiError> {
        with_timeout(async {
            let (mut transaction, changes) = self.begin_change(cluster, Some(key), None).await?;
            let chain = transaction.chain.clone();
            let roster = Roster::of(&transaction.cluster, &chain, &changes)?;
            match roster.lineage.compare(shown, &chain)? {
                LineageRelation::Known => Ok(answer(&roster.lineage)),
                LineageRelation::Competing { number, jws } => {
                    Err(self.report_contest(transaction, &roster, number, &jws).await?)
                }
                LineageRelation::Longer(lineage) => {
                    check_named_agent(&lineage, key, &roster, &changes)?;
                    self.follow(&mut transaction, &changes, &roster, &lineage).await?;
                    transaction.commit().await?;
                    self.notifier.wake(cluster);
                    Ok(answer(&lineage))
                }
            }
        })
        .await
    }

    /// Stores the new statements, and ends the lost cluster's unfinished intents.
    pub(super) async fn follow(
        &self,
        transaction: &mut ClusterTransaction,
        changes: &MembershipChanges,
        roster: &Roster,
        lineage: &Lineage,
    ) -> Result<(), ApiError> {
        let (cluster, now) = (transaction.id(), transaction.now);
        let known = roster.lineage.count();
        let Some((last, made)) = lineage.since(known).last() else { return Ok(()) };
        let by = admin_name(transaction, last);
        for intent in &changes.intents {
            let Some(outcome) = end_of(intent, now.0 as UnixMicros, made) else {
                continue;
            };
            let became = IntentResult {
                state: outcome.state(),
                outcome: Some(&outcome),
                by: &by,
                position: None,
                recovery: known,
            };
            intents::store_result(transaction.connection(), now, intent, &became).await?;
        }
        for (number, (jws, recovery)) in (known + 1..).zip(lineage.since(known)) {
            let by = admin_name(transaction, jws);
            let raft_cluster = &recovery.is.cluster_id;
            let new = NewRecovery { number, jws, raft_cluster, by: &by };
            intents::store_followed_recovery(transaction.connection(), cluster, now, &new).await?;
            tracing::warn!(cluster.id = %cluster, raft_cluster_id = raft_cluster, by,
                member.id = recovery.is.member_id, "the cluster was lost, and goes on as another one");
        }
        Ok(())
    }

    /// Raises an alarm: operators have recovered one cluster twice.
    pub(super) async fn report_contest(
        &self,
        mut transaction: ClusterTransaction,
        roster: &Roster,
        number: usize,
        jws: &Jws,
    ) -> Result<ApiError, ApiError> {
        let (cluster, now) = (transaction.id(), transaction.now);
        let text = describe_contest(&roster.lineage, number, &other_raft_cluster(jws));
        let connection = transaction.connection();
        let first =
            intents::store_competing_recovery(connection, cluster, now, number, jws).await?;
        if first {
            transaction.commit().await?;
            self.notifier.wake(cluster);
        }
        self.metrics.count_alarm("recovery_contested");
        tracing::error!(cluster.id = %cluster, statement = %jws.hash(), "{text}");
        Ok(ApiError::new(Code::RecoveryContested, text, CONTEST_NEXT))
    }
}

/// Advice for a person whose cluster has two competing recoveries.
const CONTEST_NEXT: &str = "Keep one of the two. To keep the followed one, stop the other one's \
    nodes, run `muster-agent reset --yes` on their hosts, and let these join by tickets. To keep the \
    other one, keep clients away from the followed one, and make certificates with \
    `muster-discovery ca issue`: discovery doesn't change over.";

/// Describes two competing recoveries.
fn describe_contest(lineage: &Lineage, number: usize, other: &str) -> String {
    let followed = lineage.recovery(number).map(|(_, recovery)| recovery.is.cluster_id.as_str());
    format!(
        "Operators have signed two recoveries of one cluster: discovery follows Raft cluster {}, \
         of which it heard first, and not {other}.",
        followed.unwrap_or("-")
    )
}

/// Returns the id of the Raft cluster of the recovery that a verified statement reports, or "-" if
/// the statement can't be read.
fn other_raft_cluster(jws: &Jws) -> String {
    let claims: Result<Recovery, _> = jws.claims_unverified(JwsType::Recovery);
    claims.map_or_else(|_| "-".to_owned(), |recovery| recovery.is.cluster_id)
}

/// A cluster's recoveries, as admins see them.
#[derive(Debug, Default)]
pub(crate) struct RecoveryView {
    /// Id of the Raft cluster that the last recovery made, in hexadecimal. `None` without a
    /// recovery.
    pub raft_cluster: Option<String>,
    /// One text for each competing recovery, with advice.
    pub alarms: Vec<String>,
}

impl App {
    /// Returns the recoveries of `cluster`, as admins see them.
    pub(crate) async fn recovery_view(
        &self,
        cluster: &Cluster,
        chain: &StatementChain,
    ) -> Result<RecoveryView, ApiError> {
        let changes = self.store.membership_changes(chain.newest().cluster).await?;
        if changes.recoveries.is_empty() {
            return Ok(RecoveryView::default());
        }
        let lineage = Roster::of(cluster, chain, &changes)?.lineage;
        let competing = changes.recoveries.iter().filter(|recovery| !recovery.followed);
        let alarm = competing.map(|recovery| {
            let text =
                describe_contest(&lineage, recovery.number, &other_raft_cluster(&recovery.jws));
            format!("{text} {CONTEST_NEXT}")
        });
        let alarms = alarm.collect();
        Ok(RecoveryView { raft_cluster: Some(format!("{:016x}", lineage.raft_cluster())), alarms })
    }
}

/// Returns an error unless the caller is the agent that the newest recovery statement names, and
/// discovery has that agent's record. Certificates are made from the record.
fn check_named_agent(
    lineage: &Lineage,
    key: &PublicKey,
    roster: &Roster,
    changes: &MembershipChanges,
) -> Result<(), ApiError> {
    let recovery = lineage.newest().filter(|recovery| recovery.agent == *key);
    let Some(recovery) = recovery else {
        let detail = "The newest recovery statement names another host's agent.";
        let next = "The agent of the host that the new cluster was made on shows it.";
        return Err(ApiError::new(Code::Forbidden, detail, next));
    };
    if roster.founder_made_by(recovery, changes).is_some() {
        return Ok(());
    }
    let detail = "The recovery statement names an agent that is not known as a member's here, or an \
                  id that can't be read.";
    let next = "Let another survivor's host make the new cluster: `muster-agent recover make`.";
    Err(ApiError::new(Code::RecoveryRefused, detail, next))
}

fn answer(lineage: &Lineage) -> RecoveriesResponse {
    RecoveriesResponse {
        followed: lineage.count() as u32,
        raft_cluster_id: format!("{:016x}", lineage.raft_cluster()),
    }
}

/// Returns the outcome of an intent whose cluster was lost and recovered as `made`. Returns `None`
/// if the recovery doesn't end the intent. An unused ticket stays valid: the recovered cluster
/// accepts the newcomer.
fn end_of(intent: &StoredIntent, now: UnixMicros, made: &Recovery) -> Option<Outcome> {
    let lost = format!("the cluster was lost, and goes on as {}", made.is.cluster_id);
    let verb = intent.intent.verb;
    let state = intent.state_at(now);
    if state.is_live() && intent.agent == Some(made.agent) {
        // The intent is the survivor's own ticket. The survivor was a member of the lost cluster
        // and is the new cluster's only voter. So the ticket has been carried out.
        let was = u64::from_str_radix(&made.was.member_id, 16).ok().map(MemberId::new);
        return intent.member.or(was).map(|member| Outcome::Promoted { member });
    }
    match (state, verb, intent.member) {
        (IntentState::Added, _, Some(member)) => {
            let reason = format!("{lost}: join that one with another ticket");
            Some(Outcome::Stalled { member, reason })
        }
        (IntentState::Open, Verb::Replace, _) => {
            let reason = format!(
                "{lost}, without the member that this ticket replaces: ask for one without --replace"
            );
            Some(Outcome::Refused { reason })
        }
        (IntentState::Open, Verb::Remove | Verb::Update, _) => {
            let reason = format!("{lost}, where members have other ids: look, and order again");
            Some(Outcome::Refused { reason })
        }
        _ => None,
    }
}
