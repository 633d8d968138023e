//! What an operator orders of a cluster that runs: that one member goes, or moves.
//!
//! An order is no request to the service. It is carried out by an agent of the cluster, on its own
//! node, by the cluster's own API, and that agent trusts the operator's signature alone.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::digest::{Digest, MemberId, Nonce};
use crate::jws::{Jws, JwsError, Typ};
use crate::key::SigningKey;
use crate::record::{MAX_SEAT_URLS, RecordError, check_urls};
use crate::retire::MAX_REASON;
use crate::role::Action;
use crate::statement::StatementChain;
use crate::url::NodeUrl;

/// Longest life of an order: 15 minutes.
pub const MAX_ORDER_SECONDS: u64 = 900;

/// The change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Change {
    /// The member goes, for good.
    Remove {
        /// Who.
        member: MemberId,
    },
    /// Its peers reach it elsewhere.
    Update {
        /// Who.
        member: MemberId,
        /// Where from now on.
        peer_urls: Vec<NodeUrl>,
    },
}

impl Change {
    /// Whom it is about.
    pub fn member(&self) -> MemberId {
        match self {
            Change::Remove { member } | Change::Update { member, .. } => *member,
        }
    }
}

/// Payload of an order; a JWS by an operator's or owner's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Order {
    /// 1.
    pub version: u32,
    /// Random: the same change may be ordered again later.
    pub id: Nonce,
    /// The cluster.
    pub cluster: Uuid,
    /// Hash of the statement that the operator saw.
    pub statement: Digest,
    /// The change.
    pub change: Change,
    /// The configuration (its Raft index) that the operator saw, on which alone it may be carried
    /// out; none where that isn't known, as with stock etcd.
    pub planned_at: Option<u64>,
    /// From when, in seconds since 1970 by the service's clock.
    pub issued_at: u64,
    /// Until when, in seconds since 1970 by the service's clock.
    pub expires_at: u64,
    /// Why, for those who come later.
    pub reason: String,
}

/// Why an order is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    /// Signed by a key that the newest statement doesn't allow it, or a bad signature or form.
    #[error("the order: {0}")]
    Jws(#[from] JwsError),
    /// Of another cluster.
    #[error("the order is for another cluster")]
    OtherCluster,
    /// Made under a statement that is not in the cluster's chain.
    #[error("the order was made under a statement that is not in this cluster's chain")]
    OtherStatement,
    /// An order that nobody can carry out.
    #[error("the order: {0}")]
    Invalid(&'static str),
    /// Peer URLs that no member may have.
    #[error("the order: {0}")]
    Urls(#[from] RecordError),
}

/// An order whose signer was allowed to sign it. Whether its time is over is not said here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedOrder {
    jws: Jws,
    order: Order,
}

impl Order {
    /// Signs it.
    pub fn sign(&self, operator: &SigningKey) -> Jws {
        Jws::sign(Typ::Order, operator, self)
    }
}

impl VerifiedOrder {
    /// Verifies an order under a cluster's chain: its signer's role by the newest statement.
    pub fn verify(jws: &Jws, chain: &StatementChain) -> Result<Self, OrderError> {
        let newest = chain.newest();
        let order: Order = jws.verify_any(Typ::Order, newest.keys_for(Action::PutOrder))?;
        let bad = |what| Err(OrderError::Invalid(what));
        if order.version != 1 {
            return bad("made by a newer version of Muster");
        }
        if order.cluster != newest.cluster {
            return Err(OrderError::OtherCluster);
        }
        if chain.position(&order.statement).is_none() {
            return Err(OrderError::OtherStatement);
        }
        let life = order.expires_at.checked_sub(order.issued_at);
        if !life.is_some_and(|life| (1..=MAX_ORDER_SECONDS).contains(&life)) {
            return bad("it lives longer than 15 minutes, or not at all");
        }
        if order.reason.len() > MAX_REASON || order.reason.contains(char::is_control) {
            return bad("its reason is longer than 500 bytes, or has control characters");
        }
        if let Change::Update { peer_urls, .. } = &order.change {
            let twice = (1..peer_urls.len()).any(|i| peer_urls[..i].contains(&peer_urls[i]));
            if !(1..=MAX_SEAT_URLS).contains(&peer_urls.len()) || twice {
                return bad("a member has 1 to 3 peer URLs, none twice");
            }
            check_urls(peer_urls, &newest.permissions)?;
        }
        Ok(Self { jws: jws.clone(), order })
    }

    /// The signed order.
    pub fn jws(&self) -> &Jws {
        &self.jws
    }
}

impl std::ops::Deref for VerifiedOrder {
    type Target = Order;

    fn deref(&self) -> &Order {
        &self.order
    }
}

#[cfg(test)]
mod tests;
