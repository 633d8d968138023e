//! Points where a test can have this process killed, to show that it converges on restart.
//!
//! Debug builds only: a release build contains neither the variable's name nor the call.

/// The step after whose durable write the process dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The agent's key and the first journal are durable.
    Key,
    /// The record is durable, the redeem not yet sent.
    Redeem,
    /// The bound is durable, the acknowledgement not yet sent.
    Ack,
    /// The acknowledgement was sent.
    AckSent,
    /// The release is durable, not yet sent.
    Release,
    /// The document is durable.
    Hold,
    /// It has seen that the cluster added it; nothing of that is durable.
    Added,
    /// The admission is durable.
    Admit,
    /// The cluster has made a change that was signed; discovery doesn't know it yet.
    Changed,
    /// A new cluster was made of this host's data; no statement says so yet.
    Made,
    /// The marker is durable, `launching` not yet.
    Marker,
    /// `launching` is durable, the launcher not yet started.
    Launching,
    /// The launcher wrote its pid file and has not executed the node.
    Launcher,
    /// The node runs, `ran` is not yet durable.
    Exec,
    /// `ran` is durable.
    Ran,
}

#[cfg(debug_assertions)]
impl Step {
    /// The name that `MUSTER_CRASH_AT` takes.
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
            Self::Made => "made",
            Self::Marker => "marker",
            Self::Launching => "launching",
            Self::Launcher => "launcher",
            Self::Exec => "exec",
            Self::Ran => "ran",
        }
    }
}

/// Kills this process with SIGKILL if `MUSTER_CRASH_AT` names `step`.
#[cfg(debug_assertions)]
pub(crate) fn at(step: Step) {
    if std::env::var("MUSTER_CRASH_AT").is_ok_and(|wanted| wanted == step.name()) {
        let own = rustix::process::getpid();
        // A process may always signal itself; SIGKILL doesn't return.
        let _ = rustix::process::kill_process(own, rustix::process::Signal::KILL);
        loop {
            std::thread::park();
        }
    }
}

/// Nothing, in a release build.
#[cfg(not(debug_assertions))]
pub(crate) fn at(_step: Step) {}
