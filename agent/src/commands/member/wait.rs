//! Waiting for members, aloud.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{Answers, Survey};
use crate::cli::Access;
use crate::cluster::{Cluster, MemberId};
use crate::exit::End;
use crate::plan::{IN_SYNC_ENTRIES, Pace, Progress, State};

/// How often members are looked at.
const LOOK_AGAIN: Duration = Duration::from_millis(250);
/// How long nothing is said of a wait, and how often something is after that.
pub(super) const SILENT_FOR: Duration = Duration::from_secs(2);
const SAY_AGAIN: Duration = Duration::from_secs(2);
/// For how long members have to be well: as long as the cluster asks of them before it lets its
/// members change.
const WELL_FOR: Duration = Duration::from_secs(5);

/// One wait: how long, for what, and what was said of it.
pub(super) struct Watch {
    start: Instant,
    patience: Duration,
    said: Option<Instant>,
}

impl Watch {
    pub(super) fn new(patience: Duration) -> Self {
        Self { start: Instant::now(), patience, said: None }
    }

    /// Says why it is still waited, now and then.
    fn say(&mut self, answers: &Answers<'_, '_>, text: impl FnOnce() -> String) {
        let due = self.said.map_or(self.start + SILENT_FOR, |said| said + SAY_AGAIN);
        if Instant::now() >= due {
            self.said = Some(Instant::now());
            answers.note(&text());
        }
    }

    /// The same, and waits a little; fails when nothing has happened for too long.
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

/// Waits until the learner `id` is in sync; gives what was seen then.
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

/// `member wait`: until all members have answered and been in sync, for as long as a change of
/// members asks for. Who the members are is read anew at each look: meanwhile they may be replaced, and
/// this host may become one of them.
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

/// Who isn't well.
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
