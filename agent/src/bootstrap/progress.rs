//! What people hear while the cluster forms: each reason of the service once, and every few
//! seconds what this host waits for.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use discovery_types::api::{ClusterState, PollResponse, Standing};

use crate::status::{Board, Phase};

/// How soon the progress line is first repeated, and how often it is looked whether to.
pub const REPEAT_EVERY: Duration = Duration::from_secs(5);
/// A line that stays the same is said ever more seldom, down to this.
const REPEAT_AT_LEAST_EVERY: Duration = Duration::from_secs(300);

/// How long this host waits for something of its own before it says so: most of it comes at once.
const WAIT_IS_NEWS_AFTER: Duration = Duration::from_secs(2);

/// Remembers what was said.
#[derive(Debug)]
pub struct Progress {
    board: Board,
    explained: BTreeSet<String>,
    /// The cluster as the service last showed it.
    cluster: Option<(Phase, String)>,
    /// What this host itself waits for, and since when.
    waits_for: Option<(String, Instant)>,
    line: String,
    said_at: Option<Instant>,
    pause: Duration,
}

impl Progress {
    /// Nothing was said yet.
    pub fn new(board: Board) -> Self {
        Self {
            board,
            explained: BTreeSet::new(),
            cluster: None,
            waits_for: None,
            line: String::new(),
            said_at: None,
            pause: REPEAT_EVERY,
        }
    }

    /// The service has answered.
    pub fn shown(&mut self, poll: &PollResponse) {
        let explain: Vec<String> = poll.explain.iter().map(ToString::to_string).collect();
        for line in &explain {
            if !self.explained.contains(line) {
                tracing::info!(cluster.state = poll.state.as_str(), "discovery says: {line}");
            }
        }
        self.explained = explain.iter().cloned().collect();
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

    /// This host itself waits for `what`; none: for nothing.
    pub fn waits_for(&mut self, what: Option<String>) {
        if self.waits_for.as_ref().map(|(known, _)| known) != what.as_ref() {
            self.waits_for = what.map(|what| (what, Instant::now()));
        }
        self.tell();
    }

    fn tell(&mut self) {
        let Some((phase, line)) = self.cluster.clone() else { return };
        let lasting = self.waits_for.as_ref().filter(|(_, at)| at.elapsed() >= WAIT_IS_NEWS_AFTER);
        let line = match lasting {
            Some((what, _)) => format!("{line}, and has not signed it. {what}"),
            None => line,
        };
        self.say(phase, line);
    }

    /// Something goes on: told at once if it is news, else at the next repetition.
    fn say(&mut self, phase: Phase, line: String) {
        self.board.phase(phase, line.clone());
        if line != self.line {
            self.line = line;
            self.said_at = None;
            self.pause = REPEAT_EVERY;
            self.say_again();
        }
    }

    /// Says the line again if it is time to, or a new one if this host has waited for long enough.
    pub fn repeat(&mut self) {
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

/// What the cluster looks like from this host.
pub fn sentence(poll: &PollResponse) -> String {
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

    pub fn poll(state: ClusterState, standing: Standing, seated: u8) -> PollResponse {
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

    #[test]
    fn what_this_host_waits_for_stands_in_the_status_once_it_lasts() {
        let board = Board::default();
        let mut progress = Progress::new(board.clone());
        progress.shown(&poll(ClusterState::Preparing, Standing::Seated(2), 3));
        let reason = || board.read().reason.unwrap_or_default();
        let what = "S6: run `muster-agent reset` on this host".to_owned();
        progress.waits_for(Some(what.clone()));
        assert!(!reason().contains("S6"), "it may come at once: {}", reason());
        let long_ago = Instant::now().checked_sub(WAIT_IS_NEWS_AFTER).unwrap();
        progress.waits_for = Some((what.clone(), long_ago));
        progress.repeat();
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
