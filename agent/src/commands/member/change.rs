//! The subcommands that make one change, and the steps common to all changes.

use std::time::Duration;

use serde::Serialize;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::{Answers, Survey, find, wait};
use crate::cli::{Add, MoveLeader, Promote, Remove, Update};
use crate::cluster::{
    Carrying, Change, Cluster, ClusterError, Member, MemberId, Members, NewMember,
};
use crate::exit::{End, Kind};
use crate::plan::{Objection, Plan, Wanted, plan};

/// How long a change is retried while the cluster refuses it because its members have not been
/// connected for 5 s, and the pause between attempts.
const SETTLE_LIMIT: Duration = Duration::from_secs(15);
const SETTLE_AGAIN: Duration = Duration::from_millis(500);
/// How long to wait for a new leader to be known, and the pause between checks.
const LEADER_LIMIT: Duration = Duration::from_secs(5);
const LEADER_AGAIN: Duration = Duration::from_millis(50);

/// The output of `--json` for a change.
#[derive(Serialize)]
struct Done<'a> {
    member_id: MemberId,
    cluster_id: String,
    /// The configuration after the change; `null` from stock etcd.
    configuration: Option<u64>,
    members: &'a [Member],
    /// Environment variables for starting the new member.
    #[serde(skip_serializing_if = "Option::is_none")]
    environment: Option<Environment>,
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

/// The changes that one command makes. Each is bound to the configuration of the last survey.
pub(super) struct Session {
    cluster: Cluster,
}

impl Session {
    /// Begins the changes. Fails if the configuration differs from `planned`.
    pub(super) fn begin(survey: &Survey, planned: Option<u64>) -> Result<Self, End> {
        match (planned, survey.members.configuration) {
            (Some(_), None) => Err(End::Usage(
                "--plan-at: this is stock etcd, which has no configuration index and refuses no \
                 stale plan"
                    .to_owned(),
            )),
            (Some(planned), Some(now)) if planned != now => {
                let text = format!(
                    "the plan is stale: it was made at configuration {planned}, and the members are \
                     at {now}. Nothing was changed; plan again"
                );
                Err(End::Cluster(Kind::Stale, text))
            }
            _ => Ok(Self { cluster: survey.cluster.clone() }),
        }
    }

    /// Makes a change, only if the configuration is still the one that `survey` saw.
    pub(super) async fn change(
        &self,
        survey: &Survey,
        change: &Change,
        answers: &Answers<'_, '_>,
    ) -> Result<Members, End> {
        self.change_as(survey, change, *Uuid::new_v4().as_bytes(), answers).await
    }

    /// Makes a change with the operation id `operation`, with which the cluster carries it out
    /// once.
    async fn change_as(
        &self,
        survey: &Survey,
        change: &Change,
        operation: [u8; 16],
        answers: &Answers<'_, '_>,
    ) -> Result<Members, End> {
        let start = Instant::now();
        let enough_answer = survey.sight().is_well();
        loop {
            let carrying = Carrying { operation, planned_at: survey.members.configuration };
            match self.cluster.carry_out(change, &carrying).await {
                Err(ClusterError::Refused { text, .. })
                    if text.ends_with("unhealthy cluster")
                        && enough_answer
                        && start.elapsed() < SETTLE_LIMIT =>
                {
                    if start.elapsed() < SETTLE_AGAIN {
                        answers.note("waiting until the members have been connected for 5 s");
                    }
                    sleep(SETTLE_AGAIN).await;
                }
                answer => return Ok(answer?),
            }
        }
    }

    /// Removes a member. If it leads, it hands over the leadership first.
    async fn remove(
        &self,
        survey: &Survey,
        id: MemberId,
        answers: &Answers<'_, '_>,
    ) -> Result<Members, End> {
        self.remove_as(survey, id, *Uuid::new_v4().as_bytes(), answers).await
    }

    /// Removes a member with the operation id `operation`, by which a later run can tell that it
    /// made the removal.
    pub(super) async fn remove_as(
        &self,
        survey: &Survey,
        id: MemberId,
        operation: [u8; 16],
        answers: &Answers<'_, '_>,
    ) -> Result<Members, End> {
        if survey.leader == Some(id) && survey.members.list.len() > 1 {
            hand_over(survey, None).await?;
        }
        self.change_as(survey, &Change::Remove(id), operation, answers).await
    }

    /// Prints the result of a command that made several changes.
    pub(super) fn done(
        &self,
        survey: &Survey,
        id: MemberId,
        answers: &mut Answers<'_, '_>,
        text: impl FnOnce(&Members) -> String,
    ) -> Result<(), End> {
        let members = &survey.members;
        answers.give(&Done::of(id, members), || text(members))
    }
}

