//! Encoding of a [`Witness`](super::Witness): as the text of its file, and as the report that
//! members send each other.
//!
//! The text is also meant for people: it has one line per member, and a checksum. Its numbers are
//! decimal, except for ids and runs. In a report, each record has the same length.

use std::collections::BTreeMap;

use bytes::{Buf, BufMut};
use node_consensus::MAX_INDEX;
use node_state::identity::{Incarnation, MemberId};

use super::{BootProcess, DiskState, Promise, WitnessRecord};

/// First line of the witness file. Files of the first version lack it. Each line of such a file is
/// a member with its incarnation and its boot counter.
const HEADER: &str = "muster-peers 2\n";
/// Start of the witness file's last line. The checksum follows it.
const CHECKSUM: &str = "crc32c ";
/// Bytes of one record in a report: member, incarnation, boot, flags, run, disk, and two promises.
const RECORD_BYTES: usize = 8 + 16 + 8 + 1 + 8 + 3 * 8 + 2 * 4 * 8;
/// Flag of a record: exactly one process with the boot counter is known.
const ONE_RUN: u8 = 1;
/// Flag of a record: several processes with the same boot counter are known.
const SEVERAL_RUNS: u8 = 2;
/// Flag of a record: the state of the process's disk is known.
const DISK: u8 = 4;
/// Maximum number of records in a report, more than any cluster has members.
const MAX_RECORDS: usize = 1024;

/// Reason why the witness file or a report can't be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WitnessDecodeError {
    /// The witness file is malformed, or its checksum doesn't match.
    #[error("the file is damaged")]
    File,
    /// A later version of the program wrote the witness file.
    #[error(
        "the file was written by a later version of this program: start this member with that one"
    )]
    Later,
    /// A peer's report is malformed.
    #[error("an account of peers that can't be")]
    Wire,
}

type WitnessRecords = BTreeMap<MemberId, WitnessRecord>;

pub(super) fn to_text(records: impl Iterator<Item = (MemberId, WitnessRecord)>) -> String {
    let mut text = HEADER.to_owned();
    for (member, record) in records {
        let WitnessRecord { incarnation, boot, run, disk, .. } = record;
        let run = match run {
            BootProcess::Unknown => "unknown".to_owned(),
            BootProcess::One(run) => format!("{run:016x}"),
            BootProcess::Several => "several".to_owned(),
        };
        text += &format!("{member} {incarnation} {boot} {run} ");
        text += &match disk {
            Some(DiskState { term, vote, last }) => format!("{term} {vote:x} {last}"),
            None => "unknown".to_owned(),
        };
        for Promise { term, vote, matched, floor } in
            [record.earlier_promises, record.current_promises]
        {
            text += &format!(" {term} {vote:x} {matched} {floor}");
        }
        text.push('\n');
    }
    let checksum = crc32c::crc32c(text.as_bytes());
    text + &format!("{CHECKSUM}{checksum:08x}\n")
}

pub(super) fn from_text(text: &str) -> Result<WitnessRecords, WitnessDecodeError> {
    let Some(rest) = text.strip_prefix(HEADER) else {
        if text.starts_with("muster-peers ") {
            return Err(WitnessDecodeError::Later);
        }
        return text
            .lines()
            .map(parse_first_version_line)
            .collect::<Option<_>>()
            .ok_or(WitnessDecodeError::File);
    };
    let whole = |rest: &str| {
        let at = rest.rfind(CHECKSUM)?;
        let checksum = rest[at..].strip_prefix(CHECKSUM)?.strip_suffix('\n')?;
        let checksum = u32::from_str_radix(checksum, 16).ok()?;
        let covered = HEADER.len() + at;
        (crc32c::crc32c(&text.as_bytes()[..covered]) == checksum)
            .then(|| rest[..at].lines().map(parse_line).collect::<Option<_>>())?
    };
    whole(rest).ok_or(WitnessDecodeError::File)
}

