//! Requests of agents to the discovery service.

use std::time::Duration;

use reqwest::Method;
use serde::de::DeserializeOwned;
use uuid::Uuid;

use super::http::{REQUEST_LIMIT, Request, RequestBody};
use super::{ClientError, DiscoveryClient};
use crate::api::{
    AddressesRequest, AddressesResponse, AdoptRequest, ClusterSummary, IntentView, JoinResponse,
    Jwks, LeavesRequest, NackRequest, NodeProgram, OutcomeRequest, PollRequest, PollResponse,
    ProbesRequest, RecoveriesRequest, RecoveriesResponse, RedeemResponse, ReportRequest,
    ReportResponse, SignedBody, TroubleRequest, WaitRequest,
};
use crate::csr::Csr;
use crate::digest::OperationId;
use crate::features::AgentBuild;
use crate::jws::Jws;
use crate::leaves::Leaves;
use crate::member_address::SignedMemberAddress;
use crate::problem::{Code, Problem};
use crate::readmission::ReadmitRequest;
use crate::redeem::RedeemError;

/// Time limit for a long poll: the service's longest wait and 15 seconds to answer.
pub(super) const POLL_LIMIT: Duration = Duration::from_secs(55 + 15);
/// Time limit of a redeem.
const REDEEM_LIMIT: Duration = Duration::from_secs(20);

impl DiscoveryClient {
    /// Redeems a token, and caches the access token in the answer. `redeems` holds one envelope for
    /// each pin of the join bundle.
    pub async fn redeem(&self, redeems: &[Jws]) -> Result<RedeemResponse, ClientError> {
        let response: RedeemResponse = self.send_redeems("/v1/redeem", redeems).await?;
        self.remember_token(&response.issuer, &response.token).await;
        self.note_now_ms(response.poll.now_ms);
        Ok(response)
    }

    /// Redeems a join ticket as [`DiscoveryClient::redeem`] redeems a boot token. `program` is the
    /// program of the host's node, if known. Repeating the call with the same key is allowed, and
    /// returns the intent's present state.
    pub async fn join(
        &self,
        redeems: &[Jws],
        program: Option<NodeProgram>,
    ) -> Result<JoinResponse, ClientError> {
        // The program goes into the query string. Older services and agents would refuse an
        // envelope with an unknown field.
        let path = match program {
            Some(program) => format!("/v1/join?program={program}"),
            None => "/v1/join".to_owned(),
        };
        let response: JoinResponse = self.send_redeems(&path, redeems).await?;
        self.remember_token(&response.issuer, &response.token).await;
        self.note_now_ms(response.now_ms);
        Ok(response)
    }

    /// Sends the envelopes in turn until the service gives another answer than
    /// [`Code::RecordRefused`], and returns that answer. The service refuses a record in this way
    /// if the envelope names another service's key. It checks the key before it looks the cluster
    /// up or verifies the record.
    ///
    /// If the service refuses all envelopes, this returns the last refusal. But if the last one is
    /// about another service's key, this returns the first refusal with another reason, if there is
    /// one.
    async fn send_redeems<T: DeserializeOwned>(
        &self,
        path: &str,
        redeems: &[Jws],
    ) -> Result<T, ClientError> {
        let (last, others) = redeems.split_last().expect("a bundle has at least one pin");
        let mut refusal = None;
        for envelope in others {
            match self.send_envelope(path, envelope).await {
                Err(error) if error.code() == Some(Code::RecordRefused) => {
                    refusal = refusal.or_else(|| (!is_of_other_service(&error)).then_some(error));
                }
                answer => return answer,
            }
        }
        match (self.send_envelope(path, last).await, refusal) {
            (Err(error), Some(refusal)) if is_of_other_service(&error) => Err(refusal),
            (answer, _) => answer,
        }
    }

    /// Sends an envelope without an access token. The envelope's signatures authenticate the
    /// request.
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

    /// Renews the agent's lease, and waits until the cluster's change counter differs from
    /// [`PollRequest::after`].
    pub async fn poll(
        &self,
        cluster: Uuid,
        poll: &PollRequest,
    ) -> Result<PollResponse, ClientError> {
        let path = format!("/v1/clusters/{cluster}/poll");
        self.note_service_time(self.send_within(Method::POST, path, poll, POLL_LIMIT).await)
    }

