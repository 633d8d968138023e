//! Transactions on one cluster. `begin_cluster` locks the cluster's row, reads the clock and loads
//! the cluster. The caller then changes the loaded cluster. `save` writes the changed rows, and
//! `commit` ends the transaction.

mod batch;
mod holders;
mod load;
mod records;
mod save;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use discovery_formation as formation;
use discovery_formation::Hash;
use discovery_formation::memory::{
    DatabaseFacts, HistoryPosition, LedgerVerdict, RememberedDatabase, check_ledger,
};
use discovery_formation::service::{Cluster, ClusterChange};
use discovery_types::grant::{GrantId, VerifiedGrant};
use discovery_types::jws::{Jws, JwsType};
use discovery_types::statement::{Statement, StatementChain};
use sqlx::types::Json;
use sqlx::{AssertSqlSafe, PgConnection};
use uuid::Uuid;

use self::load::LoadParameters;
use self::save::{AgentHost, UnsavedChanges};
use super::changes::MembershipChanges;
use super::{Store, StoreError, Transaction, UnixMicros};
use crate::domain::number_to_row;
use crate::ledger;

pub(crate) use batch::BatchTransaction;
pub(super) use load::Hex;
pub(crate) use load::{RequestedGrant, Trust};
pub(crate) use records::Caches;
pub(super) use save::append_event;

/// Notification channel for changed clusters. A notification is only a hint, upon which the
/// receiver reads the cluster again.
pub(crate) const CHANNEL: &str = "muster_cluster";

/// A cluster and the transaction that locks its row.
pub(crate) struct ClusterTransaction {
    transaction: Transaction,
    loaded: LoadedCluster,
    /// Whether the COMMIT notifies other processes of a change.
    has_notified: bool,
}

/// A cluster that was loaded by the transaction that locks its row.
pub(crate) struct LoadedCluster {
    /// The cluster's state, which the caller changes.
    pub cluster: Cluster,
    before: Cluster,
    /// Database time, read after the lock was taken.
    pub now: formation::UnixMicros,
    /// The cluster's statements, verified.
    pub chain: Arc<StatementChain>,
    /// Whether the database is settled. Lists of members may be frozen and committed only in a
    /// settled database.
    pub settled: bool,
    /// State of the database as the ledger had recorded it before this transaction read anything.
    known: Option<RememberedDatabase>,
    /// State of the database as this transaction read it.
    read: DatabaseFacts,
    /// Tokens issued before this time are void. It is the last time at which a process found that
    /// the database differs from a ledger, or at which an owner accepted the database.
    pub void_before: formation::UnixMicros,
    requested_grants: Vec<RequestedGrant>,
    /// The stored commit. It is loaded only for the redeem of a join ticket.
    commit: Option<StoredCommit>,
    /// Signed grants by id: those of all agents and of the frozen list, and the requested grants.
    grants: BTreeMap<String, String>,
    /// Changes that are still to be saved.
    unsaved: UnsavedChanges,
}

impl Deref for ClusterTransaction {
    type Target = LoadedCluster;

    fn deref(&self) -> &LoadedCluster {
        &self.loaded
    }
}

impl DerefMut for ClusterTransaction {
    fn deref_mut(&mut self) -> &mut LoadedCluster {
        &mut self.loaded
    }
}

/// Row of a grant.
#[derive(Clone, Debug, sqlx::FromRow)]
pub(crate) struct GrantRow {
    pub id: String,
    pub cluster_id: Uuid,
    /// Kind of the grant: `boot`, `join`, or `heal` for a replacement policy.
    pub kind: String,
    /// JWS of the grant.
    pub jws: String,
    /// When the grant was stored.
    pub stored_us: UnixMicros,
    /// When the grant was revoked.
    pub revoked_us: Option<UnixMicros>,
    /// JWS of the newest confirmation.
    pub confirmation: Option<String>,
}

