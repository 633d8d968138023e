//! `cluster credentials`: gets a client certificate for a key that is made on the admin's machine.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use discovery_types::api::{ClusterView, MemberView, SeatView, UnknownMember};
use discovery_types::csr::Csr;
use discovery_types::leaves::verify_leaf;
use discovery_types::text::printable;
use discovery_types::url::NodeUrl;
use ipnet::IpNet;
use serde_json::json;
use zeroize::Zeroizing;

use crate::cli::CliError;
use crate::cli::printer::{Printer, or_dash, time};
use crate::cli::session::AdminSession;

struct CredentialFiles {
    certificate: PathBuf,
    key: PathBuf,
    ca: PathBuf,
}

/// Arguments of `cluster credentials`.
pub(super) struct CredentialsArguments<'a> {
    /// Folder for the files.
    pub(super) out: &'a Path,
    /// Whether to replace an existing certificate.
    pub(super) renew: bool,
    /// Networks in which the members should be. If empty, each member should be in the networks
    /// that its token is bound to.
    pub(super) expected: &'a [IpNet],
    /// Whether to skip the confirmation if a member is at an unexpected address.
    pub(super) yes: bool,
}

pub(super) async fn credentials(
    session: &AdminSession,
    cluster: &str,
    wanted: &CredentialsArguments<'_>,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let CredentialsArguments { out, renew, expected, yes } = *wanted;
    let files = CredentialFiles {
        certificate: out.join("client.crt"),
        key: out.join("client.key"),
        ca: out.join("ca.crt"),
    };
    own_folder(out)?;
    let pair = key_pair(&files, renew)?;
    let cluster = session.cluster(cluster).await?;
    let chain = session.chain(cluster.cluster).await?;
    let view = session.client.show_cluster(cluster.cluster).await?;
    confirm_members(&view, expected, yes, printer)?;
    if let Some(sentence) = unknown_members(&view.present.unknown) {
        printer.warn(&sentence);
    }
    let csr = Csr::new(&pair);
    let answer = session.client.issue_credentials(cluster.cluster, &csr).await?;
    let statement = chain.newest();
    let ours = csr.verify().map_err(|error| CliError::Answer(error.to_string()))?.node_key;
    verify_leaf("client", &answer.certificate, &ours, statement.client_cas())
        .map_err(|error| CliError::Answer(error.to_string()))?;

    // A renewed certificate is for the same key, so the key and certificate files always match.
    if !files.key.exists() {
        let pem = Zeroizing::new(pair.serialize_pem());
        muster_files::replace(&files.key, pem.as_bytes())?;
    }
    muster_files::replace(&files.ca, statement.client_bundle().as_bytes())?;
    muster_files::replace(&files.certificate, answer.certificate.as_bytes())?;

    let endpoints = answer.endpoints.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let full = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    let environment = [
        ("ETCDCTL_API", "3".to_owned()),
        ("ETCDCTL_CACERT", full(&files.ca).display().to_string()),
        ("ETCDCTL_CERT", full(&files.certificate).display().to_string()),
        ("ETCDCTL_KEY", full(&files.key).display().to_string()),
        ("ETCDCTL_ENDPOINTS", endpoints.clone()),
    ];
    let value = json!({
        "certificate": files.certificate,
        "key": files.key,
        "ca": files.ca,
        "expires_at_ms": answer.expires_at_ms,
        "endpoints": answer.endpoints,
        "environment": environment.iter().cloned().collect::<BTreeMap<_, _>>(),
    });
    printer.print_value(&value, |out| {
        for (name, value) in &environment {
            out.line(&format!("export {name}={}", quote_for_shell(value)));
        }
    })?;
    printer.note(&format!("valid until {}", time(answer.expires_at_ms)));
    if answer.endpoints.is_empty() {
        printer.warn("the cluster has not committed yet, so it has no endpoints: set them later");
    }
    Ok(())
}

/// Asks for confirmation if a member's address is outside the expected networks. A client with the
/// certificate would otherwise write its data to a stranger's host. With `yes` it only warns.
fn confirm_members(
    view: &ClusterView,
    expected: &[IpNet],
    yes: bool,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let strange = match view.present.members.is_empty() {
        true => strange_seats(&view.seats, expected),
        false => strange_members(&view.present.members, expected),
    };
    if strange.is_empty() {
        return Ok(());
    }
    for sentence in strange {
        printer.warn(&sentence);
    }
    let question = "Are these the hosts that you mean? Type yes to go on:";
    if yes || printer.ask(question).as_deref() == Some("yes") {
        return Ok(());
    }
    Err(CliError::Usage(
        "nothing was done: look at `cluster show`, then type yes, or add --yes".into(),
    ))
}

