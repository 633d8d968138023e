//! Tests that watchers get every event once and in order, whatever happens meanwhile.

mod progress;

use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use tokio::task::JoinHandle;

use super::catch_up::{CatchUpPiece, PieceSize, read_piece};
use super::hub::{MAX_QUEUED_COMMANDS, MAX_QUEUED_DEPARTURES};
use super::*;
use crate::mvcc::tests::{backend, disk};
use crate::mvcc::{CompactionMode, EventKind, StoreOptions, StoreWriter};
use crate::state_machine::Position;
use muster_shares::memory::{MemoryBounds, MemoryBudget};

struct WatchFixture {
    writer: StoreWriter,
    publisher: Publisher,
    hub: WatchHub,
    index: u64,
    task: Option<JoinHandle<()>>,
}

impl WatchFixture {
    /// Starts a hub on the thread of the test, so that it runs whenever the test awaits.
    fn running() -> Self {
        Self::with(WatchOptions::default())
    }

    fn with(watch: WatchOptions) -> Self {
        let options =
            StoreOptions { compaction: CompactionMode::Inline, ..StoreOptions::default() };
        let writer = StoreWriter::open(backend(&disk(1)), options).unwrap();
        let publisher = Publisher::new(writer.store(), watch);
        let hub = publisher.watch_hub();
        let task = Some(tokio::spawn(hub.clone().run()));
        Self { writer, publisher, hub, index: 0, task }
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
            batch.put(key, Bytes::from_static(b"v"), 0);
        })
    }

    fn put_all(&mut self, count: usize) -> i64 {
        (0..count).map(|_| self.put("k")).last().unwrap()
    }

    /// Installs a snapshot of `other`, as the applier does.
    fn install(&mut self, other: &WatchFixture) {
        let mut stream = Vec::new();
        other.writer.store().view().write_snapshot(&mut stream).unwrap();
        self.writer.install_snapshot(&mut &stream[..]).unwrap();
        self.publisher.publish_replacement(self.writer.store().view().revision());
    }

    fn compact(&mut self, revision: i64) {
        self.change(|batch| batch.compact(revision).unwrap());
    }
}

impl Drop for WatchFixture {
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

/// Checks that nothing is sent for a while. 300 ms stand for any time.
async fn expect_no_notice(subscriber: &mut Subscriber) {
    let wait = tokio::time::timeout(Duration::from_millis(300), subscriber.next());
    if let Ok(notice) = wait.await {
        panic!("{notice:?}");
    }
}

/// Waits until the hub sends events to every watch. Nothing may be sent meanwhile.
async fn wait_until_attached(subscriber: &mut Subscriber) {
    for _ in 0..1_000 {
        if subscriber.is_settled() {
            return;
        }
        if let Poll::Ready(told) = futures_util::poll!(std::pin::pin!(subscriber.next())) {
            panic!("{told:?}");
        }
        tokio::task::yield_now().await;
    }
    panic!("never attached");
}

/// Makes `count` puts, and lets the hub run after each.
async fn put_slowly(world: &mut WatchFixture, count: usize) -> i64 {
    let mut last = 0;
    for _ in 0..count {
        last = world.put("k");
        tokio::task::yield_now().await;
    }
    last
}

/// Returns the revisions sent to `watch_id`, up to and including `last`.
async fn event_revisions_until(subscriber: &mut Subscriber, watch_id: i64, last: i64) -> Vec<i64> {
    let mut told = Vec::new();
    while told.last() != Some(&last) {
        match next(subscriber).await {
            Notice::Events { watch_id: id, selection, .. } => {
                if id == watch_id {
                    assert!(
                        selection.revision() >= selection.events().last().unwrap().revision.main
                    );
                    told.extend(selection.events().map(|event| event.revision.main));
                }
            }
            other => panic!("{other:?}"),
        }
    }
    told
}

#[tokio::test]
async fn a_watch_of_new_events_gets_them() {
    let mut world = WatchFixture::running();
    world.put("k");
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, spec("k", "", 3));
    let last = world.put("k");
    world.put("other");
    assert_eq!(event_revisions_until(&mut subscriber, 1, last).await, [3]);
    expect_no_notice(&mut subscriber).await;
}

