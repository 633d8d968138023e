//! The decision on a cluster's member list. The transaction that commits it also signs the commit
//! document and issues the members' certificates. This module also delivers the document to
//! members.
//!
//! A commit is one row. Triggers in the migrations refuse to change or delete it.

use data_encoding::{BASE64, HEXLOWER};
use discovery_formation as formation;
use discovery_formation::memory::LedgerEntry;
use discovery_formation::service::Cluster;
use discovery_types::convert;
use discovery_types::document::{Document, VerifiedDocument};
use discovery_types::jws::{Jws, JwsType};
use discovery_types::problem::Code;
use discovery_types::record::Record;
use discovery_types::statement::StatementChain;
use sqlx::PgConnection;
use uuid::Uuid;

use super::Delivery;
use crate::app::App;
use crate::ca::{ClusterIssuer, IssuingCa, MemberLeaf, hosts};
use crate::error::ApiError;
use crate::kek::KeyPurpose;
use crate::ledger;
use crate::store::StoreError;
use crate::store::cluster::{
    Authorities, AuthorityRow, LeafPair, LoadedCluster, NewCommit, StoredCommit, authorities,
    stored_commit,
};

impl App {
    /// Signs the commit document of the list with the hash `h`, or takes `shown`, a document that
    /// an agent sent or a ledger holds. Issues the members' certificates.
    pub(crate) fn build_commit(
        &self,
        loaded: &LoadedCluster,
        h: formation::Hash,
        shown: Option<Jws>,
        authorities: &Authorities,
    ) -> Result<NewCommit, ApiError> {
        let id = loaded.id();
        let frozen = loaded.cluster.frozen.as_ref();
        let frozen = frozen.ok_or_else(|| StoreError::damaged("a decision without a list"))?;
        let adopted = shown.is_some();
        let document = match shown {
            Some(document) => document,
            None => {
                let grants = loaded.grants_of(&frozen.proposal)?;
                let damaged = |_| StoreError::damaged(format!("a record of cluster {id}"));
                let proposal = convert::wire_proposal(&frozen.proposal, grants).map_err(damaged)?;
                // The acks are signatures of `h`. So an error fails this cluster alone, where a
                // panic would fail all requests of the batch.
                if proposal.hash().0 != h.0 {
                    let what = format!("the list of cluster {id} isn't the one that was signed");
                    return Err(StoreError::damaged(what).into());
                }
                let ack =
                    |record: &std::sync::Arc<formation::AgentRecord>| -> Result<Jws, StoreError> {
                        let ack = frozen.acks.get(&record.key);
                        let missing = || StoreError::damaged(format!("an ack of cluster {id}"));
                        ack.and_then(|ack| ack.parse().ok()).ok_or_else(missing)
                    };
                let acks = frozen.proposal.records.iter().map(ack).collect::<Result<_, _>>()?;
                let document = Document { version: 1, proposal, acks };
                let document = document.sign(&self.keys.signer().key);
                // Check that the new document can be parsed, before it is committed for ever.
                let unreadable = |_| StoreError::damaged(format!("the document of cluster {id}"));
                document.as_str().parse().map_err(unreadable)?
            }
        };
        let leaves = self.issue_leaves(id, &frozen.proposal, authorities, loaded.now)?;
        Ok(NewCommit { epoch: frozen.proposal.epoch, h, document, adopted, leaves })
    }

    fn issue_leaves(
        &self,
        id: Uuid,
        list: &formation::ProposedList,
        authorities: &Authorities,
        now: formation::UnixMicros,
    ) -> Result<Vec<LeafPair>, ApiError> {
        let authority = self.open_cluster_issuer(id, authorities)?;
        let mut leaves = Vec::with_capacity(list.records.len());
        for (seat, record) in (1_u16..).zip(&list.records) {
            let claims = claims(record)?;
            let leaf = MemberLeaf {
                trust_domain: &self.keys.settings.trust_domain,
                cluster: id,
                member: &seat.to_string(),
                peer_hosts: &hosts(&record.peer_urls),
                client_hosts: &hosts(&record.client_urls),
            };
            // The request was verified with the record. So only its key's hash is compared.
            let key = claims.csr.verified_key(&convert::digest(record.node_key));
            let key = key.map_err(|_| StoreError::damaged("the key of a verified record"))?;
            leaves.push(authority.issue_for_key(&key, &leaf, now.0 / 1_000_000)?);
        }
        Ok(leaves)
    }

    /// Opens both CAs of a cluster, ready to sign.
    pub(crate) fn open_cluster_issuer(
        &self,
        cluster: Uuid,
        rows: &Authorities,
    ) -> Result<ClusterIssuer, ApiError> {
        Ok(ClusterIssuer {
            peer: self.open_ca(cluster, KeyPurpose::PeerCa, &rows.peer)?,
            client: self.open_ca(cluster, KeyPurpose::ClientCa, &rows.client)?,
        })
    }

