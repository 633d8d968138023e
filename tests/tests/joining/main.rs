//! Changes of a running cluster by join tickets and orders, with the built programs. Whichever
//! process is killed at whichever time, a host becomes a member once, or shows why it doesn't.

mod addresses;
mod ca_rotation;
mod certificates;
mod hostile_bundle;
mod hung_leader_agent;
mod kills_during_join;
mod machines;
mod manual;
mod member_command;
mod metadata;
mod moved_service;
mod newer_records;
mod orders;
mod policies;
mod restored_service;
mod retirement;
mod running_cluster;
mod tickets;
mod upgrade;
mod users;
mod zones;
