//! Sets the `rules_off` cfg, so that rules can be switched off in this compilation of the formation
//! sources. No other compilation of them has it.

#![allow(clippy::print_stdout, reason = "this is how a build script speaks to Cargo")]

fn main() {
    println!("cargo::rustc-cfg=rules_off");
    println!("cargo::rerun-if-changed=build.rs");
}
