//! Readmits members that joined after the backup from which the database was restored.
//!
//! The restored database has neither their tickets nor their agents' keys. Discovery believes a
//! member's own proofs ([`discovery_types::readmission`]) only while the list of members that a
//! quorum of the cluster confirmed contains that member. So a member that was removed after the
//! backup doesn't come back, although the database has lost its removal, too.
//!
//! An operator's signature replaces that quorum if the cluster was lost: a recovery statement names
//! the member of whose data the operator has made a new cluster. Then discovery follows the
//! recovery, too.

use std::net::IpAddr;

use discovery_types::api::{InitialMember, IntentView, ListedMember, Outcome};
use discovery_types::digest::MemberId;
use discovery_types::grant::TokenKind;
use discovery_types::intent::{Intent, operation_of, verb_of};
use discovery_types::key::PublicKey;
use discovery_types::problem::Code;
use discovery_types::readmission::{ReadmitRequest, VerifiedReadmission};
use discovery_types::recovery::Recovery;
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
use crate::store::grants;
use crate::store::intents::{self, IntentNewcomer, IntentResult, NewIntent};
use crate::store::unknown_members::forget_unknown_member;

impl App {
    /// Stores that the agent with this key joined by its ticket, as if the ticket had been redeemed
    /// and carried out here. Repeating the request changes nothing.
    pub(crate) async fn readmit(
        &self,
        cluster: Uuid,
        key: &PublicKey,
        address: IpAddr,
        request: &ReadmitRequest,
    ) -> Result<IntentView, ApiError> {
        with_timeout(self.readmit_untimed(cluster, key, address, request)).await
    }

    async fn readmit_untimed(
        &self,
        cluster: Uuid,
        key: &PublicKey,
        address: IpAddr,
        request: &ReadmitRequest,
    ) -> Result<IntentView, ApiError> {
        let (mut transaction, changes) = self.begin_change(cluster, Some(key), None).await?;
        let shown = request.verify(key, &transaction.chain)?;
        let operation = operation_of(&shown.ticket, &shown.record.hash());
        let taken = |known: &&StoredIntent| known.intent.operation == operation;
        if let Some(known) = changes.intents.iter().find(taken) {
            if known.agent == Some(*key) {
                return self.end_change(transaction, &changes, known).await;
            }
            return Err(ApiError::new(
                Code::TicketTaken,
                "The ticket was redeemed by another key: it is for one host.",
                "Look which of the two hosts the cluster lists, and who copied the ticket.",
            ));
        }
        let roster = Roster::of(&transaction.cluster, &transaction.chain, &changes)?;
        roster.check_unused_keys(&shown.record)?;
        let listed = listed_member(&changes, shown.member).map(|listed| listed.is_learner);
        let (is_learner, recovered) = match (listed, request.recoveries.is_empty()) {
            (Some(is_learner), _) => (is_learner, None),
            (None, true) => {
                drop(transaction);
                return Err(self.note_unlisted(cluster, &shown).await?);
            }
            (None, false) => {
                let chain = transaction.chain.clone();
                match roster.lineage.compare(&request.recoveries, &chain)? {
                    LineageRelation::Longer(lineage) => {
                        check_survivor(&lineage, roster.lineage.count(), &shown)?;
                        (false, Some(lineage))
                    }
                    LineageRelation::Known => return Err(unlisted_error()),
                    LineageRelation::Competing { number, jws } => {
                        return Err(self
                            .report_contest(transaction, &roster, number, &jws)
                            .await?);
                    }
                }
            }
        };
        if roster.by_id(shown.member).is_some() || roster.is_removed(shown.member) {
            let detail = format!("Member {} is or was another one.", shown.member);
            return Err(ApiError::new(Code::Conflict, detail, "Read the cluster's own list."));
        }
        let stored = store(&mut transaction, &shown, request, address, &roster, is_learner).await?;
        if let Some(lineage) = recovered {
            self.follow(&mut transaction, &changes, &roster, &lineage).await?;
        }
        tracing::warn!(cluster.id = %cluster, member.id = %shown.member, name = stored.subject,
            "a member that this database didn't know has proved how it joined");
        self.end_change(transaction, &changes, &stored).await
    }

