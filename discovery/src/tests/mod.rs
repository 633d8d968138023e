//! The service as a whole: real Postgres, real TLS, the real client.

mod access;
mod agent;
mod database;
mod faults;
mod forming;
mod limits;
mod openapi;
mod processes;
mod refusals;
mod restore;
mod starting;
mod support;
