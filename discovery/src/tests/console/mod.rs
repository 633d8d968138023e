//! Tests of the console: sign-in, rights, contents of pages, and what pages never do.

mod pages;
mod rights;
mod sign_in;
mod streams;

use std::sync::Arc;

use discovery_types::admin::{Admin, AdminChain, AdminOperation};
use discovery_types::api::ConsoleLink;
use discovery_types::client::{DiscoveryClient, client_tls_config};
use discovery_types::key::SigningKey;
use discovery_types::role::Role;
use discovery_types::statement::Statement;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use super::agent::TestAgent;
use super::support::TestInstallation;
use crate::server::{RunningService, ServeArgs, start};

/// Text that would run as a script if a page didn't escape it. It also turns the writing direction.
const ATTACK: &str = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\u{202e}";

/// Header by which a browser says that a request comes from a page of the same origin.
const SAME_ORIGIN: (&str, &str) = ("sec-fetch-site", "same-origin");

fn with_console(mut args: ServeArgs) -> ServeArgs {
    args.console.console_listen = vec!["127.0.0.1:0".parse().unwrap()];
    args
}

/// A response as a browser gets it.
#[derive(Debug)]
struct Page {
    status: u16,
    head: String,
    body: String,
}

impl Page {
    fn parse(text: &str) -> Self {
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Page { status, head: head.to_owned(), body: body.to_owned() }
    }

    fn header(&self, name: &str) -> Option<&str> {
        let mut pairs = self.head.lines().filter_map(|line| line.split_once(':'));
        pairs.find(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
    }
}

/// A browser, with or without the cookie of a session. The browser trusts the service's own
/// certificate.
#[derive(Clone)]
struct Browser {
    address: std::net::SocketAddr,
    tls: Arc<rustls::ClientConfig>,
    cookie: Option<String>,
}

impl Browser {
    fn new(world: &TestInstallation, service: &RunningService) -> Self {
        Browser {
            address: service.console_addresses[0],
            tls: Arc::new(client_tls_config(&world.context.pins, None)),
            cookie: None,
        }
    }

    async fn connect(&self) -> TlsStream<TcpStream> {
        let connector = tokio_rustls::TlsConnector::from(self.tls.clone());
        let socket = TcpStream::connect(self.address).await.unwrap();
        let name = rustls::pki_types::ServerName::try_from("127.0.0.1").unwrap();
        connector.connect(name, socket).await.unwrap()
    }

    fn request(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> String {
        let mut text =
            format!("{method} {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n", self.address);
        if let Some(cookie) = &self.cookie {
            text.push_str(&format!("cookie: other=1; {cookie}\r\n"));
        }
        for (name, value) in headers {
            text.push_str(&format!("{name}: {value}\r\n"));
        }
        text.push_str("content-length: 0\r\n\r\n");
        text
    }

    async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> Page {
        let mut stream = self.connect().await;
        stream.write_all(self.request(method, path, headers).as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        Page::parse(&String::from_utf8(answer).unwrap())
    }

    async fn get(&self, path: &str) -> Page {
        self.send("GET", path, &[]).await
    }

    /// Opens a sign-in link and presses its button. Keeps the cookie.
    async fn sign_in(&mut self, link: &ConsoleLink) -> Page {
        let page = self.send("POST", path_of(link), &[SAME_ORIGIN]).await;
        let cookie = page.header("set-cookie").and_then(|value| value.split(';').next());
        self.cookie = cookie.map(str::to_owned).or(self.cookie.take());
        page
    }
}

/// Returns the path of a sign-in link, without the console's address.
fn path_of(link: &ConsoleLink) -> &str {
    let at = link.url.find("/sign-in/").unwrap();
    &link.url[at..]
}

/// An installation with a console, and an owner who has signed in.
struct ConsoleFixture {
    world: TestInstallation,
    service: RunningService,
    owner: DiscoveryClient,
    browser: Browser,
}

impl ConsoleFixture {
    async fn new() -> Self {
        Self::with_args(|args| args).await
    }

    async fn with_args(change: impl FnOnce(ServeArgs) -> ServeArgs) -> Self {
        let world = TestInstallation::new().await;
        let service = start(with_console(change(world.args("ledger")))).await.unwrap();
        let owner = world.owner(&service);
        let mut browser = Browser::new(&world, &service);
        let page = browser.sign_in(&owner.open_console().await.unwrap()).await;
        assert_eq!(page.status, 303, "{page:?}");
        ConsoleFixture { world, service, owner, browser }
    }

    /// Adds an admin with this role. Returns its key.
    async fn add_admin(&self, chain: &mut AdminChain, role: Role) -> Arc<SigningKey> {
        let key = Arc::new(SigningKey::generate());
        let name = role.as_str().parse().unwrap();
        let admin = Admin { key: *key.public(), name, roles: vec![role] };
        let add = chain.sign_next(&self.world.owner, AdminOperation::Add(admin));
        self.owner.put_admin(&add).await.unwrap();
        chain.append(&add).unwrap();
        key
    }

    /// Opens a cluster of this size with agents that have redeemed its token.
    async fn open_cluster(&self, name: &str, size: u8) -> (Statement, Vec<TestAgent>) {
        let statement = self.world.cluster(&self.owner, name, size).await;
        let token = self.world.token(&self.owner, &statement).await;
        let agent = |number| TestAgent::new(&self.world, &self.service, &statement, &token, number);
        let agents: Vec<TestAgent> = (1..=u16::from(size)).map(agent).collect();
        for agent in &agents {
            agent.redeem().await.unwrap();
        }
        (statement, agents)
    }
}
