//! Files that a host needs to join with a bundle at its first boot: user data for cloud-init or
//! Ignition, and a systemd unit.

use data_encoding::BASE64;
use secrecy::{ExposeSecret, SecretString};
use serde_json::json;

/// Path of the bundle on the host, where `LoadCredential=` of the agent's systemd unit finds it.
pub(super) const BUNDLE_PATH: &str = "/etc/credstore/muster-join.bundle";
/// Flag of the agent in every systemd unit. The unit for a certain host adds the host's own flags
/// after it.
const BUNDLE_FLAG: &str = "--bundle-file %d/muster-join.bundle";
/// Name of the agent's systemd unit.
const UNIT_NAME: &str = "muster-agent.service";
/// The systemd unit in the Debian package. [`unit()`] returns it for a host without the package.
const PACKAGED_UNIT: &str = include_str!("../../../../packaging/systemd/muster-agent.service");
/// Path of the program in the package.
const PACKAGED_PROGRAM: &str = "/usr/bin/muster-agent";
/// Path of the program on a host without the package.
const PROGRAM: &str = "/usr/local/bin/muster-agent";
/// File for `systemd-sysusers` with the unit's user, from the package.
const USERS: &str = include_str!("../../../../packaging/sysusers/muster-agent.conf");
/// Path of [`USERS`] on the host.
const USERS_PATH: &str = "/etc/sysusers.d/muster-agent.conf";
/// The unit's user, with comment and home directory as in [`USERS`].
const USER: [&str; 3] = ["muster", "Muster agent and its node", "/var/lib/muster"];

/// Format in which `token create` prints a bundle for a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum HostFiles {
    /// Only the bundle, as one line.
    #[default]
    Bundle,
    /// User data for cloud-init, with the bundle and the unit.
    CloudInit,
    /// A configuration for Ignition, with the bundle and the unit.
    Ignition,
}

/// Flags that choose the format in which the bundle is printed.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
#[group(multiple = false)]
pub(in crate::cli) struct HostFilesArgs {
    /// Print cloud-init user data that writes the bundle (mode 0600) and starts the agent
    #[arg(long)]
    print_cloud_init: bool,
    /// Print an Ignition configuration that writes the bundle and starts the agent (Fedora CoreOS,
    /// Flatcar)
    #[arg(long)]
    print_ignition: bool,
    /// Print a systemd unit for the agent; the bundle goes to --out, for /etc/credstore
    #[arg(long, requires = "out")]
    print_systemd: bool,
}

impl HostFilesArgs {
    /// Returns the format in which the bundle is printed.
    pub(super) fn form(self) -> HostFiles {
        match (self.print_cloud_init, self.print_ignition) {
            (true, _) => HostFiles::CloudInit,
            (_, true) => HostFiles::Ignition,
            _ => HostFiles::Bundle,
        }
    }

    /// Returns the systemd unit of an agent with these flags, if it is to be printed beside the
    /// bundle. The unit holds no secret.
    pub(super) fn unit(self, flags: &str) -> Option<String> {
        self.print_systemd.then(|| unit(flags))
    }

    /// Whether the printed text contains the agent's systemd unit.
    pub(super) fn has_unit(self) -> bool {
        self.print_systemd || self.form() != HostFiles::Bundle
    }
}

impl HostFiles {
    /// Name of the field that holds the printed text in the command's JSON output.
    pub(super) fn json_name(self) -> &'static str {
        match self {
            HostFiles::Bundle => "bundle",
            HostFiles::CloudInit => "cloud_init",
            HostFiles::Ignition => "ignition",
        }
    }

    /// Returns the text in this format, for a host whose agent has these flags. The text doesn't
    /// end in a newline, and is as secret as the bundle.
    pub(super) fn text(self, bundle: &SecretString, flags: &str) -> SecretString {
        let bundle = bundle.expose_secret();
        match self {
            HostFiles::Bundle => bundle.to_owned(),
            HostFiles::CloudInit => cloud_init(bundle, flags),
            HostFiles::Ignition => ignition(bundle, flags),
        }
        .into()
    }
}

/// Returns the systemd unit of an agent with these flags, each after a space. It is the package's
/// unit, but with another path of the program, and without the `Documentation=` lines: only the
/// package installs those files.
fn unit(flags: &str) -> String {
    let command = format!("{BUNDLE_FLAG}{flags}");
    PACKAGED_UNIT
        .lines()
        .filter(|line| !line.starts_with("Documentation="))
        .map(|line| line.replace(PACKAGED_PROGRAM, PROGRAM).replace(BUNDLE_FLAG, &command) + "\n")
        .collect()
}

/// Returns `text` as the lines of a block scalar in the user data.
fn indented(text: &str) -> String {
    text.lines()
        .map(|line| if line.is_empty() { "\n".to_owned() } else { format!("      {line}\n") })
        .collect()
}

/// Returns user data in cloud-init's cloud-config format. Cloud-init writes the files and runs the
/// commands at a machine's first boot only. The last command starts the agent's systemd unit
/// without waiting until it is ready: the agent needs the network, which may not be up yet.
fn cloud_init(bundle: &str, flags: &str) -> String {
    let (unit, users) = (indented(&unit(flags)), indented(USERS));
    format!(
        "#cloud-config\n\
         # Keep this secret until the token has expired: whoever reads it can join in this host's place.\n\
         write_files:\n  \
         - path: {BUNDLE_PATH}\n    \
           owner: root:root\n    \
           permissions: '0600'\n    \
           content: |\n      \
             {bundle}\n  \
         - path: {USERS_PATH}\n    \
           owner: root:root\n    \
           permissions: '0644'\n    \
           content: |\n{users}  \
         - path: /etc/systemd/system/{UNIT_NAME}\n    \
           owner: root:root\n    \
           permissions: '0644'\n    \
           content: |\n{unit}\
         runcmd:\n  \
         - [systemd-sysusers, {USERS_PATH}]\n  \
         - [systemctl, daemon-reload]\n  \
         - [systemctl, enable, --now, --no-block, {UNIT_NAME}]"
    )
}

