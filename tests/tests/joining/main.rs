//! Changes of a running cluster by join tickets and orders, with the built programs. Whichever
//! process is killed at whichever time, a host becomes a member once, or it doesn't and knows why.

mod asking;
mod certificates;
mod killed;
mod manual;
mod newer;
mod orders;
mod retired;
mod running;
mod silent;
mod tickets;
mod upgrade;
mod users;
