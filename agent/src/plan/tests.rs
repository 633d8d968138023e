use std::fmt::Write as _;
use std::time::Duration;

use super::*;
use crate::cluster::RemovalOrigin;

/// Makes members from one letter each:
/// - `V`: a voter that answers;
/// - `v`: a voter that doesn't answer;
/// - `n`: a voter that has not started;
/// - `L`: a learner in sync;
/// - `b`: a learner that is behind;
/// - `l`: a learner that has not started.
///
/// Ids count from 1, member 1 leads, and each name is `m` and the id.
fn observed_cluster(members: &str) -> ObservedCluster {
    let member = |(id, kind): (u64, char)| ObservedMember {
        member: ClusterMember {
            id: MemberId(id),
            name: if "nl".contains(kind) { String::new() } else { format!("m{id}") },
            peer_urls: vec![url(id)],
            client_urls: Vec::new(),
            is_learner: "Lbl".contains(kind),
        },
        state: match kind {
            'n' | 'l' => MemberState::NotStarted,
            'v' => MemberState::Silent,
            'b' => MemberState::Answers { behind: Some(IN_SYNC_ENTRIES + 1) },
            _ => MemberState::Answers { behind: Some(0) },
        },
    };
    ObservedCluster {
        members: (1..).zip(members.chars()).map(member).collect(),
        leader: Some(MemberId(1)),
    }
}

fn url(id: u64) -> String {
    format!("http://m{id}:2380")
}

fn new_url() -> Vec<String> {
    vec![url(99)]
}

/// Returns the plan as the operator sees it.
fn plan_text(members: &str, wanted: &RequestedChange) -> String {
    let plan = plan(&observed_cluster(members), wanted);
    let mut lines = vec![format!("before: {}", plan.before), format!("after: {}", plan.after)];
    lines.extend(plan.steps.iter().map(|step| format!("step: {step}")));
    lines.extend(plan.objections.iter().map(|objection| format!("refused: {objection}")));
    lines.extend(plan.warnings.iter().map(|warning| format!("warning: {warning}")));
    lines.join("\n")
}

fn add(is_voter: bool) -> RequestedChange {
    RequestedChange::Add { name: "new".to_owned(), peer_urls: new_url(), is_voter }
}

fn replace_by(old: u64, name: &str, peer_urls: Vec<String>) -> RequestedChange {
    RequestedChange::Replace { old: MemberId(old), name: name.to_owned(), peer_urls }
}

#[test]
fn a_member_is_spared_while_the_others_are_a_quorum() {
    let spared = |members: &str, id| observed_cluster(members).why_indispensable(MemberId(id));
    for (members, id) in
        [("VVV", 1), ("VVv", 3), ("VVVVv", 1), ("VVVL", 4), ("VVvL", 4), ("V", 1), ("VV", 1)]
    {
        assert_eq!(spared(members, id), None, "{members} without m{id}");
    }
    let names = |names: &[&str]| Some(names.iter().map(|name| (*name).to_owned()).collect());
    assert_eq!(spared("VVv", 1), names(&["m3"]));
    assert_eq!(spared("VVVvv", 2), names(&["m4", "m5"]));
    // A learner has no vote, so it is in no quorum.
    assert_eq!(spared("VVvL", 1), names(&["m3"]));
    let mut late = observed_cluster("VVV");
    late.members[1].state = MemberState::Answers { behind: Some(IN_SYNC_ENTRIES + 1) };
    assert_eq!(late.why_indispensable(MemberId(1)), names(&["m2"]));
}

#[test]
fn what_an_operator_reads() {
    let remove = |id| RequestedChange::Remove(MemberId(id));
    let replace = |id| replace_by(id, "new", new_url());
    let update = |id, urls| RequestedChange::Update(MemberId(id), urls);
    let mut text = String::new();
    for (members, what, wanted) in [
        ("V", "add a voter", add(true)),
        ("VVV", "add a learner", add(false)),
        ("VVV", "add a voter", add(true)),
        ("VVv", "add a learner while m3 is away", add(false)),
        ("VVVb", "add a learner beside another", add(false)),
        ("VVn", "add a voter beside one that has not started", add(true)),
        ("VVV", "remove the leader", remove(1)),
        ("VVv", "remove m2 while m3 is away", remove(2)),
        ("VVv", "remove m3, which is away", remove(3)),
        ("VVVVv", "remove m2 while m5 is away", remove(2)),
        ("VV", "remove one of two", remove(2)),
        ("V", "remove the last", remove(1)),
        ("VVL", "promote", RequestedChange::Promote(MemberId(3))),
        ("VVb", "promote a learner that is behind", RequestedChange::Promote(MemberId(3))),
        ("VVV", "promote a voter", RequestedChange::Promote(MemberId(3))),
        ("VVV", "move to another's URL", update(3, vec![url(2)])),
        ("VVV", "move", update(3, new_url())),
        ("Vvv", "move, without a quorum", update(3, new_url())),
        ("VVV", "replace the leader", replace(1)),
        ("VVv", "replace m3, which is away", replace(3)),
        ("VVV", "replace m3 where it stands", replace_by(3, "m3", vec![url(3)])),
        ("VVV", "replace m3 by another m3", replace_by(3, "m3", new_url())),
        ("VVv", "replace m3, which is away, by another m3", replace_by(3, "m3", new_url())),
        ("VVV", "replace m3 by a second m2", replace_by(3, "m2", vec![url(3)])),
        (
            "VVV",
            "add a second m2",
            RequestedChange::Add { name: "m2".to_owned(), peer_urls: new_url(), is_voter: false },
        ),
    ] {
        let _ = writeln!(text, "{members}: {what}\n{}\n", plan_text(members, &wanted));
    }
    insta::assert_snapshot!(text);
}

