//! etcd's guide to runtime reconfiguration as transcripts. A file in `chapters` has the commands
//! that an operator types, and the answers of `muster-node` and stock etcd, which must be equal.
//! Where they aren't, a line names the program, and a comment above gives the reason.
//!
//! A transcript that differs fails the test and is not changed. Only `UPDATE_GOLDENFILES=1`
//! rewrites it, and only if all programs are installed. Read the differences before you commit
//! them.

mod shell;
mod texts;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use muster_tests::harness::{programs, skip};
use muster_tests::stock_etcd;

use shell::Shell;
use texts::{merged, of_program};

const PROGRAMS: [&str; 3] = ["muster-node", "etcd 3.4", "etcd 3.7"];

type BoxedError = Box<dyn Error>;

/// Programs that are available. The newest etcd is built once, from the Go module proxy.
static AVAILABLE_PROGRAMS: LazyLock<Vec<(&'static str, PathBuf)>> = LazyLock::new(|| {
    let oldest = Some(PathBuf::from(stock_etcd::DEBIAN_ETCD_PATH)).filter(|path| path.exists());
    if oldest.is_none() {
        skip::report_missing_program(stock_etcd::DEBIAN_ETCD_PATH);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime needs no more than what every test has");
    let built = stock_etcd::build_newest(Path::new(env!("CARGO_TARGET_TMPDIR")), &|_| {});
    let newest = runtime.block_on(built);
    if let Err(error) = &newest {
        skip::report_skip(format_args!("no stock etcd could be built: {error:#}"));
    }
    let own = programs::program_path("muster-node").expect("`cargo build --workspace` builds it");
    let here = PROGRAMS.into_iter().zip([Some(own), oldest, newest.ok()]);
    here.filter_map(|(program, path)| Some((program, path?))).collect()
});

fn chapter(name: &str) -> Result<(), BoxedError> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/guide/chapters").join(name);
    let golden = fs_err::read_to_string(&path)?;
    let transcripts: Vec<(&str, String)> = std::thread::scope(|scope| {
        let threads = AVAILABLE_PROGRAMS.iter().map(|(program, path)| {
            let golden = of_program(program, &PROGRAMS, &golden);
            let generate_transcript = move || {
                let mut shell = Shell::new(path.clone()).map_err(|error| error.to_string())?;
                goldenscript::generate(&mut shell, &golden).map_err(|error| error.to_string())
            };
            (*program, scope.spawn(generate_transcript))
        });
        let threads: Vec<_> = threads.collect();
        let transcripts = threads.into_iter().map(|(program, thread)| match thread.join() {
            Ok(Ok(transcript)) => (program, transcript),
            Ok(Err(error)) => panic!("{program}: {error}"),
            Err(panic) => std::panic::resume_unwind(panic),
        });
        transcripts.collect()
    });
    if std::env::var_os("UPDATE_GOLDENFILES").is_some() {
        assert!(std::env::var_os("CI").is_none(), "CI compares transcripts, and writes none");
        assert_eq!(transcripts.len(), PROGRAMS.len(), "a program is missing");
        fs_err::write(&path, merged(&transcripts))?;
        return Ok(());
    }
    for (program, transcript) in &transcripts {
        let expected = of_program(program, &PROGRAMS, &golden);
        if let Some(difference) = texts::difference(&expected, transcript) {
            panic!("{program} says something else than {}:\n{difference}", path.display());
        }
    }
    Ok(())
}

#[test]
fn members_are_updated() -> Result<(), BoxedError> {
    chapter("update.txt")
}

#[test]
fn members_are_removed() -> Result<(), BoxedError> {
    chapter("remove.txt")
}

#[test]
fn members_are_added() -> Result<(), BoxedError> {
    chapter("add.txt")
}

#[test]
fn learners_are_added_and_promoted() -> Result<(), BoxedError> {
    chapter("learner.txt")
}

#[test]
fn clusters_change_their_size_and_their_machines() -> Result<(), BoxedError> {
    chapter("sizes.txt")
}
