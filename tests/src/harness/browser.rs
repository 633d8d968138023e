//! A headless Chromium, driven over its debugging pipe (Chrome DevTools Protocol). Tests use the
//! pages as a person uses them.
//!
//! The browser trusts one TLS key besides the usual CAs, as a person does who has compared the
//! certificate's fingerprint.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use data_encoding::BASE64;
use discovery_types::digest::Digest;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};

use super::process::ChildProcess;
use super::wait::wait_for;

/// Names of Chromium's program in the packages of Debian and other distributions. The environment
/// variable `CHROMIUM` can name another program.
const PROGRAMS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "chrome"];

/// Time limit for an answer of the browser.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// Time limit for a page to show something.
const PAGE_LIMIT: Duration = Duration::from_secs(60);

/// Shell script that starts the browser with its pipes at the descriptors 3 and 4.
const START: &str = r#"to=$1 from=$2; shift 2; exec "$@" 3<"$to" 4>"$from""#;

/// A browser with one page.
pub struct Browser {
    to: File,
    answers: Receiver<Value>,
    next_id: u64,
    session: Option<String>,
    /// Errors that the browser reported about pages: blocked content, and scripts that failed.
    page_errors: Vec<String>,
    _process: ChildProcess,
}

/// Returns the path of a Chromium, if there is one on this machine.
#[must_use]
pub fn find_chromium() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("CHROMIUM").filter(|named| !named.is_empty()) {
        return Some(named.into());
    }
    let path = std::env::var_os("PATH")?;
    let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let candidates = PROGRAMS.iter().flat_map(|name| folders.iter().map(move |dir| dir.join(name)));
    candidates.into_iter().find(|program| program.is_file())
}

