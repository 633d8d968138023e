//! `backup verify`: proves that backups are whole, and on demand that a cluster starts from one.

use std::path::Path;

use serde::Serialize;

use super::{BackupOutput, BackupSession, ensure_identity, show_progress};
use crate::backup::drill::{DrillPrograms, DrillResult};
use crate::backup::examine::{ExamineError, ExaminedBackup, Examiner, Proof};
use crate::backup::name::BackupName;
use crate::backup::progress::BackupStep;
use crate::cli::BackupVerifyArguments;
use crate::cli::settings::node_binary;
use crate::exit::{ExitError, error_chain};

/// One backup in the output of `backup verify --json`.
#[derive(Serialize)]
struct VerifiedBackup {
    name: String,
    /// How far the backup was proved; `None` if it was not.
    proof: Option<Proof>,
    /// Newest revision in the backup.
    revision: u64,
    /// Number of keys at the backup's newest revision; `None` unless the snapshot was opened.
    keys: Option<u64>,
    /// Result of the verification of the signature: `valid`, `by-dropped-ca`, `unsigned` or
    /// `unchecked`. `None` unless the backup was proved.
    signature: Option<&'static str>,
    #[serde(skip)]
    signature_text: String,
    /// Why the backup was not proved.
    problem: Option<String>,
    /// Whether the backup was found damaged. Another `problem` may come from the store, a private
    /// key or this machine.
    damaged: bool,
    /// Result of the trial restore.
    drill: Option<DrillResult>,
}

/// Verifies the backups that were typed. Fails if one of them is not good.
pub(super) async fn run(
    session: BackupSession<'_>,
    typed: &BackupVerifyArguments,
    output: &mut BackupOutput<'_, '_>,
) -> Result<(), ExitError> {
    let cluster = session.cluster().await?;
    let all = session.listing(&cluster).await?.published;
    let names = match typed.all {
        true => all.clone(),
        false => vec![session.choose(&cluster, &typed.backup).await?],
    };
    if names.is_empty() {
        let text = format!("{} has no backup of cluster {cluster}", session.place);
        return Err(ExitError::Failed(text));
    }
    if typed.drill {
        for name in &names {
            ensure_identity(&session.store, &cluster, name, typed.identity.as_deref()).await?;
        }
    }
    let programs = match typed.drill {
        true => Some(find_programs(typed.node_binary.as_deref()).await?),
        false => None,
    };
    let json = session.typed.access.json;
    let folder = session.spool.folder().to_owned();
    let examiner = session.into_examiner(cluster, typed.identity.as_deref(), &typed.signatures)?;
    let mut verified = Vec::new();
    for name in &names {
        let work = verify(&examiner, name, programs.as_ref(), &folder);
        let result = show_progress(&examiner.progress, json, work).await;
        if !json {
            output.print_line(&result.to_line())?;
        }
        verified.push(result);
    }
    let advice = match verified.iter().any(|one| one.problem.is_some()) {
        true => Some(find_next_best(&examiner, &all, &verified, json).await),
        false => None,
    };
    if json {
        let document = serde_json::json!({ "backups": verified, "next_best": advice });
        output.print(&document, String::new)?;
    }
    let bad = verified.iter().filter(|one| one.problem.is_some());
    let bad: Vec<&str> = bad.map(|one| one.name.as_str()).collect();
    let Some(next_best) = advice else { return Ok(()) };
    let next = match next_best {
        Some(name) => format!("{name} is good: it is the newest that is"),
        None => "no other backup of this cluster is good".to_owned(),
    };
    Err(ExitError::Failed(format!("not good: {}. {next}", bad.join(", "))))
}

async fn find_programs(typed: Option<&Path>) -> Result<DrillPrograms, ExitError> {
    let own = crate::commands::run::own_program()?;
    let node = node_binary(typed, &own, std::env::var_os("PATH").as_deref())?;
    DrillPrograms::find(&node).await.map_err(|error| ExitError::Usage(error_chain(&error)))
}

async fn verify(
    examiner: &Examiner,
    name: &BackupName,
    programs: Option<&DrillPrograms>,
    folder: &Path,
) -> VerifiedBackup {
    let mut result = VerifiedBackup {
        name: name.to_string(),
        proof: None,
        revision: name.revision(),
        keys: None,
        signature: None,
        signature_text: String::new(),
        problem: None,
        damaged: false,
        drill: None,
    };
    let examined = match examiner.examine(name).await {
        Ok(examined) => examined,
        Err(error) => {
            result.damaged = error.is_damage();
            result.problem = Some(error_chain(&error));
            return result;
        }
    };
    result.proof = Some(examined.proof());
    result.signature = Some(examined.signature.as_str());
    result.signature_text = examined.signature.to_text();
    result.keys = examined.snapshot.as_ref().map(|_| examined.manifest.snapshot.keys);
    if let Some(programs) = programs {
        match drill(examiner, examined, programs, folder).await {
            Ok(drill) => result.drill = Some(drill),
            Err(error) => result.problem = Some(error),
        }
    }
    result
}

/// Restores the backup into a trial cluster.
async fn drill(
    examiner: &Examiner,
    examined: ExaminedBackup,
    programs: &DrillPrograms,
    folder: &Path,
) -> Result<DrillResult, String> {
    let Some(snapshot) = examined.snapshot else {
        return Err("it is encrypted: the drill needs --identity".to_owned());
    };
    examiner.progress.begin(BackupStep::Restoring);
    let drilled = programs.run(snapshot, &examined.manifest.snapshot, folder).await;
    drilled.map_err(|error| format!("the drill failed: {}", error_chain(&error)))
}

/// Returns the newest good backup. Skips backups that `verified` shows to be bad.
async fn find_next_best(
    examiner: &Examiner,
    all: &[BackupName],
    verified: &[VerifiedBackup],
    json: bool,
) -> Option<String> {
    for name in all.iter().rev() {
        let known = verified.iter().find(|one| one.name == name.to_string());
        match known {
            Some(known) if known.problem.is_none() => return Some(known.name.clone()),
            Some(_) => continue,
            None => {}
        }
        let work = examiner.examine(name);
        let found: Result<_, ExamineError> = show_progress(&examiner.progress, json, work).await;
        if found.is_ok() {
            return Some(name.to_string());
        }
    }
    None
}

impl VerifiedBackup {
    fn to_line(&self) -> String {
        let Self { name, problem, .. } = self;
        if let Some(problem) = problem {
            let word = if self.damaged { "DAMAGED" } else { "FAILED" };
            return format!("{word}  {name}: {problem}");
        }
        let proof = match self.keys {
            Some(keys) => format!("opened: revision {}, {keys} keys", self.revision),
            None => "whole by its checksum; encrypted, so not opened without --identity".to_owned(),
        };
        let drill = self.drill.as_ref().map_or(String::new(), |drill| {
            let keys = drill
                .keys
                .map_or("its users allow no count".to_owned(), |keys| format!("{keys} keys"));
            format!(
                "; {} started from it in {} ms: revision {}, {keys}",
                drill.program, drill.duration_ms, drill.revision
            )
        });
        format!("OK  {name}  {proof}; {}{drill}", self.signature_text)
    }
}
