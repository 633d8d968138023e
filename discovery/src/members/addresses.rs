//! Addresses of members that moved: a mailbox for the agents of a cluster without a leader.
//!
//! Such a cluster can't record new addresses. Its agents sign their members' addresses, and fetch
//! each other's from here. The service makes no decision with them: agents verify them again, and
//! the nodes verify each other's keys.

use discovery_types::key::PublicKey;
use discovery_types::member_address::SignedMemberAddress;
use discovery_types::problem::Code;
use uuid::Uuid;

use super::roster::{Roster, check_running};
use crate::app::App;
use crate::error::ApiError;

impl App {
    /// Stores the address statement of the agent with this key, if there is one. Returns the newest
    /// statements of all present members.
    pub(crate) async fn exchange_addresses(
        &self,
        cluster: Uuid,
        agent: &PublicKey,
        own: Option<&SignedMemberAddress>,
    ) -> Result<Vec<SignedMemberAddress>, ApiError> {
        let running = self.store.read_running(cluster).await?;
        let running = running.ok_or_else(|| ApiError::not_found("such cluster"))?;
        check_running(&running.cluster)?;
        let roster = Roster::of(&running.cluster, &running.chain, &running.changes)?;
        let member = roster.member(agent)?;
        if let Some(signed) = own {
            let verified = signed.verify(running.chain.newest())?;
            if verified.address.agent != *agent {
                let detail = "The address is signed by another agent.";
                let next = "Send the address of the agent's own member.";
                return Err(ApiError::new(Code::RecordRefused, detail, next));
            }
            if verified.proven.node_key != member.node_key {
                let detail = "The proof is of another member.";
                let next = "Send the proof of the agent's own member.";
                return Err(ApiError::new(Code::RecordRefused, detail, next));
            }
            let (number, json) = (verified.address.number, signed.to_json());
            self.store.put_member_address(cluster, agent, number, &json).await?;
        }
        let keys: Vec<PublicKey> = roster.present_keys().copied().collect();
        let stored = self.store.member_addresses(cluster, &keys).await?;
        // Skip damaged rows: their agents send the statements again.
        Ok(stored.iter().filter_map(|text| serde_json::from_str(text).ok()).collect())
    }
}
