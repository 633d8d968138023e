//! Members that have moved: how they find each other, and how their cluster learns of it.
//!
//! A member that has moved dials the other members, and each connection serves both directions. So
//! as long as there is a leader, the agent only asks the cluster to record its member's new peer
//! URL (`MemberUpdate`). The agent replaces only URLs that this member had before, because any
//! other URL was set by an operator.
//!
//! Each agent whose member has ever moved posts a signed statement of the member's address to
//! discovery, and renews it from time to time. A member that was down meanwhile finds the others by
//! these statements.
//!
//! If so many members have moved that there is no leader, the member table is outdated and can't be
//! changed. Then the agents exchange these statements through discovery. Each statement is signed
//! by an agent, proves that this agent belongs to a member, and contains the member's node key. The
//! agent writes the addresses to a file that its node reads ([`peer_addresses`]). The node accepts
//! a peer at such an address only if the peer proves the key that the member table has for it. So
//! discovery can withhold addresses, but not put another node in a member's place. Stock etcd
//! doesn't read this file, so a majority of its members can't move at once.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use discovery_types::client::DiscoveryClient;
use discovery_types::digest::Digest;
use discovery_types::jws::Jws;
use discovery_types::key::SigningKey;
use discovery_types::member_address::{MemberAddress, SignedMemberAddress};
use discovery_types::member_proof::MemberProof;
use discovery_types::problem::Code;
use discovery_types::readmission::ReadmitRequest;
use discovery_types::statement::StatementChain;
use discovery_types::url::NodeUrl;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use crate::cluster::{
    ChangeMetadata, ClusterApiClient, ClusterError, ClusterMember, ClusterMemberChange, MemberId,
};
use crate::exit::error_chain;
use crate::launch::node_command::serves_own_certificates;
use crate::observe::status::StatusHandle;
use crate::retry::jittered;
use crate::state::Layout;
use crate::state::peer_addresses::{self, PeerAddresses};

/// How often the node is asked for its leader while it has one and the cluster has the new address.
const CALM_INTERVAL: Duration = Duration::from_secs(15);
/// How often the node is asked for its leader while it has none, or while the cluster has an
/// outdated address of this member.
const BUSY_INTERVAL: Duration = Duration::from_secs(3);
/// How long a node may be without a leader before agents exchange addresses. An election takes
/// less.
const LEADERLESS_TIME: Duration = Duration::from_secs(5);
/// How often agents exchange addresses while there is no leader. Jitter at most doubles it.
const EXCHANGE_INTERVAL: Duration = Duration::from_secs(8);
/// How often an agent posts its member's address to discovery while there is a leader. Discovery
/// can lose the address with its database. The proof in the address statement expires with the
/// member's certificate.
const POST_INTERVAL: Duration = Duration::from_secs(300);
/// Pause after a failed post of the address.
const POST_RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// How long a node must have had a leader before its agent removes the exchanged addresses. By then
/// the cluster has usually recorded them.
const FORGET_TIME: Duration = Duration::from_secs(120);

/// The task that gets a moved member's address recorded, and finds other members that have moved.
pub(crate) struct Relocation {
    /// Client of discovery, through which agents exchange addresses.
    pub client: Arc<DiscoveryClient>,
    /// The cluster's id at discovery.
    pub cluster: Uuid,
    /// API client of this host's own node.
    pub node: ClusterApiClient,
    pub layout: Layout,
    pub key: Arc<SigningKey>,
    /// Proof that this agent belongs to its member.
    pub proof: MemberProof,
    /// SHA-256 of the public key of this host's node.
    pub node_key: Digest,
    /// Hash of the pinned statement, at which the verification of the statement chain begins.
    pub pin: Digest,
    /// The longest statement chain that this agent knows.
    pub statements: watch::Receiver<Vec<Jws>>,
    /// This member's peer URL.
    pub peer_url: NodeUrl,
    /// Peer URLs of this member before it moved.
    pub former: Vec<NodeUrl>,
    /// Number of the statement of this member's addresses; 0 if it has not moved.
    pub number: u64,
    /// The request that proves to a restored service how this host joined. `None` for a founder.
    pub readmit: Option<ReadmitRequest>,
    /// Number of this member's last address that the cluster has recorded. When the number changes,
    /// the agent clears the former URLs in its journal. So the agent doesn't replace an address
    /// that an operator sets later.
    pub recorded: watch::Sender<u64>,
    /// Whether the node reads the file of its peers' addresses. Stock etcd doesn't.
    pub reads_addresses: bool,
    pub board: StatusHandle,
}

