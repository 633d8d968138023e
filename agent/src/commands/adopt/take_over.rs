//! `adopt take-over`: stops this host's etcd, and lets the agent run it from then on.
//!
//! Each step can be repeated, because each decision follows from durable state. The record in the
//! cluster's store names the member that is being restarted. The file about the etcd says whether
//! the agent runs it.

use std::path::Path;
use std::time::Duration;

use serde_json::json;

use super::host::EnrolledHost;
use super::{note, print, wait_until, wait_until_all_in_sync};
use crate::adopt::process::is_in_use;
use crate::adopt::{record, systemd};
use crate::cli::TakeOverArguments;
use crate::cluster::{ClusterApiClient, MemberId};
use crate::commands::member::survey::Survey;
use crate::commands::printer::Printer;
use crate::crash::{self, Failpoint};
use crate::exit::{ExitError, error_chain};
use crate::state::adopted::{AdoptionStage, ServedFiles};
use crate::state::{lock, node_dir, state_exit_error};

/// How long all members may take to be in sync before a take-over begins.
const IN_SYNC_LIMIT: Duration = Duration::from_secs(30);

pub(super) async fn run(
    typed: &TakeOverArguments,
    printer: &mut Printer<'_>,
) -> Result<(), ExitError> {
    let mut host = EnrolledHost::read(&typed.data_dir.data_dir)?;
    let task = TakeOver { typed, patience: Duration::from_secs(typed.patience) };
    if typed.give_back {
        task.give_back(&mut host).await?;
        return task.print(&host, "given_back", printer);
    }
    if host.node.stage == AdoptionStage::Enrolled {
        let _lock = host.lock()?;
        task.stop_and_take(&mut host).await?;
    }
    match task.start_and_wait(&host).await {
        Ok(()) => task.print(&host, "taken_over", printer),
        Err(end) if typed.agent_unit.is_some() && host.node.unit.is_some() => {
            note(&format!("{end}. The etcd's own unit gets it back"), typed.json);
            task.give_back(&mut host).await?;
            Err(ExitError::Failed(format!("not taken over: {end}. The etcd runs as before")))
        }
        Err(end) => Err(ExitError::Failed(format!(
            "{end}. Run this command again, or let the etcd run as before: stop the agent, and say \
             muster-agent adopt take-over --give-back"
        ))),
    }
}

struct TakeOver<'a> {
    typed: &'a TakeOverArguments,
    patience: Duration,
}

