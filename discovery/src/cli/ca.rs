//! `ca issue`: makes a member's certificates without a running service, from an export and the key
//! directory.

use std::path::{Path, PathBuf};

use clap::Subcommand;
use data_encoding::BASE64;
use discovery_types::api::ClusterExport;
use discovery_types::csr::Csr;
use discovery_types::digest::MemberId;
use discovery_types::statement::{StatementChain, ca_der};
use discovery_types::strict;
use discovery_types::url::NodeUrl;
use rustls::pki_types::{CertificateSigningRequestDer, pem::PemObject};

use super::CliError;
use super::printer::Printer;
use crate::ca::{ClusterIssuer, IssuingCa, MemberLeaf, hosts};
use crate::forming::show;
use crate::kek::KeyPurpose;
use crate::keydir::KeyDirectory;

/// Maximum size of an export, in bytes.
const MAX_EXPORT: u64 = 2 << 20;
/// Maximum size of a certificate request, in bytes.
const MAX_CSR: u64 = 64 << 10;

#[derive(Debug, clap::Args)]
pub(super) struct CaArgs {
    /// Print JSON on stdout instead of names of files
    #[arg(long, global = true)]
    pub(super) json: bool,
    #[command(subcommand)]
    command: CaCommand,
}

#[derive(Debug, Subcommand)]
enum CaCommand {
    /// Make a member's two certificates from an export, without the service and its database
    #[command(after_help = "\
Example, on a machine with a copy of the service's key directory:
  muster-discovery ca issue --export demo.export --keys keys --csr db-4.csr --member 8e9e05c52164694d \\
      --peer-urls https://10.1.0.4:2380 --client-urls https://10.1.0.4:2379 --out db-4-certs

Make the export with `cluster export` while the service runs. Add the member first (`muster-agent member
add`, or `etcdctl member add`), which prints its id. A request for a new key is made with:
  openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj / -keyout node.key -out db-4.csr

DIR gets peer.crt, client.crt, peer-ca.crt, client-ca.crt and statements.json (mode 0600). Both
certificates are over the one key, for server and client use, and last a year. A member's agent takes
peer.crt, client.crt and statements.json from agent/tls in its data directory when it starts.")]
    Issue(IssueArgs),
}

