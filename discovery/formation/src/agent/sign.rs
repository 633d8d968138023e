//! S1 to S7.
