//! Changes of a cluster that runs, by tickets and orders, end to end on the built programs: whoever is
//! killed, whenever, a host is a member once, or isn't and knows why.

mod asking;
mod certificates;
mod killed;
mod orders;
mod retired;
mod running;
mod silent;
mod tickets;
mod upgrade;
mod users;
