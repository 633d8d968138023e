//! Etcd tokens, by which stock etcd forms a cluster through this service:
//! `mst_etcd_<id>_<secret>_<crc>`, lower-case base32.
//!
//! The token is a capability: any holder may register members with it. The service stores only the
//! hash of the secret. Unlike a [`Token`](crate::token::Token), the whole text is sent to the
//! service with each request, because stock etcd can sign nothing.

use std::fmt;
use std::str::FromStr;

use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use zeroize::{Zeroize, Zeroizing};

use crate::digest::{Digest, MemberId, random};
use crate::grant::GrantId;
use crate::text::printable;
use crate::token::{TOKEN_LENGTH, TokenError, checksum, decode_base32, encode_base32};

/// Beginning of every etcd token.
pub const ETCD_TOKEN_PREFIX: &str = "mst_etcd_";
/// Longest lifetime of an etcd token, in seconds: 24 hours.
pub const MAX_ETCD_TOKEN_SECONDS: u64 = 86_400;

/// Protocol by which etcd forms a cluster. The ids of members depend on it, so all members of a
/// cluster use the same one.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum EtcdProtocol {
    /// etcd's keys over HTTP (`etcd --discovery`), until etcd 3.6.
    V2,
    /// etcd's v3 API over gRPC (`etcd --discovery-endpoints`), from etcd 3.6 on.
    V3,
}

impl EtcdProtocol {
    /// Returns the protocol's name.
    pub fn as_str(self) -> &'static str {
        match self {
            EtcdProtocol::V2 => "v2",
            EtcdProtocol::V3 => "v3",
        }
    }
}

/// Error for a text that isn't the name of a protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("use v2 (etcd 3.4 to 3.6) or v3 (etcd 3.6 and newer)")]
pub struct UnknownProtocol;

impl FromStr for EtcdProtocol {
    type Err = UnknownProtocol;

    fn from_str(text: &str) -> Result<Self, UnknownProtocol> {
        match text {
            "v2" => Ok(EtcdProtocol::V2),
            "v3" => Ok(EtcdProtocol::V3),
            _ => Err(UnknownProtocol),
        }
    }
}

/// An etcd token. Only [`EtcdToken::expose`] shows the secret.
#[derive(Clone, PartialEq, Eq)]
pub struct EtcdToken {
    id: GrantId,
    secret: [u8; 32],
}

impl EtcdToken {
    /// Generates a new random token.
    pub fn generate() -> Self {
        Self { id: GrantId::random(), secret: random() }
    }

    /// Makes a token with the same id and another secret.
    #[cfg(any(test, feature = "fixtures"))]
    pub fn with_other_secret(&self) -> Self {
        Self { id: self.id, secret: random() }
    }

    /// Returns the token's id, which is not secret.
    pub fn id(&self) -> GrantId {
        self.id
    }

    /// Returns the hash of the secret, which is all that the service stores of it.
    pub fn secret_hash(&self) -> Digest {
        Digest::of(&self.secret)
    }

    /// Returns the whole text of the token.
    pub fn expose(&self) -> SecretString {
        let secret = Zeroizing::new(encode_base32(&self.secret));
        let body = Zeroizing::new(format!("{ETCD_TOKEN_PREFIX}{}_{}", self.id, *secret));
        SecretString::from(format!("{}_{}", *body, checksum(&body)))
    }
}

impl Drop for EtcdToken {
    fn drop(&mut self) {
        self.secret.zeroize();
    }
}

impl fmt::Debug for EtcdToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EtcdToken({}, …)", self.id)
    }
}

impl FromStr for EtcdToken {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        let rest = text.strip_prefix(ETCD_TOKEN_PREFIX).ok_or(TokenError::Prefix)?;
        if text.len() != TOKEN_LENGTH {
            return Err(TokenError::Length(text.chars().count()));
        }
        let mut parts = rest.split('_');
        let (Some(id), Some(secret), Some(crc), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(TokenError::Form);
        };
        let body = text.strip_suffix(crc).and_then(|body| body.strip_suffix('_'));
        if body.map(checksum).as_deref() != Some(crc) {
            return Err(TokenError::Checksum);
        }
        let id = id.parse().map_err(|_| TokenError::Form)?;
        let secret = Zeroizing::new(decode_base32(secret).ok_or(TokenError::Form)?);
        let secret = secret.as_slice().try_into().map_err(|_| TokenError::Form)?;
        Ok(Self { id, secret })
    }
}

/// Registration of one member, as stock etcd sends it: the member's name and its peer URLs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdPeers {
    /// Name of the member (`etcd --name`).
    pub name: String,
    /// Peer URLs that the member advertises, sorted, as etcd wrote them.
    pub urls: Vec<String>,
}

/// Longest text of a registration, in bytes.
pub const MAX_ETCD_PEERS: usize = 2_048;
/// Largest number of peer URLs of one member.
const MAX_PEER_URLS: usize = 16;
/// Longest name of a member, in bytes.
const MAX_MEMBER_NAME: usize = 128;

