//! Reads the identity of the server, database and tables behind a connection.

use discovery_formation::memory::DatabaseIdentity;
use sqlx::PgConnection;

/// Identity and position of a Postgres server.
#[derive(Clone, Debug, sqlx::FromRow)]
pub(crate) struct PostgresServer {
    pub(super) in_recovery: bool,
    system_identifier: String,
    timeline: i64,
    /// Flushed position of the write-ahead log, in bytes.
    pub(super) wal: i64,
    database_oid: i64,
    table_oids: Vec<i64>,
}

impl PostgresServer {
    pub(crate) fn site(&self) -> Result<DatabaseIdentity, sqlx::Error> {
        site(&self.system_identifier, self.timeline, self.database_oid, &self.table_oids)
            .ok_or_else(|| sqlx::Error::Decode("a server's site in numbers that none has".into()))
    }
}

/// Builds a database's identity. Returns `None` if a number is out of its range.
pub(super) fn site(
    system: &str,
    timeline: i64,
    database: i64,
    tables: &[i64],
) -> Option<DatabaseIdentity> {
    let number = |oid: &i64| u32::try_from(*oid).ok();
    let tables: Vec<u32> = tables.iter().map(number).collect::<Option<_>>()?;
    Some(DatabaseIdentity {
        system: system.parse().ok()?,
        timeline: timeline.try_into().ok()?,
        database: number(&database)?,
        tables: tables.try_into().ok()?,
    })
}

/// SQL for the oids of the database and its core tables. It looks the oids up by name each time,
/// because the tables can have been created again.
macro_rules! oids {
    () => {
        "(SELECT oid::bigint FROM pg_database WHERE datname = current_database()) AS database_oid,
         (SELECT array_agg(coalesce(to_regclass(name)::oid::bigint, 0) ORDER BY place)
          FROM unnest(ARRAY['clusters', 'commits', 'decisions', 'processes'])
              WITH ORDINALITY AS t (name, place)) AS table_oids"
    };
}
pub(crate) use oids;

/// Present identity of the database behind an open connection. The connection led to `known` when
/// it was made, and still leads to the same server. Only the oids can have changed.
pub(crate) fn current_site(
    known: &DatabaseIdentity,
    database: i64,
    tables: &[i64],
) -> Option<DatabaseIdentity> {
    let system = known.system.to_string();
    site(&system, known.timeline.into(), database, tables)
}

pub(crate) async fn server_of(
    connection: &mut PgConnection,
) -> Result<PostgresServer, sqlx::Error> {
    // Use the flushed position of the write-ahead log: unlike the inserted one, it never goes back
    // after a crash. A replica knows neither this position nor the timeline, so the query returns 0
    // there.
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
