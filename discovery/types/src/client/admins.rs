//! What admins ask.

use reqwest::Method;
use uuid::Uuid;

use super::agents::POLL_LIMIT;
use super::{Client, ClientError};
use crate::api::{
    AbandonRequest, AcceptRequest, AcceptResponse, AdminList, ClusterExport, ClusterList,
    ClusterSummary, ClusterView, CommitDocument, CredentialsRequest, CredentialsResponse,
    DirectoryResponse, DraftRequest, DraftResponse, ExplainResponse, GrantList, GrantView,
    IntentList, IntentView, ProcessList, SignedBody, StatementList,
};
use crate::csr::Csr;
use crate::digest::OperationId;
use crate::grant::GrantId;
use crate::jws::Jws;
use crate::name::Name;

impl Client {
    /// Makes a draft of a cluster.
    pub async fn create_draft(&self, draft: &DraftRequest) -> Result<DraftResponse, ClientError> {
        self.send(Method::POST, "/v1/drafts".into(), draft).await
    }

    /// Puts a cluster's first or next statement.
    pub async fn put_statement(
        &self,
        cluster: Uuid,
        statement: &Jws,
    ) -> Result<ClusterSummary, ClientError> {
        let body = SignedBody { jws: statement.clone() };
        self.send(Method::PUT, format!("/v1/clusters/{cluster}/statement"), &body).await
    }

    /// Lists clusters, or those with this name.
    pub async fn list_clusters(&self, name: Option<&Name>) -> Result<ClusterList, ClientError> {
        let query = name.map(|name| format!("?name={name}")).unwrap_or_default();
        self.get(format!("/v1/clusters{query}")).await
    }

    /// Shows a cluster.
    pub async fn show_cluster(&self, cluster: Uuid) -> Result<ClusterView, ClientError> {
        self.get(format!("/v1/clusters/{cluster}")).await
    }

    /// A cluster's statement chain, unverified.
    pub async fn statements(&self, cluster: Uuid) -> Result<StatementList, ClientError> {
        self.get(format!("/v1/clusters/{cluster}/statements")).await
    }

    /// What a cluster waits for.
    pub async fn explain(&self, cluster: Uuid) -> Result<ExplainResponse, ClientError> {
        self.get(format!("/v1/clusters/{cluster}/explain")).await
    }

    /// A cluster's commit document, unverified.
    pub async fn document(&self, cluster: Uuid) -> Result<CommitDocument, ClientError> {
        self.get(format!("/v1/clusters/{cluster}/document")).await
    }

    /// Gives up a cluster that has not committed.
    pub async fn abandon(
        &self,
        cluster: Uuid,
        reason: &str,
    ) -> Result<ClusterSummary, ClientError> {
        let body = AbandonRequest { reason: reason.to_owned() };
        self.send(Method::POST, format!("/v1/clusters/{cluster}/abandon"), &body).await
    }

    /// Ends a committed cluster, by an owner's word.
    pub async fn retire(&self, cluster: Uuid, retire: &Jws) -> Result<ClusterSummary, ClientError> {
        let body = SignedBody { jws: retire.clone() };
        self.send(Method::POST, format!("/v1/clusters/{cluster}/retire"), &body).await
    }

    /// Takes a retirement back, by an owner's signature.
    pub async fn unretire(
        &self,
        cluster: Uuid,
        unretire: &Jws,
    ) -> Result<ClusterSummary, ClientError> {
        let body = SignedBody { jws: unretire.clone() };
        self.send(Method::POST, format!("/v1/clusters/{cluster}/unretire"), &body).await
    }

    /// A client certificate over the key of `csr`.
    pub async fn credentials(
        &self,
        cluster: Uuid,
        csr: &Csr,
    ) -> Result<CredentialsResponse, ClientError> {
        let body = CredentialsRequest { csr: csr.clone() };
        self.send(Method::POST, format!("/v1/clusters/{cluster}/credentials"), &body).await
    }

    /// Stores a grant.
    pub async fn put_grant(&self, grant: &Jws) -> Result<GrantView, ClientError> {
        self.send(Method::PUT, "/v1/grants".into(), &SignedBody { jws: grant.clone() }).await
    }

    /// A cluster's grants, or all.
    pub async fn list_grants(&self, cluster: Option<Uuid>) -> Result<GrantList, ClientError> {
        match cluster {
            Some(cluster) => self.get(format!("/v1/clusters/{cluster}/grants")).await,
            None => self.get("/v1/grants".to_owned()).await,
        }
    }

    /// One grant.
    pub async fn show_grant(&self, grant: GrantId) -> Result<GrantView, ClientError> {
        self.get(format!("/v1/grants/{grant}")).await
    }

    /// Revokes a grant.
    pub async fn revoke_grant(&self, grant: GrantId) -> Result<GrantView, ClientError> {
        self.send(Method::POST, format!("/v1/grants/{grant}/revoke"), &Empty {}).await
    }

    /// Orders a change of a cluster that runs.
    pub async fn put_order(&self, order: &Jws) -> Result<IntentView, ClientError> {
        self.send(Method::PUT, "/v1/orders".into(), &SignedBody { jws: order.clone() }).await
    }

    /// A cluster's intents, unverified: those that are live, or `all` of the last day. Waits for
    /// news after a revision that is already known.
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

    /// One intent, unverified; waits for news after a revision that is already known.
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

    /// Takes an intent back that nobody has begun.
    pub async fn withdraw_intent(
        &self,
        cluster: Uuid,
        operation: OperationId,
    ) -> Result<IntentView, ClientError> {
        let path = format!("/v1/clusters/{cluster}/intents/{operation}/withdraw");
        self.send(Method::POST, path, &Empty {}).await
    }

    /// What its members say that a cluster is.
    pub async fn directory(&self, cluster: Uuid) -> Result<DirectoryResponse, ClientError> {
        self.get(format!("/v1/clusters/{cluster}/directory")).await
    }

    /// A cluster's CAs, their keys encrypted, with what they belong to.
    pub async fn export_cluster(&self, cluster: Uuid) -> Result<ClusterExport, ClientError> {
        self.get(format!("/v1/clusters/{cluster}/export")).await
    }

    /// The admin chain, unverified.
    pub async fn list_admins(&self) -> Result<AdminList, ClientError> {
        self.get("/v1/admins".into()).await
    }

    /// Puts the next element of the admin chain.
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

    /// Processes that use, or used, the database.
    pub async fn list_processes(&self) -> Result<ProcessList, ClientError> {
        self.get("/v1/processes".into()).await
    }

    /// Says that a process won't come back.
    pub async fn forget_process(&self, process: Uuid) -> Result<ProcessList, ClientError> {
        self.send(Method::POST, format!("/v1/processes/{process}/forget"), &Empty {}).await
    }
}

#[derive(serde::Serialize)]
struct Empty {}
