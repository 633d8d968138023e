//! Facts that identify the machine on which the agent runs.
//!
//! A journal that is found on another machine is a copy, and a copy must not act as its original.
//! Two machines differ if a fact that is known of both differs. A fact that is known of only one is
//! ignored. Facts are stored as hashes: systemd asks that a machine id never leaves its host
//! (machine-id(5)), and the facts go to every peer.

use std::path::Path;

use discovery_formation::MachineIdentity;
use ring::digest::{SHA256, digest};

use discovery_types::convert::{DMI_UUID, MACHINE_ID};

/// Maximum size in bytes of a file with a machine id, which has one line.
const MAX_FILE_BYTES: u64 = 4096;

/// Values that many machines share because their manufacturer left them unset.
const PLACEHOLDERS: &[&str] = &[
    "00000000-0000-0000-0000-000000000000",
    "ffffffff-ffff-ffff-ffff-ffffffffffff",
    "03000200-0400-0500-0006-000700080009",
    "12345678-1234-5678-90ab-cddeefaabbcc",
    "not settable",
    "not specified",
    "not present",
    "uninitialized",
    "",
];

/// Makes the facts from the texts of the system's files; `None` stands for a missing file.
pub(crate) fn from_texts(dmi_uuid: Option<&str>, machine_id: Option<&str>) -> MachineIdentity {
    let known = [(DMI_UUID, dmi_uuid), (MACHINE_ID, machine_id)];
    let fact = |(fact, text): (&str, Option<&str>)| Some((fact.to_owned(), hashed(fact, text?)?));
    MachineIdentity(known.into_iter().filter_map(fact).collect())
}

fn hashed(kind: &str, text: &str) -> Option<String> {
    let text = text.trim().to_ascii_lowercase();
    if PLACEHOLDERS.contains(&text.as_str()) {
        return None;
    }
    let hash = digest(&SHA256, format!("muster-machine-1\0{kind}\0{text}").as_bytes());
    Some(data_encoding::HEXLOWER.encode(hash.as_ref()))
}

/// Reads this machine's facts. A `machine_id_file` replaces all of the system's own files. It is
/// for hosts that share a kernel (containers, namespaces) and would otherwise look like one
/// machine.
///
/// # Errors
/// Fails only if `machine_id_file` can't be read or is empty. A missing system file means that its
/// fact is unknown.
pub(crate) fn read(machine_id_file: Option<&Path>) -> std::io::Result<MachineIdentity> {
    if let Some(path) = machine_id_file {
        let text = muster_files::read_named(path, MAX_FILE_BYTES)?;
        let facts = from_texts(None, Some(&String::from_utf8_lossy(&text)));
        if facts.0.is_empty() {
            return Err(std::io::Error::other("it holds no machine id"));
        }
        return Ok(facts);
    }
    let dmi_uuid = std::fs::read_to_string("/sys/class/dmi/id/product_uuid").ok();
    let machine_id = std::fs::read_to_string("/etc/machine-id").ok();
    Ok(from_texts(dmi_uuid.as_deref(), machine_id.as_deref()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_differ_if_a_fact_that_is_known_of_both_differs() {
        let here = from_texts(Some("11111111-0000-0000-0000-000000000001"), Some("a"));
        let copy = from_texts(Some("11111111-0000-0000-0000-000000000002"), Some("a"));
        assert!(here.differs_from(&copy));
        let reinstalled = from_texts(Some("11111111-0000-0000-0000-000000000001"), Some("b"));
        assert!(here.differs_from(&reinstalled));
    }

    #[test]
    fn a_fact_that_is_known_of_only_one_machine_is_ignored() {
        let as_root = from_texts(Some("11111111-0000-0000-0000-000000000001"), Some("a"));
        let as_user = from_texts(None, Some("a"));
        assert!(!as_root.differs_from(&as_user));
        assert!(!as_user.differs_from(&MachineIdentity::default()));
    }

    #[test]
    fn placeholders_of_manufacturers_are_not_facts() {
        let facts =
            from_texts(Some("03000200-0400-0500-0006-000700080009\n"), Some("uninitialized\n"));
        assert_eq!(facts, MachineIdentity::default());
    }

    #[test]
    fn the_facts_do_not_contain_the_machine_id_itself() {
        let facts = from_texts(None, Some("0123456789abcdef0123456789abcdef"));
        let text = format!("{facts:?}");
        assert!(!text.contains("0123456789abcdef0123456789abcdef"), "{text}");
    }

    #[test]
    fn a_machine_id_file_replaces_all_facts_of_the_system() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("id");
        std::fs::write(&file, "host-a\n").unwrap();
        let facts = read(Some(&file)).unwrap();
        assert_eq!(facts, from_texts(None, Some("host-a")));
        std::fs::write(&file, "\n").unwrap();
        assert!(read(Some(&file)).is_err());
    }
}
