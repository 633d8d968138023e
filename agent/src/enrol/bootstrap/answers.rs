//! Verifies the service's answers before the state machine sees them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use discovery_formation::agent::{AgentEvent, ClusterStatus, ExaminedProposal, release_wait_limit};
use discovery_formation::service::FormationSettings;
use discovery_formation::{AgentKey, Millis};
use discovery_types::api::{CommitDocument, NackReason, NackRequest, PollResponse, ProbeResult};
use discovery_types::approval::Approval;
use discovery_types::convert;
use discovery_types::document::{DocumentError, VerifiedDocument};
use discovery_types::jws::Jws;
use discovery_types::key::PublicKey;
use discovery_types::proposal::{Proposal, Release, VerifiedProposal};
use discovery_types::statement::{StatementChain, StatementError};
use discovery_types::text::truncate_reason;

use tokio::time::Instant;

use super::mesh::ProbeFinding;
use super::outgoing::OutgoingMessage;
use super::{Bootstrap, CurrentProposal, MAX_WAIT_FOR_RELEASES, own_addresses};
use crate::enrol::redeem::{ChainError, verify_statements};
use crate::exit::{ExitError, error_chain};
use crate::observe::status::Phase;
use crate::probe::Answer;
use crate::state::state_exit_error;

/// Why an answer of the service can't be used.
#[derive(Debug, thiserror::Error)]
enum AnswerError {
    /// The statement chain is invalid, or another cluster's.
    #[error("{0}")]
    Chain(#[from] ChainError),
    /// The statement chain branches off from the one that was verified before.
    #[error("the statement chain is not a continuation of the one shown before")]
    Branch,
    /// The commit document is invalid.
    #[error("{0}")]
    Document(#[from] DocumentError),
    /// The certificates that came with the commit document are invalid.
    #[error("{0}")]
    Leaves(#[from] discovery_types::leaves::LeafError),
    /// The epoch is beyond this agent's limit. Releasing such an epoch would exclude this host from
    /// every later list.
    #[error(
        "it shows epoch {epoch}, and no cluster that this host has seen can have come beyond \
         {limit}: the service is broken, or lies"
    )]
    Epoch {
        epoch: u64,
        /// The highest epoch that this agent accepts.
        limit: u64,
    },
    /// The commit document came without this member's certificates.
    #[error("the document came without this member's certificates")]
    NoLeaves,
}

impl Bootstrap<'_> {
    /// Handles the service's answer to any request.
    pub(super) async fn handle_answer(&mut self, poll: PollResponse) -> Result<(), ExitError> {
        if let Err(error) = self.adopt_chain(&poll.statements) {
            return self.handle_bad_answer(&error);
        }
        self.check_adoption()?;
        let limit = self.protocol.agent.journal.epoch_limit();
        if poll.epoch > limit {
            return self.handle_bad_answer(&AnswerError::Epoch { epoch: poll.epoch, limit });
        }
        self.contact.revision = Some(poll.rev);
        self.progress.update(&poll);
        let Some(phase) = convert::phase(poll.state) else { return Ok(()) };
        let held = self
            .protocol
            .agent
            .journal
            .held_document
            .as_ref()
            .map(|held| convert::digest(held.proposal_hash));
        let shows_it = held.is_some() && poll.document.is_some();
        let shown =
            ClusterStatus { phase, epoch: poll.epoch, wants_document: held.is_some() && !shows_it };
        let actions = self.protocol.step(AgentEvent::StatusReceived(shown))?;
        self.carry_out_actions(actions).await?;
        for release in &poll.releases {
            self.handle_release(release).await?;
        }
        match &poll.proposal {
            Some(proposal) => {
                self.offer_proposal(proposal, &poll.approvals, release_wait(&poll)).await?
            }
            None => self.current_proposal = None,
        }
        if let Some(document) = &poll.document
            && let Err(error) = self.handle_document(document).await?
        {
            return self.handle_bad_answer(&error);
        }
        self.update_policy();
        Ok(())
    }

