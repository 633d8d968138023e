//! Answers of the API about the discovery processes that share a database.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

/// A discovery process that uses, or used, the database.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProcessView {
    /// Id of the process, which is stored in its ledger.
    pub id: Uuid,
    /// Whether this is the process that answers the request.
    pub answering: bool,
    /// Number of commits in the process's ledger, by the database's record. After a restore the
    /// recorded number can be too low.
    pub ledger_entries: u64,
    /// Time at which the process was first seen, in milliseconds since 1970.
    pub first_seen_ms: i64,
    /// Time at which the process was last seen, in milliseconds since 1970.
    pub last_seen_ms: i64,
    /// Whether the process has yet to restore its ledger's commits in the database's present
    /// generation.
    pub missing: bool,
    /// Time at which an owner declared that the process won't come back, in milliseconds since
    /// 1970.
    pub forgotten_at_ms: Option<i64>,
}

/// Answer of `GET /v1/processes` and of `POST /v1/processes/{id}/forget`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProcessList {
    /// Generation of the database. A restore, or another change of its history, begins a new one.
    pub generation: i64,
    /// Whether lists of members may be frozen and committed in this generation.
    pub settled: bool,
    /// Description of what keeps lists of members from being frozen and committed, with the remedy.
    /// None if `settled` is true.
    pub explain: Option<String>,
    /// Processes of the database, oldest first.
    pub processes: Vec<ProcessView>,
}
