//! Rows of event chains.

use std::collections::BTreeMap;

use discovery_types::api::EventView;
use discovery_types::digest::Digest;
use serde_json::Value;
use uuid::Uuid;

use super::text::{ShownTime, plain};

/// Longest value of an event's body that is shown whole, in characters.
const MAX_SHOWN_CHARS: usize = 200;

/// Names of hosts by their agents' public keys in hexadecimal, as events write them.
pub(super) type HostNames = BTreeMap<String, String>;

/// An event as a page shows it.
pub(super) struct EventRow {
    pub(super) number: u64,
    pub(super) at: ShownTime,
    pub(super) kind: String,
    pub(super) details: Vec<EventDetail>,
}

/// A field of an event's body.
pub(super) struct EventDetail {
    pub(super) name: String,
    pub(super) value: String,
}

/// Converts events, newest first.
pub(super) fn rows(events: &[EventView], names: &HostNames, now_ms: i64) -> Vec<EventRow> {
    let row = |event: &EventView| EventRow {
        number: event.number,
        at: ShownTime::new(event.at_us / 1_000, now_ms),
        kind: plain(&event.kind),
        details: details(&event.body, names),
    };
    events.iter().rev().map(row).collect()
}

/// Splits an event's body into its fields. A body that is no JSON object is one field without a
/// name.
fn details(body: &str, names: &HostNames) -> Vec<EventDetail> {
    let detail = |(name, value): (String, Value)| {
        let text = match value {
            Value::String(text) => text,
            Value::Null => return None,
            other => other.to_string(),
        };
        let value = names.get(&text).map_or_else(|| shorten(&plain(&text)), Clone::clone);
        Some(EventDetail { name: plain(&name), value })
    };
    match serde_json::from_str(body) {
        Ok(Value::Object(fields)) => fields.into_iter().filter_map(detail).collect(),
        _ => vec![EventDetail { name: String::new(), value: shorten(&plain(body)) }],
    }
}

fn shorten(text: &str) -> String {
    match text.char_indices().nth(MAX_SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Whether each event has the hash of its content, and continues the one before it.
pub(super) fn are_consistent(stream: &Uuid, events: &[EventView]) -> bool {
    let mut previous: Option<Digest> = None;
    events.iter().all(|event| {
        let continues = previous.is_none_or(|hash| hash == event.previous);
        previous = Some(event.hash);
        continues && event.computed_hash(stream) == event.hash
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_events_fields_are_shown_with_the_names_of_hosts() {
        let names = HostNames::from([("ab".to_owned(), "db-1".to_owned())]);
        let shown = |body: &str| -> Vec<(String, String)> {
            let pairs = details(body, &names).into_iter();
            pairs.map(|detail| (detail.name, detail.value)).collect()
        };
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(
            shown(r#"{"key":"ab","seat":1,"why":null}"#),
            [pair("key", "db-1"), pair("seat", "1")]
        );
        assert_eq!(shown("no JSON\n"), [pair("", "no JSON ")]);
        let long = "x".repeat(MAX_SHOWN_CHARS + 1);
        let [(_, value)] = &shown(&format!(r#"{{"a":"{long}"}}"#))[..] else { panic!() };
        assert_eq!(value.chars().count(), MAX_SHOWN_CHARS + 1, "cut, with an ellipsis");
    }

    #[test]
    fn a_changed_event_and_a_gap_are_noticed() {
        let stream = Uuid::from_u128(1);
        let event = |number, previous| {
            let mut event = EventView {
                number,
                at_us: 1,
                kind: "open".into(),
                body: "{}".into(),
                previous,
                hash: Digest([0; 32]),
            };
            event.hash = event.computed_hash(&stream);
            event
        };
        let first = event(7, Digest([9; 32]));
        let second = event(8, first.hash);
        assert!(are_consistent(&stream, &[first.clone(), second.clone()]));
        assert!(!are_consistent(&stream, &[second.clone(), first.clone()]));
        let changed = EventView { kind: "formed".into(), ..first };
        assert!(!are_consistent(&stream, &[changed, second]));
    }
}
