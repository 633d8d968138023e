//! Decides what discovery's answers mean for a newcomer. Pure.

use discovery_types::api::{IntentState, IntentView, Outcome};
use discovery_types::client::ClientError;
use discovery_types::digest::MemberId;
use discovery_types::jws::JwsType;
use discovery_types::problem::Code;
use discovery_types::record::Record;
use discovery_types::redeem::Redeem;

use crate::exit::{ExitError, error_chain};

/// Progress of a newcomer's admission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum JoinState {
    /// The cluster's agents have to act first; the text tells what is awaited.
    Waiting(String),
    /// The cluster has added the newcomer, with this member id.
    Added(MemberId),
    /// The ticket can't make this host a member any more.
    Ended(String),
}

/// Returns what an intent's state means for its newcomer.
pub(super) fn join_state(view: &IntentView) -> JoinState {
    let over = |why: &str| {
        JoinState::Ended(format!("{why}. A new ticket is needed, and muster-agent reset before it"))
    };
    match (view.state, &view.outcome) {
        (IntentState::Open, _) => JoinState::Waiting(format!(
            "waiting for the cluster to add this host: the agent beside its leader does that{}",
            view.explain.first().map(|wait| format!(" ({wait})")).unwrap_or_default()
        )),
        (IntentState::Added, Some(Outcome::Added { member, .. })) => JoinState::Added(*member),
        (IntentState::Refused, Some(Outcome::Refused { reason })) => {
            over(&format!("the cluster did not take this host: {reason}"))
        }
        (IntentState::Stalled, Some(Outcome::Stalled { reason, .. })) => {
            over(&format!("this host was taken out of the cluster again: {reason}"))
        }
        (IntentState::Promoted, _) => over(
            "this host is a member that votes already, and this directory knows nothing of it: it \
             is an old copy, or the data was lost; the cluster has to remove that member first",
        ),
        (IntentState::Expired, _) => over("the ticket's time was over before the cluster acted"),
        (IntentState::Withdrawn, _) => over("an admin took the ticket back"),
        (state, _) => over(&format!("discovery calls this join {state}, which none can be")),
    }
}

/// Checks that the intent contains this host's present record. A ticket stays bound to the name and
/// the addresses of its first redeem.
pub(super) fn check_own_record(view: &IntentView, own: &Record) -> Result<(), ExitError> {
    let refused = |why: String| Err(ExitError::DoNotRestart(why));
    let redeem = view.intent.redeem.as_ref();
    let Some(claims) =
        redeem.and_then(|jws| jws.verify::<Redeem>(JwsType::Redeem, &own.agent_key).ok())
    else {
        return refused("discovery shows a join that this host's key has not signed".to_owned());
    };
    match claims.signed.record.verify::<Record>(JwsType::Record, &own.agent_key) {
        Ok(record) if record == *own => Ok(()),
        Ok(record) => refused(format!(
            "this ticket was redeemed before, for {} at {}, and stays with that: start the agent \
             with those, or ask for a new ticket after muster-agent reset",
            record.name,
            record.peer_urls.first().map(ToString::to_string).unwrap_or_default()
        )),
        Err(error) => {
            refused(format!("discovery shows a record that is not valid: {}", error_chain(&error)))
        }
    }
}

