//! One client's connections to all members, and its authentication.

use std::error::Error as _;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use node_proto::command::Operation;
use node_proto::etcdserverpb::auth_client::AuthClient;
use node_proto::etcdserverpb::kv_client::KvClient;
use node_proto::etcdserverpb::lease_client::LeaseClient;
use node_state::apply::Response;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::super::{Answer, RequestOutcome, RequestedOperation, Time};
use super::users;
use crate::client::channel;

const AUTHENTICATION_LIMIT: Duration = Duration::from_secs(2);

/// A client's connection to each member, its user and its token.
pub(super) struct ClientSession {
    channels: Vec<Channel>,
    user: Option<String>,
    token: Option<AsciiMetadataValue>,
}

impl ClientSession {
    /// Creates the connections, which are opened at their first use.
    pub(super) fn new(members: &[SocketAddr], user: Option<String>) -> Result<Self> {
        let channels = members.iter().map(|address| channel(*address, None));
        Ok(Self { channels: channels.collect::<Result<_>>()?, user, token: None })
    }

    pub(super) fn user(&self) -> Option<&str> {
        self.user.as_deref()
    }

    pub(super) fn members(&self) -> usize {
        self.channels.len()
    }

    pub(super) fn channel(&self, member: usize) -> Channel {
        self.channels[member].clone()
    }

    /// Whether the client has a token or needs none. If the client lacks a token, it first requests
    /// one from this member.
    pub(super) async fn ensure_token(&mut self, member: usize) -> bool {
        let (Some(user), None) = (&self.user, &self.token) else { return true };
        let mut client = AuthClient::new(self.channel(member));
        let answer = client.authenticate(users::password_of(user));
        if let Ok(Ok(answer)) = tokio::time::timeout(AUTHENTICATION_LIMIT, answer).await {
            self.token = answer.into_inner().token.parse().ok();
        }
        self.token.is_some()
    }

    /// Drops the token, because members no longer accept it.
    pub(super) fn drop_token(&mut self) {
        self.token = None;
    }

    /// Returns a request with the client's token.
    pub(super) fn authenticated_request<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        if let Some(token) = &self.token {
            request.metadata_mut().insert("token", token.clone());
        }
        request
    }

    /// Sends a request once to one member, and returns its outcome.
    pub(super) async fn send(
        &self,
        member: usize,
        operation: &RequestedOperation,
        limit: Duration,
        now: impl Fn() -> Time,
    ) -> RequestOutcome {
        let call = async {
            match operation {
                RequestedOperation::Write(operation) => {
                    self.write(member, operation).await.map(Answer::Write)
                }
                RequestedOperation::Read(request) => {
                    let mut client = KvClient::new(self.channel(member));
                    let answer = client.range(self.authenticated_request(request.clone())).await;
                    answer.map(|answer| Answer::Read(answer.into_inner()))
                }
            }
        };
        match tokio::time::timeout(limit, call).await {
            Ok(Ok(answer)) => RequestOutcome::Answered { end: now(), answer },
            Ok(Err(status)) if has_not_happened(&status) => {
                let (code, text) = (status.code(), status.message().to_owned());
                RequestOutcome::Refused { end: now(), code, text }
            }
            Ok(Err(status)) => RequestOutcome::Unknown {
                text: format!("{:?}: {}", status.code(), status.message()),
            },
            Err(_) => RequestOutcome::Unknown { text: format!("no answer within {limit:?}") },
        }
    }

    async fn write(&self, member: usize, operation: &Operation) -> Result<Response, Status> {
        let mut kv = KvClient::new(self.channel(member));
        let mut leases = LeaseClient::new(self.channel(member));
        Ok(match operation.clone() {
            Operation::Put(put) => {
                Response::Put(kv.put(self.authenticated_request(put)).await?.into_inner())
            }
            Operation::DeleteRange(delete) => Response::DeleteRange(
                kv.delete_range(self.authenticated_request(delete)).await?.into_inner(),
            ),
            Operation::Txn(txn) => {
                Response::Txn(kv.txn(self.authenticated_request(txn)).await?.into_inner())
            }
            Operation::LeaseGrant(grant) => Response::LeaseGrant(
                leases.lease_grant(self.authenticated_request(grant)).await?.into_inner(),
            ),
            Operation::LeaseRevoke(revoke) => Response::LeaseRevoke(
                leases.lease_revoke(self.authenticated_request(revoke)).await?.into_inner(),
            ),
            other => unreachable!("no recorded client asks for {other:?}"),
        })
    }
}

/// Whether the status means that the request was not carried out. A status such as `Unavailable`
/// leaves this open. So does a status with a source, because the client's own transport made it.
fn has_not_happened(status: &Status) -> bool {
    let is_full = status.message() == "etcdserver: too many requests";
    let is_refusal_code = match status.code() {
        Code::InvalidArgument
        | Code::NotFound
        | Code::FailedPrecondition
        | Code::OutOfRange
        | Code::PermissionDenied
        | Code::Unauthenticated => true,
        Code::ResourceExhausted => is_full,
        _ => false,
    };
    is_refusal_code && status.source().is_none()
}
