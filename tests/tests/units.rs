//! The systemd units of the packages: systemd reads them without a complaint, and finds them hardened.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Largest exposure that `systemd-analyze security` may find, in tenths.
const THRESHOLD: &str = "15";

/// Copies the units into a folder in which every program exists, and templates have an instance.
fn units(folder: &Path) -> Result<Vec<PathBuf>> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/systemd");
    let mut units = Vec::new();
    for entry in fs_err::read_dir(&source)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).context("a name")?;
        // An absolute path that `systemd-analyze verify` finds executable.
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
    // Documentation that only an installed package has doesn't matter here.
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

/// The agent's unit and its template differ only in what the instance names.
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