impl TakeOver<'_> {
    /// Stops the etcd once all other members are healthy, and makes it the agent's node.
    async fn stop_and_take(&self, host: &mut EnrolledHost) -> Result<(), ExitError> {
        let (cluster, json) = (host.cluster()?, self.typed.json);
        check_etcd_runs(host, &cluster).await?;
        record::begin(&cluster, host.list(), host.member, host.name.as_str()).await?;
        if let Err(end) = self.stop_etcd(host, &cluster).await {
            // If the etcd still runs, remove the note "this member is being restarted" from the
            // store.
            if is_in_use(&host.node.directory).unwrap_or(false) {
                record::end(&cluster, host.list(), host.member, false).await?;
            }
            return Err(end);
        }
        crash::at(Failpoint::EtcdStopped);
        let incarnation = host.journal.incarnation;
        node_dir::write_marker(&host.node.directory, incarnation).map_err(state_exit_error)?;
        host.set_launched(true);
        host.node.stage = AdoptionStage::TakenOver;
        host.persist()?;
        crash::at(Failpoint::TakenOver);
        note("the etcd has stopped, and is the agent's node from now on", json);
        Ok(())
    }

    async fn stop_etcd(
        &self,
        host: &EnrolledHost,
        cluster: &ClusterApiClient,
    ) -> Result<(), ExitError> {
        let (json, directory) = (self.typed.json, &host.node.directory);
        ServedFiles::of(&host.layout)
            .copy_from(&host.node.certificates)
            .map_err(state_exit_error)?;
        if !check_in_use(directory)? {
            // The etcd has stopped already: an earlier run of this command was killed after that.
            // Don't wait for the etcd's own member.
            return wait_until_all_in_sync(cluster, Some(host.member), IN_SYNC_LIMIT, json).await;
        }
        wait_until_all_in_sync(cluster, None, IN_SYNC_LIMIT, json).await?;
        move_leadership_away(cluster, host.member).await;
        if let Some(unit) = &host.node.unit {
            note(&format!("stopping {unit}"), json);
            print_command_on_failure(systemd::disable_now(unit).await, "disable", unit, json);
        } else {
            note("stop this host's etcd now, and let nothing start it again", json);
        }
        wait_until(self.patience, json, async || {
            Ok(check_in_use(directory)?
                .then(|| format!("an etcd still runs on {}", directory.display())))
        })
        .await
    }

    /// Starts the agent, or prints how to start it. Waits until the node runs under the agent and
    /// all members are in sync.
    async fn start_and_wait(&self, host: &EnrolledHost) -> Result<(), ExitError> {
        let json = self.typed.json;
        match &self.typed.agent_unit {
            Some(unit) => {
                print_command_on_failure(systemd::enable_now(unit).await, "enable", unit, json);
            }
            None => note(
                &format!(
                    "start the agent now: muster-agent run --data-dir {}",
                    host.layout.root().display()
                ),
                json,
            ),
        }
        let own = host.own()?;
        wait_until(self.patience, json, async || {
            let node = lock::holder(&host.layout.node_lock()).map_err(state_exit_error)?;
            if node.is_none() {
                return Ok(Some(why_not_started(&host.node.directory)?));
            }
            Ok(match own.status().await {
                Ok(status) if status.member_id == host.member => None,
                Ok(status) => Some(format!("the member {} answers here", status.member_id)),
                Err(error) => Some(error_chain(&error)),
            })
        })
        .await?;
        let cluster = host.cluster()?;
        wait_until_all_in_sync(&cluster, None, self.patience, json).await?;
        record::end(&cluster, host.list(), host.member, true).await
    }

    /// Undoes a take-over: the etcd runs again as it did before.
    async fn give_back(&self, host: &mut EnrolledHost) -> Result<(), ExitError> {
        let json = self.typed.json;
        if host.node.has_new_certificates {
            return Err(ExitError::Usage(
                "this member serves its new certificates, with which its old unit doesn't start it: \
                 say muster-agent release"
                    .to_owned(),
            ));
        }
        refuse_new_certificates_of_others(host).await?;
        if let Some(unit) = &self.typed.agent_unit {
            print_command_on_failure(systemd::disable_now(unit).await, "disable", unit, json);
        }
        {
            let _lock = host.lock()?;
            if let Some(holder) =
                lock::holder(&host.layout.node_lock()).map_err(state_exit_error)?
            {
                return Err(ExitError::Failed(format!(
                    "the node still runs under the agent ({holder}): stop the agent with SIGTERM, \
                     which stops the node"
                )));
            }
            // Write the stage `Enrolled` first. Once the marker in the node's directory is gone, no
            // agent may start the node.
            host.node.stage = AdoptionStage::Enrolled;
            host.set_launched(false);
            host.persist()?;
            node_dir::remove_marker(&host.node.directory).map_err(state_exit_error)?;
        }
        match &host.node.unit {
            Some(unit) => {
                print_command_on_failure(systemd::enable_now(unit).await, "enable", unit, json);
            }
            None => note("start this host's etcd now as before", json),
        }
        let cluster = host.cluster()?;
        wait_until_all_in_sync(&cluster, None, self.patience, json).await?;
        record::end(&cluster, host.list(), host.member, false).await
    }

    fn print(
        &self,
        host: &EnrolledHost,
        state: &str,
        printer: &mut Printer<'_>,
    ) -> Result<(), ExitError> {
        let text = if self.typed.json {
            let (member, name) = (host.member, &host.name);
            json!({ "member": member, "name": name, "state": state, "agent_key": host.key() })
                .to_string()
        } else if state == "taken_over" {
            format!("{} is under management, and in sync. Go on with the next host.", host.name)
        } else {
            format!("The etcd of {} runs as before.", host.name)
        };
        print(printer, &text)
    }
}

