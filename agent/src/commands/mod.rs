//! One file per verb.

pub(crate) mod member;
pub(crate) mod recover;
pub(crate) mod reset;
pub(crate) mod run;
pub(crate) mod status;
