//! `recover`: makes a new cluster from the remaining data after a majority of the members is lost
//! for good.

use std::io::{BufRead as _, Write as _};
use std::path::Path;

use discovery_types::digest::Incarnation;
use discovery_types::jws::Jws;
use discovery_types::key::SigningKey;
use discovery_types::recovery::{NodeIdentity, Recovery, RecoveryChain};
use discovery_types::role::Action;
use discovery_types::statement::StatementChain;

use crate::cli::{ExamineArguments, MakeArguments, RecoverCommand};
use crate::commands::printer::Printer;
use crate::crash::{self, Failpoint};
use crate::exit::{ExitError, error_chain};
use crate::host::Host as _;
use crate::host::local::LocalHost;
use crate::recover::{
    DirectoryReport, Maker, MemberIdentity, RecoveryPrograms, RecoveryResult, Survivor, choose,
};
use crate::state::journal::{self, VerifiedJournal};
use crate::state::lock::{self, LockError};
use crate::state::{Layout, state_exit_error};

/// Maximum size in bytes of a report file, more than `examine --json` prints for any number of
/// hosts.
const MAX_REPORT_BYTES: u64 = 16 << 20;

/// Runs the command `recover`.
pub(crate) async fn run(
    typed: &RecoverCommand,
    printer: &mut Printer<'_>,
) -> Result<(), ExitError> {
    match typed {
        RecoverCommand::Examine(typed) => examine(typed, printer).await,
        RecoverCommand::Make(typed) => make_cluster(typed, printer).await,
    }
}

async fn examine(typed: &ExamineArguments, printer: &mut Printer<'_>) -> Result<(), ExitError> {
    let programs = RecoveryPrograms::find(typed.node_binary.as_deref(), None).await?;
    let mut survivors = Vec::new();
    for dir in &typed.data_dir {
        survivors.push(survivor(&programs, &open_layout(dir)?)?);
    }
    survivors.extend(read_reports(&typed.report)?);
    let text = if typed.json {
        serde_json::to_string(&survivors).map_err(|error| ExitError::Failed(error.to_string()))?
    } else {
        table(&survivors)
    };
    print_text(printer, &text)
}

fn open_layout(dir: &Path) -> Result<Layout, ExitError> {
    let layout =
        Layout::new(dir).map_err(|error| ExitError::Usage(format!("--data-dir: {error}")))?;
    if !layout.root().is_dir() {
        return Err(ExitError::Failed(format!("{}: no such folder", layout.root().display())));
    }
    match layout.separate_wal() {
        None => Ok(layout),
        Some(wal) => Err(ExitError::Usage(format!(
            "the log of this member's etcd lies in {}, apart from its data, and recover reads no such \
             log: make the new cluster from another member's data, or restore a backup",
            wal.display()
        ))),
    }
}

fn survivor(programs: &RecoveryPrograms, layout: &Layout) -> Result<Survivor, ExitError> {
    Ok(Survivor {
        host: LocalHost { machine_id_file: None }.name(),
        data_dir: layout.root().display().to_string(),
        observed: programs.examine(&layout.node())?,
    })
}

/// Reads the output of `examine --json` from other hosts.
fn read_reports(files: &[std::path::PathBuf]) -> Result<Vec<Survivor>, ExitError> {
    let mut all = Vec::new();
    for file in files {
        let wrong = |what: String| ExitError::Usage(format!("--report {}: {what}", file.display()));
        let bytes = muster_files::read_named(file, MAX_REPORT_BYTES)
            .map_err(|error| wrong(error.to_string()))?;
        let some: Vec<Survivor> =
            serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
        all.extend(some);
    }
    Ok(all)
}

