//! The whole store as a stream, for a member that is too far behind the log.
//!
//! A magic and a version, then frames: kind, length, CRC-32C, payload. Each checksum goes on from
//! the one before, so that a frame can't be lost, doubled or moved; the last frame says how many
//! records there were. Reader and writer hold one frame at a time.

use std::io::{Read, Write};
use std::sync::Arc;

use node_proto::etcdserverpb::AlarmMember;
use node_proto::musterpb;
use prost::Message;
use redb::{Durability, ReadableTable as _};

use super::error::StoreError;
use super::event::decode;
use super::revision::Revision;
use super::rows::records;
use super::store::View;
use super::tables::{
    Cluster, LEASES, META, Progress, RECORDS, decode_auth, decode_lease, decode_member,
    decode_removed, decode_role, decode_user, encode_auth, encode_lease, write_auth, write_cluster,
    write_compacted, write_progress,
};
use super::writer::Writer;
use crate::auth::AuthState;
use crate::lease::Lease;
use crate::machine::{Members, Position};
use crate::membership::MemberTable;

const MAGIC: [u8; 8] = *b"MUSTERKV";
const VERSION: u32 = 2;
/// A frame of records is sent once it has so many bytes.
const FRAME_BYTES: usize = 256 * 1024;
/// No frame is larger: one record of the largest request, and room.
const MAX_FRAME_BYTES: usize = 64 * 1024 * 1024;

/// What a frame holds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Progress = 1,
    Member = 2,
    Alarm = 3,
    /// Row (16 bytes), length (4), record; repeated.
    Records = 4,
    /// The number of records (8).
    End = 5,
    Removed = 6,
    Lease = 7,
    /// Whether users and roles count, and how often they have changed (9).
    Auth = 8,
    User = 9,
    Role = 10,
}

impl Kind {
    fn of(byte: u8) -> Option<Self> {
        use Kind::{Alarm, Auth, End, Lease, Member, Progress, Records, Removed, Role, User};
        [Progress, Member, Removed, Alarm, Lease, Auth, User, Role, Records, End]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }
}

fn corrupt(what: impl Into<String>) -> StoreError {
    StoreError::Snapshot(what.into())
}

struct FrameWriter<'a> {
    out: &'a mut dyn Write,
    checksum: u32,
}

impl FrameWriter<'_> {
    fn frame(&mut self, kind: Kind, payload: &[u8]) -> Result<(), StoreError> {
        let length = u32::try_from(payload.len()).map_err(|_| corrupt("a frame is too long"))?;
        let mut head = [0; 9];
        head[0] = kind as u8;
        head[1..5].copy_from_slice(&length.to_le_bytes());
        self.checksum = crc32c::crc32c_append(self.checksum, &head[..5]);
        self.checksum = crc32c::crc32c_append(self.checksum, payload);
        head[5..].copy_from_slice(&self.checksum.to_le_bytes());
        self.out.write_all(&head).map_err(StoreError::Stream)?;
        self.out.write_all(payload).map_err(StoreError::Stream)
    }
}

struct FrameReader<'a> {
    input: &'a mut dyn Read,
    checksum: u32,
    payload: Vec<u8>,
}

impl FrameReader<'_> {
    fn exact(&mut self, out: &mut [u8]) -> Result<(), StoreError> {
        self.input.read_exact(out).map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => corrupt("it ends too early"),
            _ => StoreError::Stream(error),
        })
    }

    /// The next frame's kind; its payload is in `payload`.
    fn frame(&mut self) -> Result<Kind, StoreError> {
        let mut head = [0; 5];
        self.exact(&mut head)?;
        let mut expected = [0; 4];
        self.exact(&mut expected)?;
        let claimed = u32::from_le_bytes([head[1], head[2], head[3], head[4]]);
        let length = usize::try_from(claimed).unwrap_or(usize::MAX);
        if length > MAX_FRAME_BYTES {
            return Err(corrupt(format!("a frame claims {length} bytes")));
        }
        // It grows as the bytes come, whatever was claimed.
        self.payload.clear();
        let mut body = Read::take(&mut *self.input, claimed.into());
        if body.read_to_end(&mut self.payload).map_err(StoreError::Stream)? < length {
            return Err(corrupt("it ends too early"));
        }
        self.checksum = crc32c::crc32c_append(self.checksum, &head);
        self.checksum = crc32c::crc32c_append(self.checksum, &self.payload);
        if self.checksum != u32::from_le_bytes(expected) {
            return Err(corrupt("a checksum does not match"));
        }
        Kind::of(head[0]).ok_or_else(|| corrupt(format!("unknown frame kind {}", head[0])))
    }

    fn message<M: Message + Default>(&self) -> Result<M, StoreError> {
        M::decode(&self.payload[..]).map_err(|error| corrupt(error.to_string()))
    }
}

