//! Queries on members that have proved how they joined, and that the database doesn't know.

use discovery_types::api::{SILENT_AFTER, UnknownMember};
use discovery_types::digest::MemberId;
use sqlx::PgConnection;
use uuid::Uuid;

use super::{Store, StoreError, UnixMicros};

impl Store {
    /// Stores that the member has proved now how it joined. Returns whether it has no row yet.
    pub(crate) async fn note_unknown_member(
        &self,
        cluster: Uuid,
        member: MemberId,
        name: &str,
    ) -> Result<bool, StoreError> {
        let is_first = sqlx::query_scalar(
            "INSERT INTO unknown_members AS u (cluster_id, member_id, name, at_us)
             VALUES ($1, $2, $3, now_us())
             ON CONFLICT (cluster_id, member_id) DO UPDATE
                 SET name = excluded.name, at_us = excluded.at_us
             RETURNING u.xmax = 0",
        )
        .bind(cluster)
        .bind(&member.0[..])
        .bind(name)
        .fetch_one(&mut *self.acquire().await?)
        .await?;
        Ok(is_first)
    }
}

/// Returns the members of a cluster that the database doesn't know, and that have proved within
/// [`SILENT_AFTER`] how they joined. They are ordered by their ids.
pub(crate) async fn unknown_members(
    connection: &mut PgConnection,
    cluster: Uuid,
) -> Result<Vec<UnknownMember>, StoreError> {
    let limit = UnixMicros::try_from(SILENT_AFTER.as_micros()).unwrap_or(UnixMicros::MAX);
    let rows: Vec<(Vec<u8>, String, UnixMicros)> = sqlx::query_as(
        "SELECT member_id, name, at_us FROM unknown_members
         WHERE cluster_id = $1 AND at_us >= (SELECT now_us()) - $2 ORDER BY member_id",
    )
    .bind(cluster)
    .bind(limit)
    .fetch_all(connection)
    .await?;
    let member = |(id, name, at_us): (Vec<u8>, String, UnixMicros)| {
        let id = MemberId(id.try_into().ok()?);
        Some(UnknownMember { id, name, last_heard_ms: at_us / 1_000 })
    };
    Ok(rows.into_iter().filter_map(member).collect())
}

/// Deletes the row of a member that the database knows now.
pub(crate) async fn forget_unknown_member(
    connection: &mut PgConnection,
    cluster: Uuid,
    member: MemberId,
) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM unknown_members WHERE cluster_id = $1 AND member_id = $2")
        .bind(cluster)
        .bind(&member.0[..])
        .execute(connection)
        .await?;
    Ok(())
}
