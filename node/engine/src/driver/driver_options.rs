//! Configuration of the driver.

/// Configuration of the driver, in addition to that of consensus.
#[derive(Clone, Copy, Debug)]
pub struct DriverOptions {
    /// Whether this member campaigns as soon as it has connected to a quorum, if there was no
    /// leader yet.
    pub campaign_when_connected: bool,
    /// Whether to shorten the wait for the first election once a quorum is connected
    /// (`--initial-election-tick-advance`).
    pub hasten_first_election: bool,
    /// Number of entries that the log keeps for followers that lag, although the store already
    /// holds them durably.
    pub catch_up_entries: u64,
    /// Age in ticks at which the driver drops a proposal that found no leader, or a read without an
    /// answer. This age must exceed the time for which the requester waits.
    pub proposal_ticks: u64,
    /// Ticks after which a ReadIndex round without an answer is repeated.
    pub read_retry_ticks: u64,
    /// Number of reads at the same time from which on a ReadIndex round is delayed until most of
    /// the readers share it.
    pub min_shared_reads: usize,
    /// Limit on the bytes of log entries that are not yet applied. Above the limit a leader refuses
    /// proposals, and a follower drops appends, which the leader sends again.
    ///
    /// This limit must exceed consensus' limit on uncommitted bytes. Uncommitted entries can't be
    /// applied. A follower that has too many of them would drop every append for ever, even one
    /// that would replace those entries.
    pub max_backlog_bytes: usize,
}