#[test]
fn a_plan_warns_of_a_member_without_tls_among_others_with_it() {
    let mut observed = observed_cluster("VV");
    let plain = |observed: &ObservedCluster| {
        let plan = plan(observed, &RequestedChange::Update(MemberId(2), new_url()));
        plan.warnings.iter().any(|warning| matches!(warning, Warning::WithoutTls(_)))
    };
    assert!(!plain(&observed));
    observed.members[1].member.peer_urls = vec!["https://m2:2380".to_owned()];
    assert!(!plain(&observed), "only the member that moves had TLS");
    observed.members[0].member.peer_urls = vec!["https://m1:2380".to_owned()];
    assert!(plain(&observed));
}

#[test]
fn without_a_quorum_the_advice_names_the_silent_voters() {
    let told = observed_cluster("Vvn").missing_quorum_advice().unwrap();
    assert!(told.starts_with("1 of 3 voters answer, and 2 have to"), "{told}");
    assert!(told.contains("Silent: m2, 3 (http://m3:2380)") && told.contains("recover"), "{told}");
    assert_eq!(observed_cluster("VVvL").missing_quorum_advice(), None);
}

/// Uses the cases of `muster-node`'s own test of its strict check.
#[test]
fn predicted_refusals_are_those_of_the_nodes_strict_check() {
    for (members, refused) in [
        ("V", false),
        ("Vn", true),
        ("VV", false),
        ("Vv", true),
        ("VVV", false),
        ("VVv", true),
        ("VVVn", false),
        ("VVVVv", false),
        ("VVVvv", true),
        ("VVnn", true),
    ] {
        assert_eq!(
            !rules::addition_objections(&observed_cluster(members), false).is_empty(),
            refused,
            "{members}"
        );
    }
    for (members, id, refused) in [
        ("V", 1, true),
        ("VV", 2, false),
        ("Vv", 2, false),
        ("Vv", 1, true),
        ("Vn", 1, true),
        ("Vn", 2, false),
        ("VVv", 3, false),
        ("VVv", 2, true),
        ("VVV", 1, false),
        ("VvvL", 4, false),
        ("VVVVv", 4, false),
        ("VVVvv", 3, true),
    ] {
        let found = rules::removal_objection(&observed_cluster(members), MemberId(id)).is_some();
        assert_eq!(found, refused, "{members} without {id}");
    }
}

/// Returns the facts for the first step of replacing member `old` by one at `peer_urls`.
fn facts<'a>(
    observed: &'a ObservedCluster,
    old: u64,
    peer_urls: &'a [String],
) -> ReplacementFacts<'a> {
    let removal_origin = RemovalOrigin::Unknown;
    let old = Some(MemberId(old));
    ReplacementFacts { observed, old, peer_urls, removal_origin, is_addition_refused: false }
}

