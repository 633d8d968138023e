//! The private discovery service: an authenticated HTTPS API over Postgres.
//!
//! | module | owns |
//! |---|---|
//! | [`cli`] | what can be typed: the program's whole command tree, and the admin's commands |
//! | [`server`] | start and stop: arguments, listener, drain |
//! | [`routes`], `handlers`, [`auth`], [`error`] | the API: the whole table; extract, authorise, one call, respond; who may do what; one shape for every refusal |
//! | [`forming`] | one event on one cluster: the shell around the pure state machine |
//! | [`store`], [`ledger`] | Postgres, the only SQL; and what was let out, kept outside of it |
//! | [`keydir`], [`kek`], [`ca`] | the service's own keys, and the CA keys that it keeps for clusters |
//! | [`managed_postgres`] | a Postgres that lives and dies with the service |
//!
//! Deciding is left to `discovery-formation`, verifying to `discovery-types`: what stands here
//! reads, locks, writes, and says why.

pub mod app;
pub mod auth;
mod background;
pub mod ca;
pub mod cli;
pub mod clock;
mod crash;
pub mod domain;
pub mod error;
pub mod forming;
mod handlers;
pub mod kek;
pub mod keydir;
pub mod ledger;
pub mod limits;
pub mod managed_postgres;
pub mod metrics;
pub mod notify;
pub mod routes;
pub mod server;
pub mod store;

#[cfg(test)]
mod tests;