    /// Opens one CA, ready to sign.
    pub(crate) fn open_ca(
        &self,
        cluster: Uuid,
        purpose: KeyPurpose,
        row: &AuthorityRow,
    ) -> Result<IssuingCa, ApiError> {
        let closed = |detail: String| {
            let next = "Start the service with the key directory that made the cluster.";
            ApiError::new(Code::Internal, detail, next)
        };
        let wrapped = row.wrapped_key.as_deref();
        let wrapped =
            wrapped.ok_or_else(|| closed("The cluster's CA is the operator's own.".into()))?;
        let key =
            self.keys.kek.unwrap(cluster, purpose, wrapped).map_err(|error| {
                closed(format!("The cluster's CA key can't be opened: {error}."))
            })?;
        IssuingCa::load(&row.certificate, &key)
            .map_err(|error| closed(format!("The cluster's CA can't be loaded: {error}.")))
    }

    /// Returns the commit document with the certificates of `asker`. If the ledger lacks the
    /// commit, also returns the entry to write.
    pub(super) async fn delivery_of(
        &self,
        connection: &mut PgConnection,
        cluster: &Cluster,
        chain: &StatementChain,
        asker: Option<formation::AgentKey>,
    ) -> Result<(Option<Delivery>, Option<ledger::Commit>), ApiError> {
        let id = Uuid::from_u128(cluster.id.0);
        let frozen = cluster.frozen.as_ref();
        let seat = frozen.zip(asker).and_then(|(frozen, key)| frozen.proposal.seat_of(key));
        let Some(stored) = stored_commit(connection, id, seat).await? else {
            return Ok((None, None));
        };
        let entry = self.missing_ledger_entry(connection, id, chain, &stored).await?;
        let document = self.with_present_signature(stored.document, chain);
        Ok((Some(Delivery { document, leaves: stored.leaves }), entry))
    }

    /// Returns a stored document with the signature of a key that the service still has, because
    /// agents refuse a document that they receive with another one. Signs it again if its key was
    /// removed, or if another service has made it. The stored document stays as it is.
    ///
    /// A document that members haven't signed stays as it is, too: somebody else wrote it into the
    /// database.
    fn with_present_signature(&self, stored: Jws, chain: &StatementChain) -> Jws {
        if self.keys.signing_keys.contains(stored.kid())
            || VerifiedDocument::verify(&stored, chain).is_err()
        {
            return stored;
        }
        let document = stored.claims_unverified::<Document>(JwsType::Document);
        document.map_or(stored, |document| document.sign(&self.keys.signer().key))
    }

    /// Returns the ledger entry for a cluster's commit. `None` if the ledger already holds the
    /// commit.
    pub(crate) async fn missing_ledger_entry(
        &self,
        connection: &mut PgConnection,
        id: Uuid,
        chain: &StatementChain,
        stored: &StoredCommit,
    ) -> Result<Option<ledger::Commit>, ApiError> {
        if let Some(LedgerEntry::Commit { h, document: true }) = self.store.ledger().entry(id)?
            && h.0[..] == stored.h[..]
        {
            return Ok(None);
        }
        let authorities = authorities(connection, id).await?;
        Ok(Some(ledger_entry(id, chain, (&stored.h[..], &stored.document), &authorities)))
    }
}

/// Returns what `asker` gets of its cluster's new commit, and the entry that the ledger must hold
/// before that leaves: the document, and the asker's own certificates.
pub(super) fn parts_to_deliver(
    commit: &NewCommit,
    loaded: &LoadedCluster,
    authorities: &Authorities,
    asker: Option<formation::AgentKey>,
) -> (Delivery, ledger::Commit) {
    let frozen = loaded.cluster.frozen.as_ref();
    let seat = frozen.zip(asker).and_then(|(frozen, key)| frozen.proposal.seat_of(key));
    let index = seat.and_then(|seat| usize::from(seat).checked_sub(1));
    let leaves = index.and_then(|index| commit.leaves.get(index)).cloned();
    let delivery = Delivery { document: commit.document.clone(), leaves };
    let stored = (&commit.h.0[..], &commit.document);
    (delivery, ledger_entry(loaded.id(), &loaded.chain, stored, authorities))
}

/// Returns the ledger entry for a cluster's commit: the hash of its list, and its document.
fn ledger_entry(
    cluster: Uuid,
    chain: &StatementChain,
    (h, document): (&[u8], &Jws),
    authorities: &Authorities,
) -> ledger::Commit {
    ledger::Commit {
        cluster_id: cluster,
        h: HEXLOWER.encode(h),
        document: document.as_str().to_owned(),
        statements: chain.jws().iter().map(|jws| jws.as_str().to_owned()).collect(),
        peer_ca: ledger_authority(&authorities.peer),
        client_ca: ledger_authority(&authorities.client),
    }
}

fn ledger_authority(row: &AuthorityRow) -> ledger::Authority {
    ledger::Authority {
        certificate: BASE64.encode(&row.certificate),
        wrapped_key: row.wrapped_key.as_ref().map(|key| BASE64.encode(key)),
    }
}

fn claims(record: &formation::AgentRecord) -> Result<Record, StoreError> {
    let jws: Option<Jws> = record.jws.parse().ok();
    jws.and_then(|jws| jws.claims_unverified(JwsType::Record).ok())
        .ok_or_else(|| StoreError::damaged("a verified record doesn't parse any more"))
}
