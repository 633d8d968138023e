//! `member replace`: replaces a member. The next step follows from the list of members, and from
//! the operation that removed the old member.

use std::collections::BTreeSet;
use std::time::Duration;

use discovery_types::digest::Digest;

use super::change::{
    ChangeSession, check_static_objections, environment, format_environment, hand_leadership_over,
};
use super::wait::{self, WaitTimer};
use super::{CommandOutput, Survey, find_member};
use crate::cli::ReplaceArguments;
use crate::cluster::{
    ClusterApiClient, ClusterMemberChange, ClusterRefusal, MemberId, NewMember, RemovalOrigin,
};
use crate::exit::{ExitError, FailureKind};
use crate::plan::{ReplacementFacts, ReplacementStep, plan};

/// State of a replacement between its steps.
struct Replacement<'a> {
    typed: &'a ReplaceArguments,
    session: ChangeSession,
    /// The member to be replaced.
    old: MemberId,
    /// Operation id of the removal of the old member.
    operation: [u8; 16],
    /// Origin of the removal of the old member, once that member is gone.
    removal_origin: RemovalOrigin,
    /// Whether the cluster has refused to add the new member because too few voters are healthy.
    is_addition_refused: bool,
    /// Timer of the wait for the new member's start.
    start: WaitTimer,
    /// Whether the operator was asked to start the new member.
    is_start_asked_for: bool,
}

/// Runs the subcommand `member replace`.
pub(super) async fn run(
    cluster: &ClusterApiClient,
    typed: &ReplaceArguments,
    answers: &mut CommandOutput<'_, '_>,
) -> Result<(), ExitError> {
    let mut survey = Survey::take_first(cluster, answers).await?;
    let old = find_old_member(&survey, typed)?;
    let session = ChangeSession::begin(&survey, typed.planned.plan_at)?;
    if survey.members.of_id(old).is_some() {
        let plan = plan(&survey.observed_cluster(), &typed.requested_change(old));
        check_static_objections(&plan)?;
        answers.print_warnings(&plan.warnings);
    }
    let mut replacement = Replacement {
        typed,
        session,
        old,
        operation: removal_operation_id(survey.members.cluster_id, old, &typed.peer_urls),
        removal_origin: RemovalOrigin::Unknown,
        is_addition_refused: false,
        start: WaitTimer::new(Duration::from_secs(typed.patience.patience)),
        is_start_asked_for: false,
    };
    loop {
        if let Some(new) = replacement.take_next_step(&survey, answers).await? {
            return replacement.session.print_result(&survey, new, answers, |members| {
                format!("Member {old} replaced by {new} in cluster {:x}", members.cluster_id)
            });
        }
        survey = survey.repeat().await?;
    }
}

impl Replacement<'_> {
    /// Takes the step that follows from `survey`. Returns the new member once all is done.
    async fn take_next_step(
        &mut self,
        survey: &Survey,
        answers: &CommandOutput<'_, '_>,
    ) -> Result<Option<MemberId>, ExitError> {
        let Self { typed, old, operation, .. } = *self;
        let facts = ReplacementFacts {
            observed: &survey.observed_cluster(),
            old: Some(old),
            peer_urls: &typed.peer_urls,
            removal_origin: self.removal_origin,
            is_addition_refused: self.is_addition_refused,
        };
        match facts.next_step() {
            ReplacementStep::FindRemover(old) => {
                self.removal_origin =
                    survey.cluster.removal_origin(old, &operation, &survey.members).await?;
            }
            ReplacementStep::GiveUp { .. } => {
                return Err(foreign_removal_error(survey, typed, old));
            }
            ReplacementStep::Add => {
                self.add(survey, facts.is_old_removed_first_if_addition_refused(), answers).await?;
            }
            ReplacementStep::AwaitStart(id) => self.await_start(survey, id, answers).await?,
            ReplacementStep::AwaitSync(id, _) => {
                let patience = Duration::from_secs(typed.patience.patience);
                wait::wait_until_in_sync(survey, id, patience, answers).await?;
            }
            ReplacementStep::Promote(id) => {
                self.session.change(survey, &ClusterMemberChange::Promote(id), answers).await?;
                answers.print_note(&format!("{} votes", typed.name));
            }
            ReplacementStep::HandOver(_) => {
                hand_leadership_over(survey, None).await?;
            }
            ReplacementStep::Remove(id) => self.remove(survey, id, answers).await?,
            ReplacementStep::Done(id) => return Ok(Some(id)),
        }
        Ok(None)
    }

    /// Adds the new member. If `may_remove_first` is true and the cluster refuses for too few
    /// healthy or started voters, only records the refusal. The old member is then removed first.
    async fn add(
        &mut self,
        survey: &Survey,
        may_remove_first: bool,
        answers: &CommandOutput<'_, '_>,
    ) -> Result<(), ExitError> {
        let add = ClusterMemberChange::Add(NewMember {
            peer_urls: self.typed.peer_urls.clone(),
            is_learner: true,
            ..NewMember::default()
        });
        if may_remove_first {
            match self.session.try_change(survey, &add).await {
                Err(error) if error.refusal().is_some_and(ClusterRefusal::is_about_quorum) => {
                    self.is_addition_refused = true;
                    return Ok(());
                }
                added => added?,
            };
        } else {
            self.session.change(survey, &add, answers).await?;
        }
        answers.print_note(&format!("{} is in the list, as a learner", self.typed.name));
        Ok(())
    }

    async fn await_start(
        &mut self,
        survey: &Survey,
        id: MemberId,
        answers: &CommandOutput<'_, '_>,
    ) -> Result<(), ExitError> {
        let typed = self.typed;
        if !std::mem::replace(&mut self.is_start_asked_for, true) {
            print_start_instructions(survey, typed, id, answers);
        }
        let elapsed = self.start.elapsed();
        let text = || format!("{} has not started; start it", typed.name);
        self.start.wait(answers, elapsed, text).await
    }

    async fn remove(
        &mut self,
        survey: &Survey,
        id: MemberId,
        answers: &CommandOutput<'_, '_>,
    ) -> Result<(), ExitError> {
        let Self { typed, operation, .. } = *self;
        let interrupted = format!(
            "removing {id}; should this be interrupted, the same with {id} goes on: muster-agent \
             member replace {id} {} --peer-urls {}",
            typed.name,
            typed.peer_urls.join(",")
        );
        answers.print_note(&interrupted);
        survey.cluster.announce_removal(id, &operation, &survey.members).await?;
        let removal = ClusterMemberChange::Remove(id);
        self.session.change_with_operation(survey, &removal, operation, answers).await?;
        self.removal_origin = RemovalOrigin::Own;
        answers.print_note(&format!("{id} is removed"));
        Ok(())
    }
}

/// Returns the operation id of the removal that a replacement makes. A later run of the same
/// command gets the same id. A replacement of the same member by one with other peer URLs gets
/// another id.
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

/// Returns the error for an old member that another operation removed. The new member would make
/// the cluster larger than intended.
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

/// Returns the id of the member to replace. A member that is already removed has to be given by its
/// id, since an unknown name may be a typing error.
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
