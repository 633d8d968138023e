//! Types of the messages between the discovery service, agents and admins:
//!
//! * keys, signed statements, grants, records, acks and documents;
//! * tokens and join bundles;
//! * the API's bodies and problem documents;
//! * the HTTPS client, which connects only to a pinned key.
//!
//! Everything signed is a compact JWS ([`jws::Jws`]) with a `typ` of its own. It is kept and
//! compared as the bytes that were received, never serialised again, and the SHA-256 of those bytes
//! is its identity. A checked value has another type than an unchecked one: a [`record::Record`] is
//! a claim, a [`record::VerifiedRecord`] is a fact.
//!
//! | trust begins at | goes by | ends at |
//! |---|---|---|
//! | owner keys of an admin's [`context::Context`] | [`statement::StatementChain`] | the admins in a statement |
//! | the statement hash in a [`bundle::Bundle`] | [`statement::StatementChain`] | the same admins, for an agent |
//! | a statement | [`grant::VerifiedGrant`] → [`record::VerifiedRecord`] | one seat's keys and addresses |
//! | a statement | [`grant::VerifiedGrant`] or [`order::VerifiedOrder`] → [`intent::VerifiedIntent`] | one change of a running cluster |
//! | a statement's CA | [`observation::SignedObservation`] | what one member's agent can't reach |
//! | a statement | [`service::VerifiedService`] | the service's URLs and TLS keys |
//! | records | [`proposal::VerifiedProposal`] → [`document::VerifiedDocument`] | the committed list |
//!
//! This crate decides no step of the protocol. `discovery-formation` does that, with plain values
//! that [`convert`] makes from verified ones. Only the client reads a clock. All other functions
//! get the time as an argument, by the clock that the protocol names.

pub mod access;
pub mod admin;
pub mod adoption;
pub mod api;
pub mod approval;
pub mod bundle;
pub mod checkpoint;
pub mod client;
pub mod confirmation;
pub mod context;
pub mod convert;
pub mod csr;
pub mod digest;
pub mod document;
pub mod etcd_token;
pub mod features;
pub mod grant;
pub mod intent;
pub mod jws;
pub mod key;
pub mod leaves;
pub mod machine;
pub mod member_address;
pub mod member_proof;
pub mod name;
pub mod observation;
pub mod order;
pub mod problem;
pub mod proposal;
pub mod raft_id;
pub mod readmission;
pub mod record;
pub mod recovery;
pub mod redeem;
pub mod retire;
pub mod role;
pub mod service;
pub mod statement;
pub mod strict;
pub mod text;
pub mod tls;
pub mod token;
pub mod url;

#[cfg(any(test, feature = "fixtures"))]
pub mod fixtures;

#[cfg(test)]
mod tests;

/// Smallest and largest size of a cluster that a statement may ask for.
pub const SIZES: std::ops::RangeInclusive<u8> = 1..=9;
