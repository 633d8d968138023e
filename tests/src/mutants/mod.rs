//! `make mutants`: inserts small bugs one at a time, and runs the tests that should find them.
//!
//! A mutant is data (`tests/mutants/*.txt`, described in CONTRIBUTING.md). It consists of a text
//! that occurs exactly once in one source file, and a replacement. The replacement calls
//! `crate::mutant(ID)`, which returns whether this run has the bug.
//!
//! So the source files contain nothing about mutants, and one build contains all of them. [`tree`]
//! copies the workspace and inserts the mutants, [`build`] builds the copy once, and [`run`] runs
//! the tests of each mutant with `MUTANT=ID`.

pub mod build;
pub mod list;
pub mod run;
pub mod tree;