/// Row of a certificate authority.
#[derive(Clone, Debug, sqlx::FromRow)]
pub(crate) struct AuthorityRow {
    /// DER of the CA's certificate.
    pub certificate: Vec<u8>,
    /// The CA's key, wrapped by the KEK. `None` for an operator's own CA.
    pub wrapped_key: Option<Vec<u8>>,
}

/// Rows of a cluster's two CAs.
#[derive(Clone, Debug)]
pub(crate) struct Authorities {
    /// CA for peer connections.
    pub peer: AuthorityRow,
    /// CA for the client port.
    pub client: AuthorityRow,
}

/// Peer certificate and client certificate of a member, in DER.
pub(crate) type LeafPair = (Vec<u8>, Vec<u8>);

/// Facts about the request that changes a cluster. The events of the change record them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RequestDetails<'a> {
    /// Source address of a redeem.
    pub address: Option<&'a str>,
    /// Agent that sent the request.
    pub agent: Option<formation::AgentKey>,
    /// Virtual machine of the agent's host, if it was verified.
    pub instance: Option<&'a str>,
    /// Revocation of a grant by an admin.
    pub revocation: Option<&'a Revocation>,
}

impl RequestDetails<'_> {
    /// Returns the facts that a redeem request contains about its agent's host.
    fn host(&self) -> Option<(formation::AgentKey, AgentHost)> {
        let address = Some(self.address?.to_owned());
        let host = AgentHost { address, instance: self.instance.map(str::to_owned) };
        self.agent.map(|key| (key, host))
    }
}

/// Revocation of a grant.
#[derive(Clone, Debug)]
pub(crate) struct Revocation {
    /// Id of the grant.
    pub grant: GrantId,
    /// Name of the admin.
    pub by: String,
    /// Whether hosts that have used the token lose their seats, too.
    pub frees_seats: bool,
}

/// A decided list, to be stored with the cluster.
#[derive(Clone, Debug)]
pub(crate) struct NewCommit {
    /// Epoch of the decided list.
    pub epoch: u64,
    /// Hash of the decided list.
    pub h: formation::Hash,
    /// The signed commit document.
    pub document: Jws,
    /// Whether the document came from an agent or a ledger. Otherwise, this service has decided the
    /// list.
    pub adopted: bool,
    /// Peer and client certificate of each seat in DER, seat 1 first.
    pub leaves: Vec<LeafPair>,
}

/// A cluster with its changes since the commit, read in one snapshot.
pub(crate) struct RunningCluster {
    /// The cluster's state in the snapshot.
    pub cluster: Cluster,
    /// The cluster's statements, verified.
    pub chain: Arc<StatementChain>,
    /// Database time of the snapshot.
    pub now: formation::UnixMicros,
    /// Everything stored about changes of the cluster's members.
    pub changes: MembershipChanges,
}

impl Store {
    /// Locks and loads a cluster, and the grant with the id `requested_grant`. Returns `None` if
    /// the cluster doesn't exist or is only a draft.
    pub(crate) async fn begin_cluster(
        &self,
        id: Uuid,
        trust: Trust,
        requested_grant: Option<&str>,
    ) -> Result<Option<ClusterTransaction>, StoreError> {
        let begun = self.begin_with(id, trust, requested_grant, false).await?;
        Ok(begun.map(|(transaction, _)| transaction))
    }

    /// Locks and loads a cluster as [`Store::begin_cluster`] does, and its changes since the
    /// commit. If a grant is requested, the stored commit is loaded as well.
    pub(crate) async fn begin_change(
        &self,
        id: Uuid,
        requested_grant: Option<&str>,
    ) -> Result<Option<(ClusterTransaction, MembershipChanges)>, StoreError> {
        self.begin_with(id, Trust::Verify, requested_grant, true).await
    }

