//! Log lines for people while the cluster forms: each reason from the service once, and regularly
//! what this host waits for.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use discovery_types::api::{ClusterState, Explanation, PollResponse, Standing};

use crate::status::{Board, Phase};

/// How often to check whether a line is due.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Pause before the progress line is first repeated.
const REPEAT_EVERY: Duration = Duration::from_secs(5);
/// How long a wait of the service or this host must last before it is logged. Every healthy cluster
/// passes through shorter ones.
const WORTH_SAYING: Duration = Duration::from_secs(2);
/// The longest pause between repetitions of an unchanged line; the pauses grow up to this.
const REPEAT_AT_LEAST_EVERY: Duration = Duration::from_secs(300);

/// Tracks what was logged, to avoid repetition.
#[derive(Debug)]
pub(super) struct Progress {
    board: Board,
    waits: Vec<Explanation>,
    /// When each wait began, by its code.
    since: BTreeMap<String, Instant>,
    explained: BTreeSet<String>,
    /// The cluster's state as the service last showed it.
    cluster: Option<(Phase, String)>,
    /// Reason why this host itself waits, and when that began.
    waits_for: Option<(String, Instant)>,
    line: String,
    said_at: Option<Instant>,
    pause: Duration,
}

impl Progress {
    /// Makes a tracker that has logged nothing.
    pub(super) fn new(board: Board) -> Self {
        Self {
            board,
            waits: Vec::new(),
            since: BTreeMap::new(),
            explained: BTreeSet::new(),
            cluster: None,
            waits_for: None,
            line: String::new(),
            said_at: None,
            pause: REPEAT_EVERY,
        }
    }

