//! Requests that were refused because of their caller, for the service's event chain.
//!
//! Anybody can send such requests, so they are counted in memory. Each minute, one event for each
//! kind of request says how often it came. Requests beyond the limits are counted together.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use discovery_types::key::KeyId;
use discovery_types::problem::Code;
use muster_shares::network_of;
use serde_json::{Value, json};

use crate::app::App;

/// Interval at which refusals become events.
pub(crate) const REFUSALS_INTERVAL: Duration = Duration::from_secs(60);
/// Largest number of different refusals within one interval. The others are only counted.
const MAX_DIFFERENT: usize = 64;

/// A kind of refused request. Requests with equal fields are counted together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RefusedRequest {
    /// Pattern of the route, without ids.
    pub route: String,
    /// Reason of the refusal.
    pub code: &'static str,
    /// Source address, or its /64 with IPv6.
    pub address: IpAddr,
    /// Key that the connection has proven, if any. It may be unknown to the service.
    pub key: Option<String>,
}

/// Counts of refused requests since the last events about them were appended.
#[derive(Debug, Default)]
pub(crate) struct RefusalCounts {
    counted: Mutex<RefusalTable>,
}

#[derive(Debug, Default)]
struct RefusalTable {
    requests: BTreeMap<RefusedRequest, u64>,
    /// Number of refusals beyond [`MAX_DIFFERENT`].
    others: u64,
}

/// Whether a request is refused because of its caller: the key, the role, the token or the address.
pub(crate) fn is_because_of_caller(code: Code, status: u16) -> bool {
    matches!(status, 401 | 403) || matches!(code, Code::TicketTaken | Code::KeyElsewhere)
}

impl RefusalCounts {
    /// Counts a refused request.
    pub(crate) fn note(&self, route: &str, code: Code, address: IpAddr, key: Option<KeyId>) {
        let request = RefusedRequest {
            route: route.to_owned(),
            code: code.as_str(),
            address: network_of(address),
            key: key.map(|key| key.to_string()),
        };
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full = counted.requests.len() >= MAX_DIFFERENT;
        match counted.requests.get_mut(&request) {
            Some(count) => *count += 1,
            None if is_full => counted.others += 1,
            None => drop(counted.requests.insert(request, 1)),
        }
    }

    /// Returns the counted refusals as bodies of events, and resets the counts.
    pub(crate) fn take(&self) -> Vec<Value> {
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let RefusalTable { requests, others } = std::mem::take(&mut *counted);
        let body = |(request, count): (RefusedRequest, u64)| {
            json!({
                "route": request.route, "code": request.code, "address": request.address,
                "key": request.key, "count": count,
            })
        };
        let mut bodies: Vec<Value> = requests.into_iter().map(body).collect();
        if others > 0 {
            bodies.push(json!({ "count": others }));
        }
        bodies
    }
}

impl App {
    /// Appends the refusals of the last interval to the service's event chain. If the database
    /// doesn't answer, they are only logged.
    pub(crate) async fn write_refusals(&self) {
        let bodies = self.refusals.take();
        if bodies.is_empty() {
            return;
        }
        if let Err(error) = self.store.append_refusals(&bodies).await {
            for refused in bodies {
                tracing::warn!(%error, %refused, "refused requests are not in the event chain");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_refusals_are_counted_and_too_many_different_ones_together() {
        let counts = RefusalCounts::default();
        let address = |n: u8| IpAddr::from([10, 0, 0, n]);
        counts.note("/v1/redeem", Code::GrantUnknown, address(1), None);
        counts.note("/v1/redeem", Code::GrantUnknown, address(1), None);
        counts.note("/v1/redeem", Code::GrantExpired, address(1), None);
        let taken = counts.take();
        let numbers: Vec<_> = taken.iter().map(|body| body["count"].as_u64().unwrap()).collect();
        assert_eq!(numbers, [1, 2], "{taken:?}");
        assert_eq!(taken[1]["code"], "grant_unknown");
        assert!(counts.take().is_empty());
        for n in 0..=u8::MAX {
            counts.note("/v1/redeem", Code::GrantUnknown, address(n), None);
        }
        let taken = counts.take();
        assert_eq!(taken.len(), MAX_DIFFERENT + 1);
        assert_eq!(taken[MAX_DIFFERENT], json!({ "count": 256 - MAX_DIFFERENT as u64 }));
    }
}
