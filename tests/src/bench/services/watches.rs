//! Measures many watchers of one prefix, and watches of many keys.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use futures_util::stream::poll_fn;
use node_proto::etcdserverpb::watch_client::WatchClient;
use node_proto::etcdserverpb::watch_request::RequestUnion;
use node_proto::etcdserverpb::{WatchCreateRequest, WatchRequest, WatchResponse};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tonic::Streaming;
use tonic::transport::Channel;

use super::{CALL_TIME, FigureRecorder, mib};
use crate::bench::cluster::BenchCluster;

/// Number of connections that the streams share.
const CONNECTIONS: usize = 10;
/// Number of streams that the watches share.
const STREAMS: usize = 100;
/// Number of create requests that can wait in one stream's channel before they are sent.
const MAX_QUEUED_CREATES: usize = 16;
const VALUE: [u8; 256] = [b'v'; 256];

pub(super) async fn one_prefix(
    cluster: BenchCluster,
    watchers: usize,
    events: usize,
    recorder: &mut FigureRecorder<'_>,
) -> Result<()> {
    let leader = cluster.leader().await?;
    let before = cluster.resident_bytes_of(leader)?;
    let received = Arc::new(Semaphore::new(0));
    let readers =
        create_watches(&cluster, leader, watchers, &received, |_| ("/hot/".into(), "/hot0".into()));
    let mut readers = readers.await?;
    let after = cluster.resident_bytes_of(leader)?;
    recorder.record(format!("RSS with {watchers} watchers of one prefix"), mib(after), "MiB");
    recorder.record("of it, by them", mib(after.saturating_sub(before)), "MiB");

    let all = u32::try_from(watchers).context("watchers")?;
    let mut client = cluster.client(leader)?;
    let (began, cpu) = (Instant::now(), cluster.cpu_of(leader)?);
    for n in 0..events {
        client.put(format!("/hot/{n}").as_bytes(), &VALUE, CALL_TIME).await?;
        let waiting = tokio::time::timeout(CALL_TIME, received.acquire_many(all));
        waiting.await.context("not every watcher received its event")??.forget();
    }
    let (took, cpu) = (began.elapsed(), cluster.cpu_of(leader)?.saturating_sub(cpu));
    let delivered = (watchers * events) as f64;
    recorder.record("events delivered", delivered / took.as_secs_f64(), "/s");
    recorder.record("CPU of the leader for an event", cpu.as_secs_f64() * 1e6 / delivered, "us");
    let peak = mib(cluster.peak_bytes(leader)?);
    recorder.record("its peak of memory", peak, "MiB");
    readers.abort_all();
    Ok(())
}

pub(super) async fn many_keys(
    cluster: BenchCluster,
    watches: usize,
    recorder: &mut FigureRecorder<'_>,
) -> Result<()> {
    const PUTS: usize = 1_000;
    let leader = cluster.leader().await?;
    let before = cluster.resident_bytes_of(leader)?;
    let received = Arc::new(Semaphore::new(0));
    let key = |n: usize| format!("/keys/{n:08}").into_bytes();
    let began = Instant::now();
    let mut readers =
        create_watches(&cluster, leader, watches, &received, |n| (key(n), Vec::new())).await?;
    recorder.record(format!("{watches} watches created"), began.elapsed().as_secs_f64(), "s");
    let after = cluster.resident_bytes_of(leader)?;
    recorder.record(format!("RSS with {watches} watches of as many keys"), mib(after), "MiB");
    recorder.record("of it, by them", mib(after.saturating_sub(before)), "MiB");

    let mut client = cluster.client(leader)?;
    let mut waits = Vec::new();
    for n in 0..PUTS {
        let began = Instant::now();
        client.put(&key(n * (watches / PUTS).max(1) % watches), &VALUE, CALL_TIME).await?;
        let waiting = tokio::time::timeout(CALL_TIME, received.acquire());
        waiting.await.context("the watcher received no event")??.forget();
        waits.push(began.elapsed());
    }
    waits.sort_unstable();
    let median = Duration::as_secs_f64(&waits[PUTS / 2]) * 1000.0;
    recorder.record("from a put to its watcher, one at a time", median, "ms");
    readers.abort_all();
    Ok(())
}

/// Creates `watches` watches of the ranges that `range` returns, and waits until all are created.
/// Adds a permit to `received` for each event.
async fn create_watches(
    cluster: &BenchCluster,
    member: usize,
    watches: usize,
    received: &Arc<Semaphore>,
    range: impl Fn(usize) -> (Vec<u8>, Vec<u8>),
) -> Result<JoinSet<Result<()>>> {
    let channels = (0..CONNECTIONS).map(|_| cluster.channel(member)).collect::<Result<Vec<_>>>()?;
    let mut readers = JoinSet::new();
    for stream in 0..STREAMS {
        let requests = (stream..watches).step_by(STREAMS).map(&range);
        let requests: Vec<_> = requests.map(|(key, end)| create(key, end)).collect();
        let channel = channels[stream % CONNECTIONS].clone();
        let received = Arc::clone(received);
        let stream = open_stream(channel, requests).await?;
        readers.spawn(count_events(stream, received));
    }
    Ok(readers)
}

fn create(key: Vec<u8>, range_end: Vec<u8>) -> WatchRequest {
    let create = WatchCreateRequest {
        key: key.into(),
        range_end: range_end.into(),
        ..WatchCreateRequest::default()
    };
    WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) }
}

/// A stream with all its watches, and the sender that keeps it open.
type OpenWatchStream = (mpsc::Sender<WatchRequest>, Streaming<WatchResponse>);

async fn open_stream(channel: Channel, requests: Vec<WatchRequest>) -> Result<OpenWatchStream> {
    let (sender, mut receiver) = mpsc::channel(MAX_QUEUED_CREATES);
    let mut left = requests.len();
    let sending = async {
        for request in requests {
            sender.send(request).await?;
        }
        Ok(sender)
    };
    let receiving = async {
        let mut service = WatchClient::new(channel);
        let answers = tokio::time::timeout(
            CALL_TIME,
            service.watch(poll_fn(move |context| receiver.poll_recv(context))),
        );
        let mut answers = answers.await??.into_inner();
        while left > 0 {
            let answer = tokio::time::timeout(CALL_TIME, answers.message()).await??;
            let answer = answer.context("the stream ended")?;
            if answer.canceled {
                bail!("a watch was refused: {}", answer.cancel_reason);
            }
            left -= usize::from(answer.created);
        }
        Ok::<_, anyhow::Error>(answers)
    };
    tokio::try_join!(sending, receiving)
}

async fn count_events(
    (open, mut answers): OpenWatchStream,
    received: Arc<Semaphore>,
) -> Result<()> {
    while let Some(answer) = answers.message().await? {
        received.add_permits(answer.events.len());
    }
    drop(open);
    bail!("the stream ended")
}
