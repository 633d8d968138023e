//! Set of key ranges that finds the ranges containing a key.
//!
//! It is a treap ordered by the ranges' first keys (Seidel and Aragon, *Randomized Search Trees*,
//! 1996). Each node also has the furthest end of its subtree, as in the interval trees of Cormen,
//! Leiserson, Rivest and Stein. For a key in no range, the lookup walks down the tree once, without
//! a look at every range.

use std::hash::{BuildHasher as _, RandomState};

use bytes::Bytes;

use crate::mvcc::revision::KeyRange;

/// ID of a range, unique in the set.
pub(super) type RangeId = usize;

#[derive(Debug, Default)]
pub(super) struct RangeTree {
    root: Subtree,
    /// Random key of the hash function that yields the priorities. It keeps clients from choosing
    /// keys that turn the tree into a list.
    priority_hasher: RandomState,
}

type Subtree = Option<Box<RangeNode>>;

/// Exclusive end of a range.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum RangeEnd {
    Before(Bytes),
    Unbounded,
}

impl RangeEnd {
    fn of(range: &KeyRange) -> Self {
        match range {
            KeyRange::One(one) => Self::Before([&one[..], &[0]].concat().into()),
            KeyRange::Between(_, end) => Self::Before(end.clone()),
            KeyRange::From(_) => Self::Unbounded,
        }
    }

    fn is_after(&self, key: &[u8]) -> bool {
        match self {
            Self::Before(end) => &end[..] > key,
            Self::Unbounded => true,
        }
    }
}

#[derive(Debug)]
struct RangeNode {
    start: Bytes,
    id: RangeId,
    end: RangeEnd,
    /// Furthest end in this node's subtree, its own included.
    furthest: RangeEnd,
    /// Heap priority: no node in the subtree has a higher one.
    priority: u64,
    left: Subtree,
    right: Subtree,
}

impl RangeNode {
    /// Recomputes `furthest` after the children have changed.
    fn with_furthest_updated(mut self: Box<Self>) -> Box<Self> {
        let below = [&self.left, &self.right].into_iter().flatten().map(|node| &node.furthest);
        self.furthest = below.chain([&self.end]).max().unwrap_or(&self.end).clone();
        self
    }

    fn is_before(&self, start: &[u8], id: RangeId) -> bool {
        (&self.start[..], self.id) < (start, id)
    }
}

impl RangeTree {
    pub(super) fn insert(&mut self, range: &KeyRange, id: RangeId) {
        let (start, end) = (range.start().clone(), RangeEnd::of(range));
        let (before, after) = split(self.root.take(), &start, id);
        let (furthest, priority) = (end.clone(), self.priority_hasher.hash_one(id));
        let node = RangeNode { start, id, end, furthest, priority, left: None, right: None };
        self.root = join(join(before, Some(Box::new(node))), after);
    }

    pub(super) fn remove(&mut self, range: &KeyRange, id: RangeId) {
        let (before, rest) = split(self.root.take(), range.start(), id);
        let (_, after) = split(rest, range.start(), id + 1);
        self.root = join(before, after);
    }

    /// Calls `offer` for each range that contains `key`, in the order of first keys.
    pub(super) fn for_each_containing(&self, key: &[u8], offer: &mut impl FnMut(RangeId)) {
        visit_containing(self.root.as_deref(), key, offer);
    }
}

fn visit_containing(node: Option<&RangeNode>, key: &[u8], offer: &mut impl FnMut(RangeId)) {
    let Some(node) = node.filter(|node| node.furthest.is_after(key)) else { return };
    visit_containing(node.left.as_deref(), key, offer);
    if &node.start[..] <= key {
        if node.end.is_after(key) {
            offer(node.id);
        }
        visit_containing(node.right.as_deref(), key, offer);
    }
}

/// Splits a tree into the nodes before (`start`, `id`) and the others.
fn split(tree: Subtree, start: &[u8], id: RangeId) -> (Subtree, Subtree) {
    let Some(mut node) = tree else { return (None, None) };
    if node.is_before(start, id) {
        let (before, after) = split(node.right.take(), start, id);
        node.right = before;
        (Some(node.with_furthest_updated()), after)
    } else {
        let (before, after) = split(node.left.take(), start, id);
        node.left = after;
        (before, Some(node.with_furthest_updated()))
    }
}

/// Joins two trees. All nodes of `first` must be before those of `second`.
fn join(first: Subtree, second: Subtree) -> Subtree {
    match (first, second) {
        (tree, None) | (None, tree) => tree,
        (Some(mut top), Some(other)) if top.priority >= other.priority => {
            top.right = join(top.right.take(), Some(other));
            Some(top.with_furthest_updated())
        }
        (first, Some(mut top)) => {
            top.left = join(first, top.left.take());
            Some(top.with_furthest_updated())
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range() -> impl Strategy<Value = KeyRange> {
        let key = || prop::collection::vec(b'a'..b'e', 1..4).prop_map(Bytes::from);
        (key(), prop_oneof![3 => key(), 1 => Just(Bytes::from_static(&[0]))])
            .prop_map(|(key, end)| KeyRange::new(key, end))
    }

    proptest! {
        #[test]
        fn the_tree_finds_exactly_the_ranges_that_contain_a_key(
            ranges in prop::collection::vec((range(), any::<bool>()), 0..60),
            keys in prop::collection::vec(prop::collection::vec(b'a'..b'f', 1..5), 1..20),
        ) {
            let mut tree = RangeTree::default();
            for (id, (range, _)) in ranges.iter().enumerate() {
                tree.insert(range, id);
            }
            for (id, (range, stays)) in ranges.iter().enumerate() {
                if !stays {
                    tree.remove(range, id);
                }
            }
            for key in &keys {
                let mut found = Vec::new();
                tree.for_each_containing(key, &mut |id| found.push(id));
                found.sort_unstable();
                let holds = |(range, stays): &(KeyRange, bool)| *stays && range.contains(key);
                let all = ranges.iter().enumerate();
                let expected: Vec<_> = all.filter(|(_, r)| holds(r)).map(|(id, _)| id).collect();
                prop_assert_eq!(found, expected);
            }
        }
    }

    fn depth(tree: &Subtree) -> usize {
        tree.as_ref().map_or(0, |node| 1 + depth(&node.left).max(depth(&node.right)))
    }

    #[test]
    fn ranges_inserted_in_order_make_a_shallow_tree() {
        let mut tree = RangeTree::default();
        let range = |n: usize| KeyRange::new(format!("q{n:07}").into(), Bytes::from_static(b"r"));
        (0..10_000).for_each(|n| tree.insert(&range(n), n));
        // A depth of about 32 is usual. A random treap of depth 100 practically never occurs.
        assert!(depth(&tree.root) < 100, "{}", depth(&tree.root));
        (0..10_000).for_each(|n| tree.remove(&range(n), n));
        assert_eq!(depth(&tree.root), 0);
    }
}
