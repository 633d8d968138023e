//! Finds the discovery service again after it has moved, or has changed its TLS key.
//!
//! A service statement says where discovery is and which keys it has. It is signed by an owner of
//! the cluster, so it is valid from any source. This agent gets one from discovery, from the
//! cluster's own store, or from an operator (`muster-agent context set`). The agent follows the
//! newest one, keeps it in the data directory, and puts it into the store for the other members'
//! agents. The URLs in the join bundle are tried last, and only the statement's keys are accepted
//! there.
//!
//! Nothing here changes the node or the members. A wrong or withheld statement can only keep the
//! agent from discovery.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use discovery_types::client::{ClientConfig, DiscoveryClient, ServiceContact};
use discovery_types::jws::Jws;
use discovery_types::key::SigningKey;
use discovery_types::service::{ServiceOrder, VerifiedService};
use discovery_types::statement::StatementChain;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::cluster::{ClusterApiClient, ClusterError, StoredValue};
use crate::exit::error_chain;
use crate::observe::status::StatusHandle;
use crate::state::journal::Join;
use crate::state::{Layout, service};
use crate::steward::STATEMENTS;

/// Key of the service statement in the cluster's own store.
const SERVICE: &str = "muster/v1/service";
/// How often the agent checks for a statement from an operator.
pub(crate) const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// How often the agent reads the statement in the store while it reaches discovery. Without
/// discovery, it does so every [`CHECK_INTERVAL`].
const STORE_READ_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum number of warnings that are remembered, so that they aren't logged again. The oldest one
/// is forgotten first.
const MAX_REMEMBERED_WARNINGS: usize = 8;

/// Places from which the agent gets service statements.
#[derive(Clone, Copy, Debug)]
enum ServiceSource {
    Discovery,
    Store,
    Operator,
}

impl ServiceSource {
    fn name(self) -> &'static str {
        match self {
            Self::Discovery => "discovery",
            Self::Store => "the cluster's own store",
            Self::Operator => "muster-agent context set",
        }
    }
}

/// Builds the client of discovery, with the URLs and pins of the service statement that this agent
/// followed last, or else of the bundle.
pub(crate) fn make_client(
    join: &Join,
    key: &Arc<SigningKey>,
    known: Option<&VerifiedService>,
) -> Option<Arc<DiscoveryClient>> {
    let config = match known {
        Some(known) => ClientConfig {
            urls: known.urls_before(&join.urls),
            pins: known.statement().pins.clone(),
            key: Some(Arc::clone(key)),
        },
        None => ClientConfig {
            urls: join.urls.clone(),
            pins: join.pins.clone(),
            key: Some(Arc::clone(key)),
        },
    };
    let client =
        DiscoveryClient::new(config).inspect_err(|error| tracing::warn!("{}", error_chain(error)));
    client.ok().map(Arc::new)
}

/// The task that follows the newest service statement.
pub(crate) struct ServiceFinder {
    client: Arc<DiscoveryClient>,
    node: ClusterApiClient,
    layout: Layout,
    join: Join,
    /// The longest statement chain that this agent knows.
    statements: watch::Receiver<Vec<Jws>>,
    chain: StatementChain,
    /// The service statement (discovery's URLs and TLS keys) that discovery sent last.
    announced: watch::Receiver<Option<Jws>>,
    board: StatusHandle,
    known: Option<VerifiedService>,
    /// When the agent last compared the service statement in the cluster's store with the known
    /// one.
    store_read: Option<Instant>,
    warnings: Vec<String>,
}

/// Facts with which a [`ServiceFinder`] starts.
pub(crate) struct FinderStart {
    /// Client of discovery. The [`ServiceFinder`] changes the client's URLs and pins.
    pub client: Arc<DiscoveryClient>,
    /// API client of this host's own node.
    pub node: ClusterApiClient,
    /// Paths of the data directory.
    pub layout: Layout,
    /// The cluster, and the URLs and pins of the join bundle.
    pub join: Join,
    /// The longest statement chain that this agent knows.
    pub statements: watch::Receiver<Vec<Jws>>,
    /// The service statement (discovery's URLs and TLS keys) that discovery sent last.
    pub announced: watch::Receiver<Option<Jws>>,
    /// The status that shows where discovery is.
    pub board: StatusHandle,
}