/// Returns a configuration of Ignition, specification 3.3.0.
fn ignition(bundle: &str, flags: &str) -> String {
    let source = format!("data:;base64,{}", BASE64.encode(format!("{bundle}\n").as_bytes()));
    let file = json!({
        "path": BUNDLE_PATH, "mode": 0o600, "overwrite": true, "contents": { "source": source },
    });
    let unit = json!({ "name": UNIT_NAME, "enabled": true, "contents": unit(flags) });
    let [name, comment, home] = USER;
    let user = json!({
        "name": name, "gecos": comment, "homeDir": home, "noCreateHome": true, "system": true,
        "shell": "/usr/sbin/nologin",
    });
    let all = json!({
        "ignition": { "version": "3.3.0" },
        "passwd": { "users": [user] },
        "storage": { "files": [file] },
        "systemd": { "units": [unit] },
    });
    format!("{all:#}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUNDLE: &str = "muster-join-v1 url=https://10.0.0.9:8443 pins=aa token=mst_boot_x_y";

    #[test]
    fn cloud_init_writes_the_bundle_for_root_alone_and_starts_the_unit() {
        let text = HostFiles::CloudInit.text(&BUNDLE.to_owned().into(), "");
        insta::assert_snapshot!(text.expose_secret());
    }

    #[test]
    fn ignition_writes_the_same_bundle_and_unit() {
        let text = HostFiles::Ignition.text(&BUNDLE.to_owned().into(), "");
        let all: serde_json::Value = serde_json::from_str(text.expose_secret()).unwrap();
        let file = &all["storage"]["files"][0];
        let source = file["contents"]["source"].as_str().unwrap();
        let data = source.strip_prefix("data:;base64,").unwrap();
        assert_eq!(BASE64.decode(data.as_bytes()).unwrap(), format!("{BUNDLE}\n").as_bytes());
        assert_eq!((&file["path"], &file["mode"]), (&BUNDLE_PATH.into(), &0o600.into()));
        assert_eq!(all["systemd"]["units"][0]["contents"], unit(""));
        assert_eq!(all["passwd"]["users"][0]["name"], "muster");
    }

    #[test]
    fn the_unit_has_the_agents_flags_in_every_output_format() {
        let flags = " --identity-from aws";
        let command = format!("{BUNDLE_FLAG}{flags} $MUSTER_AGENT_FLAGS\n");
        assert!(unit(flags).contains(&command));
        let cloud_init = HostFiles::CloudInit.text(&BUNDLE.to_owned().into(), flags);
        assert!(cloud_init.expose_secret().contains(&command));
        let ignition = HostFiles::Ignition.text(&BUNDLE.to_owned().into(), flags);
        let all: serde_json::Value = serde_json::from_str(ignition.expose_secret()).unwrap();
        assert_eq!(all["systemd"]["units"][0]["contents"], unit(flags));
    }

    #[test]
    fn the_unit_is_that_of_the_package_with_another_path_of_the_program() {
        let printed = unit("");
        let (packaged, printed): (Vec<&str>, Vec<&str>) =
            (PACKAGED_UNIT.lines().collect(), printed.lines().collect());
        let only_packaged: Vec<&&str> =
            packaged.iter().filter(|line| !printed.contains(line)).collect();
        let only_printed: Vec<&&str> =
            printed.iter().filter(|line| !packaged.contains(line)).collect();
        let [documentation, command] = only_packaged[..] else { panic!("{only_packaged:?}") };
        let [printed_command] = only_printed[..] else { panic!("{only_printed:?}") };
        assert!(documentation.starts_with("Documentation="), "{documentation}");
        let expected = command.replace("=/usr/bin/", "=/usr/local/bin/");
        assert_eq!(*printed_command, expected);
        assert!(expected.contains("ExecStart=/usr/local/bin/muster-agent run "), "{expected}");
        assert_eq!(packaged.len(), printed.len() + 1);
    }

    #[test]
    fn the_unit_finds_the_bundle_and_its_user_where_the_host_has_them() {
        let name = BUNDLE_PATH.strip_prefix("/etc/credstore/").unwrap();
        let printed = unit("");
        assert!(printed.contains(&format!("\nLoadCredential={name}\n")), "{printed}");
        assert!(printed.contains(&format!("%d/{name}")) && BUNDLE_FLAG.ends_with(name));
        let [user, comment, home] = USER;
        assert!(printed.contains(&format!("\nUser={user}\n")), "{printed}");
        assert_eq!(USERS, format!("u {user} - \"{comment}\" {home}\n"));
    }

    #[test]
    fn the_manual_says_where_unit_bundle_and_user_go() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/systemd.md");
        let page = std::fs::read_to_string(page).unwrap();
        for place in [BUNDLE_PATH, UNIT_NAME, USERS_PATH, USERS.trim_end()] {
            assert!(page.contains(place), "docs/systemd.md doesn't name {place}");
        }
    }
}
