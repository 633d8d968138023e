//! Known ways to end with two clusters or none. Each comes with the rule, or the guarantee of the
//! environment, that prevents it. Its configuration is small enough to be explored completely in
//! seconds.
//!
//! Each case is explored twice. With its rule off, the disaster must be found. With it on, the same
//! configuration must be explored completely without a violation. So a rule without effect fails
//! the test, and so does a search that finds nothing.

use formation_explored::{Hash, KeyId, Rule, Rules};

use crate::explore::actions::Action;
use crate::explore::apply::apply;
use crate::explore::config::{Config, Environment, Faults};
use crate::explore::identity::{key, list_of};
use crate::explore::processes::Setback;
use crate::explore::properties::Property;
use crate::explore::search::{Limits, Report, explore};
use crate::explore::world::World;

/// Rule or guarantee that is switched off.
#[derive(Clone, Copy, Debug)]
pub enum Switch {
    /// A rule of the two state machines.
    Rule(Rule),
    /// Locking of the cluster's row by each transaction.
    RowLock,
    /// The ledger of each process.
    Ledger,
    /// Syncing of the ledger before a document is sent.
    LedgerSync,
    /// Syncing of the agent's journal before anything is shown.
    JournalSync,
    /// Identity of the database, which no dump carries.
    Site,
    /// Number of sweeps, counted in the row and beside the ledger.
    Beats,
    /// Completeness of the ledgers.
    Complete,
    /// Number of ledger entries, recorded in a process's row.
    Entries,
    /// An owner's inability to forget a process that is running.
    GoneOnly,
    /// Age of a backup that is restored in place: older than each process's last sweep.
    OldBackups,
}

/// One known disaster and its configuration.
#[derive(Clone, Debug)]
pub struct Case {
    /// `R1` to `R19`, or a name for a rule that no regression of the protocol's list isolates.
    pub name: &'static str,
    /// Description of the disaster.
    pub story: &'static str,
    /// Rule or guarantee that prevents the disaster.
    pub switch: Switch,
    /// Properties, of which the disaster violates one.
    pub violates: &'static [Property],
    /// Configuration in which it can happen, with every rule on.
    pub config: Config,
    /// Actions applied before the exploration starts.
    pub before: Vec<Action>,
}

impl Case {
    /// Explores the configuration with every rule on.
    #[must_use]
    pub fn with_rule(&self) -> Report {
        self.run(&self.config)
    }

    /// Explores the configuration with the case's rule switched off.
    #[must_use]
    pub fn without_rule(&self) -> Report {
        let mut config = self.config.clone();
        match self.switch {
            Switch::Rule(rule) => config.rules = config.rules.without(rule),
            Switch::RowLock => {
                config.environment.row_lock = false;
                config.faults.overlaps = 1;
            }
            Switch::Ledger => config.environment.ledger = false,
            Switch::LedgerSync => config.environment.ledger_sync = false,
            Switch::JournalSync => config.environment.journal_sync = false,
            Switch::Site => config.environment.site = false,
            Switch::Beats => config.environment.beats = false,
            Switch::Complete => config.environment.complete = false,
            Switch::Entries => config.environment.entries = false,
            Switch::GoneOnly => config.environment.gone_only = false,
            Switch::OldBackups => config.environment.old_backups = false,
        }
        self.run(&config)
    }

    /// Returns the case with reductions on or off.
    #[must_use]
    pub fn reduced(mut self, reduced: bool) -> Case {
        self.config.reduced = reduced;
        self
    }

    fn run(&self, config: &Config) -> Report {
        let mut world = World::new(config);
        for action in &self.before {
            world = apply(&world, config, action).expect("what has happened before is no disaster");
        }
        explore(config, world, &Limits { states: 3_000_000, ..Limits::default() }, |_| {})
    }
}

fn case(name: &'static str, story: &'static str, switch: Switch, config: Config) -> Case {
    Case { name, story, switch, violates: &[Property::AWayOut], config, before: Vec::new() }
}

const TWO_CLUSTERS: &[Property] =
    &[Property::OneDocument, Property::CommittedListOnly, Property::NoTwoMajorities];

/// Returns every case, beginning with R1.
#[must_use]
pub fn cases() -> Vec<Case> {
    let mut cases = two_clusters();
    cases.extend(beyond_the_database());
    cases.extend(set_back());
    cases.extend(first_starts());
    cases.extend(seats_and_exits());
    cases.extend(links_and_clock());
    cases.extend(other_rules());
    cases.extend(ends());
    cases
}

