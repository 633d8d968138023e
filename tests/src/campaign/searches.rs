//! Commands of the searches. Each one is a function of the search, the number of the run and the
//! campaign's seed.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::child::ChildCommand;
use super::plan::SearchKind;
use super::programs::CampaignPrograms;

/// Distance between the first seeds of two runs of the simulation. A run has at most this many
/// histories, each with a seed of its own.
pub const SEEDS_PER_RUN: u64 = 1_000_000;
/// Maximum first seed of a campaign. The seeds above it suffice for the longest campaign, which
/// lasts 30 days.
pub const MAX_FIRST_SEED: u64 = u64::MAX / 2;
/// Shortest and longest time of a run that ends by itself.
const RUN_SECONDS: std::ops::RangeInclusive<u64> = 10..=600;
/// Longest run of one fuzz target, after which the next target has its turn.
const MAX_DECODER_SECONDS: u64 = 120;
/// Time that a run may take beyond the time after which it should end by itself.
const GRACE: Duration = Duration::from_secs(300);
/// Time limit of a test binary, which counts as hanging afterwards.
const TEST_LIMIT: Duration = Duration::from_secs(20 * 60);

/// Scenarios of the histories, which are tests of one binary.
const HISTORIES: [&str; 3] = [
    "histories_of_killed_members_are_right",
    "histories_of_stopped_members_with_users_are_right",
    "histories_of_members_that_are_cut_off_are_right",
];
/// Test binaries about partitions, with filters of their tests.
const PARTITIONS: [(&str, &str); 2] = [("partitions", ""), ("one_way_connections", "")];
/// Test binaries about disks and kills, with filters of their tests.
const DURABILITY: [(&str, &str); 6] = [
    ("durability", ""),
    ("disk", ""),
    ("maintenance", "killed_at_any_step"),
    ("snapshot", "killed_at_any_step"),
    ("recovery", "killed_at_any_step"),
    ("journal", ""),
];
/// Arguments of the program that compares random requests.
const REQUESTS: [&[&str]; 4] = [
    &["--about", "keys", "--requests", "5000"],
    &["--about", "users", "--requests", "2500"],
    &["--about", "lines", "--requests", "500"],
    &["--members", "3", "--requests", "100"],
];

/// One run of a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SearchRun {
    pub command: ChildCommand,
    /// Last seed that the run may use.
    pub last_seed: Option<u64>,
    /// Usual time of the run. No run begins with less time left.
    pub usual_time: Duration,
    /// Time after which the run is stopped and counts as hanging.
    pub limit: Duration,
    /// Command with which a person repeats the run.
    pub replay: String,
}

/// Returns run `number` of a search, counted from 0, for the next `time`.
///
/// # Errors
/// If a program is missing.
pub fn next_run(
    search: SearchKind,
    number: u64,
    time: Duration,
    seed: u64,
    programs: &CampaignPrograms,
) -> Result<SearchRun> {
    let seconds = time.as_secs().clamp(*RUN_SECONDS.start(), *RUN_SECONDS.end());
    match search {
        SearchKind::Simulation => {
            let first = seed + number * SEEDS_PER_RUN;
            let arguments = format!(
                "--first {first} --histories {SEEDS_PER_RUN} --seconds {seconds} --threads {}",
                programs.threads
            );
            Ok(program_run("sim", &arguments, seconds, first + SEEDS_PER_RUN - 1, programs))
        }
        SearchKind::Walks => {
            let seed = seed + number;
            let arguments =
                format!("--walk-seconds {seconds} --seed {seed} --threads {}", programs.threads);
            Ok(program_run("explore", &arguments, seconds, seed, programs))
        }
        SearchKind::Histories => {
            let (seed, name) = (seed + number, pick(&HISTORIES, number));
            let mut run = test_run("histories", &["--exact", name, "--nocapture"], programs)?;
            run.command.variables.push(("SEED".to_owned(), seed.to_string()));
            run.last_seed = Some(seed);
            run.replay = format!("SEED={seed} cargo test --workspace --test histories {name}");
            Ok(run)
        }
        SearchKind::Partitions => filtered_run(pick(&PARTITIONS, number), programs),
        SearchKind::Durability => filtered_run(pick(&DURABILITY, number), programs),
        SearchKind::Requests => {
            let seed = seed + number;
            let arguments = format!("{} --seed {seed}", pick(&REQUESTS, number).join(" "));
            let mut run = program_run("fuzz-etcd", &arguments, 60, seed, programs);
            run.limit = TEST_LIMIT;
            Ok(run)
        }
        SearchKind::Decoders => decoder_run(number, seconds, programs),
    }
}

fn pick<T: Copy>(list: &[T], number: u64) -> T {
    let index = usize::try_from(number % list.len() as u64).unwrap_or_default();
    list[index]
}

