//! `cluster rotate-ca`: replaces a running cluster's CAs, one step at a time.

use std::time::{Duration, Instant};

use discovery_types::api::MemberRotation;
use discovery_types::features::{Feature, lacking};
use discovery_types::role::Action;
use discovery_types::statement::{RotationStep, Statement, StatementChain};
use serde_json::json;
use uuid::Uuid;

use super::create::put;
use crate::cli::CliError;
use crate::cli::confirm::IrreversibleAct;
use crate::cli::printer::{Printer, duration};
use crate::cli::session::AdminSession;

/// Pause between two requests for the members' progress.
const INTERVAL: Duration = Duration::from_secs(1);

/// Arguments of `cluster rotate-ca`.
#[derive(Debug, clap::Args)]
pub(super) struct RotateCaArgs {
    /// Name or id of the cluster
    cluster: String,
    /// Take only this step, and at most once. With --cancel, undo this step. Required with --yes,
    /// unless --cancel is given
    #[arg(long, value_name = "1|2|3", value_parser = parse_step)]
    step: Option<RotationStep>,
    /// With --step 1: begin another replacement after a finished one
    #[arg(long, conflicts_with = "cancel")]
    again: bool,
    /// Undo the last step, and only once: let the old CAs issue again, or drop the new CAs
    #[arg(long)]
    cancel: bool,
    /// Time to wait for the members to be ready for the step
    #[arg(long, value_name = "TIME", value_parser = crate::server::parse_duration, default_value = "5m")]
    timeout: Duration,
    /// Take the step even if members are not ready. Such members can't connect until they have
    /// caught up
    #[arg(long)]
    force: bool,
    /// Skip the confirmation prompt
    #[arg(long)]
    yes: bool,
}

/// Condition that each member has to meet before the next step may be taken.
#[derive(Clone, Copy)]
enum Readiness {
    /// The member trusts the CAs of the statement with this number.
    Trusts(u64),
    /// The issuing CAs of the statement with this number signed the member's certificates.
    Certified(u64),
}

impl Readiness {
    /// Returns why the member isn't ready; `None` if it is.
    fn objection(self, member: &MemberRotation) -> Option<String> {
        let Some(cas) = member.cas else {
            return Some(match member.is_silent {
                true => "is silent".to_owned(),
                false => "has not reported its CAs (a muster-agent of an older version never does)"
                    .to_owned(),
            });
        };
        let what = match self {
            Self::Trusts(since) if cas.trusted < since => {
                "doesn't trust the new CAs yet (stock etcd has to be restarted first)"
            }
            Self::Certified(since) if cas.certified.is_none_or(|by| by < since) => {
                "has no certificates from the CAs that issue yet"
            }
            Self::Trusts(_) | Self::Certified(_) => return None,
        };
        let silent = if member.is_silent { ", and is silent" } else { "" };
        Some(format!("{what}{silent}"))
    }
}

/// Decision about a run of the command, made from the statements and arguments only.
#[derive(Debug, PartialEq, Eq)]
enum RotationDecision {
    /// Sign the statement of this step.
    Take(RotationStep),
    /// Sign nothing, because nothing is left to do.
    Keep {
        /// The step that the command line names.
        asked: Option<RotationStep>,
        /// Reason that is shown to the operator.
        why: String,
    },
}