/// Returns the case with this name.
///
/// # Panics
/// Panics if there is none.
#[must_use]
pub fn named(name: &str) -> Case {
    cases().into_iter().find(|case| case.name == name).expect("a case with this name")
}

/// Returns the actions by which `hosts` join and all sign their list of epoch 1.
fn signed_by_all(hosts: &[usize]) -> Vec<Action> {
    let mut actions: Vec<Action> = hosts.iter().map(|&host| Action::Join(host)).collect();
    actions.extend(hosts.iter().map(|&host| Action::Consider(host, first_list(hosts))));
    actions
}

fn first_list(hosts: &[usize]) -> Hash {
    let keys: Vec<KeyId> = hosts.iter().map(|&host| key(host, 0)).collect();
    list_of(1, &keys)
}

fn committed_by_all(hosts: &[usize]) -> Vec<Action> {
    let mut actions = signed_by_all(hosts);
    let list = first_list(hosts);
    actions.extend(hosts.iter().map(|&host| Action::DeliverAck(key(host, 0), list)));
    actions
}

/// Returns the actions by which A and B get the document, the backup is restored, and their leases
/// lapse in it.
fn committed_and_restored() -> Vec<Action> {
    let list = first_list(&[0, 1, 2]);
    vec![
        Action::Publish(0),
        Action::SeeDocument(0, list),
        Action::SeeDocument(1, list),
        Action::Restore(Setback::Dump),
        Action::Lapse(key(0, 0)),
        Action::Lapse(key(1, 0)),
    ]
}

/// Returns cases R1 to R3, and the one with one release too few: two lists that share hosts.
fn two_clusters() -> Vec<Case> {
    let no_ledger = Environment { ledger: false, ..Environment::SOUND };
    let mut cases = vec![Case {
        violates: &[Property::OneDocument, Property::AWayOut, Property::CommittedListOnly],
        ..case(
            "R1",
            "two processes decide, each from a row that the other has changed since",
            Switch::RowLock,
            Config {
                epochs: 2,
                faults: Faults { pauses: 1, ..Faults::default() },
                roads: 64,
                ..Config::sound("R1", 2, 2)
            },
        )
    }];
    let mut backup_in_open: Vec<Action> =
        vec![Action::Join(0), Action::Join(1), Action::Backup, Action::Join(2)];
    backup_in_open.extend(committed_by_all(&[0, 1, 2]).into_iter().skip(3));
    backup_in_open.extend(committed_and_restored());
    let restored = Config {
        environment: no_ledger,
        expects_ledger: false,
        majorities_only: true,
        epochs: 2,
        faults: Faults { restores: 1, ..Faults::default() },
        roads: 0,
        ..Config::sound("R2", 3, 5)
    };
    cases.push(Case {
        violates: TWO_CLUSTERS,
        before: backup_in_open,
        ..case(
            "R2",
            "backup in open; {A,B,C} commits, A and B start; restore; {C,D,E} forms",
            Switch::Rule(Rule::ReleasesFirst),
            restored.clone(),
        )
    });
    let mut backup_in_preparing = signed_by_all(&[0, 1, 2]);
    backup_in_preparing.insert(3, Action::Backup);
    backup_in_preparing
        .extend((0..3).map(|host| Action::DeliverAck(key(host, 0), first_list(&[0, 1, 2]))));
    backup_in_preparing.extend(committed_and_restored());
    cases.push(one_release_too_few(restored.clone()));
    cases.push(Case {
        violates: TWO_CLUSTERS,
        before: backup_in_preparing,
        ..case(
            "R3",
            "backup in preparing; {A,B,C} commits; restore; C, which signed e1, signs e2 with D, E",
            Switch::Rule(Rule::ReleasesFirst),
            Config { name: "R3", ..restored },
        )
    });
    cases
}

fn one_release_too_few(restored: Config) -> Case {
    let mut backup_of_nobody = vec![Action::Backup];
    backup_of_nobody.extend(committed_by_all(&[0, 1, 2]));
    backup_of_nobody.extend(committed_and_restored().into_iter().take(4));
    Case {
        violates: TWO_CLUSTERS,
        before: backup_of_nobody,
        ..case(
            "one release too few",
            "backup before anybody came; {A,B,C} commits, A and B start; restore; A is made anew, and \
             {A2,C,D} forms, for C counts its own release alone",
            Switch::Rule(Rule::EnoughReleases),
            Config {
                name: "one release too few",
                hosts: 4,
                faults: Faults { restores: 1, remakes: 1, ..Faults::default() },
                ..restored
            },
        )
    }
}

