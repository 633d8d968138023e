//! The admin chain: elements signed by owners, starting at the key directory's owner.
//!
//! The rows are read in their order. A row that doesn't extend the chain is ignored and raises an
//! alarm. Such a row was written into the database by hand, or remains from a chain that lost a
//! row.
//!
//! Elements that this process has once acted on are in its ledger and are read first. A database
//! that was set back to an older state therefore can't restore a role that an owner has revoked.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError, RwLock};

use discovery_types::admin::{AdminChain, AdminOperation};
use discovery_types::jws::{Jws, JwsError, newer_version};
use discovery_types::key::{KeyId, PublicKey};

use crate::clock::Clock;
use crate::error::ApiError;
use crate::metrics::ServiceMetrics;
use crate::store::Store;

/// The admins as read from the ledger and the database at one time.
#[derive(Debug)]
pub(crate) struct Admins {
    /// The verified chain of additions and revocations of admins.
    pub chain: AdminChain,
    /// The chain's elements, in order.
    pub elements: Vec<Jws>,
    /// Every key that was ever an owner's. Any of these keys can have signed a cluster's first
    /// statement.
    pub ever_owners: BTreeSet<KeyId>,
    /// Texts of the rows that don't belong to the chain.
    pub ignored_rows: Vec<String>,
    /// Error for the first row that a newer program wrote. The error contains the row's version.
    /// This row and all later rows are ignored.
    pub newer: Option<JwsError>,
    fingerprint: Vec<u8>,
}

/// Cache of the admin chain, read again when a row has changed.
#[derive(Debug)]
pub(crate) struct AdminCache {
    root: PublicKey,
    store: Store,
    clock: Arc<Clock>,
    metrics: Arc<ServiceMetrics>,
    known: RwLock<Option<Arc<Admins>>>,
    /// Lock that is held while the rows are read and stored in `known`. Without it, an older
    /// reading could replace a newer one.
    reading: tokio::sync::Mutex<()>,
}

impl AdminCache {
    /// Creates an empty cache. `root` is the key directory's owner key, at which the chain starts.
    pub(crate) fn new(root: PublicKey, store: Store, clock: Arc<Clock>) -> Self {
        let metrics = store.watch().metrics.clone();
        AdminCache {
            root,
            store,
            clock,
            metrics,
            known: RwLock::new(None),
            reading: tokio::sync::Mutex::default(),
        }
    }

    /// The owner key at which the chain starts.
    pub(crate) fn root(&self) -> &PublicKey {
        &self.root
    }

    /// Returns the current admins.
    pub(crate) async fn current(&self) -> Result<Arc<Admins>, ApiError> {
        let fingerprint = self.read_fingerprint().await?;
        if let Some(known) = self.known_with(&fingerprint) {
            return Ok(known);
        }
        let _reading = self.reading.lock().await;
        let fingerprint = self.read_fingerprint().await?;
        if let Some(known) = self.known_with(&fingerprint) {
            return Ok(known);
        }
        let rows = self.store.admin_elements().await?;
        let ledger = self.store.ledger();
        let admins = Arc::new(verify_rows(&self.root, &ledger.admins(), &rows, fingerprint));
        let texts: Vec<String> = admins.elements.iter().map(ToString::to_string).collect();
        // The chain must be durable in the ledger before this process acts on it.
        ledger.ensure_admins(&texts).await?;
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        // A row that was inserted after the fingerprint was read makes the next call read all rows
        // again. Raise the alarm only once for the same ignored rows.
        let ignored = &admins.ignored_rows;
        let is_news = known.as_ref().is_none_or(|known| known.ignored_rows != *ignored);
        if is_news && !ignored.is_empty() {
            self.metrics.count_alarm("admin_rows_ignored");
            admins.log_ignored_rows();
        }
        *known = Some(admins.clone());
        Ok(admins)
    }

    async fn read_fingerprint(&self) -> Result<Vec<u8>, ApiError> {
        let (fingerprint, now) = self.store.admin_fingerprint().await?;
        self.clock.set(now);
        Ok(fingerprint)
    }

    /// Returns the cached admins if they were read from rows with this fingerprint.
    fn known_with(&self, fingerprint: &[u8]) -> Option<Arc<Admins>> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner).clone();
        known.filter(|known| known.fingerprint == fingerprint)
    }
}

impl Admins {
    fn log_ignored_rows(&self) {
        let ignored = self.ignored_rows.len();
        match &self.newer {
            Some(newer) => tracing::error!(
                ignored,
                "a change of the admins was {newer}; until then it and all later ones are ignored"
            ),
            None => tracing::error!(
                ignored,
                "rows in admin_elements don't follow from the owner key of the key directory: \
                 somebody has written into the database; they are ignored"
            ),
        }
    }
}

fn verify_rows(
    root: &PublicKey,
    known: &[String],
    rows: &[String],
    fingerprint: Vec<u8>,
) -> Admins {
    let mut admins = Admins {
        chain: AdminChain::root(root),
        elements: Vec::new(),
        ever_owners: BTreeSet::from([root.key_id()]),
        ignored_rows: Vec::new(),
        newer: None,
        fingerprint,
    };
    let new = rows.iter().filter(|row| !known.contains(row));
    for row in known.iter().chain(new) {
        let applied = row.parse::<Jws>().ok().map(|row| (admins.chain.append(&row), row));
        let (element, change) = match applied {
            Some((Ok(change), element)) => (element, change),
            Some((Err(error), _)) => {
                admins.ignored_rows.push(row.clone());
                admins.newer = admins.newer.or_else(|| newer_version(&error).cloned());
                continue;
            }
            None => {
                admins.ignored_rows.push(row.clone());
                continue;
            }
        };
        if let AdminOperation::Add(admin) = &change.change
            && admin.is_owner()
        {
            admins.ever_owners.insert(admin.key.key_id());
        }
        admins.elements.push(element);
    }
    admins
}

