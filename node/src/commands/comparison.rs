//! Decides key by key how two clusters differ. Both give their keys in order, so only one key of
//! each is needed at a time.

use std::cmp::Ordering;

use node_proto::mvccpb::KeyValue;
use serde::Serialize;

use super::cluster::LaterChanges;

/// Maximum number of differences that are kept to be shown. All are counted.
const MAX_SHOWN: usize = 20;
/// Maximum length of a shown key in bytes. A longer one is cut off.
const MAX_SHOWN_KEY_BYTES: usize = 256;

/// A key that differs between the two clusters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct KeyDifference {
    /// Shown form of the key: see [`shown_key`].
    pub key: String,
    /// Description of what differs. It contains no value, which may be a secret.
    pub difference: String,
}

/// Counts of a comparison, and its first differences.
pub(super) struct KeyComparison<'l> {
    source_changes: &'l LaterChanges,
    target_changes: &'l LaterChanges,
    pub source_keys: u64,
    pub target_keys: u64,
    pub differences: u64,
    pub first_differences: Vec<KeyDifference>,
}

impl<'l> KeyComparison<'l> {
    /// Begins a comparison. The changes after the compared revisions tell which leases existed.
    pub(super) fn new(source_changes: &'l LaterChanges, target_changes: &'l LaterChanges) -> Self {
        Self {
            source_changes,
            target_changes,
            source_keys: 0,
            target_keys: 0,
            differences: 0,
            first_differences: Vec::new(),
        }
    }

    /// Compares the first remaining keys of both clusters. Returns which of the two keys the caller
    /// must remove: `Less` for the source's, `Greater` for the target's, `Equal` for both. Returns
    /// `None` if there are no more keys.
    pub(super) fn compare(
        &mut self,
        source: Option<&KeyValue>,
        target: Option<&KeyValue>,
    ) -> Option<Ordering> {
        let (order, differs) = match (source, target) {
            (None, None) => return None,
            (Some(source), Some(target)) if source.key == target.key => {
                (Ordering::Equal, self.difference(source, target).map(|text| (source, text)))
            }
            (Some(source), Some(target)) if source.key > target.key => {
                (Ordering::Greater, Some((target, "only the target has it".to_owned())))
            }
            (Some(source), _) => {
                (Ordering::Less, Some((source, "only the source has it".to_owned())))
            }
            (None, Some(target)) => {
                (Ordering::Greater, Some((target, "only the target has it".to_owned())))
            }
        };
        self.source_keys += u64::from(order != Ordering::Greater);
        self.target_keys += u64::from(order != Ordering::Less);
        if let Some((key_value, difference)) = differs {
            self.differences += 1;
            if self.first_differences.len() < MAX_SHOWN {
                let key = shown_key(&key_value.key);
                self.first_differences.push(KeyDifference { key, difference });
            }
        }
        Some(order)
    }

    /// Describes how the two values of one key differ. Returns `None` if they are equal.
    fn difference(&self, source: &KeyValue, target: &KeyValue) -> Option<String> {
        let mut parts = Vec::new();
        if source.value.len() != target.value.len() {
            let (of_source, of_target) = (source.value.len(), target.value.len());
            parts.push(format!("value of {of_source} bytes and {of_target} bytes"));
        } else if source.value != target.value {
            parts.push(format!("other value of {} bytes", source.value.len()));
        }
        for (name, of_source, of_target) in [
            ("version", source.version, target.version),
            ("create revision", source.create_revision, target.create_revision),
            ("modification revision", source.mod_revision, target.mod_revision),
        ] {
            if of_source != of_target {
                parts.push(format!("{name} {of_source} and {of_target}"));
            }
        }
        if source.lease != target.lease {
            parts.push(format!("lease {:x} and {:x}", source.lease, target.lease));
        } else if source.lease != 0 {
            let at_source = self.source_changes.had_lease(source.lease);
            let at_target = self.target_changes.had_lease(source.lease);
            if at_source != at_target {
                let who = if at_source { "source" } else { "target" };
                parts.push(format!("lease {:x} exists only in the {who}", source.lease));
            }
        }
        (!parts.is_empty()).then(|| parts.join("; "))
    }
}

