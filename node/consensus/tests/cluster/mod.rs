//! A cluster that runs in one thread. The test controls its disks and its network.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::error::Error;
use std::fmt::Write as _;

use bytes::{Bytes, BytesMut};
use node_consensus::{
    ConfChange, Config, Consensus, Entry, EntryKind, HardState, InitialState, Members, Message,
    MessageKind, PersistRequest, Position, Ready, Terms,
};

use crate::parse_change;

/// State of a member that survives a restart.
#[derive(Default)]
struct Disk {
    hard_state: HardState,
    base: Position,
    entries: Vec<Entry>,
    applied: Position,
    members: Members,
}

struct ScriptedMember {
    consensus: Option<Consensus>,
    disk: Disk,
    boot: u64,
    /// Whether the disk has stopped acknowledging urgent writes.
    stalled: bool,
    /// `Ready` values whose writes are not yet known to be durable.
    waiting: VecDeque<Ready>,
    /// Latest hard state that needed no urgent write. The next urgent write includes it.
    lazy: Option<HardState>,
}

/// The members of a cluster, the messages under way between them, and the transcript so far.
#[derive(Default)]
pub(crate) struct ScriptedCluster {
    members: BTreeMap<u64, ScriptedMember>,
    cache_bytes: usize,
    network: VecDeque<Message>,
    cut: BTreeSet<u64>,
    transcript: String,
}

impl ScriptedCluster {
    pub(crate) fn new(members: &Members, cache_bytes: usize) -> Self {
        let mut cluster = Self { cache_bytes, ..Self::default() };
        for id in members.voters.iter().chain(&members.learners) {
            let disk = Disk { members: members.clone(), ..Disk::default() };
            let waiting = VecDeque::new();
            let member = ScriptedMember {
                consensus: None,
                disk,
                boot: 0,
                stalled: false,
                waiting,
                lazy: None,
            };
            cluster.members.insert(*id, member);
            cluster.start(*id);
        }
        cluster
    }

    pub(crate) fn record(&mut self, what: impl AsRef<str>) {
        let _ = writeln!(self.transcript, "{}", what.as_ref());
    }

    pub(crate) fn take_transcript(&mut self) -> String {
        std::mem::take(&mut self.transcript)
    }

    fn member_mut(&mut self, id: u64) -> &mut ScriptedMember {
        self.members.get_mut(&id).expect("the script names members that are there")
    }

    pub(crate) fn member(&mut self, id: u64) -> &mut Consensus {
        self.member_mut(id).consensus.as_mut().expect("it runs")
    }

    fn start(&mut self, id: u64) {
        let cache_bytes = self.cache_bytes;
        let member = self.member_mut(id);
        member.boot += 1;
        let disk = &member.disk;
        let mut terms = Terms::default();
        for entry in &disk.entries {
            terms.push(entry.index, entry.term);
        }
        let unapplied = disk.entries.iter().filter(|entry| entry.index > disk.applied.index);
        let initial = InitialState {
            hard_state: disk.hard_state,
            base: disk.base,
            terms,
            entries: unapplied.cloned().collect(),
            applied: disk.applied,
            members: disk.members.clone(),
        };
        let mut config = Config::new(id, member.boot, id);
        config.cache_bytes = cache_bytes;
        member.consensus = Some(Consensus::new(&config, &initial).expect("its disk is whole"));
    }

    /// Adds a new member, whose disk starts as a copy of the applied state of member `from`.
    pub(crate) fn join(&mut self, id: u64, from: u64) {
        let theirs = &self.member_mut(from).disk;
        let disk = Disk {
            hard_state: HardState { vote: 0, ..theirs.hard_state },
            base: theirs.applied,
            entries: Vec::new(),
            applied: theirs.applied,
            members: theirs.members.clone(),
        };
        let waiting = VecDeque::new();
        let member =
            ScriptedMember { consensus: None, disk, boot: 0, stalled: false, waiting, lazy: None };
        self.members.insert(id, member);
        self.start(id);
        self.record_role(id);
    }

    pub(crate) fn restart(&mut self, id: u64) {
        let member = self.member_mut(id);
        member.waiting.clear();
        member.lazy = None;
        member.stalled = false;
        self.start(id);
        self.network.retain(|message| message.to != id && message.from != id);
        self.record_role(id);
        let members = format_members(self.member(id).members());
        self.record(format!("{id} counts with {members}"));
        self.work(id);
    }

