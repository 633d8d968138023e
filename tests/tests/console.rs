//! The console in a real browser: with and without scripts, by keyboard, in the light and the dark
//! color scheme, and for screen readers.
//!
//! With the environment variable `MUSTER_SCREENS`, the test writes pictures of the pages into that
//! folder. `scripts/console-screens` makes the pictures of the manual in this way. With `AXE`, the
//! path of axe-core's script, that script checks each page, too.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use discovery_types::context::Context as ServiceContext;
use muster_tests::harness::agents::AgentOptions;
use muster_tests::harness::browser::find_chromium;
use muster_tests::harness::skip::report_skip;
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{AgentProcess, Browser, Network, Testbed};
use serde_json::Value;

const FORMATION_LIMIT: Duration = Duration::from_secs(90);
const PORT: u16 = 9443;

/// Script that returns the faults of a page, such as a missing title. It needs no library.
const CHECK: &str = include_str!("console/check.js");
/// Script that hides a page and shows it again. It counts the timers that run each time.
const HIDDEN: &str = include_str!("console/hidden.js");

/// A service with a console, and a browser that trusts it.
struct ConsoleBed {
    testbed: Testbed,
    browser: Browser,
    axe: Option<String>,
    screens: Option<PathBuf>,
}

impl ConsoleBed {
    /// Starts the service and the browser. Without a browser, records that the test is skipped and
    /// returns `None`.
    fn start(hosts: u8) -> Result<Option<Self>> {
        let Some(program) = find_chromium() else {
            report_skip(
                "no Chromium on this machine: install one (Debian: chromium), or name its path in \
                 the environment variable CHROMIUM",
            );
            return Ok(None);
        };
        let network = Network::loopback(hosts);
        let mut options = TestbedOptions::default();
        let listen = format!("{}:{PORT}", network.hub.address);
        options.serve_args.extend(["--console-listen".to_owned(), listen]);
        let testbed = Testbed::start(network, options)?;
        let context: ServiceContext = fs_err::read_to_string(testbed.path("context"))?.parse()?;
        let browser = Browser::start(&program, &testbed.path("browser"), &context.pins[0])?;
        let axe = match std::env::var_os("AXE").filter(|path| !path.is_empty()) {
            Some(path) => Some(fs_err::read_to_string(PathBuf::from(path))?),
            None => None,
        };
        let screens = std::env::var_os("MUSTER_SCREENS").filter(|path| !path.is_empty());
        Ok(Some(Self { testbed, browser, axe, screens: screens.map(PathBuf::from) }))
    }

    fn url(&self, path: &str) -> String {
        format!("https://{}:{PORT}{path}", self.testbed.network.hub.address)
    }

    /// Makes a sign-in link as an admin does.
    fn link(&self, extra: &[&str]) -> Result<String> {
        let arguments = [&["console", "open"], extra].concat();
        Ok(self.testbed.admin_command(&arguments)?.trim().to_owned())
    }

    /// Signs in with the keyboard alone, and waits for the next page.
    fn sign_in(&mut self, extra: &[&str]) -> Result<String> {
        let link = self.link(extra)?;
        self.browser.open(&link)?;
        self.check("sign-in")?;
        self.browser.press("Tab")?;
        self.browser.wait_for("the skip link", "document.activeElement.matches('.skip')")?;
        for _ in 0..4 {
            if self.browser.evaluate("document.activeElement.matches('main button')")? == true {
                break;
            }
            self.browser.press("Tab")?;
        }
        self.browser.press("Enter")?;
        self.browser.wait_for("the page after the sign-in", "document.querySelector('.who')")?;
        Ok(link)
    }

    /// Checks the page in the light and the dark color scheme, and keeps pictures of it.
    fn check(&mut self, name: &str) -> Result<()> {
        for scheme in ["light", "dark"] {
            self.browser.prefer_colors(scheme)?;
            let faults = self.browser.evaluate(CHECK)?;
            ensure!(faults == Value::Array(Vec::new()), "{name}, {scheme}: {faults:#}");
            if let Some(axe) = self.axe.clone() {
                self.browser.evaluate(&format!("{axe}; true"))?;
                let run = "axe.run(document, { resultTypes: ['violations'] }).then((found) => \
                           found.violations.map((v) => [v.id, v.help, v.nodes.map((n) => n.html)]))";
                let faults = self.browser.evaluate(run)?;
                ensure!(faults == Value::Array(Vec::new()), "axe: {name}, {scheme}: {faults:#}");
            }
            if let Some(folder) = &self.screens {
                let picture = self.browser.screenshot()?;
                fs_err::write(folder.join(format!("console-{name}-{scheme}.png")), picture)?;
            }
        }
        // A narrow window must show the same page without faults.
        self.browser.resize(400, 860)?;
        let faults = self.browser.evaluate(CHECK)?;
        ensure!(faults == Value::Array(Vec::new()), "{name}, narrow: {faults:#}");
        self.browser.resize(1280, 860)?;
        self.browser.prefer_colors("light")
    }

