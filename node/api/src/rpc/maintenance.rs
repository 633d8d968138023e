//! The Maintenance service: status, alarms, checksums, snapshots, transfer of leadership.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use node_engine::driver::exit_on_defragmentation_failure;
use node_engine::transport::Transport;
use node_proto::etcdserverpb::alarm_request::AlarmAction;
use node_proto::etcdserverpb::downgrade_request::DowngradeAction;
use node_proto::etcdserverpb::maintenance_server;
use node_proto::etcdserverpb::{
    AlarmMember, AlarmRequest, AlarmResponse, AlarmType, DefragmentRequest, DefragmentResponse,
    DowngradeInfo, DowngradeRequest, DowngradeResponse, HashKvRequest, HashKvResponse, HashRequest,
    HashResponse, MoveLeaderRequest, MoveLeaderResponse, SnapshotRequest, StatusRequest,
    StatusResponse,
};
use node_state::CLUSTER_VERSION;
use node_state::auth::RequestedAccess;
use node_state::identity::MemberId;
use node_state::mvcc::{DefragmentError, DefragmentSizes, KeyValueHash, ReadError, View};
use tokio::sync::Semaphore;
use tonic::{Request, Status};

use super::access::Credentials;
use super::blocking::run_blocking;
use super::context::{ApiContext, CallContext, header};
use super::error::Error;
use super::metrics::Method;
use super::snapshot;

type Answer<T> = Result<tonic::Response<T>, Status>;

pub(super) struct MaintenanceService {
    context: Arc<ApiContext>,
    snapshots: Arc<Semaphore>,
}

/// Maximum number of whole-store checksums computed at a time. Each takes a core while it reads.
pub(super) const MAX_CONCURRENT_HASHES: usize = 2;

/// Formats an alarm as `etcdctl` and etcd's list of errors do. A member ID of 0 is left out.
fn format_alarm(alarm: &AlarmMember) -> String {
    let kind = alarm.alarm().as_str_name();
    match alarm.member_id {
        0 => format!("alarm:{kind} "),
        id => format!("memberID:{id} alarm:{kind} "),
    }
}

impl MaintenanceService {
    pub(super) fn new(context: Arc<ApiContext>) -> Self {
        Self { context, snapshots: snapshot::snapshot_permits() }
    }

    fn status(&self) -> StatusResponse {
        let node = self.context.status.borrow().clone();
        let store = &self.context.store;
        let view = store.view();
        let me = self.context.identity.member_id;
        let mut errors = Vec::new();
        if node.leader == 0 {
            errors.push(Error::NoLeader.text().into_owned());
        }
        errors.extend(view.alarms().iter().map(format_alarm));
        errors.extend(self.context.peers.iter().flat_map(Transport::one_way_warnings));
        StatusResponse {
            header: header(view.revision()),
            version: self.context.identity.version.to_owned(),
            db_size: i64::try_from(store.total_bytes()).unwrap_or(i64::MAX),
            leader: node.leader,
            // The applied index may briefly be ahead of the commit index that the driver publishes.
            // A client must never see that.
            raft_index: node.commit.max(view.applied().index),
            raft_term: node.term,
            raft_applied_index: view.applied().index,
            errors,
            db_size_in_use: i64::try_from(store.bytes_in_use()).unwrap_or(i64::MAX),
            is_learner: view.members().is_learner(MemberId(me)),
            storage_version: CLUSTER_VERSION.to_owned(),
            db_size_quota: self.context.limits.quota.reported_bytes(),
            downgrade_info: Some(DowngradeInfo::default()),
        }
    }

    async fn alarm(
        &self,
        request: AlarmRequest,
        call: &mut CallContext,
    ) -> Result<AlarmResponse, Error> {
        if AlarmAction::try_from(request.action).is_err() {
            return Err(Error::UnknownMethod);
        }
        if request.action() != AlarmAction::Get {
            return self.context.propose(request, call).await;
        }
        self.context.barrier(false).await?;
        let view = self.context.store.view();
        let wanted = |alarm: &&AlarmMember| {
            request.alarm() == AlarmType::None || alarm.alarm == request.alarm
        };
        let alarms = view.alarms().iter().filter(wanted).copied().collect();
        Ok(AlarmResponse { header: header(view.revision()), alarms })
    }

