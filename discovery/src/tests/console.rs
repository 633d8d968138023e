//! Tests of the console: sign-in, rights, what pages show, and what they never do.

use std::sync::Arc;
use std::time::Duration;

use discovery_types::access::ClientKind;
use discovery_types::admin::{Admin, AdminChain, AdminOperation};
use discovery_types::api::{ConsoleLink, NackReason, NackRequest, ProbeResult, ProbesRequest};
use discovery_types::client::{DiscoveryClient, client_tls_config};
use discovery_types::key::SigningKey;
use discovery_types::problem::Code;
use discovery_types::role::Role;
use discovery_types::statement::Statement;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use super::agent::{TestAgent, form};
use super::support::{TestInstallation, WAIT_TIMEOUT, send_with, wait_for_value, wait_until};
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

/// A browser, with or without the cookie of a session. It trusts the service's own certificate.
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

/// Returns the path of a link, at whatever address the console listens.
fn path_of(link: &ConsoleLink) -> &str {
    let at = link.url.find("/sign-in/").unwrap();
    &link.url[at..]
}

/// An installation with a console, and an owner who has signed in.
struct ConsoleWorld {
    world: TestInstallation,
    service: RunningService,
    owner: DiscoveryClient,
    browser: Browser,
}

impl ConsoleWorld {
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
        ConsoleWorld { world, service, owner, browser }
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

#[tokio::test]
async fn a_link_signs_a_browser_in_once_and_looking_at_it_uses_nothing_up() {
    let world = ConsoleWorld::new().await;
    let link = world.owner.open_console().await.unwrap();
    let mut browser = Browser { cookie: None, ..world.browser.clone() };
    for method in ["GET", "HEAD", "GET"] {
        let page = browser.send(method, path_of(&link), &[("sec-fetch-site", "none")]).await;
        assert_eq!((page.status, page.header("set-cookie")), (200, None), "{page:?}");
    }
    let page = browser.sign_in(&link).await;
    assert_eq!((page.status, page.header("location")), (303, Some("/clusters")), "{page:?}");
    let cookie = page.header("set-cookie").unwrap();
    assert!(cookie.starts_with("__Host-"), "{cookie}");
    for attribute in ["; Secure", "; HttpOnly", "; SameSite=Strict", "; Path=/", "; Max-Age=28800"]
    {
        assert!(cookie.contains(attribute), "{cookie}");
    }
    assert!(!cookie.contains("Domain"), "{cookie}");
    let page = browser.get("/clusters").await;
    assert_eq!(page.status, 200, "{page:?}");
    assert!(page.body.contains("<b>owner</b>"), "{}", page.body);

    let again = Browser { cookie: None, ..browser.clone() }.sign_in(&link).await;
    assert_eq!(again.status, 401, "{again:?}");
    assert!(again.body.contains("used already"), "{}", again.body);
    assert!(again.body.contains("muster-discovery console open"), "{}", again.body);
    world.service.stop().await;
}

#[tokio::test]
async fn of_two_links_of_an_admin_the_newer_one_counts_and_none_after_its_minute() {
    let world = ConsoleWorld::new().await;
    let older = world.owner.open_console().await.unwrap();
    let newer = world.owner.open_console().await.unwrap();
    let mut browser = Browser { cookie: None, ..world.browser.clone() };
    assert_eq!(browser.sign_in(&older).await.status, 401);
    assert_eq!(browser.sign_in(&newer).await.status, 303);
    let late = world.owner.open_console().await.unwrap();
    let left = late.expires_at_ms - world.service.app().clock.micros() / 1_000;
    assert!((50_000..=60_000).contains(&left), "{left} ms");
    let mut connection = world.world.database.connect().await;
    let sql = "UPDATE console_links SET expires_us = now_us()";
    sqlx::raw_sql(sql).execute(&mut connection).await.unwrap();
    assert_eq!(browser.sign_in(&late).await.status, 401);
    world.service.stop().await;
}

#[tokio::test]
async fn of_many_requests_with_one_link_one_signs_in() {
    let world = ConsoleWorld::new().await;
    let link = world.owner.open_console().await.unwrap();
    let attempts = (0..12).map(|_| {
        let mut browser = Browser { cookie: None, ..world.browser.clone() };
        let link = &link;
        async move { browser.sign_in(link).await.status }
    });
    let mut answers = futures_util::future::join_all(attempts).await;
    answers.sort_unstable();
    assert_eq!(answers[0], 303);
    assert!(answers[1..].iter().all(|status| *status == 401), "{answers:?}");
    world.service.stop().await;
}

#[tokio::test]
async fn a_link_of_one_process_is_taken_by_another_and_so_is_its_session() {
    let world = ConsoleWorld::new().await;
    let second = start(with_console(world.world.args("ledger-2"))).await.unwrap();
    let mut there = Browser::new(&world.world, &second);
    let link = world.owner.open_console().await.unwrap();
    assert_eq!(there.sign_in(&link).await.status, 303);
    assert_eq!(there.get("/clusters").await.status, 200);
    let here = Browser { address: world.browser.address, ..there.clone() };
    assert_eq!(here.get("/clusters").await.status, 200);
    assert_eq!(here.send("POST", "/sign-out", &[SAME_ORIGIN]).await.status, 303);
    assert_eq!(there.get("/clusters").await.status, 401, "it is over everywhere");
    second.stop().await;
    world.service.stop().await;
}

#[tokio::test]
async fn a_cookie_is_no_access_token_and_an_access_token_is_no_cookie() {
    let world = ConsoleWorld::new().await;
    let cookie = world.browser.cookie.clone().unwrap();
    let secret = cookie.split_once('=').unwrap().1;
    let key = Some(&*world.world.owner);
    let bearer = format!("Bearer {secret}");
    for headers in [
        vec![("authorization", bearer.as_str())],
        vec![("cookie", cookie.as_str())],
        vec![("cookie", cookie.as_str()), ("authorization", bearer.as_str())],
    ] {
        let (status, body) = send_with(
            &world.world,
            &world.service,
            key,
            "GET",
            "/v1/clusters",
            &headers,
            String::new(),
        )
        .await;
        assert_eq!(status, 401, "{headers:?}: {body}");
    }
    let issued =
        world.service.app().issue_access_token(world.world.owner.public(), ClientKind::Admin);
    let token = issued.access_token.to_string();
    let as_cookie = format!("__Host-muster-console={token}");
    let fake = Browser { cookie: Some(as_cookie), ..world.browser.clone() };
    assert_eq!(fake.get("/clusters").await.status, 401);
    let anonymous = Browser { cookie: None, ..world.browser.clone() };
    let authorization = format!("Bearer {token}");
    let page = anonymous.send("GET", "/clusters", &[("authorization", &authorization)]).await;
    assert_eq!(page.status, 401, "{page:?}");
    // The listeners share no path.
    assert_eq!(world.browser.get("/v1/clusters").await.status, 404);
    assert_eq!(super::support::get(&world.world, &world.service, "/clusters").await.0, 404);
    world.service.stop().await;
}

#[tokio::test]
async fn each_role_reads_the_pages_whose_data_the_api_gives_it() {
    let world = ConsoleWorld::new().await;
    let (statement, agents) = world.open_cluster("demo", 2).await;
    let mut chain = AdminChain::root(world.world.owner.public());
    let paths = [
        "/".to_owned(),
        "/clusters".to_owned(),
        format!("/clusters/{}", statement.cluster),
        "/tokens".to_owned(),
        format!("/tokens/{}", agents[0].record.grant),
        "/audit".to_owned(),
        format!("/audit?cluster={}", statement.cluster),
        "/audit?cluster=demo".to_owned(),
    ];
    let mut table = String::new();
    for role in Role::ALL {
        let key = match role {
            Role::Owner => world.world.owner.clone(),
            _ => world.add_admin(&mut chain, role).await,
        };
        let client = world.world.client(&world.service, Some(&key));
        let mut browser = Browser { cookie: None, ..world.browser.clone() };
        assert_eq!(browser.sign_in(&client.open_console().await.unwrap()).await.status, 303);
        let mut cells = Vec::new();
        for path in &paths {
            cells.push(browser.get(path).await.status.to_string());
        }
        let cluster = browser.get(&paths[2]).await.body;
        let events = if cluster.contains("All events of demo") { "events" } else { "no events" };
        let nav = if cluster.contains("href=\"/audit\"") { "audit" } else { "no audit" };
        table.push_str(&format!("{role:9} {} {events}, {nav}\n", cells.join(" ")));
    }
    insta::assert_snapshot!(table, @r"
    owner     303 200 200 200 200 200 200 200 events, audit
    issuer    303 200 200 200 200 403 403 403 no events, no audit
    operator  303 200 200 200 200 200 200 200 events, audit
    auditor   303 200 200 200 200 200 200 200 events, audit
    ");
    world.service.stop().await;
}

#[tokio::test]
async fn a_revoked_admin_reads_nothing_more_and_signs_in_no_more() {
    let world = ConsoleWorld::new().await;
    let mut chain = AdminChain::root(world.world.owner.public());
    let key = world.add_admin(&mut chain, Role::Auditor).await;
    let client = world.world.client(&world.service, Some(&key));
    let mut browser = Browser { cookie: None, ..world.browser.clone() };
    browser.sign_in(&client.open_console().await.unwrap()).await;
    assert_eq!(browser.get("/audit").await.status, 200);
    let link = client.open_console().await.unwrap();

    let revoke = chain.sign_next(&world.world.owner, AdminOperation::Revoke(*key.public()));
    world.owner.put_admin(&revoke).await.unwrap();
    let page = browser.get("/audit").await;
    assert_eq!(page.status, 401, "{page:?}");
    assert!(page.body.contains("no admin any more"), "{}", page.body);
    assert_eq!(browser.get("/live/all").await.status, 401);
    let mut other = Browser { cookie: None, ..browser.clone() };
    let page = other.sign_in(&link).await;
    assert_eq!((page.status, page.header("set-cookie")), (401, None), "{page:?}");
    world.service.stop().await;
}

#[tokio::test]
async fn a_session_ends_after_its_time_in_another_history_and_beyond_the_eighth() {
    let world = ConsoleWorld::new().await;
    let mut connection = world.world.database.connect().await;
    let life: i64 =
        sqlx::query_scalar("SELECT (expires_us - begun_us) / 1000000 FROM console_sessions")
            .fetch_one(&mut connection)
            .await
            .unwrap();
    assert_eq!(life, 8 * 3_600);
    let stored: Vec<u8> = sqlx::query_scalar("SELECT cookie_hash FROM console_sessions")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    let secret = world.browser.cookie.clone().unwrap();
    let secret = secret.split_once('=').unwrap().1.to_owned();
    assert!(!stored.windows(8).any(|part| secret.as_bytes().windows(8).any(|s| s == part)));

    let mut set = async |sql: &'static str| {
        sqlx::raw_sql(sql).execute(&mut connection).await.unwrap();
    };
    set("UPDATE console_sessions SET generation = generation - 1").await;
    assert_eq!(world.browser.get("/clusters").await.status, 401, "of another history");
    set("UPDATE console_sessions SET generation = generation + 1").await;
    assert_eq!(world.browser.get("/clusters").await.status, 200);
    set("UPDATE console_sessions SET expires_us = now_us()").await;
    assert_eq!(world.browser.get("/clusters").await.status, 401, "after its time");
    set("UPDATE console_sessions SET expires_us = now_us() + 60000000").await;
    for _ in 0..8 {
        let mut browser = Browser { cookie: None, ..world.browser.clone() };
        browser.sign_in(&world.owner.open_console().await.unwrap()).await;
        assert_eq!(browser.get("/clusters").await.status, 200);
    }
    assert_eq!(world.browser.get("/clusters").await.status, 401, "the ninth of its admin");
    set("UPDATE console_sessions SET expires_us = 0; UPDATE console_links SET expires_us = 0")
        .await;
    world.service.app().store.delete_expired_console_rows().await.unwrap();
    let left: i64 = sqlx::query_scalar(
        "SELECT (SELECT count(*) FROM console_sessions) + (SELECT count(*) FROM console_links)",
    )
    .fetch_one(&mut world.world.database.connect().await)
    .await
    .unwrap();
    assert_eq!(left, 0);
    world.service.stop().await;
}

#[tokio::test]
async fn forms_of_other_sites_are_refused() {
    let world = ConsoleWorld::new().await;
    let own = format!("https://{}", world.browser.address);
    let link = world.owner.open_console().await.unwrap();
    for headers in [
        vec![("sec-fetch-site", "cross-site")],
        vec![("sec-fetch-site", "same-site"), ("origin", own.as_str())],
        vec![("sec-fetch-site", "none")],
        vec![("origin", "https://attacker.example")],
        vec![("origin", "null")],
        vec![],
    ] {
        for path in ["/sign-out", path_of(&link)] {
            let page = world.browser.send("POST", path, &headers).await;
            assert_eq!((page.status, page.header("set-cookie")), (403, None), "{headers:?}");
        }
    }
    assert_eq!(world.browser.get("/clusters").await.status, 200, "still signed in");
    let mut other = Browser { cookie: None, ..world.browser.clone() };
    assert_eq!(other.sign_in(&link).await.status, 303, "the link is still good");
    // A browser that doesn't know Fetch Metadata names its origin.
    let page = world.browser.send("POST", "/sign-out", &[("origin", &own)]).await;
    assert_eq!((page.status, page.header("location")), (303, Some("/signed-out")), "{page:?}");
    assert!(page.header("set-cookie").unwrap().contains("Max-Age=0"));
    assert_eq!(world.browser.get("/clusters").await.status, 401);
    assert_eq!(world.browser.get("/signed-out").await.status, 200);
    for path in ["/sign-out", "/clusters"] {
        let method = if path == "/sign-out" { "GET" } else { "POST" };
        assert_eq!(world.browser.send(method, path, &[SAME_ORIGIN]).await.status, 405, "{path}");
    }
    world.service.stop().await;
}

#[tokio::test]
async fn text_that_a_host_chooses_is_escaped_on_every_page() {
    let world = ConsoleWorld::new().await;
    let (statement, agents) = world.open_cluster("demo", 3).await;
    let seen = agents[0].poll_until(|seen| seen.proposal.is_some()).await;
    let proposal = seen.proposal.as_ref().unwrap();
    let result = |seat| ProbeResult {
        seat,
        reached: false,
        error: Some(ATTACK.to_owned()),
        round_trip_us: None,
    };
    let request = ProbesRequest {
        session: agents[0].session(),
        epoch: proposal.epoch,
        h: proposal.hash(),
        results: vec![result(2), result(3)],
    };
    agents[0].client.send_probe_results(statement.cluster, &request).await.unwrap();
    let path = format!("/clusters/{}", statement.cluster);
    let probed = world.browser.get(&path).await.body;
    let nack = NackRequest {
        session: agents[1].session(),
        epoch: proposal.epoch,
        h: proposal.hash(),
        reason: NackReason::Directory,
        detail: ATTACK.to_owned(),
    };
    agents[1].client.nack(statement.cluster, &nack).await.unwrap();
    let refused = world.browser.get(&path).await.body;
    let audited = world.browser.get(&format!("/audit?cluster={}", statement.cluster)).await.body;
    for (page, body) in [("probes", &probed), ("nack", &refused), ("audit", &audited)] {
        for raw in ["<script>alert", "<img", "onerror=alert(2)>", "\u{202e}"] {
            assert!(!body.contains(raw), "{page}: {raw} in {body}");
        }
    }
    let escaped = "&#60;script&#62;alert(1)&#60;/script&#62;";
    assert!(probed.contains(escaped), "{probed}");
    assert!(refused.contains(escaped), "{refused}");
    // Filters and searches come back in the page, too.
    for path in [
        "/clusters?name=%22%3E%3Cscript%3Ealert(1)",
        "/clusters?state=%3Cscript%3E",
        "/audit?cluster=%3Cscript%3Ealert(1)",
        "/%3Cscript%3Ealert(1)",
    ] {
        let page = world.browser.get(path).await;
        assert!(!page.body.contains("<script>alert"), "{path}: {}", page.body);
    }
    world.service.stop().await;
}

/// Returns a hash over all rows of all tables, except of those that processes write on their own.
async fn hash_of_database(world: &TestInstallation) -> String {
    let mut connection = world.database.connect().await;
    let tables: Vec<String> = sqlx::query_scalar(
        "SELECT tablename::text FROM pg_tables WHERE schemaname = 'public'
             AND tablename NOT IN ('processes') ORDER BY 1",
    )
    .fetch_all(&mut connection)
    .await
    .unwrap();
    let mut hashes = String::new();
    for table in tables {
        let sql = format!(
            "SELECT md5(coalesce(string_agg(t::text, '|' ORDER BY t::text), '')) FROM {table} t"
        );
        let hash: String =
            sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).fetch_one(&mut connection).await.unwrap();
        hashes.push_str(&format!("{table} {hash}\n"));
    }
    hashes
}

