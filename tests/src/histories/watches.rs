//! Checks the responses that a watcher received. Whichever members send them, all matching changes
//! must arrive once and in order, and the changes of one revision must arrive together. A progress
//! notification must name no revision whose changes the watcher has not received.

use node_proto::etcdserverpb::WatchResponse;
use node_proto::etcdserverpb::watch_create_request::FilterType;
use node_proto::mvccpb::{Event, KeyValue, event::EventType};
use node_state::mvcc::{KeyRange, Revision};

use super::{RecordedStream, Rule, RuleViolation, Watcher, caller};
use crate::model::{KeyChange, ReferenceModel};

/// Checks one watcher, and returns the number of its events.
///
/// # Errors
/// Returns the first violation that was found.
pub fn check(watcher: &Watcher, model: &ReferenceModel, last: i64) -> Result<usize, RuleViolation> {
    let request = &watcher.request;
    let permission = model.users.may_read(
        caller(watcher.user.as_deref()).as_ref(),
        &request.key,
        &request.range_end,
    );
    if permission.is_err() {
        return check_refused(watcher);
    }
    let mut checker = WatchChecker {
        range: KeyRange::new(request.key.clone(), request.range_end.clone()),
        no_put: request.filters.contains(&FilterType::Noput.into()),
        no_delete: request.filters.contains(&FilterType::Nodelete.into()),
        prev_kv: request.prev_kv,
        model,
        last,
        received_up_to: None,
        events: 0,
    };
    for stream in &watcher.streams {
        checker.check_stream(stream)?;
    }
    match checker.received_up_to {
        Some(received) if received >= last => Ok(checker.events),
        received => {
            let what = format!("received up to {received:?}, and {last} is the last");
            Err(RuleViolation::new(Rule::WatchEverything, what))
        }
    }
}

/// Checks that a watcher without permission received nothing.
fn check_refused(watcher: &Watcher) -> Result<usize, RuleViolation> {
    let responses = watcher.streams.iter().flat_map(|stream| &stream.responses);
    let mut received =
        responses.map(|(_, response)| response).filter(|response| !response.canceled);
    match received.find(|response| !response.created) {
        None => Ok(0),
        Some(response) => {
            let what = format!("{:?} received {response:?}", watcher.user);
            Err(RuleViolation::new(Rule::Permitted, what))
        }
    }
}

struct WatchChecker<'m> {
    range: KeyRange,
    no_put: bool,
    no_delete: bool,
    prev_kv: bool,
    model: &'m ReferenceModel,
    /// Last revision to check.
    last: i64,
    /// Revision up to which the watcher has received all changes; `None` before the watch is
    /// created.
    received_up_to: Option<i64>,
    events: usize,
}

