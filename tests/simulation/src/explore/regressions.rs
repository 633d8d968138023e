//! Known ways to end with two clusters or none. Each comes with the rule, or the guarantee of the
//! environment, that prevents it. Its configuration is small enough to be explored completely in
//! seconds.
//!
//! Each case is explored twice. With its rule off, the disaster must be found. With it on, the same
//! configuration must be explored completely without a violation. So a rule without effect fails
//! the test, and so does a search that finds nothing.

use formation_explored::{AgentKey, Hash, Rule, Rules};

use crate::explore::actions::SystemAction;
use crate::explore::apply::apply;
use crate::explore::config::{Environment, ExplorationConfig, FaultCounts};
use crate::explore::identities::{key, list_of};
use crate::explore::processes::RestoreMethod;
use crate::explore::properties::Property;
use crate::explore::search::{ExplorationReport, SearchLimits, explore};
use crate::explore::state::SystemState;

/// Rule or guarantee that is switched off.
#[derive(Clone, Copy, Debug)]
pub enum Safeguard {
    /// A rule of the two state machines.
    Rule(Rule),
    /// Locking of the cluster's row by each transaction.
    RowLock,
    /// The ledger of each process.
    Ledger,
    /// Syncing of the ledger before a commit document is sent.
    LedgerSync,
    /// Syncing of the agent's journal before anything is shown.
    JournalSync,
    /// Identity of the database, which no dump carries.
    DatabaseIdentity,
    /// Number of a process's sweeps, counted in its row of the database and beside its ledger.
    SweepCounters,
    /// Completeness of the ledgers.
    CompleteLedgers,
    /// Number of ledger entries, recorded in a process's row.
    EntryCounts,
    /// The rule that an owner can't declare a running process gone.
    ForgetStoppedOnly,
    /// Guarantee that a backup, if restored in place, is older than the last sweep of each process.
    OldBackups,
}

/// One known disaster and its configuration.
#[derive(Clone, Debug)]
pub struct RegressionCase {
    /// `R1` to `R19` as in the protocol's list of regressions. Other names are for rules and
    /// guarantees that no regression in that list tests without others.
    pub name: &'static str,
    /// Description of the disaster.
    pub description: &'static str,
    /// Rule or guarantee that prevents the disaster.
    pub safeguard: Safeguard,
    /// Properties of which the disaster violates at least one.
    pub violates: &'static [Property],
    /// Configuration in which the disaster can happen once the safeguard is switched off.
    pub config: ExplorationConfig,
    /// Actions applied before the exploration starts.
    pub before: Vec<SystemAction>,
}

impl RegressionCase {
    /// Explores the configuration with the case's safeguard on.
    #[must_use]
    pub fn with_rule(&self) -> ExplorationReport {
        self.run(&self.config)
    }

    /// Explores the configuration with the case's safeguard switched off.
    #[must_use]
    pub fn without_rule(&self) -> ExplorationReport {
        let mut config = self.config.clone();
        match self.safeguard {
            Safeguard::Rule(rule) => config.rules = config.rules.without(rule),
            Safeguard::RowLock => {
                config.environment.row_lock = false;
                config.faults.overlaps = 1;
            }
            Safeguard::Ledger => config.environment.ledger = false,
            Safeguard::LedgerSync => config.environment.ledger_sync = false,
            Safeguard::JournalSync => config.environment.journal_sync = false,
            Safeguard::DatabaseIdentity => config.environment.has_database_identity = false,
            Safeguard::SweepCounters => config.environment.has_sweep_counters = false,
            Safeguard::CompleteLedgers => config.environment.has_complete_ledgers = false,
            Safeguard::EntryCounts => config.environment.has_entry_counts = false,
            Safeguard::ForgetStoppedOnly => config.environment.forgets_stopped_only = false,
            Safeguard::OldBackups => config.environment.old_backups = false,
        }
        self.run(&config)
    }

    /// Returns the case with reductions on or off.
    #[must_use]
    pub fn reduced(mut self, reduced: bool) -> RegressionCase {
        self.config.reduced = reduced;
        self
    }

