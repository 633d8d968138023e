//! Watchers are told everything once, in order, whatever happens on the way.

use std::time::Duration;

use bytes::Bytes;
use tokio::task::JoinHandle;

use super::*;
use crate::machine::Position;
use crate::mvcc::tests::{backend, disk};
use crate::mvcc::{Compaction, EventKind, Options, Writer};

struct World {
    writer: Writer,
    publisher: Publisher,
    hub: WatchHub,
    index: u64,
    task: Option<JoinHandle<()>>,
}

impl World {
    fn new() -> Self {
        let options = Options { compaction: Compaction::Inline, ..Options::default() };
        let writer = Writer::open(backend(&disk(1)), options).unwrap();
        let publisher = Publisher::new(writer.store());
        let hub = publisher.hub();
        Self { writer, publisher, hub, index: 0, task: None }
    }

    fn running() -> Self {
        let mut world = Self::new();
        world.task = Some(tokio::spawn(world.hub.clone().run()));
        world
    }

    fn change(&mut self, work: impl FnOnce(&mut crate::mvcc::Batch<'_>)) -> i64 {
        self.index += 1;
        let position = Position { index: self.index, term: 1 };
        let ((), events) = self
            .writer
            .batch(position, |batch| {
                work(batch);
                batch.end_request();
                Ok(())
            })
            .unwrap();
        let revision = self.writer.store().view().revision();
        self.publisher.publish(events);
        revision
    }

    fn put(&mut self, key: &str) -> i64 {
        let key = Bytes::copy_from_slice(key.as_bytes());
        self.change(|batch| {
            batch.put(key, Bytes::from_static(b"v"), 0).unwrap();
        })
    }

    fn compact(&mut self, revision: i64) {
        self.change(|batch| batch.compact(revision).unwrap());
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

fn spec(key: &'static str, end: &'static str, start_revision: i64) -> WatchSpec {
    let bytes = |text: &'static str| Bytes::from_static(text.as_bytes());
    WatchSpec {
        range: KeyRange::new(bytes(key), bytes(end)),
        start_revision,
        no_put: false,
        no_delete: false,
        progress_notify: false,
    }
}

async fn next(subscriber: &mut Subscriber) -> Notice {
    let wait = tokio::time::timeout(Duration::from_secs(30), subscriber.next());
    wait.await.expect("something to tell").unwrap()
}

/// Nothing is told, however long one waits; half a second stands for that.
async fn nothing(subscriber: &mut Subscriber) {
    let wait = tokio::time::timeout(Duration::from_millis(300), subscriber.next());
    if let Ok(notice) = wait.await {
        panic!("{notice:?}");
    }
}

/// Revisions told to `watch_id`, until `last` is among them.
async fn told_until(subscriber: &mut Subscriber, watch_id: i64, last: i64) -> Vec<i64> {
    let mut told = Vec::new();
    while told.last() != Some(&last) {
        match next(subscriber).await {
            Notice::Events { watch_id: id, picked } => {
                if id == watch_id {
                    assert!(picked.revision() >= picked.events().last().unwrap().revision.main);
                    told.extend(picked.events().map(|event| event.revision.main));
                }
            }
            other => panic!("{other:?}"),
        }
    }
    told
}

#[tokio::test]
async fn a_watch_from_now_on_is_told_what_happens() {
    let mut world = World::running();
    world.put("k");
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, spec("k", "", 3));
    let last = world.put("k");
    world.put("other");
    assert_eq!(told_until(&mut subscriber, 1, last).await, [3]);
    nothing(&mut subscriber).await;
}

#[tokio::test]
async fn a_watch_from_the_past_goes_over_into_the_present_without_a_gap() {
    let mut world = World::running();
    for _ in 0..2_500 {
        world.put("k");
    }
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, spec("k", "", 2));
    subscriber.add(2, spec("\0", "\0", 1_000));
    let mut told = told_until(&mut subscriber, 1, 2_501).await;
    for _ in 0..100 {
        world.put("k");
    }
    told.extend(told_until(&mut subscriber, 1, 2_601).await);
    assert_eq!(told, (2..=2_601).collect::<Vec<i64>>());
}

#[tokio::test]
async fn who_does_not_read_is_bounded_and_misses_nothing() {
    let mut world = World::running();
    let mut slow = world.hub.subscribe();
    slow.add(1, spec("k", "", 2));
    let first = world.put("k");
    assert_eq!(told_until(&mut slow, 1, first).await, [2]);
    let mut quick = world.hub.subscribe();
    quick.add(1, spec("k", "", 3));
    let mut last = 0;
    for _ in 0..1_000 {
        last = world.put("k");
        tokio::task::yield_now().await;
    }
    assert_eq!(told_until(&mut quick, 1, last).await, (3..=last).collect::<Vec<i64>>());
    assert_eq!(told_until(&mut slow, 1, last).await, (3..=last).collect::<Vec<i64>>());
    last = world.put("k");
    assert_eq!(told_until(&mut slow, 1, last).await, [last]);
}

#[tokio::test]
async fn a_hub_that_lost_its_feed_lets_everybody_catch_up() {
    let mut world = World::running();
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, spec("k", "", 2));
    let first = world.put("k");
    told_until(&mut subscriber, 1, first).await;
    world.put("k");
    world.put("k");
    world.publisher.jump(world.writer.store().view().revision());
    let last = world.put("k");
    assert_eq!(told_until(&mut subscriber, 1, last).await, [3, 4, 5]);
}

