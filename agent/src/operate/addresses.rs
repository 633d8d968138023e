//! This member's addresses: those that its cluster agreed on, or those that it has moved to since.
//!
//! A host whose node has not run yet is bound to the agreed addresses. Once its node has run, the
//! host may move with its data. Its agent learns the new addresses from the flags of its next
//! start, or finds that the host has lost the old ones ([`HostAddressWatch`]).
//! [`super::relocation`] tells the other members.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use discovery_types::convert;
use discovery_types::record::Record;
use discovery_types::statement::StatementChain;
use discovery_types::url::ServiceUrl;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::cli::addressing::{AddressFlags, is_lost};
use crate::cli::settings::RunSettings;
use crate::enrol::bootstrap::record::local_address;
use crate::enrol::protocol::Protocol;
use crate::exit::ExitError;
use crate::host::Host;
use crate::observe::status::{Phase, StatusHandle};
use crate::operate::node_start;
use crate::state::addresses::Addresses;
use crate::state::journal::{JournalExtras, VerifiedJournal};
use crate::state::{Layout, lock, service};

/// How long a host must have another address before its member moves there. The old address may be
/// gone only for a moment.
const SETTLE_TIME: Duration = Duration::from_secs(10);
/// How often the host's addresses are compared with those on which the node listens.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// The error if the journal of a member lacks `what`.
pub(super) fn missing_in_journal(what: &str) -> ExitError {
    ExitError::DoNotRestart(format!(
        "the journal holds no {what}: the node can't be started from it"
    ))
}

/// Returns the member's addresses according to the journal. If the member has not moved, the listen
/// address in `flags` overrides the journalled one.
pub(crate) fn journalled_addresses(
    extras: &JournalExtras,
    record: &Record,
    flags: &AddressFlags,
) -> Result<Addresses, ExitError> {
    if let Some(moved) = &extras.moved {
        return Ok(moved.clone());
    }
    let mut listen = extras.listen.ok_or_else(|| missing_in_journal("listen address"))?;
    if let Some(address) = flags.listen {
        listen.peer.set_ip(address);
        listen.client.set_ip(address);
    }
    Ok(Addresses {
        peer_url: record.peer_urls.first().ok_or_else(|| missing_in_journal("peer URL"))?.clone(),
        client_url: record
            .client_urls
            .first()
            .ok_or_else(|| missing_in_journal("client URL"))?
            .clone(),
        listen,
    })
}

/// Returns the addresses that a start of this member would use: the journalled ones, as changed by
/// this start's flags.
pub(crate) fn current_addresses(
    loaded: &VerifiedJournal,
    settings: &RunSettings,
    own: &[IpAddr],
) -> Result<Addresses, ExitError> {
    let key = convert::public_key(loaded.journal.key);
    let record = node_start::own_record(&loaded.journal, &key)?;
    let before = journalled_addresses(&loaded.extras, &record, &settings.addressing)?;
    settings.addressing.apply_to(&before, own)
}

/// Applies this start's address flags to the journalled addresses, for a member whose node has run
/// before. `own` are the host's addresses.
pub(crate) fn apply_address_flags(
    extras: &mut JournalExtras,
    record: &Record,
    settings: &RunSettings,
    own: &[IpAddr],
) -> Result<(), ExitError> {
    if let Some(name) = settings.name.as_ref().filter(|name| **name != record.name) {
        tracing::warn!("--name {name}: this member is {} for its life", record.name);
    }
    let before = journalled_addresses(extras, record, &settings.addressing)?;
    let now = settings.addressing.apply_to(&before, own)?;
    if now == before {
        return Ok(());
    }
    if now.peer_url != before.peer_url && !settings.layout.has_log() {
        tracing::warn!(
            "this member's node has never run, and its cluster expects it at {}: it can move to {} once \
             it has run",
            before.peer_url,
            now.peer_url
        );
        return Ok(());
    }
    log_move(&before, &now);
    if lock::holder(&settings.layout.node_lock()).is_ok_and(|holder| holder.is_some()) {
        tracing::warn!(
            "this member's node still runs at its earlier addresses: to move it, stop this agent \
             and the node, and start both again"
        );
    }
    extras.note_move(&before, now, unix_seconds());
    Ok(())
}

fn log_move(before: &Addresses, now: &Addresses) {
    tracing::warn!(
        "this member was at {} (clients: {}) and is at {} (clients: {}) from now on; its agent tells \
         the cluster",
        before.peer_url,
        before.client_url,
        now.peer_url,
        now.client_url
    );
}

