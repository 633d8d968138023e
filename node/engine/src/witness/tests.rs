//! Tests of each rule: cases that keep the rule, and cases that break it. Random histories of a
//! correct member are tested as well. In these, its promises arrive in any order.

use proptest::prelude::*;

use super::*;

const B: MemberId = MemberId(0xb);
const INCARNATION: Incarnation = Incarnation([7; 16]);

fn shown(boot: u64, run: u64, disk: DiskState) -> ProcessClaim {
    ProcessClaim { incarnation: INCARNATION, boot, run, disk }
}

fn blank(boot: u64, run: u64) -> ProcessClaim {
    shown(boot, run, DiskState::default())
}

fn disk(term: u64, vote: u64, last: u64) -> DiskState {
    DiskState { term, vote, last }
}

fn acknowledged(term: u64, matched: u64) -> Promise {
    Promise { term, matched, ..Promise::default() }
}

/// Merges everything that the witness `from` knows into the witness `to`.
fn tell(from: &Witness, to: &mut Witness) {
    let teller = ProcessClaim { incarnation: Incarnation([1; 16]), ..blank(1, 1) };
    let report = from.report(MemberId(0xa), &teller, Promise::default());
    to.merge_report(&report, |member, _| member == B).unwrap();
}

fn restarted(witness: &Witness) -> Witness {
    Witness::decode(&witness.encode()).unwrap()
}

#[test]
fn another_data_directory_of_the_same_member_is_refused_for_ever() {
    let mut witness = Witness::default();
    witness.admit(B, &blank(5, 1)).unwrap();
    let wiped = ProcessClaim { incarnation: Incarnation([8; 16]), ..blank(9, 2) };
    assert_eq!(witness.admit(B, &wiped), Err(ClaimRejection::Incarnation));
    assert_eq!(restarted(&witness).admit(B, &wiped), Err(ClaimRejection::Incarnation));
    witness.admit(B, &blank(5, 1)).expect("a reconnect");
}

#[test]
fn a_boot_counter_never_goes_back_and_belongs_to_one_process() {
    let mut witness = Witness::default();
    witness.admit(B, &blank(5, 1)).unwrap();
    for witness in [&mut restarted(&witness), &mut witness] {
        assert_eq!(witness.admit(B, &blank(4, 1)), Err(ClaimRejection::Boot));
        assert_eq!(witness.admit(B, &blank(5, 2)), Err(ClaimRejection::Boot));
        witness.admit(B, &blank(5, 1)).expect("a reconnect");
        witness.admit(B, &blank(6, 2)).expect("a restart");
        assert_eq!(witness.admit(B, &blank(5, 1)), Err(ClaimRejection::Boot));
    }
}

#[test]
fn an_image_older_than_a_promise_is_refused_and_the_members_own_disk_accepted() {
    let mut witness = Witness::default();
    witness.admit(B, &blank(5, 1)).unwrap();
    witness.record_promise(B, acknowledged(3, 10).with_commit(3, 8));
    witness.record_promise(B, Promise { term: 4, vote: 2, ..Promise::default() });
    for (why, image) in [
        ("term", disk(3, 2, 10)),
        ("vote", disk(4, 0, 10)),
        ("other vote", disk(4, 3, 10)),
        ("committed entry", disk(5, 0, 7)),
    ] {
        let mut witness = restarted(&witness);
        assert_eq!(witness.admit(B, &shown(6, 2, image)), Err(ClaimRejection::Amnesia), "{why}");
        assert_eq!(witness.admit(B, &shown(9, 3, image)), Err(ClaimRejection::Amnesia), "{why}");
        witness.admit(B, &shown(6, 4, disk(4, 2, 8))).expect("its own disk");
    }
}

#[test]
fn a_process_is_not_compared_with_its_own_promises() {
    let mut witness = Witness::default();
    witness.admit(B, &blank(5, 1)).unwrap();
    witness.record_promise(B, acknowledged(3, 10));
    witness.admit(B, &blank(5, 1)).expect("its disk has moved on since it began");
    assert!(!witness.is_refused_now(B, 1));
    restarted(&witness).admit(B, &blank(5, 1)).expect("and the other end may have restarted");
}

