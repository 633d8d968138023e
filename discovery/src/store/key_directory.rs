//! Whose database this is.
//!
//! A service with another key directory could read every row and open no cluster's CA key: it would
//! make clusters that the right one can't commit, and the other way round.

use discovery_types::digest::Digest;
use sqlx::PgConnection;

use super::StoreError;
use super::connect::ConnectError;
use crate::keydir::Keydir;

/// Claims a database that is nobody's yet; errors on another key directory's.
pub(super) async fn check(
    connection: &mut PgConnection,
    keys: &Keydir,
) -> Result<(), ConnectError> {
    let sealed = keys.kek.seal().map_err(|error| ConnectError::Keys(error.to_string()))?;
    sqlx::query("INSERT INTO key_directory (sealed, pin) VALUES ($1, $2) ON CONFLICT DO NOTHING")
        .bind(sealed)
        .bind(&keys.pin().0[..])
        .execute(&mut *connection)
        .await
        .map_err(StoreError::from)?;
    let (sealed, pin): (Vec<u8>, Vec<u8>) = sqlx::query_as("SELECT sealed, pin FROM key_directory")
        .fetch_one(connection)
        .await
        .map_err(StoreError::from)?;
    match keys.kek.opens(&sealed) {
        true => Ok(()),
        false => Err(ConnectError::OtherKeys {
            pin: pin.try_into().map(Digest).map_err(|_| StoreError::damaged("a pin"))?,
        }),
    }
}
