//! Which faults a history has, and how many: drawn once from the seed. Each history leaves some
//! out, so that rare combinations are not always drowned by the others.

use muster_node::driver::{MAX_QUEUED_MESSAGE_BYTES, MailBounds};

use crate::rng::Rng;

#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub members: u64,
    /// Per mille of messages.
    pub loss: u64,
    pub duplication: u64,
    /// Messages that take up to [`Plan::long_delay`].
    pub late: u64,
    pub long_delay: u64,
    /// Mean virtual microseconds between faults of a kind; 0 for none.
    pub partition_every: u64,
    pub crash_every: u64,
    pub pause_every: u64,
    pub transfer_every: u64,
    /// The leader is cut off until another one leads.
    pub depose_every: u64,
    /// A member is cut off until the others have compacted what it lacks.
    pub cut_off_every: u64,
    /// All members lose power at about the same time.
    pub power_cut_every: u64,
    /// Per mille of acknowledgements to a peer or a client after which power fails soon.
    pub crash_after_ack: u64,
    /// Per mille of the log's writes that a power cut ends in the middle: of those that it may tear,
    /// and of the others an eighth.
    pub crash_in_write: u64,
    /// Per mille of steps of a snapshot's installation after which power fails soon.
    pub crash_in_install: u64,
    /// A disk that fails, or is full, at one of its next operations.
    pub disk_fault_every: u64,
    /// Per mille of disk operations' groups that are slow.
    pub slow_disk: u64,
    /// Clocks differ by up to this many per mille.
    pub drift: u64,
    pub clients: usize,
    pub keys: u64,
    /// Entries between checkpoints.
    pub checkpoint_entries: u64,
    /// How many operators change the members; 0: they stay who they are.
    pub operators: usize,
    /// How operators' changes are judged.
    pub strict: bool,
    pub max_learners: u64,
    /// How long a member must have been connected to count as healthy, virtual microseconds.
    pub healthy_after: u64,
    /// Entries that a learner may have to fetch when it is promoted.
    pub in_sync_entries: u64,
    /// Members are bound to their incarnations, as those of a cluster from a document.
    pub bound: bool,
    /// Mean virtual microseconds between machines that lose their disk, that an old image of theirs
    /// is put back on, or that a copy is started beside.
    pub amnesia_every: u64,
    /// Entries that the log keeps behind a checkpoint.
    pub catch_up_entries: u64,
    /// Bytes of uncommitted proposals that a leader takes; 0 for as many as in production.
    pub uncommitted_bytes: u64,
    /// What waits for a core.
    pub mail: MailBounds,
    /// Jobs that wait for the log, or for the machine, before the core waits for them.
    pub queued_jobs: usize,
    /// Old entries that are read at once.
    pub queued_fetches: usize,
    /// Per mille of what comes in that finds the core busy.
    pub busy_core: u64,
    /// Per mille of messages that find the stream's queue full.
    pub full_streams: u64,
    /// Per mille of processes that lose a snapshot's body, and of those that can't write one.
    pub lost_bodies: u64,
    /// Mean virtual microseconds between disks that are almost full; 0 for none.
    pub little_space_every: u64,
    /// Deliveries that wait for a client that watches.
    pub queued_deliveries: usize,
    /// Bytes of events kept for watchers, and on their way to them.
    pub watch_bytes: usize,
    /// Per mille of requests that change users and roles until they count, and a quarter of it after
    /// that; 0: there are none.
    pub users: u64,
    /// Clients that do what Kubernetes' API servers do; 0: there are none.
    pub api_servers: usize,
    /// Virtual microseconds between their races for who compacts.
    pub compact_every: u64,
    /// Keys of each prefix that they keep copies of, and of a page of their lists.
    pub objects: u64,
    pub page_keys: i64,
    /// Members that start shorten the wait for their first election.
    pub hasten_first_election: bool,
}

/// Draws how many members a cluster begins with; one whose members change may begin with few.
fn first_members(rng: &mut Rng, churns: bool) -> u64 {
    let sizes = if churns { [1, 1, 2, 3, 3, 3, 5] } else { [3, 3, 3, 3, 5, 5, 1] };
    sizes[rng.pick(sizes.len())]
}

