//! Errors on order, the power switch, and the count of what was asked.

use std::io;

/// What a fault can hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Opening or creating a file, creating a directory.
    Open,
    /// Reading, asking for the length.
    Read,
    /// Writing.
    Write,
    /// Cutting, extending, allocating.
    Resize,
    /// Syncing a file.
    Sync,
    /// Syncing a directory.
    SyncDir,
    /// Renaming.
    Rename,
    /// Removing.
    Remove,
    /// Listing, looking, locking.
    List,
}

/// What the caller is told. A write that fails has written some part; a sync that fails has made
/// some sectors durable, and the others never will be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// EIO.
    Io,
    /// ENOSPC.
    NoSpace,
}

/// An error on order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Which operations it counts.
    pub operation: Operation,
    /// How many of them succeed first.
    pub after: u64,
    /// How many then fail; `u64::MAX` is "all from then on".
    pub times: u64,
    /// How.
    pub failure: Failure,
}

/// What was asked of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// All operations.
    pub operations: u64,
    /// Writes.
    pub writes: u64,
    /// Syncs of files.
    pub syncs: u64,
    /// Syncs of directories.
    pub directory_syncs: u64,
}

/// Syncs that succeed and do nothing, as if the code had forgotten them: what depends on them has
/// to go wrong then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lies {
    /// Of files.
    pub files: bool,
    /// Of directories.
    pub directories: bool,
}

#[derive(Clone)]
pub(super) struct Faults {
    pub lies: Lies,
    /// Bytes by which files may still grow.
    pub free: u64,
    orders: Vec<Fault>,
    /// Operations left; none: no end in sight.
    power: Option<u64>,
    /// The operation that the power failed in is the one being done.
    now: bool,
    /// An order was carried out.
    failed: bool,
    pub counts: Counts,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            lies: Lies::default(),
            free: u64::MAX,
            orders: Vec::new(),
            power: None,
            now: false,
            failed: false,
            counts: Counts::default(),
        }
    }
}

pub(super) fn power_is_off() -> io::Error {
    io::Error::other("the simulated power is off")
}

impl Faults {
    pub(super) fn inject(&mut self, fault: Fault) {
        self.orders.push(fault);
    }

    /// Unless it fails before that, or has failed.
    pub(super) fn power_off_after(&mut self, operations: u64) {
        self.power = Some(self.power.map_or(operations, |left| left.min(operations)));
    }

    pub(super) fn power_on(&mut self) {
        self.power = None;
        self.now = false;
        self.failed = false;
        self.orders.clear();
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed
    }

    pub(super) fn is_off(&self) -> bool {
        self.power == Some(0)
    }

    pub(super) fn went_off_now(&self) -> bool {
        self.now
    }

    /// Counts one operation, and fails it if that was ordered.
    pub(super) fn meet(&mut self, operation: Operation) -> io::Result<()> {
        self.now = false;
        match &mut self.power {
            Some(0) => return Err(power_is_off()),
            Some(left) => {
                *left -= 1;
                self.now = *left == 0;
            }
            None => {}
        }
        self.count(operation);
        if self.now {
            return Err(power_is_off());
        }
        let mut failure = None;
        for order in self.orders.iter_mut().filter(|order| order.operation == operation) {
            if order.after > 0 {
                order.after -= 1;
            } else if order.times > 0 && failure.is_none() {
                order.times -= 1;
                failure = Some(order.failure);
            }
        }
        failure.map_or(Ok(()), |failure| self.fail(failure))
    }

    /// A file grows.
    pub(super) fn take(&mut self, bytes: u64) -> io::Result<()> {
        if bytes > self.free {
            return self.fail(Failure::NoSpace);
        }
        if self.free < u64::MAX {
            self.free -= bytes;
        }
        Ok(())
    }

    fn fail(&mut self, failure: Failure) -> io::Result<()> {
        self.failed = true;
        let number = match failure {
            Failure::Io => rustix::io::Errno::IO,
            Failure::NoSpace => rustix::io::Errno::NOSPC,
        };
        Err(io::Error::from_raw_os_error(number.raw_os_error()))
    }

    fn count(&mut self, operation: Operation) {
        self.counts.operations += 1;
        match operation {
            Operation::Write => self.counts.writes += 1,
            Operation::Sync => self.counts.syncs += 1,
            Operation::SyncDir => self.counts.directory_syncs += 1,
            Operation::Open
            | Operation::Read
            | Operation::Resize
            | Operation::Rename
            | Operation::Remove
            | Operation::List => {}
        }
    }
}
