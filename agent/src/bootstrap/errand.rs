//! A message to the discovery service, sent until the service accepts or refuses it.

use std::sync::Arc;
use std::time::Duration;

use discovery_types::api::{
    AdoptRequest, NackRequest, PollRequest, PollResponse, ProbesRequest, RedeemResponse,
};
use discovery_types::client::{Client, ClientError};
use discovery_types::jws::Jws;
use uuid::Uuid;

use crate::exit::chain;
use crate::retry::Retry;
use crate::status::Board;

/// A message to the discovery service.
#[derive(Clone, Debug)]
pub(super) enum Errand {
    /// A signed ack of a proposal.
    Ack(Jws),
    /// This host's refusal of a proposal.
    Nack(NackRequest),
    /// This host's row of the matrix.
    Row(ProbesRequest),
    /// A signed release of an epoch and all lower ones.
    Release(Jws),
    /// The held document, for a service that may have lost it.
    Adopt(Box<AdoptRequest>),
}

/// Kind of a message. Of each kind, only the newest message is being sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// An answer to a proposal: [`Errand::Ack`] or [`Errand::Nack`].
    Answer,
    /// A row of the matrix, [`Errand::Row`].
    Row,
    /// A signed release, [`Errand::Release`].
    Release,
    /// The held document, [`Errand::Adopt`].
    Adopt,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Answer => "this host's answer to the list",
            Self::Row => "this host's row of the matrix",
            Self::Release => "this host's release",
            Self::Adopt => "the decided document",
        })
    }
}

/// Result of a finished request.
#[derive(Debug)]
pub(super) enum Done {
    /// Result of a redeem.
    Redeemed(Result<Box<RedeemResponse>, ClientError>),
    /// Result of a poll.
    Polled(Result<Box<PollResponse>, ClientError>),
    /// Result of an errand of this kind.
    Carried(Kind, Result<Option<Box<PollResponse>>, ClientError>),
}

impl Errand {
    /// Returns the message's kind.
    pub(super) fn kind(&self) -> Kind {
        match self {
            Self::Ack(_) | Self::Nack(_) => Kind::Answer,
            Self::Row(_) => Kind::Row,
            Self::Release(_) => Kind::Release,
            Self::Adopt(_) => Kind::Adopt,
        }
    }

    /// Sends the message until the service has accepted or refused it.
    pub(super) async fn carry_out(self, client: Arc<Client>, cluster: Uuid, board: Board) -> Done {
        let kind = self.kind();
        let mut retry = Retry::default();
        let mut told = None;
        loop {
            match self.send(&client, cluster).await {
                Err(error) if is_worth_repeating(&error) => {
                    let pause = retry.next_pause();
                    let text = format!("{kind} was not taken: {}", chain(&error));
                    if told.as_ref() != Some(&text) {
                        tracing::warn!("{text}; trying again");
                        board.error(text.clone(), None);
                        told = Some(text);
                    }
                    tokio::time::sleep(pause).await;
                }
                result => return Done::Carried(kind, result),
            }
        }
    }

    async fn send(
        &self,
        client: &Client,
        cluster: Uuid,
    ) -> Result<Option<Box<PollResponse>>, ClientError> {
        let response = match self {
            Self::Ack(jws) => client.ack(cluster, jws).await,
            Self::Nack(nack) => client.nack(cluster, nack).await,
            Self::Row(row) => client.probes(cluster, row).await,
            Self::Release(jws) => client.release(cluster, jws).await,
            Self::Adopt(adopt) => return client.adopt(adopt).await.map(|_| None),
        };
        response.map(|response| Some(Box::new(response)))
    }
}

/// Returns whether to send the message again. After a conflict, the next poll tells what to do
/// instead. An answer that is not the service's own, such as a proxy's, means that the message has
/// not arrived. It is sent again whatever its status, since nothing else would.
fn is_worth_repeating(error: &ClientError) -> bool {
    /// HTTP status code 409 Conflict.
    const CONFLICT: u16 = 409;
    match error {
        ClientError::Problem(problem) => problem.retryable && problem.status != CONFLICT,
        ClientError::Foreign { .. } => true,
        other => other.is_retryable(),
    }
}

/// Redeems once, after `pause`.
pub(super) async fn redeem(client: Arc<Client>, envelope: Jws, pause: Duration) -> Done {
    tokio::time::sleep(pause).await;
    Done::Redeemed(client.redeem(&envelope).await.map(Box::new))
}

/// Polls once, after `pause`.
pub(super) async fn poll(
    client: Arc<Client>,
    cluster: Uuid,
    poll: PollRequest,
    pause: Duration,
) -> Done {
    tokio::time::sleep(pause).await;
    Done::Polled(client.poll(cluster, &poll).await.map(Box::new))
}

#[cfg(test)]
mod tests {
    use discovery_types::problem::{Code, Problem};

    use super::*;

    #[test]
    fn a_stale_epoch_is_left_to_the_next_poll_and_a_full_service_is_not() {
        let problem = |code| ClientError::Problem(Box::new(Problem::new(code, "", "")));
        assert!(!is_worth_repeating(&problem(Code::StaleEpoch)));
        assert!(!is_worth_repeating(&problem(Code::Abandoned)));
        assert!(is_worth_repeating(&problem(Code::Overloaded)));
        assert!(is_worth_repeating(&problem(Code::DatabaseChanged)));
        let page = ClientError::Foreign { url: String::new(), status: 500, reason: String::new() };
        assert!(is_worth_repeating(&page));
    }
}