#[tokio::test]
async fn a_watch_from_the_past_continues_to_new_events_without_a_gap() {
    let mut world = WatchFixture::running();
    for _ in 0..2_500 {
        world.put("k");
    }
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, spec("k", "", 2));
    subscriber.add(2, spec("\0", "\0", 1_000));
    let mut told = event_revisions_until(&mut subscriber, 1, 2_501).await;
    for _ in 0..100 {
        world.put("k");
    }
    told.extend(event_revisions_until(&mut subscriber, 1, 2_601).await);
    assert_eq!(told, (2..=2_601).collect::<Vec<i64>>());
}

#[tokio::test]
async fn a_slow_subscriber_has_a_bounded_queue_and_misses_nothing() {
    let mut world =
        WatchFixture::with(WatchOptions { queued_deliveries: 4, ..WatchOptions::default() });
    let mut slow = world.hub.subscribe();
    slow.add(1, spec("k", "", 2));
    wait_until_attached(&mut slow).await;
    let last = put_slowly(&mut world, 20).await;
    assert!(!slow.is_detached(), "nobody has looked yet");
    assert_eq!(
        event_revisions_until(&mut slow, 1, 5).await,
        [2, 3, 4, 5],
        "what the queue had room for"
    );
    assert!(slow.is_detached(), "the queue was full");
    assert_eq!(event_revisions_until(&mut slow, 1, last).await, (6..=last).collect::<Vec<i64>>());
    wait_until_attached(&mut slow).await;
    let last = world.put("k");
    assert_eq!(event_revisions_until(&mut slow, 1, last).await, [last]);
}

#[tokio::test]
async fn a_replay_that_does_not_fit_the_queue_continues_from_the_store() {
    let mut world =
        WatchFixture::with(WatchOptions { queued_deliveries: 4, ..WatchOptions::default() });
    let mut subscriber = world.hub.subscribe();
    // The hub runs once here, and keeps all events from now on.
    tokio::task::yield_now().await;
    // The hub learns of the watch after all events have happened, and replays them.
    subscriber.add(1, spec("k", "", 2));
    let last = world.put_all(10);
    assert_eq!(
        event_revisions_until(&mut subscriber, 1, last).await,
        (2..=last).collect::<Vec<i64>>()
    );
    wait_until_attached(&mut subscriber).await;
}

#[tokio::test]
async fn events_that_the_ring_has_dropped_are_read_from_the_store() {
    // One of these numbers of puts is the borderline case: the newest event that the hub's ring of
    // recent events has dropped is the first one that the watch wants.
    for puts in 1..=10 {
        let mut world =
            WatchFixture::with(WatchOptions { ring_bytes: 300, ..WatchOptions::default() });
        let mut subscriber = world.hub.subscribe();
        tokio::task::yield_now().await;
        subscriber.add(1, spec("k", "", 2));
        let last = world.put_all(puts);
        assert_eq!(
            event_revisions_until(&mut subscriber, 1, last).await,
            (2..=last).collect::<Vec<i64>>()
        );
    }
}

#[tokio::test]
async fn events_of_an_overflowing_feed_are_read_from_the_store() {
    let mut world = WatchFixture::with(WatchOptions { feed_bytes: 300, ..WatchOptions::default() });
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, spec("k", "", 2));
    wait_until_attached(&mut subscriber).await;
    // The hub doesn't run between these puts.
    let last = world.put_all(10);
    assert_eq!(
        event_revisions_until(&mut subscriber, 1, last).await,
        (2..=last).collect::<Vec<i64>>()
    );
}

#[tokio::test]
async fn events_that_only_a_snapshot_contains_are_sent() {
    let mut other = WatchFixture::running();
    other.put_all(5);
    let mut world = WatchFixture::running();
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, spec("k", "", 2));
    wait_until_attached(&mut subscriber).await;
    let first = world.put("k");
    assert_eq!(event_revisions_until(&mut subscriber, 1, first).await, [2]);
    world.install(&other);
    assert_eq!(event_revisions_until(&mut subscriber, 1, 6).await, [3, 4, 5, 6]);
}

