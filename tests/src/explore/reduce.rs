//! Which states and steps are taken for one another, and why nothing is lost by it.
//!
//! Every function here says what it leaves out and the argument for it: two states are one if each
//! step from one of them has its like from the other, with the same properties judged the same way.
//! All of it depends on [`Config::reduced`], so that small configurations are explored with and
//! without, and every regression with its rule switched off
//! (`tests/explore_reduction.rs`); an argument that leans on a rule or on a guarantee of the
//! environment asks whether that is on. A lying service remembers nothing, so hardly anything is
//! left out with one.

use std::sync::Arc;

use formation_explored::agent::{Bound, Directory, Journal};
use formation_explored::memory::{Entry, compare};
use formation_explored::service::{Cluster, Context, Event, Phase, Seating, Settings, step};
use formation_explored::{Epoch, Hash, KeyId, Rule, quorum};

use crate::explore::config::Config;
use crate::explore::database::{Database, PROCESSES};
use crate::explore::host_side::directory_of;
use crate::explore::identity::{epoch_of, hash_of, incarnation, members_of};
use crate::explore::processes::Setback;
use crate::explore::world::{Host, Mode, NOW, World, normalise};

/// What of the row nothing looks at.
///
/// `floor` and `highest_epoch` are read by one place, the freeze, which takes an epoch of at least
/// `epoch`: below that they say nothing, and the row's epoch never falls. A stored release only
/// raises those two; agents hear of releases from `Said`. From the commit on, or the end, the row
/// is asked for its list and for who sits in it, never again for counts, standbys or acks. And only
/// a list's time-out, on the road (property 7) too, asks who has reached whom.
pub(super) fn row(cluster: &mut Cluster, config: &Config) {
    let forming = matches!(cluster.phase, Phase::Open | Phase::Preparing);
    let epoch = cluster.epoch;
    if cluster.floor < epoch {
        cluster.floor = 0;
    }
    let listed: Vec<KeyId> = match &mut cluster.frozen {
        Some(frozen) if !forming => {
            frozen.acks.clear();
            members_of(frozen.h).collect()
        }
        Some(frozen) if config.faults.timeouts == 0 && config.roads == 0 => {
            frozen.probes.clear();
            Vec::new()
        }
        _ => Vec::new(),
    };
    for (key, agent) in &mut cluster.agents {
        agent.release = None;
        if agent.highest_epoch < epoch || !forming {
            agent.highest_epoch = 0;
        }
        if !forming {
            agent.counts = 0;
            if !listed.contains(key) {
                agent.seating = Seating::Absent;
            }
        }
    }
}

/// A backup as it will be found. After a restore the first thing that any process does is to tell
/// the row that its database has changed, which throws a frozen list away: so whatever had come in
/// for it makes no difference between two backups. Needs what no dump carries: without it nobody may notice. What a
/// clock that is ahead would make of it depends on whether it still is: with one nothing is left out.
#[must_use]
pub(super) fn backup(database: &Arc<Database>, config: &Config) -> Arc<Database> {
    let is_noticed = config.environment.ledger
        && config.environment.site
        && !config.setbacks.contains(&Setback::InPlace);
    if !config.reduced || !is_noticed || config.faults.clocks > 0 {
        return Arc::clone(database);
    }
    let mut cluster = database.cluster.clone();
    let settings = Settings::DEFAULT;
    let context =
        Context { rules: &config.rules, settings: &settings, steady: true, hash: &hash_of };
    let _ = step(&mut cluster, &context, NOW, Event::DatabaseChanged);
    normalise(&mut cluster, config);
    Arc::new(Database { cluster, ..(**database).clone() })
}

/// Processes have no ledgers and keep nothing between two transactions: one is like the other, and
/// one that has just connected like one that always was. After a restore they are there at once.
#[must_use]
pub(super) fn remembers_nothing(config: &Config) -> bool {
    config.reduced && !config.environment.ledger && config.environment.row_lock
}

