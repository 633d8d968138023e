//! `cluster wait`: waits until a cluster has formed, and says meanwhile what it waits for.

use std::time::{Duration, Instant};

use discovery_types::api::{ClusterState, ExplainResponse};
use uuid::Uuid;

use super::show;
use crate::cli::CliError;
use crate::cli::printer::{Printer, duration};
use crate::cli::session::AdminSession;

/// Pause between two requests to the service.
const INTERVAL: Duration = Duration::from_secs(1);

/// Waits until the cluster has formed. Fails if the cluster ends first, or if `limit` has passed.
/// Asks again after an error that may be temporary.
pub(super) async fn wait(
    session: &AdminSession,
    cluster: &str,
    limit: Duration,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let ends = Instant::now() + limit;
    let mut said = String::new();
    let id = loop {
        let progress = match ask(session, cluster).await {
            Ok((id, answer)) if answer.state == ClusterState::Formed => break id,
            Ok((_, answer)) if has_ended(answer.state) => {
                return Err(CliError::NotFormed(format!("it is {}", answer.state)));
            }
            Ok((_, answer)) => describe(&answer),
            Err(CliError::Client(error)) if error.is_retryable() => {
                format!("the service doesn't answer: {error}")
            }
            Err(error) => return Err(error),
        };
        if progress != said {
            printer.note(&progress);
            said = progress;
        }
        let left = ends.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let waited = duration(limit.as_secs());
            return Err(CliError::NotFormed(format!("after {waited}, {said}")));
        }
        tokio::time::sleep(INTERVAL.min(left)).await;
    };
    show::show(session, &id.to_string(), printer).await
}

/// Asks what the cluster with this name or id waits for. Returns its id, too.
async fn ask(session: &AdminSession, cluster: &str) -> Result<(Uuid, ExplainResponse), CliError> {
    let id = session.cluster(cluster).await?.cluster;
    Ok((id, session.client.explain(id).await?))
}

fn has_ended(state: ClusterState) -> bool {
    matches!(state, ClusterState::Abandoned | ClusterState::Expired | ClusterState::Retired)
}

/// Describes in one line what the cluster waits for.
fn describe(answer: &ExplainResponse) -> String {
    let why: Vec<&str> = answer.explain.iter().map(|reason| reason.missing.as_str()).collect();
    match why.is_empty() {
        true => format!("{}", answer.state),
        false => format!("{}: {}", answer.state, why.join("; ")),
    }
}