/// Findings of a [`Relocation`] so far.
#[derive(Default)]
struct Progress {
    /// Whether the cluster has recorded this member's address, or another one that an operator set.
    is_recorded: bool,
    /// Time since which the node has had no leader; `None` while it has one.
    leaderless_since: Option<Instant>,
    /// Time since which the node has always had a leader; `None` while it has none.
    led_since: Option<Instant>,
    next_exchange: Option<Instant>,
    /// When this member's address is sent to discovery again.
    next_post: Option<Instant>,
    /// Newest number and URLs that each peer has stated, by the SHA-256 of the key of the peer's
    /// node.
    heard: BTreeMap<Digest, (u64, Vec<NodeUrl>)>,
    /// Text of the last failure, so that it is logged once.
    failure: Option<String>,
}

impl Relocation {
    /// Gets this member's address recorded, and exchanges addresses while there is no leader, until
    /// the future is dropped.
    pub(crate) async fn run(self) -> Infallible {
        let mut progress = Progress { is_recorded: self.former.is_empty(), ..Progress::default() };
        self.show(progress.is_recorded);
        loop {
            let pause = self.pass(&mut progress).await;
            sleep(jittered(pause)).await;
        }
    }

    /// Asks the node for its leader once, and does what is due now. Returns the pause before the
    /// next call.
    async fn pass(&self, progress: &mut Progress) -> Duration {
        let leader = self
            .node
            .status()
            .await
            .ok()
            .and_then(|status| status.leader.map(|_| status.member_id));
        let now = Instant::now();
        let Some(own) = leader else {
            progress.led_since = None;
            let since = *progress.leaderless_since.get_or_insert(now);
            let is_due = progress.next_exchange.is_none_or(|at| now >= at);
            if now.duration_since(since) >= LEADERLESS_TIME && is_due && self.reads_addresses {
                self.exchange(progress).await;
                progress.next_exchange = Some(Instant::now() + jittered(EXCHANGE_INTERVAL));
            }
            return BUSY_INTERVAL;
        };
        (progress.leaderless_since, progress.next_exchange) = (None, None);
        self.post_if_due(progress).await;
        let since = *progress.led_since.get_or_insert(now);
        if !progress.is_recorded {
            match self.record(own).await {
                Ok(()) => {
                    progress.is_recorded = true;
                    self.recorded.send_replace(self.number);
                    self.show(true);
                }
                Err(error) => self.warn_once(
                    progress,
                    format!(
                        "the cluster doesn't record yet that this member is at {}: {error}",
                        self.peer_url
                    ),
                ),
            }
            return BUSY_INTERVAL;
        }
        if now.duration_since(since) >= FORGET_TIME {
            self.forget(progress);
        }
        CALM_INTERVAL
    }

    /// Shows in the status that the cluster hasn't recorded this member's address yet. Clears that
    /// note if the cluster has.
    fn show(&self, is_recorded: bool) {
        let text = (!is_recorded).then(|| {
            format!(
                "this member is at {}, and its cluster hasn't recorded that yet; if neither a leader nor \
                 discovery can be reached, see muster-agent address --help",
                self.peer_url
            )
        });
        self.board.update(|status| status.unrecorded_address = text);
    }

    /// Logs a failure unless it was the last one logged.
    fn warn_once(&self, progress: &mut Progress, text: String) {
        if progress.failure.as_ref() != Some(&text) {
            tracing::warn!("{text}");
            progress.failure = Some(text);
        }
    }

