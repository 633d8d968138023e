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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{MemberId, MemberList};

    fn member(id: u64, name: &str) -> ClusterMember {
        ClusterMember {
            id: MemberId(id),
            name: name.to_owned(),
            peer_urls: vec![format!("https://10.0.0.{id}:2380")],
            ..ClusterMember::default()
        }
    }

    fn status(id: u64) -> NodeStatus {
        NodeStatus {
            member_id: MemberId(id),
            leader: Some(MemberId(1)),
            raft_index: 40,
            applied_index: 40,
            ..NodeStatus::default()
        }
    }

    fn text(statuses: Vec<Result<NodeStatus, String>>) -> String {
        let list = vec![member(1, "db-1"), member(2, "db-2"), member(3, "")];
        let survey = Survey {
            cluster: ClusterApiClient::new(Vec::new()),
            members: MemberList { cluster_id: 7, configuration: Some(9), list },
            leader: Some(MemberId(1)),
            statuses,
        };
        let members =
            survey.members_with_status().map(|(member, said)| row(&survey, member, said)).collect();
        let list = ListOutput {
            cluster_id: "7".to_owned(),
            configuration: Some(9),
            leader: Some("1".to_owned()),
            members,
        };
        format_text(&survey, &list)
    }

    /// This host can't reach the leader, and another member can.
    #[test]
    fn a_member_whose_leader_does_not_answer_here_is_shown_with_what_it_says_itself() {
        let text = text(vec![
            Err("connection refused".to_owned()),
            Ok(status(2)),
            Err("not started".to_owned()),
        ]);
        insta::assert_snapshot!(text, @r"
        cluster 7, configuration 9
        1                 db-1  leader   peers https://10.0.0.1:2380  clients   silent (connection refused)
        2                 db-2  voter    peers https://10.0.0.2:2380  clients   says that db-1 (1) leads, which doesn't answer here
        3                 -     voter    peers https://10.0.0.3:2380  clients   not started
        ");
    }

    #[test]
    fn a_member_that_has_not_started_shifts_no_column() {
        let text = text(vec![Ok(status(1)), Ok(status(2)), Err("not started".to_owned())]);
        let fourth = |row: &str| row.split_whitespace().nth(3).unwrap_or_default().to_owned();
        let fourth: Vec<String> = text.lines().skip(1).map(fourth).collect();
        assert_eq!(fourth, ["peers"; 3], "{text}");
    }
}