    async fn begin_with(
        &self,
        id: Uuid,
        trust: Trust,
        requested_grant: Option<&str>,
        with_changes: bool,
    ) -> Result<Option<(ClusterTransaction, MembershipChanges)>, StoreError> {
        // Read the ledger before the database. The ledger can then lag behind the rows, but it
        // can't be ahead of them.
        let known = self.ledger.known();
        // Lock the row in an SQL statement before the one that reads. A statement that waits for a
        // lock keeps its snapshot from before the wait, and would read old rows.
        let locked = format!("BEGIN; SELECT 1 FROM clusters WHERE id = '{id}' FOR UPDATE");
        let mut transaction = self.begin(AssertSqlSafe(locked)).await?;
        let of = LoadParameters {
            ids: &[id],
            copied: known.map_or(0, |known| known.last_copied.number),
            requested_grants: &requested_grant.map(str::to_owned).into_iter().collect::<Vec<_>>(),
            process: self.ledger.process(),
            with_changes,
        };
        let Some(mut rows) = load::read(&mut transaction, &of).await?.pop() else {
            return Ok(None);
        };
        let changes = std::mem::take(&mut rows.changes).parse(id)?;
        let loaded = LoadedCluster::parse(&self.caches, id, rows, known, trust)?;
        Ok(Some((ClusterTransaction { transaction, loaded, has_notified: false }, changes)))
    }

    /// Reads a cluster without a lock.
    pub(crate) async fn read_cluster(
        &self,
        id: Uuid,
    ) -> Result<Option<(Cluster, Arc<StatementChain>, formation::UnixMicros)>, StoreError> {
        let read = self.read_with(&mut *self.acquire().await?, id, false).await?;
        Ok(read.map(|read| (read.cluster, read.chain, read.now)))
    }

    /// Reads a cluster and its changes since the commit, without a lock.
    pub(crate) async fn read_running(
        &self,
        id: Uuid,
    ) -> Result<Option<RunningCluster>, StoreError> {
        self.read_with(&mut *self.acquire().await?, id, true).await
    }

    /// Reads a cluster as [`Store::read_running`] does, and its CAs.
    pub(crate) async fn read_running_and_authorities(
        &self,
        connection: &mut PgConnection,
        id: Uuid,
    ) -> Result<Option<(RunningCluster, Authorities)>, StoreError> {
        match self.read_with(connection, id, true).await? {
            Some(running) => Ok(Some((running, authorities(connection, id).await?))),
            None => Ok(None),
        }
    }

    /// Reads a cluster in one SQL statement, so all tables are read in one snapshot.
    async fn read_with(
        &self,
        connection: &mut PgConnection,
        id: Uuid,
        with_changes: bool,
    ) -> Result<Option<RunningCluster>, StoreError> {
        let process = self.ledger.process();
        let (ids, requested_grants) = (&[id], &[]);
        let of = LoadParameters { ids, copied: 0, requested_grants, process, with_changes };
        let Some(mut rows) = load::read(connection, &of).await?.pop() else { return Ok(None) };
        let now = formation::UnixMicros(rows.now.unsigned_abs());
        let chain = self.caches.chain(id, &rows.statements)?;
        let changes = std::mem::take(&mut rows.changes).parse(id)?;
        let cluster = load::load(&self.caches, rows, &chain, Trust::Verify)?;
        Ok(Some(RunningCluster { cluster, chain, now, changes }))
    }
}

