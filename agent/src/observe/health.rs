//! Asks the node for its health over HTTP.

use std::io;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::endpoint::ClientEndpoint;

/// The longest that one health check may take.
const DEADLINE: Duration = Duration::from_secs(3);
/// Maximum number of bytes that are read of an answer.
const ANSWER_LIMIT: u64 = 64 * 1024;
/// Maximum number of bytes that are read of a node's metrics.
const METRICS_LIMIT: u64 = 4 * 1024 * 1024;

/// Why a health check failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HealthError {
    /// The node doesn't listen, or doesn't speak TLS with this cluster's certificates.
    #[error("the node doesn't answer")]
    Connection(#[source] io::Error),
    /// The health check exceeded its deadline.
    #[error("the node didn't answer within {} s", DEADLINE.as_secs())]
    TimedOut,
    /// The answer is not valid HTTP.
    #[error("the node's answer is not HTTP")]
    Malformed,
}

/// The node's answer to a health check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Health {
    /// Whether the node serves linearizable requests.
    pub ready: bool,
    /// The start of the answer's body.
    pub says: String,
}

impl ClientEndpoint {
    /// Requests `/readyz`, or `/health` from a node without that path (stock etcd before 3.5.11).
    pub(crate) async fn check_health(&self) -> Result<Health, HealthError> {
        let question = async {
            match self.get("/readyz", ANSWER_LIMIT).await? {
                (404, _) => Ok(to_health(self.get("/health", ANSWER_LIMIT).await?)),
                answer => Ok(to_health(answer)),
            }
        };
        tokio::time::timeout(DEADLINE, question).await.unwrap_or(Err(HealthError::TimedOut))
    }

    /// Requests the node's metrics, in Prometheus' text format.
    pub(crate) async fn get_metrics(&self) -> Result<String, HealthError> {
        let question = async {
            match self.get("/metrics", METRICS_LIMIT).await? {
                (200, text) => Ok(text),
                _ => Err(HealthError::Malformed),
            }
        };
        tokio::time::timeout(DEADLINE, question).await.unwrap_or(Err(HealthError::TimedOut))
    }

    async fn get(&self, path: &str, limit: u64) -> Result<(u16, String), HealthError> {
        let answer = async {
            let mut stream = self.open(b"http/1.1").await?;
            let host = self.server_name();
            let request =
                format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await?;
            let mut answer = Vec::new();
            match stream.take(limit).read_to_end(&mut answer).await {
                // Some servers close without a TLS close_notify; the answer is complete
                // nevertheless.
                Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => Err(error),
                _ => Ok(answer),
            }
        };
        let answer: Result<_, io::Error> = answer.await;
        parse(&answer.map_err(HealthError::Connection)?).ok_or(HealthError::Malformed)
    }
}

/// Parses status code and body of an HTTP/1.1 answer, chunked or not.
fn parse(answer: &[u8]) -> Option<(u16, String)> {
    let text = String::from_utf8_lossy(answer);
    let (head, body) = text.split_once("\r\n\r\n")?;
    let code = head.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.parse().ok()?;
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    let body = if chunked { join_chunks(body)? } else { body.to_owned() };
    Some((code, body.trim().to_owned()))
}

/// Joins the chunks of a chunked body. The last chunk may be missing.
fn join_chunks(mut body: &str) -> Option<String> {
    let mut joined = String::new();
    while let Some((length, rest)) = body.split_once("\r\n") {
        let length = usize::from_str_radix(length.trim(), 16).ok()?;
        if length == 0 {
            break;
        }
        joined.push_str(rest.get(..length)?);
        body = rest.get(length..)?.trim_start_matches("\r\n");
    }
    Some(joined)
}

fn to_health((code, body): (u16, String)) -> Health {
    /// Number of characters kept of the answer; the node's log has the rest.
    const KEPT_CHARACTERS: usize = 300;
    let says = body.chars().take(KEPT_CHARACTERS).collect();
    // Check the body, too: old versions of etcd answer 200 with {"health":"false"} while they have
    // no leader.
    Health { ready: code == 200 && !body.contains(r#""health":"false""#), says }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_and_chunked_answers_are_read() {
        let plain = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
        assert_eq!(parse(plain), Some((200, "ok".to_owned())));
        let chunked = b"HTTP/1.1 503 X\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nno!\r\n0\r\n\r\n";
        assert_eq!(parse(chunked), Some((503, "no!".to_owned())));
        let two =
            b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n";
        assert_eq!(parse(two), Some((200, "abc".to_owned())));
        assert_eq!(parse(b"SSH-2.0-OpenSSH"), None);
    }

    #[test]
    fn a_node_without_a_leader_is_not_ready() {
        assert!(to_health((200, r#"{"health":"true"}"#.to_owned())).ready);
        assert!(!to_health((200, r#"{"health":"false"}"#.to_owned())).ready);
        assert!(!to_health((503, "no leader".to_owned())).ready);
    }
}