pub(super) async fn rotate(
    session: &AdminSession,
    args: &RotateCaArgs,
    printer: &mut Printer,
) -> Result<(), CliError> {
    check_step_is_named(args)?;
    let cluster = session.cluster(&args.cluster).await?;
    let name = cluster.name.as_str();
    let chain = session.chain(cluster.cluster).await?;
    session.check_role_in_statement(&chain, Action::PutStatement)?;
    let last = chain.newest();
    let step = match choose_step(&chain, args)? {
        RotationDecision::Take(step) => step,
        RotationDecision::Keep { asked, why } => {
            let step = asked.map(word);
            let value = json!({ "cluster": cluster.cluster, "step": step, "taken": false });
            return printer.print_value(&value, |out| out.line(&why));
        }
    };
    let mut next =
        Statement { seq: last.seq + 1, previous: Some(chain.newest_hash()), ..last.clone() };
    match step {
        RotationStep::Begin => {
            check_agents_read(session, cluster.cluster, args.force).await?;
            next.also_trusted = Some(session.client.make_cas(cluster.cluster).await?);
        }
        RotationStep::Switch => {
            wait_for_members(
                session,
                cluster.cluster,
                Readiness::Trusts(chain.trusted_since()),
                args,
                printer,
            )
            .await?;
            let text = "Members and new clients get certificates of the other CAs from now on. A client \
                        whose ca.crt has one CA alone can't connect any more: run `cluster credentials \
                        --renew` for each client first, and restart clients that read the file only when they \
                        start. --cancel undoes this step.";
            IrreversibleAct { consequences: vec![text.to_owned()], name }
                .confirm(args.yes, printer)?;
            if let Some(other) = next.also_trusted.replace(last.issuing_cas()) {
                (next.peer_ca, next.client_ca) = (other.peer, other.client);
            }
        }
        RotationStep::End => {
            // Don't wait if the replacement is cancelled before the switch: the new CAs have issued
            // no certificates that members would have to replace.
            if !args.cancel || chain.issuing_since() >= last_begin(&chain) {
                let ready = Readiness::Certified(chain.issuing_since());
                wait_for_members(session, cluster.cluster, ready, args, printer).await?;
            }
            let dropped = if args.cancel { "new" } else { "old" };
            let text = format!(
                "New connections with certificates of the {dropped} CAs are refused from now on, and the \
                 service deletes the keys of these CAs."
            );
            IrreversibleAct { consequences: vec![text], name }.confirm(args.yes, printer)?;
            next.also_trusted = None;
        }
    }
    let stated = put(session, &next).await?;
    let (id, word) = (cluster.cluster, word(step));
    let value = json!({ "cluster": id, "step": word, "taken": true, "seq": stated.seq });
    printer.print_value(&value, |out| out.line(&description(step, args.cancel)))?;
    printer.note(&next_commands(step, args.cancel, name));
    Ok(())
}

/// Refuses to sign a statement of version 2 while an agent of a present member can't read it. Such
/// an agent would neither trust the new CAs nor change the cluster's members.
async fn check_agents_read(
    session: &AdminSession,
    cluster: Uuid,
    force: bool,
) -> Result<(), CliError> {
    let present = session.client.show_cluster(cluster).await?.present;
    // Agents that have never reported are left out here. Before step 2, the command checks whether
    // they follow the statement.
    let lacking = lacking(Feature::StatementVersion2, &present.reported_builds());
    if lacking.is_empty() || force {
        return Ok(());
    }
    Err(CliError::MembersNotReady(format!(
        "these agents can't read the statement that step 1 signs: {}. Upgrade them first",
        lacking.join(", ")
    )))
}

fn parse_step(text: &str) -> Result<RotationStep, String> {
    match text {
        "1" => Ok(RotationStep::Begin),
        "2" => Ok(RotationStep::Switch),
        "3" => Ok(RotationStep::End),
        _ => Err("the steps are 1, 2 and 3".into()),
    }
}

/// Requires the step's number if `--yes` skips the confirmation. Otherwise a script that runs the
/// command again after a time-out would take the step after the intended one.
fn check_step_is_named(args: &RotateCaArgs) -> Result<(), CliError> {
    if args.yes && args.step.is_none() && !args.cancel {
        return Err(CliError::Usage(
            "--yes asks nobody: name the step that this run may take with --step 1, 2 or 3".into(),
        ));
    }
    if args.again && args.step != Some(RotationStep::Begin) {
        return Err(CliError::Usage(
            "--again begins a replacement of the CAs: add --step 1, or leave --again away".into(),
        ));
    }
    Ok(())
}