#[derive(Debug, clap::Args)]
struct IssueArgs {
    /// File that `cluster export` wrote
    #[arg(long, value_name = "FILE")]
    export: PathBuf,
    /// The service's key directory, or a copy of it
    #[arg(long, value_name = "DIR")]
    keys: PathBuf,
    /// The node's certificate request, PEM or DER, of an ECDSA P-256 key
    #[arg(long, value_name = "FILE")]
    csr: PathBuf,
    /// The member's id, as `etcdctl member list` prints it
    #[arg(long, value_name = "ID", value_parser = member_id)]
    member: MemberId,
    /// Peer URLs of the member, separated by commas
    #[arg(long, alias = "peer-url", value_name = "URLS", value_delimiter = ',', required = true)]
    peer_urls: Vec<NodeUrl>,
    /// Client URLs of the member, separated by commas
    #[arg(long, alias = "client-url", value_name = "URLS", value_delimiter = ',', required = true)]
    client_urls: Vec<NodeUrl>,
    /// Folder for the certificates
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

fn member_id(text: &str) -> Result<MemberId, String> {
    let id = u64::from_str_radix(text, 16);
    id.map(MemberId::new).map_err(|_| "an id has up to 16 hexadecimal digits".into())
}

pub(super) fn run(args: CaArgs, printer: &mut Printer) -> Result<(), CliError> {
    let CaCommand::Issue(args) = args.command;
    let now = jiff::Timestamp::now().as_second().unsigned_abs();
    let files = issue(&args, now)?;
    printer.print_value(&files, |out| {
        for file in &files {
            out.line(&file.display().to_string());
        }
    })
}

/// Writes the five files and returns their paths. `now` is in seconds since 1970.
fn issue(args: &IssueArgs, now: u64) -> Result<Vec<PathBuf>, CliError> {
    let export = read_export(&args.export)?;
    let unreadable = |what: &str| CliError::Usage(format!("{}: {what}", args.export.display()));
    let chain = StatementChain::verify_links(&export.statements)
        .map_err(|error| unreadable(&error.to_string()))?;
    let statement = chain.newest();
    if export.version != 1 || statement.cluster != export.cluster {
        return Err(unreadable("its parts don't belong together"));
    }
    let keys =
        KeyDirectory::load(&args.keys).map_err(|error| CliError::Usage(error.to_string()))?;
    let open = |purpose, wrapped: &str, pem: &str| -> Result<IssuingCa, CliError> {
        let wrapped = BASE64.decode(wrapped.as_bytes()).map_err(|_| unreadable("no base64"))?;
        let key = keys.kek.unwrap(export.cluster, purpose, &wrapped).map_err(|error| {
            CliError::Usage(format!(
                "the keys in {} don't open {}: {error}",
                args.keys.display(),
                args.export.display()
            ))
        })?;
        let certificate = ca_der(pem).ok_or_else(|| unreadable("a CA can't be read"))?;
        IssuingCa::load(&certificate, &key).map_err(|error| unreadable(&error.to_string()))
    };
    let authority = ClusterIssuer {
        peer: open(KeyPurpose::PeerCa, &export.peer_ca_key, &statement.peer_ca)?,
        client: open(KeyPurpose::ClientCa, &export.client_ca_key, &statement.client_ca)?,
    };
    let csr = read_csr(&args.csr)?;
    let bad_csr =
        |error: &dyn std::error::Error| CliError::Usage(format!("{}: {error}", args.csr.display()));
    let node_key = csr.verify().map_err(|error| bad_csr(&error))?.node_key;
    let texts = |urls: &[NodeUrl]| urls.iter().map(NodeUrl::to_string).collect::<Vec<_>>();
    let leaf = MemberLeaf {
        trust_domain: &export.trust_domain,
        cluster: export.cluster,
        member: &args.member.to_string(),
        peer_hosts: &hosts(&texts(&args.peer_urls)),
        client_hosts: &hosts(&texts(&args.client_urls)),
    };
    let leaves = authority.issue_member(csr.der(), &leaf, now).map_err(|e| bad_csr(&e))?;
    let leaves = show::leaves(&leaves);
    // Verify the result: with a wrong CA key, nobody would accept the certificates.
    leaves.verify(&node_key, statement).map_err(|error| unreadable(&error.to_string()))?;
    let statements = serde_json::to_string(&export.statements).expect("texts always serialise");
    muster_files::open_own_folder(&args.out)?;
    let files = [
        ("peer.crt", &leaves.peer),
        ("client.crt", &leaves.client),
        ("peer-ca.crt", &statement.peer_bundle()),
        ("client-ca.crt", &statement.client_bundle()),
        // An agent that has missed a replacement of the CAs learns from these statements which CAs
        // to trust.
        ("statements.json", &statements),
    ];
    let mut written = Vec::new();
    for (name, text) in files {
        let file = args.out.join(name);
        muster_files::replace(&file, text.as_bytes())?;
        written.push(file);
    }
    Ok(written)
}

fn read(path: &Path, max_bytes: u64) -> Result<Vec<u8>, CliError> {
    muster_files::read_named(path, max_bytes)
        .map_err(|source| CliError::file("reading", path, source))
}

fn read_export(path: &Path) -> Result<ClusterExport, CliError> {
    let none = |_| CliError::Usage(format!("{} is no cluster export", path.display()));
    strict::from_slice(&read(path, MAX_EXPORT)?).map_err(none)
}

fn read_csr(path: &Path) -> Result<Csr, CliError> {
    let bytes = read(path, MAX_CSR)?;
    let der = match CertificateSigningRequestDer::from_pem_slice(&bytes) {
        Ok(pem) => pem.to_vec(),
        Err(_) => bytes,
    };
    Ok(Csr::from_der(der))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use clap::Parser;
    use discovery_types::admin::Admin;
    use discovery_types::csr::NodeKey;
    use discovery_types::jws::{Jws, JwsType};
    use discovery_types::key::SigningKey;
    use discovery_types::leaves::Leaves;
    use discovery_types::role::Role;
    use discovery_types::statement::{Permissions, Statement};
    use uuid::Uuid;

    use super::*;
    use crate::ca::{NewCa, make_ca};
    use crate::server::{InitArgs, init};

    const NOW: u64 = 1_800_000_000;

    #[derive(Parser)]
    struct IssueCommandLine {
        #[command(flatten)]
        args: IssueArgs,
    }

    /// A key directory, and the export of a cluster that was made with it.
    struct IssueFixture {
        dir: tempfile::TempDir,
        export: ClusterExport,
        statement: Statement,
        csr: Csr,
    }

    fn key_directory(dir: &Path, owner: &SigningKey) -> KeyDirectory {
        let args = InitArgs {
            owner: *owner.public(),
            dir: dir.to_path_buf(),
            urls: vec!["https://127.0.0.1:1".into()],
            trust_domain: "muster".into(),
        };
        init(&args).unwrap();
        KeyDirectory::load(dir).unwrap()
    }

    impl IssueFixture {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let owner = SigningKey::generate();
            let keys = key_directory(&dir.path().join("keys"), &owner);
            let cluster = Uuid::now_v7();
            let wrapped = |purpose| -> (NewCa, String) {
                let ca = make_ca(cluster, "demo", purpose, NOW).unwrap();
                let key = keys.kek.wrap(cluster, purpose, &ca.key).unwrap();
                (ca, BASE64.encode(&key))
            };
            let (peer, peer_ca_key) = wrapped(KeyPurpose::PeerCa);
            let (client, client_ca_key) = wrapped(KeyPurpose::ClientCa);
            let name = "ada".parse().unwrap();
            let statement = Statement {
                version: 1,
                cluster,
                name: "demo".parse().unwrap(),
                size: 1,
                seq: 0,
                previous: None,
                peer_ca: show::pem("CERTIFICATE", &peer.certificate),
                client_ca: show::pem("CERTIFICATE", &client.certificate),
                admins: vec![Admin { key: *owner.public(), name, roles: vec![Role::Owner] }],
                permissions: Permissions::default(),
                deadline_seconds: 60,
                spread: None,
                needs_approval: false,
                also_trusted: None,
                adopted: None,
            };
            let export = ClusterExport {
                version: 1,
                cluster,
                trust_domain: "muster".into(),
                statements: vec![statement.sign(&owner)],
                document: Jws::sign(JwsType::Document, &owner, &()),
                peer_ca_key,
                client_ca_key,
            };
            IssueFixture { dir, export, statement, csr: NodeKey::generate().csr }
        }

        fn issue(&self, keys: &str) -> Result<Vec<PathBuf>, CliError> {
            let path = |name: &str| self.dir.path().join(name).display().to_string();
            std::fs::write(path("demo.export"), serde_json::to_vec(&self.export).unwrap()).unwrap();
            std::fs::write(path("db-4.csr"), show::pem("CERTIFICATE REQUEST", self.csr.der()))
                .unwrap();
            let (export, keys, csr, out) =
                (path("demo.export"), path(keys), path("db-4.csr"), path("certs"));
            let line = [
                "issue",
                "--export",
                &export,
                "--keys",
                &keys,
                "--csr",
                &csr,
                "--member",
                "4d",
                "--peer-url",
                "https://10.1.0.4:2380",
                "--client-url",
                "https://10.1.0.4:2379",
                "--out",
                &out,
            ];
            issue(&IssueCommandLine::parse_from(line).args, NOW)
        }
    }

