//! Converts a change into its row in the event chain: a kind, whose meaning never changes, and a
//! body.

use data_encoding::HEXLOWER;
use discovery_formation::service::{ClusterChange, ReopenReason};
use discovery_formation::{AgentKey, Hash};
use serde_json::{Value, json};

/// Returns the kind and the JSON body of a change.
pub(crate) fn describe(change: &ClusterChange) -> (&'static str, Value) {
    match change {
        ClusterChange::Joined { key } => ("joined", json!({ "key": hex(key) })),
        ClusterChange::Seated { key, seat } => ("seated", json!({ "key": hex(key), "seat": seat })),
        ClusterChange::Queued { key } => ("queued", json!({ "key": hex(key) })),
        ClusterChange::Lapsed { key } => ("lapsed", json!({ "key": hex(key) })),
        ClusterChange::RecordReplaced { key } => ("record_replaced", json!({ "key": hex(key) })),
        ClusterChange::Counted { key, counts } => {
            ("counted", json!({ "key": hex(key), "counts": counts }))
        }
        ClusterChange::Frozen { epoch, h } => ("frozen", json!({ "epoch": epoch, "h": hash(h) })),
        ClusterChange::Reopened { epoch, why } => ("reopened", reopen_body(*epoch, why)),
        ClusterChange::Acked { key, epoch } => {
            ("acked", json!({ "key": hex(key), "epoch": epoch }))
        }
        ClusterChange::Probed { key, epoch } => {
            ("probed", json!({ "key": hex(key), "epoch": epoch }))
        }
        ClusterChange::Released { key, epoch } => {
            ("released", json!({ "key": hex(key), "epoch": epoch }))
        }
        ClusterChange::Committed { epoch, h } => {
            ("committed", json!({ "epoch": epoch, "h": hash(h) }))
        }
        ClusterChange::Adopted { epoch, h } => ("adopted", json!({ "epoch": epoch, "h": hash(h) })),
        ClusterChange::Reported { key, raft_cluster } => {
            ("reported", json!({ "key": hex(key), "raft_cluster": format!("{raft_cluster:x}") }))
        }
        ClusterChange::Formed { raft_cluster } => {
            ("formed", json!({ "raft_cluster": format!("{raft_cluster:x}") }))
        }
        ClusterChange::Restated { sequence } => ("restated", json!({ "sequence": sequence })),
        ClusterChange::Approved { key } => ("approved", json!({ "key": hex(key) })),
        ClusterChange::SeatFreed { key } => ("seat_freed", json!({ "key": hex(key) })),
        ClusterChange::GrantRevoked => ("grant_revoked", json!({})),
        ClusterChange::Ended { phase } => ("ended", json!({ "phase": phase.as_str() })),
        ClusterChange::Unretired { phase, by } => {
            ("unretired", json!({ "phase": phase.as_str(), "by": by }))
        }
        ClusterChange::Unsettled => ("database_unsettled", json!({})),
        ClusterChange::Settled => ("database_settled", json!({})),
        ClusterChange::Split { other } => ("split", json!({ "other": hash(other) })),
        ClusterChange::KeyElsewhere { key } => ("key_elsewhere", json!({ "key": hex(key) })),
    }
}

fn reopen_body(epoch: u64, why: &ReopenReason) -> Value {
    match why {
        ReopenReason::Lapsed(key) => json!({ "epoch": epoch, "why": "lapsed", "key": hex(key) }),
        ReopenReason::SeatFreed(key) => {
            json!({ "epoch": epoch, "why": "seat_freed", "key": hex(key) })
        }
        ReopenReason::Refused { key, reason } => {
            json!({ "epoch": epoch, "why": "refused", "key": hex(key), "reason": reason })
        }
        ReopenReason::NewDeadline { by } => {
            json!({ "epoch": epoch, "why": "new_deadline", "by": by })
        }
        ReopenReason::TimedOut => json!({ "epoch": epoch, "why": "timed_out" }),
        ReopenReason::RecordReplaced(key) => {
            json!({ "epoch": epoch, "why": "record_replaced", "key": hex(key) })
        }
        ReopenReason::Restated => json!({ "epoch": epoch, "why": "restated" }),
        ReopenReason::DatabaseChanged => json!({ "epoch": epoch, "why": "database_changed" }),
    }
}

fn hex(key: &AgentKey) -> String {
    HEXLOWER.encode(&key.0)
}

fn hash(hash: &Hash) -> String {
    HEXLOWER.encode(&hash.0)
}
