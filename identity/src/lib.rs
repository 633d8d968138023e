//! Identity documents, by which a cloud says which virtual machine a host is.
//!
//! A token can require such a document ([`Requirement`]). A thief of the token then also needs a
//! virtual machine in the right account. Everything here is verified offline, against keys that
//! an operator has configured ([`TrustedKeys`]).
//!
//! | cloud | document | signed with | bound to the agent's key |
//! |---|---|---|---|
//! | AWS | `instance-identity/rsa2048`: CMS (RFC 5652) | RSA, SHA-256; one certificate for each region | no: a copy of it stays valid for ever |
//! | GCP | identity JWT (RFC 7519), `format=full` | RS256; Google's JWKS (RFC 7517) | by its audience |
//! | Azure | access token of a managed identity, a JWT | RS256; Microsoft's JWKS | no, but it lasts a day at most |
//!
//! Another host can send a copy of a document that isn't bound to a key. So a service also compares
//! [`HostIdentity::instance`] with the instances of the cluster's other hosts, and a requirement
//! can limit the age of the instance.

mod aws;
mod cms;
#[cfg(feature = "fixtures")]
pub mod fixtures;
mod jwt;
mod keys;
mod requirement;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use keys::{KeysError, TrustedKeys};
pub use requirement::{
    InvalidRequirement, MAX_ACCOUNTS, MAX_REGIONS, MAX_REQUIREMENTS, Requirement,
    RequirementFailure, check_any_requirement,
};

/// Longest document in bytes, in the form in which the cloud's metadata service hands it out.
pub const MAX_DOCUMENT: usize = 6 * 1024;

/// A clock may differ from the cloud's by this many seconds.
pub const SKEW_SECONDS: u64 = 120;

/// A cloud whose identity documents can be verified.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Cloud {
    /// Amazon EC2, whose machines are called instances.
    Aws,
    /// Google Compute Engine, whose accounts are projects.
    Gcp,
    /// Microsoft Azure, whose accounts are subscriptions.
    Azure,
}

impl Cloud {
    /// Every cloud, in the order of declaration.
    pub const ALL: [Cloud; 3] = [Cloud::Aws, Cloud::Gcp, Cloud::Azure];

    /// Returns the cloud's name, as in a requirement.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Cloud::Aws => "aws",
            Cloud::Gcp => "gcp",
            Cloud::Azure => "azure",
        }
    }

    /// Returns the cloud's term for the account that owns a virtual machine.
    #[must_use]
    pub fn account_name(self) -> &'static str {
        match self {
            Cloud::Aws => "account",
            Cloud::Gcp => "project",
            Cloud::Azure => "subscription",
        }
    }

    fn verifier(self) -> &'static dyn Verifier {
        match self {
            Cloud::Aws => &aws::Aws,
            Cloud::Gcp => &jwt::Gcp,
            Cloud::Azure => &jwt::Azure,
        }
    }
}

impl fmt::Display for Cloud {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Cloud {
    type Err = UnknownCloud;

    fn from_str(text: &str) -> Result<Self, UnknownCloud> {
        let named = Cloud::ALL.into_iter().find(|cloud| cloud.as_str() == text);
        named.ok_or(UnknownCloud)
    }
}

/// A text that names no cloud.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a cloud is `aws`, `gcp` or `azure`")]
pub struct UnknownCloud;

/// An identity document as a host has it from its cloud. **Only a claim** until
/// [`IdentityDocument::verify`] succeeds.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct IdentityDocument {
    /// Cloud that the document comes from.
    pub cloud: Cloud,
    /// Document in the form in which the cloud's metadata service hands it out.
    pub text: String,
}

/// Shows only the cloud: another host could present a document that it has read in a log.
impl fmt::Debug for IdentityDocument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdentityDocument").field("cloud", &self.cloud).finish_non_exhaustive()
    }
}

/// Facts about a host, which its cloud has signed. Times are in seconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostIdentity {
    /// Cloud that the host runs in.
    pub cloud: Cloud,
    /// Account that owns the host: an AWS account id, a GCP project id or an Azure subscription id.
    pub account: String,
    /// Tenant of the machine's identity; only for Azure.
    pub tenant: Option<String>,
    /// Region of the host; unknown for Azure.
    pub region: Option<String>,
    /// Id of the virtual machine, unique in its cloud.
    pub instance: String,
    /// Time at which the virtual machine was made or last started; unknown for Azure.
    pub started_at: Option<u64>,
    /// Audience that the document was made for; none for AWS.
    pub audience: Option<String>,
    /// End of the document's validity; none for AWS.
    pub expires_at: Option<u64>,
}

impl HostIdentity {
    /// Returns the name of the virtual machine with its cloud, which is unique.
    #[must_use]
    pub fn instance_name(&self) -> String {
        format!("{}:{}", self.cloud, self.instance)
    }
}

/// Reason why an identity document is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// The document is longer than [`MAX_DOCUMENT`].
    #[error("it has more than {MAX_DOCUMENT} bytes")]
    TooLong,
    /// The document isn't of the form that the cloud's documents have.
    #[error("it is not of the expected form: {0}")]
    Malformed(&'static str),
    /// No key of this cloud is trusted.
    #[error("no key of {0} is trusted here")]
    NoKeys(Cloud),
    /// The document isn't signed by any trusted key.
    #[error("none of the trusted keys of {0} has signed it")]
    BadSignature(Cloud),
}

/// Verifies the documents of one cloud.
trait Verifier: Sync {
    /// Returns the facts in a document of this cloud, if one of the trusted keys has signed it.
    /// Times are not judged.
    fn verify(&self, text: &str, keys: &TrustedKeys) -> Result<HostIdentity, IdentityError>;
}

impl IdentityDocument {
    /// Returns the facts in the document, if one of the trusted keys of its cloud has signed it.
    /// The caller must still compare them with a requirement ([`check_any_requirement`]), which
    /// also judges the times.
    ///
    /// # Errors
    /// If the document isn't of its cloud's form, or no trusted key has signed it.
    pub fn verify(&self, keys: &TrustedKeys) -> Result<HostIdentity, IdentityError> {
        if self.text.len() > MAX_DOCUMENT {
            return Err(IdentityError::TooLong);
        }
        if !keys.has_keys_of(self.cloud) {
            return Err(IdentityError::NoKeys(self.cloud));
        }
        self.cloud.verifier().verify(self.text.trim(), keys)
    }
}

/// Returns the audience of a document that is bound to an agent's key. `cluster` is the cluster's
/// id and `agent` the id of the agent's key.
#[must_use]
pub fn audience(cluster: &dyn fmt::Display, agent: &dyn fmt::Display) -> String {
    format!("muster:{cluster}:{agent}")
}

#[cfg(test)]
mod tests;