#[tokio::test]
async fn no_get_changes_anything_and_every_response_has_the_headers() {
    let world = ConsoleWorld::with_args(|mut args| {
        // No sweep may write between the two looks at the database.
        args.times.sweep = Duration::from_secs(3_600);
        args
    })
    .await;
    let (statement, mut agents) = world.open_cluster("demo", 1).await;
    form(&mut agents).await;
    let link = world.owner.open_console().await.unwrap();
    let list = world.browser.get("/clusters").await.body;
    let style = list.split('"').find(|part| part.ends_with("console.css")).unwrap().to_owned();
    let id = statement.cluster;
    let paths = [
        ("/".to_owned(), 303),
        ("/clusters".to_owned(), 200),
        ("/clusters?name=demo&state=all".to_owned(), 200),
        (format!("/clusters/{id}"), 200),
        (format!("/clusters/{}", uuid::Uuid::now_v7()), 404),
        ("/clusters/x".to_owned(), 404),
        ("/clusters?limit=5".to_owned(), 400),
        ("/tokens".to_owned(), 200),
        (format!("/tokens?cluster={id}"), 200),
        (format!("/tokens/{}", agents[0].record.grant), 200),
        ("/audit".to_owned(), 200),
        ("/audit?before=2".to_owned(), 200),
        (format!("/audit?cluster={id}"), 200),
        (path_of(&link).to_owned(), 200),
        ("/signed-out".to_owned(), 200),
        ("/nothing".to_owned(), 404),
        (style.clone(), 200),
        ("/assets/x.css".to_owned(), 404),
    ];
    let before = hash_of_database(&world.world).await;
    for (path, status) in &paths {
        for method in ["GET", "HEAD"] {
            let page = world.browser.send(method, path, &[]).await;
            assert_eq!(page.status, *status, "{method} {path}: {page:?}");
            let policy = page.header("content-security-policy").unwrap();
            for part in [
                "default-src 'none'",
                "style-src 'self'",
                "script-src 'self'",
                "img-src 'self'",
                "connect-src 'self'",
                "form-action 'self'",
                "frame-ancestors 'none'",
                "base-uri 'none'",
            ] {
                assert!(policy.split("; ").any(|found| found == part), "{policy}");
            }
            assert!(!policy.contains("unsafe"), "{policy}");
            assert_eq!(page.header("x-content-type-options"), Some("nosniff"), "{path}");
            assert_eq!(page.header("referrer-policy"), Some("no-referrer"), "{path}");
            assert_eq!(page.header("set-cookie"), None, "{path}");
            let stored = page.header("cache-control").unwrap();
            assert_eq!(stored == "no-store", *path != style, "{path}: {stored}");
            assert!(!page.body.contains("style=") && !page.body.contains("onclick"), "{path}");
        }
    }
    assert_eq!(hash_of_database(&world.world).await, before);
    world.service.stop().await;
}