impl View {
    /// Writes the store as of this view. Needs memory for one frame; meanwhile the file can't use
    /// again the pages that belong to the view.
    pub fn write_snapshot(&self, out: &mut dyn Write) -> Result<(), StoreError> {
        out.write_all(&MAGIC).map_err(StoreError::Stream)?;
        out.write_all(&VERSION.to_le_bytes()).map_err(StoreError::Stream)?;
        let mut frames = FrameWriter { out, checksum: 0 };
        frames.frame(Kind::Progress, &self.progress.encode())?;
        self.write_contents(&mut frames)?;
        frames.out.flush().map_err(StoreError::Stream)
    }

    /// A checksum of all that the file holds but how far the log is applied, which members are asked
    /// for at different moments: their records, those included that a compaction has yet to take
    /// away, the members, those that were removed, the alarms, the leases, users and roles. What etcd's `Hash` is to its file,
    /// another's; two members of one cluster agree that have applied the same, and had compacted the same
    /// when they did. Reads everything: call it where it may block.
    pub fn checksum(&self) -> Result<u32, StoreError> {
        let (mut nowhere, mut checksum) = (std::io::sink(), 0);
        for number in [self.progress.revision, self.progress.compacted] {
            checksum = crc32c::crc32c_append(checksum, &number.to_le_bytes());
        }
        let mut frames = FrameWriter { out: &mut nowhere, checksum };
        self.write_contents(&mut frames)?;
        Ok(frames.checksum)
    }

    fn write_contents(&self, frames: &mut FrameWriter<'_>) -> Result<(), StoreError> {
        for member in self.members().members() {
            frames.frame(Kind::Member, &musterpb::Member::from(member).encode_to_vec())?;
        }
        for (id, member) in self.members().removed() {
            frames.frame(Kind::Removed, &member.encode(id).encode_to_vec())?;
        }
        for alarm in self.alarms() {
            frames.frame(Kind::Alarm, &alarm.encode_to_vec())?;
        }
        for lease in self.leases()? {
            frames.frame(Kind::Lease, &encode_lease(lease))?;
        }
        // Without users there is nothing that a build which knows none could not read.
        if *self.auth() != AuthState::default() {
            frames.frame(Kind::Auth, &encode_auth(self.auth()))?;
        }
        for (_, user) in self.auth().user_rows() {
            frames.frame(Kind::User, &user.encode_to_vec())?;
        }
        for (_, role) in self.auth().role_rows() {
            frames.frame(Kind::Role, &role.encode_to_vec())?;
        }
        write_records(self, frames)
    }
}

/// What a store holds beside its records.
#[derive(Clone, Debug)]
pub struct Contents {
    /// The last log entry in it.
    pub applied: Position,
    /// The newest revision: no record has a newer one.
    pub revision: i64,
    /// The last compaction, whether or not what it takes away is gone; -1: none.
    pub compacted: i64,
    /// Who belongs to the cluster.
    pub members: MemberTable,
    /// The alarms that are raised.
    pub alarms: Vec<AlarmMember>,
    /// Leases; which keys are attached to them, the records say.
    pub leases: Vec<Lease>,
    /// Who may do what.
    pub auth: AuthState,
}

/// What is in a snapshot beside progress and records.
struct Rest {
    cluster: Cluster,
    leases: Vec<Lease>,
}

/// Takes a record that comes after all others.
type TakeRecord<'a> = dyn FnMut(u128, &[u8]) -> Result<(), StoreError> + 'a;

