//! Tests of polls that only renew a lease, and of the deadlines of their clusters.

use std::slice::from_ref;
use std::time::Duration;

use discovery_formation::service::{Cluster, next_deadline};
use discovery_formation::{AgentKey, Millis, UnixMicros};
use discovery_types::api::{PollRequest, Standing};
use discovery_types::digest::Nonce;
use discovery_types::statement::Statement;
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use super::agent::TestAgent;
use super::support::{TestInstallation, wait_until, with_long_polls};
use crate::server::{RunningService, ServeArgs, start};
use crate::store::leases::LeaseRenewal;

/// A cluster of three that waits for its third host. No sweep runs after the start.
struct WaitingCluster {
    world: TestInstallation,
    service: RunningService,
    statement: Statement,
    agents: Vec<TestAgent>,
    database: PgConnection,
}

/// Result of a renewal: the cluster's next deadline, if the lease was renewed.
type RenewalResult = Option<i64>;

impl WaitingCluster {
    async fn new(change: impl FnOnce(&mut ServeArgs)) -> Self {
        let world = TestInstallation::new().await;
        let mut args = world.args("ledger");
        args.times.sweep = Duration::from_secs(3_600);
        change(&mut args);
        let service = start(args).await.unwrap();
        // Wait for the sweep at the start, which could otherwise change the cluster during the
        // test.
        let metrics = &service.app().metrics;
        wait_until("swept at the start", async || metrics.database_up.get() == 1).await;
        let admin = world.owner(&service);
        let statement = world.cluster(&admin, "demo", 3).await;
        let token = world.token(&admin, &statement).await;
        let agents: Vec<TestAgent> =
            (1..=3).map(|i| TestAgent::new(&world, &service, &statement, &token, i)).collect();
        for agent in &agents[..2] {
            agent.redeem().await.unwrap();
        }
        let database = world.database.connect().await;
        WaitingCluster { world, service, statement, agents, database }
    }

    async fn cluster(&self) -> Cluster {
        let store = &self.service.app().store;
        store.read_cluster(self.statement.cluster).await.unwrap().unwrap().0
    }

    /// The renewal for a poll of the first agent, which has seen the cluster's newest state.
    async fn renewal(&self) -> LeaseRenewal {
        let agent = &self.agents[0];
        let poll = agent.poll_request(Some(self.cluster().await.rev));
        LeaseRenewal::of_poll(self.statement.cluster, agent.key.public(), &poll).unwrap()
    }

    async fn renew(&self, renewals: &[LeaseRenewal]) -> Vec<RenewalResult> {
        let app = self.service.app();
        let generation = app.settled_generation().unwrap();
        app.store.renew_leases(renewals, app.settings.lease, generation).await.unwrap()
    }

    async fn run(&mut self, sql: &str) {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut self.database).await.unwrap();
    }

    /// Time until the cluster's stored next deadline, in microseconds.
    async fn stored_time_left_us(&mut self) -> i64 {
        let sql = "SELECT next_deadline_us - now_us() FROM clusters";
        sqlx::query_scalar(sql).fetch_one(&mut self.database).await.unwrap()
    }

    fn first_key(&self) -> AgentKey {
        AgentKey(*self.agents[0].key.public().as_bytes())
    }
}

#[tokio::test]
async fn a_poll_without_news_renews_the_lease_and_gets_an_empty_answer() {
    let waiting = WaitingCluster::new(|args| args.times.poll = Duration::from_millis(200)).await;
    let (agent, key) = (&waiting.agents[0], waiting.first_key());
    let before = waiting.cluster().await;
    let answer = agent.poll_for_changes(Some(before.rev)).await.unwrap();
    assert_eq!(answer, None);
    let after = waiting.cluster().await;
    assert!(after.agents[&key].lease_until > before.agents[&key].lease_until);
    // The renewal has changed nothing but the lease.
    let mut expected = before.clone();
    expected.agents.get_mut(&key).unwrap().lease_until = after.agents[&key].lease_until;
    assert_eq!(after, expected);
    // An agent that doesn't prefer an empty answer gets a full one.
    let whole = agent.poll(Some(before.rev)).await.unwrap();
    assert_eq!((whole.rev, whole.standing), (before.rev, Standing::Seated(1)));
    waiting.service.stop().await;
}

