//! The hello: 96 bytes in each direction, before anything else is sent on a stream.
//!
//! ```text
//! 0  magic "MUSTERP1"   8
//! 8  version            2   big endian, as all numbers
//! 10 purpose            1   0 messages, 1 snapshot, 2 request, 3 members, 4 state,
//!                           5 take snapshot, 6 take request
//! 11 answer             1   0 in the dialler's hello and for "accepted"; otherwise the refusal
//! 12 zero               4
//! 16 cluster            8
//! 24 from               8
//! 32 to                 8
//! 40 incarnation       16
//! 56 boot counter       8
//! 64 run                8   random per process: distinguishes a copy from a reconnect
//! 72 term               8   state of the disk when the process began: term, vote
//!                           and last index
//! 80 vote               8
//! 88 last index         8
//! ```
//!
//! The answer repeats the purpose of the dialler's hello, with one exception: "messages" is
//! answered by "snapshot". Older builds, which know one-way streams only, answer "messages", and
//! ignore the purpose of an answer. So the dialler learns from the answer whether the other end
//! knows two-way streams. If so, the dialler sends the frame `TwoWay`. From this frame, the other
//! end learns that the dialler knows them as well.
//!
//! The first ten bytes are the same in every version, so a hello of another version can be refused
//! properly.

use std::io;

use node_state::identity::{ClusterId, Incarnation, MemberId, NodeKey};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::super::{LocalMember, PeerRecord, registry::Proof};
use crate::witness::{DiskState, ProcessClaim};

/// Length of a hello in bytes.
pub(in crate::transport) const HELLO_BYTES: usize = 96;
const MAGIC: &[u8; 8] = b"MUSTERP1";
const VERSION: u16 = 2;
/// End of magic and version, in bytes from the start.
const VERSION_ENDS: usize = 10;

/// Purpose for which a stream was opened. The numbers are those of the wire format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(in crate::transport) enum StreamPurpose {
    /// Consensus messages, pings, promises and lists of members, in one or both directions.
    Messages = 0,
    /// A snapshot sent by the dialler.
    Snapshot = 1,
    /// One request of the dialler, and its answer.
    Request = 2,
    /// A request for the list of members. All ids in the hello are 0, because a joining member
    /// doesn't know them yet.
    Members = 3,
    /// The whole state, sent to a joining member.
    State = 4,
    /// A snapshot sent by the member that accepted the connection. That member had invited the
    /// dialler.
    TakeSnapshot = 5,
    /// One request of the member that accepted the connection, and its answer. That member had
    /// invited the dialler.
    TakeRequest = 6,
}

impl StreamPurpose {
    const ALL: [Self; 7] = [
        Self::Messages,
        Self::Snapshot,
        Self::Request,
        Self::Members,
        Self::State,
        Self::TakeSnapshot,
        Self::TakeRequest,
    ];
    /// Purpose in the answer to [`StreamPurpose::Messages`] that shows that the answering build
    /// knows two-way streams.
    const TWO_WAY: Self = Self::Snapshot;

    pub(in crate::transport) fn from_wire(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|purpose| *purpose as u8 == byte)
    }

    /// Returns the purpose to put in the answer to an accepted hello with this purpose.
    pub(in crate::transport) fn in_answer(self) -> Self {
        if self == Self::Messages { Self::TWO_WAY } else { self }
    }

    /// Returns the purpose of the stream that the peer opens instead, if this member invites it to.
    /// `None` if a stream for this purpose can't be opened by the peer.
    pub(in crate::transport) fn reversed(self) -> Option<Self> {
        match self {
            Self::Snapshot => Some(Self::TakeSnapshot),
            Self::Request => Some(Self::TakeRequest),
            Self::Messages
            | Self::Members
            | Self::State
            | Self::TakeSnapshot
            | Self::TakeRequest => None,
        }
    }

    /// Returns whether streams of this purpose are opened only on an invitation.
    pub(in crate::transport) fn is_reversed(self) -> bool {
        matches!(self, Self::TakeSnapshot | Self::TakeRequest)
    }
}

