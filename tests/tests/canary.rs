//! Searches everything that an installation writes or shows for each of its secrets. That includes
//! logs at their most detailed level, the database's files, ledgers, journals, nodes' data, metrics
//! and answers. It also includes the arguments of the installation's processes.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use data_encoding::{BASE64, BASE64URL_NOPAD, HEXLOWER};
use discovery_types::jws::{Jws, JwsType};
use discovery_types::key::SigningKey;
use muster_tests::harness::agents::AgentOptions;
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{AgentProcess, Network, Testbed, poll_slowly};

const LIMIT: Duration = Duration::from_secs(60);
/// Length of the parts of a secret that are searched for. A shorter part proves nothing.
const PART: usize = 24;

/// Names of files whose purpose is to hold a secret. Each must be closed to other users.
const SECRET_FILES: [&str; 7] =
    ["owner.pem", "tls.key", "signing-1.key", "kek-1.key", "agent.key", "node.key", "client.key"];
/// Names of files with a token, which is a secret, too.
const BUNDLES: [&str; 4] = ["demo.bundle", "late.ticket", "revoked.bundle", "etcd.env"];

/// Secrets by file and form. Each is searched for in parts.
type Secrets = BTreeMap<String, Vec<u8>>;

/// Adds the secret of a file with a private key or a token, in each form in which it may be
/// written.
fn add_secret(secrets: &mut Secrets, file: &Path) -> Result<()> {
    let text = fs_err::read_to_string(file)?;
    let name = file.display();
    if let Some(token) = text.split("mst_").nth(1) {
        // A token's text has three parts. The id is public, and only the seed after it is secret.
        let seed = token.split('_').nth(2).context("a token's seed")?;
        secrets.insert(format!("{name}, as text"), seed.as_bytes().to_vec());
        return Ok(());
    }
    let lines = text.lines().filter(|line| !line.starts_with("-----"));
    let der = BASE64.decode(lines.collect::<String>().as_bytes())?;
    // In PKCS#8 with a P-256 or an Ed25519 key, the private number is the only octet string of 32
    // bytes. The public key is a bit string. A key-encryption key is stored as raw bytes, without
    // DER.
    let start = der.windows(2).position(|pair| pair == [0x04, 0x20]).map_or(0, |at| at + 2);
    let key = der.get(start..start + 32).with_context(|| format!("{name} holds no key"))?;
    secrets.insert(format!("{name}, as bytes"), key.to_vec());
    secrets.insert(format!("{name}, in hexadecimal"), HEXLOWER.encode(key).into_bytes());
    for skipped in 0..3 {
        // Base64 encodes three bytes as four characters. So three alignments cover a key at any
        // position in the encoded bytes.
        let aligned = &key[skipped..skipped + 27];
        for (form, encoding) in [("base64", &BASE64), ("base64url", &BASE64URL_NOPAD)] {
            let encoded = encoding.encode(aligned).into_bytes();
            secrets.insert(format!("{name}, in {form} from byte {skipped}"), encoded);
        }
    }
    Ok(())
}

fn walk(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs_err::read_dir(folder)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            walk(&entry.path(), found)?;
        } else if kind.is_file() {
            found.push(entry.path());
        }
    }
    Ok(())
}

fn is_named(path: &Path, names: &[&str]) -> bool {
    path.file_name().is_some_and(|name| names.iter().any(|known| name == *known))
}

/// Searches bytes for parts of the secrets, in one pass.
struct Searcher<'a> {
    /// Parts of the secrets, indexed by their first two bytes. Each part comes with the name of its
    /// secret.
    parts: Vec<Vec<(&'a [u8], &'a str)>>,
}

impl<'a> Searcher<'a> {
    fn new(secrets: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> Self {
        let mut parts = vec![Vec::new(); 1 << 16];
        for (what, secret) in secrets {
            for part in secret.chunks_exact(PART) {
                parts[usize::from(u16::from_be_bytes([part[0], part[1]]))].push((part, what));
            }
        }
        Self { parts }
    }

    fn find(&self, bytes: &[u8]) -> Option<&'a str> {
        let mut last = 0_u16;
        for (end, byte) in (1..).zip(bytes) {
            last = last << 8 | u16::from(*byte);
            let parts = &self.parts[usize::from(last)];
            if parts.is_empty() || end < 2 {
                continue;
            }
            let found = parts.iter().find(|(part, _)| bytes[end - 2..].starts_with(part));
            if let Some((_, what)) = found {
                return Some(what);
            }
        }
        None
    }
}

