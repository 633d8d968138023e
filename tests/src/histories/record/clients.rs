//! Clients of a recording. Each sends one request at a time, at changing members, with changing
//! time limits.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Result;
use tonic::Code;

use super::super::{Request, RequestOutcome};
use super::generator::RequestGenerator;
use super::session::ClientSession;
use super::{RecordingPlan, RecordingState};
use crate::rng::Rng;

/// Time limits of requests: shorter than an election, about as long as an election, and longer than
/// the time for which a test stops a member. A request with the longest limit still waits for its
/// answer when a stopped member runs again.
const TIME_LIMITS: [Duration; 3] =
    [Duration::from_millis(400), Duration::from_millis(1_500), Duration::from_millis(5_000)];
/// Pause after a failed request.
const PAUSE: Duration = Duration::from_millis(40);

pub(super) struct RecordedClient {
    number: usize,
    rng: Rng,
    session: ClientSession,
    generator: RequestGenerator,
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
        let generator = RequestGenerator::new(number, is_limited, Rng::new(rng.number()));
        let session = ClientSession::new(&plan.members, user)?;
        Ok(Self { number, rng, session, generator, shared })
    }

    /// Sends requests until the recording stops, and returns them with their outcomes.
    pub(super) async fn run(mut self) -> Vec<Request> {
        let mut requests = Vec::new();
        let mut member = self.number % self.session.members();
        while !self.shared.is_stopping() {
            if !self.session.ensure_token(member).await {
                member = self.rng.pick(self.session.members());
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
                member = self.rng.pick(self.session.members());
            }
            let pause = Duration::from_micros(self.rng.range(500, 12_000));
            tokio::time::sleep(if is_served { pause } else { PAUSE }).await;
        }
        requests
    }

    async fn send_request(&mut self, member: usize) -> Request {
        let operation = self.generator.next();
        let time_limit = TIME_LIMITS[self.rng.pick(TIME_LIMITS.len())];
        let begin = self.shared.now();
        let outcome = self.session.send(member, &operation, time_limit, || self.shared.now()).await;
        if matches!(outcome, RequestOutcome::Refused { code: Code::Unauthenticated, .. }) {
            self.session.drop_token();
        }
        let user = self.session.user().map(str::to_owned);
        let request = Request { client: self.number, member, user, begin, operation, outcome };
        self.generator.observe_outcome(&request);
        request
    }
}