    /// Asks the cluster to record this member's peer URL, if the cluster has recorded a former URL
    /// of this member.
    async fn record(&self, own: MemberId) -> Result<(), String> {
        let failed = |error: ClusterError| error_chain(&error);
        let members = self.node.list_members().await.map_err(failed)?;
        let Some(member) = members.of_id(own) else { return Ok(()) };
        match recorded_address(&member.peer_urls, &self.peer_url, &self.former) {
            RecordedAddress::Current => return Ok(()),
            RecordedAddress::Unknown => {
                tracing::warn!(
                    "the cluster has this member at {}, which is neither where it is ({}) nor where it \
                     was: an operator must have set it. If it is wrong: muster-agent member update {} \
                     --peer-urls {}",
                    member.peer_urls.join(", "),
                    self.peer_url,
                    member.id,
                    self.peer_url
                );
                return Ok(());
            }
            RecordedAddress::Former => {}
        }
        if let Some(other) = holder(&members.list, own, &self.peer_url) {
            return Err(format!(
                "the cluster lists {} at this address. If that member has moved, its agent has to free the \
                 address first; if two have changed places, give one of them another address for a moment \
                 (muster-agent member update {} --peer-urls URL); if it is dead, remove it",
                other.name, other.id
            ));
        }
        let change = ClusterMemberChange::Update(own, vec![self.peer_url.to_string()]);
        let metadata = ChangeMetadata {
            operation: self.operation(own),
            planned_at: members.configuration,
            send_before: None,
        };
        self.node.carry_out(&change, &metadata).await.map_err(failed)?;
        tracing::info!("the cluster has recorded that this member is at {}", self.peer_url);
        if serves_own_certificates(&self.layout) == Some(false) {
            tracing::warn!(
                "this member serves its certificates from before the adoption, and these may not name \
                 {}: then clients, and peers that connect to it, refuse it. Once agents run all members, \
                 say muster-agent adopt certificates on this host",
                self.peer_url
            );
        }
        Ok(())
    }

    /// Returns the id of the operation that records this address. A restart of the agent doesn't
    /// change the id, so the cluster carries the operation out once.
    fn operation(&self, own: MemberId) -> [u8; 16] {
        let text = format!("{own} {} {} {}", self.cluster, self.number, self.peer_url);
        let mut operation = [0; 16];
        operation.copy_from_slice(&Digest::of(text.as_bytes()).0[..16]);
        operation
    }

    /// Posts this member's address to discovery, for members that look for it later.
    async fn post_if_due(&self, progress: &mut Progress) {
        let is_due = progress.next_post.is_none_or(|at| Instant::now() >= at);
        if self.number == 0 || !self.reads_addresses || !is_due {
            return;
        }
        let own = Some(self.own_statement());
        let pause = match self.client.exchange_addresses(self.cluster, own).await {
            Ok(_) => POST_INTERVAL,
            Err(error) => {
                tracing::debug!("the address can't be left at discovery: {}", error_chain(&error));
                POST_RETRY_INTERVAL
            }
        };
        progress.next_post = Some(Instant::now() + jittered(pause));
    }

    /// Exchanges addresses through discovery, and gives the peers' addresses to the node.
    async fn exchange(&self, progress: &mut Progress) {
        let own = (self.number > 0).then(|| self.own_statement());
        let answer = match self.client.exchange_addresses(self.cluster, own).await {
            Ok(answer) => answer,
            Err(error) => {
                if matches!(error.code(), Some(Code::UnknownKey | Code::Forbidden)) {
                    self.readmit().await;
                }
                let text = error_chain(&error);
                return self
                    .warn_once(progress, format!("addresses can't be exchanged now: {text}"));
            }
        };
        let chain = StatementChain::verify_from_pin(&self.statements.borrow(), &self.pin);
        let Ok(chain) = chain else { return };
        for signed in &answer.addresses {
            match signed.verify(chain.newest()) {
                Ok(found) if found.proven.node_key == self.node_key => {}
                Ok(found) => note(
                    &mut progress.heard,
                    found.proven.node_key,
                    (found.address.number, found.address.peer_urls),
                ),
                Err(error) => self.warn_once(
                    progress,
                    format!("an address from discovery is refused: {}", error_chain(&error)),
                ),
            }
        }
        self.give_to_node(progress);
    }

    /// Proves to the service how this host joined, since a restored database may have lost that.
    /// The task that sends reports does so, too, but only while the node has a leader.
    async fn readmit(&self) {
        let Some(readmit) = &self.readmit else { return };
        match self.client.readmit(self.cluster, readmit).await {
            Ok(_) => tracing::info!("discovery had lost how this host joined, and knows it again"),
            Err(error) => {
                tracing::debug!("discovery doesn't admit this host again: {}", error_chain(&error));
            }
        }
    }

    fn own_statement(&self) -> SignedMemberAddress {
        let address = MemberAddress {
            cluster: self.cluster,
            agent: *self.key.public(),
            number: self.number,
            peer_urls: vec![self.peer_url.clone()],
        };
        address.sign(&self.key, self.proof.clone())
    }

