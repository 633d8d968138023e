//! Runs the searches in turns until the time is over, then puts known bugs back on purpose.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::bugs::{BugVerdict, PutBackBug, put_back};
use super::child::{ChildEnd, ChildRunner};
use super::machine::TestedCommit;
use super::outcome::{CampaignFinding, RunFigures, read_figures, read_finding};
use super::plan::{CampaignPlan, SearchKind, SearchTurn, plan};
use super::programs::CampaignPrograms;
use super::report::{CampaignReport, SearchEntry, counts};
use super::searches::{SearchRun, next_run};

/// Number of findings after which a search has no more turns.
const MAX_FINDINGS: u64 = 3;
/// Number of consecutive runs without work after which a search has no more turns.
const MAX_FRUITLESS_RUNS: u32 = 10;
/// Time below which a successful run counts as fruitless, because its tests were skipped.
const FRUITLESS_TIME: Duration = Duration::from_secs(2);

/// Searches of a campaign, their seeds and their time.
#[derive(Clone, Debug)]
pub struct CampaignOptions {
    /// Time of the campaign, without builds.
    pub time: Duration,
    /// First seed of every search.
    pub seed: u64,
    pub searches: Vec<SearchKind>,
    pub puts_bugs_back: bool,
}

/// State of one search during a campaign.
struct SearchState {
    entry: SearchEntry,
    /// Number of runs that have begun.
    begun: u64,
    /// Number of consecutive runs without work.
    fruitless: u32,
}

impl SearchState {
    fn new(search: SearchKind, missing: Option<String>) -> Self {
        let figures = RunFigures::default();
        let entry = SearchEntry { search, runs: 0, seconds: 0, figures, found: 0, missing };
        Self { entry, begun: 0, fruitless: 0 }
    }

    fn has_turns(&self) -> bool {
        self.entry.found < MAX_FINDINGS && self.fruitless < MAX_FRUITLESS_RUNS
    }
}

struct RunningCampaign<'a> {
    runner: &'a ChildRunner<'a>,
    programs: &'a CampaignPrograms,
    seed: u64,
    last_seed: u64,
    states: BTreeMap<SearchKind, SearchState>,
    findings: Vec<CampaignFinding>,
    /// Number of all runs that have begun.
    begun: u64,
}

/// Runs a whole campaign. An interrupted campaign is reported, too.
#[must_use]
pub fn run(
    runner: &ChildRunner<'_>,
    programs: &CampaignPrograms,
    options: &CampaignOptions,
) -> CampaignReport {
    let date = jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M UTC").to_string();
    // Read the commit at the beginning. The campaign's programs are built already, and somebody may
    // commit something while it runs.
    let tested = TestedCommit::read(&programs.root);
    let began = Instant::now();
    let states: BTreeMap<SearchKind, SearchState> = options
        .searches
        .iter()
        .map(|&search| (search, SearchState::new(search, programs.missing_for(search))))
        .collect();
    let runs = |state: &&SearchState| state.entry.missing.is_none();
    let searches: Vec<SearchKind> =
        states.values().filter(runs).map(|state| state.entry.search).collect();
    let plan = plan(options.time, &searches, options.puts_bugs_back);
    let mut campaign = RunningCampaign {
        runner,
        programs,
        seed: options.seed,
        last_seed: options.seed,
        states,
        findings: Vec::new(),
        begun: 0,
    };
    (runner.say)(&format!("seeds from {}; {}", options.seed, describe(&plan)));
    campaign.search(&plan, began + plan.searching);
    let deadline = began + options.time;
    let bugs = plan.bugs.map(|_| bugs_until(runner, programs, deadline)).unwrap_or_default();
    CampaignReport {
        date,
        tested,
        seconds: began.elapsed().as_secs(),
        interrupted: runner.interrupted.load(Ordering::Relaxed),
        seeds: (campaign.seed, campaign.last_seed),
        searches: campaign.states.into_values().map(|state| state.entry).collect(),
        findings: campaign.findings,
        bugs,
    }
}

fn describe(plan: &CampaignPlan) -> String {
    let bugs = plan.bugs.map_or("no bugs put back".to_owned(), |time| {
        format!("then {} s for bugs put back", time.as_secs())
    });
    format!("{} turns in {} s, {bugs}", plan.turns.len(), plan.searching.as_secs())
}

