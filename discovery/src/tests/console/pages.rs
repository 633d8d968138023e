//! Contents of pages, who may read them, and what pages never do.

use std::time::Duration;

use discovery_types::admin::AdminChain;
use discovery_types::api::{NackReason, NackRequest, ProbeResult, ProbesRequest};
use discovery_types::role::Role;

use super::super::agent::form;
use super::super::support::TestInstallation;
use super::{ATTACK, Browser, ConsoleFixture, path_of};

#[tokio::test]
async fn each_role_reads_the_pages_whose_data_the_api_gives_it() {
    let world = ConsoleFixture::new().await;
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
async fn text_that_a_host_chooses_is_escaped_on_every_page() {
    let world = ConsoleFixture::new().await;
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
    // Pages and errors also repeat filters and searched names, which must be escaped, too.
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
    let world = ConsoleFixture::with_args(|mut args| {
        // No sweep may write between the two reads of the database that this test compares.
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

#[tokio::test]
async fn pages_of_errors_say_what_to_do() {
    let world = ConsoleFixture::new().await;
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
async fn an_address_over_its_rate_limit_gets_a_page_that_says_so() {
    let world = ConsoleFixture::with_args(|mut args| {
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
    let world = ConsoleFixture::new().await;
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
    assert_eq!(found, ["server/accept.rs"]);
}