fn parse_first_version_line(line: &str) -> Option<(MemberId, WitnessRecord)> {
    let mut words = line.split(' ');
    let member = MemberId(u64::from_str_radix(words.next()?, 16).ok()?);
    let incarnation = words.next()?.parse().ok()?;
    let boot = words.next()?.parse().ok()?;
    let (earlier_promises, current_promises) = (Promise::default(), Promise::default());
    let record = WitnessRecord {
        incarnation,
        boot,
        run: BootProcess::Unknown,
        disk: None,
        earlier_promises,
        current_promises,
    };
    words.next().is_none().then_some((member, record))
}

fn parse_line(line: &str) -> Option<(MemberId, WitnessRecord)> {
    let mut words = line.split(' ');
    let member = MemberId(u64::from_str_radix(words.next()?, 16).ok()?);
    let incarnation = words.next()?.parse().ok()?;
    let boot = words.next()?.parse().ok()?;
    let run = match words.next()? {
        "unknown" => BootProcess::Unknown,
        "several" => BootProcess::Several,
        run => BootProcess::One(u64::from_str_radix(run, 16).ok()?),
    };
    let disk = match words.next()? {
        "unknown" => None,
        term => {
            let vote = u64::from_str_radix(words.next()?, 16).ok()?;
            Some(DiskState { term: term.parse().ok()?, vote, last: words.next()?.parse().ok()? })
        }
    };
    let mut promise = || {
        let term = words.next()?.parse().ok()?;
        let vote = u64::from_str_radix(words.next()?, 16).ok()?;
        let matched = words.next()?.parse().ok()?;
        Some(Promise { term, vote, matched, floor: words.next()?.parse().ok()? })
    };
    let (earlier_promises, current_promises) = (promise()?, promise()?);
    let record = WitnessRecord { incarnation, boot, run, disk, earlier_promises, current_promises };
    words.next().is_none().then_some((member, record))
}

pub(super) fn to_wire(records: impl Iterator<Item = (MemberId, WitnessRecord)>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (member, record) in records {
        let WitnessRecord { incarnation, boot, run, disk, .. } = record;
        bytes.put_u64(member.0);
        bytes.put_slice(&incarnation.0);
        bytes.put_u64(boot);
        let (runs, run) = match run {
            BootProcess::Unknown => (0, 0),
            BootProcess::One(run) => (ONE_RUN, run),
            BootProcess::Several => (SEVERAL_RUNS, 0),
        };
        bytes.put_u8(runs | disk.map_or(0, |_| DISK));
        let DiskState { term, vote, last } = disk.unwrap_or_default();
        [run, term, vote, last].into_iter().for_each(|number| bytes.put_u64(number));
        for Promise { term, vote, matched, floor } in
            [record.earlier_promises, record.current_promises]
        {
            [term, vote, matched, floor].into_iter().for_each(|number| bytes.put_u64(number));
        }
    }
    bytes
}

