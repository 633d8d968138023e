//! Stores the owners' statements of where the discovery service is, and hands the newest one to the
//! cluster's agents.
//!
//! An agent verifies the statement itself. So this module checks it only in order to tell an owner
//! of a mistake, and to keep the newest statement.

use discovery_types::api::StatementList;
use discovery_types::jws::Jws;
use discovery_types::problem::Code;
use discovery_types::role::Action;
use discovery_types::service::{ServiceOrder, VerifiedService};
use uuid::Uuid;

use super::admin_name;
use crate::app::App;
use crate::auth::{Caller, check_statement_allows};
use crate::error::ApiError;
use crate::gate::with_timeout;
use crate::store::intents;

impl App {
    /// Stores a service statement that an owner signed. Repeating the stored one changes nothing.
    pub(crate) async fn put_service(
        &self,
        caller: &Caller,
        cluster: Uuid,
        jws: &Jws,
    ) -> Result<StatementList, ApiError> {
        with_timeout(async {
            let (mut transaction, changes) = self.begin_change(cluster, None, None).await?;
            let chain = transaction.chain.clone();
            let signer = chain.newest().admin(jws.kid()).map_or(caller.key, |admin| admin.key);
            check_statement_allows(&chain, &signer, Action::AnnounceService)?;
            let service = VerifiedService::verify(jws, &chain)?;
            // Compare the new statement only with a stored one that an owner of the chain has
            // signed. Any new statement replaces another stored one.
            let known = changes.service.as_ref();
            let known = known.and_then(|jws| VerifiedService::verify_kept(jws, &chain).ok());
            let order = service.compare(known.as_ref(), &chain);
            if let (ServiceOrder::Older | ServiceOrder::Conflict, Some(known)) = (order, &known) {
                return Err(stale_error(&service, known));
            }
            if order == ServiceOrder::Newer {
                let (by, now) = (admin_name(&transaction, jws), transaction.now);
                let connection = transaction.connection();
                intents::store_service(connection, cluster, now, &service, &by).await?;
                transaction.commit().await?;
                self.metrics.count_change("service");
                self.notifier.wake(cluster);
                tracing::info!(cluster.id = %cluster, sequence = service.sequence(), by,
                    "an owner has said where this service is");
            }
            Ok(StatementList { statements: chain.jws(), service: Some(jws.clone()) })
        })
        .await
    }
}

fn stale_error(service: &VerifiedService, known: &VerifiedService) -> ApiError {
    let detail = format!(
        "The service statement has the number {}, and another one with the number {} is stored.",
        service.sequence(),
        known.sequence()
    );
    let next = "Look with `muster-discovery service show`, and announce again.";
    ApiError::new(Code::Conflict, detail, next)
}
