//! Reversed streams: a member that can't connect to a peer has the peer connect to it.
//!
//! Snapshots and requests have streams of their own, opened by the member that has something to
//! send. If it can't connect, it sends an invitation on the message stream: a purpose and a token.
//! The peer opens a stream for that purpose, both prove themselves in a hello as usual, and the
//! peer names the token. From then on the stream is used as if the inviting member had opened it.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::{Buf, BufMut, BytesMut};
use tokio::{io::AsyncReadExt, sync::oneshot, time::timeout};

use super::{
    SendError,
    accept::write_frame,
    dial,
    links::Opener,
    peer_handle::PeerHandle,
    request,
    service::TransportState,
    snapshot,
    wire::frame::{FrameKind, HEADER_BYTES, put},
    wire::hello::StreamPurpose,
    wire::stream::{Duplex, PeerStream},
};

/// Maximum number of open invitations to one peer.
const MAX_INVITATIONS: usize = 128;
const TOKEN_BYTES: usize = 8;

/// Open invitations to one peer. An invitation is open until the peer has opened the stream for it.
#[derive(Default)]
pub(super) struct Invitations(Mutex<OpenInvitations>);

#[derive(Default)]
struct OpenInvitations {
    next: u64,
    waiting: BTreeMap<u64, (StreamPurpose, oneshot::Sender<PeerStream>)>,
}

/// An open invitation; dropping it withdraws it.
struct Invitation<'a> {
    invitations: &'a Invitations,
    token: u64,
}

impl Invitations {
    fn lock(&self) -> MutexGuard<'_, OpenInvitations> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates an invitation, and returns the channel on which the stream will arrive. Returns
    /// `None` if too many invitations are open.
    fn begin(
        &self,
        purpose: StreamPurpose,
    ) -> Option<(Invitation<'_>, oneshot::Receiver<PeerStream>)> {
        let (sender, receiver) = oneshot::channel();
        let mut open = self.lock();
        if open.waiting.len() >= MAX_INVITATIONS {
            return None;
        }
        let token = open.next;
        open.next += 1;
        open.waiting.insert(token, (purpose, sender));
        Some((Invitation { invitations: self, token }, receiver))
    }

    /// Removes the open invitation with this purpose and token. Returns the channel on which the
    /// task that invited the peer waits for the stream.
    fn take(&self, purpose: StreamPurpose, token: u64) -> Option<oneshot::Sender<PeerStream>> {
        let mut open = self.lock();
        let fits = open.waiting.get(&token).is_some_and(|(expected, _)| *expected == purpose);
        if fits { open.waiting.remove(&token).map(|(_, sender)| sender) } else { None }
    }
}

impl Drop for Invitation<'_> {
    fn drop(&mut self) {
        self.invitations.lock().waiting.remove(&self.token);
    }
}

/// Opens a stream on which this member sends `peer` a snapshot or a request. If this member can't
/// connect to the peer, it invites the peer to connect.
pub(super) async fn open(
    shared: &Arc<TransportState>,
    peer: &Arc<PeerHandle>,
    purpose: StreamPurpose,
) -> io::Result<PeerStream> {
    let invitation = purpose.reversed().filter(|_| peer.is_two_way());
    // If only the peer has opened a message stream, invite it first: an attempt to connect to it
    // would probably take long and fail.
    let invites_first = invitation.filter(|_| !peer.has_link(Opener::Local));
    if let Some(reversed) = invites_first {
        match invite(shared, peer, reversed).await {
            Ok(stream) => return Ok(stream),
            Err(error) => {
                tracing::debug!(peer.member.id = %peer.id, %error, "the peer has not followed an invitation to connect");
            }
        }
    }
    match (dial::connect_any(shared, peer, purpose).await, invitation) {
        (Ok(stream), _) => Ok(stream),
        (Err(_), Some(reversed)) if invites_first.is_none() => invite(shared, peer, reversed).await,
        (Err(error), _) => Err(error),
    }
}

async fn invite(
    shared: &TransportState,
    peer: &PeerHandle,
    purpose: StreamPurpose,
) -> io::Result<PeerStream> {
    let begun = peer.invitations.begin(purpose);
    let (invitation, stream) = begun.ok_or_else(|| io::Error::other(SendError::Full))?;
    let mut payload = BytesMut::with_capacity(1 + TOKEN_BYTES);
    payload.put_u8(purpose as u8);
    payload.put_u64(invitation.token);
    peer.push(FrameKind::Invite, payload.freeze()).map_err(io::Error::other)?;
    tokio::select! {
        () = peer.cancellation.cancelled() => Err(io::ErrorKind::ConnectionAborted.into()),
        stream = timeout(shared.limits.handshake_timeout, stream) => match stream {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(_)) => Err(io::ErrorKind::ConnectionAborted.into()),
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "the peer did not connect when it was asked to")),
        },
    }
}

