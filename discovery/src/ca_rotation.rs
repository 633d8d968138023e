//! Replaces a cluster's CAs while it runs, in three statements that an owner signs.
//!
//! 1. The service makes new CAs. The owner's next statement names them as additional trusted CAs.
//! 2. Once all members trust them, a statement makes the new CAs the issuing ones. Agents renew
//!    their members' certificates at once.
//! 3. Once all members have new certificates, a statement drops the old CAs, and the service
//!    deletes their keys.
//!
//! The service checks which changes of the CAs a statement may make ([`check_statement`]). The
//! owner decides when the members are ready for the next step, by the progress that
//! [`App::rotation`] returns.

use discovery_types::api::{MemberCas, MemberRotation, RotationView};
use discovery_types::key::PublicKey;
use discovery_types::problem::Code;
use discovery_types::statement::{CaPair, MAX_CHAIN, RotationStep, Statement};
use uuid::Uuid;

use crate::app::App;
use crate::ca::make_ca;
use crate::error::ApiError;
use crate::forming::show;
use crate::kek::KeyPurpose;
use crate::members::roster::{Roster, check_running};
use crate::store::UnixMicros;
use crate::store::ca_rotation::other_authorities;
use crate::store::cluster::{Authorities, ClusterTransaction, RunningCluster};
use crate::store::clusters::WrappedCa;

/// Number of statements of a replacement that is undone after its switch: begin, switch, switch
/// back and end.
const STATEMENTS_OF_ROTATION: u64 = 4;

/// Refuses a statement that changes the cluster's CAs in a way that the service can't follow.
pub(crate) async fn check_statement(
    transaction: &mut ClusterTransaction,
    next: &Statement,
) -> Result<(), ApiError> {
    if next.also_trusted.is_some() && next.seq + 1 >= MAX_CHAIN as u64 {
        let detail = format!(
            "This would be the last of {MAX_CHAIN} statements, and the CAs are being replaced."
        );
        let next = "End the replacement first: muster-discovery cluster rotate-ca NAME, with or without --cancel.";
        return Err(ApiError::new(Code::WrongState, detail, next));
    }
    let last = transaction.chain.newest().clone();
    let Ok(Some(step)) = next.rotation_step(&last) else { return Ok(()) };
    check_running(&transaction.cluster)?;
    let id = transaction.id();
    let issuing = transaction.authorities().await?;
    let other = other_authorities(transaction.connection(), id).await?;
    let named = match step {
        RotationStep::Begin => next.also_trusted.clone(),
        RotationStep::Switch => Some(next.issuing_cas()),
        RotationStep::End => None,
    };
    let is_known = |pair: &CaPair| {
        let mut stored = std::iter::once(&issuing).chain(&other);
        stored.any(|stored| stored.are_certified(&pair.peer, &pair.client))
    };
    if named.as_ref().is_none_or(is_known) {
        return Ok(());
    }
    let detail = "The statement names CAs whose keys this service doesn't have.";
    let next = "Run `muster-discovery cluster rotate-ca` again; if a restored database has lost the \
                keys, with --cancel first.";
    Err(ApiError::new(Code::StatementRefused, detail, next))
}

/// Refuses to issue certificates by a CA that the newest statement doesn't name, because nobody
/// would accept them.
pub(crate) fn check_issuing(authorities: &Authorities, newest: &Statement) -> Result<(), ApiError> {
    if authorities.are_issuing(newest) {
        return Ok(());
    }
    let detail = "This service doesn't have the keys of the cluster's CAs: its database is from before \
                  they were replaced.";
    let next = "An owner replaces the CAs again: muster-discovery cluster rotate-ca NAME --step 1 --again; if \
                a replacement is under way, with --cancel first.";
    // The same request may succeed later. The CAs may have been switched between this request's two
    // reads. Or the database has lost the newest statement, and an agent will send it again.
    Err(ApiError::new(Code::WrongState, detail, next).mark_retryable())
}

