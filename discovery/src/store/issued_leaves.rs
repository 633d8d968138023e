//! Queries on the certificates that the service issued to the hosts of a token.

use data_encoding::HEXUPPER;
use discovery_types::api::{CertificatePurpose, IssuedCertificate};
use discovery_types::grant::GrantId;
use discovery_types::key::{KeyId, PublicKey};
use sqlx::PgConnection;
use uuid::Uuid;

use super::cluster::LeafPair;
use super::{Store, StoreError, UnixMicros};
use crate::ca::CertificateFacts;

/// Maximum number of certificates of one host that are kept: the newest ones. A host renews its
/// pair about three times a year, but a hostile one could ask for any number.
const MAX_KEPT: i64 = 64;

/// A certificate that was issued to a host: a row of `leaves`, or of `issued_leaves`.
#[derive(Clone, Debug, sqlx::FromRow)]
struct CertificateRow {
    agent_key: Vec<u8>,
    purpose: String,
    /// DER of a founder's first certificate. `None` for a later one, of which only the serial
    /// number and the end are stored.
    certificate: Option<Vec<u8>>,
    serial: Option<Vec<u8>>,
    expires_us: Option<UnixMicros>,
}

impl CertificateRow {
    /// Parses the row. Returns `None` if the row is damaged.
    fn parse(self) -> Option<(KeyId, IssuedCertificate)> {
        let facts = match (self.certificate, self.serial, self.expires_us) {
            (Some(der), ..) => CertificateFacts::read(&der)?,
            (None, Some(serial), Some(us)) => {
                CertificateFacts { serial, ends_at: us.div_euclid(1_000_000) }
            }
            (None, ..) => return None,
        };
        let purpose = match self.purpose.as_str() {
            "peer" => CertificatePurpose::Peer,
            "client" => CertificatePurpose::Client,
            _ => return None,
        };
        let certificate = IssuedCertificate {
            purpose,
            serial: HEXUPPER.encode(&facts.serial),
            expires_at_ms: facts.ends_at.saturating_mul(1_000),
        };
        let agent = PublicKey::from_bytes(self.agent_key.try_into().ok()?).key_id();
        Some((agent, certificate))
    }
}

impl Store {
    /// Stores which certificates an agent gets. Call this before the certificates leave the
    /// process. `now` is the time at which they were issued.
    pub(crate) async fn note_leaves(
        connection: &mut PgConnection,
        cluster: Uuid,
        agent: &PublicKey,
        (peer, client): &LeafPair,
        now: UnixMicros,
    ) -> Result<(), StoreError> {
        let facts = |der: &[u8]| {
            CertificateFacts::read(der)
                .ok_or_else(|| StoreError::damaged(format!("a new certificate of {cluster}")))
        };
        let (peer, client) = (facts(peer)?, facts(client)?);
        sqlx::query(
            "WITH old AS (
                 DELETE FROM issued_leaves
                 WHERE cluster_id = $1 AND agent_key = $2 AND serial IN (
                     SELECT serial FROM issued_leaves WHERE cluster_id = $1 AND agent_key = $2
                     ORDER BY issued_us DESC, serial OFFSET $8)
             )
             INSERT INTO issued_leaves
                 (cluster_id, agent_key, issued_us, serial, purpose, expires_us)
             VALUES ($1, $2, $3, $4, 'peer', $5), ($1, $2, $3, $6, 'client', $7)",
        )
        .bind(cluster)
        .bind(&agent.as_bytes()[..])
        .bind(now)
        .bind(&peer.serial)
        .bind(peer.ends_at.saturating_mul(1_000_000))
        .bind(&client.serial)
        .bind(client.ends_at.saturating_mul(1_000_000))
        .bind(MAX_KEPT - 2)
        .execute(connection)
        .await?;
        Ok(())
    }

    /// Returns the known certificates of the hosts that used a token, with their agents' keys,
    /// oldest first.
    pub(crate) async fn certificates_by(
        &self,
        grant: GrantId,
    ) -> Result<Vec<(KeyId, IssuedCertificate)>, StoreError> {
        let rows: Vec<CertificateRow> = sqlx::query_as(
            "SELECT f.key AS agent_key, l.purpose, l.certificate, NULL::bytea AS serial,
                 NULL::bigint AS expires_us, 0::bigint AS issued_us
             FROM grants g JOIN frozen_seats f ON f.cluster_id = g.cluster_id AND f.grant_id = g.id
                 JOIN leaves l ON l.cluster_id = f.cluster_id AND l.seat = f.seat
             WHERE g.id = $1
             UNION ALL
             SELECT i.agent_key, i.purpose, NULL, i.serial, i.expires_us, i.issued_us
             FROM grants g JOIN issued_leaves i ON i.cluster_id = g.cluster_id
             WHERE g.id = $1 AND i.agent_key IN (
                 SELECT key FROM agents WHERE grant_id = $1
                 UNION ALL SELECT agent_key FROM intents WHERE grant_id = $1)
             ORDER BY issued_us, purpose DESC",
        )
        .bind(grant.to_string())
        .fetch_all(&mut *self.acquire().await?)
        .await?;
        let damaged = || StoreError::damaged(format!("a certificate of a host of token {grant}"));
        rows.into_iter().map(|row| row.parse().ok_or_else(damaged)).collect()
    }
}
