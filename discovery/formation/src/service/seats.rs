//! Who sits.