    /// Polls as [`DiscoveryClient::poll`] does, but returns `None` if the cluster's change counter
    /// still has the known value. The service then sends no body, which costs it less.
    pub async fn poll_for_changes(
        &self,
        cluster: Uuid,
        poll: &PollRequest,
    ) -> Result<Option<PollResponse>, ClientError> {
        let path = format!("/v1/clusters/{cluster}/poll");
        let answer = self.send_for_changes(path, poll, POLL_LIMIT).await?;
        Ok(answer.inspect(|answer: &PollResponse| self.note_now_ms(answer.now_ms)))
    }

    /// Corrects the client's clock offset by the time in an answer that has just arrived.
    fn note_service_time(
        &self,
        answer: Result<PollResponse, ClientError>,
    ) -> Result<PollResponse, ClientError> {
        answer.inspect(|answer| self.note_now_ms(answer.now_ms))
    }

    /// Sends the agent's signed ack of a proposal.
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

    /// Sends the agent's signed release of an epoch.
    pub async fn release(&self, cluster: Uuid, release: &Jws) -> Result<PollResponse, ClientError> {
        let body = SignedBody { jws: release.clone() };
        self.note_service_time(
            self.send(Method::POST, format!("/v1/clusters/{cluster}/release"), &body).await,
        )
    }

    /// Reports the state of the agent's node, and the agent's own build.
    pub async fn report(
        &self,
        cluster: Uuid,
        report: &ReportRequest,
        build: &AgentBuild,
    ) -> Result<ReportResponse, ClientError> {
        let json = serde_json::to_vec(report).expect("bodies are plain structs");
        self.send_request(Request {
            method: Method::POST,
            path: format!("/v1/clusters/{cluster}/report"),
            body: RequestBody::JsonFromAgent(&json, build),
            authenticated: true,
            limit: REQUEST_LIMIT,
        })
        .await
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

    /// Sends this member's address statement, if the member has moved. Returns the address
    /// statements of all members that have moved.
    pub async fn exchange_addresses(
        &self,
        cluster: Uuid,
        own: Option<SignedMemberAddress>,
    ) -> Result<AddressesResponse, ClientError> {
        let body = AddressesRequest { own };
        self.send(Method::POST, format!("/v1/clusters/{cluster}/addresses"), &body).await
    }

    /// Reports why this member's node finds no leader.
    pub async fn report_missing_leader(
        &self,
        cluster: Uuid,
        trouble: &TroubleRequest,
    ) -> Result<ReportResponse, ClientError> {
        self.send(Method::POST, format!("/v1/clusters/{cluster}/trouble"), trouble).await
    }

    /// Sends the service a commit document that it may have lost. The request has no access token,
    /// because a restored database may not know the agent any more. The document and the TLS client
    /// key suffice: the key must belong to a member in the document.
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

    /// Shows the service how this member joined, which a restored database may not know any more.
    /// The request has no access token; it contains its own proofs.
    pub async fn readmit(
        &self,
        cluster: Uuid,
        request: &ReadmitRequest,
    ) -> Result<IntentView, ClientError> {
        let json = serde_json::to_vec(request).expect("bodies are plain structs");
        self.send_request(Request {
            method: Method::POST,
            path: format!("/v1/clusters/{cluster}/readmit"),
            body: RequestBody::Json(&json),
            authenticated: false,
            limit: REQUEST_LIMIT,
        })
        .await
    }

    /// Fetches a signed checkpoint of a cluster's event chain, without verifying it. The checkpoint
    /// also contains the hash of the event with the number `known`.
    pub async fn checkpoint(&self, cluster: Uuid, known: u64) -> Result<Jws, ClientError> {
        let path = format!("/v1/clusters/{cluster}/checkpoint?known={known}");
        let answer: SignedBody = self.get(path).await?;
        Ok(answer.jws)
    }

    /// Fetches the service's signing keys.
    pub async fn jwks(&self) -> Result<Jwks, ClientError> {
        self.get_public("/v1/jwks").await
    }
}

/// Whether the service refused a redeem because the redeem names another service.
fn is_of_other_service(error: &ClientError) -> bool {
    let reason = RedeemError::OtherService.to_string();
    // The service capitalises the error message's first letter in the problem's detail, so the
    // comparison leaves that letter out.
    let same = |problem: &Problem| {
        problem.detail.get(1..).is_some_and(|detail| detail.starts_with(&reason[1..]))
    };
    matches!(error, ClientError::Problem(problem) if same(problem))
}
