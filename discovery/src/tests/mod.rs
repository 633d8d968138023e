//! Tests of the service as a whole, with a real Postgres, real TLS and the real client.

mod access;
mod agent;
mod confirmed;
mod database;
mod faults;
mod forged_rows;
mod forming;
mod half_loaded;
mod joining;
mod jwt_vectors;
mod large_ledger;
mod leases;
mod limits;
mod lists;
mod malformed;
mod openapi;
mod past;
mod plans;
mod processes;
mod refusals;
mod restore;
mod round_trips;
mod schema;
mod set_back;
mod starting;
mod support;
