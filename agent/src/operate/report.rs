//! Reports to discovery which Raft cluster this host's node is in, once the node itself knows it.
//!
//! A report decides nothing: discovery shows the cluster as formed once a majority has reported the
//! same Raft cluster id. A node serves whether or not the report arrives. So reporting is retried
//! for as long as the agent runs, with growing pauses, and nothing waits for it.
//!
//! An accepted report is repeated from time to time, since a service restored from a backup has
//! forgotten it. It is also repeated as soon as the members change, because operators give orders
//! by discovery's list of members.
//!
//! Each answer names the Raft cluster whose reports discovery accepts. That cluster differs from
//! this node's Raft cluster after an operator has made a new cluster from the data left on this
//! host. Then the agent sends the recovery statements and repeats the report. So the agent needs no
//! memory of what it has sent.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use discovery_types::api::{
    AdoptRequest, ClusterState, ListedMember, MIN_REPORT_INTERVAL, Membership, ReportRequest,
    ReportResponse, Session, TroubleRequest,
};
use discovery_types::client::{ClientError, DiscoveryClient};
use discovery_types::digest::{self, Digest};
use discovery_types::jws::Jws;
use discovery_types::problem::{Code, Problem};
use discovery_types::readmission::ReadmitRequest;
use discovery_types::statement::StatementChain;
use tokio::sync::{Notify, watch};
use uuid::Uuid;

use crate::cluster::{self, ClusterApiClient, ClusterMember, MemberId, MemberList, NodeStatus};
use crate::endpoint::ClientEndpoint;
use crate::enrol::protocol::Protocol;
use crate::exit::error_chain;
use crate::observe::node_log;
use crate::operate::authorities::OwnCas;
use crate::operate::history::HistoryWatch;
use crate::operate::service::make_client;
use crate::retry::{Retry, jittered};
use crate::state::service;
use crate::steward::own_build;
use discovery_types::text::truncate_reason;

/// How often a node without a leader is asked for its status again.
const NODE_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How long a node may be without a leader before the last warning in its log is reported to
/// discovery. The report is repeated at this interval.
const TROUBLE_REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// How long the start of the node must be delayed before the reason is reported to discovery. A
/// host that has just booted gets its addresses within this time, so it reports nothing.
const START_REPORT_DELAY: Duration = Duration::from_secs(10);

/// Minimum time until an accepted report is repeated; jitter adds at most as much again.
const REPORT_INTERVAL: Duration = MIN_REPORT_INTERVAL;

/// How often the members are compared with those last reported. A hint that they may have changed
/// causes a comparison sooner.
const MEMBER_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Data and clients for reports about this host's node.
pub(crate) struct NodeReporter {
    /// Client of the discovery service.
    pub client: Arc<DiscoveryClient>,
    /// The cluster's id at discovery.
    pub cluster: Uuid,
    /// Session of this run of the agent.
    pub session: Session,
    /// Hash of the commit document that this agent holds.
    pub h: Digest,
    /// The request that gives the commit document to a service that has lost it.
    pub adopt: AdoptRequest,
    /// The request that proves to a restored service how this member joined. `None` for a founder,
    /// and for a member whose agent didn't keep its ticket.
    pub readmit: Option<ReadmitRequest>,
    /// The recovery statements, for a service that still accepts reports of the lost cluster. Empty
    /// unless this host's agent made the newest recovery.
    pub recoveries: Vec<Jws>,
    /// Client port of this host's node.
    pub endpoint: ClientEndpoint,
    /// Path of the node's log.
    pub log: PathBuf,
    /// Notified when the members may have changed.
    pub hint: Arc<Notify>,
    /// The members as last seen.
    pub members: watch::Sender<Vec<ClusterMember>>,
    /// CAs of this member.
    pub cas: OwnCas,
    /// Checks of discovery's history of the cluster. `None` for a host that has left the cluster.
    pub history: Option<HistoryWatch>,
}