#[tokio::test]
async fn a_watch_from_before_the_compaction_ends_and_says_where_it_could_begin() {
    let mut world = World::running();
    for _ in 0..5 {
        world.put("k");
    }
    world.compact(4);
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, spec("k", "", 3));
    let notice = next(&mut subscriber).await;
    assert!(matches!(notice, Notice::Compacted { watch_id: 1, compact_revision: 4 }), "{notice:?}");
    assert!(!subscriber.has(1));
    subscriber.add(1, spec("k", "", 4));
    assert_eq!(told_until(&mut subscriber, 1, 6).await, [4, 5, 6]);
}

#[tokio::test]
async fn a_delete_at_the_compacted_revision_is_still_told() {
    let mut world = World::running();
    world.put("k");
    let deleted = world.change(|batch| {
        batch.delete(&KeyRange::One(Bytes::from_static(b"k"))).unwrap();
    });
    world.put("l");
    world.compact(deleted);
    for watched in [spec("k", "", deleted), spec("\0", "\0", deleted)] {
        let mut subscriber = world.hub.subscribe();
        subscriber.add(1, watched);
        let Notice::Events { picked, .. } = next(&mut subscriber).await else { panic!() };
        let first = picked.events().next().unwrap();
        assert_eq!((first.revision.main, first.kind), (deleted, EventKind::Delete));
    }
}

#[tokio::test]
async fn a_watch_of_the_future_is_told_nothing_before_its_time() {
    let mut world = World::running();
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, WatchSpec { progress_notify: true, ..spec("k", "", 5) });
    for _ in 0..2 {
        world.put("k");
    }
    subscriber.request_progress().await;
    subscriber.request_periodic_progress().await;
    nothing(&mut subscriber).await;
    for _ in 0..3 {
        world.put("k");
    }
    assert_eq!(told_until(&mut subscriber, 1, 6).await, [5, 6]);
}

#[tokio::test]
async fn progress_never_overtakes_events() {
    let mut world = World::running();
    for _ in 0..3_000 {
        world.put("k");
    }
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, spec("k", "", 2));
    subscriber.add(2, spec("l", "", 2));
    subscriber.request_progress().await;
    world.put("l");
    let (mut k, mut l) = (1, 0);
    let revision = loop {
        match next(&mut subscriber).await {
            Notice::Events { watch_id: 1, picked } => {
                k = picked.events().last().unwrap().revision.main;
            }
            Notice::Events { picked, .. } => l = picked.events().last().unwrap().revision.main,
            Notice::Progress { revision } => break revision,
            other => panic!("{other:?}"),
        }
    };
    assert!(revision >= 3_001);
    assert_eq!(k, 3_001, "all of k comes before a progress of {revision}");
    assert!(revision < 3_002 || l == 3_002, "l comes before a progress of {revision}");
}

/// A watch is added, and attached only after progress was asked for: the hub then finds both, the
/// question first, together with two events.
async fn asked_before_the_attach(ask: impl AsyncFnOnce(&mut Subscriber)) -> (World, Subscriber) {
    let mut world = World::running();
    let mut subscriber = world.hub.subscribe();
    let asks = |key| WatchSpec { progress_notify: true, ..spec(key, "", 2) };
    subscriber.add(1, asks("first"));
    nothing(&mut subscriber).await;
    subscriber.add(2, asks("k"));
    ask(&mut subscriber).await;
    // The watch goes as far as to ask for its attach; the hub has had no turn yet.
    assert!(futures_util::poll!(std::pin::pin!(subscriber.next())).is_pending());
    world.put("k");
    world.put("k");
    (world, subscriber)
}

#[tokio::test]
async fn an_answer_to_a_question_from_before_the_attach_says_nothing_of_the_watch() {
    let ask = async |subscriber: &mut Subscriber| subscriber.request_progress().await;
    let (_world, mut subscriber) = asked_before_the_attach(ask).await;
    assert_eq!(told_until(&mut subscriber, 2, 3).await, [2, 3]);
    let notice = next(&mut subscriber).await;
    assert!(matches!(notice, Notice::Progress { revision: 3 }), "{notice:?}");
    nothing(&mut subscriber).await;
}

