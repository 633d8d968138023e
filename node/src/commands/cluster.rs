//! Reads of a whole cluster through one of its members, over etcd's API. The commands `compare` and
//! `move` use them.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt as _, future::join_all, stream};
use node_engine::causes::error_chain;
use node_proto::etcdserverpb::{
    AlarmMember, AlarmRequest, AlarmType, HashKvRequest, LeaseLeasesRequest, RangeRequest,
    StatusRequest, StatusResponse, WatchCreateRequest, WatchRequest, WatchResponse,
    alarm_request::AlarmAction, kv_client::KvClient, lease_client::LeaseClient,
    maintenance_client::MaintenanceClient, watch_client::WatchClient, watch_request::RequestUnion,
};
use node_proto::mvccpb::{Event, KeyValue, event::EventType};
use prost::Message as _;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use super::connection::{ClientTls, ConnectError, connect};

/// Maximum time to wait for an answer, and for the next message of a watch.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum size of an answer in bytes. A page of keys that is larger is requested again with fewer
/// keys.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// Wanted size of a page of keys in bytes.
const PAGE_BYTES: usize = 4 << 20;
/// Maximum number of keys in a page.
const MAX_PAGE_KEYS: i64 = 10_000;
/// Number of keys in the first page, when the size of the values isn't known yet.
const FIRST_PAGE_KEYS: i64 = 100;
/// Maximum number of times that leases and changes are read. They are read again if the cluster
/// changed meanwhile. If it changed during the last read too, the end of a lease may look like a
/// client's deletion.
const MAX_READS: u32 = 10;

/// First possible key, and the end of a range that means all keys from its start on.
const ZERO_BYTE: Bytes = Bytes::from_static(&[0]);
/// Name of a watch in errors.
const CHANGES: &str = "changes of keys";

