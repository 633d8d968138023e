use std::collections::BTreeMap;
use std::ops::Bound;

use super::*;
use crate::tests::random::Random;

/// Number of random sequences of operations.
const SEEDS: u64 = 20;
/// Number of insertions in a sequence; enough to split blocks many times.
const INSERTIONS: usize = 10_000;

fn commit_at(offset: u64) -> Place {
    let check = HashCheck(offset as u32 & CHECK_MASK);
    Place::Commit(CommitPlace { has_document: offset.is_multiple_of(3), offset, check })
}

/// Returns an id in one of four orders: at random, ascending, nearly ascending, or known already.
fn any_cluster(random: &mut Random, order: u64, known: &[Uuid]) -> Uuid {
    let last = known.last().map_or(0, |last| last.as_u128());
    let step = random.below(1_000) as u128 + 1;
    match order {
        0 => Uuid::from_u128(u128::from(random.number()) << 64),
        1 => Uuid::from_u128(last + step),
        2 if random.once_in(4) => Uuid::from_u128(last.saturating_sub(step * 50)),
        2 => Uuid::from_u128(last + step * 10),
        _ if !known.is_empty() && random.once_in(2) => *random.pick(known),
        _ => Uuid::from_u128(u128::from(random.number())),
    }
}

fn check_blocks(map: &PlaceMap, seed: u64) {
    for block in &map.blocks {
        assert!((1..=BLOCK_LEN).contains(&block.len()), "seed {seed}: {}", block.len());
        assert!(block.capacity() <= block.len() + BLOCK_GROWTH, "seed {seed}: unused space");
    }
}

#[test]
fn the_map_answers_as_a_btree_map_does_after_random_insertions() {
    for seed in 0..SEEDS {
        let mut random = Random(seed);
        let (mut map, mut model) = (PlaceMap::default(), BTreeMap::new());
        let mut known = Vec::new();
        for number in 0..INSERTIONS {
            let cluster = any_cluster(&mut random, seed % 4, &known);
            let place = match random.below(5) {
                0 => Place::End(*random.pick(&CAUSES)),
                _ => commit_at(number as u64),
            };
            map.insert(cluster, place);
            model.insert(cluster, place);
            known.push(cluster);
            let other = any_cluster(&mut random, seed % 4, &known);
            for asked in [cluster, other, *random.pick(&known)] {
                assert_eq!(map.get(asked), model.get(&asked).copied(), "seed {seed}: {asked}");
            }
            if random.once_in(20) {
                let range = (Bound::Excluded(other), Bound::Unbounded);
                let expected =
                    model.range(range).take(5).map(|(&cluster, &place)| (cluster, place));
                assert!(map.after(Some(other)).take(5).eq(expected), "seed {seed}: after {other}");
            }
        }
        let all = model.iter().map(|(&cluster, &place)| (cluster, place));
        assert!(map.after(None).eq(all), "seed {seed}");
        check_blocks(&map, seed);
    }
}

#[test]
fn an_empty_map_holds_nothing() {
    let mut map = PlaceMap::default();
    assert!(map.is_empty() && map.get(Uuid::nil()).is_none());
    assert_eq!((map.after(None).count(), map.after(Some(Uuid::nil())).count()), (0, 0));
    map.insert(Uuid::nil(), Place::End(EndCause::Abandon));
    assert!(!map.is_empty());
    assert_eq!((map.after(None).count(), map.after(Some(Uuid::nil())).count()), (1, 0));
}

#[test]
fn a_cluster_takes_at_most_26_bytes_in_any_order_of_ids() {
    for order in 0..3 {
        let mut random = Random(order);
        let (mut map, mut known) = (PlaceMap::default(), Vec::new());
        for number in 0..50_000 {
            known.push(any_cluster(&mut random, order, &known));
            map.insert(known[known.len() - 1], commit_at(number));
        }
        let clusters = map.after(None).count();
        let records: usize = map.blocks.iter().map(Vec::capacity).sum();
        let bytes = records * size_of::<PlaceRecord>()
            + map.blocks.capacity() * size_of::<Vec<PlaceRecord>>();
        assert!(bytes <= clusters * 26, "order {order}: {bytes} bytes for {clusters} clusters");
    }
}

#[test]
fn a_packed_place_keeps_all_its_fields() {
    let all = [true, false].into_iter().flat_map(|has_document| {
        [0, 1, MAX_FILE_BYTES - 1].into_iter().flat_map(move |offset| {
            [0, 1, CHECK_MASK].map(|check| {
                let check = HashCheck(check);
                Place::Commit(CommitPlace { has_document, offset, check })
            })
        })
    });
    for place in all.chain(CAUSES.map(Place::End)) {
        assert_eq!(unpack(pack(place)), place);
    }
}

#[test]
fn any_changed_byte_of_a_hash_changes_its_check() {
    let h = Hash([0x5a; 32]);
    for at in 0..32 {
        for flipped in 1..=255 {
            let mut changed = h;
            changed.0[at] ^= flipped;
            assert_ne!(HashCheck::of(&changed), HashCheck::of(&h), "byte {at} by {flipped}");
        }
    }
}
