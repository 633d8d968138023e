//! The list of the manual's pages, with the tests that run their commands.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::page::commands_if_any;

/// A page, or some sections of it, and the file that runs their commands.
struct Run {
    page: &'static str,
    /// Sections of the page; all if there are none.
    sections: &'static [&'static str],
    file: &'static str,
    /// Texts that must be in the file: the name of the test, of the page that it reads, or of a
    /// command that it runs.
    shown_by: &'static [&'static str],
}

const fn run(
    page: &'static str,
    sections: &'static [&'static str],
    file: &'static str,
    shown_by: &'static [&'static str],
) -> Run {
    Run { page, sections, file, shown_by }
}

const RUNS: &[Run] = &[
    run("README.md", &["Two commands"], "scripts/test", &["run-tests"]),
    run(
        "README.md",
        &["Five minutes by hand"],
        "tests/tests/joining/manual.rs",
        &["README.md", "the_first_ten_minutes_work_as_written"],
    ),
    run(
        "docs/adopt.md",
        &[],
        "tests/tests/adopt/main.rs",
        &[
            "\"survey\"",
            "\"adopt\", \"demo\", \"--survey\"",
            "\"enrol\"",
            "\"take-over\"",
            "\"certificates\"",
            "\"release\"",
            "\"rotate-ca\"",
        ],
    ),
    run("docs/audit.md", &[], "tests/tests/book/clusters.rs", &["fn audit("]),
    run("docs/backup.md", &[], "tests/tests/book/service.rs", &["fn backup_of_the_service("]),
    run("docs/cas.md", &[], "tests/tests/book/clusters.rs", &["fn certificate_authorities("]),
    run(
        "docs/cluster-backups.md",
        &[],
        "tests/tests/book/clusters.rs",
        &["fn backups_of_a_cluster("],
    ),
    run("docs/console.md", &[], "tests/tests/console.rs", &["--console-listen", "\"open\""]),
    run("docs/corruption.md", &[], "tests/tests/book/members.rs", &["docs/corruption.md"]),
    run(
        "docs/etcd-discovery.md",
        &[],
        "tests/tests/etcd_discovery.rs",
        &["\"create\"", "\"show\"", "\"list\"", "\"revoke\""],
    ),
    run(
        "docs/etcd.md",
        &["By hand, from etcd", "By hand, to etcd"],
        "tests/tests/joining/manual.rs",
        &["## By hand, from etcd", "## By hand, to etcd"],
    ),
    run(
        "docs/etcd.md",
        &["Move", "Compare two clusters"],
        "tests/tests/book/etcd.rs",
        &["fn a_move_and_a_comparison("],
    ),
    run("docs/first-cluster.md", &[], "scripts/test-first-cluster", &["docs/first-cluster.md"]),
    run("docs/forming.md", &[], "tests/tests/book/service.rs", &["fn forming("]),
    run("docs/identity.md", &[], "tests/tests/book/clusters.rs", &["fn identity_and_user_data("]),
    run(
        "docs/install.md",
        &["", "Debian packages"],
        "scripts/test-packages",
        &[
            "apt-get install",
            "muster-discovery init",
            "/etc/credstore/muster-join",
            "systemctl enable --now",
            "runuser -u muster -- muster-agent",
        ],
    ),
    run(
        "docs/install.md",
        &["Check a set-up before its start"],
        "tests/tests/check.rs",
        &[
            "the_service_finds_nothing_wrong_with_a_new_set_up_and_leaves_no_trace",
            "the_agent_finds_nothing_wrong_with_a_new_host_and_leaves_no_trace",
        ],
    ),
    run(
        "docs/members.md",
        &["The next five minutes"],
        "tests/tests/joining/manual.rs",
        &["## The next five minutes"],
    ),
    run(
        "docs/members.md",
        &["By hand: look first"],
        "tests/tests/joining/manual.rs",
        &["## By hand: look first"],
    ),
    run(
        "docs/members.md",
        &[
            "Tickets",
            "Orders",
            "Move a member to another address",
            "Restart or upgrade, one member at a time",
        ],
        "tests/tests/book/members.rs",
        &["fn members("],
    ),
    run(
        "docs/members.md",
        &["By hand: change"],
        "tests/tests/book/members.rs",
        &["\"By hand: change\""],
    ),
    run("docs/metrics.md", &[], "tests/tests/joining/manual.rs", &["docs/metrics.md"]),
    run(
        "docs/other-recovery.md",
        &["From a snapshot"],
        "tests/tests/joining/manual.rs",
        &["docs/other-recovery.md"],
    ),
    run(
        "docs/other-recovery.md",
        &["Without an agent"],
        "tests/tests/book/etcd.rs",
        &["fn recovery_without_an_agent("],
    ),
    run("docs/policies.md", &[], "tests/tests/book/clusters.rs", &["fn policies("]),
    run("docs/recovery.md", &[], "tests/tests/recovered_cluster.rs", &["docs/recovery.md"]),
    run("docs/runbook.md", &[], "tests/tests/book/members.rs", &["fn runbook("]),
    run(
        "docs/service.md",
        &[],
        "tests/tests/book/service.rs",
        &["fn moves_and_keys_of_the_service("],
    ),
    run("docs/space.md", &[], "tests/tests/joining/manual.rs", &["docs/space.md"]),
    run("docs/systemd.md", &[], "tests/tests/book/clusters.rs", &["docs/systemd.md"]),
    run("docs/users.md", &[], "tests/tests/joining/users.rs", &["docs/users.md"]),
];

/// Fails if a page has a command in a section that no test runs, or if a test is gone.
#[test]
fn a_test_runs_each_section_of_the_book_that_has_commands() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for run in RUNS {
        let test = fs_err::read_to_string(root.join(run.file))?;
        for text in run.shown_by {
            ensure!(test.contains(text), "{} has no {text:?}, for {}", run.file, run.page);
        }
    }
    let mut missing = BTreeSet::new();
    let mut pages = vec!["README.md".to_owned()];
    for entry in fs_err::read_dir(root.join("docs"))? {
        let name = entry?.file_name().into_string().ok().context("a name in UTF-8")?;
        pages.extend(name.ends_with(".md").then(|| format!("docs/{name}")));
    }
    for page in pages {
        for command in commands_if_any(&page)? {
            let is_run = RUNS.iter().any(|run| {
                let section = command.section.as_str();
                run.page == page && (run.sections.is_empty() || run.sections.contains(&section))
            });
            if !is_run {
                missing.insert(format!("{page}, {}: {}", command.section, command.line));
            }
        }
    }
    ensure!(missing.is_empty(), "no test runs: {missing:#?}");
    Ok(())
}
