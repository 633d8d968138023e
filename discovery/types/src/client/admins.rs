//! Requests of admins to the discovery service.

use reqwest::Method;
use uuid::Uuid;

use super::agents::POLL_LIMIT;
use super::{ClientError, DiscoveryClient};
use crate::api::{
    AbandonRequest, AcceptRequest, AcceptResponse, AdminList, ClusterExport, ClusterList,
    ClusterQuery, ClusterSummary, ClusterView, CommitDocument, ConsoleLink, CredentialsRequest,
    CredentialsResponse, DirectoryResponse, DraftRequest, DraftResponse, EtcdTokenList,
    EtcdTokenQuery, EtcdTokenRequest, EtcdTokenResponse, EtcdTokenView, EventList, EventQuery,
    ExplainResponse, GrantList, GrantQuery, GrantView, IntentList, IntentView, ProcessList,
    RedemptionList, RotationView, SignedBody, StatementList, StatementsRequest,
};
use crate::csr::Csr;
use crate::digest::OperationId;
use crate::grant::GrantId;
use crate::jws::Jws;
use crate::statement::CaPair;

impl DiscoveryClient {
    /// Makes a draft of a cluster.
    pub async fn create_draft(&self, draft: &DraftRequest) -> Result<DraftResponse, ClientError> {
        self.send(Method::POST, "/v1/drafts".into(), draft).await
    }

    /// Sends a cluster's first or next statement to the service.
    pub async fn put_statement(
        &self,
        cluster: Uuid,
        statement: &Jws,
    ) -> Result<ClusterSummary, ClientError> {
        let body = SignedBody { jws: statement.clone() };
        self.send(Method::PUT, format!("/v1/clusters/{cluster}/statement"), &body).await
    }

    /// Makes new CAs for a running cluster. If there are new CAs already that no statement names
    /// yet, they are replaced.
    pub async fn make_cas(&self, cluster: Uuid) -> Result<CaPair, ClientError> {
        self.send(Method::POST, format!("/v1/clusters/{cluster}/cas"), &serde_json::json!({})).await
    }

    /// Fetches each member's progress in the replacement of the cluster's CAs.
    pub async fn rotation(&self, cluster: Uuid) -> Result<RotationView, ClientError> {
        self.get(format!("/v1/clusters/{cluster}/cas")).await
    }

    /// Fetches a page of the list of clusters.
    pub async fn list_clusters(&self, query: &ClusterQuery) -> Result<ClusterList, ClientError> {
        self.get(path_with_query("/v1/clusters", query)).await
    }

    /// Fetches the state of a cluster.
    pub async fn show_cluster(&self, cluster: Uuid) -> Result<ClusterView, ClientError> {
        self.get(format!("/v1/clusters/{cluster}")).await
    }

    /// Fetches a cluster's statement chain, unverified.
    pub async fn statements(&self, cluster: Uuid) -> Result<StatementList, ClientError> {
        self.get(format!("/v1/clusters/{cluster}/statements")).await
    }

    /// Sends the statement chain that a member's agent knows, to a service that has lost some of
    /// it.
    pub async fn show_statements(
        &self,
        cluster: Uuid,
        statements: &[Jws],
    ) -> Result<StatementList, ClientError> {
        let body = StatementsRequest { statements: statements.to_vec() };
        self.send(Method::POST, format!("/v1/clusters/{cluster}/statements"), &body).await
    }

    /// Sends a service statement, which names the service's URLs and keys. Returns the service's
    /// statements.
    pub async fn put_service(
        &self,
        cluster: Uuid,
        service: &Jws,
    ) -> Result<StatementList, ClientError> {
        let body = SignedBody { jws: service.clone() };
        self.send(Method::PUT, format!("/v1/clusters/{cluster}/service"), &body).await
    }

    /// Fetches the reasons why a cluster waits.
    pub async fn explain(&self, cluster: Uuid) -> Result<ExplainResponse, ClientError> {
        self.get(format!("/v1/clusters/{cluster}/explain")).await
    }

    /// Fetches a cluster's commit document, unverified.
    pub async fn document(&self, cluster: Uuid) -> Result<CommitDocument, ClientError> {
        self.get(format!("/v1/clusters/{cluster}/document")).await
    }

    /// Abandons a cluster that has not committed.
    pub async fn abandon(
        &self,
        cluster: Uuid,
        reason: &str,
    ) -> Result<ClusterSummary, ClientError> {
        let body = AbandonRequest { reason: reason.to_owned() };
        self.send(Method::POST, format!("/v1/clusters/{cluster}/abandon"), &body).await
    }

