//! Sets of keys, built from the ranges of permissions: a start key and a `range_end` each.

use std::cmp::Ordering;

use bytes::Bytes;

/// End of a range of keys.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum RangeEnd {
    Before(Bytes),
    /// The range has no end: it holds all keys from its start on.
    Unbounded,
}

impl RangeEnd {
    fn is_after(&self, key: &[u8]) -> bool {
        match self {
            Self::Before(end) => key < end,
            Self::Unbounded => true,
        }
    }
}

/// The `range_end` of a range that holds all keys from its start on.
const UNBOUNDED_RANGE_END: &[u8] = &[0];

/// A set of keys, stored as sorted ranges that are disjoint and don't touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PermittedRanges(Vec<(Bytes, RangeEnd)>);

impl PermittedRanges {
    /// Returns the union of ranges. Each is given as a key and a `range_end`, as in a permission.
    pub(super) fn merged<'a>(ranges: impl Iterator<Item = (&'a Bytes, &'a Bytes)>) -> Self {
        let mut spans: Vec<(Bytes, RangeEnd)> =
            ranges.map(|(key, end)| to_range(key, end)).collect();
        spans.sort_unstable();
        let mut merged: Vec<(Bytes, RangeEnd)> = Vec::new();
        for (start, end) in spans {
            match merged.last_mut() {
                Some((_, last)) if touches(last, &start) => {
                    if end > *last {
                        *last = end;
                    }
                }
                _ => merged.push((start, end)),
            }
        }
        Self(merged)
    }

    /// Whether the set contains all keys of the request with this `key` and `range_end`.
    ///
    /// If the end does not come after the key, the range contains no key. As in etcd, `key` itself
    /// must be in the set even then (server/auth/range_perm_cache.go). Unlike etcd, this never
    /// overlooks one of several disjoint ranges.
    pub(super) fn covers(&self, key: &[u8], range_end: &[u8]) -> bool {
        let found = self.last_range_from(key);
        if range_end == UNBOUNDED_RANGE_END {
            return found.is_some_and(|(_, end)| *end == RangeEnd::Unbounded);
        }
        if key < range_end {
            return found.is_some_and(|(_, end)| match end {
                RangeEnd::Before(end) => range_end.cmp(end) != Ordering::Greater,
                RangeEnd::Unbounded => true,
            });
        }
        found.is_some_and(|(_, end)| end.is_after(key))
    }

    /// Returns the last range that starts at `key` or before it.
    fn last_range_from(&self, key: &[u8]) -> Option<&(Bytes, RangeEnd)> {
        let after = self.0.partition_point(|(start, _)| start <= key);
        self.0[..after].last()
    }
}

/// Whether a range that starts at `start` overlaps or touches an earlier one that ends at `end`.
fn touches(end: &RangeEnd, start: &Bytes) -> bool {
    match end {
        RangeEnd::Before(end) => start <= end,
        RangeEnd::Unbounded => true,
    }
}

fn to_range(key: &Bytes, range_end: &Bytes) -> (Bytes, RangeEnd) {
    let end = match &range_end[..] {
        [] => RangeEnd::Before([&key[..], &[0]].concat().into()),
        UNBOUNDED_RANGE_END => RangeEnd::Unbounded,
        _ => RangeEnd::Before(range_end.clone()),
    };
    (key.clone(), end)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::mvcc::KeyRange;

    fn bytes(text: &str) -> Bytes {
        Bytes::copy_from_slice(text.as_bytes())
    }

    fn holding(ranges: &[(&str, &str)]) -> PermittedRanges {
        let ranges: Vec<_> = ranges.iter().map(|(key, end)| (bytes(key), bytes(end))).collect();
        PermittedRanges::merged(ranges.iter().map(|(key, end)| (key, end)))
    }

    #[test]
    fn a_single_key_covers_only_itself() {
        let one = holding(&[("a", "")]);
        assert!(one.covers(b"a", b""));
        assert!(one.covers(b"a", b"a\0"));
        for (key, end) in [("a", "b"), ("a", "\0"), ("a\0", ""), ("", ""), ("b", "")] {
            assert!(!one.covers(key.as_bytes(), end.as_bytes()), "{key:?} {end:?}");
        }
    }

    #[test]
    fn touching_ranges_are_merged() {
        let two = holding(&[("c", "e"), ("a", "c")]);
        assert!(two.covers(b"a", b"e"));
        assert!(!two.covers(b"a", b"e\0"));
        let apart = holding(&[("a", "c"), ("c\0", "e")]);
        assert!(!apart.covers(b"a", b"e") && !apart.covers(b"c", b""));
        assert!(holding(&[("a", ""), ("a\0", "b")]).covers(b"a", b"b"));
    }

    #[test]
    fn only_an_unbounded_range_covers_an_unbounded_request() {
        let open = holding(&[("m", "\0"), ("a", "b")]);
        assert!(open.covers(b"m", b"\0") && open.covers(b"z", b"\0") && open.covers(b"n", b"zz"));
        assert!(!open.covers(b"a", b"\0") && !open.covers(b"l", b"\0") && !open.covers(b"l", b""));
        assert!(!holding(&[("a", "z")]).covers(b"b", b"\0"));
    }

    #[test]
    fn an_empty_range_is_covered_as_in_etcd() {
        let range = holding(&[("b", "f")]);
        assert!(range.covers(b"e", b"c"));
        assert!(range.covers(b"c", b"b"));
        assert!(range.covers(b"c", b"a"));
        assert!(range.covers(b"b", b"b"));
        assert!(!range.covers(b"f", b"b"));
        assert!(!range.covers(b"a", b"a"));
    }

    const NAMES: [&str; 6] = ["a", "a\0", "b", "c", "d", "e"];

    proptest! {
        #[test]
        fn a_range_is_covered_only_if_each_of_its_keys_is(
            granted in proptest::collection::vec((0_usize..6, 0_usize..8), 0..6),
            key in 0_usize..6,
            end in 0_usize..8,
        ) {
            let end_of = |n: usize| match n {
                6 => "",
                7 => "\0",
                n => NAMES[n],
            };
            let proper = |key: usize, end: usize| end > 5 || NAMES[key] < end_of(end);
            let granted: Vec<_> = granted
                .into_iter()
                .filter(|(key, end)| proper(*key, *end))
                .map(|(key, end)| (NAMES[key], end_of(end)))
                .collect();
            let ranges = holding(&granted);
            prop_assume!(proper(key, end));
            // Sample keys: each of `NAMES`, and for each name keys that sort right after it.
            let points: Vec<Bytes> = NAMES
                .iter()
                .flat_map(|name| ["", "\0", "\0\0", "x"].map(|tail| format!("{name}{tail}").into()))
                .collect();
            let of = |key: &str, end: &str| KeyRange::new(bytes(key), bytes(end));
            let asked = of(NAMES[key], end_of(end));
            let each = |point: &Bytes| granted.iter().any(|(key, end)| of(key, end).contains(point));
            let all = points.iter().filter(|point| asked.contains(point)).all(each);
            let is_open = end == 7;
            let open = granted.iter().any(|(_, end)| *end == "\0");
            prop_assert_eq!(
                ranges.covers(NAMES[key].as_bytes(), end_of(end).as_bytes()),
                all && (!is_open || open),
            );
        }
    }
}
