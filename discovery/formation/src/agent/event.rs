//! Events of an agent while its cluster forms, and the actions that the agent asks for.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::agent::directory::DirectoryKind;
use crate::agent::journal::Journal;
use crate::fitness::{RecordConflict, RecordFault, ZoneFault};
use crate::service::{Phase, ProbeResults, RefusalCode};
use crate::values::{
    AgentKey, AgentRecord, CommitDocument, Epoch, Hash, Incarnation, MachineIdentity, Millis,
    Permissions, ProposedList, Seat,
};

/// Input to an agent's state machine. The I/O shell has verified everything in an event, except
/// where a variant says otherwise.
#[derive(Clone, Debug)]
pub enum AgentEvent {
    /// The agent's signed record for this start is ready: the journal's record if that still
    /// describes the host, otherwise a new one.
    RecordReady(Arc<AgentRecord>),
    /// The service answered a request. The value is the cluster's state in that answer.
    StatusReceived(ClusterStatus),
    /// The service's answer carried a proposal, which the I/O shell has examined.
    ProposalReceived(Box<ExaminedProposal>),
    /// A probe of one peer for the proposal of `epoch` ended.
    ProbeEnded { epoch: Epoch, peer: AgentKey, result: Result<ProbeAnswer, String> },
    /// The service sent another member's release, and its signature is valid. Releases in probe
    /// answers come with [`AgentEvent::ProbeEnded`] instead.
    ReleaseSeen { key: AgentKey, epoch: Epoch },
    /// The proposal of `epoch` has waited as long as
    /// [`release_wait_limit`](crate::agent::release_wait_limit) allows. If releases are still
    /// missing (rule S6 of `sign.rs`), the agent refuses the proposal and names the missing
    /// members.
    ReleaseTimeout { epoch: Epoch },
    /// A whole commit document was received and verified. `machine` is the machine that the agent
    /// runs on now.
    DocumentReceived { document: Arc<CommitDocument>, machine: MachineIdentity },
    /// The running cluster lists this incarnation as a member. The I/O shell has asked the cluster
    /// itself, not the service.
    Admitted,
    /// The I/O shell has looked at the node's directory, to launch the node.
    DirectoryExamined(DirectoryKind),
    /// The marker is in the node's directory; its file and the folder are fsynced.
    MarkerWritten,
    /// The folder `member/wal` exists in the node's directory.
    LogSeen,
    /// The service refused a request. `code` is `None` if the reason is outside the formation
    /// protocol, such as a full or broken service. `retryable` says whether the same request may
    /// succeed later.
    RequestRefused { code: Option<RefusalCode>, retryable: bool },
    /// A tombstone is in the node's directory: the member was removed from its cluster.
    TombstoneSeen,
}

/// State of the cluster, as an answer of the service shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterStatus {
    pub phase: Phase,
    /// Epoch of the proposal, or of the next proposal if there is none now.
    pub epoch: Epoch,
    /// Whether the service asks the agent for the commit document that the agent holds.
    pub wants_document: bool,
}

/// Proposal that the service sent, with the I/O shell's findings about it.
#[derive(Clone, Debug)]
pub struct ExaminedProposal {
    pub proposal: ProposedList,
    /// Hash of the proposal, computed on this host and not taken from the service.
    pub proposal_hash: Hash,
    /// Permissions of the newest verified statement.
    pub permissions: Permissions,
    /// Whether the newest verified statement spreads the members over zones.
    pub spreads_zones: bool,
    /// Hash of the newest verified statement.
    pub statement: Hash,
    /// Number of members that the statement asks for.
    pub size: u8,
    /// Seats with an invalid record, each with the reason (rule S1 of `sign.rs`). The signatures of
    /// a record are verified under the statement, the grant and the token.
    pub invalid_records: BTreeMap<Seat, String>,
    /// Absolute difference between this host's clock and the service's, for rule S4 of `sign.rs`.
    pub skew: Millis,
    /// Whether this host's clock is behind the service's.
    pub is_behind: bool,
    /// Kind of content of the node's directory, examined after the proposal arrived, for rule S7 of
    /// `sign.rs`.
    pub directory: DirectoryKind,
    /// Machine that the agent runs on now.
    pub machine: MachineIdentity,
}

/// Answer of a probed agent: one line, over TLS with the agent's own key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeAnswer {
    /// Key of the probed agent, taken from the TLS session.
    pub key: AgentKey,
    /// Incarnation of the probed agent's node.
    pub incarnation: Incarnation,
    /// Highest epoch of which the probed agent has durably signed a release. The signed release
    /// comes with the answer.
    pub released_epoch: Epoch,
}

/// One agent to probe, and the identity that has to answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeTarget {
    /// Key of the agent that has to answer.
    pub key: AgentKey,
    /// Incarnation that the answer has to name.
    pub incarnation: Incarnation,
    /// Peer URLs at which to probe the agent.
    pub peer_urls: Vec<String>,
    /// Whether the agent is in the proposal, so that a failed probe shows in the probe matrix.
    /// Otherwise it is a member of an earlier signed list, and only its release is wanted.
    pub is_in_proposal: bool,
}

/// Commands for the I/O shell after one event. The shell first writes the whole `journal` and
/// fsyncs it. If that fails, the process stops and restarts from disk. Otherwise the shell carries
/// out `actions`, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct AgentOutput {
    /// Journal that must be on disk before the first action of `actions`; `None` if the journal
    /// didn't change.
    pub journal: Option<Box<Journal>>,
    /// Actions to carry out, in order.
    pub actions: Vec<AgentAction>,
}

