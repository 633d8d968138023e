//! Verifies the service's answers before the state machine sees them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use discovery_formation::agent::{Event, Offer, Shown, patience};
use discovery_formation::service::Settings;
use discovery_formation::{KeyId, Millis};
use discovery_types::api::{CommitDocument, NackReason, NackRequest, PollResponse, ProbeResult};
use discovery_types::convert;
use discovery_types::document::{DocumentError, VerifiedDocument};
use discovery_types::jws::Jws;
use discovery_types::proposal::{Proposal, Release, VerifiedProposal};
use discovery_types::statement::{StatementChain, StatementError};

use tokio::time::Instant;

use super::errand::Errand;
use super::mesh::Finding;
use super::{Bootstrap, LONGEST_PATIENCE, Offered, own_addresses};
use crate::exit::{End, chain};
use crate::probe::Answer;
use crate::protocol::state_end;
use crate::state::node_dir;
use crate::status::Phase;

/// Why an answer of the service can't be used.
#[derive(Debug, thiserror::Error)]
enum Unusable {
    /// The statement chain is invalid.
    #[error("the statement chain is not valid: {0}")]
    Chain(#[from] StatementError),
    /// The statement chain branches off from the one that was verified before.
    #[error("the statement chain is not a continuation of the one shown before")]
    Branch,
    /// The statement chain is of another cluster than the bundle's.
    #[error("the statement chain is another cluster's")]
    OtherCluster,
    /// The commit document is invalid.
    #[error("{0}")]
    Document(#[from] DocumentError),
    /// The certificates with the document are invalid.
    #[error("{0}")]
    Leaves(#[from] discovery_types::leaves::LeafError),
    /// The epoch is beyond this agent's limit. A promise about such an epoch would exclude this
    /// host from every later list.
    #[error(
        "it shows epoch {epoch}, and no cluster that this host has seen can have come beyond \
         {limit}: the service is broken, or lies"
    )]
    Epoch {
        epoch: u64,
        /// The highest epoch that this agent accepts.
        limit: u64,
    },
    /// The document came without this member's certificates.
    #[error("the document came without this member's certificates")]
    NoLeaves,
}

impl Bootstrap<'_> {
    /// Takes in an answer of the service to any request.
    pub(super) async fn absorb(&mut self, poll: PollResponse) -> Result<(), End> {
        if let Err(error) = self.take_chain(&poll.statements) {
            return self.unusable(&error);
        }
        let limit = self.protocol.agent.journal.epoch_limit();
        if poll.epoch > limit {
            return self.unusable(&Unusable::Epoch { epoch: poll.epoch, limit });
        }
        self.contact.revision = Some(poll.rev);
        self.progress.shown(&poll);
        let Some(phase) = convert::phase(poll.state) else { return Ok(()) };
        let held = self.protocol.agent.journal.held.as_ref().map(|held| convert::digest(held.h));
        let shows_it = held.is_some() && poll.document.is_some();
        let shown = Shown { phase, epoch: poll.epoch, show_document: held.is_some() && !shows_it };
        let actions = self.protocol.step(Event::Shown(shown))?;
        self.act(actions).await?;
        for release in &poll.releases {
            self.release_seen(release).await?;
        }
        match &poll.proposal {
            Some(proposal) => self.offer(proposal, patience_of(&poll)).await?,
            None => self.offered = None,
        }
        if let Some(document) = &poll.document
            && let Err(error) = self.document(document).await?
        {
            return self.unusable(&error);
        }
        self.update_policy();
        Ok(())
    }

    /// Handles an answer that can't be verified: the service is broken or malicious. Logs it as an
    /// error, and tries again later. A chain without the pinned statement most likely means a wrong
    /// bundle. A retry can't help then, so the agent ends.
    fn unusable(&mut self, error: &Unusable) -> Result<(), End> {
        let text = format!("discovery's answer is refused: {}", chain(error));
        if let Unusable::Chain(StatementError::NotPinned) | Unusable::OtherCluster = error {
            return Err(End::DoNotRestart(text));
        }
        tracing::error!("{text}");
        let pause = self.contact.retry.next_pause();
        self.contact.pause = pause;
        // Begin again with a redeem, which also fetches the service's newest keys.
        self.contact.redeemed = false;
        self.surroundings.board.phase(Phase::Contacting, text.clone());
        self.surroundings.board.error(text, None);
        Ok(())
    }

    /// Adopts the chain if it is longer. A shorter one, as from a restored database, changes
    /// nothing.
    fn take_chain(&mut self, statements: &[Jws]) -> Result<(), Unusable> {
        let known = &self.protocol.keepsakes.statements;
        let relation = relation(known, statements);
        if self.chain.is_some() && relation == Relation::NothingNew {
            return Ok(());
        }
        let chain = StatementChain::verify_from_pin(statements, &self.join.statement)?;
        if chain.newest().cluster != self.join.cluster {
            return Err(Unusable::OtherCluster);
        }
        if relation == Relation::Branch {
            return Err(Unusable::Branch);
        }
        let name = chain.newest().name.to_string();
        self.surroundings.board.update(|status| status.cluster_name = Some(name));
        self.protocol.keepsakes.statements = statements.to_vec();
        self.chain = Some(chain);
        Ok(())
    }

