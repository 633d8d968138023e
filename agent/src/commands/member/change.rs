//! The verbs that change one thing.

use serde::Serialize;

use super::{Answers, Survey, find};
use crate::cli::{Add, MoveLeader, Promote, Remove, Update};
use crate::cluster::{Carrying, Change, Cluster, Member, MemberId, Members, NewMember};
use crate::exit::End;

/// What `--json` prints of a change.
#[derive(Serialize)]
struct Done<'a> {
    member_id: MemberId,
    cluster_id: String,
    /// The configuration since; `null` from stock etcd.
    configuration: Option<u64>,
    members: &'a [Member],
    /// What the new member has to be told.
    #[serde(skip_serializing_if = "Option::is_none")]
    environment: Option<Vec<(&'static str, String)>>,
}

impl<'a> Done<'a> {
    fn of(member_id: MemberId, members: &'a Members) -> Self {
        Self {
            member_id,
            cluster_id: format!("{:x}", members.cluster_id),
            configuration: members.configuration,
            members: &members.list,
            environment: None,
        }
    }
}

/// `member add`.
pub(super) async fn add(
    cluster: &Cluster,
    typed: &Add,
    answers: &mut Answers<'_, '_>,
) -> Result<(), End> {
    let new = NewMember {
        peer_urls: typed.peer_urls.clone(),
        is_learner: !typed.voter,
        ..NewMember::default()
    };
    let members = cluster.carry_out(&Change::Add(new), &Carrying::anew()).await?;
    let added = members.of_peer_urls(&typed.peer_urls).ok_or_else(|| {
        End::Failed(format!("{} was added, and has been removed again since", typed.name))
    })?;
    let environment = environment(&typed.name, added, &members);
    let role = if added.is_learner { " as a learner" } else { "" };
    let text = || {
        let mut lines = vec![format!(
            "Member {} added to cluster {:x}{role}. Start it now, with:\n",
            added.id, members.cluster_id
        )];
        lines.extend(environment.iter().map(|(name, value)| format!("{name}=\"{value}\"")));
        if added.is_learner {
            lines.push(format!("\nand then: muster-agent member promote {}", typed.name));
        }
        lines.join("\n")
    };
    let done = Done { environment: Some(environment.clone()), ..Done::of(added.id, &members) };
    answers.give(&done, text)
}

/// What a new member is started with, as etcd reads it.
pub(super) fn environment(
    name: &str,
    added: &Member,
    members: &Members,
) -> Vec<(&'static str, String)> {
    let mut initial = Vec::new();
    for member in &members.list {
        let of = if member.id == added.id { name } else { &member.name };
        initial.extend(member.peer_urls.iter().map(|url| format!("{of}={url}")));
    }
    vec![
        ("ETCD_NAME", name.to_owned()),
        ("ETCD_INITIAL_CLUSTER", initial.join(",")),
        ("ETCD_INITIAL_ADVERTISE_PEER_URLS", added.peer_urls.join(",")),
        ("ETCD_INITIAL_CLUSTER_STATE", "existing".to_owned()),
    ]
}

/// `member promote`.
pub(super) async fn promote(
    cluster: &Cluster,
    typed: &Promote,
    answers: &mut Answers<'_, '_>,
) -> Result<(), End> {
    let members = cluster.list().await?;
    let id = find(&members.list, &typed.member)?.id;
    let members = cluster.carry_out(&Change::Promote(id), &Carrying::anew()).await?;
    answers.give(&Done::of(id, &members), || {
        format!("Member {id} promoted in cluster {:x}", members.cluster_id)
    })
}

/// `member update`.
pub(super) async fn update(
    cluster: &Cluster,
    typed: &Update,
    answers: &mut Answers<'_, '_>,
) -> Result<(), End> {
    let members = cluster.list().await?;
    let id = find(&members.list, &typed.member)?.id;
    let change = Change::Update(id, typed.peer_urls.clone());
    let members = cluster.carry_out(&change, &Carrying::anew()).await?;
    answers.give(&Done::of(id, &members), || {
        let urls = typed.peer_urls.join(",");
        format!(
            "Member {id} updated in cluster {:x}. Restart it now, with \
             --initial-advertise-peer-urls={urls} and listening there",
            members.cluster_id
        )
    })
}

/// `member remove`.
pub(super) async fn remove(
    cluster: &Cluster,
    typed: &Remove,
    answers: &mut Answers<'_, '_>,
) -> Result<(), End> {
    let survey = Survey::of(cluster).await?;
    let id = find(&survey.members.list, &typed.member)?.id;
    if survey.leader == Some(id) {
        hand_over(cluster, &survey, None).await?;
    }
    let members = cluster.carry_out(&Change::Remove(id), &Carrying::anew()).await?;
    answers.give(&Done::of(id, &members), || {
        format!("Member {id} removed from cluster {:x}", members.cluster_id)
    })
}

/// What `--json` prints of a new leader.
#[derive(Serialize)]
struct Moved {
    from: MemberId,
    to: MemberId,
}

/// `member move-leader`.
pub(super) async fn move_leader(
    cluster: &Cluster,
    typed: &MoveLeader,
    answers: &mut Answers<'_, '_>,
) -> Result<(), End> {
    let survey = Survey::of(cluster).await?;
    let to = match &typed.member {
        Some(typed) => Some(find(&survey.members.list, typed)?.id),
        None => None,
    };
    let from = survey.leader.ok_or_else(|| End::Failed("nobody leads".to_owned()))?;
    let to = hand_over(cluster, &survey, to).await?;
    answers.give(&Moved { from, to }, || format!("Leadership moved from {from} to {to}"))
}

/// Lets `to`, or who is nearest to the leader's log, take over. Gives who did.
async fn hand_over(
    cluster: &Cluster,
    survey: &Survey,
    to: Option<MemberId>,
) -> Result<MemberId, End> {
    let leader = survey.leader.and_then(|id| survey.members.of_id(id));
    let leader = leader.ok_or_else(|| End::Failed("nobody leads".to_owned()))?;
    let nearest = || {
        survey
            .each()
            .filter(|(member, _)| !member.is_learner && member.id != leader.id)
            .filter_map(|(member, said)| Some((member.id, said.as_ref().ok()?.applied_index)))
            .max_by_key(|(_, applied)| *applied)
            .map(|(id, _)| id)
    };
    let to = to.or_else(nearest);
    let to = to.ok_or_else(|| End::Failed("no other voter answers".to_owned()))?;
    if to != leader.id {
        cluster.move_leader(leader, to).await?;
    }
    Ok(to)
}
