//! Texts about each search for the report.

use super::plan::SearchKind;

/// Sentences of the report about faults and places that no search of a campaign covers.
pub(super) const NOT_COVERED: [&str; 6] = [
    "All members run on one machine: no search sees several kernels, real networks \
     or real clock drift.",
    "No real disk loses power. Only the simulation loses or tears data that was not synced.",
    "No real disk returns wrong data. Unit tests damage files, and the simulation tears sectors.",
    "Only the simulation changes clocks, and reorders or duplicates messages between members.",
    "Tests of etcd and of Kubernetes run apart from campaigns: see `make clients` \
     and `make kubernetes`.",
    "A search shows faults, not their absence. Bugs that nobody has thought of may \
     need other searches.",
];

impl SearchKind {
    /// Returns the search's name in the report.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::Simulation => "Simulation",
            Self::Walks => "Random walks",
            Self::Histories => "Histories",
            Self::Partitions => "Partitions",
            Self::Durability => "Durability",
            Self::Requests => "Random requests",
            Self::Decoders => "Decoders",
        }
    }

    /// Returns what the search runs, and how it judges the result.
    pub(super) fn method(self) -> &'static str {
        match self {
            Self::Simulation => {
                "Production code of the node runs over simulated disks, networks and clocks. \
                 Invariants and a plain model judge each step."
            }
            Self::Walks => {
                "Production code that forms clusters takes random steps. Safety properties \
                 must hold after each one."
            }
            Self::Histories => {
                "Clients use three built members. One order of all requests must explain \
                 every answer and every event."
            }
            Self::Partitions => {
                "Built members change their membership while networks fail. Every \
                 acknowledged write must stay."
            }
            Self::Durability => {
                "Built programs are killed, or their disks fail. Every acknowledged write \
                 must stay."
            }
            Self::Requests => {
                "Stock etcd and `muster-node` get the same random requests. Answers, errors and \
                 events must be equal."
            }
            Self::Decoders => {
                "Decoders get bytes that coverage guides. None may crash, hang or use too \
                 much memory."
            }
        }
    }

    /// Returns the faults that the search injects.
    pub(super) fn faults(self) -> &'static str {
        match self {
            Self::Simulation => {
                "lost, duplicated, late and reordered messages; partitions; crashes at any disk \
                 operation; failed, full and torn disks; pauses; clocks at different speeds; \
                 lost disks"
            }
            Self::Walks => {
                "killed, paused, dead and re-imaged hosts; lost directories; restored databases and \
                 ledgers; broken links; wrong clocks"
            }
            Self::Histories => {
                "a leader, a follower or all members killed; members paused; partitions in one or \
                 both directions; a broken link between two members"
            }
            Self::Partitions => {
                "partitions during each kind of membership change; connections that work in one \
                 direction only"
            }
            Self::Durability => {
                "kills during writes and at system calls; failed syncs; full disks; an \
                 emptied file"
            }
            Self::Requests => "none, apart from starts and stops of members",
            Self::Decoders => "damaged and hostile bytes",
        }
    }

    /// Returns what the search can't see.
    pub(super) fn blind_spot(self) -> &'static str {
        match self {
            Self::Simulation => {
                "threads, sockets, TLS and gRPC; the agent and the discovery service"
            }
            Self::Walks => "signatures, SQL, sockets and timing; more than three seats",
            Self::Histories => "compactions, membership changes and changes of users",
            Self::Partitions => "reads during the partition; losses of single packets",
            Self::Durability => "losses of data that was not synced",
            Self::Requests => "concurrent requests: each one is answered before the next is sent",
            Self::Decoders => "decoders without a fuzz target; inputs above 64 KiB",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Maximum number of words in a sentence of the report.
    const MAX_WORDS: usize = 25;

    #[test]
    fn no_sentence_about_a_search_is_long() {
        let texts = SearchKind::ALL
            .into_iter()
            .flat_map(|search| [search.method(), search.faults(), search.blind_spot()])
            .chain(NOT_COVERED);
        for sentence in texts.flat_map(|text| text.split('.')) {
            assert!(sentence.split_whitespace().count() <= MAX_WORDS, "{sentence}");
        }
    }
}