/// Formats a key for people and programs: bytes that are not printable ASCII are escaped as in a
/// Rust or C string. The empty key is shown as two quotation marks.
pub(super) fn shown_key(key: &[u8]) -> String {
    if key.is_empty() {
        return "\"\"".to_owned();
    }
    match key.get(..MAX_SHOWN_KEY_BYTES) {
        Some(begin) if key.len() > MAX_SHOWN_KEY_BYTES => format!("{}…", begin.escape_ascii()),
        _ => key.escape_ascii().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key_value(key: &'static str) -> KeyValue {
        KeyValue {
            key: key.into(),
            value: "v".into(),
            version: 1,
            create_revision: 2,
            mod_revision: 2,
            lease: 0,
        }
    }

    /// Compares two lists of keys. Returns the comparison's counts of keys, and its differences as
    /// `key: difference`.
    fn compare(
        source: &[KeyValue],
        target: &[KeyValue],
        changes: [&LaterChanges; 2],
    ) -> ((u64, u64), Vec<String>) {
        let mut comparison = KeyComparison::new(changes[0], changes[1]);
        let (mut source, mut target) = (source.iter().peekable(), target.iter().peekable());
        while let Some(order) = comparison.compare(source.peek().copied(), target.peek().copied()) {
            if order != Ordering::Greater {
                source.next();
            }
            if order != Ordering::Less {
                target.next();
            }
        }
        let found = comparison.first_differences.iter();
        let found = found.map(|one| format!("{}: {}", one.key, one.difference)).collect();
        ((comparison.source_keys, comparison.target_keys), found)
    }

    #[test]
    fn missing_keys_are_found_on_both_sides_and_at_both_ends() {
        let none = LaterChanges::default();
        let all = ["a", "b", "c", "d"].map(key_value);
        let some = [all[1].clone(), all[2].clone()];
        let (counts, found) = compare(&all, &some, [&none, &none]);
        assert_eq!(counts, (4, 2));
        assert_eq!(found, ["a: only the source has it", "d: only the source has it"]);
        let (counts, found) = compare(&some, &all, [&none, &none]);
        assert_eq!(counts, (2, 4));
        assert_eq!(found, ["a: only the target has it", "d: only the target has it"]);
        assert_eq!(compare(&all, &all, [&none, &none]), ((4, 4), Vec::new()));
        assert_eq!(compare(&[], &[], [&none, &none]), ((0, 0), Vec::new()));
    }

    #[test]
    fn each_field_of_a_key_is_compared() {
        let none = LaterChanges::default();
        let same = key_value("k");
        let changed = |change: fn(&mut KeyValue)| {
            let mut other = same.clone();
            change(&mut other);
            compare(std::slice::from_ref(&same), &[other], [&none, &none]).1.join(", ")
        };
        assert_eq!(changed(|_| ()), "");
        assert_eq!(changed(|kv| kv.value = "w".into()), "k: other value of 1 bytes");
        assert_eq!(changed(|kv| kv.value = "".into()), "k: value of 1 bytes and 0 bytes");
        assert_eq!(changed(|kv| kv.version = 2), "k: version 1 and 2");
        assert_eq!(changed(|kv| kv.create_revision = 1), "k: create revision 2 and 1");
        assert_eq!(changed(|kv| kv.mod_revision = 3), "k: modification revision 2 and 3");
        assert_eq!(changed(|kv| kv.lease = 255), "k: lease 0 and ff");
    }

    #[test]
    fn a_lease_must_exist_in_both_clusters_or_in_neither_unless_it_has_ended_since() {
        let key = [KeyValue { lease: 10, ..key_value("k") }];
        let none = LaterChanges::default();
        let has = LaterChanges { leases: [10].into(), ..LaterChanges::default() };
        let ended = LaterChanges { ended_leases: [10].into(), ..LaterChanges::default() };
        let found = |changes| compare(&key, &key, changes).1;
        assert_eq!(found([&has, &none]), ["k: lease a exists only in the source"]);
        assert_eq!(found([&none, &has]), ["k: lease a exists only in the target"]);
        assert_eq!(found([&has, &ended]), [""; 0]);
        assert_eq!(found([&ended, &has]), [""; 0]);
    }

    #[test]
    fn only_the_first_differences_are_kept_and_all_are_counted() {
        let none = LaterChanges::default();
        let mut comparison = KeyComparison::new(&none, &none);
        for _ in 0..100 {
            comparison.compare(Some(&key_value("k")), None);
        }
        assert_eq!((comparison.differences, comparison.first_differences.len()), (100, MAX_SHOWN));
    }

    #[test]
    fn keys_are_shown_in_ascii_and_long_ones_are_cut_off() {
        assert_eq!(shown_key(b""), "\"\"");
        assert_eq!(shown_key(b"\"\""), "\\\"\\\"", "not like the empty key");
        assert_eq!(shown_key(b"/registry/pods/a\0\xff"), "/registry/pods/a\\x00\\xff");
        assert_eq!(shown_key(&[b'a'; MAX_SHOWN_KEY_BYTES]), "a".repeat(MAX_SHOWN_KEY_BYTES));
        let long = shown_key(&[b'a'; MAX_SHOWN_KEY_BYTES + 1]);
        assert_eq!(long, format!("{}…", "a".repeat(MAX_SHOWN_KEY_BYTES)));
    }
}