impl App {
    /// Makes new CAs for a running cluster. They are never read back from the database for an owner
    /// to sign. Otherwise an attacker who can write there could get an owner to sign other CAs.
    pub(crate) async fn make_other_cas(&self, cluster: Uuid) -> Result<CaPair, ApiError> {
        let running = self.running(cluster).await?;
        check_running(&running.cluster)?;
        let newest = running.chain.newest();
        if newest.also_trusted.is_some() {
            let detail = "The cluster's CAs are being replaced already.";
            let next = "Go on with `muster-discovery cluster rotate-ca`.";
            return Err(ApiError::new(Code::WrongState, detail, next));
        }
        if newest.seq + STATEMENTS_OF_ROTATION >= MAX_CHAIN as u64 {
            let detail = format!(
                "A cluster has at most {MAX_CHAIN} statements, and this one has {}.",
                newest.seq + 1
            );
            let next = "Make another cluster, and move the data there.";
            return Err(ApiError::new(Code::WrongState, detail, next));
        }
        let seconds = running.now.0 / 1_000_000;
        let make = |purpose| self.make_wrapped_ca(cluster, newest.name.as_str(), purpose, seconds);
        let (peer, client) = (make(KeyPurpose::PeerCa)?, make(KeyPurpose::ClientCa)?);
        if !self.store.put_other_authorities(cluster, newest.seq, [&peer, &client]).await? {
            let detail = "An owner has signed another statement meanwhile.";
            return Err(ApiError::new(Code::Conflict, detail, "Run the command again."));
        }
        let pem = |made: &WrappedCa| show::pem("CERTIFICATE", &made.ca.certificate);
        tracing::info!(cluster.id = %cluster, "made new CAs for the cluster");
        Ok(CaPair { peer: pem(&peer), client: pem(&client) })
    }

    /// Makes a CA, and wraps its key. `now` is in seconds since 1970.
    pub(crate) fn make_wrapped_ca(
        &self,
        cluster: Uuid,
        name: &str,
        purpose: KeyPurpose,
        now: u64,
    ) -> Result<WrappedCa, ApiError> {
        let ca = make_ca(cluster, name, purpose, now)?;
        let wrapped_key = self
            .keys
            .kek
            .wrap(cluster, purpose, &ca.key)
            .map_err(|error| ApiError::internal("The CA's key can't be wrapped.", &error))?;
        Ok(WrappedCa { ca, wrapped_key })
    }

    /// Returns how far each present member is with the replacement of the CAs.
    pub(crate) async fn rotation(&self, cluster: Uuid) -> Result<RotationView, ApiError> {
        let running = self.running(cluster).await?;
        let (state, chain) = (&running.cluster, &running.chain);
        let now = running.now.0 as UnixMicros;
        let present = self.present_members((state, chain), &[], now).await?;
        let reported = self.store.member_cas(cluster).await?;
        let members = present.members.into_iter().map(|member| MemberRotation {
            name: member.display_name(),
            cas: reported.iter().find(|(id, _)| *id == member.id).map(|(_, cas)| *cas),
            id: member.id,
            is_silent: member.is_silent || member.is_released,
        });
        Ok(RotationView { members: members.collect() })
    }

    /// Stores what the agent of a member reports about its CAs.
    pub(crate) async fn note_member_cas(
        &self,
        cluster: Uuid,
        key: &PublicKey,
        cas: MemberCas,
    ) -> Result<(), ApiError> {
        let running = self.running(cluster).await?;
        let roster = Roster::of(&running.cluster, &running.chain, &running.changes)?;
        let member = roster.member(key)?.id;
        let newest = running.chain.newest().seq;
        if cas.trusted > newest || cas.certified.is_some_and(|certified| certified > newest) {
            // The agent's report names a statement that this service has lost, or doesn't have yet.
            // Such a report can't be judged, so ignore it.
            return Ok(());
        }
        Ok(self.store.note_member_cas(cluster, member, cas).await?)
    }

    async fn running(&self, cluster: Uuid) -> Result<RunningCluster, ApiError> {
        let running = self.store.read_running(cluster).await?;
        running.ok_or_else(|| ApiError::not_found("such cluster"))
    }
}
