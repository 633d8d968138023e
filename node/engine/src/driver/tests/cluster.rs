//! Drivers that exchange messages without threads. The tests decide when messages arrive and when
//! clocks tick.

use std::collections::VecDeque;

use super::*;

/// Returns a client's write with this request id.
pub(super) fn write(id: u64) -> ClientProposal {
    ClientProposal { id: RequestId(id), kind: EntryKind::Normal, data: payload(id, 0) }
}

/// Connected members. Messages to one member arrive in the order in which they were sent.
pub(super) struct DriverCluster {
    pub drivers: Vec<DriverCore>,
    pub network: VecDeque<Message>,
    /// For each member: the requests that it has applied, and the reads that it may answer.
    pub served: Vec<(Vec<u64>, Vec<u64>)>,
    /// For each member: the requests that it has reported as lost.
    pub lost: Vec<Vec<u64>>,
}

impl DriverCluster {
    /// Returns a cluster of `voters` voters. Member 1 leads it.
    pub(super) fn led(voters: u64) -> Self {
        Self::of(&Members { voters: (1..=voters).collect(), learners: Vec::new() })
    }

    /// Returns a cluster of these members, whose ids begin at 1. Member 1 leads it.
    pub(super) fn of(members: &Members) -> Self {
        let ids: Vec<u64> = members.voters.iter().chain(&members.learners).copied().collect();
        let driver = |id| {
            let initial = InitialState { members: members.clone(), ..InitialState::default() };
            DriverCore::new(&Config::new(id, 1, id), options(128 << 20), &initial).unwrap()
        };
        let drivers: Vec<_> = ids.iter().copied().map(driver).collect();
        let served = vec![(Vec::new(), Vec::new()); drivers.len()];
        let lost = vec![Vec::new(); drivers.len()];
        let mut cluster = Self { drivers, network: VecDeque::new(), served, lost };
        for (n, member) in (0..).zip(&ids) {
            for peer in ids.iter().filter(|peer| *peer != member) {
                cluster.notify(n, Notice::Connected(*peer));
            }
        }
        cluster.notify(0, Notice::Campaign);
        cluster.settle(&ids);
        assert!(cluster.leaders().iter().all(|leader| *leader == 1));
        cluster
    }

    pub(super) fn leaders(&self) -> Vec<u64> {
        self.drivers.iter().map(|driver| driver.leadership().1).collect()
    }

    pub(super) fn notify(&mut self, n: usize, notice: Notice) {
        self.drivers[n].notice(notice);
        self.run_until_idle(n);
    }

    /// Sends a write and a read of a client to one member.
    pub(super) fn send_write_and_read(&mut self, n: usize) {
        let id = n as u64 + 1;
        self.drivers[n].propose([write(id)]);
        self.drivers[n].read([id]);
        self.run_until_idle(n);
    }

    /// Does all pending work of a member. Its disk and state machine finish at once.
    pub(super) fn run_until_idle(&mut self, n: usize) {
        loop {
            let driver = &mut self.drivers[n];
            let effects = driver.advance();
            assert_eq!((effects.refused_proposals, effects.bad_messages), (Vec::new(), Vec::new()));
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
            let id =
                |entry: &CommittedEntry| u64::from_be_bytes(entry.data[..8].try_into().unwrap());
            applied.extend(requests.map(id));
            self.lost[n].extend(effects.lost_proposals.iter().map(|RequestId(id)| *id));
            read.extend(effects.reads.iter().map(|(token, _)| *token));
            if idle && !driver.has_more() {
                return;
            }
        }
    }

    /// Delivers one message: to the first member in `order` for which a message is pending. Returns
    /// false if no message is pending for any of them.
    pub(super) fn deliver(&mut self, order: &[u64]) -> bool {
        let next = |to: &u64| self.network.iter().position(|message| message.to == *to);
        let Some(message) = order.iter().find_map(next).and_then(|at| self.network.remove(at))
        else {
            return false;
        };
        let n = usize::try_from(message.to - 1).unwrap();
        self.drivers[n].message(message);
        self.run_until_idle(n);
        true
    }

    /// Delivers messages to the members in `order` until none is pending. Then leaders send a
    /// commit index that peers lack, and heartbeats that they hold back, and delayed rounds of
    /// reads start, as the ends of the delays make them do in production. This repeats until there
    /// is nothing left to send.
    pub(super) fn settle(&mut self, order: &[u64]) {
        for _ in 0..1_000 {
            if !self.deliver(order)
                && !self.send_commit_index(order)
                && !self.send_held_heartbeats(order)
                && !self.start_read_round(order)
            {
                return;
            }
        }
        panic!("it never settles");
    }

    /// Finds the first leader in `order` with a peer that lacks the leader's commit index, and
    /// makes it send the index. Returns false if there is no such leader.
    fn send_commit_index(&mut self, order: &[u64]) -> bool {
        let mut members = order.iter().map(|member| usize::try_from(member - 1).unwrap());
        let leader = members.find(|n| self.drivers[*n].has_unsent_commit());
        if let Some(n) = leader {
            self.notify(n, Notice::SendCommitIndex);
        }
        leader.is_some()
    }

    /// Finds the first member in `order` that holds back heartbeats for a read, and makes it send
    /// them. Returns false if there is no such member.
    fn send_held_heartbeats(&mut self, order: &[u64]) -> bool {
        let mut members = order.iter().map(|member| usize::try_from(member - 1).unwrap());
        let holder = members.find(|n| self.drivers[*n].oldest_held_heartbeats().is_some());
        if let Some(n) = holder {
            self.notify(n, Notice::SendHeldHeartbeats);
        }
        holder.is_some()
    }

    /// Finds the first member in `order` that delays a round of reads, and makes it start the
    /// round. Returns false if there is no such member.
    fn start_read_round(&mut self, order: &[u64]) -> bool {
        let mut members = order.iter().map(|member| usize::try_from(member - 1).unwrap());
        let reader = members.find(|n| self.drivers[*n].delayed_read_round().is_some());
        if let Some(n) = reader {
            self.notify(n, Notice::StartReadRound);
        }
        reader.is_some()
    }
}
