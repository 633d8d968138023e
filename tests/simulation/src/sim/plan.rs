//! Faults and bounds of a history, drawn once from the seed. Each history leaves some kinds of
//! fault out. Otherwise frequent faults would always hide rare combinations.

use node_engine::driver::{MAX_QUEUED_MESSAGE_BYTES, MailBounds};

use crate::rng::Rng;

#[derive(Clone, Debug)]
pub(super) struct HistoryPlan {
    pub members: u64,
    /// Chance that a message is lost, per mille.
    pub loss: u64,
    /// Chance that a message arrives twice, per mille.
    pub duplication: u64,
    /// Chance that a message takes up to [`HistoryPlan::long_delay`], per mille.
    pub late_chance: u64,
    pub long_delay: u64,
    /// Mean virtual microseconds between two partitions; 0 means none. Each field `…_every` below
    /// is such an interval for another kind of fault.
    pub partition_every: u64,
    pub crash_every: u64,
    pub pause_every: u64,
    pub transfer_every: u64,
    /// Interval between faults that cut the leader off until another member leads.
    pub depose_every: u64,
    /// Interval between faults that cut a member off until a peer has compacted entries that the
    /// member lacks.
    pub cut_off_every: u64,
    /// Interval between power cuts of all members at about the same time.
    pub power_cut_every: u64,
    /// Chance that power fails soon after an acknowledgement to a peer or a client, per mille.
    pub crash_after_ack: u64,
    /// Chance that a power cut ends a log write in the middle, per mille. For writes that can't be
    /// torn, the chance is an eighth of this.
    pub crash_in_write: u64,
    /// Chance that power fails soon after a step of a snapshot's installation, per mille.
    pub crash_in_install: u64,
    /// Interval between faults that make one of the next operations on a disk fail, or find the
    /// disk full.
    pub disk_fault_every: u64,
    /// Chance that a group of disk operations is slow, per mille.
    pub slow_disk: u64,
    /// Maximum difference between clocks, per mille.
    pub drift: u64,
    pub clients: usize,
    pub keys: u64,
    /// Number of entries between two checkpoints.
    pub checkpoint_entries: u64,
    /// Number of operators that change the members; 0 means that the members stay the same.
    pub operators: usize,
    /// Whether a membership change is refused if it could cost the quorum
    /// (`--strict-reconfig-check`).
    pub strict: bool,
    pub max_learners: u64,
    /// Virtual microseconds that a member must have been connected to count as healthy.
    pub healthy_after: u64,
    /// Maximum number of entries that a learner may lack when it is promoted.
    pub in_sync_entries: u64,
    /// Whether members are bound to their incarnations, as in a cluster that was formed from a
    /// commit document.
    pub binds_incarnations: bool,
    /// Interval between faults in which a machine loses what its member has promised. Its disk is
    /// wiped or replaced by an old image, or a copy of the machine is started beside it.
    pub amnesia_every: u64,
    /// Number of entries that the log keeps behind a checkpoint.
    pub catch_up_entries: u64,
    /// Maximum bytes of uncommitted proposals on a leader; 0 means the production limit.
    pub uncommitted_bytes: u64,
    /// Bounds of the queues in front of a member's core.
    pub mail: MailBounds,
    /// Number of jobs queued for the log or the state machine at which the core waits.
    pub queued_jobs: usize,
    /// Maximum number of reads of old log entries at the same time.
    pub queued_fetches: usize,
    /// Chance that the core is busy when input arrives, per mille.
    pub busy_core: u64,
    /// Chance that a message finds its stream's queue full, per mille.
    pub full_streams: u64,
    /// Chance that a process loses the body of one snapshot, per mille. The chance that it fails to
    /// write one body is equal.
    pub lost_bodies: u64,
    /// Mean virtual microseconds between two faults after which a disk is almost full; 0 means
    /// none.
    pub low_space_every: u64,
    /// Maximum number of deliveries that wait for a watching client.
    pub queued_deliveries: usize,
    /// Maximum bytes of events that are kept for watchers. The same limit applies to events on
    /// their way to watchers.
    pub watch_bytes: usize,
    /// Chance that a request changes users and roles, per mille. Once authentication is enabled,
    /// the chance is a quarter of this. 0 means that there are no users.
    pub user_change_chance: u64,
    /// Number of clients that behave as Kubernetes' API servers do; 0 means none.
    pub api_servers: usize,
    /// Virtual microseconds between the API servers' races for the right to compact.
    pub compact_every: u64,
    /// Number of keys in each prefix that API servers copy.
    pub keys_per_prefix: u64,
    /// Number of keys on a page of an API server's list.
    pub page_keys: i64,
    /// Whether starting members shorten the wait for their first election.
    pub hasten_first_election: bool,
    /// Chance that the loss of a stream is reported as the end of the peer's process although that
    /// process runs, per mille. The end of a process is reported in most cases. 0 means that
    /// processes' ends are never reported.
    pub wrong_process_ends: u64,
}