    /// Stores that a member which isn't in the confirmed list has proved how it joined, so that
    /// people see that the database is older than the cluster. Returns the refusal.
    async fn note_unlisted(
        &self,
        cluster: Uuid,
        shown: &VerifiedReadmission,
    ) -> Result<ApiError, ApiError> {
        let (member, name) = (shown.member, shown.record.name.as_str());
        if self.store.note_unknown_member(cluster, member, name).await? {
            tracing::warn!(cluster.id = %cluster, member.id = %member, name,
                "a member that this database doesn't know has proved how it joined: the database is \
                 older than the cluster, or the member was removed since");
        }
        Ok(unlisted_error())
    }
}

fn listed_member(changes: &MembershipChanges, id: MemberId) -> Option<&ListedMember> {
    let confirmed = changes.confirmed.as_ref()?;
    confirmed.membership.members.iter().find(|member| member.id == id)
}

/// Checks that the newest recovery names the agent, and that one of the recoveries after the first
/// `known` ones was made of the data of the member that the agent has proved to be.
fn check_survivor(
    lineage: &Lineage,
    known: usize,
    shown: &VerifiedReadmission,
) -> Result<(), ApiError> {
    let is_own = |recovery: &Recovery| recovery.agent == shown.record.agent_key;
    let was = |recovery: &Recovery| u64::from_str_radix(&recovery.was.member_id, 16).ok();
    let mut steps = lineage.since(known).iter().map(|(_, recovery)| recovery);
    let is_named =
        steps.any(|step| is_own(step) && was(step).map(MemberId::new) == Some(shown.member));
    if is_named && lineage.newest().is_some_and(is_own) {
        return Ok(());
    }
    let detail = format!(
        "The recovery statements don't say that the cluster was made of the data of member {}.",
        shown.member
    );
    let next = "The agent of the host that the new cluster was made on shows them.";
    Err(ApiError::new(Code::RecoveryRefused, detail, next))
}

/// Error for a member that isn't in the confirmed list. It may be missing only for now, because the
/// other members may not have reported since the service came back.
fn unlisted_error() -> ApiError {
    let detail = "A quorum of the members that this service knows hasn't confirmed this member.";
    let next = "Wait until their agents reach the service. If most of them joined after the backup, \
                too, restore a newer one.";
    ApiError::new(Code::WrongState, detail, next).mark_retryable()
}

/// Stores the ticket's grant, and the intent with its outcome.
async fn store(
    transaction: &mut ClusterTransaction,
    shown: &VerifiedReadmission,
    request: &ReadmitRequest,
    address: IpAddr,
    roster: &Roster,
    is_learner: bool,
) -> Result<StoredIntent, ApiError> {
    let (ticket, record, now) = (&shown.ticket, &shown.record, transaction.now);
    let by = admin_name(transaction, ticket.jws());
    grants::insert(transaction.connection(), ticket, &by, now).await?;
    let verb = verb_of(ticket);
    let intent = Intent {
        cluster: ticket.cluster,
        verb,
        operation: operation_of(ticket, &record.hash()),
        authority: ticket.jws().clone(),
        redeem: Some(request.redeem.clone()),
        planned_at: None,
        expires_at: now.0 / 1_000_000,
    };
    let newcomer = IntentNewcomer {
        grant: ticket.id.to_string(),
        agent: record.agent_key,
        address: address.to_string(),
        instance: None,
        zone: record.zone.as_ref().map(ToString::to_string),
    };
    let new = NewIntent {
        intent,
        newcomer: Some(newcomer),
        subject: record.name.to_string(),
        made_by: by.clone(),
        seen_us: (ticket.kind == TokenKind::Heal).then_some(now.0 as UnixMicros),
    };
    let stored = intents::insert(transaction.connection(), now, new).await?;
    let member = shown.member;
    forget_unknown_member(transaction.connection(), ticket.cluster, member).await?;
    let outcome = match is_learner {
        true => {
            Outcome::Added { member, initial_cluster: Vec::<InitialMember>::new(), replaces: None }
        }
        false => Outcome::Promoted { member },
    };
    let became = IntentResult {
        state: outcome.state(),
        outcome: Some(&outcome),
        by: record.name.as_str(),
        position: None,
        recovery: roster.lineage.count(),
    };
    Ok(intents::store_result(transaction.connection(), now, &stored, &became).await?)
}
