//! `adopt enrol`: waits beside a running etcd until this host holds the signed list of members.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use discovery_types::adoption::AdoptedMember;
use discovery_types::bundle::Bundle;
use discovery_types::convert;
use discovery_types::jws::JwsType;
use discovery_types::record::{Record, SignedRecord};
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use super::host::{endpoint_error, lock_agent};
use super::survey::{adopted_member, read_ca};
use super::{note, print};
use crate::adopt::process::EtcdProcess;
use crate::adopt::{open_files, systemd};
use crate::cli::EnrolArguments;
use crate::cli::settings::BundleSource;
use crate::cluster::{ClusterApiClient, MemberId};
use crate::commands::printer::Printer;
use crate::commands::run::stop_on_signals;
use crate::endpoint::{ClientEndpoint, ClientTlsIdentity};
use crate::enrol::bootstrap::etcd::RunningEtcd;
use crate::enrol::bootstrap::{AgentContext, Bootstrap, FormationResult};
use crate::enrol::bundle::{cluster_to_join, read_bundle_from};
use crate::enrol::node_key;
use crate::enrol::protocol::Protocol;
use crate::exit::{ExitError, error_chain};
use crate::host::Host;
use crate::host::local::LocalHost;
use crate::observe::status::StatusHandle;
use crate::state::addresses::ListenAddresses;
use crate::state::adopted::{AdoptedNode, AdoptionStage, read_adopted, write_adopted};
use crate::state::journal::{self, signed_record};
use crate::state::{Layout, state_exit_error};

/// This host's etcd, and how the agent would run it.
struct LocalEtcd {
    node: AdoptedNode,
    listen: ListenAddresses,
    running: RunningEtcd,
    /// The member, as the cluster lists it.
    member: AdoptedMember,
}

/// The output of `--json`.
#[derive(Serialize)]
struct EnrolOutput<'a> {
    member: &'a AdoptedMember,
    raft_cluster: String,
    node: &'a AdoptedNode,
    /// Whether this host holds the signed list of members.
    enrolled: bool,
}

pub(super) async fn run(
    typed: &EnrolArguments,
    printer: &mut Printer<'_>,
) -> Result<(), ExitError> {
    let found = LocalEtcd::detect(typed).await?;
    if typed.check {
        return found.print(typed, false, printer);
    }
    let layout = Layout::new(&typed.data_dir.data_dir)
        .map_err(|error| ExitError::Usage(format!("--data-dir: {error}")))?;
    let layout = layout.create().map_err(state_exit_error)?;
    let _lock = lock_agent(&layout)?;
    refuse_other_state(&layout)?;
    let host: Arc<dyn Host> =
        Arc::new(LocalHost { machine_id_file: typed.machine_id_file.clone() });
    let mut protocol = begin(&layout, &*host, typed, &found).await?;
    if protocol.agent.journal.held_document.is_none() {
        let (board, stop) = (StatusHandle::default(), CancellationToken::new());
        stop_on_signals(&stop)?;
        let etcd = Some(found.running.clone());
        let context = AgentContext { host, board, stop, identity: None, etcd };
        let join = cluster_to_join(&protocol.extras, None)?;
        let record = protocol.agent.journal.record.as_deref().map(signed_record);
        let record = record.expect("`begin` has made it");
        note("waiting for the agents of all members; nothing is stopped meanwhile", typed.json);
        let bootstrap = Bootstrap::new(&mut protocol, join, found.listen, context)?;
        match bootstrap.form(&record).await? {
            FormationResult::Stopped => {
                return Err(ExitError::Failed("told to stop: run the command again".to_owned()));
            }
            FormationResult::Enrolled
            | FormationResult::Launch
            | FormationResult::ReplacementWanted(_) => {}
        }
    }
    if protocol.document.is_none() {
        return Err(ExitError::Failed("this host got no list of members: try again".to_owned()));
    }
    found.print(typed, true, printer)
}

/// Refuses to enrol if this process doesn't run as the user that owns the etcd's data. After the
/// take-over, the agent runs the etcd as its own user.
fn check_owner(directory: &Path) -> Result<(), ExitError> {
    let found = std::fs::metadata(directory).map_err(|error| {
        ExitError::Failed(format!("can't look at {}: {error}", directory.display()))
    })?;
    let own = rustix::process::geteuid().as_raw();
    if found.uid() == own {
        return Ok(());
    }
    Err(ExitError::Usage(format!(
        "{} belongs to user {}, and this command runs as user {own}: run it, and the agent, as the \
         user that owns the etcd's data (sudo -u '#{}')",
        directory.display(),
        found.uid(),
        found.uid()
    )))
}

