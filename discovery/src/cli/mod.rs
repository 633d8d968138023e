//! The command line: the tree of commands, and the admin's commands.
//!
//! Admin commands sign on this machine and send the signed result. The key never leaves the
//! machine. The requested data goes to stdout (a table, or JSON with `--json`), everything else to
//! stderr.
//!
//! Exit codes: 0 done, 1 failed, 2 usage, 3 do not restart.

mod admin;
mod audit;
mod backup;
mod ca;
mod cluster;
mod confirm;
mod console;
mod context;
mod db;
mod error;
mod etcd_token;
mod home;
mod intent;
mod key;
mod log;
mod members;
mod pages;
mod policy;
mod printer;
mod process;
mod requirement;
mod service;
mod session;
mod token;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use discovery_types::token::holds_secret;
use rustix::process::{Resource, Rlimit, setrlimit};

pub use error::CliError;

use crate::server::{
    BackupArgs, BackupKeysArgs, InitArgs, RestoreArgs, RestoreKeysArgs, RewrapKeysArgs,
    RotateKeysArgs, ServeArgs, ServerError,
};
use log::LogArgs;
use printer::Printer;

/// Help heading of the options that every admin command has.
const COMMON: &str = "Options of every admin command";

const EXAMPLES: &str = "\
First steps, on the admin's machine unless said otherwise:
  muster-discovery key new --out owner.pem
  muster-discovery init --owner ed25519:… --dir keys --url https://disco.example.org:8443    (server)
  muster-discovery serve --keys keys --ledger ledger --managed-postgres pg                   (server)
  muster-discovery context add 'muster-context1 …'
  export MUSTER_ADMIN_KEY=owner.pem
  muster-discovery cluster create demo --size 3
  muster-discovery token create --cluster demo --out demo.bundle
  muster-discovery cluster explain demo

Exit codes: 0 done, 1 failed, 2 usage, 3 (serve) do not restart: a person has to decide.";

/// The private discovery service, and the admin's tool for it.
#[derive(Debug, Parser)]
#[command(name = "muster-discovery", version, after_help = EXAMPLES, max_term_width = 100)]
struct DiscoveryCli {
    /// Print JSON on stdout instead of a table; may stand before or after the command
    #[arg(long, global = true, help_heading = COMMON)]
    json: bool,
    #[command(subcommand)]
    command: DiscoveryCommand,
}

#[derive(Debug, Subcommand)]
enum KeysCommand {
    /// Make the next signing, key-encryption or TLS key
    Rotate(RotateKeysArgs),
    /// Wrap the keys of clusters' CAs under the newest key-encryption key
    Rewrap(RewrapKeysArgs),
}

#[derive(Debug, Subcommand)]
enum DiscoveryCommand {
    /// Run the discovery service
    Serve {
        #[command(flatten)]
        args: Box<ServeArgs>,
        #[command(flatten)]
        log: LogArgs,
        /// Print the result of --check as JSON. For the log: --log-format json
        #[arg(long)]
        json: bool,
    },
    /// Back up the managed Postgres and the ledger, while the service runs
    Backup {
        #[command(flatten)]
        args: BackupArgs,
    },
    /// Restore a backup into a new managed Postgres and a new ledger
    Restore {
        #[command(flatten)]
        args: RestoreArgs,
    },
    /// Copy the key directory to one encrypted file
    BackupKeys {
        #[command(flatten)]
        args: BackupKeysArgs,
    },
    /// Decrypt a backup of the key directory into a new folder
    RestoreKeys {
        #[command(flatten)]
        args: RestoreKeysArgs,
    },
    /// Make the next keys of the service
    Keys {
        #[command(subcommand)]
        command: KeysCommand,
    },
    /// Make the service's key directory, and print the admins' context
    Init {
        #[command(flatten)]
        args: InitArgs,
        /// Print JSON instead of one line
        #[arg(long)]
        json: bool,
    },
    /// Make an admin's key
    Key(key::KeyArgs),
    /// Manage contexts: URLs, pins and owners of discovery services
    Context(context::ContextArgs),
    /// Create clusters, see what they wait for, and end them
    Cluster(cluster::ClusterArgs),
    /// Make, see and revoke join bundles
    Token(token::TokenArgs),
    /// Sign beforehand when a dead member may be replaced
    Policy(policy::PolicyArgs),
    /// Let stock etcd form a cluster through the service
    EtcdToken(etcd_token::EtcdTokenArgs),
    /// Order membership changes of a running cluster, and see their outcome
    Intent(intent::IntentArgs),
    /// Announce the service's URLs and TLS keys to the agents of running clusters
    Service(service::ServiceArgs),
    /// Make a member's certificates without the discovery service
    Ca(ca::CaArgs),
    /// Add, list and revoke admins
    Admin(admin::AdminArgs),
    /// Read and verify the history of the service and of its clusters
    Audit(audit::AuditArgs),
    /// Sign a browser in to the service's console
    Console(console::ConsoleArgs),
    /// Accept a database that was restored or replaced
    Db(db::DbArgs),
    /// List the processes that share the database, and forget lost ones
    Process(process::ProcessArgs),
}

