use super::*;

const SITE: Site = Site { system: 7, timeline: 1, database: 20, tables: [1, 2, 3, 4] };

fn hash(byte: u8) -> Hash {
    Hash([byte; 32])
}

fn known() -> Known {
    let copied = Mark { number: 5, hash: hash(5) };
    Known { site: SITE, generation: 2, wal: 100, copied, beat: 9 }
}

fn memory() -> Memory {
    Memory { known: Some(known()), entries: 3 }
}

/// Returns the database that `memory` remembers, a moment later.
fn database() -> Database {
    Database {
        site: SITE,
        wal: 100,
        noted: Some(Noted { site: SITE, generation: 2 }),
        newest: 5,
        at_copied: Some(hash(5)),
        own: Some(Own { entries: 3, beat: 9 }),
    }
}

#[test]
fn who_wrote_a_row_after_this_life_began_lives_elsewhere() {
    let own = |beat| Own { entries: 3, beat };
    assert!(lives_elsewhere(&known(), &own(10), false));
    assert!(
        !lives_elsewhere(&known(), &own(10), true),
        "a kill between row and ledger, or a sweep"
    );
    assert!(!lives_elsewhere(&known(), &own(9), false), "a row from before this life");
    assert!(!lives_elsewhere(&known(), &own(3), false), "a dump from a life before");
}

#[test]
fn the_database_that_was_left_is_the_same_one_and_what_is_new_in_it_is_copied() {
    assert_eq!(compare(&memory(), &database()), Ok(Fill::New));
    let later = Database { wal: 200, newest: 9, ..database() };
    assert_eq!(compare(&memory(), &later), Ok(Fill::New));
    // A kill between the row in the database and the ledger's position is no difference.
    let killed = Database { own: Some(Own { entries: 3, beat: 10 }), ..database() };
    assert_eq!(compare(&memory(), &killed), Ok(Fill::New));
}

#[test]
fn what_a_dump_does_not_carry_tells_even_an_empty_ledger() {
    let empty = Memory { known: None, entries: 0 };
    let loaded = Site { database: 21, ..SITE };
    let over = Site { tables: [1, 2, 9, 4], ..SITE };
    let server = Site { system: 8, ..SITE };
    let recovered = Site { timeline: 2, ..SITE };
    for (site, difference) in [
        (loaded, Difference::Loaded),
        (over, Difference::Loaded),
        (server, Difference::Server),
        (recovered, Difference::Timeline { was: 1, is: 2 }),
    ] {
        let found = Database { site, own: None, ..database() };
        assert_eq!(compare(&empty, &found), Err(difference));
        assert_eq!(compare(&memory(), &Database { site, ..database() }), Err(difference));
        // Another process has stored this site, with the generation number that this process knows.
        let noted = Some(Noted { site, generation: 2 });
        assert_eq!(compare(&memory(), &Database { site, noted, ..database() }), Err(difference));
    }
}

#[test]
fn less_than_is_remembered_is_the_past() {
    let lower = |at_copied, newest| Database { newest, at_copied, ..database() };
    let beat = |beat| Database { own: Some(Own { entries: 3, beat }), ..database() };
    let noted = Some(Noted { site: SITE, generation: 1 });
    for (found, difference) in [
        (lower(None, 4), Difference::Decisions { was: 5, is: 4 }),
        (lower(Some(hash(6)), 7), Difference::History { at: 5 }),
        (Database { wal: 99, ..database() }, Difference::Log),
        (Database { own: None, ..database() }, Difference::Process),
        (beat(8), Difference::Beat { was: 9, is: 8 }),
        (Database { noted, ..database() }, Difference::Generation { was: 2, is: 1 }),
        (Database { noted: None, ..database() }, Difference::Empty),
    ] {
        assert_eq!(compare(&memory(), &found), Err(difference), "{difference}");
    }
}

#[test]
fn a_change_that_another_process_has_found_makes_everything_new() {
    let site = Site { database: 21, ..SITE };
    let noted = Some(Noted { site, generation: 3 });
    let found = Database { site, noted, wal: 1, newest: 2, at_copied: None, ..database() };
    assert_eq!(compare(&memory(), &found), Ok(Fill::Other));
    // The row comes from the dump: it counts the sweeps of another history.
    let own = Some(Own { entries: 0, beat: 2 });
    assert_eq!(compare(&memory(), &Database { own, ..found }), Ok(Fill::Other));
    // The database was restored once more and lost this process's row, so no generation waits for
    // it.
    let forgets = Database { own: None, ..found };
    assert_eq!(compare(&memory(), &forgets), Err(Difference::Process));
}

#[test]
fn a_ledger_that_holds_less_than_the_database_says_is_filled() {
    let fewer = Memory { entries: 2, ..memory() };
    assert_eq!(compare(&fewer, &database()), Ok(Fill::All));
    let swept = Database { own: Some(Own { entries: 3, beat: 11 }), ..database() };
    assert_eq!(compare(&memory(), &swept), Ok(Fill::All));
    let blank = Memory { known: None, entries: 0 };
    assert_eq!(compare(&blank, &database()), Ok(Fill::All));
    let new = Database { own: None, ..database() };
    assert_eq!(compare(&blank, &new), Ok(Fill::Other), "a process that has just joined");
    let nothing = Database { noted: None, own: None, ..database() };
    assert_eq!(compare(&blank, &nothing), Ok(Fill::Other));
    let entries = Memory { known: None, entries: 1 };
    assert_eq!(compare(&entries, &nothing), Err(Difference::Empty));
}

