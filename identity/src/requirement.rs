//! Requirements that a host has to fulfil beyond showing a token.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Cloud, HostIdentity, SKEW_SECONDS};

/// Largest number of requirements of one token.
pub const MAX_REQUIREMENTS: usize = 4;
/// Largest number of accounts in one requirement.
pub const MAX_ACCOUNTS: usize = 8;
/// Largest number of regions in one requirement.
pub const MAX_REGIONS: usize = 8;
/// Longest name of an account, region, tenant or audience, in bytes.
const MAX_NAME: usize = 128;

/// Requirement on the host that redeems a token. The host's cloud must sign that the host fulfils
/// it. A host must fulfil only one of a token's requirements.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Requirement {
    /// Cloud that the host must run in.
    pub cloud: Cloud,
    /// The host must belong to one of these accounts: AWS account ids, GCP project ids or Azure
    /// subscription ids.
    pub accounts: Vec<String>,
    /// The host must be in one of these regions. An empty list allows any region. Not for Azure.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub regions: Vec<String>,
    /// Tenant that the host's identity must belong to; only for Azure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Audience that the host's JWT must name; only for Azure. A GCP host's JWT names the cluster
    /// and the agent's key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audience: Option<String>,
    /// Largest age of the virtual machine at the redeem, in seconds. Not for Azure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_age_seconds: Option<u64>,
}

/// Reason why a requirement can't be fulfilled by any host, or doesn't restrict the hosts enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidRequirement {
    /// The requirement names no account, or too many.
    #[error(
        "a requirement names 1 to {MAX_ACCOUNTS} accounts: without one, any customer of the cloud fulfils it"
    )]
    Accounts,
    /// The requirement names too many regions, or is for Azure, whose JWTs name none.
    #[error("a requirement names at most {MAX_REGIONS} regions, and none for Azure")]
    Regions,
    /// Tenant and audience are missing for Azure, or given for another cloud.
    #[error("a requirement names a tenant and an audience for Azure, and for no other cloud")]
    Tenant,
    /// The age is 0, or given for Azure, whose JWTs don't say when the machine was made.
    #[error("a requirement's age is at least 1 s, and none is given for Azure")]
    Age,
    /// A name is empty or too long, or has characters with a meaning on a command line.
    #[error(
        "a name in a requirement has 1 to {MAX_NAME} characters of A-Z, a-z, 0-9 and . _ : / @ -"
    )]
    Name,
}

/// Reason why a host doesn't fulfil a requirement.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequirementFailure {
    /// The host runs in a cloud that no requirement names.
    #[error("the host runs in {0}, which the token is not for")]
    Cloud(Cloud),
    /// The host belongs to another account or tenant.
    #[error("the host belongs to {0}, which the token is not for")]
    Account(String),
    /// The host is in another region.
    #[error("the host is in the region {0}, which the token is not for")]
    Region(String),
    /// The document was made for another audience: another host or service may have got it first.
    #[error("its identity document is for the audience `{found}`, not for `{expected}`")]
    Audience {
        /// Audience that the document must name.
        expected: String,
        /// Audience that the document names.
        found: String,
    },
    /// The virtual machine is older than the token allows.
    #[error("the host was started {age} s ago, and the token is for hosts of at most {max_age} s")]
    TooOld {
        /// Age of the virtual machine, in seconds.
        age: u64,
        /// Largest age that the token allows, in seconds.
        max_age: u64,
    },
    /// The virtual machine or its document is from the future.
    #[error("the host was started in the future: a clock is wrong")]
    Future,
    /// The document has expired. The host can ask its cloud for another one.
    #[error("its identity document has expired")]
    Expired,
}

