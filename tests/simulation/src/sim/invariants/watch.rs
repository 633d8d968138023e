//! Invariant of watches. A watch receives each change that it selects once, in order, and in whole
//! revisions. It receives no change that an earlier progress notice has covered. In the end it has
//! received all changes that it selects. Its client can continue it on another member from the
//! revision that it has reached.

use node_proto::mvccpb::KeyValue;
use node_state::mvcc::watch::{EventSelection, WatchSpec};
use node_state::mvcc::{EventKind, KeyRange, Revision};
use prost::Message as _;

use crate::model::{KeyChange, ReferenceModel};
use crate::sim::InvariantViolation;

/// State of one watch, as its client knows it.
#[derive(Debug)]
pub struct ExpectedWatch {
    range: KeyRange,
    no_put: bool,
    no_delete: bool,
    /// Point up to which all changes that the watch selects have been received.
    received_up_to: Revision,
    /// Revision of the last progress notice.
    progress_revision: i64,
}

fn violated(what: String) -> InvariantViolation {
    InvariantViolation::new("watch", what)
}

/// Returns the position after all changes of revision `main`.
fn end_of(main: i64) -> Revision {
    Revision { main, sub: u32::MAX }
}

impl ExpectedWatch {
    /// Creates a watch that begins at revision `start`.
    pub fn new(range: KeyRange, no_put: bool, no_delete: bool, start: i64) -> Self {
        Self { range, no_put, no_delete, received_up_to: end_of(start - 1), progress_revision: 0 }
    }

    /// Returns the request that continues the watch on any member.
    pub fn spec(&self) -> WatchSpec {
        WatchSpec {
            range: self.range.clone(),
            start_revision: self.next_revision(),
            no_put: self.no_put,
            no_delete: self.no_delete,
            progress_notify: true,
        }
    }

    /// Returns the first revision that isn't covered by events or progress.
    pub fn next_revision(&self) -> i64 {
        self.received_up_to.main.max(self.progress_revision) + 1
    }

    fn selects(&self, change: &KeyChange) -> bool {
        let passes = if change.is_put { !self.no_put } else { !self.no_delete };
        passes && self.range.contains(&change.kv.key)
    }

    fn next<'m>(&self, model: &'m ReferenceModel) -> Option<&'m KeyChange> {
        model.next_change(self.received_up_to, |change| self.selects(change))
    }

    /// Checks events that have arrived.
    pub fn check_events(
        &mut self,
        model: &ReferenceModel,
        picked: &EventSelection,
    ) -> Result<(), InvariantViolation> {
        for event in picked.events() {
            let kv = KeyValue::decode(event.kv.clone())
                .map_err(|error| violated(format!("an event can't be read: {error}")))?;
            let is_put = event.kind == EventKind::Put;
            let found = KeyChange { revision: event.revision, kv, is_put };
            let expected = self.next(model);
            if expected != Some(&found) {
                return Err(violated(format!("received {found:?}, not {expected:?}")));
            }
            if found.revision.main <= self.progress_revision {
                let covered = self.progress_revision;
                return Err(violated(format!("received {found:?} after progress to {covered}")));
            }
            self.received_up_to = found.revision;
        }
        self.check_nothing_missed(model, picked.revision(), "events")
    }

    /// Checks a progress notice that has arrived.
    pub fn check_progress(
        &mut self,
        model: &ReferenceModel,
        revision: i64,
    ) -> Result<(), InvariantViolation> {
        self.check_nothing_missed(model, revision, "progress")?;
        if revision < self.progress_revision {
            return Err(violated(format!(
                "progress went back from {} to {revision}",
                self.progress_revision
            )));
        }
        self.progress_revision = revision;
        Ok(())
    }

    fn check_nothing_missed(
        &self,
        model: &ReferenceModel,
        revision: i64,
        of: &str,
    ) -> Result<(), InvariantViolation> {
        match self.next(model) {
            Some(left) if left.revision.main <= revision => {
                Err(violated(format!("{of} up to {revision} without {left:?}")))
            }
            _ => Ok(()),
        }
    }

    /// Handles the end of a watch whose next revision was compacted away. The watch continues at
    /// revision `from`.
    pub fn continue_after_compaction(&mut self, from: i64) -> Result<(), InvariantViolation> {
        if from <= self.next_revision() {
            let next = self.next_revision();
            return Err(violated(format!("ended for a compaction at {from}, with {next} to come")));
        }
        self.received_up_to = self.received_up_to.max(end_of(from - 1));
        Ok(())
    }

    /// Returns whether the watch has received all its changes.
    pub fn is_done(&self, model: &ReferenceModel) -> bool {
        self.next(model).is_none()
    }
}