    /// Handles an answer that can't be verified: the service is broken or malicious. Logs it as an
    /// error, and tries again later. A chain without the pinned statement most likely means a wrong
    /// bundle. A retry can't correct the bundle, so the agent ends in that case.
    fn handle_bad_answer(&mut self, error: &AnswerError) -> Result<(), ExitError> {
        let text = format!("discovery's answer is refused: {}", error_chain(error));
        if let AnswerError::Chain(
            ChainError::Invalid(StatementError::NotPinned) | ChainError::OtherCluster,
        ) = error
        {
            return Err(ExitError::DoNotRestart(text));
        }
        tracing::error!("{text}");
        let pause = self.contact.retry.next_pause();
        self.contact.pause = pause;
        // Begin again with a redeem, which also fetches the service's newest keys.
        self.contact.redeemed = false;
        self.context.board.set_phase(Phase::Contacting, text.clone());
        self.context.board.set_error(text, None);
        Ok(())
    }

    /// Refuses an adopted cluster unless this host's etcd is the member that the owner signed.
    /// Refuses a cluster that forms if this host has a running etcd.
    fn check_adoption(&self) -> Result<(), ExitError> {
        let Some(statement) = self.chain.as_ref().map(StatementChain::newest) else {
            return Ok(());
        };
        match (&statement.adopted, &self.context.etcd) {
            (None, None) => Ok(()),
            (Some(_), None) => Err(ExitError::DoNotRestart(
                "this bundle is for the host of an etcd that runs already: say muster-agent adopt \
                 enrol there"
                    .to_owned(),
            )),
            (None, Some(_)) => Err(ExitError::DoNotRestart(
                "this bundle is for a cluster that forms, and not for one that runs already: an owner \
                 signs that one with muster-discovery cluster adopt"
                    .to_owned(),
            )),
            (Some(adopted), Some(own)) => own
                .check(adopted, statement)
                .map_err(|why| ExitError::DoNotRestart(format!("{why}. Nothing was changed"))),
        }
    }

    /// Adopts the statement chain if it is longer than the known one. A shorter chain, as from a
    /// restored database, changes nothing.
    fn adopt_chain(&mut self, statements: &[Jws]) -> Result<(), AnswerError> {
        let known = &self.protocol.extras.statements;
        let relation = compare_chains(known, statements);
        if self.chain.is_some() && relation == ChainComparison::NothingNew {
            return Ok(());
        }
        let chain = verify_statements(statements, &self.join)?;
        if relation == ChainComparison::Branch {
            return Err(AnswerError::Branch);
        }
        let name = chain.newest().name.to_string();
        self.context.board.update(|status| status.cluster_name = Some(name));
        self.protocol.extras.statements = statements.to_vec();
        self.chain = Some(chain);
        Ok(())
    }

    async fn handle_release(&mut self, jws: &Jws) -> Result<(), ExitError> {
        let seats = self.current_proposal.iter().flat_map(|offered| offered.seats.keys().copied());
        let bound = self.protocol.agent.journal.signed_lists.values();
        let members = bound.flat_map(|bound| bound.members.iter().map(|member| member.key));
        let known: Vec<AgentKey> = seats.chain(members).collect();
        let signer = known.into_iter().find(|key| *jws.kid() == convert::public_key(*key).key_id());
        let Some(key) = signer else { return Ok(()) };
        if let Some(epoch) = self.verified_release(jws, key) {
            let actions = self.protocol.step(AgentEvent::ReleaseSeen { key, epoch })?;
            self.carry_out_actions(actions).await?;
        }
        Ok(())
    }

    fn verified_release(&self, jws: &Jws, by: AgentKey) -> Option<u64> {
        let release = Release::verify(jws, &convert::public_key(by)).ok()?;
        (release.cluster == self.join.cluster).then_some(release.epoch)
    }

