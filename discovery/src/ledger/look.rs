//! Looking at a connection's database: is it the one that was last seen?

use std::sync::atomic::Ordering;

use discovery_formation::Hash;
use discovery_formation::memory::{
    Database, Difference, Fill, Mark, Noted, Own, Site, compare, lives_elsewhere,
};
use sqlx::{Connection, PgConnection};
use uuid::Uuid;

use super::generation::{self, Generation, begin};
use super::put_back::first_contradicted;
use super::watch::publish;
use super::{DatabaseWatch, Ledger, Seen, UNCOPIED, copy};

/// Whether this look counts as a sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Occasion {
    /// A new connection, a hint, a doubt.
    Doubt,
    /// The sweep.
    Sweep,
}

/// Which server this is.
#[derive(Clone, Debug, sqlx::FromRow)]
pub(crate) struct Server {
    in_recovery: bool,
    system_identifier: String,
    timeline: i64,
    wal: i64,
    database_oid: i64,
    table_oids: Vec<i64>,
}

impl Server {
    pub(crate) fn site(&self) -> Result<Site, sqlx::Error> {
        site(&self.system_identifier, self.timeline, self.database_oid, &self.table_oids)
            .ok_or_else(|| sqlx::Error::Decode("a server's site in numbers that none has".into()))
    }
}

fn site(system: &str, timeline: i64, database: i64, tables: &[i64]) -> Option<Site> {
    let number = |oid: &i64| u32::try_from(*oid).ok();
    let tables: Vec<u32> = tables.iter().map(number).collect::<Option<_>>()?;
    Some(Site {
        system: system.parse().ok()?,
        timeline: timeline.try_into().ok()?,
        database: number(&database)?,
        tables: tables.try_into().ok()?,
    })
}

/// Looks at a connection's database, before its first use and from time to time; copies what the
/// ledger lacks of it. What differs begins a new generation.
pub(crate) async fn look(
    connection: &mut PgConnection,
    ledger: &Ledger,
    watch: &DatabaseWatch,
    occasion: Occasion,
) -> Result<(), sqlx::Error> {
    // Before the server is asked: what another connection notes meanwhile is ahead of the answer.
    let before = ledger.memory();
    let server = server_of(connection).await?;
    if server.in_recovery {
        return Err(sqlx::Error::Configuration("this server is a replica now".into()));
    }
    let looked = Looked { server: &server, ledger, watch, before };
    let mut transaction = connection.begin().await?;
    let (mut verdict, mut row) = looked.judge(&mut transaction).await?;
    if verdict.is_err() || row.generation.is_none() || row.beat.is_none() || row.forgotten {
        // Again, alone: another process may be at it as well.
        generation::lock_alone(&mut transaction).await?;
        (verdict, row) = looked.judge(&mut transaction).await?;
        begin(&mut transaction, &looked, &row, &verdict).await?;
    }
    let elsewhere = verdict.is_ok() && looked.lives_elsewhere(&row);
    if occasion == Occasion::Sweep && watch.meets(elsewhere) {
        return Err(sqlx::Error::Configuration(ELSEWHERE.into()));
    }
    let generation = generation::read(&mut transaction).await?;
    let processes = generation::known_processes(&mut transaction).await?;
    transaction.commit().await?;
    let mut seen = looked.seen(&generation, &row, processes)?;
    let failed = |error| sqlx::Error::Io(std::io::Error::other(error));
    if ledger.seen().is_none_or(|old| !old.is_of_the_same(&seen)) {
        ledger.note(seen.clone()).await.map_err(failed)?;
    }
    let fill = match verdict {
        // Its sweeps are no sign of an older ledger.
        Ok(_) if elsewhere => Fill::New,
        Ok(fill) => fill,
        Err(_) => Fill::Other,
    };
    if fill == Fill::All {
        tell_of_older(ledger, watch);
    }
    let from = match (fill, ledger.known()) {
        (Fill::New, Some(known)) => known.copied,
        _ => UNCOPIED,
    };
    copy::copy(connection, ledger, watch, from).await?;
    if ledger.is_copy() {
        tell_of_copy(ledger, watch);
        if generation.settled {
            ledger.settle_here();
        }
    }
    // The beginning of a life counts as a sweep.
    let counts = occasion == Occasion::Sweep || !watch.began.load(Ordering::Relaxed);
    seen.beat = renew(connection, ledger, watch.life, counts).await?.unsigned_abs();
    if counts || fill != Fill::New {
        // The row first: less there than here is the past, one more is a kill between the two.
        ledger.note(seen).await.map_err(failed)?;
    }
    watch.began.store(true, Ordering::Relaxed);
    if generation.settled {
        watch.compared.store(generation.number, Ordering::Relaxed);
    }
    publish(watch, ledger.process(), generation);
    Ok(())
}

