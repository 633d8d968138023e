//! Recognises a process with another root folder than this one, such as an etcd in a container. The
//! paths of such a process, and its program, mean nothing on the host.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::exit::ExitError;

/// Text that is in the control group's path of each process that a kubelet runs.
const POD_GROUP: &str = "kubepods";

/// Runtime of a process that has another root folder than this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContainerKind {
    /// A kubelet runs the process in a pod.
    Pod,
    /// The process runs in a container that no kubelet started, or in a systemd unit with
    /// `RootDirectory=`.
    Other,
}

impl ContainerKind {
    /// Returns how the process `pid` is run. Returns `None` if it has the root folder of the
    /// calling process, so that its paths are the host's.
    pub(crate) fn of(pid: u32) -> io::Result<Option<Self>> {
        let folder = Path::new("/proc").join(pid.to_string());
        if is_same_folder(&folder.join("root/"), Path::new("/"))? {
            return Ok(None);
        }
        let groups = std::fs::read_to_string(folder.join("cgroup"))?;
        Ok(Some(Self::from_groups(&groups)))
    }

    fn from_groups(groups: &str) -> Self {
        if groups.contains(POD_GROUP) { Self::Pod } else { Self::Other }
    }

    /// Returns the refusal to adopt the process. The text says how to prepare the etcd.
    pub(crate) fn refusal(self, pid: u32) -> ExitError {
        match self {
            Self::Pod => ExitError::Usage(format!(
                "process {pid} runs in a pod of Kubernetes, so its program and paths aren't the host's: \
                 let systemd run this etcd first, with the steps for kubeadm in docs/adopt.md"
            )),
            Self::Other => ExitError::Usage(format!(
                "process {pid} has another root folder, as in a container, so its program and paths \
                 aren't the host's: let systemd run this etcd on the host first"
            )),
        }
    }
}

fn is_same_folder(one: &Path, other: &Path) -> io::Result<bool> {
    let (one, other) = (std::fs::metadata(one)?, std::fs::metadata(other)?);
    Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_the_own_root_folder_is_in_no_container() {
        assert_eq!(ContainerKind::of(std::process::id()).unwrap(), None);
        let dir = tempfile::tempdir().unwrap();
        assert!(!is_same_folder(dir.path(), Path::new("/")).unwrap());
    }

    #[test]
    fn a_pod_is_recognised_by_its_control_group() {
        for groups in [
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod7c2.slice/cri-containerd-0a.scope\n",
            "12:memory:/kubepods/burstable/pod7c2/0a\n11:cpu,cpuacct:/kubepods/burstable/pod7c2/0a\n",
        ] {
            assert_eq!(ContainerKind::from_groups(groups), ContainerKind::Pod, "{groups}");
        }
        let docker = "0::/system.slice/docker-0a.scope\n";
        assert_eq!(ContainerKind::from_groups(docker), ContainerKind::Other);
        let refusal = ContainerKind::Pod.refusal(7).to_string();
        assert!(refusal.contains("kubeadm"), "{refusal}");
    }
}
