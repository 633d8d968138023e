use std::io::Cursor;
use std::sync::Mutex;

use bytes::Bytes;
use node_state::state_machine::{EntryKind, Members, Snapshot};

use super::*;

/// State machine that counts the entries it has applied. Each entry's request id equals its index.
#[derive(Debug, Default)]
struct Count {
    applied: Position,
    durable: Arc<Mutex<Position>>,
    batches: Vec<usize>,
    /// Bytes of changes that each entry makes.
    bytes_per_entry: usize,
    unflushed_bytes: usize,
}

struct EmptySnapshot(Position);

impl Snapshot for EmptySnapshot {
    type Error = io::Error;

    fn position(&self) -> Position {
        self.0
    }

    fn members(&self) -> Members {
        Members::default()
    }

    fn write(&self, _: &mut dyn io::Write) -> io::Result<()> {
        Ok(())
    }
}

impl StateMachine for Count {
    type Outcome = u64;
    type Error = io::Error;
    type Snapshot = EmptySnapshot;

    fn is_final(_: &io::Error) -> bool {
        false
    }

    fn applied(&self) -> Position {
        self.applied
    }

    fn durable(&self) -> Position {
        *self.durable.lock().unwrap()
    }

    fn members(&self) -> Members {
        Members::default()
    }

    fn apply(&mut self, entries: &[CommittedEntry]) -> io::Result<ApplyResult<u64>> {
        self.batches.push(entries.len());
        self.applied = entries.last().unwrap().position;
        self.unflushed_bytes += entries.len() * self.bytes_per_entry;
        let indexes = entries.iter().map(|entry| entry.position.index);
        let outcomes = indexes.map(|index| (RequestId(index), index)).collect();
        Ok(ApplyResult { position: self.applied, outcomes, changes: Vec::new() })
    }

    fn unflushed_bytes(&self) -> usize {
        self.unflushed_bytes
    }

    fn checkpoint(&self) -> CheckpointWork<io::Error> {
        let (applied, durable) = (self.applied, Arc::clone(&self.durable));
        Box::new(move || {
            *durable.lock().unwrap() = applied;
            Ok(applied)
        })
    }

    fn snapshot(&self) -> EmptySnapshot {
        EmptySnapshot(self.applied)
    }

    fn install_snapshot(&mut self, input: &mut dyn Read) -> io::Result<Position> {
        let mut index = [0; 8];
        input.read_exact(&mut index)?;
        self.applied = at(u64::from_be_bytes(index));
        *self.durable.lock().unwrap() = self.applied;
        Ok(self.applied)
    }
}

/// Records all results as text, in order. The only snapshot file that it can open holds index 50.
#[derive(Default)]
struct OutputRecorder {
    all: Vec<String>,
    is_building: bool,
    /// Checkpoints that were begun and not run yet.
    checkpoints: Vec<CheckpointWork<io::Error>>,
}

impl ApplySink<Count> for OutputRecorder {
    fn notice(&mut self, notice: Notice) {
        self.all.push(match notice {
            Notice::Applied { at, .. } => format!("applied {}", at.index),
            Notice::Checkpointed(at) => format!("durable {}", at.index),
            Notice::Installed { at, .. } => format!("installed {}", at.index),
            Notice::Built(None) => "not built".to_owned(),
            other => format!("{other:?}"),
        });
    }

    fn answer(&mut self, outcomes: Vec<(RequestId, u64)>) {
        let ids: Vec<_> = outcomes.iter().map(|(RequestId(id), _)| id).collect();
        self.all.push(format!("answers {ids:?}"));
    }

    fn build(&mut self, snapshot: EmptySnapshot) -> bool {
        self.all.push(format!("build {}", snapshot.0.index));
        !std::mem::replace(&mut self.is_building, true)
    }

    fn checkpoint(&mut self, work: CheckpointWork<io::Error>) {
        self.all.push("begin checkpoint".to_owned());
        self.checkpoints.push(work);
    }

    fn open(&mut self, body: &Path) -> io::Result<impl Read> {
        if body == Path::new("fifty") {
            return Ok(Cursor::new(50_u64.to_be_bytes()));
        }
        Err(io::ErrorKind::NotFound.into())
    }

    fn installed(&mut self, body: &Path) {
        self.all.push(format!("done with {}", body.display()));
    }
}

fn at(index: u64) -> Position {
    Position { index, term: 1 }
}

fn entries(indexes: std::ops::RangeInclusive<u64>) -> ApplyJob {
    let entry = |index| CommittedEntry {
        position: at(index),
        kind: EntryKind::Normal,
        data: Bytes::from_static(b"ten bytes."),
    };
    ApplyJob::Apply(indexes.map(entry).collect())
}

fn applier(policy: CheckpointPolicy) -> Applier<Count> {
    Applier::new(Count::default(), policy, Arc::default())
}

/// Runs all `jobs`. Returns the recorded results, and the number of entries in each applied batch.
fn run(policy: CheckpointPolicy, jobs: Vec<ApplyJob>) -> (Vec<String>, Vec<usize>) {
    let (mut applier, mut told) = (applier(policy), OutputRecorder::default());
    let mut jobs = jobs.into_iter();
    while let Some(first) = jobs.next() {
        applier.run(ApplyBatch::gather(first, &mut jobs), &mut told).unwrap();
    }
    (told.all, applier.machine.batches)
}