/// Once in a life.
fn tell_of_older(ledger: &Ledger, watch: &DatabaseWatch) {
    if watch.set_back.swap(true, Ordering::Relaxed) {
        return;
    }
    watch.metrics.alarm("ledger_set_back");
    tracing::error!(
        process = %ledger.process(),
        "this ledger holds less than the database says that it did: it was put back to an older \
         state. It is filled from the database; look who did that, and why"
    );
}

/// Once in a life.
fn tell_of_copy(ledger: &Ledger, watch: &DatabaseWatch) {
    if watch.copied.swap(true, Ordering::Relaxed) {
        return;
    }
    watch.metrics.alarm("ledger_copied");
    tracing::error!(
        process = %ledger.process(),
        "this ledger is not where it was written: it was put back from a backup, or copied. What it \
         lacks of the database is filled in. If the database was put back as well, nothing tells how \
         old the two are, and an owner has to decide; and no second process may run on it"
    );
}

/// This process lives, and its ledger holds so much. Returns how often it has swept.
async fn renew(
    connection: &mut PgConnection,
    ledger: &Ledger,
    life: Uuid,
    counts: bool,
) -> Result<i64, sqlx::Error> {
    sqlx::query_scalar(
        "UPDATE processes SET last_seen_us = now_us(), entries = greatest(entries, $2),
             beat = beat + $3, life = CASE WHEN $3 = 0 THEN life ELSE $4 END
         WHERE id = $1 RETURNING beat",
    )
    .bind(ledger.process())
    .bind(ledger.commits() as i64)
    .bind(i64::from(counts))
    .bind(life)
    .fetch_one(connection)
    .await
}

/// What one look has found before it reads any table.
pub(super) struct Looked<'a> {
    pub(super) server: &'a Server,
    pub(super) ledger: &'a Ledger,
    watch: &'a DatabaseWatch,
    pub(super) before: discovery_formation::memory::Memory,
}

/// What this process ends with.
pub(crate) const ELSEWHERE: &str = "two processes use copies of one ledger: another one goes by this one's id \
     in the database. Look for a cloned machine, or a ledger that was copied to a second host; leave one \
     of the two running, and give the other an empty --ledger of its own";

/// Nothing is written into it: what pg_restore makes next would not fit.
pub(crate) const HALF_LOADED: &str = "this database isn't whole: keys, indexes or triggers are missing. \
     Wait for the restore that is under way; one that broke off is begun anew, with an empty database";

/// What stands in the tables.
#[derive(Debug, sqlx::FromRow)]
pub(super) struct Row {
    /// The generation, and what was noted with it.
    pub(super) generation: Option<i64>,
    settled: Option<bool>,
    system_identifier: Option<String>,
    timeline: Option<i64>,
    database_oid: Option<i64>,
    table_oids: Option<Vec<i64>>,
    newest: i64,
    at_copied: Option<Vec<u8>>,
    /// Whether everything is there that a restore makes last.
    is_whole: bool,
    /// This process's own row.
    entries: Option<i64>,
    pub(super) beat: Option<i64>,
    life: Option<Uuid>,
    pub(super) forgotten: bool,
}

impl Row {
    fn own(&self) -> Option<Own> {
        let (entries, beat) = self.entries.zip(self.beat)?;
        Some(Own { entries: entries.unsigned_abs(), beat: beat.unsigned_abs() })
    }
}

/// Why a database isn't taken for the one that was known.
pub(super) enum Found {
    Differs(Difference),
    /// This cluster could go another way here than the ledger says.
    Contradicts(uuid::Uuid),
}

impl std::fmt::Display for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Found::Differs(difference) => difference.fmt(f),
            Found::Contradicts(cluster) => {
                write!(f, "a backup: what was decided of cluster {cluster} isn't in it")
            }
        }
    }
}

