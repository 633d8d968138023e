//! Compares a ledger with a model that keeps everything in maps, over random operations.

use std::collections::{BTreeMap, BTreeSet};

use discovery_formation::memory::LedgerEntry;
use discovery_formation::service::EndCause;

use super::*;
use crate::tests::random::Random;

/// Number of random sequences of operations.
const SEEDS: u64 = 12;
/// Number of operations in a sequence.
const OPERATIONS: usize = 250;
/// Number of clusters; few, so that most operations meet an entry.
const CLUSTERS: u128 = 12;

/// Entries that the ledger must hold.
#[derive(Default)]
struct Model {
    commits: BTreeMap<Uuid, &'static str>,
    documents: BTreeSet<Uuid>,
    ends: BTreeMap<Uuid, EndCause>,
    unconfirmed: BTreeSet<Uuid>,
    generation: u64,
}

impl Model {
    /// Adds a commit. Returns whether the cluster's first commit has this hash.
    fn add_commit(&mut self, cluster: Uuid, h: &'static str, has_document: bool) -> bool {
        self.ends.remove(&cluster);
        let is_first = !self.commits.contains_key(&cluster);
        let is_same = *self.commits.entry(cluster).or_insert(h) == h;
        if has_document && is_first {
            self.unconfirmed.insert(cluster);
        }
        if has_document && is_same {
            self.documents.insert(cluster);
        }
        is_same
    }

    fn add_end(&mut self, cluster: Uuid, cause: EndCause) {
        if !self.commits.contains_key(&cluster) {
            let end = self.ends.entry(cluster).or_insert(cause);
            if *end == EndCause::Deadline {
                *end = cause;
            }
        }
    }

    fn entry(&self, cluster: Uuid) -> Option<LedgerEntry> {
        match self.commits.get(&cluster) {
            Some(h) => Some(LedgerEntry::Commit {
                h: commit(cluster, h).hash().unwrap(),
                document: self.documents.contains(&cluster),
            }),
            None => self.ends.get(&cluster).copied().map(LedgerEntry::End),
        }
    }

    fn check(&self, ledger: &Ledger, seed: u64) {
        let mut entries = Vec::new();
        for cluster in (0..CLUSTERS).map(Uuid::from_u128) {
            let expected = self.entry(cluster);
            assert_eq!(ledger.entry(cluster).unwrap(), expected, "seed {seed}: {cluster}");
            assert_eq!(ledger.contains(cluster), expected.is_some(), "seed {seed}: {cluster}");
            let has_document = self.documents.contains(&cluster);
            let document = has_document.then(|| commit(cluster, self.commits[&cluster]));
            assert_eq!(ledger.commit_with_document(cluster).unwrap(), document, "seed {seed}");
            entries.extend(expected.map(|entry| (cluster, entry)));
        }
        assert_eq!(ledger.entries(None, usize::MAX).unwrap(), entries, "seed {seed}");
        assert_eq!(ledger.commits(), self.commits.len(), "seed {seed}");
        assert_eq!(ledger.is_empty(), entries.is_empty(), "seed {seed}");
        let unconfirmed = ledger.unconfirmed(None, usize::MAX).unwrap().into_iter();
        let unconfirmed: BTreeSet<Uuid> = unconfirmed.map(|(cluster, _)| cluster).collect();
        assert_eq!(unconfirmed, self.unconfirmed, "seed {seed}");
    }
}

fn any_cluster(random: &mut Random) -> Uuid {
    Uuid::from_u128(random.below(CLUSTERS as usize) as u128)
}

async fn copy_some(ledger: &Ledger, model: &mut Model, random: &mut Random) {
    let commits: Vec<(Uuid, &str)> =
        (0..random.below(4)).map(|_| (any_cluster(random), *random.pick(&[AA, BB]))).collect();
    let causes = [EndCause::Abandon, EndCause::Deadline, EndCause::Retire];
    let ends: Vec<(Uuid, EndCause)> =
        (0..random.below(3)).map(|_| (any_cluster(random), *random.pick(&causes))).collect();
    // The copied decisions can be of an earlier generation than the ledger's.
    let generation = model.generation.saturating_sub(u64::from(random.once_in(5)));
    for (cluster, h) in &commits {
        let h = if *h == AA { AA } else { BB };
        if model.add_commit(*cluster, h, false) && generation == model.generation {
            model.unconfirmed.remove(cluster);
        }
    }
    ends.iter().for_each(|(cluster, cause)| model.add_end(*cluster, *cause));
    let ends = ends.iter().map(|(cluster, cause)| (*cluster, cause.as_str().to_owned())).collect();
    let copied = CopiedDecisions { generation, ends, ..copied(1, &commits) };
    ledger.append_copied(copied).await.unwrap();
}

#[tokio::test]
async fn a_ledger_holds_what_the_model_does_after_random_operations_and_restarts() {
    for seed in 0..SEEDS {
        let dir = tempfile::tempdir().unwrap();
        let mut random = Random(seed);
        let mut ledger = Ledger::open(dir.path()).unwrap();
        let mut model = Model { generation: 1, ..Model::default() };
        ledger.record_position(seen(1)).await.unwrap();
        for _ in 0..OPERATIONS {
            let (cluster, h) = (any_cluster(&mut random), *random.pick(&[AA, BB]));
            match random.below(12) {
                0..5 => copy_some(&ledger, &mut model, &mut random).await,
                5..8 => {
                    let known = model.commits.get(&cluster).copied();
                    let ensured = ledger.ensure_commit(commit(cluster, h)).await;
                    assert_eq!(ensured.is_ok(), known.is_none_or(|known| known == h), "{seed}");
                    if ensured.is_ok() {
                        model.add_commit(cluster, h, true);
                    }
                }
                8..10 => {
                    // Append without the check of `ensure_commit`, as a faulty caller would.
                    let line = LedgerLine::Commit(Box::new(commit(cluster, h)));
                    ledger.append(vec![line]).await.unwrap();
                    model.add_commit(cluster, h, true);
                }
                10 => {
                    model.generation += 1;
                    model.unconfirmed.clear();
                    let seen = DatabasePosition { generation: model.generation, ..seen(1) };
                    ledger.record_position(seen).await.unwrap();
                }
                _ => ledger = reopened(dir.path(), ledger).await.unwrap(),
            }
            model.check(&ledger, seed);
        }
    }
}
