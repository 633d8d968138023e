//! Approvals of hosts. A cluster's statement can ask for approvals. An issuer then compares the
//! fingerprint of each host's key, and signs that the host may be a founder. A host with only a
//! join bundle then gets no seat in the list of members.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::jws::{Jws, JwsError, JwsType};
use crate::key::{PublicKey, SigningKey};
use crate::role::Action;
use crate::statement::StatementChain;

/// Payload of an approval, which is a JWS by the key of an admin that may mint boot tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Approval {
    /// Cluster that the host may be a founder of.
    pub cluster: Uuid,
    /// Public key of the host's agent.
    pub agent: PublicKey,
}

/// Reason why an approval is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApprovalError {
    /// The signature, kind or form is wrong, or the signer may not approve hosts.
    #[error("the approval: {0}")]
    Jws(#[from] JwsError),
    /// The approval is for another cluster.
    #[error("the approval is for another cluster")]
    OtherCluster,
}

impl Approval {
    /// Signs the approval as an issuer.
    pub fn sign(&self, issuer: &SigningKey) -> Jws {
        Jws::sign(JwsType::Approval, issuer, self)
    }

    /// Verifies that an admin of the cluster's newest statement, who may mint boot tokens, approved
    /// a host.
    pub fn verify(jws: &Jws, chain: &StatementChain) -> Result<Self, ApprovalError> {
        let newest = chain.newest();
        let issuers = newest.keys_for(Action::ApproveHost);
        let approval: Self = jws.verify_any(JwsType::Approval, issuers)?;
        match approval.cluster == newest.cluster {
            true => Ok(approval),
            false => Err(ApprovalError::OtherCluster),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::ClusterFixture;

    #[test]
    fn an_approval_counts_if_an_issuer_signed_it_for_this_cluster() {
        let world = ClusterFixture::new(3);
        let chain = world.chain();
        let agent = *SigningKey::generate().public();
        let approval = Approval { cluster: world.statement.cluster, agent };
        for admin in [&world.issuer, &world.owner] {
            assert_eq!(Approval::verify(&approval.sign(admin), &chain), Ok(approval.clone()));
        }
        let stranger = approval.sign(&SigningKey::generate());
        assert!(matches!(Approval::verify(&stranger, &chain), Err(ApprovalError::Jws(_))));
        let elsewhere = Approval { cluster: Uuid::now_v7(), agent };
        let refused = Approval::verify(&elsewhere.sign(&world.issuer), &chain);
        assert_eq!(refused, Err(ApprovalError::OtherCluster));
    }
}