    pub(crate) fn elect(&mut self, id: u64) {
        self.member(id).campaign();
        self.work(id);
        self.settle();
        self.transcript.clear();
        self.record_role(id);
    }

    pub(crate) fn stall(&mut self, id: u64, stalled: bool) {
        self.member_mut(id).stalled = stalled;
        self.work(id);
    }

    pub(crate) fn cut(&mut self, id: u64) {
        self.cut.insert(id);
        self.network.retain(|message| message.to != id && message.from != id);
    }

    pub(crate) fn heal(&mut self, id: u64) {
        self.cut.remove(&id);
    }

    pub(crate) fn compact(&mut self, id: u64, through: u64) {
        let base = self.member(id).compact(through);
        let disk = &mut self.member_mut(id).disk;
        disk.base = base;
        disk.entries.retain(|entry| entry.index > base.index);
        self.record(format!("{id} log begins after {}", format_position(base)));
    }

    pub(crate) fn propose(
        &mut self,
        id: u64,
        kind: EntryKind,
        data: Vec<String>,
    ) -> Result<(), Box<dyn Error>> {
        let data = data.into_iter().map(Bytes::from).collect();
        self.member(id).propose_many(kind, data, 0)?;
        self.work(id);
        Ok(())
    }

    pub(crate) fn read(&mut self, id: u64) {
        let context = self.member(id).read_index();
        self.record(format!("{id} asks for read {}", context.sequence));
        self.work(id);
    }

    /// Delivers all pending messages for a member, in order.
    pub(crate) fn deliver(&mut self, id: u64) {
        let (mine, others): (VecDeque<Message>, _) =
            self.network.drain(..).partition(|message| message.to == id);
        self.network = others;
        for message in mine {
            self.receive(id, message);
        }
        self.work(id);
    }

    fn receive(&mut self, id: u64, message: Message) {
        if message.kind == MessageKind::Propose {
            let (hops, kind) = (message.log_term, message.entries[0].kind);
            let data = message.entries.into_iter().map(|entry| entry.data).collect();
            if let Err(error) = self.member(id).propose_many(kind, data, hops) {
                self.record(format!("{id} drops a proposal: {error}"));
            }
            return;
        }
        if let Err(error) = self.member(id).step(message) {
            self.record(format!("{id} refuses: {error}"));
        }
    }

    /// Delivers messages until none is pending and no member has work.
    pub(crate) fn settle(&mut self) {
        for _ in 0..200 {
            let ids: Vec<u64> = self.members.keys().copied().collect();
            let busy = !self.network.is_empty();
            for id in ids {
                self.deliver(id);
            }
            if !busy {
                return;
            }
        }
        self.record("it never settles");
    }

    /// Handles every `Ready` of a member until it has no more work.
    pub(crate) fn work(&mut self, id: u64) {
        loop {
            while self.member(id).has_ready() {
                let ready = self.member(id).ready();
                self.carry_out(id, ready);
            }
            // In this test, a leader sends a new commit index at once, without waiting for the next
            // append.
            let has_more = self.complete_write(id) || self.member(id).send_commit_index(false);
            if !has_more {
                return;
            }
        }
    }

    fn carry_out(&mut self, id: u64, mut ready: Ready) {
        for message in std::mem::take(&mut ready.messages) {
            self.send(id, message);
        }
        for state in std::mem::take(&mut ready.reads) {
            self.record(format!(
                "{id} may answer read {} at {}",
                state.context.sequence, state.index
            ));
        }
        for fetch in std::mem::take(&mut ready.fetches) {
            let entries: Vec<Entry> = {
                let wanted = fetch.low..fetch.high;
                let held = &self.member_mut(id).disk.entries;
                held.iter().filter(|entry| wanted.contains(&entry.index)).cloned().collect()
            };
            self.record(format!("{id} reads {} entries from {} on", entries.len(), fetch.low));
            self.member(id).supply_fetched(fetch.id, &entries);
        }
        if let Some(peer) = ready.snapshot_wanted {
            let disk = &self.member_mut(id).disk;
            let snapshot = (disk.applied, disk.members.clone());
            let what =
                format!("{} with {}", format_position(snapshot.0), format_members(&snapshot.1));
            self.record(format!("{id} makes a snapshot for {peer}: {what}"));
            self.member(id).set_snapshot(Some(snapshot));
        }
        for entry in std::mem::take(&mut ready.committed) {
            self.apply(id, &entry);
        }
        self.member_mut(id).waiting.push_back(ready);
    }

