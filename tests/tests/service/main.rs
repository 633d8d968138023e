//! Running clusters while their service moves, is restored or is retired, and while it replaces
//! their CAs and renews their certificates.

mod ca_rotation;
mod certificates;
mod moved_service;
mod newer_records;
mod restored_service;
mod retirement;