impl WatchChecker<'_> {
    fn check_stream(&mut self, stream: &RecordedStream) -> Result<(), RuleViolation> {
        if stream.start_revision > 0 {
            let next = *self.received_up_to.get_or_insert(stream.start_revision - 1) + 1;
            let start = stream.start_revision.min(self.last + 1);
            assert_eq!(start, next, "each stream continues the one before");
        }
        for (at, response) in &stream.responses {
            let received = self.check_response(response, stream);
            received.map_err(|RuleViolation { rule, description: what }| {
                let what = format!("{what}; by member {} at {at}: {response:?}", stream.member);
                RuleViolation::new(rule, what)
            })?;
        }
        Ok(())
    }

    fn check_response(
        &mut self,
        response: &WatchResponse,
        stream: &RecordedStream,
    ) -> Result<(), RuleViolation> {
        let header = response.header.as_ref().map_or(0, |header| header.revision);
        if response.canceled {
            return Ok(());
        }
        if response.created {
            if stream.start_revision == 0 {
                self.received_up_to = Some(header.min(self.last));
            }
            return Ok(());
        }
        if response.events.is_empty() {
            return self.check_complete(header.min(self.last), Rule::WatchProgress);
        }
        let mut events = &response.events[..];
        while let Some(first) = events.first() {
            let revision = revision(first)?;
            let count = events.iter().take_while(|event| revision_of(event) == revision).count();
            if revision > self.last {
                // Events after the last revision are not checked. But such an event implies that
                // all events up to the last revision should have been received.
                self.check_complete(self.last, Rule::WatchInOrder)?;
                break;
            }
            self.check_revision(revision, &events[..count])?;
            events = &events[count..];
        }
        match self.received_up_to {
            Some(received) if received > header => {
                let what = format!("{received} by a member that stands at {header}");
                Err(RuleViolation::new(Rule::WatchInOrder, what))
            }
            _ => Ok(()),
        }
    }

    /// Checks that all changes up to `revision` have been received; otherwise `rule` is violated.
    fn check_complete(&mut self, revision: i64, rule: Rule) -> Result<(), RuleViolation> {
        let received = self.received_revision()?;
        if let Some(missing) = self.expected_changes(received, revision).first() {
            let what = format!("all up to {revision} without {missing:?}");
            return Err(RuleViolation::new(rule, what));
        }
        self.received_up_to = Some(received.max(revision));
        Ok(())
    }

    fn check_revision(&mut self, revision: i64, events: &[Event]) -> Result<(), RuleViolation> {
        let received = self.received_revision()?;
        if revision <= received {
            let what = format!("{revision} again, or too late: all was received up to {received}");
            return Err(RuleViolation::new(Rule::WatchInOrder, what));
        }
        if let Some(missing) = self.expected_changes(received, revision - 1).first() {
            let what = format!("{revision} without {missing:?} before it");
            return Err(RuleViolation::new(Rule::WatchInOrder, what));
        }
        let expected = self.expected_changes(revision - 1, revision);
        for (event, change) in events.iter().zip(&expected) {
            self.check_event(event, change)?;
        }
        if events.len() > expected.len() {
            let what = format!("{:?}, where there is no more", events[expected.len()]);
            return Err(RuleViolation::new(Rule::WatchEvents, what));
        }
        if events.len() < expected.len() {
            let what = format!("{revision} without {:?}", expected[events.len()]);
            return Err(RuleViolation::new(Rule::WatchWholeRevisions, what));
        }
        self.received_up_to = Some(revision);
        self.events += events.len();
        Ok(())
    }

    fn check_event(&self, event: &Event, change: &KeyChange) -> Result<(), RuleViolation> {
        let is_put = event.r#type() == EventType::Put;
        let before = self.model.live_record(&change.kv.key, change.revision.main - 1);
        let before = before.filter(|_| self.prev_kv);
        let is_right = event.kv.as_ref() == Some(&change.kv)
            && is_put == change.is_put
            && event.prev_kv.as_ref() == before;
        if is_right {
            return Ok(());
        }
        let what = format!("{event:?}, not {change:?} after {before:?}");
        Err(RuleViolation::new(Rule::WatchEvents, what))
    }

    fn received_revision(&self) -> Result<i64, RuleViolation> {
        let what = "received something before the response that creates the watch";
        self.received_up_to.ok_or_else(|| RuleViolation::new(Rule::WatchInOrder, what))
    }

    /// Returns the matching changes after revision `received`, up to `revision`.
    fn expected_changes(&self, received: i64, revision: i64) -> Vec<&KeyChange> {
        let changes = self.model.changes_after(Revision { main: received, sub: u32::MAX });
        let changes = changes.iter().take_while(|change| change.revision.main <= revision);
        let passes = |change: &&KeyChange| {
            let filtered = if change.is_put { self.no_put } else { self.no_delete };
            !filtered && self.range.contains(&change.kv.key)
        };
        changes.filter(passes).collect()
    }
}

fn revision_of(event: &Event) -> i64 {
    event.kv.as_ref().map_or(0, |kv: &KeyValue| kv.mod_revision)
}

fn revision(event: &Event) -> Result<i64, RuleViolation> {
    match revision_of(event) {
        0 => {
            let what = format!("{event:?} has no revision");
            Err(RuleViolation::new(Rule::WatchEvents, what))
        }
        revision => Ok(revision),
    }
}
