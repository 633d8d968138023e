//! Messages between members, as transcripts: one file in `transcripts/` for each case.
//!
//! A file consists of blocks of commands, each followed by its output. A command in brackets has
//! its output hidden. If the output differs from the file, the test fails and leaves the file as it
//! is. `UPDATE_GOLDENFILES=1` rewrites the files, but never in CI. Read the difference before you
//! commit it. The function `run` defines the commands.

mod cluster;

use std::error::Error;
use std::path::Path;

use cluster::ScriptedCluster;
use goldenscript::{ArgumentConsumer, Command, Context, Runner};
use node_consensus::{ConfChange, EntryKind, Members};
use test_each_file::test_each_path;

test_each_path! { in "node/consensus/tests/transcripts" as transcript => check }

fn check(path: &Path) {
    let set = |variable| std::env::var_os(variable).is_some();
    assert!(!(set("CI") && set("UPDATE_GOLDENFILES")), "CI compares transcripts, and writes none");
    goldenscript::run(&mut Script::default(), path).expect("the transcript is as it was");
}

#[derive(Default)]
struct Script {
    cluster: ScriptedCluster,
}

type ScriptError = Box<dyn Error>;

fn number(text: &str) -> Result<u64, ScriptError> {
    Ok(text.parse()?)
}

fn numbers(text: &str) -> Result<Vec<u64>, ScriptError> {
    text.split(',').filter(|part| !part.is_empty()).map(number).collect()
}

impl Script {
    /// Starts a new cluster of followers. With `leader=ID`, that member is then elected.
    fn begin(&mut self, args: &mut ArgumentConsumer<'_>) -> Result<(), ScriptError> {
        let ids = |text: Option<&str>| numbers(text.unwrap_or(""));
        let members = Members {
            voters: ids(args.take_key("voters"))?,
            learners: ids(args.take_key("learners"))?,
        };
        let cache_bytes = args.take_key("cache").map_or(Ok(usize::MAX), str::parse)?;
        self.cluster = ScriptedCluster::new(&members, cache_bytes);
        if let Some(leader) = args.take_key("leader") {
            self.cluster.elect(number(leader)?);
        }
        Ok(())
    }
}

impl Runner for Script {
    type Command = Command;

    fn run(&mut self, command: &Command, _: &Context) -> Result<String, ScriptError> {
        let mut args = command.consume_args();
        if command.name == "cluster" {
            self.begin(&mut args)?;
            args.reject_next()?;
            return Ok(self.cluster.take_transcript());
        }
        let cluster = &mut self.cluster;
        if command.name == "settle" {
            cluster.settle();
            return Ok(cluster.take_transcript());
        }
        let id = number(args.next_pos().ok_or("which member?")?)?;
        match command.name.as_str() {
            // tick MEMBER [N]: advances one member's clock by N ticks.
            "tick" => {
                for _ in 0..number(args.next_pos().unwrap_or("1"))? {
                    cluster.member(id).tick();
                }
                cluster.work(id);
            }
            "campaign" => {
                cluster.member(id).campaign();
                cluster.work(id);
            }
            // propose MEMBER DATA...: proposes all DATA arguments in one call.
            "propose" => {
                let mut data = Vec::new();
                while let Some(text) = args.next_pos() {
                    data.push(text.to_owned());
                }
                cluster.propose(id, EntryKind::Normal, data)?;
            }
            // change MEMBER voter=ID (or learner=ID, remove=ID): proposes a change of members. The
            // test's state machine parses this text when it applies the change.
            "change" => {
                let (what, who) = args.next_key().ok_or("voter=, learner= or remove=")?;
                number(who)?;
                cluster.propose(id, EntryKind::ConfChange, vec![format!("{what}={who}")])?;
            }
            "read" => cluster.read(id),
            "transfer" => {
                let to = number(args.take_key("to").ok_or("to whom?")?)?;
                let begun = cluster.member(id).transfer_leader(to);
                cluster.record(format!("{id} {}", if begun { "hands over" } else { "refuses" }));
                cluster.work(id);
            }
            // deliver MEMBER: delivers all messages for one member.
            "deliver" => cluster.deliver(id),
            // cut MEMBER: drops all messages to and from the member, until `heal`.
            "cut" => cluster.cut(id),
            "heal" => cluster.heal(id),
            // stall MEMBER: the member's disk acknowledges no writes, until `resume`.
            "stall" => cluster.stall(id, true),
            "resume" => cluster.stall(id, false),
            // join MEMBER from=OTHER: starts a new member from the state of an existing one.
            "join" => {
                let from = number(args.take_key("from").ok_or("from whom?")?)?;
                cluster.join(id, from);
            }
            // restart MEMBER: simulates a power failure, in which everything that was not durable
            // is lost.
            "restart" => cluster.restart(id),
            "compact" => {
                let to = number(args.next_pos().ok_or("up to where?")?)?;
                cluster.compact(id, to);
            }
            // forget_snapshot MEMBER: the member's snapshot is no longer available.
            "forget_snapshot" => cluster.member(id).set_snapshot(None),
            // forge MEMBER FIELD=...: delivers a message that is out of date, or that no correct
            // member sends.
            "forge" => {
                let mut fields = Vec::new();
                while let Some((key, value)) = args.next_key() {
                    fields.push((key.to_owned(), value.to_owned()));
                }
                cluster.forge(id, &fields)?;
            }
            "status" => cluster.status(id),
            other => return Err(format!("unknown command {other}").into()),
        }
        args.reject_next()?;
        Ok(cluster.take_transcript())
    }
}

/// Parses the text of a membership change, as the test's state machine does when it applies one.
fn parse_change(text: &str) -> ConfChange {
    let (what, who) = text.split_once('=').expect("the script has checked it");
    let id = who.parse().expect("the script has checked it");
    match what {
        "voter" => ConfChange::Voter(id),
        "learner" => ConfChange::Learner(id),
        _ => ConfChange::Remove(id),
    }
}
