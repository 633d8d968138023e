//! The private discovery service: an authenticated HTTPS API over Postgres.
//!
//! | module | owns |
//! |---|---|
//! | `cli` | what can be typed: the program's whole command tree, and the admin's commands |
//! | `server` | start and stop: arguments, listener, drain |
//! | `routes`, `handlers`, `auth`, `error` | the API: the whole table; extract, authorise, one call, respond; who may do what; one shape for every refusal |
//! | `forming` | one event on one cluster: the shell around the pure state machine |
//! | `store`, `ledger` | Postgres, the only SQL; and what was let out, kept outside of it |
//! | `keydir`, `kek`, `ca` | the service's own keys, and the CA keys that it keeps for clusters |
//! | `managed_postgres` | a Postgres that lives and dies with the service |
//!
//! Deciding is left to `discovery-formation`, verifying to `discovery-types`: what stands here
//! reads, locks, writes, and says why.

mod app;
mod auth;
mod background;
mod ca;
pub mod cli;
mod clock;
mod crash;
mod domain;
mod error;
mod forming;
mod handlers;
mod intents;
mod kek;
mod keydir;
mod ledger;
mod limits;
mod managed_postgres;
mod metrics;
mod notify;
mod routes;
mod server;
mod store;

#[cfg(test)]
mod tests;