    /// Takes in an answer of the service.
    pub(super) fn shown(&mut self, poll: &PollResponse) {
        let explain: Vec<String> = poll.explain.iter().map(ToString::to_string).collect();
        self.waits.clone_from(&poll.explain);
        for line in self.news(Instant::now()) {
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
        self.cluster = Some((phase, sentence(poll)));
        self.tell();
    }

    /// Sets what this host itself waits for; `None` if nothing.
    pub(super) fn waits_for(&mut self, what: Option<String>) {
        if self.waits_for.as_ref().map(|(known, _)| known) != what.as_ref() {
            self.waits_for = what.map(|what| (what, Instant::now()));
        }
        self.tell();
    }

    fn tell(&mut self) {
        let Some((phase, line)) = self.cluster.clone() else { return };
        let lasting = self.waits_for.as_ref().filter(|(_, at)| at.elapsed() >= WORTH_SAYING);
        let line = match lasting {
            Some((what, _)) => format!("{line}, and has not signed it. {what}"),
            None => line,
        };
        self.say(phase, line);
    }

    /// Sets the progress line. A new line is logged at once, an unchanged one when its repetition
    /// is due.
    fn say(&mut self, phase: Phase, line: String) {
        self.board.phase(phase, line.clone());
        if line != self.line {
            self.line = line;
            self.said_at = None;
            self.pause = REPEAT_EVERY;
            self.say_again();
        }
    }

    /// Returns the service's explanations that are due: those of waits that have lasted, each text
    /// once.
    fn news(&mut self, now: Instant) -> Vec<String> {
        let Self { waits, since, explained, .. } = self;
        since.retain(|code, _| waits.iter().any(|wait| wait.code == *code));
        let mut news = Vec::new();
        let mut standing = BTreeSet::new();
        for wait in waits.iter() {
            let began = *since.entry(wait.code.clone()).or_insert(now);
            if now.duration_since(began) < WORTH_SAYING {
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
    pub(super) fn look(&mut self) {
        for line in self.news(Instant::now()) {
            tracing::info!("discovery says: {line}");
        }
        self.tell();
        self.say_again();
    }

    fn say_again(&mut self) {
        let due = self.said_at.is_none_or(|at| at.elapsed() >= self.pause);
        if due && !self.line.is_empty() {
            tracing::info!("{}", self.line);
            if self.said_at.is_some() {
                self.pause = (self.pause * 2).min(REPEAT_AT_LEAST_EVERY);
            }
            self.said_at = Some(Instant::now());
        }
    }
}

/// Describes the cluster's state from this host's point of view.
pub(super) fn sentence(poll: &PollResponse) -> String {
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
            matrix: Vec::new(),
            releases: Vec::new(),
            document: None,
            explain: Vec::new(),
        }
    }

    #[test]
    fn the_progress_line_says_what_is_missing_and_where_this_host_stands() {
        assert_eq!(
            sentence(&poll(ClusterState::Open, Standing::Seated(1), 1)),
            "waiting for 2 more hosts: 1 of 3 seats are taken, this host has seat 1"
        );
        assert_eq!(
            sentence(&poll(ClusterState::Preparing, Standing::Standby(0), 3)),
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
    fn a_wait_is_told_once_it_has_lasted_and_each_of_its_words_once() {
        let mut progress = Progress::new(Board::default());
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs_f64(seconds);
        progress.waits = vec![waits("nodes_not_reported", "a majority has not reported")];
        assert!(progress.news(at(0.0)).is_empty());
        assert!(progress.news(at(1.9)).is_empty(), "what every forming passes through");
        // The wait ended in between, so a later one counts as new.
        progress.waits.clear();
        assert!(progress.news(at(1.95)).is_empty());
        progress.waits = vec![waits("acks_missing", "0 of 3 have signed")];
        assert!(progress.news(at(2.1)).is_empty());
        // The text changes, but the wait is still the same.
        progress.waits = vec![waits("acks_missing", "1 of 3 have signed")];
        assert_eq!(progress.news(at(4.2)), ["1 of 3 have signed"]);
        assert!(progress.news(at(9.0)).is_empty());
        progress.waits = vec![waits("acks_missing", "2 of 3 have signed")];
        assert_eq!(progress.news(at(9.1)), ["2 of 3 have signed"]);
    }

    #[test]
    fn a_wait_that_comes_back_is_another_wait() {
        let mut progress = Progress::new(Board::default());
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs_f64(seconds);
        let wait = waits("acks_missing", "0 of 3 have signed");
        progress.waits = vec![wait.clone()];
        assert!(progress.news(at(0.0)).is_empty());
        assert_eq!(progress.news(at(2.1)), ["0 of 3 have signed"]);
        progress.waits.clear();
        assert!(progress.news(at(3.0)).is_empty());
        progress.waits = vec![wait];
        assert!(progress.news(at(3.1)).is_empty(), "it has not lasted");
        assert_eq!(progress.news(at(5.2)), ["0 of 3 have signed"]);
    }

    #[test]
    fn what_this_host_waits_for_stands_in_the_status_once_it_lasts() {
        let board = Board::default();
        let mut progress = Progress::new(board.clone());
        progress.shown(&poll(ClusterState::Preparing, Standing::Seated(2), 3));
        let reason = || board.read().reason.unwrap_or_default();
        let what = "S6: run `muster-agent reset` on this host".to_owned();
        progress.waits_for(Some(what.clone()));
        assert!(!reason().contains("S6"), "it may come at once: {}", reason());
        let long_ago = Instant::now().checked_sub(WORTH_SAYING).unwrap();
        progress.waits_for = Some((what.clone(), long_ago));
        progress.look();
        assert_eq!(
            reason(),
            "the list of epoch 1 is proposed, waiting for all 3 to sign it: this host has seat 2, \
             and has not signed it. S6: run `muster-agent reset` on this host"
        );
        progress.waits_for(Some(what));
        assert!(reason().contains("S6"), "it goes on: {}", reason());
        progress.waits_for(None);
        assert!(!reason().contains("S6"), "{}", reason());
    }

    #[test]
    fn status_shows_what_was_said() {
        let board = Board::default();
        let mut progress = Progress::new(board.clone());
        progress.shown(&poll(ClusterState::Open, Standing::Seated(2), 2));
        let status = board.read();
        assert_eq!((status.phase, status.seat), (Phase::Waiting, Some(2)));
        assert_eq!(
            status.reason.as_deref(),
            Some("waiting for 1 more host: 2 of 3 seats are taken, this host has seat 2")
        );
    }
}