/// Reason why a stream was refused. The numbers are those of the wire format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[repr(u8)]
pub enum StreamRefusal {
    /// The other end doesn't speak the peer protocol.
    #[error("it does not speak the peer protocol")]
    Protocol = 1,
    /// The other end speaks another version of the peer protocol.
    #[error("it speaks another version of the peer protocol")]
    Version = 2,
    /// The other end belongs to another cluster.
    #[error("cluster ID mismatch")]
    Cluster = 3,
    /// The other end expected another member at this address.
    #[error("it looks for another member at this address")]
    Receiver = 4,
    /// No member has the sender's id.
    #[error("its member id is not in the cluster")]
    Sender = 5,
    /// The sender was removed from the cluster.
    #[error("the member has been permanently removed from the cluster")]
    Removed = 6,
    /// The sender's data directory isn't the one that the sender's id is known to use.
    #[error("its incarnation is not that of the member: its disk was wiped or replaced")]
    Incarnation = 7,
    /// The sender's data directory is an older copy, or two processes use it.
    #[error("its boot counter went back, or runs twice: its data directory is a copy")]
    Boot = 8,
    /// The key of the sender's certificate isn't the key that the member's record binds.
    #[error(
        "its key is not the one bound to the member: it must have that key, or be removed and added with another"
    )]
    Key = 9,
    /// The receiver can't record the sender at present: it can't write to its disk, or has no room
    /// for another member. The sender is not at fault.
    #[error("the other end cannot write down what it must remember of this member")]
    Unavailable = 10,
    /// The sender's disk lacks a vote or entries that the member has promised earlier.
    #[error(
        "its disk holds less than the member has promised: its data directory was put back from an older image"
    )]
    Amnesia = 11,
    /// Another process of the same member is connected, and may still be alive.
    #[error("another process of this member is connected, and it is being seen whether that lives")]
    AnotherProcess = 12,
}

impl StreamRefusal {
    /// All reasons, for metrics.
    pub const ALL: [Self; 12] = [
        Self::Protocol,
        Self::Version,
        Self::Cluster,
        Self::Receiver,
        Self::Sender,
        Self::Removed,
        Self::Incarnation,
        Self::Boot,
        Self::Key,
        Self::Unavailable,
        Self::Amnesia,
        Self::AnotherProcess,
    ];

    /// Returns whether the sender's data directory is refused. If so, no restart on that directory
    /// helps.
    pub fn is_permanent(self) -> bool {
        matches!(self, Self::Incarnation | Self::Boot | Self::Amnesia)
    }

    /// Returns the reason's label for metrics.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Protocol => "protocol",
            Self::Version => "version",
            Self::Cluster => "cluster_id",
            Self::Receiver => "receiver",
            Self::Sender => "unknown_member",
            Self::Removed => "removed",
            Self::Incarnation => "incarnation",
            Self::Boot => "boot_counter",
            Self::Key => "node_key",
            Self::Unavailable => "unavailable",
            Self::Amnesia => "amnesia",
            Self::AnotherProcess => "another_process",
        }
    }

    fn from_wire(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|refusal| *refusal as u8 == byte)
    }
}

/// Identity of the sender, and the id of the member that it expects to reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::transport) struct Hello {
    pub purpose: StreamPurpose,
    /// Reason for a refusal. `None` if the hello is accepted, and always `None` in the dialler's
    /// hello.
    pub answer: Option<StreamRefusal>,
    pub cluster: ClusterId,
    pub from: MemberId,
    pub to: MemberId,
    pub incarnation: Incarnation,
    pub boot: u64,
    pub run: u64,
    pub disk: DiskState,
}

impl Hello {
    pub(in crate::transport) fn new(
        local: &LocalMember,
        to: MemberId,
        purpose: StreamPurpose,
    ) -> Self {
        Self {
            purpose,
            answer: None,
            cluster: local.cluster,
            from: local.member,
            to,
            incarnation: local.incarnation,
            boot: local.boot,
            run: local.run,
            disk: local.disk,
        }
    }

    /// Returns the claims of the process that sent this hello.
    pub(in crate::transport) fn process_claim(&self) -> ProcessClaim {
        let Self { incarnation, boot, run, disk, .. } = *self;
        ProcessClaim { incarnation, boot, run, disk }
    }

