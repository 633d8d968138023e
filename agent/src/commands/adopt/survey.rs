//! `adopt survey`: asks a running etcd cluster for its members, and prints what an owner signs.

use discovery_types::adoption::{AdoptedMember, Adoption, AdoptionSurvey, member_name};
use discovery_types::digest;
use discovery_types::statement::{CaPair, ca_der};
use discovery_types::url::NodeUrl;

use super::print;
use crate::cli::SurveyArguments;
use crate::cluster::{ClusterApiClient, ClusterMember, NodeStatus};
use crate::commands::member::survey::Survey;
use crate::commands::member::wait::describe_unhealthy;
use crate::commands::printer::Printer;
use crate::endpoint::{ClientEndpoint, ClientTlsIdentity};
use crate::exit::{ExitError, error_chain};

/// Largest file with a CA that is read, in bytes.
const MAX_CA_BYTES: u64 = 64 * 1024;
/// Versions of etcd that can come under management.
const VERSIONS: [&str; 4] = ["3.4.", "3.5.", "3.6.", "3.7."];

pub(super) async fn run(
    typed: &SurveyArguments,
    printer: &mut Printer<'_>,
) -> Result<(), ExitError> {
    let cas = CaPair { peer: read_ca(&typed.peer_cacert)?, client: read_ca(&typed.cacert)? };
    let identity = ClientTlsIdentity::load(&typed.cacert, &typed.cert, &typed.key);
    let identity = identity.map_err(|error| ExitError::Usage(error_chain(&error)))?;
    let endpoints = typed
        .endpoints
        .iter()
        .map(|url| ClientEndpoint::of_member(url.trim(), Some(&identity)))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| ExitError::Usage(error_chain(&error)))?;
    let survey = Survey::take(&ClusterApiClient::new(endpoints)).await?;
    let survey = adoption_survey(&survey, cas)?;
    let text = serde_json::to_string_pretty(&survey).expect("plain structs always serialise");
    print(printer, &text)
}

/// Reads a file with one CA.
pub(super) fn read_ca(path: &std::path::Path) -> Result<String, ExitError> {
    let bad = |what: String| ExitError::Usage(format!("{}: {what}", path.display()));
    let bytes = muster_files::read_named(path, MAX_CA_BYTES).map_err(|e| bad(e.to_string()))?;
    let text = String::from_utf8(bytes).map_err(|_| bad("it is no PEM text".to_owned()))?;
    if ca_der(&text).is_none() {
        return Err(bad("it has to hold one certificate of a CA, and no other".to_owned()));
    }
    Ok(text)
}

/// Makes the survey for an owner to sign. Fails if a member doesn't answer or isn't in sync.
fn adoption_survey(survey: &Survey, cas: CaPair) -> Result<AdoptionSurvey, ExitError> {
    if let Some(trouble) = describe_unhealthy(survey, None) {
        return Err(ExitError::Failed(format!(
            "the cluster isn't well, so it can't come under management now: {trouble}"
        )));
    }
    let mut found: Vec<(AdoptedMember, String)> = Vec::new();
    for (member, status) in survey.members_with_status() {
        let status = status.as_ref().map_err(|why| ExitError::Failed(why.clone()))?;
        found.push((adopted_member(member)?, version(member, status)?));
    }
    found.sort_by_key(|(member, _)| member.id);
    let (members, versions): (Vec<_>, Vec<_>) = found.into_iter().unzip();
    if let Some(i) = (1..members.len())
        .find(|i| members[..*i].iter().any(|other: &AdoptedMember| other.name == members[*i].name))
    {
        return Err(ExitError::Failed(format!(
            "two members would have the name `{}` at discovery, where names have lower-case letters, \
             digits and hyphens alone: restart one of them with another --name first",
            members[i].name
        )));
    }
    let raft_cluster = format!("{:016x}", survey.members.cluster_id);
    let adoption = Adoption { raft_cluster, members };
    Ok(AdoptionSurvey { version: 1, adoption, cas, versions })
}

fn version(member: &ClusterMember, status: &NodeStatus) -> Result<String, ExitError> {
    if VERSIONS.iter().any(|known| status.version.starts_with(known)) {
        return Ok(status.version.clone());
    }
    Err(ExitError::Failed(format!(
        "{} runs etcd {}: only etcd 3.4 to 3.7 can come under management",
        member.name, status.version
    )))
}

/// Converts a member, as the cluster lists it, to the form that an owner signs. Fails for a
/// learner, and for a member whose URLs can't come under management.
pub(super) fn adopted_member(member: &ClusterMember) -> Result<AdoptedMember, ExitError> {
    let bad = |what: String| ExitError::Failed(format!("{} ({}): {what}", member.name, member.id));
    if member.is_learner {
        return Err(bad("it is a learner: promote or remove it first".to_owned()));
    }
    let url = |text: &String| {
        text.trim_end_matches('/').parse::<NodeUrl>().map_err(|error| {
            bad(format!(
                "{text}: {error}. Only members whose peers and clients use TLS can come under \
                 management: let each listen on https, and change its peer URL with `etcdctl member \
                 update`, one after the other"
            ))
        })
    };
    let [peer_url] = &member.peer_urls[..] else {
        let count = member.peer_urls.len();
        return Err(bad(format!("it has {count} peer URLs, and must have one")));
    };
    let name = member_name(&member.name)
        .ok_or_else(|| bad("its name has no letter or digit".to_owned()))?;
    Ok(AdoptedMember {
        id: digest::MemberId::new(member.id.0),
        name,
        peer_url: url(peer_url)?,
        client_urls: member.client_urls.iter().map(url).collect::<Result<_, _>>()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::MemberId;

    fn member() -> ClusterMember {
        ClusterMember {
            id: MemberId(7),
            name: "Node.1".to_owned(),
            peer_urls: vec!["https://10.0.0.1:2380".to_owned()],
            client_urls: vec!["https://10.0.0.1:2379".to_owned()],
            is_learner: false,
        }
    }

    #[test]
    fn a_member_keeps_its_id_and_urls() {
        let adopted = adopted_member(&member()).unwrap();
        assert_eq!((adopted.id.get(), adopted.name.to_string()), (7, "node-1".to_owned()));
        assert_eq!(adopted.peer_url.to_string(), "https://10.0.0.1:2380");
    }

    #[test]
    fn learners_members_without_tls_and_members_with_several_peer_urls_are_refused() {
        let learner = ClusterMember { is_learner: true, ..member() };
        let plain = ClusterMember { peer_urls: vec!["http://10.0.0.1:2380".into()], ..member() };
        let urls = ["https://10.0.0.1:2380", "https://10.0.0.2:2380"].map(str::to_owned);
        let two = ClusterMember { peer_urls: urls.to_vec(), ..member() };
        for (member, expected) in
            [(learner, "learner"), (plain, "etcdctl member update"), (two, "2 peer URLs")]
        {
            let refused = adopted_member(&member).unwrap_err().to_string();
            assert!(refused.contains(expected), "{refused}");
        }
    }

    #[test]
    fn only_known_versions_are_adopted() {
        let status = |version: &str| NodeStatus { version: version.into(), ..Default::default() };
        assert!(version(&member(), &status("3.4.23")).is_ok());
        for other in ["3.3.25", "3.8.0", "4.0.0", ""] {
            assert!(version(&member(), &status(other)).is_err(), "{other}");
        }
    }
}
