//! What every request has at hand.

use std::sync::Arc;
use std::time::Duration;

use discovery_formation::service::Settings;
use discovery_types::access::{AccessToken, Confirmation, MAX_ACCESS_SECONDS, Subject};
use discovery_types::api::TokenResponse;
use discovery_types::digest::Nonce;
use discovery_types::key::PublicKey;
use discovery_types::problem::Code;
use tokio_util::sync::CancellationToken;

use crate::auth::AdminDirectory;
use crate::clock::Clock;
use crate::error::ApiError;
use crate::keydir::Keydir;
use crate::limits::{AddressLimit, Place, Places};
use crate::metrics::Metrics;
use crate::notify::Wakes;
use crate::store::Store;

/// Shared by all workers; clones share everything. What it does stands where it belongs: events on
/// clusters in `forming`, what a changed database asks for in `ledger`, the rest in the handlers.
#[derive(Clone)]
pub(crate) struct App {
    /// Rows.
    pub store: Store,
    /// Our keys.
    pub keys: Arc<Keydir>,
    /// The service's time.
    pub clock: Arc<Clock>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// Who waits.
    pub wakes: Wakes,
    /// Who the admins are.
    pub admins: Arc<AdminDirectory>,
    /// The protocol's times.
    pub settings: Settings,
    /// The longest deadline that a statement may set, in seconds.
    pub max_deadline_seconds: u64,
    /// The service's name in tokens.
    pub issuer: Arc<str>,
    /// Requests per address.
    pub addresses: Arc<AddressLimit>,
    /// Documents shown per address: each costs dozens of signatures to look at.
    pub adoptions: Arc<AddressLimit>,
    /// New connections per address.
    pub connections: Arc<AddressLimit>,
    /// Places for parked polls, by the key that polls.
    pub parked: Places<[u8; 32]>,
    /// How long a poll is parked.
    pub poll: Duration,
    /// How long a draft lives.
    pub draft_life: Duration,
    /// Cancelled when the process drains: parked polls end.
    pub draining: CancellationToken,
}

/// Documents that an address may show in a second; and at once, after a restore.
pub(crate) const ADOPTIONS: (u32, u32) = (2, 20);

impl App {
    /// The answer to an address that asks too often.
    pub(crate) fn rate_limited(&self, wait: Duration) -> ApiError {
        self.metrics.alarm("rate_limited");
        let next = "Wait, and send less often.";
        ApiError::new(Code::RateLimited, "Too many requests from this address.", next)
            .retry_after(wait.as_secs() + 1)
    }

    /// A place for a parked poll, until it is dropped.
    pub(crate) fn place_to_park(&self, key: &PublicKey) -> Result<Place<[u8; 32]>, ApiError> {
        self.parked.take(*key.as_bytes()).ok_or_else(|| {
            let next = "Wait, and poll again; or start another discovery process.";
            let detail = "All places for parked polls, or all of this key, are taken.";
            ApiError::new(Code::Overloaded, detail, next)
        })
    }

    /// An access token for `key`, from now on.
    pub(crate) fn token(&self, key: &PublicKey, subject: Subject) -> TokenResponse {
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
        TokenResponse {
            access_token: token.sign(&self.keys.signer().key),
            token_type: "Bearer".into(),
            expires_in: MAX_ACCESS_SECONDS,
        }
    }
}