/// The acks of a list arrive together, once all of its members have signed. Until the last one is
/// there, only the list's time-out looks at the others (who has answered nothing is counted), so
/// that one which arrives earlier makes no difference if none is to come; the road (property 7)
/// brings every ack that was signed before it waits for anything. Needs that leases are judged
/// before the ack is, else the first of them is one too late; and the row lock: without it a
/// transaction brings what it read long ago, one by one.
#[must_use]
pub(super) fn do_acks_arrive_together(world: &World, config: &Config) -> bool {
    config.reduced
        && !config.liar
        && config.environment.row_lock
        && config.rules.on(Rule::LapseFirst)
        && world.left.timeouts == 0
}

/// After a restore no service is there until a process connects. What hosts do by themselves
/// meanwhile reads and writes nothing of the database, so they could as well have done it before
/// the restore; and nobody serves what they say.
#[must_use]
pub(super) fn waits_for_a_process(world: &World, config: &Config) -> bool {
    config.reduced && !config.liar && !world.processes.iter().any(|process| process.connected)
}

/// Nobody can have heard of this host, whatever the number of its life.
///
/// That it dies or is made anew is left out: a host that is never heard of does the same as a dead
/// one, and one that begins later does the same as a new one. Its links stay up as well: they carry
/// probes only, nobody probes a host before it has joined, and they may go down as soon as it has.
/// The road (property 7) does count
/// hosts that could still join: it is walked a second time without one of them.
#[must_use]
pub(super) fn is_untouched(host: &Host, config: &Config) -> bool {
    let blank = || directory_of(config, host) == Directory::Blank;
    config.reduced && host.journal.is_none() && host.mode == Mode::Runs && blank()
}

/// No restore can come any more, no ledger has anything to say, no transaction is half done: what
/// the database says is what it will go on from.
#[must_use]
pub(super) fn is_database_final(world: &World, config: &Config) -> bool {
    world.left.restores == 0
        && world.left.overlaps == 0
        && world.left.crashes == 0
        && are_ledgers_content(world, config)
        && world.processes.iter().all(|process| process.read.is_none())
}

/// Nothing was set back, or everybody has noticed and it is settled: no process finds a difference
/// however often it looks, and no ledger speaks against what the database decides.
#[must_use]
pub(super) fn are_ledgers_content(world: &World, config: &Config) -> bool {
    let database = &world.database;
    if !config.environment.ledger || !has_been_set_back(world, config) {
        return world.processes.iter().all(|process| process.connected);
    }
    let is_content = |at: usize| {
        let process = &world.processes[at];
        let memory = process.ledger.memory(&config.environment);
        let agrees = match process.ledger.entry {
            None => true,
            Some(Entry::Commit { h, .. }) => database.commit() == Some(h),
            Some(Entry::End(_)) => database.cluster.phase.has_ended(),
        };
        let same = compare(&memory, &database.shown_to(at, &memory, &config.environment));
        process.connected && agrees && same.is_ok()
    };
    database.settled && !database.cluster.unsettled && (0..PROCESSES).all(is_content)
}

/// A database or a ledger is not what it was.
fn has_been_set_back(world: &World, config: &Config) -> bool {
    let (left, all) = (&world.left, &config.faults.at_most(config.together));
    left.restores < all.restores || left.ledgers < all.ledgers
}

/// Which process serves makes a difference: the database was set back, and they don't know the same
/// of it. Before that all of them read the same row, and none decides what another has decided; what
/// each has let out or copied is its own step.
#[must_use]
pub(super) fn may_serve_differently(world: &World, config: &Config) -> bool {
    let can_be_set_back = config.faults.restores > 0 || config.faults.ledgers > 0;
    let matters = !config.reduced
        || (has_been_set_back(world, config) && !are_ledgers_content(world, config));
    config.environment.ledger && can_be_set_back && matters && !are_processes_alike(world)
}

/// The processes are in the same state, and every database says the same of both.
#[must_use]
pub(super) fn are_processes_alike(world: &World) -> bool {
    let rows = |database: &Arc<Database>| database.rows[0] == database.rows[1];
    world.processes[0] == world.processes[1]
        && rows(&world.database)
        && world.backup.as_ref().is_none_or(rows)
}