#[derive(Debug, thiserror::Error)]
pub(super) enum ClusterReadError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("no member can serve requests: {0}")]
    NoMember(String),
    #[error(
        "{url} is of cluster {cluster_id:x}, but {other_url} of cluster {other_cluster_id:x}: name the members of one cluster"
    )]
    TwoClusters { url: String, cluster_id: u64, other_url: String, other_cluster_id: u64 },
    #[error("{url} refused the request for {what}: {code}: {text}")]
    Refused { url: String, what: &'static str, code: Code, text: String },
    #[error("{url} did not answer the request for {what} within {} s", ANSWER_TIMEOUT.as_secs())]
    Late { url: String, what: &'static str },
}

impl ClusterReadError {
    /// Whether a wrong command line caused the error. The command then exits with the code for
    /// wrong usage.
    pub(super) fn is_usage(&self) -> bool {
        match self {
            Self::Connect(error) => error.is_usage(),
            Self::TwoClusters { .. } => true,
            Self::NoMember(_) | Self::Refused { .. } | Self::Late { .. } => false,
        }
    }
}

/// Client URLs of a cluster's members, and the TLS files for them.
#[derive(Clone, Debug)]
pub(super) struct ClusterAddress {
    pub urls: Vec<String>,
    pub tls: ClientTls,
}

impl ClusterAddress {
    /// Makes sure that the members that answer belong to one cluster. Members that don't answer are
    /// left out.
    pub(super) async fn ensure_one_cluster(&self) -> Result<(), ClusterReadError> {
        let urls = self.urls.iter();
        let connect = urls.map(|url| ClusterReader::connect_to(url, &self.tls));
        let answers = join_all(connect).await;
        let members = answers.into_iter().filter_map(Result::ok);
        let members: Vec<(String, u64)> =
            members.map(|(member, _)| (member.url, member.cluster_id)).collect();
        ensure_equal_ids(&members)
    }
}

/// Makes sure that the members with these client URLs have equal cluster ids.
pub(super) fn ensure_equal_ids(members: &[(String, u64)]) -> Result<(), ClusterReadError> {
    let Some((url, id)) = members.first() else { return Ok(()) };
    let Some((other_url, other_id)) = members.iter().find(|(_, other)| other != id) else {
        return Ok(());
    };
    Err(ClusterReadError::TwoClusters {
        url: url.clone(),
        cluster_id: *id,
        other_url: other_url.clone(),
        other_cluster_id: *other_id,
    })
}

/// A connection to one member, through which its cluster is read.
pub(super) struct ClusterReader {
    /// Client URL of the member.
    pub url: String,
    pub cluster_id: u64,
    pub member_id: u64,
    channel: Channel,
}

impl ClusterReader {
    /// Connects to the first member that can serve linearizable reads.
    pub(super) async fn connect(address: &ClusterAddress) -> Result<Self, ClusterReadError> {
        let mut failures = Vec::new();
        for url in &address.urls {
            match Self::connect_to(url, &address.tls).await {
                Ok((_, status)) if status.leader == 0 => {
                    failures.push(format!("{url}: it knows no leader"));
                }
                Ok((_, status)) if status.is_learner => {
                    failures.push(format!("{url}: it is a learner"));
                }
                Ok((reader, _)) => return Ok(reader),
                Err(error) if error.is_usage() => return Err(error),
                Err(error) => failures.push(format!("{url}: {}", error_chain(&error))),
            }
        }
        Err(ClusterReadError::NoMember(failures.join("; ")))
    }

    /// Connects to the member at `url`, and returns its status too.
    pub(super) async fn connect_to(
        url: &str,
        tls: &ClientTls,
    ) -> Result<(Self, StatusResponse), ClusterReadError> {
        let channel = connect(url, tls).await?;
        let mut reader = Self { url: url.to_owned(), cluster_id: 0, member_id: 0, channel };
        let mut client = MaintenanceClient::new(reader.channel.clone());
        let status = reader.answer("its status", client.status(StatusRequest::default())).await?;
        if let Some(header) = &status.header {
            (reader.cluster_id, reader.member_id) = (header.cluster_id, header.member_id);
        }
        Ok((reader, status))
    }

    /// Returns the connection, on which a caller sends other requests than reads.
    pub(super) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Returns the newest revision, by a linearizable read.
    pub(super) async fn revision(&self) -> Result<i64, ClusterReadError> {
        let request = RangeRequest { key: ZERO_BYTE, count_only: true, ..Default::default() };
        let mut client = KvClient::new(self.channel.clone());
        let answer = self.answer("its revision", client.range(request)).await?;
        Ok(answer.header.as_ref().map_or(0, |header| header.revision))
    }

    /// Returns this member's hash of all changes up to `revision`, and its compacted revision.
    pub(super) async fn hash(&self, revision: i64) -> Result<(u32, i64), ClusterReadError> {
        let mut client = MaintenanceClient::new(self.channel.clone());
        let answer = self.answer("a hash", client.hash_kv(HashKvRequest { revision })).await?;
        Ok((answer.hash, answer.compact_revision))
    }

    /// Returns the active alarms of all members.
    pub(super) async fn alarms(&self) -> Result<Vec<AlarmMember>, ClusterReadError> {
        self.alarm(AlarmAction::Get, 0, AlarmType::None).await
    }

    /// Raises the NOSPACE alarm of the member behind this connection. When this returns, no member
    /// takes puts any more.
    pub(super) async fn raise_nospace(&self) -> Result<(), ClusterReadError> {
        self.alarm(AlarmAction::Activate, self.member_id, AlarmType::Nospace).await.map(drop)
    }

    /// Lowers the NOSPACE alarms of all members.
    pub(super) async fn lower_nospace(&self) -> Result<(), ClusterReadError> {
        for alarm in self.alarms().await? {
            if alarm.alarm() == AlarmType::Nospace {
                self.alarm(AlarmAction::Deactivate, alarm.member_id, AlarmType::Nospace).await?;
            }
        }
        Ok(())
    }

    async fn alarm(
        &self,
        action: AlarmAction,
        member_id: u64,
        alarm: AlarmType,
    ) -> Result<Vec<AlarmMember>, ClusterReadError> {
        let request = AlarmRequest { action: action.into(), member_id, alarm: alarm.into() };
        let mut client = MaintenanceClient::new(self.channel.clone());
        Ok(self.answer("alarms", client.alarm(request)).await?.alarms)
    }

    /// Returns the leases that exist now, and the changes after `revision`.
    pub(super) async fn changes_after(
        &self,
        revision: i64,
    ) -> Result<LaterChanges, ClusterReadError> {
        let mut reads = 0;
        loop {
            reads += 1;
            let now = self.revision().await?;
            let leases = self.leases().await?;
            let changes = self.read_changes(revision, now, leases).await?;
            // If a lease ended after the revision `now` was read, `changes` lacks the deletions of
            // its keys. These deletions have raised the revision, so everything is read again. A
            // lease without keys doesn't matter.
            if reads == MAX_READS || self.revision().await? == now {
                return Ok(changes);
            }
        }
    }

    async fn leases(&self) -> Result<BTreeSet<i64>, ClusterReadError> {
        let mut client =
            LeaseClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER_BYTES);
        let request = LeaseLeasesRequest::default();
        let answer = self.answer("leases", client.lease_leases(request)).await?;
        Ok(answer.leases.iter().map(|lease| lease.id).collect())
    }

    /// Reads the changes of all keys after revision `after`, up to revision `now`.
    async fn read_changes(
        &self,
        after: i64,
        now: i64,
        leases: BTreeSet<i64>,
    ) -> Result<LaterChanges, ClusterReadError> {
        let mut changes = LaterChanges { leases, ..LaterChanges::default() };
        if now <= after {
            return Ok(changes);
        }
        let create = WatchCreateRequest {
            key: ZERO_BYTE,
            range_end: ZERO_BYTE,
            start_revision: after + 1,
            prev_kv: true,
            fragment: true,
            ..Default::default()
        };
        let request = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
        // The stream of requests never ends, because its end would end the watch.
        let requests = stream::iter([request]).chain(stream::pending());
        let mut client =
            WatchClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER_BYTES);
        let mut answers = self.answer(CHANGES, client.watch(requests)).await?;
        let mut reached = after;
        loop {
            let next = tokio::time::timeout(ANSWER_TIMEOUT, answers.message()).await;
            let next = next.map_err(|_| self.late(CHANGES))?;
            let answer = next.map_err(|status| self.refused(CHANGES, &status))?;
            let ended = || self.refused(CHANGES, &Status::unavailable("the watch has ended"));
            let answer = answer.ok_or_else(ended)?;
            if answer.canceled {
                return Err(self.refused(CHANGES, &cancel_status(&answer)));
            }
            for event in &answer.events {
                reached = event.kv.as_ref().map_or(reached, |kv| kv.mod_revision);
                if reached > now {
                    return Ok(changes);
                }
                changes.count(event);
            }
            if reached >= now && !answer.fragment {
                return Ok(changes);
            }
        }
    }

    /// Waits for an answer, within [`ANSWER_TIMEOUT`].
    pub(super) async fn answer<T>(
        &self,
        what: &'static str,
        answer: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, ClusterReadError> {
        match tokio::time::timeout(ANSWER_TIMEOUT, answer).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(self.refused(what, &status)),
            Err(_) => Err(self.late(what)),
        }
    }

    fn refused(&self, what: &'static str, status: &Status) -> ClusterReadError {
        let (code, text) = (status.code(), status.message().to_owned());
        ClusterReadError::Refused { url: self.url.clone(), what, code, text }
    }

    fn late(&self, what: &'static str) -> ClusterReadError {
        ClusterReadError::Late { url: self.url.clone(), what }
    }
}

