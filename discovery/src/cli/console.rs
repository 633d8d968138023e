//! `console`: signs a browser in to the service's console.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use clap::Subcommand;
use discovery_types::api::ConsoleLink;

use super::printer::{Printer, duration};
use super::session::AdminSession;
use super::{CliError, RemoteArgs};

/// Name of the file that leads a browser to the link, in the folder of the contexts.
const LINK_FILE: &str = "console.html";

#[derive(Debug, clap::Args)]
pub(super) struct ConsoleArgs {
    #[command(flatten)]
    pub(super) remote: RemoteArgs,
    #[command(subcommand)]
    command: ConsoleCommand,
}

#[derive(Debug, Subcommand)]
enum ConsoleCommand {
    /// Print a link by which a browser signs in to the console, once, within a minute
    #[command(after_help = "\
Examples:
  muster-discovery console open
  muster-discovery console open demo --browser

The first to press \"Sign in\" on the link's page can read what you may read, for eight hours at most. Use
the link at once, and send it to nobody. The console changes nothing, and your key stays on this machine.
The session ends when you sign out, or when an owner revokes you. The service needs
`serve --console-listen` for this.")]
    Open {
        /// Name or id of the cluster whose page to open [default: the list of clusters]
        cluster: Option<String>,
        /// Open the link in a browser on this machine, too
        #[arg(long)]
        browser: bool,
    },
}

pub(super) async fn run(args: ConsoleArgs, printer: &mut Printer) -> Result<(), CliError> {
    let session = AdminSession::open(&args.remote)?;
    let ConsoleCommand::Open { cluster, browser } = args.command;
    // Look the cluster up first: the link is valid for a minute only.
    let cluster = match cluster {
        Some(cluster) => Some(session.cluster(&cluster).await?.cluster),
        None => None,
    };
    let mut link = session.client.open_console().await?;
    if let Some(cluster) = cluster {
        link.url = format!("{}?cluster={cluster}", link.url);
    }
    printer.print_value(&link, |out| out.line(&link.url))?;
    let hours = duration(link.session_seconds);
    printer.note(&format!("open it within a minute; it works once, and the session lasts {hours}"));
    if link.uses_service_certificate {
        printer.warn(
            "browsers don't trust the console's certificate, which is the service's own. Continue \
             only if the browser shows this SHA-256 fingerprint:",
        );
        printer.note(&fingerprint(&link));
    }
    if browser {
        open_browser(&session, &link)?;
    }
    Ok(())
}

/// Formats the certificate's fingerprint as browsers do.
fn fingerprint(link: &ConsoleLink) -> String {
    let bytes = link.certificate_sha256.as_bytes().iter();
    bytes.map(|byte| format!("{byte:02X}")).collect::<Vec<_>>().join(":")
}

/// Opens the link in a browser. The browser gets the path of a file that leads to the link, and
/// that only this user can read. The link itself isn't an argument, because other users of this
/// machine can read a command's arguments.
fn open_browser(session: &AdminSession, link: &ConsoleLink) -> Result<(), CliError> {
    let file = session.home.file_beside_contexts(LINK_FILE)?;
    // Refuse URLs with characters that HTML interprets: the service may be hostile.
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._~:/?[]=".contains(c);
    if !link.url.starts_with("https://") || !link.url.chars().all(is_plain) {
        return Err(CliError::Answer("the link is not the URL of a page".into()));
    }
    let page = format!(
        "<!doctype html><meta charset=\"utf-8\"><title>Muster</title>\
         <meta http-equiv=\"refresh\" content=\"0;url={url}\"><a href=\"{url}\">Open the console</a>\n",
        url = link.url
    );
    muster_files::replace(&file, page.as_bytes())?;
    let started = Command::new(opener())
        .arg(&file)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let child = started.map_err(|source| {
        CliError::io(format!("starting {} to open a browser", opener().display()), source)
    });
    // Don't wait: the opener exits by itself.
    child.map(drop)
}

/// Returns the program that opens a file in the user's browser.
fn opener() -> PathBuf {
    let own = std::env::var_os("BROWSER").filter(|program| !program.is_empty());
    let usual = if cfg!(target_os = "macos") { "open" } else { "xdg-open" };
    own.map_or_else(|| usual.into(), PathBuf::from)
}
