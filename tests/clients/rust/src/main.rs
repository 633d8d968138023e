//! Exercises the API of the etcd-client crate without TLS, with all members as its endpoints.

use std::fmt::Debug;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use etcd_client::{
    Client, Compare, CompareOp, ConnectOptions, Error, EventType, GetOptions, LeaseGrantOptions,
    LeaseTimeToLiveOptions, LockOptions, Permission, PermissionType, ProclaimOptions, PutOptions,
    ResignOptions, SortOrder, SortTarget, Txn, TxnOp, TxnOpResponse, WatchOptions, WatchStream,
};

/// Time limit of each wait for a state that the test expects.
const TIME_LIMIT: Duration = Duration::from_secs(60);

fn main() -> Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(run())
}

async fn run() -> Result<()> {
    let urls = std::env::var("ENDPOINTS").context("ENDPOINTS")?;
    let urls: Vec<&str> = urls.split(',').collect();
    let mut client = Client::connect(&urls, None).await?;
    said("reads and writes", reads_and_writes(&mut client).await)?;
    said("ranges", ranges(&mut client).await)?;
    said("transactions", transactions(&mut client).await)?;
    said("watches", watches(&mut client).await)?;
    said("leases", leases(&mut client).await)?;
    said("locks", locks(&mut client).await)?;
    said("elections", elections(&mut client).await)?;
    // All further requests go to one member, because another member may not have applied a change
    // yet.
    let one = &urls[..1];
    let mut client = Client::connect(one, None).await?;
    said("compaction", compaction(&mut client).await)?;
    said("cluster", cluster(&mut client, urls.len()).await)?;
    said("users", users(&mut client, one).await)?;
    println!("done");
    Ok(())
}

fn said(what: &'static str, result: Result<()>) -> Result<()> {
    println!("{what}");
    result.context(what)
}

fn equal<T: PartialEq<U> + Debug, U: Debug>(what: &str, got: T, wanted: U) -> Result<()> {
    ensure!(got == wanted, "{what}: {got:?} instead of {wanted:?}");
    Ok(())
}

fn refused<T: Debug>(what: &str, answer: Result<T, Error>, words: &str) -> Result<()> {
    match answer {
        Err(Error::GRpcStatus(status)) if status.message() == words => Ok(()),
        other => bail!("{what}: {other:?} instead of {words:?}"),
    }
}

async fn reads_and_writes(client: &mut Client) -> Result<()> {
    client.put("kv/a", "old", None).await?;
    let put = client.put("kv/a", "new", Some(PutOptions::new().with_prev_key())).await?;
    equal("the value before", put.prev_key().context("none before")?.value(), b"old")?;
    let got = client.get("kv/a", None).await?;
    let kv = got.kvs().first().context("no kv/a")?;
    equal("a value", kv.value(), b"new")?;
    equal("its version", kv.version(), 2)?;
    let old = Some(GetOptions::new().with_revision(kv.mod_revision() - 1));
    equal("an old value", client.get("kv/a", old).await?.kvs()[0].value(), b"old")?;
    let big = vec![7; 1_000_000];
    client.put("big", big.clone(), None).await?;
    ensure!(client.get("big", None).await?.kvs()[0].value() == big, "a large value differs");
    equal("deleting a key", client.delete("big", None).await?.deleted(), 1)?;
    equal("deleting it again", client.delete("big", None).await?.deleted(), 0)?;
    refused("an empty key", client.put("", "x", None).await, "etcdserver: key is not provided")
}

