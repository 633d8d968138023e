//! Queries on members whose agents follow another statement chain than the database has.

use discovery_types::digest::{Digest, MemberId};
use uuid::Uuid;

use super::{Store, StoreError};
use crate::domain::number_to_row;

/// First statement in which the chain of a member's agent differs from the database's chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StatementBranch {
    pub member: MemberId,
    /// Position of the differing statement in the chain.
    pub number: u64,
    /// Hash of the differing statement that the agent follows.
    pub hash: Digest,
}

impl Store {
    /// Stores a member's branch, which replaces the member's previous one. Returns whether the
    /// branch is another one than before.
    pub(crate) async fn note_branch(
        &self,
        cluster: Uuid,
        branch: &StatementBranch,
    ) -> Result<bool, StoreError> {
        let done = sqlx::query(
            "INSERT INTO statement_branches AS b (cluster_id, member_id, number, hash)
             VALUES ($1, $2, $3, $4)
             ON CONFLICT (cluster_id, member_id) DO UPDATE
                 SET number = excluded.number, hash = excluded.hash
                 WHERE (b.number, b.hash) IS DISTINCT FROM (excluded.number, excluded.hash)",
        )
        .bind(cluster)
        .bind(&branch.member.0[..])
        .bind(number_to_row(branch.number)?)
        .bind(&branch.hash.0[..])
        .execute(&mut *self.acquire().await?)
        .await?;
        Ok(done.rows_affected() > 0)
    }

    /// Returns the branches that members' agents have shown, ordered by the members' ids.
    pub(crate) async fn branches(&self, cluster: Uuid) -> Result<Vec<StatementBranch>, StoreError> {
        let rows: Vec<(Vec<u8>, i64, Vec<u8>)> = sqlx::query_as(
            "SELECT member_id, number, hash FROM statement_branches
             WHERE cluster_id = $1 ORDER BY member_id",
        )
        .bind(cluster)
        .fetch_all(&mut *self.acquire().await?)
        .await?;
        let branch = |(member, number, hash): (Vec<u8>, i64, Vec<u8>)| {
            Some(StatementBranch {
                member: MemberId(member.try_into().ok()?),
                number: number.unsigned_abs(),
                hash: Digest(hash.try_into().ok()?),
            })
        };
        Ok(rows.into_iter().filter_map(branch).collect())
    }
}
