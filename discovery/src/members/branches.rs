//! Splits of a statement chain: owners have signed two different statements with the same number.
//!
//! This can happen after a restore of the database from a backup that lacks a statement. An owner
//! then signs another statement with its number before an agent has sent the lost one to the
//! service. If an agent follows another statement than the service, it sends the service its own
//! chain. The service keeps its own chain, and shows a person the members that follow another
//! statement.

use std::collections::BTreeMap;

use data_encoding::HEXLOWER;
use discovery_types::api::{Explanation, MembersView};
use discovery_types::digest::Digest;
use discovery_types::key::PublicKey;
use discovery_types::statement::StatementChain;
use uuid::Uuid;

use super::roster::Roster;
use crate::app::App;
use crate::error::ApiError;
use crate::store::statement_branches::StatementBranch;

/// Number of bytes of a statement's hash that are shown.
const SHOWN_HASH_BYTES: usize = 4;

impl App {
    /// Stores that a member's agent follows the chain `shown`, which branches off from the
    /// service's. Stores nothing if the chains have no common beginning, because then nothing
    /// proves that owners have signed `shown`.
    pub(crate) async fn note_branch(
        &self,
        cluster: Uuid,
        key: &PublicKey,
        shown: &StatementChain,
    ) -> Result<(), ApiError> {
        let running = self.store.read_running(cluster).await?;
        let running = running.ok_or_else(|| ApiError::not_found("such cluster"))?;
        let roster = Roster::of(&running.cluster, &running.chain, &running.changes)?;
        let member = roster.member(key)?.id;
        let Some((number, hash)) = first_difference(&running.chain, shown) else { return Ok(()) };
        if self.store.note_branch(cluster, &StatementBranch { member, number, hash }).await? {
            tracing::warn!(
                cluster.id = %cluster, member.id = %member, number, hash = %hash,
                "a member's agent follows another statement than this service: owners have signed both"
            );
        }
        Ok(())
    }

    /// Explains which present members follow another statement than the service, as far as their
    /// agents have sent their chains.
    pub(crate) async fn explain_branches(
        &self,
        chain: &StatementChain,
        present: &MembersView,
    ) -> Result<Vec<Explanation>, ApiError> {
        if present.members.is_empty() {
            return Ok(Vec::new());
        }
        let branches = self.store.branches(chain.newest().cluster).await?;
        Ok(explain(chain, &branches, present))
    }
}

/// Returns number and hash of the first statement of `shown` that differs from the one in `chain`.
/// `None` if the chains have no common beginning, or if one chain only continues the other.
fn first_difference(chain: &StatementChain, shown: &StatementChain) -> Option<(u64, Digest)> {
    let (own, shown) = (chain.jws(), shown.jws());
    let mut pairs = own.iter().zip(&shown).enumerate();
    let (at, (_, other)) = pairs.find(|(_, (own, other))| own.as_str() != other.as_str())?;
    (at > 0).then(|| (at as u64, other.hash()))
}

/// Returns one line for each statement that members follow in place of the service's.
fn explain(
    chain: &StatementChain,
    branches: &[StatementBranch],
    present: &MembersView,
) -> Vec<Explanation> {
    let own = chain.jws();
    let mut followers: BTreeMap<(u64, Digest), Vec<String>> = BTreeMap::new();
    for branch in branches {
        let member = present.members.iter().find(|member| member.id == branch.member);
        if let Some(member) = member {
            let names = followers.entry((branch.number, branch.hash)).or_default();
            names.push(member.display_name());
        }
    }
    let line = |((number, hash), names): ((u64, Digest), Vec<String>)| {
        // Skip the branch if the service has no statement with this number: agents send the service
        // the statements that it lacks.
        let kept = own.get(usize::try_from(number).ok()?)?.hash();
        (kept != hash).then(|| split_line(number, (&kept, &hash), &names.join(", ")))
    };
    followers.into_iter().filter_map(line).collect()
}