/// Decides whether this run signs a statement, and for which step.
///
/// # Errors
/// Fails if the statements don't allow the step that the command line names, or if another
/// replacement would follow a finished one without `--again`.
fn choose_step(chain: &StatementChain, args: &RotateCaArgs) -> Result<RotationDecision, CliError> {
    if args.cancel {
        return choose_undoing_step(chain, args.step);
    }
    if let Some(wanted) = args.step
        && is_done(chain, wanted)?
    {
        let why = format!("step {} of 3 is done already: nothing to do", number(wanted));
        return Ok(RotationDecision::Keep { asked: Some(wanted), why });
    }
    let next = next_step(chain);
    if next == RotationStep::Begin && is_finished(chain) && !args.again {
        return Err(CliError::Usage(
            "the last replacement of the CAs is finished: --step 1 --again begins another one"
                .into(),
        ));
    }
    Ok(RotationDecision::Take(next))
}

/// Decides what `--cancel` does. A repeated run must not undo the step before the last one as well:
/// an operator has to renew the clients' certificates between the two.
fn choose_undoing_step(
    chain: &StatementChain,
    asked: Option<RotationStep>,
) -> Result<RotationDecision, CliError> {
    use RotationStep::{Begin, End, Switch};
    let keep =
        |why: &str| Ok(RotationDecision::Keep { asked, why: format!("nothing to cancel: {why}") });
    if asked == Some(End) {
        return Err(CliError::Usage(
            "step 3 can't be undone: the keys of the old CAs are deleted".into(),
        ));
    }
    if chain.newest().also_trusted.is_none() {
        return keep("the cluster's CAs are not being replaced");
    }
    if chain.trusts_cas_before_adoption() {
        return Err(CliError::Usage(
            "there is no step to undo: the CAs that this cluster had before its adoption can't \
             issue, because the service doesn't have their keys. Without --cancel, the command \
             drops them"
                .into(),
        ));
    }
    match (asked, is_new_pair_issuing(chain)) {
        (Some(Begin), true) => Err(CliError::Usage(
            "step 1 can't be undone now: undo step 2 first, with --cancel --step 2".into(),
        )),
        (_, true) => Ok(RotationDecision::Take(Switch)),
        (Some(Switch), false) => keep("the old CAs issue"),
        (None, false) if is_switch_undone(chain) => {
            keep("step 2 is undone already. --cancel --step 1 drops the new CAs")
        }
        (_, false) => Ok(RotationDecision::Take(End)),
    }
}

/// Returns whether the step is done already, by the replacement under way. If none is under way,
/// returns whether the last replacement did the step.
///
/// # Errors
/// Fails if the step is neither done nor the next one.
fn is_done(chain: &StatementChain, wanted: RotationStep) -> Result<bool, CliError> {
    let next = next_step(chain);
    if wanted == next {
        return Ok(false);
    }
    let is_done = match next {
        RotationStep::Begin => {
            let has_ended = steps(chain).any(|(_, step)| step == RotationStep::End);
            wanted == RotationStep::End && has_ended && is_new_pair_issuing(chain)
        }
        RotationStep::Switch | RotationStep::End => number(wanted) < number(next),
    };
    if is_done {
        return Ok(true);
    }
    let (wanted, next) = (number(wanted), number(next));
    Err(CliError::Usage(format!("step {wanted} can't be taken now: the next step is {next}")))
}

/// Returns the next step of the replacement that is under way. If none is under way, returns the
/// first step, which would begin another one.
fn next_step(chain: &StatementChain) -> RotationStep {
    match (chain.newest().also_trusted.is_some(), is_new_pair_issuing(chain)) {
        (false, _) => RotationStep::Begin,
        (true, false) => RotationStep::Switch,
        (true, true) => RotationStep::End,
    }
}

/// Whether the last replacement completed its last step and was not cancelled. The end of an
/// adoption is no replacement.
fn is_finished(chain: &StatementChain) -> bool {
    chain.newest().also_trusted.is_none() && last_begin(chain) > 0 && is_new_pair_issuing(chain)
}

