//! Users, roles, their permissions, and the one function that decides whether a request is allowed.
//!
//! This state is replicated. Only log entries change it, in the storage transaction that also
//! writes the applied index. The rules are etcd's (server/auth): a user has roles, and a role
//! permits reading or writing ranges of keys. A user with the role `root` may do everything.
//!
//! [`authorise()`] is called at three points:
//!
//! - Before a request is begun, so that a refusal takes no log entry.
//! - For a read, on the view that is read.
//! - When an entry is applied; this decision is final.
//!
//! An entry contains its caller, and the revision of users and roles at which the caller was
//! identified. If users or roles have changed since, the entry is refused and the client has to
//! retry. A member's own entries are marked as such. An entry that names no caller has no rights.
//!
//! A token identifies the caller: a signed one ([`Jwt`]) if keys are configured, otherwise a simple
//! one. Each member keeps the users of simple tokens in memory ([`SimpleTokens`]), outside the
//! replicated state. They can't be in that state, because the log has no clock and contains only a
//! hash of each token.

mod authorise;
mod change;
mod jwt;
mod ranges;
mod state;
mod tokens;

pub use authorise::{Caller, RequestedAccess, authorise};
pub use change::{AuthOperation, Password, RevokedTokens};
pub use jwt::{Claims, Jwt, JwtError, JwtOptions, TokenError};
pub use muster_jws::Algorithm;
pub use state::{AuthError, AuthRole, AuthState, User};
pub use tokens::{SecretHash, SimpleTokens, TokenSecret};

#[cfg(test)]
mod tests;
