//! A copy of the keys of a prefix, kept as Kubernetes' API server keeps one.
//!
//! The copy begins with a list of the prefix in pages, all at the first page's revision. Then the
//! copy follows a watch from the next revision on, with the previous value in each event. The copy
//! reaches another revision by a list, by events, or by progress without events. At each such
//! revision it must equal the store's keys. A copy that learns that an event is missing starts with
//! a new list.

use std::collections::BTreeMap;

use bytes::Bytes;
use node_proto::etcdserverpb::{RangeRequest, RangeResponse};
use node_proto::mvccpb::event::EventType;
use node_proto::mvccpb::{Event, KeyValue};
use node_state::apply::ApplyError;
use node_state::mvcc::KeyRange;
use node_state::mvcc::watch::WatchSpec;

use super::InvariantViolation;
use crate::model::ReferenceModel;

/// A list of the prefix's keys, of which not all pages have arrived.
#[derive(Debug, Default)]
struct UnfinishedList {
    /// Revision of the first page; 0 before that page has arrived.
    revision: i64,
    /// Number of keys that the first page has announced and that have not arrived yet.
    left: i64,
    kvs: BTreeMap<Bytes, KeyValue>,
}

/// State of a copy of a prefix's keys, after it has taken a page of a list, events or a progress
/// notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyState {
    /// The prefix copy needs more pages or events before it can be compared with the store.
    Unfinished,
    /// The prefix copy was compared with the store, and equals it.
    Checked,
    /// A revision or a previous value that the prefix copy needs is gone, so the prefix is listed
    /// again.
    Outdated,
}

/// A copy of the keys of one prefix.
#[derive(Debug)]
pub(super) struct PrefixCopy {
    prefix: &'static str,
    range: KeyRange,
    /// Records that the prefix copy has, by key.
    records: BTreeMap<Bytes, KeyValue>,
    /// Revision of the store that the prefix copy has reached.
    revision: i64,
    listing: Option<UnfinishedList>,
    /// Id of the watch that the prefix copy follows, on the API server's stream.
    pub watch: Option<i64>,
    /// Newest revision of the store that the API server knows. The prefix copy has to reach it.
    pub wanted_revision: i64,
}

fn violated(what: String) -> InvariantViolation {
    InvariantViolation::new("copies", what)
}

/// Returns the end of the range of all keys with this prefix. The prefix ends in a slash.
fn end_of(prefix: &str) -> String {
    format!("{}0", prefix.trim_end_matches('/'))
}

impl PrefixCopy {
    pub(super) fn new(prefix: &'static str) -> Self {
        Self {
            prefix,
            range: KeyRange::new(prefix.into(), end_of(prefix).into()),
            records: BTreeMap::new(),
            revision: 0,
            listing: Some(UnfinishedList::default()),
            watch: None,
            wanted_revision: 0,
        }
    }

    pub(super) fn key(&self, number: u64) -> Bytes {
        format!("{}{number}", self.prefix).into()
    }

    /// Returns the record that the prefix copy has of a key; it may be older than the store's
    /// record.
    pub(super) fn get(&self, key: &Bytes) -> Option<&KeyValue> {
        self.records.get(key)
    }

    pub(super) fn is_listed(&self) -> bool {
        self.listing.is_none()
    }

    /// Returns whether the prefix copy has reached this revision.
    pub(super) fn is_at(&self, revision: i64) -> bool {
        self.is_listed() && self.revision >= revision
    }

    /// Returns the request for the next page of the list.
    pub(super) fn page(&self, limit: i64) -> RangeRequest {
        let listing = self.listing.as_ref();
        let last = listing.and_then(|listing| listing.kvs.keys().next_back());
        let after = |last: &Bytes| [last, &b"\0"[..]].concat().into();
        RangeRequest {
            key: last.map_or_else(|| self.prefix.into(), after),
            range_end: end_of(self.prefix).into(),
            revision: listing.map_or(0, |listing| listing.revision),
            limit,
            ..RangeRequest::default()
        }
    }