#[test]
fn promises_of_all_earlier_boots_are_merged() {
    let mut witness = Witness::default();
    witness.admit(B, &blank(5, 1)).unwrap();
    witness.record_promise(B, acknowledged(3, 10));
    witness.admit(B, &shown(6, 2, disk(3, 0, 10))).unwrap();
    witness.record_promise(B, acknowledged(3, 9));
    assert_eq!(witness.admit(B, &shown(7, 3, disk(3, 0, 9))), Err(ClaimRejection::Amnesia));
    witness.admit(B, &shown(7, 3, disk(3, 0, 10))).unwrap();
}

#[test]
fn a_process_accepted_for_lack_of_knowledge_is_refused_after_a_report() {
    let (mut knows, mut less) = (Witness::default(), Witness::default());
    for witness in [&mut knows, &mut less] {
        witness.admit(B, &blank(5, 1)).unwrap();
    }
    knows.record_promise(B, acknowledged(3, 10));
    less.admit(B, &shown(6, 2, disk(3, 0, 4))).unwrap();
    assert!(!less.is_refused_now(B, 2));
    tell(&knows, &mut less);
    assert!(less.is_refused_now(B, 2));
    assert_eq!(less.admit(B, &shown(6, 2, disk(3, 0, 4))), Err(ClaimRejection::Amnesia));
    less.admit(B, &shown(7, 3, disk(3, 0, 10))).expect("the member itself");
    assert!(!less.is_refused_now(B, 3) && less.is_refused_now(B, 2));
}

#[test]
fn an_older_process_is_refused_once_a_report_names_a_later_one() {
    let (mut one, mut other) = (Witness::default(), Witness::default());
    one.admit(B, &blank(5, 1)).unwrap();
    other.admit(B, &blank(6, 2)).unwrap();
    tell(&one, &mut other);
    assert!(!other.is_refused_now(B, 2));
    assert!(!one.is_refused_now(B, 1));
    tell(&other, &mut one);
    assert!(one.is_refused_now(B, 1));
    assert_eq!(one.admit(B, &blank(5, 1)), Err(ClaimRejection::Boot));
    one.admit(B, &blank(6, 2)).unwrap();
}

#[test]
fn two_processes_with_the_same_boot_counter_are_both_refused() {
    let (mut one, mut other) = (Witness::default(), Witness::default());
    one.admit(B, &blank(6, 1)).unwrap();
    one.record_promise(B, acknowledged(3, 10));
    other.admit(B, &blank(6, 2)).unwrap();
    tell(&one, &mut other);
    tell(&other, &mut one);
    for witness in [&mut one, &mut other] {
        for run in [1, 2] {
            assert!(witness.is_refused_now(B, run));
            assert_eq!(witness.admit(B, &blank(6, run)), Err(ClaimRejection::Boot), "run {run}");
        }
        assert_eq!(witness.admit(B, &blank(7, 3)), Err(ClaimRejection::Amnesia));
        witness.admit(B, &shown(7, 4, disk(3, 0, 10))).expect("the one that forgot nothing");
    }
}

#[test]
fn a_process_on_an_older_image_does_not_displace_the_member_elsewhere() {
    for boot in [6, 5] {
        let (mut knows, mut less) = (Witness::default(), Witness::default());
        knows.admit(B, &blank(4, 1)).unwrap();
        knows.record_promise(B, acknowledged(3, 10));
        knows.admit(B, &shown(5, 2, disk(3, 0, 10))).unwrap();
        less.admit(B, &shown(boot, 3, disk(3, 0, 4))).unwrap();
        tell(&less, &mut knows);
        assert!(!knows.is_refused_now(B, 2), "boot {boot}");
        tell(&knows, &mut less);
        assert!(less.is_refused_now(B, 3), "boot {boot}");
        // The refused process ran on a copy of the data directory. The member must still keep the
        // promises that this process made.
        less.record_promise(B, Promise { term: 4, vote: 9, ..Promise::default() });
        tell(&less, &mut knows);
        assert_eq!(knows.admit(B, &shown(7, 4, disk(3, 0, 10))), Err(ClaimRejection::Amnesia));
        knows.admit(B, &shown(7, 5, disk(4, 9, 10))).unwrap();
    }
}

