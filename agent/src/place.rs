//! Where this member is: where its cluster agreed that it should be, or where it has moved since.
//!
//! A host that has not run its node yet is bound to what was agreed on. One that has may move, with
//! its data: its peers are told by a change of members, its agent by the flags of its next start.

use std::net::IpAddr;

use discovery_types::record::Record;

use crate::addressing::{Addresses, Addressing};
use crate::exit::End;
use crate::settings::Settings;
use crate::state::journal::Keepsakes;
use crate::state::lock;

fn missing(what: &str) -> End {
    End::DoNotRestart(format!("the journal holds no {what}: the node can't be started from it"))
}

/// Where it is as far as the journal knows; `said` may have it listen elsewhere.
pub(crate) fn known(
    keepsakes: &Keepsakes,
    record: &Record,
    said: &Addressing,
) -> Result<Addresses, End> {
    if let Some(moved) = &keepsakes.moved {
        return Ok(moved.clone());
    }
    let mut listen = keepsakes.listen.ok_or_else(|| missing("listen address"))?;
    if let Some(address) = said.listen {
        listen.peer.set_ip(address);
        listen.client.set_ip(address);
    }
    Ok(Addresses {
        peer_url: record.peer_urls.first().ok_or_else(|| missing("peer URL"))?.clone(),
        client_url: record.client_urls.first().ok_or_else(|| missing("client URL"))?.clone(),
        listen,
    })
}

/// Takes what this start of a member says, which has run before and whose host has the addresses
/// `own`, into what is kept.
pub(crate) fn move_to(
    keepsakes: &mut Keepsakes,
    record: &Record,
    settings: &Settings,
    own: &[IpAddr],
) -> Result<(), End> {
    if let Some(name) = settings.name.as_ref().filter(|name| **name != record.name) {
        tracing::warn!("--name {name}: this member is {} for its life", record.name);
    }
    let before = known(keepsakes, record, &settings.addressing)?;
    let now = settings.addressing.since(&before, own)?;
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