impl LoadedCluster {
    /// Builds the cluster `id` from its rows. `known` is the database's state that the ledger had
    /// recorded before the rows were read.
    fn parse(
        caches: &Caches,
        id: Uuid,
        mut rows: load::ClusterRows,
        known: Option<RememberedDatabase>,
        trust: Trust,
    ) -> Result<Self, StoreError> {
        // A process that has not compared a database with its ledger yet makes no decisions. So the
        // default identity does no harm here.
        let known_site = known.map(|known| known.identity).unwrap_or_default();
        let site = ledger::current_site(&known_site, rows.database_oid, &rows.table_oids)
            .ok_or_else(|| StoreError::damaged("the oids of this database"))?;
        let read = DatabaseFacts {
            identity: site,
            sweeps: rows.beat.map(i64::unsigned_abs),
            generation: rows.generation.unsigned_abs(),
            newest: rows.newest.unsigned_abs(),
            hash_at_last_copied: rows
                .at_copied
                .as_deref()
                .and_then(|h| h.try_into().ok())
                .map(Hash),
        };
        let (now, settled) = (formation::UnixMicros(rows.now.unsigned_abs()), rows.settled);
        let void_before = formation::UnixMicros(rows.void_before_us.unsigned_abs());
        let grants = rows.grants();
        let requested_grants = std::mem::take(&mut rows.requested_grants.0);
        let chain = caches.chain(id, &rows.statements)?;
        let commit = rows.commit.take().map(|Json(commit)| commit.parse(id)).transpose()?;
        let cluster = load::load(caches, rows, &chain, trust)?;
        Ok(LoadedCluster {
            before: cluster.clone(),
            cluster,
            now,
            chain,
            settled,
            known,
            read,
            void_before,
            requested_grants,
            commit,
            grants,
            unsaved: UnsavedChanges::default(),
        })
    }

    pub(crate) fn id(&self) -> Uuid {
        Uuid::from_u128(self.cluster.id.0)
    }

    /// Compares the ledger with the database: the verdict says whether this transaction may freeze
    /// or decide a list, or end a cluster.
    pub(crate) fn ledger_verdict(&self) -> LedgerVerdict {
        check_ledger(self.known.as_ref(), &self.read)
    }

    /// Number of decisions that this transaction saw and the ledger lacked.
    fn missing_decisions(&self) -> u64 {
        let copied = self.known.map_or(0, |known| known.last_copied.number);
        self.read.newest.saturating_sub(copied)
    }

    /// Returns the database's generation, as this transaction read it.
    pub(crate) fn generation(&self) -> u64 {
        self.read.generation
    }

    /// The requested grant with this id, if it belongs to this cluster.
    pub(crate) fn requested_grant(&self, id: &str) -> Option<&RequestedGrant> {
        self.requested_grants.iter().find(|grant| grant.id == id)
    }

    /// Returns the stored commit, if this transaction is the redeem of a join ticket.
    pub(crate) fn stored_commit(&self) -> Option<&StoredCommit> {
        self.commit.as_ref()
    }

    /// Returns the signed grants that the records of `list` name, without duplicates.
    pub(crate) fn grants_of(&self, list: &formation::ProposedList) -> Result<Vec<Jws>, StoreError> {
        let ids: BTreeSet<&str> = list.records.iter().map(|record| &*record.grant.0).collect();
        let damaged = || StoreError::damaged(format!("a grant of cluster {}", self.id()));
        let jws = |id: &str| self.grants.get(id)?.parse().ok();
        ids.into_iter().map(|id| jws(id).ok_or_else(damaged)).collect()
    }

    /// Notes that a step has changed the cluster from `before` to its present state, so that
    /// [`BatchTransaction::save`] or [`ClusterTransaction::save`] writes it. Returns whether
    /// the COMMIT will notify other processes. It does so if the cluster has another phase or list.
    ///
    /// Postgres commits notifying transactions one after the other, and each waits for the disk
    /// meanwhile. So smaller changes, such as a taken seat, are announced after the COMMIT
    /// ([`super::Store::notify_clusters`]). If this process dies in between, that announcement is
    /// lost. Agents whose polls wait at other processes then see the change at their next poll.
    pub(crate) fn note_step(
        &mut self,
        before: &Cluster,
        changes: &[ClusterChange],
        next_deadline: Option<formation::UnixMicros>,
        request: &RequestDetails<'_>,
    ) -> bool {
        let after = &self.cluster;
        let list = |cluster: &Cluster| cluster.frozen.as_ref().map(|list| list.proposal_hash);
        let notifies =
            !changes.is_empty() && (before.phase != after.phase || list(before) != list(after));
        let events = changes.iter().filter(|change| !is_repeated(before, change));
        self.unsaved.events.extend(events.map(|change| save::event_row(change, after, request)));
        self.unsaved.hosts.extend(request.host());
        self.unsaved.next_deadline = next_deadline;
        self.unsaved.notifies |= notifies;
        self.unsaved.is_changed = true;
        notifies
    }
}