    async fn offer_proposal(
        &mut self,
        proposal: &Proposal,
        approvals: &[Jws],
        patience: Duration,
    ) -> Result<(), ExitError> {
        let Some(chain) = self.chain.clone() else { return Ok(()) };
        let h = proposal.hash();
        let verified = match VerifiedProposal::verify(proposal, &chain) {
            Ok(verified) => verified,
            Err(error) => {
                let detail = crate::exit::error_chain(&error);
                return self.refuse_unverified(proposal.epoch, h, detail);
            }
        };
        let list = convert::proposal(&verified);
        self.set_current_proposal(&list, convert::hash(&h), patience);
        let statement = chain.newest();
        let offer = ExaminedProposal {
            proposal_hash: convert::hash(&h),
            permissions: convert::permissions(&statement.permissions),
            spreads_zones: statement.spreads_zones(),
            statement: convert::hash(&chain.newest_hash()),
            size: statement.size,
            invalid_records: self.invalid_seats(&verified, approvals, &chain),
            skew: Millis(self.client.clock_offset_ms().unsigned_abs()),
            is_behind: self.client.clock_offset_ms() > 0,
            directory: self.protocol.layout.classify_node().map_err(state_exit_error)?,
            machine: self.facts()?,
            proposal: list,
        };
        if let Some(own) = &self.context.etcd {
            self.probers.etcds = own.targets(&verified);
        }
        let actions = self.protocol.step(AgentEvent::ProposalReceived(Box::new(offer)))?;
        self.update_policy();
        self.carry_out_actions(actions).await
    }

    /// Returns the seats of the proposed list whose records this agent must refuse, each with the
    /// reason.
    fn invalid_seats(
        &self,
        list: &VerifiedProposal,
        approvals: &[Jws],
        chain: &StatementChain,
    ) -> BTreeMap<u8, String> {
        let mut invalid = self.seats_with_time_errors(list);
        let keys = list.records().iter().map(|record| record.agent_key);
        invalid.extend(unapproved_seats(keys, approvals, chain));
        invalid
    }

    /// Returns the seats whose token is not valid now, by the service's clock or by this host's.
    fn seats_with_time_errors(&self, list: &VerifiedProposal) -> BTreeMap<u8, String> {
        let own = self.context.host.now().as_second();
        let clocks = [own, self.client.service_now_ms().div_euclid(1000)];
        let judged = clocks.iter().filter_map(|now| u64::try_from(*now).ok());
        judged
            .filter_map(|now| list.seat_with_time_error(now))
            .map(|(s, why)| (s, why.to_string()))
            .collect()
    }

    pub(super) fn facts(&self) -> Result<discovery_formation::MachineIdentity, ExitError> {
        let facts = self.context.host.facts();
        facts.map_err(|error| ExitError::Failed(format!("--machine-id-file: {error}")))
    }

    fn set_current_proposal(
        &mut self,
        list: &discovery_formation::ProposedList,
        h: discovery_formation::Hash,
        patience: Duration,
    ) {
        if self.current_proposal.as_ref().is_some_and(|offered| offered.h == h) {
            return;
        }
        let seats = (1..).zip(&list.records).map(|(seat, record)| (record.key, seat)).collect();
        self.current_proposal = Some(CurrentProposal {
            h,
            epoch: list.epoch,
            seats,
            results: BTreeMap::new(),
            release_deadline: Instant::now() + patience,
        });
    }

    /// Sends a nack for a proposal whose signatures can't be verified (rule S1 of the formation,
    /// `agent/sign.rs`). The state machine never sees such a proposal.
    fn refuse_unverified(
        &mut self,
        epoch: u64,
        h: discovery_types::digest::Digest,
        detail: String,
    ) -> Result<(), ExitError> {
        if self.refused_unverified == Some(h) {
            return Ok(());
        }
        self.refused_unverified = Some(h);
        tracing::warn!(epoch, "the proposed list is refused: {detail}");
        self.context.board.set_error(format!("the proposed list is refused: {detail}"), None);
        let nack = NackRequest {
            session: self.session(),
            epoch,
            h,
            reason: NackReason::Record,
            detail: truncate_reason(detail),
        };
        self.send(OutgoingMessage::Nack(nack));
        Ok(())
    }

