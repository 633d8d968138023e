//! etcd's v3 API: gRPC, the same methods as JSON, the HTTP paths of the client port, and the
//! listener for clients.
//!
//! Nothing here touches the store's file or the log. Requests are checked, proposed through the
//! driver's handle, or read from the store's views.

pub mod clients;
pub mod gateway;
pub mod http;
pub mod rpc;
