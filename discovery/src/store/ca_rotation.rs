//! Queries on the replacement of a cluster's CAs.
//!
//! `authorities` holds the issuing CAs. `other_authorities` holds the other pair: the new CAs until
//! the switch, the old ones after it. Once the newest statement trusts only one pair, the other
//! pair's rows are deleted, and with them its keys.

use discovery_types::api::MemberCas;
use discovery_types::digest::MemberId;
use discovery_types::statement::{Statement, ca_der};
use sqlx::PgConnection;
use uuid::Uuid;

use super::cluster::{Authorities, AuthorityRow, authorities};
use super::clusters::WrappedCa;
use super::{Store, StoreError};
use crate::domain::number_to_row;

/// Returns the CAs of a cluster that don't issue; `None` if there are none.
pub(crate) async fn other_authorities(
    connection: &mut PgConnection,
    cluster: Uuid,
) -> Result<Option<Authorities>, StoreError> {
    let rows: Vec<AuthorityRow> = sqlx::query_as(
        "SELECT certificate, wrapped_key FROM other_authorities
         WHERE cluster_id = $1 AND purpose IN ('peer', 'client') ORDER BY purpose DESC",
    )
    .bind(cluster)
    .fetch_all(connection)
    .await?;
    let pair = <[AuthorityRow; 2]>::try_from(rows).ok();
    Ok(pair.map(|[peer, client]| Authorities { peer, client }))
}

/// Updates the CA tables for a statement that was just added to the chain. If the statement's
/// issuing CAs are in `other_authorities`, the rows of the two tables are swapped. If the statement
/// trusts only one pair of CAs, the rows of `other_authorities` are deleted. If neither table has
/// the issuing CAs, the service issues nothing until the CAs are replaced again.
pub(super) async fn follow_statement(
    connection: &mut PgConnection,
    statement: &Statement,
) -> Result<(), StoreError> {
    let cluster = statement.cluster;
    if statement.seq == 0 {
        return Ok(());
    }
    let Some(other) = other_authorities(connection, cluster).await? else { return Ok(()) };
    let issuing = authorities(connection, cluster).await?;
    if !issuing.are_issuing(statement) && other.are_issuing(statement) {
        // The two UPDATEs swap the rows: each reads the rows as they were before this SQL
        // statement.
        sqlx::query(
            "WITH promoted AS (
                 UPDATE authorities a SET certificate = o.certificate, wrapped_key = o.wrapped_key
                 FROM other_authorities o
                 WHERE a.cluster_id = $1 AND o.cluster_id = $1 AND o.purpose = a.purpose)
             UPDATE other_authorities o SET certificate = a.certificate, wrapped_key = a.wrapped_key
             FROM authorities a
             WHERE o.cluster_id = $1 AND a.cluster_id = $1 AND a.purpose = o.purpose",
        )
        .bind(cluster)
        .execute(&mut *connection)
        .await?;
    }
    if statement.also_trusted.is_none() {
        sqlx::query("DELETE FROM other_authorities WHERE cluster_id = $1")
            .bind(cluster)
            .execute(connection)
            .await?;
    }
    Ok(())
}

impl Authorities {
    /// Whether these CAs are the issuing CAs of the statement.
    pub(crate) fn are_issuing(&self, statement: &Statement) -> bool {
        self.are_certified(&statement.peer_ca, &statement.client_ca)
    }

    /// Whether these CAs have the certificates `peer` and `client` (PEM).
    pub(crate) fn are_certified(&self, peer: &str, client: &str) -> bool {
        ca_der(peer).as_ref() == Some(&self.peer.certificate)
            && ca_der(client).as_ref() == Some(&self.client.certificate)
    }
}

impl Store {
    /// Stores new CAs beside the issuing ones, in place of other CAs that no statement names yet.
    /// Stores nothing and returns `false` if the cluster's newest statement isn't at the position
    /// `newest` any more. A newer statement may name the other CAs.
    pub(crate) async fn put_other_authorities(
        &self,
        cluster: Uuid,
        newest: u64,
        [peer, client]: [&WrappedCa; 2],
    ) -> Result<bool, StoreError> {
        let mut transaction = self.begin("BEGIN").await?;
        sqlx::query("SELECT 1 FROM clusters WHERE id = $1 FOR UPDATE")
            .bind(cluster)
            .execute(&mut *transaction)
            .await?;
        let found: Option<i64> =
            sqlx::query_scalar("SELECT max(sequence) FROM statements WHERE cluster_id = $1")
                .bind(cluster)
                .fetch_one(&mut *transaction)
                .await?;
        if found != Some(number_to_row(newest)?) {
            return Ok(false);
        }
        for (purpose, ca) in [("peer", peer), ("client", client)] {
            sqlx::query(
                "INSERT INTO other_authorities (cluster_id, purpose, certificate, wrapped_key)
                 VALUES ($1, $2, $3, $4)
                 ON CONFLICT (cluster_id, purpose) DO UPDATE
                     SET certificate = excluded.certificate, wrapped_key = excluded.wrapped_key",
            )
            .bind(cluster)
            .bind(purpose)
            .bind(&ca.ca.certificate)
            .bind(&ca.wrapped_key)
            .execute(&mut *transaction)
            .await?;
        }
        transaction.commit().await?;
        Ok(true)
    }

    /// Stores a member's progress with the replacement of its cluster's CAs.
    pub(crate) async fn note_member_cas(
        &self,
        cluster: Uuid,
        member: MemberId,
        cas: MemberCas,
    ) -> Result<(), StoreError> {
        sqlx::query(
            "INSERT INTO member_authorities AS m (cluster_id, member_id, trusted, certified)
             VALUES ($1, $2, $3, $4)
             ON CONFLICT (cluster_id, member_id) DO UPDATE
                 SET trusted = excluded.trusted, certified = excluded.certified
                 WHERE (m.trusted, m.certified)
                     IS DISTINCT FROM (excluded.trusted, excluded.certified)",
        )
        .bind(cluster)
        .bind(&member.0[..])
        .bind(number_to_row(cas.trusted)?)
        .bind(cas.certified.map(number_to_row).transpose()?)
        .execute(&mut *self.acquire().await?)
        .await?;
        Ok(())
    }

    /// Returns the reported progress of the members with the replacement of the cluster's CAs.
    pub(crate) async fn member_cas(
        &self,
        cluster: Uuid,
    ) -> Result<Vec<(MemberId, MemberCas)>, StoreError> {
        let rows: Vec<(Vec<u8>, i64, Option<i64>)> = sqlx::query_as(
            "SELECT member_id, trusted, certified FROM member_authorities WHERE cluster_id = $1",
        )
        .bind(cluster)
        .fetch_all(&mut *self.acquire().await?)
        .await?;
        let member = |(id, trusted, certified): (Vec<u8>, i64, Option<i64>)| {
            let cas = MemberCas {
                trusted: trusted.unsigned_abs(),
                certified: certified.map(i64::unsigned_abs),
            };
            Some((MemberId(id.try_into().ok()?), cas))
        };
        Ok(rows.into_iter().filter_map(member).collect())
    }
}