    fn run(&self, config: &ExplorationConfig) -> ExplorationReport {
        let mut system = SystemState::new(config);
        for action in &self.before {
            system =
                apply(&system, config, action).expect("what has happened before is no disaster");
        }
        explore(
            config,
            system,
            &SearchLimits { states: 3_000_000, ..SearchLimits::default() },
            |_| {},
        )
    }
}

fn case(
    name: &'static str,
    description: &'static str,
    safeguard: Safeguard,
    config: ExplorationConfig,
) -> RegressionCase {
    RegressionCase {
        name,
        description,
        safeguard,
        violates: &[Property::WayOut],
        config,
        before: Vec::new(),
    }
}

const TWO_CLUSTERS: &[Property] =
    &[Property::OneDocument, Property::CommittedListOnly, Property::NoTwoMajorities];

/// Returns every case, beginning with R1.
#[must_use]
pub fn regression_cases() -> Vec<RegressionCase> {
    let mut cases = two_clusters();
    cases.extend(cases_beyond_the_database());
    cases.extend(rollback_cases());
    cases.extend(first_start_cases());
    cases.extend(seat_and_exit_cases());
    cases.extend(link_and_clock_cases());
    cases.extend(other_rule_cases());
    cases.extend(end_cases());
    cases
}

/// Returns the case with this name.
///
/// # Panics
/// Panics if no case has this name.
#[must_use]
pub fn find_case(name: &str) -> RegressionCase {
    regression_cases().into_iter().find(|case| case.name == name).expect("a case with this name")
}

/// Returns the actions by which `hosts` join and all sign their list of members of epoch 1.
fn signed_by_all(hosts: &[usize]) -> Vec<SystemAction> {
    let mut actions: Vec<SystemAction> =
        hosts.iter().map(|&host| SystemAction::Join(host)).collect();
    actions.extend(hosts.iter().map(|&host| SystemAction::ExamineList(host, first_list(hosts))));
    actions
}

fn first_list(hosts: &[usize]) -> Hash {
    let keys: Vec<AgentKey> = hosts.iter().map(|&host| key(host, 0)).collect();
    list_of(1, &keys)
}

fn committed_by_all(hosts: &[usize]) -> Vec<SystemAction> {
    let mut actions = signed_by_all(hosts);
    let list = first_list(hosts);
    actions.extend(hosts.iter().map(|&host| SystemAction::DeliverAck(key(host, 0), list)));
    actions
}

/// Returns these actions: A and B get the commit document, and the backup is restored. Then the
/// leases of both lapse in the restored database.
fn committed_and_restored() -> Vec<SystemAction> {
    let list = first_list(&[0, 1, 2]);
    vec![
        SystemAction::Publish(0),
        SystemAction::SeeDocument(0, list),
        SystemAction::SeeDocument(1, list),
        SystemAction::Restore(RestoreMethod::Dump),
        SystemAction::Lapse(key(0, 0)),
        SystemAction::Lapse(key(1, 0)),
    ]
}

/// Returns cases R1 to R3, and the case in which an agent waits for one release too few. In each,
/// two lists share hosts.
fn two_clusters() -> Vec<RegressionCase> {
    let no_ledger = Environment { ledger: false, ..Environment::SOUND };
    let mut cases = vec![RegressionCase {
        violates: &[Property::OneDocument, Property::WayOut, Property::CommittedListOnly],
        ..case(
            "R1",
            "two processes decide, each from a row that the other has changed since",
            Safeguard::RowLock,
            ExplorationConfig {
                epochs: 2,
                faults: FaultCounts { pauses: 1, ..FaultCounts::default() },
                fault_free_interval: 64,
                ..ExplorationConfig::sound("R1", 2, 2)
            },
        )
    }];
    let mut backup_in_open: Vec<SystemAction> = vec![
        SystemAction::Join(0),
        SystemAction::Join(1),
        SystemAction::Backup,
        SystemAction::Join(2),
    ];
    backup_in_open.extend(committed_by_all(&[0, 1, 2]).into_iter().skip(3));
    backup_in_open.extend(committed_and_restored());
    let restored = ExplorationConfig {
        environment: no_ledger,
        expects_ledger: false,
        majorities_only: true,
        epochs: 2,
        faults: FaultCounts { restores: 1, ..FaultCounts::default() },
        fault_free_interval: 0,
        ..ExplorationConfig::sound("R2", 3, 5)
    };
    cases.push(RegressionCase {
        violates: TWO_CLUSTERS,
        before: backup_in_open,
        ..case(
            "R2",
            "backup in open; {A,B,C} commits, A and B start; restore; {C,D,E} forms",
            Safeguard::Rule(Rule::ReleasesFirst),
            restored.clone(),
        )
    });
    let mut backup_in_preparing = signed_by_all(&[0, 1, 2]);
    backup_in_preparing.insert(3, SystemAction::Backup);
    backup_in_preparing
        .extend((0..3).map(|host| SystemAction::DeliverAck(key(host, 0), first_list(&[0, 1, 2]))));
    backup_in_preparing.extend(committed_and_restored());
    cases.push(one_release_too_few(restored.clone()));
    cases.push(RegressionCase {
        violates: TWO_CLUSTERS,
        before: backup_in_preparing,
        ..case(
            "R3",
            "backup in preparing; {A,B,C} commits; restore; C, which signed e1, signs e2 with D, E",
            Safeguard::Rule(Rule::ReleasesFirst),
            ExplorationConfig { name: "R3", ..restored },
        )
    });
    cases
}

