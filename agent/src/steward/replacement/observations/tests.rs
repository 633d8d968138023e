use discovery_types::fixtures::ClusterFixture;
use discovery_types::record::VerifiedRecord;

use super::*;

const AFTER: Duration = Duration::from_secs(60);

/// A cluster of three founders. The agent of the first one counts, the second one observes, and the
/// third one is dead.
struct Scene {
    world: ClusterFixture,
    observer: VoterObserver,
    ids: Vec<MemberId>,
}

impl Scene {
    fn new() -> Self {
        let world = ClusterFixture::new(3);
        let document = world.document(1).sign(&world.service);
        let document = VerifiedDocument::verify(&document, &world.chain()).unwrap();
        let id = |record: &VerifiedRecord| MemberId(document.founder_id(record).get());
        let ids: Vec<MemberId> = document.records().iter().map(id).collect();
        let observer = VoterObserver {
            cluster: world.statement.cluster,
            key: Arc::new(SigningKey::generate()),
            proof: world.member_proof(0),
            document,
            is_recovered: false,
        };
        Self { world, observer, ids }
    }

    /// Returns the observation of the second founder that the third one is dead.
    fn observation(&self, number: u64) -> Observation {
        Observation {
            cluster: self.world.statement.cluster,
            agent: *self.world.agents[1].public(),
            observer: digest::MemberId::new(self.ids[1].0),
            number,
            unreachable: vec![UnreachableMember {
                member: digest::MemberId::new(self.ids[2].0),
                for_seconds: 60,
            }],
        }
    }

    /// Signs an observation with the key and the proof of the second founder's agent.
    fn sign(&self, observation: &Observation) -> SignedObservation {
        observation.sign(&self.world.agents[1], self.world.member_proof(1))
    }

    /// Lets the first founder's agent read these observations, and returns the members whose
    /// observations count.
    fn look(
        &self,
        seen: &mut Observations,
        values: &[(MemberId, &SignedObservation, u64)],
    ) -> Vec<MemberId> {
        let mut written = BTreeMap::new();
        for &(member, signed, revision) in values {
            written.insert(member, (serde_json::to_vec(signed).unwrap(), revision));
        }
        let (chain, dead) = (self.world.chain(), (self.ids[2], AFTER));
        seen.count(&self.observer, chain.newest(), &written, dead, Instant::now())
    }

    /// Whether the second founder's observation counts once its key has had two observations, each
    /// made by `make`.
    fn counts(&self, make: impl Fn(Observation) -> SignedObservation) -> bool {
        let (mut seen, member) = (Observations::default(), self.ids[1]);
        let [first, second] = [1, 2].map(|number| make(self.observation(number)));
        self.look(&mut seen, &[(member, &first, 2)]);
        self.look(&mut seen, &[(member, &second, 3)]) == [member]
    }
}

#[tokio::test(start_paused = true)]
async fn an_observation_counts_once_a_newer_one_was_seen_and_until_it_is_old() {
    let mut seen = Observations::default();
    let (start, of) = (Instant::now(), MemberId(7));
    let at = |seconds| start + Duration::from_secs(seconds);
    assert!(!seen.is_fresh(of, (5, 10), at(0)), "it may be of last week");
    assert!(!seen.is_fresh(of, (5, 10), at(10)));
    assert!(seen.is_fresh(of, (10, 20), at(15)));
    assert!(seen.is_fresh(of, (10, 20), at(59)));
    assert!(!seen.is_fresh(of, (10, 20), at(60)));
    assert!(!seen.is_fresh(of, (5, 30), at(61)), "an older one is shown again");
    assert!(seen.is_fresh(of, (30, 40), at(62)));
    assert!(
        !seen.is_fresh(of, (40, 50), at(107)),
        "it may have been written at any time meanwhile"
    );
    assert!(seen.is_fresh(of, (50, 60), at(108)));
}

#[tokio::test(start_paused = true)]
async fn only_the_members_own_agent_can_say_that_the_dead_member_is_unreachable() {
    let (scene, stranger) = (Scene::new(), ClusterFixture::new(3));
    let (own, other) = (&scene.world.agents[0], &scene.world.agents[1]);
    assert!(scene.counts(|observation| scene.sign(&observation)));

    let by_first = |observation: Observation| {
        let observation = Observation { agent: *own.public(), ..observation };
        observation.sign(own, scene.world.member_proof(0))
    };
    assert!(!scene.counts(by_first), "another member's agent signs in its name");
    assert!(!scene.counts(|observation| {
        let observer = digest::MemberId::new(scene.ids[0].0);
        scene.sign(&Observation { observer, ..observation })
    }));
    assert!(
        !scene.counts(|observation| observation.sign(own, scene.world.member_proof(1))),
        "the signature is not by the agent that it names"
    );
    assert!(!scene.counts(|observation| {
        let observation = Observation { agent: *own.public(), ..observation };
        observation.sign(own, scene.world.member_proof(1))
    }));
    assert!(
        !scene.counts(|observation| observation.sign(other, scene.world.member_proof(0))),
        "the proof is of another member"
    );
    assert!(!scene.counts(|observation| {
        let observation = Observation { agent: *stranger.agents[1].public(), ..observation };
        observation.sign(&stranger.agents[1], stranger.member_proof(1))
    }));
    assert!(!scene.counts(|observation| {
        let cluster = stranger.statement.cluster;
        scene.sign(&Observation { cluster, ..observation })
    }));
}

#[tokio::test(start_paused = true)]
async fn an_observation_counts_only_for_the_member_and_the_time_that_it_names() {
    let scene = Scene::new();
    let with = |member: MemberId, for_seconds| {
        let member = digest::MemberId::new(member.0);
        scene.counts(|observation| {
            let unreachable = vec![UnreachableMember { member, for_seconds }];
            scene.sign(&Observation { unreachable, ..observation })
        })
    };
    assert!(with(scene.ids[2], 60));
    assert!(!with(scene.ids[2], 59));
    assert!(!with(scene.ids[0], 60));
}

#[tokio::test(start_paused = true)]
async fn observations_that_somebody_writes_again_do_not_count() {
    let (scene, mut seen) = (Scene::new(), Observations::default());
    let member = scene.ids[1];
    let signed = |number| scene.sign(&scene.observation(number));
    // Two observations of an earlier outage, in their order.
    for (number, revision) in [(2, 50), (3, 51)] {
        let counting = scene.look(&mut seen, &[(member, &signed(number), revision)]);
        assert!(counting.is_empty(), "{number} was signed long before {revision} was written");
    }
    assert_eq!(scene.look(&mut seen, &[(member, &signed(51), 52)]), [member]);
}

/// The founders of a recovered cluster have other ids than those in its document.
#[tokio::test(start_paused = true)]
async fn one_certificate_counts_for_one_member_of_a_recovered_cluster() {
    let (mut scene, mut seen) = (Scene::new(), Observations::default());
    scene.observer.is_recovered = true;
    let ids = [MemberId(0x51), MemberId(0x52)];
    for (number, revision) in [(1, 2), (2, 3)] {
        let signed = ids.map(|id| {
            let observer = digest::MemberId::new(id.0);
            scene.sign(&Observation { observer, ..scene.observation(number) })
        });
        let values = [(ids[0], &signed[0], revision), (ids[1], &signed[1], revision)];
        let counting = scene.look(&mut seen, &values);
        let expected = if number == 1 { 0 } else { 1 };
        assert_eq!(counting.len(), expected, "{counting:?}");
    }
}