/// Runs the subcommand `member add`.
pub(super) async fn add(
    cluster: &Cluster,
    typed: &Add,
    answers: &mut Answers<'_, '_>,
) -> Result<(), End> {
    let survey = Survey::first(cluster, answers).await?;
    let session = Session::begin(&survey, typed.planned.plan_at)?;
    let planned = plan(&survey.sight(), &typed.wanted());
    refuse_at_once(&planned)?;
    answers.notes(&planned.warnings);
    let new = NewMember {
        peer_urls: typed.peer_urls.clone(),
        is_learner: !typed.voter,
        ..NewMember::default()
    };
    let members = session.change(&survey, &Change::Add(new), answers).await?;
    let added = members.of_peer_urls(&typed.peer_urls).ok_or_else(|| {
        End::Failed(format!("{} was added, and has been removed again since", typed.name))
    })?;
    let environment = environment(&typed.name, added, &members);
    let text = || {
        let role = if added.is_learner { " as a learner" } else { "" };
        let next = if added.is_learner {
            let (id, wait) = (added.id, "which waits until it is in sync");
            format!("\n\nand then: muster-agent member promote {id} ({wait})")
        } else {
            String::new()
        };
        format!(
            "Member {} added to cluster {:x}{role}. Start it now, with:\n\n{}{next}",
            added.id,
            members.cluster_id,
            print_environment(&environment)
        )
    };
    let done = Done { environment: Some(environment.clone()), ..Done::of(added.id, &members) };
    answers.give(&done, text)
}