/// Returns a run of a release program that ends by itself.
fn program_run(
    name: &str,
    arguments: &str,
    seconds: u64,
    last_seed: u64,
    programs: &CampaignPrograms,
) -> SearchRun {
    let mut words: Vec<String> = arguments.split(' ').map(str::to_owned).collect();
    if name != "fuzz-etcd" {
        words.push("--json".to_owned());
    }
    SearchRun {
        command: ChildCommand {
            program: programs.folder.join(name),
            arguments: words,
            directory: programs.root.clone(),
            variables: Vec::new(),
        },
        last_seed: Some(last_seed),
        usual_time: Duration::from_secs(seconds),
        limit: Duration::from_secs(seconds) + GRACE,
        replay: format!("cargo run --release -p muster-tests --bin {name} -- {arguments}"),
    }
}

fn filtered_run((name, filter): (&str, &str), programs: &CampaignPrograms) -> Result<SearchRun> {
    let filters: &[&str] = if filter.is_empty() { &[] } else { &[filter] };
    test_run(name, filters, programs)
}

fn test_run(name: &str, arguments: &[&str], programs: &CampaignPrograms) -> Result<SearchRun> {
    let command = test_command(name, arguments, programs)?;
    let filter = arguments.first().copied().unwrap_or_default();
    let replay = format!("cargo test --workspace --test {name} {filter}");
    Ok(SearchRun {
        command,
        last_seed: None,
        usual_time: Duration::from_secs(90),
        limit: TEST_LIMIT,
        replay: replay.trim_end().to_owned(),
    })
}

/// Returns the command of a test binary, with the variables that Cargo sets.
pub(super) fn test_command(
    name: &str,
    arguments: &[&str],
    programs: &CampaignPrograms,
) -> Result<ChildCommand> {
    let test = programs.tests.get(name).with_context(|| format!("test {name} is not built"))?;
    let directory = test.directory.to_string_lossy().into_owned();
    Ok(ChildCommand {
        program: test.program.clone(),
        arguments: arguments.iter().map(|&argument| argument.to_owned()).collect(),
        directory: test.directory.clone(),
        variables: vec![("CARGO_MANIFEST_DIR".to_owned(), directory)],
    })
}

fn decoder_run(number: u64, seconds: u64, programs: &CampaignPrograms) -> Result<SearchRun> {
    ensure!(!programs.decoders.is_empty(), "no fuzz target is built");
    let targets: Vec<&PathBuf> = programs.decoders.iter().collect();
    let target = pick(&targets, number);
    let name = target.file_name().and_then(|name| name.to_str()).context("a name in UTF-8")?;
    let corpus = format!("fuzz/corpus/{name}");
    fs_err::create_dir_all(programs.root.join(&corpus))?;
    let seconds = seconds.min(MAX_DECODER_SECONDS);
    let arguments = vec![
        corpus,
        format!("-max_total_time={seconds}"),
        "-max_len=65536".to_owned(),
        "-timeout=10".to_owned(),
        "-artifact_prefix=fuzz/corpus/".to_owned(),
    ];
    Ok(SearchRun {
        command: ChildCommand {
            program: programs.root.join(target),
            arguments,
            directory: programs.root.clone(),
            variables: Vec::new(),
        },
        last_seed: None,
        usual_time: Duration::from_secs(seconds),
        limit: Duration::from_secs(seconds) + GRACE,
        replay: format!("make fuzz T={name}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::campaign::programs::BuiltTest;

    fn programs() -> CampaignPrograms {
        let histories =
            BuiltTest { program: "/d/histories-1".into(), directory: "/w/tests".into() };
        CampaignPrograms {
            root: "/w".into(),
            folder: "/w/target/release".into(),
            tests: [("histories".to_owned(), histories)].into(),
            decoders: Vec::new(),
            threads: 2,
        }
    }

    fn run(search: SearchKind, number: u64, seconds: u64) -> SearchRun {
        next_run(search, number, Duration::from_secs(seconds), 7, &programs()).unwrap()
    }

    #[test]
    fn each_run_of_the_simulation_has_seeds_of_its_own() {
        let arguments = run(SearchKind::Simulation, 2, 3_600).command.arguments.join(" ");
        let wanted = "--first 2000007 --histories 1000000 --seconds 600 --threads 2 --json";
        assert_eq!(arguments, wanted);
        assert_eq!(run(SearchKind::Simulation, 1, 60).last_seed, Some(2_000_006));
    }

    #[test]
    fn runs_take_the_scenarios_in_turn_and_say_how_to_repeat_them() {
        assert_eq!(
            run(SearchKind::Histories, 4, 60).replay,
            "SEED=11 cargo test --workspace --test histories \
             histories_of_stopped_members_with_users_are_right"
        );
        let arguments = |number| run(SearchKind::Requests, number, 60).command.arguments.join(" ");
        assert_eq!(arguments(3), "--members 3 --requests 100 --seed 10");
        assert_eq!(arguments(4), "--about keys --requests 5000 --seed 11");
    }
}
