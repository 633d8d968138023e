//! `token confirm`: signs confirmations, which make tokens valid again after a change of the
//! database has made them void.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use discovery_types::api::{GrantState, GrantView};
use discovery_types::confirmation::GrantConfirmation;
use discovery_types::grant::{GrantId, TokenKind, VerifiedGrant};
use discovery_types::statement::StatementChain;
use serde_json::json;
use uuid::Uuid;

use super::row;
use crate::cli::CliError;
use crate::cli::confirm::IrreversibleAct;
use crate::cli::pages;
use crate::cli::printer::{Printer, or_dash, time_of_seconds};
use crate::cli::session::AdminSession;

/// Arguments of `token confirm`.
#[derive(Debug, clap::Args)]
pub(super) struct ConfirmArgs {
    /// Ids of the tokens, as `token list` prints them
    #[arg(value_name = "ID", required_unless_present = "all", conflicts_with = "all")]
    ids: Vec<GrantId>,
    /// Confirm all void boot tokens of a cluster
    #[arg(long, requires = "cluster")]
    all: bool,
    /// Name or id of the cluster, with --all
    #[arg(long, value_name = "CLUSTER", requires = "all")]
    cluster: Option<String>,
    /// Skip the confirmation prompt
    #[arg(long)]
    yes: bool,
}

pub(super) async fn confirm(
    session: &AdminSession,
    args: ConfirmArgs,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let (views, word) = match &args.cluster {
        Some(name) => {
            let cluster = session.cluster(name).await?;
            let all = pages::grants(session, Some(cluster.cluster), None, printer).await?.items;
            (all.into_iter().filter(is_confirmable).collect(), cluster.name.to_string())
        }
        None => {
            let mut views = Vec::new();
            for id in &args.ids {
                let view = session.client.show_grant(*id).await?;
                match view.state {
                    GrantState::Valid => printer.note(&format!("token {id} counts already")),
                    _ => views.push(view),
                }
            }
            let word = match &args.ids[..] {
                [id] => id.to_string(),
                ids => ids.len().to_string(),
            };
            (views, word)
        }
    };
    if let Some(other) = views.iter().find(|view| !is_confirmable(view)) {
        return Err(CliError::Usage(format!(
            "nothing was done: {} token {} is {}; only a void boot token is confirmed",
            other.grant.kind,
            other.grant.id,
            other.state.as_str()
        )));
    }
    let signed = sign_confirmations(session, &views).await?;
    if !views.is_empty() {
        IrreversibleAct { consequences: describe(&views), name: &word }
            .confirm(args.yes, printer)?;
    }
    let mut confirmed = Vec::new();
    for (id, confirmation) in signed {
        confirmed.push(session.client.confirm_grant(id, &confirmation).await?);
    }
    printer.print_value(&json!({ "grants": confirmed }), |out| {
        let header = ["ID", "CLUSTER", "KIND", "STATE", "KEYS", "USES", "EXPIRES", "ISSUER"];
        let rows = confirmed.iter().map(|view| {
            let name = view.cluster_name.as_ref().map(ToString::to_string);
            row(view, name.unwrap_or_else(|| view.grant.cluster.to_string()))
        });
        out.table(header, rows);
    })?;
    if confirmed.is_empty() {
        printer.note("no token has to be confirmed");
    }
    Ok(())
}

fn is_confirmable(view: &GrantView) -> bool {
    view.grant.kind != TokenKind::Join && view.state == GrantState::Void
}

/// Signs a confirmation for each token, after verifying that an issuer of its cluster signed it.
async fn sign_confirmations(
    session: &AdminSession,
    views: &[GrantView],
) -> Result<Vec<(GrantId, discovery_types::jws::Jws)>, CliError> {
    let mut chains: BTreeMap<Uuid, StatementChain> = BTreeMap::new();
    let mut signed = Vec::new();
    for view in views {
        let cluster = view.grant.cluster;
        let chain = match chains.entry(cluster) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                let (chain, _) = session.statements(cluster).await?;
                session.check_role_in_statement(&chain, view.grant.kind.action())?;
                place.insert(chain)
            }
        };
        let grant = VerifiedGrant::verify(&view.jws, chain)?;
        if *grant != view.grant {
            return Err(CliError::Answer("it shows another token than the signed one".into()));
        }
        let void_before_us = view.void_before_us.ok_or_else(|| {
            CliError::Answer("it doesn't say which change made the token void".into())
        })?;
        let confirmation = GrantConfirmation { cluster, grant: grant.jws().hash(), void_before_us };
        signed.push((grant.id, confirmation.sign(&session.key)));
    }
    Ok(signed)
}

/// Describes the tokens that will become valid again.
fn describe(views: &[GrantView]) -> Vec<String> {
    let tokens = views.iter().map(|view| {
        let grant = &view.grant;
        let cidrs: Vec<String> = grant.cidrs.iter().map(ToString::to_string).collect();
        format!(
            "  {}: {} use(s) until {}, from {}, name {}, issued by {}",
            grant.id,
            grant.uses,
            time_of_seconds(grant.expires_at),
            if cidrs.is_empty() { "any address".into() } else { cidrs.join(",") },
            or_dash(grant.name.as_ref()),
            view.issuer
        )
    });
    let first = "The database was changed after these tokens were made. If one of them was revoked \
                 before, the revocation can be lost:";
    let last = "They admit hosts again. Confirm only those that you know were never revoked.";
    std::iter::once(first.to_owned()).chain(tokens).chain([last.to_owned()]).collect()
}