/// Options of every admin command.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
struct CommonArgs {
    /// Print JSON on stdout instead of a table
    #[arg(long, global = true, help_heading = COMMON)]
    json: bool,
    /// Directory with this tool's contexts [default: ~/.config/muster]
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        env = "MUSTER_ADMIN_HOME",
        hide_env_values = true,
        help_heading = COMMON
    )]
    home: Option<PathBuf>,
}

/// Options of every command that connects to the service.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
struct RemoteArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Name of the context to use [default: the current one]
    #[arg(
        long,
        global = true,
        value_name = "NAME",
        env = "MUSTER_CONTEXT",
        hide_env_values = true,
        help_heading = COMMON
    )]
    context: Option<String>,
    /// Your private key, as `key new` made it [default: HOME/admin.pem]
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        env = "MUSTER_ADMIN_KEY",
        hide_env_values = true,
        help_heading = COMMON
    )]
    key: Option<PathBuf>,
}

/// Returns the description of the command line, for manual pages and completions.
pub fn command() -> clap::Command {
    DiscoveryCli::command()
}

/// Runs the program and returns its exit code.
pub fn main() -> ExitCode {
    // Disable core files, which could contain keys and tokens. Lowering the limit is always
    // allowed.
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    let _ = setrlimit(Resource::Core, none);
    if let Err(error) = refuse_secrets(std::env::args_os().skip(1)) {
        Printer::stdio(false).print_error(&error);
        return ExitCode::from(error.exit_code());
    }
    match DiscoveryCli::try_parse() {
        Ok(cli) => run(cli),
        Err(error) => {
            let code = if error.use_stderr() { 2 } else { 0 };
            // Ignore the error: a closed terminal can't be written to.
            let _ = error.print();
            ExitCode::from(code)
        }
    }
}

/// Refuses secrets among the arguments, before any output could repeat them.
fn refuse_secrets(arguments: impl Iterator<Item = OsString>) -> Result<(), CliError> {
    for argument in arguments {
        if holds_password(&argument.to_string_lossy()) {
            return Err(CliError::Usage(
                "the password of a database stands on the command line, where other users and the \
                 shell's history see it: change it, and put the URL into the environment variable \
                 MUSTER_DATABASE_URL, or into a file (mode 0600) that --database-url-file names"
                    .into(),
            ));
        }
        if holds_secret(&argument.to_string_lossy()) {
            return Err(CliError::Usage(
                "a secret (a join bundle's token, or a private key) stands on the command line, \
                 where other users and the shell's history see it: revoke it, and name the file \
                 that holds the next one"
                    .into(),
            ));
        }
    }
    Ok(())
}

/// Whether an argument contains a Postgres URL with a password. libpq accepts the password before
/// the host or as a parameter.
fn holds_password(argument: &str) -> bool {
    let small = argument.to_ascii_lowercase();
    let urls = ["postgres://", "postgresql://"];
    let Some((_, rest)) = urls.iter().find_map(|scheme| small.split_once(scheme)) else {
        return false;
    };
    let authority = rest.split('/').next().unwrap_or_default();
    let user = authority.rsplit_once('@').map_or("", |(user, _)| user);
    let before_host = user.split_once(':').is_some_and(|(_, password)| !password.is_empty());
    let query = rest.split_once('?').map_or("", |(_, query)| query);
    let secret = |parameter: &str| {
        let named = parameter.split_once('=').filter(|(_, value)| !value.is_empty());
        named.is_some_and(|(name, _)| ["password", "sslpassword", "passwd"].contains(&name))
    };
    before_host || query.split('&').any(secret)
}