#[tokio::test]
async fn a_poll_that_waits_hears_of_the_next_change() {
    let waiting = WaitingCluster::new(|args| *args = with_long_polls(args.clone())).await;
    let rev = waiting.cluster().await.rev;
    let parked = waiting.service.app().poll_slots.clone();
    let third = async {
        while parked.taken() == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        waiting.agents[2].redeem().await.unwrap();
    };
    let (news, ()) = tokio::join!(waiting.agents[0].poll_for_changes(Some(rev)), third);
    let news = news.unwrap().unwrap();
    assert!(news.rev > rev && news.proposal.is_some(), "{news:?}");
    waiting.service.stop().await;
}

#[tokio::test]
async fn a_poll_that_changes_more_than_a_lease_takes_a_transaction() {
    let mut waiting = WaitingCluster::new(|_| {}).await;
    let fits = waiting.renewal().await;
    assert!(waiting.renew(from_ref(&fits)).await[0].is_some());
    let other = |change: fn(&mut LeaseRenewal)| {
        let mut renewal = fits.clone();
        change(&mut renewal);
        renewal
    };
    let others = [
        other(|renewal| renewal.rev -= 1),
        other(|renewal| renewal.rev += 1),
        other(|renewal| renewal.boot += 1),
        other(|renewal| renewal.nonce[0] ^= 1),
        other(|renewal| renewal.highest_epoch += 1),
        other(|renewal| renewal.key[0] ^= 1),
        other(|renewal| renewal.cluster = uuid::Uuid::now_v7()),
    ];
    assert_eq!(waiting.renew(&others).await, [None; 7]);
    // A renewal that the database refuses doesn't prevent the other renewals of the same SQL
    // statement.
    let mixed = [others[0].clone(), fits.clone(), others[3].clone()];
    let places: Vec<bool> = waiting.renew(&mixed).await.iter().map(Option::is_some).collect();
    assert_eq!(places, [false, true, false]);
    let app = waiting.service.app();
    let (lease, generation) = (app.settings.lease, app.settled_generation().unwrap());
    let elsewhere = app.store.renew_leases(from_ref(&fits), lease, generation + 1).await.unwrap();
    assert_eq!(elsewhere, [None], "another history of the database");

    // Each of these changes of rows is undone before the next one.
    let changes = [
        "UPDATE agents SET lease_us = now_us() - 1",
        "UPDATE agents SET lease_us = now_us() + 3600000000",
        "UPDATE agents SET seat = NULL",
        "UPDATE clusters SET unsettled = true",
        "UPDATE clusters SET split_other = decode(repeat('00', 32), 'hex'), split_epoch = 1",
        "UPDATE clusters SET deadline_us = now_us() - 1",
        "UPDATE clusters SET rev = rev + 1",
        "UPDATE generation SET settled = false",
    ];
    for change in changes {
        waiting.run("CREATE TABLE kept AS SELECT * FROM agents").await;
        waiting.run("CREATE TABLE kept_clusters AS SELECT * FROM clusters").await;
        waiting.run(&format!("SET session_replication_role = replica; {change}")).await;
        assert_eq!(waiting.renew(from_ref(&fits)).await, [None], "{change}");
        waiting
            .run(
                "DELETE FROM agents; DELETE FROM clusters;
                 INSERT INTO clusters SELECT * FROM kept_clusters;
                 INSERT INTO agents SELECT * FROM kept; UPDATE generation SET settled = true;
                 DROP TABLE kept, kept_clusters; SET session_replication_role = origin",
            )
            .await;
        assert!(waiting.renew(from_ref(&fits)).await[0].is_some(), "undone: {change}");
    }
    waiting.service.stop().await;
}

#[tokio::test]
async fn a_row_that_another_transaction_holds_is_not_waited_for() {
    let mut waiting = WaitingCluster::new(|_| {}).await;
    let renewal = waiting.renewal().await;
    let mut other = waiting.world.database.connect().await;
    let mut transaction = other.begin().await.unwrap();
    sqlx::raw_sql("SELECT 1 FROM agents FOR UPDATE").execute(&mut *transaction).await.unwrap();
    assert_eq!(waiting.renew(from_ref(&renewal)).await, [None]);
    transaction.rollback().await.unwrap();
    assert!(waiting.renew(&[renewal]).await[0].is_some());
    waiting.run("SELECT 1").await;
    waiting.service.stop().await;
}