    fn apply(&mut self, id: u64, entry: &Entry) {
        let at = Position { index: entry.index, term: entry.term };
        self.record(format!("{id} applies {}", format_entry(entry)));
        if entry.kind == EntryKind::ConfChange {
            let text = std::str::from_utf8(&entry.data).expect("a script's text");
            let change: ConfChange = parse_change(text);
            self.member(id).change_members(change);
            let members = self.member(id).members().as_ref().clone();
            self.record(format!("{id} counts with {}", format_members(&members)));
            self.member_mut(id).disk.members = members;
        }
        self.member_mut(id).disk.applied = at;
        self.member(id).report_applied(entry.index);
    }

    /// Completes the oldest pending write of a member. Returns false if there is none, or if it is
    /// stalled.
    fn complete_write(&mut self, id: u64) -> bool {
        let member = self.member_mut(id);
        let stalled = member.stalled;
        let Some(mut ready) =
            member.waiting.pop_front_if(|ready| !(stalled && ready.persist.urgent))
        else {
            return false;
        };
        let persist = std::mem::take(&mut ready.persist);
        member.lazy = persist.hard_state.or(member.lazy);
        let installed = persist.snapshot;
        if persist.urgent {
            self.write(id, persist);
        }
        for message in ready.after_persist {
            self.send(id, message);
        }
        self.member(id).report_persisted(ready.number);
        if let Some(at) = installed {
            self.member(id).report_applied(at.index);
        }
        true
    }

    fn write(&mut self, id: u64, persist: PersistRequest) {
        let mut said = Vec::new();
        if let Some(at) = persist.snapshot {
            let members = self.member(id).members().as_ref().clone();
            said.push(format!(
                "snapshot {} with {}",
                format_position(at),
                format_members(&members)
            ));
            let disk = &mut self.member_mut(id).disk;
            (disk.base, disk.applied, disk.members) = (at, at, members);
            disk.entries.clear();
        }
        if let Some(state) = self.member_mut(id).lazy.take() {
            let before = std::mem::replace(&mut self.member_mut(id).disk.hard_state, state);
            if (before.term, before.vote) != (state.term, state.vote) {
                said.push(format!("term {} vote {}", state.term, state.vote));
            } else if persist.entries.is_empty() && persist.snapshot.is_none() {
                said.push(format!("commit {}", state.commit));
            }
        }
        if let Some(first) = persist.entries.first() {
            said.extend(persist.entries.iter().map(format_entry));
            let entries = &mut self.member_mut(id).disk.entries;
            entries.retain(|entry| entry.index < first.index);
            entries.extend(persist.entries.iter().cloned());
        }
        self.record(format!("{id} has on disk: {}", said.join(", ")));
    }

    fn send(&mut self, id: u64, message: Message) {
        assert_eq!(message.from, id, "a member speaks for itself");
        let mut bytes = BytesMut::new();
        message.encode(&mut bytes);
        let message = Message::decode(bytes.freeze()).expect("what is sent can be read");
        let (from, to) = (message.from, message.to);
        let lost =
            self.cut.contains(&from) || self.cut.contains(&to) || !self.members.contains_key(&to);
        let note = if lost { " (lost)" } else { "" };
        self.record(format!("{from} -> {to} {}{note}", format_message(&message)));
        if !lost {
            if message.kind == MessageKind::Snapshot {
                self.member(from).report_snapshot(to, true);
            }
            self.network.push_back(message);
        }
    }

    pub(crate) fn forge(
        &mut self,
        to: u64,
        fields: &[(String, String)],
    ) -> Result<(), Box<dyn Error>> {
        let mut message = Message::new(MessageKind::Heartbeat, 0, to);
        for (field, value) in fields {
            let number = || -> Result<u64, Box<dyn Error>> { Ok(value.parse()?) };
            match field.as_str() {
                "kind" => message.kind = kind_of(value)?,
                "from" => message.from = number()?,
                "term" => message.term = number()?,
                "index" => message.index = number()?,
                "log_term" => message.log_term = number()?,
                "commit" => message.commit = number()?,
                "hint" => message.reject_hint = number()?,
                "reject" => message.reject = true,
                "entry" => message.entries.push(Entry {
                    index: message.index + 1,
                    term: number()?,
                    data: Bytes::from_static(b"forged"),
                    ..Entry::default()
                }),
                other => return Err(format!("unknown field {other}").into()),
            }
        }
        self.record(format!("{} -> {to} {}", message.from, format_message(&message)));
        self.receive(to, message);
        self.work(to);
        Ok(())
    }

