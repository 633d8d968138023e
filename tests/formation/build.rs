//! Sets the `rules_off` cfg, which allows to switch off rules. It applies to this copy of the
//! formation sources only.

#![allow(clippy::print_stdout, reason = "this is how a build script speaks to Cargo")]

fn main() {
    println!("cargo::rustc-cfg=rules_off");
    println!("cargo::rerun-if-changed=build.rs");
}
