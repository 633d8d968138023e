//! How far the saving or the verification of a backup has come, for status, metrics and terminals.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// Step in saving or verifying a backup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum BackupStep {
    /// The agent queries the node and the store; nothing has been copied yet.
    #[default]
    Preparing,
    /// The agent reads the manifests of all backups.
    Listing,
    /// The agent receives the snapshot from the node.
    Receiving,
    /// The agent reads the snapshot to verify it.
    Reading,
    /// The agent copies the snapshot to the store.
    Storing,
    /// The agent copies a backup from the store.
    Fetching,
    /// The agent decrypts a backup from the store.
    Decrypting,
    /// The agent makes a trial cluster from the backup.
    Restoring,
}

impl BackupStep {
    const ALL: [Self; 8] = [
        Self::Preparing,
        Self::Listing,
        Self::Receiving,
        Self::Reading,
        Self::Storing,
        Self::Fetching,
        Self::Decrypting,
        Self::Restoring,
    ];

    /// Returns the step as a word of a sentence.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Preparing => "preparing",
            Self::Listing => "reading the manifests",
            Self::Receiving => "receiving the snapshot",
            Self::Reading => "reading the snapshot",
            Self::Storing => "storing the snapshot",
            Self::Fetching => "fetching the backup",
            Self::Decrypting => "decrypting the backup",
            Self::Restoring => "restoring on trial",
        }
    }
}

/// A shared count of the bytes (or manifests) of the current step. Cloning is cheap.
#[derive(Clone, Debug, Default)]
pub(crate) struct BackupProgress(Arc<Counters>);

#[derive(Debug, Default)]
struct Counters {
    step: AtomicU8,
    bytes: AtomicU64,
}

impl BackupProgress {
    /// Begins a step, whose bytes are counted from 0.
    pub(crate) fn begin(&self, step: BackupStep) {
        let number = BackupStep::ALL.iter().position(|each| *each == step).unwrap_or_default();
        self.0.bytes.store(0, Ordering::Relaxed);
        self.0.step.store(u8::try_from(number).unwrap_or_default(), Ordering::Relaxed);
    }

    /// Counts further bytes of the step.
    pub(crate) fn add(&self, bytes: usize) {
        self.0.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Returns a text for people: the current step, and how many bytes (or manifests) it has
    /// processed.
    pub(crate) fn to_text(&self) -> String {
        let (step, count) = self.now();
        let count = match step {
            BackupStep::Listing => count.to_string(),
            _ => format_bytes(count),
        };
        format!("{}: {count}", step.as_str())
    }

    /// Returns the current step, and how many bytes (or manifests, while it is `Listing`) it has
    /// processed.
    pub(crate) fn now(&self) -> (BackupStep, u64) {
        let number = usize::from(self.0.step.load(Ordering::Relaxed));
        let step = BackupStep::ALL.get(number).copied().unwrap_or_default();
        (step, self.0.bytes.load(Ordering::Relaxed))
    }
}

/// Formats a number of bytes for people.
pub(crate) fn format_bytes(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        1_048_576..1_073_741_824 => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
        _ => format!("{:.2} GiB", bytes as f64 / 1_073_741_824.0),
    }
}
