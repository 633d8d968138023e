//! Tests that change bytes of the log. Opening it must fail with file and offset, unless the bytes
//! belong to an unacknowledged record at the end.

use super::*;

/// Writes a log of four records, none of them sealed. Returns the entries of each record.
fn four_records(disk: &SimulatedDisk) -> Vec<Vec<Entry>> {
    let mut log = create(disk);
    let groups = [entries(1..=3, 1), entries(4..=70, 1), entries(71..=72, 2), entries(73..=75, 2)];
    for group in &groups {
        write(&mut log, group.clone());
    }
    groups.into()
}

fn first_segment() -> PathBuf {
    directory().join("0000000000000001.wal")
}

/// Offsets at which the records of [`four_records`] begin, and the end of the last of them. The
/// segment's first record and the boot record come before.
const RECORDS: [u64; 5] = [8192, 12288, 20480, 24576, 28672];

fn flip(disk: &SimulatedDisk, path: &Path, offset: u64, bits: u8) {
    let file = file(disk, path);
    let mut byte = [0];
    file.read_at(offset, &mut byte).unwrap();
    file.write_at(offset, &[byte[0] ^ bits]).unwrap();
    file.sync_data().unwrap();
}

fn damage(error: LogError) -> (PathBuf, u64, Damage) {
    assert!(error.is_final(), "{error}");
    match error {
        LogError::Corrupt { path, offset, what } => (path, offset, what),
        other => panic!("{other}"),
    }
}

#[test]
fn a_flipped_byte_before_the_last_record_is_located_unless_it_is_padding() {
    let disk = disk(1);
    let groups = four_records(&disk).concat();
    let mut refused = 0;
    for (record, place) in RECORDS[..3].iter().enumerate() {
        for offset in (*place..RECORDS[record + 1]).step_by(7) {
            let copy = disk.duplicate(1);
            flip(&copy, &first_segment(), offset, 0x10);
            match open(&copy) {
                Err(error) => {
                    let later = RECORDS[record + 1];
                    let expected = Damage::Record { segment: 1, later };
                    assert_eq!(damage(error), (first_segment(), *place, expected));
                    refused += 1;
                }
                Ok((log, _)) => assert_eq!(all_entries(&log), groups, "padding, at {offset}"),
            }
        }
    }
    let payload = (3 + 67 + 2) * 112;
    assert!(refused * 7 >= payload, "{refused}");
}

#[test]
fn damage_to_the_first_record_of_a_segment_is_refused() {
    let disk = disk(1);
    four_records(&disk);
    for offset in 0..28 + 65 {
        let copy = disk.duplicate(1);
        flip(&copy, &first_segment(), offset, 1);
        match open(&copy).unwrap_err() {
            LogError::Version { path, version: 3, .. } => {
                assert_eq!((path, offset), (first_segment(), 28));
            }
            error => {
                let expected = (first_segment(), 0, Damage::FirstRecord);
                assert_eq!(damage(error), expected, "at {offset}");
            }
        }
    }
}

#[test]
fn a_log_cut_at_any_offset_keeps_the_whole_records_before_the_cut() {
    let disk = disk(1);
    let groups = four_records(&disk);
    for cut in (RECORDS[0]..=RECORDS[4]).step_by(512) {
        let copy = disk.duplicate(1);
        let segment = file(&copy, &first_segment());
        let end = segment.len().unwrap();
        let zeros = vec![0; usize::try_from(end - cut).unwrap()];
        segment.write_at(cut, &zeros).unwrap();
        let (log, recovered) = open(&copy).unwrap();
        let last = recovered.last().index;
        let whole: Vec<_> =
            groups.concat().into_iter().filter(|entry| entry.index <= last).collect();
        assert_eq!(all_entries(&log), whole, "cut at {cut}");
        let wholes = [0, 3, 70, 72, 75];
        assert!(wholes.contains(&last), "cut at {cut}: {last}");
        let kept = RECORDS[1..].iter().filter(|end| **end <= cut).count();
        assert!(last >= wholes[kept], "cut at {cut}: {last}");
    }
}

#[test]
fn a_segment_that_became_shorter_or_longer_is_refused() {
    let disk = disk(1);
    four_records(&disk);
    for found in [40_000, 16_384, 65_535, 65_537] {
        let copy = disk.duplicate(1);
        file(&copy, &first_segment()).set_len(found).unwrap();
        let (path, _, damage) = damage(open(&copy).unwrap_err());
        assert_eq!((path, damage), (first_segment(), Damage::Length { found, expected: 65_536 }));
    }
}

#[test]
fn the_last_record_counts_as_torn_until_it_is_sealed() {
    let disk = disk(1);
    four_records(&disk);
    let torn = disk.duplicate(1);
    flip(&torn, &first_segment(), RECORDS[3] + 100, 1);
    let (_, recovered) = open(&torn).unwrap();
    assert_eq!(recovered.last(), at(72, 2));
    assert_eq!(recovered.truncated_at, Some((first_segment(), RECORDS[3])));

    disk.kill();
    let (mut log, _) = open(&disk).unwrap();
    write(&mut log, entries(76..=76, 2));
    log.write(&[Batch::default()]).unwrap();
    let before = disk.counts();
    log.write(&[Batch::default()]).unwrap();
    assert_eq!(disk.counts(), before, "one seal is enough");
    drop(log);
    let place = RECORDS[4] + 4096;
    flip(&disk, &first_segment(), place + 100, 1);
    let (path, offset, _) = damage(open(&disk).unwrap_err());
    assert_eq!((path, offset), (first_segment(), place));
}