/// A new member knows nothing of the past. So it may accept either process, and the one with the
/// higher boot counter wins.
#[test]
fn a_member_is_accepted_again_once_its_copy_is_refused() {
    let member = shown(8, 1, disk(3, 0, 10));
    let copy = shown(9, 2, disk(3, 0, 15));
    let (mut knows, mut new, mut newer) =
        (Witness::default(), Witness::default(), Witness::default());
    knows.admit(B, &member).unwrap();
    knows.record_promise(B, acknowledged(3, 20));
    new.admit(B, &copy).unwrap();
    newer.admit(B, &copy).unwrap();
    assert_eq!(new.admit(B, &member), Err(ClaimRejection::Boot), "for now");
    tell(&knows, &mut new);
    assert!(new.is_refused_now(B, 2));
    assert_eq!(new.admit(B, &copy), Err(ClaimRejection::Amnesia));
    new.admit(B, &member).expect("it is the member");
    tell(&newer, &mut new);
    tell(&new, &mut newer);
    tell(&newer, &mut knows);
    for witness in [knows, new, newer] {
        assert!(!witness.is_refused_now(B, 1) && witness.is_refused_now(B, 2));
        let mut witness = restarted(&witness);
        witness.admit(B, &member).unwrap();
        assert_eq!(witness.admit(B, &shown(10, 3, disk(3, 0, 19))), Err(ClaimRejection::Amnesia));
        witness.admit(B, &shown(9, 4, disk(3, 0, 20))).expect("its next process");
    }
}

/// A peer had accepted a process on a copy of the directory, which then made promises. The original
/// is refused, because its disk lacks what the copy promised.
#[test]
fn a_member_that_lacks_promises_of_its_copy_is_not_accepted_again() {
    let member = shown(8, 1, disk(3, 0, 10));
    let (mut knows, mut new) = (Witness::default(), Witness::default());
    knows.admit(B, &member).unwrap();
    knows.record_promise(B, acknowledged(3, 20));
    new.admit(B, &shown(9, 2, disk(3, 0, 15))).unwrap();
    new.record_promise(B, Promise { term: 4, vote: 9, ..Promise::default() });
    tell(&knows, &mut new);
    assert!(new.is_refused_now(B, 2));
    assert_eq!(new.admit(B, &member), Err(ClaimRejection::Amnesia));
}

#[test]
fn there_is_no_room_for_strangers_beyond_the_maximum_of_known_members() {
    let mut witness = Witness::default();
    for id in 0..MAX_KNOWN_MEMBERS as u64 {
        assert!(witness.has_room(MemberId(100 + id)));
        witness.admit(MemberId(100 + id), &blank(1, id)).unwrap();
    }
    assert!(!witness.has_room(B) && witness.has_room(MemberId(100)));
    witness.admit(B, &blank(1, 1)).expect("a member always does");
}

#[test]
fn a_process_is_new_until_it_is_admitted() {
    let mut witness = Witness::default();
    assert_eq!(witness.is_new(B, &blank(5, 1)), Ok(true));
    witness.admit(B, &blank(5, 1)).unwrap();
    assert_eq!(witness.is_new(B, &blank(5, 1)), Ok(false));
    assert_eq!(witness.is_new(B, &blank(6, 2)), Ok(true));
    assert_eq!(witness.is_new(B, &blank(5, 2)), Err(ClaimRejection::Boot));
}

#[test]
fn reports_of_strangers_or_of_another_directory_and_junk_are_ignored() {
    let (mut from, mut to) = (Witness::default(), Witness::default());
    from.admit(MemberId(9), &blank(1, 1)).unwrap();
    let wiped = ProcessClaim { incarnation: Incarnation([8; 16]), ..blank(9, 9) };
    from.admit(B, &wiped).unwrap();
    to.admit(B, &blank(5, 1)).unwrap();
    let before = (to.encode(), to.version());
    tell(&from, &mut to);
    assert!(to.merge_report(b"junk", |_, _| true).is_err());
    assert_eq!((to.encode(), to.version()), before);
    assert!(!to.is_refused_now(B, 1));
}

#[test]
fn a_report_includes_the_promises_of_its_sender() {
    let mut witness = Witness::default();
    let report = Witness::default().report(B, &blank(5, 1), acknowledged(3, 10));
    witness.merge_report(&report, |_, _| true).unwrap();
    assert_eq!(witness.admit(B, &shown(6, 2, disk(3, 0, 9))), Err(ClaimRejection::Amnesia));
    witness.admit(B, &shown(6, 2, disk(3, 0, 10))).unwrap();
}

