//! This agent's record: built for this start, or taken from the journal.

use std::net::{IpAddr, SocketAddr};

use discovery_types::bundle::Bundle;
use discovery_types::convert;
use discovery_types::jws::JwsType;
use discovery_types::key::PublicKey;
use discovery_types::name::Name;
use discovery_types::record::{Record, SignedRecord};
use discovery_types::url::{ServiceUrl, UrlHost};

use crate::cli::settings::RunSettings;
use crate::enrol::node_key;
use crate::enrol::protocol::Protocol;
use crate::exit::{ExitError, error_chain};
use crate::host::Host;
use crate::state::addresses::Addresses;
use crate::state::journal::signed_record;
use crate::state::state_exit_error;

/// Returns the local address from which packets to the service leave.
pub(crate) async fn local_address(host: &dyn Host, urls: &[ServiceUrl]) -> Result<IpAddr, String> {
    let mut last = "no URL of the service is known".to_owned();
    for url in urls {
        match resolve(url).await {
            Ok(peer) => match host.route_to(peer) {
                Ok(address) => return Ok(address),
                Err(error) => last = format!("no route to {url}: {error}"),
            },
            Err(error) => last = error,
        }
    }
    Err(last)
}

async fn resolve(url: &ServiceUrl) -> Result<SocketAddr, String> {
    match url.host() {
        UrlHost::Address(address) => Ok((*address, url.port()).into()),
        UrlHost::Dns(name) => tokio::net::lookup_host((name.as_str(), url.port()))
            .await
            .map_err(|error| format!("can't resolve {name}: {error}"))?
            .next()
            .ok_or_else(|| format!("{name} has no address")),
    }
}

/// Returns the record for this start. Without a bundle, that is the journal's record. With a
/// bundle, it is a new record, unless the journal's is still correct or must not change any more.
/// Makes the node's key durable before a record names it.
pub(crate) fn choose_record(
    protocol: &Protocol,
    settings: &RunSettings,
    zone: Option<Name>,
    host: &dyn Host,
    addresses: &Addresses,
    bundle: Option<&Bundle>,
) -> Result<SignedRecord, ExitError> {
    let csr = node_key::node_request(&protocol.layout).map_err(state_exit_error)?;
    let own = *protocol.key.public();
    let journal = &protocol.agent.journal;
    let name = settings.name.clone().unwrap_or_else(|| default_name(&host.name(), &own));
    let known = journal.record.as_deref().map(signed_record);
    let claims: Option<Record> =
        known.as_ref().and_then(|signed| signed.record.verify(JwsType::Record, &own).ok());
    let Some(bundle) = bundle else {
        return known.ok_or_else(|| {
            ExitError::Usage(
                "this host has not redeemed a join bundle yet: say --bundle-file FILE (or - for \
                 standard input); an admin makes one with muster-discovery token create"
                    .to_owned(),
            )
        });
    };
    let node_key = csr.verify().map_err(|error| ExitError::Failed(error_chain(&error)))?.node_key;
    let wanted = Record {
        version: 1,
        cluster: bundle.cluster,
        grant: bundle.token.id(),
        agent_key: own,
        incarnation: convert::wire_incarnation(journal.incarnation),
        name,
        peer_urls: vec![addresses.peer_url.clone()],
        client_urls: vec![addresses.client_url.clone()],
        csr,
        machine: convert::machine_facts(&journal.machine),
        zone,
    };
    if let (Some(signed), Some(claims)) = (known, claims) {
        let same_key =
            journal.record.as_ref().is_some_and(|r| r.node_key == convert::hash(&node_key));
        // A signing request's signature is random, so two requests for one key differ. So the
        // comparison leaves the requests out.
        if same_key && claims == (Record { csr: claims.csr.clone(), ..wanted.clone() }) {
            return Ok(signed);
        }
        if !journal.may_change_record() {
            tracing::warn!(
                "name, zone, address or token differ from what this host has signed in a list that may \
                 still be committed: it stays with what it signed"
            );
            return Ok(signed);
        }
    }
    Ok(wanted.sign(&protocol.key, bundle.token.key()))
}

/// Returns the host's name and four hex digits of its key, so that two hosts with equal names
/// differ.
pub(crate) fn default_name(host_name: &str, key: &PublicKey) -> Name {
    /// A name has at most 63 characters; the hyphen and the four hex digits take five.
    const MAX_STEM_LENGTH: usize = 58;
    let first_label = host_name.split('.').next().unwrap_or_default().to_ascii_lowercase();
    let mapped: String = first_label
        .chars()
        .map(|c| if c.is_ascii_lowercase() || c.is_ascii_digit() { c } else { '-' })
        .take(MAX_STEM_LENGTH)
        .collect();
    let trimmed = mapped.trim_matches('-');
    let stem = if trimmed.is_empty() { "host" } else { trimmed };
    let digits = data_encoding::HEXLOWER.encode(&key.as_bytes()[..2]);
    format!("{stem}-{digits}").parse().expect("letters, digits and inner hyphens make a name")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::fake::FakeHost;

    #[test]
    fn every_host_name_makes_a_valid_member_name_that_ends_with_digits_of_the_key() {
        let key = PublicKey::from_bytes([0xab; 32]);
        for (host, name) in [
            ("db-1", "db-1-abab"),
            ("DB_1.example.org", "db-1-abab"),
            ("", "host-abab"),
            ("-_-", "host-abab"),
        ] {
            assert_eq!(default_name(host, &key).to_string(), name, "{host:?}");
        }
        assert_eq!(default_name(&"x".repeat(200), &key).to_string().len(), 63);
    }

    #[tokio::test]
    async fn the_local_address_follows_from_the_route_to_the_service() {
        let host = FakeHost::default();
        let urls = ["https://192.0.2.1:8443".parse().unwrap()];
        assert_eq!(local_address(&host, &urls).await.unwrap(), host.address);
        assert!(local_address(&host, &[]).await.is_err());
    }
}
