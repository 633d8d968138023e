//! `muster-node` as it is built, with real processes, disks and sockets: one module for each subject.
//! All modules are one test program, because each program would compile and link the clients anew.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod common;

mod auth;
mod bad_member;
mod certificates;
mod command_line;
mod compare;
mod corruption;
mod disk;
mod etcd_files;
mod incarnation;
mod joining;
mod jwt;
mod leases;
mod maintenance;
mod members;
mod metrics;
mod mutual_tls;
mod node_keys;
mod reads;
mod recovery;
mod removed;
mod settings;
mod single;
mod snapshot;
mod three;
mod volumes;
mod watch_storm;