#[tokio::test]
async fn polls_with_numbers_too_large_for_a_row_use_a_transaction() {
    let (boot, nonce) = (u64::MAX, Nonce::random());
    let key = discovery_types::key::SigningKey::generate();
    let poll = PollRequest { after: Some(1), boot, nonce, highest_epoch: 0 };
    assert!(LeaseRenewal::of_poll(uuid::Uuid::now_v7(), key.public(), &poll).is_none());
    let poll = PollRequest { after: None, boot: 1, nonce, highest_epoch: 0 };
    assert!(LeaseRenewal::of_poll(uuid::Uuid::now_v7(), key.public(), &poll).is_none());
}

/// Lease with which these tests postpone deadlines. A postponed deadline is at most one lease away,
/// so the lease is longer than the time until any expected deadline.
const LONG_LEASE: Millis = Millis(3_600_000);

#[tokio::test]
async fn only_an_open_cluster_that_has_nothing_due_is_postponed() {
    let mut waiting = WaitingCluster::new(|_| {}).await;
    let id = waiting.statement.cluster;
    let app = waiting.service.app().clone();
    let far = "UPDATE agents SET lease_us = now_us() + 60000000 WHERE seat = 1";
    let changes = [
        // The second agent's lease has lapsed.
        (false, "UPDATE agents SET lease_us = now_us() - 1 WHERE seat = 2"),
        (true, "UPDATE agents SET lease_us = now_us() + 50000000 WHERE seat = 2"),
        // The first agent's backoff ends before any lease.
        (true, "UPDATE agents SET held_us = now_us() + 20000000 WHERE seat = 1"),
        // The list of members may be frozen once a backoff has ended.
        (false, "UPDATE agents SET held_us = now_us() - 1 WHERE seat = 1"),
        // The last step has taken the end of this backoff into account.
        (true, "UPDATE agents SET held_us = now_us() - 60000000 WHERE seat = 1"),
        // Agents without a place have no lease.
        (true, "UPDATE agents SET seat = NULL, lease_us = now_us() - 1 WHERE seat = 2"),
        (true, "UPDATE clusters SET deadline_us = now_us() + 10000000"),
        (false, "UPDATE clusters SET deadline_us = now_us() - 1"),
    ];
    waiting.run(far).await;
    for (is_postponed, change) in changes {
        waiting.run("UPDATE clusters SET next_deadline_us = now_us() - 1").await;
        waiting.run(change).await;
        let (cluster, _, now) = app.store.read_cluster(id).await.unwrap().unwrap();
        let expected = next_deadline(&cluster, &app.settings, now).unwrap();
        let postponed = app.store.postpone_deadlines(&[id], LONG_LEASE).await.unwrap();
        let next = postponed.first().map(|(_, next)| UnixMicros(next.unsigned_abs()));
        assert_eq!(next, is_postponed.then_some(expected), "{change}");
        // The first call has stored the new deadline. So a second call returns the same one.
        assert_eq!(app.store.postpone_deadlines(&[id], LONG_LEASE).await.unwrap(), postponed);
    }
    waiting.service.stop().await;
}

#[tokio::test]
async fn a_cluster_that_prepares_is_not_postponed() {
    let mut waiting = WaitingCluster::new(|_| {}).await;
    waiting.agents[2].redeem().await.unwrap();
    waiting.run("UPDATE clusters SET next_deadline_us = now_us() - 1").await;
    let clusters = [waiting.statement.cluster];
    let store = &waiting.service.app().store;
    assert_eq!(store.postpone_deadlines(&clusters, LONG_LEASE).await.unwrap(), []);
    waiting.service.stop().await;
}

