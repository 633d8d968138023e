//! Start of a node from its configuration, and its orderly stop.

mod disk;
mod error;
mod join;
mod node;
mod peers;
mod removed_keys;

use std::{pin::pin, time::Duration};

use axum::{
    Router,
    extract::Request,
    http::StatusCode,
    middleware::{Next, from_fn},
    response::{IntoResponse, Response},
};
use node_state::identity::ForcedCluster;
use tokio::signal::unix::{SignalKind, signal};

pub use self::{error::ServerError, join::JoinRefusal};
use self::{
    node::Node,
    peers::{PeerMessageReceiver, PeerMessageSender, PeerReports, PermanentRefusal},
};
use crate::config::{Config, Remark};

/// Interval of the keep-alive timer if no service manager expects keep-alives. No keep-alive is
/// sent then, because the branch that polls the timer is disabled.
const NO_WATCHDOG: Duration = Duration::from_secs(3_600);

/// Runs a node until a signal or an error ends it.
///
/// # Errors
/// Fails if the node can't start, or if it was removed from its cluster.
pub async fn run(config: &Config) -> Result<(), ServerError> {
    let system = |source| ServerError::System { action: "listen for signals", source };
    let mut terminate = signal(SignalKind::terminate()).map_err(system)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(system)?;
    let mut hangup = signal(SignalKind::hangup()).map_err(system)?;
    // Handle signals even before the node has started: a joining member fetches the whole state
    // during its start, which can take long.
    let node = tokio::select! {
        node = Node::start(config) => node?,
        _ = terminate.recv() => return Ok(()),
        _ = interrupt.recv() => return Ok(()),
    };
    let mut ready = false;
    let keep_alive = muster_notify::keep_alive_interval();
    let mut next_keep_alive = tokio::time::interval(keep_alive.unwrap_or(NO_WATCHDOG));
    let end = {
        // All turns of the loop poll this one future. A new future in each turn would begin a new
        // attempt to publish the member at each keep-alive. No attempt would ever reach its time
        // limit.
        let mut published = pin!(node.wait_until_published());
        loop {
            tokio::select! {
                _ = next_keep_alive.tick(), if keep_alive.is_some() => {
                    // An error is ignored: without keep-alives, the service manager kills this
                    // process and reports that.
                    let _ = muster_notify::notify(muster_notify::State::Watchdog);
                }
                () = &mut published, if !ready => {
                    ready = true;
                    log_ready(config, &node);
                }
                removed = node.wait_until_removed() => break Err(removed),
                _ = terminate.recv() => break Ok("terminated"),
                _ = interrupt.recv() => break Ok("interrupt"),
                _ = hangup.recv() => node.reload(),
            }
        }
    };
    match end {
        Ok(received) => {
            tracing::info!(signal = received, "received signal; shutting down");
            let _ = muster_notify::notify(muster_notify::State::Stopping);
            node.stop().await;
            Ok(())
        }
        Err(error) => {
            if matches!(error, ServerError::Removed) {
                tracing::warn!("data-dir used by this member must be removed");
            }
            // After `leave`, requests that need other members fail at once. But a client that asked
            // this member for its own removal still gets an answer.
            node.leave();
            node.stop().await;
            Err(error)
        }
    }
}

/// Turns the data of the member that `config` names into a single-member cluster. Starts nothing. A
/// repeated call returns the cluster that was made before, unless the member has meanwhile been
/// started without `--force-new-cluster`.
///
/// # Errors
/// Fails if there is no such data, or if it can't be used.
pub async fn force_new_cluster(config: &Config) -> Result<ForcedCluster, ServerError> {
    let force = config.force_new_cluster.as_ref().expect("whoever calls this sets the flag");
    let found = disk::force(config, force).await?;
    Ok(found.dir.forced_cluster()?.expect("with the flag, one was made now or before"))
}

fn log_ready(config: &Config, node: &Node) {
    let clients: Vec<String> = config.listen_client_urls.iter().map(ToString::to_string).collect();
    tracing::info!(
        cluster.id = %node.local().cluster,
        member.id = %node.local().member,
        name = config.name,
        client_urls = clients.join(","),
        "ready to serve client requests"
    );
    if let Err(error) = muster_notify::notify(muster_notify::State::Ready) {
        tracing::warn!(%error, "cannot tell the init system that this member is ready");
    }
}

