//! Sizes.

use node_consensus::Guards;

/// Sizes of the log's files.
#[derive(Clone, Debug)]
pub struct LogOptions {
    /// One segment; a multiple of 4 KiB.
    pub segment_bytes: u64,
    /// Segments kept ready, so that a full disk is noticed before the log needs the space.
    pub spare_segments: usize,
    /// Zeros are written in steps of this.
    pub fill_bytes: u64,
    /// The largest record; bounds what one flush takes and what recovery allocates.
    pub max_record_bytes: u64,
    /// Always [`Guards::ALL`] outside tests.
    pub guards: Guards,
}

impl Default for LogOptions {
    fn default() -> Self {
        Self {
            segment_bytes: 64 * 1024 * 1024,
            spare_segments: 2,
            fill_bytes: 1024 * 1024,
            max_record_bytes: 16 * 1024 * 1024,
            guards: Guards::ALL,
        }
    }
}