/// Carries out the steps of a replacement until it is complete. Returns the steps, and the smallest
/// number of failures that was tolerated on the way.
fn run_replacement(members: &str, old: u64) -> (Vec<&'static str>, Option<usize>) {
    let mut observed = observed_cluster(members);
    let (mut removal_origin, mut is_addition_refused) = (RemovalOrigin::Unknown, false);
    let mut steps = Vec::new();
    let mut fewest = observed.voter_counts().spare_voters();
    for _ in 0..20 {
        let at = |observed: &ObservedCluster, id| {
            observed.members.iter().position(|s| s.member.id == id).unwrap()
        };
        let urls = new_url();
        let known = facts(&observed, old, &urls);
        match (ReplacementFacts { removal_origin, is_addition_refused, ..known }).next_step() {
            ReplacementStep::Add if !rules::addition_objections(&observed, true).is_empty() => {
                assert!(!is_addition_refused, "{observed:?}");
                is_addition_refused = true;
            }
            ReplacementStep::Add => {
                steps.push("add");
                let member = ClusterMember {
                    id: MemberId(99),
                    peer_urls: new_url(),
                    is_learner: true,
                    ..ClusterMember::default()
                };
                observed.members.push(ObservedMember { member, state: MemberState::NotStarted });
            }
            ReplacementStep::AwaitStart(id) => {
                let at = at(&observed, id);
                observed.members[at].member.name = "new".to_owned();
                observed.members[at].state = MemberState::Answers { behind: Some(5_000) };
            }
            ReplacementStep::AwaitSync(id, _) => {
                let at = at(&observed, id);
                observed.members[at].state = MemberState::Answers { behind: Some(5) };
            }
            ReplacementStep::Promote(id) => {
                steps.push("promote");
                let at = at(&observed, id);
                observed.members[at].member.is_learner = false;
            }
            ReplacementStep::HandOver(id) => {
                let heir = observed
                    .members
                    .iter()
                    .find(|seen| seen.member.id != id && seen.is_voter() && seen.is_answering());
                observed.leader = heir.map(|seen| seen.member.id);
            }
            ReplacementStep::Remove(id) => {
                steps.push("remove");
                assert_eq!(rules::removal_objection(&observed, id), None, "{observed:?}");
                observed.members.retain(|seen| seen.member.id != id);
                removal_origin = RemovalOrigin::Own;
            }
            ReplacementStep::Done(id) => {
                assert_eq!((id, observed.of_id(MemberId(old))), (MemberId(99), None));
                return (steps, fewest);
            }
            step @ (ReplacementStep::FindRemover(_) | ReplacementStep::GiveUp { .. }) => {
                panic!("{step:?}")
            }
        }
        fewest = fewest.min(observed.voter_counts().spare_voters());
    }
    panic!("it never ends");
}

#[test]
fn a_replacement_never_lowers_the_number_of_tolerated_failures() {
    let newcomer_first = vec!["add", "promote", "remove"];
    let old_first = vec!["remove", "add", "promote"];
    for (members, old, steps) in [
        ("VVV", 1, &newcomer_first),
        ("VVV", 3, &newcomer_first),
        ("VVv", 3, &old_first),
        ("VVVVv", 5, &newcomer_first),
        ("VVVVV", 2, &newcomer_first),
        ("V", 1, &newcomer_first),
        ("VVVvv", 5, &old_first),
    ] {
        let before = observed_cluster(members).voter_counts().spare_voters();
        assert_eq!(run_replacement(members, old), (steps.clone(), before), "{members}, {old}");
    }
}

#[test]
fn an_old_member_whose_url_the_new_one_gets_is_removed_first() {
    let observed = observed_cluster("VVV");
    let urls = vec![url(2)];
    let step = facts(&observed, 2, &urls).next_step();
    assert_eq!(step, ReplacementStep::Remove(MemberId(2)));
}

/// In earlier versions, the operator's command removed a silent member without first trying to add
/// the new one. The leader's agent did not check whether a quorum would remain.
#[test]
fn a_silent_member_is_removed_first_only_if_the_cluster_refuses_the_new_one() {
    let urls = new_url();
    let next = |members: &str, old, is_addition_refused| {
        let observed = observed_cluster(members);
        ReplacementFacts { is_addition_refused, ..facts(&observed, old, &urls) }.next_step()
    };
    let removal = ReplacementStep::Remove(MemberId(3));
    for (members, refused, expected) in [
        ("VVv", false, ReplacementStep::Add),
        ("VVv", true, removal),
        // Older releases of etcd refuse an addition while any voter is unreachable.
        ("VVvVV", true, removal),
        // No early removal if the old member answers, or if too few would answer after its removal.
        ("VvV", true, ReplacementStep::Add),
        ("VvvV", true, removal),
        ("Vvv", true, ReplacementStep::Add),
    ] {
        assert_eq!(next(members, 3, refused), expected, "{members}, refused: {refused}");
    }
    let observed = observed_cluster("VVv");
    assert!(facts(&observed, 3, &urls).is_old_removed_first_if_addition_refused());
    assert!(!facts(&observed, 2, &urls).is_old_removed_first_if_addition_refused());
}

/// The leader's agent used to add the new member first, which the cluster refuses as a second
/// learner.
#[test]
fn an_old_learner_is_removed_before_the_new_one_is_added() {
    let (observed, urls) = (observed_cluster("VVVL"), new_url());
    assert_eq!(facts(&observed, 4, &urls).next_step(), ReplacementStep::Remove(MemberId(4)));
}

#[test]
fn an_old_member_that_leads_hands_over_before_it_is_removed() {
    let urls = vec![url(1)];
    let observed = observed_cluster("VVV");
    assert_eq!(facts(&observed, 1, &urls).next_step(), ReplacementStep::HandOver(MemberId(1)));
    // No other voter can lead. So the removal is sent, and the cluster's refusal gives the reason.
    let observed = observed_cluster("VL");
    assert_eq!(facts(&observed, 1, &urls).next_step(), ReplacementStep::Remove(MemberId(1)));
}