/// A stream of server-sent events.
struct EventStream {
    stream: TlsStream<TcpStream>,
    received: String,
}

impl EventStream {
    async fn open(browser: &Browser, path: &str) -> Self {
        let mut stream = browser.connect().await;
        stream.write_all(browser.request("GET", path, &[]).as_bytes()).await.unwrap();
        EventStream { stream, received: String::new() }
    }

    /// Reads until what was received satisfies `wanted`, or the stream ends. Returns whether it ended.
    async fn read_until(&mut self, wanted: impl Fn(&str) -> bool) -> bool {
        let read = async {
            while !wanted(&self.received) {
                let mut part = [0; 4_096];
                match self.stream.read(&mut part).await {
                    Ok(0) | Err(_) => return true,
                    Ok(read) => self.received.push_str(&String::from_utf8_lossy(&part[..read])),
                }
            }
            false
        };
        tokio::time::timeout(WAIT_TIMEOUT, read).await.expect("the stream says nothing")
    }

    /// Reads everything that comes within this time.
    async fn read_for(&mut self, time: Duration) {
        let read = async {
            let mut part = [0; 4_096];
            while let Ok(read @ 1..) = self.stream.read(&mut part).await {
                self.received.push_str(&String::from_utf8_lossy(&part[..read]));
            }
        };
        let _ = tokio::time::timeout(time, read).await;
    }

