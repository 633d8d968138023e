//! Configuration of an exploration: bounds, faults and switches.

use formation_explored::Rules;

use crate::explore::processes::RestoreMethod;

/// Bounds of one exploration, and the faults that may happen in it.
#[derive(Clone, Debug)]
pub struct ExplorationConfig {
    /// Name of the configuration in reports.
    pub name: &'static str,
    /// Number of seats, which is the cluster's size: 1 to 3.
    pub seats: u8,
    /// Number of hosts that take part.
    pub hosts: usize,
    /// Highest epoch that is explored. States of a higher epoch are counted, but their successors
    /// aren't explored.
    pub epochs: u64,
    /// Rules of formation that the state machines of service and agent follow.
    pub rules: Rules,
    /// Guarantees that the environment gives.
    pub environment: Environment,
    /// How often each fault may happen on one path.
    pub faults: FaultCounts,
    /// Bit mask of hosts that no other host can reach.
    pub unreachable: u8,
    /// Whether to check two guarantees that only the ledger gives:
    /// - At most one commit document is ever sent, even for lists without a common host.
    /// - No commit document is sent after the cluster was abandoned.
    pub expects_ledger: bool,
    /// Whether to check only property 3 (no two majorities). Then the successors of states that
    /// can't lead to a second majority aren't explored.
    pub majorities_only: bool,
    /// Whether the service lies: any list of members of known records may be shown at any time.
    pub service_lies: bool,
    /// The only lists that a lying service shows. Each is given by its epoch and its hosts. If this
    /// is empty, the service may show every list.
    pub false_lists: Vec<(u64, Vec<usize>)>,
    /// Whether late messages of dead and re-imaged hosts may still arrive.
    pub has_late_messages: bool,
    /// Whether a lease may lapse without a transaction that notices it, so that another event is
    /// processed first.
    pub quiet_lapses: bool,
    /// Whether node directories are fresh file systems, which contain `lost+found`.
    pub lost_and_found: bool,
    /// Phases in which a backup may be taken: open, preparing, committed.
    pub backup_in: [bool; 3],
    /// Ways in which the backup may be restored.
    pub restore_methods: &'static [RestoreMethod],
    /// Whether members report their Raft cluster, one by one. Reports decide nothing, so large
    /// explorations leave them out.
    pub reports: bool,
    /// A fault-free run is played from one in this many states. 0 means that none is played.
    pub fault_free_interval: u64,
    /// Maximum number of faults of all kinds together on one path. The limit of each kind in
    /// `faults` applies as well. 255 means no limit.
    pub max_total_faults: u8,
    /// Whether states and steps that no property can tell apart are merged (`reductions`). Tests
    /// switch this off to compare with the unreduced exploration.
    pub reduced: bool,
}

/// Guarantees that the state machines of service and agent need from their environment. Each can be
/// switched off to show that it is needed.
#[derive(Clone, Copy, Debug)]
pub struct Environment {
    /// A transaction locks the cluster's row before it reads the row.
    pub row_lock: bool,
    /// Each process keeps a ledger, and compares the database with its ledger.
    pub ledger: bool,
    /// Each database has an identity that no dump carries, and each process checks it.
    pub has_database_identity: bool,
    /// Each process counts its sweeps, in its row of the database and beside its ledger.
    pub has_sweep_counters: bool,
    /// Ledgers are complete: before a process decides anything, it copies into its ledger all
    /// decisions of the other processes.
    pub has_complete_ledgers: bool,
    /// A process's row records how many entries its ledger held.
    pub has_entry_counts: bool,
    /// An owner can't declare a process gone while it is running.
    pub forgets_stopped_only: bool,
    /// A backup that is restored in place is older than the last sweep of each process. No rule can
    /// guarantee this: a process can only recognise a database that is older than the decisions
    /// that it last copied.
    pub old_backups: bool,
    /// The ledger is synced before a process sends a commit document.
    pub ledger_sync: bool,
    /// The agent's journal is synced before the agent shows anything to others.
    pub journal_sync: bool,
}

impl Environment {
    /// The guarantees that hold for the real programs.
    pub const SOUND: Environment = Environment {
        row_lock: true,
        ledger: true,
        has_database_identity: true,
        has_sweep_counters: true,
        has_complete_ledgers: true,
        has_entry_counts: true,
        forgets_stopped_only: true,
        old_backups: true,
        ledger_sync: true,
        journal_sync: true,
    };
}