impl ClusterTransaction {
    /// Returns the connection, for other SQL statements in this transaction.
    pub(crate) fn connection(&mut self) -> &mut PgConnection {
        &mut self.transaction
    }

    /// Copies decisions into the ledger that this transaction sees and the ledger lacks. The number
    /// of copied decisions is limited, because the cluster stays locked meanwhile. Returns whether
    /// the ledger has all decisions now.
    pub(crate) async fn copy_new_decisions(&mut self, store: &Store) -> Result<bool, StoreError> {
        copy_decisions_up_to(&mut self.transaction, store, &self.loaded).await
    }

    /// Ends this connection, so that the pool can't hand it out again. Called if the connected
    /// database was set back to an older state.
    pub(crate) async fn terminate_connection(mut self) {
        let end = sqlx::query("SELECT pg_terminate_backend(pg_backend_pid())");
        if let Err(error) = end.execute(&mut *self.transaction).await {
            tracing::debug!(%error, "a connection was ended");
        }
    }

    /// Returns both CAs of the cluster.
    pub(crate) async fn authorities(&mut self) -> Result<Authorities, StoreError> {
        let id = self.id();
        authorities(&mut self.transaction, id).await
    }

    /// Saves the changed rows, their events and the commit. If the cluster gets another phase or
    /// list, this also notifies other processes ([`LoadedCluster::note_step`]).
    pub(crate) async fn save(
        &mut self,
        changes: &[ClusterChange],
        commit: Option<&NewCommit>,
        next_deadline: Option<formation::UnixMicros>,
        request: &RequestDetails<'_>,
    ) -> Result<(), StoreError> {
        let (id, now) = (self.id(), self.now);
        let before = self.loaded.before.clone();
        if before.phase.has_ended() && !self.cluster.phase.has_ended() {
            save::rename_if_name_taken(&mut self.transaction, id).await?;
        }
        self.has_notified |= self.loaded.note_step(&before, changes, next_deadline, request);
        save::save(&mut self.transaction, &[&self.loaded]).await?;
        if let Some(commit) = commit {
            save::commits(&mut self.transaction, now, &[(id, commit)]).await?;
        }
        Ok(())
    }

    /// Whether the COMMIT notifies other processes of what was saved.
    pub(crate) fn has_notified(&self) -> bool {
        self.has_notified
    }

    /// Commits the transaction and returns the saved cluster.
    pub(crate) async fn commit(self) -> Result<Cluster, StoreError> {
        self.transaction.commit().await?;
        Ok(self.loaded.cluster)
    }
}

/// Copies decisions into the ledger until it has those that the transaction of `loaded` saw, or
/// until the limit is reached. Returns whether the ledger has all of them now.
async fn copy_decisions_up_to(
    connection: &mut PgConnection,
    store: &Store,
    loaded: &LoadedCluster,
) -> Result<bool, StoreError> {
    let from = loaded.known.map_or(HistoryPosition::START, |known| known.last_copied);
    let limit = ledger::LOOK_LIMIT;
    ledger::copy_decisions(connection, &store.ledger, &store.watch, from, limit).await?;
    let copied = store.ledger.known().map_or(0, |known| known.last_copied.number);
    Ok(copied >= loaded.read.newest)
}

