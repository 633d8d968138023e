//! `member replace`: replaces a member. Each next step follows from the list of members alone.

use std::collections::BTreeSet;
use std::time::Duration;

use discovery_types::digest::Digest;

use super::change::{Session, environment, print_environment, refuse_at_once};
use super::wait::{self, Watch};
use super::{Answers, Survey, find};
use crate::cli::Replace;
use crate::cluster::{Change, Cluster, MemberId, NewMember};
use crate::exit::{End, Kind};
use crate::plan::{Next, next, plan};

/// Runs the subcommand `member replace`.
pub(super) async fn run(
    cluster: &Cluster,
    typed: &Replace,
    answers: &mut Answers<'_, '_>,
) -> Result<(), End> {
    let first = Survey::first(cluster, answers).await?;
    let old = old(&first, typed)?;
    let operation = operation(first.members.cluster_id, old, &typed.peer_urls);
    let session = Session::begin(&first, typed.planned.plan_at)?;
    if first.members.of_id(old).is_some() {
        let plan = plan(&first.sight(), &typed.wanted(old));
        refuse_at_once(&plan)?;
        answers.notes(&plan.warnings);
    }
    let patience = Duration::from_secs(typed.patience.patience);
    let mut start = Watch::new(patience);
    let mut told = false;
    let mut survey = first;
    let mut removed_here = false;
    loop {
        let there = survey.members.of_id(old).map(|member| member.id);
        let next = next(&survey.sight(), there, &typed.peer_urls);
        if there.is_none() && !removed_here && !matches!(next, Next::Done(_)) {
            must_be_own_removal(&survey, typed, old, &operation).await?;
            removed_here = true;
        }
        match next {
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
                survey.cluster.announce_removal(id, &operation, &survey.members).await?;
                session.remove_as(&survey, id, operation, answers).await?;
                removed_here = true;
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

/// Returns the operation id of the removal that a replacement makes. A later run of the same
/// command gets the same id; another replacement of the same member gets a different one.
fn operation(cluster_id: u64, old: MemberId, peer_urls: &[String]) -> [u8; 16] {
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
async fn must_be_own_removal(
    survey: &Survey,
    typed: &Replace,
    old: MemberId,
    operation: &[u8; 16],
) -> Result<(), End> {
    match survey.cluster.has_removed(old, operation, &survey.members).await? {
        true => Ok(()),
        false => Err(removed_elsewhere(survey, typed, old)),
    }
}

/// Returns the error for an old member that another operation removed: the new one would be an
/// additional member.
fn removed_elsewhere(survey: &Survey, typed: &Replace, old: MemberId) -> End {
    let Replace { name, peer_urls, .. } = typed;
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
    End::Cluster(Kind::Refused, text)
}

/// Returns the id of the member to replace. Once that is removed, it has to be given by its id,
/// since a name could be mistyped.
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
