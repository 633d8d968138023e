//! Checks running etcds: this host's etcd, and those of the other members, have to be the members
//! that the owner signed.
//!
//! The agent can't listen on the peer address, because the etcd uses it. So the agents don't probe
//! each other. Instead, each agent asks the other etcds for their ids, with the client certificate
//! that was named at enrolment.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use discovery_formation::AgentKey;
use discovery_formation::agent::ProbeTarget;
use discovery_types::adoption::Adoption;
use discovery_types::convert;
use discovery_types::digest;
use discovery_types::name::Name;
use discovery_types::proposal::VerifiedProposal;
use discovery_types::statement::{Statement, ca_der};
use discovery_types::url::NodeUrl;

use crate::cluster::{ClusterApiClient, MemberId};
use crate::endpoint::{ClientEndpoint, ClientTlsIdentity};
use crate::exit::error_chain;
use crate::probe::Answer;
use crate::probe::client::ProbeError;

/// This host's etcd, which runs already.
#[derive(Clone, Debug)]
pub(crate) struct RunningEtcd {
    /// Id of the Raft cluster, as the etcd reports it.
    pub cluster: u64,
    /// Id of the member, as the etcd reports it.
    pub member: MemberId,
    /// The member's name at discovery.
    pub name: Name,
    /// CA with which the etcd verifies peers, PEM.
    pub peer_ca: String,
    /// CA with which the etcd verifies clients, PEM.
    pub client_ca: String,
    /// Client identity for requests to the members.
    pub identity: ClientTlsIdentity,
}

/// The etcd of another member.
#[derive(Clone, Debug)]
pub(crate) struct EtcdTarget {
    cluster: u64,
    member: digest::MemberId,
    client_urls: Vec<NodeUrl>,
    identity: ClientTlsIdentity,
}

impl RunningEtcd {
    /// Checks that this etcd is the member that the owner signed. The error names the difference.
    pub(crate) fn check(&self, adopted: &Adoption, statement: &Statement) -> Result<(), String> {
        if adopted.raft_cluster_id() != Some(self.cluster) {
            return Err(format!(
                "the etcd of this host belongs to the cluster {:016x}, and the owner signed {}",
                self.cluster, adopted.raft_cluster
            ));
        }
        let signed = adopted.member(&self.name).map(|member| member.id.get());
        if signed != Some(self.member.0) {
            return Err(format!(
                "the etcd of this host is the member {} ({}), and the owner signed no such member",
                self.member, self.name
            ));
        }
        let is_trusted = |mut cas: Box<dyn Iterator<Item = &str> + '_>, own: &str| {
            let own = ca_der(own);
            own.is_some() && cas.any(|ca| ca_der(ca) == own)
        };
        if !is_trusted(Box::new(statement.peer_cas()), &self.peer_ca) {
            return Err(
                "the --peer-trusted-ca-file of this etcd is not the one CA that the owner \
                        signed: survey again with --peer-cacert"
                    .to_owned(),
            );
        }
        if !is_trusted(Box::new(statement.client_cas()), &self.client_ca) {
            return Err(
                "the --trusted-ca-file of this etcd is not the one CA that the owner signed: \
                        survey again with --cacert"
                    .to_owned(),
            );
        }
        Ok(())
    }

    /// Returns the etcds of the members in the proposed list, by the keys of their agents.
    pub(super) fn targets(&self, list: &VerifiedProposal) -> BTreeMap<AgentKey, EtcdTarget> {
        let target = |record: &discovery_types::record::VerifiedRecord| {
            let member = list.adopted()?.member_of(record)?;
            let target = EtcdTarget {
                cluster: self.cluster,
                member: member.id,
                client_urls: member.client_urls.clone(),
                identity: self.identity.clone(),
            };
            Some((convert::key(&record.agent_key), target))
        };
        list.records().iter().filter_map(target).collect()
    }
}

impl EtcdTarget {
    /// Asks the member's etcd for its ids. If these are the ids that the owner signed, returns an
    /// answer like the one that the member's agent would give to a probe. It contains no release.
    pub(super) async fn probe(
        &self,
        target: &ProbeTarget,
    ) -> Result<(Answer, Duration), ProbeError> {
        let began = Instant::now();
        let failed = |error: &dyn std::error::Error| ProbeError::Etcd(error_chain(error));
        let endpoints = self
            .client_urls
            .iter()
            .map(|url| ClientEndpoint::of_member(&url.to_string(), Some(&self.identity)))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| failed(&error))?;
        let status = ClusterApiClient::new(endpoints).status().await;
        let status = status.map_err(|error| failed(&error))?;
        if (status.cluster_id, status.member_id.0) != (self.cluster, self.member.get()) {
            return Err(ProbeError::Etcd(format!(
                "the member {} of cluster {:016x} answers there",
                status.member_id, status.cluster_id
            )));
        }
        let answer = Answer {
            key: convert::public_key(target.key),
            incarnation: convert::wire_incarnation(target.incarnation),
            released: None,
        };
        Ok((answer, began.elapsed()))
    }
}

#[cfg(test)]
mod tests {
    use discovery_types::adoption::AdoptedMember;
    use discovery_types::fixtures::{ClusterFixture, TestCa};
    use discovery_types::statement::CaPair;

    use super::*;

    #[test]
    fn only_the_signed_member_with_the_signed_cas_is_accepted() {
        let dir = tempfile::tempdir().unwrap();
        let world = ClusterFixture::new(1);
        let leaves = world.leaves(0);
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let identity = ClientTlsIdentity::load(
            &file("ca", &world.statement.client_ca),
            &file("crt", &leaves.client),
            &file("key", &world.node_keys[0].key_pem),
        )
        .unwrap();
        let old = TestCa::new("etcd").pem;
        let statement = Statement {
            also_trusted: Some(CaPair { peer: old.clone(), client: old.clone() }),
            ..world.statement.clone()
        };
        let adopted = Adoption {
            raft_cluster: "00000000000000ff".to_owned(),
            members: vec![AdoptedMember {
                id: digest::MemberId::new(0xa),
                name: "a".parse().unwrap(),
                peer_url: "https://10.0.0.1:2380".parse().unwrap(),
                client_urls: vec!["https://10.0.0.1:2379".parse().unwrap()],
            }],
        };
        let own = RunningEtcd {
            cluster: 0xff,
            member: MemberId(0xa),
            name: "a".parse().unwrap(),
            peer_ca: old.clone(),
            client_ca: old,
            identity,
        };
        assert_eq!(own.check(&adopted, &statement), Ok(()));
        let other = TestCa::new("other").pem;
        let wrong = [
            RunningEtcd { cluster: 1, ..own.clone() },
            RunningEtcd { member: MemberId(0xb), ..own.clone() },
            RunningEtcd { name: "b".parse().unwrap(), ..own.clone() },
            RunningEtcd { peer_ca: other.clone(), ..own.clone() },
            RunningEtcd { client_ca: format!("{}{other}", own.client_ca), ..own },
        ];
        for (number, wrong) in wrong.into_iter().enumerate() {
            assert!(wrong.check(&adopted, &statement).is_err(), "case {number}");
        }
    }
}