pub(super) fn from_wire(mut bytes: &[u8]) -> Result<WitnessRecords, WitnessDecodeError> {
    let whole = bytes.len().is_multiple_of(RECORD_BYTES);
    if !whole || bytes.len() > MAX_RECORDS * RECORD_BYTES {
        return Err(WitnessDecodeError::Wire);
    }
    let mut records = WitnessRecords::new();
    while bytes.has_remaining() {
        let member = MemberId(bytes.get_u64());
        let mut incarnation = [0; 16];
        bytes.copy_to_slice(&mut incarnation);
        let boot = bytes.get_u64();
        let (what, run) = (bytes.get_u8(), bytes.get_u64());
        let run = match (what & !DISK, run) {
            (0, 0) => BootProcess::Unknown,
            (ONE_RUN, run) => BootProcess::One(run),
            (SEVERAL_RUNS, 0) => BootProcess::Several,
            _ => return Err(WitnessDecodeError::Wire),
        };
        let disk =
            DiskState { term: bytes.get_u64(), vote: bytes.get_u64(), last: bytes.get_u64() };
        let disk = (what & DISK != 0).then_some(disk);
        let mut promise = || Promise {
            term: bytes.get_u64(),
            vote: bytes.get_u64(),
            matched: bytes.get_u64(),
            floor: bytes.get_u64(),
        };
        let (earlier_promises, current_promises) = (promise(), promise());
        let numbers = [earlier_promises, current_promises].map(|p| [p.term, p.matched, p.floor]);
        let can_be = numbers.as_flattened().iter().all(|number| *number < MAX_INDEX);
        if !can_be || boot >= MAX_INDEX {
            return Err(WitnessDecodeError::Wire);
        }
        let incarnation = Incarnation(incarnation);
        records.insert(
            member,
            WitnessRecord { incarnation, boot, run, disk, earlier_promises, current_promises },
        );
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn promises() -> impl Strategy<Value = Promise> {
        (0..MAX_INDEX, any::<u64>(), 0..MAX_INDEX, 0..MAX_INDEX)
            .prop_map(|(term, vote, matched, floor)| Promise { term, vote, matched, floor })
    }

    fn records() -> impl Strategy<Value = WitnessRecords> {
        let run = prop_oneof![
            Just(BootProcess::Unknown),
            any::<u64>().prop_map(BootProcess::One),
            Just(BootProcess::Several)
        ];
        let disk = proptest::option::of(any::<[u64; 3]>())
            .prop_map(|disk| disk.map(|[term, vote, last]| DiskState { term, vote, last }));
        let record = (any::<[u8; 16]>(), 0..MAX_INDEX, run, disk, promises(), promises());
        let record = record.prop_map(
            |(incarnation, boot, run, disk, earlier_promises, current_promises)| {
                let incarnation = Incarnation(incarnation);
                WitnessRecord { incarnation, boot, run, disk, earlier_promises, current_promises }
            },
        );
        proptest::collection::btree_map(any::<u64>().prop_map(MemberId), record, 0..8)
    }

    proptest! {
        #[test]
        fn records_read_back_as_written(records in records()) {
            prop_assert_eq!(from_text(&to_text(records.clone().into_iter())).unwrap(), records.clone());
            prop_assert_eq!(from_wire(&to_wire(records.clone().into_iter())).unwrap(), records);
        }

        #[test]
        fn a_file_with_a_changed_byte_is_damaged(records in records(), at: prop::sample::Index, with: u8) {
            let text = to_text(records.into_iter());
            let mut bytes = text.clone().into_bytes();
            let at = at.index(bytes.len());
            prop_assume!(bytes[at] != with);
            bytes[at] = with;
            if let Ok(other) = std::str::from_utf8(&bytes) {
                // A checksum in upper case is also valid, so this text must not count as damaged.
                prop_assume!(!other.eq_ignore_ascii_case(&text));
                prop_assert!(from_text(other).is_err());
            }
        }

        #[test]
        fn junk_is_refused_or_read_and_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = from_wire(&bytes);
            let _ = from_text(&String::from_utf8_lossy(&bytes));
        }
    }

    #[test]
    fn a_cut_file_is_damaged_and_a_later_version_has_an_error_of_its_own() {
        let record = parse_first_version_line(&format!("a1 {} 5", "07".repeat(16))).unwrap();
        let text = to_text([record].into_iter());
        for length in 1..text.len() {
            assert!(from_text(&text[..length]).is_err(), "{length} bytes");
        }
        assert_eq!(from_text("muster-peers 3\n"), Err(WitnessDecodeError::Later));
        assert_eq!(from_text("a1 zz 5\n"), Err(WitnessDecodeError::File));
    }

    #[test]
    fn a_file_of_the_first_version_is_read() {
        let text = format!("a1 {} 5\n", "07".repeat(16));
        let records = from_text(&text).unwrap();
        let known = records[&MemberId(0xa1)];
        assert_eq!((known.incarnation, known.boot), (Incarnation([7; 16]), 5));
        assert_eq!((known.run, known.current_promises), (BootProcess::Unknown, Promise::default()));
        assert!(from_text("").unwrap().is_empty());
    }

    #[test]
    fn a_record_with_a_number_that_would_overflow_is_refused() {
        let record = parse_first_version_line(&format!("a1 {} 5", "07".repeat(16))).unwrap().1;
        let far = Promise { matched: MAX_INDEX, ..Promise::default() };
        for record in [
            WitnessRecord { boot: MAX_INDEX, ..record },
            WitnessRecord { earlier_promises: far, ..record },
            WitnessRecord { current_promises: far, ..record },
        ] {
            let wire = to_wire([(MemberId(1), record)].into_iter());
            assert_eq!(from_wire(&wire), Err(WitnessDecodeError::Wire));
        }
    }
}
