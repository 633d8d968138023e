//! A storage backend that keeps its file's length in memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use redb::StorageBackend;

use super::error::StoreError;

/// Storage backend that publishes its file's length in an atomic, for readers that must not touch
/// the disk.
#[derive(Debug)]
pub(super) struct LengthTrackingBackend<B> {
    inner: B,
    length: Arc<AtomicU64>,
}

impl<B: StorageBackend> LengthTrackingBackend<B> {
    pub(super) fn new(inner: B, length: Arc<AtomicU64>) -> Result<Self, StoreError> {
        let now = inner.len().map_err(redb::StorageError::from)?;
        length.store(now, Ordering::Relaxed);
        Ok(Self { inner, length })
    }
}

impl<B: StorageBackend> StorageBackend for LengthTrackingBackend<B> {
    fn len(&self) -> std::io::Result<u64> {
        self.inner.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        self.inner.read(offset, out)
    }

    fn set_len(&self, len: u64) -> std::io::Result<()> {
        self.inner.set_len(len)?;
        self.length.store(len, Ordering::Relaxed);
        Ok(())
    }

    fn sync_data(&self) -> std::io::Result<()> {
        self.inner.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        self.inner.write(offset, data)
    }

    fn close(&self) -> std::io::Result<()> {
        self.inner.close()
    }
}
