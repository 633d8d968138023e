//! `make mutants`: small bugs, put in one at a time, and the tests that should find them.
//!
//! A mutant is data (`tests/mutants/*.txt`, described in CONTRIBUTING.md): a text that stands
//! exactly once in one file of the product, and another in its place that asks
//! `crate::mutant(ID)` whether this run has the bug. So the product's sources know nothing of it,
//! and one build holds them all: [`tree`] copies the workspace and rewrites it, [`build`] builds
//! the copy once, [`run`] starts the tests of each mutant with `MUTANT=ID`.

pub mod build;
pub mod list;
pub mod run;
pub mod tree;
