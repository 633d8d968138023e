//! This member's addresses: those that its cluster agreed on, or those that it has moved to since.
//!
//! A host whose node has not run yet is bound to the agreed addresses. Once its node has run, the
//! host may move with its data. Its peers learn the new addresses by a membership change. Its agent
//! learns them from the flags of its next start.

use std::net::IpAddr;

use discovery_types::record::Record;

use crate::cli::addressing::AddressFlags;
use crate::cli::settings::RunSettings;
use crate::exit::ExitError;
use crate::state::addresses::Addresses;
use crate::state::journal::JournalExtras;
use crate::state::lock;

/// The error if the journal of a member lacks `what`.
pub(super) fn missing_in_journal(what: &str) -> ExitError {
    ExitError::DoNotRestart(format!(
        "the journal holds no {what}: the node can't be started from it"
    ))
}

/// Returns the member's addresses according to the journal. If the member has not moved, the listen
/// address in `said` overrides the journalled one.
pub(crate) fn journalled_addresses(
    keepsakes: &JournalExtras,
    record: &Record,
    said: &AddressFlags,
) -> Result<Addresses, ExitError> {
    if let Some(moved) = &keepsakes.moved {
        return Ok(moved.clone());
    }
    let mut listen = keepsakes.listen.ok_or_else(|| missing_in_journal("listen address"))?;
    if let Some(address) = said.listen {
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

/// Applies this start's address flags to the journalled addresses, for a member whose node has run
/// before. `own` are the host's addresses.
pub(crate) fn apply_address_flags(
    keepsakes: &mut JournalExtras,
    record: &Record,
    settings: &RunSettings,
    own: &[IpAddr],
) -> Result<(), ExitError> {
    if let Some(name) = settings.name.as_ref().filter(|name| **name != record.name) {
        tracing::warn!("--name {name}: this member is {} for its life", record.name);
    }
    let before = journalled_addresses(keepsakes, record, &settings.addressing)?;
    let now = settings.addressing.apply_to(&before, own)?;
    if now == before {
        return Ok(());
    }
    tracing::warn!(
        "this member was at {} (clients: {}) and is at {} (clients: {}) from now on. Unless its peers \
         know: muster-agent member update {} --peer-urls {}, on another member's host",
        before.peer_url,
        before.client_url,
        now.peer_url,
        now.client_url,
        record.name,
        now.peer_url
    );
    if lock::holder(&settings.layout.node_lock()).is_ok_and(|holder| holder.is_some()) {
        tracing::warn!(
            "its node runs already, where it was: it moves when it is stopped, with this agent, and \
             both are started again"
        );
    }
    keepsakes.moved = Some(now);
    Ok(())
}