    /// Starts the agent of a host, with a realistic host name.
    fn start_agent(&self, index: usize, bundle: &Path) -> Result<AgentProcess> {
        let name = format!("db-{}", index + 1);
        let args = vec!["--name".to_owned(), name];
        let options = AgentOptions { args, ..AgentOptions::default() };
        let mut agent = self.testbed.agent_with(index, bundle, options);
        agent.start()?;
        Ok(agent)
    }

    fn open(&mut self, path: &str) -> Result<()> {
        let url = self.url(path);
        self.browser.open(&url)
    }

    fn ensure_text(&mut self, wanted: &[&str]) -> Result<()> {
        let text = self.browser.text()?;
        for part in wanted {
            ensure!(text.contains(part), "{part:?} is not on the page:\n{text}");
        }
        Ok(())
    }
}

/// Checks all pages except the cluster's page, some of them without scripts.
fn visit_other_pages(bed: &mut ConsoleBed, id: &str) -> Result<()> {
    bed.open("/clusters?state=all")?;
    bed.check("clusters")?;
    bed.open("/tokens")?;
    bed.ensure_text(&["boot token", "owner", "db-1"])?;
    bed.check("tokens")?;
    let token = "document.querySelector('tbody th a').getAttribute('href')";
    let token = bed.browser.evaluate(token)?;
    bed.open(token.as_str().context("a token's path")?)?;
    bed.check("token")?;
    bed.open(&format!("/audit?cluster={id}"))?;
    bed.ensure_text(&["frozen", "committed", "formed", "db-3"])?;
    bed.check("audit")?;

    // The list of clusters, a cluster's page and the audit page must also work without scripts.
    bed.browser.set_scripts_enabled(false)?;
    for path in ["/clusters".to_owned(), format!("/clusters/{id}"), "/audit".to_owned()] {
        bed.open(&path)?;
        bed.ensure_text(&["Reload", "owner", "Sign out"])?;
    }
    bed.browser.set_scripts_enabled(true)?;
    Ok(())
}

#[test]
fn an_admin_watches_a_cluster_form_in_a_browser() -> Result<()> {
    let Some(mut bed) = ConsoleBed::start(3)? else { return Ok(()) };
    bed.open("/clusters")?;
    bed.ensure_text(&["This browser isn't signed in", "muster-discovery console open"])?;
    bed.check("not-signed-in")?;
    let bundle = bed.testbed.create_cluster_with_token("orders", 3)?;
    bed.testbed.create_cluster("billing", 3, &[])?;
    bed.testbed.create_cluster("sessions", 5, &[])?;
    let mut agents = vec![bed.start_agent(0, &bundle)?, bed.start_agent(1, &bundle)?];

    let link = bed.sign_in(&[])?;
    bed.ensure_text(&["Clusters", "orders", "billing", "owner"])?;
    bed.browser
        .wait_for("two seats", "document.querySelector('main').innerText.includes('2/3')")?;
    bed.browser.open(&link)?;
    bed.browser.evaluate("document.querySelector('main button').click()")?;
    bed.browser.wait_for("a refusal", "document.body.innerText.includes('used already')")?;

    // The cluster's page must update itself, and keep the keyboard focus.
    let orders = bed.testbed.admin_json(&["cluster", "show", "orders"])?;
    let id = orders["cluster"].as_str().context("the cluster's id")?.to_owned();
    bed.open(&format!("/clusters/{id}"))?;
    bed.browser.wait_for("a live page", "document.getElementById('live').innerText === 'Live'")?;
    bed.ensure_text(&["What it waits for", "2 of 3 seats taken", "free"])?;
    bed.check("forming")?;
    let all_tokens = "main a[href^='/tokens?cluster']";
    bed.browser.evaluate(&format!("document.querySelector(\"{all_tokens}\").focus()"))?;
    bed.browser.evaluate("window.before = document.getElementById('main'); true")?;
    agents.push(bed.start_agent(2, &bundle)?);
    bed.testbed.wait_cluster_state("orders", "formed", FORMATION_LIMIT)?;
    bed.browser.wait_for(
        "a formed cluster, without a reload",
        "document.querySelector('.head').innerText.includes('formed') \
         && document.querySelectorAll('.probes .signed.reached').length === 3 \
         && window.before !== document.getElementById('main')",
    )?;
    let has_focus = format!("document.activeElement.matches(\"{all_tokens}\")");
    ensure!(bed.browser.evaluate(&has_focus)? == true, "the focus is lost");
    bed.browser.wait_for(
        "the members' first reports",
        "[...document.querySelectorAll('#members ~ .scroll .badge')].filter((b) => \
         b.innerText.includes('well')).length === 3",
    )?;
    bed.browser.evaluate("document.activeElement.blur(); true")?;
    bed.check("cluster")?;

    visit_other_pages(&mut bed, &id)?;
    bed.open("/clusters")?;
    bed.browser.evaluate("document.querySelector('.who button').click()")?;
    bed.browser.wait_for("the end of the session", "location.pathname === '/signed-out'")?;
    bed.check("signed-out")?;
    bed.open("/clusters")?;
    bed.ensure_text(&["This browser isn't signed in"])?;
    ensure!(bed.browser.page_errors().is_empty(), "{:?}", bed.browser.page_errors());

    // The service's log must not contain the secret code of the sign-in link.
    let code = link.rsplit('/').next().context("the link's code")?;
    let log = bed.testbed.discovery.as_ref().context("discovery runs")?.output();
    ensure!(log.contains("signed in to the console") && !log.contains(code), "{log}");
    drop(agents);
    Ok(())
}

