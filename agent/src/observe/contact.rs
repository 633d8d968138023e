//! Shows whether the agent reaches discovery: in the status, which the metrics show too, and in the
//! log.

use std::convert::Infallible;
use std::time::SystemTime;

use discovery_types::client::ServiceContact;
use jiff::Timestamp;
use tokio::sync::watch;

use super::status::{DiscoveryOutage, StatusHandle};

/// Shows in the status whether the agent reaches discovery, until the future is dropped.
pub(crate) async fn show(
    mut contact: watch::Receiver<ServiceContact>,
    board: StatusHandle,
) -> Infallible {
    loop {
        let now = contact.borrow_and_update().clone();
        board.update(|status| status.discovery_unreachable = outage(&now));
        if contact.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}

/// Shows in the status whether the agent reaches discovery, as [`show`] does. Also logs when
/// discovery becomes unreachable, and when the agent reaches it again.
pub(crate) async fn show_and_log(
    contact: watch::Receiver<ServiceContact>,
    board: StatusHandle,
) -> Infallible {
    let logged = contact.clone();
    tokio::select! {
        never = show(contact, board) => never,
        never = log(logged) => never,
    }
}

async fn log(mut contact: watch::Receiver<ServiceContact>) -> Infallible {
    let mut lost_at: Option<SystemTime> = None;
    loop {
        let now = contact.borrow_and_update().clone();
        match (&now, lost_at) {
            (ServiceContact::Unreachable { since, error }, None) => {
                lost_at = Some(*since);
                tracing::warn!(
                    "{error}. The node and this agent go on, and try again. If the service has \
                     moved, an owner announces where it is (muster-discovery service announce)"
                );
            }
            (ServiceContact::Reachable, Some(since)) => {
                lost_at = None;
                let seconds = since.elapsed().unwrap_or_default().as_secs();
                tracing::info!("discovery answers again, after {seconds} s");
            }
            (ServiceContact::Reachable, None) | (ServiceContact::Unreachable { .. }, Some(_)) => {}
        }
        if contact.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}

fn outage(contact: &ServiceContact) -> Option<DiscoveryOutage> {
    match contact {
        ServiceContact::Reachable => None,
        ServiceContact::Unreachable { since, error } => {
            let since = Timestamp::try_from(*since).unwrap_or_default();
            Some(DiscoveryOutage { since, error: error.clone() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_outage_is_shown_from_its_beginning_to_its_end() {
        let board = StatusHandle::default();
        let contact = watch::Sender::new(ServiceContact::Reachable);
        let task = tokio::spawn(show(contact.subscribe(), board.clone()));
        let mut status = board.subscribe();
        let since = SystemTime::UNIX_EPOCH;
        for error in ["refused", "no route"] {
            contact.send_replace(ServiceContact::Unreachable { since, error: error.to_owned() });
            let expected =
                DiscoveryOutage { since: Timestamp::UNIX_EPOCH, error: error.to_owned() };
            let shown = |status: &crate::observe::status::AgentStatus| {
                status.discovery_unreachable.as_ref() == Some(&expected)
            };
            status.wait_for(shown).await.unwrap();
        }
        contact.send_replace(ServiceContact::Reachable);
        status.wait_for(|status| status.discovery_unreachable.is_none()).await.unwrap();
        task.abort();
    }
}
