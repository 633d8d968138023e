//! Waits for members, and prints notes meanwhile.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{Answers, Survey};
use crate::cli::Access;
use crate::cluster::{Cluster, MemberId};
use crate::exit::End;
use crate::plan::{IN_SYNC_ENTRIES, Pace, Progress, State};

/// How often the members are surveyed.
const LOOK_AGAIN: Duration = Duration::from_millis(250);
/// How long a wait lasts before its first note, and the pause between notes after that.
pub(super) const SILENT_FOR: Duration = Duration::from_secs(2);
const SAY_AGAIN: Duration = Duration::from_secs(2);
/// How long all members have to be well: as long as the cluster itself requires before a membership
/// change.
const WELL_FOR: Duration = Duration::from_secs(5);

/// A wait with its limit, and the time of its last note.
pub(super) struct Watch {
    start: Instant,
    patience: Duration,
    said: Option<Instant>,
}

impl Watch {
    pub(super) fn new(patience: Duration) -> Self {
        Self { start: Instant::now(), patience, said: None }
    }

    /// Prints a note on what is waited for, if one is due.
    fn say(&mut self, answers: &Answers<'_, '_>, text: impl FnOnce() -> String) {
        let due = self.said.map_or(self.start + SILENT_FOR, |said| said + SAY_AGAIN);
        if Instant::now() >= due {
            self.said = Some(Instant::now());
            answers.note(&text());
        }
    }

    /// Prints a note if one is due, and waits before the next survey. Fails if there was no
    /// progress for too long.
    pub(super) async fn wait(
        &mut self,
        answers: &Answers<'_, '_>,
        stalled: Duration,
        text: impl Fn() -> String,
    ) -> Result<(), End> {
        if stalled >= self.patience {
            let seconds = self.patience.as_secs();
            return Err(End::Failed(format!("given up after {seconds} s: {}", text())));
        }
        self.say(answers, text);
        sleep(LOOK_AGAIN).await;
        Ok(())
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }
}

/// Waits until the learner `id` is in sync. Returns the last survey.
pub(super) async fn in_sync(
    first: &Survey,
    id: MemberId,
    patience: Duration,
    answers: &Answers<'_, '_>,
) -> Result<Survey, End> {
    let mut watch = Watch::new(patience);
    let mut progress = Progress::default();
    loop {
        let survey = first.again().await?;
        let sight = survey.sight();
        let gone = || End::Failed(format!("member {id} is not in the cluster any more"));
        let seen = sight.of_id(id).ok_or_else(gone)?;
        let label = seen.label();
        let text = match seen.state {
            State::Answers { behind: Some(behind) } if behind <= IN_SYNC_ENTRIES => {
                return Ok(survey);
            }
            State::Answers { behind: Some(behind) } => {
                pace(&label, progress.look(watch.elapsed(), behind))
            }
            State::Answers { behind: None } => format!("{label} answers, and nobody leads"),
            State::NotStarted => format!("{label} has not started; start it"),
            State::Silent => format!("{label} doesn't answer"),
        };
        let stalled = progress.stalled(watch.elapsed());
        watch.wait(answers, stalled, || text.clone()).await?;
    }
}

fn pace(label: &str, pace: Pace) -> String {
    let Pace { behind, rate, left } = pace;
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
pub(super) async fn all_well(
    access: &Access,
    patience: Duration,
    answers: &mut Answers<'_, '_>,
) -> Result<(), End> {
    let mut watch = Watch::new(patience);
    let mut well_since: Option<Instant> = None;
    let mut reached = Cluster::new(Vec::new());
    loop {
        let trouble = match super::cluster(access) {
            Ok(cluster) => match Survey::of(&cluster.joined(&reached)).await {
                Ok(survey) => {
                    reached = survey.cluster.clone();
                    trouble(&survey)
                }
                Err(error) => Some(error.to_string()),
            },
            Err(End::Failed(why)) => Some(why),
            Err(end) => return Err(end),
        };
        let Some(trouble) = trouble else {
            let since = *well_since.get_or_insert_with(Instant::now);
            if since.elapsed() >= WELL_FOR {
                break;
            }
            sleep(LOOK_AGAIN).await;
            continue;
        };
        well_since = None;
        let elapsed = watch.elapsed();
        watch.wait(answers, elapsed, || trouble.clone()).await?;
    }
    super::list::run(&reached, answers).await
}

/// Returns which members are not well, or `None`.
fn trouble(survey: &Survey) -> Option<String> {
    if survey.leader.is_none() {
        return Some("nobody leads".to_owned());
    }
    let told = survey.sight().members.into_iter().filter_map(|seen| match seen.state {
        State::NotStarted => Some(format!("{} has not started", seen.label())),
        State::Silent => Some(format!("{} doesn't answer", seen.label())),
        State::Answers { behind: Some(behind) } if behind <= IN_SYNC_ENTRIES => None,
        State::Answers { behind: Some(behind) } => {
            Some(format!("{} is {behind} entries behind", seen.label()))
        }
        State::Answers { behind: None } => Some("the leader doesn't answer".to_owned()),
    });
    let told: Vec<String> = told.collect();
    (!told.is_empty()).then(|| told.join(", "))
}
