//! Checks whether a list of members may contain a certain record, and whether it may contain two
//! certain records together. The service (at redeem) and the agents (rules S1 and S2 of
//! `agent/sign.rs`, before they sign) share these checks.

use std::net::IpAddr;

use crate::values::{AgentRecord, Permissions, quorum};

/// Why no list of members of this cluster can contain a record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordFault {
    /// The record has no peer URL or no client URL.
    #[error("advertises no {0} URL")]
    NoUrl(&'static str),
    /// The URL is not of the form `https://host:port`.
    #[error("{0} is not of the form https://host:port")]
    Malformed(String),
    /// The URL's host is the unspecified address, `0.0.0.0` or `[::]`.
    #[error("{0} is the unspecified address: nobody can reach it")]
    Unspecified(String),
    /// The URL's host is a loopback address, which the statement doesn't allow.
    #[error("{0} is a loopback address, and the cluster was not created with --allow-loopback")]
    Loopback(String),
    /// The URL's port is below 1024, which the statement doesn't allow.
    #[error("{0} has a port below 1024")]
    LowPort(String),
}

/// Value that two records of one list of members may not share.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordConflict {
    /// Agent key that both records have.
    #[error("one key")]
    Key,
    /// Incarnation or node key that both records have.
    #[error("one incarnation or node key")]
    Incarnation,
    /// Member name that both records have.
    #[error("the name {0}")]
    Name(String),
    /// URL that both records advertise, as a peer or a client URL.
    #[error("the URL {0}")]
    Url(String),
    /// Machine that both agents run on, although the statement doesn't allow a shared machine.
    #[error(
        "one machine, and the cluster was not created with --allow-shared-host (if they are two \
         machines made from one image, give each a machine id of its own)"
    )]
    Machine,
}

/// Why a list whose members are spread over zones can't contain a record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ZoneFault {
    /// The record has no zone.
    #[error("says no zone, and the cluster was created with --spread zone")]
    Missing,
    /// The zone would have a majority of the members.
    #[error("is in the zone {zone}, which may have {max} of {size} members and has them")]
    Crowded {
        /// Name of the zone.
        zone: String,
        /// Largest number of members in one zone.
        max: usize,
        /// Number of members in the cluster.
        size: usize,
    },
}

/// Returns the largest number of members in one zone if `size` members are spread over zones: less
/// than a majority.
#[must_use]
pub fn max_in_one_zone(size: usize) -> usize {
    quorum(size) - 1
}

/// Checks whether a member in `zone` may be in a cluster with members in the zones `others`. The
/// cluster has `size` members, which are spread over zones.
///
/// # Errors
/// The member has no zone, or the zone would have a majority.
pub fn check_zone<'a>(
    zone: Option<&str>,
    others: impl IntoIterator<Item = Option<&'a str>>,
    size: usize,
) -> Result<(), ZoneFault> {
    let zone = zone.ok_or(ZoneFault::Missing)?;
    let neighbours = others.into_iter().filter(|other| *other == Some(zone)).count();
    let max = max_in_one_zone(size);
    match neighbours < max {
        true => Ok(()),
        false => Err(ZoneFault::Crowded { zone: zone.to_owned(), max, size }),
    }
}

/// Checks whether a list of members of this cluster can contain `record`.
///
/// # Errors
/// The first reason why the list can't contain `record`.
pub fn check_record(record: &AgentRecord, permissions: Permissions) -> Result<(), RecordFault> {
    for (what, urls) in [("peer", &record.peer_urls), ("client", &record.client_urls)] {
        if urls.is_empty() {
            return Err(RecordFault::NoUrl(what));
        }
        urls.iter().try_for_each(|url| check_url(url, permissions))?;
    }
    Ok(())
}

fn check_url(url: &str, permissions: Permissions) -> Result<(), RecordFault> {
    let malformed = || RecordFault::Malformed(url.to_owned());
    let (host, port) = url
        .strip_prefix("https://")
        .and_then(|rest| rest.rsplit_once(':'))
        .ok_or_else(malformed)?;
    let port: u16 = port.parse().map_err(|_| malformed())?;
    if host.is_empty() || host.contains(['/', '@', '?', '#']) || port == 0 {
        return Err(malformed());
    }
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    // An IPv4 address can also be written as IPv6 (`::ffff:127.0.0.1`). Both forms reach the same
    // host, so both are checked as IPv4.
    let address = bare.parse::<IpAddr>().ok().map(|address| address.to_canonical());
    if address.is_some_and(|address| address.is_unspecified()) {
        return Err(RecordFault::Unspecified(url.to_owned()));
    }
    let loopback = address.is_some_and(|address| address.is_loopback())
        || host == "localhost"
        || host.ends_with(".localhost");
    if loopback && !permissions.allow_loopback {
        return Err(RecordFault::Loopback(url.to_owned()));
    }
    if port < 1024 && !permissions.allow_low_ports {
        return Err(RecordFault::LowPort(url.to_owned()));
    }
    Ok(())
}

/// Checks whether one list of members may contain both `one` and `other`.
///
/// # Errors
/// The first value that both records have, although it must be unique in a list.
pub fn check_pair(
    one: &AgentRecord,
    other: &AgentRecord,
    permissions: Permissions,
) -> Result<(), RecordConflict> {
    if one.key == other.key {
        return Err(RecordConflict::Key);
    }
    if one.incarnation == other.incarnation || one.node_key == other.node_key {
        return Err(RecordConflict::Incarnation);
    }
    if one.name == other.name {
        return Err(RecordConflict::Name(one.name.clone()));
    }
    // The peer URLs of one record must also differ from the client URLs of the other: only one node
    // can listen at a URL.
    let mut urls = one.peer_urls.iter().chain(&one.client_urls);
    if let Some(url) =
        urls.find(|url| other.peer_urls.contains(url) || other.client_urls.contains(url))
    {
        return Err(RecordConflict::Url(url.clone()));
    }
    if !permissions.allow_shared_host && one.machine.is_same_as(&other.machine) {
        return Err(RecordConflict::Machine);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{plain_record, variant};

    fn judged(url: &str, permissions: Permissions) -> String {
        let record = AgentRecord { peer_urls: vec![url.to_owned()], ..plain_record(1) };
        check_record(&record, permissions).map_or_else(|why| variant(&why), |()| "fits".to_owned())
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
    fn no_zone_has_a_majority() {
        let zones = |names: &str| names.chars().map(|c| c.to_string()).collect::<Vec<_>>();
        let judged = |zone: &str, others: &str, size| {
            let others = zones(others);
            let others = others.iter().map(|zone| Some(zone.as_str()));
            let zone = (!zone.is_empty()).then_some(zone);
            check_zone(zone, others, size).map_or_else(|why| variant(&why), |()| "fits".to_owned())
        };
        for (zone, others, size, answer) in [
            ("a", "", 3, "fits"),
            ("a", "bc", 3, "fits"),
            ("a", "a", 3, "Crowded"),
            ("a", "abb", 5, "fits"),
            ("a", "aab", 5, "Crowded"),
            ("a", "ab", 4, "fits"),
            ("a", "aa", 4, "Crowded"),
            ("a", "", 1, "Crowded"),
            ("", "", 3, "Missing"),
        ] {
            assert_eq!(judged(zone, others, size), answer, "{zone} beside {others} of {size}");
        }
    }

    #[test]
    fn two_records_of_a_list_share_no_value_that_must_be_unique() {
        let clash = |change: fn(&mut AgentRecord)| {
            let mut other = plain_record(2);
            change(&mut other);
            let result = check_pair(&plain_record(1), &other, Permissions::default());
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