/// Reason why the text of a registration is refused. etcd logs the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EtcdPeersError {
    /// The text is longer than [`MAX_ETCD_PEERS`], or has too many URLs.
    #[error("a member registers at most {MAX_PEER_URLS} peer URLs, in {MAX_ETCD_PEERS} bytes")]
    TooLong,
    /// The text isn't of the form `name=url`, or `name=url,name=url`.
    #[error("a registration reads name=url, or name=url,name=url with one name")]
    Form,
    /// The name is empty, too long, or has characters that no log should show.
    #[error("the name must have 1 to {MAX_MEMBER_NAME} printable characters, without , and =")]
    Name,
    /// A URL is no peer URL that others can connect to.
    #[error("a peer URL reads http://host:port or https://host:port")]
    Url,
}

impl FromStr for EtcdPeers {
    type Err = EtcdPeersError;

    fn from_str(text: &str) -> Result<Self, EtcdPeersError> {
        if text.len() > MAX_ETCD_PEERS {
            return Err(EtcdPeersError::TooLong);
        }
        let mut urls = Vec::new();
        let mut name = None;
        for entry in text.split(',') {
            let (entry_name, url) = entry.split_once('=').ok_or(EtcdPeersError::Form)?;
            if *name.get_or_insert(entry_name) != entry_name {
                return Err(EtcdPeersError::Form);
            }
            if !is_peer_url(url) {
                return Err(EtcdPeersError::Url);
            }
            urls.push(url.to_owned());
        }
        if urls.len() > MAX_PEER_URLS {
            return Err(EtcdPeersError::TooLong);
        }
        urls.sort_unstable();
        let name = name.unwrap_or_default();
        let is_printable = !name.contains(char::is_whitespace) && printable(name) == name;
        if name.is_empty() || name.len() > MAX_MEMBER_NAME || !is_printable {
            return Err(EtcdPeersError::Name);
        }
        Ok(EtcdPeers { name: name.to_owned(), urls })
    }
}

impl EtcdPeers {
    /// Computes the member's id by etcd's formula, from its URLs and the cluster token. The cluster
    /// token is the discovery URL in the protocol v2, and the discovery token in v3.
    pub fn member_id(&self, cluster_token: &str) -> MemberId {
        crate::raft_id::member_id(&self.urls, cluster_token)
    }
}

/// Whether etcd accepts the text as a peer URL, and other members can connect to it.
fn is_peer_url(url: &str) -> bool {
    let rest = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
    let Some(rest) = rest else { return false };
    // Apply the strict rules of `NodeUrl`: host and port, and nothing else. `NodeUrl` accepts only
    // https.
    format!("https://{rest}").parse::<crate::url::NodeUrl>().is_ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use secrecy::ExposeSecret;

    use super::*;

    #[test]
    fn an_etcd_token_survives_a_round_trip_and_hides_its_secret() {
        let token = EtcdToken::generate();
        let text = token.expose().expose_secret().to_owned();
        assert_eq!(text.len(), TOKEN_LENGTH);
        assert_eq!(text.parse::<EtcdToken>().unwrap(), token);
        assert!(crate::token::holds_secret(&text));
        let secret = text.split('_').nth(3).unwrap();
        assert!(!format!("{token:?}").contains(secret));
    }

    #[test]
    fn peers_are_parsed_as_etcd_writes_them() {
        let peers: EtcdPeers = "n8=http://h:2,n8=http://h:1".parse().unwrap();
        assert_eq!(peers.name, "n8");
        assert_eq!(peers.urls, ["http://h:1", "http://h:2"]);
        let longest = "x".repeat(MAX_MEMBER_NAME);
        assert!(format!("{longest}=https://[fd00::1]:2380").parse::<EtcdPeers>().is_ok());
        use EtcdPeersError::{Form, Name, TooLong, Url};
        for (text, error) in [
            ("", Form),
            ("n0", Form),
            ("n0=http://h:1,n1=http://h:2", Form),
            ("=http://h:1", Name),
            ("a b=http://h:1", Name),
            ("a\u{1b}[2J=http://h:1", Name),
            ("a\u{202e}b=http://h:1", Name),
            (&format!("x{longest}=http://h:1"), Name),
            ("n0=ftp://h:1", Url),
            ("n0=http://h", Url),
            ("n0=http://h:1/path", Url),
            ("n0=http://0.0.0.0:2380", Url),
            ("n0=http://user@h:1", Url),
            (&vec!["n=http://h:1"; MAX_PEER_URLS + 1].join(","), TooLong),
            (&format!("n={}", "x".repeat(MAX_ETCD_PEERS)), TooLong),
        ] {
            assert_eq!(text.parse::<EtcdPeers>(), Err(error), "{text}");
        }
    }

    /// The expected id was computed by etcd 3.5.
    #[test]
    fn the_id_of_a_member_is_etcds() {
        let peers: EtcdPeers = "n0=http://127.0.0.1:23201".parse().unwrap();
        assert_eq!(peers.member_id("etcd-cluster").to_string(), "c8d9246ced7969c0");
    }

    proptest! {
        #[test]
        fn any_one_changed_character_of_an_etcd_token_is_noticed(
            position in 0..TOKEN_LENGTH, to in "[a-z2-7_]",
        ) {
            let text = EtcdToken::generate().expose().expose_secret().to_owned();
            let mut changed = text.clone();
            changed.replace_range(position..=position, &to);
            prop_assume!(changed != text);
            prop_assert!(changed.parse::<EtcdToken>().is_err());
        }

        #[test]
        fn no_text_makes_the_parsers_panic(text in "(mst_etcd_)?\\PC{0,120}") {
            let _ = (text.parse::<EtcdToken>(), text.parse::<EtcdPeers>());
        }
    }
}
