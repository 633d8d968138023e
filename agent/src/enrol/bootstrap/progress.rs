//! Log lines for people while the cluster forms. Each explanation from the service is logged once.
//! What this host waits for is logged when it changes, and repeated from time to time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use discovery_types::api::{ClusterState, Explanation, PollResponse, Standing};

use crate::observe::status::{Phase, StatusHandle};

/// How often to check whether a line is due.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Pause before the progress line is first repeated.
const FIRST_REPEAT_PAUSE: Duration = Duration::from_secs(5);
/// How long a wait of the service or this host must last before it is logged. Shorter waits are
/// normal while a cluster forms.
const MIN_LOGGED_WAIT: Duration = Duration::from_secs(2);
/// The longest pause between repetitions of an unchanged line; the pauses grow up to this.
const MAX_REPEAT_PAUSE: Duration = Duration::from_secs(300);

/// Tracks what was logged, to avoid repetition.
#[derive(Debug)]
pub(super) struct ProgressLog {
    board: StatusHandle,
    waits: Vec<Explanation>,
    /// When each wait in `waits` began, by the code of its explanation.
    since: BTreeMap<String, Instant>,
    explained: BTreeSet<String>,
    /// The cluster's state as the service last showed it.
    cluster: Option<(Phase, String)>,
    /// Reason why this host itself waits, and when that began.
    own_wait: Option<(String, Instant)>,
    line: String,
    logged_at: Option<Instant>,
    pause: Duration,
}

impl ProgressLog {
    /// Makes a tracker that has logged nothing.
    pub(super) fn new(board: StatusHandle) -> Self {
        Self {
            board,
            waits: Vec::new(),
            since: BTreeMap::new(),
            explained: BTreeSet::new(),
            cluster: None,
            own_wait: None,
            line: String::new(),
            logged_at: None,
            pause: FIRST_REPEAT_PAUSE,
        }
    }

    /// Updates waits, status and progress line from an answer of the service.
    pub(super) fn update(&mut self, poll: &PollResponse) {
        let explain: Vec<String> = poll.explain.iter().map(ToString::to_string).collect();
        self.waits.clone_from(&poll.explain);
        for line in self.due_explanations(Instant::now()) {
            tracing::info!("discovery says: {line}");
        }
        let seat = match poll.standing {
            Standing::Seated(seat) | Standing::Member(seat) => Some(seat),
            Standing::Standby(_) | Standing::Reader => None,
        };
        self.board.update(|status| {
            status.explain = explain;
            status.cluster_phase = Some(poll.state.as_str().to_owned());
            status.epoch = Some(poll.epoch);
            status.seat = seat;
            status.next_retry_at = None;
        });
        let phase = match poll.state {
            ClusterState::Preparing => Phase::Preparing,
            _ => Phase::Waiting,
        };
        self.cluster = Some((phase, describe_state(poll)));
        self.update_line();
    }

    /// Sets what this host itself waits for; `None` if nothing.
    pub(super) fn set_own_wait(&mut self, what: Option<String>) {
        if self.own_wait.as_ref().map(|(known, _)| known) != what.as_ref() {
            self.own_wait = what.map(|what| (what, Instant::now()));
        }
        self.update_line();
    }

    fn update_line(&mut self) {
        let Some((phase, line)) = self.cluster.clone() else { return };
        let lasting = self.own_wait.as_ref().filter(|(_, at)| at.elapsed() >= MIN_LOGGED_WAIT);
        let line = match lasting {
            Some((what, _)) => format!("{line}, and has not signed it. {what}"),
            None => line,
        };
        self.set_line(phase, line);
    }

    /// Sets the progress line. A new line is logged at once, an unchanged one when its repetition
    /// is due.
    fn set_line(&mut self, phase: Phase, line: String) {
        self.board.set_phase(phase, line.clone());
        if line != self.line {
            self.line = line;
            self.logged_at = None;
            self.pause = FIRST_REPEAT_PAUSE;
            self.repeat_line();
        }
    }

