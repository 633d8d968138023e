//! Requests that other members send: questions about leases and data, and changes of members.

use bytes::Bytes;
use node_state::identity::MemberId;

use super::context::ApiContext;
use super::{corruption, lease_questions, reconfigure};

/// Answers a request of another member, of any kind. Returns `None` for a malformed request.
pub async fn answer_member(context: &ApiContext, from: MemberId, request: Bytes) -> Option<Bytes> {
    if let Some(answer) = lease_questions::answer_leases(context, request.clone()).await {
        return Some(answer);
    }
    match corruption::answer_store(context, from, request.clone()).await {
        Some(answer) => Some(answer),
        None => reconfigure::answer_change(context, request).await,
    }
}