/// Follows an invitation of `peer`, in a new task: opens the stream that the peer asks for.
///
/// # Errors
/// If the payload is not a valid invitation.
pub(super) fn follow_invitation(
    shared: &Arc<TransportState>,
    peer: &Arc<PeerHandle>,
    mut invitation: &[u8],
) -> io::Result<()> {
    if invitation.len() != 1 + TOKEN_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let purpose =
        StreamPurpose::from_wire(invitation.get_u8()).filter(|purpose| purpose.is_reversed());
    let (purpose, token) = (purpose.ok_or(io::ErrorKind::InvalidData)?, invitation.get_u64());
    let Ok(place) = Arc::clone(&peer.invited).try_acquire_owned() else {
        tracing::warn!(peer.member.id = %peer.id, "a peer asks this member to connect too often");
        return Ok(());
    };
    let (shared, peer) = (Arc::clone(shared), Arc::clone(peer));
    let tasks = shared.tasks.clone();
    tasks.spawn(async move {
        let _place = place;
        let followed = tokio::select! {
            () = peer.cancellation.cancelled() => return,
            followed = connect_back(&shared, &peer, purpose, token) => followed,
        };
        if let Err(error) = followed {
            tracing::warn!(peer.member.id = %peer.id, %error, "cannot do what a peer has asked this member to connect for");
        }
    });
    Ok(())
}

async fn connect_back(
    shared: &Arc<TransportState>,
    peer: &Arc<PeerHandle>,
    purpose: StreamPurpose,
    token: u64,
) -> io::Result<()> {
    let mut stream = dial::connect_any(shared, peer, purpose).await?;
    write_frame(&mut stream.io, FrameKind::InvitationToken, &token.to_be_bytes()).await?;
    if purpose == StreamPurpose::TakeSnapshot {
        snapshot::receive(shared, peer, stream.io).await
    } else {
        request::answer(shared, peer, stream.io).await
    }
}

/// Accepts a stream for which the peer claims to have an invitation of this member.
pub(super) async fn accept_invited_stream(
    shared: &TransportState,
    peer: &PeerHandle,
    purpose: StreamPurpose,
    mut stream: PeerStream,
) -> io::Result<()> {
    // No byte after the token is read here, because the rest belongs to the task that gets the
    // stream.
    let token = timeout(shared.limits.handshake_timeout, read_token(&mut stream.io));
    let token = token.await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    match peer.invitations.take(purpose, token) {
        // If the task that invited the peer has ended, the stream is dropped and so closed.
        Some(waiting) => drop(waiting.send(stream)),
        None => return Err(io::Error::other("nobody has invited the peer to this stream")),
    }
    Ok(())
}

async fn read_token(io: &mut Box<dyn Duplex>) -> io::Result<u64> {
    let mut expected = BytesMut::new();
    put(&mut expected, FrameKind::InvitationToken, &[0; TOKEN_BYTES]);
    let mut bytes = [0; HEADER_BYTES + TOKEN_BYTES];
    io.read_exact(&mut bytes).await?;
    let (header, mut token) = bytes.split_at(HEADER_BYTES);
    if header != &expected[..HEADER_BYTES] {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(token.get_u64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invitation_can_be_taken_once_for_its_purpose_while_its_task_waits() {
        let invitations = Invitations::default();
        let (invitation, _stream) = invitations.begin(StreamPurpose::TakeSnapshot).unwrap();
        let token = invitation.token;
        assert!(invitations.take(StreamPurpose::TakeRequest, token).is_none());
        assert!(invitations.take(StreamPurpose::TakeSnapshot, token + 1).is_none());
        assert!(invitations.take(StreamPurpose::TakeSnapshot, token).is_some());
        assert!(invitations.take(StreamPurpose::TakeSnapshot, token).is_none());
        drop(invitation);
        let (invitation, _stream) = invitations.begin(StreamPurpose::TakeRequest).unwrap();
        let token = invitation.token;
        drop(invitation);
        assert!(invitations.take(StreamPurpose::TakeRequest, token).is_none());
        let all: Vec<_> = (0..MAX_INVITATIONS)
            .map_while(|_| invitations.begin(StreamPurpose::TakeRequest))
            .collect();
        assert!(
            all.len() == MAX_INVITATIONS && invitations.begin(StreamPurpose::TakeRequest).is_none()
        );
    }
}