    async fn handle_document(
        &mut self,
        shown: &CommitDocument,
    ) -> Result<Result<(), AnswerError>, ExitError> {
        let verified = match self.verify_document(shown) {
            Ok(verified) => verified,
            Err(error) => return Ok(Err(error)),
        };
        self.protocol.extras.leaves.clone_from(&shown.leaves);
        let document = Arc::new(convert::document(&verified));
        let held_before = self.protocol.document.is_some();
        let machine = self.facts()?;
        let actions = self.protocol.step(AgentEvent::DocumentReceived { document, machine })?;
        let held =
            self.protocol.agent.journal.held_document.as_ref().map(|held| held.proposal_hash);
        if !held_before && held == Some(convert::hash(&verified.hash())) {
            tracing::info!(epoch = verified.epoch(), "the list is decided: this host is a member");
            self.protocol.document = Some(verified);
        }
        self.carry_out_actions(actions).await?;
        Ok(Ok(()))
    }

    fn verify_document(&mut self, shown: &CommitDocument) -> Result<VerifiedDocument, AnswerError> {
        self.adopt_chain(&shown.statements)?;
        let Some(chain) = &self.chain else { return Err(AnswerError::Branch) };
        let verified =
            VerifiedDocument::verify_received(&shown.document, chain, &self.service_keys)?;
        let leaves = shown.leaves.as_ref().ok_or(AnswerError::NoLeaves)?;
        let own = verified.records().iter().find(|r| r.agent_key == *self.protocol.key.public());
        if let Some(own) = own {
            // The certificates are from the CAs that the cluster had at the commit. If the CAs have
            // been replaced since, the agent renews the certificates.
            if !chain.statements().any(|then| leaves.verify(own.node_key(), then).is_ok()) {
                leaves.verify(own.node_key(), chain.newest())?;
            }
        }
        Ok(verified)
    }

    /// Passes the result of a probe to the state machine of the formation protocol.
    pub(super) async fn handle_finding(&mut self, finding: ProbeFinding) -> Result<(), ExitError> {
        let ProbeFinding { epoch, peer, result } = finding;
        let result = match result {
            Ok((answer, round_trip)) => {
                self.verify_probe_answer(peer, answer).map(|ok| (ok, round_trip))
            }
            Err(reason) => Err(reason),
        };
        self.record_probe_result(epoch, peer, &result);
        let result = result.map(|(answer, _)| answer);
        let actions = self.protocol.step(AgentEvent::ProbeEnded { epoch, peer, result })?;
        self.carry_out_actions(actions).await
    }

    fn verify_probe_answer(
        &self,
        peer: AgentKey,
        answer: Answer,
    ) -> Result<discovery_formation::agent::ProbeAnswer, String> {
        let released = match &answer.released {
            Some(jws) => self
                .verified_release(jws, peer)
                .ok_or("its release is not signed by it, or is for another cluster")?,
            None => 0,
        };
        Ok(discovery_formation::agent::ProbeAnswer {
            key: convert::key(&answer.key),
            incarnation: convert::incarnation(&answer.incarnation),
            released_epoch: released,
        })
    }

    fn record_probe_result<T>(
        &mut self,
        epoch: u64,
        peer: AgentKey,
        result: &Result<(T, Duration), String>,
    ) {
        let Some(offered) = &mut self.current_proposal else { return };
        let Some(&seat) = offered.seats.get(&peer) else { return };
        if offered.epoch != epoch {
            return;
        }
        if let Err(reason) = result {
            tracing::warn!(
                seat,
                "seat {seat} can't be reached yet: {reason} (this host's addresses: {})",
                own_addresses(&*self.context.host)
            );
        }
        let micros = |(_, took): &(T, Duration)| u64::try_from(took.as_micros()).ok();
        let result = ProbeResult {
            seat,
            reached: result.is_ok(),
            error: result.as_ref().err().cloned().map(truncate_reason),
            round_trip_us: result.as_ref().ok().and_then(micros),
        };
        offered.results.insert(peer, result);
    }
}

/// Returns the seats of hosts that no issuer has approved, if the statement asks for approvals.
/// Without approvals, the service alone could admit a host.
fn unapproved_seats(
    keys: impl Iterator<Item = PublicKey>,
    approvals: &[Jws],
    chain: &StatementChain,
) -> BTreeMap<u8, String> {
    if !chain.newest().needs_approval {
        return BTreeMap::new();
    }
    let approved: Vec<PublicKey> = approvals
        .iter()
        .filter_map(|jws| Approval::verify(jws, chain).ok())
        .map(|approval| approval.agent)
        .collect();
    (1..)
        .zip(keys)
        .filter(|(_, key)| !approved.contains(key))
        .map(|(seat, _)| (seat, "no issuer has approved this host".to_owned()))
        .collect()
}