/// Sends a request without a client certificate to the service, and returns what it answers.
fn request(testbed: &Testbed, line: &str, body: &str) -> Result<Vec<u8>> {
    let address = testbed.url().replace("https://", "");
    let mut child = Command::new("openssl")
        .args(["s_client", "-quiet", "-connect", &address])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .context("openssl")?;
    let headers = "Host: x\r\nConnection: close\r\nContent-Type: application/json\r\n";
    let length = body.len();
    let text = format!("{line} HTTP/1.1\r\n{headers}Content-Length: {length}\r\n\r\n{body}");
    let mut stdin = child.stdin.take().context("a pipe")?;
    stdin.write_all(text.as_bytes())?;
    // Keep the input open until the answer is complete, because openssl ends when its input ends.
    let mut answer = Vec::new();
    child.stdout.take().context("a pipe")?.read_to_end(&mut answer)?;
    drop(stdin);
    child.wait()?;
    Ok(answer)
}

/// Returns the arguments of every running process.
fn all_arguments() -> Result<Vec<u8>> {
    let mut all = Vec::new();
    for entry in fs_err::read_dir("/proc")? {
        let path = entry?.path().join("cmdline");
        all.extend(std::fs::read(path).unwrap_or_default());
        all.push(b'\n');
    }
    Ok(all)
}

/// Forms a cluster, lets a host join, and makes some tokens and requests fail. Returns the agents.
fn run_typical_operations(testbed: &Testbed) -> Result<Vec<AgentProcess>> {
    let options = AgentOptions {
        env: vec![("MUSTER_LOG".to_owned(), "trace".to_owned())],
        ..AgentOptions::default()
    };
    testbed.create_cluster("demo", 3, &[])?;
    let create = |kind: &str, file: &str| {
        let path = testbed.path(file);
        let arguments = ["token", "create", "--cluster", "demo", "--kind", kind, "--out"];
        testbed.admin_command(&[&arguments[..], &[path_text(&path)?]].concat())?;
        Ok::<_, anyhow::Error>(path)
    };
    let bundle = create("boot", "demo.bundle")?;
    let mut agents = Vec::new();
    for host in 0..3 {
        let mut agent = testbed.agent_with(host, &bundle, options.clone());
        agent.start()?;
        agents.push(agent);
    }
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let ticket = create("join", "late.ticket")?;
    let mut late = testbed.agent_with(3, &ticket, options.clone());
    late.start()?;
    poll_slowly("the fourth member", LIMIT, || {
        let shown = testbed.admin_json(&["cluster", "show", "demo"]).ok()?;
        let members = shown["present"]["members"].as_array()?;
        let heard = members.iter().all(|member| member["last_heard_ms"].is_number());
        (members.len() == 4 && heard).then_some(())
    })?;
    agents.push(late);
    let variables = testbed.path("etcd.env");
    let arguments = ["etcd-token", "create", "stock", "--size", "3", "--protocol", "v2", "--out"];
    testbed.admin_command(&[&arguments[..], &[path_text(&variables)?]].concat())?;
    // Make a ticket that is revoked before it is used.
    let revoked = create("join", "revoked.bundle")?;
    let listed = testbed.admin_json(&["token", "list", "--cluster", "demo"])?;
    let grants = listed["grants"].as_array().context("a list")?;
    let valid = grants.iter().find(|grant| grant["state"] == "valid");
    let id = valid.and_then(|view| view["grant"]["id"].as_str());
    let id = id.with_context(|| format!("{listed}"))?;
    testbed.admin_command(&["token", "revoke", id, "--yes"])?;
    let mut refused = testbed.agent_with(4, &revoked, options);
    refused.start()?;
    poll_slowly("the revoked ticket to be refused", LIMIT, || {
        (!refused.is_running()).then_some(())
    })?;
    ensure!(refused.output().contains("revoked"), "{}", refused.output());
    Ok(agents)
}

