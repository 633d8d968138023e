//! Between the driver and the peer streams: messages to bytes and back, snapshots to files and back.

use std::{
    fs::File,
    io::{self, Seek},
    path::PathBuf,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use bytes::{Bytes, BytesMut};
use tokio::sync::watch;

use crate::{
    driver::{IncomingSnapshot, Message, OutgoingSnapshot, PeerInbox, PeerSender, SendError},
    identity::MemberId,
    transport::{self, PeerEvents, SnapshotReader, SnapshotWriter, Transport},
};

/// What the driver sends by. The transport can only start once the driver has, so it is put in
/// later; until then every peer is away.
#[derive(Default)]
pub struct Outbound {
    link: OnceLock<(Transport, PeerInbox)>,
}

impl Outbound {
    /// From now on there are peers.
    pub fn connect(&self, transport: Transport, inbox: PeerInbox) {
        // Called once, by the one who started both.
        let _ = self.link.set((transport, inbox));
    }
}

impl PeerSender for Outbound {
    fn try_send(&self, message: Message) -> Result<(), SendError> {
        let (transport, _) = self.link.get().ok_or(SendError::NotConnected)?;
        let mut bytes = BytesMut::with_capacity(message.cost());
        message.encode(&mut bytes);
        match transport.send(MemberId(message.to), bytes.freeze()) {
            Ok(()) => Ok(()),
            Err(transport::SendError::Full | transport::SendError::TooLong) => Err(SendError::Full),
            Err(transport::SendError::Unknown | transport::SendError::Away) => {
                Err(SendError::NotConnected)
            }
        }
    }

    fn send_snapshot(&self, snapshot: OutgoingSnapshot) {
        // Without a link nothing has been started that could ask for a snapshot.
        let Some((transport, inbox)) = self.link.get().cloned() else {
            return;
        };
        let peer = snapshot.message.to;
        let reporter = inbox.clone();
        let sending = move || {
            let result = send(&transport, snapshot);
            if let Err(error) = &result {
                tracing::warn!(peer.member.id = %MemberId(peer), %error, "cannot send a snapshot");
            }
            inbox.snapshot_sent(peer, result.is_ok());
        };
        let spawned = std::thread::Builder::new().name("snapshot-out".to_owned()).spawn(sending);
        if let Err(error) = spawned {
            tracing::warn!(peer.member.id = %MemberId(peer), %error, "cannot send a snapshot");
            reporter.snapshot_sent(peer, false);
        }
    }
}

fn send(transport: &Transport, snapshot: OutgoingSnapshot) -> io::Result<()> {
    let OutgoingSnapshot { message, mut body, bytes } = snapshot;
    let mut header = BytesMut::with_capacity(message.cost());
    message.encode(&mut header);
    let mut writer: SnapshotWriter =
        transport.open_snapshot(MemberId(message.to), header.freeze()).map_err(io::Error::other)?;
    body.rewind()?;
    let copied = io::copy(&mut body, &mut writer)?;
    if copied != bytes {
        return Err(io::Error::other("the snapshot's file has another length than it should"));
    }
    writer.finish()
}

/// What comes from peers, on its way to the driver.
pub struct Inbound {
    inbox: PeerInbox,
    snapshot_dir: PathBuf,
    snapshots: AtomicU64,
    undecodable: AtomicU64,
    removed: watch::Sender<Option<MemberId>>,
}

impl Inbound {
    /// Snapshots are written to `snapshot_dir`; who says that this member was removed is told
    /// through `removed`.
    #[must_use]
    pub fn new(
        inbox: PeerInbox,
        snapshot_dir: PathBuf,
        removed: watch::Sender<Option<MemberId>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            inbox,
            snapshot_dir,
            snapshots: AtomicU64::new(0),
            undecodable: AtomicU64::new(0),
            removed,
        })
    }

    fn decode(&self, from: MemberId, bytes: Bytes) -> Option<Message> {
        match Message::decode(bytes) {
            Ok(message) => Some(message),
            Err(error) => {
                // A member proved itself and then sent junk: worth a line, but not thousands.
                let seen = self.undecodable.fetch_add(1, Ordering::Relaxed);
                if seen.is_power_of_two() || seen == 0 {
                    tracing::error!(peer.member.id = %from, %error, seen, "a peer sent a message that cannot be decoded");
                }
                None
            }
        }
    }
}

impl PeerEvents for Inbound {
    fn message(&self, from: MemberId, message: Bytes) -> bool {
        self.decode(from, message)
            .is_some_and(|message| self.inbox.deliver(from.0, message).is_ok())
    }

    fn snapshot(&self, from: MemberId, header: Bytes, mut body: SnapshotReader) -> io::Result<()> {
        let message = self.decode(from, header).ok_or(io::ErrorKind::InvalidData)?;
        let number = self.snapshots.fetch_add(1, Ordering::Relaxed);
        let path = self.snapshot_dir.join(format!("incoming-{from}-{number}"));
        let mut write = || {
            let mut file = File::create(&path)?;
            io::copy(&mut body, &mut file)?;
            file.sync_all()
        };
        if let Err(error) = write() {
            let _ = std::fs::remove_file(&path);
            return Err(error);
        }
        self.inbox.deliver_snapshot(from.0, IncomingSnapshot { message, body: path });
        Ok(())
    }

    fn reachable(&self, peer: MemberId, reachable: bool) {
        if reachable {
            self.inbox.connected(peer.0);
        } else {
            self.inbox.disconnected(peer.0);
        }
    }

    fn removed(&self, by: MemberId) {
        self.removed.send_if_modified(|removed| removed.is_none() && removed.replace(by).is_none());
    }
}