#[cfg(test)]
mod tests {
    use discovery_types::admin::{Admin, AdminChange};
    use discovery_types::fixtures::sign_newer_version;
    use discovery_types::jws::JwsType;
    use discovery_types::key::SigningKey;
    use discovery_types::role::Role;

    use super::*;

    fn admin(name: &str, role: Role) -> (SigningKey, Admin) {
        let key = SigningKey::generate();
        let admin = Admin { key: *key.public(), name: name.parse().unwrap(), roles: vec![role] };
        (key, admin)
    }

    #[test]
    fn rows_that_no_owner_signed_are_ignored_and_later_rows_still_count() {
        let root = SigningKey::generate();
        let (thief, planted) = admin("thief", Role::Owner);
        let (_, issuer) = admin("issuer", Role::Issuer);
        let chain = AdminChain::root(root.public());
        let planted = chain.sign_next(&thief, AdminOperation::Add(planted));
        let good = chain.sign_next(&root, AdminOperation::Add(issuer));
        let rows = [planted.as_str(), "not even a JWS", good.as_str()].map(str::to_owned);
        let admins = verify_rows(root.public(), &[], &rows, Vec::new());
        assert_eq!(admins.ignored_rows.len(), 2);
        assert!(admins.chain.find(&thief.key_id()).is_none());
        assert_eq!(admins.chain.admins().len(), 2);
    }

    #[test]
    fn a_newer_programs_change_is_ignored_with_later_rows_and_its_version_is_reported() {
        let root = SigningKey::generate();
        let (_, issuer) = admin("issuer", Role::Issuer);
        let mut chain = AdminChain::root(root.public());
        let first = chain.sign_next(&root, AdminOperation::Add(issuer.clone()));
        let change = chain.append(&first).unwrap();
        let change = AdminChange { seq: 2, previous: first.hash(), ..change };
        let newer = sign_newer_version(JwsType::Admin, &root, &change);
        let later = AdminChange { seq: 3, previous: newer.hash(), ..change.clone() };
        let later = Jws::sign(JwsType::Admin, &root, &later);
        let rows = [&first, &newer, &later].map(|jws| jws.as_str().to_owned());
        let admins = verify_rows(root.public(), &[], &rows, Vec::new());
        assert_eq!((admins.chain.seq(), admins.ignored_rows.len()), (1, 2));
        assert_eq!(admins.newer, Some(JwsError::Newer { found: 2, known: 1 }));
        let planted = sign_newer_version(JwsType::Admin, &SigningKey::generate(), &change);
        let rows = [first.as_str(), planted.as_str()].map(str::to_owned);
        let admins = verify_rows(root.public(), &[], &rows, Vec::new());
        assert_eq!((admins.ignored_rows.len(), admins.newer), (1, None), "nobody may sign that");
    }

    #[test]
    fn a_revoked_owner_is_still_known_as_a_former_owner() {
        let root = SigningKey::generate();
        let (second_key, second) = admin("second", Role::Owner);
        let mut chain = AdminChain::root(root.public());
        let add = chain.sign_next(&root, AdminOperation::Add(second));
        chain.append(&add).unwrap();
        let revoke = chain.sign_next(&root, AdminOperation::Revoke(*second_key.public()));
        let rows = [add.as_str().to_owned(), revoke.as_str().to_owned()];
        let admins = verify_rows(root.public(), &[], &rows, Vec::new());
        assert!(admins.ever_owners.contains(&second_key.key_id()));
        assert!(admins.chain.find(&second_key.key_id()).is_none());
    }

    #[test]
    fn a_revocation_in_the_ledger_is_not_undone_by_older_or_forked_rows() {
        let root = SigningKey::generate();
        let (thief, thrown_out) = admin("thief", Role::Owner);
        let (_, friend) = admin("friend", Role::Owner);
        let mut chain = AdminChain::root(root.public());
        let add = chain.sign_next(&root, AdminOperation::Add(thrown_out));
        chain.append(&add).unwrap();
        let forked = chain.sign_next(&thief, AdminOperation::Add(friend));
        let revoke = chain.sign_next(&root, AdminOperation::Revoke(*thief.public()));
        let known = [&add, &revoke].map(|jws| jws.as_str().to_owned());
        let back = [add.as_str().to_owned()];
        let admins = verify_rows(root.public(), &known, &back, Vec::new());
        assert_eq!((admins.chain.seq(), admins.ignored_rows.len()), (2, 0));
        assert!(admins.chain.find(&thief.key_id()).is_none());
        let other = [&add, &forked].map(|jws| jws.as_str().to_owned());
        let admins = verify_rows(root.public(), &known, &other, Vec::new());
        assert_eq!((admins.chain.seq(), admins.ignored_rows.len()), (2, 1));
        assert_eq!(admins.chain.admins().len(), 1);
    }
}