/// Refuses an agent's data directory that holds another member's state, or the state of an etcd
/// that is taken over already.
fn refuse_other_state(layout: &Layout) -> Result<(), ExitError> {
    let shown = layout.root().display();
    match read_adopted(layout).map_err(state_exit_error)? {
        Some(node) if node.stage == AdoptionStage::TakenOver => {
            Err(ExitError::Usage(format!("{shown}: this etcd is under management already")))
        }
        None if layout.journal().exists() => Err(ExitError::Usage(format!(
            "{shown} holds the state of another member: say another folder with --data-dir"
        ))),
        _ => Ok(()),
    }
}

/// Prepares the enrolment durably: writes the file about the etcd, makes the journal unless there
/// is one, and puts this host's record into the journal.
async fn begin(
    layout: &Layout,
    host: &dyn Host,
    typed: &EnrolArguments,
    found: &LocalEtcd,
) -> Result<Protocol, ExitError> {
    let machine =
        host.facts().map_err(|error| ExitError::Usage(format!("--machine-id-file: {error}")))?;
    let bundle = match &typed.bundle_file {
        None => None,
        Some(file) => {
            let is_stdin = file.as_os_str() == "-";
            let source =
                if is_stdin { BundleSource::Stdin } else { BundleSource::File(file.clone()) };
            Some(read_bundle_from(source, false).await?)
        }
    };
    let loaded = journal::read(layout).map_err(state_exit_error)?;
    if loaded.is_none() && bundle.is_none() {
        return Err(ExitError::Usage(
            "this host has redeemed no bundle yet: say --bundle-file FILE (or - for standard input)"
                .to_owned(),
        ));
    }
    let mut node = found.node.clone();
    node.stage = AdoptionStage::Enrolled;
    write_adopted(layout, &node).map_err(state_exit_error)?;
    let (key, journal, mut extras, document) = match loaded {
        Some((key, loaded)) => {
            (key, loaded.journal.with_next_boot(), loaded.extras, loaded.document)
        }
        None => {
            let (key, journal, extras) =
                journal::create(layout, machine).map_err(state_exit_error)?;
            (key, journal, extras, None)
        }
    };
    extras.join = Some(cluster_to_join(&extras, bundle.as_ref())?);
    extras.listen = Some(found.listen);
    let mut protocol = Protocol::new(layout.clone(), key, journal, extras, document);
    let record = choose_record(&protocol, bundle.as_ref(), &found.member)?;
    let own = convert::own_record(&record, protocol.key.public())
        .map_err(|error| ExitError::Failed(error_chain(&error)))?;
    protocol.agent.journal.record = Some(own);
    protocol.persist_extras()?;
    Ok(protocol)
}

/// Returns this host's record: the journal's, or a new one. The journal's record is kept in three
/// cases: there is no bundle, the record fits the bundle, or the record must not change any more.
fn choose_record(
    protocol: &Protocol,
    bundle: Option<&Bundle>,
    member: &AdoptedMember,
) -> Result<SignedRecord, ExitError> {
    let journal = &protocol.agent.journal;
    let known = journal.record.as_deref().map(signed_record);
    let Some(bundle) = bundle else {
        return known.ok_or_else(|| {
            ExitError::Usage("this host has redeemed no bundle yet: say --bundle-file".to_owned())
        });
    };
    let own = protocol.key.public();
    if let Some(signed) = known {
        let claims: Option<Record> = signed.record.verify(JwsType::Record, own).ok();
        let is_of_bundle = claims.is_some_and(|claims| {
            claims.grant == bundle.token.id()
                && claims.name == member.name
                && claims.peer_urls == [member.peer_url.clone()]
                && claims.client_urls == member.client_urls
        });
        if is_of_bundle || !journal.may_change_record() {
            return Ok(signed);
        }
    }
    let record = Record {
        version: 1,
        cluster: bundle.cluster,
        grant: bundle.token.id(),
        agent_key: *own,
        incarnation: convert::wire_incarnation(journal.incarnation),
        name: member.name.clone(),
        peer_urls: vec![member.peer_url.clone()],
        client_urls: member.client_urls.clone(),
        csr: node_key::node_request(&protocol.layout).map_err(state_exit_error)?,
        machine: convert::machine_facts(&journal.machine),
        zone: None,
    };
    Ok(record.sign(&protocol.key, bundle.token.key()))
}

