//! The command `db`: decisions about the service's database that only an admin with the role of
//! owner may make.

use clap::Subcommand;
use discovery_types::api::AcceptRequest;

use super::confirm::IrreversibleAct;
use super::printer::Printer;
use super::session::AdminSession;
use super::{CliError, RemoteArgs};

#[derive(Debug, clap::Args)]
pub(super) struct DbArgs {
    #[command(flatten)]
    pub(super) remote: RemoteArgs,
    #[command(subcommand)]
    command: DbCommand,
}

#[derive(Debug, Subcommand)]
enum DbCommand {
    /// Accept that the database was restored or replaced
    #[command(after_help = "\
Example:
  muster-discovery db accept --yes

Use it only when the database was restored from a backup or replaced, and ledgers of earlier processes
are lost. It abandons every cluster that has not committed and revokes every token: whatever the lost
part of the database said about them can't be known. Committed and running clusters are not touched.")]
    Accept {
        /// Accept only a database with this system identifier (see `cluster explain`)
        #[arg(long, value_name = "ID")]
        system_identifier: Option<String>,
        /// Skip the confirmation prompt
        #[arg(long)]
        yes: bool,
    },
}

pub(super) async fn run(args: DbArgs, printer: &mut Printer) -> Result<(), CliError> {
    let DbCommand::Accept { system_identifier, yes } = args.command;
    let ends = "This abandons every cluster that has not committed and revokes every token.";
    IrreversibleAct { consequences: vec![ends.into()], name: "accept" }.confirm(yes, printer)?;
    let session = AdminSession::open(&args.remote)?;
    let done = session.client.accept_database(&AcceptRequest { system_identifier }).await?;
    printer.print_value(&done, |out| {
        out.fields(&[
            ("database", format!("{} (timeline {})", done.system_identifier, done.timeline)),
            ("abandoned clusters", done.abandoned.len().to_string()),
            ("revoked tokens", done.revoked_tokens.to_string()),
            ("commits put back", done.restored_commits.to_string()),
        ]);
    })
}
