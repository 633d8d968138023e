//! Renews this member's certificates: after a third of their life, after the member has moved, and
//! after the cluster's CAs have been replaced.
//!
//! The old certificates serve until they are renewed. Peers that know a node's key accept an
//! expired certificate, too. So renewal is retried for as long as it takes, and nothing waits for
//! it.

use std::sync::Arc;
use std::time::Duration;

use discovery_types::client::DiscoveryClient;
use discovery_types::csr::Csr;
use discovery_types::digest::Digest;
use discovery_types::leaves::{Leaves, Validity, certificate_hosts};
use discovery_types::statement::Statement;
use discovery_types::url::UrlHost;
use jiff::{SignedDuration, Timestamp};
use uuid::Uuid;

use crate::exit::error_chain;
use crate::observe::status::StatusHandle;
use crate::retry::Retry;
use crate::state::addresses::Addresses;
use crate::state::{self, Layout};

/// How often the wall clock is read while waiting, since somebody may set the clock meanwhile.
const CLOCK_CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// Data and clients for renewing certificates.
pub(crate) struct Renewal {
    /// Client of the discovery service.
    pub client: Arc<DiscoveryClient>,
    /// The cluster's id at discovery.
    pub cluster: Uuid,
    /// The certificate signing request in this member's record.
    pub csr: Csr,
    /// This member's addresses, which its certificates have to contain.
    pub addresses: Addresses,
    /// The newest statement, which contains the CA certificates.
    pub statement: Statement,
    /// The status in which the expiry is shown.
    pub board: StatusHandle,
}

impl Renewal {
    /// Waits until the present certificates, `now`, are due for renewal, then returns new ones.
    pub(crate) async fn next_certificates(&self, now: &Leaves) -> Leaves {
        let Some(life) = now.validity() else { return std::future::pending().await };
        let old = ExpiringCertificates {
            life,
            is_for_own_address: self.is_for_own_address(now),
            are_by_issuing_cas: now.are_by_issuing_cas(&self.statement),
        };
        // Certificates for another address, or of other CAs, are due at once.
        let is_due = !old.is_for_own_address || !old.are_by_issuing_cas;
        let due = if is_due { i64::MIN } else { life.renewal_due() };
        if !is_due && unix_seconds() < life.renewal_overdue() {
            // The warning may be out of date: if an owner has undone a switch of CAs, the
            // certificates are right again without a renewal.
            self.board.update(|status| status.certificates_late = None);
        }
        let failed = |why: &str, pause| self.report_failure(&old, why, pause);
        let leaves =
            wait_and_renew(due, unix_seconds, async || self.request_once(&old).await, failed).await;
        self.board.update(|status| {
            if status.certificates_late.take().is_some() {
                status.next_retry_at = None;
            }
        });
        leaves
    }

    /// Returns whether the certificates name this member's address. The client certificate is
    /// compared only if the client URL has the peer URL's host, because the cluster agrees only on
    /// peer URLs.
    fn is_for_own_address(&self, leaves: &Leaves) -> bool {
        let name = |pem: &str, host: &UrlHost| certificate_hosts(pem.as_bytes()).contains(host);
        let Addresses { peer_url, client_url, .. } = &self.addresses;
        let elsewhere = client_url.host() != peer_url.host();
        name(&leaves.peer, peer_url.host())
            && (elsewhere || name(&leaves.client, client_url.host()))
    }

    async fn request_once(&self, old: &ExpiringCertificates) -> Result<Leaves, String> {
        let leaves = self.client.renew_leaves(self.cluster, &self.csr).await;
        self.check_new(leaves.map_err(|error| error_chain(&error))?, old)
    }

    /// Returns the certificates that discovery has sent, if they are better than the old ones, and
    /// otherwise the reason why not. A service that was restored from a backup may still issue
    /// certificates of replaced CAs. Members trust replaced CAs only until the last step of the
    /// replacement.
    fn check_new(&self, leaves: Leaves, old: &ExpiringCertificates) -> Result<Leaves, String> {
        let node_key = self.csr.verify().map_err(|error| error_chain(&error))?.node_key;
        leaves.verify(&node_key, &self.statement).map_err(|error| error_chain(&error))?;
        if !leaves.are_by_issuing_cas(&self.statement) {
            return Err(
                "discovery doesn't issue certificates of the cluster's new CAs yet".to_owned()
            );
        }
        match leaves.validity() {
            Some(_) if !old.are_by_issuing_cas => Ok(leaves),
            Some(life) if life.ends > old.life.ends => {
                if self.is_for_own_address(&leaves) || unix_seconds() >= old.life.renewal_due() {
                    return Ok(leaves);
                }
                let at = &self.addresses.peer_url;
                Err(format!("discovery hasn't heard yet that the cluster knows it at {at}"))
            }
            _ => Err("discovery's new certificates don't last longer than the old ones".to_owned()),
        }
    }