/// Whether the change only replaces an earlier value of the same agent. Such a change appends no
/// event. Events are kept for ever, while an agent can send such requests without limit. The newest
/// value is stored in the agent's own row.
fn is_repeated(before: &Cluster, change: &ClusterChange) -> bool {
    match change {
        ClusterChange::Probed { key, epoch } => before.frozen.as_ref().is_some_and(|frozen| {
            frozen.proposal.epoch == *epoch && frozen.probes.contains_key(key)
        }),
        ClusterChange::Released { key, .. } => {
            let release = before.agents.get(key).and_then(|agent| agent.release.as_ref());
            release.is_some_and(|release| release.epoch >= before.epoch)
        }
        _ => false,
    }
}

/// Returns the signed grants that the records of `list` name, without duplicates.
pub(crate) async fn grants_of(
    connection: &mut PgConnection,
    cluster: Uuid,
    list: &formation::ProposedList,
) -> Result<Vec<Jws>, StoreError> {
    let mut ids: Vec<String> =
        list.records.iter().map(|record| record.grant.0.to_string()).collect();
    ids.sort();
    ids.dedup();
    let rows: Vec<String> = sqlx::query_scalar(
        "SELECT jws FROM grants WHERE cluster_id = $1 AND id = ANY($2) ORDER BY id",
    )
    .bind(cluster)
    .bind(&ids)
    .fetch_all(connection)
    .await?;
    if rows.len() != ids.len() {
        return Err(StoreError::damaged(format!("a grant of cluster {cluster} is missing")));
    }
    let damaged = |_| StoreError::damaged(format!("a grant of cluster {cluster}"));
    rows.iter().map(|jws| jws.parse().map_err(damaged)).collect()
}

/// Returns both CAs of a cluster.
pub(crate) async fn authorities(
    connection: &mut PgConnection,
    cluster: Uuid,
) -> Result<Authorities, StoreError> {
    let mut found = authorities_of(connection, &[cluster]).await?;
    found
        .remove(&cluster)
        .ok_or_else(|| StoreError::damaged(format!("cluster {cluster} has no CA")))
}

/// Returns both CAs of each cluster, by the cluster's id. A cluster that lacks one is left out.
pub(crate) async fn authorities_of(
    connection: &mut PgConnection,
    clusters: &[Uuid],
) -> Result<BTreeMap<Uuid, Authorities>, StoreError> {
    #[derive(sqlx::FromRow)]
    struct PairRow {
        cluster_id: Uuid,
        peer_certificate: Vec<u8>,
        peer_key: Option<Vec<u8>>,
        client_certificate: Vec<u8>,
        client_key: Option<Vec<u8>>,
    }
    let rows: Vec<PairRow> = sqlx::query_as(
        "SELECT p.cluster_id, p.certificate AS peer_certificate, p.wrapped_key AS peer_key,
                c.certificate AS client_certificate, c.wrapped_key AS client_key
         FROM authorities p JOIN authorities c
             ON c.cluster_id = p.cluster_id AND c.purpose = 'client'
         WHERE p.cluster_id = ANY($1) AND p.purpose = 'peer'",
    )
    .bind(clusters)
    .fetch_all(connection)
    .await?;
    let pair = |row: PairRow| {
        let peer = AuthorityRow { certificate: row.peer_certificate, wrapped_key: row.peer_key };
        let client =
            AuthorityRow { certificate: row.client_certificate, wrapped_key: row.client_key };
        (row.cluster_id, Authorities { peer, client })
    };
    Ok(rows.into_iter().map(pair).collect())
}

/// A decision as stored in the database.
#[derive(Clone, Debug)]
pub(crate) struct StoredCommit {
    /// Hash of the decided list.
    pub h: Vec<u8>,
    /// The signed commit document.
    pub document: Jws,
    /// Certificates of the requested seat, in DER.
    pub leaves: Option<LeafPair>,
}

