//! `token compromised`: revokes a token that somebody else may have, and frees the seats that it
//! gave while the cluster forms. Says what to do about the hosts that used the token.

use discovery_types::api::{
    CertificatePurpose, ClusterState, ClusterSummary, IntentState, IssuedCertificate, Redemption,
};
use discovery_types::grant::{GrantId, TokenKind};
use serde_json::json;

use super::{write_grant, write_hosts};
use crate::cli::CliError;
use crate::cli::confirm::IrreversibleAct;
use crate::cli::printer::{Printer, TextOutput, time};
use crate::cli::session::AdminSession;

/// Runs the command `token compromised`.
pub(super) async fn run(
    session: &AdminSession,
    id: GrantId,
    yes: bool,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let grant = session.client.show_grant(id).await?.grant;
    let ends = format!("Token {id} admits no further host. Hosts that have used it are listed.");
    let seats = "While the cluster forms, each of them loses its seat, yours, too.".to_owned();
    IrreversibleAct { consequences: vec![ends, seats], name: &id.to_string() }
        .confirm(yes, printer)?;
    // Revoke before listing. A host that comes meanwhile is then either refused or in the list.
    let view = session.client.revoke_grant_and_free_seats(id).await?;
    let hosts = session.client.redemptions(id).await?.redemptions;
    let cluster = session.cluster(&grant.cluster.to_string()).await?;
    let steps = steps(&cluster, grant.kind, &hosts);
    let mut value = json!(view);
    value["redemptions"] = json!(hosts);
    value["steps"] = json!(steps);
    printer.print_value(&value, |out| {
        write_grant(out, &view);
        write_hosts(out, &hosts);
        write_certificates(out, &hosts);
        out.line("");
        for step in &steps {
            out.line(step);
        }
    })
}

/// Writes the known certificates of the hosts that have used the token.
fn write_certificates(out: &mut TextOutput<'_>, hosts: &[Redemption]) {
    let rows: Vec<_> = hosts.iter().flat_map(certificate_rows).collect();
    if !rows.is_empty() {
        out.line("");
        out.table(["HOST", "CERTIFICATE", "SERIAL", "ENDS"], rows);
    }
}

fn certificate_rows(host: &Redemption) -> Vec<[String; 4]> {
    let row = |certificate: &IssuedCertificate| {
        [
            host.name.to_string(),
            certificate.purpose.as_str().to_owned(),
            certificate.serial.clone(),
            time(certificate.expires_at_ms),
        ]
    };
    host.certificates.iter().map(row).collect()
}

/// Returns the end of the hosts' last known client certificate, in milliseconds since 1970.
fn last_client_end(hosts: &[Redemption]) -> Option<i64> {
    let known = hosts.iter().flat_map(|host| &host.certificates);
    let client = known.filter(|certificate| certificate.purpose == CertificatePurpose::Client);
    client.map(|certificate| certificate.expires_at_ms).max()
}

/// Returns what to do about the hosts that have used the token.
fn steps(cluster: &ClusterSummary, kind: TokenKind, hosts: &[Redemption]) -> Vec<String> {
    let name = &cluster.name;
    if hosts.is_empty() {
        return vec!["no host has used the token: mint another one".to_owned()];
    }
    let mut steps = Vec::new();
    let is_forming = matches!(cluster.state, ClusterState::Open | ClusterState::Preparing);
    if is_forming {
        steps.push(format!(
            "the cluster has not committed, and these hosts have lost their seats: make a new token for \
             yours (muster-discovery token create --cluster {name}), and start their agents with it"
        ));
        steps.push(format!(
            "if the cluster doesn't form then, because hosts that aren't yours have signed a list \
             (muster-discovery cluster explain {name}), create another one: muster-discovery cluster \
             abandon {name}"
        ));
    }
    let is_running = matches!(cluster.state, ClusterState::Committed | ClusterState::Formed);
    if is_running {
        steps.push("for each of these hosts that isn't yours:".to_owned());
    }
    for host in hosts.iter().filter(|_| is_running) {
        let step = match (host.change, host.operation) {
            (Some(IntentState::Open), Some(operation)) => Some(format!(
                "{} waits for a place: muster-discovery intent withdraw {name} {operation}",
                host.name
            )),
            (Some(IntentState::Added | IntentState::Promoted), _) => Some(format!(
                "{} is a member: muster-discovery intent remove {name} {}",
                host.name,
                host.member.map_or_else(|| host.name.to_string(), |id| id.to_string())
            )),
            (None, _) if host.seat.is_some() => Some(format!(
                "{} is a founder: muster-discovery intent remove {name} {}, after another host has \
                 joined",
                host.name, host.name
            )),
            _ => None,
        };
        steps.extend(step);
    }
    if is_running {
        let end = last_client_end(hosts)
            .map_or_else(String::new, |end| format!(" (the last known one at {})", time(end)));
        steps.push(format!(
            "a removed member keeps its client certificate until that ends{end}, and reads and \
             writes with it: turn on users and roles, or move the data to a new cluster. Members \
             as they are: muster-discovery cluster show {name}"
        ));
    }
    if kind == TokenKind::Heal {
        steps.push(
            "if the service may be in other hands, too, end the policy on a member's host: \
             muster-agent policy revoke"
                .to_owned(),
        );
    }
    steps
}