#[test]
fn no_secret_is_in_what_an_installation_writes_or_shows() -> Result<()> {
    let mut options = TestbedOptions::default();
    options.serve_env.push(("MUSTER_LOG".to_owned(), "trace".to_owned()));
    let mut testbed = Testbed::start(Network::loopback(5), options)?;
    let mut agents = run_typical_operations(&testbed)?;

    let (mut files, mut secrets) = (Vec::new(), Secrets::new());
    walk(&testbed.path(""), &mut files)?;
    for file in
        files.iter().filter(|file| is_named(file, &SECRET_FILES) || is_named(file, &BUNDLES))
    {
        add_secret(&mut secrets, file)?;
        let mode = fs_err::metadata(file)?.permissions().mode();
        ensure!(mode & 0o077 == 0, "{} may be read by others: {mode:o}", file.display());
    }
    for name in SECRET_FILES.iter().filter(|name| **name != "client.key").chain(&BUNDLES) {
        let known = files.iter().any(|file| is_named(file, &[name]));
        ensure!(known, "no file is named {name}: the test looks for no such secret");
    }
    secrets.extend(token_starts());
    let searcher = Searcher::new(secrets.iter().map(|(what, it)| (what.as_str(), &it[..])));
    // Check that the search can find a secret, in a file that holds one.
    let planted = fs_err::read(files.iter().find(|f| is_named(f, &["kek-1.key"])).context("kek")?)?;
    ensure!(searcher.find(&planted).is_some_and(|what| what.contains("kek-1.key")));

    // Search the service's answers while all programs run. No answer may repeat the secret that its
    // request contains.
    let seed = secrets.iter().find(|(what, _)| what.contains("demo.bundle")).context("a seed")?.1;
    let seed = String::from_utf8(seed.clone())?;
    // Stock etcd sends its token in the path.
    let variables = fs_err::read_to_string(testbed.path("etcd.env"))?;
    let etcd_path = variables.split("/v2/").nth(1).and_then(|rest| rest.lines().next());
    let etcd_path = format!("/v2/{}", etcd_path.context("a discovery URL")?);
    for (line, body) in [
        (&*format!("GET {etcd_path}"), String::new()),
        (&*format!("GET {etcd_path}/_config/size?wait={etcd_path}"), String::new()),
        (&*format!("PUT {etcd_path}/1?prevExist=false"), "value=x".to_owned()),
        (&*format!("DELETE {etcd_path}"), String::new()),
        (&*format!("GET {etcd_path}x"), String::new()),
        (&*format!("GET /v1{etcd_path}"), String::new()),
        ("GET /metrics", String::new()),
        ("POST /v1/redeem", format!(r#"{{"jws":"{seed}"}}"#)),
        ("POST /v1/join", format!(r#"{{"{seed}":1}}"#)),
        ("POST /v1/token", seed.clone()),
    ] {
        let answer = request(&testbed, line, &body)?;
        ensure!(answer.starts_with(b"HTTP/1.1 "), "{line}: no answer");
        let found = searcher.find(&answer);
        ensure!(found.is_none(), "{line}: {found:?}: {}", String::from_utf8_lossy(&answer));
    }
    let shown = searcher.find(&all_arguments()?);
    ensure!(shown.is_none(), "a process shows {shown:?} among its arguments");

    for agent in &mut agents {
        agent.kill();
    }
    testbed.stop_discovery()?;
    files.clear();
    walk(&testbed.path(""), &mut files)?;
    let mut searched = 0_u64;
    for file in
        files.iter().filter(|file| !is_named(file, &SECRET_FILES) && !is_named(file, &BUNDLES))
    {
        let bytes = fs_err::read(file)?;
        searched += bytes.len() as u64;
        let found = searcher.find(&bytes);
        ensure!(found.is_none(), "{} holds {found:?}", file.display());
    }
    let trace = fs_err::read_to_string(testbed.path("discovery.log"))?;
    ensure!(trace.contains("TRACE"), "the log has no details");
    ensure!(searched > 1 << 20, "only {searched} bytes were searched");
    Ok(())
}

/// Returns the beginnings of texts that give access to the service: access tokens and assertions.
/// All texts of one type begin alike, up to the key id in their headers. Statements, grants and
/// documents are public.
fn token_starts() -> Secrets {
    let key = SigningKey::generate();
    let start = |typ: JwsType| {
        let text = Jws::sign(typ, &key, &serde_json::json!({}));
        (format!("a token of the type {typ:?}"), text.as_str().as_bytes()[..PART].to_vec())
    };
    [JwsType::Access, JwsType::Assertion].map(start).into()
}
