use std::future::poll_fn;

use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};

use super::*;

/// Time limit after which a test fails. It is much longer than any step takes.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);

/// Polls the connection until it has nothing to do, and returns the bytes that the other end
/// received.
async fn run<F: Future>(
    writes: &CollectedWrites<DuplexStream>,
    mut connection: Pin<&mut F>,
    other: &mut DuplexStream,
) -> Vec<u8> {
    let mut received = Vec::new();
    let turns = poll_fn(|context| writes.poll(connection.as_mut(), context));
    let read = other.read_buf(&mut received);
    tokio::select! {
        biased;
        () = turns => {}
        count = read => assert!(count.unwrap() > 0),
    }
    received
}

#[tokio::test]
async fn writes_between_two_flushes_are_sent_together_and_none_is_lost() {
    let (stream, mut other) = duplex(1 << 20);
    let (mut stream, writes) = collect(stream);
    let mut connection = std::pin::pin!(async {
        for part in [b"ab".as_slice(), b"c", b"de"] {
            stream.write_all(part).await.unwrap();
            stream.flush().await.unwrap();
        }
        let large = vec![7; LARGE_WRITE_BYTES];
        stream.write_all(&large).await.unwrap();
        std::future::pending::<()>().await;
    });
    let received = run(&writes, connection.as_mut(), &mut other).await;
    assert_eq!(received[..5], *b"abcde");
    let mut rest = vec![0; LARGE_WRITE_BYTES + 5 - received.len()];
    other.read_exact(&mut rest).await.unwrap();
    assert!(rest.iter().all(|byte| *byte == 7));
}

#[tokio::test]
async fn bytes_wait_for_the_turn_after_the_next_one_if_a_request_was_received() {
    let (stream, mut other) = duplex(1 << 20);
    let (mut stream, writes) = collect(stream);
    other.write_all(b"request").await.unwrap();
    let mut turns = 0;
    let mut connection = std::pin::pin!(async {
        let mut request = [0; 7];
        stream.read_exact(&mut request).await.unwrap();
        stream.write_all(b"ack ").await.unwrap();
        tokio::task::yield_now().await;
        stream.write_all(b"answer").await.unwrap();
        std::future::pending::<()>().await;
    });
    let mut received = Vec::new();
    let driven = poll_fn(|context| {
        turns += 1;
        writes.poll(connection.as_mut(), context)
    });
    tokio::select! {
        biased;
        () = driven => panic!("the connection doesn't end"),
        count = other.read_buf(&mut received) => assert!(count.unwrap() > 0),
    }
    assert_eq!((received.as_slice(), turns), (b"ack answer".as_slice(), 3));
}

#[tokio::test]
async fn a_slow_reader_holds_back_the_writer_and_gets_all_bytes_before_the_end() {
    const BYTES: usize = 3 * MAX_COLLECTED_BYTES;
    let (stream, mut other) = duplex(1_000);
    let (mut stream, writes) = collect(stream);
    let mut connection = std::pin::pin!(async {
        for number in 0..BYTES {
            stream.write_all(&[number.to_le_bytes()[0]]).await.unwrap();
        }
        stream.shutdown().await.unwrap();
    });
    let held = poll_fn(|context| Poll::Ready(writes.poll(connection.as_mut(), context))).await;
    assert!(held.is_pending() && lock(&writes.0).collected.len() <= MAX_COLLECTED_BYTES);
    let turns = poll_fn(|context| writes.poll(connection.as_mut(), context));
    let mut received = Vec::new();
    let (_, count) = tokio::join!(turns, other.read_to_end(&mut received));
    assert_eq!(count.unwrap(), BYTES);
    assert!(received.iter().enumerate().all(|(n, byte)| *byte == n.to_le_bytes()[0]));
}

#[tokio::test]
async fn the_connection_ends_if_its_bytes_cannot_be_written() {
    let (stream, other) = duplex(1_000);
    let (mut stream, writes) = collect(stream);
    drop(other);
    let mut connection = std::pin::pin!(async {
        stream.write_all(b"lost").await.unwrap();
        std::future::pending::<()>().await;
    });
    poll_fn(|context| writes.poll(connection.as_mut(), context)).await;
}

