//! What this member durably remembers of each peer: its incarnation and highest boot counter.
//!
//! A directory that comes back has forgotten votes and entries that it once promised, and must not
//! speak for the member. What is told from the true one here, and refused:
//! - another incarnation: the directory was wiped or replaced;
//! - a counter below the mark: a copy that is older by at least one start *which this peer saw*, and
//!   that was not started as often since;
//! - the mark's counter from another process than the one that showed it to *this process*: two
//!   copies run at once.
//!
//! What is not: a copy taken while the member ran, and put back after it stopped. It counts one start
//! more than the mark, as the member itself would at its next start. Nor, after a restart of this
//! peer, a second process with the mark's counter. To tell these, the peer would have to remember the
//! term and the entries that were acknowledged to it.
//!
//! The mark is on disk before the hello that raised it is answered.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Mutex,
};

use super::hello::Refusal;
use crate::identity::{Incarnation, MemberId};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    incarnation: Incarnation,
    boot: u64,
    /// The process that showed `boot`, if it did so to this one; not kept on disk.
    run: Option<u64>,
}

/// Why a claim was not taken.
#[derive(Debug)]
pub(super) enum MarkError {
    /// It doesn't fit what is remembered.
    Refused(Refusal),
    /// It fits, but can't be remembered.
    Io(io::Error),
}

#[derive(Debug)]
pub(super) struct Marks {
    path: PathBuf,
    marks: Mutex<BTreeMap<MemberId, Mark>>,
}

impl Marks {
    /// Reads what was remembered; no file is an empty memory.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let marks = match fs_err::read_to_string(path) {
            Ok(text) => parse(&text)
                .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the file is damaged"))?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
            Err(e) => return Err(e),
        };
        Ok(Self { path: path.to_owned(), marks: Mutex::new(marks) })
    }

    /// Takes what `member` claims, durably if it is news. May block on the disk.
    pub(super) fn take(
        &self,
        member: MemberId,
        incarnation: Incarnation,
        boot: u64,
        run: u64,
    ) -> Result<(), MarkError> {
        let mut marks = self.marks.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let claim = Mark { incarnation, boot, run: Some(run) };
        if let Some(mark) = marks.get_mut(&member) {
            if mark.incarnation != incarnation {
                return Err(MarkError::Refused(Refusal::Incarnation));
            }
            let twice = mark.run.is_some_and(|known| known != run);
            if boot < mark.boot || (boot == mark.boot && twice) {
                return Err(MarkError::Refused(Refusal::Boot));
            }
            if boot == mark.boot {
                mark.run = Some(run);
                return Ok(());
            }
        }
        let mut next = marks.clone();
        next.insert(member, claim);
        store(&self.path, &next).map_err(MarkError::Io)?;
        *marks = next;
        Ok(())
    }
}

fn parse(text: &str) -> Option<BTreeMap<MemberId, Mark>> {
    text.lines()
        .map(|line| {
            let mut words = line.split(' ');
            let member = u64::from_str_radix(words.next()?, 16).ok()?;
            let incarnation = words.next()?.parse().ok()?;
            let boot = words.next()?.parse().ok()?;
            let mark = Mark { incarnation, boot, run: None };
            words.next().is_none().then_some((MemberId(member), mark))
        })
        .collect()
}

fn store(path: &Path, marks: &BTreeMap<MemberId, Mark>) -> io::Result<()> {
    let text: String = marks
        .iter()
        .map(|(member, mark)| format!("{member} {} {}\n", mark.incarnation, mark.boot))
        .collect();
    let temporary = path.with_extension("tmp");
    let mut file = fs_err::File::create(&temporary)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs_err::rename(&temporary, path)?;
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs_err::File::open(parent)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMBER: MemberId = MemberId(0xa1);
    const INCARNATION: Incarnation = Incarnation([7; 16]);

    fn refused(result: Result<(), MarkError>) -> Option<Refusal> {
        match result {
            Ok(()) => None,
            Err(MarkError::Refused(refusal)) => Some(refusal),
            Err(MarkError::Io(e)) => panic!("{e}"),
        }
    }

    #[test]
    fn a_counter_that_went_back_is_refused_even_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("marks");
        let marks = Marks::open(&path).unwrap();
        assert_eq!(refused(marks.take(MEMBER, INCARNATION, 5, 1)), None);
        assert_eq!(refused(marks.take(MEMBER, INCARNATION, 4, 1)), Some(Refusal::Boot));
        let again = Marks::open(&path).unwrap();
        assert_eq!(refused(again.take(MEMBER, INCARNATION, 4, 1)), Some(Refusal::Boot));
        assert_eq!(refused(again.take(MEMBER, INCARNATION, 5, 1)), None);
        assert_eq!(refused(again.take(MEMBER, INCARNATION, 6, 2)), None);
    }

    #[test]
    fn one_counter_from_two_processes_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let marks = Marks::open(&dir.path().join("marks")).unwrap();
        assert_eq!(refused(marks.take(MEMBER, INCARNATION, 5, 1)), None);
        assert_eq!(refused(marks.take(MEMBER, INCARNATION, 5, 1)), None, "a reconnect");
        assert_eq!(refused(marks.take(MEMBER, INCARNATION, 5, 2)), Some(Refusal::Boot));
    }

    #[test]
    fn a_member_whose_disk_was_replaced_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("marks");
        let marks = Marks::open(&path).unwrap();
        assert_eq!(refused(marks.take(MEMBER, INCARNATION, 5, 1)), None);
        let marks = Marks::open(&path).unwrap();
        let other = Incarnation([8; 16]);
        assert_eq!(refused(marks.take(MEMBER, other, 9, 1)), Some(Refusal::Incarnation));
    }

    #[test]
    fn a_damaged_memory_is_not_an_empty_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("marks");
        std::fs::write(&path, "a1 zz 5\n").unwrap();
        assert_eq!(Marks::open(&path).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