/// How often each fault may happen on one path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FaultCounts {
    /// Maximum number of restores of the database from its backup. There is at most one backup,
    /// taken in one of the phases that `backup_in` allows.
    pub restores: u8,
    /// Maximum number of lost node directories. Each loss restarts the host.
    pub lost_directories: u8,
    /// Maximum number of hosts that are re-imaged: nothing on such a host survives.
    pub reimages: u8,
    /// Maximum number of hosts that die for good.
    pub deaths: u8,
    /// Maximum number of agents that are killed at any point and restart. If journals aren't
    /// synced, each also loses power.
    pub kills: u8,
    /// Maximum number of times that a host's disk is copied to a fresh host.
    pub clones: u8,
    /// Maximum number of leases that lapse although the agent runs, because it was paused. The
    /// lapse of a dead agent's lease isn't counted here.
    pub pauses: u8,
    /// Maximum number of frozen lists of members that time out.
    pub timeouts: u8,
    /// Maximum number of times that an operator abandons the cluster or its deadline passes.
    pub cluster_ends: u8,
    /// Maximum number of times that an owner retires the committed cluster. Taking a retirement
    /// back isn't a fault.
    pub retirements: u8,
    /// Maximum number of times that an owner reopens the expired cluster.
    pub reopenings: u8,
    /// Maximum number of times that an owner accepts a changed database before the ledgers agree.
    pub accepts: u8,
    /// Maximum number of transactions that read the cluster's row without a lock and write it
    /// later. Needs `row_lock` switched off.
    pub overlaps: u8,
    /// Maximum number of process crashes. If the ledger isn't synced, its last entry is lost.
    pub crashes: u8,
    /// Maximum number of times that a process's ledger is replaced by an older copy.
    pub ledger_rollbacks: u8,
    /// Maximum number of processes that are lost for good, each with its ledger. The other process
    /// has copied all decisions before.
    pub losses: u8,
    /// Maximum number of times that an owner declares a process gone, so that nobody waits for its
    /// ledger.
    pub forgets: u8,
    /// Maximum number of links that go down for good. A link joins two hosts and goes down in both
    /// directions.
    pub links: u8,
    /// Maximum number of times that the service's clock is ahead by `CLOCK_JUMP` for a while and
    /// then right again.
    pub clock_jumps: u8,
}

impl FaultCounts {
    /// Returns these limits, each lowered to at most `together`, the limit on faults of all kinds
    /// together.
    #[must_use]
    pub fn at_most(self, together: u8) -> FaultCounts {
        FaultCounts {
            restores: self.restores.min(together),
            lost_directories: self.lost_directories.min(together),
            reimages: self.reimages.min(together),
            deaths: self.deaths.min(together),
            kills: self.kills.min(together),
            clones: self.clones.min(together),
            pauses: self.pauses.min(together),
            timeouts: self.timeouts.min(together),
            cluster_ends: self.cluster_ends.min(together),
            retirements: self.retirements.min(together),
            reopenings: self.reopenings.min(together),
            accepts: self.accepts.min(together),
            overlaps: self.overlaps.min(together),
            crashes: self.crashes.min(together),
            ledger_rollbacks: self.ledger_rollbacks.min(together),
            losses: self.losses.min(together),
            forgets: self.forgets.min(together),
            links: self.links.min(together),
            clock_jumps: self.clock_jumps.min(together),
        }
    }
}

impl ExplorationConfig {
    /// Returns a small sound configuration without faults, with `seats` seats and `hosts` hosts.
    #[must_use]
    pub fn sound(name: &'static str, seats: u8, hosts: usize) -> ExplorationConfig {
        ExplorationConfig {
            name,
            seats,
            hosts,
            epochs: 3,
            rules: Rules::ALL,
            environment: Environment::SOUND,
            faults: FaultCounts::default(),
            unreachable: 0,
            expects_ledger: true,
            majorities_only: false,
            service_lies: false,
            false_lists: Vec::new(),
            has_late_messages: false,
            quiet_lapses: false,
            lost_and_found: false,
            backup_in: [true; 3],
            restore_methods: &[RestoreMethod::Dump],
            reports: false,
            fault_free_interval: 1,
            max_total_faults: u8::MAX,
            reduced: true,
        }
    }

    /// Returns the full bounds: 3 seats, 5 hosts, 3 epochs, 2 processes.
    ///
    /// Each of these faults may happen once:
    ///
    /// - a restore, an accepted database, a ledger that is replaced by an older copy,
    /// - a lost directory, a re-imaged host, a dead host, a killed agent,
    /// - an end of the cluster, a link that goes down, a clock that is ahead.
    ///
    /// Pauses and time-outs are not limited, and messages may be late.
    #[must_use]
    pub fn full() -> ExplorationConfig {
        ExplorationConfig {
            faults: FaultCounts {
                restores: 1,
                lost_directories: 1,
                reimages: 1,
                deaths: 1,
                kills: 1,
                pauses: u8::MAX,
                timeouts: u8::MAX,
                cluster_ends: 1,
                accepts: 1,
                ledger_rollbacks: 1,
                links: 1,
                clock_jumps: 1,
                ..FaultCounts::default()
            },
            has_late_messages: true,
            restore_methods: &[RestoreMethod::Dump, RestoreMethod::InPlace],
            fault_free_interval: 4096,
            ..ExplorationConfig::sound("full", 3, 5)
        }
    }
}