fn one_release_too_few(restored: ExplorationConfig) -> RegressionCase {
    let mut backup_of_nobody = vec![SystemAction::Backup];
    backup_of_nobody.extend(committed_by_all(&[0, 1, 2]));
    backup_of_nobody.extend(committed_and_restored().into_iter().take(4));
    RegressionCase {
        violates: TWO_CLUSTERS,
        before: backup_of_nobody,
        ..case(
            "one release too few",
            "backup before anybody came; {A,B,C} commits, A and B start; restore; A is re-imaged, and \
             {A2,C,D} forms, for C counts its own release alone",
            Safeguard::Rule(Rule::EnoughReleases),
            ExplorationConfig {
                name: "one release too few",
                hosts: 4,
                faults: FaultCounts { restores: 1, reimages: 1, ..FaultCounts::default() },
                ..restored
            },
        )
    }
}

/// Returns cases R4 to R6. In each, only a ledger or the agents can prevent a second list of
/// members.
fn cases_beyond_the_database() -> Vec<RegressionCase> {
    let mut cases = Vec::new();
    let mut disjoint = vec![SystemAction::Backup];
    disjoint.extend(committed_by_all(&[0, 1, 2]));
    disjoint.extend([SystemAction::Publish(0), SystemAction::Restore(RestoreMethod::Dump)]);
    disjoint.extend((0..3).map(|host| SystemAction::SeeDocument(host, first_list(&[0, 1, 2]))));
    cases.push(RegressionCase {
        violates: TWO_CLUSTERS,
        before: disjoint,
        ..case(
            "R4",
            "a list commits and starts; restore; a second list, disjoint, forms",
            Safeguard::Ledger,
            ExplorationConfig {
                epochs: 1,
                faults: FaultCounts { restores: 1, ..FaultCounts::default() },
                fault_free_interval: 0,
                ..ExplorationConfig::sound("R4", 3, 6)
            },
        )
    });
    cases.push(RegressionCase {
        violates: TWO_CLUSTERS,
        ..case(
            "R5",
            "size 1: it commits and starts; restore; another host commits and starts",
            Safeguard::Ledger,
            ExplorationConfig {
                epochs: 2,
                faults: FaultCounts { restores: 1, pauses: 1, ..FaultCounts::default() },
                ..ExplorationConfig::sound("R5", 1, 2)
            },
        )
    });
    cases.push(RegressionCase {
        violates: &[Property::NoTwoMajorities],
        before: (0..5).map(SystemAction::Join).collect(),
        ..case(
            "R6",
            "a lying service has {A,B,C} and {C,D,E} both fully signed",
            Safeguard::Rule(Rule::ReleasesFirst),
            lying_service_config("R6", 2),
        )
    });
    cases
}

