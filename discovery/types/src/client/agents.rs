//! Requests of agents to the discovery service.

use std::time::Duration;

use reqwest::Method;
use serde::de::DeserializeOwned;
use uuid::Uuid;

use super::http::{REQUEST_LIMIT, Request, RequestBody};
use super::{ClientError, DiscoveryClient};
use crate::api::{
    AdoptRequest, ClusterSummary, IntentView, JoinResponse, Jwks, LeavesRequest, NackRequest,
    NodeProgram, OutcomeRequest, PollRequest, PollResponse, ProbesRequest, RecoveriesRequest,
    RecoveriesResponse, RedeemResponse, ReportRequest, ReportResponse, SignedBody, TroubleRequest,
    WaitRequest,
};
use crate::csr::Csr;
use crate::digest::OperationId;
use crate::jws::Jws;
use crate::leaves::Leaves;
use crate::problem::Code;

/// Time limit of a poll that waits at the service: the service's longest wait, and time to answer.
pub(super) const POLL_LIMIT: Duration = Duration::from_secs(55 + 15);
/// Time limit of a redeem.
const REDEEM_LIMIT: Duration = Duration::from_secs(20);

impl DiscoveryClient {
    /// Redeems a token, and keeps the access token of the answer. `redeems` has the same redeem,
    /// signed once for each pin of the bundle.
    pub async fn redeem(&self, redeems: &[Jws]) -> Result<RedeemResponse, ClientError> {
        let response: RedeemResponse = self.send_redeems("/v1/redeem", redeems).await?;
        self.remember_token(&response.issuer, &response.token).await;
        self.note_now_ms(response.poll.now_ms);
        Ok(response)
    }

    /// Redeems a join ticket as [`DiscoveryClient::redeem`] does a boot token. `program` is the
    /// program of the host's node, if known. The same key may do so again, and learns how far its
    /// intent has come.
    pub async fn join(
        &self,
        redeems: &[Jws],
        program: Option<NodeProgram>,
    ) -> Result<JoinResponse, ClientError> {
        // In the query: services and agents of older versions refuse an envelope with an unknown
        // member.
        let path = match program {
            Some(program) => format!("/v1/join?program={program}"),
            None => "/v1/join".to_owned(),
        };
        let response: JoinResponse = self.send_redeems(&path, redeems).await?;
        self.remember_token(&response.issuer, &response.token).await;
        self.note_now_ms(response.now_ms);
        Ok(response)
    }

    /// Sends redeems one after another until the service accepts one, or refuses one for another
    /// reason than that it is meant for another service. Services check that first, and refuse such
    /// a redeem with [`Code::RecordRefused`].
    async fn send_redeems<T: DeserializeOwned>(
        &self,
        path: &str,
        redeems: &[Jws],
    ) -> Result<T, ClientError> {
        let (last, others) = redeems.split_last().expect("a bundle has at least one pin");
        for envelope in others {
            match self.send_envelope(path, envelope).await {
                Err(error) if error.code() == Some(Code::RecordRefused) => {}
                answer => return answer,
            }
        }
        self.send_envelope(path, last).await
    }

    /// Sends an envelope without an access token: its signatures take the place of one.
    async fn send_envelope<T: DeserializeOwned>(
        &self,
        path: &str,
        envelope: &Jws,
    ) -> Result<T, ClientError> {
        let body = SignedBody { jws: envelope.clone() };
        let json = serde_json::to_vec(&body).expect("bodies are plain structs");
        self.send_request(Request {
            method: Method::POST,
            path: path.into(),
            body: RequestBody::Json(&json),
            authenticated: false,
            limit: REDEEM_LIMIT,
        })
        .await
    }

    /// Reports the outcome of an intent.
    pub async fn report_outcome(
        &self,
        cluster: Uuid,
        operation: OperationId,
        outcome: &OutcomeRequest,
    ) -> Result<IntentView, ClientError> {
        let path = format!("/v1/clusters/{cluster}/intents/{operation}/outcome");
        self.send(Method::POST, path, outcome).await
    }

    /// Reports why an intent waits.
    pub async fn report_wait(
        &self,
        cluster: Uuid,
        operation: OperationId,
        wait: &WaitRequest,
    ) -> Result<IntentView, ClientError> {
        let path = format!("/v1/clusters/{cluster}/intents/{operation}/wait");
        self.send(Method::POST, path, wait).await
    }

