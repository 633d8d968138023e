//! Streams of server-sent events, which say that a page has changed. They carry no data.

use std::time::Duration;

use actix_web::HttpResponse;
use actix_web::http::header::CONTENT_TYPE;
use actix_web::web::{Bytes, Data, Path, Query};
use discovery_types::role::Action;
use futures_util::stream;
use muster_shares::slots::Slot;
use serde::Deserialize;
use tokio::sync::watch;
use tokio::time::Instant;
use uuid::Uuid;

use super::error::ConsoleError;
use super::visitor::Visitor;
use crate::app::App;
use crate::notify::Subscription;

/// Path of the stream for pages about more than one cluster.
pub(super) const ALL_CLUSTERS: &str = "/live/all";
/// Minimum time between two events of a stream, apart from the one at its start.
const EVENT_INTERVAL: Duration = Duration::from_secs(1);
/// Interval at which a stream without events sends a comment, so that a lost browser is noticed.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Longest life of a stream. The browser then asks for another one, which checks the session anew.
const MAX_STREAM_LIFE: Duration = Duration::from_secs(300);
/// Time in milliseconds after which a browser asks for another stream.
const RETRY_MS: u32 = 3_000;

/// Query of a stream.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LiveQuery {
    /// Number of wake-ups in this process when the page was read. A higher number at the start of
    /// the stream means that the page is outdated.
    seen: Option<u64>,
}

/// Changes that a stream waits for.
enum Changes {
    One(Subscription),
    All(watch::Receiver<u64>),
}

impl Changes {
    async fn next(&mut self) {
        match self {
            Changes::One(changes) => changes.changed().await,
            // Waiting can't fail: the app holds the sender as long as a stream lives.
            Changes::All(changes) => drop(changes.changed().await),
        }
    }
}

/// State of a stream between two messages to the browser.
struct LiveStream {
    app: Data<App>,
    changes: Changes,
    /// Whether anything may have changed between the reading of the page and the start of the
    /// stream.
    is_late: bool,
    has_begun: bool,
    /// Time before which no event is sent.
    next_event: Instant,
    ends: Instant,
    _slot: Slot<[u8; 32]>,
}

impl LiveStream {
    /// Returns the bytes of the stream's next message. `None` ends the stream.
    async fn next_part(&mut self) -> Option<Bytes> {
        if !std::mem::replace(&mut self.has_begun, true) {
            return Some(Bytes::from(format!("retry: {RETRY_MS}\n\n")));
        }
        if std::mem::take(&mut self.is_late) {
            return Some(Bytes::from_static(CHANGED));
        }
        tokio::select! {
            () = self.changes.next() => {
                // Wait until the next event is allowed. Changes that happen meanwhile share that
                // event.
                tokio::time::sleep_until(self.next_event).await;
                self.next_event = Instant::now() + EVENT_INTERVAL;
                Some(Bytes::from_static(CHANGED))
            }
            () = tokio::time::sleep(KEEP_ALIVE) => Some(Bytes::from_static(b":\n\n")),
            () = tokio::time::sleep_until(self.ends) => None,
            () = self.app.draining.cancelled() => None,
        }
    }
}

/// The event that tells a browser that a page has changed.
const CHANGED: &[u8] = b"event: changed\ndata:\n\n";

/// Streams the changes of all clusters.
pub(super) async fn all(
    app: Data<App>,
    visitor: Visitor,
    query: Query<LiveQuery>,
) -> Result<HttpResponse, ConsoleError> {
    visitor.check(Action::ListClusters, None)?;
    let changes = Changes::All(app.notifier.subscribe_all());
    respond(&app, &visitor, changes, &query)
}

/// Streams the changes of one cluster.
pub(super) async fn one(
    app: Data<App>,
    visitor: Visitor,
    path: Path<Uuid>,
    query: Query<LiveQuery>,
) -> Result<HttpResponse, ConsoleError> {
    visitor.check(Action::ShowCluster, Some(*path))?;
    let changes = Changes::One(app.notifier.subscribe(*path));
    respond(&app, &visitor, changes, &query)
}

fn respond(
    app: &Data<App>,
    visitor: &Visitor,
    changes: Changes,
    query: &LiveQuery,
) -> Result<HttpResponse, ConsoleError> {
    let console = app.console.as_ref().ok_or_else(ConsoleError::no_page)?;
    let slot = console.stream_slots.take(*visitor.session.as_bytes());
    let slot = slot.ok_or_else(ConsoleError::too_many_streams)?;
    let left_us = visitor.expires_us.saturating_sub(app.clock.micros()).max(0);
    let life = MAX_STREAM_LIFE.min(Duration::from_micros(left_us.unsigned_abs()));
    let live = LiveStream {
        app: app.clone(),
        changes,
        is_late: query.seen != Some(*app.notifier.subscribe_all().borrow()),
        has_begun: false,
        next_event: Instant::now(),
        ends: Instant::now() + life,
        _slot: slot,
    };
    let parts = stream::unfold(live, |mut live| async move {
        let part = live.next_part().await?;
        Some((Ok::<_, actix_web::Error>(part), live))
    });
    Ok(HttpResponse::Ok().insert_header((CONTENT_TYPE, "text/event-stream")).streaming(parts))
}