async fn ranges(client: &mut Client) -> Result<()> {
    let names: Vec<String> = (0..120).map(|n| format!("many/{n:03}")).collect();
    for name in &names {
        client.put(name.as_bytes(), name.as_bytes(), None).await?;
    }
    let prefix = || GetOptions::new().with_prefix();
    let keys = |answer: &etcd_client::GetResponse| -> Vec<String> {
        answer.kvs().iter().map(|kv| String::from_utf8_lossy(kv.key()).into_owned()).collect()
    };
    let down = prefix().with_sort(SortTarget::Key, SortOrder::Descend);
    let found = keys(&client.get("many/", Some(down)).await?);
    equal("a prefix, from the last", found, names.iter().rev().cloned().collect::<Vec<_>>())?;
    let some = client.get("many/", Some(prefix().with_limit(7))).await?;
    equal("a limit", (keys(&some), some.more(), some.count()), (names[..7].to_vec(), true, 120))?;
    let range = GetOptions::new().with_range("many/010").with_keys_only();
    let some = client.get("many/007", Some(range)).await?;
    equal("a range is half open", keys(&some), names[7..10].to_vec())?;
    let mut stream = client.kv_client().get_stream("many/", Some(prefix())).await?;
    let mut found = Vec::new();
    while let Some(part) = stream.message().await? {
        found.extend(keys(&part));
    }
    equal("a range as a stream", found, names)
}

async fn transactions(client: &mut Client) -> Result<()> {
    client.put("txn/a", "1", None).await?;
    let inner = Txn::new().and_then([TxnOp::delete("txn/a", None)]);
    let first = Txn::new()
        .when([
            Compare::value("txn/a", CompareOp::Equal, "1"),
            Compare::create_revision("txn/b", CompareOp::Equal, 0),
        ])
        .and_then([TxnOp::put("txn/b", "x", None), TxnOp::get("txn/b", None), TxnOp::txn(inner)])
        .or_else([TxnOp::put("txn/b", "wrong", None)]);
    let answer = client.txn(first.clone()).await?;
    ensure!(answer.succeeded(), "both comparisons hold: {answer:?}");
    let TxnOpResponse::Get(got) = &answer.op_responses()[1] else { bail!("no get: {answer:?}") };
    equal("what it wrote, read in it", got.kvs()[0].value(), b"x")?;
    let answer = client.txn(first).await?;
    ensure!(!answer.succeeded(), "the comparisons hold no more: {answer:?}");
    equal("the other branch", client.get("txn/b", None).await?.kvs()[0].value(), b"wrong")?;
    let twice = Txn::new().and_then([TxnOp::put("x", "1", None), TxnOp::put("x", "2", None)]);
    let words = "etcdserver: duplicate key given in txn request";
    refused("one key put twice", client.txn(twice).await, words)
}

type Seen = (EventType, String, String, Option<String>);

/// Returns the next `count` events of a watch: type, key, value, and previous value.
async fn events(watch: &mut WatchStream, count: usize) -> Result<Vec<Seen>> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut seen = Vec::new();
    while seen.len() < count {
        let part = tokio::time::timeout(TIME_LIMIT, watch.message());
        let part = part.await.with_context(|| format!("{count} events; so far {seen:?}"))??;
        for event in part.context("the watch ended")?.events() {
            let kv = event.kv().context("an event without its key")?;
            let before = event.prev_kv().map(|kv| text(kv.value()));
            seen.push((event.event_type(), text(kv.key()), text(kv.value()), before));
        }
    }
    Ok(seen)
}

fn seen(kind: EventType, key: &str, value: &str, before: Option<&str>) -> Seen {
    (kind, key.to_owned(), value.to_owned(), before.map(str::to_owned))
}

async fn watches(client: &mut Client) -> Result<()> {
    use EventType::{Delete, Put};
    let begun = client.put("watch/a", "1", None).await?;
    let begun = begun.header().context("a header")?.revision();
    client.put("watch/a", "2", None).await?;
    client.delete("watch/a", None).await?;
    let since = WatchOptions::new().with_prefix().with_start_revision(begun).with_prev_key();
    let mut watch = client.watch("watch/", Some(since)).await?;
    client.put("watch/b", "3", None).await?;
    let wanted = vec![
        seen(Put, "watch/a", "1", None),
        seen(Put, "watch/a", "2", Some("1")),
        seen(Delete, "watch/a", "", Some("2")),
        seen(Put, "watch/b", "3", None),
    ];
    equal("the events since a revision", events(&mut watch, 4).await?, wanted)?;
    watch.request_progress().await?;
    let part = watch.message().await?.context("progress")?;
    let reached = part.header().context("a header")?.revision();
    ensure!(part.events().is_empty() && reached >= begun + 3, "progress: {part:?}");
    watch.watch("other", Some(WatchOptions::new().with_watch_id(7))).await?;
    ensure!(watch.message().await?.is_some_and(|part| part.created() && part.watch_id() == 7));
    client.put("other", "1", None).await?;
    equal("a second watch", events(&mut watch, 1).await?, vec![seen(Put, "other", "1", None)])?;
    watch.cancel(7).await?;
    ensure!(watch.message().await?.is_some_and(|part| part.canceled() && part.watch_id() == 7));
    Ok(())
}

