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
//! | `store`, `ledger` | access to Postgres, the only SQL; the record of decisions kept outside Postgres |
//! | `keydir`, `kek`, `ca` | the service's own keys, and the CA keys that it keeps for clusters |
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