impl LocalEtcd {
    /// Reads how this host's etcd was started, and asks the etcd for its member.
    async fn detect(typed: &EnrolArguments) -> Result<Self, ExitError> {
        let pid = match (&typed.unit, typed.pid) {
            (Some(unit), _) => systemd::main_process(unit).await?,
            (None, Some(pid)) => pid,
            (None, None) => return Err(ExitError::Usage("say --unit or --pid".to_owned())),
        };
        let process = EtcdProcess::read(pid).await?;
        let refused = |error: &dyn std::error::Error| ExitError::Usage(error_chain(error));
        if !process.keys_without_flag.is_empty() {
            let keys = process.keys_without_flag.join(", ");
            note(
                &format!("keys of the etcd's configuration file that set no flag: {keys}"),
                typed.json,
            );
        }
        let config = &process.config;
        let node = config.node(&process.program, typed.unit.clone());
        let mut node = node.map_err(|error| refused(&error))?;
        let listen = config.listen().map_err(|error| refused(&error))?;
        let name = config.name().map_err(|error| refused(&error))?;
        for directory in [Some(&node.directory), node.wal_directory.as_ref()].into_iter().flatten()
        {
            check_owner(directory)?;
        }
        open_files::check_directories(pid, &node)?;
        let absolute = |path: &Option<PathBuf>, default: &PathBuf| match path {
            Some(path) => std::path::absolute(path).map_err(|error| refused(&error)),
            None => Ok(default.clone()),
        };
        node.certificates.client_cert = absolute(&typed.cert, &node.certificates.cert)?;
        node.certificates.client_key = absolute(&typed.key, &node.certificates.key)?;
        let files = &node.certificates;
        let identity =
            ClientTlsIdentity::load(&files.trusted_ca, &files.client_cert, &files.client_key);
        let identity = identity.map_err(endpoint_error)?;
        let endpoint = ClientEndpoint::serving(&files.cert, listen.client, identity.clone());
        let own = ClusterApiClient::new(vec![endpoint.map_err(endpoint_error)?]);
        let status = own.status().await?;
        let members = own.list_members().await?;
        let listed = members.of_id(status.member_id).ok_or_else(|| {
            ExitError::Failed(format!("the cluster lists no member {}", status.member_id))
        })?;
        let member = AdoptedMember { name: name.clone(), ..adopted_member(listed)? };
        let running = RunningEtcd {
            cluster: members.cluster_id,
            member: MemberId(member.id.get()),
            name,
            peer_ca: read_ca(&files.peer_trusted_ca)?,
            client_ca: read_ca(&files.trusted_ca)?,
            identity,
        };
        Ok(Self { node, listen, running, member })
    }

    fn print(
        &self,
        typed: &EnrolArguments,
        enrolled: bool,
        printer: &mut Printer<'_>,
    ) -> Result<(), ExitError> {
        let raft_cluster = format!("{:016x}", self.running.cluster);
        let text = if typed.json {
            let output =
                EnrolOutput { member: &self.member, raft_cluster, node: &self.node, enrolled };
            serde_json::to_string(&output).expect("plain structs always serialise")
        } else {
            self.describe(typed, enrolled)
        };
        print(printer, &text)
    }

    fn describe(&self, typed: &EnrolArguments, enrolled: bool) -> String {
        let Self { node, member, .. } = self;
        let runs_by = node.unit.as_deref().unwrap_or("no unit");
        let flags = node.flags.join(" ");
        let log = node.wal_directory.as_ref();
        let log = log.map(|path| format!("\n  log        {}", path.display())).unwrap_or_default();
        let found = format!(
            "{} ({}) at {}\n  program    {}\n  data       {}{log}\n  run by     {runs_by}\n  kept flags {flags}",
            member.name,
            member.id,
            member.peer_url,
            node.program.display(),
            node.directory.display(),
        );
        if !enrolled {
            return format!("{found}\nNothing was changed (--check).");
        }
        format!(
            "{found}\nThis host holds the signed list of members. Its etcd runs on as before. Next, on one \
             host after the other: muster-agent adopt take-over --data-dir {}",
            typed.data_dir.data_dir.display()
        )
    }
}