#[test]
fn only_boots_and_votes_are_urgent_changes() {
    let mut witness = Witness::default();
    witness.admit(B, &blank(5, 1)).unwrap();
    assert_eq!(witness.urgent(), witness.version());
    let durable = witness.version();
    witness.admit(B, &blank(5, 1)).unwrap();
    witness.record_promise(B, Promise::default());
    assert_eq!(witness.version(), durable, "no news");
    witness.record_promise(B, acknowledged(3, 10));
    assert!(witness.version() > durable && witness.urgent() == durable);
    witness.record_promise(B, Promise { term: 3, vote: 2, ..Promise::default() });
    assert_eq!(witness.urgent(), witness.version());
    let voted = witness.version();
    witness.record_promise(B, acknowledged(3, 11));
    assert!(witness.version() > voted && witness.urgent() == voted);
    let version = witness.version();
    tell(&restarted(&witness), &mut witness);
    assert_eq!(witness.version(), version, "nothing new was told");
}

#[test]
fn a_removed_member_is_forgotten() {
    let mut witness = Witness::default();
    witness.admit(B, &blank(5, 1)).unwrap();
    let version = witness.version();
    witness.forget(|member| member != B);
    assert_eq!(witness.version(), version);
    witness.forget(|member| member == B);
    assert!(witness.version() > version && !witness.encode().contains(&INCARNATION.to_string()));
}

#[test]
fn a_file_of_the_first_version_still_counts() {
    let text = format!("b {INCARNATION} 5\n");
    let mut witness = Witness::decode(&text).unwrap();
    assert_eq!(witness.admit(B, &blank(4, 1)), Err(ClaimRejection::Boot));
    witness.admit(B, &blank(5, 1)).expect("its process was not noted");
    assert_eq!(witness.admit(B, &blank(5, 2)), Err(ClaimRejection::Boot));
}

/// An event in the history of a correct member and its witnesses.
#[derive(Clone, Copy, Debug)]
enum HistoryEvent {
    /// The member votes in a later term.
    Vote(u64),
    /// A leader of a later term replaces uncommitted entries, and the member acknowledges the new
    /// ones.
    Follow {
        keep: u64,
        add: u64,
    },
    /// All entries of the member become committed.
    Commit,
    /// The member writes entries without acknowledging them.
    Write(u64),
    Restart,
    /// A witness receives the member's latest promise, or receives an older one again.
    Hear {
        witness: usize,
        age: usize,
    },
    /// A witness accepts a stream of the member's running process.
    Stream(usize),
    /// One witness sends another its report.
    Tell(usize, usize),
    /// A witness crashes, and restarts with the state that it last wrote to disk.
    Crash(usize),
    Flush(usize),
}

fn steps() -> impl Strategy<Value = HistoryEvent> {
    let witness = 0..3_usize;
    prop_oneof![
        (1..4_u64).prop_map(HistoryEvent::Vote),
        (0..5_u64, 0..5_u64).prop_map(|(keep, add)| HistoryEvent::Follow { keep, add }),
        Just(HistoryEvent::Commit),
        (1..4_u64).prop_map(HistoryEvent::Write),
        Just(HistoryEvent::Restart),
        (witness.clone(), 0..4_usize)
            .prop_map(|(witness, age)| HistoryEvent::Hear { witness, age }),
        witness.clone().prop_map(HistoryEvent::Stream),
        (witness.clone(), witness.clone()).prop_map(|(from, to)| HistoryEvent::Tell(from, to)),
        witness.clone().prop_map(HistoryEvent::Crash),
        witness.prop_map(HistoryEvent::Flush),
    ]
}

/// A correct member, whose disk keeps everything, and three witnesses.
struct MemberHistory {
    disk: DiskState,
    commit: u64,
    boot: u64,
    began: DiskState,
    /// Promises that the member has made, each with its boot counter.
    said: Vec<(u64, Promise)>,
    /// For each witness: highest boot that it has accepted, and still knows after a crash.
    let_in: Vec<u64>,
    witnesses: Vec<Witness>,
    durable: Vec<String>,
}

