//! Tests that progress is reported to the watches that want it, and never before their events.

use super::*;

#[tokio::test]
async fn progress_does_not_overtake_lost_events_that_are_read_from_the_store() {
    let mut world = WatchFixture::running();
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, spec("k", "", 2));
    wait_until_attached(&mut subscriber).await;
    let last = world.put_all(2);
    world.publisher.publish_replacement(last);
    // The hub learns of the lost events and of this progress request at the same time.
    subscriber.request_progress().await;
    assert_eq!(event_revisions_until(&mut subscriber, 1, last).await, [2, 3]);
}

#[tokio::test]
async fn progress_dropped_by_a_full_queue_is_sent_after_the_queued_events() {
    let mut world =
        WatchFixture::with(WatchOptions { queued_deliveries: 4, ..WatchOptions::default() });
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, spec("k", "", 2));
    wait_until_attached(&mut subscriber).await;
    let last = put_slowly(&mut world, 4).await;
    subscriber.request_progress().await;
    tokio::task::yield_now().await;
    assert_eq!(event_revisions_until(&mut subscriber, 1, last).await, [2, 3, 4, 5]);
    let notice = next(&mut subscriber).await;
    assert!(matches!(notice, Notice::Progress { revision: 5 }), "{notice:?}");
}

#[tokio::test]
async fn progress_never_overtakes_events() {
    let mut world = WatchFixture::running();
    for _ in 0..3_000 {
        world.put("k");
    }
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, spec("k", "", 2));
    subscriber.add(2, spec("l", "", 0));
    // No progress is sent while a watch catches up, however often it is requested.
    let mut told = 1;
    while told < 3_001 {
        subscriber.request_progress().await;
        match next(&mut subscriber).await {
            Notice::Events { watch_id: 1, selection, .. } => {
                told = selection.events().last().unwrap().revision.main;
            }
            other => panic!("{other:?}"),
        }
    }
    wait_until_attached(&mut subscriber).await;
    world.put("l");
    subscriber.request_progress().await;
    assert_eq!(event_revisions_until(&mut subscriber, 2, 3_002).await, [3_002]);
    let notice = next(&mut subscriber).await;
    assert!(matches!(notice, Notice::Progress { revision: 3_002 }), "{notice:?}");
}

#[tokio::test]
async fn progress_is_sent_to_a_watch_of_the_next_event_but_not_of_the_future() {
    let world = WatchFixture::running();
    let mut subscriber = world.hub.subscribe();
    subscriber.request_progress().await;
    expect_no_notice(&mut subscriber).await;
    assert_eq!(subscriber.add(1, spec("k", "", 0)), 1);
    subscriber.request_progress().await;
    let notice = next(&mut subscriber).await;
    assert!(matches!(notice, Notice::Progress { revision: 1 }), "{notice:?}");
    subscriber.add(2, spec("k", "", 2));
    subscriber.request_progress().await;
    expect_no_notice(&mut subscriber).await;
}

#[tokio::test]
async fn periodic_progress_is_not_sent_to_a_watch_that_is_behind() {
    let mut world = WatchFixture::running();
    world.put_all(3);
    let mut subscriber = world.hub.subscribe();
    subscriber.add(1, WatchSpec { progress_notify: true, ..spec("k", "", 2) });
    subscriber.request_periodic_progress().await;
    // The hub answers before the watch has read anything.
    tokio::task::yield_now().await;
    assert_eq!(event_revisions_until(&mut subscriber, 1, 4).await, [2, 3, 4]);
    expect_no_notice(&mut subscriber).await;
}

/// Requests progress first, then attaches a second watch and makes two events. The hub receives all
/// of this at once, the request first.
async fn request_before_attach(
    ask: impl AsyncFnOnce(&mut Subscriber),
) -> (WatchFixture, Subscriber) {
    let mut world = WatchFixture::running();
    let mut subscriber = world.hub.subscribe();
    let asks = |key| WatchSpec { progress_notify: true, ..spec(key, "", 0) };
    subscriber.add(1, asks("first"));
    wait_until_attached(&mut subscriber).await;
    ask(&mut subscriber).await;
    subscriber.add(2, asks("k"));
    world.put_all(2);
    (world, subscriber)
}

#[tokio::test]
async fn progress_requested_before_a_watch_attached_comes_after_its_events() {
    let ask = async |subscriber: &mut Subscriber| subscriber.request_progress().await;
    let (_world, mut subscriber) = request_before_attach(ask).await;
    assert_eq!(event_revisions_until(&mut subscriber, 2, 3).await, [2, 3]);
    let notice = next(&mut subscriber).await;
    assert!(matches!(notice, Notice::Progress { revision: 3 }), "{notice:?}");
    expect_no_notice(&mut subscriber).await;
}

#[tokio::test]
async fn periodic_progress_requested_before_a_watch_attached_does_not_cover_it() {
    let ask = async |subscriber: &mut Subscriber| subscriber.request_periodic_progress().await;
    let (_world, mut subscriber) = request_before_attach(ask).await;
    let notice = next(&mut subscriber).await;
    assert!(matches!(notice, Notice::WatchProgress { watch_id: 1, revision: 3 }), "{notice:?}");
    assert_eq!(event_revisions_until(&mut subscriber, 2, 3).await, [2, 3]);
    expect_no_notice(&mut subscriber).await;
}

#[tokio::test]
async fn periodic_progress_is_sent_only_to_quiet_watches_that_want_it() {
    let mut world = WatchFixture::running();
    let mut subscriber = world.hub.subscribe();
    let asks = |key| WatchSpec { progress_notify: true, ..spec(key, "", 2) };
    subscriber.add(1, asks("busy"));
    subscriber.add(2, asks("quiet"));
    subscriber.add(3, spec("silent", "", 2));
    wait_until_attached(&mut subscriber).await;
    let last = world.put("busy");
    event_revisions_until(&mut subscriber, 1, last).await;
    subscriber.request_periodic_progress().await;
    let notice = next(&mut subscriber).await;
    assert!(matches!(notice, Notice::WatchProgress { watch_id: 2, revision: 2 }), "{notice:?}");
    expect_no_notice(&mut subscriber).await;
    // Neither watch has got an event since the last notification.
    subscriber.request_periodic_progress().await;
    for expected in [1, 2] {
        let notice = next(&mut subscriber).await;
        let Notice::WatchProgress { watch_id, revision: 2 } = notice else { panic!("{notice:?}") };
        assert_eq!(watch_id, expected);
    }
}