#[tokio::test]
async fn a_client_that_never_stops_sending_gets_its_answers() {
    let (stream, mut other) = duplex(16);
    let (stream, writes) = collect(stream);
    let (mut from_client, mut to_client) = tokio::io::split(stream);
    let mut connection = std::pin::pin!(async {
        loop {
            let mut request = [0; 1];
            from_client.read_exact(&mut request).await.unwrap();
            to_client.write_all(&request).await.unwrap();
            tokio::task::yield_now().await;
        }
    });
    let turns = poll_fn(|context| writes.poll(connection.as_mut(), context));
    let client = async {
        let mut answers = Vec::new();
        while answers.len() < 100 {
            other.write_all(b"x").await.unwrap();
            other.write_all(b"x").await.unwrap();
            assert!(other.read_buf(&mut answers).await.unwrap() > 0);
        }
    };
    tokio::select! {
        () = turns => panic!("the connection doesn't end"),
        () = client => {}
    }
}

/// Stream that accepts more bytes than its socket does, as TLS streams do, and sends the rest when
/// it is flushed.
struct BufferingStream {
    inner: DuplexStream,
    bytes: BytesMut,
}

impl BufferingStream {
    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.bytes.is_empty() {
            let sent = ready!(Pin::new(&mut self.inner).poll_write(context, &self.bytes))?;
            self.bytes.advance(sent);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for BufferingStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

impl AsyncWrite for BufferingStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.bytes.extend_from_slice(data);
        match self.poll_send(context) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Ready(Ok(())) | Poll::Pending => Poll::Ready(Ok(data.len())),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_send(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_send(context))?;
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

#[tokio::test]
async fn bytes_that_the_stream_itself_buffers_are_sent_once_the_reader_continues() {
    for length in [LARGE_WRITE_BYTES - 1, LARGE_WRITE_BYTES] {
        let (inner, mut other) = duplex(1_000);
        let (mut stream, writes) = collect(BufferingStream { inner, bytes: BytesMut::new() });
        let mut connection = std::pin::pin!(async {
            stream.write_all(&vec![7; length]).await.unwrap();
            stream.flush().await.unwrap();
            std::future::pending::<()>().await;
        });
        let turns = poll_fn(|context| writes.poll(connection.as_mut(), context));
        let mut received = vec![0; length];
        tokio::select! {
            () = turns => panic!("the connection doesn't end"),
            read = tokio::time::timeout(PATIENCE, other.read_exact(&mut received)) => {
                read.expect("all bytes come").unwrap();
            }
        }
    }
}

#[tokio::test]
async fn a_connection_that_ends_without_a_shutdown_sends_its_last_bytes() {
    let (stream, mut other) = duplex(1_000);
    let (mut stream, writes) = collect(stream);
    let mut connection = std::pin::pin!(async { stream.write_all(b"last").await.unwrap() });
    poll_fn(|context| writes.poll(connection.as_mut(), context)).await;
    let mut received = [0; 4];
    tokio::time::timeout(PATIENCE, other.read_exact(&mut received)).await.unwrap().unwrap();
    assert_eq!(&received, b"last");
}

#[tokio::test]
async fn a_connection_keeps_little_memory_after_its_writes() {
    let (stream, _other) = duplex(1 << 20);
    let (mut stream, writes) = collect(stream);
    let mut connection = std::pin::pin!(async {
        for _ in 0..3 {
            stream.write_all(&[7; LARGE_WRITE_BYTES - 1]).await.unwrap();
        }
        std::future::pending::<()>().await;
    });
    let turn = poll_fn(|context| Poll::Ready(writes.poll(connection.as_mut(), context))).await;
    let shared = lock(&writes.0);
    assert!(turn.is_pending() && shared.collected.is_empty());
    assert!(shared.collected.capacity() <= KEPT_CAPACITY, "{}", shared.collected.capacity());
}
