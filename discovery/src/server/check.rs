//! `serve --check`: tells whether a start would work, and changes nothing. It runs the steps of a
//! start, apart from those that write.

use std::time::Duration;

use managed_postgres::running_connect_options;
use muster_checks::CheckReport;
use sqlx::postgres::PgConnectOptions;

use super::console::{self, CONSOLE_CERTIFICATE_ADVICE, SERVICE_CERTIFICATE_WARNING};
use super::run::{
    DATABASE, bind, check_args, database_error, external_options, ledger_error, load_identity_keys,
    load_keys, load_tls, postgres_error, postgres_settings,
};
use super::{ServeArgs, ServerError};
use crate::keydir::KeyDirectory;
use crate::ledger::LedgerFacts;
use crate::store;

/// Time limit for all queries of the database.
const DATABASE_TIMEOUT: Duration = Duration::from_secs(10);
/// Remaining life of the listener's certificate in seconds below which a person is warned. The
/// alert on the metric has the same limit.
const MIN_CERTIFICATE_LIFE: i64 = 14 * 86_400;

/// Checks the set-up of the service. Returns an error only for a wrong command line. Everything
/// else is in the report.
pub(crate) async fn check(args: &ServeArgs) -> Result<CheckReport, ServerError> {
    check_args(args)?;
    let mut report = CheckReport::default();
    let keys = check_keys(args, &mut report);
    check_identity_keys(args, &mut report);
    let is_running = check_ledger(args, &mut report);
    check_addresses(args, is_running, &mut report);
    check_console(args, keys.as_ref(), &mut report);
    check_database(args, keys.as_ref(), &mut report).await;
    Ok(report)
}

fn check_keys(args: &ServeArgs, report: &mut CheckReport) -> Option<KeyDirectory> {
    let keys = match load_keys(args) {
        Ok(keys) => keys,
        Err(error) => {
            report.fail_with("keys", &error);
            return None;
        }
    };
    let (signing, kek) = (keys.signer().version, keys.kek.newest_version());
    report.ok("keys", format!("{} has signing key {signing} and KEK {kek}", args.keys.display()));
    if let Err(error) = load_tls(&keys) {
        report.fail_with("tls", &error);
        return Some(keys);
    }
    let end = keys.tls_certificate_end();
    let shown = jiff::Timestamp::from_second(end).unwrap_or(jiff::Timestamp::MAX);
    let next = "make another certificate of the same key, as docs/runbook.md says under \
                MusterDiscoveryCertificateEnds";
    match end - jiff::Timestamp::now().as_second() {
        left if left <= 0 => report.fail("tls", format!("the certificate ended at {shown}"), next),
        left if left < MIN_CERTIFICATE_LIFE => {
            report.warn("tls", format!("the certificate ends at {shown}"), next);
        }
        _ => report
            .ok("tls", format!("the pin is {}, and the certificate ends at {shown}", keys.pin())),
    }
    Some(keys)
}

fn check_identity_keys(args: &ServeArgs, report: &mut CheckReport) {
    let Some(folder) = &args.identity_keys else { return };
    match load_identity_keys(args) {
        Ok(_) => report.ok("identity-keys", folder.display().to_string()),
        Err(error) => report.fail_with("identity-keys", &error),
    }
}

/// Checks the ledger. Returns whether a running process uses it.
fn check_ledger(args: &ServeArgs, report: &mut CheckReport) -> bool {
    let dir = args.ledger.display();
    match LedgerFacts::read(&args.ledger) {
        Ok(None) => report.ok("ledger", format!("{dir} has no ledger yet: the start makes one")),
        Ok(Some(facts)) if facts.is_in_use => {
            let text = format!("{dir} is in use: the service runs, or another process of it");
            report.warn("ledger", text, "stop that process before a second one is started with it");
            return true;
        }
        Ok(Some(LedgerFacts { is_copy: true, .. })) => report.warn(
            "ledger",
            format!("{dir} was restored or copied"),
            "run no second process with the original; see docs/backup.md",
        ),
        Ok(Some(LedgerFacts { commits, .. })) => {
            report.ok("ledger", format!("{dir} has {commits} commits"));
        }
        Err(error) => report.fail_with("ledger", &ledger_error(error)),
    }
    false
}