/// Returns cases R4 to R6: second lists that only a ledger or the agents can prevent.
fn beyond_the_database() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut disjoint = vec![Action::Backup];
    disjoint.extend(committed_by_all(&[0, 1, 2]));
    disjoint.extend([Action::Publish(0), Action::Restore(Setback::Dump)]);
    disjoint.extend((0..3).map(|host| Action::SeeDocument(host, first_list(&[0, 1, 2]))));
    cases.push(Case {
        violates: TWO_CLUSTERS,
        before: disjoint,
        ..case(
            "R4",
            "a list commits and starts; restore; a second list, disjoint, forms",
            Switch::Ledger,
            Config {
                epochs: 1,
                faults: Faults { restores: 1, ..Faults::default() },
                roads: 0,
                ..Config::sound("R4", 3, 6)
            },
        )
    });
    cases.push(Case {
        violates: TWO_CLUSTERS,
        ..case(
            "R5",
            "size 1: it commits and starts; restore; another host commits and starts",
            Switch::Ledger,
            Config {
                epochs: 2,
                faults: Faults { restores: 1, pauses: 1, ..Faults::default() },
                ..Config::sound("R5", 1, 2)
            },
        )
    });
    cases.push(Case {
        violates: &[Property::NoTwoMajorities],
        before: (0..5).map(Action::Join).collect(),
        ..case(
            "R6",
            "a lying service has {A,B,C} and {C,D,E} both fully signed",
            Switch::Rule(Rule::ReleasesFirst),
            lying("R6", 2),
        )
    });
    cases
}

/// Returns R16, R17 and similar cases: only one of two processes has sent the document.
fn set_back() -> Vec<Case> {
    // No roads: on most of them the process with the ledger is stuck, and that violation would be
    // found first.
    let one_seat =
        |name, faults| Config { epochs: 2, faults, roads: 0, ..Config::sound(name, 1, 2) };
    let restored = Faults { restores: 1, ..Faults::default() };
    let with_ledger = Faults { ledgers: 1, ..restored };
    let two_clusters = |name, story, switch, config| Case {
        violates: TWO_CLUSTERS,
        ..case(name, story, switch, config)
    };
    vec![
        two_clusters(
            "R16",
            "the process that delivered is down, a dump is loaded into the same server, and the other \
             process forms a second cluster",
            Switch::Site,
            one_seat("R16", restored),
        ),
        two_clusters(
            "R16 in place",
            "the rows are set back under the processes, and one that has let out nothing goes on",
            Switch::Beats,
            Config { setbacks: &[Setback::InPlace], ..one_seat("R16 in place", restored) },
        ),
        two_clusters(
            "forgotten while it runs",
            "a dump is loaded, and an owner forgets the process that delivered before it has looked",
            Switch::GoneOnly,
            one_seat("forgotten", Faults { losses: 1, forgets: 1, ..restored }),
        ),
        two_clusters(
            "rows younger than a sweep",
            "the same, before that one has heard of the commit, and of a backup that it has not swept \
             since: nothing that it knows is different",
            Switch::OldBackups,
            Config { setbacks: &[Setback::InPlace], ..one_seat("younger rows", restored) },
        ),
        two_clusters(
            "R17",
            "a ledger is put back to one entry less, then the database",
            Switch::Entries,
            one_seat("R17", with_ledger),
        ),
        two_clusters(
            "R17 with its position",
            "a ledger and the position beside it are put back, then the database",
            Switch::Complete,
            one_seat("R17 with its position", with_ledger),
        ),
    ]
}

