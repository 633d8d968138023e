//! Lets rules be switched off in this compilation of the formation sources, and in no other.

#![allow(clippy::print_stdout, reason = "this is how a build script speaks to Cargo")]

fn main() {
    println!("cargo::rustc-cfg=rules_off");
    println!("cargo::rerun-if-changed=build.rs");
}
