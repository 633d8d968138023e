//! `cluster create` and `cluster restate`: sign a statement on the admin's machine.

use discovery_types::admin::AdminChain;
use discovery_types::api::{
    ClusterQuery, ClusterState, ClusterStates, ClusterSummary, DraftRequest,
};
use discovery_types::digest::Digest;
use discovery_types::role::Action;
use discovery_types::statement::{Permissions, Statement};
use serde::Serialize;

use super::{CreateArgs, RestateArgs};
use crate::cli::CliError;
use crate::cli::pages;
use crate::cli::printer::{Printer, duration};
use crate::cli::session::{AdminSession, is_live, repeat_while_busy};

#[derive(Serialize)]
pub(super) struct StatementResult {
    #[serde(flatten)]
    summary: ClusterSummary,
    statement: Digest,
    /// Number of the statement in the chain.
    pub(super) seq: u64,
    /// Whether this command signed the statement. If not, the cluster's newest statement already
    /// had the same content.
    is_new: bool,
}

pub(super) async fn create(
    session: &AdminSession,
    args: &CreateArgs,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let permissions = args.allow.added_to(Permissions::default());
    if args.size.is_multiple_of(2) && !permissions.even_size {
        return Err(CliError::Usage(format!(
            "{} members tolerate no more failures than {}: use an odd size, or --allow-even",
            args.size,
            args.size - 1
        )));
    }
    let deadline_seconds = args.deadline.as_secs();
    check_deadline(session, deadline_seconds).await?;
    let (_, admins) = session.admins().await?;
    session.check_role(&admins, Action::CreateDraft)?;
    let request = DraftRequest { name: args.name.clone(), size: args.size };
    let draft = session.client.create_draft(&request).await?;
    let statement = Statement {
        version: 1,
        cluster: draft.cluster,
        name: args.name.clone(),
        size: args.size,
        seq: 0,
        previous: None,
        peer_ca: draft.peer_ca,
        client_ca: draft.client_ca,
        admins: admins.admins().to_vec(),
        permissions,
        deadline_seconds,
        spread: args.spread,
        needs_approval: args.approve,
        also_trusted: None,
        adopted: None,
    };
    print(printer, &put(session, &statement).await?)?;
    warn_single_owner(&admins, printer);
    printer.note(&format!(
        "next: muster-discovery token create --cluster {0} --out {0}.bundle",
        args.name
    ));
    Ok(())
}

/// Refuses a deadline that the service doesn't take. Call it before making a draft, which would
/// block the cluster's name.
pub(super) async fn check_deadline(session: &AdminSession, seconds: u64) -> Result<(), CliError> {
    let most = session.client.context().await?.max_deadline_seconds;
    if seconds > most {
        return Err(CliError::Usage(format!(
            "--deadline: this service takes {} at most",
            duration(most)
        )));
    }
    Ok(())
}

pub(super) async fn restate(
    session: &AdminSession,
    args: &RestateArgs,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let Some(cluster) = &args.cluster else { return restate_all(session, args, printer).await };
    let cluster = session.cluster(cluster).await?;
    let (_, admins) = session.admins().await?;
    let stated = restate_one(session, args, &admins, cluster).await?;
    if !stated.is_new {
        printer.note("nothing has changed: the newest statement says this already");
    }
    print(printer, &stated)
}

/// Signs a next statement for each of the clusters, one after the other. If one fails, the command
/// goes on with the next cluster.
async fn restate_all(
    session: &AdminSession,
    args: &RestateArgs,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let (mut done, mut failed) = (Vec::new(), None);
    let (_, admins) = session.admins().await?;
    let opened = ClusterState::ALL
        .into_iter()
        .filter(|state| is_live(*state) && *state != ClusterState::Draft);
    let query = ClusterQuery { state: Some(ClusterStates::new(opened)), ..ClusterQuery::default() };
    let clusters = pages::clusters(session, &query, None, printer).await?.items;
    for cluster in clusters {
        let name = cluster.name.clone();
        let restated =
            repeat_while_busy(async || restate_one(session, args, &admins, cluster.clone()).await);
        match restated.await {
            Ok(stated) => done.push(stated),
            Err(error) => {
                printer.warn(&format!("cluster {name} was not restated: {error}"));
                failed.get_or_insert(error);
            }
        }
    }
    printer.print_value(&done, |out| {
        let rows = done.iter().map(|stated| {
            let what = if stated.is_new { "restated" } else { "unchanged" };
            [stated.summary.name.to_string(), what.to_owned(), stated.seq.to_string()]
        });
        out.table(["CLUSTER", "STATEMENT", "NUMBER"], rows);
    })?;
    failed.map_or(Ok(()), Err)
}

