//! Sign-in links and sessions: who gets one, how long it counts, and what ends it.

use std::sync::Arc;

use discovery_types::access::ClientKind;
use discovery_types::admin::{AdminChain, AdminOperation};
use discovery_types::client::client_tls_config;
use discovery_types::problem::Code;
use discovery_types::role::Role;

use super::super::support::{TestInstallation, get, send_with};
use super::{Browser, ConsoleFixture, SAME_ORIGIN, path_of, with_console};
use crate::server::start;

#[tokio::test]
async fn a_link_signs_a_browser_in_once_and_looking_at_it_uses_nothing_up() {
    let world = ConsoleFixture::new().await;
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
    let world = ConsoleFixture::new().await;
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
    let world = ConsoleFixture::new().await;
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
    let world = ConsoleFixture::new().await;
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
    let world = ConsoleFixture::new().await;
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
    // The console's listener doesn't serve the API's paths, and the API's listener doesn't serve
    // the console's paths.
    assert_eq!(world.browser.get("/v1/clusters").await.status, 404);
    assert_eq!(get(&world.world, &world.service, "/clusters").await.0, 404);
    world.service.stop().await;
}

#[tokio::test]
async fn a_revoked_admin_reads_nothing_more_and_signs_in_no_more() {
    let world = ConsoleFixture::new().await;
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
    let world = ConsoleFixture::new().await;
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
    let world = ConsoleFixture::new().await;
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
    // A browser without Fetch Metadata sends the header `Origin`.
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
async fn a_process_without_a_console_makes_no_links() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let error = world.owner(&service).open_console().await.unwrap_err();
    assert_eq!(error.code(), Some(Code::NotFound));
    assert!(error.to_string().contains("--console-listen"), "{error}");
    service.stop().await;
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
    assert_eq!((link.certificate_sha256, link.uses_service_certificate), (expected, false));
    let mut browser = Browser::new(&world, &service);
    let pin = discovery_types::tls::spki_hash(certificate.der()).unwrap();
    browser.tls = Arc::new(client_tls_config(&[pin], None));
    assert_eq!(browser.sign_in(&link).await.status, 303);
    service.stop().await;
}
