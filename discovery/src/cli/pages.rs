//! Lists that the service returns in pages.

use std::time::{Duration, Instant};

use discovery_types::api::{
    ClusterQuery, ClusterSummary, EtcdTokenQuery, EtcdTokenView, GrantQuery, GrantView, MAX_PAGE,
};
use discovery_types::client::ClientError;
use uuid::Uuid;

use super::CliError;
use super::printer::Printer;
use super::session::AdminSession;

/// Interval between two lines that report how much of a list has arrived.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);
/// Maximum number of requests for one page while the service is overloaded.
const TRIES: u32 = 5;
/// Pause between two requests for the same page.
const PAUSE: Duration = Duration::from_secs(1);

/// The newest items of a list: all of them, or as many as were asked for.
pub(super) struct ListedItems<T> {
    pub items: Vec<T>,
    /// Whether the list has more items than were asked for.
    pub has_more: bool,
}

impl<T> ListedItems<T> {
    /// Prints a note if the list has more items than the printed ones.
    pub(super) fn note_if_cut(&self, printer: &mut Printer) {
        if self.has_more {
            let shown = self.items.len();
            printer.note(&format!("these are the newest {shown}: there are more, see --limit"));
        }
    }
}

/// Fetches the clusters that fit `query`, newest first. With a `limit`, it fetches only that many.
pub(super) async fn clusters(
    session: &AdminSession,
    query: &ClusterQuery,
    limit: Option<usize>,
    printer: &mut Printer,
) -> Result<ListedItems<ClusterSummary>, CliError> {
    let page = async |after: Option<String>, limit| {
        let query = ClusterQuery { after, limit: Some(limit), ..query.clone() };
        let page = session.client.list_clusters(&query).await?;
        Ok((page.clusters, page.next))
    };
    collect(page, limit, "clusters", printer).await
}

/// Fetches the grants of one cluster or of all clusters, newest first. With a `limit`, it fetches
/// only that many.
pub(super) async fn grants(
    session: &AdminSession,
    cluster: Option<Uuid>,
    limit: Option<usize>,
    printer: &mut Printer,
) -> Result<ListedItems<GrantView>, CliError> {
    grants_of_kind(session, cluster, None, limit, printer).await
}

/// Fetches the replacement policies of a cluster or of all clusters, newest first.
pub(super) async fn policies(
    session: &AdminSession,
    cluster: Option<Uuid>,
    printer: &mut Printer,
) -> Result<ListedItems<GrantView>, CliError> {
    grants_of_kind(session, cluster, Some(true), None, printer).await
}

/// Fetches the etcd tokens, newest first.
pub(super) async fn etcd_tokens(
    session: &AdminSession,
    printer: &mut Printer,
) -> Result<ListedItems<EtcdTokenView>, CliError> {
    let page = async |after: Option<String>, limit| {
        let query = EtcdTokenQuery { after, limit: Some(limit) };
        let page = session.client.list_etcd_tokens(&query).await?;
        Ok((page.tokens, page.next))
    };
    collect(page, None, "etcd tokens", printer).await
}

async fn grants_of_kind(
    session: &AdminSession,
    cluster: Option<Uuid>,
    policies: Option<bool>,
    limit: Option<usize>,
    printer: &mut Printer,
) -> Result<ListedItems<GrantView>, CliError> {
    let page = async |after: Option<String>, limit| {
        let query = GrantQuery { after, limit: Some(limit), policies };
        let page = session.client.list_grants(cluster, &query).await?;
        Ok((page.grants, page.next))
    };
    let what = if policies.is_some() { "policies" } else { "tokens" };
    collect(page, limit, what, printer).await
}

/// Fetches page after page, until the last page or `limit` items.
async fn collect<T>(
    fetch: impl AsyncFn(Option<String>, u16) -> Result<(Vec<T>, Option<String>), ClientError>,
    limit: Option<usize>,
    what: &str,
    printer: &mut Printer,
) -> Result<ListedItems<T>, CliError> {
    let (mut items, mut after) = (Vec::new(), None);
    let mut reported = Instant::now();
    loop {
        let missing = limit.map_or(usize::from(MAX_PAGE), |limit| limit - items.len());
        let size = u16::try_from(missing).map_or(MAX_PAGE, |missing| missing.min(MAX_PAGE));
        let mut fetched = fetch(after.clone(), size).await;
        for _ in 1..TRIES {
            if !fetched.as_ref().is_err_and(ClientError::is_retryable) {
                break;
            }
            tokio::time::sleep(PAUSE).await;
            fetched = fetch(after.clone(), size).await;
        }
        let (page, next) = fetched?;
        // Cut the page: a service from before pagination ignores the requested size and returns all
        // items.
        items.extend(page.into_iter().take(missing));
        if next.is_none() || limit == Some(items.len()) {
            return Ok(ListedItems { items, has_more: next.is_some() });
        }
        after = next;
        if reported.elapsed() >= PROGRESS_INTERVAL {
            reported = Instant::now();
            printer.note(&format!("{} {what} so far", items.len()));
        }
    }
}
