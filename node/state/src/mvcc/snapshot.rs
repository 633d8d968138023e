//! Snapshot stream: the whole store, for a member that is too far behind the log.
//!
//! The stream begins with a magic number and a version. Frames follow, each with kind, length,
//! CRC-32C and payload. Each checksum continues the previous one, so that a lost, repeated or moved
//! frame is noticed. The last frame has the number of records. Reader and writer hold one frame at
//! a time.

use std::io::{Read, Write};
use std::sync::Arc;

use node_proto::etcdserverpb::AlarmMember;
use node_proto::musterpb;
use prost::Message;
use redb::Durability;

use super::error::StoreError;
use super::event::decode;
use super::revision::Revision;
use super::rows::records;
use super::store::View;
use super::tables::{
    ClusterData, LEASES, META, RECORDS, StoreProgress, decode_auth, decode_lease, decode_member,
    decode_removed, decode_role, decode_user, encode_auth, encode_lease, write_auth, write_cluster,
    write_finished_compaction, write_progress,
};
use super::writer::StoreWriter;
use crate::auth::AuthState;
use crate::lease::Lease;
use crate::membership::MemberTable;
use crate::state_machine::{Members, Position};

const MAGIC: [u8; 8] = *b"MUSTERKV";
const VERSION: u32 = 2;
/// Size from which a frame of records is written out.
const FRAME_BYTES: usize = 256 * 1024;
/// Maximum length of a frame: one record of the largest request, with some reserve.
const MAX_FRAME_BYTES: usize = 64 * 1024 * 1024;

/// Kind of a frame.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SnapshotFrameKind {
    Progress = 1,
    Member = 2,
    Alarm = 3,
    /// Records. Each has the number of its row (16 bytes), its length (4 bytes) and its contents.
    Records = 4,
    /// Last frame: the number of records in the snapshot (8 bytes).
    End = 5,
    Removed = 6,
    Lease = 7,
    /// Whether authentication is enabled (1 byte), and the revision of users and roles (8 bytes).
    Auth = 8,
    User = 9,
    Role = 10,
}