async fn leases(client: &mut Client) -> Result<()> {
    let own = Some(LeaseGrantOptions::new().with_id(4711));
    let id = client.lease_grant(60, own).await?.id();
    equal("an id of one's own", id, 4711)?;
    let with = |id| Some(PutOptions::new().with_lease(id));
    client.put("lease/a", "x", with(id)).await?;
    let keys = Some(LeaseTimeToLiveOptions::new().with_keys());
    let about = client.lease_time_to_live(id, keys).await?;
    equal("what it has", (about.granted_ttl(), about.keys()), (60, &[b"lease/a".to_vec()][..]))?;
    let before = loop {
        let left = client.lease_time_to_live(id, None).await?.ttl();
        if left < 59 {
            break left;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let (mut keeper, mut kept) = client.lease_keep_alive(id).await?;
    loop {
        keeper.keep_alive().await?;
        let answer = kept.message().await?.context("the keep-alives ended")?;
        equal("what a keep-alive gives", answer.ttl(), 60)?;
        if client.lease_time_to_live(id, None).await?.ttl() > before {
            break;
        }
    }
    let all = client.leases().await?;
    ensure!(all.leases().iter().any(|lease| lease.id() == id), "the list: {all:?}");
    client.lease_revoke(id).await?;
    equal("the key of a revoked lease", client.get("lease/a", None).await?.kvs().len(), 0)?;
    refused(
        "a lease that is not",
        client.put("lease/a", "x", with(id)).await,
        "etcdserver: requested lease not found",
    )?;
    let mut watch = client.watch("lease/b", None).await?;
    let short = client.lease_grant(1, None).await?.id();
    client.put("lease/b", "x", with(short)).await?;
    let kinds: Vec<_> = events(&mut watch, 2).await?.into_iter().map(|event| event.0).collect();
    equal("the key of a lease that ends", kinds, [EventType::Put, EventType::Delete])
}

async fn locks(client: &mut Client) -> Result<()> {
    let mine = client.lock("one", None).await?.key().to_vec();
    let lease = client.lease_grant(120, None).await?.id();
    let mut other = client.clone();
    let waits = async move {
        let lock = other.lock("one", Some(LockOptions::new().with_lease(lease))).await;
        lock.map(|lock| lock.key().to_vec())
    };
    let mut waits = std::pin::pin!(waits);
    let early = tokio::time::timeout(Duration::from_secs(1), &mut waits).await;
    ensure!(early.is_err(), "a lock that another one has: {early:?}");
    client.unlock(mine.clone()).await?;
    let theirs = tokio::time::timeout(TIME_LIMIT, waits).await.context("the lock let go")??;
    equal("whose the key of a lock is", theirs, format!("one/{lease:x}").into_bytes())?;
    client.lease_revoke(lease).await?;
    Ok(())
}

async fn elections(client: &mut Client) -> Result<()> {
    let lease = client.lease_grant(120, None).await?.id();
    let won = client.campaign("vote", "first", lease).await?;
    let leader = won.leader().context("no leader")?.clone();
    equal("who leads", client.leader("vote").await?.kv().context("none")?.value(), b"first")?;
    let mut observed = client.observe("vote").await?;
    let mut next = async || -> Result<Vec<u8>> {
        let part = tokio::time::timeout(TIME_LIMIT, observed.message()).await??;
        let part = part.context("the observation ended")?;
        Ok(part.kv().context("no leader observed")?.value().to_vec())
    };
    equal("who is observed to lead", next().await?, b"first")?;
    let still = ProclaimOptions::new().with_leader(leader.clone());
    client.proclaim("still first", Some(still)).await?;
    equal("what is proclaimed", next().await?, b"still first")?;
    client.resign(Some(ResignOptions::new().with_leader(leader))).await?;
    refused("nobody leads", client.leader("vote").await, "election: no leader")
}

async fn compaction(client: &mut Client) -> Result<()> {
    let old = client.put("old", "1", None).await?.header().context("a header")?.revision();
    let now = client.put("old", "2", None).await?.header().context("a header")?.revision();
    client.compact(now, None).await?;
    let at = |revision| Some(GetOptions::new().with_revision(revision));
    let gone = "etcdserver: mvcc: required revision has been compacted";
    refused("a compacted revision", client.get("old", at(old)).await, gone)?;
    let future = "etcdserver: mvcc: required revision is a future revision";
    refused("a future revision", client.get("old", at(now + 1000)).await, future)?;
    let since = Some(WatchOptions::new().with_start_revision(old));
    let mut watch = client.watch("old", since).await?;
    loop {
        let part = watch.message().await?.context("the watch ended without a word")?;
        if part.canceled() {
            return equal("where a compacted watch can begin", part.compact_revision(), now);
        }
    }
}

async fn cluster(client: &mut Client, members: usize) -> Result<()> {
    equal("the members", client.member_list().await?.members().len(), members)?;
    let status = client.status().await?;
    ensure!(status.version().starts_with("3.") && status.leader() != 0, "status: {status:?}");
    equal(
        "alarms",
        client
            .alarm(etcd_client::AlarmAction::Get, etcd_client::AlarmType::None, None)
            .await?
            .alarms()
            .len(),
        0,
    )?;
    let mut snapshot = client.snapshot().await?;
    let (mut bytes, mut remaining) = (0, 0);
    while let Some(part) = snapshot.message().await? {
        bytes += part.blob().len();
        remaining = part.remaining_bytes();
    }
    ensure!(bytes > 32 && remaining == 0, "a snapshot of {bytes} bytes, {remaining} missing");
    Ok(())
}

async fn users(client: &mut Client, urls: &[&str]) -> Result<()> {
    client.user_add("root", "of root", None).await?;
    client.user_grant_role("root", "root").await?;
    client.role_add("reader").await?;
    let reads = Permission::new(PermissionType::Read, "kv/").with_prefix();
    client.role_grant_permission("reader", reads).await?;
    client.user_add("alice", "of alice", None).await?;
    client.user_grant_role("alice", "reader").await?;
    client.auth_enable().await?;
    refused("nobody", client.get("kv/a", None).await, "etcdserver: user name is empty")?;
    let of = |name: &str, password: &str| Some(ConnectOptions::new().with_user(name, password));
    let wrong = Client::connect(urls, of("alice", "wrong")).await.map(|_| ());
    let words = "etcdserver: authentication failed, invalid user ID or password";
    refused("a wrong password", wrong, words)?;
    let mut alice = Client::connect(urls, of("alice", "of alice")).await?;
    equal("what a user may read", alice.get("kv/a", None).await?.kvs()[0].value(), b"new")?;
    let denied = "etcdserver: permission denied";
    refused("what a user may not write", alice.put("kv/a", "x", None).await, denied)?;
    refused("what a user may not read", alice.get("txn/b", None).await, denied)?;
    let mut root = Client::connect(urls, of("root", "of root")).await?;
    let mut watch = root.watch("kv/b", None).await?;
    root.put("kv/b", "by root", None).await?;
    let wanted = vec![seen(EventType::Put, "kv/b", "by root", None)];
    equal("a watch with a password", events(&mut watch, 1).await?, wanted)?;
    root.auth_disable().await?;
    Ok(())
}