/// Returns why a member has ended a watch. If a compaction is the reason, the member sends no text,
/// so the text is made here.
fn cancel_status(answer: &WatchResponse) -> Status {
    match answer.compact_revision {
        0 => Status::unknown(answer.cancel_reason.clone()),
        revision => Status::out_of_range(format!(
            "a compaction has removed changes before revision {revision}"
        )),
    }
}

/// A cluster's leases, and its changes after a revision.
#[derive(Debug, Default)]
pub(super) struct LaterChanges {
    /// Ids of all leases that exist now.
    pub leases: BTreeSet<i64>,
    /// Ids of the leases that had keys, and have ended since the revision after which the changes
    /// were read.
    pub ended_leases: BTreeSet<i64>,
    /// Number of deletions of keys whose leases have ended.
    pub expired_keys: u64,
    /// Number of the changes that clients have made: all except the deletions that `expired_keys`
    /// counts.
    pub by_clients: u64,
    /// Key of the first change that a client has made.
    pub first_key: Option<Bytes>,
}

impl LaterChanges {
    /// Whether the lease existed at the revision after which the changes were read.
    pub(super) fn had_lease(&self, id: i64) -> bool {
        self.leases.contains(&id) || self.ended_leases.contains(&id)
    }

    fn count(&mut self, event: &Event) {
        let lease = event.prev_kv.as_ref().map_or(0, |before| before.lease);
        if lease != 0 && !self.leases.contains(&lease) {
            // The event can also be a put that took the key from the lease, before the lease ended.
            // A client has made that change.
            self.ended_leases.insert(lease);
            if event.r#type() == EventType::Delete {
                self.expired_keys += 1;
                return;
            }
        }
        self.by_clients += 1;
        if self.first_key.is_none() {
            self.first_key = event.kv.as_ref().map(|kv| kv.key.clone());
        }
    }
}

