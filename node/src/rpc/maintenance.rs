//! Maintenance: status, alarms, checksums, moving the leader.

use std::sync::Arc;

use node_proto::command::Operation;
use node_proto::etcdserverpb::alarm_request::AlarmAction;
use node_proto::etcdserverpb::maintenance_server;
use node_proto::etcdserverpb::{
    AlarmMember, AlarmRequest, AlarmResponse, AlarmType, DowngradeInfo, HashKvRequest,
    HashKvResponse, MoveLeaderRequest, MoveLeaderResponse, StatusRequest, StatusResponse,
};
use tonic::{Request, Status};

use super::context::Context;
use super::error::Error;
use super::metrics::Method;
use crate::apply::Response;
use crate::identity::MemberId;
use crate::mvcc::{KeyValueHash, ReadError, View};

type Answer<T> = Result<tonic::Response<T>, Status>;

/// etcd's default for `--quota-backend-bytes`, which nothing here enforces yet.
const QUOTA_BYTES: i64 = 2 * 1024 * 1024 * 1024;

pub(super) struct Maintenance(pub(super) Arc<Context>);

/// How `etcdctl` and etcd's `errors` list show an alarm.
fn show(alarm: &AlarmMember) -> String {
    let kind = alarm.alarm().as_str_name();
    format!("memberID:{} alarm:{kind} ", alarm.member_id)
}

impl Maintenance {
    fn status(&self) -> StatusResponse {
        let node = self.0.status.borrow().clone();
        let store = &self.0.store;
        let view = store.view();
        let me = self.0.identity.member_id;
        let mut errors = Vec::new();
        if node.leader == 0 {
            errors.push(Error::NoLeader.text().to_owned());
        }
        errors.extend(view.alarms().iter().map(show));
        StatusResponse {
            header: Some(self.0.header(view.revision())),
            version: self.0.identity.version.to_owned(),
            db_size: i64::try_from(store.file_bytes()).unwrap_or(i64::MAX),
            leader: node.leader,
            raft_index: node.commit,
            raft_term: node.term,
            raft_applied_index: view.applied().index,
            errors,
            db_size_in_use: i64::try_from(store.record_bytes()).unwrap_or(i64::MAX),
            is_learner: view.members().is_learner(MemberId(me)),
            storage_version: crate::config::CLUSTER_VERSION.to_owned(),
            db_size_quota: QUOTA_BYTES,
            downgrade_info: Some(DowngradeInfo::default()),
        }
    }

    async fn alarm(&self, request: AlarmRequest) -> Result<AlarmResponse, Error> {
        if AlarmAction::try_from(request.action).is_err() {
            return Err(Error::UnknownMethod);
        }
        if request.action() != AlarmAction::Get {
            return match self.0.propose(Operation::Alarm(request)).await? {
                Response::Alarm(response) => Ok(response),
                other => unreachable!("an alarm is answered as one, not by {other:?}"),
            };
        }
        self.0.barrier(false).await?;
        let view = self.0.store.view();
        let wanted = |alarm: &&AlarmMember| {
            request.alarm() == AlarmType::None || alarm.alarm == request.alarm
        };
        let alarms = view.alarms().iter().filter(wanted).copied().collect();
        Ok(AlarmResponse { header: Some(self.0.header(view.revision())), alarms })
    }

    /// Runs `hash` where it may block; again on a newer view if a compaction overtakes it.
    async fn hash(&self, revision: i64) -> Result<(Arc<View>, KeyValueHash), Error> {
        loop {
            let store = self.0.store.clone();
            let work = move || {
                let view = store.view();
                let hash = store.hash_kv(&view, revision);
                (view, hash)
            };
            let (view, hash) =
                tokio::task::spawn_blocking(work).await.map_err(|_| Error::Stopped)?;
            match hash {
                Err(ReadError::Superseded) if revision == 0 => {}
                hash => return Ok((view, hash?)),
            }
        }
    }

    async fn hash_kv(&self, revision: i64) -> Result<HashKvResponse, Error> {
        let (view, hash) = self.hash(revision).await?;
        Ok(HashKvResponse {
            header: Some(self.0.header(view.revision())),
            hash: hash.hash,
            compact_revision: hash.compact_revision,
            hash_revision: hash.revision,
        })
    }

    async fn move_leader(&self, target: u64) -> Result<MoveLeaderResponse, Error> {
        self.0.handle.transfer_leader(target).await?;
        Ok(MoveLeaderResponse { header: Some(self.0.header(0)) })
    }

    async fn count<T>(
        &self,
        method: Method,
        work: impl Future<Output = Result<T, Error>>,
    ) -> Answer<T> {
        let call = self.0.metrics.start(method);
        let result = work.await.map_err(Status::from);
        call.end(result.as_ref().err());
        result.map(tonic::Response::new)
    }
}

#[tonic::async_trait]
impl maintenance_server::Maintenance for Maintenance {
    async fn status(&self, _: Request<StatusRequest>) -> Answer<StatusResponse> {
        self.count(Method::Status, async { Ok(self.status()) }).await
    }

    async fn alarm(&self, request: Request<AlarmRequest>) -> Answer<AlarmResponse> {
        self.count(Method::Alarm, async {
            let mut response = self.alarm(request.into_inner()).await?;
            self.0.fill(&mut response.header);
            Ok(response)
        })
        .await
    }

    async fn hash_kv(&self, request: Request<HashKvRequest>) -> Answer<HashKvResponse> {
        self.count(Method::HashKv, self.hash_kv(request.into_inner().revision)).await
    }

    async fn move_leader(&self, request: Request<MoveLeaderRequest>) -> Answer<MoveLeaderResponse> {
        self.count(Method::MoveLeader, self.move_leader(request.into_inner().target_id)).await
    }
}
