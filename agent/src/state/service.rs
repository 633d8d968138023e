//! The service statement that this agent follows, and the one that an operator offers to it.
//!
//! Only the agent writes the file with the statement that it follows. `muster-agent context set`
//! writes another file, which the agent reads. Neither file is trusted: each reader verifies the
//! signature. A file that can't be read counts as missing, because the bundle's URLs remain.

use std::path::Path;

use discovery_types::jws::Jws;
use discovery_types::service::VerifiedService;
use discovery_types::statement::StatementChain;
use muster_files::data;

use super::{Layout, StateError};

/// Returns the service statement that this agent followed last.
pub(crate) fn read_known(layout: &Layout, chain: &StatementChain) -> Option<VerifiedService> {
    let jws = read_text(&layout.service_statement())?;
    let known = VerifiedService::verify_kept(&jws, chain);
    let refused = |error: &_| {
        let path = layout.service_statement();
        tracing::warn!("{} is not used: {error}", path.display());
    };
    known.inspect_err(refused).ok()
}

/// Writes the service statement that this agent follows from now on, durably.
pub(crate) fn write_known(layout: &Layout, service: &VerifiedService) -> Result<(), StateError> {
    Ok(data::replace(&layout.service_statement(), service.jws().as_str().as_bytes())?)
}

/// Returns the service statement that an operator offers, unverified.
pub(crate) fn read_offer(layout: &Layout) -> Option<Jws> {
    read_text(&layout.service_offer())
}

/// Writes a service statement for the agent to read, durably.
pub(crate) fn write_offer(layout: &Layout, service: &VerifiedService) -> Result<(), StateError> {
    Ok(data::replace(&layout.service_offer(), service.jws().as_str().as_bytes())?)
}

/// Removes the service statement that an operator offered.
pub(crate) fn remove_offer(layout: &Layout) -> Result<(), StateError> {
    Ok(data::remove(&layout.service_offer())?)
}

fn read_text(path: &Path) -> Option<Jws> {
    let bytes = super::read(path).ok().flatten()?;
    String::from_utf8(bytes).ok()?.trim().parse().ok()
}
