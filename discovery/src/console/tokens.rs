//! Tokens: who made them, what they are worth, and which hosts used them. No page holds a secret,
//! since the service knows none.

use std::collections::BTreeMap;

use actix_web::HttpResponse;
use actix_web::web::{Data, Path, Query};
use askama::Template;
use discovery_types::api::{GrantQuery, GrantState, GrantView, Redemption};
use discovery_types::grant::{Grant, GrantId, ReplacementLimits, TokenKind};
use discovery_types::role::Action;
use serde::Deserialize;
use uuid::Uuid;

use super::PAGE_ROWS;
use super::error::ConsoleError;
use super::layout::{PageFrame, Section, render};
use super::live;
use super::text::{Badge, ShownTime, Tone, duration, plain, plain_list};
use super::visitor::Visitor;
use crate::app::App;
use crate::handlers::grants::{grant_list, grant_view, redemptions_of};

/// Maximum number of hosts that the list names for each token. The token's own page has the others.
const NAMED_HOSTS: usize = 3;
/// Maximum number of hosts on the page of a token: the newest.
const MAX_HOSTS: usize = 200;

/// Query of the list: the cluster whose tokens are listed, and the page.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TokensQuery {
    cluster: Option<Uuid>,
    after: Option<String>,
}

/// A token as lists show it.
pub(super) struct TokenRow {
    pub(super) id: String,
    pub(super) path: String,
    pub(super) kind: &'static str,
    pub(super) cluster: String,
    pub(super) cluster_path: String,
    pub(super) state: Badge,
    pub(super) made_by: String,
    pub(super) made: ShownTime,
    pub(super) expires: ShownTime,
    /// Number of seats that the token is worth, or the policy's limits.
    pub(super) worth: String,
    /// Number of hosts that have used the token.
    pub(super) used: u32,
    /// Names of the hosts that used the token last.
    pub(super) hosts: String,
    /// Number of hosts that `hosts` leaves out.
    pub(super) other_hosts: u32,
}

/// A host that has used a token.
struct HostRow {
    name: String,
    key: String,
    address: String,
    instance: String,
    zone: String,
    first: ShownTime,
    became: String,
}

#[derive(Template)]
#[template(path = "tokens.html")]
struct TokensPage {
    layout: PageFrame,
    /// Name and path of the cluster, if only this cluster's tokens are listed.
    cluster: Option<(String, String)>,
    rows: Vec<TokenRow>,
    first: Option<String>,
    next: Option<String>,
}