    /// Returns whether this answer to [`StreamPurpose::Messages`] shows that the answering build
    /// knows two-way streams.
    pub(in crate::transport) fn offers_two_way(&self) -> bool {
        self.answer.is_none() && self.purpose == StreamPurpose::TWO_WAY
    }

    /// Returns the proven identity of the sender. `key` is the key of its certificate.
    pub(in crate::transport) fn proof(&self, key: Option<NodeKey>) -> Proof {
        Proof { incarnation: self.incarnation, run: self.run, key }
    }

    /// Reads one hello. The inner result is a refusal if the bytes are not a valid hello.
    ///
    /// # Errors
    /// If the stream fails.
    pub(in crate::transport) async fn read<R: AsyncRead + Unpin>(
        from: &mut R,
    ) -> io::Result<Result<Self, StreamRefusal>> {
        let mut bytes = [0; HELLO_BYTES];
        from.read_exact(&mut bytes[..VERSION_ENDS]).await?;
        if let Err(refusal) = check_version(&bytes) {
            return Ok(Err(refusal));
        }
        from.read_exact(&mut bytes[VERSION_ENDS..]).await?;
        Ok(Self::decode(&bytes))
    }

    pub(in crate::transport) fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut out = [0; HELLO_BYTES];
        out[..8].copy_from_slice(MAGIC);
        out[8..10].copy_from_slice(&VERSION.to_be_bytes());
        out[10] = self.purpose as u8;
        out[11] = self.answer.map_or(0, |refusal| refusal as u8);
        out[16..24].copy_from_slice(&self.cluster.0.to_be_bytes());
        out[24..32].copy_from_slice(&self.from.0.to_be_bytes());
        out[32..40].copy_from_slice(&self.to.0.to_be_bytes());
        out[40..56].copy_from_slice(&self.incarnation.0);
        out[56..64].copy_from_slice(&self.boot.to_be_bytes());
        out[64..72].copy_from_slice(&self.run.to_be_bytes());
        out[72..80].copy_from_slice(&self.disk.term.to_be_bytes());
        out[80..88].copy_from_slice(&self.disk.vote.to_be_bytes());
        out[88..96].copy_from_slice(&self.disk.last.to_be_bytes());
        out
    }

    pub(in crate::transport) fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, StreamRefusal> {
        check_version(bytes)?;
        let purpose = StreamPurpose::from_wire(bytes[10]).ok_or(StreamRefusal::Protocol)?;
        let answer = match bytes[11] {
            0 => None,
            byte => Some(StreamRefusal::from_wire(byte).ok_or(StreamRefusal::Protocol)?),
        };
        if bytes[12..16] != [0; 4] {
            return Err(StreamRefusal::Protocol);
        }
        let number = |at: usize| {
            let mut eight = [0; 8];
            eight.copy_from_slice(&bytes[at..at + 8]);
            u64::from_be_bytes(eight)
        };
        let mut incarnation = [0; 16];
        incarnation.copy_from_slice(&bytes[40..56]);
        Ok(Self {
            purpose,
            answer,
            cluster: ClusterId(number(16)),
            from: MemberId(number(24)),
            to: MemberId(number(32)),
            incarnation: Incarnation(incarnation),
            boot: number(56),
            run: number(64),
            disk: DiskState { term: number(72), vote: number(80), last: number(88) },
        })
    }

    /// Checks this hello, received by `local`, against the sender's record. `record` is `Err(true)`
    /// for a removed member and `Err(false)` for an unknown one. The boot counter is not checked
    /// here, because that requires a write to disk.
    pub(in crate::transport) fn check(
        &self,
        local: &LocalMember,
        record: Result<&PeerRecord, bool>,
        key: Option<NodeKey>,
    ) -> Result<(), StreamRefusal> {
        // The cluster is checked first, so that a member of another cluster learns nothing about
        // this cluster's members.
        if self.cluster != local.cluster {
            return Err(StreamRefusal::Cluster);
        }
        if self.to != local.member {
            return Err(StreamRefusal::Receiver);
        }
        let peer =
            record.map_err(
                |removed| if removed { StreamRefusal::Removed } else { StreamRefusal::Sender },
            )?;
        if self.from != peer.id {
            return Err(StreamRefusal::Sender);
        }
        if peer.node_key.is_some() && peer.node_key != key {
            return Err(StreamRefusal::Key);
        }
        if peer.incarnation.is_some_and(|bound| bound != self.incarnation) {
            return Err(StreamRefusal::Incarnation);
        }
        Ok(())
    }
}

