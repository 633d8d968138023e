//! Tests of the list of certificates that hosts got by a token.

use discovery_types::api::{CertificatePurpose, IssuedCertificate};
use discovery_types::grant::GrantId;
use x509_parser::prelude::*;

use super::{CommittedCluster, added};
use crate::tests::agent::TestAgent;

/// Returns the serial number and the end of a certificate (PEM) as the service should list them.
fn listed(purpose: CertificatePurpose, pem: &str) -> IssuedCertificate {
    let (_, pem) = parse_x509_pem(pem.as_bytes()).unwrap();
    let certificate = pem.parse_x509().unwrap();
    IssuedCertificate {
        purpose,
        serial: certificate.raw_serial_as_string().replace(':', "").to_uppercase(),
        expires_at_ms: certificate.validity().not_after.timestamp() * 1_000,
    }
}

impl CommittedCluster {
    /// Fetches the certificates of the only host that redeemed a token.
    async fn certificates(&self, grant: GrantId) -> Vec<IssuedCertificate> {
        let mut hosts = self.admin.redemptions(grant).await.unwrap().redemptions;
        assert_eq!(hosts.len(), 1, "{hosts:?}");
        hosts.remove(0).certificates
    }

    /// Has an agent fetch new certificates, and returns them as the service should list them.
    async fn renew(&self, agent: &TestAgent) -> [IssuedCertificate; 2] {
        let id = self.statement.cluster;
        let leaves = agent.client.renew_leaves(id, &agent.record.csr).await.unwrap();
        [
            listed(CertificatePurpose::Peer, &leaves.peer),
            listed(CertificatePurpose::Client, &leaves.client),
        ]
    }
}

#[tokio::test]
async fn a_founders_token_lists_its_first_certificates_and_the_renewed_ones() {
    let cluster = CommittedCluster::of(1).await;
    let founder = &cluster.agents[0];
    let document = founder.client.document(cluster.statement.cluster).await.unwrap();
    let first = document.leaves.unwrap();
    let first = [
        listed(CertificatePurpose::Peer, &first.peer),
        listed(CertificatePurpose::Client, &first.client),
    ];
    assert_eq!(cluster.certificates(cluster.token.id()).await, first);
    let renewed = cluster.renew(founder).await;
    assert_ne!(first[0].serial, renewed[0].serial);
    assert_eq!(cluster.certificates(cluster.token.id()).await, [first, renewed].concat());
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_ticket_lists_the_certificates_of_its_own_host_only() {
    let cluster = CommittedCluster::of(1).await;
    let newcomer = cluster.newcomer(9).await;
    let joined = newcomer.join().await.unwrap();
    let ticket = newcomer.record.grant;
    assert!(cluster.certificates(ticket).await.is_empty());
    cluster.report_outcome(&cluster.agents[0], &joined.intent, added(77), 20).await.unwrap();
    let own = cluster.renew(&newcomer).await;
    cluster.renew(&cluster.agents[0]).await;
    assert_eq!(cluster.certificates(ticket).await, own);
    // The certificates stay known after the token was revoked, because they can still be used.
    cluster.admin.revoke_grant(ticket).await.unwrap();
    assert_eq!(cluster.certificates(ticket).await, own);
    cluster.service.stop().await;
}

/// A member that asks for certificates in a loop must not fill the database.
#[tokio::test]
async fn only_the_newest_certificates_of_a_host_are_kept() {
    let cluster = CommittedCluster::of(1).await;
    let founder = &cluster.agents[0];
    let mut newest = Vec::new();
    for _ in 0..34 {
        newest = cluster.renew(founder).await.to_vec();
    }
    let listed = cluster.certificates(cluster.token.id()).await;
    assert_eq!(listed.len(), 2 + 64, "a founder's first two, and the newest 64");
    assert_eq!(listed[64..], newest);
    cluster.service.stop().await;
}