impl ServiceFinder {
    /// Makes the finder, with the service statement that this agent followed last. `None` if the
    /// chain of the cluster's statements can't be verified.
    pub(crate) fn new(start: FinderStart) -> Option<Self> {
        let FinderStart { client, node, layout, join, mut statements, announced, board } = start;
        let journalled = statements.borrow_and_update().clone();
        let chain = StatementChain::verify_from_pin(&journalled, &join.statement).ok()?;
        let known = service::read_known(&layout, &chain);
        let finder = Self {
            client,
            node,
            layout,
            join,
            statements,
            chain,
            announced,
            board,
            known,
            store_read: None,
            warnings: Vec::new(),
        };
        finder.show();
        Some(finder)
    }

    /// Follows the newest service statement until the future is dropped.
    pub(crate) async fn run(mut self) -> Infallible {
        let mut contact = self.client.contact();
        loop {
            let is_unreachable =
                matches!(*contact.borrow_and_update(), ServiceContact::Unreachable { .. });
            self.pass(is_unreachable).await;
            tokio::select! {
                () = sleep(CHECK_INTERVAL) => {}
                Ok(()) = self.announced.changed() => {}
                Ok(()) = self.statements.changed() => self.update_chain(),
                Ok(()) = contact.changed() => {}
            }
        }
    }

    fn update_chain(&mut self) {
        let longer = self.statements.borrow_and_update().clone();
        if let Ok(chain) = StatementChain::verify_from_pin(&longer, &self.join.statement) {
            self.chain = chain;
        }
    }

    /// Checks each source of service statements once. Reads the cluster's store only if that is
    /// due, or if discovery `is_unreachable`.
    async fn pass(&mut self, is_unreachable: bool) {
        let announced = self.announced.borrow_and_update().clone();
        if let Some(jws) = announced {
            self.consider(&jws, ServiceSource::Discovery);
        }
        if let Some(jws) = service::read_offer(&self.layout) {
            self.consider(&jws, ServiceSource::Operator);
            if let Err(error) = service::remove_offer(&self.layout) {
                self.warn_once(error_chain(&error));
            }
        }
        let is_due = |read: Instant| is_unreachable || read.elapsed() >= STORE_READ_INTERVAL;
        if self.store_read.is_none_or(is_due) {
            match self.sync_store().await {
                Ok(()) => self.store_read = Some(Instant::now()),
                // Only log the error, and try again in the next pass. The node may have no leader
                // now, or the member may be a learner.
                Err(error) => tracing::debug!("{SERVICE}: {}", error_chain(&error)),
            }
        }
    }

    /// Follows a service statement if it is newer than the known one. Returns how the statement
    /// compares with the known one; `None` if it is refused.
    fn consider(&mut self, jws: &Jws, source: ServiceSource) -> Option<ServiceOrder> {
        let found = match VerifiedService::verify(jws, &self.chain) {
            Ok(found) => found,
            // An owner who has been removed since may have signed the known statement. The agent
            // still follows it until there is another one.
            Err(_) if self.known.as_ref().is_some_and(|known| known.jws() == jws) => {
                return Some(ServiceOrder::Same);
            }
            Err(error) => {
                self.warn_once(format!("what {} has is refused: {error}", source.name()));
                return None;
            }
        };
        let order = found.compare(self.known.as_ref(), &self.chain);
        match order {
            ServiceOrder::Newer => self.follow(found, source),
            ServiceOrder::Conflict => self.warn_once(format!(
                "{} has another service statement with the number {}: the one that came first \
                 stays. An owner announces again: muster-discovery service announce",
                source.name(),
                found.sequence()
            )),
            ServiceOrder::Same | ServiceOrder::Older => {}
        }
        Some(order)
    }