fn check_version(bytes: &[u8; HELLO_BYTES]) -> Result<(), StreamRefusal> {
    if &bytes[..8] != MAGIC {
        Err(StreamRefusal::Protocol)
    } else if bytes[8..VERSION_ENDS] != VERSION.to_be_bytes() {
        Err(StreamRefusal::Version)
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn local() -> LocalMember {
        LocalMember {
            cluster: ClusterId(1),
            member: MemberId(2),
            incarnation: Incarnation([2; 16]),
            boot: 1,
            run: 1,
            disk: DiskState::default(),
        }
    }

    fn peer() -> PeerRecord {
        PeerRecord {
            id: MemberId(3),
            urls: Vec::new(),
            incarnation: Some(Incarnation([3; 16])),
            node_key: Some(NodeKey([9; 32])),
        }
    }

    fn hello() -> Hello {
        Hello {
            purpose: StreamPurpose::Messages,
            answer: None,
            cluster: ClusterId(1),
            from: MemberId(3),
            to: MemberId(2),
            incarnation: Incarnation([3; 16]),
            boot: 4,
            run: 5,
            disk: DiskState { term: 6, vote: 7, last: 8 },
        }
    }

    #[test]
    fn a_matching_hello_is_accepted() {
        let key = Some(NodeKey([9; 32]));
        assert_eq!(hello().check(&local(), Ok(&peer()), key), Ok(()));
    }

    #[test]
    fn each_mismatch_in_a_hello_is_refused_with_its_reason() {
        let key = Some(NodeKey([9; 32]));
        let cases = [
            (Hello { cluster: ClusterId(8), ..hello() }, key, StreamRefusal::Cluster),
            (Hello { to: MemberId(8), ..hello() }, key, StreamRefusal::Receiver),
            (Hello { from: MemberId(8), ..hello() }, key, StreamRefusal::Sender),
            (
                Hello { incarnation: Incarnation([8; 16]), ..hello() },
                key,
                StreamRefusal::Incarnation,
            ),
            (hello(), Some(NodeKey([8; 32])), StreamRefusal::Key),
            (hello(), None, StreamRefusal::Key),
        ];
        for (hello, key, refusal) in cases {
            assert_eq!(hello.check(&local(), Ok(&peer()), key), Err(refusal));
        }
        assert_eq!(hello().check(&local(), Err(true), key), Err(StreamRefusal::Removed));
        assert_eq!(hello().check(&local(), Err(false), key), Err(StreamRefusal::Sender));
    }

    #[test]
    fn a_removed_member_of_another_cluster_is_refused_for_the_cluster() {
        let foreign = Hello { cluster: ClusterId(8), ..hello() };
        assert_eq!(foreign.check(&local(), Err(true), None), Err(StreamRefusal::Cluster));
    }

    proptest! {
        #[test]
        fn a_decoded_hello_encodes_to_the_same_bytes(mut bytes in proptest::array::uniform32(any::<u8>()), tail in proptest::collection::vec(any::<u8>(), HELLO_BYTES - 32), good in any::<bool>()) {
            if good {
                bytes[..12].copy_from_slice(b"MUSTERP1\0\x02\x01\x03");
                bytes[12..16].fill(0);
            }
            let mut all = [0; HELLO_BYTES];
            all[..32].copy_from_slice(&bytes);
            all[32..].copy_from_slice(&tail);
            match Hello::decode(&all) {
                Ok(hello) => prop_assert_eq!(hello.encode(), all),
                Err(_) => prop_assert!(!good),
            }
        }
    }
}