    /// Returns the service's explanations that are due, each text once. An explanation is due when
    /// its wait has lasted for [`MIN_LOGGED_WAIT`].
    fn due_explanations(&mut self, now: Instant) -> Vec<String> {
        let Self { waits, since, explained, .. } = self;
        since.retain(|code, _| waits.iter().any(|wait| wait.code == *code));
        let mut news = Vec::new();
        let mut standing = BTreeSet::new();
        for wait in waits.iter() {
            let began = *since.entry(wait.code.clone()).or_insert(now);
            if now.duration_since(began) < MIN_LOGGED_WAIT {
                continue;
            }
            let line = wait.to_string();
            if !explained.contains(&line) {
                news.push(line.clone());
            }
            standing.insert(line);
        }
        *explained = standing;
        news
    }

    /// Logs explanations that have become due, and repeats the progress line if that is due.
    pub(super) fn log_due_lines(&mut self) {
        for line in self.due_explanations(Instant::now()) {
            tracing::info!("discovery says: {line}");
        }
        self.update_line();
        self.repeat_line();
    }

    fn repeat_line(&mut self) {
        let due = self.logged_at.is_none_or(|at| at.elapsed() >= self.pause);
        if due && !self.line.is_empty() {
            tracing::info!("{}", self.line);
            if self.logged_at.is_some() {
                self.pause = (self.pause * 2).min(MAX_REPEAT_PAUSE);
            }
            self.logged_at = Some(Instant::now());
        }
    }
}