async fn make_cluster(typed: &MakeArguments, printer: &mut Printer<'_>) -> Result<(), ExitError> {
    if !typed.i_accept_data_loss {
        return Err(ExitError::Usage(
            "what only the lost members had is lost for good: see muster-agent recover examine, \
             then say --i-accept-data-loss. Nothing was changed"
                .to_owned(),
        ));
    }
    let programs =
        RecoveryPrograms::find(typed.node_binary.as_deref(), typed.etcdutl.as_deref()).await?;
    let layout = open_layout(&typed.data_dir.data_dir)?;
    let layout = layout.claim().map_err(state_exit_error)?;
    let _lock =
        lock::acquire(&layout.agent_lock(), "muster-agent recover").map_err(
            |error| match error {
                LockError::Held { .. } => {
                    ExitError::Failed(error_chain(&error) + "; stop that agent first")
                }
                LockError::State(error) => state_exit_error(error),
            },
        )?;
    if let Some(holder) = lock::holder(&layout.node_lock()).map_err(state_exit_error)? {
        return Err(ExitError::Failed(format!(
            "a node still runs on this state ({holder}): stop it first"
        )));
    }
    let host = HostState::read(&layout)?;
    let operator = SigningKey::load(&typed.key).map_err(|error| {
        ExitError::Usage(format!("--key {}: {}", typed.key.display(), error_chain(&error)))
    })?;
    if !host.chain.newest().keys_for(Action::PutOrder).any(|key| key == operator.public()) {
        return Err(ExitError::Usage(format!(
            "--key {}: it is no operator's or owner's key in the cluster's newest statement here",
            typed.key.display()
        )));
    }
    let mut survivors = vec![survivor(&programs, &layout)?];
    survivors.extend(read_reports(&typed.report)?);
    if !typed.json {
        print_text(printer, &table(&survivors))?;
    }
    let mut objections = choose::objections(&survivors, 0);
    objections.extend(programs.objection(survivors[0].observed.maker));
    objections.extend(host.objection(&survivors[0].observed));
    if !objections.is_empty() {
        let text = objections.join("; ");
        return Err(ExitError::Failed(format!("nothing was changed: {text}")));
    }
    confirm_data_loss(typed, &host.confirmation_sentence())?;
    // The new cluster is made before its statement is signed. After a crash in between, a repeated
    // run finds the new cluster, and only signs the statement.
    let made = match host.unsigned_recovery(&survivors[0].observed) {
        Some(made) => made,
        None => programs.make(&layout.node())?,
    };
    crash::at(Failpoint::Made);
    let jws = host.sign(&made, &operator)?;
    let HostState { mut loaded, .. } = host;
    if loaded.extras.recoveries.last() != Some(&jws) {
        loaded.extras.recoveries.push(jws.clone());
    }
    journal::write(&layout, &loaded.journal, &loaded.extras).map_err(state_exit_error)?;
    let text = if typed.json {
        serde_json::json!({ "made": made, "statement": jws }).to_string()
    } else {
        next_steps(&made)
    };
    print_text(printer, &text)
}

/// This host's journal and the verified statement chain of its cluster.
struct HostState {
    loaded: VerifiedJournal,
    chain: StatementChain,
}

impl HostState {
    fn read(layout: &Layout) -> Result<Self, ExitError> {
        let none = || {
            ExitError::Failed(format!(
                "{} holds no member of a cluster: this host was never one, so there is nothing to \
                 recover. Run this on a host that was a member; this one joins the new cluster \
                 afterwards, with a ticket",
                layout.root().display()
            ))
        };
        let (_, loaded) = journal::read(layout).map_err(state_exit_error)?.ok_or_else(none)?;
        let join = loaded.extras.join.as_ref().ok_or_else(none)?;
        // A host that has only asked to join holds no commit document yet, and no statements that
        // could be verified.
        if loaded.document.is_none() {
            return Err(none());
        }
        let chain_of = StatementChain::verify_from_pin(&loaded.extras.statements, &join.statement)
            .map_err(|error| ExitError::DoNotRestart(error_chain(&error)))?;
        Ok(Self { loaded, chain: chain_of })
    }

    /// Returns the sentence that an operator has to type to confirm.
    fn confirmation_sentence(&self) -> String {
        format!("make a new cluster of {}", self.chain.newest().name)
    }

    /// Returns the id of this host's Raft cluster, according to the newest recovery statement, or
    /// else to the commit document.
    fn raft_cluster(&self) -> Option<u64> {
        let founded = self.loaded.document.as_ref().map(crate::cluster::founded_cluster_id);
        self.loaded.recoveries.raft_cluster().or(founded)
    }

