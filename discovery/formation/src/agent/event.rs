//! What can happen to an agent while its cluster forms, and what it does then.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::agent::directory::Directory;
use crate::agent::journal::Journal;
use crate::fitness::{Clash, Unfit};
use crate::service::{Phase, RefusalCode, Row};
use crate::values::{
    Document, Epoch, Hash, Incarnation, KeyId, Machine, Millis, Permissions, Proposal, Record, Seat,
};

/// One event. Everything in it has been verified by the shell, save where it says otherwise.
#[derive(Clone, Debug)]
pub enum Event {
    /// The record for this start is built and signed (from the journal's if that still fits).
    RecordReady(Arc<Record>),
    /// The service answered; what it shows of the cluster.
    Shown(Shown),
    /// The answer carried a proposal; the shell has looked at it.
    Offered(Box<Offer>),
    /// A probe of one peer for the proposal of `epoch` ended.
    Probed { epoch: Epoch, peer: KeyId, result: Result<ProbeAnswer, String> },
    /// Another member's release, shown by the service; signature verified. Those in probe answers
    /// come with [`Event::Probed`].
    ReleaseSeen { key: KeyId, epoch: Epoch },
    /// The proposal of `epoch` has waited for as long as [`patience`](crate::agent::patience) lasts:
    /// say what is missing.
    Impatient { epoch: Epoch },
    /// A whole document, verified.
    DocumentShown { document: Arc<Document>, machine: Machine },
    /// The running cluster lists this incarnation as a member of its own; the shell has asked it.
    Admitted,
    /// The node's directory was looked at, for the launch.
    Looked(Directory),
    /// The marker is in the directory, file and folder fsynced.
    MarkerWritten,
    /// `member/wal` exists in the node's directory.
    LogSeen,
    /// The service refused: why, if it is one of forming's reasons (a full or broken service has
    /// others), and whether the same request may succeed later.
    Refused { code: Option<RefusalCode>, retryable: bool },
    /// A tombstone lies in the node's directory.
    TombstoneSeen,
}

/// What an answer shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shown {
    /// Where the cluster stands.
    pub phase: Phase,
    /// Its epoch.
    pub epoch: Epoch,
    /// The service asks for the document that this agent holds.
    pub show_document: bool,
}

/// A proposal and what the shell found out about it.
#[derive(Clone, Debug)]
pub struct Offer {
    /// The list.
    pub proposal: Proposal,
    /// Its hash, computed here, not taken from the service.
    pub h: Hash,
    /// What the newest verified statement allows.
    pub permissions: Permissions,
    /// That statement's hash.
    pub statement: Hash,
    /// Its size.
    pub size: u8,
    /// S1: records that don't verify under statement, grant and token, and why.
    pub invalid: BTreeMap<Seat, String>,
    /// S4: how far this host's clock is off the service's, either way.
    pub skew: Millis,
    /// This host's clock is the one that is behind.
    pub is_behind: bool,
    /// S7: the node's directory, looked at after the proposal came.
    pub directory: Directory,
    /// The machine that this is.
    pub machine: Machine,
}

/// The one line that a probed agent answers, over TLS with its own key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeAnswer {
    /// Its key: the one of the TLS session.
    pub key: KeyId,
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// What it has released, durably. The signed release comes with it.
    pub released: Epoch,
}

/// Whom to probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The agent that has to answer.
    pub key: KeyId,
    /// The incarnation that it has to say.
    pub incarnation: Incarnation,
    /// Where.
    pub peer_urls: Vec<String>,
    /// In the proposal, so a failure is a red field of the matrix; else a member of an earlier
    /// signed list, asked for its release only.
    pub in_proposal: bool,
}

/// What to do after one event. The order is the contract: `durable` first, whole and fsynced; if
/// that fails, the process stops and restarts from disk; only then `then`, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Output {
    /// The journal to have on disk before anything of `then`.
    pub durable: Option<Box<Journal>>,
    /// What to do next.
    pub then: Vec<Action>,
}

/// Something for the shell to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send the journal's record.
    Redeem,
    /// Probe these until each answers or the epoch is over (50 ms to 1 s apart).
    Probe { epoch: Epoch, targets: Vec<Target> },
    /// Send this row of the matrix; it replaces the one before.
    SendRow { epoch: Epoch, row: Row },
    /// Sign h and send the ack.
    SignAck { epoch: Epoch, h: Hash },
    /// Tell the service why not.
    Nack { epoch: Epoch, reason: Objection },
    /// Sign "never from an epoch ≤ this" and send it; probe answers carry it from now on.
    SignRelease { epoch: Epoch },
    /// Send the held document to the service (`adopt`): it knows none, or another one.
    ShowDocument { h: Hash },
    /// Look at the node's directory now and say what is there.
    LookAtDirectory,
    /// Write the marker, fsync it and its folder.
    WriteMarker { incarnation: Incarnation },
    /// Stop listening for probes and execute the node.
    Launch(From),
    /// Report the node's Raft cluster id to the service, once it has one.
    Report,
    /// The node's data is lost: ask for a replacement, look again in a minute.
    ReplacementWanted { why: String },
    /// End the process with this exit code.
    Stop { exit: u8, reason: String },
}

/// What a node starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum From {
    /// Nothing: its first start, with the document's list.
    List,
    /// Its own log.
    Log,
}

/// Why an agent doesn't sign a proposal. Numbered as in the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Objection {
    /// S1.
    #[error("S1: the record of seat {seat} is not valid: {why}")]
    InvalidRecord { seat: Seat, why: String },
    /// S1.
    #[error("S1: my own record is not in the list as I sent it")]
    NotMyRecord,
    /// S1.
    #[error("S1: the list is for another statement, cluster or size than the one I verified")]
    ForeignList,
    /// S2.
    #[error("S2: seat {seat} can't be a member: {why}")]
    Unfit { seat: Seat, why: Unfit },
    /// S2.
    #[error("S2: seats {one} and {other} share {clash}")]
    Duplicate { one: Seat, other: Seat, clash: Clash },
    /// S4.
    #[error(
        "S4: this host's clock is {} {} the service's, and {allowed} are allowed: synchronise the \
         clocks (chrony, systemd-timesyncd)",
        rounded(*skew),
        if *is_behind { "behind" } else { "ahead of" }
    )]
    Skew { skew: Millis, is_behind: bool, allowed: Millis },
    /// S5.
    #[error("S5: epoch {epoch} is not above {highest}, which I have signed or released")]
    OldEpoch { epoch: Epoch, highest: Epoch },
    /// S5.
    #[error("S5: epoch {epoch} is far beyond {limit}: no cluster comes there")]
    EpochTooFar { epoch: Epoch, limit: Epoch },
    /// S6.
    #[error(
        "S6: of the {need} releases that end the list of epoch {epoch}, which I signed, {have} are here; \
         missing: {missing}. Start the agents there again or, if they are gone for good, run \
         `muster-agent reset` on this host"
    )]
    Unreleased { epoch: Epoch, have: usize, need: usize, missing: String },
    /// S7.
    #[error("S7: I hold the document of epoch {epoch}")]
    Holding { epoch: Epoch },
    /// S7.
    #[error("S7: the node's directory is not blank: {what}")]
    NotBlank { what: String },
    /// This is not the machine that the key was made on.
    #[error("this is not the machine that the key was made on")]
    OtherMachine,
}

/// `24 h`, `12 min`, `31 s`.
fn rounded(time: Millis) -> String {
    let seconds = time.0.div_ceil(1_000);
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", (seconds + 30) / 60),
        _ => format!("{} h", (seconds + 1_800) / 3_600),
    }
}
