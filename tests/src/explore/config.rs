//! What is explored: bounds, faults and switches.

use formation_explored::Rules;

use crate::explore::processes::Setback;

/// How far an exploration goes, and what may go wrong in it.
#[derive(Clone, Debug)]
pub struct Config {
    /// A name for reports.
    pub name: &'static str,
    /// The cluster's size: 1 to 3.
    pub seats: u8,
    /// How many hosts there are.
    pub hosts: usize,
    /// States beyond this epoch are counted and not followed.
    pub epochs: u64,
    /// Which rules the machines follow.
    pub rules: Rules,
    /// What the environment guarantees.
    pub environment: Environment,
    /// How often each fault may happen.
    pub faults: Faults,
    /// Hosts that nobody can reach, as a bit mask.
    pub unreachable: u8,
    /// Two documents are wrong even if their lists share no host, as only the ledger can prevent.
    pub expects_ledger: bool,
    /// Property 3 alone is asked: what can't come to a second majority any more isn't followed.
    pub majorities_only: bool,
    /// There is no honest service: any list of known records may be shown at any time.
    pub liar: bool,
    /// The only lists that a liar shows, as hosts with the epoch; all if empty.
    pub lies: Vec<(u64, Vec<usize>)>,
    /// Messages of dead and re-made hosts may still arrive.
    pub late: bool,
    /// A lease may have lapsed before anybody looks, so that an event comes first.
    pub quiet_lapses: bool,
    /// Node directories are fresh file systems, with `lost+found` in them.
    pub lost_and_found: bool,
    /// Backups are taken in these phases only: open, preparing, committed.
    pub backup_in: [bool; 3],
    /// How they are put back.
    pub setbacks: &'static [Setback],
    /// Members report their Raft cluster, one by one. It decides nothing, so that large
    /// explorations do without.
    pub reports: bool,
    /// From one in this many states the fault-free road is walked; 0 for none.
    pub roads: u64,
    /// How many faults of all kinds may happen on one path, within what `faults` allows of each;
    /// 255 for no bound.
    pub together: u8,
    /// States and steps that no property can tell apart are taken for one (`reduce`). Off, to
    /// compare.
    pub reduced: bool,
}

/// What holds outside the two machines. Each can be switched off to show that it is needed.
#[derive(Clone, Copy, Debug)]
pub struct Environment {
    /// A transaction locks the cluster's row first.
    pub row_lock: bool,
    /// Each process keeps a ledger, and compares its database with it.
    pub ledger: bool,
    /// Which database it is, no dump carries, and each process looks.
    pub site: bool,
    /// Each process counts its sweeps, in its row and beside its ledger.
    pub beats: bool,
    /// Ledgers are complete: each process copies what others have decided, and decides nothing
    /// before it has.
    pub complete: bool,
    /// A process's row says how much its ledger held.
    pub entries: bool,
    /// An owner can't forget a process that runs.
    pub gone_only: bool,
    /// Rows that are set back under the processes are of a backup that is older than a sweep of each
    /// of them. No rule sees to that, and none could: what a process knows is no younger than what
    /// it copied last.
    pub old_backups: bool,
    /// The ledger is synced before a document leaves.
    pub ledger_sync: bool,
    /// The agent's journal is synced before anything is shown.
    pub journal_sync: bool,
}

impl Environment {
    /// As the programs have it.
    pub const SOUND: Environment = Environment {
        row_lock: true,
        ledger: true,
        site: true,
        beats: true,
        complete: true,
        entries: true,
        gone_only: true,
        old_backups: true,
        ledger_sync: true,
        journal_sync: true,
    };
}

/// How often each thing may happen on one path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Faults {
    /// The database is put back to its backup (there is one backup, taken at any time).
    pub restores: u8,
    /// A node's directory is lost, with a restart of its host.
    pub lost_directories: u8,
    /// A host is made anew: nothing on it survives.
    pub remakes: u8,
    /// A host dies for good.
    pub deaths: u8,
    /// An agent is killed at any point and restarts; without synced journals, with power cut.
    pub kills: u8,
    /// A host's disk is copied to a fresh host.
    pub clones: u8,
    /// A lease lapses though its agent lives (a pause); a dead agent's lapses for nothing.
    pub pauses: u8,
    /// The time of a frozen list is over.
    pub timeouts: u8,
    /// An operator gives the cluster up, or its deadline passes.
    pub ends: u8,
    /// An owner retires the committed cluster; taking that back is no fault.
    pub retirements: u8,
    /// An owner accepts a changed database before the ledgers agree.
    pub accepts: u8,
    /// Without row lock: a transaction reads, and writes later.
    pub overlaps: u8,
    /// A process crashes; without a synced ledger its last entry is lost.
    pub crashes: u8,
    /// A process's ledger is put back to an older copy.
    pub ledgers: u8,
    /// A process is lost for good, and its ledger with it, once the other has copied what it held.
    pub losses: u8,
    /// An owner says that a process won't come back: its ledger isn't waited for.
    pub forgets: u8,
    /// A link between two hosts goes down, both ways, for good.
    pub links: u8,
    /// The service's clock is `AHEAD` for a while, then right again.
    pub clocks: u8,
}

impl Faults {
    /// No more of any kind than `together`.
    #[must_use]
    pub fn at_most(self, together: u8) -> Faults {
        Faults {
            restores: self.restores.min(together),
            lost_directories: self.lost_directories.min(together),
            remakes: self.remakes.min(together),
            deaths: self.deaths.min(together),
            kills: self.kills.min(together),
            clones: self.clones.min(together),
            pauses: self.pauses.min(together),
            timeouts: self.timeouts.min(together),
            ends: self.ends.min(together),
            retirements: self.retirements.min(together),
            accepts: self.accepts.min(together),
            overlaps: self.overlaps.min(together),
            crashes: self.crashes.min(together),
            ledgers: self.ledgers.min(together),
            losses: self.losses.min(together),
            forgets: self.forgets.min(together),
            links: self.links.min(together),
            clocks: self.clocks.min(together),
        }
    }
}

impl Config {
    /// A small sound configuration: `seats` seats, `hosts` hosts, no faults yet.
    #[must_use]
    pub fn sound(name: &'static str, seats: u8, hosts: usize) -> Config {
        Config {
            name,
            seats,
            hosts,
            epochs: 3,
            rules: Rules::ALL,
            environment: Environment::SOUND,
            faults: Faults::default(),
            unreachable: 0,
            expects_ledger: true,
            majorities_only: false,
            liar: false,
            lies: Vec::new(),
            late: false,
            quiet_lapses: false,
            lost_and_found: false,
            backup_in: [true; 3],
            setbacks: &[Setback::Dump],
            reports: false,
            roads: 1,
            together: u8::MAX,
            reduced: true,
        }
    }

    /// The full bounds: 3 seats, 5 hosts, 3 epochs, 2 processes, 1 restore, 1 wipe of either kind,
    /// 1 death, 1 link down, the clock ahead once, late messages, pauses at any point.
    #[must_use]
    pub fn full() -> Config {
        Config {
            faults: Faults {
                restores: 1,
                lost_directories: 1,
                remakes: 1,
                deaths: 1,
                kills: 1,
                pauses: u8::MAX,
                timeouts: u8::MAX,
                ends: 1,
                accepts: 1,
                ledgers: 1,
                links: 1,
                clocks: 1,
                ..Faults::default()
            },
            late: true,
            setbacks: &[Setback::Dump, Setback::InPlace],
            roads: 4096,
            ..Config::sound("full", 3, 5)
        }
    }
}