/// Refuses a change whose objections don't depend on the cluster's state, with the text of `member
/// plan`. The cluster itself would accept a second member of one name, but the name would be
/// ambiguous for people.
pub(super) fn refuse_at_once(plan: &Plan) -> Result<(), End> {
    for objection in &plan.objections {
        match objection {
            Objection::NameTaken { .. } => return Err(End::Usage(objection.to_string())),
            Objection::BadUrl(_) => {
                return Err(End::Cluster(Kind::Refused, format!("refused: {objection}")));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Environment variables for starting a new member, in the form that etcd and `muster-node` read.
pub(super) type Environment = std::collections::BTreeMap<&'static str, String>;

/// Returns the variables for starting `added`, whose name is `name`.
pub(super) fn environment(name: &str, added: &Member, members: &Members) -> Environment {
    let mut initial = Vec::new();
    for member in &members.list {
        let of = if member.id == added.id { name } else { &member.name };
        initial.extend(member.peer_urls.iter().map(|url| format!("{of}={url}")));
    }
    Environment::from([
        ("ETCD_NAME", name.to_owned()),
        ("ETCD_INITIAL_CLUSTER", initial.join(",")),
        ("ETCD_INITIAL_ADVERTISE_PEER_URLS", added.peer_urls.join(",")),
        ("ETCD_INITIAL_CLUSTER_STATE", "existing".to_owned()),
    ])
}

/// Formats the variables for a shell, one per line.
pub(super) fn print_environment(environment: &Environment) -> String {
    let lines = environment.iter().map(|(name, value)| format!("{name}={}", quoted(value)));
    lines.collect::<Vec<_>>().join("\n")
}

/// Quotes a value for a shell: in double quotes, as etcdctl does, unless a shell would interpret
/// its content. Any member can choose such a name, and people paste these lines.
fn quoted(value: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.:/=,@%+[]".contains(c);
    if value.chars().all(is_plain) {
        return format!("\"{value}\"");
    }
    format!("'{}'", value.replace('\'', r"'\''"))
}

/// Runs the subcommand `member promote`.
pub(super) async fn promote(
    cluster: &Cluster,
    typed: &Promote,
    answers: &mut Answers<'_, '_>,
) -> Result<(), End> {
    let mut survey = Survey::first(cluster, answers).await?;
    let session = Session::begin(&survey, typed.planned.plan_at)?;
    let member = find(&survey.members.list, &typed.member)?.clone();
    answers.notes(&plan(&survey.sight(), &Wanted::Promote(member.id)).warnings);
    if !typed.no_wait && member.is_learner {
        let patience = Duration::from_secs(typed.patience.patience);
        survey = wait::in_sync(&survey, member.id, patience, answers).await?;
        Session::begin(&survey, typed.planned.plan_at)?;
    }
    let members = session.change(&survey, &Change::Promote(member.id), answers).await?;
    answers.give(&Done::of(member.id, &members), || {
        format!("Member {} promoted in cluster {:x}", member.id, members.cluster_id)
    })
}

/// Runs the subcommand `member update`.
pub(super) async fn update(
    cluster: &Cluster,
    typed: &Update,
    answers: &mut Answers<'_, '_>,
) -> Result<(), End> {
    let survey = Survey::first(cluster, answers).await?;
    let session = Session::begin(&survey, typed.planned.plan_at)?;
    let id = find(&survey.members.list, &typed.member)?.id;
    let planned = plan(&survey.sight(), &Wanted::Update(id, typed.peer_urls.clone()));
    refuse_at_once(&planned)?;
    answers.notes(&planned.warnings);
    let change = Change::Update(id, typed.peer_urls.clone());
    let members = session.change(&survey, &change, answers).await?;
    answers.give(&Done::of(id, &members), || {
        let urls = typed.peer_urls.join(",");
        format!(
            "Member {id} updated in cluster {:x}. Restart it there now: its agent with \
             --advertise-address (or --peer-url), a node without agent with \
             --initial-advertise-peer-urls={urls}, listening there",
            members.cluster_id
        )
    })
}

/// Runs the subcommand `member remove`.
pub(super) async fn remove(
    cluster: &Cluster,
    typed: &Remove,
    answers: &mut Answers<'_, '_>,
) -> Result<(), End> {
    let survey = Survey::first(cluster, answers).await?;
    let session = Session::begin(&survey, typed.planned.plan_at)?;
    let id = find(&survey.members.list, &typed.member)?.id;
    answers.notes(&plan(&survey.sight(), &Wanted::Remove(id)).warnings);
    let members = session.remove(&survey, id, answers).await?;
    answers.give(&Done::of(id, &members), || {
        format!("Member {id} removed from cluster {:x}", members.cluster_id)
    })
}

/// The output of `--json` for a new leader.
#[derive(Serialize)]
struct Moved {
    from: MemberId,
    to: MemberId,
}

/// Runs the subcommand `member move-leader`.
pub(super) async fn move_leader(
    cluster: &Cluster,
    typed: &MoveLeader,
    answers: &mut Answers<'_, '_>,
) -> Result<(), End> {
    let survey = Survey::first(cluster, answers).await?;
    let find = |typed: &Option<String>| {
        let typed = typed.as_deref();
        typed.map(|typed| find(&survey.members.list, typed).map(|member| member.id)).transpose()
    };
    let (to, only_from) = (find(&typed.member)?, find(&typed.from)?);
    if let Some(away) = only_from.and_then(|from| survey.sight().cannot_spare(from)) {
        let text = format!(
            "the cluster would stop with this member, since {} don't answer or are behind. Nothing \
             was changed; see muster-agent member wait",
            away.join(", ")
        );
        return Err(End::Cluster(Kind::Refused, text));
    }
    let from = survey.leader.ok_or_else(|| End::Failed("nobody leads".to_owned()))?;
    if to == Some(from) || only_from.is_some_and(|only| only != from) {
        return answers.give(&Moved { from, to: from }, || format!("{from} leads; nothing to do"));
    }
    if to.is_some() && to == only_from {
        return Err(End::Usage("the leadership is to move from and to the same member".to_owned()));
    }
    let to = hand_over(&survey, to).await?;
    answers.give(&Moved { from, to }, || format!("Leadership moved from {from} to {to}"))
}

/// Hands the leadership to `to`, or else to the voter that has applied the most entries. Waits
/// until there is a new leader, and returns it.
async fn hand_over(survey: &Survey, to: Option<MemberId>) -> Result<MemberId, End> {
    let cluster = &survey.cluster;
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
    let to = to.ok_or_else(|| End::Failed("no other voter answers: nobody can lead".to_owned()))?;
    match cluster.move_leader(leader, to).await {
        // Whether the leadership has moved is checked below.
        Err(ClusterError::Ambiguous { .. }) | Ok(()) => {}
        Err(error) => return Err(error.into()),
    }
    let start = Instant::now();
    loop {
        let led = cluster.status().await.ok().and_then(|status| status.leader);
        if led.is_some_and(|led| led != leader.id) {
            return Ok(led.unwrap_or(to));
        }
        if start.elapsed() > LEADER_LIMIT {
            return Err(End::Failed(format!("{} still leads", leader.id)));
        }
        sleep(LEADER_AGAIN).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_pasted_into_a_shell_is_nothing_but_values() {
        let usual = "a=https://[::1]:2380,b-1=https://10.0.0.1:2380";
        assert_eq!(quoted(usual), format!("\"{usual}\""));
        let odd = "a$(touch x)`touch y`\"\\ 'b";
        let script = format!("VALUE={}; printf %s \"$VALUE\"", quoted(odd));
        let shell = std::process::Command::new("/bin/sh").args(["-c", &script]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&shell.stdout), odd);
    }
}
