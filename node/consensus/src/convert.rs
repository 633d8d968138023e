//! Conversion between our types and the library's, field by field. No bytes are encoded or decoded
//! here.

use bytes::Bytes;
use raft::eraftpb;

use crate::{
    ConfChange, Entry, EntryKind, HardState, Members, Message, MessageKind, PeerState, Position,
    Role,
};

/// Data of every change of members that the library sees: one change with all fields left out. The
/// library decodes this data when a change is proposed, to see whether the change is empty. Our own
/// data travels in the entry's context instead, so the library never decodes what a client or a
/// peer has sent.
const CONF_CHANGE_PLACEHOLDER: Bytes = Bytes::from_static(&[0x12, 0]);

pub(crate) fn entry_from_raft(entry: eraftpb::Entry) -> Entry {
    let eraftpb::Entry { index, term, entry_type, data, context, .. } = entry;
    let (kind, data) = match entry_type {
        // An entry without data is a no-op. The library itself makes it when a leader's term
        // begins.
        eraftpb::EntryType::EntryNormal if data.is_empty() => (EntryKind::NoOp, data),
        eraftpb::EntryType::EntryNormal => (EntryKind::Normal, data),
        eraftpb::EntryType::EntryConfChange | eraftpb::EntryType::EntryConfChangeV2 => {
            (EntryKind::ConfChange, context)
        }
    };
    Entry { index, term, kind, data }
}

pub(crate) fn entry_to_raft(entry: &Entry) -> eraftpb::Entry {
    let theirs = eraftpb::Entry { index: entry.index, term: entry.term, ..Default::default() };
    match entry.kind {
        EntryKind::Normal | EntryKind::NoOp => {
            eraftpb::Entry { data: entry.data.clone(), ..theirs }
        }
        EntryKind::ConfChange => eraftpb::Entry {
            entry_type: eraftpb::EntryType::EntryConfChangeV2,
            data: CONF_CHANGE_PLACEHOLDER,
            context: entry.data.clone(),
            ..theirs
        },
    }
}

pub(crate) fn hard_state_from_raft(state: &eraftpb::HardState) -> HardState {
    HardState { term: state.term, vote: state.vote, commit: state.commit }
}

pub(crate) fn hard_state_to_raft(state: &HardState) -> eraftpb::HardState {
    eraftpb::HardState {
        term: state.term,
        vote: state.vote,
        commit: state.commit,
        ..Default::default()
    }
}

pub(crate) fn members_from_raft(state: &eraftpb::ConfState) -> Members {
    let ascending = |ids: &[u64]| {
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids
    };
    Members { voters: ascending(&state.voters), learners: ascending(&state.learners) }
}

pub(crate) fn members_to_raft(members: &Members) -> eraftpb::ConfState {
    eraftpb::ConfState {
        voters: members.voters.clone(),
        learners: members.learners.clone(),
        ..Default::default()
    }
}

pub(crate) fn change_to_raft(change: ConfChange) -> eraftpb::ConfChangeV2 {
    let (kind, id) = match change {
        ConfChange::Voter(id) => (eraftpb::ConfChangeType::AddNode, id),
        ConfChange::Learner(id) => (eraftpb::ConfChangeType::AddLearnerNode, id),
        ConfChange::Remove(id) => (eraftpb::ConfChangeType::RemoveNode, id),
    };
    let mut single = eraftpb::ConfChangeSingle { node_id: id, ..Default::default() };
    single.set_change_type(kind);
    eraftpb::ConfChangeV2 { changes: vec![single].into(), ..Default::default() }
}

pub(crate) fn snapshot_to_raft(at: Position, members: &Members) -> eraftpb::Snapshot {
    let mut snapshot = eraftpb::Snapshot::default();
    let metadata = snapshot.mut_metadata();
    metadata.index = at.index;
    metadata.term = at.term;
    metadata.set_conf_state(members_to_raft(members));
    snapshot
}

pub(crate) fn role_from_raft(role: raft::StateRole) -> Role {
    match role {
        raft::StateRole::Follower => Role::Follower,
        raft::StateRole::PreCandidate => Role::PreCandidate,
        raft::StateRole::Candidate => Role::Candidate,
        raft::StateRole::Leader => Role::Leader,
    }
}

pub(crate) fn peer_state_from_raft(state: raft::ProgressState) -> PeerState {
    match state {
        raft::ProgressState::Probe => PeerState::Probe,
        raft::ProgressState::Replicate => PeerState::Replicate,
        raft::ProgressState::Snapshot => PeerState::Snapshot,
    }
}

