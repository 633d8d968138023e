//! Replacements of dead members by a policy, as the tests wait for them and read them.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::super::agents::AgentProcess;
use super::super::process::last_lines;
use super::super::programs::program_path;
use super::super::wait::poll_slowly;
use super::{FormedCluster, LIMIT};

/// Time after which the agents of these tests consider a member dead.
pub const AFTER: (&str, &str) = ("MUSTER_UNREACHABLE_AFTER", "6");
/// Zone of the hosts, to which the policy is bound.
pub const ZONE: (&str, &str) = ("MUSTER_ZONE", "room-1");
/// Time limit of a replacement: for the detection of the death, two observations of the dead
/// member, and the changes of members. After another agent has taken over, each other agent has to
/// make two new observations.
pub const REPLACED: Duration = Duration::from_secs(180);

impl FormedCluster {
    /// Waits until `agent`'s host is a voter beside the hosts of the other agents, and the member
    /// with the peer URL `gone` is removed.
    pub fn wait_replaced(&self, agent: &AgentProcess, gone: &str) -> Result<()> {
        poll_slowly("the newcomer to take the dead member's place", REPLACED, || {
            let members = self.members().ok()?;
            let is_whole = members.len() == self.agents.len() + 1;
            (is_whole && !members.contains_key(gone) && self.is_voter(agent)).then_some(())
        })
        .with_context(|| {
            format!(
                "members: {:?}\nwaits: {:?}\nthe newcomer:\n{}\nthe founders:\n{}",
                self.members(),
                self.waits(),
                last_lines(&agent.output(), 25),
                self.agents
                    .iter()
                    .map(|each| last_lines(&each.output(), 20))
                    .collect::<Vec<_>>()
                    .join("\n---\n"),
            )
        })
    }

    /// Returns the reasons why newcomers wait, as agents have reported them to discovery.
    pub fn waits(&self) -> Result<Vec<String>> {
        let list = self.testbed.admin_json(&["intent", "list", "demo", "--all"])?;
        let views = list["intents"].as_array().context("a list of intents")?;
        let reason = |view: &Value| view["waits"]["reason"].as_str().unwrap_or_default().to_owned();
        Ok(views.iter().map(reason).collect())
    }

    /// Waits until an agent has reported to discovery that a newcomer waits for this reason.
    pub fn wait_reason(&self, part: &str) -> Result<()> {
        poll_slowly(part, LIMIT, || {
            self.waits().ok()?.iter().any(|reason| reason.contains(part)).then_some(())
        })
        .with_context(|| format!("{:?}", self.waits()))
    }

    /// Starts an agent on `host` with a policy's bundle, and waits until it is a standby.
    pub fn standby(&self, host: usize, bundle: &Path) -> Result<AgentProcess> {
        let mut agent = self.agent(host, bundle, &[AFTER, ZONE]);
        agent.start()?;
        agent.wait_for_output("waiting for the cluster to add this host", LIMIT)?;
        Ok(agent)
    }

    /// Returns the replacements that are recorded in the cluster's own store.
    pub fn replacements(&self) -> Result<Vec<Value>> {
        let mut command = self.policy_command(&["list", "--json"])?;
        let output = command.output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let listing: Value = serde_json::from_slice(&output.stdout)?;
        Ok(listing["replacements"].as_array().context("replacements")?.clone())
    }

    /// Returns a command `muster-agent policy` on the first founder's host.
    pub fn policy_command(&self, args: &[&str]) -> Result<Command> {
        let agent = &self.agents[0];
        let mut command = agent.host.command(program_path("muster-agent")?);
        command.arg("policy").args(args).arg("--data-dir").arg(&agent.data_dir);
        Ok(command)
    }
}
