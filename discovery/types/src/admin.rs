//! Chain of owner-signed changes that defines the admins. It starts at one owner key.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::digest::Digest;
use crate::jws::{Jws, JwsError, JwsType};
use crate::key::{KeyId, PublicKey, SigningKey};
use crate::name::Name;
use crate::role::Role;

/// Largest number of admins at a time.
pub const MAX_ADMINS: usize = 32;
/// Largest number of changes in a chain that is verified.
pub const MAX_CHANGES: usize = 4096;
/// Name of the first owner, until an owner gives another one.
pub const FIRST_OWNER: &str = "owner";

/// An admin of the service or of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Admin {
    /// Public key of the admin.
    pub key: PublicKey,
    /// Name of the admin, unique among the admins.
    pub name: Name,
    /// Roles of the admin: at least one, none twice.
    pub roles: Vec<Role>,
}

impl Admin {
    /// Whether the admin is an owner.
    pub fn is_owner(&self) -> bool {
        self.roles.contains(&Role::Owner)
    }
}

/// Payload of one element of the admin chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdminChange {
    /// Version of the format, always 1.
    pub version: u32,
    /// Number of the element: 1 for the first, then one more each.
    pub seq: u64,
    /// Hash of the previous element; for the first element, [`AdminChain::root_hash`].
    pub previous: Digest,
    pub change: AdminOperation,
}

/// Change that one element of the admin chain makes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AdminOperation {
    /// Adds an admin, or gives an existing admin's key new roles or a new name.
    Add(Admin),
    /// Removes the admin with this key.
    Revoke(PublicKey),
}

/// Reason why an admin chain, or a new element for it, is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdminError {
    /// The signature, kind or form of an element is wrong.
    #[error("element {seq} of the admin chain: {source}")]
    Jws {
        /// Number of the refused element.
        seq: u64,
        /// Reason why the element's JWS is refused.
        source: JwsError,
    },
    /// The element doesn't name the hash of the chain's last element: another element was added in
    /// the meantime.
    #[error("element {seq} of the admin chain doesn't follow the one before it")]
    Broken {
        /// Number of the refused element.
        seq: u64,
    },
    /// The last owner can't be revoked or demoted: nobody could ever change anything again.
    #[error("the last owner can't be revoked or given other roles: add another owner first")]
    LastOwner,
    /// The key belongs to no admin.
    #[error("key {0} is no admin's")]
    NotAnAdmin(KeyId),
    /// The admin has no role, a role twice, or a name that another admin has.
    #[error("an admin needs a name of its own and at least one role, none twice")]
    BadAdmin,
    /// There would be more than [`MAX_ADMINS`] or [`MAX_CHANGES`].
    #[error("at most {MAX_ADMINS} admins and {MAX_CHANGES} changes")]
    TooMany,
}

/// A verified admin chain, with the admins at its end.
#[derive(Clone, Debug)]
pub struct AdminChain {
    admins: Vec<Admin>,
    head: Digest,
    seq: u64,
}

impl AdminChain {
    /// Verifies a whole chain from its root owner.
    pub fn verify(root: &PublicKey, elements: &[Jws]) -> Result<Self, AdminError> {
        let mut chain = Self::root(root);
        for element in elements {
            chain.append(element)?;
        }
        Ok(chain)
    }

    /// Returns an empty chain, whose only admin is the root owner.
    pub fn root(root: &PublicKey) -> Self {
        let name = FIRST_OWNER.parse().expect("the constant is a name");
        let admins = vec![Admin { key: *root, name, roles: vec![Role::Owner] }];
        Self { admins, head: Self::root_hash(root), seq: 0 }
    }

    /// Returns the hash that the first element has in its field `previous`.
    pub fn root_hash(root: &PublicKey) -> Digest {
        Digest::of_parts(&[b"muster-admin-root-1", root.as_bytes()])
    }

    /// Verifies the next element of the chain, and applies its change. The chain is unchanged if
    /// this fails.
    pub fn append(&mut self, element: &Jws) -> Result<AdminChange, AdminError> {
        let seq = self.seq + 1;
        let owners = self.admins.iter().filter(|a| a.is_owner()).map(|a| &a.key);
        let change: AdminChange = element
            .verify_any(JwsType::Admin, owners)
            .map_err(|source| AdminError::Jws { seq, source })?;
        if change.seq != seq || change.previous != self.head {
            return Err(AdminError::Broken { seq });
        }
        if self.seq as usize >= MAX_CHANGES {
            return Err(AdminError::TooMany);
        }
        let mut next = self.admins.clone();
        match &change.change {
            AdminOperation::Add(admin) => {
                next.retain(|other| other.key != admin.key);
                let mut roles = admin.roles.clone();
                roles.sort();
                roles.dedup();
                let named = next.iter().any(|other| other.name == admin.name);
                if roles.is_empty() || roles.len() != admin.roles.len() || named {
                    return Err(AdminError::BadAdmin);
                }
                next.push(admin.clone());
            }
            AdminOperation::Revoke(key) => {
                let before = next.len();
                next.retain(|other| other.key != *key);
                if next.len() == before {
                    return Err(AdminError::NotAnAdmin(key.key_id()));
                }
            }
        }
        if !next.iter().any(Admin::is_owner) {
            return Err(AdminError::LastOwner);
        }
        if next.len() > MAX_ADMINS {
            return Err(AdminError::TooMany);
        }
        self.admins = next;
        self.seq = seq;
        self.head = element.hash();
        Ok(change)
    }