/// Logs the remarks about the command line and environment.
pub fn log_remarks(remarks: &[Remark]) {
    for remark in remarks {
        match remark {
            Remark::Ignored { flag, because } => {
                tracing::warn!(flag = format!("--{flag}"), because, "this flag has no effect here");
            }
            Remark::FlagOverridesVariable { variable } => tracing::info!(
                variable,
                "this environment variable is shadowed by its command-line flag"
            ),
            Remark::UnknownVariable { variable } => {
                tracing::warn!(variable, "unrecognized environment variable");
            }
            Remark::Plaintext { flag, url } => tracing::warn!(
                flag = format!("--{flag}"),
                url,
                "the scheme is http while a certificate is given: whoever reaches this address is served, without TLS"
            ),
            Remark::BcryptCost(given) => tracing::warn!(
                given,
                "use default bcrypt cost instead of the invalid given cost: it can be 4 to 31"
            ),
            Remark::LargeRequests { given, limit } => tracing::warn!(
                max_request_bytes = given,
                limit,
                "--max-request-bytes exceeds the recommended 10 MiB, which is also the most that an entry of the log holds: larger requests are refused"
            ),
            Remark::CipherSuites(names) => tracing::warn!(
                names = names.join(","),
                "these cipher suites are not offered: they have no forward secrecy, or no authenticated encryption"
            ),
            Remark::FilePartIgnored { line, text } => {
                tracing::warn!(line, "the configuration file: {text}");
            }
            Remark::LargeQuota(bytes) => tracing::warn!(
                quota_size_bytes = bytes,
                "quota exceeds the suggested maximum of 8 GiB: a member that starts or is replaced reads all of it"
            ),
            Remark::ConfigFile { path, ignored_settings: left_out } if left_out.is_empty() => {
                tracing::info!(path = %path.display(), "the configuration is this file's");
            }
            Remark::ConfigFile { path, ignored_settings: left_out } => tracing::warn!(
                path = %path.display(),
                left_out = left_out.join(","),
                "the configuration is this file's alone: these flags and variables do not count"
            ),
            Remark::DefaultName => tracing::warn!(
                "'default' is used as the member's name: give --name, lest two members share it"
            ),
        }
    }
}

/// Disables core dumps, which would contain keys and data, and raises the limit of open files to
/// its maximum.
pub fn limit_process() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    if let Err(error) = setrlimit(Resource::Core, none) {
        tracing::warn!(%error, "cannot turn core dumps off");
    }
    let files = getrlimit(Resource::Nofile);
    let all = Rlimit { current: files.maximum, maximum: files.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, all) {
        tracing::warn!(%error, "cannot raise the number of open files");
    }
}

/// Restricts the router to health and metrics, without data, for `--listen-metrics-urls`.
fn health_only(router: Router) -> Router {
    async fn check(request: Request, next: Next) -> Response {
        let path = request.uri().path();
        let under = |base: &str| {
            path.strip_prefix(base).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        if ["/metrics", "/health", "/livez", "/readyz"].into_iter().any(under) {
            next.run(request).await
        } else {
            StatusCode::NOT_FOUND.into_response()
        }
    }
    router.layer(from_fn(check))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_metrics_address_serves_no_data() {
        use tower::ServiceExt as _;
        let answer = || async { "here" };
        let router = Router::new()
            .route("/health", axum::routing::get(answer))
            .route("/livez/{check}", axum::routing::get(answer))
            .route("/etcdserverpb.KV/Range", axum::routing::get(answer))
            .route("/healthy", axum::routing::get(answer));
        let served = health_only(router);
        for (path, status) in [
            ("/health", 200),
            ("/livez/x", 200),
            ("/etcdserverpb.KV/Range", 404),
            ("/healthy", 404),
            ("/version", 404),
        ] {
            let request = http::Request::get(path).body(axum::body::Body::empty()).unwrap();
            let response = served.clone().oneshot(request).await.unwrap();
            assert_eq!(response.status().as_u16(), status, "{path}");
        }
    }
}