impl NodeReporter {
    /// Reports until discovery says that the cluster is formed, and from time to time after that.
    /// If the service has lost the commit, sends the commit document first. Calls `heard` with the
    /// cluster's state in each answer.
    pub(crate) async fn run(self, heard: impl Fn(ClusterState)) -> Infallible {
        let first = async || self.wait_for_leader().await;
        let told = RefCell::new(Vec::new());
        let told_cas = Cell::new(None);
        let pause = async || {
            tokio::select! {
                () = tokio::time::sleep(jittered(REPORT_INTERVAL)) => {}
                () = self.wait_for_member_change(&told) => {}
                () = self.cas.wait_for_change(told_cas.get()) => {}
            }
        };
        let later = async || {
            let status = self.status_with_leader().await;
            if status.is_none() {
                self.report_trouble().await;
            }
            status
        };
        let tell = async |status: &NodeStatus| {
            let members = self.node().list_members().await.ok();
            if let Some(members) = &members {
                self.members.send_if_modified(|seen| {
                    let is_news = *seen != members.list;
                    seen.clone_from(&members.list);
                    is_news
                });
            }
            told_cas.set(self.cas.report());
            let answer = self.send_once(status, members.as_ref()).await;
            told.replace(members.map(|members| members.list).unwrap_or_default());
            match &answer {
                Ok(state) => {
                    heard(*state);
                    if let Some(history) = &self.history {
                        history.check_if_due().await;
                    }
                }
                Err(_) => self.mark_history_due(),
            }
            answer
        };
        keep_reporting(first, pause, later, tell).await
    }

    fn node(&self) -> ClusterApiClient {
        ClusterApiClient::new(vec![self.endpoint.clone()])
    }

    /// Waits until the members differ from those last reported.
    async fn wait_for_member_change(&self, told: &RefCell<Vec<ClusterMember>>) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(MEMBER_CHECK_INTERVAL) => {}
                () = self.hint.notified() => {}
            }
            if let Ok(now) = self.node().list_members().await
                && now.list != *told.borrow()
            {
                return;
            }
        }
    }

    /// Sends the last report about the removed member `own`: the cluster's members without it, as
    /// read from `others`. If a cluster of two removes a member, discovery needs the reports of
    /// both members to accept that only one is left.
    pub(crate) async fn report_removal(
        &self,
        own: MemberId,
        others: &ClusterApiClient,
    ) -> Result<(), String> {
        let members = others.list_members().await.map_err(|error| error_chain(&error))?;
        let status = others.status().await.map_err(|error| error_chain(&error))?;
        if members.of_id(own).is_some() {
            return Err(format!("the cluster still lists member {own}"));
        }
        let status = NodeStatus { member_id: own, ..status };
        match self.send_once(&status, Some(&members)).await {
            Err(error) if error.code() != Some(Code::Removed) => Err(error_chain(&error)),
            // Discovery knows of the removal already, from the other members' reports. So nothing
            // has failed.
            Ok(_) | Err(_) => Ok(()),
        }
    }

    async fn send_once(
        &self,
        status: &NodeStatus,
        members: Option<&MemberList>,
    ) -> Result<ClusterState, ClientError> {
        let (request, build) = (self.request(status, members), own_build());
        let first = self.client.report(self.cluster, &request, &build).await;
        let code = first.as_ref().err().and_then(ClientError::code);
        let second = match code {
            Some(code) if is_commit_lost(code) || self.is_join_lost(code) => {
                self.send_lost_facts(code).await?;
                self.client.report(self.cluster, &request, &build).await
            }
            _ => first,
        };
        let response =
            if !self.recoveries.is_empty() && is_other_cluster(&second, status.cluster_id) {
                self.client.send_recoveries(self.cluster, &self.recoveries).await?;
                tracing::info!("discovery follows the recovery that made this cluster");
                self.client.report(self.cluster, &request, &build).await?
            } else {
                second?
            };
        Ok(response.state)
    }

    /// Makes the next check of discovery's history due, because its database may have been
    /// replaced.
    fn mark_history_due(&self) {
        if let Some(history) = &self.history {
            history.mark_due();
        }
    }

    /// Returns whether the service refuses this host because a restore of its database has lost
    /// how this host joined. The host's older access token is still valid then, so the refusal is
    /// `Forbidden`.
    fn is_join_lost(&self, code: Code) -> bool {
        self.readmit.is_some() && code == Code::Forbidden
    }

    /// Sends the service what it has lost: the commit document, or the proof of how this host
    /// joined after the commit.
    async fn send_lost_facts(&self, code: Code) -> Result<(), ClientError> {
        self.mark_history_due();
        let Some(readmit) = &self.readmit else {
            tracing::info!(code = code.as_str(), "discovery has lost the commit: showing it");
            return self.client.adopt(&self.adopt).await.map(drop);
        };
        match self.client.readmit(self.cluster, readmit).await {
            // No member can confirm this one, because an operator has made the cluster of its data.
            Err(error) if error.code() == Some(Code::WrongState) && !self.recoveries.is_empty() => {
                let recoveries = self.recoveries.clone();
                let recovered = ReadmitRequest { recoveries, ..readmit.clone() };
                self.client.readmit(self.cluster, &recovered).await?
            }
            answer => answer?,
        };
        tracing::info!(
            code = code.as_str(),
            "discovery had lost how this host joined, and knows it again"
        );
        Ok(())
    }

    fn request(&self, status: &NodeStatus, members: Option<&MemberList>) -> ReportRequest {
        let hex = |id: u64| format!("{id:016x}");
        ReportRequest {
            session: self.session,
            h: self.h,
            raft_cluster_id: hex(status.cluster_id),
            member_id: hex(status.member_id.0),
            leader_id: status.leader.map(|leader| hex(leader.0)),
            raft_term: status.raft_term,
            raft_index: status.raft_index,
            membership: members.map(membership),
            cas: self.cas.report(),
        }
    }

    async fn wait_for_leader(&self) -> NodeStatus {
        let mut waiting_since = Instant::now();
        loop {
            if waiting_since.elapsed() >= TROUBLE_REPORT_INTERVAL {
                waiting_since = Instant::now();
                self.report_trouble().await;
            }
            if let Some(status) = self.status_with_leader().await {
                return status;
            }
            tokio::time::sleep(NODE_POLL_INTERVAL).await;
        }
    }

    async fn status_with_leader(&self) -> Option<NodeStatus> {
        match cluster::node_status(&self.endpoint).await {
            Ok(status) => status.leader.is_some().then_some(status),
            Err(error) => {
                tracing::debug!(error = error_chain(&error), "can't ask the node yet");
                None
            }
        }
    }
}

