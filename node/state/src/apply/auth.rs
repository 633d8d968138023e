//! Changes of users and roles, and tokens for users who have authenticated with a password.

use node_proto::command::{AssignToken, AuthChange};

use super::outcome::{ApplyError, ApplyFailure, Response};
use super::txn::response_header;
use crate::auth::AuthError;
use crate::mvcc::Batch;
use crate::state_machine::Position;

pub(super) fn change(batch: &mut Batch<'_>, change: AuthChange) -> Result<Response, ApplyFailure> {
    let mut auth = batch.auth().clone();
    let revoked = auth.change(change).map_err(ApplyError::Auth)?;
    if auth != *batch.auth() {
        batch.set_auth(auth);
    }
    batch.revoke_tokens(revoked);
    Ok(Response::AuthChanged(response_header(batch.revision())))
}

/// Assigns a token to a user whose password was verified. Fails if users or roles have changed
/// since then: the password must be verified again.
pub(super) fn assign_token(
    batch: &mut Batch<'_>,
    assign: &AssignToken,
    at: Position,
) -> Result<Response, ApplyFailure> {
    let refused = |why| Err(ApplyError::Auth(why).into());
    let auth = batch.auth();
    if !auth.is_enabled() {
        return refused(AuthError::NotEnabled);
    }
    if assign.revision != auth.revision() {
        return refused(AuthError::OldRevision);
    }
    let has_password = auth.user(&assign.user).is_some_and(|user| user.hash().is_some());
    let (true, Ok(secret)) = (has_password, <[u8; 32]>::try_from(&assign.secret[..])) else {
        return refused(AuthError::Failed);
    };
    batch.assign_token(at.index, secret, &assign.user);
    Ok(Response::TokenAssigned { header: response_header(batch.revision()), index: at.index })
}