#[tokio::test]
async fn a_narrow_range_catches_up_in_order_of_revision() {
    let mut world = WatchFixture::running();
    for key in ["c", "a", "b", "c", "a"] {
        world.put(key);
    }
    for records_per_piece in [1, 2, 1_000] {
        let options = WatchOptions { records_per_piece, ..WatchOptions::default() };
        let hub = WatchHub { options, ..world.hub.clone() };
        let mut subscriber = hub.subscribe();
        subscriber.add(1, spec("a", "d", 2));
        assert_eq!(event_revisions_until(&mut subscriber, 1, 6).await, [2, 3, 4, 5, 6]);
    }
}

#[tokio::test]
async fn after_losing_its_feed_the_hub_makes_all_watches_catch_up() {
    let mut world = WatchFixture::running();
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, spec("k", "", 2));
    wait_until_attached(&mut subscriber).await;
    let first = world.put("k");
    event_revisions_until(&mut subscriber, 1, first).await;
    world.put("k");
    world.put("k");
    world.publisher.publish_replacement(world.writer.store().view().revision());
    let last = world.put("k");
    assert_eq!(event_revisions_until(&mut subscriber, 1, last).await, [3, 4, 5]);
}

#[tokio::test]
async fn a_watch_attached_after_a_feed_loss_gets_the_lost_events() {
    let mut world = WatchFixture::running();
    let mut subscriber = world.hub.subscribe();
    // The hub runs once here, and keeps all events from now on.
    tokio::task::yield_now().await;
    subscriber.add(1, spec("k", "", 2));
    let last = world.put_all(3);
    world.publisher.publish_replacement(last);
    assert_eq!(
        event_revisions_until(&mut subscriber, 1, last).await,
        (2..=last).collect::<Vec<i64>>()
    );
}

#[tokio::test]
async fn after_a_feed_loss_the_oldest_watch_catches_up_first() {
    let mut world = WatchFixture::running();
    let mut subscriber = world.hub.subscribe();
    for watch_id in 1..=20 {
        subscriber.add(watch_id, spec("k", "", 2));
    }
    wait_until_attached(&mut subscriber).await;
    world.put("k");
    world.publisher.publish_replacement(world.writer.store().view().revision());
    for expected in 1..=20 {
        let notice = next(&mut subscriber).await;
        let Notice::Events { watch_id, .. } = notice else { panic!("{notice:?}") };
        assert_eq!(watch_id, expected);
    }
}

#[tokio::test]
async fn a_watch_of_a_compacted_revision_ends_with_the_compact_revision() {
    let mut world = WatchFixture::running();
    for _ in 0..5 {
        world.put("k");
    }
    world.compact(4);
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, spec("k", "", 3));
    let notice = next(&mut subscriber).await;
    assert!(matches!(notice, Notice::Compacted { watch_id: 1, compact_revision: 4 }), "{notice:?}");
    assert!(subscriber.has(1), "its id is its own until it is removed");
    subscriber.request_progress().await;
    expect_no_notice(&mut subscriber).await;
    assert!(subscriber.remove(1).await);
    subscriber.add(1, spec("k", "", 4));
    assert_eq!(event_revisions_until(&mut subscriber, 1, 6).await, [4, 5, 6]);
}

#[tokio::test]
async fn catching_up_skips_no_event_after_a_concurrent_compaction() {
    let mut world = WatchFixture::running();
    world.put_all(5);
    let (store, before) = (world.writer.store(), world.writer.store().view());
    let size = PieceSize { records: 10, bytes: usize::MAX };
    world.compact(4);
    // The index has dropped changes before the compaction, but the older view still contains them.
    for (next, is_compacted) in [(3, true), (4, false)] {
        let piece = read_piece(&store, &before, &spec("k", "", next), next, size).unwrap();
        let said = matches!(piece, CatchUpPiece::Compacted { compacted: 4 });
        assert_eq!(said, is_compacted, "from {next}");
    }
}