/// Refuses to give the etcd back if another member serves certificates of the cluster's own CAs. An
/// etcd that was given back trusts only the CA from before the adoption. So this etcd and that
/// member would refuse each other.
async fn refuse_new_certificates_of_others(host: &EnrolledHost) -> Result<(), ExitError> {
    let before = host.cluster_with_earlier_ca()?;
    let clients: Vec<ClusterApiClient> =
        [Some(host.cluster()?), host.cluster_as_agent()].into_iter().flatten().collect();
    let mut members = None;
    for client in &clients {
        if members.is_none() {
            members = client.list_members_serializable().await.ok();
        }
    }
    // If no member answers, no member with new certificates is found, and the etcd is given back.
    // Other members may serve new certificates nevertheless.
    let mut exchanged = Vec::new();
    for member in members.unwrap_or_default().list {
        if member.id == host.member || before.status_of(&member).await.is_ok() {
            continue;
        }
        for client in &clients {
            if client.status_of(&member).await.is_ok() {
                exchanged.push(member.name);
                break;
            }
        }
    }
    if exchanged.is_empty() {
        return Ok(());
    }
    Err(ExitError::Usage(format!(
        "this host's etcd as it was before wouldn't trust the new certificates of {}, so it can't \
         be given back: finish the take-over, and say muster-agent release",
        exchanged.join(", ")
    )))
}

/// Returns why the agent runs no node on this data directory yet. Somebody may have started the
/// etcd again, for example by its old unit after a restart of the host. Then the agent can't start
/// it.
fn why_not_started(directory: &Path) -> Result<String, ExitError> {
    Ok(match check_in_use(directory)? {
        true => format!(
            "an etcd that isn't the agent's runs on {}: stop it, and let nothing start it again",
            directory.display()
        ),
        false => "the agent hasn't started the etcd yet".to_owned(),
    })
}

/// Whether an etcd runs on this data directory.
fn check_in_use(directory: &Path) -> Result<bool, ExitError> {
    is_in_use(directory)
        .map_err(|error| ExitError::Failed(format!("{}: {error}", directory.display())))
}

/// Fails if no etcd runs on this host's data directory, unless an earlier run has begun to stop it.
/// The etcd may run on another directory by now. The agent must not start an etcd on old data.
async fn check_etcd_runs(host: &EnrolledHost, cluster: &ClusterApiClient) -> Result<(), ExitError> {
    let directory = &host.node.directory;
    if check_in_use(directory)? {
        return Ok(());
    }
    let (_, record) = record::read(cluster, host.list()).await?;
    if record.is_restarting(host.member) {
        return Ok(());
    }
    Err(ExitError::Failed(format!(
        "no etcd runs on {}: start this host's etcd first. If it runs on another directory by now, \
         repeat muster-agent adopt enrol",
        directory.display()
    )))
}

/// If systemctl failed, for example for lack of permission, prints the command to run as root.
pub(super) fn print_command_on_failure(
    done: Result<(), ExitError>,
    verb: &str,
    unit: &str,
    json: bool,
) {
    if let Err(why) = done {
        note(&format!("{why}. Say now, as root: systemctl {verb} --now {unit}"), json);
    }
}

/// Moves the leadership away from `member`, so that the cluster needs no election while that member
/// is down. A failure is only logged, because the restart works without the move.
pub(super) async fn move_leadership_away(cluster: &ClusterApiClient, member: MemberId) {
    let Ok(survey) = Survey::take(cluster).await else { return };
    if survey.leader != Some(member) {
        return;
    }
    let leader = survey.members.of_id(member);
    let other = survey.members.list.iter().find(|other| other.id != member && !other.is_learner);
    if let (Some(leader), Some(other)) = (leader, other)
        && let Err(error) = cluster.move_leader(leader, other.id).await
    {
        tracing::info!("the leadership stays with this member: {}", error_chain(&error));
    }
}
