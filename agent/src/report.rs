//! Tells discovery which Raft cluster this host's node is in, once it says so itself.
//!
//! It decides nothing: discovery shows the cluster as formed when a majority has reported one id.
//! A node serves whether or not anybody hears of it, so this is tried for as long as the agent
//! runs, with growing pauses, and nothing waits for it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use discovery_types::api::{AdoptRequest, ClusterState, ReportRequest, Session, TroubleRequest};
use discovery_types::client::{Client, ClientError};
use discovery_types::digest::Digest;
use discovery_types::problem::{Code, Problem};
use hyper_util::rt::TokioIo;
use node_proto::etcdserverpb::StatusRequest;
use node_proto::etcdserverpb::maintenance_client::MaintenanceClient;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::transport::{Endpoint, Uri};
use uuid::Uuid;

use crate::bootstrap::cut;
use crate::exit::chain;
use crate::health::Door;
use crate::retry::Retry;
use crate::tail;

/// The longest that one question to the node may take.
const ASK_DEADLINE: Duration = Duration::from_secs(3);
/// How often a node that has no leader yet is asked again.
const ASK_EVERY: Duration = Duration::from_millis(50);

/// How long a node may be without a leader before discovery hears what its log says, and how often
/// it hears it then.
const TROUBLE_AFTER: Duration = Duration::from_secs(5);

/// What a report is about.
pub(crate) struct Report {
    /// The service.
    pub client: Arc<Client>,
    /// The cluster.
    pub cluster: Uuid,
    /// This run of the agent.
    pub session: Session,
    /// The held document's hash.
    pub h: Digest,
    /// What the service is shown if it has lost the commit.
    pub adopt: AdoptRequest,
    /// The node.
    pub door: Door,
    /// The node's log.
    pub log: PathBuf,
}

/// Why the node's status isn't known.
#[derive(Debug, thiserror::Error)]
enum AskError {
    /// No connection, or no TLS.
    #[error("the node doesn't answer")]
    Connection(#[from] tonic::transport::Error),
    /// gRPC said no.
    #[error("the node refuses: {0}")]
    Status(Box<tonic::Status>),
    /// It took too long.
    #[error("the node takes too long")]
    TimedOut,
}

struct NodeStatus {
    cluster_id: u64,
    member_id: u64,
    leader_id: u64,
    raft_term: u64,
    raft_index: u64,
}

impl Report {
    /// Reports until discovery says that the cluster is formed, so that this host knows it too;
    /// then the cluster's state there. A service that has lost the commit is shown the document
    /// first. Nothing if it never takes the report. `heard` is told of each answer.
    pub(crate) async fn deliver(self, heard: impl Fn(ClusterState)) -> Option<ClusterState> {
        let mut retry = Retry::default();
        loop {
            let status = self.node_with_leader().await;
            match self.once(&status).await {
                Ok(ClusterState::Committed) => {
                    heard(ClusterState::Committed);
                    tracing::debug!("a majority has not reported yet");
                }
                Ok(state) => {
                    heard(state);
                    tracing::info!(
                        cluster.state = state.as_str(),
                        raft_cluster_id = format!("{:016x}", status.cluster_id),
                        "discovery knows that this member runs, as most of them do"
                    );
                    return Some(state);
                }
                Err(ClientError::Problem(problem)) if !may_pass(&problem) => {
                    tracing::warn!("discovery doesn't take this member's report: {problem}");
                    return None;
                }
                Err(error) => tracing::debug!(error = chain(&error), "can't report yet"),
            }
            tokio::time::sleep(retry.next_pause()).await;
        }
    }

    async fn once(&self, status: &NodeStatus) -> Result<ClusterState, ClientError> {
        let request = self.request(status);
        let first = self.client.report(self.cluster, &request).await;
        let code = first.as_ref().err().and_then(ClientError::code);
        let response = match code {
            Some(code) if means_lost(code) => {
                tracing::info!(code = code.as_str(), "discovery has lost the commit: showing it");
                self.client.adopt(&self.adopt).await?;
                self.client.report(self.cluster, &request).await?
            }
            _ => first?,
        };
        Ok(response.state)
    }

    fn request(&self, status: &NodeStatus) -> ReportRequest {
        let hex = |id: u64| format!("{id:016x}");
        ReportRequest {
            session: self.session,
            h: self.h,
            raft_cluster_id: hex(status.cluster_id),
            member_id: hex(status.member_id),
            leader_id: Some(hex(status.leader_id)),
            raft_term: status.raft_term,
            raft_index: status.raft_index,
        }
    }

    async fn node_with_leader(&self) -> NodeStatus {
        let mut waiting_since = Instant::now();
        loop {
            if waiting_since.elapsed() >= TROUBLE_AFTER {
                waiting_since = Instant::now();
                self.tell_trouble().await;
            }
            let asked = tokio::time::timeout(ASK_DEADLINE, ask(&self.door)).await;
            match asked.unwrap_or(Err(AskError::TimedOut)) {
                Ok(status) if status.leader_id != 0 => return status,
                Ok(_) => {}
                Err(error) => tracing::debug!(error = chain(&error), "can't ask the node yet"),
            }
            tokio::time::sleep(ASK_EVERY).await;
        }
    }
}

impl Report {
    /// Lets `explain` say why this node has no leader, in its own words.
    async fn tell_trouble(&self) {
        let Some(complaint) = tail::last_complaint(&self.log) else { return };
        let trouble = TroubleRequest {
            session: self.session,
            h: self.h,
            detail: cut(format!("the node has no leader; its log says: {complaint}")),
        };
        if let Err(error) = self.client.trouble(self.cluster, &trouble).await {
            tracing::debug!(error = chain(&error), "discovery doesn't hear of the node's trouble");
        }
    }
}

/// Whether a refusal of a member's report says that the service knows no commit, as after a restore
/// from a backup.
fn means_lost(code: Code) -> bool {
    matches!(code, Code::WrongState | Code::UnknownKey | Code::Abandoned | Code::NotFound)
}

/// Whether the report may be taken later. A 401 is about access, not about the report.
fn may_pass(problem: &Problem) -> bool {
    /// HTTP's "unauthorized".
    const UNAUTHORIZED: u16 = 401;
    problem.retryable || problem.status == UNAUTHORIZED
}

async fn ask(door: &Door) -> Result<NodeStatus, AskError> {
    // The connector below speaks TLS; the scheme only keeps tonic from doing so as well.
    let endpoint = Endpoint::from_static("http://node");
    let (address, name) = (door.address, door.server_name.clone());
    let mut config = door.tls().clone();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let tls = TlsConnector::from(Arc::new(config));
    let connector = tower::service_fn(move |_: Uri| {
        let (tls, name) = (tls.clone(), name.clone());
        async move {
            let name = ServerName::try_from(name).map_err(std::io::Error::other)?;
            let stream = TcpStream::connect(address).await?;
            Ok::<_, std::io::Error>(TokioIo::new(tls.connect(name, stream).await?))
        }
    });
    let channel = endpoint.connect_with_connector(connector).await?;
    let response = MaintenanceClient::new(channel)
        .status(StatusRequest::default())
        .await
        .map_err(|status| AskError::Status(Box::new(status)))?
        .into_inner();
    let header = response.header.unwrap_or_default();
    Ok(NodeStatus {
        cluster_id: header.cluster_id,
        member_id: header.member_id,
        leader_id: response.leader,
        raft_term: response.raft_term,
        raft_index: response.raft_index,
    })
}