#[tokio::test]
async fn past_events_are_read_in_pieces() {
    let mut world = WatchFixture::running();
    for key in 0..600 {
        world.put(&format!("k{key}"));
    }
    let options = WatchOptions { records_per_piece: 3, ..WatchOptions::default() };
    let hub = WatchHub { options, ..world.hub.clone() };
    // The first watched range has few keys, so its events are found by the index. The second has
    // many keys, so its events are read by revision.
    for (watched, last) in [(spec("k1", "k2", 190), 201), (spec("\0", "\0", 590), 601)] {
        let mut subscriber = hub.subscribe();
        subscriber.add(1, watched);
        let mut told = 0;
        while told < last {
            let Notice::Events { selection, .. } = next(&mut subscriber).await else { panic!() };
            assert!(selection.events().count() <= 3, "{}", selection.events().count());
            told = selection.events().last().unwrap().revision.main;
        }
    }
}

#[tokio::test]
async fn catching_up_continues_across_many_revisions_without_events() {
    let mut world = WatchFixture::running();
    world.change(|batch| {
        for _ in 0..70_000 {
            batch.put(Bytes::from_static(b"other"), Bytes::new(), 0);
            batch.end_request();
        }
    });
    let last = world.put("k");
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, spec("k", "", 2));
    assert_eq!(event_revisions_until(&mut subscriber, 1, last).await, [last]);
}

#[tokio::test]
async fn deletes_in_a_shared_row_are_sent_as_single_events() {
    let mut world = WatchFixture::running();
    for key in 0..600 {
        world.put(&format!("k{key:03}"));
    }
    let deleted = world.change(|batch| {
        let all = KeyRange::new(Bytes::from_static(b"k"), Bytes::from_static(b"l"));
        assert_eq!(batch.delete(&all), 600);
    });
    world.compact(deleted);
    // The first watched range has few keys, so its events are found by the index. The second has
    // many keys, so its events are read by revision.
    for (watched, keys) in
        [(spec("k2", "k3", deleted), 200..300), (spec("k", "l", deleted), 0..600)]
    {
        let mut subscriber = world.hub.subscribe();
        subscriber.add(1, watched);
        let Notice::Events { selection, .. } = next(&mut subscriber).await else { panic!() };
        let told: Vec<_> =
            selection.events().map(|event| (event.kind, event.key.clone())).collect();
        let all: Vec<_> =
            keys.map(|key| (EventKind::Delete, Bytes::from(format!("k{key:03}")))).collect();
        assert_eq!(told, all);
    }
}

#[tokio::test]
async fn a_delete_at_the_compacted_revision_is_still_sent() {
    let mut world = WatchFixture::running();
    world.put("k");
    let deleted = world.change(|batch| {
        batch.delete(&KeyRange::One(Bytes::from_static(b"k")));
    });
    world.put("l");
    world.compact(deleted);
    for watched in [spec("k", "", deleted), spec("\0", "\0", deleted)] {
        let mut subscriber = world.hub.subscribe();
        subscriber.add(1, watched);
        let Notice::Events { selection, .. } = next(&mut subscriber).await else { panic!() };
        let first = selection.events().next().unwrap();
        assert_eq!((first.revision.main, first.kind), (deleted, EventKind::Delete));
    }
}

#[tokio::test]
async fn a_watch_of_a_future_revision_gets_nothing_before_it() {
    let mut world = WatchFixture::running();
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, WatchSpec { progress_notify: true, ..spec("k", "", 5) });
    for _ in 0..2 {
        world.put("k");
    }
    subscriber.request_progress().await;
    subscriber.request_periodic_progress().await;
    expect_no_notice(&mut subscriber).await;
    for _ in 0..3 {
        world.put("k");
    }
    assert_eq!(event_revisions_until(&mut subscriber, 1, 6).await, [5, 6]);
}

#[tokio::test]
async fn a_watch_that_begins_within_a_batch_gets_no_earlier_events() {
    let mut world = WatchFixture::running();
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, spec("k", "", 3));
    wait_until_attached(&mut subscriber).await;
    let last = world.change(|batch| {
        for _ in 0..3 {
            batch.put(Bytes::from_static(b"k"), Bytes::from_static(b"v"), 0);
            batch.end_request();
        }
    });
    assert_eq!(event_revisions_until(&mut subscriber, 1, last).await, [3, 4]);
}

