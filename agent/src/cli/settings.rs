//! The arguments of `run`, resolved and checked. Nothing here uses the network.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use discovery_types::name::Name;
use discovery_types::url::NodeUrl;
use muster_identity::Cloud;

use crate::backup::settings::BackupSettings;
use crate::cli;
use crate::cli::addressing::{self, AddressFlags};
use crate::exit::ExitError;
use crate::host::cloud::IdentitySource;
use crate::launch::node_command::is_set_by_agent;
use crate::state::Layout;

/// Maximum number of --cluster-address flags: a cluster has at most as many members.
const MAX_CLUSTER_ADDRESSES: usize = 64;

/// Source of a join bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BundleSource {
    /// A file with this path.
    File(PathBuf),
    /// Standard input, given as `-`.
    Stdin,
}

/// The arguments of `run`, resolved.
#[derive(Clone, Debug)]
pub(crate) struct RunSettings {
    /// Paths in the data directory.
    pub layout: Layout,
    /// Source of the bundle, if `--bundle-file` was given.
    pub bundle: Option<BundleSource>,
    /// Whether to wait for a join ticket in the bundle file if the cluster has its members already.
    pub wait_for_ticket: bool,
    /// The member's name, if `--name` was given.
    pub name: Option<Name>,
    /// The host's zone, if `--zone` was given.
    pub zone: Option<Name>,
    /// Cloud that is asked for the zone, if `--zone-from` was given.
    pub zone_from: Option<Cloud>,
    /// Source of identity documents, if `--identity-from` was given.
    pub identity: Option<IdentitySource>,
    /// Address of the cloud's metadata service.
    pub metadata_url: String,
    /// The address flags of this start.
    pub addressing: AddressFlags,
    /// Addresses at which a newcomer tries to reach the cluster, besides those from discovery.
    pub cluster_addresses: Vec<NodeUrl>,
    /// File that replaces the machine's own ids.
    pub machine_id_file: Option<PathBuf>,
    pub node_binary: PathBuf,
    /// Additional flags for the node.
    pub node_flags: Vec<String>,
    /// Address of the plain HTTP listener for `/metrics` and `/livez`; `None` for no listener.
    pub metrics_listen: Option<SocketAddr>,
    /// Scheduled backups; `None` without `--backup-to`.
    pub backup: Option<BackupSettings>,
}

impl RunSettings {
    /// Resolves and checks the arguments. `own_program` is this program's path, `search_path` the
    /// value of `PATH`.
    pub(crate) fn resolve(
        typed: cli::RunArguments,
        own_program: &Path,
        search_path: Option<&std::ffi::OsStr>,
    ) -> Result<Self, ExitError> {
        let layout = Layout::new(&typed.data_dir.data_dir)
            .map_err(|error| ExitError::Usage(format!("--data-dir: {error}")))?;
        refuse_reserved_flags(&typed.node_flags)?;
        let is_file = typed.bundle_file.as_ref().is_some_and(|file| file.as_os_str() != "-");
        if typed.wait_for_ticket && !is_file {
            let text = "--wait-for-ticket: the ticket comes in a file; say --bundle-file FILE";
            return Err(ExitError::Usage(text.to_owned()));
        }
        Ok(Self {
            wait_for_ticket: typed.wait_for_ticket,
            bundle: typed.bundle_file.as_ref().map(|file| match file.to_str() {
                Some("-") => BundleSource::Stdin,
                _ => BundleSource::File(file.clone()),
            }),
            name: typed.name.as_deref().map(|name| parse("--name", name)).transpose()?,
            zone: typed.zone.as_deref().map(|zone| parse("--zone", zone)).transpose()?,
            zone_from: typed.zone_from,
            identity: identity_source(&typed)?,
            metadata_url: typed.metadata_url.clone(),
            node_binary: node_binary(
                // Without `--node-binary`, an adopted etcd runs with its earlier program.
                typed.node_binary.as_deref().or(layout.adopted().map(|node| &*node.program)),
                own_program,
                search_path,
            )?,
            node_flags: typed.node_flags.clone(),
            metrics_listen: typed.metrics_listen,
            cluster_addresses: cluster_addresses(&typed.cluster_address)?,
            machine_id_file: typed.machine_id_file.clone(),
            addressing: AddressFlags::resolve(&typed)?,
            backup: BackupSettings::resolve(
                &typed.backup_store,
                &typed.backup_schedule,
                &typed.backup_recipients.backup_recipient,
            )?,
            layout,
        })
    }
}

/// Returns the source of identity documents, if one was asked for.
fn identity_source(typed: &cli::RunArguments) -> Result<Option<IdentitySource>, ExitError> {
    let Some(cloud) = typed.identity_from else { return Ok(None) };
    let audience = typed.identity_audience.clone();
    if audience.is_some() != (cloud == Cloud::Azure) {
        let text = "--identity-audience goes with --identity-from azure, and with no other cloud: it is \
                    the audience that the token requires";
        return Err(ExitError::Usage(text.to_owned()));
    }
    let metadata_url = typed.metadata_url.clone();
    Ok(Some(IdentitySource { cloud, audience, metadata_url }))
}

/// Parses the values of --cluster-address as client URLs.
fn cluster_addresses(typed: &[String]) -> Result<Vec<NodeUrl>, ExitError> {
    if typed.len() > MAX_CLUSTER_ADDRESSES {
        return Err(ExitError::Usage(format!(
            "--cluster-address: it may be said {MAX_CLUSTER_ADDRESSES} times at most"
        )));
    }
    typed.iter().map(|text| addressing::client_url("--cluster-address", text)).collect()
}