    /// Writes the peers' addresses where the node reads them. Addresses that an operator has put
    /// there stay, unless a peer has stated other addresses for the same node key.
    fn give_to_node(&self, progress: &mut Progress) {
        if !self.layout.has_log() {
            return;
        }
        let before = peer_addresses::read(&self.layout);
        let mut after = before.clone();
        let heard = progress.heard.iter();
        after.extend(heard.map(|(key, (_, urls))| (*key, urls.clone())));
        if after == before {
            return;
        }
        match peer_addresses::write(&self.layout, &after) {
            Ok(()) => tracing::info!(
                "the node also dials new addresses of {} members of this cluster",
                after.len()
            ),
            Err(error) => self.warn_once(
                progress,
                format!("the peers' new addresses can't be written down: {}", error_chain(&error)),
            ),
        }
    }

    /// Removes the file of peers' addresses. Once members have moved again, the node would only
    /// dial outdated addresses.
    fn forget(&self, progress: &mut Progress) {
        progress.heard.clear();
        if self.layout.peer_addresses().exists()
            && let Err(error) = peer_addresses::write(&self.layout, &PeerAddresses::new())
        {
            tracing::debug!("old addresses can't be removed: {}", error_chain(&error));
        }
    }
}

/// Kind of the address that the cluster has recorded for a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RecordedAddress {
    /// The address at which the member is.
    Current,
    /// An address at which the member was.
    Former,
    /// An address that the member's agent doesn't know.
    Unknown,
}

/// Classifies the recorded peer URLs. Several URLs count as `Former` only if all of them are.
fn recorded_address(recorded: &[String], current: &NodeUrl, former: &[NodeUrl]) -> RecordedAddress {
    let is =
        |url: &NodeUrl, text: &String| text.parse::<NodeUrl>().is_ok_and(|found| found == *url);
    if recorded.iter().any(|text| is(current, text)) {
        RecordedAddress::Current
    } else if recorded.iter().all(|text| former.iter().any(|url| is(url, text))) {
        RecordedAddress::Former
    } else {
        RecordedAddress::Unknown
    }
}

/// Returns the other member that the cluster lists at this URL, if there is one.
fn holder<'a>(
    members: &'a [ClusterMember],
    own: MemberId,
    wanted: &NodeUrl,
) -> Option<&'a ClusterMember> {
    let is_wanted = |text: &String| text.parse::<NodeUrl>().is_ok_and(|url| url == *wanted);
    members.iter().find(|member| member.id != own && member.peer_urls.iter().any(is_wanted))
}

/// Stores the addresses that a peer has stated, unless a newer statement of that peer is known.
fn note(
    heard: &mut BTreeMap<Digest, (u64, Vec<NodeUrl>)>,
    key: Digest,
    (number, urls): (u64, Vec<NodeUrl>),
) {
    let known = heard.entry(key).or_insert_with(|| (number, urls.clone()));
    if known.0 < number {
        *known = (number, urls);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(host: u8) -> NodeUrl {
        format!("https://10.0.0.{host}:2380").parse().unwrap()
    }

    #[test]
    fn only_an_address_from_before_is_replaced() {
        let text = |host: u8| url(host).to_string();
        let judge = |recorded: &[String]| recorded_address(recorded, &url(3), &[url(1), url(2)]);
        assert_eq!(judge(&[text(3)]), RecordedAddress::Current);
        assert_eq!(judge(&[text(9), text(3)]), RecordedAddress::Current);
        assert_eq!(judge(&[text(1)]), RecordedAddress::Former);
        assert_eq!(judge(&[text(2), text(1)]), RecordedAddress::Former);
        assert_eq!(judge(&[text(9)]), RecordedAddress::Unknown);
        assert_eq!(judge(&[text(1), text(9)]), RecordedAddress::Unknown);
    }

    #[test]
    fn the_member_that_is_listed_at_a_wanted_address_is_named() {
        let member = |id, host| ClusterMember {
            id: MemberId(id),
            name: format!("db-{id}"),
            peer_urls: vec![url(host).to_string()],
            client_urls: Vec::new(),
            is_learner: false,
        };
        let members = [member(1, 1), member(2, 2)];
        let found =
            |own, wanted| holder(&members, MemberId(own), &url(wanted)).map(|member| member.id.0);
        assert_eq!((found(1, 2), found(1, 1), found(1, 3)), (Some(2), None, None));
    }

    #[test]
    fn of_two_statements_of_a_peer_the_one_with_the_higher_number_counts() {
        let (mut heard, key) = (BTreeMap::new(), Digest::of(b"key"));
        note(&mut heard, key, (2, vec![url(2)]));
        note(&mut heard, key, (1, vec![url(1)]));
        assert_eq!(heard[&key], (2, vec![url(2)]));
        note(&mut heard, key, (3, vec![url(3)]));
        assert_eq!(heard[&key], (3, vec![url(3)]));
    }
}