async fn restate_one(
    session: &AdminSession,
    args: &RestateArgs,
    admins: &AdminChain,
    cluster: ClusterSummary,
) -> Result<StatementResult, CliError> {
    let chain = session.chain(cluster.cluster).await?;
    session.check_role_in_statement(&chain, Action::PutStatement)?;
    let last = chain.newest();
    let deadline = args.deadline.map_or(last.deadline_seconds, |deadline| deadline.as_secs());
    let mut next = Statement {
        admins: admins.admins().to_vec(),
        permissions: args.allow.added_to(last.permissions),
        deadline_seconds: deadline,
        ..last.clone()
    };
    if next == *last {
        let (statement, seq) = (chain.newest_hash(), last.seq);
        return Ok(StatementResult { summary: cluster, statement, seq, is_new: false });
    }
    next.seq += 1;
    next.previous = Some(chain.newest_hash());
    put(session, &next).await
}

/// Signs a statement and sends it.
pub(super) async fn put(
    session: &AdminSession,
    statement: &Statement,
) -> Result<StatementResult, CliError> {
    let statement = &Statement { version: statement.format_version(), ..statement.clone() };
    statement.check().map_err(CliError::Statement)?;
    let jws = statement.sign(&session.key);
    let summary = session.client.put_statement(statement.cluster, &jws).await?;
    Ok(StatementResult { summary, statement: jws.hash(), seq: statement.seq, is_new: true })
}

pub(super) fn print(printer: &mut Printer, stated: &StatementResult) -> Result<(), CliError> {
    printer.print_value(stated, |out| {
        out.fields(&[
            ("name", stated.summary.name.to_string()),
            ("id", stated.summary.cluster.to_string()),
            ("size", stated.summary.size.to_string()),
            ("state", stated.summary.state.to_string()),
            ("statement", format!("{} (number {})", stated.statement, stated.seq)),
        ]);
    })
}

/// Warns if the service has a single owner.
pub(super) fn warn_single_owner(admins: &AdminChain, printer: &mut Printer) {
    if has_single_owner(admins) {
        printer.warn(
            "there is a single owner: if that key is lost, nobody can retire this cluster, \
             restate it or name an admin. Add a second, or one on paper: muster-discovery admin \
             add NAME --recovery, then cluster restate",
        );
    }
}

fn has_single_owner(admins: &AdminChain) -> bool {
    admins.admins().iter().filter(|admin| admin.is_owner()).count() == 1
}

#[cfg(test)]
mod tests {
    use discovery_types::admin::{Admin, AdminOperation};
    use discovery_types::key::SigningKey;
    use discovery_types::role::Role;

    use super::*;

    #[test]
    fn only_a_further_owner_ends_the_warning_about_a_single_one() {
        let owner = SigningKey::generate();
        let mut chain = AdminChain::root(owner.public());
        assert!(has_single_owner(&chain));
        for (name, role, is_single) in [
            ("ina", Role::Issuer, true),
            ("olga", Role::Operator, true),
            ("ada", Role::Owner, false),
        ] {
            let key = *SigningKey::generate().public();
            let admin = Admin { key, name: name.parse().unwrap(), roles: vec![role] };
            let add = chain.sign_next(&owner, AdminOperation::Add(admin));
            chain.append(&add).unwrap();
            assert_eq!(has_single_owner(&chain), is_single, "{name}");
        }
    }
}