/// Returns R16, R17 and similar cases. In each, only one of two processes has sent the commit
/// document.
fn rollback_cases() -> Vec<RegressionCase> {
    // Leave out the fault-free run. In most states of these cases, the process with the ledger
    // can't go on. So the run would report a violation of `Property::WayOut` before the violation
    // that the case is about.
    let one_seat = |name, faults| ExplorationConfig {
        epochs: 2,
        faults,
        fault_free_interval: 0,
        ..ExplorationConfig::sound(name, 1, 2)
    };
    let restored = FaultCounts { restores: 1, ..FaultCounts::default() };
    let with_ledger = FaultCounts { ledger_rollbacks: 1, ..restored };
    let two_clusters = |name, description, safeguard, config| RegressionCase {
        violates: TWO_CLUSTERS,
        ..case(name, description, safeguard, config)
    };
    vec![
        two_clusters(
            "R16",
            "the process that delivered is down, a dump is loaded into the same server, and the other \
             process forms a second cluster",
            Safeguard::DatabaseIdentity,
            one_seat("R16", restored),
        ),
        two_clusters(
            "R16 in place",
            "the rows are set back under the processes, and one that has let out nothing goes on",
            Safeguard::SweepCounters,
            ExplorationConfig {
                restore_methods: &[RestoreMethod::InPlace],
                ..one_seat("R16 in place", restored)
            },
        ),
        two_clusters(
            "forgotten while it runs",
            "a dump is loaded, and an owner forgets the process that delivered before it has looked",
            Safeguard::ForgetStoppedOnly,
            one_seat("forgotten", FaultCounts { losses: 1, forgets: 1, ..restored }),
        ),
        two_clusters(
            "rows younger than a sweep",
            "the same, before that one knows of the commit, and of a backup that it has not swept \
             since: nothing that it knows is different",
            Safeguard::OldBackups,
            ExplorationConfig {
                restore_methods: &[RestoreMethod::InPlace],
                ..one_seat("younger rows", restored)
            },
        ),
        two_clusters(
            "R17",
            "a ledger is put back to one entry less, then the database",
            Safeguard::EntryCounts,
            one_seat("R17", with_ledger),
        ),
        two_clusters(
            "R17 with its position",
            "a ledger and the position beside it are put back, then the database",
            Safeguard::CompleteLedgers,
            one_seat("R17 with its position", with_ledger),
        ),
    ]
}

fn first_start_cases() -> Vec<RegressionCase> {
    let killed = |name| ExplorationConfig {
        epochs: 1,
        faults: FaultCounts { kills: 2, lost_directories: 1, ..FaultCounts::default() },
        ..ExplorationConfig::sound(name, 1, 1)
    };
    vec![
        case(
            "R8",
            "killed between a `ran` journalled before the exec, and the exec",
            Safeguard::Rule(Rule::RanAfterLog),
            killed("R8"),
        ),
        RegressionCase {
            violates: &[Property::OneStartFromEmpty],
            ..case(
                "R9",
                "killed between the exec and what is journalled after it; then the disk is lost",
                Safeguard::Rule(Rule::LaunchingBeforeExec),
                killed("R9"),
            )
        },
        case(
            "R10",
            "a fresh file system has lost+found in it",
            Safeguard::Rule(Rule::LostAndFoundIsBlank),
            ExplorationConfig { lost_and_found: true, ..ExplorationConfig::sound("R10", 1, 1) },
        ),
        RegressionCase {
            violates: &[Property::OneStartFromEmpty],
            ..case(
                "R13",
                "a disk is copied after its agent holds the document; the copy starts",
                Safeguard::Rule(Rule::SameMachine),
                ExplorationConfig {
                    epochs: 1,
                    faults: FaultCounts { clones: 1, kills: 1, ..FaultCounts::default() },
                    fault_free_interval: 1,
                    ..ExplorationConfig::sound("R13", 1, 2)
                },
            )
        },
    ]
}

