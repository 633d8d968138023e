//! Checks that the database belongs to this service's key directory.
//!
//! A service with another key directory could read every row, but couldn't decrypt any cluster's CA
//! key. Two such services on one database would each make clusters that the other can't commit.
//!
//! The database holds a seal, which only the keys of its own key directory open. A process opens
//! the seal before its first write to a database.

use discovery_types::digest::Digest;
use sqlx::PgConnection;

use super::StoreError;
use super::connect::ConnectError;
use crate::keydir::KeyDirectory;

/// Claims a database that belongs to no key directory yet. Returns an error if the database belongs
/// to another key directory.
pub(super) async fn check(
    connection: &mut PgConnection,
    keys: &KeyDirectory,
) -> Result<(), ConnectError> {
    let sealed = keys.kek.seal().map_err(|error| ConnectError::Keys(error.to_string()))?;
    sqlx::query("INSERT INTO key_directory (sealed, pin) VALUES ($1, $2) ON CONFLICT DO NOTHING")
        .bind(sealed)
        .bind(&keys.pin().0[..])
        .execute(&mut *connection)
        .await
        .map_err(StoreError::from)?;
    verify(connection, keys).await
}

/// Returns an error if the database belongs to another key directory. Changes nothing.
pub(super) async fn verify(
    connection: &mut PgConnection,
    keys: &KeyDirectory,
) -> Result<(), ConnectError> {
    let owner = sqlx::query_as("SELECT sealed, pin FROM key_directory")
        .fetch_optional(connection)
        .await
        .map_err(StoreError::from)?;
    // A database without this row belongs to no key directory yet. The next start claims it.
    let Some((sealed, pin)): Option<(Vec<u8>, Vec<u8>)> = owner else { return Ok(()) };
    match keys.kek.opens(&sealed) {
        true => Ok(()),
        false => Err(ConnectError::OtherKeys {
            pin: pin.try_into().map(Digest).map_err(|_| StoreError::damaged("a pin"))?,
        }),
    }
}