/// Action for the I/O shell to carry out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgentAction {
    /// Redeem the token: send the journal's record to the service.
    Redeem,
    /// Probe each of `targets` repeatedly, 50 ms to 1 s apart, until the target answers or the
    /// epoch ends.
    Probe { epoch: Epoch, targets: Vec<ProbeTarget> },
    /// Send this row of the probe matrix; it replaces the row that was sent before.
    SendProbeResults { epoch: Epoch, row: ProbeResults },
    /// Sign the proposal's hash `h`, and send the signature as the ack.
    SignAck { epoch: Epoch, h: Hash },
    /// Refuse the proposal of `epoch`, and send the service the reason.
    Nack { epoch: Epoch, reason: ProposalObjection },
    /// Sign a release of `epoch` and all lower ones, and send it. From now on the agent's answers
    /// to probes contain it.
    SignRelease { epoch: Epoch },
    /// Send the held commit document to the service (`adopt`), which has none or a different one.
    SendDocument { h: Hash },
    /// Look at the node's directory now and report its kind as [`AgentEvent::DirectoryExamined`].
    ExamineDirectory,
    /// Write the marker with `incarnation`, and fsync the file and its folder.
    WriteMarker { incarnation: Incarnation },
    /// Stop listening for probes and execute the node.
    Launch(StartSource),
    /// Report the node's Raft cluster id to the service, as soon as the node has one.
    Report,
    /// Report that the node can't run here and needs a replacement, and check again in a minute.
    RequestReplacement { why: String },
    /// End the process with this exit code.
    Stop { exit: u8, reason: String },
}

/// Data that a node starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StartSource {
    /// No data: the node's first start, with the list of members.
    List,
    /// The node's own log: every later start.
    Log,
}

/// Reason why an agent doesn't sign a proposal. S1 to S7 are the protocol's rules for signing,
/// listed in `sign.rs`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProposalObjection {
    /// Rule S1 of `sign.rs`: the record of `seat` doesn't verify under statement, grant and token.
    #[error("S1: the record of seat {seat} is not valid: {why}")]
    InvalidRecord { seat: Seat, why: String },
    /// Rule S1 of `sign.rs`: this agent's record is missing from the list of members, or isn't the
    /// one that it sent.
    #[error("S1: my own record is not in the list as I sent it")]
    NotMyRecord,
    /// Rule S1 of `sign.rs`: the list of members is for another statement, cluster or size than the
    /// one that this agent verified.
    #[error("S1: the list is for another statement, cluster or size than the one I verified")]
    ForeignList,
    /// Rule S2 of `sign.rs`: no list of members can contain the record of `seat`.
    #[error("S2: seat {seat} can't be a member: {why}")]
    Unfit { seat: Seat, why: RecordFault },
    /// Rule S2 of `sign.rs`: two seats share a value that must be unique.
    #[error("S2: seats {one} and {other} share {clash}")]
    Duplicate { one: Seat, other: Seat, clash: RecordConflict },
    /// Rule S2 of `sign.rs`: the members are spread over zones, and the zone of `seat` has too many
    /// members.
    #[error("S2: seat {seat} {why}")]
    Zone { seat: Seat, why: ZoneFault },
    /// Rule S4 of `sign.rs`: this host's clock is too far off the service's.
    #[error(
        "S4: this host's clock is {} {} the service's, and {allowed} are allowed: synchronise the \
         clocks (chrony, systemd-timesyncd)",
        rounded(*skew),
        if *is_behind { "behind" } else { "ahead of" }
    )]
    Skew { skew: Millis, is_behind: bool, allowed: Millis },
    /// Rule S5 of `sign.rs`: the agent has already signed a list of members or a release of this
    /// epoch or of a higher one.
    #[error("S5: epoch {epoch} is not above {highest}, which I have signed or released")]
    OldEpoch { epoch: Epoch, highest: Epoch },
    /// Rule S5 of `sign.rs`: the epoch is higher than any that a cluster can have reached.
    #[error("S5: epoch {epoch} is far beyond {limit}: no cluster comes there")]
    EpochTooFar { epoch: Epoch, limit: Epoch },
    /// Rule S6 of `sign.rs`: too few members of an earlier signed list have released it.
    #[error(
        "S6: of the {need} releases that end the list of epoch {epoch}, which I signed, {have} are here; \
         missing: {missing}. Start the agents there again or, if they are gone for good, run \
         `muster-agent reset` on this host"
    )]
    Unreleased { epoch: Epoch, have: usize, need: usize, missing: String },
    /// Rule S7 of `sign.rs`: the agent holds a commit document already.
    #[error("S7: I hold the document of epoch {epoch}")]
    Holding { epoch: Epoch },
    /// Rule S7 of `sign.rs`: the node's directory is not blank.
    #[error("S7: the node's directory is not blank: {what}")]
    NotBlank { what: String },
    /// Rule S7 of `sign.rs`: the agent runs on another machine than the one that its key was made
    /// on.
    #[error("this is not the machine that the key was made on")]
    OtherMachine,
}

/// Formats a time for a message, rounded: `24 h`, `12 min` or `31 s`.
fn rounded(time: Millis) -> String {
    let seconds = time.0.div_ceil(1_000);
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", (seconds + 30) / 60),
        _ => format!("{} h", (seconds + 1_800) / 3_600),
    }
}
