//! State that every request handler can reach.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use discovery_formation::service::FormationSettings;
use discovery_types::access::{AccessToken, ClientKind, Confirmation, MAX_ACCESS_SECONDS};
use discovery_types::api::TokenResponse;
use discovery_types::digest::{Digest, Nonce};
use discovery_types::key::PublicKey;
use discovery_types::problem::Code;
use muster_shares::slots::{Slot, SlotPool};
use tokio_util::sync::CancellationToken;

use crate::admins::AdminCache;
use crate::clock::Clock;
use crate::error::ApiError;
use crate::etcd_tokens::EtcdWaitSlots;
use crate::forming::{ClusterBatches, LeaseRenewals, PendingHints};
use crate::guesses::WrongSecretCounts;
use crate::host_identity::IdentityKeys;
use crate::keydir::KeyDirectory;
use crate::limits::AddressLimit;
use crate::metrics::ServiceMetrics;
use crate::notify::ClusterNotifier;
use crate::refusals::RefusalCounts;
use crate::store::Store;
use crate::throttle_log::{ThrottleKind, ThrottleLog};

/// State shared by all workers and by every clone. The logic that uses it is elsewhere: `forming`
/// applies events to clusters, `ledger` reacts to a changed database, and `handlers` does the rest.
#[derive(Clone)]
pub(crate) struct App {
    /// Access to the rows in Postgres.
    pub store: Store,
    /// The key directory: the service's own keys and settings.
    pub keys: Arc<KeyDirectory>,
    /// Postgres' time, extrapolated between queries by the monotonic clock.
    pub clock: Arc<Clock>,
    /// Counters and gauges that `/metrics` shows.
    pub metrics: Arc<ServiceMetrics>,
    /// Wake-ups for requests that wait for a cluster to change.
    pub notifier: ClusterNotifier,
    /// Clusters whose changes are still to be announced to the other processes.
    pub hints: Arc<PendingHints>,
    /// Requests of agents that wait for the next transaction.
    pub batches: Arc<ClusterBatches>,
    /// Lease renewals that polls of this process request. They wait for the next SQL statement that
    /// renews leases.
    pub renewals: Arc<LeaseRenewals>,
    /// The verified admin chain: who the admins are and which roles they have.
    pub admins: Arc<AdminCache>,
    /// Time limits of the formation protocol.
    pub settings: FormationSettings,
    /// Maximum deadline that a statement may set, in seconds.
    pub max_deadline_seconds: u64,
    /// The service's name: issuer and audience of its access tokens.
    pub issuer: Arc<str>,
    /// Counts of redeem requests that have the id of a real token and a wrong secret.
    pub guesses: Arc<WrongSecretCounts>,
    /// The clouds' keys, with which identity documents of hosts are verified.
    pub identity_keys: Arc<IdentityKeys>,
    /// Counts of this process's refused requests that are not written as events yet.
    pub refusals: Arc<RefusalCounts>,
    /// Counts and logs requests and connections over a limit.
    pub throttle_log: Arc<ThrottleLog>,
    /// Rate limit on requests, per address.
    pub request_limit: Arc<AddressLimit>,
    /// Rate limit on requests to adopt a commit document or to readmit a member, per address. Each
    /// such request costs several signature checks.
    pub adoption_limit: Arc<AddressLimit>,
    /// Rate limit on new connections, per address.
    pub connection_limit: Arc<AddressLimit>,
    /// Bounded slots for long polls. The key is the public key of the poller.
    pub poll_slots: SlotPool<[u8; 32]>,
    /// Bounded slots for requests of stock etcd that wait for members.
    pub etcd_wait_slots: EtcdWaitSlots,
    /// The console of this process. `None` if it serves none.
    pub console: Option<Arc<ConsoleSettings>>,
    /// Addresses (`host:port`) at which this process serves etcd's discovery protocol v3.
    pub etcd_v3_endpoints: Arc<[String]>,
    /// Maximum time that a long poll waits for a change.
    pub max_poll_wait: Duration,
    /// Time for which the draft of a cluster can be used after it was made.
    pub draft_life: Duration,
    /// Cancelled when the process drains, which ends every long poll.
    pub draining: CancellationToken,
}

/// Longest life of a sign-in link of the console.
pub(crate) const CONSOLE_LINK_LIFE: Duration = Duration::from_secs(60);
/// Longest life of a session of the console.
pub(crate) const CONSOLE_SESSION_LIFE: Duration = Duration::from_secs(8 * 3_600);

/// How browsers reach the console of a process.
#[derive(Clone, Debug)]
pub(crate) struct ConsoleSettings {
    /// URL of the console, without a path.
    pub url: String,
    /// SHA-256 of the certificate that browsers are shown.
    pub certificate_sha256: Digest,
    /// Whether the console shows browsers the service's own certificate, which they don't trust.
    pub uses_service_certificate: bool,
    /// Bounded slots for streams. The key is the hash of a session's cookie.
    pub stream_slots: SlotPool<[u8; 32]>,
}

/// Limit on the requests of one address to adopt a commit document or to readmit a member: rate per
/// second, and burst. Agents send many such requests after the database was restored from a backup.
pub(crate) const ADOPTION_RATE_AND_BURST: (u32, u32) = (2, 20);

impl App {
    /// Returns the error for an address over its rate limit, and raises an alarm.
    pub(crate) fn rate_limited(&self, address: IpAddr, wait: Duration) -> ApiError {
        self.throttle_log.note(ThrottleKind::Request, address);
        let next = "Wait, and send less often.";
        ApiError::new(Code::RateLimited, "Too many requests from this address.", next)
            .retry_after(wait.as_secs() + 1)
    }

    /// Takes a slot for a long poll. Dropping the `Slot` frees it.
    pub(crate) fn take_poll_slot(&self, key: &PublicKey) -> Result<Slot<[u8; 32]>, ApiError> {
        self.poll_slots.take(*key.as_bytes()).ok_or_else(|| {
            let next = "Wait, and poll again; or start another discovery process.";
            let detail = "All places for parked polls, or all of this key, are taken.";
            ApiError::new(Code::Overloaded, detail, next)
        })
    }

    /// Issues an access token for `key`, valid from now for `MAX_ACCESS_SECONDS`.
    #[cfg(test)]
    pub(crate) fn issue_access_token(&self, key: &PublicKey, subject: ClientKind) -> TokenResponse {
        self.sign_access_token(key, subject).1
    }

    /// Issues an access token for `key`, valid from now for `MAX_ACCESS_SECONDS`. Returns its
    /// content, and the response with its signed form.
    pub(crate) fn sign_access_token(
        &self,
        key: &PublicKey,
        subject: ClientKind,
    ) -> (AccessToken, TokenResponse) {
        let iat = self.clock.seconds();
        let token = AccessToken {
            iss: self.issuer.to_string(),
            aud: self.issuer.to_string(),
            sub: key.key_id(),
            subject,
            iat,
            exp: iat + MAX_ACCESS_SECONDS,
            jti: Nonce::random(),
            cnf: Confirmation { jkt: key.key_id() },
        };
        let response = TokenResponse {
            access_token: token.sign(&self.keys.signer().key),
            token_type: "Bearer".into(),
            expires_in: MAX_ACCESS_SECONDS,
        };
        (token, response)
    }
}