fn seat_and_exit_cases() -> Vec<RegressionCase> {
    vec![
        case(
            "R7",
            "two of three die; the last ack is stored after their leases: committed, and no exit",
            Safeguard::Rule(Rule::LapseFirst),
            ExplorationConfig {
                epochs: 2,
                quiet_lapses: true,
                faults: FaultCounts { deaths: 2, ..FaultCounts::default() },
                fault_free_interval: 0,
                ..ExplorationConfig::sound("R7", 3, 3)
            },
        ),
        case(
            "R7 exit",
            "two of three die after the commit: nothing can form, and abandon is refused",
            Safeguard::Rule(Rule::RetireIsAnExit),
            ExplorationConfig {
                epochs: 1,
                faults: FaultCounts { deaths: 2, ..FaultCounts::default() },
                ..ExplorationConfig::sound("R7 exit", 3, 3)
            },
        ),
        case(
            "R11",
            "a host that nobody can reach keeps its seat while a standby waits",
            Safeguard::Rule(Rule::CountedGoBehind),
            ExplorationConfig {
                unreachable: 1,
                epochs: 1,
                ..ExplorationConfig::sound("R11", 3, 4)
            },
        ),
        case(
            "R12",
            "a host is re-imaged, and its token is full",
            Safeguard::Rule(Rule::UseIsASeat),
            ExplorationConfig {
                epochs: 1,
                faults: FaultCounts { reimages: 1, ..FaultCounts::default() },
                ..ExplorationConfig::sound("R12", 2, 2)
            },
        ),
        RegressionCase {
            before: signed_e2_and_restored_to_e1(),
            ..case(
                "R14",
                "restore to e1; the agents have signed e2; the next freeze must be e3",
                Safeguard::Rule(Rule::FreezeAboveFloor),
                ExplorationConfig {
                    faults: FaultCounts { restores: 1, timeouts: 1, ..FaultCounts::default() },
                    ..ExplorationConfig::sound("R14", 2, 2)
                },
            )
        },
        case(
            "R15",
            "the commit's answer is lost, and the agent asks again",
            Safeguard::Rule(Rule::AckAgain),
            ExplorationConfig { epochs: 1, ..ExplorationConfig::sound("R15", 2, 2) },
        ),
    ]
}

/// Returns cases R18 and R19: a link that is down, and a clock that is ahead.
fn link_and_clock_cases() -> Vec<RegressionCase> {
    vec![
        RegressionCase {
            before: vec![SystemAction::Cut(0, 1)],
            ..case(
                "R18",
                "five hosts, three seats, one link down: the same list for ever",
                Safeguard::Rule(Rule::PairsAreCounted),
                ExplorationConfig {
                    epochs: 1,
                    fault_free_interval: 4,
                    ..ExplorationConfig::sound("R18", 3, 5)
                },
            )
        },
        case(
            "R19",
            "the clock is half an hour ahead for a moment: a host that refused then is held back for \
             half an hour",
            Safeguard::Rule(Rule::ClampStoredTimes),
            ExplorationConfig {
                epochs: 2,
                faults: FaultCounts { clock_jumps: 1, ..FaultCounts::default() },
                ..ExplorationConfig::sound("R19", 1, 1)
            },
        ),
        case(
            "R19 frozen",
            "the clock is half an hour ahead, a list is frozen, the clock is set right, a member dies",
            Safeguard::Rule(Rule::ClampStoredTimes),
            ExplorationConfig {
                epochs: 1,
                faults: FaultCounts { clock_jumps: 1, deaths: 1, ..FaultCounts::default() },
                ..ExplorationConfig::sound("R19 frozen", 2, 2)
            },
        ),
    ]
}

/// Returns actions that take a backup at epoch 1, let A and B sign epoch 2, and then restore.
fn signed_e2_and_restored_to_e1() -> Vec<SystemAction> {
    let second = list_of(2, &[key(0, 0), key(1, 0)]);
    vec![
        SystemAction::Join(0),
        SystemAction::Join(1),
        SystemAction::Backup,
        SystemAction::TimeOut,
        SystemAction::EndBackoff(key(0, 0)),
        SystemAction::EndBackoff(key(1, 0)),
        SystemAction::ExamineList(0, second),
        SystemAction::ExamineList(1, second),
        SystemAction::Restore(RestoreMethod::Dump),
    ]
}

/// Returns actions by which five hosts join and C signs {A,B,C} at epoch 1. A and B then release
/// that epoch without having signed anything.
fn released_unsigned() -> Vec<SystemAction> {
    let mut actions: Vec<SystemAction> = (0..5).map(SystemAction::Join).collect();
    actions.extend([
        SystemAction::ExamineList(2, first_list(&[0, 1, 2])),
        SystemAction::SeeEpoch(0, 2),
        SystemAction::SeeEpoch(1, 2),
    ]);
    actions
}

