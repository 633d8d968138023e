//! Calls that may wait long, and the answers they have received.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use node_proto::v3electionpb::LeaderRequest;
use node_proto::v3electionpb::election_client::ElectionClient;
use tokio::task::JoinHandle;

use super::concurrency::ConcurrencyCall;
use super::server::{TokenChannel, anonymise_header, send_concurrency_call};

/// Answers that each call has received, by its number.
pub(super) type AnswersByCall = BTreeMap<u64, Vec<String>>;

#[derive(Default)]
struct ReceivedAnswers {
    answers: AnswersByCall,
    ended: BTreeSet<u64>,
}

impl ReceivedAnswers {
    fn add(&mut self, number: u64, text: String, is_over: bool) {
        self.answers.entry(number).or_default().push(text);
        if is_over {
            self.ended.insert(number);
        }
    }
}

/// The waiting calls of one server.
#[derive(Default)]
pub(super) struct PendingCalls {
    received: Arc<Mutex<ReceivedAnswers>>,
    tasks: BTreeMap<u64, JoinHandle<()>>,
}

impl Drop for PendingCalls {
    fn drop(&mut self) {
        self.tasks.values().for_each(JoinHandle::abort);
    }
}

impl PendingCalls {
    /// Starts a call without waiting for its answer.
    pub(super) fn begin(&mut self, number: u64, call: ConcurrencyCall, service: TokenChannel) {
        let received = self.received.clone();
        let task = async move {
            let answer = send_concurrency_call(call, service).await;
            received.lock().expect("nothing panics under this lock").add(number, answer.text, true);
        };
        self.tasks.insert(number, tokio::spawn(task));
    }

    /// Opens a stream that observes an election's leaders, without waiting for any.
    pub(super) fn observe(&mut self, number: u64, name: &'static str, service: TokenChannel) {
        let received = self.received.clone();
        let task = async move {
            let tell = |text: String, is_over: bool| {
                let mut received = received.lock().expect("nothing panics under this lock");
                received.add(number, text, is_over);
            };
            let request = LeaderRequest { name: name.into() };
            let mut leaders = match ElectionClient::new(service).observe(request).await {
                Ok(leaders) => leaders.into_inner(),
                Err(refused) => return tell(format!("refused: {refused:?}"), true),
            };
            loop {
                match leaders.message().await {
                    Ok(Some(mut leader)) => {
                        anonymise_header(&mut leader.header);
                        tell(format!("{leader:?}"), false);
                    }
                    end => return tell(format!("the end: {end:?}"), true),
                }
            }
        };
        self.tasks.insert(number, tokio::spawn(task));
    }

    /// Drops the client of call `number`, as if it had disconnected.
    pub(super) fn abandon(&mut self, number: u64) {
        if let Some(task) = self.tasks.remove(&number) {
            task.abort();
        }
    }

    /// Returns the answers since [`Self::clear_answers`], and the calls that have ended.
    pub(super) fn answers_and_ended(&self) -> (AnswersByCall, BTreeSet<u64>) {
        let received = self.received.lock().expect("nothing panics under this lock");
        (received.answers.clone(), received.ended.clone())
    }

    pub(super) fn clear_answers(&self) {
        let mut received = self.received.lock().expect("nothing panics under this lock");
        *received = ReceivedAnswers::default();
    }
}