    pub(crate) fn status(&mut self, id: u64) {
        self.record_role(id);
        for peer in self.member(id).status().peers {
            assert!(peer.next > peer.matched, "next > match");
            self.record(format!(
                "  {}: match {} next {} {:?}",
                peer.member, peer.matched, peer.next, peer.state
            ));
        }
    }

    fn record_role(&mut self, id: u64) {
        let status = self.member(id).status();
        self.record(format!(
            "{id} {:?} term {} leader {} log {}..{} commit {} applied {}",
            status.role,
            status.term,
            status.leader,
            status.first,
            status.last,
            status.commit,
            status.applied
        ));
    }
}

fn kind_of(text: &str) -> Result<MessageKind, Box<dyn Error>> {
    use MessageKind as Kind;
    [
        Kind::Append,
        Kind::AppendResponse,
        Kind::Heartbeat,
        Kind::HeartbeatResponse,
        Kind::RequestVote,
        Kind::RequestPreVote,
        Kind::TimeoutNow,
        Kind::ReadIndex,
        Kind::Propose,
    ]
    .into_iter()
    .find(|kind| format!("{kind:?}") == text)
    .ok_or_else(|| format!("no message is called {text}").into())
}

fn format_position(at: Position) -> String {
    format!("{}@{}", at.index, at.term)
}

fn format_members(members: &Members) -> String {
    format!("voters {:?} learners {:?}", members.voters, members.learners)
}

fn format_entry(entry: &Entry) -> String {
    let at = format_position(Position { index: entry.index, term: entry.term });
    match entry.kind {
        EntryKind::NoOp => format!("{at} no-op"),
        EntryKind::Normal => format!("{at} \"{}\"", String::from_utf8_lossy(&entry.data)),
        EntryKind::ConfChange => format!("{at} change {}", String::from_utf8_lossy(&entry.data)),
    }
}

fn format_message(message: &Message) -> String {
    let mut text = format!("{:?} term {}", message.kind, message.term);
    let before = Position { index: message.index, term: message.log_term };
    match message.kind {
        MessageKind::Append => {
            let entries: Vec<String> = message.entries.iter().map(format_entry).collect();
            let _ = write!(text, " after {} commit {}", format_position(before), message.commit);
            let _ = write!(text, " [{}]", entries.join(", "));
        }
        MessageKind::AppendResponse if message.reject => {
            let hint = Position { index: message.reject_hint, term: message.log_term };
            let _ =
                write!(text, " no, {} does not fit; try {}", message.index, format_position(hint));
        }
        MessageKind::AppendResponse => {
            let _ = write!(text, " has {}", message.index);
        }
        MessageKind::RequestVote | MessageKind::RequestPreVote => {
            let _ = write!(text, " last {}", format_position(before));
            if !message.context.is_empty() {
                text.push_str(" by transfer");
            }
        }
        MessageKind::RequestVoteResponse | MessageKind::RequestPreVoteResponse => {
            text.push_str(if message.reject { " no" } else { " yes" });
        }
        MessageKind::Heartbeat | MessageKind::HeartbeatResponse => {
            let _ = write!(text, " commit {}", message.commit);
            if !message.context.is_empty() {
                text.push_str(" with a read");
            }
        }
        MessageKind::Snapshot => {
            let at = message.snapshot.expect("a snapshot has a position");
            let members = message.members.as_ref().expect("a snapshot has members");
            let _ = write!(text, " {} with {}", format_position(at), format_members(members));
        }
        MessageKind::ReadIndexResponse => {
            let _ = write!(text, " at {}", message.index);
        }
        MessageKind::Propose => {
            let data = message.entries.iter().map(|entry| String::from_utf8_lossy(&entry.data));
            let data: Vec<_> = data.collect();
            let _ = write!(text, " hop {} [{}]", message.log_term, data.join(", "));
        }
        MessageKind::TimeoutNow | MessageKind::ReadIndex | MessageKind::Unknown => {}
    }
    text
}
