//! Every route of the console with every kind of visitor, as the running service answers.
//!
//! In the table, `yes` means that the page was shown or the form was accepted, and `-` that it was
//! refused. A visitor signs in by a link. In the line of `POST /sign-in/{code}`, `nobody` and
//! `guess` have a random code. `late` has a link whose time is over, and the others have a link of
//! their own.

use std::collections::BTreeSet;

use tokio::io::AsyncReadExt;

use super::*;
use crate::tests::rights::{RightsRow, format_rights};

/// Method and path of each route, in the order of the requests. The last routes end sessions. The
/// streams below `/live` have no HEAD.
const ROUTES: [(&str, &str); 13] = [
    ("GET", "/"),
    ("GET", "/clusters"),
    ("GET", "/clusters/{id}"),
    ("GET", "/tokens"),
    ("GET", "/tokens/{id}"),
    ("GET", "/audit"),
    ("GET", "/live/all"),
    ("GET", "/live/{id}"),
    ("GET", "/signed-out"),
    ("GET", "/assets/{name}"),
    ("GET", "/sign-in/{code}"),
    ("POST", "/sign-in/{code}"),
    ("POST", "/sign-out"),
];

/// A visitor with its cookie, and the code of its sign-in link.
struct RightsVisitor {
    name: &'static str,
    browser: Browser,
    code: String,
}

/// Returns a code or a cookie's secret that nobody was given.
fn random_secret() -> String {
    crate::domain::BrowserSecret::generate().expose_text().to_string()
}

/// Signs an admin in, and makes another link for it.
async fn signed_in(
    world: &ConsoleFixture,
    name: &'static str,
    admin: &DiscoveryClient,
) -> RightsVisitor {
    let mut browser = Browser { cookie: None, ..world.browser.clone() };
    assert_eq!(browser.sign_in(&admin.open_console().await.unwrap()).await.status, 303);
    let link = admin.open_console().await.unwrap();
    let code = path_of(&link).rsplit('/').next().unwrap().to_owned();
    RightsVisitor { name, browser, code }
}

/// Makes a visitor of each kind.
async fn visitors(world: &ConsoleFixture) -> Vec<RightsVisitor> {
    let mut chain = AdminChain::root(world.world.owner.public());
    let anonymous = Browser { cookie: None, ..world.browser.clone() };
    let cookie = Some(format!("__Host-muster-console={}", random_secret()));
    let guess = Browser { cookie, ..anonymous.clone() };
    let mut visitors = vec![
        RightsVisitor { name: "nobody", browser: anonymous, code: random_secret() },
        RightsVisitor { name: "guess", browser: guess, code: random_secret() },
    ];
    for (name, role) in [
        ("late", Role::Owner),
        ("revoked", Role::Owner),
        ("auditor", Role::Auditor),
        ("issuer", Role::Issuer),
        ("operator", Role::Operator),
    ] {
        let key = Arc::new(SigningKey::generate());
        let admin = Admin { key: *key.public(), name: name.parse().unwrap(), roles: vec![role] };
        let add = chain.sign_next(&world.world.owner, AdminOperation::Add(admin));
        world.owner.put_admin(&add).await.unwrap();
        chain.append(&add).unwrap();
        let client = world.world.client(&world.service, Some(&key));
        visitors.push(signed_in(world, name, &client).await);
        if name == "late" {
            let mut database = world.world.database.connect().await;
            for table in ["console_sessions", "console_links"] {
                let sql = format!("UPDATE {table} SET expires_us = now_us() WHERE admin_key = $1");
                let done = sqlx::query(sqlx::AssertSqlSafe(sql)).bind(&key.public().as_bytes()[..]);
                assert_eq!(done.execute(&mut database).await.unwrap().rows_affected(), 1);
            }
        }
        if name == "revoked" {
            let revoke = chain.sign_next(&world.world.owner, AdminOperation::Revoke(*key.public()));
            world.owner.put_admin(&revoke).await.unwrap();
            chain.append(&revoke).unwrap();
        }
    }
    visitors.push(signed_in(world, "owner", &world.owner).await);
    visitors
}

/// Sends a request, and reads only the head of the answer: a stream has no end.
async fn status(browser: &Browser, method: &str, path: &str) -> u16 {
    let mut stream = browser.connect().await;
    let request = browser.request(method, path, &[SAME_ORIGIN]);
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut head = [0; 12];
    stream.read_exact(&mut head).await.unwrap();
    let head = std::str::from_utf8(&head).unwrap();
    head.strip_prefix("HTTP/1.1 ").unwrap().parse().unwrap()
}

/// The table has every route: the test counts the resources that the console's source registers.
#[tokio::test]
async fn each_page_is_shown_to_the_visitors_that_it_is_for() {
    let resources = include_str!("../../console/mod.rs").matches("page_at(").count();
    let paths: BTreeSet<&str> = ROUTES.iter().map(|(_, path)| *path).collect();
    assert_eq!(resources - 1, paths.len(), "a route of the console is not in this test's table");

    let world = ConsoleFixture::new().await;
    let (statement, agents) = world.open_cluster("demo", 2).await;
    let visitors = visitors(&world).await;
    let page = world.browser.get("/clusters").await.body;
    let style = page.split("href=\"/assets/").nth(1).unwrap().split('"').next().unwrap();
    let mut rows = Vec::new();
    for (method, pattern) in ROUTES {
        let mut cells = Vec::new();
        for visitor in &visitors {
            let id = match pattern {
                "/tokens/{id}" => agents[0].record.grant.to_string(),
                _ => statement.cluster.to_string(),
            };
            let path = pattern.replace("{id}", &id).replace("{name}", style);
            let path = path.replace("{code}", &visitor.code);
            let answered = status(&visitor.browser, method, &path).await;
            if method == "GET" && !pattern.starts_with("/live/") {
                let head = status(&visitor.browser, "HEAD", &path).await;
                assert_eq!(head, answered, "HEAD {pattern} of {}", visitor.name);
            }
            cells.push(match answered {
                200 | 303 => "yes",
                401 | 403 => "-",
                other => panic!("{method} {pattern} of {}: {other}", visitor.name),
            });
        }
        rows.push(RightsRow { method: method.into(), path: pattern.into(), cells });
    }
    let names: Vec<&str> = visitors.iter().map(|visitor| visitor.name).collect();
    insta::assert_snapshot!(format_rights(&names, rows));
    world.service.stop().await;
}
