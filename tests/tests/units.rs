//! The systemd units of the packages are valid and hardened, and the service sends the keep-alives
//! that its unit requires.

use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{Network, Testbed};

/// Maximum exposure level that `systemd-analyze security` may report, in tenths.
const THRESHOLD: &str = "15";

/// Copies the systemd units into a folder, and makes an instance of each template. Every program
/// that the copies name exists.
fn units(folder: &Path) -> Result<Vec<PathBuf>> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/systemd");
    let mut units = Vec::new();
    for entry in fs_err::read_dir(&source)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).context("a name")?;
        // Use a program that exists: `systemd-analyze verify` requires an absolute path of an
        // executable.
        let text = fs_err::read_to_string(&path)?;
        let text: String = text
            .lines()
            .map(|line| match line.strip_prefix("ExecStart=/usr/bin/muster-") {
                Some(rest) => {
                    let arguments = rest.split_once(' ').map_or("", |(_, arguments)| arguments);
                    format!("ExecStart=/bin/true {arguments}\n")
                }
                None => format!("{line}\n"),
            })
            .collect();
        let unit = folder.join(name.replace("@.", "@demo."));
        fs_err::write(&unit, text)?;
        units.push(unit);
    }
    units.sort();
    Ok(units)
}

fn analyze(arguments: &[&str], unit: &Path) -> Result<()> {
    let done = Command::new("systemd-analyze").args(arguments).arg(unit).output()?;
    let text = [done.stdout, done.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    // Only the exit status counts: the output may complain about documentation that only an
    // installed package has.
    ensure!(done.status.success(), "{} {arguments:?}: {text}", unit.display());
    Ok(())
}

#[test]
fn each_unit_is_valid_and_hardened() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let units = units(folder.path())?;
    ensure!(units.len() == 4, "{units:?}");
    for unit in &units {
        analyze(&["verify", "--man=no"], unit)?;
        let threshold = format!("--threshold={THRESHOLD}");
        analyze(&["security", "--offline=true", &threshold], unit)?;
    }
    Ok(())
}

/// The agent's unit and its template differ only in the parts that name the instance.
#[test]
fn the_template_is_the_agents_unit_with_an_instance() -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/systemd");
    let unit = fs_err::read_to_string(folder.join("muster-agent.service"))?;
    let template = fs_err::read_to_string(folder.join("muster-agent@.service"))?;
    ensure!(template.matches("%i").count() == 7, "{template}");
    let without = template.replace(" of cluster %i", "").replace("/%i", "").replace("-%i", "");
    ensure!(without == unit, "{without}");
    Ok(())
}

/// A restarted agent finds its node in `/proc`. The node is in the user namespace of the earlier
/// agent then, and `ProtectProc=` hides processes of other user namespaces.
#[test]
fn an_agents_unit_does_not_hide_the_node_of_an_earlier_agent() -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/systemd");
    for name in ["muster-agent.service", "muster-agent@.service"] {
        let unit = fs_err::read_to_string(folder.join(name))?;
        let has = |setting: &str| unit.lines().any(|line| line.starts_with(setting));
        ensure!(has("KillMode=process"), "{name}: the node outlives its agent");
        ensure!(!(has("PrivateUsers=yes") && has("ProtectProc=")), "{name} hides the node");
    }
    Ok(())
}

/// Interval in microseconds, the unit of `WATCHDOG_USEC`, which `WatchdogSec=` sets.
const WATCHDOG_INTERVAL: &str = "300000";

/// A unit with `WatchdogSec=` is killed if its process sends no keep-alives.
#[test]
fn the_service_sends_keep_alives_to_the_service_manager() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let socket = folder.path().join("notify");
    let manager = UnixDatagram::bind(&socket)?;
    manager.set_read_timeout(Some(Duration::from_secs(60)))?;
    let options = TestbedOptions {
        serve_env: vec![
            ("NOTIFY_SOCKET".to_owned(), path_text(&socket)?.to_owned()),
            ("WATCHDOG_USEC".to_owned(), WATCHDOG_INTERVAL.to_owned()),
        ],
        ..TestbedOptions::default()
    };
    let _testbed = Testbed::start(Network::loopback(1), options)?;
    let mut keep_alives = 0;
    while keep_alives < 3 {
        let mut message = [0; 64];
        let length = manager.recv(&mut message).context("no message of the service")?;
        keep_alives += usize::from(&message[..length] == b"WATCHDOG=1\n");
    }
    Ok(())
}
