//! Readmits members that joined after the backup from which the database was restored.
//!
//! The restored database has neither their tickets nor their agents' keys. Discovery believes a
//! member's own proofs ([`discovery_types::readmission`]) only while the list of members that a
//! quorum of the cluster confirmed contains that member. So a member that was removed after the
//! backup doesn't come back, although the database has lost its removal, too.

use std::net::IpAddr;

use discovery_types::api::{InitialMember, IntentView, ListedMember, Outcome};
use discovery_types::digest::MemberId;
use discovery_types::grant::TokenKind;
use discovery_types::intent::{Intent, operation_of, verb_of};
use discovery_types::key::PublicKey;
use discovery_types::problem::Code;
use discovery_types::readmission::{ReadmitRequest, VerifiedReadmission};
use uuid::Uuid;

use super::admin_name;
use crate::app::App;
use crate::error::ApiError;
use crate::gate::with_timeout;
use crate::members::roster::Roster;
use crate::store::UnixMicros;
use crate::store::changes::{MembershipChanges, StoredIntent};
use crate::store::cluster::ClusterTransaction;
use crate::store::grants;
use crate::store::intents::{self, IntentNewcomer, IntentResult, NewIntent};

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
        let listed = listed_member(&changes, shown.member).ok_or_else(unlisted_error)?;
        if roster.by_id(shown.member).is_some() || roster.is_removed(shown.member) {
            let detail = format!("Member {} is or was another one.", shown.member);
            return Err(ApiError::new(Code::Conflict, detail, "Read the cluster's own list."));
        }
        let stored = store(&mut transaction, &shown, request, address, &roster, listed).await?;
        tracing::warn!(cluster.id = %cluster, member.id = %shown.member, name = stored.subject,
            "a member that this database didn't know has proved how it joined");
        self.end_change(transaction, &changes, &stored).await
    }
}

fn listed_member(changes: &MembershipChanges, id: MemberId) -> Option<&ListedMember> {
    let confirmed = changes.confirmed.as_ref()?;
    confirmed.membership.members.iter().find(|member| member.id == id)
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
    listed: &ListedMember,
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
    let outcome = match listed.is_learner {
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