    /// Runs `work`, which reads the whole store, once one of the few permits is free.
    async fn run_hash<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Error> {
        let turn = self.context.hash_permits.clone().acquire_owned().await;
        run_blocking(turn.map_err(|_| Error::Stopped)?, work).await
    }

    /// Hashes the key space on a thread that may block. Starts again on a newer view if a
    /// compaction overtakes the hash of the newest revision.
    async fn hash_at(&self, revision: i64) -> Result<(Arc<View>, KeyValueHash), Error> {
        loop {
            let store = self.context.store.clone();
            let work = move || {
                let view = store.view();
                let hash = store.hash_kv(&view, revision);
                (view, hash)
            };
            let (view, hash) = self.run_hash(work).await?;
            match hash {
                Err(ReadError::Superseded) if revision == 0 => {}
                hash => return Ok((view, hash?)),
            }
        }
    }

    async fn hash_kv(&self, revision: i64) -> Result<HashKvResponse, Error> {
        let started = Instant::now();
        let (view, hash) = self.hash_at(revision).await?;
        self.context.metrics.revision_hashes.record(started.elapsed());
        Ok(HashKvResponse {
            header: header(view.revision()),
            hash: hash.hash,
            compact_revision: hash.compact_revision,
            hash_revision: hash.revision,
        })
    }

    /// Defragments the store's file while reads and writes continue. The work continues if the
    /// client leaves.
    async fn defragment(&self) -> Result<DefragmentResponse, Error> {
        let context = self.context.clone();
        let work = move || {
            let started = Instant::now();
            context.metrics.defragmenting.store(true, Ordering::Relaxed);
            let done = context.store.defragment(&context.store_file);
            context.metrics.defragmenting.store(false, Ordering::Relaxed);
            context.metrics.defragmentations.record(started.elapsed());
            log_defragmentation(&done, started.elapsed());
            done
        };
        let done = tokio::task::spawn_blocking(work).await.map_err(|_| Error::Stopped)?;
        match done {
            Ok(_) => Ok(DefragmentResponse { header: None }),
            Err(error @ DefragmentError::RenameNotDurable(_)) => {
                exit_on_defragmentation_failure(&error)
            }
            Err(_) => Err(Error::NotDefragmented),
        }
    }

    async fn checksum(&self) -> Result<HashResponse, Error> {
        let store = self.context.store.clone();
        let started = Instant::now();
        let work = move || {
            let view = store.view();
            (view.revision(), view.checksum())
        };
        let (revision, hash) = self.run_hash(work).await?;
        self.context.metrics.hashes.record(started.elapsed());
        Ok(HashResponse { header: header(revision), hash: hash? })
    }

    /// Refuses downgrades, because there is no older version of the data format. So no downgrade
    /// can be under way. A request to cancel one succeeds anyway, as in etcd.
    async fn downgrade(&self, request: &DowngradeRequest) -> Result<DowngradeResponse, Error> {
        let action = DowngradeAction::try_from(request.action);
        match action.map_err(|_| Error::UnknownMethod)? {
            DowngradeAction::Validate | DowngradeAction::Enable => {
                self.context.barrier(false).await?;
                Err(match is_version(&request.version) {
                    true => Error::InvalidDowngradeTarget,
                    false => Error::WrongDowngradeVersion,
                })
            }
            DowngradeAction::Cancel => {
                self.context.barrier(false).await?;
                let (version, _) = CLUSTER_VERSION.rsplit_once('.').expect("it has a patch");
                let header = header(self.context.store.view().revision());
                Ok(DowngradeResponse { header, version: version.to_owned() })
            }
        }
    }

