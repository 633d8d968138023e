//! How a released node continues without an agent, and its unit file; pure.

use serde::{Deserialize, Serialize};

use super::PLAN_FILE;
use crate::cluster::MemberId;
use crate::exit::ExitError;

/// Command line and owner with which the node continues without an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ReleasePlan {
    pub(super) version: u32,
    /// The member's id, in hexadecimal.
    pub(super) member: String,
    pub(super) name: String,
    /// The node's program and arguments, with the paths of the copied files.
    pub(super) command: Vec<String>,
    /// User and group that own the node's data.
    pub(super) owner: (u32, u32),
}

impl ReleasePlan {
    /// Returns the member's id.
    pub(super) fn id(&self) -> Result<MemberId, ExitError> {
        self.member.parse().map_err(|_| {
            ExitError::Usage(format!("{PLAN_FILE}: `{}` is no member's id", self.member))
        })
    }

    /// Returns the text of the unit file.
    pub(super) fn unit(&self) -> String {
        let quoted: Vec<String> = self.command.iter().map(|word| quote(word)).collect();
        let (user, group) = self.owner;
        format!(
            "[Unit]\n\
             Description=etcd member {}\n\
             Wants=network-online.target\n\
             After=network-online.target\n\
             \n\
             [Service]\n\
             Type=notify\n\
             User={user}\n\
             Group={group}\n\
             ExecStart={}\n\
             Restart=on-failure\n\
             RestartSec=5\n\
             LimitNOFILE=65536\n\
             \n\
             [Install]\n\
             WantedBy=multi-user.target\n",
            self.name.replace('%', "%%"),
            quoted.join(" ")
        )
    }
}

/// Quotes a word for a command line in a unit file.
fn quote(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,@+".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    let escaped =
        word.replace('\\', "\\\\").replace('"', "\\\"").replace('%', "%%").replace('$', "$$");
    format!("\"{escaped}\"")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn plan() -> ReleasePlan {
        let words = ["/usr/bin/etcd", "--name=a", "--cert-file=/etc/x y/c.crt", "--odd=50%$\""];
        ReleasePlan {
            version: 1,
            member: "a1".to_owned(),
            name: "a".to_owned(),
            command: words.map(str::to_owned).to_vec(),
            owner: (7, 8),
        }
    }

    #[test]
    fn the_unit_runs_the_nodes_own_command_line_as_the_datas_owner() {
        let unit = plan().unit();
        let line = "ExecStart=/usr/bin/etcd --name=a \"--cert-file=/etc/x y/c.crt\" \
                    \"--odd=50%%$$\\\"\"\n";
        assert!(unit.contains(line), "{unit}");
        assert!(unit.contains("User=7\nGroup=8\n"), "{unit}");
        assert_eq!(plan().id().unwrap(), MemberId(0xa1));
    }
}
