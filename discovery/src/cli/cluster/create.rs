//! `cluster create` and `cluster restate`: a statement, signed here.

use discovery_types::admin::AdminChain;
use discovery_types::api::{ClusterSummary, DraftRequest};
use discovery_types::digest::Digest;
use discovery_types::role::Action;
use discovery_types::statement::{Permissions, Statement};
use serde::Serialize;

use super::{CreateArgs, RestateArgs};
use crate::cli::CliError;
use crate::cli::printer::{Printer, duration};
use crate::cli::session::Session;

#[derive(Serialize)]
struct Stated {
    #[serde(flatten)]
    summary: ClusterSummary,
    statement: Digest,
    seq: u64,
}

pub(super) async fn create(
    session: &Session,
    args: &CreateArgs,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let permissions = args.allow.over(Permissions::default());
    if args.size.is_multiple_of(2) && !permissions.even_size {
        return Err(CliError::Usage(format!(
            "{} members tolerate no more failures than {}: use an odd size, or --allow-even",
            args.size,
            args.size - 1
        )));
    }
    let deadline_seconds = args.deadline.as_secs();
    // Before there is a draft that would stand in the way of the name's earlier clusters.
    let most = session.client.context().await?.max_deadline_seconds;
    if deadline_seconds > most {
        return Err(CliError::Usage(format!(
            "--deadline: this service takes {} at most",
            duration(most)
        )));
    }
    let (_, admins) = session.admins().await?;
    session.needs(&admins, Action::CreateDraft)?;
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
    };
    put(session, &statement, printer).await?;
    warn_single_owner(&admins, printer);
    printer.note(&format!(
        "next: muster-discovery token create --cluster {0} --out {0}.bundle",
        args.name
    ));
    Ok(())
}

pub(super) async fn restate(
    session: &Session,
    args: &RestateArgs,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let cluster = session.cluster(&args.cluster).await?;
    let chain = session.chain(cluster.cluster).await?;
    session.needs_in_statement(&chain, Action::PutStatement)?;
    let (_, admins) = session.admins().await?;
    let last = chain.newest();
    let deadline = args.deadline.map_or(last.deadline_seconds, |deadline| deadline.as_secs());
    let mut next = Statement {
        admins: admins.admins().to_vec(),
        permissions: args.allow.over(last.permissions),
        deadline_seconds: deadline,
        ..last.clone()
    };
    if next == *last {
        printer.note("nothing has changed: the newest statement says this already");
        let statement = chain.newest_hash();
        return print(printer, cluster, statement, last.seq);
    }
    next.seq += 1;
    next.previous = Some(chain.newest_hash());
    put(session, &next, printer).await
}

async fn put(
    session: &Session,
    statement: &Statement,
    printer: &mut Printer,
) -> Result<(), CliError> {
    statement.check().map_err(CliError::Statement)?;
    let jws = statement.sign(&session.key);
    let summary = session.client.put_statement(statement.cluster, &jws).await?;
    print(printer, summary, jws.hash(), statement.seq)
}

fn print(
    printer: &mut Printer,
    summary: ClusterSummary,
    statement: Digest,
    seq: u64,
) -> Result<(), CliError> {
    let stated = Stated { summary, statement, seq };
    printer.value(&stated, |out| {
        out.fields(&[
            ("name", stated.summary.name.to_string()),
            ("id", stated.summary.cluster.to_string()),
            ("size", stated.summary.size.to_string()),
            ("state", stated.summary.state.to_string()),
            ("statement", format!("{} (number {seq})", stated.statement)),
        ]);
    })
}

fn warn_single_owner(admins: &AdminChain, printer: &mut Printer) {
    if admins.admins().iter().filter(|admin| admin.is_owner()).count() == 1 {
        printer.warn(
            "there is a single owner: if that key is lost, nobody can retire this cluster, \
             restate it or name an admin. Add a second: muster-discovery admin add NAME \
             PUBLIC_KEY --role owner, then cluster restate",
        );
    }
}
