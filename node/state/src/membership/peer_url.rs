//! URLs of members as etcd accepts them: a scheme, a host and a port, and nothing else (etcd
//! `pkg/types.NewURLs`).

use std::{fmt, net::ToSocketAddrs as _};

/// Why a URL is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// The scheme is neither http nor https.
    #[error("URL scheme must be http, https, unix, or unixs: {0}")]
    Scheme(String),
    /// The URL names a Unix domain socket.
    #[error("unix sockets are not supported: {0}")]
    Unix(String),
    /// The host or the port is missing or malformed.
    #[error("URL address does not have the form \"host:port\": {0}")]
    HostPort(String),
    /// The URL has a path, query or fragment.
    #[error("URL must not contain a path: {0}")]
    Path(String),
    /// The host is a name, but an IP address is required.
    #[error("expected IP in URL for binding ({0})")]
    NotAnAddress(String),
}

/// URL under which a member is reached by peers or clients. Comparisons and output use the text as
/// it was written, with the scheme in lower case.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerUrl {
    text: String,
    host: String,
    port: u16,
    https: bool,
}

impl PeerUrl {
    /// Parses a URL. Spaces before and after it are ignored.
    ///
    /// # Errors
    /// Fails unless the URL consists of scheme, host and port.
    pub fn parse(text: &str) -> Result<Self, UrlError> {
        let text = text.trim();
        let (scheme, rest) =
            text.split_once("://").ok_or_else(|| UrlError::Scheme(text.to_owned()))?;
        let scheme = scheme.to_ascii_lowercase();
        let https = match scheme.as_str() {
            "http" => false,
            "https" => true,
            "unix" | "unixs" => return Err(UrlError::Unix(text.to_owned())),
            _ => return Err(UrlError::Scheme(text.to_owned())),
        };
        if rest.contains(['/', '?', '#']) {
            return Err(UrlError::Path(text.to_owned()));
        }
        let bad = || UrlError::HostPort(text.to_owned());
        let (host, port) = rest.rsplit_once(':').ok_or_else(bad)?;
        let port = if port.bytes().all(|b| b.is_ascii_digit()) {
            port.parse().map_err(|_| bad())?
        } else {
            return Err(bad());
        };
        let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        let host = match bare {
            Some(v6) => ipv6_host(v6).ok_or_else(bad)?,
            None if !host.is_empty() && host.chars().all(may_be_in_host) => host.to_owned(),
            None => return Err(bad()),
        };
        Ok(Self { text: format!("{scheme}://{rest}"), host, port, https })
    }

    /// Parses a list separated by commas, and drops duplicates.
    ///
    /// # Errors
    /// Fails at the first invalid URL.
    pub fn parse_list(text: &str) -> Result<Vec<Self>, UrlError> {
        let mut urls: Vec<Self> = Vec::new();
        for url in text.split(',') {
            let url = Self::parse(url)?;
            if !urls.contains(&url) {
                urls.push(url);
            }
        }
        Ok(urls)
    }

    /// Returns the host: a name, or an address without brackets, which may have a zone
    /// (`fe80::1%eth0`).
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Whether the scheme is https.
    #[must_use]
    pub fn is_https(&self) -> bool {
        self.https
    }

    /// Whether the other URL leads to the same server. Schemes and ports must be equal. Hosts must
    /// be equal or resolve to a common address (etcd `netutil.urlsEqual`). This may make DNS
    /// queries.
    #[must_use]
    pub fn reaches_same(&self, other: &Self) -> bool {
        if self.https != other.https || self.port != other.port {
            return false;
        }
        self.host.eq_ignore_ascii_case(&other.host) || {
            let addresses = |url: &Self| {
                (url.host.as_str(), url.port)
                    .to_socket_addrs()
                    .map(Vec::from_iter)
                    .unwrap_or_default()
            };
            let theirs = addresses(other);
            addresses(self).iter().any(|address| theirs.contains(address))
        }
    }
}

/// Converts an IPv6 address to the form that the resolver takes. A URL has `%25` before the
/// address's zone (RFC 6874), and the resolver expects `%`.
fn ipv6_host(text: &str) -> Option<String> {
    let (address, zone) = match text.split_once("%25") {
        Some((address, zone)) => (address, Some(zone)),
        None => (text, None),
    };
    address.parse::<std::net::Ipv6Addr>().ok()?;
    let Some(zone) = zone else { return Some(address.to_owned()) };
    let is_zone = !zone.is_empty() && zone.chars().all(may_be_in_host);
    is_zone.then(|| format!("{address}%{zone}"))
}

/// Whether Go's `net/url` accepts this character in a host that has no user name and no escapes.
fn may_be_in_host(c: char) -> bool {
    !c.is_control() && !"[]:@ %{}|\\^`".contains(c)
}

impl fmt::Display for PeerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_split_into_scheme_host_and_port() {
        let url = PeerUrl::parse("https://[::1]:2380").unwrap();
        assert_eq!((url.host(), url.port(), url.is_https()), ("::1", 2380, true));
        let url = PeerUrl::parse(" http://node-1.example:80").unwrap();
        assert_eq!((url.host(), url.port(), url.is_https()), ("node-1.example", 80, false));
        assert_eq!(url.to_string(), "http://node-1.example:80");
    }

    #[test]
    fn an_upper_case_scheme_becomes_lower_case() {
        let url = PeerUrl::parse("HTTPS://Node-1:2380").unwrap();
        assert_eq!(url.to_string(), "https://Node-1:2380");
        assert!(url.is_https());
    }

    #[test]
    fn an_ipv6_address_can_have_a_zone() {
        let url = PeerUrl::parse("http://[fe80::1%25eth0]:2380").unwrap();
        assert_eq!((url.host(), url.port()), ("fe80::1%eth0", 2380));
        assert_eq!(url.to_string(), "http://[fe80::1%25eth0]:2380");
    }

    #[test]
    fn a_duplicate_url_in_a_list_is_dropped() {
        let urls = |text| PeerUrl::parse_list(text).unwrap();
        let twice = urls("http://h:1,https://h:1, HTTP://h:1,http://h:2");
        assert_eq!(twice, urls("http://h:1,https://h:1,http://h:2"));
    }

    #[test]
    fn urls_that_etcd_refuses_are_refused() {
        for bad in [
            "http://[fe80::1%25]:1",
            "http://[fe80::1%eth0]:1",
            "http://[node%25eth0]:1",
            "",
            "foo",
            "localhost:2380",
            "ftp://h:1",
            "http://h",
            "http://h:",
            "http://h:1/",
            "http://h:1/path",
            "http://h:x",
            "http://h:70000",
            "http://:1",
            "http://[::1:2",
            "http://::1:2",
            "http://u@h:1",
            "http://h:+1",
            "http://h%41:1",
            "http://h\u{7f}:1",
            "http://a\nb:1",
            "http://a\\b:1",
        ] {
            assert!(PeerUrl::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_host_name_and_its_address_reach_the_same_server() {
        let url = |text| PeerUrl::parse(text).unwrap();
        assert!(url("http://localhost:1").reaches_same(&url("http://127.0.0.1:1")));
        assert!(!url("http://localhost:1").reaches_same(&url("http://127.0.0.1:2")));
        assert!(!url("http://localhost:1").reaches_same(&url("https://localhost:1")));
    }
}