impl Looked<'_> {
    async fn judge(
        &self,
        connection: &mut PgConnection,
    ) -> Result<(Result<Fill, Found>, Row), sqlx::Error> {
        let copied = self.before.known.map_or(Mark::START, |known| known.copied);
        let row: Row = sqlx::query_as(
            "SELECT g.number AS generation, g.settled, g.system_identifier, g.timeline,
                    g.database_oid, g.table_oids, p.entries, p.beat, p.life,
                    coalesce(p.forgotten_us IS NOT NULL, false) AS forgotten,
                    is_whole(), (SELECT coalesce(max(number), 0) FROM decisions) AS newest,
                    (SELECT hash FROM decisions WHERE number = $2) AS at_copied
             FROM (SELECT 1) AS one LEFT JOIN generation g ON true LEFT JOIN processes p ON p.id = $1",
        )
        .bind(self.ledger.process())
        .bind(copied.number as i64)
        .fetch_one(&mut *connection)
        .await?;
        if !row.is_whole {
            return Err(sqlx::Error::Configuration(HALF_LOADED.into()));
        }
        let verdict = match compare(&self.before, &self.database(&row)?) {
            Err(difference) => Err(Found::Differs(difference)),
            Ok(fill) => {
                // What was copied in this generation stands in it, by the hash; what the ledger
                // brings into another one, or from another life, is looked for once.
                let compared = self.watch.compared.load(Ordering::Relaxed);
                let looks = row.settled == Some(true) && row.generation != Some(compared);
                match looks {
                    true => match first_contradicted(connection, self.ledger).await? {
                        Some(cluster) => Err(Found::Contradicts(cluster)),
                        None => Ok(fill),
                    },
                    false => Ok(fill),
                }
            }
        };
        Ok((verdict, row))
    }

    /// What is noted of the database.
    fn seen(
        &self,
        generation: &Generation,
        row: &Row,
        processes: Vec<Uuid>,
    ) -> Result<Seen, sqlx::Error> {
        let site = self.server.site()?;
        Ok(Seen {
            system_identifier: site.system,
            timeline: site.timeline,
            database: site.database,
            tables: site.tables,
            generation: generation.number.unsigned_abs(),
            wal: self.server.wal.unsigned_abs(),
            beat: row.beat.unwrap_or(0).unsigned_abs(),
            processes,
        })
    }

    fn lives_elsewhere(&self, row: &Row) -> bool {
        let began = self.watch.began.load(Ordering::Relaxed);
        let (known, is_ours) = (self.before.known, row.life == Some(self.watch.life));
        let known = known.zip(row.own()).filter(|_| began);
        known.is_some_and(|(known, own)| lives_elsewhere(&known, &own, is_ours))
    }

    fn database(&self, row: &Row) -> Result<Database, sqlx::Error> {
        let hash = row.at_copied.as_deref().and_then(|hash| hash.try_into().ok()).map(Hash);
        let noted = row.generation.map(|number| {
            let noted = site(
                row.system_identifier.as_deref().unwrap_or_default(),
                row.timeline.unwrap_or_default(),
                row.database_oid.unwrap_or_default(),
                row.table_oids.as_deref().unwrap_or_default(),
            );
            // Noted before there were such notes: of nowhere.
            let site =
                noted.unwrap_or(Site { system: 0, timeline: 0, database: 0, tables: [0; 4] });
            Noted { site, generation: number.unsigned_abs() }
        });
        Ok(Database {
            site: self.server.site()?,
            wal: self.server.wal.unsigned_abs(),
            noted,
            newest: row.newest.unsigned_abs(),
            at_copied: hash,
            own: row.own(),
        })
    }
}

/// The database's and its core tables' oids. By name each time: they may have been made anew.
macro_rules! oids {
    () => {
        "(SELECT oid::bigint FROM pg_database WHERE datname = current_database()) AS database_oid,
         (SELECT array_agg(coalesce(to_regclass(name)::oid::bigint, 0) ORDER BY place)
          FROM unnest(ARRAY['clusters', 'commits', 'decisions', 'processes'])
              WITH ORDINALITY AS t (name, place)) AS table_oids"
    };
}
pub(crate) use oids;

/// Where a connection leads now that led to `known` when it was made: the server stays the same.
pub(crate) fn site_now(known: &Site, database: i64, tables: &[i64]) -> Option<Site> {
    let system = known.system.to_string();
    site(&system, known.timeline.into(), database, tables)
}

pub(crate) async fn server_of(connection: &mut PgConnection) -> Result<Server, sqlx::Error> {
    // The flushed position never goes back after a crash; the inserted one may. On a replica
    // neither can be asked for.
    sqlx::query_as(concat!(
        "SELECT r AS in_recovery, s.system_identifier::text AS system_identifier,
                CASE WHEN r THEN 0 ELSE
                    ('x' || substr(pg_walfile_name(pg_current_wal_flush_lsn()), 1, 8))::bit(32)::bigint
                END AS timeline,
                CASE WHEN r THEN 0 ELSE
                    pg_wal_lsn_diff(pg_current_wal_flush_lsn(), '0/0')::bigint
                END AS wal, ",
        oids!(),
        " FROM pg_is_in_recovery() AS r, pg_control_system() AS s",
    ))
    .fetch_one(connection)
    .await
}
