//! Parser for a node's configuration file.
#![no_main]

use muster_fuzz as _;

libfuzzer_sys::fuzz_target!(|text: &str| muster_node::config::fuzz_file(text));