    fn follow(&mut self, found: VerifiedService, source: ServiceSource) {
        if let Err(error) = service::write_known(&self.layout, &found) {
            // The agent follows the statement although it can't be written to its file. After a
            // restart, the agent gets it again from discovery or from the cluster's store.
            self.warn_once(format!(
                "where discovery is can't be written down: {}",
                error_chain(&error)
            ));
        }
        let (urls, pins) = (found.urls_before(&self.join.urls), found.statement().pins.clone());
        if let Err(error) = self.client.set_service(urls, pins) {
            tracing::warn!("{}", error_chain(&error));
        }
        tracing::info!(
            sequence = found.sequence(),
            "{} says, with an owner's signature, that discovery is at {}",
            source.name(),
            url_list(&found)
        );
        self.known = Some(found);
        // Compare the statement in the cluster's store soon: the store may lack the new one.
        self.store_read = None;
        self.show();
    }

    fn show(&self) {
        self.board.update(|status| {
            status.service_statement = self.known.as_ref().map(VerifiedService::sequence);
            status.discovery_urls = self.known.as_ref().map(url_list);
        });
    }

    /// Follows the service statement in the cluster's store if it is newer than the known one. If
    /// it is older or missing, writes the known statement there.
    async fn sync_store(&mut self) -> Result<(), ClusterError> {
        let stored = self.node.read_key(SERVICE).await?;
        let order = match parse(&stored) {
            Some(jws) => self.consider(&jws, ServiceSource::Store),
            None => Some(ServiceOrder::Older),
        };
        let Some(known) = &self.known else { return Ok(()) };
        let is_replaced = match order {
            Some(ServiceOrder::Older) => true,
            Some(ServiceOrder::Same | ServiceOrder::Newer | ServiceOrder::Conflict) => false,
            // This agent refuses the stored statement. Its signer may be an owner whom only a
            // longer statement chain names. If the store has such a chain, leave the stored
            // statement there.
            None => {
                let statements = self.node.read_key(STATEMENTS).await?;
                chain_length(&statements) <= self.chain.jws().len()
            }
        };
        if is_replaced {
            let text = known.jws().as_str().as_bytes();
            self.node.replace_key_if_unchanged(SERVICE, &stored, text).await?;
        }
        Ok(())
    }

    fn warn_once(&mut self, text: String) {
        if self.warnings.contains(&text) {
            return;
        }
        tracing::warn!("{text}");
        if self.warnings.len() >= MAX_REMEMBERED_WARNINGS {
            self.warnings.remove(0);
        }
        self.warnings.push(text);
    }
}

fn parse(stored: &StoredValue) -> Option<Jws> {
    std::str::from_utf8(stored.value.as_deref()?).ok()?.parse().ok()
}

/// Returns the number of statements in the stored chain, unverified.
fn chain_length(stored: &StoredValue) -> usize {
    let texts = stored.value.as_ref().and_then(|bytes| serde_json::from_slice(bytes).ok());
    texts.map_or(0, |texts: Vec<String>| texts.len())
}

fn url_list(service: &VerifiedService) -> String {
    let urls: Vec<String> = service.statement().urls.iter().map(ToString::to_string).collect();
    urls.join(", ")
}

#[cfg(test)]
mod tests {
    use discovery_types::digest::Digest;
    use discovery_types::fixtures::ClusterFixture;
    use discovery_types::grant::TokenKind;
    use discovery_types::service::ServiceStatement;
    use uuid::Uuid;

    use super::*;

    fn says(world: &ClusterFixture, sequence: u64) -> ServiceStatement {
        ServiceStatement {
            version: 1,
            cluster: world.statement.cluster,
            sequence,
            urls: vec![format!("https://new-{sequence}.example:8443").parse().unwrap()],
            pins: vec![Digest::of(b"key")],
            issued_at: 1_700_000_000,
        }
    }

    struct FinderFixture {
        world: ClusterFixture,
        dir: tempfile::TempDir,
        board: StatusHandle,
        announced: watch::Sender<Option<Jws>>,
    }

    impl FinderFixture {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            Layout::new(dir.path()).unwrap().create().unwrap();
            let (board, announced) = (StatusHandle::default(), watch::Sender::new(None));
            Self { world: ClusterFixture::new(1), dir, board, announced }
        }

        fn layout(&self) -> Layout {
            Layout::new(self.dir.path()).unwrap()
        }

