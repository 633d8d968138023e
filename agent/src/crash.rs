//! Failpoints at which a test kills this process, to show that a restart continues correctly.
//!
//! Only debug builds have them: a release build contains neither the kill nor the name of the
//! environment variable that asks for it.

/// Failpoints, named by the step after which the process dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failpoint {
    /// The agent's key and the first journal are durable.
    Key,
    /// The agent's record is durable, and its redeem request is not yet sent.
    Redeem,
    /// The list of members that this agent signs is durable in its journal, and its acknowledgement
    /// is not yet sent.
    Ack,
    /// The acknowledgement of a signed list of members was sent.
    AckSent,
    /// The agent's release of an epoch (its promise to be in no list of that epoch) is durable, and
    /// is not yet sent.
    Release,
    /// The cluster's commit document is durable.
    Hold,
    /// The agent has seen that the cluster added this host; this fact is not yet durable.
    Added,
    /// The journal with this host's admission to a running cluster is durable.
    Admit,
    /// The cluster has carried out a signed change; discovery doesn't know it yet.
    Changed,
    /// The use of a replacement policy is counted in the cluster; no member is changed yet.
    PolicyUsed,
    /// The snapshot of a backup is stored, and its manifest is not.
    BackupStored,
    /// A new cluster was made from this host's data; no recovery statement records it yet.
    Made,
    /// The marker in the node's directory is durable. The launch state in the journal isn't
    /// `Launching` yet.
    Marker,
    /// The launch state `Launching` is durable in the journal. The launcher isn't started yet.
    Launching,
    /// The launcher wrote its pid file and has not executed the node.
    Launcher,
    /// The node runs. The launch state `Ran` isn't durable in the journal yet.
    Exec,
    /// The launch state `Ran` (the node has created its log) is durable in the journal.
    Ran,
    /// An etcd that comes under management has stopped; the journal doesn't say so yet.
    EtcdStopped,
    /// The journal says that this agent runs the etcd; nothing has started it yet.
    TakenOver,
}

#[cfg(debug_assertions)]
impl Failpoint {
    /// Returns the step's name in `MUSTER_CRASH_AT`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Key => "key",
            Self::Redeem => "redeem",
            Self::Ack => "ack",
            Self::AckSent => "ack-sent",
            Self::Release => "release",
            Self::Hold => "hold",
            Self::Added => "added",
            Self::Admit => "admit",
            Self::Changed => "changed",
            Self::PolicyUsed => "policy-used",
            Self::BackupStored => "backup-stored",
            Self::Made => "made",
            Self::Marker => "marker",
            Self::Launching => "launching",
            Self::Launcher => "launcher",
            Self::Exec => "exec",
            Self::Ran => "ran",
            Self::EtcdStopped => "etcd-stopped",
            Self::TakenOver => "taken-over",
        }
    }
}

/// Kills this process with SIGKILL if `MUSTER_CRASH_AT` names `step`.
#[cfg(debug_assertions)]
pub(crate) fn at(step: Failpoint) {
    if std::env::var("MUSTER_CRASH_AT").is_ok_and(|wanted| wanted == step.name()) {
        let own = rustix::process::getpid();
        // A process may always signal itself. SIGKILL takes effect before user code runs on, so
        // this never returns.
        let _ = rustix::process::kill_process(own, rustix::process::Signal::KILL);
        loop {
            std::thread::park();
        }
    }
}

/// Does nothing: a release build has no failpoints.
#[cfg(not(debug_assertions))]
pub(crate) fn at(_step: Failpoint) {}