/// The decided list's document may as well be out already: the database is final, so letting it out
/// is possible from now on for ever, takes nothing back, and agents may see it as late as they like.
/// So it is without ledgers, whatever becomes of the database: no process remembers what it let out.
#[must_use]
pub(super) fn is_as_good_as_out(world: &World, config: &Config) -> bool {
    let cluster = &world.database.cluster;
    config.reduced
        && !config.liar
        && matches!(cluster.phase, Phase::Committed | Phase::Formed)
        && cluster.split.is_none()
        && (is_database_final(world, config) || remembers_nothing(config))
        && cluster.frozen.as_ref().is_some_and(|frozen| !world.said.documents.contains(&frozen.h))
}

/// The service has had its last word: one document is out, no other exists, nobody holds or runs
/// anything else, and nothing that a host does can reach the database or another host any more.
/// Hosts are then strangers to each other, and every property that a step is judged by looks at
/// one host's own past, so each is followed alone, with all the faults that are left.
///
/// What is left out: states in which two hosts have gone on since. Only the road (property 7) sees
/// two hosts at once; it is walked from the state in which the others stand where they stood.
#[must_use]
pub(super) fn are_strangers(world: &World, config: &Config) -> bool {
    let cluster = &world.database.cluster;
    let Some(frozen) = &cluster.frozen else { return false };
    let only = |h: &Hash| *h == frozen.h;
    let host_agrees = |host: &Arc<Host>| {
        let held = host.journal.as_ref().and_then(|journal| journal.held.as_ref());
        held.is_none_or(|held| only(&held.h)) && host.node.as_ref().is_none_or(only)
    };
    config.reduced
        && !config.liar
        && !config.reports
        && config.faults.clones == 0
        && config.environment.journal_sync
        && config.rules.on(Rule::AbandonBeforeCommit)
        && cluster.phase == Phase::Committed
        && cluster.split.is_none()
        && is_database_final(world, config)
        && world.said.documents.len() == 1
        && world.said.documents.contains(&frozen.h)
        && world.said.committed.contains(&frozen.h)
        && world.said.started.values().all(only)
        && world.hosts.iter().all(host_agrees)
}

/// The cluster has ended, no document was ever let out, and nobody holds one: nobody will start
/// anything, and nobody will sign.
#[must_use]
pub(super) fn is_the_end(world: &World, config: &Config) -> bool {
    let holds = |host: &Arc<Host>| {
        host.node.is_some() || host.journal.as_ref().is_some_and(|journal| journal.held.is_some())
    };
    config.reduced
        && !config.liar
        && world.database.cluster.phase.has_ended()
        && is_database_final(world, config)
        && world.said.documents.is_empty()
        && !world.hosts.iter().any(holds)
}

/// Where property 3 alone is asked: no restore is left, so that the present database decides one
/// /// list at most from here on, and of those that earlier ones decided none can have a majority. That
/// takes members that have started with it, or still can: who hold its document, or whose journal
/// knows that they signed it and have not released it. There are never more of them: journals never
/// forget, and a member that dies or is made anew is none any more.
#[must_use]
pub(super) fn has_one_majority_at_most(world: &World, config: &Config) -> bool {
    let applies = config.reduced
        && config.majorities_only
        && !config.liar
        && config.environment.row_lock
        && config.environment.journal_sync
        && config.faults.clones == 0
        && config.rules.on(Rule::AbandonBeforeCommit)
        && config.rules.on(Rule::HoldAboveReleased)
        && config.rules.on(Rule::HoldWhatWasSigned);
    let mut earlier = world.said.committed.iter().filter(|&&h| world.database.commit() != Some(h));
    applies && world.left.restores == 0 && !earlier.any(|&h| can_have_a_majority(world, h))
}

fn can_have_a_majority(world: &World, h: Hash) -> bool {
    let epoch = epoch_of(h);
    let starts = |key: &KeyId| {
        let journal = world.live_journal(*key);
        world.said.started.get(&incarnation(*key)) == Some(&h)
            || journal.is_some_and(|journal| {
                let holds = journal.held.as_ref().is_some_and(|held| held.h == h);
                let signed = journal.bound.get(&epoch).is_some_and(|bound| bound.h == h);
                holds || (signed && epoch > journal.released)
            })
    };
    let size = members_of(h).count();
    members_of(h).filter(starts).count() >= quorum(size)
}

