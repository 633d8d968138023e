//! Checks whether a Postgres server is safe to use: its version and its durability settings.

use sqlx::PgConnection;

use super::StoreError;

/// Oldest version of Postgres that is tested, as `server_version_num`.
const OLDEST_VERSION: i32 = 130_000;

/// Results of the check, in sentences.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Findings {
    /// Reasons not to start.
    pub refusals: Vec<String>,
    /// Problems that are only logged.
    pub warnings: Vec<String>,
}

#[derive(Clone, Debug, sqlx::FromRow)]
struct Facts {
    version: i32,
    in_recovery: bool,
    fsync: String,
    synchronous_commit: String,
    full_page_writes: String,
    data_checksums: String,
    data_sync_retry: String,
    read_only: String,
}

/// Checks the server behind `connection`.
pub(crate) async fn check(connection: &mut PgConnection) -> Result<Findings, StoreError> {
    let facts: Facts = sqlx::query_as(
        "SELECT current_setting('server_version_num')::int AS version,
                pg_is_in_recovery() AS in_recovery,
                current_setting('fsync') AS fsync,
                current_setting('synchronous_commit') AS synchronous_commit,
                current_setting('full_page_writes') AS full_page_writes,
                current_setting('data_checksums') AS data_checksums,
                coalesce(current_setting('data_sync_retry', true), 'off') AS data_sync_retry,
                current_setting('default_transaction_read_only') AS read_only",
    )
    .fetch_one(connection)
    .await?;
    Ok(judge(&facts))
}

fn judge(facts: &Facts) -> Findings {
    let mut findings = Findings::default();
    let mut refuse = |text: String| findings.refusals.push(text);
    if facts.version < OLDEST_VERSION {
        let major = facts.version / 10_000;
        refuse(format!("it is PostgreSQL {major}, and 13 is the oldest one supported"));
    }
    if facts.in_recovery {
        refuse("it is a replica: connect to the primary".into());
    }
    if facts.read_only == "on" {
        refuse("default_transaction_read_only is on".into());
    }
    if facts.fsync != "on" {
        refuse("fsync is off: a power cut would lose what hosts rely on. Turn it on".into());
    }
    if facts.full_page_writes != "on" {
        let why = "a power cut could tear pages. Turn it on";
        refuse(format!("full_page_writes is off: {why}"));
    }
    if facts.synchronous_commit == "off" {
        findings.warnings.push(
            "synchronous_commit is off by default there; our sessions turn it on for themselves"
                .into(),
        );
    }
    if facts.data_checksums != "on" {
        findings.warnings.push(
            "data checksums are off: a failing disk can change rows unnoticed. Turn them on with \
             pg_checksums --enable while the server is stopped"
                .into(),
        );
    }
    if facts.data_sync_retry == "on" {
        findings.warnings.push(
            "data_sync_retry is on: after a failed sync Postgres goes on with lost writes. Turn it off"
                .into(),
        );
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Facts {
        Facts {
            version: 150_018,
            in_recovery: false,
            fsync: "on".into(),
            synchronous_commit: "on".into(),
            full_page_writes: "on".into(),
            data_checksums: "on".into(),
            data_sync_retry: "off".into(),
            read_only: "off".into(),
        }
    }

    #[test]
    fn a_server_with_safe_settings_has_no_findings() {
        assert_eq!(judge(&good()), Findings::default());
    }

    #[test]
    fn settings_that_can_lose_commits_are_refused() {
        for facts in [
            Facts { version: 120_009, ..good() },
            Facts { in_recovery: true, ..good() },
            Facts { fsync: "off".into(), ..good() },
            Facts { full_page_writes: "off".into(), ..good() },
            Facts { read_only: "on".into(), ..good() },
        ] {
            assert_eq!(judge(&facts).refusals.len(), 1, "{facts:?}");
        }
    }

    #[test]
    fn settings_that_weaken_durability_are_warned_of() {
        for facts in [
            Facts { synchronous_commit: "off".into(), ..good() },
            Facts { data_checksums: "off".into(), ..good() },
            Facts { data_sync_retry: "on".into(), ..good() },
        ] {
            let findings = judge(&facts);
            assert_eq!((findings.refusals.len(), findings.warnings.len()), (0, 1), "{facts:?}");
        }
    }
}
