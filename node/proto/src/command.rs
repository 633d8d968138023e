//! Encoding of log entries: one version byte, then a [`Command`].
//!
//! A member that reads an unknown version or operation must stop. Other members may have applied
//! the entry. If this member skipped it, its state would differ from theirs.

use bytes::{BufMut as _, Bytes, BytesMut};
use prost::Message as _;

pub use crate::musterpb::{
    AssignToken, AuthChange, Caller, Command, LeaseCheckpoint, LeaseExpire, LeaseLeft,
    MemberChange, PublishMember, command::Operation,
};

/// Command version that this build writes. Entries with another version can't be read.
pub const VERSION: u8 = 1;

/// Reason why a log entry can't be applied. After any of these errors, this member must stop and
/// run a newer build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommandDecodeError {
    /// The version byte is missing (`None`) or is not [`VERSION`].
    Version(Option<u8>),
    /// The bytes after the version byte are not a valid [`Command`].
    Malformed(String),
    /// The command has an operation that this build does not know.
    UnknownOperation {
        /// Request id of the command.
        request_id: u64,
    },
}

impl std::fmt::Display for CommandDecodeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Version(Some(version)) => {
                write!(f, "log entry has command version {version}, this build knows {VERSION}")
            }
            Self::Version(None) => write!(f, "log entry has no command version"),
            Self::Malformed(what) => write!(f, "log entry is no command: {what}"),
            Self::UnknownOperation { request_id } => {
                write!(
                    f,
                    "request {request_id:016x} has an operation that this build does not know"
                )
            }
        }
    }
}

impl std::error::Error for CommandDecodeError {}

/// A decoded log entry.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodedCommand {
    /// Request id, unique for the life of the cluster.
    pub request_id: u64,
    /// Caller of the request; `None` if the log entry names none.
    pub caller: Option<Caller>,
    pub operation: Operation,
}

/// Returns the caller to record for a request that a member itself makes.
pub fn member_caller() -> Option<Caller> {
    Some(Caller { member: true, ..Caller::default() })
}

/// Encodes a command as the bytes of a log entry.
pub fn encode(request_id: u64, caller: Option<Caller>, operation: Operation) -> Bytes {
    let command = Command { request_id, caller, operation: Some(operation) };
    let mut out = BytesMut::with_capacity(1 + command.encoded_len());
    out.put_u8(VERSION);
    // Encoding can't fail, because a `BytesMut` grows as needed.
    command.encode_raw(&mut out);
    out.freeze()
}

/// Decodes the bytes that [`encode`] returned. Keys and values share the memory of `data`.
pub fn decode(mut data: Bytes) -> Result<DecodedCommand, CommandDecodeError> {
    match data.first() {
        Some(&VERSION) => {}
        other => return Err(CommandDecodeError::Version(other.copied())),
    }
    let body = data.split_off(1);
    let command =
        Command::decode(body).map_err(|e| CommandDecodeError::Malformed(e.to_string()))?;
    let Command { request_id, caller, operation } = command;
    match operation {
        Some(
            Operation::ChangeMember(MemberChange { change: None, .. })
            | Operation::ChangeAuth(AuthChange { change: None }),
        )
        | None => Err(CommandDecodeError::UnknownOperation { request_id }),
        Some(operation) => Ok(DecodedCommand { request_id, caller, operation }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::etcdserverpb::PutRequest;

    fn put() -> Operation {
        Operation::Put(PutRequest {
            key: Bytes::from_static(b"k"),
            value: Bytes::from_static(b"v"),
            ..Default::default()
        })
    }

    #[test]
    fn a_command_survives_the_round_trip() {
        let user = Caller { user: "u".to_owned(), revision: 3, member: false };
        for caller in [None, member_caller(), Some(user)] {
            let said = DecodedCommand { request_id: 7, caller: caller.clone(), operation: put() };
            assert_eq!(decode(encode(7, caller, put())), Ok(said));
        }
    }

    #[test]
    fn another_version_is_refused() {
        let mut data = BytesMut::from(&encode(7, None, put())[..]);
        data[0] = 2;
        assert_eq!(decode(data.freeze()), Err(CommandDecodeError::Version(Some(2))));
        assert_eq!(decode(Bytes::new()), Err(CommandDecodeError::Version(None)));
    }

    #[test]
    fn an_unknown_operation_is_refused_not_skipped() {
        // The bytes are the version, then field 1 (the request id) with the value 7, then the
        // unknown field 100 with an empty message.
        let data = Bytes::from_static(&[VERSION, 0x08, 7, 0xa2, 0x06, 0]);
        assert_eq!(decode(data), Err(CommandDecodeError::UnknownOperation { request_id: 7 }));
    }

    #[test]
    fn an_unknown_change_of_members_or_users_is_refused_not_skipped() {
        for unknown in [
            Operation::ChangeMember(MemberChange::default()),
            Operation::ChangeAuth(AuthChange::default()),
        ] {
            let data = encode(7, None, unknown);
            assert_eq!(decode(data), Err(CommandDecodeError::UnknownOperation { request_id: 7 }));
        }
    }

    #[test]
    fn a_truncated_command_is_refused() {
        let data = encode(7, None, put());
        assert!(matches!(
            decode(data.slice(..data.len() - 1)),
            Err(CommandDecodeError::Malformed(_))
        ));
    }
}