/// The leader's agent used to ask for the promotion of members in any state. Stock etcd promotes a
/// learner that has failed since it caught up.
#[test]
fn a_new_member_votes_once_it_answers_and_has_caught_up() {
    let urls = new_url();
    let id = MemberId(99);
    let next = |is_learner, state| {
        let mut observed = observed_cluster("VVV");
        let member = ClusterMember { id, peer_urls: new_url(), is_learner, ..Default::default() };
        observed.members.push(ObservedMember { member, state });
        facts(&observed, 2, &urls).next_step()
    };
    let answers = |behind| MemberState::Answers { behind };
    for (state, expected) in [
        (MemberState::NotStarted, ReplacementStep::AwaitStart(id)),
        (MemberState::Silent, ReplacementStep::AwaitSync(id, MemberState::Silent)),
        (answers(None), ReplacementStep::AwaitSync(id, answers(None))),
        (answers(Some(1_001)), ReplacementStep::AwaitSync(id, answers(Some(1_001)))),
        (answers(Some(1_000)), ReplacementStep::Promote(id)),
    ] {
        assert_eq!(next(true, state), expected);
    }
    // Removing the old member must not leave a voter in its place that has never run.
    assert_eq!(next(false, MemberState::NotStarted), ReplacementStep::AwaitStart(id));
    assert_eq!(next(false, answers(Some(0))), ReplacementStep::Remove(MemberId(2)));
}

#[test]
fn a_new_member_takes_no_place_that_another_operation_freed() {
    let urls = new_url();
    let (old, id) = (MemberId(7), MemberId(99));
    let next = |new: Option<bool>, removal_origin| {
        let mut observed = observed_cluster("VV");
        let state = MemberState::Answers { behind: Some(0) };
        observed.members.extend(new.map(|is_learner| ObservedMember {
            member: ClusterMember { id, peer_urls: new_url(), is_learner, ..Default::default() },
            state,
        }));
        ReplacementFacts { removal_origin, ..facts(&observed, 7, &urls) }.next_step()
    };
    for (new, learner) in [(None, None), (Some(true), Some(id))] {
        assert_eq!(next(new, RemovalOrigin::Unknown), ReplacementStep::FindRemover(old));
        let foreign = next(new, RemovalOrigin::Foreign);
        assert_eq!(foreign, ReplacementStep::GiveUp { old, learner });
    }
    assert_eq!(next(None, RemovalOrigin::Own), ReplacementStep::Add);
    assert_eq!(next(Some(true), RemovalOrigin::Own), ReplacementStep::Promote(id));
    // A new member that votes already has its place, whichever operation removed the old member.
    assert_eq!(next(Some(false), RemovalOrigin::Unknown), ReplacementStep::Done(id));
}

#[test]
fn a_learners_progress_shows_its_rate_the_time_left_and_stalls() {
    let mut progress = CatchUpProgress::default();
    let seconds = Duration::from_secs;
    assert_eq!(
        progress.record(seconds(1), 9_000),
        CatchUpRate { behind: 9_000, rate: 0, left: None }
    );
    let pace = progress.record(seconds(3), 5_000);
    assert_eq!(pace, CatchUpRate { behind: 5_000, rate: 2_000, left: Some(seconds(2)) });
    assert_eq!(progress.stalled_for(seconds(4)), seconds(1));
    // Falling further behind is no progress.
    progress.record(seconds(9), 6_000);
    assert_eq!(progress.stalled_for(seconds(10)), seconds(7));
}

#[test]
fn an_invalid_peer_url_is_refused_with_the_clusters_text() {
    let observed = observed_cluster("VVV");
    let add = |url: &str| RequestedChange::Add {
        name: "new".to_owned(),
        peer_urls: vec![url.to_owned()],
        is_voter: false,
    };
    for bad in ["garbage", "", "https://h", "https://h:x", "ftp://h:1", "http://h:1/", "http://:1"]
    {
        for wanted in [
            add(bad),
            RequestedChange::Update(MemberId(2), vec![bad.to_owned()]),
            replace_by(2, "new", vec![bad.to_owned()]),
        ] {
            let objections = plan(&observed, &wanted).objections;
            let [PlanObjection::BadUrl(url)] = objections.as_slice() else {
                panic!("{objections:?}")
            };
            assert_eq!(url, bad);
            let text = objections[0].to_string();
            assert!(text.starts_with("etcdserver: given member URLs are invalid"), "{text}");
        }
    }
    for good in ["https://h:1", "http://10.0.0.1:2380", "https://[::1]:2380", " https://h:1 "] {
        assert_eq!(plan(&observed, &add(good)).objections, [], "{good}");
    }
}
