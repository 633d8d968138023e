//! A leader hands over while its cluster is written and read. Clocks stand still: whatever waited for
//! a tick would wait for ever.

use std::collections::VecDeque;

use super::*;

/// Three members. What is on its way to one of them arrives in the order in which it was sent.
struct Trio {
    drivers: Vec<Driver>,
    network: VecDeque<Message>,
    /// Which requests each has applied, and which reads it may answer.
    served: Vec<(Vec<u64>, Vec<u64>)>,
}

impl Trio {
    /// The first one leads.
    fn led() -> Self {
        let voters = vec![1, 2, 3];
        let driver = |id| {
            let members = Members { voters: voters.clone(), learners: Vec::new() };
            let initial = Initial { members, ..Initial::default() };
            Driver::new(&Config::new(id, 1, id), options(128 << 20), &initial).unwrap()
        };
        let drivers: Vec<_> = (1..=3).map(driver).collect();
        let served = vec![(Vec::new(), Vec::new()); 3];
        let mut trio = Self { drivers, network: VecDeque::new(), served };
        trio.tell(0, Notice::Campaign);
        trio.settle(&[1, 2, 3]);
        assert_eq!(trio.leaders(), [1, 1, 1]);
        trio
    }

    fn leaders(&self) -> Vec<u64> {
        self.drivers.iter().map(|driver| driver.leadership().1).collect()
    }

    fn tell(&mut self, n: usize, notice: Notice) {
        self.drivers[n].notice(notice);
        self.work(n);
    }

    /// A write and a read, by clients of one member.
    fn ask(&mut self, n: usize) {
        let id = n as u64 + 1;
        let kind = EntryKind::Normal;
        self.drivers[n].propose([Proposal { id: RequestId(id), kind, data: payload(id, 0) }]);
        self.drivers[n].read([id]);
        self.work(n);
    }

    /// Does all that a member has to do now. Its disk is quick, and its state machine.
    fn work(&mut self, n: usize) {
        loop {
            let driver = &mut self.drivers[n];
            let effects = driver.advance();
            assert_eq!((effects.refused, effects.bad_messages), (Vec::new(), Vec::new()));
            let idle = effects.persist.is_empty() && effects.apply.is_empty();
            self.network.extend(effects.send);
            if let Some((last, _)) = effects.persist.last() {
                driver.notice(Notice::Persisted(*last));
            }
            if let Some(last) = effects.apply.last() {
                driver.notice(Notice::Applied { at: last.position, changes: Vec::new() });
            }
            let (applied, read) = &mut self.served[n];
            let requests = effects.apply.iter().filter(|entry| entry.kind == EntryKind::Normal);
            let id = |entry: &Committed| u64::from_be_bytes(entry.data[..8].try_into().unwrap());
            applied.extend(requests.map(id));
            read.extend(effects.reads.iter().map(|(token, _)| *token));
            if idle && !driver.has_more() {
                return;
            }
        }
    }

    /// One message arrives, at whoever comes first among those to whom any is on its way.
    fn deliver(&mut self, order: &[u64]) -> bool {
        let next = |to: &u64| self.network.iter().position(|message| message.to == *to);
        let Some(message) = order.iter().find_map(next).and_then(|at| self.network.remove(at))
        else {
            return false;
        };
        let n = usize::try_from(message.to - 1).unwrap();
        self.drivers[n].message(message);
        self.work(n);
        true
    }

    fn settle(&mut self, order: &[u64]) {
        for _ in 0..1_000 {
            if !self.deliver(order) {
                return;
            }
        }
        panic!("it never settles");
    }
}

#[test]
fn nobody_waits_for_the_clock_while_a_leader_hands_over() {
    let orders = [[1, 2, 3], [1, 3, 2], [2, 1, 3], [2, 3, 1], [3, 1, 2], [3, 2, 1]];
    for order in orders {
        // Clients come before each of its steps, and after the last.
        for before in 0.. {
            let mut trio = Trio::led();
            trio.tell(0, Notice::Transfer(Some(2)));
            let is_over = !(0..before).all(|_| trio.deliver(&order));
            (0..3).for_each(|n| trio.ask(n));
            trio.settle(&order);
            let at = format!("asked after {before} steps, {order:?}");
            assert_eq!(trio.leaders(), [2, 2, 2], "{at}");
            for (n, (applied, read)) in trio.served.iter_mut().enumerate() {
                applied.sort_unstable();
                assert_eq!(*applied, [1, 2, 3], "member {}, {at}", n + 1);
                assert_eq!(*read, [n as u64 + 1], "{at}");
            }
            if is_over {
                assert!(before > 5, "it takes some steps");
                break;
            }
        }
    }
}

/// Consensus forgets at each check of the quorum who answers, until they answer again.
#[test]
fn there_is_somebody_to_hand_over_to_at_any_time() {
    for ticks in 1..=40 {
        let mut trio = Trio::led();
        for _ in 1..ticks {
            trio.drivers[0].tick();
            trio.work(0);
            trio.settle(&[1, 2, 3]);
        }
        // Nothing of what it says in the last one has arrived yet.
        trio.drivers[0].tick();
        trio.work(0);
        trio.tell(0, Notice::Transfer(None));
        trio.settle(&[1, 2, 3]);
        assert_ne!(trio.leaders()[0], 1, "after {ticks} ticks");
    }
}
