//! Paths that name no regular file: a pipe that nobody writes to, an endless device, or a folder.
//! Every command must refuse them at once.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::process::ChildProcess;
use muster_tests::harness::programs::program_path;
use muster_tests::harness::testbed::path_text;

const LIMIT: Duration = Duration::from_secs(60);
/// Memory limit in KiB, which stops a program that reads a device without end.
const MEMORY_LIMIT_KIB: u32 = 8 << 20;

const FILE_COMMANDS: [&str; 14] = [
    "muster-node snapshot status FILE",
    "muster-node snapshot restore FILE --data-dir OUT",
    "muster-node snapshot restore FILE --from-etcd --initial-cluster-token=t --data-dir OUT",
    "muster-node snapshot save --endpoints https://127.0.0.1:1 --cacert FILE OUT",
    "muster-node compare --source https://127.0.0.1:1 --source-cacert FILE --target 127.0.0.1:1",
    "muster-node --data-dir OUT --muster-document FILE",
    "muster-node --data-dir OUT --listen-client-urls https://127.0.0.1:0 \
     --advertise-client-urls https://127.0.0.1:1 --cert-file FILE --key-file FILE",
    "muster-agent recover examine --data-dir DIR --report FILE",
    "muster-agent member list --endpoints https://127.0.0.1:1 --cacert FILE --cert FILE --key FILE",
    "muster-agent run --data-dir OUT --machine-id-file FILE",
    "muster-discovery key show FILE",
    "muster-discovery context add --home OUT FILE",
    "muster-discovery init --owner FILE --dir OUT --url https://127.0.0.1:1",
    "muster-discovery ca issue --export FILE --keys DIR --csr FILE --member 4d \
     --peer-url https://10.1.0.4:2380 --client-url https://10.1.0.4:2379 --out OUT",
];

/// Command lines that take a folder instead of a file.
const FOLDER_COMMANDS: [&str; 2] =
    ["muster-node data status FILE", "muster-node data recover --i-accept-data-loss FILE"];

/// Runs `line` with `named` as its file. Returns the exit code and the output.
fn run_with_file(line: &str, named: &Path, folder: &Path) -> Result<(i32, String)> {
    let mut words = line.split(' ').map(|word| match word {
        "FILE" => path_text(named).map(str::to_owned),
        "OUT" => path_text(&folder.join("out")).map(str::to_owned),
        "DIR" => path_text(folder).map(str::to_owned),
        word => Ok(word.to_owned()),
    });
    let name = words.next().context("a program")??;
    let mut command = Command::new("sh");
    command.args(["-c", &format!("ulimit -v {MEMORY_LIMIT_KIB} && exec \"$@\""), "sh"]);
    command.arg(program_path(&name)?).args(words.collect::<Result<Vec<_>>>()?);
    let (out, log) = (folder.join("out"), folder.join("log"));
    let _ = (fs_err::remove_dir_all(out), fs_err::remove_file(&log));
    let mut process = ChildProcess::spawn(line, command, &log)?;
    let code = process.exit_code(LIMIT)?;
    Ok((code, process.output()))
}

#[test]
fn every_command_refuses_a_path_that_is_no_regular_file() -> Result<()> {
    let root = tempfile::tempdir()?;
    let (pipe, folder) = (root.path().join("pipe"), root.path().join("folder"));
    fs_err::create_dir(&folder)?;
    // `recover examine` expects the node's data in this folder of the agent's data directory.
    fs_err::create_dir(root.path().join("node"))?;
    ensure!(Command::new("mkfifo").args(["-m", "600"]).arg(&pipe).status()?.success());
    let named = [
        (pipe.as_path(), "it is a pipe"),
        (Path::new("/dev/zero"), "it is a device"),
        (folder.as_path(), "is a directory"),
    ];
    for line in FILE_COMMANDS {
        for (path, says) in named {
            let (code, printed) = run_with_file(line, path, root.path())?;
            let refused = (code == 1 || code == 2) && printed.contains(says);
            ensure!(refused, "{line}: {}: exit code {code}: {printed}", path.display());
            ensure!(!printed.contains("panicked"), "{line}: {printed}");
        }
    }
    for line in FOLDER_COMMANDS {
        for path in [&pipe, Path::new("/dev/zero")] {
            let (code, printed) = run_with_file(line, path, root.path())?;
            let refused =
                (1..=3).contains(&code) && printed.to_lowercase().contains("not a directory");
            ensure!(refused, "{line}: {}: exit code {code}: {printed}", path.display());
        }
    }
    Ok(())
}

#[test]
fn snapshot_save_refuses_a_target_that_is_no_regular_file() -> Result<()> {
    let root = tempfile::tempdir()?;
    let pipe = root.path().join("pipe");
    ensure!(Command::new("mkfifo").arg(&pipe).status()?.success());
    for target in [&pipe, root.path()] {
        let line = "muster-node snapshot save --endpoints http://127.0.0.1:1 FILE";
        let (code, printed) = run_with_file(line, target, root.path())?;
        ensure!(
            code == 2 && printed.contains("no regular file"),
            "{}: {printed}",
            target.display()
        );
    }
    Ok(())
}