impl NodeReporter {
    /// Reports the last warning or error in the node's log, so that `explain` can show why this
    /// node has no leader.
    async fn report_trouble(&self) {
        let complaint = node_log::last_warning(&self.log);
        let detail = match complaint {
            Some(complaint) => format!("the node has no leader; its log says: {complaint}"),
            None => "the node has no leader".to_owned(),
        };
        let trouble =
            TroubleRequest { session: self.session, h: self.h, detail: truncate_reason(detail) };
        if let Err(error) = self.client.report_missing_leader(self.cluster, &trouble).await {
            tracing::debug!(
                error = error_chain(&error),
                "discovery doesn't hear of the node's trouble"
            );
        }
    }
}

/// Reports to discovery why this member's node isn't started.
pub(crate) struct StartReporter {
    client: Arc<DiscoveryClient>,
    cluster: Uuid,
    session: Session,
    /// Hash of the commit document that this agent holds.
    h: Digest,
}

impl StartReporter {
    /// Builds the task from the journal. `None` if the journal lacks the cluster or the commit
    /// document, or if its statement chain is invalid.
    pub(crate) fn of(protocol: &Protocol) -> Option<Self> {
        let join = protocol.extras.join.as_ref()?;
        let statements = &protocol.extras.statements;
        let chain = StatementChain::verify_from_pin(statements, &join.statement).ok()?;
        let known = service::read_known(&protocol.layout, &chain);
        Some(Self {
            client: make_client(join, &protocol.key, known.as_ref())?,
            cluster: join.cluster,
            session: Session { boot: protocol.agent.session.boot, nonce: protocol.nonce() },
            h: protocol.document.as_ref()?.hash(),
        })
    }