/// Describes the cluster's state from this host's point of view.
pub(super) fn describe_state(poll: &PollResponse) -> String {
    let PollResponse { size, seated, epoch, .. } = poll;
    let mine = match poll.standing {
        Standing::Seated(seat) | Standing::Member(seat) => format!("this host has seat {seat}"),
        Standing::Standby(0) => "this host is the first standby".to_owned(),
        Standing::Standby(ahead) => format!("this host is a standby behind {ahead} others"),
        Standing::Reader => "this host has no place in it".to_owned(),
    };
    match poll.state {
        ClusterState::Open if seated < size => {
            let missing = size - seated;
            let hosts = if missing == 1 { "host" } else { "hosts" };
            format!(
                "waiting for {missing} more {hosts}: {seated} of {size} seats are taken, {mine}"
            )
        }
        ClusterState::Open => format!("waiting for the list to be proposed: {mine}"),
        ClusterState::Preparing => {
            format!(
                "the list of epoch {epoch} is proposed, waiting for all {size} to sign it: {mine}"
            )
        }
        ClusterState::Committed | ClusterState::Formed => {
            format!("the list of epoch {epoch} is decided: {mine}")
        }
        ClusterState::Draft
        | ClusterState::Abandoned
        | ClusterState::Expired
        | ClusterState::Retired => format!("the cluster is {}: {mine}", poll.state),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn poll(state: ClusterState, standing: Standing, seated: u8) -> PollResponse {
        PollResponse {
            rev: 1,
            now_ms: 0,
            state,
            epoch: 1,
            standing,
            seated,
            size: 3,
            lease_ms: None,
            prepare_ms: None,
            statements: Vec::new(),
            proposal: None,
            approvals: Vec::new(),
            matrix: Vec::new(),
            releases: Vec::new(),
            document: None,
            explain: Vec::new(),
        }
    }

    #[test]
    fn the_progress_line_says_what_is_missing_and_where_this_host_stands() {
        assert_eq!(
            describe_state(&poll(ClusterState::Open, Standing::Seated(1), 1)),
            "waiting for 2 more hosts: 1 of 3 seats are taken, this host has seat 1"
        );
        assert_eq!(
            describe_state(&poll(ClusterState::Preparing, Standing::Standby(0), 3)),
            "the list of epoch 1 is proposed, waiting for all 3 to sign it: this host is the first \
             standby"
        );
    }

    fn waits(code: &str, missing: &str) -> Explanation {
        Explanation {
            code: code.to_owned(),
            missing: missing.to_owned(),
            held_by: Vec::new(),
            last_error: None,
            next_retry_ms: None,
            command: None,
        }
    }

    #[test]
    fn a_wait_is_logged_only_after_a_while_and_each_of_its_texts_once() {
        let mut progress = ProgressLog::new(StatusHandle::default());
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs_f64(seconds);
        progress.waits = vec![waits("nodes_not_reported", "a majority has not reported")];
        assert!(progress.due_explanations(at(0.0)).is_empty());
        assert!(progress.due_explanations(at(1.9)).is_empty(), "what every forming passes through");
        // The wait ended in between, so a later wait counts as new.
        progress.waits.clear();
        assert!(progress.due_explanations(at(1.95)).is_empty());
        progress.waits = vec![waits("acks_missing", "0 of 3 have signed")];
        assert!(progress.due_explanations(at(2.1)).is_empty());
        // Only the text changes. The code is unchanged, so this is still the same wait.
        progress.waits = vec![waits("acks_missing", "1 of 3 have signed")];
        assert_eq!(progress.due_explanations(at(4.2)), ["1 of 3 have signed"]);
        assert!(progress.due_explanations(at(9.0)).is_empty());
        progress.waits = vec![waits("acks_missing", "2 of 3 have signed")];
        assert_eq!(progress.due_explanations(at(9.1)), ["2 of 3 have signed"]);
    }

    #[test]
    fn a_wait_that_returns_after_its_end_counts_as_new() {
        let mut progress = ProgressLog::new(StatusHandle::default());
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs_f64(seconds);
        let wait = waits("acks_missing", "0 of 3 have signed");
        progress.waits = vec![wait.clone()];
        assert!(progress.due_explanations(at(0.0)).is_empty());
        assert_eq!(progress.due_explanations(at(2.1)), ["0 of 3 have signed"]);
        progress.waits.clear();
        assert!(progress.due_explanations(at(3.0)).is_empty());
        progress.waits = vec![wait];
        assert!(progress.due_explanations(at(3.1)).is_empty(), "it has not lasted");
        assert_eq!(progress.due_explanations(at(5.2)), ["0 of 3 have signed"]);
    }

    #[test]
    fn a_long_wait_of_this_host_itself_is_shown_in_the_status() {
        let board = StatusHandle::default();
        let mut progress = ProgressLog::new(board.clone());
        progress.update(&poll(ClusterState::Preparing, Standing::Seated(2), 3));
        let reason = || board.read().reason.unwrap_or_default();
        let what = "S6: run `muster-agent reset` on this host".to_owned();
        progress.set_own_wait(Some(what.clone()));
        assert!(!reason().contains("S6"), "it may come at once: {}", reason());
        let long_ago = Instant::now().checked_sub(MIN_LOGGED_WAIT).unwrap();
        progress.own_wait = Some((what.clone(), long_ago));
        progress.log_due_lines();
        assert_eq!(
            reason(),
            "the list of epoch 1 is proposed, waiting for all 3 to sign it: this host has seat 2, \
             and has not signed it. S6: run `muster-agent reset` on this host"
        );
        progress.set_own_wait(Some(what));
        assert!(reason().contains("S6"), "it goes on: {}", reason());
        progress.set_own_wait(None);
        assert!(!reason().contains("S6"), "{}", reason());
    }

    #[test]
    fn the_status_shows_the_logged_line() {
        let board = StatusHandle::default();
        let mut progress = ProgressLog::new(board.clone());
        progress.update(&poll(ClusterState::Open, Standing::Seated(2), 2));
        let status = board.read();
        assert_eq!((status.phase, status.seat), (Phase::Waiting, Some(2)));
        assert_eq!(
            status.reason.as_deref(),
            Some("waiting for 1 more host: 2 of 3 seats are taken, this host has seat 2")
        );
    }
}
