//! Renewal of this member's certificates, from a third of their life on.
//!
//! Until they are renewed the old ones serve, and a node whose key the cluster knows is let in with
//! an expired one, too: so this is tried again for as long as it takes, and nothing waits for it.

use std::sync::Arc;
use std::time::Duration;

use discovery_types::client::Client;
use discovery_types::csr::Csr;
use discovery_types::digest::Digest;
use discovery_types::leaves::{Leaves, Life};
use discovery_types::statement::Statement;
use jiff::{SignedDuration, Timestamp};
use uuid::Uuid;

use crate::exit::chain;
use crate::retry::Retry;
use crate::state::{self, Layout};
use crate::status::Board;

/// How often the clock is looked at: it may be set.
const LOOK_EVERY: Duration = Duration::from_secs(60);

/// What a renewal needs.
pub(crate) struct Renewal {
    /// The service.
    pub client: Arc<Client>,
    /// The cluster.
    pub cluster: Uuid,
    /// What this member's record asked for.
    pub csr: Csr,
    /// The CAs stand in it.
    pub statement: Statement,
    /// Where the expiry is shown.
    pub board: Board,
}

impl Renewal {
    /// Waits until `now` ones are due, and gets new ones.
    pub(crate) async fn next(&self, now: &Leaves) -> Leaves {
        let Some(life) = now.life() else { return std::future::pending().await };
        let clock = || Timestamp::now().as_second();
        let failed = |why: &str, pause| self.failed(&life, why, pause);
        let leaves = from_a_third_on(&life, clock, async || self.once(&life).await, failed).await;
        self.board.update(|status| status.certificates_late = None);
        leaves
    }

    async fn once(&self, old: &Life) -> Result<Leaves, String> {
        let leaves = self.client.leaves(self.cluster, &self.csr).await;
        let leaves = leaves.map_err(|error| chain(&error))?;
        let node_key = self.csr.verify().map_err(|error| chain(&error))?.node_key;
        leaves.verify(&node_key, &self.statement).map_err(|error| chain(&error))?;
        match leaves.life() {
            Some(life) if life.ends > old.ends => Ok(leaves),
            _ => Err("discovery's new certificates don't last longer than the old ones".to_owned()),
        }
    }

    fn failed(&self, life: &Life, why: &str, pause: Duration) {
        let now = Timestamp::now();
        tracing::debug!("the certificates are not renewed yet: {why}");
        if now.as_second() >= life.late() {
            let text = format!(
                "the certificates end at {}, and are not renewed: {why}. A person can make new ones \
                 without the service: muster-discovery ca issue",
                Timestamp::from_second(life.ends).unwrap_or_default()
            );
            let at = now + SignedDuration::try_from(pause).unwrap_or_default();
            self.board.update(|status| {
                if status.certificates_late.is_none() {
                    tracing::error!("{text}");
                }
                status.certificates_late = Some(text);
                status.next_retry_at = Some(at);
            });
        }
    }
}

/// Waits for the time, then asks until it gets them.
async fn from_a_third_on<T>(
    life: &Life,
    clock: impl Fn() -> i64,
    ask: impl AsyncFn() -> Result<T, String>,
    failed: impl Fn(&str, Duration),
) -> T {
    while clock() < life.due() {
        tokio::time::sleep(LOOK_EVERY).await;
    }
    let mut retry = Retry::default();
    loop {
        match ask().await {
            Ok(new) => return new,
            Err(why) => {
                let pause = retry.next_pause();
                failed(&why, pause);
                tokio::time::sleep(pause).await;
            }
        }
    }
}

/// The certificates that a start uses: the journal's, or those that a person has put in their place
/// since, if they are this member's and last longer.
pub(crate) fn newest(
    layout: &Layout,
    journalled: &Leaves,
    node_key: &Digest,
    statement: &Statement,
) -> Leaves {
    let read = |name: &str| {
        let bytes = state::read(&layout.tls().join(name)).ok().flatten()?;
        String::from_utf8(bytes).ok()
    };
    let found = read("peer.crt").zip(read("client.crt"));
    let found = found.map(|(peer, client)| Leaves { peer, client });
    let ends = |leaves: &Leaves| leaves.life().map(|life| life.ends);
    match found {
        Some(found) if found != *journalled => match found.verify(node_key, statement) {
            Ok(()) if ends(&found) > ends(journalled) => {
                tracing::info!("the certificates in {} are taken", layout.tls().display());
                found
            }
            _ => journalled.clone(),
        },
        _ => journalled.clone(),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use discovery_types::fixtures::World;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn they_are_asked_for_from_a_third_of_their_life_on_until_they_come() {
        let begun = tokio::time::Instant::now();
        let clock = || i64::try_from(begun.elapsed().as_secs()).unwrap();
        let life = Life { begins: 0, ends: 30_000 };
        let (asked, first) = (Cell::new(0), Cell::new(0));
        let ask = async || {
            if asked.get() == 0 {
                first.set(clock());
            }
            asked.set(asked.get() + 1);
            if asked.get() < 20 { Err("it is away".to_owned()) } else { Ok(()) }
        };
        let told = Cell::new(0);
        from_a_third_on(&life, clock, ask, |_, _| told.set(told.get() + 1)).await;
        assert!((10_000..=10_060).contains(&first.get()), "{}", first.get());
        assert_eq!((asked.get(), told.get()), (20, 19));
        assert!(clock() > first.get() + 60, "a service that is away is not asked all the time");
    }

    fn renewal(world: &World) -> Renewal {
        let config = discovery_types::client::ClientConfig {
            urls: vec!["https://127.0.0.1:1".parse().unwrap()],
            pins: vec![Digest([1; 32])],
            key: None,
        };
        Renewal {
            client: Arc::new(Client::new(config).unwrap()),
            cluster: world.statement.cluster,
            csr: world.records[0].csr.clone(),
            statement: world.statement.clone(),
            board: Board::default(),
        }
    }

    #[test]
    fn what_is_late_is_told_and_what_is_only_due_is_not() {
        let world = World::new(1);
        let renewal = renewal(&world);
        let now = Timestamp::now().as_second();
        renewal.failed(&Life { begins: now - 50, ends: now + 50 }, "away", Duration::ZERO);
        assert_eq!(renewal.board.read().certificates_late, None);
        renewal.failed(&Life { begins: now - 70, ends: now + 30 }, "away", Duration::ZERO);
        let late = renewal.board.read().certificates_late.unwrap();
        assert!(late.contains("away") && late.contains("ca issue"), "{late}");
    }

    #[test]
    fn certificates_that_a_person_put_there_are_taken_only_if_they_are_this_members() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        let world = World::new(2);
        let journalled = world.leaves_until(0, 2080);
        let key = world.records[0].csr.verify().unwrap().node_key;
        let put = |leaves: &Leaves| {
            std::fs::write(layout.tls().join("peer.crt"), &leaves.peer).unwrap();
            std::fs::write(layout.tls().join("client.crt"), &leaves.client).unwrap();
        };
        let taken = || newest(&layout, &journalled, &key, &world.statement);
        assert_eq!(taken(), journalled, "there are none");
        put(&world.leaves(1));
        assert_eq!(taken(), journalled, "another member's");
        put(&world.leaves_until(0, 2070));
        assert_eq!(taken(), journalled, "older ones");
        let longer = world.leaves_until(0, 2090);
        put(&longer);
        assert_eq!(taken(), longer);
    }
}
