//! Redeems a newcomer's join ticket: the part of [`crate::redeem`] that only tickets have.

use discovery_types::api::{IntentState, IntentView, NodeProgram};
use discovery_types::digest::MemberId;
use discovery_types::grant::{TokenKind, VerifiedGrant};
use discovery_types::intent::{Intent, MAX_INTENT_SECONDS, operation_of, verb_of};
use discovery_types::jws::Jws;
use discovery_types::key::PublicKey;
use discovery_types::problem::Code;
use discovery_types::record::VerifiedRecord;

use super::{admin_name, check_intent_limit, refuse_removed, standby};
use crate::app::App;
use crate::error::ApiError;
use crate::gate::with_timeout;
use crate::host_identity::{check_free_for_member, check_host};
use crate::members::roster::Roster;
use crate::redeem::{
    RedeemRequest, TokenUse, VerifiedRedeem, hide_unknown_cluster, unsettled_error,
};
use crate::store::UnixMicros;
use crate::store::changes::{MembershipChanges, StoredIntent};
use crate::store::cluster::ClusterTransaction;
use crate::store::intents::{self, IntentNewcomer, NewIntent};

/// Answer to the redeem of a join ticket. The ledger holds the document's commit.
#[derive(Debug)]
pub(crate) struct JoinReply {
    /// The intent that the ticket became.
    pub intent: IntentView,
    /// The signed commit document of the cluster.
    pub document: Jws,
    /// The cluster's statements, in order.
    pub statements: Vec<Jws>,
}

impl App {
    /// Redeems a join ticket. The first key that redeems a ticket owns it, and gets the same answer
    /// to every retry. `program` is the node program on the newcomer's host: `None` from an older
    /// agent.
    pub(crate) async fn join(
        &self,
        request: &RedeemRequest,
        program: Option<NodeProgram>,
    ) -> Result<JoinReply, ApiError> {
        with_timeout(self.join_untimed(request, program)).await
    }

    async fn join_untimed(
        &self,
        request: &RedeemRequest,
        program: Option<NodeProgram>,
    ) -> Result<JoinReply, ApiError> {
        let grant = request.grant().to_string();
        let begun = self.begin_change(request.cluster(), None, Some(&grant)).await;
        let (mut transaction, changes) = begun.map_err(hide_unknown_cluster)?;
        let verified = request.verify(self, &transaction, TokenUse::Join)?;
        let operation = operation_of(&verified.grant, &verified.record.hash());
        let is_policy = verified.grant.kind == TokenKind::Heal;
        let taken = |known: &&StoredIntent| {
            let is_own = is_policy && known.agent == Some(request.key);
            known.intent.operation == operation
                || (is_own && known.intent.authority == *verified.grant.jws())
        };
        let known = changes.intents.iter().find(taken);
        if let Some(known) = known.filter(|known| known.agent != Some(request.key)) {
            return Err(self.report_ticket_copy(transaction, known, request).await?);
        }
        refuse_removed(&changes, Some(&request.key))?;
        verified.check_address(request.address)?;
        if let Some(known) = known {
            check_same_record(known, &verified.record)?;
            let known = self.note_standby(&mut transaction, known).await?;
            return self.end_join(transaction, &changes, &known).await;
        }
        verified.check_issue(&transaction)?;
        admit(&transaction, &verified)?;
        let (ticket, record) = (&verified.grant, &verified.record);
        let roster = Roster::of(&transaction.cluster, &transaction.chain, &changes)?;
        roster.check_unused_keys(record)?;
        // A host under a policy may have the name of the member that it replaces. The cluster's
        // agents decide which member that is, and compare the names then.
        if let Some(member) = roster.member_with_name(record, ticket.replaces)
            && !is_policy
        {
            return Err(name_taken_error(record, member));
        }
        if let Some(program) = program {
            check_same_program(program, &changes)?;
        }
        match is_policy {
            true => standby::check_limit(&changes, transaction.now.0 as UnixMicros)?,
            false => check_intent_limit(&changes, transaction.now.0 as UnixMicros)?,
        }
        check_replaced_member(ticket, &roster)?;
        check_spread(&transaction, record, ticket, &roster)?;
        let keys = self.identity_keys.trusted();
        let instance = check_host(&request.redeem, ticket, &keys, transaction.now)?;
        if let Some(instance) = &instance {
            let now = transaction.now.0 as UnixMicros;
            let is_waiting = |key: &PublicKey| {
                changes.intents.iter().any(|known| {
                    known.agent == Some(*key)
                        && known.state == IntentState::Open
                        && !known.is_standby_gone(now)
                })
            };
            let (key, replaces) = (&request.key, ticket.replaces);
            check_free_for_member(&mut transaction, instance, key, &roster, replaces, is_waiting)
                .await?;
        }
        let new = new_intent(&transaction, &changes, &verified, request, instance);
        let now = transaction.now;
        if is_policy {
            intents::delete_gone_standbys(transaction.connection(), request.cluster(), now).await?;
        }
        let stored = intents::insert(transaction.connection(), now, new).await?;
        tracing::info!(cluster.id = %ticket.cluster, %operation, verb = %stored.intent.verb,
            name = stored.subject, "a ticket was redeemed");
        self.end_join(transaction, &changes, &stored).await
    }