    /// Returns why no recovery statement about this data may be signed. The data must belong to the
    /// cluster that this host's last recovery statement has made. Without such a statement, it must
    /// belong to the founded cluster.
    fn objection(&self, observed: &DirectoryReport) -> Option<String> {
        let signed = self.loaded.recoveries.newest();
        let made = observed.forced.as_ref().filter(|_| observed.is_recovery_unfinished());
        if signed.is_some_and(|signed| made.is_some_and(|made| made.is.matches(&signed.is)))
            || self.unsigned_recovery(observed).is_some()
        {
            return None;
        }
        let was = made.map(|made| &made.was.cluster_id).or(observed.cluster_id.as_ref());
        let expected = self.raft_cluster();
        if was.and_then(|was| parse_hex_id(was)) == expected {
            return None;
        }
        Some(format!(
            "the data is of cluster {}, and what was signed for this host is about cluster {:016x}: it was \
             put there by hand, or made another cluster's with --force-new-cluster more than once",
            was.map_or("none", String::as_str),
            expected.unwrap_or_default()
        ))
    }

    /// Returns the new cluster that this directory already holds, if only the signed statement is
    /// missing. An interrupted run made it, or somebody made it by hand with --force-new-cluster.
    /// `None` if that cluster was not made from the cluster of the last statement.
    fn unsigned_recovery(&self, observed: &DirectoryReport) -> Option<RecoveryResult> {
        let forced = observed.forced.as_ref()?;
        let is = observed.cluster_id.as_deref().and_then(parse_hex_id);
        let follows = parse_hex_id(&forced.was.cluster_id) == self.raft_cluster();
        (follows && parse_hex_id(&forced.is.cluster_id) == is).then(|| RecoveryResult {
            was: forced.was.clone(),
            is: forced.is.clone(),
            last_index: forced.last_index,
            last_term: forced.last_term,
        })
    }

    fn sign(&self, made: &RecoveryResult, operator: &SigningKey) -> Result<Jws, ExitError> {
        let failed = |what: String| ExitError::Failed(format!("the recovery statement: {what}"));
        let identity = |of: &MemberIdentity| -> Result<NodeIdentity, ExitError> {
            let incarnation: Incarnation =
                of.incarnation.parse().map_err(|_| failed("no incarnation".to_owned()))?;
            let (cluster_id, member_id) = (of.cluster_id.clone(), of.member_id.clone());
            Ok(NodeIdentity { cluster_id, member_id, incarnation })
        };
        let (was, is) = (identity(&made.was)?, identity(&made.is)?);
        let mut all = self.loaded.recoveries.jws();
        // An earlier run has already signed the statement for this new cluster.
        if let Some(last) = all
            .last()
            .filter(|_| self.loaded.recoveries.newest().is_some_and(|signed| signed.is == is))
        {
            return Ok(last.clone());
        }
        let at = jiff::Timestamp::now().as_second();
        let recovery = Recovery {
            version: 1,
            cluster: self.chain.newest().cluster,
            statement: self.chain.newest_hash(),
            agent: discovery_types::convert::public_key(self.loaded.journal.key),
            was,
            is,
            last_index: made.last_index,
            last_term: made.last_term,
            at: u64::try_from(at).unwrap_or_default(),
        };
        let jws = recovery.sign(operator);
        all.push(jws.clone());
        let founded = self.loaded.document.as_ref().map(crate::cluster::founded_cluster_id);
        RecoveryChain::verify(&all, &self.chain, founded.unwrap_or_default())
            .map_err(|error| failed(error_chain(&error)))?;
        Ok(jws)
    }
}

fn parse_hex_id(id: &str) -> Option<u64> {
    u64::from_str_radix(id, 16).ok()
}

