//! `member plan`: shows what a change would do, without making it.

use serde::Serialize;

use super::{Answers, Survey, find};
use crate::cli::Plan as Typed;
use crate::cluster::Cluster;
use crate::exit::{End, Kind};
use crate::plan::{Plan, Shape, State, Wanted, plan};

/// The output of `--json`.
#[derive(Serialize)]
struct Told<'a> {
    cluster_id: String,
    /// The configuration index, for `--plan-at`; `null` from stock etcd.
    configuration: Option<u64>,
    before: Numbers,
    after: Numbers,
    members: Vec<Found<'a>>,
    steps: Vec<String>,
    warnings: Vec<String>,
    /// Why the cluster would refuse the change; empty if it would not.
    refused: Vec<String>,
}

#[derive(Serialize)]
struct Numbers {
    voters: usize,
    learners: usize,
    quorum: usize,
    /// Number of voters that may fail if all work now.
    failure_tolerance: usize,
    answering: usize,
    /// Number of voters that may fail in addition now; `null` if there is no quorum.
    may_fail_now: Option<usize>,
}

#[derive(Serialize)]
struct Found<'a> {
    id: String,
    name: &'a str,
    role: &'static str,
    started: bool,
    answers: bool,
    behind: Option<u64>,
}

impl From<Shape> for Numbers {
    fn from(shape: Shape) -> Self {
        Self {
            voters: shape.voters,
            learners: shape.learners,
            quorum: shape.quorum(),
            failure_tolerance: shape.tolerance(),
            answering: shape.answering,
            may_fail_now: shape.spare(),
        }
    }
}

/// Runs the subcommand `member plan`.
pub(super) async fn run(
    cluster: &Cluster,
    typed: &Typed,
    answers: &mut Answers<'_, '_>,
) -> Result<(), End> {
    let survey = Survey::first(cluster, answers).await?;
    let wanted = wanted(&survey, typed)?;
    let plan = plan(&survey.sight(), &wanted);
    let told = told(&survey, &plan);
    answers.give(&told, || for_people(&survey, &plan, &told))?;
    match plan.objections.len() {
        0 => Ok(()),
        _ => {
            let text = "the cluster would refuse this now; nothing was changed";
            Err(End::Cluster(Kind::Refused, text.to_owned()))
        }
    }
}

fn wanted(survey: &Survey, typed: &Typed) -> Result<Wanted, End> {
    let id = |typed: &str| find(&survey.members.list, typed).map(|member| member.id);
    Ok(match typed {
        Typed::Add(add) => add.wanted(),
        Typed::Promote(promote) => Wanted::Promote(id(&promote.member)?),
        Typed::Update(update) => Wanted::Update(id(&update.member)?, update.peer_urls.clone()),
        Typed::Remove(remove) => Wanted::Remove(id(&remove.member)?),
        Typed::Replace(replace) => replace.wanted(id(&replace.old)?),
    })
}

fn told<'a>(survey: &'a Survey, plan: &Plan) -> Told<'a> {
    let found = survey.members.list.iter().zip(survey.sight().members).map(|(member, seen)| {
        let behind = match seen.state {
            State::Answers { behind } => behind,
            State::NotStarted | State::Silent => None,
        };
        Found {
            id: member.id.to_string(),
            name: &member.name,
            role: survey.role(member),
            started: member.is_started(),
            answers: matches!(seen.state, State::Answers { .. }),
            behind,
        }
    });
    Told {
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

fn for_people(survey: &Survey, plan: &Plan, told: &Told<'_>) -> String {
    let mut lines = vec![match told.configuration {
        Some(index) => format!(
            "cluster {}, configuration {index}: the change itself takes --plan-at {index}",
            told.cluster_id
        ),
        None => format!("cluster {}: stock etcd, which refuses no stale plan", told.cluster_id),
    }];
    lines.push(format!("before   {}", plan.before));
    lines.push(format!("after    {}", plan.after));
    for (member, seen) in survey.members.list.iter().zip(survey.sight().members) {
        let state = match seen.state {
            State::NotStarted => "not started".to_owned(),
            State::Silent => "started, doesn't answer".to_owned(),
            State::Answers { behind: Some(behind) } if behind > 0 => {
                format!("started, answers, {behind} entries behind")
            }
            State::Answers { .. } => "started, answers".to_owned(),
        };
        lines.push(format!("member   {} {}: {state}", survey.role(member), seen.label()));
    }
    let numbered = (1..).zip(&told.steps);
    lines.extend(numbered.map(|(number, step)| format!("step {number}   {step}")));
    lines.extend(told.warnings.iter().map(|warning| format!("note     {warning}")));
    lines.extend(told.refused.iter().map(|refused| format!("refused  {refused}")));
    lines.join("\n")
}