fn split_line(number: u64, (kept, other): (&Digest, &Digest), names: &str) -> Explanation {
    let short = |hash: &Digest| HEXLOWER.encode(&hash.0[..SHOWN_HASH_BYTES]);
    let (kept, other) = (short(kept), short(other));
    Explanation {
        code: "statements_split".into(),
        missing: format!(
            "owners have signed two statements with the number {number}: this service follows {kept}, and \
             the agents of these members follow {other} and change no members: {names}"
        ),
        held_by: vec!["owner".into()],
        last_error: None,
        next_retry_ms: None,
        command: Some(format!(
            "sign no statement now. The one in the cluster's own store has to stay: if that is {kept}, \
             replace the named members; if it is {other}, restore the service's backup again. Both are \
             described in docs/cas.md"
        )),
    }
}

#[cfg(test)]
mod tests {
    use discovery_types::digest::MemberId;
    use discovery_types::fixtures::ClusterFixture;
    use discovery_types::statement::Statement;

    use super::*;
    use crate::members::present::tests::member;

    /// Returns the chain with one more statement. Another value of `seconds` makes another
    /// statement.
    fn continued(world: &ClusterFixture, chain: &StatementChain, seconds: u64) -> StatementChain {
        let mut longer = chain.clone();
        let next = Statement {
            seq: chain.newest().seq + 1,
            previous: Some(chain.newest_hash()),
            deadline_seconds: seconds,
            ..world.statement.clone()
        };
        longer.append(&next.sign(&world.owner)).unwrap();
        longer
    }

    #[test]
    fn a_chain_that_branches_off_is_told_from_a_shorter_and_from_a_foreign_one() {
        let world = ClusterFixture::new(1);
        let first = world.chain();
        let (one, other) = (continued(&world, &first, 61), continued(&world, &first, 62));
        let longer = continued(&world, &other, 63);
        assert_eq!(first_difference(&one, &other), Some((1, other.newest_hash())));
        assert_eq!(first_difference(&one, &longer), Some((1, other.newest_hash())));
        assert_eq!(first_difference(&one, &first), None);
        assert_eq!(first_difference(&first, &one), None);
        assert_eq!(first_difference(&one, &one), None);
        let foreign = ClusterFixture::new(1);
        assert_eq!(first_difference(&one, &continued(&foreign, &foreign.chain(), 61)), None);
    }

    #[test]
    fn a_split_names_the_number_both_statements_and_the_present_members_that_follow_the_other() {
        let world = ClusterFixture::new(1);
        let first = world.chain();
        let (one, other) = (continued(&world, &first, 61), continued(&world, &first, 62));
        let branch = |id| StatementBranch {
            member: MemberId::new(id),
            number: 1,
            hash: other.newest_hash(),
        };
        // Member 9 isn't present: it was removed after it had shown its chain.
        let branches = [branch(1), branch(3), branch(9)];
        let present = MembersView {
            confirmed: true,
            members: (1..=3).map(|id| member(id, Some(1), false)).collect(),
            unknown: Vec::new(),
        };
        let lines = explain(&one, &branches, &present);
        let [line] = &lines[..] else { panic!("{lines:?}") };
        assert_eq!(line.code, "statements_split");
        let start = |hash: Digest| hash.to_string().chars().take(8).collect::<String>();
        for part in [
            "with the number 1:".to_owned(),
            format!("this service follows {}", start(one.newest_hash())),
            format!("follow {} and", start(other.newest_hash())),
            ": db-1, db-3".to_owned(),
        ] {
            assert!(line.missing.contains(&part), "{part} is not in {}", line.missing);
        }
        assert!(!line.missing.contains("db-2") && !line.missing.contains("db-9"));
        // There is no split if the service follows the same statement as the members. Neither is
        // there one if the service has no statement with that number at all.
        assert!(explain(&other, &branches, &present).is_empty());
        assert!(explain(&first, &branches, &present).is_empty());
    }
}
