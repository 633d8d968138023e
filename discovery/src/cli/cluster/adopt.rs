//! `cluster adopt`: signs the membership of a running etcd cluster, which then comes under
//! management.
//!
//! The service never connects to that etcd cluster. `muster-agent adopt survey` queries the
//! cluster, and this command reads the survey's output from a file. The owner signs the membership
//! that this command shows.

use std::path::PathBuf;
use std::time::Duration;

use discovery_types::adoption::{AdoptedMember, AdoptionSurvey};
use discovery_types::api::DraftRequest;
use discovery_types::name::Name;
use discovery_types::role::Action;
use discovery_types::statement::{Permissions, Statement};
use discovery_types::text::printable;
use discovery_types::url::{LOWEST_OPEN_PORT, NodeUrl};

use super::create::{check_deadline, print, put, warn_single_owner};
use crate::cli::CliError;
use crate::cli::confirm::IrreversibleAct;
use crate::cli::printer::Printer;
use crate::cli::session::AdminSession;

/// Largest file with a survey that is read, in bytes.
const MAX_SURVEY_BYTES: u64 = 64 * 1024;

/// Arguments of `cluster adopt`.
#[derive(Debug, clap::Args)]
pub(super) struct AdoptArgs {
    /// Name of the cluster at discovery: letters, digits and hyphens
    name: Name,
    /// File with the output of `muster-agent adopt survey`
    #[arg(long, value_name = "FILE")]
    survey: PathBuf,
    /// Let two members be on one machine (which then fails as one)
    #[arg(long)]
    allow_shared_host: bool,
    /// Time within which the agents of all members have to come
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = crate::server::parse_duration)]
    deadline: Duration,
    /// Skip the confirmation prompt
    #[arg(long)]
    yes: bool,
}

pub(super) async fn adopt(
    session: &AdminSession,
    args: &AdoptArgs,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let survey = read_survey(args)?;
    let members = &survey.adoption.members;
    let size = u8::try_from(members.len()).map_err(|_| too_many())?;
    let (_, admins) = session.admins().await?;
    session.check_role(&admins, Action::CreateDraft)?;
    let deadline_seconds = args.deadline.as_secs();
    check_deadline(session, deadline_seconds).await?;
    show(&survey, printer);
    let text = "By your signature these are the cluster's members. Compare ids and URLs with `etcdctl \
                member list`. Nothing is stopped or changed now.";
    IrreversibleAct { consequences: vec![text.to_owned()], name: args.name.as_str() }
        .confirm(args.yes, printer)?;
    let request = DraftRequest { name: args.name.clone(), size };
    let draft = session.client.create_draft(&request).await?;
    let statement = Statement {
        version: 1,
        cluster: draft.cluster,
        name: args.name.clone(),
        size,
        seq: 0,
        previous: None,
        peer_ca: draft.peer_ca,
        client_ca: draft.client_ca,
        admins: admins.admins().to_vec(),
        permissions: permissions(members, args.allow_shared_host),
        deadline_seconds,
        spread: None,
        needs_approval: false,
        also_trusted: Some(survey.cas.clone()),
        adopted: Some(survey.adoption.clone()),
    };
    print(printer, &put(session, &statement).await?)?;
    warn_single_owner(&admins, printer);
    for member in members {
        printer.note(&format!(
            "next: muster-discovery token create --cluster {} --uses 1 --name {1} --out {1}.bundle",
            args.name, member.name
        ));
    }
    Ok(())
}

fn too_many() -> CliError {
    CliError::Usage("the survey lists more members than a cluster can have".to_owned())
}

fn read_survey(args: &AdoptArgs) -> Result<AdoptionSurvey, CliError> {
    let path = &args.survey;
    let bad = |what: String| CliError::Usage(format!("--survey {}: {what}", path.display()));
    let bytes = muster_files::read_named(path, MAX_SURVEY_BYTES).map_err(|e| bad(e.to_string()))?;
    let survey: AdoptionSurvey = serde_json::from_slice(&bytes)
        .map_err(|error| bad(format!("it is no output of muster-agent adopt survey ({error})")))?;
    if survey.version != 1 {
        let found = survey.version;
        return Err(bad(format!("it has version {found}, and this program knows 1: upgrade it")));
    }
    Ok(survey)
}

/// Returns the permissions that a statement with these members needs. The members' URLs and number
/// are facts of a running cluster, and need no flag. Only a shared host needs one.
fn permissions(members: &[AdoptedMember], shared_host: bool) -> Permissions {
    let urls = || {
        let peers = members.iter().map(|member| &member.peer_url);
        peers.chain(members.iter().flat_map(|member| &member.client_urls))
    };
    Permissions {
        loopback: urls().any(NodeUrl::is_loopback),
        shared_host,
        even_size: members.len().is_multiple_of(2),
        low_ports: urls().any(|url| url.port() < LOWEST_OPEN_PORT),
    }
}

fn show(survey: &AdoptionSurvey, printer: &mut Printer) {
    printer.note(&format!("cluster {}", printable(&survey.adoption.raft_cluster)));
    for (index, member) in survey.adoption.members.iter().enumerate() {
        let clients: Vec<String> = member.client_urls.iter().map(NodeUrl::to_string).collect();
        let version = survey.versions.get(index).map_or("?", String::as_str);
        printer.note(&format!(
            "  {}  {}  etcd {}  peers {}  clients {}",
            member.id,
            member.name,
            printable(version),
            member.peer_url,
            clients.join(",")
        ));
    }
}

#[cfg(test)]
mod tests {
    use discovery_types::digest::MemberId;

    use super::*;

    #[test]
    fn permissions_follow_from_where_the_members_are() {
        let member = |host: &str, port: u16| AdoptedMember {
            id: MemberId::new(1),
            name: "a".parse().unwrap(),
            peer_url: format!("https://{host}:{port}").parse().unwrap(),
            client_urls: vec![format!("https://{host}:2379").parse().unwrap()],
        };
        let strict = permissions(&[member("10.0.0.1", 2380)], false);
        assert_eq!(strict, Permissions::default());
        let (a, b) = (member("127.0.0.1", 2380), member("10.0.0.1", 380));
        let all = permissions(&[a, b], true);
        assert!(all.loopback && all.low_ports && all.even_size && all.shared_host);
    }
}
