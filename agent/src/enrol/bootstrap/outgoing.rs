//! A message to the discovery service, sent until the service accepts or refuses it.

use std::sync::Arc;
use std::time::Duration;

use discovery_types::api::{
    AdoptRequest, NackRequest, PollRequest, PollResponse, ProbesRequest, RedeemResponse,
};
use discovery_types::client::{ClientError, DiscoveryClient};
use discovery_types::jws::Jws;
use uuid::Uuid;

use crate::enrol::redeem::UnsignedRedeem;
use crate::exit::error_chain;
use crate::host::cloud::{IdentitySource, MetadataError};
use crate::observe::status::StatusHandle;
use crate::retry::Retry;

/// A message to the discovery service.
#[derive(Clone, Debug)]
pub(super) enum OutgoingMessage {
    /// A signed ack of a proposal.
    Ack(Jws),
    /// This host's refusal of a proposal.
    Nack(NackRequest),
    /// This host's row of the probe matrix.
    Row(ProbesRequest),
    /// A signed release: this agent's promise to be no member of a list of this epoch or a lower
    /// one.
    Release(Jws),
    /// The commit document that this host holds, for a service that may have lost it.
    Adopt(Box<AdoptRequest>),
}

/// Kind of a message. Of each kind, only the newest message is being sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum OutgoingMessageKind {
    /// An answer to a proposal: [`OutgoingMessage::Ack`] or [`OutgoingMessage::Nack`].
    Answer,
    /// A row of the probe matrix, [`OutgoingMessage::Row`].
    Row,
    /// A signed release, [`OutgoingMessage::Release`].
    Release,
    /// The commit document that this host holds, [`OutgoingMessage::Adopt`].
    Adopt,
}

impl std::fmt::Display for OutgoingMessageKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Answer => "this host's answer to the list",
            Self::Row => "this host's row of the matrix",
            Self::Release => "this host's release",
            Self::Adopt => "the decided document",
        })
    }
}

/// Reason why a redeem has failed.
#[derive(Debug)]
pub(super) enum RedeemFailure {
    /// The cloud's metadata service gave no identity document, so nothing was sent.
    Identity(MetadataError),
    /// The service refused the redeem, or didn't get it.
    Client(ClientError),
}

/// Result of a finished request.
#[derive(Debug)]
pub(super) enum RequestResult {
    /// Result of a redeem.
    Redeemed(Result<Box<RedeemResponse>, RedeemFailure>),
    /// Result of a poll.
    Polled(Result<Option<Box<PollResponse>>, ClientError>),
    /// Result of sending a message of this kind.
    MessageSent(OutgoingMessageKind, Result<Option<Box<PollResponse>>, ClientError>),
}

impl OutgoingMessage {
    /// Returns the message's kind.
    pub(super) fn kind(&self) -> OutgoingMessageKind {
        match self {
            Self::Ack(_) | Self::Nack(_) => OutgoingMessageKind::Answer,
            Self::Row(_) => OutgoingMessageKind::Row,
            Self::Release(_) => OutgoingMessageKind::Release,
            Self::Adopt(_) => OutgoingMessageKind::Adopt,
        }
    }

    /// Sends the message until the service has accepted or refused it.
    pub(super) async fn send_until_accepted(
        self,
        client: Arc<DiscoveryClient>,
        cluster: Uuid,
        board: StatusHandle,
    ) -> RequestResult {
        let kind = self.kind();
        let mut retry = Retry::default();
        let mut told = None;
        loop {
            match self.send(&client, cluster).await {
                Err(error) if must_resend(&error) => {
                    let pause = retry.next_pause();
                    let text = format!("{kind} was not taken: {}", error_chain(&error));
                    if told.as_ref() != Some(&text) {
                        tracing::warn!("{text}; trying again");
                        board.set_error(text.clone(), None);
                        told = Some(text);
                    }
                    tokio::time::sleep(pause).await;
                }
                result => return RequestResult::MessageSent(kind, result),
            }
        }
    }

    async fn send(
        &self,
        client: &DiscoveryClient,
        cluster: Uuid,
    ) -> Result<Option<Box<PollResponse>>, ClientError> {
        let response = match self {
            Self::Ack(jws) => client.ack(cluster, jws).await,
            Self::Nack(nack) => client.nack(cluster, nack).await,
            Self::Row(row) => client.send_probe_results(cluster, row).await,
            Self::Release(jws) => client.release(cluster, jws).await,
            Self::Adopt(adopt) => return client.adopt(adopt).await.map(|_| None),
        };
        response.map(|response| Some(Box::new(response)))
    }
}

/// Returns whether to send the message again. After a conflict, the next poll tells what to do
/// instead. An answer that is not the service's own, such as a proxy's, means that the message has
/// not arrived. Whatever the status of such an answer is, the message is sent again: no other part
/// of the agent would repeat it.
fn must_resend(error: &ClientError) -> bool {
    /// HTTP status code 409 Conflict.
    const CONFLICT: u16 = 409;
    match error {
        ClientError::Problem(problem) => problem.retryable && problem.status != CONFLICT,
        ClientError::Foreign { .. } => true,
        other => other.is_retryable(),
    }
}

/// Redeems once, after `pause`. With a `source`, the redeem contains a new identity document.
pub(super) async fn redeem(
    client: Arc<DiscoveryClient>,
    redeem: UnsignedRedeem,
    source: Option<IdentitySource>,
    pause: Duration,
) -> RequestResult {
    tokio::time::sleep(pause).await;
    let redeems = match redeem.sign(source.as_ref()).await {
        Ok(redeems) => redeems,
        Err(error) => return RequestResult::Redeemed(Err(RedeemFailure::Identity(error))),
    };
    let redeemed = client.redeem(&redeems).await;
    RequestResult::Redeemed(redeemed.map(Box::new).map_err(RedeemFailure::Client))
}

/// Polls once, after `pause`.
pub(super) async fn poll(
    client: Arc<DiscoveryClient>,
    cluster: Uuid,
    poll: PollRequest,
    pause: Duration,
) -> RequestResult {
    tokio::time::sleep(pause).await;
    let polled = client.poll_for_changes(cluster, &poll).await;
    RequestResult::Polled(polled.map(|changed| changed.map(Box::new)))
}

#[cfg(test)]
mod tests {
    use discovery_types::problem::{Code, Problem};

    use super::*;

    #[test]
    fn refusals_are_left_to_the_next_poll_and_temporary_failures_are_resent() {
        let problem = |code| ClientError::Problem(Box::new(Problem::new(code, "", "")));
        assert!(!must_resend(&problem(Code::StaleEpoch)));
        assert!(!must_resend(&problem(Code::Abandoned)));
        assert!(must_resend(&problem(Code::Overloaded)));
        assert!(must_resend(&problem(Code::DatabaseChanged)));
        let page = ClientError::Foreign { url: String::new(), status: 500, reason: String::new() };
        assert!(must_resend(&page));
    }
}
