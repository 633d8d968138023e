//! The state of a host that holds the signed list of members, and clients of its cluster.

use std::path::Path;

use discovery_formation::agent::{Journal, LaunchState};
use discovery_types::convert;
use discovery_types::digest::Digest;
use discovery_types::document::VerifiedDocument;
use discovery_types::name::Name;
use discovery_types::statement::{Statement, StatementChain};

use crate::cluster::{ClusterApiClient, MemberId};
use crate::endpoint::{ClientEndpoint, ClientTlsIdentity, EndpointError};
use crate::exit::{ExitError, error_chain};
use crate::operate::node_start;
use crate::state::adopted::{AdoptedNode, CertificateFiles, read_adopted, write_adopted};
use crate::state::journal::{self, JournalExtras};
use crate::state::lock::{self, FileLock, LockError};
use crate::state::{Layout, state_exit_error};

/// A host whose etcd comes under management, and which holds the signed list of members.
pub(super) struct EnrolledHost {
    pub layout: Layout,
    pub journal: Journal,
    pub extras: JournalExtras,
    pub document: VerifiedDocument,
    pub statement: Statement,
    pub node: AdoptedNode,
    /// Id of this host's member in the etcd cluster.
    pub member: MemberId,
    pub name: Name,
}

impl EnrolledHost {
    /// Reads the state of the host.
    pub(super) fn read(data_dir: &Path) -> Result<Self, ExitError> {
        let layout = claim(data_dir)?;
        let missing = |what: &str| {
            ExitError::Usage(format!(
                "{}: {what}: say muster-agent adopt enrol first, on the hosts of all members",
                layout.root().display()
            ))
        };
        let node = read_adopted(&layout).map_err(state_exit_error)?;
        let loaded = journal::read(&layout).map_err(state_exit_error)?;
        let has_run =
            loaded.as_ref().is_some_and(|(_, it)| it.journal.launch_state == LaunchState::Ran);
        if node.is_none() && has_run {
            // The host joined an adopted cluster later, or its cluster formed under agents.
            return Err(ExitError::Usage(format!(
                "{}: there is nothing to do on this host, because its agent has run the member from \
                 the beginning: the member serves certificates of the cluster's own CAs",
                layout.root().display()
            )));
        }
        let node = node.ok_or_else(|| missing("no etcd was enrolled here"))?;
        let (key, loaded) = loaded.ok_or_else(|| missing("no etcd was enrolled here"))?;
        let document =
            loaded.document.ok_or_else(|| missing("the list of members isn't signed"))?;
        let join = loaded.extras.join.as_ref().ok_or_else(|| missing("no cluster is known"))?;
        let chain = StatementChain::verify_from_pin(&loaded.extras.statements, &join.statement)
            .map_err(|error| ExitError::DoNotRestart(error_chain(&error)))?;
        let record = node_start::own_record(&loaded.journal, key.public())?;
        Ok(Self {
            member: MemberId(document.founder_id(&record).get()),
            statement: chain.newest().clone(),
            name: record.name,
            journal: loaded.journal,
            extras: loaded.extras,
            layout,
            document,
            node,
        })
    }

    /// Takes the agent's lock. While the lock is held, no agent runs on this data directory.
    pub(super) fn lock(&self) -> Result<FileLock, ExitError> {
        lock_agent(&self.layout)
    }

    /// Returns a client of this host's own etcd, with the client certificate that was named at
    /// enrolment.
    pub(super) fn own(&self) -> Result<ClusterApiClient, ExitError> {
        self.own_as(self.identity()?)
    }

    fn own_as(&self, identity: ClientTlsIdentity) -> Result<ClusterApiClient, ExitError> {
        let listen = self.extras.current_listen().ok_or_else(|| {
            ExitError::DoNotRestart(
                "the journal holds no listen address: the node can't be started from it".to_owned(),
            )
        })?;
        let files = &self.node.certificates;
        let endpoint = ClientEndpoint::serving(&files.cert, listen.client, identity);
        Ok(ClusterApiClient::new(vec![endpoint.map_err(endpoint_error)?]))
    }