/// What of what was said can still make a difference. Made once for each state.
pub(super) struct Relevance<'a> {
    /// No list below this epoch will ever be frozen, acked or refused at the service again: it is
    /// the lowest that the present database, the backup, or a transaction under way has.
    lowest: Epoch,
    /// Journals never forget: they are synced, and nobody's disk is copied.
    journals_last: bool,
    /// The ledgers will never be asked again.
    pub ledgers_asked: bool,
    /// Boot counters tell the holders of a key apart, and without copies each key has one.
    pub boots_count: bool,
    /// A dead host's disk is never copied, nor looked at in any other way.
    pub forgets_the_dead: bool,
    /// Messages of those that are no more may still arrive.
    pub late: bool,
    /// Lists that can still be signed, or frozen again.
    proposals: Vec<Hash>,
    config: &'a Config,
}

impl<'a> Relevance<'a> {
    /// For `world`.
    #[must_use]
    pub(super) fn of(world: &World, config: &'a Config) -> Relevance<'a> {
        let reads = world.processes.iter().filter_map(|process| process.read.as_ref());
        let databases = [Some(&world.database), world.backup.as_ref()].into_iter().flatten();
        let lowest = databases.chain(reads).map(|database| database.cluster.epoch).min();
        let on = config.reduced && !config.liar;
        let mut relevance = Relevance {
            lowest: lowest.filter(|_| on).unwrap_or(0),
            journals_last: config.environment.journal_sync && config.faults.clones == 0,
            ledgers_asked: !(on && is_database_final(world, config)),
            boots_count: !config.reduced || config.faults.clones > 0,
            forgets_the_dead: config.reduced,
            late: config.late || !config.reduced,
            proposals: Vec::new(),
            config,
        };
        let alive = |h: &&Hash| relevance.is_proposal_alive(world, **h);
        relevance.proposals = world.said.proposals.iter().filter(alive).copied().collect();
        relevance
    }

    /// Somebody may still sign it, or the service may still hear of it.
    ///
    /// Whoever has signed or released its epoch never signs it anew (S5), and sends the same ack
    /// again at most. That it may be told the epoch by it is no difference: the service has shown
    /// that epoch, and an agent may see it at any time.
    fn is_proposal_alive(&self, world: &World, h: Hash) -> bool {
        let epoch = epoch_of(h);
        if epoch >= self.lowest
            || !self.journals_last
            || !self.config.rules.on(Rule::OneListPerEpoch)
        {
            return true;
        }
        let may_sign = |journal: &Journal| {
            members_of(h).any(|key| key == journal.key)
                && journal.held.is_none()
                && journal.highest_epoch() < epoch
        };
        let hosts = world.hosts.iter().filter(|host| host.alive);
        hosts.filter_map(|host| host.journal.as_ref()).any(may_sign)
    }

    /// The class of `host`'s directory.
    #[must_use]
    pub(super) fn directory(&self, host: &Host) -> Directory {
        directory_of(self.config, host)
    }

    /// The list can still be signed by somebody or refused at the service.
    #[must_use]
    pub(super) fn proposals(&self) -> &[Hash] {
        &self.proposals
    }

    /// An ack can only be taken for a list that is frozen at its epoch.
    #[must_use]
    pub(super) fn is_ack_alive(&self, h: Hash) -> bool {
        epoch_of(h) >= self.lowest
    }

    /// A signed list can still keep its signer from signing another, or let it hold its document.
    /// Once it is released by its signer, it can't be held (`HoldAboveReleased`); once enough of
    /// its members have released it, it keeps nobody back (S6): releases are never taken back.
    #[must_use]
    pub(super) fn is_bound_alive(
        &self,
        world: &World,
        journal: &Journal,
        epoch: Epoch,
        bound: &Bound,
    ) -> bool {
        let reducible = self.lowest > 0
            && self.journals_last
            && self.config.rules.on(Rule::HoldAboveReleased)
            && epoch <= journal.released;
        if !reducible {
            return true;
        }
        let released = |key: KeyId| world.said.releases.get(&key).is_some_and(|&r| r >= epoch);
        let count = bound.members.iter().filter(|member| released(member.key)).count();
        count < bound.releases_needed(&self.config.rules)
    }
}
