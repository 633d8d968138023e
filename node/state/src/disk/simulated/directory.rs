//! A simulated directory: the names that processes see, the durable names, and the unsynced
//! changes.

use std::collections::BTreeMap;

use super::rng::Rng;

#[derive(Clone, Debug)]
pub(super) enum DirectoryChange {
    Link { name: String, inode: u64 },
    Unlink { name: String },
    Rename { from: String, to: String },
}

#[derive(Clone, Default)]
pub(super) struct Directory {
    visible: BTreeMap<String, u64>,
    durable: BTreeMap<String, u64>,
    changes: Vec<DirectoryChange>,
}

fn apply(names: &mut BTreeMap<String, u64>, change: &DirectoryChange) {
    match change {
        DirectoryChange::Link { name, inode } => {
            names.insert(name.clone(), *inode);
        }
        DirectoryChange::Unlink { name } => {
            names.remove(name);
        }
        DirectoryChange::Rename { from, to } => {
            if let Some(inode) = names.remove(from) {
                names.insert(to.clone(), inode);
            }
        }
    }
}

impl Directory {
    pub(super) fn get(&self, name: &str) -> Option<u64> {
        self.visible.get(name).copied()
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.visible.keys().cloned().collect()
    }

    /// Returns every inode that can have a name after a crash.
    pub(super) fn all_inodes(&self) -> impl Iterator<Item = u64> {
        let linked = self.changes.iter().filter_map(|change| match change {
            DirectoryChange::Link { inode, .. } => Some(*inode),
            DirectoryChange::Unlink { .. } | DirectoryChange::Rename { .. } => None,
        });
        self.visible.values().chain(self.durable.values()).copied().chain(linked)
    }

    pub(super) fn change(&mut self, change: DirectoryChange) {
        apply(&mut self.visible, &change);
        self.changes.push(change);
    }

    pub(super) fn sync(&mut self) {
        self.durable = self.visible.clone();
        self.changes.clear();
    }

    /// Simulates a crash: the changes before a random point survive, and later ones are lost.
    pub(super) fn crash(&mut self, rng: &mut Rng) {
        let survive = rng.below(self.changes.len() + 1);
        for change in self.changes.drain(..).take(survive) {
            apply(&mut self.durable, &change);
        }
        self.visible = self.durable.clone();
    }
}