#[test]
fn a_truncated_record_does_not_come_back() {
    let disk = disk(1);
    four_records(&disk);
    flip(&disk, &first_segment(), RECORDS[3] + 100, 1);
    drop(open(&disk).unwrap());
    flip(&disk, &first_segment(), RECORDS[3] + 100, 1);
    let (log, recovered) = open(&disk).unwrap();
    assert_eq!(recovered.last(), at(72, 2));
    assert_eq!(all_entries(&log).len(), 72);
}

fn three_segments(disk: &SimulatedDisk) -> Vec<PathBuf> {
    let mut log = create(disk);
    let mut first = 1;
    while files(disk, "wal").len() < 3 {
        write(&mut log, entries(first..=first + 9, 1));
        first += 10;
    }
    write(&mut log, entries(first..=first, 1));
    files(disk, "wal")
}

#[test]
fn a_missing_segment_is_named_in_the_error() {
    let disk = disk(1);
    let segments = three_segments(&disk);
    for (number, path) in (1..).zip(&segments) {
        let copy = disk.duplicate(1);
        copy.remove(path).unwrap();
        let (file, _, damage) = damage(open(&copy).unwrap_err());
        if number == 1 {
            assert_eq!(damage, Damage::Contradiction("entries after the base are missing"));
        } else {
            assert_eq!((&file, damage), (path, Damage::Missing));
        }
    }
    let empty = disk.duplicate(1);
    for path in &segments {
        empty.remove(path).unwrap();
    }
    assert_eq!(damage(open(&empty).unwrap_err()).2, Damage::Missing);
}

#[test]
fn swapped_segments_are_refused() {
    let disk = disk(1);
    let segments = three_segments(&disk);
    let aside = directory().join("aside");
    disk.rename(&segments[0], &aside).unwrap();
    disk.rename(&segments[1], &segments[0]).unwrap();
    disk.rename(&aside, &segments[1]).unwrap();
    let (file, offset, found) = damage(open(&disk).unwrap_err());
    assert_eq!((file, offset, found), (segments[0].clone(), 0, Damage::FirstRecord));
}

#[test]
fn damage_at_the_end_of_a_segment_is_proved_by_the_next_one() {
    let disk = disk(1);
    let segments = three_segments(&disk);
    // Each record holds ten entries. The segment's last record but one holds entries; its last
    // record marks the full segment.
    let last = 65_536 - 2 * 4096;
    let mark = disk.duplicate(1);
    flip(&mark, &segments[1], last + 4096, 1);
    assert!(open(&mark).is_ok(), "the mark only repeats what the next segment says");
    flip(&disk, &segments[1], last + 4096, 1);
    flip(&disk, &segments[1], last, 1);
    let (path, offset, found) = damage(open(&disk).unwrap_err());
    assert_eq!((path, offset), (segments[1].clone(), last));
    assert_eq!(found, Damage::Record { segment: 3, later: 0 });
}

#[test]
fn damage_after_opening_is_found_when_the_entry_is_read() {
    let disk = disk(1);
    let mut log = create(&disk);
    write(&mut log, entries(1..=3, 1));
    flip(&disk, &first_segment(), RECORDS[0] + 100, 1);
    let error = log.read(1, 4, u64::MAX).unwrap_err();
    assert_eq!(damage(error), (first_segment(), RECORDS[0], Damage::Checksum));
}

#[test]
fn a_segment_of_another_member_is_refused() {
    let (disk, other) = (disk(1), disk(2));
    let segments = three_segments(&disk);
    let theirs = LogIdentity { member: 0xb, ..identity() };
    Log::create(&other.shared(), member(), &theirs, &small_segments()).unwrap();
    let mut log = Log::open(&other.shared(), member(), &small_segments()).unwrap().0;
    let mut first = 1;
    while log.segment_count() < 3 {
        write(&mut log, entries(first..=first + 9, 1));
        first += 10;
    }
    let from = file(&other, &segments[1]);
    let mut bytes = vec![0; 65_536];
    from.read_at(0, &mut bytes).unwrap();
    file(&disk, &segments[1]).write_at(0, &bytes).unwrap();
    assert_eq!(damage(open(&disk).unwrap_err()), (segments[1].clone(), 0, Damage::Foreign));
}

#[test]
fn random_bytes_in_the_place_of_a_segment_never_panic() {
    let disk = disk(1);
    four_records(&disk);
    for seed in 0..200_u64 {
        let copy = disk.duplicate(seed);
        let mut noise = seed;
        let bytes: Vec<u8> = std::iter::repeat_with(|| {
            noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            noise.to_be_bytes()[0]
        })
        .take(300)
        .collect();
        let offset = 4096 * (seed % 9) + (seed % 3) * 28;
        file(&copy, &first_segment()).write_at(offset, &bytes).unwrap();
        match open(&copy) {
            Ok((log, _)) => assert!(all_entries(&log).len() <= 75),
            Err(error) => {
                let named = error.is_final();
                assert!(named, "{error}");
            }
        }
    }
}