/// Whether the last step was a switch back to the old CAs. The caller has checked that the old CAs
/// issue.
fn is_switch_undone(chain: &StatementChain) -> bool {
    steps(chain).last().is_some_and(|(_, step)| step == RotationStep::Switch)
}

/// Whether the CAs that the last replacement made are the issuing CAs now. A switch can be undone
/// and repeated. In an adopted cluster, the service's CAs issue from the beginning, before any
/// switch.
fn is_new_pair_issuing(chain: &StatementChain) -> bool {
    let begun = last_begin(chain);
    let switches =
        steps(chain).filter(|(seq, step)| *seq > begun && *step == RotationStep::Switch).count();
    let is_adopted = begun == 0 && chain.newest().adopted.is_some();
    switches.is_multiple_of(2) == is_adopted
}

/// Returns the position of the statement that began the last replacement; 0 if there is none.
fn last_begin(chain: &StatementChain) -> u64 {
    let begins = steps(chain).filter(|(_, step)| *step == RotationStep::Begin);
    begins.map(|(seq, _)| seq).last().unwrap_or(0)
}

/// Returns the steps of all replacements, with the positions of their statements.
fn steps(chain: &StatementChain) -> impl Iterator<Item = (u64, RotationStep)> {
    let pairs = chain.statements().zip(chain.statements().skip(1));
    pairs.filter_map(|(last, next)| Some((next.seq, next.rotation_step(last).ok()??)))
}

/// Waits until all members are ready. Says meanwhile which ones are not.
async fn wait_for_members(
    session: &AdminSession,
    cluster: uuid::Uuid,
    ready: Readiness,
    args: &RotateCaArgs,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let ends = Instant::now() + args.timeout;
    let mut said = String::new();
    loop {
        let members = session.client.rotation(cluster).await?.members;
        let unready: Vec<String> = members
            .iter()
            .filter_map(|member| Some(format!("{} {}", member.name, ready.objection(member)?)))
            .collect();
        if unready.is_empty() {
            return Ok(());
        }
        let progress = unready.join("; ");
        if args.force {
            printer.warn(&format!("going on without these members: {progress}"));
            return Ok(());
        }
        if progress != said {
            printer.note(&progress);
            said = progress;
        }
        let left = ends.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let waited = duration(args.timeout.as_secs());
            return Err(CliError::MembersNotReady(format!("after {waited}, {said}")));
        }
        tokio::time::sleep(INTERVAL.min(left)).await;
    }
}

/// Returns the step's number, as `--step` takes it.
fn number(step: RotationStep) -> u8 {
    match step {
        RotationStep::Begin => 1,
        RotationStep::Switch => 2,
        RotationStep::End => 3,
    }
}

fn word(step: RotationStep) -> &'static str {
    match step {
        RotationStep::Begin => "begin",
        RotationStep::Switch => "switch",
        RotationStep::End => "end",
    }
}

fn description(step: RotationStep, cancel: bool) -> String {
    let text = match (step, cancel) {
        (RotationStep::Begin, _) => "step 1 of 3: members trust new CAs; the old CAs still issue",
        (RotationStep::Switch, false) => {
            "step 2 of 3: the new CAs issue, and members get new certificates"
        }
        (RotationStep::Switch, true) => "step 2 is undone: the old CAs issue again",
        (RotationStep::End, false) => "step 3 of 3: only the new CAs are trusted",
        (RotationStep::End, true) => "step 1 is undone: the new CAs are dropped",
    };
    text.to_owned()
}

