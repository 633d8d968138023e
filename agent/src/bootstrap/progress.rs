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

/// Remembers what was said.
#[derive(Debug)]
pub struct Progress {
    board: Board,
    explained: BTreeSet<String>,
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
        self.say(phase, sentence(poll));
    }

    /// Something goes on: told at once if it is news, else at the next repetition.
    pub fn say(&mut self, phase: Phase, line: String) {
        self.board.phase(phase, line.clone());
        if line != self.line {
            self.line = line;
            self.said_at = None;
            self.pause = REPEAT_EVERY;
            self.repeat();
        }
    }

    /// Says the line again if it is time to.
    pub fn repeat(&mut self) {
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
mod tests {
    use super::*;

    fn poll(state: ClusterState, standing: Standing, seated: u8) -> PollResponse {
        PollResponse {
            rev: 1,
            now_ms: 0,
            state,
            epoch: 1,
            standing,
            seated,
            size: 3,
            lease_ms: None,
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