    async fn release_seen(&mut self, jws: &Jws) -> Result<(), End> {
        let seats = self.offered.iter().flat_map(|offered| offered.seats.keys().copied());
        let bound = self.protocol.agent.journal.bound.values();
        let members = bound.flat_map(|bound| bound.members.iter().map(|member| member.key));
        let known: Vec<KeyId> = seats.chain(members).collect();
        let signer = known.into_iter().find(|key| *jws.kid() == convert::public_key(*key).key_id());
        let Some(key) = signer else { return Ok(()) };
        if let Some(epoch) = self.verified_release(jws, key) {
            let actions = self.protocol.step(Event::ReleaseSeen { key, epoch })?;
            self.act(actions).await?;
        }
        Ok(())
    }

    fn verified_release(&self, jws: &Jws, by: KeyId) -> Option<u64> {
        let release = Release::verify(jws, &convert::public_key(by)).ok()?;
        (release.cluster == self.join.cluster).then_some(release.epoch)
    }

    async fn offer(&mut self, proposal: &Proposal, patience: Duration) -> Result<(), End> {
        let Some(chain) = self.chain.clone() else { return Ok(()) };
        let h = proposal.hash();
        let verified = match VerifiedProposal::verify(proposal, &chain) {
            Ok(verified) => verified,
            Err(error) => {
                let detail = crate::exit::chain(&error);
                return self.refuse_unseen(proposal.epoch, h, detail);
            }
        };
        let list = convert::proposal(&verified);
        self.note_offered(&list, convert::hash(&h), patience);
        let statement = chain.newest();
        let offer = Offer {
            h: convert::hash(&h),
            permissions: convert::permissions(&statement.permissions),
            statement: convert::hash(&chain.newest_hash()),
            size: statement.size,
            invalid: self.untimely(&verified),
            skew: Millis(self.client.clock_offset_ms().unsigned_abs()),
            is_behind: self.client.clock_offset_ms() > 0,
            directory: node_dir::classify(&self.protocol.layout.node()).map_err(state_end)?,
            machine: self.facts()?,
            proposal: list,
        };
        let actions = self.protocol.step(Event::Offered(Box::new(offer)))?;
        self.update_policy();
        self.act(actions).await
    }

    /// Returns the seats whose token can't give a seat now, by the service's clock or by this
    /// host's.
    fn untimely(&self, list: &VerifiedProposal) -> BTreeMap<u8, String> {
        let own = self.surroundings.host.now().as_second();
        let clocks = [own, self.client.service_now_ms().div_euclid(1000)];
        let judged = clocks.iter().filter_map(|now| u64::try_from(*now).ok());
        judged.filter_map(|now| list.untimely(now)).map(|(s, why)| (s, why.to_string())).collect()
    }

    pub(super) fn facts(&self) -> Result<discovery_formation::Machine, End> {
        let facts = self.surroundings.host.facts();
        facts.map_err(|error| End::Failed(format!("--machine-id-file: {error}")))
    }

    fn note_offered(
        &mut self,
        list: &discovery_formation::Proposal,
        h: discovery_formation::Hash,
        patience: Duration,
    ) {
        if self.offered.as_ref().is_some_and(|offered| offered.h == h) {
            return;
        }
        let seats = (1..).zip(&list.records).map(|(seat, record)| (record.key, seat)).collect();
        self.offered = Some(Offered {
            h,
            epoch: list.epoch,
            seats,
            results: BTreeMap::new(),
            impatient_at: Instant::now() + patience,
        });
    }

    /// Refuses a proposal that can't be verified (rule S1), before the state machine sees it. Its
    /// signatures don't confirm its content.
    fn refuse_unseen(
        &mut self,
        epoch: u64,
        h: discovery_types::digest::Digest,
        detail: String,
    ) -> Result<(), End> {
        if self.refused_unseen == Some(h) {
            return Ok(());
        }
        self.refused_unseen = Some(h);
        tracing::warn!(epoch, "the proposed list is refused: {detail}");
        self.surroundings.board.error(format!("the proposed list is refused: {detail}"), None);
        let nack = NackRequest {
            session: self.session(),
            epoch,
            h,
            reason: NackReason::Record,
            detail: cut(detail),
        };
        self.send(Errand::Nack(nack));
        Ok(())
    }

    async fn document(&mut self, shown: &CommitDocument) -> Result<Result<(), Unusable>, End> {
        let verified = match self.verify_document(shown) {
            Ok(verified) => verified,
            Err(error) => return Ok(Err(error)),
        };
        self.protocol.keepsakes.leaves.clone_from(&shown.leaves);
        let document = Arc::new(convert::document(&verified));
        let held_before = self.protocol.document.is_some();
        let machine = self.facts()?;
        let actions = self.protocol.step(Event::DocumentShown { document, machine })?;
        let held = self.protocol.agent.journal.held.as_ref().map(|held| held.h);
        if !held_before && held == Some(convert::hash(&verified.hash())) {
            tracing::info!(epoch = verified.epoch(), "the list is decided: this host is a member");
            self.protocol.document = Some(verified);
        }
        self.act(actions).await?;
        Ok(Ok(()))
    }

