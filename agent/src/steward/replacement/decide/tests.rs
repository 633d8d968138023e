use super::*;

const A: MemberId = MemberId(0xa);
const B: MemberId = MemberId(0xb);
const C: MemberId = MemberId(0xc);
const NOW: u64 = 1_000_000;
const LIMITS: ReplacementLimits =
    ReplacementLimits { after_seconds: 600, at_most: 2, per_seconds: 86_400 };

fn member(id: MemberId, name: &str) -> ClusterMember {
    ClusterMember {
        id,
        name: name.to_owned(),
        peer_urls: vec![format!("https://{name}:2380")],
        ..ClusterMember::default()
    }
}

/// A cluster of three in which C is dead, and all conditions of a replacement hold.
struct Scene {
    policy: PolicyFacts,
    candidate: Candidate,
    uses: UseLog,
    members: MemberList,
    voters: VoterFacts,
    zones: Option<BTreeMap<MemberId, String>>,
    other_change: Option<&'static str>,
    own_now: u64,
    service_now: u64,
}

impl Scene {
    fn new() -> Self {
        let list = vec![member(A, "a"), member(B, "b"), member(C, "c")];
        Self {
            policy: PolicyFacts {
                id: GrantId::random(),
                limits: LIMITS,
                expires_at: NOW + 1_000,
                standing: PolicyStanding::InForce,
            },
            candidate: Candidate {
                operation: OperationId([1; 16]),
                name: "d".to_owned(),
                peer_urls: vec!["https://d:2380".to_owned()],
                zone: None,
            },
            uses: UseLog::default(),
            members: MemberList { list, ..MemberList::default() },
            voters: VoterFacts {
                unreachable: vec![(C, Duration::from_secs(600))],
                are_known: true,
                observers: vec![A, B],
                unconfirming: Vec::new(),
                not_in_sync: Vec::new(),
            },
            zones: None,
            other_change: None,
            own_now: NOW,
            service_now: NOW,
        }
    }

    fn decide(&self) -> PolicyDecision {
        PolicyReplacementFacts {
            policy: self.policy,
            candidate: &self.candidate,
            uses: &self.uses,
            members: &self.members,
            own: A,
            voters: &self.voters,
            zones: self.zones.as_ref(),
            other_change: self.other_change,
            own_now: self.own_now,
            service_now: self.service_now,
        }
        .decide()
    }

    /// Changes the scene, and returns the decision about the changed scene.
    fn with(mut self, change: impl FnOnce(&mut Self)) -> PolicyDecision {
        change(&mut self);
        self.decide()
    }

    fn use_of(&self, number: u8, began_at: u64) -> PolicyUse {
        PolicyUse {
            policy: self.policy.id,
            operation: OperationId([number; 16]),
            member: C,
            member_name: "c".to_owned(),
            newcomer: "e".to_owned(),
            voters: 3,
            raft_cluster: raft_cluster_text(0),
            fills_vacancy: false,
            began_at,
            intent: None,
            ended: None,
            left_vacancy: false,
        }
    }

    /// Adds an ended use of the policy: one replacement of a member.
    fn add_ended_use(&mut self, number: u8, began_at: u64, left_vacancy: bool) {
        let new = self.use_of(number, began_at);
        self.uses.begin(new, began_at).unwrap();
        self.uses.end(&OperationId([number; 16]), "stalled", left_vacancy);
    }
}

fn is_wait(decision: &PolicyDecision, part: &str) -> bool {
    matches!(decision, PolicyDecision::Wait(why) if why.contains(part))
}

fn is_refusal(decision: &PolicyDecision, part: &str) -> bool {
    matches!(decision, PolicyDecision::Refuse(why) if why.contains(part))
}