impl SnapshotFrameKind {
    fn of(byte: u8) -> Option<Self> {
        use SnapshotFrameKind::{
            Alarm, Auth, End, Lease, Member, Progress, Records, Removed, Role, User,
        };
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
    fn write_frame(&mut self, kind: SnapshotFrameKind, payload: &[u8]) -> Result<(), StoreError> {
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

    /// Reads the next frame's payload into `payload`, and returns its kind.
    fn read_frame(&mut self) -> Result<SnapshotFrameKind, StoreError> {
        let mut head = [0; 5];
        self.exact(&mut head)?;
        let mut expected = [0; 4];
        self.exact(&mut expected)?;
        let claimed = u32::from_le_bytes([head[1], head[2], head[3], head[4]]);
        let length = usize::try_from(claimed).unwrap_or(usize::MAX);
        if length > MAX_FRAME_BYTES {
            return Err(corrupt(format!("a frame claims {length} bytes")));
        }
        // The buffer grows as bytes arrive, so a false length can't make us allocate much.
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
        SnapshotFrameKind::of(head[0])
            .ok_or_else(|| corrupt(format!("unknown frame kind {}", head[0])))
    }

    fn message<M: Message + Default>(&self) -> Result<M, StoreError> {
        M::decode(&self.payload[..]).map_err(|error| corrupt(error.to_string()))
    }
}

impl View {
    /// Writes the store as of this view. The call needs memory for one frame. During the call, the
    /// file can't reuse the view's pages.
    pub fn write_snapshot(&self, out: &mut dyn Write) -> Result<(), StoreError> {
        out.write_all(&MAGIC).map_err(StoreError::Stream)?;
        out.write_all(&VERSION.to_le_bytes()).map_err(StoreError::Stream)?;
        let mut frames = FrameWriter { out, checksum: 0 };
        frames.write_frame(SnapshotFrameKind::Progress, &self.progress.encode())?;
        self.write_contents(&mut frames)?;
        frames.out.flush().map_err(StoreError::Stream)
    }

    /// Returns a checksum of the whole file: records, members, removed members, alarms, leases,
    /// users and roles. Records that a compaction has yet to delete are included. The applied
    /// position is left out, because members are asked at different moments.
    ///
    /// This checksum plays the role of etcd's `Hash`, but has another value. Two members have the
    /// same checksum if they have applied the same entries and deleted the same compacted records.
    /// This reads the whole store, so call it where blocking is allowed.
    pub fn checksum(&self) -> Result<u32, StoreError> {
        let (mut nowhere, mut checksum) = (std::io::sink(), 0);
        for number in [self.progress.revision, self.progress.compact_revision] {
            checksum = crc32c::crc32c_append(checksum, &number.to_le_bytes());
        }
        let mut frames = FrameWriter { out: &mut nowhere, checksum };
        self.write_contents(&mut frames)?;
        Ok(frames.checksum)
    }

    fn write_contents(&self, frames: &mut FrameWriter<'_>) -> Result<(), StoreError> {
        for member in self.members().members() {
            frames.write_frame(
                SnapshotFrameKind::Member,
                &musterpb::Member::from(member).encode_to_vec(),
            )?;
        }
        for (id, member) in self.members().removed() {
            frames.write_frame(SnapshotFrameKind::Removed, &member.encode(id).encode_to_vec())?;
        }
        for alarm in self.alarms() {
            frames.write_frame(SnapshotFrameKind::Alarm, &alarm.encode_to_vec())?;
        }
        for lease in self.leases()? {
            frames.write_frame(SnapshotFrameKind::Lease, &encode_lease(lease))?;
        }
        // Without users and roles, this frame is left out, so that builds that don't know the frame
        // can read the snapshot.
        if *self.auth() != AuthState::default() {
            frames.write_frame(SnapshotFrameKind::Auth, &encode_auth(self.auth()))?;
        }
        for (_, user) in self.auth().user_rows() {
            frames.write_frame(SnapshotFrameKind::User, &user.encode_to_vec())?;
        }
        for (_, role) in self.auth().role_rows() {
            frames.write_frame(SnapshotFrameKind::Role, &role.encode_to_vec())?;
        }
        write_records(self, frames)
    }
}

/// Contents of a store except its records.
#[derive(Clone, Debug)]
pub struct Contents {
    /// Position of the last log entry applied to the store.
    pub applied: Position,
    /// Newest revision. No record has a newer one.
    pub revision: i64,
    /// Last compaction revision, whether or not its records are deleted yet; -1 if there was none.
    pub compact_revision: i64,
    /// Current and removed members of the cluster.
    pub members: MemberTable,
    /// Active alarms of the cluster.
    pub alarms: Vec<AlarmMember>,
    /// Leases. Their attached keys follow from the records.
    pub leases: Vec<Lease>,
    /// Users, roles and whether authentication is enabled.
    pub auth: AuthState,
}

/// Contents of a snapshot except progress and records.
struct SnapshotMetadata {
    cluster: ClusterData,
    leases: Vec<Lease>,
}

/// Function that takes a row and its record, in ascending order of rows.
type RecordSink<'a> = dyn FnMut(u128, &[u8]) -> Result<(), StoreError> + 'a;

impl StoreWriter {
    /// Replaces the whole store, durably and in one transaction, by a stream from
    /// [`View::write_snapshot`]. A damaged stream changes nothing.
    pub fn install_snapshot(&mut self, input: &mut dyn Read) -> Result<Position, StoreError> {
        let (mut frames, progress) = read_header(input)?;
        self.install(progress, |take| read_frames(&mut frames, take))?;
        Ok(progress.applied)
    }

    /// Replaces the whole store, durably and in one transaction. The new store has `contents` and
    /// the records that `fill` passes: encoded `KeyValue`s in the order of revisions. An error
    /// changes nothing.
    pub fn import<E: From<StoreError>>(
        &mut self,
        contents: Contents,
        fill: impl FnOnce(&mut dyn FnMut(Revision, &[u8]) -> Result<(), StoreError>) -> Result<(), E>,
    ) -> Result<(), E> {
        let Contents {
            applied,
            revision,
            compact_revision: compacted,
            members,
            mut alarms,
            leases,
            auth,
        } = contents;
        alarms.sort_unstable_by_key(|alarm| (alarm.member_id, alarm.alarm));
        self.install(StoreProgress { applied, revision, compact_revision: compacted }, |take| {
            fill(&mut |at, record| {
                assert!(at.main <= revision, "a record of {at:?} in a store at {revision}");
                take(at.to_row(), record)
            })?;
            let (members, auth) = (Arc::new(members), Arc::new(auth));
            Ok(SnapshotMetadata { cluster: ClusterData { members, alarms, auth }, leases })
        })
    }

    fn install<E: From<StoreError>>(
        &mut self,
        progress: StoreProgress,
        fill: impl FnOnce(&mut RecordSink<'_>) -> Result<SnapshotMetadata, E>,
    ) -> Result<(), E> {
        let shared = self.shared.clone();
        let _alone = shared.state_lock.lock().expect("a panic under it stops the process");
        let file = shared.file();
        let _no_flush = shared.flush_lock.lock().expect("a panic under it stops the process");
        let mut txn = file.db.begin_write().map_err(StoreError::from)?;
        let empty = |txn: &mut redb::WriteTransaction| {
            txn.set_durability(Durability::Immediate)?;
            txn.set_quick_repair(true);
            txn.delete_table(RECORDS)?;
            txn.delete_table(LEASES)?;
            Ok::<_, StoreError>(())
        };
        empty(&mut txn)?;
        let SnapshotMetadata { cluster, leases } = {
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
            write_finished_compaction(&mut meta, StoreProgress::START.compact_revision)?;
        }
        txn.commit().map_err(StoreError::from)?;
        Ok(self.replace(&file, progress, cluster)?)
    }
}

/// Checks a whole stream from [`View::write_snapshot`] without installing it. Returns its log
/// position and the members at that position. A damaged stream is an error here, as in
/// `install_snapshot`. The check needs memory for one frame.
pub fn inspect_snapshot(input: &mut dyn Read) -> Result<(Position, Members), StoreError> {
    let (mut frames, progress) = read_header(input)?;
    let rest = read_frames(&mut frames, &mut |_, record| decode(record).map(drop))?;
    Ok((progress.applied, rest.cluster.members.voters_and_learners()))
}

fn read_header(input: &mut dyn Read) -> Result<(FrameReader<'_>, StoreProgress), StoreError> {
    let mut frames = FrameReader { input, checksum: 0, payload: Vec::new() };
    let mut head = [0; 12];
    frames.exact(&mut head)?;
    if head[..8] != MAGIC {
        return Err(corrupt("it does not begin as one"));
    }
    if head[8..] != VERSION.to_le_bytes() {
        return Err(corrupt("it has another version"));
    }
    if frames.read_frame()? != SnapshotFrameKind::Progress {
        return Err(corrupt("it does not say how far it goes"));
    }
    let progress = StoreProgress::decode(&frames.payload)?;
    Ok((frames, progress))
}

fn write_records(view: &View, frames: &mut FrameWriter<'_>) -> Result<(), StoreError> {
    let mut payload = Vec::with_capacity(FRAME_BYTES);
    let mut count: u64 = 0;
    for row in view.all_rows()? {
        let (first, row) = row?;
        for record in records(first, &row) {
            let (at, record) = record?;
            let length = u32::try_from(record.len());
            let length = length.map_err(|_| corrupt("a record is too long"))?;
            payload.extend_from_slice(&at.to_row().to_le_bytes());
            payload.extend_from_slice(&length.to_le_bytes());
            payload.extend_from_slice(record);
            count += 1;
            // The length is checked after each record, not each row. Different members can keep the
            // same records in different rows, but the checksum depends on where frames end.
            if payload.len() >= FRAME_BYTES {
                frames.write_frame(SnapshotFrameKind::Records, &payload)?;
                payload.clear();
            }
        }
    }
    if !payload.is_empty() {
        frames.write_frame(SnapshotFrameKind::Records, &payload)?;
    }
    frames.write_frame(SnapshotFrameKind::End, &count.to_le_bytes())
}

fn read_frames(
    frames: &mut FrameReader<'_>,
    record: &mut RecordSink<'_>,
) -> Result<SnapshotMetadata, StoreError> {
    let mut count: u64 = 0;
    let (mut members, mut removed, mut alarms) = (Vec::new(), Vec::new(), Vec::new());
    let mut leases = Vec::new();
    let (mut users, mut roles) = (Vec::new(), Vec::new());
    let (mut enabled, mut auth_revision) = (false, AuthState::default().revision());
    loop {
        match frames.read_frame()? {
            SnapshotFrameKind::Member => {
                members.push(decode_member(&frames.payload).map_err(corrupt)?)
            }
            SnapshotFrameKind::Removed => {
                removed.push(decode_removed(&frames.payload).map_err(corrupt)?)
            }
            SnapshotFrameKind::Alarm => alarms.push(frames.message::<AlarmMember>()?),
            SnapshotFrameKind::Lease => {
                leases.push(decode_lease(&frames.payload).map_err(corrupt)?)
            }
            SnapshotFrameKind::Auth => {
                (enabled, auth_revision) = decode_auth(&frames.payload).map_err(corrupt)?;
            }
            SnapshotFrameKind::User => users.push(decode_user(&frames.payload).map_err(corrupt)?),
            SnapshotFrameKind::Role => roles.push(decode_role(&frames.payload).map_err(corrupt)?),
            SnapshotFrameKind::Records => {
                let mut rest = &frames.payload[..];
                while !rest.is_empty() {
                    let (row, bytes, after) =
                        split_record(rest).ok_or_else(|| corrupt("a record is cut off"))?;
                    record(row, bytes)?;
                    count += 1;
                    rest = after;
                }
            }
            SnapshotFrameKind::End if frames.payload == count.to_le_bytes() => {
                let members = Arc::new(MemberTable::from_parts(members, removed));
                let auth = AuthState::from_rows(enabled, auth_revision, users, roles);
                let auth = Arc::new(auth.map_err(corrupt)?);
                return Ok(SnapshotMetadata {
                    cluster: ClusterData { members, alarms, auth },
                    leases,
                });
            }
            SnapshotFrameKind::End => return Err(corrupt("the number of records does not match")),
            SnapshotFrameKind::Progress => return Err(corrupt("it says twice how far it goes")),
        }
    }
}

/// Splits the first record off a frame: its row, its bytes, and the remaining frame.
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
    fn a_frame_takes_memory_only_for_received_bytes() {
        let mut input: &[u8] = &[1, 0, 0, 0, 3, 0, 0, 0, 0, 7, 7];
        let mut frames = FrameReader { input: &mut input, checksum: 0, payload: Vec::new() };
        assert!(matches!(frames.read_frame(), Err(StoreError::Snapshot(_))));
        assert_eq!(frames.payload, [7, 7]);
        assert!(frames.payload.capacity() < 1 << 10);
    }
}