#[tokio::test]
async fn the_timers_question_from_before_the_attach_says_nothing_of_the_watch() {
    let ask = async |subscriber: &mut Subscriber| subscriber.request_periodic_progress().await;
    let (_world, mut subscriber) = asked_before_the_attach(ask).await;
    let notice = next(&mut subscriber).await;
    assert!(matches!(notice, Notice::WatchProgress { watch_id: 1, revision: 3 }), "{notice:?}");
    assert_eq!(told_until(&mut subscriber, 2, 3).await, [2, 3]);
    nothing(&mut subscriber).await;
}

#[tokio::test]
async fn periodic_progress_is_for_who_asked_and_was_quiet() {
    let mut world = World::running();
    let mut subscriber = world.hub.subscribe();
    let asks = |key| WatchSpec { progress_notify: true, ..spec(key, "", 2) };
    subscriber.add(1, asks("busy"));
    subscriber.add(2, asks("quiet"));
    subscriber.add(3, spec("silent", "", 2));
    let last = world.put("busy");
    told_until(&mut subscriber, 1, last).await;
    // A stream works while it is asked for more: now all three are up to date.
    nothing(&mut subscriber).await;
    subscriber.request_periodic_progress().await;
    let notice = next(&mut subscriber).await;
    assert!(matches!(notice, Notice::WatchProgress { watch_id: 2, revision: 2 }), "{notice:?}");
    nothing(&mut subscriber).await;
}

#[tokio::test]
async fn a_cancelled_watch_is_told_no_more_and_its_id_is_free() {
    let mut world = World::running();
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, spec("k", "", 2));
    let first = world.put("k");
    told_until(&mut subscriber, 1, first).await;
    assert!(subscriber.remove(1).await);
    assert!(!subscriber.remove(1).await);
    world.put("k");
    nothing(&mut subscriber).await;
    subscriber.add(1, spec("k", "", 3));
    assert_eq!(told_until(&mut subscriber, 1, 3).await, [3]);
}

#[tokio::test]
async fn filters_leave_out_puts_or_deletes() {
    let mut world = World::running();
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, WatchSpec { no_put: true, ..spec("k", "", 2) });
    subscriber.add(2, WatchSpec { no_delete: true, ..spec("k", "", 2) });
    world.put("k");
    world.change(|batch| {
        batch.delete(&KeyRange::One(Bytes::from_static(b"k"))).unwrap();
    });
    let mut told = Vec::new();
    for _ in 0..2 {
        let Notice::Events { watch_id, picked } = next(&mut subscriber).await else { panic!() };
        told.extend(picked.events().map(|event| (watch_id, event.kind)));
    }
    told.sort_by_key(|(watch_id, _)| *watch_id);
    assert_eq!(told, [(1, EventKind::Delete), (2, EventKind::Put)]);
}

#[tokio::test]
async fn all_changes_of_a_revision_come_together_and_in_order() {
    let mut world = World::running();
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, spec("\0", "\0", 2));
    world.change(|batch| {
        for number in (0..1_500).rev() {
            let key = Bytes::from(format!("{number:04}"));
            batch.put(key, Bytes::from_static(b"v"), 0).unwrap();
        }
    });
    world.put("z");
    for _ in 0..2 {
        let mut late = world.hub.subscribe();
        late.add(1, spec("\0", "\0", 2));
        for subscriber in [&mut subscriber, &mut late] {
            let Notice::Events { picked, .. } = next(subscriber).await else { panic!() };
            let subs: Vec<u32> =
                picked.events().map(|event| event.revision.sub).take(1_500).collect();
            assert_eq!(subs, (0..1_500).collect::<Vec<u32>>());
        }
        world.put("y");
        subscriber = world.hub.subscribe();
        subscriber.add(1, spec("\0", "\0", 2));
    }
}

#[tokio::test]
async fn a_previous_value_is_the_one_before_the_revision() {
    use node_proto::etcdserverpb::WatchResponse;
    use prost::Message as _;
    let mut world = World::running();
    world.put("k");
    world.put("k");
    world.change(|batch| {
        batch.delete(&KeyRange::One(Bytes::from_static(b"k"))).unwrap();
    });
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, spec("k", "", 2));
    let Notice::Events { picked, .. } = next(&mut subscriber).await else { panic!() };
    let wire = picked.encoded_with_previous(&world.writer.store()).concat();
    let events = WatchResponse::decode(&wire[..]).unwrap().events;
    let previous: Vec<_> =
        events.iter().map(|event| event.prev_kv.as_ref().map(|kv| kv.mod_revision)).collect();
    assert_eq!(previous, [None, Some(2), Some(3)]);
    assert_eq!(events[2].r#type, 1);
    assert_eq!(events[2].kv.as_ref().unwrap().mod_revision, 4);
    let plain = WatchResponse::decode(&picked.encoded().concat()[..]).unwrap().events;
    assert!(plain.iter().all(|event| event.prev_kv.is_none()));
    assert_eq!(plain[1].kv.as_ref().unwrap().version, 2);
}