    /// Reports the present reason from time to time, as long as there is one. So discovery doesn't
    /// take this member for a silent member.
    pub(crate) async fn run(self, reason: impl Fn() -> Option<String>) -> Infallible {
        tokio::time::sleep(START_REPORT_DELAY).await;
        loop {
            if let Some(reason) = reason() {
                let detail = truncate_reason(reason);
                let trouble = TroubleRequest { session: self.session, h: self.h, detail };
                let told = self.client.report_missing_leader(self.cluster, &trouble).await;
                if let Err(error) = told {
                    tracing::debug!(
                        error = error_chain(&error),
                        "discovery doesn't hear why the node isn't started"
                    );
                }
            }
            tokio::time::sleep(jittered(REPORT_INTERVAL)).await;
        }
    }
}

/// Converts a list of members to its wire format.
fn membership(members: &MemberList) -> Membership {
    let listed = |member: &ClusterMember| ListedMember {
        id: digest::MemberId::new(member.id.0),
        name: member.name.clone(),
        peer_urls: member.peer_urls.clone(),
        client_urls: member.client_urls.clone(),
        is_learner: member.is_learner,
    };
    Membership {
        configuration: members.configuration,
        members: members.list.iter().map(listed).collect(),
    }
}

/// Reports the status from `first` until discovery accepts it, then the statuses from `later`, one
/// after each `pause`. While the node has no leader, `later` returns `None`, and nothing is
/// reported.
async fn keep_reporting(
    first: impl AsyncFn() -> NodeStatus,
    pause: impl AsyncFn(),
    later: impl AsyncFn() -> Option<NodeStatus>,
    tell: impl AsyncFn(&NodeStatus) -> Result<ClusterState, ClientError>,
) -> Infallible {
    let mut retry = Retry::default();
    let mut said = String::new();
    let mut status = first().await;
    loop {
        let answer = tell(&status).await;
        let settled = is_settled(&answer);
        log(&answer, &status, &mut said);
        if !settled {
            tokio::time::sleep(retry.next_pause()).await;
            status = first().await;
            continue;
        }
        retry.reset();
        status = loop {
            pause().await;
            if let Some(status) = later().await {
                break status;
            }
        };
    }
}

/// Returns whether repeating the report soon would change nothing.
fn is_settled(answer: &Result<ClusterState, ClientError>) -> bool {
    match answer {
        Ok(state) => *state != ClusterState::Committed,
        Err(ClientError::Problem(problem)) => !is_transient(problem),
        Err(_) => false,
    }
}

/// Returns whether an operator has to see the answer: repeating the report changes nothing, at
/// least until other members have reported.
fn is_for_operators(answer: &Result<ClusterState, ClientError>) -> bool {
    let code = answer.as_ref().err().and_then(ClientError::code);
    is_settled(answer) || code == Some(Code::WrongState)
}

/// Logs an answer for operators (see [`is_for_operators`]) at level info or warning, if it differs
/// from the last such answer, whose text is in `said`. Logs every other answer at level debug.
fn log(answer: &Result<ClusterState, ClientError>, status: &NodeStatus, said: &mut String) {
    let is_shown = is_for_operators(answer);
    let says = match answer {
        Ok(state) => state.to_string(),
        Err(error) => error_chain(error),
    };
    let is_news = is_shown && says != *said;
    match answer {
        Ok(state) if is_news => tracing::info!(
            cluster.state = state.as_str(),
            raft_cluster_id = format!("{:016x}", status.cluster_id),
            "discovery knows that this member runs, and that most members of the cluster do"
        ),
        Ok(_) => tracing::debug!(cluster.state = says, "reported"),
        Err(_) if is_news => {
            tracing::warn!("discovery doesn't take this member's report: {says}");
        }
        Err(_) => tracing::debug!(error = says, "can't report yet"),
    }
    if is_shown {
        *said = says;
    }
}