    fn events(text: &str) -> usize {
        text.matches("event: changed").count()
    }
}

#[tokio::test]
async fn a_stream_says_that_its_cluster_has_changed_and_ends_with_the_process() {
    let world = ConsoleWorld::with_args(|mut args| {
        args.times.sweep = Duration::from_secs(3_600);
        args
    })
    .await;
    let statement = world.world.cluster(&world.owner, "demo", 3).await;
    let other = world.world.cluster(&world.owner, "other", 3).await;
    // The service itself wakes all pages when it begins to listen to the database.
    let (live, mut stream) = wait_for_value("a page that nothing changes", async || {
        let page = world.browser.get(&format!("/clusters/{}", statement.cluster)).await.body;
        let live = page.split('"').find(|part| part.starts_with("/live/")).unwrap().to_owned();
        let mut stream = EventStream::open(&world.browser, &live).await;
        stream.read_for(Duration::from_millis(500)).await;
        (EventStream::events(&stream.received) == 0).then_some((live, stream))
    })
    .await;
    assert!(stream.received.contains("text/event-stream"), "{}", stream.received);
    assert!(stream.received.contains("retry:"), "{}", stream.received);

    let other_token = world.world.token(&world.owner, &other).await;
    let agent = TestAgent::new(&world.world, &world.service, &other, &other_token, 7);
    agent.redeem().await.unwrap();
    stream.read_for(Duration::from_millis(1_500)).await;
    let events = EventStream::events(&stream.received);
    assert_eq!(events, 0, "a change of another cluster wakes other pages alone");

    let token = world.world.token(&world.owner, &statement).await;
    let started = std::time::Instant::now();
    for number in 1..=3 {
        TestAgent::new(&world.world, &world.service, &statement, &token, number)
            .redeem()
            .await
            .unwrap();
    }
    stream.read_until(|text| EventStream::events(text) >= 1).await;
    stream.read_for(Duration::from_millis(2_500)).await;
    let most = 1 + started.elapsed().as_secs() as usize;
    assert!(EventStream::events(&stream.received) <= most, "{}", stream.received);

    // A page that was read before the changes is told so at once.
    let mut late = EventStream::open(&world.browser, &live).await;
    late.read_until(|text| EventStream::events(text) == 1).await;
    world.service.stop().await;
    assert!(stream.read_until(|_| false).await, "the stream ends");
}

