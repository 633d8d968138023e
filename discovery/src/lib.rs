//! The private discovery service: an authenticated HTTPS API over Postgres.
//!
//! | module | owns |
//! |---|---|
//! | `cli` | the command line: the program's whole command tree, and the admin's commands |
//! | `server` | start and stop: arguments, listener, drain |
//! | `routes`, `handlers`, `auth`, `error` | the API: routing table, handlers, authorisation, one error format |
//! | `console` | the read-only pages for browsers; it calls handlers and store, and nothing calls it but the listener |
//! | `redeem` | the verification of redeemed boot tokens and join tickets |
//! | `gate`, `members` | the start of work on a cluster; who its members are, and which of them report |
//! | `forming` | one event on one cluster: the shell around the pure state machine |
//! | `intents` | changes of running clusters, on their way to the clusters' own agents |
//! | `etcd_tokens` | stock etcd's own discovery protocols; their clusters aren't Muster's |
//! | `host_identity` | the check of the identity documents that clouds sign for their hosts |
//! | `store`, `ledger` | access to Postgres, the only SQL; the record of decisions kept outside Postgres |
//! | `keydir`, `kek` | the service's own keys |
//! | `ca`, `ca_rotation` | the CAs that the service keeps for clusters, and their replacement |
//! | `background` | tasks that run without a request, such as sweeps |
//! | `limits`, `refusals`, `throttle_log` | limits by address; the record of refused requests |
//!
//! `discovery-formation` decides and `discovery-types` verifies. This crate reads, locks, writes
//! and answers.

mod admins;
mod app;
mod auth;
mod background;
mod ca;
mod ca_rotation;
pub mod cli;
mod clock;
mod console;
mod crash;
mod domain;
mod error;
mod etcd_tokens;
mod forming;
mod gate;
mod guesses;
mod handlers;
mod host_identity;
mod intents;
mod kek;
mod keydir;
mod ledger;
mod limits;
mod members;
mod metrics;
mod notify;
mod openapi;
mod redeem;
mod refusals;
mod routes;
mod server;
mod store;
mod throttle_log;

#[cfg(test)]
mod tests;
