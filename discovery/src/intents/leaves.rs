//! Renews a member's certificates, and exports a cluster's CAs.

use discovery_types::api::ClusterExport;
use discovery_types::csr::Csr;
use discovery_types::key::PublicKey;
use discovery_types::leaves::Leaves;
use discovery_types::problem::Code;
use discovery_types::statement::StatementChain;
use discovery_types::url::NodeUrl;
use uuid::Uuid;

use super::refuse_removed;
use crate::app::App;
use crate::ca::{MemberLeaf, hosts};
use crate::ca_rotation::check_issuing;
use crate::error::ApiError;
use crate::forming::show;
use crate::members::roster::{Roster, RosterMember, check_running};
use crate::store::changes::MembershipChanges;
use crate::store::cluster::RunningCluster;
use crate::store::{Store, StoreError, UnixMicros};

impl App {
    /// Issues the peer and the client certificate of a member, for the key in its record. A
    /// newcomer gets its first certificates by this call, too.
    pub(crate) async fn renew_leaves(
        &self,
        cluster: Uuid,
        key: &PublicKey,
        csr: &Csr,
    ) -> Result<Leaves, ApiError> {
        // Use one connection for all SQL statements, because each use of the pool costs two pings.
        let mut connection = self.store.acquire().await?;
        let found = self.store.read_running_and_authorities(&mut connection, cluster).await?;
        let (running, authorities) = found.ok_or_else(|| ApiError::not_found("such cluster"))?;
        let RunningCluster { cluster: state, chain, now, changes } = running;
        refuse_removed(&changes, Some(key))?;
        check_running(&state)?;
        let roster = Roster::of(&state, &chain, &changes)?;
        let member = roster.member(key)?;
        let asked = csr.verify().map_err(|error| {
            let next = "Send a PKCS#10 request of the node's own key.";
            ApiError::new(Code::CsrRefused, format!("{error}."), next)
        })?;
        if asked.node_key != member.node_key {
            let next = "A member keeps its node's key for life; another key is another member.";
            let detail = "The request is over another key than the member's record has.";
            return Err(ApiError::new(Code::CsrRefused, detail, next));
        }
        check_issuing(&authorities, chain.newest())?;
        let authority = self.open_cluster_issuer(cluster, &authorities)?;
        let leaf = MemberLeaf {
            trust_domain: &self.keys.settings.trust_domain,
            cluster,
            member: &member.label,
            peer_hosts: &peer_hosts(member, &changes),
            client_hosts: &client_hosts(member, &changes),
        };
        let leaves = authority.issue_member(csr.der(), &leaf, now.0 / 1_000_000)?;
        let issued_us = now.0 as UnixMicros;
        Store::note_leaves(&mut connection, cluster, key, &leaves, issued_us).await?;
        drop(connection);
        tracing::info!(cluster.id = %cluster, member.id = %member.id, name = %member.record.name,
            "issued a member's certificates");
        Ok(show::leaves(&leaves))
    }

    /// Exports a cluster's CA keys, encrypted with the key directory's KEK, and the signed
    /// documents that the keys belong to.
    pub(crate) async fn export(&self, cluster: Uuid) -> Result<ClusterExport, ApiError> {
        let (delivery, statements) = self.document(cluster, None).await?;
        let delivery = delivery.ok_or_else(|| {
            let next = "Wait until the cluster is committed.";
            ApiError::new(Code::WrongState, "There is no document yet.", next)
        })?;
        let authorities = self.store.authorities(cluster).await?;
        check_issuing(&authorities, StatementChain::verify_links(&statements)?.newest())?;
        let encoded = |key: Option<Vec<u8>>| {
            let missing = || StoreError::damaged(format!("a CA's key of cluster {cluster}"));
            key.map(|key| data_encoding::BASE64.encode(&key)).ok_or_else(missing)
        };
        Ok(ClusterExport {
            version: 1,
            cluster,
            trust_domain: self.keys.settings.trust_domain.clone(),
            statements,
            document: delivery.document,
            peer_ca_key: encoded(authorities.peer.wrapped_key)?,
            client_ca_key: encoded(authorities.client.wrapped_key)?,
        })
    }
}

/// Returns the hosts of the member's peer URLs. The list that the cluster has confirmed takes
/// precedence over the member's record, because the member can have moved.
fn peer_hosts(member: &RosterMember, changes: &MembershipChanges) -> Vec<String> {
    let listed = confirmed_peer_urls(member, changes);
    hosts(&urls_to_strings(if listed.is_empty() { &member.record.peer_urls } else { &listed }))
}

/// Returns the hosts for the client certificate: the hosts of the client URLs in the member's
/// record, and of the member's confirmed peer URLs. Client URLs that a node publishes are ignored.
/// Otherwise the node could get a certificate for another host's name.
fn client_hosts(member: &RosterMember, changes: &MembershipChanges) -> Vec<String> {
    hosts(&urls_to_strings(
        &[member.record.client_urls.clone(), confirmed_peer_urls(member, changes)].concat(),
    ))
}

/// Returns the member's peer URLs in the confirmed list. URLs that don't parse are left out.
fn confirmed_peer_urls(member: &RosterMember, changes: &MembershipChanges) -> Vec<NodeUrl> {
    let confirmed = changes.confirmed.iter().flat_map(|said| &said.membership.members);
    let listed = confirmed.filter(|listed| listed.id == member.id);
    // A host's record holds normalised URLs, but the cluster's member list can hold any text. So
    // parse each URL.
    listed.flat_map(|listed| &listed.peer_urls).filter_map(|url| url.parse().ok()).collect()
}

fn urls_to_strings(urls: &[NodeUrl]) -> Vec<String> {
    urls.iter().map(NodeUrl::to_string).collect()
}