#[test]
fn queued_entries_share_a_transaction_up_to_the_next_other_job() {
    let install = ApplyJob::Install(at(50), "fifty".into());
    let jobs = vec![
        entries(1..=2),
        entries(3..=3),
        ApplyJob::Build,
        ApplyJob::Build,
        entries(4..=4),
        entries(5..=6),
        install,
        entries(51..=51),
    ];
    let (told, batches) = run(CheckpointPolicy::default(), jobs);
    assert_eq!(batches, [3, 3, 1]);
    assert_eq!(
        told,
        [
            "applied 3",
            "answers [1, 2, 3]",
            "build 3",
            "build 3",
            "not built",
            "applied 6",
            "answers [4, 5, 6]",
            "done with fifty",
            "installed 50",
            "applied 51",
            "answers [51]",
        ]
    );
}

#[test]
fn a_checkpoint_is_begun_after_the_answers_and_runs_elsewhere() {
    let by_entries = CheckpointPolicy { bytes: usize::MAX, entries: 2 };
    let by_bytes = CheckpointPolicy { bytes: 20, entries: u64::MAX };
    for policy in [by_entries, by_bytes] {
        let one_by_one =
            |index| run(policy, vec![entries(1..=1), ApplyJob::Build, entries(2..=index)]);
        let (told, _) = one_by_one(2);
        assert_eq!(told[3..], ["applied 2", "answers [2]", "begin checkpoint"]);
        let (told, _) = run(policy, vec![entries(1..=1)]);
        assert_eq!(told, ["applied 1", "answers [1]"], "not due yet");
    }
}

#[test]
fn a_begun_checkpoint_resets_the_counts_of_bytes_and_entries() {
    for policy in [
        CheckpointPolicy { bytes: 20, entries: u64::MAX },
        CheckpointPolicy { bytes: usize::MAX, entries: 2 },
    ] {
        let jobs =
            vec![entries(1..=2), ApplyJob::Build, entries(3..=3), ApplyJob::Build, entries(4..=4)];
        let (told, _) = run(policy, jobs);
        let begun = |told: &[String]| told.iter().filter(|all| *all == "begin checkpoint").count();
        let third = told.iter().position(|line| line == "applied 3").unwrap();
        let fourth = told.iter().position(|line| line == "applied 4").unwrap();
        assert_eq!([third, fourth, told.len()].map(|end| begun(&told[..end])), [1, 1, 2]);
    }
}

#[test]
fn changes_that_are_larger_than_their_entries_make_a_checkpoint_due() {
    let policy = CheckpointPolicy { bytes: 1_000, entries: u64::MAX };
    let machine = Count { bytes_per_entry: 400, ..Count::default() };
    let mut applier = Applier::new(machine, policy, Arc::default());
    let mut told = OutputRecorder::default();
    let mut begun = |index| {
        let turn = ApplyBatch::gather(entries(index..=index), std::iter::empty());
        applier.run(turn, &mut told).unwrap();
        told.checkpoints.len()
    };
    assert_eq!([1, 2, 3, 4, 5, 6].map(&mut begun), [0, 0, 1, 1, 1, 2]);
}

#[test]
fn a_checkpoint_reports_its_position_when_it_has_run() {
    let policy = CheckpointPolicy { bytes: 20, entries: 2 };
    let (mut applier, mut told) = (applier(policy), OutputRecorder::default());
    applier.run(ApplyBatch::gather(entries(1..=2), std::iter::empty()), &mut told).unwrap();
    let work = told.checkpoints.pop().unwrap();
    assert_eq!(applier.machine.durable().index, 0, "it was only begun");
    let notice = run_checkpoint(work, &DriverMetrics::default()).unwrap();
    assert!(matches!(notice, Notice::Checkpointed(end) if end == at(2)), "{notice:?}");
    assert_eq!(applier.machine.durable(), at(2));
}

#[test]
fn an_idle_machine_is_made_durable_once() {
    let (mut applier, mut told) = (applier(CheckpointPolicy::default()), OutputRecorder::default());
    applier.checkpoint(&mut told).unwrap();
    assert!(told.all.is_empty(), "there is nothing to make durable");
    applier.run(ApplyBatch::gather(entries(1..=1), std::iter::empty()), &mut told).unwrap();
    applier.checkpoint(&mut told).unwrap();
    applier.checkpoint(&mut told).unwrap();
    assert_eq!(told.all[2..], ["durable 1"]);
}

#[test]
fn an_unreadable_snapshot_body_fails_before_the_machine_has_changed() {
    let (mut applier, mut told) = (applier(CheckpointPolicy::default()), OutputRecorder::default());
    let turn = ApplyBatch::gather(ApplyJob::Install(at(9), "gone".into()), std::iter::empty());
    assert!(matches!(applier.run(turn, &mut told), Err(ApplierError::Body(_))));
    assert!(told.all.is_empty() && applier.machine.applied == Position::default());
}

#[test]
#[should_panic(expected = "of another position than its message")]
fn a_snapshot_body_of_another_position_than_its_message_panics() {
    let turn = ApplyBatch::gather(ApplyJob::Install(at(9), "fifty".into()), std::iter::empty());
    let _ = applier(CheckpointPolicy::default()).run(turn, &mut OutputRecorder::default());
}
