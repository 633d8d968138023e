//! Addresses of members that moved: a mailbox for the agents of a cluster without a leader.
//!
//! Such a cluster can't record new addresses. Its agents sign their members' addresses, and fetch
//! each other's from here. The service makes no decision with these addresses: agents verify them
//! again, and the nodes verify each other's keys.

use discovery_formation::service::{Cluster, Phase};
use discovery_types::api::{Explanation, MembersView};
use discovery_types::digest::MemberId;
use discovery_types::key::PublicKey;
use discovery_types::member_address::SignedMemberAddress;
use discovery_types::problem::Code;
use discovery_types::statement::StatementChain;
use discovery_types::url::NodeUrl;
use uuid::Uuid;

use super::present::member_explanation;
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
        // Skip damaged rows: their agents send the address statements again.
        Ok(stored.iter().filter_map(|text| serde_json::from_str(text).ok()).collect())
    }

    /// Explains which members of a formed cluster have moved to an address that the cluster hasn't
    /// recorded yet.
    pub(crate) async fn move_explanations(
        &self,
        cluster: &Cluster,
        chain: &StatementChain,
        present: &MembersView,
    ) -> Result<Vec<Explanation>, ApiError> {
        if cluster.phase != Phase::Formed {
            return Ok(Vec::new());
        }
        let id = Uuid::from_u128(cluster.id.0);
        let changes = self.store.membership_changes(id).await?;
        let roster = Roster::of(cluster, chain, &changes)?;
        let keys: Vec<PublicKey> = roster.present_keys().copied().collect();
        let stored = self.store.member_addresses(id, &keys).await?;
        // Skip address statements that can't be verified: agents would refuse them, too.
        let moved = stored.iter().filter_map(|text| {
            let signed: SignedMemberAddress = serde_json::from_str(text).ok()?;
            let address = signed.verify(chain.newest()).ok()?.address;
            let member = roster.member(&address.agent).ok()?;
            Some((member.id, address.peer_urls))
        });
        Ok(explain_moves(present, moved))
    }
}

/// Explains each moved member whose address isn't recorded by the cluster yet. `moved` has the
/// members with the URLs in their address statements.
fn explain_moves(
    present: &MembersView,
    moved: impl Iterator<Item = (MemberId, Vec<NodeUrl>)>,
) -> Vec<Explanation> {
    let explain = |(id, urls): (MemberId, Vec<NodeUrl>)| {
        let member = present.members.iter().find(|member| member.id == id)?;
        // Compare parsed URLs, as agents do: the cluster may list the same URL in another spelling.
        let is_new = |text: &String| text.parse::<NodeUrl>().is_ok_and(|url| urls.contains(&url));
        let is_recorded = member.peer_urls.iter().any(is_new);
        if is_recorded || member.is_released {
            return None;
        }
        let urls: Vec<String> = urls.iter().map(ToString::to_string).collect();
        let who = member.display_name();
        let missing = format!(
            "{who} has moved to {}, and the cluster still lists it at {}",
            urls.join(", "),
            member.peer_urls.join(", ")
        );
        let command = format!(
            "wait: its agent has the cluster record the new address once there is a leader. It \
             leaves an address that somebody has set by hand: if that one is wrong, muster-agent \
             member update {} --peer-urls {}. If this stays otherwise, look at `muster-agent \
             status` on that host",
            member.id,
            urls.join(",")
        );
        Some(member_explanation("member_moved", member, missing, &command))
    };
    moved.filter_map(explain).collect()
}

#[cfg(test)]
mod tests {
    use discovery_types::api::MemberView;

    use super::*;
    use crate::members::present;

    fn member(id: u64) -> MemberView {
        let peer_urls = vec![format!("https://10.0.0.{id}:2380")];
        MemberView { peer_urls, ..present::tests::member(id, Some(1), false) }
    }

    #[test]
    fn a_move_is_explained_unless_it_is_recorded_or_its_member_is_gone_or_released() {
        let url = |host: u8| -> Vec<NodeUrl> {
            vec![format!("https://10.0.0.{host}:2380").parse().unwrap()]
        };
        let released = MemberView { is_released: true, ..member(3) };
        let present = MembersView {
            confirmed: true,
            members: vec![member(1), member(2), released],
            ..MembersView::default()
        };
        let moved = [(1, url(9)), (2, url(2)), (3, url(8)), (4, url(7))];
        let moved = moved.into_iter().map(|(id, urls)| (MemberId::new(id), urls));
        let lines = explain_moves(&present, moved);
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert_eq!(
            (lines[0].code.as_str(), &lines[0].held_by[..]),
            ("member_moved", &["db-1".to_owned()][..])
        );
        assert_eq!(
            lines[0].missing,
            "db-1 has moved to https://10.0.0.9:2380, and the cluster still lists it at \
             https://10.0.0.1:2380"
        );
        let command = lines[0].command.as_deref().unwrap();
        let by_hand = "member update 0000000000000001 --peer-urls https://10.0.0.9:2380";
        assert!(command.contains(by_hand), "{command}");
    }

    #[test]
    fn an_address_that_is_recorded_in_another_spelling_is_recorded() {
        let spelled = |text: &str| {
            let listed = MemberView { peer_urls: vec![text.to_owned()], ..member(1) };
            let present =
                MembersView { confirmed: true, members: vec![listed], ..MembersView::default() };
            let urls: Vec<NodeUrl> = vec!["https://db-1.example:2380".parse().unwrap()];
            explain_moves(&present, [(MemberId::new(1), urls)].into_iter()).len()
        };
        assert_eq!(["https://DB-1.example:2380", "https://db-2.example:2380"].map(spelled), [0, 1]);
    }
}
