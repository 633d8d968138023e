//! Sets of keys, as permissions and requests name them: a key, and where the range from it ends.

use std::cmp::Ordering;

use bytes::Bytes;

/// Where a range ends.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    Before(Bytes),
    /// There is no last key.
    Never,
}

impl End {
    fn is_after(&self, key: &[u8]) -> bool {
        match self {
            Self::Before(end) => key < end,
            Self::Never => true,
        }
    }
}

/// `range_end` of everything from the key on.
const OPEN: &[u8] = &[0];

/// Keys in any of many ranges: disjoint ones that don't touch, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ranges(Vec<(Bytes, End)>);

impl Ranges {
    /// What the ranges hold together; each is a key, and `range_end` as permissions have it.
    pub(super) fn merged<'a>(ranges: impl Iterator<Item = (&'a Bytes, &'a Bytes)>) -> Self {
        let mut spans: Vec<(Bytes, End)> = ranges.map(|(key, end)| span(key, end)).collect();
        spans.sort_unstable();
        let mut merged: Vec<(Bytes, End)> = Vec::new();
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

    /// Whether it holds everything that a request with this `key` and `range_end` is about. One whose end
    /// does not come after its key is about nothing: as in etcd, its key alone has to be allowed even so
    /// (server/auth/range_perm_cache.go; of several ranges that don't overlap etcd may overlook one).
    pub(super) fn covers(&self, key: &[u8], range_end: &[u8]) -> bool {
        let found = self.last_from(key);
        if range_end == OPEN {
            return found.is_some_and(|(_, end)| *end == End::Never);
        }
        if key < range_end {
            return found.is_some_and(|(_, end)| match end {
                End::Before(end) => range_end.cmp(end) != Ordering::Greater,
                End::Never => true,
            });
        }
        found.is_some_and(|(_, end)| end.is_after(key))
    }

    /// The last one that begins at this key or before it.
    fn last_from(&self, key: &[u8]) -> Option<&(Bytes, End)> {
        let after = self.0.partition_point(|(start, _)| start <= key);
        self.0[..after].last()
    }
}

/// Whether a range that begins at `start` goes on where one that ends at `end` stopped, or before.
fn touches(end: &End, start: &Bytes) -> bool {
    match end {
        End::Before(end) => start <= end,
        End::Never => true,
    }
}

fn span(key: &Bytes, range_end: &Bytes) -> (Bytes, End) {
    let end = match &range_end[..] {
        [] => End::Before([&key[..], &[0]].concat().into()),
        OPEN => End::Never,
        _ => End::Before(range_end.clone()),
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

    fn holding(ranges: &[(&str, &str)]) -> Ranges {
        let ranges: Vec<_> = ranges.iter().map(|(key, end)| (bytes(key), bytes(end))).collect();
        Ranges::merged(ranges.iter().map(|(key, end)| (key, end)))
    }

    #[test]
    fn a_key_alone_is_no_more_than_that_key() {
        let one = holding(&[("a", "")]);
        assert!(one.covers(b"a", b""));
        assert!(one.covers(b"a", b"a\0"));
        for (key, end) in [("a", "b"), ("a", "\0"), ("a\0", ""), ("", ""), ("b", "")] {
            assert!(!one.covers(key.as_bytes(), end.as_bytes()), "{key:?} {end:?}");
        }
    }

    #[test]
    fn ranges_that_touch_are_one() {
        let two = holding(&[("c", "e"), ("a", "c")]);
        assert!(two.covers(b"a", b"e"));
        assert!(!two.covers(b"a", b"e\0"));
        let apart = holding(&[("a", "c"), ("c\0", "e")]);
        assert!(!apart.covers(b"a", b"e") && !apart.covers(b"c", b""));
        assert!(holding(&[("a", ""), ("a\0", "b")]).covers(b"a", b"b"));
    }

    #[test]
    fn only_what_has_no_end_covers_what_has_none() {
        let open = holding(&[("m", "\0"), ("a", "b")]);
        assert!(open.covers(b"m", b"\0") && open.covers(b"z", b"\0") && open.covers(b"n", b"zz"));
        assert!(!open.covers(b"a", b"\0") && !open.covers(b"l", b"\0") && !open.covers(b"l", b""));
        assert!(!holding(&[("a", "z")]).covers(b"b", b"\0"));
    }

    #[test]
    fn an_empty_range_is_answered_as_etcd_does() {
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
        fn what_is_covered_is_allowed_key_by_key(
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
            // Keys between and after the names that ranges begin and end with.
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