    fn report_failure(&self, old: &ExpiringCertificates, why: &str, pause: Duration) {
        let now = Timestamp::now();
        tracing::debug!("the certificates are not renewed yet: {why}");
        let is_late = now.as_second() >= old.life.renewal_overdue();
        if !old.is_for_own_address || !old.are_by_issuing_cas || is_late {
            let what = if !old.are_by_issuing_cas {
                "the certificates are not from the CAs that issue now".to_owned()
            } else if old.is_for_own_address {
                let ends = Timestamp::from_second(old.life.ends).unwrap_or_default();
                format!("the certificates end at {ends}, and are not renewed")
            } else {
                let at = self.addresses.peer_url.host();
                format!("the certificates are not for {at}, where this member is now")
            };
            let text = format!(
                "{what}: {why}. A person can make new ones without the service: muster-discovery ca \
                 issue"
            );
            let at = now + SignedDuration::try_from(pause).unwrap_or_default();
            self.board.update(|status| {
                match &status.certificates_late {
                    // This is only a warning, because the cause may be temporary. Discovery learns
                    // of a new address some seconds late, and the first request for certificates of
                    // new CAs may fail.
                    None if !is_late => tracing::warn!("{text}"),
                    None => tracing::error!("{text}"),
                    Some(_) => {}
                }
                status.certificates_late = Some(text);
                status.next_retry_at = Some(at);
            });
        }
    }
}

/// The certificates to renew.
struct ExpiringCertificates {
    life: Validity,
    /// Whether the certificates name this member's address.
    is_for_own_address: bool,
    /// Whether these certificates are from the CAs that issue according to the newest statement.
    are_by_issuing_cas: bool,
}

fn unix_seconds() -> i64 {
    Timestamp::now().as_second()
}

