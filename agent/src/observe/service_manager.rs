//! Notifications to the service manager that started the agent (systemd's `Type=notify`).
//!
//! An agent is ready once it holds its data directory and runs. It must not wait for the cluster to
//! form: that may take hours, and would exceed the unit's start time-out. Phase and reason follow
//! as the unit's status line (`systemctl status`). With `WatchdogSec=` the agent sends a keep-alive
//! three times in each interval, from the runtime that does its work.
//!
//! Source: sd_notify(3), sd_watchdog_enabled(3). Nothing is sent unless a service manager asked for
//! it.

use std::time::Duration;

use muster_notify::State;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::observe::status::AgentStatus;

/// The longest status line, in characters: `systemctl status` shows one line.
const STATUS_LINE_LIMIT: usize = 240;

/// Tells the service manager that the agent is ready, then about each change of `status`. With a
/// watchdog, also sends keep-alives. When cancelled, says that the agent stops.
pub(crate) async fn notify_until_stopped(
    mut status: watch::Receiver<AgentStatus>,
    stop: CancellationToken,
) {
    send(State::Ready);
    let watchdog = muster_notify::keep_alive_interval();
    // Without a watchdog, only a change of the status or the cancellation ends the wait.
    let every = watchdog.unwrap_or(Duration::MAX);
    loop {
        let line = status_line(&status.borrow_and_update());
        send(State::Status(&line));
        if watchdog.is_some() {
            send(State::Watchdog);
        }
        tokio::select! {
            changed = status.changed() => if changed.is_err() { break },
            () = tokio::time::sleep(every) => {}
            () = stop.cancelled() => break,
        }
    }
    send(State::Stopping);
}

/// Sends a notification. If it is lost, only the line in `systemctl status` is stale.
fn send(state: State<'_>) {
    if let Err(error) = muster_notify::notify(state) {
        tracing::debug!(%error, "can't notify the service manager");
    }
}

/// Returns the phase, and its reason if there is one, shortened to [`STATUS_LINE_LIMIT`].
fn status_line(status: &AgentStatus) -> String {
    let text = match &status.reason {
        Some(reason) => format!("{}: {reason}", status.phase.as_str()),
        None => status.phase.as_str().to_owned(),
    };
    text.chars().take(STATUS_LINE_LIMIT).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::status::Phase;

    #[test]
    fn status_line_is_bounded() {
        let mut status = AgentStatus { phase: Phase::Waiting, ..AgentStatus::default() };
        assert_eq!(status_line(&status), "waiting");
        status.reason = Some(format!("for db-2 {}", "x".repeat(1000)));
        let line = status_line(&status);
        assert!(line.starts_with("waiting: for db-2 "), "{line}");
        assert_eq!(line.chars().count(), STATUS_LINE_LIMIT);
    }
}