#[test]
fn a_hidden_page_has_no_timer_and_a_shown_one_has_one() -> Result<()> {
    let Some(mut bed) = ConsoleBed::start(1)? else { return Ok(()) };
    bed.sign_in(&[])?;
    bed.browser.wait_for("a live page", "document.getElementById('live').innerText === 'Live'")?;
    let timers = bed.browser.evaluate(HIDDEN)?;
    ensure!(timers == serde_json::json!([0, 1]), "while hidden, and once shown: {timers}");
    Ok(())
}

#[test]
fn console_open_leads_a_browser_to_the_clusters_page_without_a_secret_among_its_arguments()
-> Result<()> {
    let network = Network::loopback(1);
    let mut options = TestbedOptions::default();
    let listen = format!("{}:{PORT}", network.hub.address);
    options.serve_args.extend(["--console-listen".to_owned(), listen]);
    let testbed = Testbed::start(network, options)?;
    testbed.create_cluster("demo", 3, &[])?;
    // In place of a browser, the command starts a script that records its arguments.
    let (opener, told) = (testbed.path("opener"), testbed.path("told"));
    let told_text = path_text(&told)?;
    let script =
        format!("#!/bin/sh\necho \"$@\" > {told_text}.new\nmv {told_text}.new {told_text}\n");
    muster_tests::harness::write_script(&opener, &script)?;
    let mut command = testbed
        .network
        .hub
        .command(muster_tests::harness::programs::program_path("muster-discovery")?);
    command
        .args(["console", "open", "demo", "--browser"])
        .env("MUSTER_ADMIN_HOME", testbed.admin_home())
        .env("MUSTER_ADMIN_KEY", testbed.admin_key())
        .env("BROWSER", &opener);
    let output = command.output()?;
    let (out, err) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    ensure!(output.status.success(), "{err}");
    ensure!(err.contains("SHA-256") && err.contains(':'), "{err}");
    let url = out.trim();
    let demo = testbed.admin_json(&["cluster", "show", "demo"])?;
    let id = demo["cluster"].as_str().context("the cluster's id")?;
    ensure!(url.starts_with("https://") && url.ends_with(&format!("?cluster={id}")), "{url}");
    let arguments = muster_tests::harness::wait_for("the opener", FORMATION_LIMIT, || {
        fs_err::read_to_string(&told).ok()
    })?;
    ensure!(arguments.trim().ends_with("console.html") && !arguments.contains("sign-in"));
    let page = fs_err::read_to_string(arguments.trim())?;
    ensure!(page.contains(url), "{page}");
    let file = fs_err::metadata(arguments.trim())?;
    let mode = std::os::unix::fs::PermissionsExt::mode(&file.permissions()) & 0o777;
    ensure!(mode == 0o600, "{mode:o}");
    Ok(())
}
