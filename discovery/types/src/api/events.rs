//! API bodies of the event chains. A client can verify the order of a chain's events, and that none
//! was changed.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use crate::digest::Digest;

/// Query of `GET /v1/events`: which events of which chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct EventQuery {
    /// Id of the cluster whose chain is read, or the id of zeros for the service's own chain.
    pub stream: Uuid,
    /// Number of the event after which the answer begins; from the beginning without it.
    pub after: Option<u64>,
    /// Maximum number of events in the answer, at most [`MAX_PAGE`](super::MAX_PAGE).
    pub limit: Option<u16>,
}

/// Query of `GET /v1/clusters/{id}/checkpoint`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct CheckpointQuery {
    /// Number of an event whose hash the answer repeats, if the chain has it.
    pub known: Option<u64>,
}

/// One event of a chain. Events are never changed or removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventView {
    /// Position in the chain, from 1.
    pub number: u64,
    /// Time of the event, in microseconds since 1970 by the database's clock.
    pub at_us: i64,
    /// Kind of the event.
    pub kind: String,
    /// Details of the event as JSON, exactly as they were hashed.
    pub body: String,
    /// Hash of the event before this one; zeros for the first.
    pub previous: Digest,
    /// Hash of this event.
    pub hash: Digest,
}

impl EventView {
    /// Computes the event's hash: SHA-256 of the previous event's hash, followed by the text
    /// `STREAM NUMBER AT_US KIND BODY`.
    pub fn computed_hash(&self, stream: &Uuid) -> Digest {
        let text = format!("{stream} {} {} {} {}", self.number, self.at_us, self.kind, self.body);
        Digest::of_parts(&[self.previous.as_bytes(), text.as_bytes()])
    }
}

/// Answer of `GET /v1/events`: a part of one chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventList {
    /// Id of the cluster, or zeros for the service's own chain.
    pub stream: Uuid,
    /// Number of the chain's last event; 0 if there is none.
    pub last: u64,
    /// Events after [`EventQuery::after`], in the order of their numbers.
    pub events: Vec<EventView>,
}
