//! Hosts that take a dead member's place without an operator, under a replacement policy: what the
//! policy allows, which host is chosen, and what somebody with a stolen bundle can't do.

mod hostile_bundle;
mod hung_leader_agent;
mod machines;
mod metadata;
mod replacements;
mod zones;