#[tokio::test]
async fn a_cancelled_watch_gets_nothing_and_frees_its_id() {
    let mut world = WatchFixture::running();
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, spec("k", "", 2));
    let first = world.put("k");
    event_revisions_until(&mut subscriber, 1, first).await;
    assert!(subscriber.remove(1).await);
    assert!(!subscriber.remove(1).await);
    world.put("k");
    expect_no_notice(&mut subscriber).await;
    subscriber.add(1, spec("k", "", 3));
    assert_eq!(event_revisions_until(&mut subscriber, 1, 3).await, [3]);
}

/// Waits until the hub and its queues hold no reference to the account.
async fn wait_until_forgotten(account: &Arc<MemoryAccount>) {
    for _ in 0..1_000 {
        if Arc::strong_count(account) == 1 {
            return;
        }
        tokio::task::yield_now().await;
    }
    panic!("{} have stayed", Arc::strong_count(account) - 1);
}

#[tokio::test]
async fn the_hub_keeps_nothing_of_an_ended_stream() {
    let world = WatchFixture::running();
    let account = MemoryAccount::unbounded();
    // The stream has more watches than the hub's command queue has room for. The stream ends either
    // after all of them are attached, or before.
    for is_attached in [true, false] {
        let mut subscriber = world.hub.subscribe_for(account.clone());
        for watch_id in 1..=i64::try_from(MAX_QUEUED_COMMANDS).unwrap() + 200 {
            subscriber.add(watch_id, spec("k", "", 0));
        }
        if is_attached {
            wait_until_attached(&mut subscriber).await;
        }
        drop(subscriber);
        wait_until_forgotten(&account).await;
    }
}

#[tokio::test]
async fn many_streams_that_end_at_once_are_all_detached() {
    let mut world = WatchFixture::running();
    let account = MemoryAccount::unbounded();
    let mut stays = world.hub.subscribe();
    stays.add(1, spec("k", "", 0));
    let mut streams = Vec::new();
    for _ in 0..MAX_QUEUED_DEPARTURES + 200 {
        let mut subscriber = world.hub.subscribe_for(account.clone());
        subscriber.add(1, spec("k", "", 0));
        wait_until_attached(&mut subscriber).await;
        streams.push(subscriber);
    }
    wait_until_attached(&mut stays).await;
    // The hub runs on this thread, so it handles the ended streams only after all of them are
    // dropped.
    drop(streams);
    wait_until_forgotten(&account).await;
    let last = world.put("k");
    assert_eq!(event_revisions_until(&mut stays, 1, last).await, [last]);
}

#[tokio::test]
async fn a_watch_is_detached_if_its_stream_ends_during_its_cancellation() {
    let world = WatchFixture::running();
    let account = MemoryAccount::unbounded();
    let mut subscriber = world.hub.subscribe_for(account.clone());
    subscriber.add(1, spec("k", "", 0));
    wait_until_attached(&mut subscriber).await;
    let mut other = world.hub.subscribe();
    for watch_id in 1..=i64::try_from(MAX_QUEUED_COMMANDS).unwrap() {
        other.add(watch_id, spec("k", "", 0));
    }
    let removed = futures_util::poll!(std::pin::pin!(subscriber.remove(1)));
    assert_eq!(removed, Poll::Pending, "there is no room to say so");
    drop(subscriber);
    wait_until_forgotten(&account).await;
}

#[tokio::test]
async fn filters_leave_out_puts_or_deletes() {
    let mut world = WatchFixture::running();
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, WatchSpec { no_put: true, ..spec("k", "", 2) });
    subscriber.add(2, WatchSpec { no_delete: true, ..spec("k", "", 2) });
    world.put("k");
    world.change(|batch| {
        batch.delete(&KeyRange::One(Bytes::from_static(b"k")));
    });
    let mut told = Vec::new();
    for _ in 0..2 {
        let Notice::Events { watch_id, selection, .. } = next(&mut subscriber).await else {
            panic!()
        };
        told.extend(selection.events().map(|event| (watch_id, event.kind)));
    }
    told.sort_by_key(|(watch_id, _)| *watch_id);
    assert_eq!(told, [(1, EventKind::Delete), (2, EventKind::Put)]);
}