/// Binds each address, and releases it at once. If the service runs, an address that can't be bound
/// is only a warning: the service probably holds it.
fn check_addresses(args: &ServeArgs, is_running: bool, report: &mut CheckReport) {
    let console = &args.console.console_listen;
    for address in args.listen.iter().chain(&args.etcd_listen).chain(console) {
        match bind(std::slice::from_ref(address)) {
            Ok(_) => report.ok("listen", format!("{address} is free")),
            Err(_) if is_running => {
                let text = format!("{address} can't be bound, and the ledger is in use");
                report.warn("listen", text, "ignore this if the running service listens there");
            }
            Err(error) => report.fail_with("listen", &error),
        }
    }
}

/// Reads the certificate and the key that the console shows to browsers.
fn check_console(args: &ServeArgs, keys: Option<&KeyDirectory>, report: &mut CheckReport) {
    // Check nothing if the key directory can't be read, which is reported already: the console's
    // default certificate is in it.
    let (Some(keys), Some(&first)) = (keys, args.console.console_listen.first()) else { return };
    match console::prepare(&args.console, keys, Some(first)) {
        Ok(Some(ready)) if ready.settings.uses_service_certificate => {
            report.warn("console", SERVICE_CERTIFICATE_WARNING, CONSOLE_CERTIFICATE_ADVICE);
        }
        Ok(ready) => {
            let url = ready.map(|ready| ready.settings.url.clone()).unwrap_or_default();
            report.ok("console", format!("its certificate and key fit, and its URL is {url}"));
        }
        Err(error) => report.fail_with("console", &error),
    }
}

async fn check_database(args: &ServeArgs, keys: Option<&KeyDirectory>, report: &mut CheckReport) {
    match database_to_inspect(args, report) {
        Ok(Some(options)) => inspect_database(options, keys, report).await,
        Ok(None) => {}
        Err(error) => report.fail_with("database", &error),
    }
}

/// Returns the connect options of a database that runs. If a managed Postgres doesn't run, only
/// checks that it could be started, and returns `None`.
fn database_to_inspect(
    args: &ServeArgs,
    report: &mut CheckReport,
) -> Result<Option<PgConnectOptions>, ServerError> {
    let Some(dir) = &args.database.managed_postgres else {
        return external_options(&args.database).map(Some);
    };
    let settings = postgres_settings(&args.database, dir)?;
    managed_postgres::check(&settings).map_err(|error| postgres_error(error.into()))?;
    let running = running_connect_options(&settings.dir, DATABASE);
    if running.is_none() {
        let text = format!("the Postgres in {} can be started", settings.dir.display());
        report.ok("database", text);
    }
    Ok(running)
}

async fn inspect_database(
    options: PgConnectOptions,
    keys: Option<&KeyDirectory>,
    report: &mut CheckReport,
) {
    let inspected = tokio::time::timeout(DATABASE_TIMEOUT, store::inspect(options, keys)).await;
    let Ok(inspected) = inspected else {
        let text = format!("no answer within {} s", DATABASE_TIMEOUT.as_secs());
        return report.fail("database", text, "check Postgres' log, and the network path to it");
    };
    match inspected {
        Ok(facts) => {
            for warning in &facts.warnings {
                report.warn("database", warning, "a setting of this Postgres needs a look");
            }
            let text = match (facts.is_new, facts.pending_migrations) {
                (true, _) => {
                    "it answers, and has no tables of ours yet: the start creates them".to_owned()
                }
                (false, 0) => "it answers, and its schema is up to date".to_owned(),
                (false, n) => format!("it answers, and the start applies {n} migrations"),
            };
            report.ok("database", text);
        }
        Err(error) => report.fail_with("database", &database_error(error)),
    }
}
