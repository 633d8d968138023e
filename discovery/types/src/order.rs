//! Orders by an operator to a running cluster: remove one member, or change its peer URLs.
//!
//! An order is addressed to the cluster and not to the service. An agent of the cluster carries it
//! out on its own node, through the cluster's own API. The agent trusts only the operator's
//! signature.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::digest::{Digest, MemberId, Nonce};
use crate::jws::{Jws, JwsError, JwsType};
use crate::key::SigningKey;
use crate::record::{MAX_SEAT_URLS, RecordError, check_urls};
use crate::retire::MAX_REASON;
use crate::role::Action;
use crate::statement::StatementChain;
use crate::url::NodeUrl;

/// Longest lifetime of an order, in seconds: 15 minutes.
pub const MAX_ORDER_SECONDS: u64 = 900;

/// Change of one member that an order asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum OrderedChange {
    /// Remove the member, for good.
    Remove {
        /// Id of the member.
        member: MemberId,
    },
    /// Change the URLs at which peers reach the member.
    Update {
        /// Id of the member.
        member: MemberId,
        /// New peer URLs of the member.
        peer_urls: Vec<NodeUrl>,
    },
}

impl OrderedChange {
    /// Returns the member that the change is about.
    pub fn member(&self) -> MemberId {
        match self {
            OrderedChange::Remove { member } | OrderedChange::Update { member, .. } => *member,
        }
    }
}

/// Payload of an order; a JWS by an operator's or owner's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Order {
    /// Version of the format, always 1.
    pub version: u32,
    /// Random id, so that the same change can be ordered again later.
    pub id: Nonce,
    /// Cluster that the order is for.
    pub cluster: Uuid,
    /// Hash of the statement that the operator saw.
    pub statement: Digest,
    pub change: OrderedChange,
    /// Raft index of the configuration that the operator saw. The order may be carried out only in
    /// this configuration. `None` if the index isn't known, as with stock etcd.
    pub planned_at: Option<u64>,
    /// Start of the validity, in seconds since 1970 by the service's clock.
    pub issued_at: u64,
    /// End of the validity, in seconds since 1970 by the service's clock.
    pub expires_at: u64,
    /// Reason for the order, for people who read it later.
    pub reason: String,
}

/// Reason why an order is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    /// The form or signature is wrong, or the newest statement doesn't allow the key to sign an
    /// order.
    #[error("the order: {0}")]
    Jws(#[from] JwsError),
    /// The order is for another cluster.
    #[error("the order is for another cluster")]
    OtherCluster,
    /// The order was made under a statement that is not in the cluster's chain.
    #[error("the order was made under a statement that is not in this cluster's chain")]
    OtherStatement,
    /// The order has values with which no agent can carry it out.
    #[error("the order: {0}")]
    Invalid(&'static str),
    /// The order has peer URLs that no member may have.
    #[error("the order: {0}")]
    Urls(#[from] RecordError),
}

/// An order whose signer was allowed to sign it. The order may have expired.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedOrder {
    jws: Jws,
    order: Order,
}

impl Order {
    /// Signs the order, as an operator or owner.
    pub fn sign(&self, operator: &SigningKey) -> Jws {
        Jws::sign(JwsType::Order, operator, self)
    }
}

impl VerifiedOrder {
    /// Verifies an order under a cluster's statement chain. The newest statement decides whether
    /// the signer may give orders.
    pub fn verify(jws: &Jws, chain: &StatementChain) -> Result<Self, OrderError> {
        let newest = chain.newest();
        let order: Order = jws.verify_any(JwsType::Order, newest.keys_for(Action::PutOrder))?;
        let bad = |what| Err(OrderError::Invalid(what));
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
        if let OrderedChange::Update { peer_urls, .. } = &order.change {
            let twice = (1..peer_urls.len()).any(|i| peer_urls[..i].contains(&peer_urls[i]));
            if !(1..=MAX_SEAT_URLS).contains(&peer_urls.len()) || twice {
                return bad("a member has 1 to 3 peer URLs, none twice");
            }
            check_urls(peer_urls, &newest.permissions)?;
        }
        Ok(Self { jws: jws.clone(), order })
    }

    /// Returns the signed order.
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