fn confirm_data_loss(typed: &MakeArguments, phrase: &str) -> Result<(), ExitError> {
    let said = match &typed.yes {
        Some(said) => said.clone(),
        None => {
            // Standard output is only for the result, which programs may read.
            let question = format!("To go on, type: {phrase}\n");
            let asked = std::io::stderr().write_all(question.as_bytes());
            asked.map_err(|error| ExitError::Failed(format!("can't ask: {error}")))?;
            let mut line = String::new();
            let read = std::io::stdin().lock().read_line(&mut line);
            read.map_err(|error| ExitError::Failed(format!("can't read the answer: {error}")))?;
            line
        }
    };
    if said.trim() == phrase {
        return Ok(());
    }
    Err(ExitError::Usage(format!(
        "nothing was changed: it takes exactly \"{phrase}\" (or --yes with it)"
    )))
}

fn next_steps(made: &RecoveryResult) -> String {
    format!(
        "Made cluster {} with member {} of the data of member {}. Now:\n\
         1. here: muster-agent run (as before; no bundle is needed). If this host has another address now:\n\
         muster-agent run --advertise-address ADDRESS\n\
         The agent tells the new cluster where it is, and discovery of the new cluster\n\
         2. on each other host, one at a time: muster-agent reset --yes, then muster-agent run with a join\n\
         ticket (muster-discovery token create --kind join): the agent here adds it as a learner and\n\
         promotes it. A member of the old cluster that comes back is refused: its cluster id is another.",
        made.is.cluster_id, made.is.member_id, made.was.member_id
    )
}

fn table(survivors: &[Survivor]) -> String {
    let mut rows: Vec<[String; 8]> = vec![
        ["", "HOST", "DATA DIR", "STATE", "TERM", "ENTRY", "REVISION", "MEMBER"].map(str::to_owned),
    ];
    let best = choose::best(survivors);
    for (n, one) in survivors.iter().enumerate() {
        let number = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
        let log = one.observed.log.as_ref();
        rows.push([
            if best == Some(n) { "*" } else { "" }.to_owned(),
            one.host.clone(),
            one.data_dir.clone(),
            one.observed.state.clone(),
            number(log.map(|log| log.last_term.to_string())),
            number(log.map(|log| log.last_index.to_string())),
            number(format_revision(&one.observed)),
            number(one.observed.name.clone()),
        ]);
    }
    let widths: Vec<usize> =
        (0..8).map(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0)).collect();
    let mut lines: Vec<String> = rows
        .iter()
        .map(|row| {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        })
        .collect();
    for one in survivors {
        lines.extend(one.observed.problem.as_ref().map(|what| format!("{}: {what}", one.data_dir)));
    }
    if let Some(best) = best {
        lines.push("* goes furthest: make the new cluster there".to_owned());
        lines.extend(choose::warnings(survivors, best).iter().map(|text| format!("  {text}")));
    }
    lines.join("\n")
}

/// Formats the store's revision. `+N entries` is appended if stock etcd made the data, and its log
/// has N entries that it has not applied to the store yet.
fn format_revision(report: &DirectoryReport) -> Option<String> {
    let (store, log) = (report.store.as_ref()?, report.log.as_ref()?);
    let behind = match report.maker {
        Maker::Etcd => log.last_index.saturating_sub(store.applied),
        Maker::MusterNode => 0,
    };
    let more = if behind > 0 { format!(" +{behind} entries") } else { String::new() };
    Some(format!("{}{more}", store.revision))
}

fn print_text(printer: &mut Printer<'_>, text: &str) -> Result<(), ExitError> {
    printer.line(text).map_err(|error| ExitError::Failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::adopted::{self, AdoptedNode, AdoptionStage};

    #[test]
    fn an_etcd_whose_log_lies_apart_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        let stage = AdoptionStage::TakenOver;
        let node = AdoptedNode { stage, ..adopted::tests::node(&dir.path().join("etcd")) };
        adopted::write_adopted(&layout, &node).unwrap();
        assert!(open_layout(dir.path()).is_ok());
        let node = AdoptedNode { version: 2, wal_directory: Some("/srv/wal".into()), ..node };
        adopted::write_adopted(&layout, &node).unwrap();
        let refused = open_layout(dir.path()).unwrap_err().to_string();
        assert!(refused.contains("/srv/wal"), "{refused}");
    }
}
