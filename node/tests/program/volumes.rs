//! Data directories that others may write to, such as container volumes, and attacks by another
//! user there. The built node runs as an unprivileged user.

use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use crate::common::{TestMember, report_skip, write_script};

const DO_NOT_RESTART: i32 = 3;
/// User id that the node runs as, unless the test sets another one.
const NODE_USER: u32 = 1000;
/// User id of another user who may write to the volume.
const OTHER_USER: u32 = 1001;
/// Group id of a volume, as `fsGroup` sets it.
const GROUP: u32 = 2000;

/// A volume with its owner and mode, and the user that the node runs as.
struct Volume {
    name: &'static str,
    owner: u32,
    group: u32,
    mode: u32,
    user: u32,
    groups: &'static [u32],
    /// Path of the data directory within the volume.
    below: &'static str,
}

const VOLUMES: [Volume; 6] = [
    Volume {
        name: "a volume with fsGroup",
        owner: 0,
        group: GROUP,
        mode: 0o2770,
        user: NODE_USER,
        groups: &[NODE_USER, GROUP],
        below: "",
    },
    Volume {
        name: "emptyDir",
        owner: 0,
        group: 0,
        mode: 0o777,
        user: NODE_USER,
        groups: &[NODE_USER],
        below: "",
    },
    Volume {
        name: "a directory in an emptyDir",
        owner: 0,
        group: 0,
        mode: 0o777,
        user: NODE_USER,
        groups: &[NODE_USER],
        below: "default.etcd",
    },
    Volume {
        name: "OpenShift's random user in group 0",
        owner: 0,
        group: 0,
        mode: 0o2775,
        user: 1_000_680_000,
        groups: &[0],
        below: "",
    },
    Volume {
        name: "our own, with a group",
        owner: NODE_USER,
        group: GROUP,
        mode: 0o770,
        user: NODE_USER,
        groups: &[NODE_USER],
        below: "",
    },
    Volume {
        name: "another user's, for root",
        owner: OTHER_USER,
        group: OTHER_USER,
        mode: 0o755,
        user: 0,
        groups: &[0],
        below: "",
    },
];

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// Whether the test runs as root, which it must to run the node as other users. Reports a skip
/// otherwise.
fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        report_skip("only root can run the node as other users");
    }
    is_root
}

impl Volume {
    /// Creates the volume, and returns a member with its data directory there, not started yet.
    fn member(&self) -> (tempfile::TempDir, PathBuf, TestMember) {
        let root = tempfile::tempdir().unwrap();
        set_mode(root.path(), 0o755);
        let volume = root.path().join("one");
        std::fs::create_dir(&volume).unwrap();
        chown(&volume, Some(self.owner), Some(self.group)).unwrap();
        set_mode(&volume, self.mode);
        let mut member = TestMember::alone(root.path());
        member.data_dir = volume.join(self.below);
        let script = root.path().join("as-another-user");
        let groups: Vec<_> = self.groups.iter().map(ToString::to_string).collect();
        let text = format!(
            "#!/bin/sh\nexec setpriv --reuid {} --regid {} --groups {} {} \"$@\" --data-dir {}\n",
            self.user,
            self.groups[0],
            groups.join(","),
            env!("CARGO_BIN_EXE_muster-node"),
            member.data_dir.display()
        );
        write_script(&script, &text);
        member.program = Some(script);
        member.args.retain(|arg| !arg.starts_with("--data-dir"));
        (root, volume, member)
    }
}

/// Changes group and modes as kubelet does on a volume with `fsGroup`, before each start of a pod.
fn open_to_group(path: &Path, group: u32) {
    let found = path.symlink_metadata().unwrap();
    std::os::unix::fs::lchown(path, None, Some(group)).unwrap();
    if found.is_dir() {
        set_mode(path, found.mode() & 0o7777 | 0o2770);
        for entry in std::fs::read_dir(path).unwrap() {
            open_to_group(&entry.unwrap().path(), group);
        }
    } else {
        set_mode(path, found.mode() & 0o7777 | 0o660);
    }
}

/// Returns the paths below `path` whose mode gives group or others any permission.
fn open_to_others(path: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(path).unwrap() {
        let path = entry.unwrap().path();
        let metadata = path.symlink_metadata().unwrap();
        if metadata.is_dir() {
            found.extend(open_to_others(&path));
        }
        if metadata.mode() & 0o077 != 0 {
            found.push(path);
        }
    }
    found
}

