//! A simulated file: the bytes that processes see, and the bytes that the medium can hold instead.

use std::collections::BTreeMap;

use super::rng::Rng;

/// Number of bytes that a disk writes atomically.
pub(super) const SECTOR: usize = 512;

/// Maximum number of versions of a sector that are kept between two syncs, including the durable
/// version. If there are more, versions between the oldest and the newest are discarded.
const MAX_SECTOR_VERSIONS: usize = 4;

type Sector = [u8; SECTOR];

#[derive(Clone, Default)]
pub(super) struct SimulatedFile {
    /// Contents, padded to whole sectors; zeros from `len` on.
    bytes: Vec<u8>,
    len: usize,
    durable_len: usize,
    /// Earlier contents of the sectors that changed since the last sync, the durable one first.
    dirty: BTreeMap<usize, Vec<Sector>>,
    /// For each sector that a failed sync has marked clean in the cache: the contents that the
    /// medium still has.
    lost: BTreeMap<usize, Sector>,
}

/// How much of a file's unsynced data a crash loses.
#[derive(Clone, Copy)]
enum Loss {
    Nothing,
    Everything,
    Mixed,
}

fn position(at: u64) -> usize {
    usize::try_from(at).expect("simulated files fit into memory")
}

impl SimulatedFile {
    pub(super) fn len(&self) -> u64 {
        self.len as u64
    }

    pub(super) fn read(&self, offset: u64, out: &mut [u8]) -> usize {
        let from = position(offset).min(self.len);
        let to = (from + out.len()).min(self.len);
        out[..to - from].copy_from_slice(&self.bytes[from..to]);
        to - from
    }

    pub(super) fn write(&mut self, offset: u64, data: &[u8]) {
        if data.is_empty() {
            return;
        }
        let from = position(offset);
        let to = from + data.len();
        if to > self.len {
            self.grow(to);
        }
        self.record_versions(from, to);
        self.bytes[from..to].copy_from_slice(data);
    }

    pub(super) fn resize(&mut self, len: u64) {
        let len = position(len);
        if len > self.len {
            self.grow(len);
        } else {
            self.record_versions(len, self.bytes.len());
            self.bytes[len..].fill(0);
            self.len = len;
        }
    }

    fn grow(&mut self, len: usize) {
        let padded = len.next_multiple_of(SECTOR);
        if padded > self.bytes.len() {
            self.bytes.resize(padded, 0);
        }
        self.len = len;
    }

    /// Records the contents of the sectors of a range before they change.
    fn record_versions(&mut self, from: usize, to: usize) {
        for sector in from / SECTOR..to.div_ceil(SECTOR) {
            let now = self.sector(sector);
            let older = self.dirty.entry(sector).or_default();
            if older.is_empty() {
                older.push(self.lost.remove(&sector).unwrap_or(now));
            } else {
                if older.len() == MAX_SECTOR_VERSIONS {
                    older.remove(1);
                }
                older.push(now);
            }
        }
    }

    fn sector(&self, number: usize) -> Sector {
        let at = number * SECTOR;
        self.bytes[at..at + SECTOR].try_into().expect("of a sector's length")
    }

    fn restore(&mut self, number: usize, content: &Sector) {
        let at = number * SECTOR;
        if let Some(place) = self.bytes.get_mut(at..at + SECTOR) {
            place.copy_from_slice(content);
        }
    }

    pub(super) fn sync(&mut self) {
        self.dirty.clear();
        self.durable_len = self.len;
    }

    /// Simulates a failed sync: random sectors become durable, and the kernel marks the others
    /// clean without writing them.
    pub(super) fn fail_sync(&mut self, rng: &mut Rng) {
        for (sector, older) in std::mem::take(&mut self.dirty) {
            if rng.coin() {
                self.lost.insert(sector, older[0]);
            }
        }
    }

    /// Drops the page cache, so that later reads see what the medium holds.
    pub(super) fn drop_cache(&mut self) {
        for (sector, content) in std::mem::take(&mut self.lost) {
            self.restore(sector, &content);
        }
    }

    pub(super) fn crash(&mut self, rng: &mut Rng) {
        let loss = match rng.below(4) {
            0 => Loss::Nothing,
            1 => Loss::Everything,
            _ => Loss::Mixed,
        };
        let len = self.surviving_len(loss, rng);
        let cut = self.len;
        for (sector, older) in std::mem::take(&mut self.dirty) {
            // If the crash loses the truncation, the file also keeps its old contents past the
            // truncated length.
            let uncut = len > cut && (sector + 1) * SECTOR > cut;
            let keep = match loss {
                Loss::Nothing => true,
                Loss::Everything => false,
                Loss::Mixed => rng.coin(),
            };
            if uncut || !keep {
                let pick = match loss {
                    Loss::Mixed if !uncut => rng.below(older.len()),
                    _ => 0,
                };
                self.restore(sector, &older[pick]);
            }
        }
        self.drop_cache();
        self.bytes.resize(len.next_multiple_of(SECTOR), 0);
        self.bytes[len..].fill(0);
        self.len = len;
        self.durable_len = len;
    }

    fn surviving_len(&self, loss: Loss, rng: &mut Rng) -> usize {
        match loss {
            Loss::Nothing => self.len,
            Loss::Everything => self.durable_len,
            Loss::Mixed if self.len > self.durable_len => {
                self.durable_len + rng.below(self.len - self.durable_len + 1)
            }
            Loss::Mixed if rng.coin() => self.len,
            Loss::Mixed => self.durable_len,
        }
    }
}
