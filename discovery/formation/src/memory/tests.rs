use super::*;

const IDENTITY: DatabaseIdentity =
    DatabaseIdentity { system: 7, timeline: 1, database: 20, tables: [1, 2, 3, 4] };

fn hash(byte: u8) -> Hash {
    Hash([byte; 32])
}

fn known_database() -> RememberedDatabase {
    let copied = HistoryPosition { number: 5, hash: hash(5) };
    RememberedDatabase {
        identity: IDENTITY,
        generation: 2,
        wal: 100,
        last_copied: copied,
        sweeps: 9,
    }
}

fn ledger_summary() -> LedgerSummary {
    LedgerSummary { database: Some(known_database()), entries: 3 }
}

/// Returns what a process finds in the database that `ledger_summary` describes, if nothing has
/// changed since.
fn database() -> ObservedDatabase {
    ObservedDatabase {
        identity: IDENTITY,
        wal: 100,
        stored: Some(StoredGeneration { identity: IDENTITY, generation: 2 }),
        newest: 5,
        hash_at_last_copied: Some(hash(5)),
        process_row: Some(ProcessRow { entries: 3, sweeps: 9 }),
    }
}

#[test]
fn a_process_row_with_unknown_sweeps_shows_a_second_copy_of_the_process() {
    let own = |sweeps| ProcessRow { entries: 3, sweeps };
    assert!(is_running_elsewhere(&known_database(), &own(10), false));
    assert!(
        !is_running_elsewhere(&known_database(), &own(10), true),
        "a kill between row and ledger, or a sweep"
    );
    assert!(
        !is_running_elsewhere(&known_database(), &own(9), false),
        "a row from before this life"
    );
    assert!(!is_running_elsewhere(&known_database(), &own(3), false), "a dump from a life before");
}

#[test]
fn an_unchanged_database_is_recognised_and_its_new_decisions_are_copied() {
    assert_eq!(compare(&ledger_summary(), &database()), Ok(CopyScope::NewDecisions));
    let later = ObservedDatabase { wal: 200, newest: 9, ..database() };
    assert_eq!(compare(&ledger_summary(), &later), Ok(CopyScope::NewDecisions));
    // The process was killed between two writes: it had written its row, but not the position
    // beside its ledger. So the row is one sweep ahead, which doesn't count as a difference.
    let killed =
        ObservedDatabase { process_row: Some(ProcessRow { entries: 3, sweeps: 10 }), ..database() };
    assert_eq!(compare(&ledger_summary(), &killed), Ok(CopyScope::NewDecisions));
}

#[test]
fn another_database_identity_is_noticed_even_with_an_empty_ledger() {
    let empty = LedgerSummary { database: None, entries: 0 };
    let loaded = DatabaseIdentity { database: 21, ..IDENTITY };
    let loaded_over_tables = DatabaseIdentity { tables: [1, 2, 9, 4], ..IDENTITY };
    let server = DatabaseIdentity { system: 8, ..IDENTITY };
    let recovered = DatabaseIdentity { timeline: 2, ..IDENTITY };
    for (identity, difference) in [
        (loaded, DatabaseDifference::DumpLoaded),
        (loaded_over_tables, DatabaseDifference::DumpLoaded),
        (server, DatabaseDifference::Server),
        (recovered, DatabaseDifference::Timeline { was: 1, is: 2 }),
    ] {
        let found = ObservedDatabase { identity, process_row: None, ..database() };
        assert_eq!(compare(&empty, &found), Err(difference));
        assert_eq!(
            compare(&ledger_summary(), &ObservedDatabase { identity, ..database() }),
            Err(difference)
        );
        // Case: the database has stored the changed identity as its own. Its generation number is
        // still the one that this process remembers.
        let stored = Some(StoredGeneration { identity, generation: 2 });
        assert_eq!(
            compare(&ledger_summary(), &ObservedDatabase { identity, stored, ..database() }),
            Err(difference)
        );
    }
}

#[test]
fn a_lower_value_than_the_remembered_one_shows_an_older_database() {
    let lower = |at_copied, newest| ObservedDatabase {
        newest,
        hash_at_last_copied: at_copied,
        ..database()
    };
    let with_sweeps = |sweeps| ObservedDatabase {
        process_row: Some(ProcessRow { entries: 3, sweeps }),
        ..database()
    };
    let stored = Some(StoredGeneration { identity: IDENTITY, generation: 1 });
    for (found, difference) in [
        (lower(None, 4), DatabaseDifference::Decisions { was: 5, is: 4 }),
        (lower(Some(hash(6)), 7), DatabaseDifference::History { at: 5 }),
        (ObservedDatabase { wal: 99, ..database() }, DatabaseDifference::WalPosition),
        (ObservedDatabase { process_row: None, ..database() }, DatabaseDifference::MissingProcess),
        (with_sweeps(8), DatabaseDifference::Sweeps { was: 9, is: 8 }),
        (
            ObservedDatabase { stored, ..database() },
            DatabaseDifference::Generation { was: 2, is: 1 },
        ),
        (ObservedDatabase { stored: None, ..database() }, DatabaseDifference::Empty),
    ] {
        assert_eq!(compare(&ledger_summary(), &found), Err(difference), "{difference}");
    }
}

