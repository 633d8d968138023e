//! The subcommands that make one change, and the steps common to all changes.

use std::time::Duration;

use serde::Serialize;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::{CommandOutput, Survey, find_member, wait};
use crate::cli::{
    AddArguments, MoveLeaderArguments, PromoteArguments, RemoveArguments, UpdateArguments,
};
use crate::cluster::{
    ChangeMetadata, ClusterApiClient, ClusterError, ClusterMember, ClusterMemberChange,
    ClusterRefusal, MemberId, MemberList, NewMember,
};
use crate::exit::{ExitError, FailureKind};
use crate::plan::{ChangePlan, PlanObjection, RequestedChange, plan};

/// How long a change is retried while the cluster refuses it as unhealthy, although enough voters
/// answer. A voter counts as healthy only after 5 s of connection.
const SETTLE_LIMIT: Duration = Duration::from_secs(15);
/// Pause between two attempts to make a change that the cluster refuses.
const SETTLE_PAUSE: Duration = Duration::from_millis(500);
/// How long to wait for a new leader to be known.
const LEADER_LIMIT: Duration = Duration::from_secs(5);
/// Pause between two checks whether there is a new leader.
const LEADER_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The output of `--json` for a change.
#[derive(Serialize)]
struct ChangeOutput<'a> {
    member_id: MemberId,
    cluster_id: String,
    /// The configuration after the change; `null` from stock etcd.
    configuration: Option<u64>,
    members: &'a [ClusterMember],
    /// Environment variables for starting the new member.
    #[serde(skip_serializing_if = "Option::is_none")]
    environment: Option<Environment>,
}

