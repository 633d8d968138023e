//! Tests of wrong watch responses.

use super::*;

/// Returns the responses of the history's watcher in its second stream, which has three revisions.
fn second_stream(history: &mut RecordedHistory) -> &mut Vec<(Time, WatchResponse)> {
    &mut history.watchers[0].streams[1].responses
}

#[test]
fn a_missing_repeated_or_misplaced_event_is_found() {
    let wrong: [(Rule, HistoryMutation); 8] = [
        (Rule::WatchInOrder, |history| _ = second_stream(history).remove(1)),
        (Rule::WatchInOrder, |history| second_stream(history).swap(1, 2)),
        (Rule::WatchInOrder, |history| {
            let repeated = second_stream(history)[1].clone();
            second_stream(history).insert(2, repeated);
        }),
        (Rule::WatchInOrder, |history| {
            // The second stream repeats a response of the first stream.
            let repeated = history.watchers[0].streams[0].responses[1].clone();
            second_stream(history).insert(1, repeated);
        }),
        (Rule::WatchProgress, |history| _ = second_stream(history).remove(3)),
        (Rule::WatchEverything, |history| second_stream(history).truncate(3)),
        (Rule::WatchEverything, |history| history.watchers[0].streams.clear()),
        (Rule::WatchInOrder, |history| {
            let header = second_stream(history)[2].1.header.as_mut();
            header.expect("it has one").revision -= 1;
        }),
    ];
    for (number, (expected, change)) in wrong.into_iter().enumerate() {
        let mut history = sample_history();
        change(&mut history);
        assert_eq!(violated_rule(&history), expected, "{number}");
    }
}

#[test]
fn an_event_after_the_last_revision_shows_missing_earlier_events() {
    // The client gave up its last put, which was applied after the last read. No progress
    // notification follows.
    let after_the_end = |request: WatchCreateRequest| {
        let mut builder = HistoryBuilder::default();
        builder.add_answered(put("a", "1"));
        builder.add_answered(put("b", "2"));
        builder.add_applied_unknown(put("a", "3"));
        builder.add_watcher(None, request);
        let mut history = builder.finish();
        history.last_revision -= 1;
        second_stream(&mut history).pop();
        history
    };
    let one_key = WatchCreateRequest { key: "a".into(), ..WatchCreateRequest::default() };
    judge(&after_the_end(one_key)).expect("the watcher of one key misses no change of it");
    let mut history = after_the_end(everything());
    second_stream(&mut history).remove(1);
    assert_eq!(violated_rule(&history), Rule::WatchInOrder);
}

#[test]
fn a_split_or_incomplete_revision_is_found() {
    // The transaction's two events arrive in two responses, or the second event never arrives.
    for is_told in [true, false] {
        let mut history = sample_history();
        let responses = second_stream(&mut history);
        let at = responses.iter().position(|(_, response)| response.events.len() == 2);
        let at = at.expect("the transaction has two");
        let mut second = responses[at].clone();
        second.1.events.remove(0);
        responses[at].1.events.remove(1);
        if is_told {
            responses.insert(at + 1, second);
        }
        // Another watcher of all keys shows what the revision contains.
        let whole = sample_history().watchers.remove(0);
        history.watchers.insert(0, whole);
        assert_eq!(violated_rule(&history), Rule::WatchWholeRevisions);
    }
}

#[test]
fn a_false_progress_notification_is_found() {
    // The progress notification arrives before the last event instead of after that event.
    let mut history = sample_history();
    second_stream(&mut history).swap(3, 4);
    assert_eq!(violated_rule(&history), Rule::WatchProgress);
    // No progress notification follows the missing event. But the next stream starts after the
    // missing event's revision.
    let mut history = sample_history();
    history.watchers[0].streams[0].responses.remove(2);
    assert_eq!(violated_rule(&history), Rule::WatchProgress);
}

#[test]
fn an_event_that_differs_from_the_change_is_found() {
    let wrong: [fn(&mut Event); 5] = [
        |event| event.kv.as_mut().expect("it has one").value = "0".into(),
        |event| event.kv.as_mut().expect("it has one").version += 1,
        |event| event.kv.as_mut().expect("it has one").lease = 1,
        |event| event.r#type = EventType::Delete.into(),
        |event| event.prev_kv = None,
    ];
    for change in wrong {
        let mut history = sample_history();
        change(&mut second_stream(&mut history)[1].1.events[0]);
        assert_eq!(violated_rule(&history), Rule::WatchEvents);
    }
    let mut history = sample_history();
    history.watchers[0].request.prev_kv = false;
    assert_eq!(violated_rule(&history), Rule::WatchEvents, "no previous value is wanted");
    let mut history = sample_history();
    history.watchers[0].request.filters = vec![FilterType::Noput.into()];
    let evidence = sample_history().watchers.remove(0);
    history.watchers.push(evidence);
    assert_eq!(violated_rule(&history), Rule::WatchEvents, "puts are not wanted");
}
