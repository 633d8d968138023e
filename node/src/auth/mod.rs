//! Who may do what: users, roles and what these allow, and the one function that decides.
//!
//! The state is replicated: it changes by log entries alone, in the transaction that notes how far the
//! log is applied. Its rules are etcd's (server/auth): a user has roles, a role permits to read or write
//! ranges of keys, and whoever has the role `root` may do everything.
//!
//! [`authorise`] is asked three times: before a request is begun, which refuses it without a log entry;
//! of what is read, on the very view that is read; and where an entry is applied, which is what counts.
//! An entry says who asked for it and by which revision of the users and roles that was found out; on a
//! later one it is refused, and its client asks again.
//!
//! Who asks is said by a token: a signed one ([`Jwt`]), if there are keys for it, else a simple one. What
//! a simple token proves is kept beside the state, in each member's memory ([`Tokens`]): the log has
//! a hash of it and no clock.

mod authorise;
mod change;
mod jwt;
mod ranges;
mod state;
mod tokens;

pub use authorise::{Access, Caller, authorise};
pub use change::{Change, Forget, Password};
pub use jwt::{Claims, Jwt, JwtError, JwtOptions, Method, TokenError};
pub use state::{AuthError, AuthState, Role, User};
pub use tokens::{SecretHash, TokenSecret, Tokens};

#[cfg(test)]
mod tests;