/// Waits until the time `due`, then calls `ask` until it succeeds.
async fn wait_and_renew<T>(
    due: i64,
    clock: impl Fn() -> i64,
    ask: impl AsyncFn() -> Result<T, String>,
    failed: impl Fn(&str, Duration),
) -> T {
    while let Ok(left @ 1..) = u64::try_from(due.saturating_sub(clock())) {
        tokio::time::sleep(CLOCK_CHECK_INTERVAL.min(Duration::from_secs(left))).await;
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

/// Returns the certificates for a start: the journal's, or those that a person has put into the
/// `tls` directory. Certificates in that directory must be this member's, and are used in three
/// cases:
/// - Only they are from the issuing CAs.
/// - Both or neither are from the issuing CAs, and they end later.
/// - The CAs of the journal's certificates are no longer trusted.
pub(crate) fn newest_certificates(
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
    let ends = |leaves: &Leaves| leaves.validity().map(|life| life.ends);
    let rank = |leaves: &Leaves| (leaves.are_by_issuing_cas(statement), ends(leaves));
    let is_better = |found: &Leaves| {
        rank(found) > rank(journalled) || journalled.verify(node_key, statement).is_err()
    };
    match found {
        Some(found) if found != *journalled => match found.verify(node_key, statement) {
            Ok(()) if is_better(&found) => {
                tracing::info!("the certificates in {} are taken", layout.tls().display());
                found
            }
            Ok(()) => journalled.clone(),
            Err(error) => {
                tracing::warn!(
                    "the certificates in {} are replaced by the agent's earlier ones: {}",
                    layout.tls().display(),
                    error_chain(&error)
                );
                journalled.clone()
            }
        },
        _ => journalled.clone(),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use discovery_types::fixtures::{ClusterFixture, TestCa};

    use super::*;
    use crate::state::addresses::ListenAddresses;

    #[tokio::test(start_paused = true)]
    async fn certificates_are_requested_after_a_third_of_their_life_until_they_come() {
        let begun = tokio::time::Instant::now();
        let clock = || i64::try_from(begun.elapsed().as_secs()).unwrap();
        let life = Validity { begins: 0, ends: 30_000 };
        let (asked, first) = (Cell::new(0), Cell::new(0));
        let ask = async || {
            if asked.get() == 0 {
                first.set(clock());
            }
            asked.set(asked.get() + 1);
            if asked.get() < 20 { Err("it is away".to_owned()) } else { Ok(()) }
        };
        let told = Cell::new(0);
        wait_and_renew(life.renewal_due(), clock, ask, |_, _| told.set(told.get() + 1)).await;
        assert!((10_000..=10_060).contains(&first.get()), "{}", first.get());
        assert_eq!((asked.get(), told.get()), (20, 19));
        assert!(clock() > first.get() + 60, "a service that is away is not asked all the time");
    }

    fn at(host: &str) -> Addresses {
        let url = |port| format!("https://{host}:{port}").parse().unwrap();
        let listen = ListenAddresses { peer: ([0; 4], 2380).into(), client: ([0; 4], 2379).into() };
        Addresses { peer_url: url(2380), client_url: url(2379), listen }
    }

    #[test]
    fn certificates_are_compared_with_this_members_address() {
        let world = ClusterFixture::new(2);
        let leaves = world.leaves(0);
        let mut renewal = renewal(&world);
        assert!(
            renewal.is_for_own_address(&leaves),
            "{:?}",
            certificate_hosts(leaves.peer.as_bytes())
        );
        renewal.addresses = at("10.0.0.2");
        assert!(!renewal.is_for_own_address(&leaves));
        renewal.addresses = Addresses { client_url: at("10.0.0.9").client_url, ..at("10.0.0.1") };
        assert!(renewal.is_for_own_address(&leaves), "discovery would not issue it");
    }

    #[tokio::test(start_paused = true)]
    async fn short_lived_certificates_are_renewed_in_time() {
        let begun = tokio::time::Instant::now();
        let clock = || i64::try_from(begun.elapsed().as_secs()).unwrap();
        let life = Validity { begins: 0, ends: 15 };
        wait_and_renew(life.renewal_due(), clock, async || Ok(()), |_, _| {}).await;
        assert_eq!(clock(), 5);
    }

    fn renewal(world: &ClusterFixture) -> Renewal {
        let config = discovery_types::client::ClientConfig {
            urls: vec!["https://127.0.0.1:1".parse().unwrap()],
            pins: vec![Digest([1; 32])],
            key: None,
        };
        Renewal {
            client: Arc::new(DiscoveryClient::new(config).unwrap()),
            cluster: world.statement.cluster,
            csr: world.records[0].csr.clone(),
            addresses: at("10.0.0.1"),
            statement: world.statement.clone(),
            board: StatusHandle::default(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn certificates_of_cas_that_do_not_issue_any_more_are_renewed_at_once() {
        let world = ClusterFixture::new(1);
        let mut renewal = renewal(&world);
        let leaves = world.leaves(0);
        let is_asking = async |renewal: &Renewal| {
            // No certificates come in this test, so a due renewal never ends.
            let asked = tokio::time::timeout(Duration::from_secs(5), async {
                renewal.next_certificates(&leaves).await
            });
            assert!(asked.await.is_err());
            renewal.board.read().certificates_late.clone()
        };
        assert_eq!(is_asking(&renewal).await, None);
        let also_trusted = Some(renewal.statement.issuing_cas());
        let (peer, client) = (TestCa::new("peers").pem, TestCa::new("clients").pem);
        renewal.statement =
            Statement { peer_ca: peer, client_ca: client, also_trusted, ..renewal.statement };
        let late = is_asking(&renewal).await.unwrap();
        assert!(late.contains("not from the CAs that issue now"), "{late}");
    }

    #[test]
    fn certificates_from_a_service_that_issues_by_the_old_cas_are_refused() {
        let world = ClusterFixture::new(1);
        let mut renewal = renewal(&world);
        let csr = &world.records[0].csr;
        let (peer, client) = (TestCa::new("peers"), TestCa::new("clients"));
        let by_new = Leaves {
            peer: peer.issue_for(csr, "10.0.0.1"),
            client: client.issue_for(csr, "10.0.0.1"),
        };
        let by_old = world.leaves(0);
        let mixed = Leaves { peer: by_new.peer.clone(), client: by_old.client.clone() };
        let old = |are_by_issuing_cas| ExpiringCertificates {
            life: Validity { begins: 0, ends: 1 },
            is_for_own_address: true,
            are_by_issuing_cas,
        };
        // At first, the old CAs are still trusted. Then they are dropped.
        let old_cas = world.statement.issuing_cas();
        for also_trusted in [Some(old_cas), None] {
            renewal.statement = Statement {
                peer_ca: peer.pem.clone(),
                client_ca: client.pem.clone(),
                also_trusted,
                ..world.statement.clone()
            };
            for are_new in [false, true] {
                for refused in [&by_old, &mixed] {
                    let answer = renewal.check_new(refused.clone(), &old(are_new));
                    assert!(answer.is_err(), "{:?}", renewal.statement.also_trusted);
                }
                assert_eq!(renewal.check_new(by_new.clone(), &old(are_new)), Ok(by_new.clone()));
            }
        }
        // If the switch is undone, the first CAs issue certificates again.
        renewal.statement = world.statement.clone();
        assert_eq!(renewal.check_new(by_old.clone(), &old(false)), Ok(by_old));
    }

    #[test]
    fn only_a_late_renewal_is_reported() {
        let world = ClusterFixture::new(1);
        let renewal = renewal(&world);
        let now = Timestamp::now().as_second();
        let old = |begins, ends, fit| ExpiringCertificates {
            life: Validity { begins, ends },
            is_for_own_address: fit,
            are_by_issuing_cas: true,
        };
        renewal.report_failure(&old(now - 50, now + 50, true), "away", Duration::ZERO);
        assert_eq!(renewal.board.read().certificates_late, None);
        renewal.report_failure(&old(now - 50, now + 50, false), "away", Duration::ZERO);
        let moved = renewal.board.read().certificates_late.unwrap();
        assert!(moved.contains("not for 10.0.0.1"), "{moved}");
        renewal.report_failure(&old(now - 70, now + 30, true), "away", Duration::ZERO);
        let late = renewal.board.read().certificates_late.unwrap();
        assert!(late.contains("away") && late.contains("ca issue"), "{late}");
    }

    #[test]
    fn certificates_in_the_tls_directory_are_used_only_if_they_are_ours_and_end_later() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        let world = ClusterFixture::new(2);
        let journalled = world.leaves_until(0, 2080);
        let key = world.records[0].csr.verify().unwrap().node_key;
        let put = |leaves: &Leaves| {
            std::fs::write(layout.tls().join("peer.crt"), &leaves.peer).unwrap();
            std::fs::write(layout.tls().join("client.crt"), &leaves.client).unwrap();
        };
        let taken = || newest_certificates(&layout, &journalled, &key, &world.statement);
        assert_eq!(taken(), journalled, "there are none");
        put(&world.leaves(1));
        assert_eq!(taken(), journalled, "another member's");
        put(&world.leaves_until(0, 2070));
        assert_eq!(taken(), journalled, "older ones");
        let csr = &world.records[0].csr;
        let (peer, client) = (TestCa::new("peers"), TestCa::new("clients"));
        put(&Leaves { peer: peer.issue_until(csr, 2090), client: client.issue_until(csr, 2090) });
        assert_eq!(taken(), journalled, "of CAs that nobody trusts any more");
        let longer = world.leaves_until(0, 2090);
        put(&longer);
        assert_eq!(taken(), longer);
    }

    #[test]
    fn of_trusted_certificates_those_of_the_issuing_cas_are_used_even_if_they_end_earlier() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        let world = ClusterFixture::new(1);
        let csr = &world.records[0].csr;
        let key = csr.verify().unwrap().node_key;
        let (peer, client) = (TestCa::new("peers"), TestCa::new("clients"));
        let by_new =
            Leaves { peer: peer.issue_until(csr, 2080), client: client.issue_until(csr, 2080) };
        let by_old = world.leaves_until(0, 2090);
        let statement = Statement {
            peer_ca: peer.pem,
            client_ca: client.pem,
            also_trusted: Some(world.statement.issuing_cas()),
            ..world.statement.clone()
        };
        for (found, journalled) in [(&by_old, &by_new), (&by_new, &by_old)] {
            std::fs::write(layout.tls().join("peer.crt"), &found.peer).unwrap();
            std::fs::write(layout.tls().join("client.crt"), &found.client).unwrap();
            assert_eq!(newest_certificates(&layout, journalled, &key, &statement), by_new);
        }
    }

    #[test]
    fn certificates_of_new_cas_are_used_even_if_they_end_earlier_than_those_of_dropped_cas() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        let world = ClusterFixture::new(1);
        let (old, csr) = (world.leaves_until(0, 2090), &world.records[0].csr);
        let key = csr.verify().unwrap().node_key;
        let (peer, client) = (TestCa::new("peers"), TestCa::new("clients"));
        let new =
            Leaves { peer: peer.issue_until(csr, 2080), client: client.issue_until(csr, 2080) };
        std::fs::write(layout.tls().join("peer.crt"), &new.peer).unwrap();
        std::fs::write(layout.tls().join("client.crt"), &new.client).unwrap();
        let statement =
            Statement { peer_ca: peer.pem, client_ca: client.pem, ..world.statement.clone() };
        assert_eq!(newest_certificates(&layout, &old, &key, &statement), new);
        assert_eq!(newest_certificates(&layout, &old, &key, &world.statement), old);
    }
}
