//! `cluster credentials`: a client certificate over a key that is made here.

use std::collections::BTreeMap;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use discovery_types::api::SeatView;
use discovery_types::csr::Csr;
use discovery_types::leaves::verify_leaf;
use discovery_types::url::NodeUrl;
use ipnet::IpNet;
use serde_json::json;
use zeroize::Zeroizing;

use crate::cli::CliError;
use crate::cli::printer::{Printer, or_dash, time};
use crate::cli::session::Session;

struct Files {
    certificate: PathBuf,
    key: PathBuf,
    ca: PathBuf,
}

/// What was asked for.
pub(super) struct Wanted<'a> {
    /// Folder for the files.
    pub(super) out: &'a Path,
    /// Replace a certificate that is there.
    pub(super) renew: bool,
    /// Where the members should be; empty for what their tokens are bound to.
    pub(super) expected: &'a [IpNet],
    /// Whoever asks knows where the members come from.
    pub(super) yes: bool,
}

pub(super) async fn credentials(
    session: &Session,
    cluster: &str,
    wanted: &Wanted<'_>,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let Wanted { out, renew, expected, yes } = *wanted;
    let files = Files {
        certificate: out.join("client.crt"),
        key: out.join("client.key"),
        ca: out.join("ca.crt"),
    };
    let pair = key_pair(&files, renew)?;
    let cluster = session.cluster(cluster).await?;
    let chain = session.chain(cluster.cluster).await?;
    if !yes {
        confirm_members(session, cluster.cluster, expected, printer).await?;
    }
    let csr = Csr::new(&pair);
    let answer = session.client.credentials(cluster.cluster, &csr).await?;
    let statement = chain.newest();
    let ours = csr.verify().map_err(|error| CliError::Answer(error.to_string()))?.node_key;
    verify_leaf("client", &answer.certificate, &ours, &statement.client_ca)
        .map_err(|error| CliError::Answer(error.to_string()))?;

    fs_err::create_dir_all(out.parent().unwrap_or(Path::new(".")))
        .and_then(|()| match out.is_dir() {
            true => Ok(()),
            false => std::fs::DirBuilder::new().mode(0o700).create(out),
        })
        .map_err(|source| CliError::file("making", out, source))?;
    // A renewed certificate is over the same key, so each file fits the others at any moment.
    if !files.key.exists() {
        let pem = Zeroizing::new(pair.serialize_pem());
        muster_files::replace(&files.key, pem.as_bytes())?;
    }
    muster_files::replace(&files.ca, statement.client_ca.as_bytes())?;
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
    printer.value(&value, |out| {
        for (name, value) in &environment {
            out.line(&format!("export {name}={}", quoted(value)));
        }
    })?;
    printer.note(&format!("valid until {}", time(answer.expires_at_ms)));
    if answer.endpoints.is_empty() {
        printer.warn("the cluster has not committed yet, so it has no endpoints: set them later");
    }
    Ok(())
}

/// Before anything is written into a cluster whose members aren't where their tokens were meant for,
/// a person has to say so.
async fn confirm_members(
    session: &Session,
    cluster: uuid::Uuid,
    expected: &[IpNet],
    printer: &mut Printer,
) -> Result<(), CliError> {
    let view = session.client.show_cluster(cluster).await?;
    let strange = strange_members(&view.seats, expected);
    if strange.is_empty() {
        return Ok(());
    }
    for sentence in strange {
        printer.warn(&sentence);
    }
    if printer.confirmed("Are these the hosts that you mean?") {
        return Ok(());
    }
    Err(CliError::Usage(
        "nothing was done: look at `cluster show`, then type yes, or add --yes".into(),
    ))
}

/// A sentence for each seated member that isn't where it should be.
fn strange_members(seats: &[SeatView], expected: &[IpNet]) -> Vec<String> {
    let listed = |of: &[IpNet]| of.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
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
                    listed(expected)
                )
            })
        })
        .collect()
}

/// The key that is there, where that is asked for; a new one otherwise.
fn key_pair(files: &Files, renew: bool) -> Result<rcgen::KeyPair, CliError> {
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

/// For a POSIX shell.
fn quoted(text: &str) -> String {
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
    fn members_that_are_not_where_they_should_be_are_named() {
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
            let found = strange_members(std::slice::from_ref(&seat), &expected);
            assert_eq!(found.len(), strange, "{seat:?} {expected:?}");
        }
    }

    #[test]
    fn the_environment_survives_a_shell() {
        assert_eq!(quoted("/home/ada/demo/ca.crt"), "/home/ada/demo/ca.crt");
        assert_eq!(quoted("/tmp/a b"), "'/tmp/a b'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
        assert_eq!(quoted("https://[::1]:2379"), "'https://[::1]:2379'");
    }
}
