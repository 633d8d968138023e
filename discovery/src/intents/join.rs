//! Redeems a newcomer's join ticket.

use std::net::IpAddr;

use discovery_types::api::{IntentView, NodeProgram};
use discovery_types::digest::{MemberId, OperationId};
use discovery_types::grant::{ISSUER_SKEW_SECONDS, VerifiedGrant};
use discovery_types::intent::{
    Intent, MAX_INTENT_SECONDS, verb_of, verify_newcomer, verify_ticket,
};
use discovery_types::jws::Jws;
use discovery_types::problem::Code;
use discovery_types::record::{Record, VerifiedRecord};
use discovery_types::redeem::Redeem;

use super::roster::Roster;
use super::{admin_name, check_intent_limit};
use crate::app::App;
use crate::error::ApiError;
use crate::forming::{is_void, with_timeout};
use crate::store::UnixMicros;
use crate::store::cluster::{ClusterTransaction, RequestedGrant};
use crate::store::intents::{self, MembershipChanges, NewIntent, StoredIntent};

/// A newcomer's request. The handler has opened its envelope; the rest is verified here.
pub(crate) struct JoinRequest {
    /// The signed envelope, as received.
    pub envelope: Jws,
    /// Content of the envelope.
    pub redeem: Redeem,
    /// The newcomer's record, not verified yet.
    pub claimed: Record,
    /// Source address of the request.
    pub address: IpAddr,
    /// The node program on the newcomer's host. `None` from an older agent.
    pub program: Option<NodeProgram>,
}

fn unknown_token() -> ApiError {
    let next = "Check that the bundle is for this service and cluster, or ask for another.";
    ApiError::new(Code::GrantUnknown, "The token is not known here.", next)
}

impl App {
    /// Redeems a join ticket. The first key that redeems it owns it, and gets the same answer to
    /// every retry.
    pub(crate) async fn join(&self, joining: &JoinRequest) -> Result<IntentView, ApiError> {
        with_timeout(self.join_untimed(joining)).await
    }

    async fn join_untimed(&self, joining: &JoinRequest) -> Result<IntentView, ApiError> {
        let grant = joining.claimed.grant.to_string();
        let begun = self.begin_change(joining.redeem.cluster, Some(&grant)).await;
        let (mut transaction, changes) = begun.map_err(|error| match error.problem().code {
            Code::NotFound => unknown_token(),
            _ => error,
        })?;
        let chain = transaction.chain.clone();
        if chain.position(&joining.redeem.statement).is_none() {
            let next = "Copy the bundle again, whole and unchanged, or ask for another one.";
            let detail = "The join bundle pins a statement that this cluster doesn't have.";
            return Err(ApiError::new(Code::StatementRefused, detail, next));
        }
        let row = transaction.asked().cloned().ok_or_else(unknown_token)?;
        let jws: Jws = row.jws.parse().map_err(|_| unknown_token())?;
        let ticket = verify_ticket(&jws, &chain)?;
        if ticket.key.as_bytes()[..] != row.token_key {
            return Err(unknown_token());
        }
        let record = verify_newcomer(&joining.envelope, &ticket, &chain)?;
        let verb = verb_of(&ticket);
        let operation = OperationId::of(&jws, verb);
        let taken = |known: &&StoredIntent| known.intent.operation == operation;
        if let Some(known) = changes.intents.iter().find(taken) {
            return self.answer_used_ticket(transaction, known, &record, joining).await;
        }
        admit(&transaction, &ticket, &row, joining.address)?;
        let roster = Roster::of(&transaction.cluster, &chain, &changes)?;
        roster.check_unused_keys(&record)?;
        if let Some(member) = roster.member_with_name(&record, ticket.replaces) {
            return Err(name_taken_error(&record, member));
        }
        if let Some(program) = joining.program {
            check_same_program(program, &changes)?;
        }
        check_intent_limit(&changes, transaction.now.0 as UnixMicros)?;
        check_replaced_member(&ticket, &roster)?;
        let confirmed = changes.confirmed.as_ref();
        let intent = Intent {
            cluster: ticket.cluster,
            verb,
            operation,
            authority: jws.clone(),
            redeem: Some(joining.envelope.clone()),
            planned_at: confirmed.and_then(|said| said.membership.configuration),
            expires_at: transaction.now.0 / 1_000_000 + MAX_INTENT_SECONDS,
        };
        let (address, name) = (joining.address.to_string(), record.name.to_string());
        let new = NewIntent {
            intent: &intent,
            newcomer: Some((ticket.id.to_string(), record.agent_key, address)),
            subject: name,
            made_by: admin_name(&transaction, &jws),
        };
        let now = transaction.now;
        intents::insert(transaction.connection(), now, &new).await?;
        tracing::info!(cluster.id = %ticket.cluster, %operation, %verb, name = new.subject,
            "a ticket was redeemed");
        self.end_change(transaction, operation).await
    }

