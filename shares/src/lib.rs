//! Fair shares of limited resources: no client can take what the others need.
//!
//! | module | resource | if it is used up |
//! |---|---|---|
//! | [`slots`] | slots, with a maximum per holder | refuses, or evicts from the largest holder |
//! | [`admission`] | slots of connections that have not identified themselves | evicts |
//! | [`memory`] | bytes, an equal part for each network | refuses |
//!
//! This crate only divides the resources. The code that uses it sets the limits, and answers
//! clients that reach a limit. The rate of requests is limited elsewhere.

pub mod admission;
pub mod memory;
pub mod slots;

use std::net::{IpAddr, Ipv6Addr};

/// Prefix length of an IPv6 network that counts as one host: a host usually gets a whole /64, that
/// is 2⁶⁴ addresses.
const IPV6_PREFIX: u32 = 64;

/// Returns the address that stands for the whole network: an IPv4 address itself, or the /64 prefix
/// of an IPv6 address. One such network counts as one host.
#[must_use]
pub fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let mask = u128::MAX << (128 - IPV6_PREFIX);
            IpAddr::V6(Ipv6Addr::from(u128::from(address) & mask))
        }
        address @ IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_network_count_as_one_host() {
        let of = |text: &str| network_of(text.parse().expect("an address"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_eq!(of("fd00::1"), of("fd00::2"));
        assert_ne!(of("fd00::1"), of("fd00:0:0:1::1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }
}
