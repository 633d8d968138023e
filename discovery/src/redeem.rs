//! Verifies redeems of tokens. Boot tokens and join tickets take the same path, in this order:
//!
//! 1. The envelope is signed by the connection's key and meant for this service
//!    ([`RedeemRequest::open`]).
//! 2. The cluster exists, and the database wasn't set back to an older state. The callers check
//!    this when they lock and load the cluster. For a boot token, they also check that the agent's
//!    member wasn't removed.
//! 3. [`RedeemRequest::verify`]: the record names the cluster, the bundle's statement is in the
//!    cluster's chain, and the grant is stored here. An issuer signed the grant, which is of the
//!    right kind. The agent's key and the token's key signed the record, and the record fits the
//!    grant's bindings.
//! 4. [`VerifiedRedeem::check_address`]: the grant allows the request's source address.
//! 5. [`VerifiedRedeem::check_issue`]: a key that hasn't redeemed the token before may redeem it
//!    now.
//! 6. [`crate::host_identity`]: such a key's host fulfils what the grant requires, and its virtual
//!    machine isn't in use under another key.
//!
//! Boot tokens and join tickets differ in the following:
//!
//! - A boot token can give seats to several keys. The state machine decides on the seats, expiry
//!   and revocation. The record becomes a part of the commit document, so its length is limited.
//! - A join ticket belongs to its first key, and becomes an intent that agents carry out at once.
//!   So no ticket is redeemed while the database is unsettled. A boot token can be redeemed then,
//!   because no list is frozen or committed before the database is settled.
//! - The token of a replacement policy is a boot token while the cluster forms. Afterwards it is a
//!   ticket for any number of hosts.
//! - A used ticket that comes from another key raises an alarm even before the address is checked.
//!   Somebody has copied the ticket.

use std::net::IpAddr;

use discovery_formation::UnixMicros;
use discovery_types::confirmation::GrantConfirmation;
use discovery_types::digest::Digest;
use discovery_types::grant::{Grant, GrantId, ISSUER_SKEW_SECONDS, VerifiedGrant};
use discovery_types::jws::{Jws, JwsError, JwsType};
use discovery_types::key::PublicKey;
use discovery_types::problem::Code;
use discovery_types::record::{Endorsement, Record, RecordError, VerifiedRecord};
use discovery_types::redeem::Redeem;
use uuid::Uuid;

use crate::app::App;
use crate::error::ApiError;
use crate::store::cluster::LoadedCluster;

/// Purpose for which a token is redeemed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenUse {
    /// A seat in a cluster that forms.
    Seat,
    /// A place in a running cluster.
    Join,
}

impl TokenUse {
    /// Whether a token with this grant is for this purpose.
    fn is_of(self, grant: &VerifiedGrant) -> bool {
        match self {
            TokenUse::Seat => grant.gives_seats(),
            TokenUse::Join => grant.admits_newcomers(),
        }
    }
}

/// A redeem whose envelope is verified. The record and the grant aren't verified yet.
#[derive(Debug)]
pub(crate) struct RedeemRequest {
    /// The signed envelope, as received.
    pub envelope: Jws,
    /// Content of the envelope.
    pub redeem: Redeem,
    /// Public key of the agent, which the connection proves.
    pub key: PublicKey,
    /// The agent's record, not verified yet.
    pub claimed: Record,
    /// Source address of the request.
    pub address: IpAddr,
}

/// A redeem whose signatures are all verified.
#[derive(Debug)]
pub(crate) struct VerifiedRedeem {
    /// The token's grant, which an issuer signed.
    pub grant: VerifiedGrant,
    /// The agent's record, which the token endorsed.
    pub record: VerifiedRecord,
    /// Whether an admin has revoked the grant.
    pub is_revoked: bool,
    /// Whether the grant is older than the database's last change, and no issuer has confirmed it
    /// since.
    pub is_void: bool,
}

impl RedeemRequest {
    /// Opens an envelope that came over a connection with the client key `key`. `pin` is the hash
    /// of this service's key.
    pub(crate) fn open(
        envelope: Jws,
        key: PublicKey,
        pin: Digest,
        address: IpAddr,
    ) -> Result<Self, ApiError> {
        let redeem = Redeem::open(&envelope, &key, &[pin])?;
        let record = &redeem.signed.record;
        let claimed = record.claims_unverified(JwsType::Record).map_err(RecordError::Record)?;
        Ok(RedeemRequest { envelope, redeem, key, claimed, address })
    }

    /// Id of the cluster that the agent wants to be a member of.
    pub(crate) fn cluster(&self) -> Uuid {
        self.redeem.cluster
    }

    /// Id of the grant that the record names.
    pub(crate) fn grant(&self) -> GrantId {
        self.claimed.grant
    }