#[cfg(test)]
mod tests {
    use discovery_types::digest::{MemberId, OperationId};
    use discovery_types::key::SigningKey;

    use super::*;

    fn host(name: &str) -> Redemption {
        Redemption {
            name: name.parse().unwrap(),
            agent: SigningKey::generate().public().key_id(),
            address: Some("192.0.2.1".to_owned()),
            instance: None,
            zone: None,
            at_ms: 0,
            seat: None,
            change: None,
            operation: None,
            member: None,
            certificates: Vec::new(),
        }
    }

    fn cluster(state: &str) -> ClusterSummary {
        serde_json::from_value(json!({
            "cluster": "00000000-0000-0000-0000-000000000001", "name": "demo", "size": 3,
            "state": state, "epoch": 1, "seated": 3, "standbys": 0, "created_at_ms": 0,
        }))
        .unwrap()
    }

    #[test]
    fn each_host_that_has_something_gets_the_command_that_takes_it_back() {
        let waiting = Redemption {
            change: Some(IntentState::Open),
            operation: Some(OperationId([7; 16])),
            ..host("waits")
        };
        let member = Redemption {
            change: Some(IntentState::Promoted),
            member: Some(MemberId::new(5)),
            ..host("votes")
        };
        let refused = Redemption { change: Some(IntentState::Refused), ..host("refused") };
        let founder = Redemption { seat: Some(2), ..host("founder") };
        let hosts = [waiting, member, refused, founder];
        let steps = super::steps(&cluster("formed"), TokenKind::Heal, &hosts).join("\n");
        for part in [
            "intent withdraw demo 07070707070707070707070707070707",
            "intent remove demo 0000000000000005",
            "founder is a founder",
            "muster-agent policy revoke",
        ] {
            assert!(steps.contains(part), "{part}: {steps}");
        }
        assert!(!steps.contains("refused"), "{steps}");
        let steps = super::steps(&cluster("open"), TokenKind::Boot, &hosts[3..]);
        assert!(steps.len() == 2 && steps[0].contains("token create --cluster demo"), "{steps:?}");
        assert!(steps[1].contains("cluster abandon demo"), "{steps:?}");
        let none = super::steps(&cluster("formed"), TokenKind::Join, &[]);
        assert!(none[0].contains("no host has used"), "{none:?}");
    }

    #[test]
    fn the_certificates_of_each_host_are_listed_and_the_last_end_is_named() {
        let certificate = |purpose, serial: &str, days: i64| IssuedCertificate {
            purpose,
            serial: serial.to_owned(),
            expires_at_ms: days * 86_400_000,
        };
        let founder = Redemption {
            seat: Some(1),
            certificates: vec![
                certificate(CertificatePurpose::Peer, "4A", 40),
                certificate(CertificatePurpose::Client, "4B", 20),
                certificate(CertificatePurpose::Client, "4C", 30),
            ],
            ..host("founder")
        };
        let rows = certificate_rows(&founder);
        assert_eq!(rows[1], ["founder", "client", "4B", "1970-01-21T00:00:00Z"]);
        let hosts = [founder, host("other")];
        let steps = super::steps(&cluster("formed"), TokenKind::Boot, &hosts).join("\n");
        assert!(steps.contains("(the last known one at 1970-01-31T00:00:00Z)"), "{steps}");
        let steps = super::steps(&cluster("formed"), TokenKind::Boot, &hosts[1..]).join("\n");
        assert!(steps.contains("until that ends, and"), "{steps}");
    }
}