/// Returns advice on what to do after the step.
fn next_commands(step: RotationStep, cancel: bool, name: &str) -> String {
    let renew =
        format!("for each client: muster-discovery cluster credentials {name} --renew --out DIR");
    let rotate = format!("muster-discovery cluster rotate-ca {name}");
    match (step, cancel) {
        (RotationStep::Begin, _) | (RotationStep::Switch, false) => {
            format!("next, {renew}; then: {rotate}")
        }
        (RotationStep::Switch, true) => {
            format!("next, {renew}; then, to drop the new CAs: {rotate} --cancel --step 1")
        }
        (RotationStep::End, _) => format!(
            "at last, so that clients and stock etcd forget the other CAs: stop and start the agents of \
             members that run stock etcd, and {renew}"
        ),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use discovery_types::adoption::{AdoptedMember, Adoption};
    use discovery_types::api::MemberCas;
    use discovery_types::digest::MemberId;
    use discovery_types::fixtures::{ClusterFixture, TestCa};
    use discovery_types::statement::CaPair;

    use super::*;

    #[derive(Parser)]
    struct RotateCaCommandLine {
        #[command(flatten)]
        args: RotateCaArgs,
    }

    /// Returns the decision about a run with these arguments; `None` if the run is refused.
    fn decide(chain: &StatementChain, more: &[&str]) -> Option<RotationDecision> {
        let line = [&["rotate-ca", "demo"][..], more].concat();
        let line = RotateCaCommandLine::try_parse_from(line).unwrap();
        choose_step(chain, &line.args).inspect_err(|error| assert_eq!(error.exit_code(), 2)).ok()
    }

    /// Returns the step that a run with these arguments takes; `None` if it takes none.
    fn taken(chain: &StatementChain, more: &[&str]) -> Option<RotationStep> {
        match decide(chain, more) {
            Some(RotationDecision::Take(step)) => Some(step),
            Some(RotationDecision::Keep { .. }) | None => None,
        }
    }

    /// Whether a run with these arguments finds nothing to do, and succeeds.
    fn is_kept(chain: &StatementChain, more: &[&str]) -> bool {
        matches!(decide(chain, more), Some(RotationDecision::Keep { .. }))
    }

    #[test]
    fn each_step_follows_from_the_statements_and_can_be_taken_back_once() {
        use RotationStep::{Begin, End, Switch};
        let world = ClusterFixture::new(1);
        let old = world.statement.issuing_cas();
        let new = CaPair { peer: TestCa::new("p").pem, client: TestCa::new("c").pem };
        let mut chain = world.chain();
        assert_eq!(taken(&chain, &[]), Some(Begin));
        assert!(is_kept(&chain, &["--cancel"]));
        for (issuing, other, next, undoing) in [
            (&old, Some(&new), Some(Switch), Some(End)),
            (&new, Some(&old), Some(End), Some(Switch)),
            (&old, Some(&new), Some(Switch), None), // Step 2 was undone.
            (&new, Some(&old), Some(End), Some(Switch)),
            (&new, None, None, None),
            (&new, Some(&old), Some(Switch), Some(End)),
            (&new, None, Some(Begin), None), // Step 1 was undone.
        ] {
            world.append_cas(&mut chain, issuing, other);
            let number = chain.newest().seq;
            assert_eq!(taken(&chain, &[]), next, "after statement {number}");
            assert_eq!(taken(&chain, &["--cancel"]), undoing, "after statement {number}");
            assert_eq!(is_kept(&chain, &["--cancel"]), undoing.is_none(), "{number}");
        }
    }

    #[test]
    fn a_cancelled_step_is_undone_once_however_often_the_command_is_repeated() {
        use RotationStep::{End, Switch};
        let world = ClusterFixture::new(1);
        let old = world.statement.issuing_cas();
        let new = CaPair { peer: TestCa::new("p").pem, client: TestCa::new("c").pem };
        let mut chain = world.chain();
        let (first, second) = (["--cancel", "--step", "1"], ["--cancel", "--step", "2"]);
        world.append_cas(&mut chain, &old, Some(&new));
        assert!(is_kept(&chain, &second), "step 2 was not taken");
        world.append_cas(&mut chain, &new, Some(&old));
        assert_eq!(decide(&chain, &first), None, "step 2 has to be undone first");
        assert_eq!(taken(&chain, &second), Some(Switch));
        world.append_cas(&mut chain, &old, Some(&new));
        let Some(RotationDecision::Keep { asked: None, why }) = decide(&chain, &["--cancel"])
        else {
            panic!("a repeated --cancel drops the new CAs");
        };
        assert!(why.contains("--cancel --step 1"), "{why}");
        assert!(is_kept(&chain, &second));
        assert_eq!(taken(&chain, &first), Some(End));
        world.append_cas(&mut chain, &old, None);
        for repeated in [&first[..], &second, &["--cancel"]] {
            assert!(is_kept(&chain, repeated), "{repeated:?}");
        }
        assert_eq!(decide(&chain, &["--cancel", "--step", "3"]), None);
    }

    #[test]
    fn another_replacement_begins_only_if_the_command_says_so() {
        use RotationStep::Begin;
        let world = ClusterFixture::new(1);
        let old = world.statement.issuing_cas();
        let new = CaPair { peer: TestCa::new("p").pem, client: TestCa::new("c").pem };
        let newer = CaPair { peer: TestCa::new("q").pem, client: TestCa::new("d").pem };
        let mut chain = world.chain();
        let (plain, again) = (["--step", "1"], ["--step", "1", "--again"]);
        assert_eq!(taken(&chain, &plain), Some(Begin));
        for (issuing, other) in [(&old, Some(&new)), (&new, Some(&old)), (&new, None)] {
            world.append_cas(&mut chain, issuing, other);
        }
        for accidental in [&plain[..], &[]] {
            assert_eq!(decide(&chain, accidental), None, "{accidental:?}");
        }
        assert_eq!(taken(&chain, &again), Some(Begin));
        world.append_cas(&mut chain, &new, Some(&newer));
        for repeated in [&plain[..], &again] {
            assert!(is_kept(&chain, repeated), "{repeated:?}");
        }
        world.append_cas(&mut chain, &new, None);
        assert_eq!(taken(&chain, &plain), Some(Begin), "the second replacement was cancelled");
    }

    /// Returns for each step whether it is done; `None` if it is refused.
    fn done(chain: &StatementChain) -> [Option<bool>; 3] {
        use RotationStep::{Begin, End, Switch};
        [Begin, Switch, End].map(|step| is_done(chain, step).ok())
    }

    #[test]
    fn a_step_that_is_named_is_never_taken_twice_and_no_other_step_is_taken_for_it() {
        let world = ClusterFixture::new(1);
        let old = world.statement.issuing_cas();
        let new = CaPair { peer: TestCa::new("p").pem, client: TestCa::new("c").pem };
        let newer = CaPair { peer: TestCa::new("q").pem, client: TestCa::new("d").pem };
        let mut chain = world.chain();
        let (first, second) = ([Some(false), None, None], [Some(true), Some(false), None]);
        let third = [Some(true), Some(true), Some(false)];
        assert_eq!(done(&chain), first);
        for (issuing, other, expected) in [
            (&old, Some(&new), second),
            (&old, None, first), // The replacement was cancelled.
            (&old, Some(&new), second),
            (&new, Some(&old), third),
            (&old, Some(&new), second),
            (&new, Some(&old), third),
            (&new, None, [Some(false), None, Some(true)]),
            (&new, Some(&newer), second),
            (&new, None, first),
        ] {
            world.append_cas(&mut chain, issuing, other);
            assert_eq!(done(&chain), expected, "after statement {}", chain.newest().seq);
        }
        let refused = is_done(&chain, RotationStep::End).unwrap_err();
        assert_eq!(refused.exit_code(), 2);
        assert!(refused.to_string().contains("the next step is 1"), "{refused}");
    }

    #[test]
    fn without_a_question_the_step_has_to_be_named() {
        let check = |more: &[&str]| {
            let line = [&["rotate-ca", "demo"][..], more].concat();
            let line = RotateCaCommandLine::try_parse_from(line).ok()?;
            Some(check_step_is_named(&line.args).map_err(|error| error.exit_code()))
        };
        for accepted in
            [&["--step", "2"][..], &["--yes", "--step", "3"], &["--yes", "--cancel"], &[]]
        {
            assert_eq!(check(accepted), Some(Ok(())), "{accepted:?}");
        }
        assert_eq!(check(&["--yes"]), Some(Err(2)));
        assert_eq!(check(&["--step", "4"]), None);
        assert_eq!(check(&["--step", "1", "--cancel"]), Some(Ok(())));
        assert_eq!(check(&["--step", "1", "--again"]), Some(Ok(())));
        for refused in [&["--again"][..], &["--step", "2", "--again"], &["--yes", "--again"]] {
            assert_eq!(check(refused), Some(Err(2)), "{refused:?}");
        }
        assert_eq!(check(&["--cancel", "--again"]), None);
    }

    #[test]
    fn the_old_cas_of_an_adopted_cluster_are_dropped_by_the_first_step() {
        let world = ClusterFixture::new(1);
        let record = &world.records[0];
        let member = AdoptedMember {
            id: MemberId::new(1),
            name: record.name.clone(),
            peer_url: record.peer_urls[0].clone(),
            client_urls: record.client_urls.clone(),
        };
        let old = TestCa::new("etcd").pem;
        let first = Statement {
            version: 2,
            also_trusted: Some(CaPair { peer: old.clone(), client: old }),
            adopted: Some(Adoption { raft_cluster: "0".repeat(15) + "1", members: vec![member] }),
            ..world.statement.clone()
        };
        let mut chain = StatementChain::verify_links(&[first.sign(&world.owner)]).unwrap();
        assert_eq!(next_step(&chain), RotationStep::End);
        assert_eq!(done(&chain), [Some(true), Some(true), Some(false)]);
        // The service has no keys of the old CAs, so nothing can be undone.
        for undoing in
            [&["--cancel"][..], &["--cancel", "--step", "1"], &["--cancel", "--step", "2"]]
        {
            assert_eq!(decide(&chain, undoing), None, "{undoing:?}");
        }
        let next = Statement {
            version: 1,
            seq: 1,
            previous: Some(chain.newest_hash()),
            also_trusted: None,
            ..first
        };
        chain.append(&next.sign(&world.owner)).unwrap();
        assert_eq!(next_step(&chain), RotationStep::Begin);
        assert_eq!(done(&chain), [Some(false), None, Some(true)]);
        assert!(is_kept(&chain, &["--cancel"]));
        // The end of the adoption was no replacement, so the first one needs no --again.
        assert_eq!(taken(&chain, &["--step", "1"]), Some(RotationStep::Begin));
    }

    #[test]
    fn a_member_is_ready_once_it_has_followed_the_last_step() {
        let member = |cas: Option<(u64, Option<u64>)>, is_silent| MemberRotation {
            id: MemberId::new(1),
            name: "db-1".to_owned(),
            cas: cas.map(|(trusted, certified)| MemberCas { trusted, certified }),
            is_silent,
        };
        let trusts = |cas| Readiness::Trusts(2).objection(&member(cas, false));
        assert_eq!(trusts(Some((2, None))), None);
        assert_eq!(trusts(Some((3, None))), None);
        assert!(trusts(Some((1, Some(1)))).unwrap().contains("restarted"));
        assert!(trusts(None).unwrap().contains("older version"));
        let certified = |cas| Readiness::Certified(2).objection(&member(Some(cas), true));
        assert_eq!(certified((2, Some(2))), None);
        for old in [None, Some(1)] {
            let objection = certified((2, old)).unwrap();
            assert!(objection.contains("no certificates") && objection.contains("silent"));
        }
        let silent = Readiness::Trusts(2).objection(&member(None, true)).unwrap();
        assert_eq!(silent, "is silent");
    }
}
