//! URLs that this node listens on.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
};

use node_state::membership::{PeerUrl, UrlError};

/// URL to listen on. The host is an IP address or `localhost`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenUrl {
    url: PeerUrl,
    address: SocketAddr,
}

impl ListenUrl {
    /// Parses one URL and determines the address to bind.
    ///
    /// # Errors
    /// Fails if the text is not a URL, or if the host is a name other than `localhost`.
    pub fn parse(text: &str) -> Result<Self, UrlError> {
        let url = PeerUrl::parse(text)?;
        let ip = if url.host() == "localhost" {
            IpAddr::V4(std::net::Ipv4Addr::LOCALHOST)
        } else {
            url.host().parse().map_err(|_| UrlError::NotAnAddress(url.to_string()))?
        };
        let address = SocketAddr::new(ip, url.port());
        Ok(Self { url, address })
    }

    /// Parses a list of URLs separated by commas. If two URLs have the same scheme and address,
    /// only the first is kept.
    ///
    /// # Errors
    /// Fails at the first invalid URL.
    pub fn parse_list(text: &str) -> Result<Vec<Self>, UrlError> {
        let mut urls: Vec<Self> = Vec::new();
        for url in text.split(',') {
            let url = Self::parse(url)?;
            let is_known =
                |known: &Self| known.address == url.address && known.is_https() == url.is_https();
            if !urls.iter().any(is_known) {
                urls.push(url);
            }
        }
        Ok(urls)
    }

    /// Returns the address to bind.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns whether the scheme is https.
    #[must_use]
    pub fn is_https(&self) -> bool {
        self.url.is_https()
    }
}

impl fmt::Display for ListenUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.url.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scheme_in_capitals_becomes_lower_case() {
        let listens = ListenUrl::parse("Http://127.0.0.1:2379").unwrap();
        assert_eq!(listens.to_string(), "http://127.0.0.1:2379");
    }

    #[test]
    fn an_address_with_a_zone_is_refused() {
        assert!(ListenUrl::parse("http://[fe80::1%25eth0]:2380").is_err());
    }

    #[test]
    fn a_repeated_address_in_a_list_is_kept_once() {
        let listens = ListenUrl::parse_list("http://127.0.0.1:1,http://localhost:1").unwrap();
        assert_eq!(listens.len(), 1);
    }

    #[test]
    fn only_ip_addresses_and_localhost_can_be_listened_on() {
        assert_eq!(
            ListenUrl::parse("http://localhost:2379").unwrap().address().to_string(),
            "127.0.0.1:2379"
        );
        assert_eq!(
            ListenUrl::parse("http://example.com:2379").unwrap_err().to_string(),
            "expected IP in URL for binding (http://example.com:2379)"
        );
    }
}
