//! `keys rewrap`: wraps the keys of clusters' CAs under the newest key-encryption key.

use std::time::{Duration, Instant};

use serde::Serialize;
use sqlx::ConnectOptions;

use super::ServerError;
use super::args::RewrapKeysArgs;
use super::run::running_database_options;
use crate::keydir::KeyDirectory;
use crate::store::rewrap::{RewrapCounts, RewrapError, rewrap};

/// Interval between two reports of the progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);

/// Result of `keys rewrap`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct RewrappedKeys {
    /// Version of the key-encryption key that wraps all keys now.
    pub kek: u32,
    /// Number of CA keys in the database.
    pub keys: u64,
    /// Number of keys that were wrapped again.
    pub rewrapped: u64,
}

/// Wraps all CA keys in the database under the newest key-encryption key. Calls `progress` every
/// two seconds with the numbers so far.
pub(crate) async fn rewrap_keys(
    args: &RewrapKeysArgs,
    mut progress: impl FnMut(RewrapCounts),
) -> Result<RewrappedKeys, ServerError> {
    let keys = KeyDirectory::load(&args.keys).map_err(|error| {
        ServerError::permanent_if(error.is_permanent(), "can't read the keys", error)
    })?;
    let options = running_database_options(&args.database)?;
    let failed = |error: sqlx::Error| ServerError::failed("can't use the database", error);
    let mut connection = options.connect().await.map_err(failed)?;
    let mut told = Instant::now();
    let counts = rewrap(&mut connection, &keys.kek, |counts| {
        if told.elapsed() >= PROGRESS_INTERVAL {
            told = Instant::now();
            progress(counts);
        }
    });
    let counts = counts
        .await
        .map_err(|error: RewrapError| ServerError::failed("can't wrap the CA keys again", error))?;
    let RewrapCounts { all, rewrapped } = counts;
    Ok(RewrappedKeys { kek: keys.kek.newest_version(), keys: all, rewrapped })
}