    fn verify_document(&mut self, shown: &CommitDocument) -> Result<VerifiedDocument, Unusable> {
        self.take_chain(&shown.statements)?;
        let Some(chain) = &self.chain else { return Err(Unusable::Branch) };
        let verified =
            VerifiedDocument::verify_received(&shown.document, chain, &self.service_keys)?;
        let leaves = shown.leaves.as_ref().ok_or(Unusable::NoLeaves)?;
        let own = verified.records().iter().find(|r| r.agent_key == *self.protocol.key.public());
        if let Some(own) = own {
            leaves.verify(own.node_key(), chain.newest())?;
        }
        Ok(verified)
    }

    /// Passes a probe's finding to the state machine.
    pub(super) async fn found(&mut self, finding: Finding) -> Result<(), End> {
        let Finding { epoch, peer, result } = finding;
        let result = match result {
            Ok((answer, round_trip)) => self.checked(peer, answer).map(|ok| (ok, round_trip)),
            Err(reason) => Err(reason),
        };
        self.note_result(epoch, peer, &result);
        let result = result.map(|(answer, _)| answer);
        let actions = self.protocol.step(Event::Probed { epoch, peer, result })?;
        self.act(actions).await
    }

    fn checked(
        &self,
        peer: KeyId,
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
            released,
        })
    }

    fn note_result<T>(&mut self, epoch: u64, peer: KeyId, result: &Result<(T, Duration), String>) {
        let Some(offered) = &mut self.offered else { return };
        let Some(&seat) = offered.seats.get(&peer) else { return };
        if offered.epoch != epoch {
            return;
        }
        if let Err(reason) = result {
            tracing::warn!(
                seat,
                "seat {seat} can't be reached yet: {reason} (this host's addresses: {})",
                own_addresses(&*self.surroundings.host)
            );
        }
        let micros = |(_, took): &(T, Duration)| u64::try_from(took.as_micros()).ok();
        let result = ProbeResult {
            seat,
            reached: result.is_ok(),
            error: result.as_ref().err().cloned().map(cut),
            round_trip_us: result.as_ref().ok().and_then(micros),
        };
        offered.results.insert(peer, result);
    }
}

/// Returns how long the proposal in this answer may wait for releases.
fn patience_of(poll: &PollResponse) -> Duration {
    let left = poll.prepare_ms.map_or(Settings::DEFAULT.prepare, Millis);
    Duration::from_millis(patience(left).0).min(LONGEST_PATIENCE)
}

/// How a chain in an answer compares with the known one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Relation {
    /// The chain is equal to the known one, or its beginning.
    NothingNew,
    /// The chain continues the known one.
    Longer,
    /// The chain branches off from the known one.
    Branch,
}

fn relation<T: PartialEq>(known: &[T], shown: &[T]) -> Relation {
    if known.starts_with(shown) {
        Relation::NothingNew
    } else if shown.starts_with(known) {
        Relation::Longer
    } else {
        Relation::Branch
    }
}

/// Cuts a text to the length that the service accepts as a reason.
pub(crate) fn cut(text: String) -> String {
    /// Maximum number of characters in a reason, as the API defines it.
    const LIMIT: usize = 300;
    match text.char_indices().nth(LIMIT) {
        Some((end, _)) => text[..end].to_owned(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use discovery_types::api::{ClusterState, Standing};

    use super::*;
    use crate::bootstrap::progress::tests::poll;

    #[test]
    fn patience_is_half_of_what_the_service_gives_the_list_and_bounded() {
        let mut shown = poll(ClusterState::Preparing, Standing::Seated(1), 3);
        let mut of = |left| {
            shown.prepare_ms = left;
            patience_of(&shown)
        };
        assert_eq!(of(Some(8_000)), Duration::from_secs(4));
        assert_eq!(of(None), Duration::from_secs(30), "a service that doesn't say");
        assert_eq!(of(Some(u64::MAX)), LONGEST_PATIENCE);
    }

    #[test]
    fn a_restored_services_shorter_chain_is_nothing_new_and_another_one_a_branch() {
        let known = [1, 2, 3];
        assert_eq!(relation(&known, &[1, 2]), Relation::NothingNew);
        assert_eq!(relation(&known, &known), Relation::NothingNew);
        assert_eq!(relation(&known, &[1, 2, 3, 4]), Relation::Longer);
        assert_eq!(relation(&known, &[1, 2, 4]), Relation::Branch);
        assert_eq!(relation(&known, &[1, 4, 3, 5]), Relation::Branch);
        assert_eq!(relation(&[], &[1]), Relation::Longer);
    }

    #[test]
    fn a_reason_is_cut_between_characters() {
        assert_eq!(cut("short".to_owned()), "short");
        assert_eq!(cut("é".repeat(400)).chars().count(), 300);
    }
}