impl Writer {
    /// Replaces the whole store, durably and at once, by what [`View::write_snapshot`] wrote. A
    /// damaged stream changes nothing.
    pub fn install_snapshot(&mut self, input: &mut dyn Read) -> Result<Position, StoreError> {
        let (mut frames, progress) = begin(input)?;
        self.install(progress, |take| read_frames(&mut frames, take))?;
        Ok(progress.applied)
    }

    /// Replaces the whole store, durably and at once, by `contents` and the records that `fill`
    /// gives, each an encoded `KeyValue`, in the order of their revisions. If that fails, nothing has
    /// changed.
    pub fn import<E: From<StoreError>>(
        &mut self,
        contents: Contents,
        fill: impl FnOnce(&mut dyn FnMut(Revision, &[u8]) -> Result<(), StoreError>) -> Result<(), E>,
    ) -> Result<(), E> {
        let Contents { applied, revision, compacted, members, mut alarms, leases, auth } = contents;
        alarms.sort_unstable_by_key(|alarm| (alarm.member_id, alarm.alarm));
        self.install(Progress { applied, revision, compacted }, |take| {
            fill(&mut |at, record| {
                assert!(at.main <= revision, "a record of {at:?} in a store at {revision}");
                take(at.to_row(), record)
            })?;
            let (members, auth) = (Arc::new(members), Arc::new(auth));
            Ok(Rest { cluster: Cluster { members, alarms, auth }, leases })
        })
    }

