//! Checks the responses that a watcher received. It must receive each matching change once, in
//! order, and whole revisions at a time, from whichever member. A progress notification must be
//! true.

use muster_node::mvcc::{KeyRange, Revision};
use node_proto::etcdserverpb::WatchResponse;
use node_proto::etcdserverpb::watch_create_request::FilterType;
use node_proto::mvccpb::{Event, KeyValue, event::EventType};

use super::{Rule, Stream, Violation, Watcher, caller};
use crate::model::{Change, Model};

/// Checks one watcher, and returns the number of its events.
///
/// # Errors
/// Returns the first violation that was found.
pub fn check(watcher: &Watcher, model: &Model, last: i64) -> Result<usize, Violation> {
    let wants = &watcher.wants;
    let may = model.users.may_read(
        caller(watcher.user.as_deref()).as_ref(),
        &wants.key,
        &wants.range_end,
    );
    if may.is_err() {
        return refused(watcher);
    }
    let mut telling = Telling {
        range: KeyRange::new(wants.key.clone(), wants.range_end.clone()),
        no_put: wants.filters.contains(&FilterType::Noput.into()),
        no_delete: wants.filters.contains(&FilterType::Nodelete.into()),
        prev_kv: wants.prev_kv,
        model,
        last,
        told: None,
        events: 0,
    };
    for stream in &watcher.streams {
        telling.stream(stream)?;
    }
    match telling.told {
        Some(told) if told >= last => Ok(telling.events),
        told => {
            let what = format!("told up to {told:?}, and {last} is the last");
            Err(Violation::new(Rule::WatchEverything, what))
        }
    }
}

/// Checks that a watcher without permission received nothing.
fn refused(watcher: &Watcher) -> Result<usize, Violation> {
    let heard = watcher.streams.iter().flat_map(|stream| &stream.heard);
    let mut told = heard.map(|(_, response)| response).filter(|response| !response.canceled);
    match told.find(|response| !response.created) {
        None => Ok(0),
        Some(response) => {
            let what = format!("{:?} was told {response:?}", watcher.user);
            Err(Violation::new(Rule::Permitted, what))
        }
    }
}

struct Telling<'m> {
    range: KeyRange,
    no_put: bool,
    no_delete: bool,
    prev_kv: bool,
    model: &'m Model,
    /// Last revision to check.
    last: i64,
    /// Revision up to which the watcher has received all changes; `None` before the watch is
    /// created.
    told: Option<i64>,
    events: usize,
}

impl Telling<'_> {
    fn stream(&mut self, stream: &Stream) -> Result<(), Violation> {
        if stream.start_revision > 0 {
            let next = *self.told.get_or_insert(stream.start_revision - 1) + 1;
            assert_eq!(stream.start_revision.min(self.last + 1), next, "it goes on where it was");
        }
        for (at, response) in &stream.heard {
            let told = self.response(response, stream);
            told.map_err(|Violation { rule, what }| {
                let what = format!("{what}; by member {} at {at}: {response:?}", stream.member);
                Violation::new(rule, what)
            })?;
        }
        Ok(())
    }

    fn response(&mut self, response: &WatchResponse, stream: &Stream) -> Result<(), Violation> {
        let header = response.header.as_ref().map_or(0, |header| header.revision);
        if response.canceled {
            return Ok(());
        }
        if response.created {
            if stream.start_revision == 0 {
                self.told = Some(header.min(self.last));
            }
            return Ok(());
        }
        if response.events.is_empty() {
            return self.all_told(header.min(self.last), Rule::WatchProgress);
        }
        let mut events = &response.events[..];
        while let Some(first) = events.first() {
            let revision = revision(first)?;
            let count = events.iter().take_while(|event| at(event) == revision).count();
            if revision > self.last {
                // The revision itself is not checked, but it shows that all earlier ones should
                // have been received.
                self.all_told(self.last, Rule::WatchInOrder)?;
                break;
            }
            self.revision(revision, &events[..count])?;
            events = &events[count..];
        }
        match self.told {
            Some(told) if told > header => {
                let what = format!("{told} by a member that stands at {header}");
                Err(Violation::new(Rule::WatchInOrder, what))
            }
            _ => Ok(()),
        }
    }

    /// Checks that all changes up to `revision` have been received; otherwise `rule` is violated.
    fn all_told(&mut self, revision: i64, rule: Rule) -> Result<(), Violation> {
        let told = self.begun()?;
        if let Some(left) = self.wanted(told, revision).first() {
            let what = format!("all up to {revision} without {left:?}");
            return Err(Violation::new(rule, what));
        }
        self.told = Some(told.max(revision));
        Ok(())
    }

    fn revision(&mut self, revision: i64, events: &[Event]) -> Result<(), Violation> {
        let told = self.begun()?;
        if revision <= told {
            let what = format!("{revision} again, or too late: all was told up to {told}");
            return Err(Violation::new(Rule::WatchInOrder, what));
        }
        if let Some(left) = self.wanted(told, revision - 1).first() {
            let what = format!("{revision} without {left:?} before it");
            return Err(Violation::new(Rule::WatchInOrder, what));
        }
        let expected = self.wanted(revision - 1, revision);
        for (event, change) in events.iter().zip(&expected) {
            self.event(event, change)?;
        }
        if events.len() > expected.len() {
            let what = format!("{:?}, where there is no more", events[expected.len()]);
            return Err(Violation::new(Rule::WatchEvents, what));
        }
        if events.len() < expected.len() {
            let what = format!("{revision} without {:?}", expected[events.len()]);
            return Err(Violation::new(Rule::WatchWholeRevisions, what));
        }
        self.told = Some(revision);
        self.events += events.len();
        Ok(())
    }

    fn event(&self, event: &Event, change: &Change) -> Result<(), Violation> {
        let is_put = event.r#type() == EventType::Put;
        let before = self.model.live(&change.kv.key, change.at.main - 1);
        let before = before.filter(|_| self.prev_kv);
        let is_right = event.kv.as_ref() == Some(&change.kv)
            && is_put == change.is_put
            && event.prev_kv.as_ref() == before;
        if is_right {
            return Ok(());
        }
        let what = format!("{event:?}, not {change:?} after {before:?}");
        Err(Violation::new(Rule::WatchEvents, what))
    }

    fn begun(&self) -> Result<i64, Violation> {
        let what = "told something before it was said where it begins";
        self.told.ok_or_else(|| Violation::new(Rule::WatchInOrder, what))
    }

    /// Returns the matching changes after revision `told`, up to `revision`.
    fn wanted(&self, told: i64, revision: i64) -> Vec<&Change> {
        let changes = self.model.changes_after(Revision { main: told, sub: u32::MAX });
        let changes = changes.iter().take_while(|change| change.at.main <= revision);
        let passes = |change: &&Change| {
            let filtered = if change.is_put { self.no_put } else { self.no_delete };
            !filtered && self.range.contains(&change.kv.key)
        };
        changes.filter(passes).collect()
    }
}

fn at(event: &Event) -> i64 {
    event.kv.as_ref().map_or(0, |kv: &KeyValue| kv.mod_revision)
}

fn revision(event: &Event) -> Result<i64, Violation> {
    match at(event) {
        0 => {
            let what = format!("{event:?} has no revision");
            Err(Violation::new(Rule::WatchEvents, what))
        }
        revision => Ok(revision),
    }
}