#[test]
fn who_decides_has_copied_what_it_sees_and_sees_what_it_has_copied() {
    let read =
        Read { site: SITE, generation: 2, newest: 5, at_copied: Some(hash(5)), beat: Some(9) };
    let gate = |read: Read| gate(Some(&known()), &read);
    assert_eq!(gate(read), Gate::Open);
    assert_eq!(gate(Read { newest: 6, ..read }), Gate::Copy);
    assert_eq!(
        gate(Read { beat: Some(10), ..read }),
        Gate::Open,
        "killed between row and position"
    );
    let moved = Site { tables: [1, 2, 9, 4], ..SITE };
    let anew = Read { site: moved, generation: 3, newest: 0, at_copied: None, beat: Some(0) };
    assert_eq!(gate(anew), Gate::Look);
    for (read, difference) in [
        (Read { generation: 1, ..read }, Difference::Generation { was: 2, is: 1 }),
        (Read { newest: 4, at_copied: None, ..read }, Difference::Decisions { was: 5, is: 4 }),
        (Read { newest: 6, at_copied: Some(hash(1)), ..read }, Difference::History { at: 5 }),
        (Read { site: moved, ..read }, Difference::Loaded),
        (Read { beat: None, ..read }, Difference::Process),
        (Read { beat: Some(8), ..read }, Difference::Beat { was: 9, is: 8 }),
    ] {
        assert_eq!(gate(read), Gate::Past(difference));
    }
    assert_eq!(super::gate(None, &read), Gate::Look);
    let fresh = Known { copied: Mark::START, ..known() };
    let first = Read { newest: 0, at_copied: None, ..read };
    assert_eq!(super::gate(Some(&fresh), &first), Gate::Open);
}

fn put_back(entry: Entry, stands: Option<&Stands>) -> PutBack {
    super::put_back(entry, stands, false)
}

fn stands(phase: Phase) -> Stands {
    Stands { phase: Some(phase), cause: None, commit: None, split: false }
}

#[test]
fn a_commit_goes_back_with_its_document_and_without_it_keeps_every_other_list_away() {
    let whole = Entry::Commit { h: hash(1), document: true };
    let bare = Entry::Commit { h: hash(1), document: false };
    let draft = Stands { phase: None, ..stands(Phase::Open) };
    for forming in [stands(Phase::Open), stands(Phase::Preparing), draft] {
        assert_eq!(put_back(whole, Some(&forming)), PutBack::Adopt);
        assert_eq!(super::put_back(whole, Some(&forming), true), PutBack::Adopt, "it still forms");
        assert_eq!(put_back(bare, Some(&forming)), PutBack::Close);
        let end = Entry::End(EndCause::Abandon);
        assert_eq!(put_back(end, Some(&forming)), PutBack::End(EndCause::Abandon));
    }
    assert_eq!(put_back(whole, None), PutBack::Adopt);
    assert_eq!(put_back(bare, None), PutBack::Nothing, "what isn't there forms nothing");
    assert_eq!(put_back(Entry::End(EndCause::Deadline), None), PutBack::Nothing);
    let cause = |cause| Stands { cause: Some(cause), ..stands(Phase::Abandoned) };
    let accepted = cause(EndCause::DatabaseAccepted);
    assert_eq!(put_back(whole, Some(&accepted)), PutBack::Adopt);
    for stands in [None, Some(&accepted)] {
        assert_eq!(super::put_back(whole, stands, true), PutBack::Nothing, "tried before");
    }
    assert_eq!(put_back(bare, Some(&accepted)), PutBack::Nothing);
    for entry in [whole, bare] {
        assert_eq!(put_back(entry, Some(&cause(EndCause::Abandon))), PutBack::Nothing);
        let decided = Stands { commit: Some(hash(1)), ..stands(Phase::Formed) };
        assert_eq!(put_back(entry, Some(&decided)), PutBack::Nothing);
        let split = Stands { commit: Some(hash(2)), split: true, ..stands(Phase::Committed) };
        assert_eq!(put_back(entry, Some(&split)), PutBack::Nothing);
    }
    let other = Stands { commit: Some(hash(2)), ..stands(Phase::Committed) };
    assert_eq!(put_back(whole, Some(&other)), PutBack::Adopt, "which finds the two");
}

#[test]
fn what_a_ledger_holds_is_never_decided_otherwise() {
    let commit = Some(Entry::Commit { h: hash(1), document: false });
    let decide = |h, adopted| Decision::Commit { h: hash(h), adopted };
    assert!(contradicts(commit, Decision::Freeze));
    assert!(contradicts(commit, Decision::End));
    assert!(contradicts(commit, decide(2, true)));
    assert!(!contradicts(commit, decide(1, true)));
    for (cause, comes_back) in [(EndCause::Abandon, false), (EndCause::DatabaseAccepted, true)] {
        let end = Some(Entry::End(cause));
        assert!(contradicts(end, Decision::Freeze));
        assert!(contradicts(end, decide(1, false)));
        assert_eq!(contradicts(end, decide(1, true)), !comes_back);
        assert!(!contradicts(end, Decision::End));
    }
    assert!(!contradicts(None, Decision::Freeze));
}