#[tokio::test]
async fn a_cluster_is_postponed_by_one_lease_at_most() {
    let mut waiting = WaitingCluster::new(|_| {}).await;
    waiting.run("UPDATE agents SET lease_us = now_us() + 3600000000").await;
    waiting.run("UPDATE clusters SET next_deadline_us = now_us() - 1").await;
    let app = waiting.service.app();
    let clusters = [waiting.statement.cluster];
    let postponed = app.store.postpone_deadlines(&clusters, Millis(1_000)).await.unwrap();
    let now = app.store.now().await.unwrap();
    assert!(postponed[0].1 <= now + 1_000_000, "{postponed:?} at {now}");
    waiting.service.stop().await;
}

#[tokio::test]
async fn a_waiting_poll_hears_of_a_lease_that_lapses_after_the_stored_deadline() {
    let mut waiting = WaitingCluster::new(|args| *args = with_long_polls(args.clone())).await;
    let rev = waiting.cluster().await.rev;
    waiting.run("UPDATE clusters SET next_deadline_us = now_us() - 1").await;
    waiting.run("UPDATE agents SET lease_us = now_us() + 1500000 WHERE seat = 2").await;
    let news = waiting.agents[0].poll_for_changes(Some(rev)).await.unwrap().unwrap();
    assert_eq!(news.seated, 1, "the second agent has lost its seat");
    waiting.service.stop().await;
}

/// All seats are taken, and only the first agent's backoff holds the list of members back. Polls
/// renew all leases meanwhile.
#[tokio::test]
async fn a_list_is_frozen_when_a_backoff_ends_by_a_waiting_poll_or_by_a_sweep() {
    for is_swept in [false, true] {
        let mut waiting = WaitingCluster::new(|args| *args = with_long_polls(args.clone())).await;
        waiting.run("UPDATE agents SET held_us = now_us() + 1000000 WHERE seat = 1").await;
        waiting.agents[2].redeem().await.unwrap();
        let rev = waiting.cluster().await.rev;
        let renewal = waiting.renewal().await;
        assert!(waiting.renew(&[renewal]).await[0].is_some());
        if is_swept {
            tokio::time::sleep(Duration::from_millis(1_100)).await;
            waiting.service.app().sweep().await.unwrap();
            assert!(waiting.cluster().await.frozen.is_some());
        } else {
            let news = waiting.agents[0].poll_for_changes(Some(rev)).await.unwrap();
            assert!(news.is_some_and(|news| news.proposal.is_some()));
        }
        waiting.service.stop().await;
    }
}

#[tokio::test]
async fn a_sweep_postpones_clusters_with_nothing_due_and_ends_expired_ones() {
    let mut waiting = WaitingCluster::new(|_| {}).await;
    let app = waiting.service.app().clone();
    waiting.run("UPDATE clusters SET next_deadline_us = now_us() - 1").await;
    let before = waiting.cluster().await;
    app.sweep().await.unwrap();
    assert_eq!(waiting.cluster().await, before);
    waiting.run("UPDATE agents SET lease_us = now_us() - 1 WHERE seat = 2").await;
    waiting.run("UPDATE clusters SET next_deadline_us = now_us() - 1").await;
    app.sweep().await.unwrap();
    assert_eq!(waiting.cluster().await.seats().len(), 1);
    waiting.service.stop().await;
}

/// A dump or an ALTER TABLE can lock a cluster's row for longer than a sweep waits.
#[tokio::test]
async fn a_deadline_that_a_sweep_could_not_correct_is_corrected_by_the_next_sweep() {
    const HOUR_US: i64 = 3_600_000_000;
    let mut waiting = WaitingCluster::new(|_| {}).await;
    let app = waiting.service.app().clone();
    // The database's clock was an hour ahead, and is set back.
    waiting.run("UPDATE clusters SET next_deadline_us = next_deadline_us + 3600000000").await;
    app.clock.set(app.clock.micros() + HOUR_US);
    waiting.run("BEGIN; SELECT 1 FROM clusters FOR UPDATE").await;
    app.sweep().await.unwrap();
    assert!(waiting.stored_time_left_us().await > HOUR_US / 2, "the row was locked");
    waiting.run("ROLLBACK").await;
    app.sweep().await.unwrap();
    assert!(waiting.stored_time_left_us().await < HOUR_US / 2);
    waiting.service.stop().await;
}