impl<'a> ChangeOutput<'a> {
    fn of(member_id: MemberId, members: &'a MemberList) -> Self {
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
pub(super) struct ChangeSession {
    cluster: ClusterApiClient,
}

impl ChangeSession {
    /// Begins the changes. Fails if the configuration differs from `planned`.
    pub(super) fn begin(survey: &Survey, planned: Option<u64>) -> Result<Self, ExitError> {
        match (planned, survey.members.configuration) {
            (Some(_), None) => Err(ExitError::Usage(
                "--plan-at: this is stock etcd, which has no configuration index and refuses no \
                 stale plan"
                    .to_owned(),
            )),
            (Some(planned), Some(now)) if planned != now => {
                let text = format!(
                    "the plan is stale: it was made at configuration {planned}, and the members are \
                     at {now}. Nothing was changed; plan again"
                );
                Err(ExitError::Cluster(FailureKind::Stale, text))
            }
            _ => Ok(Self { cluster: survey.cluster.clone() }),
        }
    }

    /// Makes a change. `muster-node` refuses it if the configuration is no longer the one that
    /// `survey` saw.
    pub(super) async fn change(
        &self,
        survey: &Survey,
        change: &ClusterMemberChange,
        answers: &CommandOutput<'_, '_>,
    ) -> Result<MemberList, ExitError> {
        self.change_with_operation(survey, change, new_operation(), answers).await
    }

    /// Makes a change like [`Self::change`], but doesn't retry if the cluster refuses it.
    pub(super) async fn try_change(
        &self,
        survey: &Survey,
        change: &ClusterMemberChange,
    ) -> Result<MemberList, ClusterError> {
        self.send(survey, change, new_operation()).await
    }

    async fn send(
        &self,
        survey: &Survey,
        change: &ClusterMemberChange,
        operation: [u8; 16],
    ) -> Result<MemberList, ClusterError> {
        let carrying = ChangeMetadata {
            operation,
            planned_at: survey.members.configuration,
            send_before: None,
        };
        self.cluster.carry_out(change, &carrying).await
    }

    /// Makes a change with the operation id `operation`, which the cluster carries out at most
    /// once. A later run with an equal id learns that this operation made the change. Retries for
    /// [`SETTLE_LIMIT`] while the cluster is unhealthy although enough voters answer.
    pub(super) async fn change_with_operation(
        &self,
        survey: &Survey,
        change: &ClusterMemberChange,
        operation: [u8; 16],
        answers: &CommandOutput<'_, '_>,
    ) -> Result<MemberList, ExitError> {
        let start = Instant::now();
        let enough_answer = survey.observed_cluster().has_quorum();
        loop {
            match self.send(survey, change, operation).await {
                Err(error)
                    if error.refusal() == Some(ClusterRefusal::UnhealthyCluster)
                        && enough_answer
                        && start.elapsed() < SETTLE_LIMIT =>
                {
                    if start.elapsed() < SETTLE_PAUSE {
                        answers.print_note("waiting until the members have been connected for 5 s");
                    }
                    sleep(SETTLE_PAUSE).await;
                }
                // Stock etcd computes a member's id from its peer URLs and the time in seconds. A
                // member that is added in the second of its removal would get the removed id, so
                // etcd refuses the addition. Try again later.
                Err(error)
                    if error.refusal() == Some(ClusterRefusal::MemberNotFound)
                        && matches!(change, ClusterMemberChange::Add(_))
                        && start.elapsed() < SETTLE_LIMIT =>
                {
                    sleep(SETTLE_PAUSE).await;
                }
                answer => return Ok(answer?),
            }
        }
    }

    /// Removes a member. If the member leads, moves its leadership to another voter first.
    async fn remove(
        &self,
        survey: &Survey,
        id: MemberId,
        answers: &CommandOutput<'_, '_>,
    ) -> Result<MemberList, ExitError> {
        if survey.observed_cluster().must_hand_over(id) {
            hand_leadership_over(survey, None).await?;
        }
        self.change(survey, &ClusterMemberChange::Remove(id), answers).await
    }

    /// Prints the result of a command that made several changes.
    pub(super) fn print_result(
        &self,
        survey: &Survey,
        id: MemberId,
        answers: &mut CommandOutput<'_, '_>,
        text: impl FnOnce(&MemberList) -> String,
    ) -> Result<(), ExitError> {
        let members = &survey.members;
        answers.print_result(&ChangeOutput::of(id, members), || text(members))
    }
}

fn new_operation() -> [u8; 16] {
    *Uuid::new_v4().as_bytes()
}

/// Runs the subcommand `member add`.
pub(super) async fn add(
    cluster: &ClusterApiClient,
    typed: &AddArguments,
    answers: &mut CommandOutput<'_, '_>,
) -> Result<(), ExitError> {
    let survey = Survey::take_first(cluster, answers).await?;
    let session = ChangeSession::begin(&survey, typed.planned.plan_at)?;
    let planned = plan(&survey.observed_cluster(), &typed.requested_change());
    check_static_objections(&planned)?;
    answers.print_warnings(&planned.warnings);
    let new = NewMember {
        peer_urls: typed.peer_urls.clone(),
        is_learner: !typed.voter,
        ..NewMember::default()
    };
    let members = session.change(&survey, &ClusterMemberChange::Add(new), answers).await?;
    let added = members.of_peer_urls(&typed.peer_urls).ok_or_else(|| {
        ExitError::Failed(format!("{} was added, and has been removed again since", typed.name))
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
            format_environment(&environment)
        )
    };
    let done = ChangeOutput {
        environment: Some(environment.clone()),
        ..ChangeOutput::of(added.id, &members)
    };
    answers.print_result(&done, text)
}

/// Refuses a plan whose member name is taken or whose URL is bad, with the text of `member plan`.
/// The cluster itself would accept two members with one name, but people could not tell them apart.
pub(super) fn check_static_objections(plan: &ChangePlan) -> Result<(), ExitError> {
    for objection in &plan.objections {
        match objection {
            PlanObjection::NameTaken { .. } => return Err(ExitError::Usage(objection.to_string())),
            PlanObjection::BadUrl(_) => {
                return Err(ExitError::Cluster(
                    FailureKind::Refused,
                    format!("refused: {objection}"),
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Environment variables for starting a new member, in the form that etcd and `muster-node` read.
pub(super) type Environment = std::collections::BTreeMap<&'static str, String>;

/// Returns the variables for starting `added`, whose name is `name`.
pub(super) fn environment(name: &str, added: &ClusterMember, members: &MemberList) -> Environment {
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
pub(super) fn format_environment(environment: &Environment) -> String {
    let lines =
        environment.iter().map(|(name, value)| format!("{name}={}", quote_for_shell(value)));
    lines.collect::<Vec<_>>().join("\n")
}

/// Quotes a value for a shell: in double quotes, as etcdctl does, or in single quotes if a shell
/// would interpret the content. Any member can choose a name with such content, and people paste
/// these lines.
fn quote_for_shell(value: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.:/=,@%+[]".contains(c);
    if value.chars().all(is_plain) {
        return format!("\"{value}\"");
    }
    format!("'{}'", value.replace('\'', r"'\''"))
}

/// Runs the subcommand `member promote`.
pub(super) async fn promote(
    cluster: &ClusterApiClient,
    typed: &PromoteArguments,
    answers: &mut CommandOutput<'_, '_>,
) -> Result<(), ExitError> {
    let mut survey = Survey::take_first(cluster, answers).await?;
    let session = ChangeSession::begin(&survey, typed.planned.plan_at)?;
    let member = find_member(&survey.members.list, &typed.member)?.clone();
    answers.print_warnings(
        &plan(&survey.observed_cluster(), &RequestedChange::Promote(member.id)).warnings,
    );
    if !typed.no_wait && member.is_learner {
        let patience = Duration::from_secs(typed.patience.patience);
        survey = wait::wait_until_in_sync(&survey, member.id, patience, answers).await?;
        ChangeSession::begin(&survey, typed.planned.plan_at)?;
    }
    let members =
        session.change(&survey, &ClusterMemberChange::Promote(member.id), answers).await?;
    answers.print_result(&ChangeOutput::of(member.id, &members), || {
        format!("Member {} promoted in cluster {:x}", member.id, members.cluster_id)
    })
}

/// Runs the subcommand `member update`.
pub(super) async fn update(
    cluster: &ClusterApiClient,
    typed: &UpdateArguments,
    answers: &mut CommandOutput<'_, '_>,
) -> Result<(), ExitError> {
    let survey = Survey::take_first(cluster, answers).await?;
    let session = ChangeSession::begin(&survey, typed.planned.plan_at)?;
    let id = find_member(&survey.members.list, &typed.member)?.id;
    let planned =
        plan(&survey.observed_cluster(), &RequestedChange::Update(id, typed.peer_urls.clone()));
    check_static_objections(&planned)?;
    answers.print_warnings(&planned.warnings);
    let change = ClusterMemberChange::Update(id, typed.peer_urls.clone());
    let members = session.change(&survey, &change, answers).await?;
    answers.print_result(&ChangeOutput::of(id, &members), || {
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
    cluster: &ClusterApiClient,
    typed: &RemoveArguments,
    answers: &mut CommandOutput<'_, '_>,
) -> Result<(), ExitError> {
    let survey = Survey::take_first(cluster, answers).await?;
    let session = ChangeSession::begin(&survey, typed.planned.plan_at)?;
    let id = find_member(&survey.members.list, &typed.member)?.id;
    answers
        .print_warnings(&plan(&survey.observed_cluster(), &RequestedChange::Remove(id)).warnings);
    let members = session.remove(&survey, id, answers).await?;
    answers.print_result(&ChangeOutput::of(id, &members), || {
        format!("Member {id} removed from cluster {:x}", members.cluster_id)
    })
}

/// The output of `--json` for a new leader.
#[derive(Serialize)]
struct MoveLeaderOutput {
    from: MemberId,
    to: MemberId,
}

/// Runs the subcommand `member move-leader`.
pub(super) async fn move_leader(
    cluster: &ClusterApiClient,
    typed: &MoveLeaderArguments,
    answers: &mut CommandOutput<'_, '_>,
) -> Result<(), ExitError> {
    let survey = Survey::take_first(cluster, answers).await?;
    let find = |typed: &Option<String>| {
        let typed = typed.as_deref();
        typed
            .map(|typed| find_member(&survey.members.list, typed).map(|member| member.id))
            .transpose()
    };
    let (to, only_from) = (find(&typed.member)?, find(&typed.from)?);
    if let Some(away) = only_from.and_then(|from| survey.observed_cluster().why_indispensable(from))
    {
        let text = format!(
            "the cluster would stop with this member, since {} don't answer or are behind. Nothing \
             was changed; see muster-agent member wait",
            away.join(", ")
        );
        return Err(ExitError::Cluster(FailureKind::Refused, text));
    }
    let from = survey.leader.ok_or_else(|| ExitError::Failed("nobody leads".to_owned()))?;
    if to == Some(from) || only_from.is_some_and(|only| only != from) {
        return answers.print_result(&MoveLeaderOutput { from, to: from }, || {
            format!("{from} leads; nothing to do")
        });
    }
    if to.is_some() && to == only_from {
        return Err(ExitError::Usage(
            "the leadership is to move from and to the same member".to_owned(),
        ));
    }
    let to = hand_leadership_over(&survey, to).await?;
    answers.print_result(&MoveLeaderOutput { from, to }, || {
        format!("Leadership moved from {from} to {to}")
    })
}

/// Hands the leadership to `to`. With `None`, hands it to the voter that has applied the most
/// entries. Waits until there is a new leader, and returns it.
pub(super) async fn hand_leadership_over(
    survey: &Survey,
    to: Option<MemberId>,
) -> Result<MemberId, ExitError> {
    let cluster = &survey.cluster;
    let leader = survey.leader.and_then(|id| survey.members.of_id(id));
    let leader = leader.ok_or_else(|| ExitError::Failed("nobody leads".to_owned()))?;
    let nearest = || {
        survey
            .members_with_status()
            .filter(|(member, _)| !member.is_learner && member.id != leader.id)
            .filter_map(|(member, said)| Some((member.id, said.as_ref().ok()?.applied_index)))
            .max_by_key(|(_, applied)| *applied)
            .map(|(id, _)| id)
    };
    let to = to.or_else(nearest);
    let to =
        to.ok_or_else(|| ExitError::Failed("no other voter answers: nobody can lead".to_owned()))?;
    match cluster.move_leader(leader, to).await {
        // Even if the answer was lost, the loop below checks whether the leadership has moved.
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
            return Err(ExitError::Failed(format!("{} still leads", leader.id)));
        }
        sleep(LEADER_CHECK_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pasted_environment_values_are_quoted() {
        let usual = "a=https://[::1]:2380,b-1=https://10.0.0.1:2380";
        assert_eq!(quote_for_shell(usual), format!("\"{usual}\""));
        let odd = "a$(touch x)`touch y`\"\\ 'b";
        let script = format!("VALUE={}; printf %s \"$VALUE\"", quote_for_shell(odd));
        let shell = std::process::Command::new("/bin/sh").args(["-c", &script]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&shell.stdout), odd);
    }
}
