//! Clients of a recording. Each sends one request at a time, at changing members, with changing
//! time limits.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Result;
use tonic::Code;

use super::super::{Request, RequestOutcome};
use super::draw::RequestGenerator;
use super::link::ClientSession;
use super::{RecordingPlan, RecordingState};
use crate::rng::Rng;

/// Time limits of requests: shorter than an election, about as long as one, and longer than members
/// are stopped. With the last, a member that is continued still has requests to answer.
const PATIENCE: [Duration; 3] =
    [Duration::from_millis(400), Duration::from_millis(1_500), Duration::from_millis(5_000)];
/// Pause after a failed request.
const PAUSE: Duration = Duration::from_millis(40);

pub(super) struct RecordedClient {
    number: usize,
    rng: Rng,
    link: ClientSession,
    draw: RequestGenerator,
    shared: Arc<RecordingState>,
}

impl RecordedClient {
    pub(super) fn new(
        number: usize,
        user: Option<String>,
        mut rng: Rng,
        plan: &RecordingPlan,
        shared: Arc<RecordingState>,
    ) -> Result<Self> {
        let is_limited = user.as_deref().is_some_and(|user| user == super::users::limited_user());
        let draw = RequestGenerator::new(number, is_limited, Rng::new(rng.number()));
        let link = ClientSession::new(&plan.members, user)?;
        Ok(Self { number, rng, link, draw, shared })
    }

    /// Sends requests until the recording stops, and returns them with their outcomes.
    pub(super) async fn run(mut self) -> Vec<Request> {
        let mut requests = Vec::new();
        let mut member = self.number % self.link.members();
        while !self.shared.is_stopping() {
            if !self.link.ensure_token(member).await {
                member = self.rng.pick(self.link.members());
                tokio::time::sleep(PAUSE).await;
                continue;
            }
            let request = self.send_request(member).await;
            let is_served = matches!(request.outcome, RequestOutcome::Answered { .. });
            let is_lost = request.is_unknown();
            self.shared.answered.fetch_add(u64::from(is_served), Ordering::Relaxed);
            self.shared.lost.fetch_add(u64::from(is_lost), Ordering::Relaxed);
            requests.push(request);
            if is_lost || self.rng.chance(200) {
                member = self.rng.pick(self.link.members());
            }
            let pause = Duration::from_micros(self.rng.range(500, 12_000));
            tokio::time::sleep(if is_served { pause } else { PAUSE }).await;
        }
        requests
    }

    async fn send_request(&mut self, member: usize) -> Request {
        let asked = self.draw.next();
        let patience = PATIENCE[self.rng.pick(PATIENCE.len())];
        let begin = self.shared.now();
        let came = self.link.send(member, &asked, patience, || self.shared.now()).await;
        if matches!(came, RequestOutcome::Refused { code: Code::Unauthenticated, .. }) {
            self.link.drop_token();
        }
        let user = self.link.user().map(str::to_owned);
        let request =
            Request { client: self.number, member, user, begin, operation: asked, outcome: came };
        self.draw.observe_outcome(&request);
        request
    }
}
