//! Serves stock etcd's own discovery protocols, v2 (HTTP) and v3 (gRPC), for tokens that expire.
//!
//! * [`registry`] decides who is in the list of members.
//! * This module checks tokens and applies decisions to the database. Both protocols use it.
//! * [`v2`] and [`v3`] speak the protocols. They translate, and decide nothing.
//!
//! These clusters are not Muster's: nobody signs their members, and no agent looks after them. A
//! list only tells each etcd which peers to begin with. etcd sources: `etcdserver/api/v2discovery`
//! and `etcdserver/api/v3discovery`.

pub(crate) mod registry;
pub(crate) mod v2;
pub(crate) mod v3;

use std::net::IpAddr;
use std::time::Duration;

use discovery_types::digest::MemberId;
use discovery_types::etcd_token::{EtcdProtocol, EtcdToken};
use discovery_types::grant::GrantId;
use discovery_types::problem::Code;
use muster_shares::slots::{Slot, SlotPool};
use uuid::Uuid;

use crate::app::App;
use crate::store::etcd_tokens::{ServiceEvent, StoredEtcdToken};
use crate::store::{StoreError, UnixMicros};
use registry::{EtcdRegistry, Registrant, Registration, RegistrationRefusal};

/// Maximum number of waiting requests of one address for one token. A host runs one etcd; a host
/// with a whole test cluster has nine.
const MAX_WAITS_PER_ADDRESS: usize = 32;

/// Slots for requests of etcd that wait for members, by token and address.
pub(crate) type EtcdWaitSlots = SlotPool<(Uuid, IpAddr)>;

/// Makes the pool of `max` slots for requests of etcd that wait for members.
pub(crate) fn wait_slots(max: usize) -> EtcdWaitSlots {
    SlotPool::new(max, MAX_WAITS_PER_ADDRESS)
}

/// Reason why a request of etcd gets no answer. The message is shown to whoever operates that etcd.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EtcdError {
    /// The token is unknown, or can't be used any more. All cases have one message, so that nobody
    /// learns which tokens exist.
    #[error(
        "this discovery token is unknown, expired, revoked, or of the other protocol: \
         `muster-discovery etcd-token create` makes a new one"
    )]
    UnknownToken,
    /// The token is bound to other networks.
    #[error("the discovery token is bound to other networks than the address {0}")]
    ForeignAddress(IpAddr),
    /// The member gets no place.
    #[error(transparent)]
    Refused(#[from] RegistrationRefusal),
    /// The database doesn't answer. The same request may succeed later.
    #[error("the discovery service has no database at the moment")]
    Unavailable,
    /// Too many requests wait.
    #[error("too many requests wait at the discovery service")]
    Overloaded,
}

impl From<StoreError> for EtcdError {
    fn from(error: StoreError) -> Self {
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        tracing::warn!(%error, cause, "a request of an etcd was not served");
        EtcdError::Unavailable
    }
}

impl App {
    /// Checks a token, and removes members that stopped waiting from its list. Returns the token
    /// and its members.
    pub(crate) async fn read_etcd_registry(
        &self,
        token: &EtcdToken,
        protocol: EtcdProtocol,
        address: IpAddr,
    ) -> Result<StoredEtcdToken, EtcdError> {
        let stored = self.check_etcd_token(token, protocol, address).await?;
        if !stored.registry.has_ended_lease(stored.now) {
            return Ok(stored);
        }
        self.change_etcd_registry(token.id(), |_, _, _| Ok(())).await
    }

    /// Renews the leases of the members that registered from `address`, because an etcd waits
    /// there.
    pub(crate) async fn renew_etcd_leases(
        &self,
        token: GrantId,
        address: IpAddr,
    ) -> Result<StoredEtcdToken, EtcdError> {
        self.change_etcd_registry(token, |registry, now, lease| {
            registry.renew(address, now, lease);
            Ok(())
        })
        .await
    }

    /// Gives a member a place in the list.
    pub(crate) async fn register_etcd_member(
        &self,
        token: &EtcdToken,
        protocol: EtcdProtocol,
        registrant: &Registrant,
    ) -> Result<(StoredEtcdToken, Registration), EtcdError> {
        self.check_etcd_token(token, protocol, registrant.address).await?;
        let mut registered = None;
        let stored = self.change_etcd_registry(token.id(), |registry, now, lease| {
            registered = Some(registry.register(registrant, now, lease)?);
            Ok(())
        });
        let stored = stored.await.inspect_err(|error| {
            tracing::warn!(
                token.id = %token.id(), address = %registrant.address, member = %registrant.id,
                %error, "an etcd was not registered"
            );
        })?;
        let registered = registered.ok_or(EtcdError::UnknownToken)?;
        tracing::info!(
            token.id = %token.id(), address = %registrant.address, member = %registrant.id,
            peers = registrant.value, complete = stored.registry.is_complete, "an etcd registered"
        );
        Ok((stored, registered))
    }

