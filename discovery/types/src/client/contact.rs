//! Whether the client's last request reached the service.

use std::time::SystemTime;

/// Contact with the service, as the client's requests show it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ServiceContact {
    /// The last request got an answer from the service, or there was no request yet.
    #[default]
    Reachable,
    /// The last request got no answer from the service.
    Unreachable {
        /// Time of the first request without an answer.
        since: SystemTime,
        /// Error of the last request, with its causes.
        error: String,
    },
}

impl ServiceContact {
    /// Notes the result of a request; `error` is `None` if the service answered. Returns whether
    /// the contact differs afterwards.
    pub(super) fn note(&mut self, error: Option<String>, now: SystemTime) -> bool {
        let next = match (&*self, error) {
            (_, None) => Self::Reachable,
            (Self::Reachable, Some(error)) => Self::Unreachable { since: now, error },
            (Self::Unreachable { since, .. }, Some(error)) => {
                Self::Unreachable { since: *since, error }
            }
        };
        let differs = next != *self;
        *self = next;
        differs
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    #[test]
    fn the_time_of_the_first_failure_stays_until_the_service_answers() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let mut contact = ServiceContact::default();
        assert!(!contact.note(None, at(1)));
        assert!(contact.note(Some("refused".to_owned()), at(2)));
        assert!(!contact.note(Some("refused".to_owned()), at(3)));
        assert!(contact.note(Some("no route".to_owned()), at(4)));
        let lost = ServiceContact::Unreachable { since: at(2), error: "no route".to_owned() };
        assert_eq!(contact, lost);
        assert!(contact.note(None, at(5)));
        assert_eq!(contact, ServiceContact::Reachable);
    }
}
