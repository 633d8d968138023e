//! API bodies of the discovery processes that share a database.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

/// A process that uses, or used, the database.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProcessView {
    /// The id in its ledger.
    pub id: Uuid,
    /// Whether it is the one that answers.
    pub answering: bool,
    /// Commits in its ledger, as far as the database knows: one that was restored may know of too
    /// few.
    pub ledger_entries: u64,
    /// When it was first seen, in milliseconds since 1970.
    pub first_seen_ms: i64,
    /// When it was last seen, in milliseconds since 1970.
    pub last_seen_ms: i64,
    /// Whether the database waits for its ledger.
    pub missing: bool,
    /// When an owner said that it won't come back, in milliseconds since 1970.
    pub forgotten_at_ms: Option<i64>,
}

/// `GET /v1/processes`, and the answer to `POST /v1/processes/{id}/forget`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProcessList {
    /// Which history of the database this is.
    pub generation: i64,
    /// Whether lists may be frozen and committed in it.
    pub settled: bool,
    /// What is wrong and what to do, unless it is settled.
    pub explain: Option<String>,
    /// The processes, oldest first.
    pub processes: Vec<ProcessView>,
}
