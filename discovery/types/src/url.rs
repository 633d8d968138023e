//! URLs of services and nodes, parsed strictly: only `https://host[:port]` is accepted, in one
//! normal form.
//!
//! A general URL parser accepts far more than a peer address needs: user names, paths, octal
//! addresses, percent signs. Two spellings of one address could then pass as different addresses.
//! So this module parses scheme, host and port itself.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use crate::text::wire_text;

/// Longest URL that is accepted, in bytes.
pub const MAX_URL: usize = 280;
/// Lowest port of a seat's URL, unless the statement allows lower ones.
pub const LOWEST_OPEN_PORT: u16 = 1024;

/// Reason why a text is no URL of a service or node. The error message says what to write instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// The text is longer than [`MAX_URL`].
    #[error("a URL has at most {MAX_URL} bytes")]
    TooLong,
    /// The scheme is not https.
    #[error("the URL must begin with https://")]
    NotHttps,
    /// The URL has a user name (`user@host`).
    #[error("the URL must not contain a user name")]
    UserInfo,
    /// Something follows the port in the URL.
    #[error("the URL must end after the port: no path, query or fragment")]
    Path,
    /// The URL has no port, but a node's URL must have one.
    #[error("the URL must name a port, as in https://10.0.0.5:2380")]
    NoPort,
    /// The port is not from 1 to 65535, or has a leading zero.
    #[error("the port must be a number from 1 to 65535")]
    BadPort,
    /// The host is neither an address nor a DNS name.
    #[error("`{0}` is neither an IPv4 address, an IPv6 address in brackets, nor a DNS name")]
    BadHost(String),
    /// The address is 0.0.0.0, ::, multicast or broadcast: nobody can connect to it.
    #[error("{0} is not an address that others can connect to")]
    NotConnectable(IpAddr),
}

/// Host of a URL.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum UrlHost {
    /// An IP address. An IPv4-mapped IPv6 address is stored as IPv4.
    Address(IpAddr),
    /// A DNS name, lower-case, without a final dot.
    Dns(String),
}

impl UrlHost {
    /// Returns the address, if the host is one.
    pub fn address(&self) -> Option<IpAddr> {
        match self {
            UrlHost::Address(address) => Some(*address),
            UrlHost::Dns(_) => None,
        }
    }

    /// Whether this is a loopback address, `localhost` or a name below `localhost`.
    pub fn is_loopback(&self) -> bool {
        match self {
            UrlHost::Address(address) => address.is_loopback(),
            UrlHost::Dns(name) => name == "localhost" || name.ends_with(".localhost"),
        }
    }
}

impl fmt::Display for UrlHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UrlHost::Address(IpAddr::V6(address)) => write!(f, "[{address}]"),
            UrlHost::Address(address) => write!(f, "{address}"),
            UrlHost::Dns(name) => f.write_str(name),
        }
    }
}

/// URL of a node in normal form, so equal URLs are equal values.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeUrl {
    host: UrlHost,
    port: u16,
}

/// URL of a discovery service: like [`NodeUrl`], but the port is 443 if the text has none.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceUrl(NodeUrl);

impl NodeUrl {
    /// Makes a URL from address and port.
    pub fn new(address: IpAddr, port: u16) -> Result<Self, UrlError> {
        Ok(Self { host: connectable(address)?, port })
    }

    /// Returns the host of the URL.
    pub fn host(&self) -> &UrlHost {
        &self.host
    }

    /// Returns the port of the URL.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Whether only programs on the same machine can reach the URL.
    pub fn is_loopback(&self) -> bool {
        self.host.is_loopback()
    }

    /// Returns `host:port`, the authority part of the URL.
    pub fn authority(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }
}

impl FromStr for NodeUrl {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        let (host, port) = read(text)?;
        Ok(Self { host, port: port.ok_or(UrlError::NoPort)? })
    }
}

impl FromStr for ServiceUrl {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        let (host, port) = read(text)?;
        Ok(Self(NodeUrl { host, port: port.unwrap_or(443) }))
    }
}

impl std::ops::Deref for ServiceUrl {
    type Target = NodeUrl;

    fn deref(&self) -> &NodeUrl {
        &self.0
    }
}

impl fmt::Display for NodeUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "https://{}:{}", self.host, self.port)
    }
}

impl fmt::Display for ServiceUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

wire_text!(NodeUrl, "^https://.+:[0-9]+$");
wire_text!(ServiceUrl, "^https://.+$");

impl fmt::Debug for NodeUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl fmt::Debug for ServiceUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

fn read(text: &str) -> Result<(UrlHost, Option<u16>), UrlError> {
    if text.len() > MAX_URL {
        return Err(UrlError::TooLong);
    }
    let rest = text.strip_prefix("https://").ok_or(UrlError::NotHttps)?;
    // Browsers append a slash to a pasted URL, which has no meaning here.
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    if rest.contains(['/', '?', '#', '\\']) {
        return Err(UrlError::Path);
    }
    if rest.contains('@') {
        return Err(UrlError::UserInfo);
    }
    let bad = || UrlError::BadHost(rest.chars().take(80).collect());
    let (host, port) = match rest.strip_prefix('[') {
        Some(inner) => {
            let (address, after) = inner.split_once(']').ok_or_else(bad)?;
            let port = match after.strip_prefix(':') {
                Some(port) => Some(port),
                None if after.is_empty() => None,
                None => return Err(bad()),
            };
            let address: Ipv6Addr = address.parse().map_err(|_| bad())?;
            (connectable(IpAddr::V6(address))?, port)
        }
        None => {
            let (host, port) = match rest.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (rest, None),
            };
            (read_host(host)?, port)
        }
    };
    Ok((host, port.map(read_port).transpose()?))
}