/// Returns `None` for kinds that never leave the process.
fn kind_from_raft(kind: eraftpb::MessageType) -> Option<MessageKind> {
    use eraftpb::MessageType as Theirs;
    Some(match kind {
        Theirs::MsgPropose => MessageKind::Propose,
        Theirs::MsgAppend => MessageKind::Append,
        Theirs::MsgAppendResponse => MessageKind::AppendResponse,
        Theirs::MsgRequestVote => MessageKind::RequestVote,
        Theirs::MsgRequestVoteResponse => MessageKind::RequestVoteResponse,
        Theirs::MsgSnapshot => MessageKind::Snapshot,
        Theirs::MsgHeartbeat => MessageKind::Heartbeat,
        Theirs::MsgHeartbeatResponse => MessageKind::HeartbeatResponse,
        Theirs::MsgTimeoutNow => MessageKind::TimeoutNow,
        Theirs::MsgReadIndex => MessageKind::ReadIndex,
        Theirs::MsgReadIndexResp => MessageKind::ReadIndexResponse,
        Theirs::MsgRequestPreVote => MessageKind::RequestPreVote,
        Theirs::MsgRequestPreVoteResponse => MessageKind::RequestPreVoteResponse,
        Theirs::MsgHup
        | Theirs::MsgBeat
        | Theirs::MsgUnreachable
        | Theirs::MsgSnapStatus
        | Theirs::MsgCheckQuorum
        | Theirs::MsgTransferLeader => return None,
    })
}

fn kind_to_raft(kind: MessageKind) -> eraftpb::MessageType {
    use eraftpb::MessageType as Theirs;
    match kind {
        MessageKind::Unknown => unreachable!("decoding refuses unknown kinds"),
        MessageKind::Propose => Theirs::MsgPropose,
        MessageKind::Append => Theirs::MsgAppend,
        MessageKind::AppendResponse => Theirs::MsgAppendResponse,
        MessageKind::RequestVote => Theirs::MsgRequestVote,
        MessageKind::RequestVoteResponse => Theirs::MsgRequestVoteResponse,
        MessageKind::Snapshot => Theirs::MsgSnapshot,
        MessageKind::Heartbeat => Theirs::MsgHeartbeat,
        MessageKind::HeartbeatResponse => Theirs::MsgHeartbeatResponse,
        MessageKind::TimeoutNow => Theirs::MsgTimeoutNow,
        MessageKind::ReadIndex => Theirs::MsgReadIndex,
        MessageKind::ReadIndexResponse => Theirs::MsgReadIndexResp,
        MessageKind::RequestPreVote => Theirs::MsgRequestPreVote,
        MessageKind::RequestPreVoteResponse => Theirs::MsgRequestPreVoteResponse,
    }
}

pub(crate) fn message_from_raft(mut message: eraftpb::Message) -> Option<Message> {
    let kind = kind_from_raft(message.get_msg_type())?;
    let entries = message.take_entries().into_iter().map(entry_from_raft).collect();
    let metadata = message.get_snapshot().get_metadata();
    let snapshot = (kind == MessageKind::Snapshot)
        .then_some(Position { index: metadata.index, term: metadata.term });
    let members = snapshot.map(|_| members_from_raft(metadata.get_conf_state()));
    Some(Message {
        kind,
        from: message.from,
        to: message.to,
        term: message.term,
        log_term: message.log_term,
        index: message.index,
        commit: message.commit,
        commit_term: message.commit_term,
        reject: message.reject,
        reject_hint: message.reject_hint,
        request_snapshot: message.request_snapshot,
        context: message.take_context(),
        entries,
        snapshot,
        members,
    })
}

pub(crate) fn message_to_raft(message: Message) -> eraftpb::Message {
    let mut theirs = eraftpb::Message {
        from: message.from,
        to: message.to,
        term: message.term,
        log_term: message.log_term,
        index: message.index,
        commit: message.commit,
        commit_term: message.commit_term,
        reject: message.reject,
        reject_hint: message.reject_hint,
        request_snapshot: message.request_snapshot,
        context: message.context,
        ..Default::default()
    };
    theirs.set_msg_type(kind_to_raft(message.kind));
    let entries: Vec<_> = message.entries.iter().map(entry_to_raft).collect();
    theirs.set_entries(entries.into());
    if let (Some(at), Some(members)) = (message.snapshot, &message.members) {
        theirs.set_snapshot(snapshot_to_raft(at, members));
    }
    theirs
}