    async fn move_leader(&self, target: u64) -> Result<MoveLeaderResponse, Error> {
        self.context.handle.transfer_leader(target).await?;
        // As in etcd, this answer has no header.
        Ok(MoveLeaderResponse { header: None })
    }
}

/// Whether `text` is a version as etcd parses it: `major.minor`, or `major.minor.patch` with an
/// optional suffix (server/etcdserver/version).
fn is_version(text: &str) -> bool {
    let core = text.split(['-', '+']).next().unwrap_or_default();
    let parts: Vec<&str> = core.split('.').collect();
    let number =
        |part: &&str| part.bytes().all(|b| b.is_ascii_digit()) && part.parse::<i64>().is_ok();
    (parts.len() == 3 || (parts.len() == 2 && core == text)) && parts.iter().all(number)
}

fn log_defragmentation(done: &Result<DefragmentSizes, DefragmentError>, took: Duration) {
    let duration_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    match done {
        Ok(DefragmentSizes { before, after }) => {
            tracing::info!(before, after, duration_ms, "finished defragmenting the store");
        }
        Err(error) => {
            let error = error as &dyn std::error::Error;
            tracing::error!(error, duration_ms, "the store was not defragmented");
        }
    }
}

#[tonic::async_trait]
impl maintenance_server::Maintenance for MaintenanceService {
    async fn status(&self, request: Request<StatusRequest>) -> Answer<StatusResponse> {
        self.context
            .call(Method::Status, request, async |_, _: &mut CallContext| {
                Ok::<_, Error>(self.status())
            })
            .await
    }

    async fn alarm(&self, request: Request<AlarmRequest>) -> Answer<AlarmResponse> {
        let work = async |request, call: &mut CallContext| self.alarm(request, call).await;
        self.context.call(Method::Alarm, request, work).await
    }

    async fn defragment(&self, request: Request<DefragmentRequest>) -> Answer<DefragmentResponse> {
        let work = async |_, _: &mut CallContext| self.defragment().await;
        self.context.call(Method::Defragment, request, work).await
    }

    async fn hash(&self, request: Request<HashRequest>) -> Answer<HashResponse> {
        let work = async |_, _: &mut CallContext| self.checksum().await;
        self.context.call(Method::Hash, request, work).await
    }

    async fn downgrade(&self, request: Request<DowngradeRequest>) -> Answer<DowngradeResponse> {
        let work = async |request, _: &mut CallContext| self.downgrade(&request).await;
        self.context.call(Method::Downgrade, request, work).await
    }

    async fn hash_kv(&self, request: Request<HashKvRequest>) -> Answer<HashKvResponse> {
        let work = async |request: HashKvRequest, _: &mut CallContext| {
            self.hash_kv(request.revision).await
        };
        self.context.call(Method::HashKv, request, work).await
    }

    async fn move_leader(&self, request: Request<MoveLeaderRequest>) -> Answer<MoveLeaderResponse> {
        let work = async |request: MoveLeaderRequest, _: &mut CallContext| {
            self.move_leader(request.target_id).await
        };
        self.context.call(Method::MoveLeader, request, work).await
    }

    async fn snapshot(
        &self,
        request: Request<SnapshotRequest>,
    ) -> Answer<snapshot::SnapshotStream> {
        self.context.count_client(request.metadata(), true);
        self.context.admit(request.metadata(), true)?;
        self.context.ensure_not_corrupt()?;
        self.context
            .authorise_call(&Credentials::of(&request), RequestedAccess::RootRole, true)
            .await?;
        let chunks = snapshot::send(self.context.clone(), &self.snapshots)?;
        Ok(tonic::Response::new(chunks))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_recognised_as_in_etcd() {
        for version in ["3.6.0", "3.6", "3.6.7", "3.6.0-rc.1", "03.6.0", "0.0"] {
            assert!(is_version(version), "{version}");
        }
        for text in
            ["", "3", "abc", "3.6-rc", "3.a.0", "3.6.0.1", "3.6.", "99999999999999999999.0.0"]
        {
            assert!(!is_version(text), "{text}");
        }
    }
}
