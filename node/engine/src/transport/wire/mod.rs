//! Contents of a connection between two members: the byte stream, the hello, and frames.
//!
//! The tasks that accept, dial and serve streams are built on these parts, which start no task.

pub(in crate::transport) mod frame;
pub(in crate::transport) mod hello;
pub(in crate::transport) mod stream;
