//! Requests of a joining member. Such a member fetches the list of members and the whole state
//! before it starts its transport.

use std::{io, sync::Arc, time::Duration};

use bytes::Bytes;
use node_state::identity::{ClusterId, Incarnation, MemberId, NodeKey};
use node_state::membership::PeerUrl;
use tokio::{io::AsyncWriteExt, time::timeout};

use super::{
    LocalMember, SnapshotReader, StreamRefusal, request, snapshot,
    wire::frame::FrameKind,
    wire::hello::{Hello, StreamPurpose},
    wire::stream::{self, PeerStream},
};
use crate::{tls::PeerTls, witness::DiskState};

/// Time limit for the exchange of hellos with a member, and for fetching its list of members.
const STEP_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of pings to the source. The pings show that this member is still installing the state.
const PING_INTERVAL: Duration = Duration::from_secs(1);

/// Reason why a member could not be queried.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The member could not be reached, or the stream broke.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The member refused the joining member.
    #[error("the member refused this one: {0}")]
    RefusedBy(StreamRefusal),
    /// The answer came from another member or another cluster than expected.
    #[error("another member, or one of another cluster, is at this address")]
    WrongMember,
}

/// A member that can send its whole state to a joining member.
#[derive(Clone, Debug)]
pub struct StateSource {
    pub member: MemberId,
    pub url: PeerUrl,
    /// Key that the source's certificate must have, if its record binds one.
    pub key: Option<NodeKey>,
}

/// Fetches the list of members from the member at `url`, whichever member that is.
///
/// # Errors
/// If the answer doesn't arrive in time, or the stream fails.
pub async fn ask_members(url: &PeerUrl, tls: Option<&Arc<PeerTls>>) -> Result<Bytes, JoinError> {
    let nobody = LocalMember {
        cluster: ClusterId(0),
        member: MemberId(0),
        incarnation: Incarnation([0; 16]),
        boot: 0,
        run: 0,
        disk: DiskState::default(),
    };
    let asked = async {
        let ours = Hello::new(&nobody, MemberId(0), StreamPurpose::Members);
        let (stream, _) = exchange_hellos(url, tls, None, &ours).await?;
        Ok(request::read(stream.io, FrameKind::Answer).await?)
    };
    timeout(STEP_TIMEOUT, asked)
        .await
        .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))
}

/// Fetches the whole state from `source`. The cluster must already have added the joining member
/// `local`.
///
/// # Errors
/// If `source` refuses, or breaks the stream off, or if `install` fails.
pub async fn fetch_state<T: Send + 'static>(
    source: &StateSource,
    tls: Option<&Arc<PeerTls>>,
    local: &LocalMember,
    install: impl FnOnce(SnapshotReader) -> io::Result<T> + Send + 'static,
) -> Result<T, JoinError> {
    let from = source.member;
    let ours = Hello::new(local, from, StreamPurpose::State);
    let greeted = timeout(STEP_TIMEOUT, exchange_hellos(&source.url, tls, source.key, &ours)).await;
    let (stream, theirs) = greeted.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    if let Some(refusal) = theirs.answer {
        return Err(JoinError::RefusedBy(refusal));
    }
    if theirs.from != from || theirs.cluster != local.cluster || theirs.to != local.member {
        return Err(JoinError::WrongMember);
    }
    Ok(snapshot::receive_state(stream.io, PING_INTERVAL, install).await?)
}

async fn exchange_hellos(
    url: &PeerUrl,
    tls: Option<&Arc<PeerTls>>,
    bound: Option<NodeKey>,
    ours: &Hello,
) -> Result<(PeerStream, Hello), JoinError> {
    let mut stream = stream::dial(url, tls, bound).await?;
    stream.io.write_all(&ours.encode()).await?;
    stream.io.flush().await?;
    let theirs = Hello::read(&mut stream.io)
        .await?
        .map_err(|refusal| io::Error::new(io::ErrorKind::InvalidData, refusal))?;
    Ok((stream, theirs))
}
