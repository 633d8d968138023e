//! The HTTPS client. It connects to a pinned key and to nothing else, presents a certificate over
//! its own key, and turns problem documents into typed errors.

mod admins;
mod agents;
mod date;
mod error;
mod http;
mod pinned;

pub use error::ClientError;
pub use http::{ClientConfig, DiscoveryClient};
pub use pinned::{PinMismatch, client_tls_config};

#[cfg(test)]
mod tests;