/// Returns a sentence about members whose addresses the answer lacks, if there are any.
fn unknown_members(unknown: &[UnknownMember]) -> Option<String> {
    let names: Vec<String> =
        unknown.iter().map(|member| printable(&member.name).into_owned()).collect();
    (!names.is_empty()).then(|| {
        format!(
            "the service's database is older than these members' joins, so they are not among the \
             endpoints: {}. Ask the cluster itself: muster-agent member list",
            names.join(", ")
        )
    })
}

/// Returns a sentence for each member with an address outside the expected networks.
fn strange_members(members: &[MemberView], expected: &[IpNet]) -> Vec<String> {
    let strange = members.iter().filter_map(|member| {
        let expected = if expected.is_empty() { &member.bound_to } else { expected };
        member.is_outside(expected).then(|| {
            format!(
                "member {} came from {} and is at {}, not in {}",
                member.display_name(),
                or_dash(member.source.as_ref()),
                member.peer_urls.join(", "),
                join_blocks(expected)
            )
        })
    });
    strange.collect()
}

fn join_blocks(blocks: &[IpNet]) -> String {
    blocks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Returns a sentence for each seat of a forming cluster whose agent has an address outside the
/// expected networks.
fn strange_seats(seats: &[SeatView], expected: &[IpNet]) -> Vec<String> {
    let urls = |of: &[NodeUrl]| of.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let seated = seats.iter().filter(|seat| seat.seat.is_some());
    seated
        .filter_map(|seat| {
            let expected = if expected.is_empty() { &seat.bound_to } else { expected };
            seat.is_outside(expected).then(|| {
                format!(
                    "member {} came from {} and is at {}, not in {}",
                    seat.name,
                    or_dash(seat.source.as_ref()),
                    urls(&seat.peer_urls),
                    join_blocks(expected)
                )
            })
        })
        .collect()
}

/// Makes the folder. Refuses a folder that another user owns or can write to, because that user
/// could swap the CA or the key later.
fn own_folder(out: &Path) -> Result<(), CliError> {
    match muster_files::open_own_folder(out) {
        Ok(_) => Ok(()),
        Err(error) if error.is_refusal() => Err(CliError::Usage(error.to_string())),
        Err(error) => Err(error.into()),
    }
}

/// Returns the existing key, or makes one if there is none. An existing key is an error without
/// `renew`.
fn key_pair(files: &CredentialFiles, renew: bool) -> Result<rcgen::KeyPair, CliError> {
    match (files.key.exists(), renew) {
        (true, false) => Err(CliError::Usage(format!(
            "{} exists already: use another folder, or --renew to replace the certificate",
            files.key.display()
        ))),
        (true, true) => {
            let pem = fs_err::read_to_string(&files.key)
                .map(Zeroizing::new)
                .map_err(|source| CliError::file("reading", &files.key, source))?;
            rcgen::KeyPair::from_pem(&pem)
                .map_err(|_| CliError::Usage(format!("{} is no private key", files.key.display())))
        }
        (false, _) => Ok(rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)
            .expect("ring makes P-256 keys")),
    }
}