fn unix_seconds() -> u64 {
    jiff::Timestamp::now().as_second().unsigned_abs()
}

/// Returns the host's addresses, and those of `wanted` on which a program can listen. Such an
/// address can be missing in the host's list, for example with a local route to a network or with
/// `ip_nonlocal_bind`.
pub(crate) fn usable_addresses(host: &dyn Host, wanted: &[IpAddr]) -> Vec<IpAddr> {
    let mut own = host.addresses();
    let can_bind = |address: IpAddr| host.test_bind(SocketAddr::new(address, 0)).is_ok();
    for address in wanted {
        if is_lost(*address, &own) && can_bind(*address) {
            own.push(*address);
        }
    }
    own
}

/// Watches whether the host still has the addresses on which a member's node listens.
pub(crate) struct HostAddressWatch {
    pub host: Arc<dyn Host>,
    /// The address flags of this start. An address that a flag gives never follows the host.
    pub flags: AddressFlags,
    /// URLs of discovery. The new address is the source address of packets to them.
    pub urls: Vec<ServiceUrl>,
    /// The member's addresses in the journal when the node was started.
    pub journalled: Addresses,
    /// Paths of the node's files. A node without a log has never run. Its cluster expects it at the
    /// agreed addresses, so it can't move to its host's new addresses.
    pub layout: Layout,
}

impl HostAddressWatch {
    /// Makes the watch from the journal. `None` if the journal lacks the cluster to which this
    /// member belongs, or the member's addresses.
    pub(crate) fn of(
        host: &Arc<dyn Host>,
        layout: &Layout,
        extras: &JournalExtras,
        record: &Record,
        flags: &AddressFlags,
    ) -> Option<Self> {
        let join = extras.join.as_ref()?;
        let chain = StatementChain::verify_from_pin(&extras.statements, &join.statement).ok();
        let known = chain.and_then(|chain| service::read_known(layout, &chain));
        let urls = known.map_or_else(|| join.urls.clone(), |known| known.urls_before(&join.urls));
        let journalled = journalled_addresses(extras, record, flags).ok()?;
        Some(Self {
            host: Arc::clone(host),
            flags: flags.clone(),
            urls,
            journalled,
            layout: layout.clone(),
        })
    }

    /// Waits until the host has lost an address on which the node listens, and has had another
    /// address for some time. Returns the addresses to use. Without a route to discovery it can't
    /// choose another address, and warns that the host has lost the address.
    pub(crate) async fn wait_for_move(&self) -> Addresses {
        let mut found: Option<(Addresses, Instant)> = None;
        let mut lost_since: Option<Instant> = None;
        let mut has_warned = false;
        loop {
            let new = self.new_addresses().await;
            let is_stranded = new.is_none() && !self.lost().is_empty();
            lost_since = is_stranded.then(|| lost_since.unwrap_or_else(Instant::now));
            if lost_since.is_some_and(|since| since.elapsed() >= SETTLE_TIME) && !has_warned {
                if let Some(text) = self.waits_for() {
                    tracing::warn!("{text}");
                }
                has_warned = true;
            }
            found = match (new, found) {
                (Some(new), Some((known, since))) if new == known => {
                    if since.elapsed() >= SETTLE_TIME {
                        return new;
                    }
                    Some((known, since))
                }
                (Some(new), _) => Some((new, Instant::now())),
                (None, _) => None,
            };
            sleep(CHECK_INTERVAL).await;
        }
    }

    /// Waits at a start for the member's addresses, because a booted host gets its addresses only
    /// after some time. Returns `None` once the host has the member's addresses. If the host has
    /// had other addresses for [`SETTLE_TIME`], returns the addresses to move to.
    pub(crate) async fn wait_for_addresses(&self, board: &StatusHandle) -> Option<Addresses> {
        let text = self.waits_for()?;
        tracing::warn!("{text}");
        board.set_phase(Phase::Launching, text);
        let returned = async {
            while !self.lost().is_empty() {
                sleep(CHECK_INTERVAL).await;
            }
        };
        tokio::select! {
            new = self.wait_for_move() => Some(new),
            () = returned => None,
        }
    }

