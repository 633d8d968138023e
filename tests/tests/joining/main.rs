//! Changes of a running cluster by join tickets and orders, with the built programs. Whichever
//! process is killed at whichever time, a host becomes a member once, or shows why it doesn't.

mod kills_during_join;
mod manual;
mod member_command;
mod orders;
mod tickets;
mod upgrade;
mod users;