fn first_starts() -> Vec<Case> {
    let killed = |name| Config {
        epochs: 1,
        faults: Faults { kills: 2, lost_directories: 1, ..Faults::default() },
        ..Config::sound(name, 1, 1)
    };
    vec![
        case(
            "R8",
            "killed between a `ran` journalled before the exec, and the exec",
            Switch::Rule(Rule::RanAfterLog),
            killed("R8"),
        ),
        Case {
            violates: &[Property::OneStartFromEmpty],
            ..case(
                "R9",
                "killed between the exec and what is journalled after it; then the disk is lost",
                Switch::Rule(Rule::LaunchingBeforeExec),
                killed("R9"),
            )
        },
        case(
            "R10",
            "a fresh file system has lost+found in it",
            Switch::Rule(Rule::LostAndFoundIsBlank),
            Config { lost_and_found: true, ..Config::sound("R10", 1, 1) },
        ),
        Case {
            violates: &[Property::OneStartFromEmpty],
            ..case(
                "R13",
                "a disk is copied after its agent holds the document; the copy starts",
                Switch::Rule(Rule::SameMachine),
                Config {
                    epochs: 1,
                    faults: Faults { clones: 1, kills: 1, ..Faults::default() },
                    roads: 1,
                    ..Config::sound("R13", 1, 2)
                },
            )
        },
    ]
}

fn seats_and_exits() -> Vec<Case> {
    vec![
        case(
            "R7",
            "two of three die; the last ack is stored after their leases: committed, and no exit",
            Switch::Rule(Rule::LapseFirst),
            Config {
                epochs: 2,
                quiet_lapses: true,
                faults: Faults { deaths: 2, ..Faults::default() },
                roads: 0,
                ..Config::sound("R7", 3, 3)
            },
        ),
        case(
            "R7 exit",
            "two of three die after the commit: nothing can form, and abandon is refused",
            Switch::Rule(Rule::RetireIsAnExit),
            Config {
                epochs: 1,
                faults: Faults { deaths: 2, ..Faults::default() },
                ..Config::sound("R7 exit", 3, 3)
            },
        ),
        case(
            "R11",
            "a host that nobody can reach keeps its seat while a standby waits",
            Switch::Rule(Rule::CountedGoBehind),
            Config { unreachable: 1, epochs: 1, ..Config::sound("R11", 3, 4) },
        ),
        case(
            "R12",
            "a host is made anew, and its token is full",
            Switch::Rule(Rule::UseIsASeat),
            Config {
                epochs: 1,
                faults: Faults { remakes: 1, ..Faults::default() },
                ..Config::sound("R12", 2, 2)
            },
        ),
        Case {
            before: signed_e2_and_restored_to_e1(),
            ..case(
                "R14",
                "restore to e1; the agents have signed e2; the next freeze must be e3",
                Switch::Rule(Rule::FreezeAboveFloor),
                Config {
                    faults: Faults { restores: 1, timeouts: 1, ..Faults::default() },
                    ..Config::sound("R14", 2, 2)
                },
            )
        },
        case(
            "R15",
            "the commit's answer is lost, and the agent asks again",
            Switch::Rule(Rule::AckAgain),
            Config { epochs: 1, ..Config::sound("R15", 2, 2) },
        ),
    ]
}

/// Returns cases R18 and R19: a link that is down, and a clock that is ahead.
fn links_and_clock() -> Vec<Case> {
    vec![
        Case {
            before: vec![Action::Cut(0, 1)],
            ..case(
                "R18",
                "five hosts, three seats, one link down: the same list for ever",
                Switch::Rule(Rule::PairsAreCounted),
                Config { epochs: 1, roads: 4, ..Config::sound("R18", 3, 5) },
            )
        },
        case(
            "R19",
            "the clock is half an hour ahead for a moment: a host that refused then is held back for \
             half an hour",
            Switch::Rule(Rule::ClampStoredTimes),
            Config {
                epochs: 2,
                faults: Faults { clocks: 1, ..Faults::default() },
                ..Config::sound("R19", 1, 1)
            },
        ),
        case(
            "R19 frozen",
            "the clock is half an hour ahead, a list is frozen, the clock is set right, a member dies",
            Switch::Rule(Rule::ClampStoredTimes),
            Config {
                epochs: 1,
                faults: Faults { clocks: 1, deaths: 1, ..Faults::default() },
                ..Config::sound("R19 frozen", 2, 2)
            },
        ),
    ]
}

/// Returns actions that take a backup at epoch 1, let A and B sign epoch 2, and then restore.
fn signed_e2_and_restored_to_e1() -> Vec<Action> {
    let second = list_of(2, &[key(0, 0), key(1, 0)]);
    vec![
        Action::Join(0),
        Action::Join(1),
        Action::Backup,
        Action::TimeOut,
        Action::HoldOver(key(0, 0)),
        Action::HoldOver(key(1, 0)),
        Action::Consider(0, second),
        Action::Consider(1, second),
        Action::Restore(Setback::Dump),
    ]
}

