//! Tests of answers whose bodies are polled by hand, in place of clients that read or don't read.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::task::Waker;

use super::*;

const MB: usize = 1 << 20;

/// Response body that yields these pieces and then never ends.
struct ChunkBody(VecDeque<Bytes>);

impl Body for ChunkBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.0.pop_front() {
            Some(piece) => Poll::Ready(Some(Ok(Frame::data(piece)))),
            None => Poll::Pending,
        }
    }
}

fn connection(room: &Arc<MemoryBudget>) -> Arc<AnswerAccounting> {
    AnswerAccounting::open(room, [10, 0, 0, 1].into(), Arc::default())
}

fn whole(answers: &Arc<AnswerAccounting>, bytes: usize) -> Response<AnswerBody> {
    answers.count(vec![b'x'; bytes].into_response())
}

fn stream(answers: &Arc<AnswerAccounting>, pieces: usize) -> AnswerBody {
    let pieces = (0..pieces).map(|_| Bytes::from(vec![b'x'; MB])).collect();
    answers.count(Response::new(axum::body::Body::new(ChunkBody(pieces)))).into_body()
}

/// Returns the bytes that were written and not passed to the HTTP library yet.
fn rest(body: &AnswerBody) -> &Bytes {
    match body {
        AnswerBody::Any(body) => &body.rest,
        AnswerBody::Message(body) => &body.rest,
    }
}

/// Returns the next part that the client could read, if there is one.
fn next(body: &mut AnswerBody) -> Option<Bytes> {
    let mut context = Context::from_waker(Waker::noop());
    match Pin::new(body).poll_frame(&mut context) {
        Poll::Ready(Some(Ok(frame))) => frame.into_data().ok(),
        Poll::Ready(Some(Err(error))) => panic!("{error}"),
        Poll::Ready(None) | Poll::Pending => None,
    }
}

#[test]
fn an_answer_is_charged_until_its_last_byte_is_sent() {
    let room = new_budget();
    let answers = connection(&room);
    let mut body = whole(&answers, 10 * PART_BYTES).into_body();
    assert_eq!(body.size_hint().exact(), Some(10 * PART_BYTES as u64));
    let parts: Vec<_> = std::iter::from_fn(|| next(&mut body)).collect();
    assert_eq!(parts.iter().map(Bytes::len).collect::<Vec<_>>(), [PART_BYTES; 10]);
    assert!(body.is_end_stream());
    drop(body);
    assert_eq!(room.held(), 10 * PART_BYTES, "the parts are still to be sent");
    drop(parts);
    assert_eq!(room.held(), 0);
}

#[test]
fn a_client_that_leaves_too_many_answers_unread_is_refused_more() {
    let answers = connection(&new_budget());
    let all: Vec<_> = (0..30).map(|_| whole(&answers, 10 * MB)).collect();
    let taken = all.iter().filter(|answer| answer.status() == StatusCode::OK).count();
    assert_eq!(taken, CONNECTION_BYTES / 8 * 7 / (10 * MB));
    assert_eq!(whole(&answers, 1_000).status(), StatusCode::OK, "a small one");
    drop(all);
    assert_eq!(whole(&answers, 10 * MB).status(), StatusCode::OK);
}

#[tokio::test]
async fn no_more_of_a_stream_is_written_while_its_client_does_not_read() {
    let room = new_budget();
    let answers = connection(&room);
    let mut streams: Vec<_> = (0..500).map(|_| stream(&answers, 2)).collect();
    let mut parts: Vec<_> = streams.iter_mut().filter_map(next).collect();
    assert!(parts.len() < 260 && room.held() <= CONNECTION_BYTES, "{}", parts.len());
    assert!(streams.iter_mut().skip(300).all(|stream| next(stream).is_none()));
    // Once the client has read parts of some streams, there is room for the next parts of other
    // streams.
    parts.truncate(100);
    for stream in &mut streams[..150] {
        while next(stream).is_some_and(|_| !rest(stream).is_empty()) {}
    }
    tokio::time::sleep(2 * RETRY_INTERVAL).await;
    assert!(next(&mut streams[400]).is_some());
}

#[test]
fn a_connection_without_unread_pieces_always_gets_room_for_one() {
    let room = new_budget();
    let other = connection(&room);
    let _other: Vec<_> = (0..30).map(|_| whole(&other, 10 * MB)).collect();
    let another = connection(&room);
    let _another: Vec<_> = (0..30).map(|_| whole(&another, 10 * MB)).collect();
    let answers = connection(&room);
    let (mut first, mut second) = (stream(&answers, 1), stream(&answers, 1));
    let part = next(&mut first);
    assert!(part.is_some());
    assert!(next(&mut first).is_some(), "its further parts are there already");
    assert!(!rest(&second).is_empty() || next(&mut second).is_none() || room.held() < ALL_BYTES);
}

#[tokio::test(start_paused = true)]
async fn a_client_counts_as_stalled_only_if_it_reads_nothing() {
    let patience = Duration::from_millis(200);
    let answers = connection(&new_budget());
    let mut body = whole(&answers, 10 * PART_BYTES).into_body();
    let _stream = stream(&answers, 0);
    let slow = async {
        while next(&mut body).is_some() {
            sleep(patience / 2).await;
        }
        drop(body);
        // The answer is complete now. Only the open stream is left, and a client needn't read that.
        sleep(3 * patience).await;
    };
    tokio::select! {
        () = answers.wait_until_stalled(patience) => panic!("it was sent away"),
        () = slow => {}
    }
    let start = Instant::now();
    let _unread = whole(&answers, 1);
    answers.wait_until_stalled(patience).await;
    assert!(start.elapsed() >= patience);
}