#[tokio::test]
async fn a_session_has_few_streams_and_a_closed_page_frees_its_own() {
    let world = ConsoleWorld::new().await;
    let taken = || world.service.app().console.as_ref().unwrap().stream_slots.taken();
    let mut streams = Vec::new();
    for _ in 0..8 {
        let mut stream = EventStream::open(&world.browser, "/live/all").await;
        stream.read_until(|text| text.contains("retry:")).await;
        streams.push(stream);
    }
    assert_eq!(taken(), 8);
    let page = world.browser.get("/live/all").await;
    assert_eq!(page.status, 503, "{page:?}");
    assert!(page.header("retry-after").is_some(), "{page:?}");
    let mut other = Browser { cookie: None, ..world.browser.clone() };
    other.sign_in(&world.owner.open_console().await.unwrap()).await;
    let mut stream = EventStream::open(&other, "/live/all").await;
    stream.read_until(|text| text.contains("retry:")).await;
    drop((streams, stream));
    // A change makes the service write to the streams, which notices the closed ones.
    wait_until("closed pages free their streams", async || {
        world.service.app().notifier.wake_all();
        taken() == 0
    })
    .await;
    world.service.stop().await;
}

#[tokio::test]
async fn pages_of_errors_say_what_to_do() {
    let world = ConsoleWorld::new().await;
    let anonymous = Browser { cookie: None, ..world.browser.clone() };
    for path in ["/", "/clusters", "/tokens", "/audit", "/live/all"] {
        let page = anonymous.get(path).await;
        assert_eq!(page.status, 401, "{path}");
        assert!(page.body.contains("muster-discovery console open"), "{}", page.body);
        assert!(page.header("www-authenticate").is_some());
    }
    let page = world.browser.get("/clusters/nothing").await;
    assert_eq!(page.status, 404);
    assert!(page.body.contains("<h1>No such page</h1>"), "{}", page.body);
    world.world.database.remove().await;
    let page = world.browser.get("/clusters").await;
    assert_eq!(page.status, 503, "{page:?}");
    assert!(page.header("retry-after").is_some() && page.body.contains("<h1>Try again soon</h1>"));
    world.service.stop().await;
}