    /// Gets new certificates for this member.
    pub async fn renew_leaves(&self, cluster: Uuid, csr: &Csr) -> Result<Leaves, ClientError> {
        let body = LeavesRequest { csr: csr.clone() };
        self.send(Method::POST, format!("/v1/clusters/{cluster}/leaves"), &body).await
    }

    /// Renews the lease, and waits for a revision after the one that is already known.
    pub async fn poll(
        &self,
        cluster: Uuid,
        poll: &PollRequest,
    ) -> Result<PollResponse, ClientError> {
        let path = format!("/v1/clusters/{cluster}/poll");
        self.note_service_time(self.send_within(Method::POST, path, poll, POLL_LIMIT).await)
    }

    /// Notes the service's time in an answer that has just come.
    fn note_service_time(
        &self,
        answer: Result<PollResponse, ClientError>,
    ) -> Result<PollResponse, ClientError> {
        answer.inspect(|answer| self.note_now_ms(answer.now_ms))
    }

    /// Sends a signed ack.
    pub async fn ack(&self, cluster: Uuid, ack: &Jws) -> Result<PollResponse, ClientError> {
        let body = SignedBody { jws: ack.clone() };
        self.note_service_time(
            self.send(Method::POST, format!("/v1/clusters/{cluster}/ack"), &body).await,
        )
    }

    /// Refuses a proposal, with the reason.
    pub async fn nack(
        &self,
        cluster: Uuid,
        nack: &NackRequest,
    ) -> Result<PollResponse, ClientError> {
        self.note_service_time(
            self.send(Method::POST, format!("/v1/clusters/{cluster}/nack"), nack).await,
        )
    }

    /// Sends this seat's row of the probe matrix.
    pub async fn send_probe_results(
        &self,
        cluster: Uuid,
        probes: &ProbesRequest,
    ) -> Result<PollResponse, ClientError> {
        self.note_service_time(
            self.send(Method::POST, format!("/v1/clusters/{cluster}/probes"), probes).await,
        )
    }

    /// Sends a signed release.
    pub async fn release(&self, cluster: Uuid, release: &Jws) -> Result<PollResponse, ClientError> {
        let body = SignedBody { jws: release.clone() };
        self.note_service_time(
            self.send(Method::POST, format!("/v1/clusters/{cluster}/release"), &body).await,
        )
    }

    /// Reports the state of the agent's node.
    pub async fn report(
        &self,
        cluster: Uuid,
        report: &ReportRequest,
    ) -> Result<ReportResponse, ClientError> {
        self.send(Method::POST, format!("/v1/clusters/{cluster}/report"), report).await
    }

    /// Sends the recovery statements that lead from the founded Raft cluster to this member's.
    pub async fn send_recoveries(
        &self,
        cluster: Uuid,
        recoveries: &[Jws],
    ) -> Result<RecoveriesResponse, ClientError> {
        let body = RecoveriesRequest { recoveries: recoveries.to_vec() };
        self.send(Method::POST, format!("/v1/clusters/{cluster}/recoveries"), &body).await
    }

    /// Reports why this member's node finds no leader.
    pub async fn report_missing_leader(
        &self,
        cluster: Uuid,
        trouble: &TroubleRequest,
    ) -> Result<ReportResponse, ClientError> {
        self.send(Method::POST, format!("/v1/clusters/{cluster}/trouble"), trouble).await
    }

    /// Sends the service a document that it may have lost. The request has no access token, since a
    /// restored database may not know the agent any more. The document and the TLS key, which must
    /// be one of its members', are proof enough.
    pub async fn adopt(&self, adopt: &AdoptRequest) -> Result<ClusterSummary, ClientError> {
        let json = serde_json::to_vec(adopt).expect("bodies are plain structs");
        self.send_request(Request {
            method: Method::POST,
            path: format!("/v1/clusters/{}/adopt", adopt.cluster),
            body: RequestBody::Json(&json),
            authenticated: false,
            limit: REQUEST_LIMIT,
        })
        .await
    }

    /// Fetches the service's signing keys.
    pub async fn jwks(&self) -> Result<Jwks, ClientError> {
        self.get_public("/v1/jwks").await
    }
}
