//! Redeem requests that have the id of a real token and a wrong secret. A secret has 256 bits, so
//! nobody guesses it. But the sender knows an id, and may have found a part of a bundle.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use discovery_types::grant::GrantId;

use crate::metrics::ServiceMetrics;

/// The alarm is raised whenever the number of wrong secrets for one token is a multiple of this
/// number.
const ALARM_AT: u64 = 5;
/// Number of tokens whose wrong secrets are counted. Beyond it, the token with the oldest attempt
/// is forgotten.
const MAX_TOKENS: usize = 1_024;
/// Name of the alarm in the metrics.
const ALARM: &str = "token_guessed";

/// Counts of wrong secrets by token, in this process.
#[derive(Debug, Default)]
pub(crate) struct WrongSecretCounts {
    by_token: Mutex<HashMap<GrantId, WrongSecrets>>,
}

/// Wrong secrets for one token.
#[derive(Clone, Copy, Debug, Default)]
struct WrongSecrets {
    count: u64,
    /// Sequence number of the last wrong secret, among all that this process has counted.
    last: u64,
}

impl WrongSecretCounts {
    /// Counts a wrong secret for the token, sent from this address, and raises the alarm at every
    /// fifth one.
    pub(crate) fn note(&self, token: GrantId, address: IpAddr, metrics: &ServiceMetrics) {
        let count = self.count(token);
        tracing::warn!(token.id = %token, %address, count, "a wrong secret for a known token");
        if count.is_multiple_of(ALARM_AT) {
            metrics.count_alarm(ALARM);
            tracing::error!(
                token.id = %token, %address, count,
                "somebody tries secrets for a token: revoke it if its bundle may have been seen"
            );
        }
    }

    fn count(&self, token: GrantId) -> u64 {
        let mut by_token = self.by_token.lock().unwrap_or_else(PoisonError::into_inner);
        let next = by_token.values().map(|guesses| guesses.last).max().unwrap_or(0) + 1;
        if by_token.len() >= MAX_TOKENS && !by_token.contains_key(&token) {
            let oldest = by_token.iter().min_by_key(|(_, guesses)| guesses.last);
            if let Some(oldest) = oldest.map(|(&id, _)| id) {
                by_token.remove(&oldest);
            }
        }
        let guesses = by_token.entry(token).or_default();
        (guesses.count, guesses.last) = (guesses.count + 1, next);
        guesses.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_token_with_the_oldest_attempt_is_forgotten_first() {
        let guesses = WrongSecretCounts::default();
        let (first, second) = (GrantId::random(), GrantId::random());
        assert_eq!([guesses.count(first), guesses.count(second)], [1, 1]);
        assert_eq!(guesses.count(first), 2);
        for _ in 2..MAX_TOKENS {
            guesses.count(GrantId::random());
        }
        assert_eq!(guesses.count(GrantId::random()), 1, "it takes the place of the second");
        assert_eq!([guesses.count(first), guesses.count(second)], [3, 1]);
        assert_eq!(guesses.by_token.lock().unwrap().len(), MAX_TOKENS);
    }
}
