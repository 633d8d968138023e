//! Waits until members are in sync, and prints notes about the wait.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{CommandOutput, Survey};
use crate::cli::ClusterAccess;
use crate::cluster::{ClusterApiClient, MemberId};
use crate::exit::ExitError;
use crate::plan::{CatchUpProgress, CatchUpRate, MemberState};

/// How often the members are surveyed.
const SURVEY_INTERVAL: Duration = Duration::from_millis(250);
/// How long a wait lasts before its first note is printed.
pub(super) const FIRST_NOTE_DELAY: Duration = Duration::from_secs(2);
/// Time between two notes of one wait.
const NOTE_INTERVAL: Duration = Duration::from_secs(2);
/// How long all members must have answered and been in sync. Before a membership change, the
/// cluster itself requires voters that have been healthy for as long.
const REQUIRED_HEALTHY_TIME: Duration = Duration::from_secs(5);

/// A wait with its limit, and the time of its last note.
pub(super) struct WaitTimer {
    start: Instant,
    patience: Duration,
    last_note: Option<Instant>,
}

impl WaitTimer {
    pub(super) fn new(patience: Duration) -> Self {
        Self { start: Instant::now(), patience, last_note: None }
    }

    /// Prints a note on what the command waits for, if a note is due.
    fn print_note_if_due(
        &mut self,
        answers: &CommandOutput<'_, '_>,
        text: impl FnOnce() -> String,
    ) {
        let due = self.last_note.map_or(self.start + FIRST_NOTE_DELAY, |said| said + NOTE_INTERVAL);
        if Instant::now() >= due {
            self.last_note = Some(Instant::now());
            answers.print_note(&text());
        }
    }

    /// Prints a note if one is due, and waits before the next survey. Fails if there was no
    /// progress for too long.
    pub(super) async fn wait(
        &mut self,
        answers: &CommandOutput<'_, '_>,
        stalled: Duration,
        text: impl Fn() -> String,
    ) -> Result<(), ExitError> {
        if stalled >= self.patience {
            let seconds = self.patience.as_secs();
            return Err(ExitError::Failed(format!("given up after {seconds} s: {}", text())));
        }
        self.print_note_if_due(answers, text);
        sleep(SURVEY_INTERVAL).await;
        Ok(())
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }
}

/// Waits until the learner `id` is in sync. Returns the last survey.
pub(super) async fn wait_until_in_sync(
    first: &Survey,
    id: MemberId,
    patience: Duration,
    answers: &CommandOutput<'_, '_>,
) -> Result<Survey, ExitError> {
    let mut watch = WaitTimer::new(patience);
    let mut progress = CatchUpProgress::default();
    loop {
        let survey = first.repeat().await?;
        let observed = survey.observed_cluster();
        let gone = || ExitError::Failed(format!("member {id} is not in the cluster any more"));
        let seen = observed.of_id(id).ok_or_else(gone)?;
        let label = seen.label();
        let text = match seen.state {
            state if state.is_in_sync() => return Ok(survey),
            MemberState::Answers { behind: Some(behind) } => {
                describe_pace(&label, progress.record(watch.elapsed(), behind))
            }
            MemberState::Answers { behind: None } => format!("{label} answers, and nobody leads"),
            MemberState::NotStarted => format!("{label} has not started; start it"),
            MemberState::Silent => format!("{label} doesn't answer"),
        };
        let stalled = progress.stalled_for(watch.elapsed());
        watch.wait(answers, stalled, || text.clone()).await?;
    }
}

fn describe_pace(label: &str, pace: CatchUpRate) -> String {
    let CatchUpRate { behind, rate, left } = pace;
    match left {
        Some(left) => format!(
            "{label} is {behind} entries behind, fetches {rate} a second, {} s left",
            left.as_secs()
        ),
        None => format!("{label} is {behind} entries behind and comes no nearer"),
    }
}

/// Runs `member wait`: waits until all members have answered and been in sync for 5 s, as a
/// membership change requires. Each survey reads the list of members again: a member may be
/// replaced meanwhile, and this host may become a member.
pub(super) async fn wait_until_healthy(
    access: &ClusterAccess,
    patience: Duration,
    answers: &mut CommandOutput<'_, '_>,
) -> Result<(), ExitError> {
    let mut watch = WaitTimer::new(patience);
    let mut well_since: Option<Instant> = None;
    let mut reached = ClusterApiClient::new(Vec::new());
    loop {
        let trouble = match super::cluster_client(access) {
            Ok(cluster) => match Survey::take(&cluster.with_endpoints_of(&reached)).await {
                Ok(survey) => {
                    reached = survey.cluster.clone();
                    describe_unhealthy(&survey, None)
                }
                Err(error) => Some(error.to_string()),
            },
            Err(ExitError::Failed(why)) => Some(why),
            Err(end) => return Err(end),
        };
        let Some(trouble) = trouble else {
            let since = *well_since.get_or_insert_with(Instant::now);
            if since.elapsed() >= REQUIRED_HEALTHY_TIME {
                break;
            }
            sleep(SURVEY_INTERVAL).await;
            continue;
        };
        well_since = None;
        let elapsed = watch.elapsed();
        watch.wait(answers, elapsed, || trouble.clone()).await?;
    }
    super::list::run(&reached, answers).await
}

/// Returns which members except `but` don't answer or are not in sync; `None` if there is no such
/// member.
pub(in crate::commands) fn describe_unhealthy(
    survey: &Survey,
    but: Option<MemberId>,
) -> Option<String> {
    if survey.leader.is_none() {
        return Some("nobody leads".to_owned());
    }
    let members = survey.observed_cluster().members.into_iter();
    let judged = members.filter(|seen| Some(seen.member.id) != but);
    let told = judged.filter_map(|seen| match seen.state {
        MemberState::NotStarted => Some(format!("{} has not started", seen.label())),
        MemberState::Silent => Some(format!("{} doesn't answer", seen.label())),
        state if state.is_in_sync() => None,
        MemberState::Answers { behind: Some(behind) } => {
            Some(format!("{} is {behind} entries behind", seen.label()))
        }
        MemberState::Answers { behind: None } => Some("the leader doesn't answer".to_owned()),
    });
    let told: Vec<String> = told.collect();
    (!told.is_empty()).then(|| told.join(", "))
}