/// Returns actions by which five hosts join and C signs {A,B,C} at epoch 1. A and B then release
/// that epoch without having signed anything.
fn released_unsigned() -> Vec<Action> {
    let mut actions: Vec<Action> = (0..5).map(Action::Join).collect();
    actions.extend([
        Action::Consider(2, first_list(&[0, 1, 2])),
        Action::SeeEpoch(0, 2),
        Action::SeeEpoch(1, 2),
    ]);
    actions
}

/// Returns a configuration whose service shows {A,B,C} at epoch 1 and {C,D,E} at `second`, to any
/// host at any time.
fn lying(name: &'static str, second: u64) -> Config {
    Config {
        liar: true,
        lies: vec![(1, vec![0, 1, 2]), (second, vec![2, 3, 4])],
        expects_ledger: false,
        epochs: 2,
        roads: 0,
        ..Config::sound(name, 3, 5)
    }
}

/// Returns the cases of rules and guarantees that R1 to R19 leave out.
fn other_rules() -> Vec<Case> {
    let all = || (0..5).map(Action::Join).collect();
    let two_majorities = |name, story, switch, config| Case {
        violates: &[Property::NoTwoMajorities],
        before: all(),
        ..case(name, story, switch, config)
    };
    vec![
        two_majorities(
            "hold above released",
            "hosts release a list, another forms on that word, and they hold its document after all",
            Switch::Rule(Rule::HoldAboveReleased),
            lying("hold above released", 2),
        ),
        Case {
            before: released_unsigned(),
            ..two_majorities(
                "one list per epoch",
                "hosts release an epoch, another list forms on that word, and they sign one of it",
                Switch::Rule(Rule::OneListPerEpoch),
                Config {
                    // This rule alone would also prevent the hosts from holding the document.
                    rules: Rules::ALL.without(Rule::HoldAboveReleased),
                    ..lying("one list per epoch", 2)
                },
            )
        },
        two_majorities(
            "held releases nothing",
            "hosts that hold a document release it, and so let another list form",
            Switch::Rule(Rule::HeldReleasesNothing),
            lying("held releases nothing", 2),
        ),
        Case {
            before: signed_by_all(&[0, 1, 2])
                .into_iter()
                .chain([Action::Kill(2), Action::Join(3), Action::Join(4)])
                .collect(),
            ..two_majorities(
                "journal sync",
                "power is cut, a journal forgets the list that its agent signed; it signs another",
                Switch::JournalSync,
                Config {
                    faults: Faults { kills: 1, ..Faults::default() },
                    ..lying("journal sync", 2)
                },
            )
        },
        Case {
            violates: TWO_CLUSTERS,
            ..case(
                "ledger sync",
                "a document leaves, its process crashes, the ledger has forgotten it; restore",
                Switch::LedgerSync,
                Config {
                    epochs: 2,
                    faults: Faults { restores: 1, pauses: 1, crashes: 1, ..Faults::default() },
                    ..Config::sound("ledger sync", 1, 2)
                },
            )
        },
    ]
}

/// Returns the cases about when a cluster may be ended.
fn ends() -> Vec<Case> {
    vec![
        Case {
            violates: &[Property::NothingAfterAbandon],
            ..case(
                "abandon before commit",
                "an operator abandons a committed cluster, and its nodes start",
                Switch::Rule(Rule::AbandonBeforeCommit),
                Config {
                    epochs: 1,
                    // Without the rule, the ledger of the process that sent the document would
                    // still prevent it.
                    environment: Environment { ledger: false, ..Environment::SOUND },
                    faults: Faults { ends: 1, ..Faults::default() },
                    ..Config::sound("abandon before commit", 1, 1)
                },
            )
        },
        Case {
            violates: &[Property::NothingAfterAbandon],
            ..case(
                "end when settled",
                "a restored database forgets a commit, and is abandoned before the ledgers speak",
                Switch::Rule(Rule::EndWhenSettled),
                Config {
                    epochs: 1,
                    faults: Faults { restores: 1, ends: 1, ..Faults::default() },
                    ..Config::sound("end when settled", 1, 1)
                },
            )
        },
    ]
}
