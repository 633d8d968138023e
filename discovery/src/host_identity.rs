//! Proof beyond a token: the identity document that a host's cloud has signed.
//!
//! A key that redeems a token for the first time must meet the token's requirements. Another host
//! can present a copy of a document that isn't bound to a key. So a cluster accepts only one key
//! for each virtual machine that is a member or waits to be one.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use discovery_formation::UnixMicros;
use discovery_formation::service::{Cluster, Phase, Seating};
use discovery_types::convert;
use discovery_types::digest::MemberId;
use discovery_types::grant::VerifiedGrant;
use discovery_types::key::PublicKey;
use discovery_types::problem::Code;
use discovery_types::redeem::{HostIdentityError, Redeem};
use muster_identity::{Cloud, IdentityError, KeysError, RequirementFailure, TrustedKeys};

use crate::error::{ApiError, sentence};
use crate::members::roster::Roster;
use crate::metrics::ServiceMetrics;
use crate::store::cluster::ClusterTransaction;
use crate::store::{StoreError, instances};

/// How often the files with the clouds' keys are read again. Google and Microsoft publish a new key
/// days before they sign with it.
pub(crate) const KEYS_INTERVAL: Duration = Duration::from_secs(60);
/// Name of the alarm for keys that can't be read any more.
const KEYS_ALARM: &str = "identity_keys_unreadable";

/// The clouds' keys that this process trusts.
#[derive(Debug, Default)]
pub(crate) struct IdentityKeys {
    /// Folder with the keys. Without one, no identity document can be verified.
    folder: Option<PathBuf>,
    trusted: RwLock<Arc<TrustedKeys>>,
}

impl IdentityKeys {
    /// Reads the keys in a folder, if there is one.
    pub(crate) fn load(folder: Option<&Path>) -> Result<Self, KeysError> {
        let trusted = folder.map(TrustedKeys::load).transpose()?.unwrap_or_default();
        Ok(Self { folder: folder.map(Path::to_owned), trusted: RwLock::new(Arc::new(trusted)) })
    }

