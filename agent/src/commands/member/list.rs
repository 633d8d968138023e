//! `member list`: lists the members and their states.

use serde::Serialize;

use super::{CommandOutput, Survey};
use crate::cluster::{ClusterApiClient, ClusterMember, NodeStatus};
use crate::exit::ExitError;

/// The output of `--json`.
#[derive(Serialize)]
struct ListOutput<'a> {
    cluster_id: String,
    /// The configuration index; `null` from stock etcd.
    configuration: Option<u64>,
    leader: Option<String>,
    members: Vec<MemberRow<'a>>,
}

#[derive(Serialize)]
struct MemberRow<'a> {
    #[serde(flatten)]
    member: &'a ClusterMember,
    started: bool,
    /// Why the member doesn't answer.
    silent: Option<&'a str>,
    term: Option<u64>,
    applied_index: Option<u64>,
    /// Number of entries that the leader has and this member hasn't applied.
    behind: Option<u64>,
    /// The leader's id, according to this member.
    leader: Option<String>,
    version: Option<&'a str>,
}

/// Runs the subcommand `member list`.
pub(super) async fn run(
    cluster: &ClusterApiClient,
    answers: &mut CommandOutput<'_, '_>,
) -> Result<(), ExitError> {
    let survey = Survey::take_first(cluster, answers).await?;
    let list = ListOutput {
        cluster_id: format!("{:x}", survey.members.cluster_id),
        configuration: survey.members.configuration,
        leader: survey.leader.map(|id| id.to_string()),
        members: survey
            .members_with_status()
            .map(|(member, said)| row(&survey, member, said))
            .collect(),
    };
    answers.print_result(&list, || format_text(&survey, &list))
}

fn row<'a>(
    survey: &Survey,
    member: &'a ClusterMember,
    said: &'a Result<NodeStatus, String>,
) -> MemberRow<'a> {
    let status = said.as_ref().ok();
    MemberRow {
        member,
        started: member.is_started(),
        silent: said.as_ref().err().map(String::as_str),
        term: status.map(|status| status.raft_term),
        applied_index: status.map(|status| status.applied_index),
        behind: status.and_then(|status| survey.behind(status)),
        leader: status.and_then(|status| status.leader).map(|id| id.to_string()),
        version: status.map(|status| status.version.as_str()),
    }
}

fn format_text(survey: &Survey, list: &ListOutput<'_>) -> String {
    let mut lines = vec![match list.configuration {
        Some(index) => format!("cluster {}, configuration {index}", list.cluster_id),
        None => format!("cluster {}", list.cluster_id),
    }];
    let width =
        list.members.iter().map(|row| shown_name(row.member).len()).max().unwrap_or(0).max(4);
    for row in &list.members {
        let member = row.member;
        let role = survey.role(member);
        let health = match (row.silent, row.behind) {
            (Some(why), _) if row.started => format!("silent ({why})"),
            (Some(why), _) => why.to_owned(),
            (None, Some(0)) => "in sync".to_owned(),
            (None, Some(behind)) => format!("{behind} entries behind"),
            (None, None) => describe_leader(survey, row),
        };
        let (peers, clients) = (member.peer_urls.join(","), member.client_urls.join(","));
        lines.push(format!(
            "{:<16x}  {:<width$}  {role:<7}  peers {peers}  clients {clients}  {health}",
            member.id.0,
            shown_name(member)
        ));
    }
    lines.join("\n")
}

/// Returns the text of the name column: `-` for a member that has not started and so has no name.
/// An empty field would shift the columns for scripts that split at spaces.
fn shown_name(member: &ClusterMember) -> &str {
    if member.name.is_empty() { "-" } else { &member.name }
}

/// Describes the leader that the member of this row knows. Called if that leader doesn't answer
/// this host.
fn describe_leader(survey: &Survey, row: &MemberRow<'_>) -> String {
    let Some(leader) = &row.leader else { return "knows no leader".to_owned() };
    let mut named = survey.members.list.iter();
    let name = named.find(|member| member.id.to_string() == *leader).map_or("", |it| &it.name);
    format!("says that {name} ({leader}) leads, which doesn't answer here")
}