    /// Returns a client that asks the members in the signed list of members, this host's own first.
    pub(super) fn cluster(&self) -> Result<ClusterApiClient, ExitError> {
        self.cluster_as(self.identity()?)
    }

    /// Returns a client of the cluster as [`Self::cluster`] does, but with the CA that this host's
    /// etcd trusted before its adoption, and no other CA.
    pub(super) fn cluster_with_earlier_ca(&self) -> Result<ClusterApiClient, ExitError> {
        let files = &self.node.certificates;
        let identity =
            ClientTlsIdentity::load(&files.trusted_ca, &files.client_cert, &files.client_key);
        self.cluster_as(identity.map_err(endpoint_error)?)
    }

    /// Returns a client of the cluster as [`Self::cluster`] does, but with the agent's own
    /// certificate. `None` if the agent has no certificate yet.
    pub(super) fn cluster_as_agent(&self) -> Option<ClusterApiClient> {
        let identity = ClientTlsIdentity::load_own(&self.layout.tls()).ok()?;
        self.cluster_as(identity).ok()
    }

    fn cluster_as(&self, identity: ClientTlsIdentity) -> Result<ClusterApiClient, ExitError> {
        let urls = self.document.records().iter().flat_map(|record| &record.client_urls);
        let endpoints = urls
            .map(|url| ClientEndpoint::of_member(&url.to_string(), Some(&identity)))
            .collect::<Result<Vec<_>, _>>()
            .map_err(endpoint_error)?;
        Ok(self.own_as(identity)?.with_endpoints_of(&ClusterApiClient::new(endpoints)))
    }

    /// Returns a TLS identity with the client certificate that was named at enrolment. Besides the
    /// earlier CA it trusts the cluster's own CAs, because other members may have exchanged their
    /// certificates.
    fn identity(&self) -> Result<ClientTlsIdentity, ExitError> {
        let CertificateFiles { trusted_ca, client_cert, client_key, .. } = &self.node.certificates;
        let own_cas = self.statement.client_bundle();
        ClientTlsIdentity::load_trusting(trusted_ca, &own_cas, client_cert, client_key)
            .map_err(endpoint_error)
    }

    /// Writes the journal and the file about the adopted etcd durably.
    pub(super) fn persist(&self) -> Result<(), ExitError> {
        journal::write(&self.layout, &self.journal, &self.extras).map_err(state_exit_error)?;
        write_adopted(&self.layout, &self.node).map_err(state_exit_error)
    }

    /// Records in the journal whether the node has run under this agent. The caller persists the
    /// journal.
    pub(super) fn set_launched(&mut self, has_run: bool) {
        self.journal.launch_state =
            if has_run { LaunchState::Ran } else { LaunchState::NotStarted };
    }

    /// Returns the hash of the signed list of members.
    pub(super) fn list(&self) -> Digest {
        self.document.hash()
    }

    /// Returns the key of this host's agent, as text.
    pub(super) fn key(&self) -> String {
        convert::public_key(self.journal.key).to_string()
    }
}

/// Claims a data directory for a command. Fails if there is no such directory.
pub(super) fn claim(data_dir: &Path) -> Result<Layout, ExitError> {
    let layout =
        Layout::new(data_dir).map_err(|error| ExitError::Usage(format!("--data-dir: {error}")))?;
    if !layout.root().is_dir() {
        return Err(ExitError::Usage(format!("{}: no such folder", layout.root().display())));
    }
    layout.claim().map_err(state_exit_error)
}

/// Takes the agent's lock. While the lock is held, no agent runs on this data directory.
pub(super) fn lock_agent(layout: &Layout) -> Result<FileLock, ExitError> {
    let holder = format!("muster-agent, pid {}", std::process::id());
    lock::acquire(&layout.agent_lock(), &holder).map_err(|error| match error {
        LockError::Held { .. } => {
            ExitError::Failed(error_chain(&error) + "; stop that agent first")
        }
        LockError::State(error) => state_exit_error(error),
    })
}

pub(super) fn endpoint_error(error: EndpointError) -> ExitError {
    ExitError::Failed(error_chain(&error))
}