impl Requirement {
    /// Checks that the requirement's fields fit its cloud.
    ///
    /// # Errors
    /// The first rule that the requirement breaks.
    pub fn check(&self) -> Result<(), InvalidRequirement> {
        let is_azure = self.cloud == Cloud::Azure;
        if !(1..=MAX_ACCOUNTS).contains(&self.accounts.len()) {
            return Err(InvalidRequirement::Accounts);
        }
        if self.regions.len() > MAX_REGIONS || (is_azure && !self.regions.is_empty()) {
            return Err(InvalidRequirement::Regions);
        }
        if self.tenant.is_some() != is_azure || self.audience.is_some() != is_azure {
            return Err(InvalidRequirement::Tenant);
        }
        if self.max_age_seconds.is_some_and(|max_age| max_age == 0 || is_azure) {
            return Err(InvalidRequirement::Age);
        }
        let names = self.accounts.iter().chain(&self.regions);
        let mut names = names.chain(&self.tenant).chain(&self.audience);
        let is_name = |name: &String| {
            (1..=MAX_NAME).contains(&name.len())
                && name
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || b"._:/@-".contains(&byte))
        };
        if names.all(is_name) { Ok(()) } else { Err(InvalidRequirement::Name) }
    }

    /// Checks whether the host with this identity fulfils the requirement at `now` (seconds since
    /// 1970). `bound` is the audience of a document that is bound to the host's agent
    /// ([`crate::audience`]).
    fn check_host(
        &self,
        host: &HostIdentity,
        bound: &str,
        now: u64,
    ) -> Result<(), RequirementFailure> {
        if host.cloud != self.cloud {
            return Err(RequirementFailure::Cloud(host.cloud));
        }
        let is_same = |one: &String, other: &String| one.eq_ignore_ascii_case(other);
        if !self.accounts.iter().any(|account| is_same(account, &host.account)) {
            return Err(RequirementFailure::Account(format!("the account {}", host.account)));
        }
        if let Some(tenant) = &self.tenant
            && !host.tenant.as_ref().is_some_and(|found| is_same(tenant, found))
        {
            let found = host.tenant.clone().unwrap_or_default();
            return Err(RequirementFailure::Account(format!("the tenant {found}")));
        }
        let is_in = |found: &String| self.regions.iter().any(|region| is_same(region, found));
        if !self.regions.is_empty() && !host.region.as_ref().is_some_and(is_in) {
            return Err(RequirementFailure::Region(host.region.clone().unwrap_or_default()));
        }
        let expected = match self.cloud {
            Cloud::Aws => None,
            Cloud::Gcp => Some(bound),
            Cloud::Azure => self.audience.as_deref(),
        };
        if let Some(expected) = expected
            && host.audience.as_deref() != Some(expected)
        {
            let found = host.audience.clone().unwrap_or_default();
            return Err(RequirementFailure::Audience { expected: expected.to_owned(), found });
        }
        self.check_time(host, now)
    }

    fn check_time(&self, host: &HostIdentity, now: u64) -> Result<(), RequirementFailure> {
        if host.started_at.is_some_and(|started| started > now.saturating_add(SKEW_SECONDS)) {
            return Err(RequirementFailure::Future);
        }
        if host.expires_at.is_some_and(|ends| ends.saturating_add(SKEW_SECONDS) <= now) {
            return Err(RequirementFailure::Expired);
        }
        let Some(max_age) = self.max_age_seconds else { return Ok(()) };
        let age = host.started_at.map_or(u64::MAX, |started| now.saturating_sub(started));
        if age > max_age { Err(RequirementFailure::TooOld { age, max_age }) } else { Ok(()) }
    }
}

/// Checks whether a host fulfils one of the requirements at `now` (seconds since 1970). `bound` is
/// the audience of a document that is bound to the host's agent ([`crate::audience`]).
///
/// # Errors
/// The reason why the host doesn't fulfil the last requirement for its cloud.
pub fn check_any_requirement(
    requirements: &[Requirement],
    host: &HostIdentity,
    bound: &str,
    now: u64,
) -> Result<(), RequirementFailure> {
    let mut failure = RequirementFailure::Cloud(host.cloud);
    for requirement in requirements.iter().filter(|required| required.cloud == host.cloud) {
        match requirement.check_host(host, bound, now) {
            Ok(()) => return Ok(()),
            Err(why) => failure = why,
        }
    }
    Err(failure)
}

/// Describes the requirement in the form in which it is typed: `aws:account=1,region=eu-west-1`.
impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let accounts: BTreeSet<_> = self.accounts.iter().collect();
        let mut words: Vec<String> = Vec::new();
        let name = self.cloud.account_name();
        words.extend(accounts.into_iter().map(|account| format!("{name}={account}")));
        words.extend(self.regions.iter().map(|region| format!("region={region}")));
        words.extend(self.tenant.iter().map(|tenant| format!("tenant={tenant}")));
        words.extend(self.audience.iter().map(|audience| format!("audience={audience}")));
        words.extend(self.max_age_seconds.map(|age| format!("max-age={age}s")));
        write!(f, "{}:{}", self.cloud, words.join(","))
    }
}
