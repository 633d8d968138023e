//! Issues a token: signs its grant, sends the grant to the service, and hands out the bundle.
//! Tokens and replacement policies are issued alike.

use std::path::PathBuf;

use discovery_types::api::{GrantState, GrantView};
use discovery_types::bundle::Bundle;
use discovery_types::client::ClientError;
use discovery_types::digest::Digest;
use discovery_types::grant::{Grant, TokenKind};
use discovery_types::service::VerifiedService;
use discovery_types::statement::StatementChain;
use discovery_types::token::Token;
use secrecy::{ExposeSecret, SecretString};
use serde_json::json;

use super::host_files::{BUNDLE_PATH, HostFilesArgs};
use crate::cli::CliError;
use crate::cli::printer::{Printer, time_of_seconds};
use crate::cli::requirement;
use crate::cli::session::AdminSession;

/// Flags that say how the bundle is handed out.
#[derive(Clone, Debug, Default, clap::Args)]
pub(in crate::cli) struct DeliveryArgs {
    /// Write the text that contains the bundle to a new file (mode 0600) instead of stdout
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    #[command(flatten)]
    pub host_files: HostFilesArgs,
}

/// Facts that are needed to issue a token.
pub(in crate::cli) struct Issuance {
    /// The cluster's statements, verified from the context's owners.
    pub chain: StatementChain,
    /// Time of the service, in seconds since 1970.
    pub now: u64,
}

impl Issuance {
    /// Reads the facts that are needed to issue a token for `cluster`, a name or an id. Returns an
    /// error already if a later step would fail. Warns if clocks or pins differ.
    pub(in crate::cli) async fn prepare(
        session: &AdminSession,
        cluster: &str,
        kind: TokenKind,
        delivery: &DeliveryArgs,
        printer: &mut Printer,
    ) -> Result<Self, CliError> {
        if let Some(out) = &delivery.out
            && out.exists()
        {
            // Refuse an existing file before the first request to the service.
            return Err(muster_files::Error::Exists(out.clone()).into());
        }
        let cluster = session.cluster(cluster).await?;
        let (chain, service) = session.statements(cluster.cluster).await?;
        let service = service.and_then(|jws| VerifiedService::verify_kept(&jws, &chain).ok());
        if let Some(service) = &service
            && let Some(difference) = pin_warning(&session.context.pins, service)
        {
            printer.warn(&difference);
        }
        session.check_role_in_statement(&chain, kind.action())?;
        let now_ms = session.client.context().await?.now_ms;
        let own_ms = jiff::Timestamp::now().as_millisecond();
        if let Some(difference) = clock_warning(now_ms, own_ms) {
            printer.warn(&difference);
        }
        let now = u64::try_from(now_ms.div_euclid(1000)).unwrap_or_default();
        Ok(Self { chain, now })
    }

    /// Signs and stores the grant of `token`, and prints the bundle or writes it to its file.
    pub(in crate::cli) async fn issue(
        &self,
        session: &AdminSession,
        token: Token,
        grant: &Grant,
        delivery: &DeliveryArgs,
        printer: &mut Printer,
    ) -> Result<GrantView, CliError> {
        let bundle = Bundle {
            urls: session.context.urls.clone(),
            pins: session.context.pins.clone(),
            cluster: grant.cluster,
            statement: self.chain.newest_hash(),
            token,
        };
        let flags = requirement::agent_flags(grant);
        if flags.is_none() && delivery.host_files.has_unit() {
            printer.note(
                "the agent's unit lacks --identity-from: add it, with the cloud that the host runs in",
            );
        }
        let flags = flags.unwrap_or_default();
        let text = delivery.host_files.form().text(&bundle.expose(), &flags);
        if let Some(out) = &delivery.out {
            // Write the file before the service stores the grant. Otherwise, if writing fails,
            // there would be a grant for a token that nobody has.
            muster_files::create(out, format!("{}\n", text.expose_secret()).as_bytes(), 0o600)?;
        }
        let put = put_grant(session, grant).await;
        if let (Err(error), Some(out)) = (&put, &delivery.out)
            && !matches!(error, CliError::Client(ClientError::Interrupted { .. }))
        {
            fs_err::remove_file(out).map_err(|source| CliError::file("removing", out, source))?;
        }
        let view = put?;
        let unit = delivery.host_files.unit(&flags);
        print_bundle((&text, unit.as_deref()), &view, delivery, printer)?;
        Ok(view)
    }
}