#[test]
fn all_history_is_new_in_a_generation_that_another_process_began() {
    let identity = DatabaseIdentity { database: 21, ..IDENTITY };
    let stored = Some(StoredGeneration { identity, generation: 3 });
    let found = ObservedDatabase {
        identity,
        stored,
        wal: 1,
        newest: 2,
        hash_at_last_copied: None,
        ..database()
    };
    assert_eq!(compare(&ledger_summary(), &found), Ok(CopyScope::NewHistory));
    // Case: the process's row comes from the dump, so it counts the sweeps of another history.
    let own = Some(ProcessRow { entries: 0, sweeps: 2 });
    assert_eq!(
        compare(&ledger_summary(), &ObservedDatabase { process_row: own, ..found }),
        Ok(CopyScope::NewHistory)
    );
    // Case: the database was restored once more, and lost this process's row. So the present
    // generation doesn't wait for this process's ledger, and the process must begin another one.
    let forgets = ObservedDatabase { process_row: None, ..found };
    assert_eq!(compare(&ledger_summary(), &forgets), Err(DatabaseDifference::MissingProcess));
}

#[test]
fn a_ledger_that_holds_less_than_the_database_recorded_is_incomplete() {
    let fewer = LedgerSummary { entries: 2, ..ledger_summary() };
    assert_eq!(compare(&fewer, &database()), Ok(CopyScope::IncompleteLedger));
    let swept =
        ObservedDatabase { process_row: Some(ProcessRow { entries: 3, sweeps: 11 }), ..database() };
    assert_eq!(compare(&ledger_summary(), &swept), Ok(CopyScope::IncompleteLedger));
    let blank = LedgerSummary { database: None, entries: 0 };
    assert_eq!(compare(&blank, &database()), Ok(CopyScope::IncompleteLedger));
    let new = ObservedDatabase { process_row: None, ..database() };
    assert_eq!(compare(&blank, &new), Ok(CopyScope::NewHistory), "a process that has just joined");
    let nothing = ObservedDatabase { stored: None, process_row: None, ..database() };
    assert_eq!(compare(&blank, &nothing), Ok(CopyScope::NewHistory));
    let entries = LedgerSummary { database: None, entries: 1 };
    assert_eq!(compare(&entries, &nothing), Err(DatabaseDifference::Empty));
}

#[test]
fn a_process_decides_only_if_its_ledger_and_the_database_agree() {
    let read = DatabaseFacts {
        identity: IDENTITY,
        generation: 2,
        newest: 5,
        hash_at_last_copied: Some(hash(5)),
        sweeps: Some(9),
    };
    let gate = |read: DatabaseFacts| check_ledger(Some(&known_database()), &read);
    assert_eq!(gate(read), LedgerVerdict::Allowed);
    assert_eq!(gate(DatabaseFacts { newest: 6, ..read }), LedgerVerdict::CopyFirst);
    assert_eq!(
        gate(DatabaseFacts { sweeps: Some(10), ..read }),
        LedgerVerdict::Allowed,
        "killed between row and position"
    );
    let moved = DatabaseIdentity { tables: [1, 2, 9, 4], ..IDENTITY };
    let new_generation = DatabaseFacts {
        identity: moved,
        generation: 3,
        newest: 0,
        hash_at_last_copied: None,
        sweeps: Some(0),
    };
    assert_eq!(gate(new_generation), LedgerVerdict::CompareFirst);
    for (read, difference) in [
        (DatabaseFacts { generation: 1, ..read }, DatabaseDifference::Generation { was: 2, is: 1 }),
        (
            DatabaseFacts { newest: 4, hash_at_last_copied: None, ..read },
            DatabaseDifference::Decisions { was: 5, is: 4 },
        ),
        (
            DatabaseFacts { newest: 6, hash_at_last_copied: Some(hash(1)), ..read },
            DatabaseDifference::History { at: 5 },
        ),
        (DatabaseFacts { identity: moved, ..read }, DatabaseDifference::DumpLoaded),
        (DatabaseFacts { sweeps: None, ..read }, DatabaseDifference::MissingProcess),
        (DatabaseFacts { sweeps: Some(8), ..read }, DatabaseDifference::Sweeps { was: 9, is: 8 }),
    ] {
        assert_eq!(gate(read), LedgerVerdict::OlderDatabase(difference));
    }
    assert_eq!(super::check_ledger(None, &read), LedgerVerdict::CompareFirst);
    let fresh = RememberedDatabase { last_copied: HistoryPosition::START, ..known_database() };
    let first = DatabaseFacts { newest: 0, hash_at_last_copied: None, ..read };
    assert_eq!(super::check_ledger(Some(&fresh), &first), LedgerVerdict::Allowed);
}

