//! Probes one peer once.

use std::io;

use discovery_types::key::PublicKey;
use rustls::pki_types::ServerName;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::tls::IdentityError;
use super::{ANSWER_LIMIT, Answer, PROBE_DEADLINE, ProbeIdentity};

/// Why a probe failed; the text is shown in the matrix of who reached whom.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProbeError {
    /// The TCP connection failed: nothing listens, no route, or a firewall.
    #[error("can't connect to {at}")]
    Connect {
        /// Probed host and port.
        at: String,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The TLS handshake failed: the listener is not the agent with the expected key.
    #[error("{at} is not the agent that signed for it")]
    Handshake {
        /// Probed host and port.
        at: String,
        /// The error of the handshake.
        #[source]
        source: io::Error,
    },
    /// The peer proved its key, but closed without an answer. Probably it doesn't have the proposal
    /// yet, and so doesn't know this agent.
    #[error("{at} doesn't answer this host yet")]
    Silent {
        /// Probed host and port.
        at: String,
    },
    /// The peer sent something that is not a valid answer.
    #[error("{at} gave no valid answer")]
    Malformed {
        /// Probed host and port.
        at: String,
    },
    /// The probe exceeded its deadline.
    #[error("{at} did not answer within {} s", PROBE_DEADLINE.as_secs())]
    TimedOut {
        /// Probed host and port.
        at: String,
    },
    /// The etcd of a member that comes under management doesn't answer, or another etcd answers.
    #[error("its etcd: {0}")]
    Etcd(String),
    /// The peer's record has no peer URL.
    #[error("it has no peer URL")]
    NoUrl,
    /// This agent's own key can't be used.
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// Probes `at` (`host:port`) and returns the answer of the agent that holds the key `expected`.
pub(crate) async fn probe(
    identity: &ProbeIdentity,
    expected: PublicKey,
    at: &str,
) -> Result<Answer, ProbeError> {
    let connector = TlsConnector::from(identity.client_config(expected)?);
    tokio::time::timeout(PROBE_DEADLINE, ask(connector, expected, at))
        .await
        .unwrap_or_else(|_| Err(ProbeError::TimedOut { at: at.to_owned() }))
}

async fn ask(connector: TlsConnector, expected: PublicKey, at: &str) -> Result<Answer, ProbeError> {
    let named = || at.to_owned();
    let stream = TcpStream::connect(at)
        .await
        .map_err(|source| ProbeError::Connect { at: named(), source })?;
    // TLS needs a server name, but the verifier compares only keys and ignores this one.
    let name = ServerName::try_from("muster-agent").expect("it is a valid DNS name");
    let mut stream = connector
        .connect(name, stream)
        .await
        .map_err(|source| ProbeError::Handshake { at: named(), source })?;
    let mut line = Vec::new();
    // A peer that doesn't know this agent's key closes, with or without a TLS close_notify.
    let read = (&mut stream).take(ANSWER_LIMIT as u64 + 1).read_to_end(&mut line).await;
    if line.is_empty() {
        return Err(ProbeError::Silent { at: named() });
    }
    let complete = read.is_ok() && line.len() <= ANSWER_LIMIT && line.ends_with(b"\n");
    let answer: Option<Answer> = serde_json::from_slice(&line).ok().filter(|_| complete);
    answer
        .filter(|answer| answer.key == expected)
        .ok_or_else(|| ProbeError::Malformed { at: named() })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use discovery_types::digest::Incarnation;
    use discovery_types::jws::{Jws, JwsType};
    use discovery_types::key::SigningKey;
    use tokio::sync::watch;

    use super::*;
    use crate::probe::server::{ProbeListener, ProbePolicy};

    struct TestPeer {
        identity: ProbeIdentity,
        listener: ProbeListener,
        policy: watch::Sender<ProbePolicy>,
    }

    fn identity() -> ProbeIdentity {
        ProbeIdentity::new(&SigningKey::generate())
    }

    async fn peer() -> TestPeer {
        let identity = identity();
        let answer =
            Answer { key: identity.public(), incarnation: Incarnation([7; 16]), released: None };
        let (policy, changes) =
            watch::channel(ProbePolicy { answer: Some(answer), ..ProbePolicy::default() });
        let any = "127.0.0.1:0".parse().unwrap();
        let listener = ProbeListener::open(any, &identity, changes).await.unwrap();
        TestPeer { identity, listener, policy }
    }

    fn admit(peer: &TestPeer, asker: &ProbeIdentity) {
        peer.policy.send_modify(|policy| {
            policy.allowed_keys.insert(asker.public());
        });
    }

    #[tokio::test]
    async fn an_asker_in_the_list_gets_the_answer() {
        let (peer, asker) = (peer().await, identity());
        admit(&peer, &asker);
        let at = peer.listener.address().to_string();
        let answer = probe(&asker, peer.identity.public(), &at).await.unwrap();
        assert_eq!(answer.incarnation, Incarnation([7; 16]));
    }

    #[tokio::test]
    async fn a_stranger_gets_no_answer_and_the_connection_is_closed() {
        let (peer, stranger) = (peer().await, identity());
        let at = peer.listener.address().to_string();
        let error = probe(&stranger, peer.identity.public(), &at).await.unwrap_err();
        assert!(matches!(error, ProbeError::Silent { .. }), "{error}");
    }

    #[tokio::test]
    async fn a_peer_with_another_key_fails_the_handshake() {
        let (peer, asker, other) = (peer().await, identity(), identity());
        admit(&peer, &asker);
        let at = peer.listener.address().to_string();
        let error = probe(&asker, other.public(), &at).await.unwrap_err();
        assert!(matches!(error, ProbeError::Handshake { .. }), "{error}");
    }

    #[tokio::test]
    async fn a_closed_listener_has_freed_its_address() {
        let (peer, asker) = (peer().await, identity());
        let at = peer.listener.address();
        peer.listener.close().await;
        drop(std::net::TcpListener::bind(at).unwrap());
        let error = probe(&asker, peer.identity.public(), &at.to_string()).await.unwrap_err();
        assert!(matches!(error, ProbeError::Connect { .. }), "{error}");
    }

    #[tokio::test]
    async fn an_asker_without_a_certificate_gets_nothing() {
        let peer = peer().await;
        let pinned = identity().client_config(peer.identity.public()).unwrap();
        let mut bare = (*pinned).clone();
        bare.client_auth_cert_resolver = Arc::new(NoCertificate);
        let connector = TlsConnector::from(Arc::new(bare));
        let at = peer.listener.address().to_string();
        assert!(ask(connector, peer.identity.public(), &at).await.is_err());
    }

    #[derive(Debug)]
    struct NoCertificate;

    impl rustls::client::ResolvesClientCert for NoCertificate {
        fn resolve(
            &self,
            _hints: &[&[u8]],
            _schemes: &[rustls::SignatureScheme],
        ) -> Option<Arc<rustls::sign::CertifiedKey>> {
            None
        }

        fn has_certs(&self) -> bool {
            false
        }
    }

    #[tokio::test]
    async fn an_answer_that_is_too_long_is_not_sent() {
        let (peer, asker) = (peer().await, identity());
        admit(&peer, &asker);
        peer.policy.send_modify(|policy| {
            if let Some(answer) = &mut policy.answer {
                let long = "x".repeat(ANSWER_LIMIT);
                answer.released =
                    Some(Jws::sign(JwsType::Document, &SigningKey::generate(), &long));
            }
        });
        let at = peer.listener.address().to_string();
        assert!(probe(&asker, peer.identity.public(), &at).await.is_err());
    }
}