fn parse<T: std::str::FromStr>(flag: &str, text: &str) -> Result<T, ExitError>
where
    T::Err: std::fmt::Display,
{
    text.parse().map_err(|error| ExitError::Usage(format!("{flag} {text}: {error}")))
}

fn refuse_reserved_flags(flags: &[String]) -> Result<(), ExitError> {
    for flag in flags {
        let name = flag.trim_start_matches('-').split('=').next().unwrap_or_default();
        if flag.starts_with('-') && is_set_by_agent(name) {
            return Err(ExitError::Usage(format!(
                "-- {flag}: the agent sets --{name} itself, from what the cluster has agreed on"
            )));
        }
    }
    Ok(())
}

pub(crate) fn node_binary(
    typed: Option<&Path>,
    own_program: &Path,
    search_path: Option<&std::ffi::OsStr>,
) -> Result<PathBuf, ExitError> {
    /// File name of muster-node.
    const NAME: &str = "muster-node";
    let absolute = |path: &Path| {
        std::path::absolute(path)
            .map_err(|error| ExitError::Usage(format!("--node-binary: {error}")))
    };
    if let Some(typed) = typed {
        let path = absolute(typed)?;
        if path.is_file() {
            return Ok(path);
        }
        return Err(ExitError::Usage(format!("--node-binary {}: no such file", path.display())));
    }
    let beside = own_program.with_file_name(NAME);
    let in_path = search_path.into_iter().flat_map(std::env::split_paths).map(|dir| dir.join(NAME));
    std::iter::once(beside).chain(in_path).find(|path| path.is_file()).map_or_else(
        || {
            Err(ExitError::Usage(format!(
                "no {NAME} beside this program or in PATH: say which with --node-binary"
            )))
        },
        |path| absolute(&path),
    )
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn typed(arguments: &[&str]) -> cli::RunArguments {
        let all = ["muster-agent", "run", "--node-binary", "/bin/sleep"].iter().chain(arguments);
        match cli::AgentCli::try_parse_from(all).unwrap().command {
            cli::AgentCommand::Run(run) => *run,
            _ => panic!("not run"),
        }
    }

    fn resolve(arguments: &[&str]) -> Result<RunSettings, ExitError> {
        RunSettings::resolve(typed(arguments), Path::new("/nowhere/muster-agent"), None)
    }

    #[test]
    fn port_0_is_refused_because_others_could_not_connect_to_it() {
        for flag in ["--peer-port", "--client-port"] {
            assert!(matches!(resolve(&[flag, "0"]), Err(ExitError::Usage(_))), "{flag}");
        }
    }

    #[test]
    fn an_unspecified_address_is_refused_before_anything_is_sent() {
        let end = resolve(&["--advertise-address", "0.0.0.0"]).unwrap_err();
        assert_eq!(end.code(), 2);
    }

    #[test]
    fn node_flags_that_determine_the_identity_are_refused() {
        for flag in ["--name=x", "-name", "--initial-cluster-token"] {
            let end = resolve(&["--", flag, "x"]).unwrap_err();
            assert_eq!(end.code(), 2, "{flag}");
        }
        let settings = resolve(&["--", "--heartbeat-interval", "50"]).unwrap();
        assert_eq!(settings.node_flags, ["--heartbeat-interval", "50"]);
    }

    #[test]
    fn metrics_may_listen_on_any_address() {
        for address in ["127.0.0.1:9000", "10.0.0.7:9000", "0.0.0.0:9000", "[::]:9000"] {
            let settings = resolve(&["--metrics-listen", address]).unwrap();
            assert_eq!(settings.metrics_listen, Some(address.parse().unwrap()));
        }
    }

    #[test]
    fn a_missing_node_program_is_a_usage_error_that_names_the_flag() {
        let nothing = cli::RunArguments { node_binary: None, ..typed(&[]) };
        let end =
            RunSettings::resolve(nothing, Path::new("/nowhere/muster-agent"), None).unwrap_err();
        assert!(end.to_string().contains("--node-binary"), "{end}");
        let wrong = cli::RunArguments { node_binary: Some("/no/such/node".into()), ..typed(&[]) };
        assert_eq!(RunSettings::resolve(wrong, Path::new("/nowhere"), None).unwrap_err().code(), 2);
    }

    #[test]
    fn the_node_beside_the_agent_is_found_before_the_one_in_the_path() {
        let dir = tempfile::tempdir().unwrap();
        let (beside, elsewhere) = (dir.path().join("a"), dir.path().join("b"));
        for folder in [&beside, &elsewhere] {
            std::fs::create_dir(folder).unwrap();
            std::fs::write(folder.join("muster-node"), "").unwrap();
        }
        let own = beside.join("muster-agent");
        let found = node_binary(None, &own, Some(elsewhere.as_os_str())).unwrap();
        assert_eq!(found, beside.join("muster-node"));
        let found = node_binary(None, Path::new("/nowhere/x"), Some(elsewhere.as_os_str()));
        assert_eq!(found.unwrap(), elsewhere.join("muster-node"));
    }

    #[test]
    fn a_dash_as_bundle_file_means_standard_input() {
        assert_eq!(resolve(&["--bundle-file", "-"]).unwrap().bundle, Some(BundleSource::Stdin));
        for bundle in [&[][..], &["--bundle-file", "-"]] {
            let typed = [&["--wait-for-ticket"][..], bundle].concat();
            assert_eq!(resolve(&typed).unwrap_err().code(), 2, "no file will hold the ticket");
        }
        assert!(resolve(&["--wait-for-ticket", "--bundle-file", "t"]).unwrap().wait_for_ticket);
    }
}