fn read_port(text: &str) -> Result<u16, UrlError> {
    let digits = !text.starts_with('0') && text.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|_| digits).ok_or(UrlError::BadPort)
}

fn read_host(text: &str) -> Result<UrlHost, UrlError> {
    if let Ok(address) = text.parse::<Ipv4Addr>() {
        return connectable(IpAddr::V4(address));
    }
    let bad = || UrlError::BadHost(text.chars().take(80).collect());
    let name = text.to_ascii_lowercase();
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    };
    // A last label that begins with a digit is no top-level domain. It is part of an unusual
    // spelling of an address (`127.1`, `0x7f.0.0.1`), and resolvers read such spellings
    // differently.
    let last = name.rsplit('.').next().unwrap_or_default();
    let named = last.starts_with(|c: char| c.is_ascii_lowercase());
    if name.len() > 253 || !named || !name.split('.').all(label) {
        return Err(bad());
    }
    Ok(UrlHost::Dns(name))
}

fn connectable(address: IpAddr) -> Result<UrlHost, UrlError> {
    let address = address.to_canonical();
    let broadcast = matches!(address, IpAddr::V4(v4) if v4.is_broadcast());
    if address.is_unspecified() || address.is_multicast() || broadcast {
        return Err(UrlError::NotConnectable(address));
    }
    Ok(UrlHost::Address(address))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(text: &str) -> Result<String, UrlError> {
        text.parse::<NodeUrl>().map(|url| url.to_string())
    }

    #[test]
    fn all_texts_of_one_url_become_equal() {
        for (text, normal) in [
            ("https://10.0.0.5:2380/", "https://10.0.0.5:2380"),
            ("https://DB-1.Example.org:2380", "https://db-1.example.org:2380"),
            ("https://[2001:DB8:0:0::1]:2380", "https://[2001:db8::1]:2380"),
            ("https://[::ffff:10.0.0.5]:2380", "https://10.0.0.5:2380"),
        ] {
            assert_eq!(node(text).as_deref(), Ok(normal));
        }
    }

    #[test]
    fn an_unusual_url_is_refused_with_its_reason() {
        for (text, error) in [
            ("http://10.0.0.5:2380", UrlError::NotHttps),
            ("HTTPS://10.0.0.5:2380", UrlError::NotHttps),
            ("https://root@10.0.0.5:2380", UrlError::UserInfo),
            ("https://10.0.0.5:2380/raft", UrlError::Path),
            ("https://10.0.0.5:2380?x", UrlError::Path),
            ("https://10.0.0.5", UrlError::NoPort),
            ("https://10.0.0.5:", UrlError::BadPort),
            ("https://10.0.0.5:0", UrlError::BadPort),
            ("https://10.0.0.5:02380", UrlError::BadPort),
            ("https://10.0.0.5:70000", UrlError::BadPort),
            ("https://0.0.0.0:2380", UrlError::NotConnectable(Ipv4Addr::UNSPECIFIED.into())),
            ("https://[::]:2380", UrlError::NotConnectable(Ipv6Addr::UNSPECIFIED.into())),
        ] {
            assert_eq!(node(text), Err(error), "{text}");
        }
        for text in [
            "https://127.1:2380",
            "https://0x7f.0.0.1:80",
            "https://:1",
            "https://a b:1",
            "https://2130706433:2380",
            "https://[::1:2380",
            "https://-a.org:1",
            "https://a..b:1",
        ] {
            assert!(matches!(node(text), Err(UrlError::BadHost(_))), "{text}: {:?}", node(text));
        }
    }

    #[test]
    fn the_limit_of_a_url_is_in_bytes_as_the_error_says() {
        let text = format!("https://{}:2380", "ü".repeat(MAX_URL / 2));
        assert!(text.chars().count() < MAX_URL);
        let refused = node(&text).unwrap_err();
        assert_eq!(refused, UrlError::TooLong);
        assert_eq!(refused.to_string(), "a URL has at most 280 bytes");
    }

    #[test]
    fn each_form_of_a_loopback_address_is_recognised() {
        for text in
            ["127.0.0.1", "127.9.9.9", "[::1]", "[::ffff:127.0.0.1]", "localhost", "db.localhost"]
        {
            let url: NodeUrl = format!("https://{text}:2380").parse().unwrap();
            assert!(url.is_loopback(), "{text}");
        }
        assert!(!"https://10.0.0.1:2380".parse::<NodeUrl>().unwrap().is_loopback());
    }

    #[test]
    fn a_service_url_may_omit_its_port() {
        let url: ServiceUrl = "https://discovery.example.org".parse().unwrap();
        assert_eq!(url.to_string(), "https://discovery.example.org:443");
    }
}