/// Puts bugs back on purpose, and returns which ones the tests found. If a program can't be run,
/// its error is the only result.
fn bugs_until(
    runner: &ChildRunner<'_>,
    programs: &CampaignPrograms,
    deadline: Instant,
) -> Vec<PutBackBug> {
    put_back(runner, programs, deadline).unwrap_or_else(|error| {
        let verdict = BugVerdict::NoResult(format!("{error:#}"));
        vec![PutBackBug {
            source: "all".to_owned(),
            what: "all bugs".to_owned(),
            incident: None,
            verdict,
        }]
    })
}

impl RunningCampaign<'_> {
    /// Gives the searches their turns, again and again, until no run fits into the time.
    fn search(&mut self, plan: &CampaignPlan, deadline: Instant) {
        loop {
            let begun = self.begun;
            for turn in &plan.turns {
                self.take_turn(*turn, deadline);
            }
            if self.begun == begun {
                return;
            }
        }
    }

    /// Runs commands of one search until its turn is over. A run that has begun goes on to its end.
    fn take_turn(&mut self, turn: SearchTurn, deadline: Instant) {
        let end = (Instant::now() + turn.time).min(deadline);
        let begun = self.begun;
        while !self.runner.interrupted.load(Ordering::Relaxed) {
            let now = Instant::now();
            let left = end.saturating_duration_since(now);
            let Some(state) = self.states.get(&turn.search).filter(|state| state.has_turns())
            else {
                return;
            };
            if left.is_zero() {
                return;
            }
            let run = next_run(turn.search, state.begun, left, self.seed, self.programs);
            let usual_time = run.as_ref().map_or(Duration::ZERO, |run| run.usual_time);
            let is_too_late = usual_time > deadline.saturating_duration_since(now);
            let is_next_turn = self.begun > begun && left < usual_time / 2;
            if is_too_late || is_next_turn {
                return;
            }
            let title = turn.search.title().to_lowercase().replace(' ', "-");
            self.begun += 1;
            let name = format!("{:04}-{title}", self.begun);
            if let Err(error) = run.and_then(|run| self.run_once(turn.search, &run, &name)) {
                self.add_finding(CampaignFinding {
                    search: turn.search,
                    what: format!("it can't be run: {error:#}"),
                    replay: "none".to_owned(),
                    run: name,
                });
            }
        }
    }

    fn run_once(&mut self, search: SearchKind, run: &SearchRun, name: &str) -> Result<()> {
        if let Some(state) = self.states.get_mut(&search) {
            state.begun += 1;
        }
        self.last_seed = self.last_seed.max(run.last_seed.unwrap_or_default());
        let ended = self.runner.run(name, &run.command, run.limit)?;
        let figures = read_figures(search, &ended);
        let finding = read_finding(search, run, name, &ended, &figures);
        let took = ended.took.as_secs();
        (self.runner.say)(&format!("{name}: {took} s, {}", counts(&figures.work)));
        if let Some(state) = self.states.get_mut(&search) {
            let is_fruitless = ended.end == ChildEnd::Succeeded && ended.took < FRUITLESS_TIME;
            state.fruitless = if is_fruitless { state.fruitless + 1 } else { 0 };
            let is_whole = matches!(ended.end, ChildEnd::Succeeded | ChildEnd::Failed);
            state.entry.runs += u64::from(is_whole);
            state.entry.seconds += took;
            state.entry.figures.add(figures);
        }
        if let Some(finding) = finding {
            self.add_finding(finding);
        }
        Ok(())
    }

    /// Keeps a finding. Replaces the path of the workspace in its description by a dot.
    fn add_finding(&mut self, finding: CampaignFinding) {
        let root = self.programs.root.to_string_lossy().into_owned();
        let what = finding.what.replace(&root, ".");
        (self.runner.say)(&format!("FOUND by {}: {what}", finding.run));
        if let Some(state) = self.states.get_mut(&finding.search) {
            state.entry.found += 1;
        }
        self.findings.push(CampaignFinding { what, ..finding });
    }
}