    /// Ends a committed cluster, with an owner's signature.
    pub async fn retire(&self, cluster: Uuid, retire: &Jws) -> Result<ClusterSummary, ClientError> {
        let body = SignedBody { jws: retire.clone() };
        self.send(Method::POST, format!("/v1/clusters/{cluster}/retire"), &body).await
    }

    /// Undoes a retirement, with an owner's signature.
    pub async fn unretire(
        &self,
        cluster: Uuid,
        unretire: &Jws,
    ) -> Result<ClusterSummary, ClientError> {
        let body = SignedBody { jws: unretire.clone() };
        self.send(Method::POST, format!("/v1/clusters/{cluster}/unretire"), &body).await
    }

    /// Reopens a cluster that expired before it had committed.
    pub async fn reopen(&self, cluster: Uuid) -> Result<ClusterSummary, ClientError> {
        self.send(Method::POST, format!("/v1/clusters/{cluster}/reopen"), &()).await
    }

    /// Gets a client certificate for the key in `csr`.
    pub async fn issue_credentials(
        &self,
        cluster: Uuid,
        csr: &Csr,
    ) -> Result<CredentialsResponse, ClientError> {
        let body = CredentialsRequest { csr: csr.clone() };
        self.send(Method::POST, format!("/v1/clusters/{cluster}/credentials"), &body).await
    }

    /// Sends an issuer's approval of a host.
    pub async fn approve_host(
        &self,
        cluster: Uuid,
        approval: &Jws,
    ) -> Result<ClusterSummary, ClientError> {
        let body = SignedBody { jws: approval.clone() };
        self.send(Method::POST, format!("/v1/clusters/{cluster}/approvals"), &body).await
    }

    /// Stores a grant at the service.
    pub async fn put_grant(&self, grant: &Jws) -> Result<GrantView, ClientError> {
        self.send(Method::PUT, "/v1/grants".into(), &SignedBody { jws: grant.clone() }).await
    }

    /// Fetches a page of the list of a cluster's grants, or of all grants.
    pub async fn list_grants(
        &self,
        cluster: Option<Uuid>,
        query: &GrantQuery,
    ) -> Result<GrantList, ClientError> {
        let path = match cluster {
            Some(cluster) => format!("/v1/clusters/{cluster}/grants"),
            None => "/v1/grants".to_owned(),
        };
        self.get(path_with_query(&path, query)).await
    }

    /// Fetches events of a cluster's chain or of the service's own, unverified.
    pub async fn events(&self, query: &EventQuery) -> Result<EventList, ClientError> {
        self.get(path_with_query("/v1/events", query)).await
    }

    /// Makes a link by which a browser signs in to the console as this client's admin.
    pub async fn open_console(&self) -> Result<ConsoleLink, ClientError> {
        self.send(Method::POST, "/v1/console/links".into(), &EmptyBody {}).await
    }

    /// Fetches one grant by its id.
    pub async fn show_grant(&self, grant: GrantId) -> Result<GrantView, ClientError> {
        self.get(format!("/v1/grants/{grant}")).await
    }

    /// Lists the hosts that have redeemed a grant's token.
    pub async fn redemptions(&self, grant: GrantId) -> Result<RedemptionList, ClientError> {
        self.get(format!("/v1/grants/{grant}/redemptions")).await
    }

    /// Confirms a void grant, so that its token is valid again.
    pub async fn confirm_grant(
        &self,
        grant: GrantId,
        confirmation: &Jws,
    ) -> Result<GrantView, ClientError> {
        let body = SignedBody { jws: confirmation.clone() };
        self.send(Method::POST, format!("/v1/grants/{grant}/confirm"), &body).await
    }

    /// Revokes a grant by its id.
    pub async fn revoke_grant(&self, grant: GrantId) -> Result<GrantView, ClientError> {
        self.send(Method::POST, format!("/v1/grants/{grant}/revoke"), &EmptyBody {}).await
    }

    /// Revokes a grant, and frees the seats that hosts took with it in a cluster that still forms.
    pub async fn revoke_grant_and_free_seats(
        &self,
        grant: GrantId,
    ) -> Result<GrantView, ClientError> {
        let path = format!("/v1/grants/{grant}/revoke?free_seats=true");
        self.send(Method::POST, path, &EmptyBody {}).await
    }

    /// Stores an etcd token, without its secret.
    pub async fn put_etcd_token(
        &self,
        token: &EtcdTokenRequest,
    ) -> Result<EtcdTokenResponse, ClientError> {
        self.send(Method::PUT, "/v1/etcd-tokens".into(), token).await
    }