    /// Returns the keys as they were read last.
    pub(crate) fn trusted(&self) -> Arc<TrustedKeys> {
        Arc::clone(&self.trusted.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads the folder again. If that fails, the keys stay as they were, and an alarm is raised.
    pub(crate) fn reload(&self, metrics: &ServiceMetrics) {
        let Some(folder) = &self.folder else { return };
        match TrustedKeys::load(folder) {
            Ok(read) => {
                let mut trusted = self.trusted.write().unwrap_or_else(PoisonError::into_inner);
                if **trusted != read {
                    let [aws, gcp, azure] = Cloud::ALL.map(|cloud| read.count(cloud));
                    tracing::info!(aws, gcp, azure, "the clouds' keys have changed");
                    *trusted = Arc::new(read);
                }
            }
            Err(error) => {
                metrics.count_alarm(KEYS_ALARM);
                let error: &dyn std::error::Error = &error;
                tracing::error!(error, "the clouds' keys can't be read; the last ones stay in use");
            }
        }
    }
}

/// Checks that a host fulfils what its grant requires. Returns the name of its virtual machine, or
/// `None` if the grant requires nothing.
pub(crate) fn check_host(
    redeem: &Redeem,
    grant: &VerifiedGrant,
    keys: &TrustedKeys,
    now: UnixMicros,
) -> Result<Option<String>, ApiError> {
    redeem.check_identity(grant, keys, now.0 / 1_000_000).map_err(|error| refusal(&error, grant))
}

fn refusal(error: &HostIdentityError, grant: &VerifiedGrant) -> ApiError {
    let required: Vec<String> = grant.require.iter().map(ToString::to_string).collect();
    let detail = format!("{} The token requires {}.", sentence(error), required.join(" or "));
    let (next, may_change) = match error {
        HostIdentityError::Missing => (
            "Start the agent with `--identity-from` and the cloud that the host runs in."
                .to_owned(),
            false,
        ),
        HostIdentityError::Document(IdentityError::NoKeys(cloud)) => (
            format!(
                "Have the service's operator put the keys of {cloud} into the folder of `serve \
                 --identity-keys`. The agent tries again by itself."
            ),
            true,
        ),
        HostIdentityError::Document(IdentityError::BadSignature(cloud)) => (
            format!(
                "If the host does run in {cloud}, the service's keys are old or of other regions: have \
                 its operator fetch them again. The agent tries again by itself."
            ),
            true,
        ),
        HostIdentityError::Requirement(
            RequirementFailure::Expired | RequirementFailure::Future,
        ) => ("The agent gets another document and tries again by itself.".to_owned(), true),
        HostIdentityError::Document(_) | HostIdentityError::Requirement(_) => {
            ("Use a host that the token is for, or ask for another token.".to_owned(), false)
        }
    };
    let error = ApiError::new(Code::GrantBinding, detail, next);
    if may_change { error.mark_retryable() } else { error }
}

/// Refuses a virtual machine if another agent key of this machine has a seat or waits for one, and
/// its lease hasn't lapsed.
pub(crate) async fn check_free_for_seat(
    transaction: &mut ClusterTransaction,
    instance: &str,
    key: &PublicKey,
) -> Result<(), ApiError> {
    let keys = keys_with(transaction, instance, key).await?;
    let now = transaction.now;
    match keys.iter().find(|key| is_live(&transaction.cluster, key, now)) {
        None => Ok(()),
        Some(other) => {
            let detail = format!(
                "The virtual machine {instance} takes part already, with the agent key {}.",
                other.key_id()
            );
            let next = "If this host was rebuilt, wait: its old key loses its place within two \
                        minutes. Otherwise somebody sends this host's identity document.";
            Err(ApiError::new(Code::GrantBinding, detail, next).mark_retryable())
        }
    }
}

/// Refuses a virtual machine that is a member already, or that waits to join with another key.
/// `is_waiting` tells whether an agent's join is open.
pub(crate) async fn check_free_for_member(
    transaction: &mut ClusterTransaction,
    instance: &str,
    key: &PublicKey,
    roster: &Roster,
    replaces: Option<MemberId>,
    is_waiting: impl Fn(&PublicKey) -> bool,
) -> Result<(), ApiError> {
    let keys = keys_with(transaction, instance, key).await?;
    if let Some(member) = roster.present_member_of(&keys, replaces) {
        let detail = format!(
            "The virtual machine {instance} is member {} ({}) already.",
            member.record.name, member.id
        );
        let next = "If that host was rebuilt, ask for a ticket that replaces the member: \
                    `muster-discovery token create --kind join --replace`. Otherwise somebody sends \
                    that host's identity document.";
        return Err(ApiError::new(Code::GrantBinding, detail, next));
    }
    if keys.iter().any(is_waiting) {
        let detail = format!("The virtual machine {instance} waits for a place already.");
        let next = "If this host was rebuilt, wait for two minutes, or have an operator withdraw the \
                    earlier request: `muster-discovery intent list`, then `intent withdraw`.";
        return Err(ApiError::new(Code::GrantBinding, detail, next).mark_retryable());
    }
    Ok(())
}

/// Returns the keys of other agents that have presented an identity document of this virtual
/// machine in this cluster.
async fn keys_with(
    transaction: &mut ClusterTransaction,
    instance: &str,
    key: &PublicKey,
) -> Result<Vec<PublicKey>, StoreError> {
    let cluster = transaction.id();
    instances::other_keys(transaction.connection(), cluster, instance, key).await
}

/// Whether an agent takes part in forming the cluster now.
fn is_live(cluster: &Cluster, key: &PublicKey, now: UnixMicros) -> bool {
    let is_forming = matches!(cluster.phase, Phase::Open | Phase::Preparing);
    let applicant = cluster.agents.get(&convert::key(key));
    is_forming
        && applicant.is_some_and(|applicant| {
            applicant.seating != Seating::Absent && applicant.lease_until > now
        })
}