impl Browser {
    /// Starts a browser that keeps its files in `folder`, and accepts the TLS key with the hash
    /// `pin`.
    pub fn start(program: &Path, folder: &Path, pin: &Digest) -> Result<Self> {
        fs_err::create_dir_all(folder)?;
        let [to, from] = ["to", "from"].map(|name| folder.join(name));
        for pipe in [&to, &from] {
            mknodat(CWD, pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        }
        let mut command = Command::new("sh");
        command.args(["-c", START, "sh"]).arg(&to).arg(&from).arg(program).args([
            "--headless",
            "--remote-debugging-pipe",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--hide-scrollbars",
            "--force-color-profile=srgb",
            "--lang=en",
        ]);
        // As root, Chromium starts only without its sandbox.
        if rustix::process::geteuid().is_root() {
            command.arg("--no-sandbox");
        }
        command
            .arg(format!("--ignore-certificate-errors-spki-list={}", BASE64.encode(&pin.0)))
            .arg(format!("--user-data-dir={}", folder.join("profile").display()))
            .env("HOME", folder);
        let process = ChildProcess::spawn("chromium", command, &folder.join("log"))?;
        let to = fs_err::OpenOptions::new().write(true).open(to)?.into_file();
        let from = fs_err::File::open(from)?.into_file();
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            for message in BufReader::new(from).split(0).map_while(Result::ok) {
                let value = serde_json::from_slice(&message).unwrap_or_default();
                if sender.send(value).is_err() {
                    return;
                }
            }
        });
        let mut browser = Self {
            to,
            answers,
            next_id: 0,
            session: None,
            page_errors: Vec::new(),
            _process: process,
        };
        browser.open_page()?;
        Ok(browser)
    }

    fn open_page(&mut self) -> Result<()> {
        let made = self.command("Target.createTarget", json!({ "url": "about:blank" }))?;
        let attach = json!({ "targetId": made["targetId"], "flatten": true });
        let attached = self.command("Target.attachToTarget", attach)?;
        let session = attached["sessionId"].as_str().context("a session of the page")?;
        self.session = Some(session.to_owned());
        for domain in ["Page", "Runtime", "Log"] {
            self.command(&format!("{domain}.enable"), json!({}))?;
        }
        self.resize(1280, 860)
    }

    /// Sends a command of the Chrome DevTools Protocol, and returns its result.
    pub fn command(&mut self, method: &str, parameters: Value) -> Result<Value> {
        self.next_id += 1;
        let mut message = json!({ "id": self.next_id, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(0);
        self.to.write_all(&bytes).context("writing to chromium")?;
        let end = Instant::now() + ANSWER_LIMIT;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let received = self.answers.recv_timeout(left);
            let answer = received.with_context(|| format!("chromium doesn't answer {method}"))?;
            if answer["id"] == self.next_id {
                ensure!(answer.get("error").is_none(), "{method}: {}", answer["error"]);
                return Ok(answer["result"].clone());
            }
            self.record_problem(&answer);
        }
    }

    fn record_problem(&mut self, event: &Value) {
        let text = match event["method"].as_str() {
            Some("Log.entryAdded") => event["params"]["entry"]["text"].to_string(),
            Some("Runtime.exceptionThrown") => event["params"]["exceptionDetails"].to_string(),
            _ => return,
        };
        // Ignore the HTTP error status of a page, which Chromium reports, too. Tests request such
        // pages on purpose.
        if !text.contains("Failed to load resource") {
            self.page_errors.push(text);
        }
    }

    /// Returns the errors of pages that the browser has reported so far.
    #[must_use]
    pub fn page_errors(&self) -> &[String] {
        &self.page_errors
    }

    /// Evaluates a JavaScript expression in the page. A promise is awaited.
    pub fn evaluate(&mut self, expression: &str) -> Result<Value> {
        let parameters = json!({
            "expression": expression, "awaitPromise": true, "returnByValue": true,
        });
        let result = self.command("Runtime.evaluate", parameters)?;
        if let Some(thrown) = result.get("exceptionDetails") {
            bail!("{expression}: {thrown}");
        }
        Ok(result["result"]["value"].clone())
    }

    /// Opens a URL, and waits until its page is complete.
    pub fn open(&mut self, url: &str) -> Result<()> {
        let opened = self.command("Page.navigate", json!({ "url": url }))?;
        ensure!(opened.get("errorText").is_none(), "{url}: {}", opened["errorText"]);
        self.wait_for("a complete page", "document.readyState === 'complete'")
    }

    /// Waits until a JavaScript condition holds. If its evaluation fails, for example while the
    /// page is being replaced, the condition counts as false.
    pub fn wait_for(&mut self, what: &str, condition: &str) -> Result<()> {
        let waited = wait_for(what, PAGE_LIMIT, || {
            let value = self.evaluate(&format!("Boolean({condition})")).ok()?;
            (value == true).then_some(())
        });
        waited.with_context(|| self.text().unwrap_or_default())
    }

    /// Returns the text that the page shows.
    pub fn text(&mut self) -> Result<String> {
        let text = self.evaluate("document.body.innerText")?;
        Ok(text.as_str().unwrap_or_default().to_owned())
    }

    /// Presses a key, such as `Tab` or `Enter`.
    pub fn press(&mut self, key: &str) -> Result<()> {
        let (code, text) = match key {
            "Tab" => (9, ""),
            "Enter" => (13, "\r"),
            other => bail!("the key {other} has no code here"),
        };
        for kind in ["keyDown", "keyUp"] {
            let mut event =
                json!({ "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code });
            if kind == "keyDown" && !text.is_empty() {
                event["text"] = json!(text);
            }
            self.command("Input.dispatchKeyEvent", event)?;
        }
        Ok(())
    }

    /// Shows pages in a window of this size, in CSS pixels.
    pub fn resize(&mut self, width: u32, height: u32) -> Result<()> {
        let size =
            json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.command("Emulation.setDeviceMetricsOverride", size).map(drop)
    }

    /// Shows pages in the `light` or the `dark` scheme.
    pub fn prefer_colors(&mut self, scheme: &str) -> Result<()> {
        let feature = json!({ "name": "prefers-color-scheme", "value": scheme });
        self.command("Emulation.setEmulatedMedia", json!({ "features": [feature] })).map(drop)
    }

    /// Switches the scripts of pages on or off.
    pub fn set_scripts_enabled(&mut self, are_enabled: bool) -> Result<()> {
        let disabled = json!({ "value": !are_enabled });
        self.command("Emulation.setScriptExecutionDisabled", disabled).map(drop)
    }

    /// Returns a picture of the visible part of the page, as a PNG.
    pub fn screenshot(&mut self) -> Result<Vec<u8>> {
        let shot = json!({ "format": "png", "optimizeForSpeed": false });
        let taken = self.command("Page.captureScreenshot", shot)?;
        Ok(BASE64.decode(taken["data"].as_str().context("a picture")?.as_bytes())?)
    }
}