fn plan(entry: LedgerEntry, stands: Option<&ClusterInDatabase>) -> RestoreAction {
    super::plan_restore(entry, stands, false)
}

fn stands(phase: Phase) -> ClusterInDatabase {
    ClusterInDatabase { phase: Some(phase), cause: None, commit: None, is_split: false }
}

#[test]
fn a_commit_is_restored_with_its_document_and_otherwise_closes_the_cluster() {
    let whole = LedgerEntry::Commit { h: hash(1), document: true };
    let bare = LedgerEntry::Commit { h: hash(1), document: false };
    let draft = ClusterInDatabase { phase: None, ..stands(Phase::Open) };
    for forming in [stands(Phase::Open), stands(Phase::Preparing), draft] {
        assert_eq!(plan(whole, Some(&forming)), RestoreAction::Adopt);
        assert_eq!(
            super::plan_restore(whole, Some(&forming), true),
            RestoreAction::Adopt,
            "it still forms"
        );
        assert_eq!(plan(bare, Some(&forming)), RestoreAction::Close);
        let end = LedgerEntry::End(EndCause::Abandon);
        assert_eq!(plan(end, Some(&forming)), RestoreAction::End(EndCause::Abandon));
        let expired = LedgerEntry::End(EndCause::Deadline);
        assert_eq!(
            plan(expired, Some(&forming)),
            RestoreAction::Nothing,
            "an owner may have reopened it, and its deadline stands in the database"
        );
    }
    assert_eq!(plan(whole, None), RestoreAction::Adopt);
    assert_eq!(plan(bare, None), RestoreAction::Nothing, "what isn't there forms nothing");
    assert_eq!(plan(LedgerEntry::End(EndCause::Deadline), None), RestoreAction::Nothing);
    let cause = |cause| ClusterInDatabase { cause: Some(cause), ..stands(Phase::Abandoned) };
    let accepted = cause(EndCause::DatabaseAccepted);
    assert_eq!(plan(whole, Some(&accepted)), RestoreAction::Adopt);
    for stands in [None, Some(&accepted)] {
        assert_eq!(
            super::plan_restore(whole, stands, true),
            RestoreAction::Nothing,
            "tried before"
        );
    }
    assert_eq!(plan(bare, Some(&accepted)), RestoreAction::Nothing);
    for entry in [whole, bare] {
        assert_eq!(plan(entry, Some(&cause(EndCause::Abandon))), RestoreAction::Nothing);
        let decided = ClusterInDatabase { commit: Some(hash(1)), ..stands(Phase::Formed) };
        assert_eq!(plan(entry, Some(&decided)), RestoreAction::Nothing);
        let split =
            ClusterInDatabase { commit: Some(hash(2)), is_split: true, ..stands(Phase::Committed) };
        assert_eq!(plan(entry, Some(&split)), RestoreAction::Nothing);
    }
    let other = ClusterInDatabase { commit: Some(hash(2)), ..stands(Phase::Committed) };
    assert_eq!(plan(whole, Some(&other)), RestoreAction::Adopt, "which finds the two");
}

#[test]
fn no_decision_contradicts_an_entry_of_the_ledger() {
    let commit = Some(LedgerEntry::Commit { h: hash(1), document: false });
    let decide = |h, adopted| ClusterDecision::Commit { h: hash(h), adopted };
    assert!(contradicts(commit, ClusterDecision::Freeze));
    assert!(contradicts(commit, ClusterDecision::End));
    assert!(contradicts(commit, decide(2, true)));
    assert!(!contradicts(commit, decide(1, true)));
    for (cause, comes_back) in [(EndCause::Abandon, false), (EndCause::DatabaseAccepted, true)] {
        let end = Some(LedgerEntry::End(cause));
        assert!(contradicts(end, ClusterDecision::Freeze));
        assert!(contradicts(end, decide(1, false)));
        assert_eq!(contradicts(end, decide(1, true)), !comes_back);
        assert!(!contradicts(end, ClusterDecision::End));
    }
    for entry in [None, Some(LedgerEntry::End(EndCause::Deadline))] {
        for step in [ClusterDecision::Freeze, ClusterDecision::End, decide(1, false)] {
            assert!(!contradicts(entry, step), "an expired cluster may be reopened");
        }
    }
}
