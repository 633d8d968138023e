//! `member replace`: replaces a member. Each next step follows from the list of members alone.

use std::collections::BTreeSet;
use std::time::Duration;

use discovery_types::digest::Digest;

use super::change::{ChangeSession, check_static_objections, environment, format_environment};
use super::wait::{self, WaitTimer};
use super::{CommandOutput, Survey, find_member};
use crate::cli::ReplaceArguments;
use crate::cluster::{ClusterApiClient, ClusterMemberChange, MemberId, NewMember};
use crate::exit::{ExitError, FailureKind};
use crate::plan::{ReplacementStep, next_step, plan};

/// Runs the subcommand `member replace`.
pub(super) async fn run(
    cluster: &ClusterApiClient,
    typed: &ReplaceArguments,
    answers: &mut CommandOutput<'_, '_>,
) -> Result<(), ExitError> {
    let first = Survey::take_first(cluster, answers).await?;
    let old = find_old_member(&first, typed)?;
    let operation = removal_operation_id(first.members.cluster_id, old, &typed.peer_urls);
    let session = ChangeSession::begin(&first, typed.planned.plan_at)?;
    if first.members.of_id(old).is_some() {
        let plan = plan(&first.observed_cluster(), &typed.requested_change(old));
        check_static_objections(&plan)?;
        answers.print_warnings(&plan.warnings);
    }
    let patience = Duration::from_secs(typed.patience.patience);
    let mut start = WaitTimer::new(patience);
    let mut told = false;
    let mut survey = first;
    let mut removed_here = false;
    loop {
        let there = survey.members.of_id(old).map(|member| member.id);
        let next = next_step(&survey.observed_cluster(), there, &typed.peer_urls);
        if there.is_none() && !removed_here && !matches!(next, ReplacementStep::Done(_)) {
            check_own_removal(&survey, typed, old, &operation).await?;
            removed_here = true;
        }
        match next {
            ReplacementStep::Add => {
                let new = NewMember {
                    peer_urls: typed.peer_urls.clone(),
                    is_learner: true,
                    ..NewMember::default()
                };
                session.change(&survey, &ClusterMemberChange::Add(new), answers).await?;
                answers.print_note(&format!("{} is in the list, as a learner", typed.name));
            }
            ReplacementStep::AwaitStart(id) => {
                if !told {
                    told = true;
                    print_start_instructions(&survey, typed, id, answers);
                }
                let elapsed = start.elapsed();
                let text = || format!("{} has not started; start it", typed.name);
                start.wait(answers, elapsed, text).await?;
            }
            ReplacementStep::AwaitSync(id, _) => {
                wait::wait_until_in_sync(&survey, id, patience, answers).await?;
            }
            ReplacementStep::Promote(id) => {
                session.change(&survey, &ClusterMemberChange::Promote(id), answers).await?;
                answers.print_note(&format!("{} votes", typed.name));
            }
            ReplacementStep::Remove(id) => {
                let interrupted = format!(
                    "removing {id}; should this be interrupted, the same with {id} goes on: \
                     muster-agent member replace {id} {} --peer-urls {}",
                    typed.name,
                    typed.peer_urls.join(",")
                );
                answers.print_note(&interrupted);
                survey.cluster.announce_removal(id, &operation, &survey.members).await?;
                session.remove_with_operation(&survey, id, operation, answers).await?;
                removed_here = true;
                answers.print_note(&format!("{id} is removed"));
            }
            ReplacementStep::Done(id) => {
                return session.print_result(&survey, id, answers, |members| {
                    format!("Member {old} replaced by {id} in cluster {:x}", members.cluster_id)
                });
            }
        }
        survey = survey.repeat().await?;
    }
}

/// Returns the operation id of the removal that a replacement makes. A later run of the same
/// command gets the same id; another replacement of the same member gets a different one.
fn removal_operation_id(cluster_id: u64, old: MemberId, peer_urls: &[String]) -> [u8; 16] {
    let urls = peer_urls.iter().cloned().collect::<BTreeSet<_>>();
    let urls = urls.into_iter().collect::<Vec<_>>().join(",");
    let (cluster_id, old) = (cluster_id.to_be_bytes(), old.0.to_be_bytes());
    let digest =
        Digest::of_parts(&[b"muster-member-replace-1", &cluster_id, &old, urls.as_bytes()]);
    let mut id = [0; 16];
    id.copy_from_slice(&digest.as_bytes()[..16]);
    id
}

/// Fails unless `operation` has removed `old`, which is gone.
async fn check_own_removal(
    survey: &Survey,
    typed: &ReplaceArguments,
    old: MemberId,
    operation: &[u8; 16],
) -> Result<(), ExitError> {
    match survey.cluster.has_removed(old, operation, &survey.members).await? {
        true => Ok(()),
        false => Err(foreign_removal_error(survey, typed, old)),
    }
}

/// Returns the error for an old member that another operation removed: the new one would be an
/// additional member.
fn foreign_removal_error(survey: &Survey, typed: &ReplaceArguments, old: MemberId) -> ExitError {
    let ReplaceArguments { name, peer_urls, .. } = typed;
    let urls = peer_urls.join(",");
    let next = match survey.members.of_peer_urls(peer_urls) {
        Some(new) => format!(
            "{name} is in the list as a learner ({}): muster-agent member remove {0} takes it out, \
             member promote {0} makes the cluster larger",
            new.id
        ),
        None => format!(
            "If one member more is meant: muster-agent member add {name} --peer-urls {urls}"
        ),
    };
    let text = format!(
        "{old} is no member of this cluster, and this replacement has not removed it: another \
         operation did, or the id is wrong. {name} would be one member more, so nothing was changed. \
         {next}"
    );
    ExitError::Cluster(FailureKind::Refused, text)
}

/// Returns the id of the member to replace. Once that is removed, it has to be given by its id,
/// since a name could be mistyped.
fn find_old_member(survey: &Survey, typed: &ReplaceArguments) -> Result<MemberId, ExitError> {
    let members = &survey.members;
    let found = match find_member(&members.list, &typed.old) {
        Ok(member) => member,
        Err(end) => {
            let is_id = typed.old.len() >= 12;
            let id = typed.old.parse().ok().filter(|_| is_id);
            return id.ok_or_else(|| {
                ExitError::Usage(format!("{end}. If it is removed already, say its id to go on"))
            });
        }
    };
    let is_new = found.peer_urls.iter().any(|url| typed.peer_urls.contains(url));
    if is_new && found.name == typed.old {
        return Err(ExitError::Usage(format!(
            "{} has that peer URL: nobody can tell whether it is the old member or the new one \
             already. Say the old one's id ({} is there now)",
            typed.old, found.id
        )));
    }
    Ok(found.id)
}

fn print_start_instructions(
    survey: &Survey,
    typed: &ReplaceArguments,
    id: MemberId,
    answers: &CommandOutput<'_, '_>,
) {
    let Some(added) = survey.members.of_id(id) else { return };
    let environment = environment(&typed.name, added, &survey.members);
    answers.print_note(&format!(
        "start {} now, on its host, with:\n{}",
        typed.name,
        format_environment(&environment)
    ));
}