    /// Commits the transaction. If the ledger lacks the cluster's commit, records it there durably
    /// before the commit document is returned.
    async fn end_join(
        &self,
        mut transaction: ClusterTransaction,
        changes: &MembershipChanges,
        stored: &StoredIntent,
    ) -> Result<JoinReply, ApiError> {
        let commit = transaction.stored_commit().cloned();
        let commit = commit.ok_or_else(|| ApiError::not_found("such document"))?;
        let (cluster, chain) = (transaction.id(), transaction.chain.clone());
        let connection = transaction.connection();
        let entry = self.missing_ledger_entry(connection, cluster, &chain, &commit).await?;
        let intent = self.end_change(transaction, changes, stored).await?;
        if let Some(entry) = entry {
            self.store.record_commit(entry).await?;
        }
        Ok(JoinReply { intent, document: commit.document, statements: chain.jws() })
    }

    /// Raises an alarm: another key has tried to redeem a used ticket. Returns the refusal.
    async fn report_ticket_copy(
        &self,
        mut transaction: ClusterTransaction,
        known: &StoredIntent,
        request: &RedeemRequest,
    ) -> Result<ApiError, ApiError> {
        let (now, address) = (transaction.now, request.address.to_string());
        let first = intents::note_ticket_reuse(transaction.connection(), now, known, &address);
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
        Ok(ApiError::new(Code::TicketTaken, detail, next))
    }
}

fn new_intent(
    transaction: &ClusterTransaction,
    changes: &MembershipChanges,
    verified: &VerifiedRedeem,
    request: &RedeemRequest,
    instance: Option<String>,
) -> NewIntent {
    let (ticket, record) = (&verified.grant, &verified.record);
    let verb = verb_of(ticket);
    let confirmed = changes.confirmed.as_ref();
    let now = transaction.now;
    let is_policy = ticket.kind == TokenKind::Heal;
    let intent = Intent {
        cluster: ticket.cluster,
        verb,
        operation: operation_of(ticket, &record.hash()),
        authority: ticket.jws().clone(),
        redeem: Some(request.envelope.clone()),
        planned_at: confirmed.and_then(|said| said.membership.configuration),
        expires_at: match is_policy {
            true => ticket.expires_at,
            false => now.0 / 1_000_000 + MAX_INTENT_SECONDS,
        },
    };
    let newcomer = IntentNewcomer {
        grant: ticket.id.to_string(),
        agent: record.agent_key,
        address: request.address.to_string(),
        instance,
        zone: record.zone.as_ref().map(ToString::to_string),
    };
    let made_by = admin_name(transaction, ticket.jws());
    NewIntent {
        intent,
        newcomer: Some(newcomer),
        subject: record.name.to_string(),
        made_by,
        seen_us: is_policy.then_some(now.0 as UnixMicros),
    }
}

/// Refuses a retry if its record differs from the record of the first redeem by this key.
fn check_same_record(known: &StoredIntent, record: &VerifiedRecord) -> Result<(), ApiError> {
    if known.record_hash() == Some(record.hash()) {
        return Ok(());
    }
    let detail = "This host redeemed the ticket with another record.";
    let next = "Start the agent with the names and addresses that it had then, or ask for another \
                ticket.";
    Err(ApiError::new(Code::Conflict, detail, next))
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

/// Refuses a newcomer whose zone has no room, if the cluster's members are spread over zones. The
/// cluster's agents decide later which member a host under a policy replaces, and then judge the
/// host's zone.
fn check_spread(
    transaction: &ClusterTransaction,
    record: &VerifiedRecord,
    ticket: &VerifiedGrant,
    roster: &Roster,
) -> Result<(), ApiError> {
    let is_ticket = ticket.kind == TokenKind::Join;
    match transaction.chain.newest().spreads_zones() && (is_ticket || record.zone.is_none()) {
        true => roster.check_zone(record, ticket.replaces),
        false => Ok(()),
    }
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

/// Returns an error if the ticket or policy was revoked or has expired, or if the database isn't
/// settled. A ticket from before a change of the database counts as revoked. A policy from before
/// such a change is refused until its issuer confirms it.
fn admit(transaction: &ClusterTransaction, verified: &VerifiedRedeem) -> Result<(), ApiError> {
    if verified.grant.kind == TokenKind::Heal {
        return admit_by_policy(transaction, verified);
    }
    let again = "Ask for another ticket: `muster-discovery token create --kind join`.";
    if verified.is_revoked || verified.is_void {
        return Err(ApiError::new(Code::GrantRevoked, "The ticket was revoked.", again));
    }
    if !transaction.settled {
        return Err(unsettled_error("The database was changed, and isn't settled yet."));
    }
    if verified.grant.expires_at <= transaction.now.0 / 1_000_000 {
        return Err(ApiError::new(Code::GrantExpired, "The ticket has expired.", again));
    }
    Ok(())
}

fn admit_by_policy(
    transaction: &ClusterTransaction,
    verified: &VerifiedRedeem,
) -> Result<(), ApiError> {
    let again = "Ask an operator for another policy (`muster-discovery policy create`), or for a join \
                 ticket.";
    if verified.is_revoked {
        return Err(ApiError::new(
            Code::GrantRevoked,
            "The replacement policy was revoked.",
            again,
        ));
    }
    if !transaction.settled {
        return Err(unsettled_error("The database was changed, and isn't settled yet."));
    }
    verified.check_confirmed()?;
    if verified.grant.expires_at <= transaction.now.0 / 1_000_000 {
        let detail = "The replacement policy has expired.";
        return Err(ApiError::new(Code::GrantExpired, detail, again));
    }
    Ok(())
}