#[derive(Template)]
#[template(path = "token.html")]
struct TokenPage {
    layout: PageFrame,
    token: TokenRow,
    /// Key id of the issuer who signed the grant.
    issuer: String,
    bound_to: Vec<(&'static str, String)>,
    hosts: Vec<HostRow>,
    is_void: bool,
}

/// Shows the list of tokens, newest first.
pub(super) async fn list(
    app: Data<App>,
    visitor: Visitor,
    query: Query<TokensQuery>,
) -> Result<HttpResponse, ConsoleError> {
    visitor.check(Action::ReadGrants, query.cluster)?;
    let seen = *app.notifier.subscribe_all().borrow();
    let filter =
        GrantQuery { after: query.after.clone(), limit: Some(PAGE_ROWS), ..GrantQuery::default() };
    let found = grant_list(&app, query.cluster, &filter).await?;
    let rows = rows(&app, &found.grants).await?;
    let cluster = match query.cluster {
        None => None,
        Some(id) => {
            visitor.check(Action::ShowCluster, Some(id))?;
            let row = app.store.summary(id).await?;
            let row = row.ok_or_else(ConsoleError::no_page)?;
            Some((plain(&row.name), format!("/clusters/{id}")))
        }
    };
    let page =
        query.cluster.map_or_else(|| "/tokens?".to_owned(), |id| format!("/tokens?cluster={id}&"));
    render(&TokensPage {
        layout: PageFrame::new(&app, &visitor, Section::Tokens, "Tokens")
            .live(live::ALL_CLUSTERS, seen),
        cluster,
        rows,
        first: query.after.as_ref().map(|_| page.trim_end_matches(['?', '&']).to_owned()),
        next: found.next.map(|next| format!("{page}after={next}")),
    })
}

/// Shows one token, and the hosts that used it.
pub(super) async fn show(
    app: Data<App>,
    visitor: Visitor,
    path: Path<GrantId>,
) -> Result<HttpResponse, ConsoleError> {
    visitor.check(Action::ReadGrants, None)?;
    let view = grant_view(&app, *path).await?;
    let seen = *app.notifier.subscribe_all().borrow();
    let hosts: Vec<Redemption> = redemptions_of(&app, &[*path], MAX_HOSTS)
        .await?
        .into_iter()
        .map(|(_, host)| host)
        .collect();
    let now_ms = app.clock.micros() / 1_000;
    render(&TokenPage {
        layout: PageFrame::new(&app, &visitor, Section::Tokens, format!("Token {}", *path))
            .live(format_args!("/live/{}", view.grant.cluster), seen),
        token: row(&view, &hosts, now_ms),
        issuer: view.issuer.to_string(),
        bound_to: bounds(&view.grant),
        hosts: hosts.iter().map(|host| host_row(host, now_ms)).collect(),
        is_void: view.state == GrantState::Void,
    })
}

/// Makes the rows of these tokens. Each row names the hosts that used its token last.
pub(super) async fn rows(app: &App, views: &[GrantView]) -> Result<Vec<TokenRow>, ConsoleError> {
    let now_ms = app.clock.micros() / 1_000;
    let ids: Vec<GrantId> = views.iter().map(|view| view.grant.id).collect();
    let mut hosts: BTreeMap<GrantId, Vec<Redemption>> = BTreeMap::new();
    for (id, host) in redemptions_of(app, &ids, NAMED_HOSTS).await? {
        hosts.entry(id).or_default().push(host);
    }
    let of = |view: &GrantView| hosts.get(&view.grant.id).map_or(&[][..], Vec::as_slice);
    Ok(views.iter().map(|view| row(view, of(view), now_ms)).collect())
}

fn row(view: &GrantView, hosts: &[Redemption], now_ms: i64) -> TokenRow {
    let grant = &view.grant;
    let named = hosts.iter().take(NAMED_HOSTS).map(|host| &host.name);
    let shown = u32::try_from(hosts.len().min(NAMED_HOSTS)).unwrap_or(u32::MAX);
    TokenRow {
        id: grant.id.to_string(),
        path: format!("/tokens/{}", grant.id),
        kind: kind(grant.kind),
        cluster: match &view.cluster_name {
            Some(name) => name.to_string(),
            None => grant.cluster.to_string(),
        },
        cluster_path: format!("/clusters/{}", grant.cluster),
        state: Badge::new(tone(view.state), view.state.as_str()),
        made_by: plain(view.made_by.as_deref().unwrap_or("-")),
        made: ShownTime::relative_seconds(grant.issued_at, now_ms),
        expires: ShownTime::relative_seconds(grant.expires_at, now_ms),
        worth: match &grant.replacement {
            Some(limits) => describe_limits(limits),
            None if grant.uses == 1 => "1 seat".to_owned(),
            None => format!("{} seats", grant.uses),
        },
        used: view.keys,
        hosts: plain_list(named),
        other_hosts: view.keys.saturating_sub(shown),
    }
}

fn kind(kind: TokenKind) -> &'static str {
    match kind {
        TokenKind::Boot => "boot token",
        TokenKind::Join => "join ticket",
        TokenKind::Heal => "policy",
    }
}

fn tone(state: GrantState) -> Tone {
    match state {
        GrantState::Valid => Tone::Good,
        GrantState::Void => Tone::Bad,
        GrantState::Expired | GrantState::Revoked | GrantState::Closed => Tone::Ended,
    }
}

/// Describes the limits of a replacement policy.
fn describe_limits(limits: &ReplacementLimits) -> String {
    format!(
        "unreachable for {}, at most {} in {}",
        duration(limits.after_seconds),
        limits.at_most,
        duration(limits.per_seconds)
    )
}

/// Returns what the token is bound to, as names and values.
fn bounds(grant: &Grant) -> Vec<(&'static str, String)> {
    let mut bounds = Vec::new();
    if !grant.cidrs.is_empty() {
        bounds.push(("addresses", plain_list(&grant.cidrs)));
    }
    bounds.extend(grant.name.iter().map(|name| ("name", name.to_string())));
    bounds.extend(grant.zone.iter().map(|zone| ("zone", zone.to_string())));
    bounds.extend(grant.replaces.iter().map(|member| ("replaces", member.to_string())));
    if !grant.require.is_empty() {
        bounds.push(("identity document", plain_list(&grant.require)));
    }
    bounds
}

fn host_row(host: &Redemption, now_ms: i64) -> HostRow {
    let or_dash = |text: Option<String>| text.map_or_else(|| "-".to_owned(), |text| plain(&text));
    let became = match (host.seat, host.member, host.change) {
        (Some(seat), ..) => format!("seat {seat}"),
        (None, Some(member), _) => format!("member {member}"),
        (None, None, Some(change)) => format!("join {change}"),
        (None, None, None) => "-".to_owned(),
    };
    HostRow {
        name: host.name.to_string(),
        key: host.agent.to_string(),
        address: or_dash(host.address.clone()),
        instance: or_dash(host.instance.clone()),
        zone: or_dash(host.zone.as_ref().map(ToString::to_string)),
        first: ShownTime::new(host.at_ms, now_ms),
        became,
    }
}