/// Returns a warning if the bundle's pins are others than those announced to the cluster's agents.
/// A host that joins follows the announcement.
pub(super) fn pin_warning(pins: &[Digest], service: &VerifiedService) -> Option<String> {
    let announced = &service.statement().pins;
    let fits = pins.iter().any(|pin| announced.contains(pin));
    (!fits).then(|| {
        format!(
            "the pins in this context are not those that were announced to the cluster's agents \
             (number {}): a host that joins won't reach this service any more. Announce it: \
             muster-discovery service announce",
            service.sequence()
        )
    })
}

async fn put_grant(session: &AdminSession, grant: &Grant) -> Result<GrantView, CliError> {
    let view = session.client.put_grant(&grant.sign(&session.key)).await?;
    match view.grant == *grant {
        true => Ok(view),
        false => Err(CliError::Answer("it stored another grant than the one sent".into())),
    }
}

/// Prints `text`, which contains the bundle. If `text` was written to a file, prints the file's
/// path instead. Prints the agent's systemd unit as well, if it is requested.
fn print_bundle(
    (text, unit): (&SecretString, Option<&str>),
    view: &GrantView,
    delivery: &DeliveryArgs,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let mut value = json!({
        "id": view.grant.id,
        "cluster": view.grant.cluster,
        "uses": view.grant.uses,
        "expires_at": view.grant.expires_at,
    });
    let expires = time_of_seconds(view.grant.expires_at);
    let about = format!("token {}: {} use(s), until {expires}", view.grant.id, view.grant.uses);
    match (&delivery.out, unit) {
        (Some(file), None) => {
            value["file"] = json!(file);
            printer.print_value(&value, |out| out.line(&file.display().to_string()))?;
        }
        (Some(file), Some(unit)) => {
            value["file"] = json!(file);
            value["systemd"] = json!(unit);
            printer.print_value(&value, |out| out.line(unit.trim_end()))?;
            printer.note(&format!(
                "copy {} to {BUNDLE_PATH} on the host (mode 0600), and what is printed to \
                 /etc/systemd/system/muster-agent.service; make the user muster; then: systemctl \
                 enable --now muster-agent",
                file.display()
            ));
        }
        (None, _) => {
            value[delivery.host_files.form().json_name()] = json!(text.expose_secret());
            printer.print_value(&value, |out| out.line(text.expose_secret()))?;
        }
    }
    printer.note(&about);
    if view.state == GrantState::Expired {
        printer.warn(
            "it has expired already: the clock of the service's Postgres was set ahead. Look at that \
             clock, and mint another one once it is right",
        );
    }
    Ok(())
}

/// Maximum clock difference in milliseconds: an agent whose clock differs more signs nothing.
const SKEW_MS: u64 = 30_000;

/// Warns if this machine's clock and the service's differ. Tokens expire by the clock of the
/// service's Postgres. If that clock is wrong, tokens expire at once, or far too late.
pub(super) fn clock_warning(service_ms: i64, own_ms: i64) -> Option<String> {
    let off = service_ms.saturating_sub(own_ms);
    let way = if off > 0 { "ahead of" } else { "behind" };
    (off.unsigned_abs() > SKEW_MS).then(|| {
        format!(
            "the service's clock (its Postgres') is {} s {way} this machine's: tokens expire by the \
             service's, and hosts that are more than 30 s off it form nothing. Set whichever is \
             wrong",
            off.unsigned_abs() / 1_000
        )
    })
}
