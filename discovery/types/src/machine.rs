//! Which machine an agent runs on: facts that may be missing, and what two sets of them say.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Longest fact.
pub const MAX_FACT: usize = 128;

/// Facts that name a machine. Each may be missing; none is secret.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MachineFacts {
    /// DMI product UUID.
    pub dmi_uuid: Option<String>,
    /// `/etc/machine-id`, or the file that stands in for it.
    pub machine_id: Option<String>,
}

/// What two sets of facts say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sameness {
    /// A fact that both have differs.
    Different,
    /// They share a fact, and none differs.
    Same,
    /// They have no fact in common.
    Unknown,
}

impl MachineFacts {
    /// Compares: another machine is one where a fact present in both differs.
    pub fn compare(&self, other: &Self) -> Sameness {
        let pairs = [(&self.dmi_uuid, &other.dmi_uuid), (&self.machine_id, &other.machine_id)];
        let mut verdict = Sameness::Unknown;
        for pair in pairs {
            if let (Some(own), Some(theirs)) = pair {
                if own != theirs {
                    return Sameness::Different;
                }
                verdict = Sameness::Same;
            }
        }
        verdict
    }

    /// Whether each fact is short and printable.
    pub fn is_sane(&self) -> bool {
        [&self.dmi_uuid, &self.machine_id].into_iter().flatten().all(|fact| {
            (1..=MAX_FACT).contains(&fact.len()) && fact.bytes().all(|b| b.is_ascii_graphic())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(dmi: Option<&str>, id: Option<&str>) -> MachineFacts {
        MachineFacts { dmi_uuid: dmi.map(Into::into), machine_id: id.map(Into::into) }
    }

    #[test]
    fn one_differing_fact_makes_another_machine() {
        let here = facts(Some("a"), Some("x"));
        assert_eq!(here.compare(&facts(Some("a"), Some("y"))), Sameness::Different);
        assert_eq!(here.compare(&facts(Some("a"), None)), Sameness::Same);
        assert_eq!(here.compare(&here), Sameness::Same);
    }

    #[test]
    fn nothing_in_common_says_nothing() {
        assert_eq!(facts(Some("a"), None).compare(&facts(None, Some("x"))), Sameness::Unknown);
        assert_eq!(facts(None, None).compare(&facts(None, None)), Sameness::Unknown);
    }
}