#[test]
fn a_host_whose_zone_would_get_a_majority_waits_for_one_of_another_zone() {
    let zones = |a: &str, b: &str, c: &str| {
        let each = [(A, a), (B, b), (C, c)].map(|(id, zone)| (id, zone.to_owned()));
        Some(BTreeMap::from(each))
    };
    let decision = |zone: Option<&str>, of_members: Option<BTreeMap<MemberId, String>>| {
        Scene::new().with(|scene| {
            scene.candidate.zone = zone.map(ToOwned::to_owned);
            scene.zones = of_members;
        })
    };
    let begins = |decision: &PolicyDecision| matches!(decision, PolicyDecision::Begin(_));
    assert!(begins(&decision(Some("c"), zones("a", "b", "c"))), "the dead one's own zone");
    assert!(begins(&decision(Some("d"), zones("a", "b", "c"))));
    assert!(begins(&decision(None, None)), "the members aren't spread");
    for (zone, text) in [(Some("a"), "the zone a, which may have 1 of 3"), (None, "says no zone")] {
        match decision(zone, zones("a", "b", "c")) {
            PolicyDecision::Wait(why) => assert!(why.contains(text), "{why}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_newcomer_takes_the_place_of_the_one_dead_member() {
    let scene = Scene::new();
    let PolicyDecision::Begin(new) = scene.decide() else { panic!("{:?}", scene.decide()) };
    assert_eq!((new.member, new.began_at, new.voters), (C, NOW, 3));
    assert_eq!((new.policy, new.operation), (scene.policy.id, scene.candidate.operation));
    assert!(new.ended.is_none() && !new.fills_vacancy);
}

#[test]
fn nothing_begins_while_a_guard_stands_against_it() {
    type Change = fn(&mut Scene);
    let waits: [(&str, Change); 12] = [
        ("store", |s| s.policy.standing = PolicyStanding::Missing),
        ("no room", |s| s.policy.standing = PolicyStanding::NoRoom),
        ("yet to see", |s| s.voters.are_known = false),
        ("one member at a time", |s| s.voters.unreachable.push((B, Duration::from_secs(1)))),
        ("590 s", |s| s.voters.unreachable = vec![(C, Duration::from_secs(599))]),
        ("takes the place", |s| s.uses.begin(s.use_of(2, NOW), NOW).unwrap()),
        ("another change", |s| s.other_change = Some("join e")),
        ("learner", |s| {
            s.members.list.push(ClusterMember { is_learner: true, ..member(MemberId(9), "e") });
        }),
        ("not in sync", |s| s.voters.not_in_sync.push(B)),
        ("1 of 3", |s| s.voters.observers = vec![A]),
        ("1 of 3", |s| s.voters.observers = vec![A, C]),
        ("just changed", |s| s.members.list.truncate(2)),
    ];
    for (part, change) in waits {
        let decision = Scene::new().with(change);
        assert!(is_wait(&decision, part), "{part}: {decision:?}");
    }
    let refusals: [(&str, Change); 6] = [
        ("revoked", |s| s.policy.standing = PolicyStanding::Revoked),
        ("expired", |s| s.own_now = s.policy.expires_at),
        ("expired", |s| s.service_now = s.policy.expires_at),
        ("before", |s| s.add_ended_use(1, NOW - 90_000, false)),
        ("called b", |s| s.candidate.name = "b".to_owned()),
        ("peer URL", |s| s.candidate.peer_urls = vec!["https://b:2380".to_owned()]),
    ];
    for (part, change) in refusals {
        let decision = Scene::new().with(change);
        assert!(is_refusal(&decision, part), "{part}: {decision:?}");
    }
    assert_eq!(Scene::new().with(|s| s.voters.unreachable.clear()), PolicyDecision::StandBy);
}

/// Agents of an older version stop observing once the policy has reached its limit.
#[test]
fn the_last_replacement_that_a_policy_allows_waits_until_a_quorum_of_agents_can_confirm_it() {
    let (first, d) = (Scene::new(), MemberId(4));
    let decision = first.with(|s| s.voters.unconfirming = vec![B]);
    assert!(matches!(decision, PolicyDecision::Begin(_)), "older agents observe: {decision:?}");
    let last = |s: &mut Scene| s.policy.limits.at_most = 1;
    let decision = Scene::new().with(last);
    assert!(matches!(decision, PolicyDecision::Begin(_)), "{decision:?}");
    let decision = Scene::new().with(|s| {
        last(s);
        s.voters.unconfirming = vec![B];
    });
    assert!(is_wait(&decision, "agents are upgraded: b (b)"), "{decision:?}");
    // Of five voters' agents, three can confirm the death even without the older agent.
    let decision = Scene::new().with(|s| {
        last(s);
        s.members.list.extend([member(d, "d2"), member(MemberId(5), "e2")]);
        s.voters.observers = vec![A, B, d, MemberId(5)];
        s.voters.unconfirming = vec![B];
    });
    assert!(matches!(decision, PolicyDecision::Begin(_)), "{decision:?}");
}

#[test]
fn a_newcomer_may_have_the_dead_members_name_and_address() {
    let decision = Scene::new().with(|s| {
        s.candidate.name = "c".to_owned();
        s.candidate.peer_urls = vec!["https://c:2380".to_owned()];
    });
    assert!(matches!(decision, PolicyDecision::Begin(_)), "{decision:?}");
}

#[test]
fn the_limit_counts_failed_uses_and_neither_clock_alone_ends_it() {
    let used = |s: &mut Scene| {
        s.add_ended_use(2, NOW - 100, false);
        s.add_ended_use(3, NOW - 50, false);
    };
    let decision = Scene::new().with(used);
    let PolicyDecision::Exhausted(why) = &decision else { panic!("{decision:?}") };
    assert!(why.contains("2 replacements in 24 h") && why.contains("1439 min"), "{why}");
    let later = |s: &mut Scene| s.policy.expires_at = u64::MAX;
    for is_own in [true, false] {
        let decision = Scene::new().with(|s| {
            used(s);
            later(s);
            *if is_own { &mut s.own_now } else { &mut s.service_now } += 90_000;
        });
        assert!(matches!(decision, PolicyDecision::Exhausted(_)), "{decision:?}");
    }
    let decision = Scene::new().with(|s| {
        used(s);
        later(s);
        s.own_now += 90_000;
        s.service_now += 90_000;
    });
    assert!(matches!(decision, PolicyDecision::Begin(_)), "{decision:?}");
}

#[test]
fn a_place_that_a_failed_replacement_left_is_filled_by_the_next_newcomer() {
    let vacant = |s: &mut Scene| {
        s.add_ended_use(2, NOW - 100, true);
        s.members.list.truncate(2);
        s.voters.unreachable.clear();
    };
    let decision = Scene::new().with(vacant);
    let PolicyDecision::Begin(new) = decision else { panic!("{decision:?}") };
    assert!(new.fills_vacancy && new.member == C && new.voters == 3);
    let decision = Scene::new().with(|s| {
        vacant(s);
        s.voters.not_in_sync.push(B);
    });
    assert!(is_wait(&decision, "not in sync"), "{decision:?}");
    let decision = Scene::new().with(|s| {
        vacant(s);
        s.add_ended_use(3, NOW - 50, true);
    });
    assert!(matches!(decision, PolicyDecision::Exhausted(_)), "{decision:?}");
    let decision = Scene::new().with(|s| {
        vacant(s);
        s.members.list.push(member(MemberId(9), "e"));
    });
    assert_eq!(decision, PolicyDecision::StandBy, "somebody has filled it by hand");
}

#[test]
fn a_replacement_that_has_begun_goes_on_only_while_the_member_is_dead_and_the_policy_in_force() {
    use DeadMemberState::{Back, Disputed, Unknown, Unreachable};
    use PolicyStanding::{InForce, Missing, NoRoom, Revoked};
    let of = Scene::new().use_of(2, NOW);
    let of_voters = |standing, old, voters| match continuation(&of, standing, old, voters) {
        Continuation::Continue => "go on",
        Continuation::Pause(_) => "pause",
        Continuation::GiveUp(_) => "give up",
    };
    for (standing, old, expected) in [
        (InForce, Some(Unreachable), "go on"),
        (Missing, Some(Unreachable), "go on"),
        (NoRoom, Some(Unreachable), "go on"),
        (Revoked, Some(Unreachable), "give up"),
        (InForce, Some(Back), "give up"),
        (InForce, Some(Unknown), "pause"),
        (InForce, Some(Disputed), "pause"),
        (Revoked, Some(Disputed), "give up"),
        (Revoked, Some(Unknown), "give up"),
        // The member was removed already: the cluster needs the newcomer's vote.
        (InForce, None, "go on"),
        (Revoked, None, "go on"),
    ] {
        let voters = if old.is_some() { 3 } else { 2 };
        assert_eq!(of_voters(standing, old, voters), expected, "{standing:?} {old:?}");
    }
    assert_eq!(of_voters(InForce, None, 3), "give up", "somebody else has taken the place");
}

#[test]
fn a_replacement_that_has_ended_is_given_up_whatever_discovery_says() {
    let ended = PolicyUse { ended: Some("stalled".to_owned()), ..Scene::new().use_of(2, NOW) };
    for old in [Some(DeadMemberState::Unreachable), Some(DeadMemberState::Unknown), None] {
        let goes_on = continuation(&ended, PolicyStanding::InForce, old, 2);
        let Continuation::GiveUp(why) = goes_on else { panic!("{old:?}: {goes_on:?}") };
        assert!(why.contains("has ended: stalled"), "{why}");
    }
}

#[test]
fn a_failed_replacement_leaves_a_vacancy_if_it_or_an_earlier_one_has_removed_the_member() {
    use RemovalOrigin::{Foreign, Own, Unknown};
    let with_c = Scene::new().members;
    let mut without_c = with_c.clone();
    without_c.list.retain(|member| member.id != C);
    let of = Scene::new().use_of(2, NOW);
    let later = PolicyUse { fills_vacancy: true, ..of.clone() };
    for (of, is_promoted, members, origin, expected) in [
        (&of, false, &without_c, Own, Some(true)),
        (&of, false, &without_c, Foreign, Some(false)),
        (&of, false, &without_c, Unknown, None),
        (&of, false, &with_c, Unknown, Some(false)),
        (&of, true, &without_c, Unknown, Some(false)),
        (&later, false, &without_c, Unknown, Some(true)),
        (&later, true, &without_c, Unknown, Some(false)),
    ] {
        let found = leaves_vacancy(of, is_promoted, members, origin);
        assert_eq!(found, expected, "{} {is_promoted} {origin:?}", of.fills_vacancy);
    }
    without_c.list.push(member(MemberId(9), "e"));
    assert_eq!(leaves_vacancy(&later, false, &without_c, Unknown), Some(false), "it is filled");
}

#[test]
fn a_member_that_only_this_host_misses_is_disputed() {
    use DeadMemberState::{Back, Disputed, Unknown, Unreachable};
    let state =
        |own: DeadMemberState, observers: &[MemberId]| own.with_observers(C, observers, &[A, B, C]);
    assert_eq!(state(Unreachable, &[A, B]), Unreachable);
    for too_few in [&[A][..], &[A, C], &[A, MemberId(9)], &[]] {
        assert_eq!(state(Unreachable, too_few), Disputed, "{too_few:?}");
    }
    assert_eq!(state(Back, &[A, B]), Back, "this host reaches it");
    assert_eq!(state(Unknown, &[A, B]), Unknown);
}
