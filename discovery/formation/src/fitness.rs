//! Whether a record may stand in a list at all, and whether two may stand in it together. Service
//! (at redeem) and agents (S1, S2, before they sign) ask the same questions here.

use std::net::IpAddr;

use crate::values::{Permissions, Record};

/// Why a record can't stand in any list of this cluster.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// No peer or no client URL.
    #[error("advertises no {0} URL")]
    NoUrl(&'static str),
    /// Not `https://host:port`.
    #[error("{0} is not of the form https://host:port")]
    Malformed(String),
    /// `0.0.0.0` or `[::]`.
    #[error("{0} is the unspecified address: nobody can reach it")]
    Unspecified(String),
    /// Loopback, not allowed by the statement.
    #[error("{0} is a loopback address, and the cluster was not created with --allow-loopback")]
    Loopback(String),
    /// A port below 1024, not allowed by the statement.
    #[error("{0} has a port below 1024")]
    LowPort(String),
}

/// What two records have in common that they may not.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Clash {
    /// The same agent key.
    #[error("one key")]
    Key,
    /// The same incarnation or node key.
    #[error("one incarnation or node key")]
    Incarnation,
    /// The same member name.
    #[error("the name {0}")]
    Name(String),
    /// The same URL, peer or client.
    #[error("the URL {0}")]
    Url(String),
    /// The same machine, not allowed by the statement.
    #[error("one machine, and the cluster was not created with --allow-shared-host")]
    Machine,
}

/// The first reason why `record` can't stand in a list, if there is one.
///
/// # Errors
/// That reason.
pub fn fit(record: &Record, permissions: Permissions) -> Result<(), Unfit> {
    for (what, urls) in [("peer", &record.peer_urls), ("client", &record.client_urls)] {
        if urls.is_empty() {
            return Err(Unfit::NoUrl(what));
        }
        urls.iter().try_for_each(|url| url_fits(url, permissions))?;
    }
    Ok(())
}

fn url_fits(url: &str, permissions: Permissions) -> Result<(), Unfit> {
    let malformed = || Unfit::Malformed(url.to_owned());
    let (host, port) = url
        .strip_prefix("https://")
        .and_then(|rest| rest.rsplit_once(':'))
        .ok_or_else(malformed)?;
    let port: u16 = port.parse().map_err(|_| malformed())?;
    if host.is_empty() || host.contains(['/', '@', '?', '#']) || port == 0 {
        return Err(malformed());
    }
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    // An IPv4 address inside an IPv6 one reaches the same place.
    let address = bare.parse::<IpAddr>().ok().map(|address| address.to_canonical());
    if address.is_some_and(|address| address.is_unspecified()) {
        return Err(Unfit::Unspecified(url.to_owned()));
    }
    let loopback = address.is_some_and(|address| address.is_loopback())
        || host == "localhost"
        || host.ends_with(".localhost");
    if loopback && !permissions.allow_loopback {
        return Err(Unfit::Loopback(url.to_owned()));
    }
    if port < 1024 && !permissions.allow_low_ports {
        return Err(Unfit::LowPort(url.to_owned()));
    }
    Ok(())
}

/// What keeps `one` and `other` from standing in one list.
///
/// # Errors
/// The first thing that they have in common.
pub fn together(one: &Record, other: &Record, permissions: Permissions) -> Result<(), Clash> {
    if one.key == other.key {
        return Err(Clash::Key);
    }
    if one.incarnation == other.incarnation || one.node_key == other.node_key {
        return Err(Clash::Incarnation);
    }
    if one.name == other.name {
        return Err(Clash::Name(one.name.clone()));
    }
    // A peer URL that is another's client URL can't be listened on by both either.
    let mut urls = one.peer_urls.iter().chain(&one.client_urls);
    if let Some(url) =
        urls.find(|url| other.peer_urls.contains(url) || other.client_urls.contains(url))
    {
        return Err(Clash::Url(url.clone()));
    }
    if !permissions.allow_shared_host && one.machine.is_shared_with(&other.machine) {
        return Err(Clash::Machine);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{plain_record, variant};

    fn judged(url: &str, permissions: Permissions) -> String {
        let record = Record { peer_urls: vec![url.to_owned()], ..plain_record(1) };
        fit(&record, permissions).map_or_else(|why| variant(&why), |()| "fits".to_owned())
    }

    #[test]
    fn addresses_that_others_can_not_reach_are_named() {
        for (url, answer) in [
            ("https://10.0.0.1:2380", "fits"),
            ("https://10.0.0.1:1024", "fits"),
            ("https://10.0.0.1:1023", "LowPort"),
            ("https://10.0.0.1:0", "Malformed"),
            ("https://10.0.0.1", "Malformed"),
            ("http://10.0.0.1:2380", "Malformed"),
            ("https://127.8.8.8:2380", "Loopback"),
            ("https://[::ffff:127.0.0.1]:2380", "Loopback"),
            ("https://localhost:2380", "Loopback"),
            ("https://a.localhost:2380", "Loopback"),
            ("https://0.0.0.0:2380", "Unspecified"),
            ("https://[::]:2380", "Unspecified"),
        ] {
            assert_eq!(judged(url, Permissions::default()), answer, "{url}");
        }
        let all =
            Permissions { allow_loopback: true, allow_low_ports: true, ..Permissions::default() };
        assert_eq!(judged("https://localhost:1", all), "fits");
    }

    #[test]
    fn two_records_share_nothing_that_one_member_has() {
        let clash = |change: fn(&mut Record)| {
            let mut other = plain_record(2);
            change(&mut other);
            let result = together(&plain_record(1), &other, Permissions::default());
            result.map_or_else(|clash| variant(&clash), |()| "none".to_owned())
        };
        assert_eq!(clash(|_| {}), "none");
        assert_eq!(clash(|other| other.key = plain_record(1).key), "Key");
        assert_eq!(clash(|other| other.incarnation = plain_record(1).incarnation), "Incarnation");
        assert_eq!(clash(|other| other.node_key = plain_record(1).node_key), "Incarnation");
        assert_eq!(clash(|other| other.name = plain_record(1).name), "Name");
        assert_eq!(clash(|other| other.peer_urls = plain_record(1).client_urls), "Url");
        assert_eq!(clash(|other| other.client_urls = plain_record(1).peer_urls), "Url");
        assert_eq!(clash(|other| other.machine = plain_record(1).machine), "Machine");
    }
}
