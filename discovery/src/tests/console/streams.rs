//! The event streams by which pages follow changes.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use super::super::agent::TestAgent;
use super::super::support::{WAIT_TIMEOUT, wait_for_value, wait_until};
use super::{Browser, ConsoleFixture};

/// A stream of server-sent events.
struct EventStream {
    stream: TlsStream<TcpStream>,
    received: String,
}

impl EventStream {
    async fn open(browser: &Browser, path: &str) -> Self {
        let mut stream = browser.connect().await;
        stream.write_all(browser.request("GET", path, &[]).as_bytes()).await.unwrap();
        EventStream { stream, received: String::new() }
    }

    /// Reads until the received text satisfies `wanted`, or the stream ends. Returns whether it
    /// ended.
    async fn read_until(&mut self, wanted: impl Fn(&str) -> bool) -> bool {
        let read = async {
            while !wanted(&self.received) {
                let mut part = [0; 4_096];
                match self.stream.read(&mut part).await {
                    Ok(0) | Err(_) => return true,
                    Ok(read) => self.received.push_str(&String::from_utf8_lossy(&part[..read])),
                }
            }
            false
        };
        tokio::time::timeout(WAIT_TIMEOUT, read).await.expect("the stream says nothing")
    }

    /// Reads everything that comes within this time.
    async fn read_for(&mut self, time: Duration) {
        let read = async {
            let mut part = [0; 4_096];
            while let Ok(read @ 1..) = self.stream.read(&mut part).await {
                self.received.push_str(&String::from_utf8_lossy(&part[..read]));
            }
        };
        let _ = tokio::time::timeout(time, read).await;
    }

    fn events(text: &str) -> usize {
        text.matches("event: changed").count()
    }
}

#[tokio::test]
async fn a_stream_says_that_its_cluster_has_changed_and_ends_with_the_process() {
    let world = ConsoleFixture::with_args(|mut args| {
        args.times.sweep = Duration::from_secs(3_600);
        args
    })
    .await;
    let statement = world.world.cluster(&world.owner, "demo", 3).await;
    let other = world.world.cluster(&world.owner, "other", 3).await;
    // The service itself wakes all pages when it begins to listen to the database.
    let (live, mut stream) = wait_for_value("a page that nothing changes", async || {
        let page = world.browser.get(&format!("/clusters/{}", statement.cluster)).await.body;
        let live = page.split('"').find(|part| part.starts_with("/live/")).unwrap().to_owned();
        let mut stream = EventStream::open(&world.browser, &live).await;
        stream.read_for(Duration::from_millis(500)).await;
        (EventStream::events(&stream.received) == 0).then_some((live, stream))
    })
    .await;
    assert!(stream.received.contains("text/event-stream"), "{}", stream.received);
    assert!(stream.received.contains("retry:"), "{}", stream.received);

    let other_token = world.world.token(&world.owner, &other).await;
    let agent = TestAgent::new(&world.world, &world.service, &other, &other_token, 7);
    agent.redeem().await.unwrap();
    stream.read_for(Duration::from_millis(1_500)).await;
    let events = EventStream::events(&stream.received);
    assert_eq!(events, 0, "a change of another cluster wakes other pages alone");

    let token = world.world.token(&world.owner, &statement).await;
    let started = std::time::Instant::now();
    for number in 1..=3 {
        TestAgent::new(&world.world, &world.service, &statement, &token, number)
            .redeem()
            .await
            .unwrap();
    }
    stream.read_until(|text| EventStream::events(text) >= 1).await;
    stream.read_for(Duration::from_millis(2_500)).await;
    let most = 1 + started.elapsed().as_secs() as usize;
    assert!(EventStream::events(&stream.received) <= most, "{}", stream.received);

    // The stream of a page that was read before the changes begins with an event.
    let mut late = EventStream::open(&world.browser, &live).await;
    late.read_until(|text| EventStream::events(text) == 1).await;
    world.service.stop().await;
    assert!(stream.read_until(|_| false).await, "the stream ends");
}

#[tokio::test]
async fn a_session_has_few_streams_and_a_closed_page_frees_its_own() {
    let world = ConsoleFixture::new().await;
    let taken = || world.service.app().console.as_ref().unwrap().stream_slots.taken();
    let mut streams = Vec::new();
    for _ in 0..8 {
        let mut stream = EventStream::open(&world.browser, "/live/all").await;
        stream.read_until(|text| text.contains("retry:")).await;
        streams.push(stream);
    }
    assert_eq!(taken(), 8);
    let page = world.browser.get("/live/all").await;
    assert_eq!(page.status, 503, "{page:?}");
    assert!(page.header("retry-after").is_some(), "{page:?}");
    let mut other = Browser { cookie: None, ..world.browser.clone() };
    other.sign_in(&world.owner.open_console().await.unwrap()).await;
    let mut stream = EventStream::open(&other, "/live/all").await;
    stream.read_until(|text| text.contains("retry:")).await;
    drop((streams, stream));
    // The service notices a closed stream only when it writes to it. So announce a change.
    wait_until("closed pages free their streams", async || {
        world.service.app().notifier.wake_all();
        taken() == 0
    })
    .await;
    world.service.stop().await;
}