    /// Checks that a token may be used from `address`. Refusals are counted for the event chain.
    async fn check_etcd_token(
        &self,
        token: &EtcdToken,
        protocol: EtcdProtocol,
        address: IpAddr,
    ) -> Result<StoredEtcdToken, EtcdError> {
        let checked = self.judge_etcd_token(token, protocol, address).await;
        let code = match &checked {
            Err(EtcdError::UnknownToken) => Some(Code::GrantUnknown),
            Err(EtcdError::ForeignAddress(_)) => Some(Code::GrantBinding),
            _ => None,
        };
        if let Some(code) = code {
            let route = format!("etcd discovery {}", protocol.as_str());
            self.refusals.note(&route, code, address, None);
        }
        checked
    }

    async fn judge_etcd_token(
        &self,
        token: &EtcdToken,
        protocol: EtcdProtocol,
        address: IpAddr,
    ) -> Result<StoredEtcdToken, EtcdError> {
        let stored = self.store.etcd_token(&token.id()).await?.ok_or(EtcdError::UnknownToken)?;
        if stored.secret_hash != token.secret_hash() {
            self.guesses.note(token.id(), address, &self.metrics);
            return Err(EtcdError::UnknownToken);
        }
        if !stored.is_usable() || stored.registry.protocol != protocol {
            return Err(EtcdError::UnknownToken);
        }
        if !stored.cidrs.is_empty() && !stored.cidrs.iter().any(|block| block.contains(&address)) {
            return Err(EtcdError::ForeignAddress(address));
        }
        Ok(stored)
    }

    /// Applies a change to the members of a token, under the token's lock. Before the change,
    /// members that stopped waiting lose their places.
    async fn change_etcd_registry(
        &self,
        id: GrantId,
        change: impl FnOnce(
            &mut EtcdRegistry,
            UnixMicros,
            UnixMicros,
        ) -> Result<(), RegistrationRefusal>,
    ) -> Result<StoredEtcdToken, EtcdError> {
        let lease = UnixMicros::try_from(self.settings.lease.0.saturating_mul(1_000));
        let lease = lease.unwrap_or(UnixMicros::MAX);
        let changed = self.store.change_etcd_members(&id, |stored| {
            if !stored.is_usable() {
                return Err(EtcdError::UnknownToken);
            }
            let before = stored.registry.clone();
            stored.registry.lapse(stored.now);
            change(&mut stored.registry, stored.now, lease)?;
            Ok(events(id, &before, &stored.registry))
        });
        let changed = changed.await?.ok_or(EtcdError::UnknownToken)??;
        // Wake this process's waiting requests now. The database's notification arrives only later.
        self.notifier.wake(changed.uuid);
        Ok(changed)
    }

    /// Takes a slot for a request of etcd that waits for members. Dropping the `Slot` frees it.
    pub(crate) fn take_etcd_wait_slot(
        &self,
        token: Uuid,
        address: IpAddr,
    ) -> Result<Slot<(Uuid, IpAddr)>, EtcdError> {
        self.etcd_wait_slots.take((token, address)).ok_or(EtcdError::Overloaded)
    }

    /// Maximum time between two lease renewals by a waiting etcd.
    pub(crate) fn etcd_wait_time(&self) -> Duration {
        self.max_poll_wait.min(Duration::from_millis(self.settings.lease.0) / 3)
    }
}

impl StoredEtcdToken {
    /// Whether members may use the token now.
    pub(crate) fn is_usable(&self) -> bool {
        !self.is_revoked && !self.is_void && self.now < self.expires_us
    }
}

/// Formats a member's id as etcd does: hexadecimal, without zeros in front.
pub(crate) fn format_id(id: MemberId) -> String {
    format!("{:x}", id.get())
}

/// Parses a member's id as etcd formats it.
pub(crate) fn parse_id(text: &str) -> Option<MemberId> {
    let id = MemberId(u64::from_str_radix(text, 16).ok()?.to_be_bytes());
    (format_id(id) == text).then_some(id)
}

/// Returns the events of a change of the list. They name hosts, and never a secret.
fn events(id: GrantId, before: &EtcdRegistry, after: &EtcdRegistry) -> Vec<ServiceEvent> {
    let mut events = Vec::new();
    let token = id.to_string();
    for member in &after.members {
        let old = before.members.iter().find(|old| old.id == member.id);
        let body = serde_json::json!({
            "token": token, "member": member.id.to_string(), "peers": member.value,
            "address": member.address,
        });
        let had_place = old.is_some_and(|old| !old.has_lapsed);
        match (had_place, !member.has_lapsed) {
            (false, true) => events.push(ServiceEvent { kind: "etcd_member_registered", body }),
            (true, false) => events.push(ServiceEvent { kind: "etcd_member_lapsed", body }),
            _ => {}
        }
    }
    if after.is_complete && !before.is_complete {
        let body = serde_json::json!({ "token": token });
        events.push(ServiceEvent { kind: "etcd_list_complete", body });
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_has_no_zeros_in_front_as_in_etcd() {
        let id = MemberId([0x0c, 0, 0, 0, 0, 0, 0, 0x10]);
        assert_eq!(format_id(id), "c00000000000010");
        assert_eq!(parse_id("c00000000000010"), Some(id));
        for text in ["", "0c00000000000010", "C00000000000010", "+c", "x", "1c00000000000000f0"] {
            assert_eq!(parse_id(text), None, "{text}");
        }
    }
}