/// All keys of a cluster at one revision, in the order of the keys. One page of them is in memory.
pub(super) struct KeyPages<'c> {
    cluster: &'c ClusterReader,
    revision: i64,
    /// First possible key of the next page; `None` after the last page.
    next: Option<Bytes>,
    /// Maximum number of keys in the next page.
    limit: i64,
    page: VecDeque<KeyValue>,
}

impl<'c> KeyPages<'c> {
    pub(super) fn new(cluster: &'c ClusterReader, revision: i64) -> Self {
        let limit = FIRST_PAGE_KEYS;
        Self { cluster, revision, next: Some(ZERO_BYTE), limit, page: VecDeque::new() }
    }

    /// Reads the next page, if all keys of the page in memory were taken.
    pub(super) async fn fill(&mut self) -> Result<(), ClusterReadError> {
        while self.page.is_empty() {
            let Some(first) = self.next.clone() else { return Ok(()) };
            let request = RangeRequest {
                key: first,
                range_end: ZERO_BYTE,
                limit: self.limit,
                revision: self.revision,
                ..Default::default()
            };
            let mut client = KvClient::new(self.cluster.channel.clone())
                .max_decoding_message_size(MAX_ANSWER_BYTES);
            let answer = match self.cluster.answer("keys", client.range(request)).await {
                Err(ClusterReadError::Refused { code, .. })
                    if self.limit > 1 && may_be_too_large(code) =>
                {
                    self.limit = (self.limit / 8).max(1);
                    continue;
                }
                answer => answer?,
            };
            self.limit = next_limit(self.limit, answer.kvs.len(), answer.encoded_len());
            let last = answer.kvs.last().filter(|_| answer.more);
            self.next = last.map(|last| key_after(&last.key));
            self.page = answer.kvs.into();
        }
        Ok(())
    }

    /// Returns the first remaining key. [`Self::fill`] must have been called before.
    pub(super) fn first(&self) -> Option<&KeyValue> {
        self.page.front()
    }

    /// Removes the first remaining key.
    pub(super) fn take(&mut self) {
        self.page.pop_front();
    }
}

/// Whether a page with fewer keys may succeed where one was refused with this code. `OutOfRange` is
/// this client's code for a message above its limit, `ResourceExhausted` is a server's.
fn may_be_too_large(code: Code) -> bool {
    matches!(code, Code::OutOfRange | Code::ResourceExhausted)
}