/// Draws the number of members that a cluster begins with. A cluster whose members change may begin
/// with few.
fn draw_member_count(rng: &mut Rng, changes_members: bool) -> u64 {
    let sizes = if changes_members { [1, 1, 2, 3, 3, 3, 5] } else { [3, 3, 3, 3, 5, 5, 1] };
    sizes[rng.pick(sizes.len())]
}

impl HistoryPlan {
    pub(super) fn new(rng: &mut Rng, members: Option<u64>) -> Self {
        // Separate generators draw the newer parameters, so that the histories of old seeds stay
        // the same where these parameters aren't used.
        let mut server_rng = Rng::new(rng.clone().number());
        let mut start_rng = Rng::new(rng.clone().number() ^ 1);
        let changes_members = rng.chance(500);
        let members = members.unwrap_or_else(|| draw_member_count(rng, changes_members));
        let mut some = |chance, low, high| {
            let drawn = rng.range(low, high);
            if rng.chance(chance) { drawn } else { 0 }
        };
        let small = |drawn: u64, default: usize| match usize::try_from(drawn) {
            Ok(0) | Err(_) => default,
            Ok(small) => small,
        };
        let bounds = MailBounds::default();
        let mail = MailBounds {
            proposals: small(some(300, 1, 6), bounds.proposals),
            proposal_bytes: small(some(300, 7_000, 20_000), bounds.proposal_bytes),
            // This bound must leave room for the largest transaction, so it is never drawn below
            // 45,000 bytes.
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
            low_space_every: some(300, 200_000, 900_000),
            loss: some(600, 1, 120),
            duplication: some(500, 1, 100),
            late_chance: some(700, 1, 120),
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
            operators: usize::try_from(if changes_members { some(1000, 1, 4) } else { 0 })
                .expect("few"),
            strict: some(850, 1, 2) == 1,
            max_learners: some(1000, 1, 4),
            healthy_after: some(1000, 20_000, 120_000),
            in_sync_entries: some(1000, 2, 40),
            binds_incarnations: some(500, 1, 2) == 1,
            amnesia_every: if changes_members { some(600, 200_000, 900_000) } else { 0 },
            user_change_chance: some(500, 200, 500),
            api_servers: if server_rng.chance(250) { 2 + server_rng.pick(2) } else { 0 },
            compact_every: server_rng.range(60_000, 300_000),
            keys_per_prefix: server_rng.range(3, 13),
            page_keys: i64::try_from(server_rng.range(1, 4)).expect("few"),
            hasten_first_election: start_rng.chance(500),
            wrong_process_ends: if start_rng.chance(500) { start_rng.range(1, 500) } else { 0 },
        }
    }

    /// Returns whether a leader's bounds leave room for everything that followers may forward.
    pub(super) fn has_room_for_forwarded(&self) -> bool {
        self.uncommitted_bytes == 0 && self.mail.message_bytes == MAX_QUEUED_MESSAGE_BYTES
    }
}