/// Returns how long this host waits for releases (other hosts' promises to be in no earlier list)
/// before it refuses the proposal in this answer.
fn release_wait(poll: &PollResponse) -> Duration {
    let left = poll.prepare_ms.map_or(FormationSettings::DEFAULT.ack_timeout, Millis);
    Duration::from_millis(release_wait_limit(left).0).min(MAX_WAIT_FOR_RELEASES)
}

/// How a statement chain in an answer compares with the known one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChainComparison {
    /// The chain is equal to the known one, or its beginning.
    NothingNew,
    /// The chain continues the known one.
    Longer,
    /// The chain branches off from the known one.
    Branch,
}

fn compare_chains<T: PartialEq>(known: &[T], shown: &[T]) -> ChainComparison {
    if known.starts_with(shown) {
        ChainComparison::NothingNew
    } else if shown.starts_with(known) {
        ChainComparison::Longer
    } else {
        ChainComparison::Branch
    }
}

#[cfg(test)]
mod tests {
    use discovery_types::api::{ClusterState, Standing};

    use discovery_types::fixtures::ClusterFixture;
    use discovery_types::key::SigningKey;

    use super::*;
    use crate::enrol::bootstrap::progress::tests::poll;

    #[test]
    fn the_wait_for_releases_is_half_of_the_services_limit_and_bounded() {
        let mut shown = poll(ClusterState::Preparing, Standing::Seated(1), 3);
        let mut of = |left| {
            shown.prepare_ms = left;
            release_wait(&shown)
        };
        assert_eq!(of(Some(8_000)), Duration::from_secs(4));
        assert_eq!(of(None), Duration::from_secs(30), "a service that doesn't say");
        assert_eq!(of(Some(u64::MAX)), MAX_WAIT_FOR_RELEASES);
    }

    #[test]
    fn a_shorter_chain_is_nothing_new_and_a_different_chain_is_a_branch() {
        let known = [1, 2, 3];
        assert_eq!(compare_chains(&known, &[1, 2]), ChainComparison::NothingNew);
        assert_eq!(compare_chains(&known, &known), ChainComparison::NothingNew);
        assert_eq!(compare_chains(&known, &[1, 2, 3, 4]), ChainComparison::Longer);
        assert_eq!(compare_chains(&known, &[1, 2, 4]), ChainComparison::Branch);
        assert_eq!(compare_chains(&known, &[1, 4, 3, 5]), ChainComparison::Branch);
        assert_eq!(compare_chains(&[], &[1]), ChainComparison::Longer);
    }

    #[test]
    fn a_list_with_a_host_that_no_issuer_approved_is_not_signed() {
        let mut world = ClusterFixture::new(3);
        world.statement.needs_approval = true;
        let (issuer, owner) = (&world.issuer, &world.owner);
        let signed = [world.statement.sign(owner)];
        let chain = StatementChain::verify_from_owners(&signed, &[*owner.public()]).unwrap();
        let keys: Vec<PublicKey> = (0..3).map(|_| *SigningKey::generate().public()).collect();
        let cluster = world.statement.cluster;
        let approve = |key: PublicKey, by: &SigningKey| Approval { cluster, agent: key }.sign(by);
        let stranger = SigningKey::generate();
        let mut approvals =
            vec![approve(keys[0], issuer), approve(keys[1], &stranger), approve(keys[2], owner)];
        let seats = |approvals: &[Jws]| {
            let invalid = unapproved_seats(keys.iter().copied(), approvals, &chain);
            invalid.into_keys().collect::<Vec<_>>()
        };
        assert_eq!(seats(&approvals), [2], "a stranger signed for the second");
        assert_eq!(seats(&[]), [1, 2, 3]);
        approvals.push(approve(keys[1], issuer));
        assert_eq!(seats(&approvals), [0_u8; 0]);
        let needless = ClusterFixture::new(3).chain();
        assert!(unapproved_seats(keys.iter().copied(), &[], &needless).is_empty());
    }
}