/// Returns a cluster's decision, with the certificates of `seat`.
pub(crate) async fn stored_commit(
    connection: &mut PgConnection,
    cluster: Uuid,
    seat: Option<u8>,
) -> Result<Option<StoredCommit>, StoreError> {
    let row: Option<(Vec<u8>, String)> =
        sqlx::query_as("SELECT h, document FROM commits WHERE cluster_id = $1")
            .bind(cluster)
            .fetch_optional(&mut *connection)
            .await?;
    let Some((h, document)) = row else { return Ok(None) };
    let damaged = |_| StoreError::damaged(format!("the document of cluster {cluster}"));
    let document = document.parse().map_err(damaged)?;
    let leaves: Option<LeafPair> = match seat {
        None => None,
        Some(seat) => {
            sqlx::query_as(
                "SELECT p.certificate, c.certificate FROM leaves p JOIN leaves c
                     ON c.cluster_id = p.cluster_id AND c.seat = p.seat AND c.purpose = 'client'
                 WHERE p.cluster_id = $1 AND p.seat = $2 AND p.purpose = 'peer'",
            )
            .bind(cluster)
            .bind(i16::from(seat))
            .fetch_optional(connection)
            .await?
        }
    };
    Ok(Some(StoredCommit { h, document, leaves }))
}

impl ClusterTransaction {
    /// Stores the statement and the revocation that came with an event that wasn't refused.
    pub(crate) async fn add_statement_and_revocation(
        &mut self,
        statement: Option<&Jws>,
        revoke: Option<&Revocation>,
    ) -> Result<(), StoreError> {
        if let Some(statement) = statement {
            self.add_statement(statement).await?;
        }
        if let Some(revocation) = revoke {
            self.revoke_grant(revocation).await?;
        }
        Ok(())
    }

    /// Appends a statement to the cluster's chain.
    pub(crate) async fn add_statement(&mut self, jws: &Jws) -> Result<(), StoreError> {
        let (id, now) = (self.id(), self.now);
        add_statement(&mut self.transaction, id, now, jws).await
    }

    /// Stores a grant that a commit document names, unless it exists already.
    pub(crate) async fn add_grant(
        &mut self,
        grant: &VerifiedGrant,
        by: &str,
    ) -> Result<(), StoreError> {
        let now = self.now;
        super::grants::insert(&mut self.transaction, grant, by, now).await?;
        Ok(())
    }

    /// Revokes a grant of this cluster.
    async fn revoke_grant(&mut self, revocation: &Revocation) -> Result<(), StoreError> {
        let cluster = self.id();
        sqlx::query(
            "UPDATE grants SET revoked_us = coalesce(revoked_us, now_us()),
                 revoked_by = coalesce(revoked_by, $3),
                 freed_us = CASE WHEN $4 THEN coalesce(freed_us, now_us()) ELSE freed_us END
             WHERE id = $1 AND cluster_id = $2 AND (revoked_us IS NULL OR $4)",
        )
        .bind(revocation.grant.to_string())
        .bind(cluster)
        .bind(&revocation.by)
        .bind(revocation.frees_seats)
        .execute(&mut *self.transaction)
        .await?;
        Ok(())
    }
}

/// Appends `jws` to the cluster's chain of signed statements.
pub(in crate::store) async fn add_statement(
    connection: &mut PgConnection,
    cluster: Uuid,
    now: formation::UnixMicros,
    jws: &Jws,
) -> Result<(), StoreError> {
    let claimed: Statement = jws
        .claims_unverified(JwsType::Statement)
        .map_err(|_| StoreError::damaged("a verified statement doesn't parse"))?;
    sqlx::query(
        "INSERT INTO statements (cluster_id, sequence, hash, jws, stored_us)
         VALUES ($1, $2, $3, $4, $5)",
    )
    .bind(cluster)
    .bind(number_to_row(claimed.seq)?)
    .bind(&jws.hash().0[..])
    .bind(jws.as_str())
    .bind(number_to_row(now.0)?)
    .execute(&mut *connection)
    .await?;
    super::ca_rotation::follow_statement(connection, &claimed).await
}
