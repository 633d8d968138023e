//! The HTTPS client. It connects only to a server with a pinned key, and presents a self-signed
//! certificate of its own key. It converts problem documents into typed errors.

mod admins;
mod agents;
mod contact;
mod date;
mod error;
mod http;
mod pinned;

pub use contact::ServiceContact;
pub use error::ClientError;
pub use http::{ClientConfig, DiscoveryClient};
pub use pinned::{PinMismatch, client_tls_config};

#[cfg(test)]
mod tests;
