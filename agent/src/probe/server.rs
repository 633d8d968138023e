//! Answers probes on the node's peer address until the node listens there itself.

use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use discovery_types::key::PublicKey;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::tls::{IdentityError, key_of};
use super::{ANSWER_LIMIT, Answer, PROBE_DEADLINE, ProbeIdentity};

/// Maximum number of probes answered at one time. Further connections are closed at once, and the
/// probing agent tries again.
const MAX_CONNECTIONS: usize = 64;
/// Pause after a failed accept (for example without free file descriptors), to avoid a busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The listener's answer and who gets it. Updated whenever the agent's journal changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProbePolicy {
    /// Keys that get an answer: those in the proposal, and those in every list of members that this
    /// agent has signed.
    pub allowed_keys: BTreeSet<PublicKey>,
    /// Answer to a probe; `None` until the agent has one.
    pub answer: Option<Answer>,
}

/// Why the listener could not be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListenError {
    /// Binding the address failed.
    #[error("can't listen on {at}")]
    Bind {
        at: SocketAddr,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// This agent's own key can't be used.
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// A probe listener. Dropping it without `close` leaves its port open until its tasks have ended.
#[derive(Debug)]
pub(crate) struct ProbeListener {
    stop: CancellationToken,
    tasks: TaskTracker,
    #[cfg(test)]
    address: SocketAddr,
}

impl ProbeListener {
    /// Starts to listen on `at`.
    pub(crate) async fn open(
        at: SocketAddr,
        identity: &ProbeIdentity,
        policy: watch::Receiver<ProbePolicy>,
    ) -> Result<Self, ListenError> {
        let bind = |source| ListenError::Bind { at, source };
        let listener = TcpListener::bind(at).await.map_err(bind)?;
        #[cfg(test)]
        let address = listener.local_addr().map_err(bind)?;
        let acceptor = TlsAcceptor::from(identity.server_config()?);
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        tasks.spawn(accept(listener, acceptor, policy, stop.clone(), tasks.clone()));
        Ok(Self {
            stop,
            tasks,
            #[cfg(test)]
            address,
        })
    }

    #[cfg(test)]
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes the listener. Once this returns, the node can listen on the address.
    pub(crate) async fn close(self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

impl Drop for ProbeListener {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn accept(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    policy: watch::Receiver<ProbePolicy>,
    stop: CancellationToken,
    tasks: TaskTracker,
) {
    let free = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::debug!(%error, "can't accept a probe");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(permit) = Arc::clone(&free).try_acquire_owned() else { continue };
        let (acceptor, policy, stop) = (acceptor.clone(), policy.clone(), stop.clone());
        tasks.spawn(async move {
            let answered = tokio::time::timeout(PROBE_DEADLINE, answer(stream, &acceptor, &policy));
            tokio::select! {
                result = answered => match result {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::debug!(%peer, %error, "a probe failed"),
                    Err(_) => tracing::debug!(%peer, "a probe took too long"),
                },
                () = stop.cancelled() => {}
            }
            drop(permit);
        });
    }
}

async fn answer(
    stream: TcpStream,
    acceptor: &TlsAcceptor,
    policy: &watch::Receiver<ProbePolicy>,
) -> io::Result<()> {
    let mut stream = acceptor.accept(stream).await?;
    let (_, session) = stream.get_ref();
    let alpn = session.alpn_protocol() == Some(super::ALPN);
    let asker = session.peer_certificates().and_then(|chain| chain.first());
    let asker = asker.and_then(|certificate| key_of(certificate).ok());
    // The borrow of the policy ends in this block: it must not be held across an await.
    let line = {
        let policy = policy.borrow();
        let known = alpn && asker.is_some_and(|key| policy.allowed_keys.contains(&key));
        policy.answer.as_ref().filter(|_| known).map(to_line).transpose()?
    };
    if let Some(line) = line {
        stream.write_all(&line).await?;
    }
    stream.shutdown().await
}

fn to_line(answer: &Answer) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(answer).map_err(io::Error::other)?;
    line.push(b'\n');
    if line.len() > ANSWER_LIMIT {
        return Err(io::Error::other("the answer is longer than a probe may be"));
    }
    Ok(line)
}