#[tokio::test]
async fn all_changes_of_a_revision_are_sent_together_and_in_order() {
    let mut world = WatchFixture::running();
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, spec("\0", "\0", 2));
    world.change(|batch| {
        for number in (0..1_500).rev() {
            let key = Bytes::from(format!("{number:04}"));
            batch.put(key, Bytes::from_static(b"v"), 0);
        }
    });
    world.put("z");
    for _ in 0..2 {
        let mut late = world.hub.subscribe();
        late.add(1, spec("\0", "\0", 2));
        for subscriber in [&mut subscriber, &mut late] {
            let Notice::Events { selection, .. } = next(subscriber).await else { panic!() };
            let subs: Vec<u32> =
                selection.events().map(|event| event.revision.sub).take(1_500).collect();
            assert_eq!(subs, (0..1_500).collect::<Vec<u32>>());
        }
        world.put("y");
        subscriber = world.hub.subscribe();
        subscriber.add(1, spec("\0", "\0", 2));
    }
}

#[tokio::test]
async fn a_previous_value_is_the_value_before_the_revision() {
    use node_proto::etcdserverpb::WatchResponse;
    use prost::Message as _;
    let mut world = WatchFixture::running();
    world.put("k");
    world.put("k");
    world.change(|batch| {
        batch.delete(&KeyRange::One(Bytes::from_static(b"k")));
    });
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, spec("k", "", 2));
    let Notice::Events { selection, .. } = next(&mut subscriber).await else { panic!() };
    let wire = selection.encoded_with_previous(&world.writer.store()).concat();
    let events = WatchResponse::decode(&wire[..]).unwrap().events;
    let previous: Vec<_> =
        events.iter().map(|event| event.prev_kv.as_ref().map(|kv| kv.mod_revision)).collect();
    assert_eq!(previous, [None, Some(2), Some(3)]);
    assert_eq!(events[2].r#type, 1);
    assert_eq!(events[2].kv.as_ref().unwrap().mod_revision, 4);
    let plain = WatchResponse::decode(&selection.encoded().concat()[..]).unwrap().events;
    assert!(plain.iter().all(|event| event.prev_kv.is_none()));
    assert_eq!(plain[1].kv.as_ref().unwrap().version, 2);
}

#[tokio::test]
async fn queued_events_are_charged_and_a_slow_client_misses_nothing() {
    let bounds = MemoryBounds { per_connection: 4_000, total: 4_000, guaranteed: 0 };
    let account = MemoryBudget::new(bounds).open_account(std::net::Ipv4Addr::LOCALHOST.into());
    let mut world = WatchFixture::running();
    let mut streams = [1, 2].map(|_| world.hub.subscribe_for(account.clone()));
    for slow in &mut streams {
        slow.add(1, spec("k", "", 2));
        wait_until_attached(slow).await;
    }
    let last = put_slowly(&mut world, 100).await;
    assert!((1_000..=2_000).contains(&account.held()), "half of it: {}", account.held());
    for slow in &mut streams {
        assert_eq!(event_revisions_until(slow, 1, last).await, (2..=last).collect::<Vec<i64>>());
        wait_until_attached(slow).await;
    }
    assert_eq!(account.held(), 0);
}

#[tokio::test]
async fn a_piece_of_past_events_ends_at_the_byte_limit() {
    for key in ["k", "\0"] {
        let options = WatchOptions { bytes_per_piece: 100, ..WatchOptions::default() };
        let mut world = WatchFixture::with(options);
        let last = world.put_all(50);
        let mut subscriber = world.hub.subscribe();
        subscriber.add(1, spec(key, if key == "k" { "" } else { "\0" }, 2));
        let Notice::Events { selection, .. } = next(&mut subscriber).await else { panic!() };
        assert!((1..20).contains(&selection.len()), "{}", selection.len());
        let first = i64::try_from(selection.len()).unwrap() + 2;
        let told = event_revisions_until(&mut subscriber, 1, last).await;
        assert_eq!(told, (first..=last).collect::<Vec<i64>>());
    }
}
