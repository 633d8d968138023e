//! Converts a change into its row in the event chain: a kind, whose meaning never changes, and a
//! body.

use data_encoding::HEXLOWER;
use discovery_formation::service::{Change, Reopen};
use discovery_formation::{Hash, KeyId};
use serde_json::{Value, json};

/// Returns the kind and the JSON body of a change.
pub(crate) fn describe(change: &Change) -> (&'static str, Value) {
    match change {
        Change::Joined { key } => ("joined", json!({ "key": hex(key) })),
        Change::Seated { key, seat } => ("seated", json!({ "key": hex(key), "seat": seat })),
        Change::Queued { key } => ("queued", json!({ "key": hex(key) })),
        Change::Lapsed { key } => ("lapsed", json!({ "key": hex(key) })),
        Change::RecordReplaced { key } => ("record_replaced", json!({ "key": hex(key) })),
        Change::Counted { key, counts } => {
            ("counted", json!({ "key": hex(key), "counts": counts }))
        }
        Change::Frozen { epoch, h } => ("frozen", json!({ "epoch": epoch, "h": hash(h) })),
        Change::Reopened { epoch, why } => ("reopened", reopened(*epoch, why)),
        Change::Acked { key, epoch } => ("acked", json!({ "key": hex(key), "epoch": epoch })),
        Change::Probed { key, epoch } => ("probed", json!({ "key": hex(key), "epoch": epoch })),
        Change::Released { key, epoch } => ("released", json!({ "key": hex(key), "epoch": epoch })),
        Change::Committed { epoch, h } => ("committed", json!({ "epoch": epoch, "h": hash(h) })),
        Change::Adopted { epoch, h } => ("adopted", json!({ "epoch": epoch, "h": hash(h) })),
        Change::Reported { key, raft_cluster } => {
            ("reported", json!({ "key": hex(key), "raft_cluster": format!("{raft_cluster:x}") }))
        }
        Change::Formed { raft_cluster } => {
            ("formed", json!({ "raft_cluster": format!("{raft_cluster:x}") }))
        }
        Change::Restated { sequence } => ("restated", json!({ "sequence": sequence })),
        Change::GrantRevoked => ("grant_revoked", json!({})),
        Change::Ended { phase } => ("ended", json!({ "phase": phase.as_str() })),
        Change::Unretired { phase, by } => {
            ("unretired", json!({ "phase": phase.as_str(), "by": by }))
        }
        Change::Unsettled => ("database_unsettled", json!({})),
        Change::Settled => ("database_settled", json!({})),
        Change::Split { other } => ("split", json!({ "other": hash(other) })),
        Change::KeyElsewhere { key } => ("key_elsewhere", json!({ "key": hex(key) })),
    }
}

fn reopened(epoch: u64, why: &Reopen) -> Value {
    match why {
        Reopen::Lapsed(key) => json!({ "epoch": epoch, "why": "lapsed", "key": hex(key) }),
        Reopen::Refused { key, reason } => {
            json!({ "epoch": epoch, "why": "refused", "key": hex(key), "reason": reason })
        }
        Reopen::TimedOut => json!({ "epoch": epoch, "why": "timed_out" }),
        Reopen::RecordReplaced(key) => {
            json!({ "epoch": epoch, "why": "record_replaced", "key": hex(key) })
        }
        Reopen::Restated => json!({ "epoch": epoch, "why": "restated" }),
        Reopen::DatabaseChanged => json!({ "epoch": epoch, "why": "database_changed" }),
    }
}

fn hex(key: &KeyId) -> String {
    HEXLOWER.encode(&key.0)
}

fn hash(hash: &Hash) -> String {
    HEXLOWER.encode(&hash.0)
}
