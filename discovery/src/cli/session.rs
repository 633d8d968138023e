//! A session with the service: context, key and client.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use discovery_types::admin::AdminChain;
use discovery_types::api::{AdminList, ClusterQuery, ClusterState, ClusterStates, ClusterSummary};
use discovery_types::client::{ClientConfig, DiscoveryClient};
use discovery_types::context::Context;
use discovery_types::jws::Jws;
use discovery_types::key::SigningKey;
use discovery_types::name::Name;
use discovery_types::role::{Action, roles_allow};
use discovery_types::statement::StatementChain;
use uuid::Uuid;

use super::home::Home;
use super::{CliError, RemoteArgs};

/// Maximum number of attempts of an operation while the service is overloaded.
const TRIES: u32 = 5;
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_secs(1);

/// An admin's connection to a service.
pub(super) struct AdminSession {
    pub home: Home,
    pub name: Name,
    pub context: Context,
    pub key: Arc<SigningKey>,
    pub client: DiscoveryClient,
}

impl AdminSession {
    /// Reads the context and the key. Doesn't connect yet.
    pub(super) fn open(args: &RemoteArgs) -> Result<Self, CliError> {
        let home = Home::new(args.common.home.as_deref())?;
        let (name, context) = home.get(args.context.as_deref())?;
        let file = args.key.clone().unwrap_or_else(|| home.default_key());
        if !file.exists() {
            return Err(CliError::NoKey(file));
        }
        let key = Arc::new(SigningKey::load(&file)?);
        let client = DiscoveryClient::new(ClientConfig {
            urls: context.urls.clone(),
            pins: context.pins.clone(),
            key: Some(key.clone()),
        })?;
        Ok(Self { home, name, context, key, client })
    }

    /// Returns the cluster with this id or name. Of several clusters with the name, it prefers a
    /// live one, then the newest of the ended ones. It takes a draft without a statement only if
    /// there is no other.
    pub(super) async fn cluster(&self, text: &str) -> Result<ClusterSummary, CliError> {
        let missing = || CliError::NoCluster(text.to_owned());
        if let Ok(id) = Uuid::try_parse(text) {
            return Ok(self.client.show_cluster(id).await?.summary);
        }
        let name: Name = text.parse().map_err(|_| missing())?;
        let query = ClusterQuery { name: Some(name.clone()), ..ClusterQuery::default() };
        let found = self.client.list_clusters(&query).await?.clusters;
        let found = found.into_iter().filter(|cluster| cluster.name == name);
        found.min_by_key(|cluster| rank(cluster.state)).ok_or_else(missing)
    }

    /// Returns a cluster's statement chain, after verifying it from the context's owners.
    pub(super) async fn chain(&self, cluster: Uuid) -> Result<StatementChain, CliError> {
        Ok(self.statements(cluster).await?.0)
    }

    /// Returns a cluster's verified statement chain, as [`AdminSession::chain`] does. Also returns
    /// the unverified service statement that the service holds.
    pub(super) async fn statements(
        &self,
        cluster: Uuid,
    ) -> Result<(StatementChain, Option<Jws>), CliError> {
        let list = self.client.statements(cluster).await?;
        let chain = StatementChain::verify_from_owners(&list.statements, &self.context.owners)
            .map_err(CliError::Statements)?;
        if chain.newest().cluster != cluster {
            return Err(CliError::Answer("the statements are of another cluster".into()));
        }
        Ok((chain, list.service))
    }

    /// Returns the admin chain, after verifying it from an owner in the context.
    pub(super) async fn admins(&self) -> Result<(AdminList, AdminChain), CliError> {
        let list = self.client.list_admins().await?;
        if !self.context.owners.contains(&list.root_owner) {
            return Err(CliError::ForeignAdmins);
        }
        let chain = AdminChain::verify(&list.root_owner, &list.chain).map_err(CliError::Admins)?;
        Ok((list, chain))
    }

    /// Errors if the key's role doesn't allow `action`, before any request.
    pub(super) fn check_role(&self, chain: &AdminChain, action: Action) -> Result<(), CliError> {
        let admin = chain.find(&self.key.key_id());
        if admin.is_some_and(|admin| roles_allow(&admin.roles, action)) {
            return Ok(());
        }
        Err(self.role_error(action, "", admin.is_some()))
    }

    /// Errors if the cluster's newest statement doesn't allow the key to do `action`.
    pub(super) fn check_role_in_statement(
        &self,
        chain: &StatementChain,
        action: Action,
    ) -> Result<(), CliError> {
        let admin = chain.newest().admin(&self.key.key_id());
        if admin.is_some_and(|admin| roles_allow(&admin.roles, action)) {
            return Ok(());
        }
        Err(self.role_error(action, " in the cluster's newest statement", admin.is_some()))
    }

    fn role_error(&self, action: Action, where_: &'static str, listed: bool) -> CliError {
        let key = self.key.key_id().to_string();
        CliError::Role { key, needs: action.needs(), where_, listed }
    }
}

/// Sort key for clusters with the same name: live ones, then ended ones, then drafts. Clusters with
/// equal keys stay in the service's order, newest first.
fn rank(state: ClusterState) -> u8 {
    match state {
        ClusterState::Draft => 2,
        state if is_live(state) => 0,
        _ => 1,
    }
}

/// Whether a cluster hasn't ended.
pub(super) fn is_live(state: ClusterState) -> bool {
    match state {
        ClusterState::Draft
        | ClusterState::Open
        | ClusterState::Preparing
        | ClusterState::Committed
        | ClusterState::Formed => true,
        ClusterState::Abandoned | ClusterState::Expired | ClusterState::Retired => false,
    }
}

/// Returns the states of a cluster that hasn't ended.
pub(super) fn live_states() -> ClusterStates {
    ClusterStates::new(ClusterState::ALL.into_iter().filter(|state| is_live(*state)))
}

/// Performs `act`. Repeats it a few times while the service is overloaded.
pub(super) async fn repeat_while_busy<T>(
    act: impl AsyncFn() -> Result<T, CliError>,
) -> Result<T, CliError> {
    let mut done = act().await;
    for _ in 1..TRIES {
        if !matches!(&done, Err(CliError::Client(error)) if error.is_retryable()) {
            break;
        }
        tokio::time::sleep(PAUSE).await;
        done = act().await;
    }
    done
}

/// Runs a command on a new single-threaded runtime.
pub(super) fn block_on<T>(
    command: impl Future<Output = Result<T, CliError>>,
) -> Result<T, CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| CliError::io("starting the runtime", source))?;
    runtime.block_on(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_real_cluster_comes_before_a_draft_and_a_live_one_before_one_that_ended() {
        use ClusterState::{Abandoned, Draft, Expired, Formed, Open};
        let meant = |states: &[ClusterState]| states.iter().copied().min_by_key(|s| rank(*s));
        assert_eq!(meant(&[Draft, Expired]), Some(Expired));
        assert_eq!(meant(&[Draft, Expired, Open]), Some(Open));
        assert_eq!(meant(&[Expired, Abandoned]), Some(Expired), "the newest is listed first");
        assert_eq!(meant(&[Draft, Formed]), Some(Formed));
        assert_eq!(meant(&[Draft]), Some(Draft));
    }
}
