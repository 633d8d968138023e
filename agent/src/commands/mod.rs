//! The commands of muster-agent, one file each.

pub(crate) mod address;
pub(crate) mod adopt;
pub(crate) mod backup;
pub(crate) mod check;
pub(crate) mod context;
pub(crate) mod member;
pub(crate) mod policy;
pub(crate) mod printer;
pub(crate) mod recover;
pub(crate) mod reset;
pub(crate) mod run;
pub(crate) mod status;