#[tokio::test]
async fn a_process_without_a_console_makes_no_links() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let error = world.owner(&service).open_console().await.unwrap_err();
    assert_eq!(error.code(), Some(Code::NotFound));
    assert!(error.to_string().contains("--console-listen"), "{error}");
    service.stop().await;
}

#[tokio::test]
async fn an_address_over_its_rate_limit_gets_a_page_that_says_so() {
    let world = ConsoleWorld::with_args(|mut args| {
        (args.limits.rate, args.limits.burst) = (1, 12);
        args
    })
    .await;
    let mut limited = None;
    for _ in 0..200 {
        let page = world.browser.get("/signed-out").await;
        if page.status == 429 {
            limited = Some(page);
            break;
        }
    }
    let page = limited.expect("a request beyond the limit");
    assert!(page.body.contains("<h1>Too many requests</h1>"), "{}", page.body);
    assert!(page.header("content-security-policy").is_some());
    world.service.stop().await;
}

#[tokio::test]
async fn a_running_clusters_page_shows_its_members_and_a_refused_sign_in_is_an_event() {
    let world = ConsoleWorld::new().await;
    let (statement, mut agents) = world.open_cluster("demo", 2).await;
    form(&mut agents).await;
    let page = world.browser.get(&format!("/clusters/{}", statement.cluster)).await.body;
    for text in ["node-1", "node-2", "Members of demo", "2 of 2 hosts signed the list", "committed"]
    {
        assert!(page.contains(text), "{text}: {page}");
    }
    let tokens = world.browser.get("/tokens").await.body;
    for text in ["boot token", "node-1", "node-2", "owner"] {
        assert!(tokens.contains(text), "{text}: {tokens}");
    }
    assert!(!tokens.contains("mst_"), "no secret");
    let link = world.owner.open_console().await.unwrap();
    let mut browser = Browser { cookie: None, ..world.browser.clone() };
    browser.sign_in(&link).await;
    browser.sign_in(&link).await;
    world.service.app().write_refusals().await;
    let audit = world.browser.get("/audit").await.body;
    for text in ["console_link", "console_sign_in", "/sign-in/{code}", "127.0.0.1"] {
        assert!(audit.contains(text), "{text}: {audit}");
    }
    let code = path_of(&link).rsplit('/').next().unwrap();
    assert!(!audit.contains(code), "the link's code is in no event");
    world.service.stop().await;
}