impl Plan {
    pub(super) fn new(rng: &mut Rng, members: Option<u64>) -> Self {
        // Drawn beside the others, so that a seed without them has the history that it always had.
        let mut of_servers = Rng::new(rng.clone().number());
        let mut of_starts = Rng::new(rng.clone().number() ^ 1);
        let churns = rng.chance(500);
        let members = members.unwrap_or_else(|| first_members(rng, churns));
        let mut some = |chance, low, high| {
            let drawn = rng.range(low, high);
            if rng.chance(chance) { drawn } else { 0 }
        };
        let small = |drawn: u64, else_: usize| match usize::try_from(drawn) {
            Ok(0) | Err(_) => else_,
            Ok(small) => small,
        };
        let bounds = MailBounds::default();
        let mail = MailBounds {
            proposals: small(some(300, 1, 6), bounds.proposals),
            proposal_bytes: small(some(300, 7_000, 20_000), bounds.proposal_bytes),
            // The largest transaction fits.
            message_bytes: small(some(300, 45_000, 80_000), bounds.message_bytes),
            reads: small(some(300, 1, 4), bounds.reads),
        };
        Self {
            members,
            mail,
            queued_jobs: small(some(200, 2, 12), 4096),
            queued_fetches: small(some(500, 1, 3), 64),
            busy_core: some(600, 5, 300),
            full_streams: some(400, 1, 40),
            lost_bodies: some(700, 100, 600),
            little_space_every: some(300, 200_000, 900_000),
            loss: some(600, 1, 120),
            duplication: some(500, 1, 100),
            late: some(700, 1, 120),
            long_delay: some(1000, 20_000, 600_000),
            partition_every: some(700, 200_000, 900_000),
            crash_every: some(800, 150_000, 800_000),
            pause_every: some(400, 300_000, 1_000_000),
            transfer_every: some(300, 200_000, 800_000),
            depose_every: some(850, 120_000, 400_000),
            cut_off_every: some(800, 100_000, 400_000),
            power_cut_every: some(400, 400_000, 1_200_000),
            crash_after_ack: some(500, 1, 6),
            crash_in_write: some(800, 40, 120),
            crash_in_install: some(600, 100, 400),
            slow_disk: some(500, 1, 80),
            drift: some(700, 10, 300),
            clients: usize::try_from(some(1000, 3, 7)).expect("small"),
            keys: some(1000, 1, 8),
            checkpoint_entries: some(1000, 2, 12),
            catch_up_entries: some(1000, 1, 5),
            queued_deliveries: usize::try_from(some(1000, 1, 6)).expect("small"),
            watch_bytes: usize::try_from(some(1000, 1_000, 30_000)).expect("small"),
            uncommitted_bytes: some(300, 5_000, 9_000),
            disk_fault_every: some(400, 150_000, 800_000),
            operators: if churns { usize::try_from(some(1000, 1, 4)).expect("few") } else { 0 },
            strict: some(850, 1, 2) == 1,
            max_learners: some(1000, 1, 4),
            healthy_after: some(1000, 20_000, 120_000),
            in_sync_entries: some(1000, 2, 40),
            bound: some(500, 1, 2) == 1,
            amnesia_every: if churns { some(600, 200_000, 900_000) } else { 0 },
            users: some(500, 200, 500),
            api_servers: if of_servers.chance(250) { 2 + of_servers.pick(2) } else { 0 },
            compact_every: of_servers.range(60_000, 300_000),
            objects: of_servers.range(3, 13),
            page_keys: i64::try_from(of_servers.range(1, 4)).expect("few"),
            hasten_first_election: of_starts.chance(500),
        }
    }

    /// Whether a leader has room for whatever followers may have for it.
    pub(super) fn takes_all_that_is_passed_on(&self) -> bool {
        self.uncommitted_bytes == 0 && self.mail.message_bytes == MAX_QUEUED_MESSAGE_BYTES
    }
}