    /// Answers a redeem of a used ticket: by the same key, which is a retry, or by another key.
    async fn answer_used_ticket(
        &self,
        mut transaction: ClusterTransaction,
        known: &StoredIntent,
        record: &VerifiedRecord,
        joining: &JoinRequest,
    ) -> Result<IntentView, ApiError> {
        if known.agent == Some(record.agent_key) {
            if known.record_hash() != Some(record.hash()) {
                let detail = "This host redeemed the ticket with another record.";
                let next = "Start the agent with the names and addresses that it had then, or ask \
                            for another ticket.";
                return Err(ApiError::new(Code::Conflict, detail, next));
            }
            return self.end_change(transaction, known.intent.operation).await;
        }
        let (now, address) = (transaction.now, joining.address.to_string());
        let first =
            intents::note_ticket_reuse(transaction.connection(), now, &known.intent, &address);
        if first.await? {
            transaction.commit().await?;
            self.notifier.wake(known.intent.cluster);
        }
        self.metrics.count_alarm("ticket_taken");
        tracing::error!(cluster.id = %known.intent.cluster, operation = %known.intent.operation,
            address, "another key tried a join ticket that is taken: somebody copied it");
        let detail = "The ticket was redeemed by another key: it is for one host.";
        let next = "Ask for another ticket. If that host isn't yours, have an operator run \
                    `muster-discovery intent list` and withdraw it.";
        Err(ApiError::new(Code::TicketTaken, detail, next))
    }
}

/// Refuses a ticket whose replaced member was already removed or lost.
fn check_replaced_member(ticket: &VerifiedGrant, roster: &Roster) -> Result<(), ApiError> {
    let Some(member) = ticket.replaces else { return Ok(()) };
    if roster.is_removed(member) {
        let detail = format!("Member {member}, which this ticket replaces, is gone already.");
        let next = "Ask for a ticket without `--replace`.";
        return Err(ApiError::new(Code::WrongState, detail, next));
    }
    if roster.is_lost(member) {
        let detail = format!(
            "Member {member}, which this ticket replaces, was lost with its whole cluster, which \
             goes on as a recovered one."
        );
        let next =
            "Ask for a ticket without `--replace`: the host may have the lost member's name.";
        return Err(ApiError::new(Code::WrongState, detail, next));
    }
    Ok(())
}

/// Refuses a newcomer whose node speaks another peer protocol than the members do. Members that run
/// `muster-node` report a configuration index, while stock etcd has none.
fn check_same_program(newcomer: NodeProgram, changes: &MembershipChanges) -> Result<(), ApiError> {
    let Some(confirmed) = &changes.confirmed else { return Ok(()) };
    let members = match confirmed.membership.configuration {
        Some(_) => NodeProgram::MusterNode,
        None => NodeProgram::Etcd,
    };
    if newcomer == members {
        return Ok(());
    }
    let detail = format!(
        "This host would run {newcomer}, and the cluster's members run {members}: the two can't be \
         members of one cluster."
    );
    let next = "Start the agent with --node-binary and the program that the members run. The ticket \
                was not used.";
    Err(ApiError::new(Code::Conflict, detail, next))
}

fn name_taken_error(record: &VerifiedRecord, member: MemberId) -> ApiError {
    let detail = format!("Member {member} is called {} already.", record.name);
    let next = "Start the agent with another --name, or redeem a ticket that is for that member's \
                place: `muster-discovery token create --kind join --replace`.";
    ApiError::new(Code::NameTaken, detail, next)
}

/// Errors unless the ticket is valid now and for this address.
fn admit(
    transaction: &ClusterTransaction,
    ticket: &VerifiedGrant,
    row: &RequestedGrant,
    address: IpAddr,
) -> Result<(), ApiError> {
    let again = "Ask for another ticket: `muster-discovery token create --kind join`.";
    let seconds = transaction.now.0 / 1_000_000;
    if row.revoked_us.is_some() || is_void(ticket, row.stored_us, transaction.void_before) {
        return Err(ApiError::new(Code::GrantRevoked, "The ticket was revoked.", again));
    }
    if !transaction.settled {
        let detail = "The database was changed, and isn't settled yet.";
        let next = "Wait: `muster-discovery process list` says for what.";
        return Err(ApiError::new(Code::DatabaseChanged, detail, next));
    }
    if ticket.expires_at <= seconds {
        return Err(ApiError::new(Code::GrantExpired, "The ticket has expired.", again));
    }
    if ticket.issued_at > seconds + ISSUER_SKEW_SECONDS {
        let next = "Set the clock of the machine that it was made on.";
        return Err(ApiError::new(Code::GrantRefused, "The ticket is of the future.", next));
    }
    if !ticket.cidrs.is_empty() && !ticket.cidrs.iter().any(|block| block.contains(&address)) {
        let next = "Use the ticket from the network that it is for, or ask for another.";
        let detail = format!("The ticket is not for the address {address}.");
        return Err(ApiError::new(Code::GrantBinding, detail, next));
    }
    Ok(())
}