    /// Verifies the grant and the record under the locked cluster's statements. A request without
    /// the token's secret is counted, and gets the same error as an unknown token.
    pub(crate) fn verify(
        &self,
        app: &App,
        loaded: &LoadedCluster,
        purpose: TokenUse,
    ) -> Result<VerifiedRedeem, ApiError> {
        let chain = &loaded.chain;
        if self.claimed.cluster != loaded.id() || self.redeem.cluster != loaded.id() {
            return Err(unknown_token());
        }
        if chain.position(&self.redeem.statement).is_none() {
            let next = "Copy the bundle again, whole and unchanged, or ask for another one.";
            let detail = "The join bundle pins a statement that this cluster doesn't have.";
            return Err(ApiError::new(Code::StatementRefused, detail, next));
        }
        let row = loaded.requested_grant(&self.grant().to_string()).ok_or_else(unknown_token)?;
        let jws: Jws = row.jws.parse().map_err(|_| unknown_token())?;
        let refusal = |error: ApiError| self.hide_from_guessers(app, &row.token_key, error);
        let grant = app.store.caches().newest_grant(&jws, chain);
        let grant = grant.map_err(|error| refusal(error.into()))?;
        if grant.key.as_bytes()[..] != row.token_key || !purpose.is_of(&grant) {
            return Err(unknown_token());
        }
        let permissions = &chain.newest().permissions;
        let record = VerifiedRecord::verify(&self.redeem.signed, &grant, permissions);
        let record = record.map_err(|error| refusal(error.into()))?;
        app.store.caches().add_record(&record, &grant);
        let void_before = loaded.void_before;
        let is_confirmed = row.confirmation.as_ref().is_some_and(|jws| {
            jws.parse().is_ok_and(|jws| {
                GrantConfirmation::verify(&jws, chain, &grant, void_before.0).is_ok()
            })
        });
        Ok(VerifiedRedeem {
            is_revoked: row.revoked_us.is_some(),
            is_void: is_void(&grant, row.stored_us, void_before) && !is_confirmed,
            grant: VerifiedGrant::clone(&grant),
            record,
        })
    }
}

impl RedeemRequest {
    /// Hides from a sender without the token's secret that the token exists. If the endorsement's
    /// signature proves the secret, returns `error`. Otherwise counts a wrong secret, and returns
    /// the error for an unknown token. `token_key` is the token's public key.
    fn hide_from_guessers(&self, app: &App, token_key: &[u8], error: ApiError) -> ApiError {
        let key = token_key.try_into().ok().and_then(|key: [u8; 32]| PublicKey::try_from(key).ok());
        let endorsement = &self.redeem.signed.endorsement;
        let verified = key.map(|key| endorsement.verify::<Endorsement>(JwsType::Endorsement, &key));
        // The payload is parsed only after the signature was verified. So these errors, too, mean
        // that the sender has the secret.
        if let Some(Ok(_) | Err(JwsError::Newer { .. } | JwsError::Payload(_))) = verified {
            return error;
        }
        app.guesses.note(self.grant(), self.address, &app.metrics);
        unknown_token()
    }
}

impl VerifiedRedeem {
    /// Returns an error if the grant doesn't allow this source address.
    pub(crate) fn check_address(&self, address: IpAddr) -> Result<(), ApiError> {
        let blocks = &self.grant.cidrs;
        if blocks.is_empty() || blocks.iter().any(|block| block.contains(&address)) {
            return Ok(());
        }
        let next = "Use the token from the network that it is for, or ask for another.";
        let detail = format!("The token is not for the address {address}.");
        Err(ApiError::new(Code::GrantBinding, detail, next))
    }

    /// Returns an error if the grant can't admit a new key now. Either it isn't known yet whether
    /// the grant is valid, or the grant's issue time is in the future.
    ///
    /// Before the database is settled, the error for a void grant asks the host to try again later.
    /// A cluster that looks open can have committed already, and its hosts must learn that first.
    /// An operator can also replace the database by the right one, in which the grant is valid.
    pub(crate) fn check_issue(&self, loaded: &LoadedCluster) -> Result<(), ApiError> {
        if self.is_void && !loaded.settled {
            let detail =
                "The database was changed after this token was made, and isn't settled yet.";
            return Err(unsettled_error(detail));
        }
        if self.grant.issued_at > loaded.now.0 / 1_000_000 + ISSUER_SKEW_SECONDS {
            let detail = "The token was issued in this service's future: a clock was set back.";
            let next = "Wait until that time has come, or ask for another token.";
            return Err(ApiError::new(Code::GrantRefused, detail, next).mark_retryable());
        }
        Ok(())
    }

    /// Returns an error if an issuer has to confirm the grant first.
    pub(crate) fn check_confirmed(&self) -> Result<(), ApiError> {
        if self.is_void && !self.is_revoked {
            let detail = "The database was changed after this token was made, and can have lost its \
                          revocation.";
            let next = format!(
                "Ask its issuer to run `muster-discovery token confirm {}`, or for another token.",
                self.grant.id
            );
            return Err(ApiError::new(Code::GrantVoid, detail, next));
        }
        Ok(())
    }
}

/// Error for a token that this service doesn't know, that is of another cluster or kind, or whose
/// secret the request doesn't prove.
pub(crate) fn unknown_token() -> ApiError {
    let next = "Check that the bundle is for this service and cluster, or ask for another.";
    ApiError::new(Code::GrantUnknown, "The token is not known here.", next)
}

/// Replaces the error for an unknown cluster, so that it looks like an unknown token.
pub(crate) fn hide_unknown_cluster(error: ApiError) -> ApiError {
    match error.problem().code {
        Code::NotFound => unknown_token(),
        _ => error,
    }
}

/// Error for a redeem that has to wait until the database is settled.
pub(crate) fn unsettled_error(detail: &str) -> ApiError {
    let next = "Wait: `muster-discovery process list` says for what.";
    ApiError::new(Code::DatabaseChanged, detail, next)
}

/// Whether a token was issued before the last change of the database, or before an owner last
/// accepted the database. The database can have lost the token's revocation, so such a token admits
/// no new key any more.
///
/// A token is void if its time of issue or its time of storage is too early. The time of issue
/// alone isn't enough: it is in whole seconds, and the issuer's clock can be ahead. The time of
/// storage alone isn't enough either, because the issuer didn't sign it.
pub(crate) fn is_void(grant: &Grant, stored_us: i64, void_before: UnixMicros) -> bool {
    grant.issued_at < void_before.0 / 1_000_000 || stored_us.unsigned_abs() < void_before.0
}