#[tokio::test]
async fn the_console_shows_the_operators_certificate() {
    use std::os::unix::fs::PermissionsExt;
    let world = TestInstallation::new().await;
    let key = rcgen::KeyPair::generate().unwrap();
    let made = rcgen::CertificateParams::new(vec!["127.0.0.1".into()]).unwrap();
    let certificate = made.self_signed(&key).unwrap();
    let (cert_file, key_file) =
        (world.folder.path().join("console.pem"), world.folder.path().join("console.key"));
    std::fs::write(&cert_file, certificate.pem()).unwrap();
    std::fs::write(&key_file, key.serialize_pem()).unwrap();
    let mut args = with_console(world.args("ledger"));
    args.console.console_cert = Some(cert_file);
    args.console.console_key = Some(key_file.clone());
    args.console.console_url = Some("https://console.example.org".parse().unwrap());
    let mode = |mode| {
        std::fs::set_permissions(&key_file, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    mode(0o644);
    let refused = start(args.clone()).await.err().unwrap();
    assert_eq!(refused.exit_code(), 2);
    assert!(refused.to_string().contains("chmod 600"), "{refused}");
    mode(0o600);
    let service = start(args).await.unwrap();
    let link = world.owner(&service).open_console().await.unwrap();
    assert!(link.url.starts_with("https://console.example.org:443/sign-in/"), "{}", link.url);
    let expected = discovery_types::digest::Digest::of(certificate.der());
    assert_eq!((link.certificate, link.is_own_certificate), (expected, false));
    let mut browser = Browser::new(&world, &service);
    let pin = discovery_types::tls::spki_hash(certificate.der()).unwrap();
    browser.tls = Arc::new(client_tls_config(&[pin], None));
    assert_eq!(browser.sign_in(&link).await.status, 303);
    service.stop().await;
}

/// Returns the files below `folder` that name the console's module.
fn callers_of_the_console(folder: &std::path::Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let source = env!("CARGO_MANIFEST_DIR").to_owned() + "/src/";
        let name = path.to_str().unwrap().trim_start_matches(&source).to_owned();
        match path.is_dir() {
            true if ["console", "tests"].contains(&name.as_str()) => {}
            true => callers_of_the_console(&path, found),
            false => {
                let text = std::fs::read_to_string(&path).unwrap_or_default();
                found.extend(text.contains("crate::console").then_some(name));
            }
        }
    }
}

#[test]
fn nothing_but_the_listener_calls_the_console() {
    let mut found = Vec::new();
    callers_of_the_console(
        &std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src"),
        &mut found,
    );
    assert_eq!(found, ["server/door.rs"]);
}
