//! `member replace`: what comes next is asked after every step, of the list of members alone.

use std::time::Duration;

use super::change::{Session, environment, free_name, print_environment};
use super::wait::{self, Watch};
use super::{Answers, Survey, find};
use crate::cli::Replace;
use crate::cluster::{Change, Cluster, MemberId, NewMember};
use crate::exit::End;
use crate::plan::{Next, next, plan};

/// Runs it.
pub(super) async fn run(
    cluster: &Cluster,
    typed: &Replace,
    answers: &mut Answers<'_, '_>,
) -> Result<(), End> {
    let first = Survey::first(cluster, answers).await?;
    let old = old(&first, typed)?;
    let session = Session::begin(&first, typed.planned.plan_at)?;
    if first.members.of_id(old).is_some() {
        let plan = plan(&first.sight(), &typed.wanted(old));
        free_name(&plan)?;
        answers.notes(&plan.warnings);
    }
    let patience = Duration::from_secs(typed.patience.patience);
    let mut start = Watch::new(patience);
    let mut told = false;
    let mut survey = first;
    loop {
        let there = survey.members.of_id(old).map(|member| member.id);
        match next(&survey.sight(), there, &typed.peer_urls) {
            Next::Add => {
                let new = NewMember {
                    peer_urls: typed.peer_urls.clone(),
                    is_learner: true,
                    ..NewMember::default()
                };
                session.change(&survey, &Change::Add(new), answers).await?;
                answers.note(&format!("{} is in the list, as a learner", typed.name));
            }
            Next::AwaitStart(id) => {
                if !told {
                    told = true;
                    tell_how(&survey, typed, id, answers);
                }
                let elapsed = start.elapsed();
                let text = || format!("{} has not started; start it", typed.name);
                start.wait(answers, elapsed, text).await?;
            }
            Next::AwaitSync(id, _) => {
                wait::in_sync(&survey, id, patience, answers).await?;
            }
            Next::Promote(id) => {
                session.change(&survey, &Change::Promote(id), answers).await?;
                answers.note(&format!("{} votes", typed.name));
            }
            Next::Remove(id) => {
                let interrupted = format!(
                    "removing {id}; should this be interrupted, the same with {id} goes on: \
                     muster-agent member replace {id} {} --peer-urls {}",
                    typed.name,
                    typed.peer_urls.join(",")
                );
                answers.note(&interrupted);
                session.remove(&survey, id, answers).await?;
                answers.note(&format!("{id} is removed"));
            }
            Next::Done(id) => {
                return session.done(&survey, id, answers, |members| {
                    format!("Member {old} replaced by {id} in cluster {:x}", members.cluster_id)
                });
            }
        }
        survey = survey.again().await?;
    }
}

/// Who is replaced. Once it is gone, only its id says who that was: a name could be mistyped.
fn old(survey: &Survey, typed: &Replace) -> Result<MemberId, End> {
    let members = &survey.members;
    let found = match find(&members.list, &typed.old) {
        Ok(member) => member,
        Err(end) => {
            let is_id = typed.old.len() >= 12;
            let id = typed.old.parse().ok().filter(|_| is_id);
            return id.ok_or_else(|| {
                End::Usage(format!("{end}. If it is removed already, say its id to go on"))
            });
        }
    };
    let is_new = found.peer_urls.iter().any(|url| typed.peer_urls.contains(url));
    if is_new && found.name == typed.old {
        return Err(End::Usage(format!(
            "{} has that peer URL: nobody can tell whether it is the old member or the new one \
             already. Say the old one's id ({} is there now)",
            typed.old, found.id
        )));
    }
    Ok(found.id)
}

fn tell_how(survey: &Survey, typed: &Replace, id: MemberId, answers: &Answers<'_, '_>) {
    let Some(added) = survey.members.of_id(id) else { return };
    let environment = environment(&typed.name, added, &survey.members);
    answers.note(&format!(
        "start {} now, on its host, with:\n{}",
        typed.name,
        print_environment(&environment)
    ));
}
