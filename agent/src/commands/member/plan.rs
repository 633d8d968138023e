//! `member plan`: shows what a change would do, without making it.

use serde::Serialize;

use super::{CommandOutput, Survey, find_member};
use crate::cli::PlanCommand as Typed;
use crate::cluster::ClusterApiClient;
use crate::exit::{ExitError, FailureKind};
use crate::plan::{ChangePlan, MemberState, RequestedChange, VoterCounts, plan};

/// The output of `--json`.
#[derive(Serialize)]
struct PlanOutput<'a> {
    cluster_id: String,
    /// The configuration index, for `--plan-at`; `null` from stock etcd.
    configuration: Option<u64>,
    before: VoterCountsOutput,
    after: VoterCountsOutput,
    members: Vec<MemberOutput<'a>>,
    steps: Vec<String>,
    warnings: Vec<String>,
    /// Why the cluster would refuse the change; empty if it would not.
    refused: Vec<String>,
}

#[derive(Serialize)]
struct VoterCountsOutput {
    voters: usize,
    learners: usize,
    quorum: usize,
    /// Number of voters that can fail without loss of the quorum, if all work now.
    failure_tolerance: usize,
    answering: usize,
    /// Number of further voters that can fail now without loss of the quorum; `null` if there is no
    /// quorum.
    may_fail_now: Option<usize>,
}

#[derive(Serialize)]
struct MemberOutput<'a> {
    id: String,
    name: &'a str,
    role: &'static str,
    started: bool,
    answers: bool,
    behind: Option<u64>,
}

impl From<VoterCounts> for VoterCountsOutput {
    fn from(shape: VoterCounts) -> Self {
        Self {
            voters: shape.voters,
            learners: shape.learners,
            quorum: shape.quorum(),
            failure_tolerance: shape.tolerance(),
            answering: shape.answering,
            may_fail_now: shape.spare_voters(),
        }
    }
}

/// Runs the subcommand `member plan`.
pub(super) async fn run(
    cluster: &ClusterApiClient,
    typed: &Typed,
    answers: &mut CommandOutput<'_, '_>,
) -> Result<(), ExitError> {
    let survey = Survey::take_first(cluster, answers).await?;
    let wanted = requested_change(&survey, typed)?;
    let plan = plan(&survey.observed_cluster(), &wanted);
    let told = plan_output(&survey, &plan);
    answers.print_result(&told, || format_text(&survey, &plan, &told))?;
    match plan.objections.len() {
        0 => Ok(()),
        _ => {
            let text = "the cluster would refuse this now; nothing was changed";
            Err(ExitError::Cluster(FailureKind::Refused, text.to_owned()))
        }
    }
}

fn requested_change(survey: &Survey, typed: &Typed) -> Result<RequestedChange, ExitError> {
    let id = |typed: &str| find_member(&survey.members.list, typed).map(|member| member.id);
    Ok(match typed {
        Typed::Add(add) => add.requested_change(),
        Typed::Promote(promote) => RequestedChange::Promote(id(&promote.member)?),
        Typed::Update(update) => {
            RequestedChange::Update(id(&update.member)?, update.peer_urls.clone())
        }
        Typed::Remove(remove) => RequestedChange::Remove(id(&remove.member)?),
        Typed::Replace(replace) => replace.requested_change(id(&replace.old)?),
    })
}

fn plan_output<'a>(survey: &'a Survey, plan: &ChangePlan) -> PlanOutput<'a> {
    let found =
        survey.members.list.iter().zip(survey.observed_cluster().members).map(|(member, seen)| {
            let behind = match seen.state {
                MemberState::Answers { behind } => behind,
                MemberState::NotStarted | MemberState::Silent => None,
            };
            MemberOutput {
                id: member.id.to_string(),
                name: &member.name,
                role: survey.role(member),
                started: member.is_started(),
                answers: matches!(seen.state, MemberState::Answers { .. }),
                behind,
            }
        });
    PlanOutput {
        cluster_id: format!("{:x}", survey.members.cluster_id),
        configuration: survey.members.configuration,
        before: plan.before.into(),
        after: plan.after.into(),
        members: found.collect(),
        steps: plan.steps.iter().map(ToString::to_string).collect(),
        warnings: plan.warnings.iter().map(ToString::to_string).collect(),
        refused: plan.objections.iter().map(ToString::to_string).collect(),
    }
}

fn format_text(survey: &Survey, plan: &ChangePlan, told: &PlanOutput<'_>) -> String {
    let mut lines = vec![match told.configuration {
        Some(index) => format!(
            "cluster {}, configuration {index}: the change itself takes --plan-at {index}",
            told.cluster_id
        ),
        None => format!("cluster {}: stock etcd, which refuses no stale plan", told.cluster_id),
    }];
    lines.push(format!("before   {}", plan.before));
    lines.push(format!("after    {}", plan.after));
    for (member, seen) in survey.members.list.iter().zip(survey.observed_cluster().members) {
        let state = match seen.state {
            MemberState::NotStarted => "not started".to_owned(),
            MemberState::Silent => "started, doesn't answer".to_owned(),
            MemberState::Answers { behind: Some(behind) } if behind > 0 => {
                format!("started, answers, {behind} entries behind")
            }
            MemberState::Answers { .. } => "started, answers".to_owned(),
        };
        lines.push(format!("member   {} {}: {state}", survey.role(member), seen.label()));
    }
    let numbered = (1..).zip(&told.steps);
    lines.extend(numbered.map(|(number, step)| format!("step {number}   {step}")));
    lines.extend(told.warnings.iter().map(|warning| format!("note     {warning}")));
    lines.extend(told.refused.iter().map(|refused| format!("refused  {refused}")));
    lines.join("\n")
}