    fn install<E: From<StoreError>>(
        &mut self,
        progress: Progress,
        fill: impl FnOnce(&mut TakeRecord<'_>) -> Result<Rest, E>,
    ) -> Result<(), E> {
        let shared = self.shared.clone();
        let _alone = shared.one_state.lock().expect("a panic under it stops the process");
        let file = shared.file();
        let mut txn = file.db.begin_write().map_err(StoreError::from)?;
        let empty = |txn: &mut redb::WriteTransaction| {
            txn.set_durability(Durability::Immediate)?;
            txn.set_quick_repair(true);
            txn.delete_table(RECORDS)?;
            txn.delete_table(LEASES)?;
            Ok::<_, StoreError>(())
        };
        empty(&mut txn)?;
        let Rest { cluster, leases } = {
            let mut records = txn.open_table(RECORDS).map_err(StoreError::from)?;
            fill(&mut |row, record| {
                records.insert(row, record)?;
                Ok(())
            })?
        };
        write_cluster(&txn, &cluster)?;
        write_auth(&txn, &cluster.auth)?;
        {
            let mut rows = txn.open_table(LEASES).map_err(StoreError::from)?;
            for lease in leases {
                let row = encode_lease(lease);
                rows.insert(lease.id, &row[..]).map_err(StoreError::from)?;
            }
            let mut meta = txn.open_table(META).map_err(StoreError::from)?;
            write_progress(&mut meta, progress)?;
            write_compacted(&mut meta, Progress::START.compacted)?;
        }
        txn.commit().map_err(StoreError::from)?;
        Ok(self.replace(&file, progress, cluster)?)
    }
}

/// Reads through what [`View::write_snapshot`] wrote, to its end, and returns the position that it
/// is of, and who belonged to the cluster there: an error here is one that would come, or worse, if it were installed. Needs memory for one
/// frame.
pub fn inspect_snapshot(input: &mut dyn Read) -> Result<(Position, Members), StoreError> {
    let (mut frames, progress) = begin(input)?;
    let rest = read_frames(&mut frames, &mut |_, record| decode(record).map(drop))?;
    Ok((progress.applied, rest.cluster.members.voters_and_learners()))
}

fn begin(input: &mut dyn Read) -> Result<(FrameReader<'_>, Progress), StoreError> {
    let mut frames = FrameReader { input, checksum: 0, payload: Vec::new() };
    let mut head = [0; 12];
    frames.exact(&mut head)?;
    if head[..8] != MAGIC {
        return Err(corrupt("it does not begin as one"));
    }
    if head[8..] != VERSION.to_le_bytes() {
        return Err(corrupt("it has another version"));
    }
    if frames.frame()? != Kind::Progress {
        return Err(corrupt("it does not say how far it goes"));
    }
    let progress = Progress::decode(&frames.payload)?;
    Ok((frames, progress))
}

fn write_records(view: &View, frames: &mut FrameWriter<'_>) -> Result<(), StoreError> {
    let mut payload = Vec::with_capacity(FRAME_BYTES);
    let mut count: u64 = 0;
    for row in view.records.iter()? {
        let (first, row) = row?;
        for record in records(first.value(), row.value()) {
            let (at, record) = record?;
            let length = u32::try_from(record.len());
            let length = length.map_err(|_| corrupt("a record is too long"))?;
            payload.extend_from_slice(&at.to_row().to_le_bytes());
            payload.extend_from_slice(&length.to_le_bytes());
            payload.extend_from_slice(record);
            count += 1;
            // After each record, and not each row: how records lie in rows differs between members,
            // and a checksum is of frames.
            if payload.len() >= FRAME_BYTES {
                frames.frame(Kind::Records, &payload)?;
                payload.clear();
            }
        }
    }
    if !payload.is_empty() {
        frames.frame(Kind::Records, &payload)?;
    }
    frames.frame(Kind::End, &count.to_le_bytes())
}

fn read_frames(
    frames: &mut FrameReader<'_>,
    record: &mut TakeRecord<'_>,
) -> Result<Rest, StoreError> {
    let mut count: u64 = 0;
    let (mut members, mut removed, mut alarms) = (Vec::new(), Vec::new(), Vec::new());
    let mut leases = Vec::new();
    let (mut users, mut roles) = (Vec::new(), Vec::new());
    let (mut enabled, mut auth_revision) = (false, AuthState::default().revision());
    loop {
        match frames.frame()? {
            Kind::Member => members.push(decode_member(&frames.payload).map_err(corrupt)?),
            Kind::Removed => removed.push(decode_removed(&frames.payload).map_err(corrupt)?),
            Kind::Alarm => alarms.push(frames.message::<AlarmMember>()?),
            Kind::Lease => leases.push(decode_lease(&frames.payload).map_err(corrupt)?),
            Kind::Auth => {
                (enabled, auth_revision) = decode_auth(&frames.payload).map_err(corrupt)?;
            }
            Kind::User => users.push(decode_user(&frames.payload).map_err(corrupt)?),
            Kind::Role => roles.push(decode_role(&frames.payload).map_err(corrupt)?),
            Kind::Records => {
                let mut rest = &frames.payload[..];
                while !rest.is_empty() {
                    let (row, bytes, after) =
                        split_record(rest).ok_or_else(|| corrupt("a record is cut off"))?;
                    record(row, bytes)?;
                    count += 1;
                    rest = after;
                }
            }
            Kind::End if frames.payload == count.to_le_bytes() => {
                let members = Arc::new(MemberTable::from_parts(members, removed));
                let auth = AuthState::from_rows(enabled, auth_revision, users, roles);
                let auth = Arc::new(auth.map_err(corrupt)?);
                return Ok(Rest { cluster: Cluster { members, alarms, auth }, leases });
            }
            Kind::End => return Err(corrupt("the number of records does not match")),
            Kind::Progress => return Err(corrupt("it says twice how far it goes")),
        }
    }
}

/// The first record of a frame, and what follows it.
fn split_record(frame: &[u8]) -> Option<(u128, &[u8], &[u8])> {
    let (row, rest) = frame.split_first_chunk::<16>()?;
    let (length, rest) = rest.split_first_chunk::<4>()?;
    let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
    let (record, rest) = rest.split_at_checked(length)?;
    Some((u128::from_le_bytes(*row), record, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_takes_no_more_memory_than_has_come_of_it() {
        let mut input: &[u8] = &[1, 0, 0, 0, 3, 0, 0, 0, 0, 7, 7];
        let mut frames = FrameReader { input: &mut input, checksum: 0, payload: Vec::new() };
        assert!(matches!(frames.frame(), Err(StoreError::Snapshot(_))));
        assert_eq!(frames.payload, [7, 7]);
        assert!(frames.payload.capacity() < 1 << 10);
    }
}
