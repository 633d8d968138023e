use super::*;

/// Body of the given parts. A part without bytes is an error.
#[derive(Debug)]
struct Parts(VecDeque<Option<Bytes>>);

impl Body for Parts {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let part = self.0.pop_front();
        Poll::Ready(part.map(|part| part.map(Frame::data).ok_or_else(|| "cut off".into())))
    }
}

fn body(parts: &[Option<&[u8]>]) -> ReplayedBody<Parts> {
    let parts = parts.iter().map(|part| part.map(Bytes::copy_from_slice));
    ReplayedBody::unread(Parts(parts.collect()))
}

/// Reads the rest of a body. The second value says whether it ended with an error.
async fn rest(mut body: ReplayedBody<Parts>) -> (Vec<u8>, bool) {
    let mut bytes = Vec::new();
    while let Some(frame) =
        std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await
    {
        match frame {
            Ok(frame) => bytes.extend_from_slice(&frame.into_data().unwrap()),
            Err(_) => return (bytes, true),
        }
    }
    (bytes, false)
}

const MAX: usize = 10;

#[tokio::test]
async fn a_whole_message_is_read_in_any_number_of_parts() {
    let whole: &[u8] = &[0, 0, 0, 0, 3, b'a', b'b', b'c'];
    let (head, tail) = whole.split_at(6);
    let cases: [&[Option<&[u8]>]; 4] = [
        &[Some(whole)],
        &[Some(head), Some(tail)],
        &[Some(&whole[..2]), Some(&[]), Some(&whole[2..]), Some(&[])],
        &[Some(&[]), Some(whole)],
    ];
    for parts in cases {
        assert_eq!(body(parts).read_message(MAX).await.as_deref(), Some(whole), "{parts:?}");
    }
    let empty: &[u8] = &[0; 5];
    assert_eq!(body(&[Some(empty)]).read_message(MAX).await.as_deref(), Some(empty));
}

#[tokio::test]
async fn another_body_is_returned_again_from_its_first_byte() {
    let cases: [&[Option<&[u8]>]; 7] = [
        &[],
        &[Some(&[0, 0])],
        &[Some(&[0, 0, 0, 0, 3, b'a']), Some(b"b")],
        &[Some(&[0, 0, 0, 0, 1, b'a']), Some(&[0, 0, 0, 0, 1, b'b'])],
        &[Some(&[1, 0, 0, 0, 1, b'a'])],
        &[Some(&[0, 0, 0, 0, 11]), Some(b"a"), Some(b"b")],
        &[Some(&[0, 0, 0, 0, 2, b'a']), None],
    ];
    for parts in cases {
        let mut read = body(parts);
        assert_eq!(read.read_message(MAX).await, None, "{parts:?}");
        let bytes = parts.iter().flatten().copied().flatten().copied().collect::<Vec<u8>>();
        assert_eq!(rest(read).await, (bytes, parts.contains(&None)), "{parts:?}");
    }
}

#[tokio::test]
async fn the_body_of_a_decoded_request_is_dropped_before_the_call_is_answered() {
    let path = "/etcdserverpb.KV/Range";
    let mut whole = Some(body(&[Some(&[0; 5]), Some(&[])]));
    assert!(take_request(&mut whole, path, MAX).await.is_some());
    assert!(whole.is_none(), "its charge has ended");
    let malformed: &[u8] = &[0, 0, 0, 0, 1, 0xff];
    let mut kept = Some(body(&[Some(malformed)]));
    assert!(take_request(&mut kept, path, MAX).await.is_none());
    assert_eq!(rest(kept.unwrap()).await, (malformed.to_vec(), false));
}

#[test]
fn a_message_in_many_frames_takes_no_more_memory_than_its_length() {
    const LENGTH: usize = 100_000;
    let mut received = Received::default();
    let header = [&[0], &u32::try_from(LENGTH).unwrap().to_be_bytes()[..]].concat();
    received.add(header.into(), LENGTH);
    for _ in 0..LENGTH / 10 {
        received.add(Bytes::from_static(&[7; 10]), LENGTH);
    }
    assert_eq!(
        (received.left(LENGTH), received.all.len()),
        (Some(0), LENGTH + MESSAGE_HEADER_BYTES)
    );
    assert!(
        received.all.capacity() <= LENGTH + 2 * MESSAGE_HEADER_BYTES,
        "{}",
        received.all.capacity()
    );
}

/// Returns the size of the future that a function returns.
fn future_bytes<A, B, C, D, F>(_: impl FnOnce(A, B, C, D) -> F) -> usize {
    size_of::<F>()
}

/// Each call in progress takes this memory.
#[test]
fn a_call_in_progress_takes_a_few_kibibytes() {
    let bytes = future_bytes(
        |kv: &'static DirectKv,
         request: Request<Parts>,
         client: &'static ClientConnection,
         answers: &'static Arc<AnswerAccounting>| answer(kv, request, client, answers),
    );
    assert!(bytes < 4 * 1024, "{bytes} bytes");
}