    #[test]
    fn a_newcomer_gets_its_certificates_without_a_service() {
        let world = IssueFixture::new();
        let files = world.issue("keys").unwrap();
        let read = |name: &str| std::fs::read_to_string(world.dir.path().join("certs").join(name));
        let leaves =
            Leaves { peer: read("peer.crt").unwrap(), client: read("client.crt").unwrap() };
        let node_key = world.csr.verify().unwrap().node_key;
        leaves.verify(&node_key, &world.statement).unwrap();
        assert_eq!(read("peer-ca.crt").unwrap(), world.statement.peer_ca);
        assert_eq!(read("client-ca.crt").unwrap(), world.statement.client_ca);
        let statements: Vec<Jws> = serde_json::from_str(&read("statements.json").unwrap()).unwrap();
        assert_eq!(statements, world.export.statements);
        for file in &files {
            let mode = std::fs::metadata(file).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{}", file.display());
        }
        // Issue once more, as for a renewal.
        assert_eq!(world.issue("keys").unwrap(), files);
    }

    #[test]
    fn an_export_cant_be_opened_with_another_key_directory() {
        let world = IssueFixture::new();
        key_directory(&world.dir.path().join("other"), &SigningKey::generate());
        let error = world.issue("other").unwrap_err();
        assert!(error.to_string().contains("don't open"), "{error}");
        assert!(!world.dir.path().join("certs").exists());
    }

    #[test]
    fn no_certificate_is_made_from_an_export_that_was_tampered_with() {
        let mut world = IssueFixture::new();
        let stranger = IssueFixture::new();
        // The test changes three exports: it swaps the CA keys, inserts another cluster's
        // statements, and inserts another cluster's CA.
        let (peer, client) = (world.export.peer_ca_key.clone(), world.export.client_ca_key.clone());
        (world.export.peer_ca_key, world.export.client_ca_key) = (client, peer);
        assert_eq!(world.issue("keys").unwrap_err().exit_code(), 2);
        let mut world = IssueFixture::new();
        world.export.statements = stranger.export.statements;
        assert_eq!(world.issue("keys").unwrap_err().exit_code(), 2);
        let mut world = IssueFixture::new();
        let owner = SigningKey::generate();
        world.statement.peer_ca = stranger.statement.peer_ca;
        world.statement.admins[0].key = *owner.public();
        world.export.statements = vec![world.statement.sign(&owner)];
        assert_eq!(world.issue("keys").unwrap_err().exit_code(), 2);
        assert!(!world.dir.path().join("certs").exists());
    }
}
