//! Injected errors, simulated power failures, and counts of operations.

use std::io;

/// Kind of operation that a fault can hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskOperation {
    /// Opening or creating a file, or creating a directory.
    Open,
    /// Reading from a file, or getting its length.
    Read,
    /// Writing to a file.
    Write,
    /// Truncating, extending or allocating a file.
    Resize,
    /// Syncing a file (`sync_data`).
    Sync,
    /// Syncing a directory (`sync_dir`).
    SyncDir,
    /// Renaming a file or directory.
    Rename,
    /// Removing a file by its path.
    Remove,
    /// Listing or locking a directory, or checking whether a path exists.
    List,
}

/// Error that the caller gets. A failing write has written a part of its data. A failing sync has
/// made some sectors durable, and no later sync writes the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFailure {
    /// An I/O error (EIO).
    Io,
    /// The disk is full (ENOSPC).
    NoSpace,
}

/// An error to be injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Kind of operation that fails.
    pub operation: DiskOperation,
    /// Number of operations of this kind that succeed before the first failure.
    pub after: u64,
    /// Number of operations of this kind that fail once `after` of them have succeeded; `u64::MAX`
    /// if all later ones fail.
    pub times: u64,
    /// Error that the failing operations return.
    pub failure: DiskFailure,
}

/// Number of operations on a disk, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Operations of all kinds.
    pub operations: u64,
    pub writes: u64,
    /// Syncs of files (`sync_data`).
    pub syncs: u64,
    /// Syncs of directories (`sync_dir`).
    pub directory_syncs: u64,
}

/// Selects the syncs that succeed without doing anything, as if the code had forgotten them. Tests
/// show with this type that the code depends on these syncs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IgnoredSyncs {
    /// Whether syncs of files do nothing, although they succeed.
    pub files: bool,
    /// Whether syncs of directories do nothing, although they succeed.
    pub directories: bool,
}

#[derive(Clone)]
pub(super) struct Faults {
    pub ignored_syncs: IgnoredSyncs,
    /// Number of bytes by which files may still grow.
    pub free: u64,
    injected: Vec<Fault>,
    /// Number of operations until the power fails; `None` if it does not fail.
    operations_until_power_failure: Option<u64>,
    /// Whether the power failed during the current operation.
    power_just_failed: bool,
    /// Whether an injected error has occurred.
    failed: bool,
    pub counts: Counts,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            ignored_syncs: IgnoredSyncs::default(),
            free: u64::MAX,
            injected: Vec::new(),
            operations_until_power_failure: None,
            power_just_failed: false,
            failed: false,
            counts: Counts::default(),
        }
    }
}

pub(super) fn power_off_error() -> io::Error {
    io::Error::other("the simulated power is off")
}

impl Faults {
    pub(super) fn inject(&mut self, fault: Fault) {
        self.injected.push(fault);
    }

    /// Makes the power fail after this many operations. If a power failure is already due sooner,
    /// it stays so.
    pub(super) fn power_off_after(&mut self, operations: u64) {
        self.operations_until_power_failure = Some(
            self.operations_until_power_failure.map_or(operations, |left| left.min(operations)),
        );
    }

    pub(super) fn power_on(&mut self) {
        self.operations_until_power_failure = None;
        self.power_just_failed = false;
        self.failed = false;
        self.injected.clear();
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed
    }

    pub(super) fn is_power_off(&self) -> bool {
        self.operations_until_power_failure == Some(0)
    }

    pub(super) fn has_power_just_failed(&self) -> bool {
        self.power_just_failed
    }

    /// Counts one operation, and fails it if the power is off or a fault was injected for it.
    pub(super) fn begin_operation(&mut self, operation: DiskOperation) -> io::Result<()> {
        self.power_just_failed = false;
        match &mut self.operations_until_power_failure {
            Some(0) => return Err(power_off_error()),
            Some(left) => {
                *left -= 1;
                self.power_just_failed = *left == 0;
            }
            None => {}
        }
        self.count(operation);
        if self.power_just_failed {
            return Err(power_off_error());
        }
        let mut failure = None;
        for order in self.injected.iter_mut().filter(|order| order.operation == operation) {
            if order.after > 0 {
                order.after -= 1;
            } else if order.times > 0 && failure.is_none() {
                order.times -= 1;
                failure = Some(order.failure);
            }
        }
        failure.map_or(Ok(()), |failure| self.fail(failure))
    }

    /// Takes `bytes` from the free space for a file that grows.
    pub(super) fn take_free_bytes(&mut self, bytes: u64) -> io::Result<()> {
        if bytes > self.free {
            return self.fail(DiskFailure::NoSpace);
        }
        if self.free < u64::MAX {
            self.free -= bytes;
        }
        Ok(())
    }

    fn fail(&mut self, failure: DiskFailure) -> io::Result<()> {
        self.failed = true;
        let number = match failure {
            DiskFailure::Io => rustix::io::Errno::IO,
            DiskFailure::NoSpace => rustix::io::Errno::NOSPC,
        };
        Err(io::Error::from_raw_os_error(number.raw_os_error()))
    }

    fn count(&mut self, operation: DiskOperation) {
        self.counts.operations += 1;
        match operation {
            DiskOperation::Write => self.counts.writes += 1,
            DiskOperation::Sync => self.counts.syncs += 1,
            DiskOperation::SyncDir => self.counts.directory_syncs += 1,
            DiskOperation::Open
            | DiskOperation::Read
            | DiskOperation::Resize
            | DiskOperation::Rename
            | DiskOperation::Remove
            | DiskOperation::List => {}
        }
    }
}
