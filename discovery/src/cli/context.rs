//! `context`: keeps the addresses, pins and owners of discovery services.

use std::io::Read;
use std::path::Path;

use clap::Subcommand;
use discovery_types::bundle::MAX_LINE;
use discovery_types::context::{CONTEXT_WORD, Context};
use discovery_types::name::Name;
use serde_json::json;

use super::home::{DEFAULT_CONTEXT, Home};
use super::printer::Printer;
use super::session::{AdminSession, block_on};
use super::{CliError, CommonArgs, RemoteArgs};

#[derive(Debug, clap::Args)]
pub(super) struct ContextArgs {
    #[command(flatten)]
    pub(super) common: CommonArgs,
    #[command(subcommand)]
    command: ContextCommand,
}

#[derive(Debug, Subcommand)]
enum ContextCommand {
    /// Add a discovery service's context
    #[command(after_help = "\
Examples:
  muster-discovery context add 'muster-context1 urls=… pins=… owners=…'
  muster-discovery context add context.txt --name production
  ssh disco cat context.txt | muster-discovery context add -

The line holds no secret, but take it only from somebody whom you trust: it names the owners whose
signatures count.")]
    Add {
        /// Context line, a file that holds it, or - for stdin
        #[arg(value_name = "LINE|FILE|-")]
        source: String,
        /// Name to keep the context under
        #[arg(long, value_name = "NAME", default_value = DEFAULT_CONTEXT)]
        name: Name,
        /// Replace another context of that name
        #[arg(long)]
        replace: bool,
    },
    /// List the contexts on this machine
    List,
    /// Print a context's line, to give it to another admin
    Show {
        /// Name of the context [default: the current one]
        name: Option<String>,
    },
    /// Make a context the current one
    Use {
        /// Name of the context
        name: Name,
    },
    /// Remove a context from this machine
    Remove {
        /// Name of the context
        name: Name,
    },
    /// Update a context's owners from the service's owner-signed admin chain
    Refresh {
        /// Name of the context [default: the current one]
        name: Option<String>,
        /// Your private key, as `key new` made it [default: HOME/admin.pem]
        #[arg(long, value_name = "FILE", env = "MUSTER_ADMIN_KEY", hide_env_values = true)]
        key: Option<std::path::PathBuf>,
    },
}

pub(super) fn run(args: ContextArgs, printer: &mut Printer) -> Result<(), CliError> {
    let home = Home::new(args.common.home.as_deref())?;
    match args.command {
        ContextCommand::Add { source, name, replace } => {
            let context = read(&source)?;
            match home.get(Some(name.as_str())) {
                Ok((_, known)) if known != context && !replace => {
                    let url = known.urls[0].to_string();
                    return Err(CliError::ContextTaken { name, url });
                }
                _ => {}
            }
            home.put(&name, &context)?;
            show(printer, &name, &context, "kept")
        }
        ContextCommand::List => list(&home, printer),
        ContextCommand::Show { name } => {
            let (name, context) = home.get(name.as_deref())?;
            printer.print_value(&to_json(&name, &context), |out| out.line(&context.to_string()))
        }
        ContextCommand::Use { name } => {
            home.set_current(&name)?;
            let (name, context) = home.get(Some(name.as_str()))?;
            show(printer, &name, &context, "is current")
        }
        ContextCommand::Remove { name } => {
            home.remove(&name)?;
            let text = format!("context {name} removed");
            printer.print_value(&json!({ "removed": name }), |out| out.line(&text))
        }
        ContextCommand::Refresh { name, key } => {
            let remote = RemoteArgs { common: args.common, context: name, key };
            block_on(refresh(&remote, printer))
        }
    }
}

/// Adds the owners at the end of the verified admin chain to the context. Old owners stay, because
/// the statement chain of an older cluster can start with an owner who has left.
async fn refresh(args: &RemoteArgs, printer: &mut Printer) -> Result<(), CliError> {
    let mut session = AdminSession::open(args)?;
    let (_, chain) = session.admins().await?;
    let owners = chain.admins().iter().filter(|admin| admin.is_owner());
    let known = session.context.owners.clone();
    let new: Vec<_> = owners.map(|admin| admin.key).filter(|key| !known.contains(key)).collect();
    session.context.owners.extend(&new);
    session.home.put(&session.name, &session.context)?;
    let done = format!("has {} new owner(s)", new.len());
    show(printer, &session.name, &session.context, &done)
}

/// Reads a context from a line, a file, or stdin (`-`).
pub(super) fn read(source: &str) -> Result<Context, CliError> {
    const MAX_BYTES: u64 = 2 * MAX_LINE as u64;
    let failed = |error| CliError::io(format!("reading {source}"), error);
    let (place, text) = if source == "-" {
        let mut bytes = Vec::new();
        let mut stdin = std::io::stdin().lock().take(MAX_BYTES);
        stdin.read_to_end(&mut bytes).map_err(|error| CliError::io("reading stdin", error))?;
        ("stdin", bytes)
    } else if source.trim_start().starts_with(CONTEXT_WORD) {
        ("the line", source.into())
    } else {
        (source, muster_files::read_named(Path::new(source), MAX_BYTES).map_err(failed)?)
    };
    let text = String::from_utf8_lossy(&text);
    text.parse().map_err(|source| CliError::Context { place: place.to_owned(), source })
}

fn list(home: &Home, printer: &mut Printer) -> Result<(), CliError> {
    let contexts = home.list()?;
    let current = home.current();
    let value: Vec<_> = contexts.iter().map(|(name, context)| to_json(name, context)).collect();
    let value = json!({ "contexts": value, "current": current });
    printer.print_value(&value, |out| {
        let rows = contexts.iter().map(|(name, context)| {
            let mark = if current.as_ref() == Some(name) { "*" } else { "" };
            let urls = context.urls.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
            [name.to_string(), mark.into(), urls, context.owners.len().to_string()]
        });
        out.table(["NAME", "CURRENT", "URLS", "OWNERS"], rows);
    })
}

fn show(printer: &mut Printer, name: &Name, context: &Context, done: &str) -> Result<(), CliError> {
    let text = format!("context {name} {done}: {}", context.urls[0]);
    printer.print_value(&to_json(name, context), |out| out.line(&text))
}

fn to_json(name: &Name, context: &Context) -> serde_json::Value {
    json!({
        "name": name,
        "urls": context.urls,
        "pins": context.pins,
        "owners": context.owners,
        "line": context.to_string(),
    })
}