/// Returns the maximum number of keys for a page of about [`PAGE_BYTES`]. The page before had
/// `keys` keys with `bytes` bytes, and the maximum `limit`. The result is at most four times
/// `limit`.
fn next_limit(limit: i64, keys: usize, bytes: usize) -> i64 {
    let average = (bytes / keys.max(1)).max(1);
    let wanted = i64::try_from(PAGE_BYTES / average).unwrap_or(MAX_PAGE_KEYS);
    wanted.clamp(1, limit.saturating_mul(4).clamp(1, MAX_PAGE_KEYS))
}

/// Returns the smallest key that is greater than `key`.
fn key_after(key: &[u8]) -> Bytes {
    Bytes::from([key, &b"\0"[..]].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: EventType, key: &'static str, lease: i64) -> Event {
        let kv = KeyValue { key: key.into(), ..KeyValue::default() };
        let before = KeyValue { lease, ..kv.clone() };
        Event { r#type: kind.into(), kv: Some(kv), prev_kv: Some(before) }
    }

    #[test]
    fn members_of_two_clusters_are_named_with_their_clusters() {
        let members = [("a:1", 10), ("b:1", 10), ("c:1", 11)];
        let members = members.map(|(url, id)| (url.to_owned(), id));
        assert!(ensure_equal_ids(&members[..2]).is_ok() && ensure_equal_ids(&[]).is_ok());
        let error = ensure_equal_ids(&members).unwrap_err();
        assert!(error.is_usage());
        assert_eq!(
            error.to_string(),
            "a:1 is of cluster a, but c:1 of cluster b: name the members of one cluster"
        );
    }

    #[test]
    fn only_deletions_with_an_ended_lease_are_not_a_clients_changes() {
        let mut changes = LaterChanges { leases: [7].into(), ..LaterChanges::default() };
        changes.count(&event(EventType::Delete, "expired", 5));
        assert_eq!((changes.expired_keys, changes.by_clients), (1, 0));
        assert!(changes.had_lease(5) && changes.had_lease(7) && !changes.had_lease(6));
        changes.count(&event(EventType::Delete, "deleted", 7));
        changes.count(&event(EventType::Delete, "plain", 0));
        changes.count(&event(EventType::Put, "put", 5));
        assert_eq!((changes.expired_keys, changes.by_clients), (1, 3));
        assert_eq!(changes.first_key.as_deref(), Some(&b"deleted"[..]));
    }

    #[test]
    fn a_lease_has_ended_even_if_a_put_had_taken_its_key_before() {
        let mut changes = LaterChanges { leases: [7].into(), ..LaterChanges::default() };
        changes.count(&event(EventType::Put, "k", 5));
        assert!(changes.had_lease(5));
        assert_eq!((changes.expired_keys, changes.by_clients), (0, 1));
    }

    #[test]
    fn a_watch_that_a_compaction_has_ended_says_so() {
        let ended = WatchResponse { canceled: true, compact_revision: 4, ..Default::default() };
        let status = cancel_status(&ended);
        assert_eq!(status.code(), Code::OutOfRange);
        assert_eq!(status.message(), "a compaction has removed changes before revision 4");
        let cancel_reason = "etcdserver: permission denied".to_owned();
        let denied = WatchResponse { canceled: true, cancel_reason, ..Default::default() };
        assert_eq!(cancel_status(&denied).message(), "etcdserver: permission denied");
    }

    #[test]
    fn pages_of_small_keys_grow_and_pages_of_large_values_shrink() {
        assert_eq!(next_limit(100, 100, 100 * 64), 400);
        assert_eq!(next_limit(10_000, 10_000, 10_000 * 64), MAX_PAGE_KEYS);
        assert_eq!(next_limit(400, 400, 400 << 20), 4);
        assert_eq!(next_limit(1, 1, 32 << 20), 1);
        assert_eq!(next_limit(1, 0, 30), 4);
    }

    #[test]
    fn no_key_lies_between_a_key_and_the_one_after_it() {
        assert_eq!(key_after(b"a"), "a\0");
    }
}