    /// Fetches a page of the list of etcd tokens.
    pub async fn list_etcd_tokens(
        &self,
        query: &EtcdTokenQuery,
    ) -> Result<EtcdTokenList, ClientError> {
        self.get(path_with_query("/v1/etcd-tokens", query)).await
    }

    /// Fetches one etcd token, and the members that registered with it.
    pub async fn show_etcd_token(&self, id: GrantId) -> Result<EtcdTokenView, ClientError> {
        self.get(format!("/v1/etcd-tokens/{id}")).await
    }

    /// Revokes an etcd token.
    pub async fn revoke_etcd_token(&self, id: GrantId) -> Result<EtcdTokenView, ClientError> {
        self.send(Method::POST, format!("/v1/etcd-tokens/{id}/revoke"), &EmptyBody {}).await
    }

    /// Sends an order, which asks for a change of a running cluster.
    pub async fn put_order(&self, order: &Jws) -> Result<IntentView, ClientError> {
        self.send(Method::PUT, "/v1/orders".into(), &SignedBody { jws: order.clone() }).await
    }

    /// Lists a cluster's live intents, unverified. With `all`, the list also holds the other
    /// intents of the last day. With `after`, the service delays the answer until the change
    /// counter of the intents (`rev`) differs from `after`.
    pub async fn intents(
        &self,
        cluster: Uuid,
        after: Option<u64>,
        all: bool,
    ) -> Result<IntentList, ClientError> {
        let after = after.map(|rev| format!("&after={rev}")).unwrap_or_default();
        let path = format!("/v1/clusters/{cluster}/intents?all={all}{after}");
        self.get_within(path, POLL_LIMIT).await
    }

    /// Fetches one intent, unverified. With `after`, the service delays the answer until the change
    /// counter of the intents (`rev`) differs from `after`.
    pub async fn intent(
        &self,
        cluster: Uuid,
        operation: OperationId,
        after: Option<u64>,
    ) -> Result<IntentView, ClientError> {
        let query = after.map(|rev| format!("?after={rev}")).unwrap_or_default();
        let path = format!("/v1/clusters/{cluster}/intents/{operation}{query}");
        self.get_within(path, POLL_LIMIT).await
    }

    /// Withdraws an intent that no agent has begun.
    pub async fn withdraw_intent(
        &self,
        cluster: Uuid,
        operation: OperationId,
    ) -> Result<IntentView, ClientError> {
        let path = format!("/v1/clusters/{cluster}/intents/{operation}/withdraw");
        self.send(Method::POST, path, &EmptyBody {}).await
    }

    /// Fetches the members of a cluster, as the members' agents report them.
    pub async fn directory(&self, cluster: Uuid) -> Result<DirectoryResponse, ClientError> {
        self.get(format!("/v1/clusters/{cluster}/directory")).await
    }

    /// Exports a cluster's CAs with their encrypted keys, its statement chain and its commit
    /// document.
    pub async fn export_cluster(&self, cluster: Uuid) -> Result<ClusterExport, ClientError> {
        self.get(format!("/v1/clusters/{cluster}/export")).await
    }

    /// Fetches the list of admins, and the chain of owner-signed changes that proves it. The client
    /// doesn't verify the chain.
    pub async fn list_admins(&self) -> Result<AdminList, ClientError> {
        self.get("/v1/admins".into()).await
    }

    /// Appends the next change, signed by an owner, to the chain that defines the admins.
    pub async fn put_admin(&self, element: &Jws) -> Result<AdminList, ClientError> {
        self.send(Method::PUT, "/v1/admins".into(), &SignedBody { jws: element.clone() }).await
    }

    /// Accepts a database that was restored or swapped.
    pub async fn accept_database(
        &self,
        request: &AcceptRequest,
    ) -> Result<AcceptResponse, ClientError> {
        self.send(Method::POST, "/v1/db/accept".into(), request).await
    }

    /// Lists the processes that use, or used, the database.
    pub async fn list_processes(&self) -> Result<ProcessList, ClientError> {
        self.get("/v1/processes".into()).await
    }

    /// Declares that a process won't come back.
    pub async fn forget_process(&self, process: Uuid) -> Result<ProcessList, ClientError> {
        self.send(Method::POST, format!("/v1/processes/{process}/forget"), &EmptyBody {}).await
    }
}

/// Appends the fields of `query` that have a value to `path`.
fn path_with_query(path: &str, query: &impl serde::Serialize) -> String {
    let query = serde_urlencoded::to_string(query).expect("queries are flat structs");
    if query.is_empty() { path.to_owned() } else { format!("{path}?{query}") }
}

#[derive(serde::Serialize)]
struct EmptyBody {}