#[tokio::test]
async fn a_member_starts_again_in_every_kind_of_volume() {
    if !is_root() {
        return;
    }
    for volume in &VOLUMES {
        let (_root, path, mut member) = volume.member();
        for start in ["1", "2", "3"] {
            member.start();
            member.wait_ready();
            if start != "1" {
                assert_eq!(member.get("a").await.unwrap().as_deref(), Some("1"), "{}", volume.name);
            }
            member.put("a", "1").await.unwrap();
            assert_eq!(open_to_others(&member.data_dir), Vec::<PathBuf>::new(), "{}", volume.name);
            assert_eq!(member.stop(), Some(0), "{}", volume.name);
            open_to_group(&path, volume.group);
        }
        let log = member.log();
        assert!(log.contains("other users can delete or replace"), "{}: {log}", volume.name);
    }
}

/// Creates the file that the other user wants the node to write to or to read.
fn victim(root: &Path) -> PathBuf {
    let victim = root.join("victim");
    std::fs::write(&victim, "kept").unwrap();
    chown(&victim, Some(NODE_USER), Some(NODE_USER)).unwrap();
    victim
}

fn prepare_file(at: &Path, owner: u32) {
    std::fs::write(at, "7\n").unwrap();
    chown(at, Some(owner), Some(owner)).unwrap();
}

fn prepare_folder(at: &Path, owner: u32) {
    std::fs::create_dir(at).unwrap();
    chown(at, Some(owner), Some(owner)).unwrap();
}

/// Path that the node must refuse, and the attack that another user prepares there.
type Attack = (&'static str, fn(&Path, &Path));

const ATTACKS: [Attack; 8] = [
    ("muster-boot", |volume, _| prepare_file(&volume.join("muster-boot"), OTHER_USER)),
    ("muster-incarnation", |volume, _| prepare_file(&volume.join("muster-incarnation"), 0)),
    ("muster-boot", |volume, victim| symlink(victim, volume.join("muster-boot")).unwrap()),
    ("muster-boot", |volume, victim| {
        std::fs::hard_link(victim, volume.join("muster-boot")).unwrap();
    }),
    ("member", |volume, _| prepare_folder(&volume.join("member"), OTHER_USER)),
    ("member", |volume, victim| {
        prepare_folder(&victim.with_file_name("elsewhere"), NODE_USER);
        symlink(victim.with_file_name("elsewhere"), volume.join("member")).unwrap();
    }),
    ("member/wal", |volume, _| {
        prepare_folder(&volume.join("member"), NODE_USER);
        prepare_folder(&volume.join("member/wal"), OTHER_USER);
    }),
    ("member/db", |volume, victim| {
        prepare_folder(&volume.join("member"), NODE_USER);
        set_mode(&volume.join("member"), 0o2770);
        symlink(victim, volume.join("member/db")).unwrap();
    }),
];

#[test]
fn files_that_another_user_has_prepared_are_refused_and_left_unchanged() {
    if !is_root() {
        return;
    }
    for (index, (name, prepare)) in ATTACKS.iter().enumerate() {
        let (root, volume, mut member) = VOLUMES[1].member();
        let victim = victim(root.path());
        prepare(&volume, &victim);
        member.start();
        assert_eq!(member.exit_code(), Some(DO_NOT_RESTART), "{index}: {}", member.log());
        let refused = volume.join(name);
        let log = member.log();
        assert!(log.contains(&format!("{} ", refused.display())), "{index}: {log}");
        assert_eq!(std::fs::read(&victim).unwrap(), b"kept", "{index}");
        let elsewhere = root.path().join("elsewhere");
        assert!(!elsewhere.exists() || elsewhere.read_dir().unwrap().next().is_none(), "{index}");
    }
}

/// Simulates another user who moves the member's directory away, and creates a directory with that
/// name.
#[test]
fn a_directory_that_another_user_has_put_in_the_members_place_is_refused() {
    if !is_root() {
        return;
    }
    let (_root, volume, mut member) = VOLUMES[1].member();
    member.start();
    member.wait_ready();
    assert_eq!(member.stop(), Some(0));
    std::fs::rename(volume.join("member"), volume.join("moved")).unwrap();
    prepare_folder(&volume.join("member"), OTHER_USER);
    member.start();
    assert_eq!(member.exit_code(), Some(DO_NOT_RESTART), "{}", member.log());
    assert!(member.log().contains("belongs to user 1001"), "{}", member.log());
}