    /// Returns the status text of a start that waits for lost addresses, or `None` if the host has
    /// all of its addresses.
    pub(crate) fn waits_for(&self) -> Option<String> {
        let lost: Vec<String> = self.lost().iter().map(ToString::to_string).collect();
        (!lost.is_empty()).then(|| self.waiting_text(&lost.join(", ")))
    }

    /// Returns the status text of a start that waits for the address `lost`. The text says how the
    /// wait can end.
    fn waiting_text(&self, lost: &str) -> String {
        if !self.layout.has_log() {
            return format!(
                "waits for the address {lost}: this member's node has never run, and its cluster expects it \
                 there. Give the host this address, or give the member's place to another host \
                 (muster-agent reset, and a new token)"
            );
        }
        if self.flags.has_address() {
            return format!(
                "waits for the address {lost}, which this host doesn't have now: give it the address, or \
                 correct this start's address flags"
            );
        }
        format!(
            "waits until this host has the address {lost} again, or has had a route to discovery from \
             another address for {} s; muster-agent run --advertise-address ADDRESS chooses one",
            SETTLE_TIME.as_secs()
        )
    }

    /// Returns the addresses on which the node listens and which the host doesn't have.
    fn lost(&self) -> BTreeSet<IpAddr> {
        let (listen, own) = (self.listen(), self.usable());
        listen.into_iter().filter(|address| is_lost(*address, &own)).collect()
    }

    fn listen(&self) -> [IpAddr; 2] {
        [self.journalled.listen.peer.ip(), self.journalled.listen.client.ip()]
    }

    fn usable(&self) -> Vec<IpAddr> {
        usable_addresses(&*self.host, &self.listen())
    }

    async fn new_addresses(&self) -> Option<Addresses> {
        if self.lost().is_empty() || !self.layout.has_log() {
            return None;
        }
        let route = local_address(&*self.host, &self.urls).await.ok()?;
        self.flags.follow_host(&self.journalled, &self.usable(), route)
    }
}

/// Logs the move, and notes it in `extras`. The caller persists `extras`.
pub(crate) fn note_host_move(extras: &mut JournalExtras, before: &Addresses, now: Addresses) {
    log_move(before, &now);
    extras.note_move(before, now, unix_seconds());
}

/// Journals that the cluster has recorded the address with the number `recorded`. The agent then
/// forgets the member's former peer URLs. So if an operator sets a former URL in the cluster, the
/// agent doesn't replace it. Does nothing if the member has moved again meanwhile.
pub(crate) fn journal_recorded_address(protocol: &mut Protocol, recorded: &watch::Receiver<u64>) {
    if !protocol.extras.forget_former_addresses(*recorded.borrow()) {
        return;
    }
    if let Err(end) = protocol.persist_extras() {
        tracing::warn!(
            "it can't be journalled that the cluster knows this member's address: {end}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::fake::FakeHost;
    use crate::state::addresses::ListenAddresses;

    #[test]
    fn an_address_that_can_be_listened_on_is_not_lost_although_the_host_does_not_list_it() {
        let address = |host: u8| IpAddr::from([10, 0, 0, host]);
        let host = FakeHost { taken: vec![(address(9), 0).into()], ..FakeHost::default() };
        let usable = usable_addresses(&host, &[address(7), address(8), address(9)]);
        assert_eq!(usable, [address(7), address(8)]);
    }

    #[test]
    fn a_wait_for_a_lost_address_names_the_address_and_what_ends_the_wait() {
        let dir = tempfile::tempdir().unwrap();
        let (own, lost) = (IpAddr::from([10, 0, 0, 7]), IpAddr::from([10, 0, 0, 9]));
        let watch = |listen: IpAddr| HostAddressWatch {
            host: Arc::new(FakeHost { taken: vec![(lost, 0).into()], ..FakeHost::default() }),
            flags: AddressFlags::default(),
            urls: Vec::new(),
            journalled: Addresses {
                peer_url: format!("https://{listen}:2380").parse().unwrap(),
                client_url: format!("https://{listen}:2379").parse().unwrap(),
                listen: ListenAddresses {
                    peer: SocketAddr::new(listen, 2380),
                    client: SocketAddr::new(listen, 2379),
                },
            },
            layout: Layout::new(dir.path()).unwrap(),
        };
        assert_eq!(watch(own).waits_for(), None);
        let text = watch(lost).waits_for().unwrap();
        assert!(text.starts_with("waits for the address 10.0.0.9: "), "{text}");
        assert!(text.contains("Give the host this address"), "{text}");
    }
}