        fn finder(&self) -> ServiceFinder {
            let chain = self.world.chain();
            let join = Join {
                urls: vec!["https://old.example:8443".parse().unwrap()],
                pins: vec![Digest::of(b"old key")],
                cluster: self.world.statement.cluster,
                statement: chain.newest_hash(),
                kind: TokenKind::Boot,
            };
            let key = Arc::new(SigningKey::generate());
            ServiceFinder::new(FinderStart {
                client: make_client(&join, &key, None).unwrap(),
                node: ClusterApiClient::new(Vec::new()),
                layout: self.layout(),
                join,
                statements: watch::Sender::new(chain.jws()).subscribe(),
                announced: self.announced.subscribe(),
                board: self.board.clone(),
            })
            .unwrap()
        }
    }

    #[tokio::test]
    async fn a_newer_statement_is_followed_and_read_back_after_a_restart() {
        let fixture = FinderFixture::new();
        let mut finder = fixture.finder();
        assert_eq!(fixture.board.read().service_statement, None);
        for (sequence, order) in [(2, ServiceOrder::Newer), (1, ServiceOrder::Older)] {
            let jws = says(&fixture.world, sequence).sign(&fixture.world.owner);
            assert_eq!(finder.consider(&jws, ServiceSource::Discovery), Some(order));
        }
        let again = fixture.finder();
        let known = again.known.unwrap();
        assert_eq!(known.sequence(), 2);
        let status = fixture.board.read();
        assert_eq!(status.service_statement, Some(2));
        assert_eq!(status.discovery_urls.as_deref(), Some("https://new-2.example:8443"));
    }

    #[tokio::test]
    async fn only_an_owners_statement_of_this_cluster_is_followed_and_the_first_of_two() {
        let fixture = FinderFixture::new();
        let (world, mut finder) = (&fixture.world, fixture.finder());
        let mut consider = |jws: Jws| finder.consider(&jws, ServiceSource::Store);
        assert_eq!(consider(says(world, 1).sign(&SigningKey::generate())), None);
        assert_eq!(consider(says(world, 1).sign(&world.issuer)), None);
        let elsewhere = ServiceStatement { cluster: Uuid::now_v7(), ..says(world, 1) };
        assert_eq!(consider(elsewhere.sign(&world.owner)), None);
        let first = says(world, 1).sign(&world.owner);
        assert_eq!(consider(first), Some(ServiceOrder::Newer));
        let second = ServiceStatement { issued_at: 7, ..says(world, 1) };
        assert_eq!(consider(second.sign(&world.owner)), Some(ServiceOrder::Conflict));
        assert_eq!(finder.warnings.len(), 4, "each reason is told once");
    }

    #[tokio::test]
    async fn an_operators_statement_is_taken_once_whether_or_not_it_is_good() {
        let fixture = FinderFixture::new();
        let (world, layout, mut finder) = (&fixture.world, fixture.layout(), fixture.finder());
        let good = says(world, 1).sign(&world.owner);
        let good = VerifiedService::verify(&good, &world.chain()).unwrap();
        service::write_offer(&layout, &good).unwrap();
        finder.pass(false).await;
        assert_eq!(finder.known, Some(good));
        assert_eq!(service::read_offer(&layout), None);
        let other = ClusterFixture::new(1);
        let foreign = says(&other, 2).sign(&other.owner);
        let foreign = VerifiedService::verify(&foreign, &other.chain()).unwrap();
        service::write_offer(&layout, &foreign).unwrap();
        finder.pass(false).await;
        assert_eq!(finder.known.map(|known| known.sequence()), Some(1));
        assert_eq!(service::read_offer(&layout), None);
    }

    #[tokio::test]
    async fn what_discovery_shows_is_followed() {
        let fixture = FinderFixture::new();
        let mut finder = fixture.finder();
        let jws = says(&fixture.world, 1).sign(&fixture.world.owner);
        fixture.announced.send_replace(Some(jws.clone()));
        finder.pass(false).await;
        assert_eq!(finder.known.map(|known| known.jws().clone()), Some(jws));
    }

    #[test]
    fn a_damaged_file_leaves_the_bundles_urls() {
        let fixture = FinderFixture::new();
        std::fs::write(fixture.layout().service_statement(), "junk").unwrap();
        assert_eq!(fixture.finder().known, None);
    }
}