/// Returns how the agent ends after this error of the service or the connection. `None` if a retry
/// may help.
pub(super) fn fatal_error(error: &ClientError) -> Option<ExitError> {
    let text = || error_chain(error);
    match error {
        ClientError::Problem(problem) if problem.retryable => None,
        // End with exit code 1: the cluster may still form, and a restart helps then.
        ClientError::Problem(problem) if problem.code == Code::WrongState => {
            Some(ExitError::Failed(text()))
        }
        ClientError::Problem(_) => Some(ExitError::DoNotRestart(text())),
        ClientError::Pin { .. } | ClientError::NoKey | ClientError::Setup(_) => {
            Some(ExitError::Failed(text()))
        }
        ClientError::Unreachable { .. }
        | ClientError::Interrupted { .. }
        | ClientError::Foreign { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use discovery_types::digest::{Digest, Nonce, OperationId};
    use discovery_types::fixtures::{ClusterFixture, join_fixture};
    use discovery_types::intent::{Intent, Verb};
    use discovery_types::name::Name;
    use discovery_types::problem::Problem;

    use super::*;

    fn view(world: &ClusterFixture, state: IntentState, outcome: Option<Outcome>) -> IntentView {
        let authority = world.grant.sign(&world.owner);
        let redeem = Redeem {
            service: Digest([1; 32]),
            cluster: world.statement.cluster,
            statement: world.chain().newest_hash(),
            signed: world.signed(0),
            boot: 1,
            nonce: Nonce::random(),
            highest_epoch: 0,
            identity: None,
        };
        let intent = Intent {
            cluster: world.statement.cluster,
            verb: Verb::Join,
            operation: OperationId::of(&authority, Verb::Join),
            authority,
            redeem: Some(redeem.sign(&world.agents[0])),
            planned_at: None,
            expires_at: 2_000,
        };
        IntentView {
            intent,
            state,
            rev: 1,
            subject: "db-1".to_owned(),
            by: "ada".to_owned(),
            made_at_ms: 0,
            outcome,
            reported_by: None,
            explain: Vec::new(),
            about: None,
            about_name: None,
            waits: None,
            policy: None,
        }
    }

    #[test]
    fn only_a_host_that_the_cluster_added_can_continue() {
        let world = join_fixture();
        let member = MemberId::new(9);
        let of = |state, outcome| join_state(&view(&world, state, outcome));
        assert!(matches!(of(IntentState::Open, None), JoinState::Waiting(_)));
        let added = Outcome::Added { member, initial_cluster: Vec::new(), replaces: None };
        assert_eq!(of(IntentState::Added, Some(added)), JoinState::Added(member));
        let reason = "Peer URLs already exists".to_owned();
        for (state, outcome) in [
            (IntentState::Refused, Some(Outcome::Refused { reason: reason.clone() })),
            (IntentState::Stalled, Some(Outcome::Stalled { member, reason })),
            (IntentState::Promoted, Some(Outcome::Promoted { member })),
            (IntentState::Removed, Some(Outcome::Removed { member })),
            (IntentState::Expired, None),
            (IntentState::Withdrawn, None),
            (IntentState::Added, None),
        ] {
            let JoinState::Ended(why) = of(state, outcome) else { panic!("{state}") };
            assert!(why.contains("A new ticket is needed"), "{why}");
            let says_reason = why.contains("Peer URLs already exists");
            let has_reason = matches!(state, IntentState::Refused | IntentState::Stalled);
            assert_eq!(says_reason, has_reason, "{why}");
        }
    }

    #[test]
    fn a_join_with_another_record_or_key_is_refused() {
        let world = join_fixture();
        let shown = view(&world, IntentState::Open, None);
        let own = &world.records[0];
        assert!(check_own_record(&shown, own).is_ok());
        let name: Name = "other".parse().unwrap();
        let moved = Record { name, ..own.clone() };
        let end = check_own_record(&shown, &moved).unwrap_err();
        assert!(end.code() == 3 && end.to_string().contains(&own.name.to_string()), "{end}");
        let others = join_fixture();
        assert_eq!(check_own_record(&shown, &others.records[0]).unwrap_err().code(), 3);
    }

    #[test]
    fn a_taken_ticket_ends_the_agent_with_code_3_and_a_forming_cluster_with_code_1() {
        let problem = |code| ClientError::Problem(Box::new(Problem::new(code, "", "")));
        let code = |error: &ClientError| fatal_error(error).map(|end| end.code());
        assert_eq!(code(&problem(Code::TicketTaken)), Some(3));
        assert_eq!(code(&problem(Code::GrantExpired)), Some(3));
        assert_eq!(code(&problem(Code::GrantUnknown)), Some(3));
        assert_eq!(code(&problem(Code::Removed)), Some(3));
        assert_eq!(code(&problem(Code::WrongState)), Some(1));
        assert_eq!(code(&problem(Code::Overloaded)), None);
        let page = ClientError::Foreign { url: String::new(), status: 502, reason: String::new() };
        assert_eq!(code(&page), None);
    }
}