/// Quotes a word for a POSIX shell.
fn quote_for_shell(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/.,:_-[]".contains(c);
    if !text.is_empty() && text.chars().all(plain) && !text.contains('[') {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seat(source: Option<&str>, url: &str, bound_to: &[&str]) -> SeatView {
        serde_json::from_value(json!({
            "seat": 1, "name": "a", "agent": "A".repeat(43), "incarnation": "0".repeat(32),
            "peer_urls": [url], "client_urls": [], "grant": "a".repeat(16), "source": source,
            "bound_to": bound_to, "lease_until_ms": null, "acked": true, "probes": [],
            "last_nack": null,
        }))
        .unwrap()
    }

    #[test]
    fn members_outside_the_expected_networks_are_reported() {
        let inside = "https://10.1.0.7:2380";
        let cases = [
            (seat(Some("10.1.0.7"), inside, &[]), vec![], 0),
            (seat(Some("10.1.0.7"), inside, &["10.1.0.0/16"]), vec![], 0),
            (seat(Some("10.2.0.7"), inside, &["10.1.0.0/16"]), vec![], 1),
            (seat(Some("10.1.0.7"), "https://10.2.0.7:2380", &["10.1.0.0/16"]), vec![], 1),
            (seat(None, inside, &["10.1.0.0/16"]), vec![], 1),
            (seat(Some("10.1.0.7"), inside, &["10.1.0.0/16"]), vec!["10.2.0.0/16"], 1),
            (seat(Some("10.1.0.7"), inside, &["10.9.0.0/16"]), vec!["10.1.0.0/16"], 0),
        ];
        for (seat, expected, strange) in cases {
            let expected: Vec<IpNet> =
                expected.iter().map(|block| block.parse().unwrap()).collect();
            let found = strange_seats(std::slice::from_ref(&seat), &expected);
            assert_eq!(found.len(), strange, "{seat:?} {expected:?}");
        }
    }

    fn view(seats: &[SeatView], members: &[MemberView]) -> ClusterView {
        serde_json::from_value(json!({
            "cluster": uuid::Uuid::nil(), "name": "demo", "size": 1, "state": "formed", "epoch": 1,
            "seated": 1, "standbys": 0, "created_at_ms": 0, "deadline_at_ms": null,
            "statement": null, "seats": seats, "timeline": [], "explain": [], "document": null,
            "raft_cluster_id": null, "alarms": [],
            "present": { "confirmed": true, "members": members },
        }))
        .unwrap()
    }

    #[test]
    fn current_members_of_a_running_cluster_are_judged_and_not_its_founders() {
        let founder = seat(Some("10.1.0.7"), "https://10.1.0.7:2380", &["10.1.0.0/16"]);
        let member = |url: &str, source: Option<&str>| -> MemberView {
            serde_json::from_value(json!({
                "id": "0000000000000001", "name": "a", "is_learner": false, "is_leader": false,
                "peer_urls": [url], "client_urls": [], "last_heard_ms": null, "is_silent": false,
                "disagreement": null, "last_error": null, "source": source,
                "bound_to": ["10.1.0.0/16"],
            }))
            .unwrap()
        };
        let asked = |member: MemberView, yes| {
            let said = SharedBuffer::default();
            let mut printer = Printer::new(false, Box::new(said.clone()), Box::new(said.clone()));
            let view = view(std::slice::from_ref(&founder), &[member]);
            let done = confirm_members(&view, &[], yes, &mut printer).is_ok();
            (done, String::from_utf8(said.0.take()).unwrap())
        };
        let at_home = member("https://10.1.0.9:2380", Some("10.1.0.9"));
        assert_eq!(asked(at_home, false), (true, String::new()));
        for strange in [
            member("https://192.0.2.9:2380", Some("192.0.2.9")),
            member("https://192.0.2.9:2380", Some("10.1.0.9")),
            member("https://10.1.0.9:2380", None),
        ] {
            let (done, said) = asked(strange.clone(), false);
            assert!(!done, "tests have no terminal: {said}");
            assert!(said.contains("member a came from"), "{said}");
            assert!(asked(strange, true).0);
        }
    }

    #[derive(Clone, Default)]
    struct SharedBuffer(std::rc::Rc<std::cell::RefCell<Vec<u8>>>);

    impl std::io::Write for SharedBuffer {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.borrow_mut().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn yes_skips_the_question_but_not_the_warning() {
        let said = SharedBuffer::default();
        let mut printer = Printer::new(false, Box::new(said.clone()), Box::new(said.clone()));
        let seat = seat(Some("10.2.0.7"), "https://10.2.0.7:2380", &["10.1.0.0/16"]);
        confirm_members(&view(&[seat], &[]), &[], true, &mut printer).unwrap();
        let said = String::from_utf8(said.0.take()).unwrap();
        assert!(said.contains("warning: member a came from 10.2.0.7"), "{said}");
    }

    #[test]
    fn a_folder_that_others_can_write_to_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        own_folder(&dir.path().join("new/one")).unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        for folder in [dir.path(), &dir.path().join("new")] {
            let refused = own_folder(folder).unwrap_err();
            assert_eq!(refused.exit_code(), 2, "{refused}");
        }
    }

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(quote_for_shell("/home/ada/demo/ca.crt"), "/home/ada/demo/ca.crt");
        assert_eq!(quote_for_shell("/tmp/a b"), "'/tmp/a b'");
        assert_eq!(quote_for_shell("it's"), r"'it'\''s'");
        assert_eq!(quote_for_shell(""), "''");
        assert_eq!(quote_for_shell("https://[::1]:2379"), "'https://[::1]:2379'");
    }
}
