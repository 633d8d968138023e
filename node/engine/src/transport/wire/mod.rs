//! Format of a connection between two members: the byte stream, the hello and the frames.
//!
//! The tasks that accept, dial and serve streams use these modules. The modules themselves start no
//! task.

pub(in crate::transport) mod frame;
pub(in crate::transport) mod hello;
pub(in crate::transport) mod stream;