fn run(cli: DiscoveryCli) -> ExitCode {
    let mut printer = Printer::stdio(cli.wants_json());
    match cli.command.run(&mut printer) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            printer.print_error(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

impl DiscoveryCli {
    fn wants_json(&self) -> bool {
        self.json || self.command.wants_json()
    }
}

impl DiscoveryCommand {
    fn wants_json(&self) -> bool {
        match self {
            DiscoveryCommand::Serve { json, args, .. } => *json && args.check,
            DiscoveryCommand::Backup { .. }
            | DiscoveryCommand::Restore { .. }
            | DiscoveryCommand::BackupKeys { .. }
            | DiscoveryCommand::RestoreKeys { .. }
            | DiscoveryCommand::Keys { .. } => false,
            DiscoveryCommand::Init { json, .. } => *json,
            DiscoveryCommand::Key(args) => args.common.json,
            DiscoveryCommand::Context(args) => args.common.json,
            DiscoveryCommand::Cluster(args) => args.remote.common.json,
            DiscoveryCommand::Token(args) => args.remote.common.json,
            DiscoveryCommand::Policy(args) => args.remote.common.json,
            DiscoveryCommand::EtcdToken(args) => args.remote.common.json,
            DiscoveryCommand::Intent(args) => args.remote.common.json,
            DiscoveryCommand::Service(args) => args.remote.common.json,
            DiscoveryCommand::Ca(args) => args.json,
            DiscoveryCommand::Admin(args) => args.remote.common.json,
            DiscoveryCommand::Audit(args) => args.remote.common.json,
            DiscoveryCommand::Console(args) => args.remote.common.json,
            DiscoveryCommand::Db(args) => args.remote.common.json,
            DiscoveryCommand::Process(args) => args.remote.common.json,
        }
    }

    fn run(self, printer: &mut Printer) -> Result<(), CliError> {
        match self {
            DiscoveryCommand::Serve { args, log, .. } if args.check => {
                check_serve(&args, &log, printer)
            }
            DiscoveryCommand::Serve { json: true, .. } => Err(CliError::Usage(
                "`serve` prints no answer: --log-format json makes its log JSON".into(),
            )),
            DiscoveryCommand::Serve { args, log, .. } => serve(*args, &log),
            DiscoveryCommand::Backup { args } => backup::backup(&args, printer),
            DiscoveryCommand::Restore { args } => backup::restore(&args, printer),
            DiscoveryCommand::BackupKeys { args } => backup::backup_keys(&args, printer),
            DiscoveryCommand::RestoreKeys { args } => backup::restore_keys(&args, printer),
            DiscoveryCommand::Keys { command: KeysCommand::Rotate(args) } => {
                backup::rotate_keys(&args, printer)
            }
            DiscoveryCommand::Keys { command: KeysCommand::Rewrap(args) } => {
                session::block_on(backup::rewrap_keys(&args, printer))
            }
            DiscoveryCommand::Init { args, .. } => init(&args, printer),
            DiscoveryCommand::Key(args) => key::run(args, printer),
            DiscoveryCommand::Context(args) => context::run(args, printer),
            DiscoveryCommand::Cluster(args) => session::block_on(cluster::run(args, printer)),
            DiscoveryCommand::Token(args) => session::block_on(token::run(args, printer)),
            DiscoveryCommand::Policy(args) => session::block_on(policy::run(args, printer)),
            DiscoveryCommand::EtcdToken(args) => session::block_on(etcd_token::run(args, printer)),
            DiscoveryCommand::Intent(args) => session::block_on(intent::run(args, printer)),
            DiscoveryCommand::Service(args) => session::block_on(service::run(args, printer)),
            DiscoveryCommand::Ca(args) => ca::run(args, printer),
            DiscoveryCommand::Admin(args) => session::block_on(admin::run(args, printer)),
            DiscoveryCommand::Audit(args) => session::block_on(audit::run(args, printer)),
            DiscoveryCommand::Console(args) => session::block_on(console::run(args, printer)),
            DiscoveryCommand::Db(args) => session::block_on(db::run(args, printer)),
            DiscoveryCommand::Process(args) => session::block_on(process::run(args, printer)),
        }
    }
}

fn serve(args: ServeArgs, log: &LogArgs) -> Result<(), CliError> {
    // With transparent huge pages, the allocator's arenas would fill whole huge pages. An idle
    // service would then have twice the memory. A kernel without such pages refuses the call, which
    // does no harm.
    let _ = rustix::thread::disable_transparent_huge_pages(true);
    log.install()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|source| CliError::io("starting the runtime", source))?;
    Ok(runtime.block_on(crate::server::serve(args))?)
}

/// Checks the set-up of `serve`, and prints what was found.
fn check_serve(args: &ServeArgs, log: &LogArgs, printer: &mut Printer) -> Result<(), CliError> {
    log.install()?;
    let report = session::block_on(async { Ok(crate::server::check(args).await?) })?;
    printer.print_value(&report.document(), |out| {
        report.checks().iter().for_each(|check| out.line(&check.to_string()));
    })?;
    match report.failures() {
        0 => Ok(()),
        failures => Err(ServerError::failed_checks(failures, report.checks().len()).into()),
    }
}

fn init(args: &InitArgs, printer: &mut Printer) -> Result<(), CliError> {
    let line = crate::server::init(args)?;
    printer.print_value(&serde_json::json!({ "context": line }), |out| out.line(&line))?;
    printer.note(
        "Keep this line: it is how admins find this service and know it. It holds no secret.",
    );
    printer.note("On each admin's machine: muster-discovery context add '<the line>'");
    Ok(())
}

/// Runs a command in a test of another module. Returns the error's text.
#[cfg(test)]
pub(crate) fn run_quietly(words: Vec<String>) -> Result<(), String> {
    let words = std::iter::once("muster-discovery".to_owned()).chain(words);
    let cli = DiscoveryCli::try_parse_from(words).map_err(|error| error.to_string())?;
    let mut printer = Printer::new(false, Box::new(std::io::sink()), Box::new(std::io::sink()));
    cli.command.run(&mut printer).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests;
