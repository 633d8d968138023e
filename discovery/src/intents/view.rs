//! Reads and shows a cluster's members and the hosts that ask for a seat. Stores why a member's
//! node has no leader.

use discovery_formation::service::{Cluster, Phase};
use discovery_types::api::{AskingHost, Explanation, MembersView};
use discovery_types::grant::Grant;
use discovery_types::jws::JwsType;
use discovery_types::key::PublicKey;
use discovery_types::statement::StatementChain;
use uuid::Uuid;

use super::standby;
use crate::app::App;
use crate::error::ApiError;
use crate::members::present::{self, RedeemSource};
use crate::members::roster::Roster;
use crate::members::silence_times;
use crate::store::UnixMicros;
use crate::store::changes::MembershipChanges;
use crate::store::clusters::Origin;
use crate::store::present::AskingHostRow;
use crate::store::unknown_members::unknown_members;

impl App {
    /// Returns a cluster's present members. The list is empty before the commit.
    pub(crate) async fn present_members(
        &self,
        (cluster, chain): (&Cluster, &StatementChain),
        origins: &[Origin],
        now: UnixMicros,
    ) -> Result<MembersView, ApiError> {
        if !is_decided(cluster) {
            return Ok(MembersView::default());
        }
        let id = Uuid::from_u128(cluster.id.0);
        let changes = self.store.membership_changes(id).await?;
        let troubles = self.store.troubles(id).await?;
        let roster = Roster::of(cluster, chain, &changes)?;
        let source = |key: &PublicKey| source_of(origins, &changes, key);
        let mut present = present::present_members(
            &roster,
            &changes,
            &troubles,
            silence_times(cluster, now, self.clock.listening_for()),
            source,
        );
        let builds = self.store.agent_builds(id).await?;
        for member in &mut present.members {
            let Some(known) = roster.by_id(member.id) else { continue };
            let build = builds.iter().find(|(key, _)| *key == known.key);
            member.agent = build.map(|(_, build)| build.clone());
        }
        present.unknown = unknown_members(&mut *self.store.acquire().await?, id).await?;
        Ok(present)
    }

    /// Explains what a formed cluster's standbys wait for.
    pub(crate) async fn standby_explanations(
        &self,
        cluster: &Cluster,
        present: &MembersView,
        name: &str,
        now: UnixMicros,
    ) -> Result<Vec<Explanation>, ApiError> {
        if cluster.phase != Phase::Formed {
            return Ok(Vec::new());
        }
        let changes = self.store.membership_changes(Uuid::from_u128(cluster.id.0)).await?;
        Ok(standby::explain(&changes, present, name, now))
    }

    /// Returns the hosts that hold a boot token and have no seat.
    pub(crate) async fn asking_hosts(
        &self,
        cluster: &Cluster,
    ) -> Result<Vec<AskingHost>, ApiError> {
        if !is_decided(cluster) {
            return Ok(Vec::new());
        }
        let rows = self.store.asking_hosts(Uuid::from_u128(cluster.id.0)).await?;
        Ok(rows.into_iter().filter_map(asking_host).collect())
    }

    /// Stores the reason why a member's node has no leader, as the member's agent reports it.
    pub(crate) async fn note_trouble(
        &self,
        cluster: Uuid,
        key: &PublicKey,
        text: &str,
    ) -> Result<(), ApiError> {
        let found = self.store.read_running(cluster).await?;
        let running = found.ok_or_else(|| ApiError::not_found("such cluster"))?;
        let roster = Roster::of(&running.cluster, &running.chain, &running.changes)?;
        let member = roster.member(key)?.id;
        self.store.note_trouble(cluster, member, text).await?;
        Ok(())
    }

    /// Stores a host that came with a boot token after the commit, and logs its first request.
    pub(crate) async fn note_asking_host(
        &self,
        cluster: Uuid,
        key: &PublicKey,
        name: &str,
        address: &str,
    ) -> Result<(), ApiError> {
        if self.store.note_asking_host(cluster, key, name, address).await? {
            tracing::warn!(cluster.id = %cluster, name, address, agent = %key.key_id(),
                "a host came with a boot token, and the cluster has its members: it needs a join \
                 ticket");
        }
        Ok(())
    }
}

/// Explains what a person should do about the members and about hosts that ask for a seat.
pub(crate) fn explain(view: &MembersView, asking: &[AskingHost], name: &str) -> Vec<Explanation> {
    let mut lines = present::explain(view, name);
    lines.extend(asking_line(view, asking, name));
    lines
}

fn asking_line(view: &MembersView, asking: &[AskingHost], name: &str) -> Option<Explanation> {
    if asking.is_empty() {
        return None;
    }
    let hosts: Vec<String> =
        asking.iter().map(|host| format!("{} from {}", host.name, host.source)).collect();
    Some(Explanation {
        code: "asking".into(),
        missing: format!(
            "hosts with a boot token ask for a place, and the cluster has its members: {}",
            hosts.join(", ")
        ),
        held_by: vec!["admin".into()],
        last_error: None,
        next_retry_ms: None,
        command: Some(ticket_command(view, name)),
    })
}

/// Returns the command that makes a ticket for a new host. If exactly one member is silent, the
/// host replaces that member.
pub(crate) fn ticket_command(view: &MembersView, name: &str) -> String {
    let mut silent = view.members.iter().filter(|member| member.is_silent);
    let replaced = match (silent.next(), silent.next()) {
        (Some(one), None) => one.display_name(),
        _ => "MEMBER".to_owned(),
    };
    format!("muster-discovery token create --cluster {name} --kind join --replace {replaced}")
}

fn is_decided(cluster: &Cluster) -> bool {
    matches!(cluster.phase, Phase::Committed | Phase::Formed | Phase::Retired)
}

/// Returns where an agent redeemed its token. A newcomer's redeem is in its intent, a founder's in
/// the `agents` table.
fn source_of(origins: &[Origin], changes: &MembershipChanges, key: &PublicKey) -> RedeemSource {
    let intent = changes.intents.iter().rev().find(|intent| intent.agent.as_ref() == Some(key));
    if let Some(intent) = intent {
        let grant = intent.intent.authority.claims_unverified::<Grant>(JwsType::Grant).ok();
        let bound_to = grant.map(|grant| grant.cidrs).unwrap_or_default();
        return RedeemSource { address: intent.address.clone(), bound_to };
    }
    let origin = origins.iter().find(|origin| origin.key[..] == key.as_bytes()[..]);
    RedeemSource {
        address: origin.and_then(|origin| origin.address.clone()),
        bound_to: origin.map(Origin::bound_to).unwrap_or_default(),
    }
}

fn asking_host(row: AskingHostRow) -> Option<AskingHost> {
    let key = PublicKey::from_bytes(row.agent_key.try_into().ok()?);
    Some(AskingHost {
        name: row.name,
        agent: key.key_id(),
        source: row.address,
        first_ms: row.first_us / 1_000,
        last_ms: row.last_us / 1_000,
        times: row.times.unsigned_abs(),
    })
}
