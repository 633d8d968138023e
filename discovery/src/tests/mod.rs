//! The service as a whole: real Postgres, real TLS, the real client.

mod access;
mod agent;
mod database;
mod forming;
mod limits;
mod openapi;
mod refusals;
mod restore;
mod support;