/// Returns whether a refusal means that the service doesn't know the commit, as after a restore
/// from a backup.
fn is_commit_lost(code: Code) -> bool {
    matches!(code, Code::WrongState | Code::UnknownKey | Code::Abandoned | Code::NotFound)
}

/// Returns whether discovery's answer says that it accepts reports of a Raft cluster other than
/// `own`.
fn is_other_cluster(answer: &Result<ReportResponse, ClientError>, own: u64) -> bool {
    match answer {
        Ok(response) => {
            response.raft_cluster_id.as_ref().is_some_and(|id| *id != format!("{own:016x}"))
        }
        Err(error) => error.code() == Some(Code::ClusterLost),
    }
}

/// Returns whether the report may be accepted later. Status 401 concerns access, not the report.
fn is_transient(problem: &Problem) -> bool {
    /// HTTP status code 401 Unauthorized.
    const UNAUTHORIZED: u16 = 401;
    problem.retryable || problem.status == UNAUTHORIZED
}

#[cfg(test)]
mod tests {
    use super::*;

    fn running() -> NodeStatus {
        let one = Some(cluster::MemberId(1));
        NodeStatus { cluster_id: 7, leader: one, raft_term: 2, ..NodeStatus::default() }
    }

    #[test]
    fn recoveries_are_sent_if_discovery_accepts_reports_of_another_cluster() {
        let answer = |raft_cluster_id: Option<&str>| {
            let raft_cluster_id = raft_cluster_id.map(str::to_owned);
            Ok(ReportResponse { state: ClusterState::Formed, raft_cluster_id })
        };
        assert!(!is_other_cluster(&answer(Some("0000000000000007")), 7));
        assert!(is_other_cluster(&answer(Some("0000000000000008")), 7));
        assert!(!is_other_cluster(&answer(None), 7), "an older service says nothing of it");
        for (code, shown) in [(Code::ClusterLost, true), (Code::Removed, false)] {
            let refused = ClientError::Problem(Box::new(Problem::new(code, "", "")));
            assert_eq!(is_other_cluster(&Err(refused), 7), shown);
        }
    }

    async fn report_pause() {
        tokio::time::sleep(jittered(REPORT_INTERVAL)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn an_accepted_report_is_repeated_so_that_a_restored_service_gets_it() {
        let restored = 3;
        let begun = tokio::time::Instant::now();
        let told = RefCell::new(Vec::new());
        let tell = async |_: &NodeStatus| {
            told.borrow_mut().push(begun.elapsed());
            // Simulates a restore of the service: for two reports, it answers as before the cluster
            // was formed.
            match told.borrow().len() {
                count if count < restored || count > restored + 1 => Ok(ClusterState::Formed),
                _ => Ok(ClusterState::Committed),
            }
        };
        let keep = keep_reporting(async || running(), report_pause, async || Some(running()), tell);
        let _ = tokio::time::timeout(Duration::from_secs(3600), keep).await;
        let told = told.into_inner();
        let pauses: Vec<_> = told.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(pauses.len() >= 6, "{pauses:?}");
        for (at, pause) in pauses.iter().enumerate() {
            let waits_for_others = (restored - 1..=restored).contains(&at);
            let expected =
                if waits_for_others { ..=Duration::from_secs(1) } else { ..=2 * REPORT_INTERVAL };
            assert!(expected.contains(pause), "{pauses:?}");
            assert!(waits_for_others || *pause >= REPORT_INTERVAL, "no more often: {pauses:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_reported_without_a_leader_and_the_node_is_asked_rarely() {
        let (told, asked) = (RefCell::new(0), RefCell::new(0));
        let later = async || {
            *asked.borrow_mut() += 1;
            None
        };
        let tell = async |_: &NodeStatus| {
            *told.borrow_mut() += 1;
            Ok(ClusterState::Formed)
        };
        let keep = keep_reporting(async || running(), report_pause, later, tell);
        let _ = tokio::time::timeout(Duration::from_secs(3600), keep).await;
        assert_eq!(*told.borrow(), 1);
        assert!((30..=60).contains(&*asked.borrow()), "{asked:?}");
    }
}
