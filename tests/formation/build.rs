//! Sets the `rules_off` cfg, with which rules can be switched off. The cfg applies only to this
//! copy of the formation sources.

#![allow(clippy::print_stdout, reason = "this is how a build script speaks to Cargo")]

fn main() {
    println!("cargo::rustc-cfg=rules_off");
    println!("cargo::rerun-if-changed=build.rs");
}