    /// Signs `change` as the next element of the chain.
    pub fn sign_next(&self, owner: &SigningKey, change: AdminOperation) -> Jws {
        let change = AdminChange { version: 1, seq: self.seq + 1, previous: self.head, change };
        Jws::sign(JwsType::Admin, owner, &change)
    }

    /// Returns the admins at the end of the chain.
    pub fn admins(&self) -> &[Admin] {
        &self.admins
    }

    /// Returns the admin whose key has this id, if there is one.
    pub fn find(&self, kid: &KeyId) -> Option<&Admin> {
        self.admins.iter().find(|admin| admin.key.key_id() == *kid)
    }

    /// Returns the hash of the last element, or the root hash of an empty chain.
    pub fn head(&self) -> Digest {
        self.head
    }

    /// Returns the number of elements in the chain.
    pub fn seq(&self) -> u64 {
        self.seq
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admin(key: &SigningKey, name: &str, roles: &[Role]) -> Admin {
        Admin { key: *key.public(), name: name.parse().unwrap(), roles: roles.to_vec() }
    }

    #[test]
    fn owners_add_and_revoke_admins() {
        let (first, second) = (SigningKey::generate(), SigningKey::generate());
        let mut chain = AdminChain::root(first.public());
        let add =
            chain.sign_next(&first, AdminOperation::Add(admin(&second, "ada", &[Role::Owner])));
        chain.append(&add).unwrap();
        let revoke = chain.sign_next(&second, AdminOperation::Revoke(*first.public()));
        chain.append(&revoke).unwrap();
        let again = AdminChain::verify(first.public(), &[add, revoke]).unwrap();
        assert_eq!(again.admins(), [admin(&second, "ada", &[Role::Owner])]);
        assert_eq!(again.head(), chain.head());
    }

    #[test]
    fn an_element_by_anybody_but_an_owner_is_refused() {
        let (owner, issuer) = (SigningKey::generate(), SigningKey::generate());
        let mut chain = AdminChain::root(owner.public());
        let add =
            chain.sign_next(&owner, AdminOperation::Add(admin(&issuer, "ian", &[Role::Issuer])));
        chain.append(&add).unwrap();
        let planted =
            chain.sign_next(&issuer, AdminOperation::Add(admin(&issuer, "ian", &[Role::Owner])));
        assert!(matches!(
            chain.append(&planted),
            Err(AdminError::Jws { seq: 2, source: JwsError::UnknownKey(_) })
        ));
        assert_eq!(chain.seq(), 1);
    }

    #[test]
    fn an_element_out_of_order_is_refused() {
        let (owner, other) = (SigningKey::generate(), SigningKey::generate());
        let mut chain = AdminChain::root(owner.public());
        let stale =
            chain.sign_next(&owner, AdminOperation::Add(admin(&other, "old", &[Role::Auditor])));
        let add =
            chain.sign_next(&owner, AdminOperation::Add(admin(&other, "new", &[Role::Auditor])));
        chain.append(&add).unwrap();
        assert_eq!(chain.append(&stale), Err(AdminError::Broken { seq: 2 }));
        assert_eq!(chain.append(&add), Err(AdminError::Broken { seq: 2 }));
    }

    #[test]
    fn the_last_owner_can_not_be_revoked_or_demoted() {
        let owner = SigningKey::generate();
        let mut chain = AdminChain::root(owner.public());
        let revoke = chain.sign_next(&owner, AdminOperation::Revoke(*owner.public()));
        assert_eq!(chain.append(&revoke), Err(AdminError::LastOwner));
        let demote =
            chain.sign_next(&owner, AdminOperation::Add(admin(&owner, "me", &[Role::Auditor])));
        assert_eq!(chain.append(&demote), Err(AdminError::LastOwner));
        assert_eq!(chain.admins().len(), 1);
    }

    #[test]
    fn a_chain_of_another_root_is_refused() {
        let (owner, other) = (SigningKey::generate(), SigningKey::generate());
        let add = AdminChain::root(owner.public())
            .sign_next(&owner, AdminOperation::Add(admin(&other, "ada", &[Role::Owner])));
        assert!(AdminChain::verify(other.public(), &[add]).is_err());
    }
}
