//! Health checks: the older path `/health`, and the separate checks for orchestrators
//! (server/etcdserver/api/etcdhttp/health.go in etcd).

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::extract::{Path, RawQuery, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use node_proto::etcdserverpb::{AlarmMember, AlarmType, RangeRequest};
use node_state::identity::MemberId;

use crate::rpc::{ApiContext, Error};

const TEXT: [(axum::http::HeaderName, &str); 2] = [
    (CONTENT_TYPE, "text/plain; charset=utf-8"),
    (axum::http::header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
];

/// Values of a query by name. A name such as `exclude` may be repeated.
struct Query(HashMap<String, Vec<String>>);

impl Query {
    fn parse(raw: Option<&str>) -> Self {
        let mut values: HashMap<String, Vec<String>> = HashMap::new();
        for (name, value) in form_urlencoded::parse(raw.unwrap_or_default().as_bytes()) {
            values.entry(name.into_owned()).or_default().push(value.into_owned());
        }
        Self(values)
    }

    fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    fn is_true(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|values| values.first().is_some_and(|value| value == "true"))
    }

    fn all(&self, name: &str) -> &[String] {
        self.0.get(name).map_or(&[], Vec::as_slice)
    }
}

/// Reads a key to check that reads work. It doesn't matter whether the key exists.
async fn read(context: &ApiContext, serializable: bool) -> Result<(), Error> {
    context.barrier(serializable).await?;
    let request =
        RangeRequest { key: bytes::Bytes::from_static(b"a"), limit: 1, ..RangeRequest::default() };
    context.read(|store, view| store.range(view, &request)).await?;
    Ok(())
}

/// Maximum number of peers named in a failed check. The others are only counted.
const NAMED_PEERS: usize = 5;

/// Describes the members to which this member has no stream, for the text of a failed check. Empty
/// if there are none.
fn unconnected_peers(context: &ApiContext) -> String {
    let Some(transport) = &context.peers else { return String::new() };
    let (connected, table) = (transport.connected(), context.members.borrow().clone());
    let me = MemberId(context.identity.member_id);
    let away: Vec<String> = table
        .members()
        .filter(|member| member.id != me && !connected.contains_key(&member.id))
        .map(|member| match member.name.as_str() {
            "" => format!("{} ({})", member.peer_urls.join(","), member.id),
            name => format!("{name} ({})", member.id),
        })
        .collect();
    if away.is_empty() {
        return String::new();
    }
    let named = &away[..away.len().min(NAMED_PEERS)];
    let more = match away.len() - named.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("; no stream to {}{more}", named.join(", "))
}

/// Whether the alarm is a CORRUPT alarm about another member's data. Such an alarm doesn't make
/// this member unhealthy: a supervisor would then stop healthy members too.
fn is_of_another(alarm: &AlarmMember, context: &ApiContext) -> bool {
    alarm.alarm() == AlarmType::Corrupt
        && ![0, context.identity.member_id].contains(&alarm.member_id)
}

pub(super) async fn health(
    State(context): State<Arc<ApiContext>>,
    RawQuery(query): RawQuery,
) -> Response {
    let query = Query::parse(query.as_deref());
    let answer = |reason: &str| {
        let metrics = &context.metrics;
        let counter = if reason.is_empty() { &metrics.healthy } else { &metrics.unhealthy };
        counter.fetch_add(1, Ordering::Relaxed);
        let code = if reason.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        let health = reason.is_empty();
        let reason = serde_json::Value::from(reason);
        let end = if health { "" } else { "\n" };
        let body = format!(r#"{{"health":"{health}","reason":{reason}}}{end}"#);
        (code, [(CONTENT_TYPE, "text/plain; charset=utf-8")], body).into_response()
    };
    let excluded = query.all("exclude");
    for alarm in context.store.view().alarms() {
        let name = alarm.alarm().as_str_name();
        if excluded.iter().any(|excluded| excluded == name) || is_of_another(alarm, &context) {
            continue;
        }
        match alarm.alarm() {
            AlarmType::Nospace => return answer("ALARM NOSPACE"),
            AlarmType::Corrupt => return answer("ALARM CORRUPT"),
            AlarmType::None => return answer("ALARM UNKNOWN"),
        }
    }
    let serializable = query.is_true("serializable");
    if !serializable && !context.has_leader() {
        return answer("RAFT NO LEADER");
    }
    match read(&context, serializable).await {
        Ok(()) => answer(""),
        Err(error) => answer(&format!("RANGE ERROR:{}", error.text())),
    }
}

/// A single check that can be requested by name.
#[derive(Clone, Copy, PartialEq, Eq)]
enum HealthCheck {
    DataCorruption,
    SerializableRead,
    LinearizableRead,
    NonLearner,
}

const LIVENESS_CHECKS: &[HealthCheck] = &[HealthCheck::SerializableRead];
const READINESS_CHECKS: &[HealthCheck] = &[
    HealthCheck::DataCorruption,
    HealthCheck::SerializableRead,
    HealthCheck::LinearizableRead,
    HealthCheck::NonLearner,
];

impl HealthCheck {
    fn name(self) -> &'static str {
        match self {
            Self::DataCorruption => "data_corruption",
            Self::SerializableRead => "serializable_read",
            Self::LinearizableRead => "linearizable_read",
            Self::NonLearner => "non_learner",
        }
    }

    async fn run(self, context: &ApiContext) -> Result<(), String> {
        match self {
            Self::DataCorruption => {
                let view = context.store.view();
                let corrupt = |a: &AlarmMember| a.alarm() == AlarmType::Corrupt;
                let mut alarms = view.alarms().iter().filter(|a| !is_of_another(a, context));
                let corrupt = alarms.any(corrupt);
                if corrupt { Err("alarm activated: CORRUPT".to_owned()) } else { Ok(()) }
            }
            Self::SerializableRead => {
                read(context, true).await.map_err(|error| error.text().into_owned())
            }
            Self::LinearizableRead => read(context, false)
                .await
                .map_err(|error| format!("{}{}", error.text(), unconnected_peers(context))),
            Self::NonLearner => {
                let me = context.identity.member_id;
                let view = context.store.view();
                let learner = view.members().is_learner(MemberId(me));
                if learner { Err("not supported for learner".to_owned()) } else { Ok(()) }
            }
        }
    }
}

/// Runs `checks` and answers as etcd does. Lists each check if that is requested, or if one fails.
async fn answer(
    context: &ApiContext,
    checks: &[HealthCheck],
    excluded: &[String],
    verbose: bool,
) -> Response {
    let (mut lines, mut failed) = (String::new(), false);
    for check in checks {
        let name = check.name();
        if excluded.iter().any(|excluded| excluded == name) {
            continue;
        }
        match check.run(context).await {
            Ok(()) => {
                let _ = writeln!(lines, "[+]{name} ok");
            }
            Err(why) => {
                failed = true;
                let _ = writeln!(lines, "[-]{name} failed: {why}");
            }
        }
    }
    if failed {
        lines.push('\n');
        return (StatusCode::SERVICE_UNAVAILABLE, TEXT, lines).into_response();
    }
    lines.push_str("ok\n");
    let body = if verbose { lines } else { "ok\n".to_owned() };
    (StatusCode::OK, TEXT, body).into_response()
}

async fn all(context: &ApiContext, checks: &[HealthCheck], query: &Query) -> Response {
    answer(context, checks, query.all("exclude"), query.has("verbose")).await
}

async fn single(
    context: &ApiContext,
    checks: &[HealthCheck],
    name: &str,
    query: &Query,
) -> Response {
    match checks.iter().find(|check| check.name() == name) {
        // A check requested by its own path is run even if the query excludes it.
        Some(check) => answer(context, &[*check], &[], query.has("verbose")).await,
        None => (StatusCode::NOT_FOUND, TEXT, "404 page not found\n").into_response(),
    }
}

pub(super) async fn livez(
    State(context): State<Arc<ApiContext>>,
    RawQuery(query): RawQuery,
) -> Response {
    all(&context, LIVENESS_CHECKS, &Query::parse(query.as_deref())).await
}

pub(super) async fn livez_check(
    State(context): State<Arc<ApiContext>>,
    Path(check): Path<String>,
    RawQuery(query): RawQuery,
) -> Response {
    single(&context, LIVENESS_CHECKS, &check, &Query::parse(query.as_deref())).await
}

pub(super) async fn readyz(
    State(context): State<Arc<ApiContext>>,
    RawQuery(query): RawQuery,
) -> Response {
    all(&context, READINESS_CHECKS, &Query::parse(query.as_deref())).await
}

pub(super) async fn readyz_check(
    State(context): State<Arc<ApiContext>>,
    Path(check): Path<String>,
    RawQuery(query): RawQuery,
) -> Response {
    single(&context, READINESS_CHECKS, &check, &Query::parse(query.as_deref())).await
}