/// Returns a configuration whose service shows {A,B,C} at epoch 1 and {C,D,E} at `second`, to any
/// host at any time.
fn lying_service_config(name: &'static str, second: u64) -> ExplorationConfig {
    ExplorationConfig {
        service_lies: true,
        false_lists: vec![(1, vec![0, 1, 2]), (second, vec![2, 3, 4])],
        expects_ledger: false,
        epochs: 2,
        fault_free_interval: 0,
        ..ExplorationConfig::sound(name, 3, 5)
    }
}

/// Returns the cases of rules and guarantees that R1 to R19 leave out.
fn other_rule_cases() -> Vec<RegressionCase> {
    let all = || (0..5).map(SystemAction::Join).collect();
    let two_majorities = |name, description, safeguard, config| RegressionCase {
        violates: &[Property::NoTwoMajorities],
        before: all(),
        ..case(name, description, safeguard, config)
    };
    vec![
        two_majorities(
            "hold above released",
            "hosts release a list, another forms on that word, and they hold its document after all",
            Safeguard::Rule(Rule::HoldAboveReleased),
            lying_service_config("hold above released", 2),
        ),
        RegressionCase {
            before: released_unsigned(),
            ..two_majorities(
                "one list per epoch",
                "hosts release an epoch, another list forms on that word, and they sign one of it",
                Safeguard::Rule(Rule::OneListPerEpoch),
                ExplorationConfig {
                    // `HoldAboveReleased` is off, too. With this rule on, the hosts would not hold
                    // the commit document, so the missing rule `OneListPerEpoch` would do no harm.
                    rules: Rules::ALL.without(Rule::HoldAboveReleased),
                    ..lying_service_config("one list per epoch", 2)
                },
            )
        },
        two_majorities(
            "held releases nothing",
            "hosts that hold a document release it, and so let another list form",
            Safeguard::Rule(Rule::HeldReleasesNothing),
            lying_service_config("held releases nothing", 2),
        ),
        RegressionCase {
            before: signed_by_all(&[0, 1, 2])
                .into_iter()
                .chain([SystemAction::Kill(2), SystemAction::Join(3), SystemAction::Join(4)])
                .collect(),
            ..two_majorities(
                "journal sync",
                "power is cut, a journal forgets the list that its agent signed; it signs another",
                Safeguard::JournalSync,
                ExplorationConfig {
                    faults: FaultCounts { kills: 1, ..FaultCounts::default() },
                    ..lying_service_config("journal sync", 2)
                },
            )
        },
        RegressionCase {
            violates: TWO_CLUSTERS,
            ..case(
                "ledger sync",
                "a document leaves, its process crashes, the ledger has forgotten it; restore",
                Safeguard::LedgerSync,
                ExplorationConfig {
                    epochs: 2,
                    faults: FaultCounts {
                        restores: 1,
                        pauses: 1,
                        crashes: 1,
                        ..FaultCounts::default()
                    },
                    ..ExplorationConfig::sound("ledger sync", 1, 2)
                },
            )
        },
    ]
}

/// Returns the cases about when a cluster may be ended.
fn end_cases() -> Vec<RegressionCase> {
    vec![
        RegressionCase {
            violates: &[Property::NothingAfterAbandon],
            ..case(
                "abandon before commit",
                "an operator abandons a committed cluster, and its nodes start",
                Safeguard::Rule(Rule::AbandonBeforeCommit),
                ExplorationConfig {
                    epochs: 1,
                    // Even without the case's rule, the ledger of the process that sent the commit
                    // document would prevent the disaster. So ledgers are off, too.
                    environment: Environment { ledger: false, ..Environment::SOUND },
                    faults: FaultCounts { cluster_ends: 1, ..FaultCounts::default() },
                    ..ExplorationConfig::sound("abandon before commit", 1, 1)
                },
            )
        },
        RegressionCase {
            violates: &[Property::NothingAfterAbandon],
            ..case(
                "end when settled",
                "a restored database forgets a commit, and is abandoned before the ledgers speak",
                Safeguard::Rule(Rule::EndWhenSettled),
                ExplorationConfig {
                    epochs: 1,
                    faults: FaultCounts { restores: 1, cluster_ends: 1, ..FaultCounts::default() },
                    ..ExplorationConfig::sound("end when settled", 1, 1)
                },
            )
        },
    ]
}