    /// Handles a page of the prefix's keys, or the error that came instead of the page.
    pub(super) fn take_page(
        &mut self,
        model: &ReferenceModel,
        page: &Result<RangeResponse, ApplyError>,
    ) -> Result<CopyState, InvariantViolation> {
        let Some(listing) = &mut self.listing else { return Ok(CopyState::Unfinished) };
        let page = match page {
            Ok(page) => page,
            Err(ApplyError::Compacted) if listing.revision > 0 => return Ok(self.start_over()),
            Err(other) => return Err(violated(format!("{listing:?} is followed by {other:?}"))),
        };
        if listing.revision == 0 {
            listing.revision = page.header.as_ref().map_or(0, |header| header.revision);
            listing.left = page.count;
        }
        let left = listing.left - i64::try_from(page.kvs.len()).expect("few");
        if page.count != listing.left || page.more != (left > 0) || left < 0 {
            return Err(violated(format!("{listing:?} is followed by {page:?}")));
        }
        listing.left = left;
        listing.kvs.extend(page.kvs.iter().map(|kv| (kv.key.clone(), kv.clone())));
        if page.more {
            return Ok(CopyState::Unfinished);
        }
        (self.records, self.revision) = (std::mem::take(&mut listing.kvs), listing.revision);
        self.listing = None;
        self.check(model, "list")
    }

    /// Returns the parameters of a watch that begins right after the prefix copy's revision.
    pub(super) fn spec(&self) -> WatchSpec {
        WatchSpec {
            range: self.range.clone(),
            start_revision: self.revision + 1,
            no_put: false,
            no_delete: false,
            progress_notify: true,
        }
    }

    /// Applies events as they were sent to the client. `is_readable` is false if the member's disk
    /// has failed, so that previous values may be missing.
    pub(super) fn take_events(
        &mut self,
        model: &ReferenceModel,
        events: Vec<Event>,
        is_readable: bool,
    ) -> Result<CopyState, InvariantViolation> {
        let before = self.revision;
        for event in events {
            let Some(kv) = event.kv.clone() else {
                return Err(violated(format!("an event without a key: {event:?}")));
            };
            let (at, is_put) = (kv.mod_revision, event.r#type() == EventType::Put);
            if at <= before || at < self.revision {
                let revision = self.revision;
                return Err(violated(format!("received {kv:?} at revision {revision}")));
            }
            let is_new = is_put && kv.create_revision == at;
            let can_be_read = is_readable && model.compacted() < at;
            let record = self.records.get(&kv.key);
            match &event.prev_kv {
                // Kubernetes also lists the prefix again if a previous value is missing, because
                // its own watchers need that value.
                None if !is_new && !can_be_read => return Ok(self.start_over()),
                previous if previous.as_ref() == record && record.is_none() == is_new => {}
                _ => return Err(violated(format!("{event:?} after {record:?}"))),
            }
            self.revision = at;
            if is_put {
                self.records.insert(kv.key.clone(), kv);
            } else {
                self.records.remove(&kv.key);
            }
        }
        self.check(model, "events")
    }

    /// Handles a progress notice, which means that all events up to `revision` have been sent.
    pub(super) fn take_progress(
        &mut self,
        model: &ReferenceModel,
        revision: i64,
    ) -> Result<CopyState, InvariantViolation> {
        if revision < self.revision {
            let at = self.revision;
            return Err(violated(format!("progress to {revision} of a copy at {at}")));
        }
        self.revision = revision;
        self.check(model, "progress")
    }

    /// Handles the end of the prefix copy's watch, whose next event was compacted away.
    pub(super) fn take_compaction(&mut self, from: i64) -> Result<CopyState, InvariantViolation> {
        if from <= self.revision + 1 {
            let at = self.revision;
            return Err(violated(format!("ended for a compaction at {from}, a copy at {at}")));
        }
        Ok(self.start_over())
    }

    fn start_over(&mut self) -> CopyState {
        self.listing = Some(UnfinishedList::default());
        CopyState::Outdated
    }

    fn check(&self, model: &ReferenceModel, after: &str) -> Result<CopyState, InvariantViolation> {
        let expected = model.records_in(&self.range, self.revision);
        if self.records.values().eq(&expected) {
            return Ok(CopyState::Checked);
        }
        let (records, revision) = (&self.records, self.revision);
        Err(violated(format!("{records:?} after {after} at {revision}, not {expected:?}")))
    }
}