impl MemberHistory {
    fn new() -> Self {
        let disk = DiskState::default();
        let witnesses = vec![Witness::default(); 3];
        let durable = witnesses.iter().map(Witness::encode).collect();
        Self {
            disk,
            commit: 0,
            boot: 1,
            began: disk,
            said: Vec::new(),
            let_in: vec![0; 3],
            witnesses,
            durable,
        }
    }

    fn say(&mut self, promise: Promise) {
        self.said.push((self.boot, promise.with_commit(self.disk.term, self.commit)));
    }

    fn now(&self) -> ProcessClaim {
        shown(self.boot, 100 + self.boot, self.began)
    }

    fn step(&mut self, step: HistoryEvent) -> Result<(), (usize, ClaimRejection)> {
        match step {
            HistoryEvent::Vote(to) => {
                self.disk = DiskState { term: self.disk.term + to, vote: to, ..self.disk };
                self.say(Promise { term: self.disk.term, vote: to, ..Promise::default() });
            }
            HistoryEvent::Follow { keep, add } => {
                // The log can only get shorter in a later term.
                let last = (self.commit + keep).min(self.disk.last) + add;
                self.disk = DiskState { term: self.disk.term + 1, vote: 0, last };
                self.say(acknowledged(self.disk.term, last));
            }
            HistoryEvent::Commit => {
                self.commit = self.disk.last;
                self.say(acknowledged(self.disk.term, self.disk.last));
            }
            HistoryEvent::Write(entries) => self.disk.last += entries,
            HistoryEvent::Restart => (self.boot, self.began) = (self.boot + 1, self.disk),
            HistoryEvent::Hear { witness, age } => {
                let Some(at) = self.said.len().checked_sub(age + 1) else { return Ok(()) };
                let (boot, promise) = self.said[at];
                // A witness receives promises only from a process that it has accepted.
                if boot <= self.let_in[witness] {
                    self.witnesses[witness].record_promise(B, promise);
                }
            }
            HistoryEvent::Stream(witness) => {
                let now = self.now();
                self.witnesses[witness].admit(B, &now).map_err(|why| (witness, why))?;
                if self.witnesses[witness].is_refused_now(B, now.run) {
                    return Err((witness, ClaimRejection::Amnesia));
                }
                self.durable[witness] = self.witnesses[witness].encode();
                self.let_in[witness] = self.boot;
            }
            HistoryEvent::Tell(from, to) => {
                let teller = self.witnesses[from].clone();
                tell(&teller, &mut self.witnesses[to]);
            }
            HistoryEvent::Crash(witness) => {
                self.witnesses[witness] = Witness::decode(&self.durable[witness]).unwrap();
            }
            HistoryEvent::Flush(witness) => {
                self.durable[witness] = self.witnesses[witness].encode()
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn a_correct_member_is_never_refused(steps in proptest::collection::vec(steps(), 1..60)) {
        let mut history = MemberHistory::new();
        for step in steps {
            let done = history.step(step);
            prop_assert!(done.is_ok(), "{done:?}");
        }
    }

    /// A witness that received the latest promise refuses every earlier image that lacks it. Other
    /// reports don't change that, and neither does starting the image several times.
    #[test]
    fn an_image_is_refused_by_a_witness_of_later_promises(
        first in proptest::collection::vec(steps(), 1..30),
        later in proptest::collection::vec(steps(), 1..30),
        starts in 1..4_u64,
    ) {
        let mut history = MemberHistory::new();
        let now = history.now();
        history.witnesses[0].admit(B, &now).unwrap();
        for step in first {
            let _ = history.step(step);
        }
        let image = (history.boot, history.disk);
        let said = history.said.len();
        for step in later {
            if !matches!(step, HistoryEvent::Crash(_)) {
                let _ = history.step(step);
            }
        }
        let now = history.now();
        history.witnesses[0].admit(B, &now).unwrap();
        for at in said..history.said.len() {
            let promise = history.said[at].1;
            history.witnesses[0].record_promise(B, promise);
        }
        let lacks = history.said[said..].iter().any(|(_, promise)| !image.1.keeps(promise));
        let boot = image.0 + starts;
        let mut witness = restarted(&history.witnesses[0]);
        let admitted = witness.admit(B, &shown(boot, 999, image.1));
        if lacks {
            prop_assert!(admitted.is_err());
        } else if boot > history.boot {
            prop_assert_eq!(admitted, Ok(()));
        }
    }
}
