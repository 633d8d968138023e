//! The journal: everything that this agent must never forget. One file, replaced as a whole.
//!
//! The protocol's state machine determines what has to be durable and when. This module stores it
//! with the signed texts, unchanged as received; reading the journal verifies them again. The
//! private keys are in other files, so that a journal can be shown to somebody who helps.

use std::collections::BTreeMap;
use std::sync::Arc;

use discovery_formation as formation;
use discovery_formation::agent::{Journal, LaunchState, SignedList, SignedListMember};
use discovery_types::api::InitialMember;
use discovery_types::convert;
use discovery_types::digest::{Digest, Incarnation, MemberId};
use discovery_types::document::VerifiedDocument;
use discovery_types::grant::TokenKind;
use discovery_types::jws::Jws;
use discovery_types::key::{PublicKey, SigningKey};
use discovery_types::leaves::Leaves;
use discovery_types::record::SignedRecord;
use discovery_types::recovery::{Recovery, RecoveryChain};
use discovery_types::statement::StatementChain;
use discovery_types::url::{NodeUrl, ServiceUrl};
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use zeroize::Zeroizing;

use super::node_dir::Tombstone;
use super::{Layout, StateError};
use crate::cluster::founded_cluster_id;
use crate::state::addresses::{Addresses, ListenAddresses};

/// Version of the file's format.
const VERSION: u64 = 1;

/// The cluster that this agent joins, and how to reach its service: the bundle without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    /// URLs of the discovery service.
    pub urls: Vec<ServiceUrl>,
    /// SHA-256 hashes of the service's TLS keys: two while the service changes its key.
    pub pins: Vec<Digest>,
    /// The cluster's id at discovery.
    pub cluster: Uuid,
    /// Hash of the pinned statement, at which the verification of the statement chain begins.
    pub statement: Digest,
    /// Kind of the bundle's token: for a founder (boot) or for a member added later (join).
    #[serde(default = "boot")]
    pub kind: TokenKind,
}

/// Default for journals older than join tickets.
fn boot() -> TokenKind {
    TokenKind::Boot
}

/// Everything in the journal except the state machine's own part: the signed texts that the agent
/// has received, and facts such as addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournalExtras {
    pub join: Option<Join>,
    /// The node's listen addresses since its first start.
    pub listen: Option<ListenAddresses>,
    /// The member's current addresses, if it has moved since its first start.
    #[serde(default)]
    pub moved: Option<Addresses>,
    /// Peer URLs of this member before it moved, oldest first. Empty once the cluster has recorded
    /// where the member is.
    #[serde(default)]
    pub former_peer_urls: Vec<NodeUrl>,
    /// Number of the statement of this member's addresses; 0 if it has not moved.
    #[serde(default)]
    pub address_number: u64,
    /// The longest statement chain that was verified.
    pub statements: Vec<Jws>,
    pub leaves: Option<Leaves>,
    /// The tombstone of this incarnation, once its member was removed.
    #[serde(default)]
    pub removed: Option<Tombstone>,
    /// Chain of the recovery statements, one for each recovery of this cluster.
    #[serde(default)]
    pub recoveries: Vec<Jws>,
    /// The facts with which the node of an added member starts; `None` for a founder.
    #[serde(default)]
    pub admission: Option<Admission>,
}

/// Maximum number of former peer URLs that are kept.
const MAX_FORMER_URLS: usize = 8;

impl JournalExtras {
    /// Returns the addresses on which the node listens now.
    pub(crate) fn current_listen(&self) -> Option<ListenAddresses> {
        self.moved.as_ref().map(|moved| moved.listen).or(self.listen)
    }

    /// Notes that the member is at `now` and not at `before` any more. `seconds` is the time since
    /// 1970.
    pub(crate) fn note_move(&mut self, before: &Addresses, now: Addresses, seconds: u64) {
        if before.peer_url != now.peer_url {
            let urls = &mut self.former_peer_urls;
            urls.retain(|url| *url != before.peer_url && *url != now.peer_url);
            urls.push(before.peer_url.clone());
            let excess = urls.len().saturating_sub(MAX_FORMER_URLS);
            urls.drain(..excess);
            // The current time keeps the number growing even if an older version of the agent has
            // dropped the number from the journal.
            self.address_number = seconds.max(self.address_number + 1);
        }
        self.moved = Some(now);
    }

    /// Forgets the former peer URLs, since the cluster has recorded the address with the number
    /// `recorded`. Returns false, and changes nothing, if the member has moved again since then.
    pub(crate) fn forget_former_addresses(&mut self, recorded: u64) -> bool {
        let is_newest = recorded == self.address_number;
        if is_newest {
            self.former_peer_urls.clear();
        }
        is_newest
    }
}

/// Facts that an added member's agent has read from the cluster itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Admission {
    pub member: MemberId,
    /// The members as the agent last read them before its node's first start, this host included.
    /// They are the initial list of members of this host's node.
    pub members: Vec<InitialMember>,
    /// Client URLs of the other members, from the time at which the cluster admitted this host.
    pub client_urls: Vec<String>,
    /// The commit document, with which the cluster was founded.
    pub document: Jws,
    /// Grant of the ticket with which this host joined. The agent sends it to a restored service.
    /// Missing in journals of older agents.
    #[serde(default)]
    pub ticket: Option<Jws>,
}

#[derive(Serialize, Deserialize)]
struct JournalFile {
    version: u64,
    key: PublicKey,
    incarnation: Incarnation,
    machine: BTreeMap<String, String>,
    boot: u64,
    record: Option<SignedRecord>,
    bound: Vec<BoundFile>,
    released: u64,
    document: Option<Jws>,
    start: StartFile,
    tombstone: bool,
    #[serde(flatten)]
    extras: JournalExtras,
}

#[derive(Serialize, Deserialize)]
struct BoundFile {
    epoch: u64,
    h: Digest,
    members: Vec<MemberFile>,
}

#[derive(Serialize, Deserialize)]
struct MemberFile {
    key: PublicKey,
    incarnation: Incarnation,
    peer_urls: Vec<String>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum StartFile {
    NotYet,
    Launching,
    Ran,
}

/// A journal read from disk, with all its signatures verified.
#[derive(Debug)]
pub struct VerifiedJournal {
    /// The state machine's part of the journal.
    pub journal: Journal,
    /// The signed texts that the agent has received, and other facts.
    pub extras: JournalExtras,
    /// The verified commit document: the one that this agent holds, or that of the cluster that
    /// added this host.
    pub document: Option<VerifiedDocument>,
    /// The verified chain of recovery statements.
    pub recoveries: RecoveryChain,
}

impl VerifiedJournal {
    /// Returns the journal by which the node's directory is judged. After a recovery, only data of
    /// the new incarnation belongs to this host.
    pub fn for_directory(&self) -> Journal {
        let recovered = own_recovery(&self.recoveries, &convert::public_key(self.journal.key));
        let incarnation = recovered.map(|recovery| convert::incarnation(&recovery.is.incarnation));
        let incarnation = incarnation.unwrap_or(self.journal.incarnation);
        Journal { incarnation, ..self.journal.clone() }
    }

    /// Returns client URLs of the cluster's members, as of the time when this host joined or
    /// founded the cluster.
    pub(crate) fn client_urls(&self) -> Vec<String> {
        let joined = self.extras.admission.iter().flat_map(|known| known.client_urls.clone());
        let records = self.document.iter().flat_map(VerifiedDocument::records);
        let founders = records.flat_map(|record| &record.client_urls).map(NodeUrl::to_string);
        joined.chain(founders).collect()
    }
}

/// Returns the newest recovery, if the agent with the key `own` made it. Such a recovery gave that
/// agent's member a new identity.
pub fn own_recovery<'a>(all: &'a RecoveryChain, own: &PublicKey) -> Option<&'a Recovery> {
    all.newest().filter(|recovery| recovery.agent == *own)
}

/// Generates the agent's private key and makes it durable, then writes the first journal. A key
/// without a journal, left by a crash, was never sent to anybody and is replaced.
pub fn create(
    layout: &Layout,
    machine: formation::MachineIdentity,
) -> Result<(SigningKey, Journal, JournalExtras), StateError> {
    let key = SigningKey::generate();
    muster_files::data::replace(&layout.agent_key(), key.to_pem().as_bytes())?;
    let incarnation = convert::incarnation(&Incarnation::random());
    let journal = Journal::new(convert::key(key.public()), incarnation, machine);
    let extras = JournalExtras::default();
    write(layout, &journal, &extras)?;
    Ok((key, journal, extras))
}

pub fn write(layout: &Layout, journal: &Journal, extras: &JournalExtras) -> Result<(), StateError> {
    let file = JournalFile {
        version: VERSION,
        key: convert::public_key(journal.key),
        incarnation: convert::wire_incarnation(journal.incarnation),
        machine: journal.machine.0.clone(),
        boot: journal.boot,
        record: journal.record.as_deref().map(signed_record),
        bound: journal
            .signed_lists
            .iter()
            .map(|(epoch, bound)| bound_file(*epoch, bound))
            .collect(),
        released: journal.released_epoch,
        document: journal.held_document.as_deref().map(|document| received(&document.text)),
        start: match journal.launch_state {
            LaunchState::NotStarted => StartFile::NotYet,
            LaunchState::Launching => StartFile::Launching,
            LaunchState::Ran => StartFile::Ran,
        },
        tombstone: journal.is_removed,
        extras: extras.clone(),
    };
    let text = serde_json::to_vec_pretty(&file).expect("plain structs always serialise");
    Ok(muster_files::data::replace(&layout.journal(), &text)?)
}

fn received(text: &str) -> Jws {
    text.parse().expect("it was read from such a text")
}

/// Returns the two signed texts of a host's record: one is signed with the agent's key, the other
/// with the token's key.
pub fn signed_record(record: &formation::AgentRecord) -> SignedRecord {
    SignedRecord { record: received(&record.jws), endorsement: received(&record.token_jws) }
}

fn bound_file(epoch: u64, bound: &SignedList) -> BoundFile {
    let member = |member: &SignedListMember| MemberFile {
        key: convert::public_key(member.key),
        incarnation: convert::wire_incarnation(member.incarnation),
        peer_urls: member.peer_urls.clone(),
    };
    let members = bound.members.iter().map(member).collect();
    BoundFile { epoch, h: convert::digest(bound.proposal_hash), members }
}

/// Reads the journal and verifies its signatures again; `None` if there is no journal.
///
/// # Errors
/// A damaged journal, or one without its private key, is an error and never treated as missing.
/// Otherwise this host could become a second member.
pub fn read(layout: &Layout) -> Result<Option<(SigningKey, VerifiedJournal)>, StateError> {
    let path = layout.journal();
    let Some(bytes) = super::read(&path)? else { return Ok(None) };
    let damaged = |what: String| StateError::Damaged { path: path.clone(), what };
    let json: serde_json::Value =
        serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
    let found = json["version"].as_u64().unwrap_or(0);
    if found > VERSION {
        return Err(StateError::Newer { path, found, known: VERSION });
    }
    let file: JournalFile =
        serde_json::from_value(json).map_err(|error| damaged(error.to_string()))?;
    let key = read_key(layout, &file.key)?;
    let unverified = |error: Unverified| StateError::unverified(&path, &*error);
    let document = read_document(&file).map_err(unverified)?;
    let recoveries = read_recoveries(&file, document.as_ref()).map_err(unverified)?;
    let record = file.record.as_ref().map(|signed| convert::own_record(signed, &file.key));
    let record = record.transpose().map_err(|error| unverified(error.into()))?;
    let journal = Journal {
        key: convert::key(&file.key),
        incarnation: convert::incarnation(&file.incarnation),
        machine: formation::MachineIdentity(file.machine),
        boot: file.boot,
        record,
        signed_lists: file.bound.into_iter().map(bound_of).collect(),
        released_epoch: file.released,
        held_document: document.as_ref().filter(|_| file.document.is_some()).map(held),
        is_admitted: file.extras.admission.is_some(),
        launch_state: match file.start {
            StartFile::NotYet => LaunchState::NotStarted,
            StartFile::Launching => LaunchState::Launching,
            StartFile::Ran => LaunchState::Ran,
        },
        is_removed: file.tombstone,
    };
    Ok(Some((key, VerifiedJournal { journal, extras: file.extras, document, recoveries })))
}

/// Returns the tombstone in the journal, if the member was removed. No other field is verified.
/// `None` also if the journal can't be parsed.
pub fn read_tombstone(layout: &Layout) -> Result<Option<Tombstone>, StateError> {
    #[derive(Deserialize)]
    struct Removal {
        tombstone: bool,
        #[serde(default)]
        removed: Option<Tombstone>,
    }
    let bytes = super::read(&layout.journal())?;
    let removal: Option<Removal> = bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let removal = removal.filter(|removal| removal.tombstone);
    Ok(removal.map(|removal| removal.removed.unwrap_or_default()))
}

fn read_key(layout: &Layout, public: &PublicKey) -> Result<SigningKey, StateError> {
    let path = layout.agent_key();
    let damaged =
        |what: &str| StateError::Damaged { path: layout.agent_key(), what: what.to_owned() };
    let bytes = super::read(&path)?.ok_or_else(|| damaged("it is missing"))?;
    let bytes = Zeroizing::new(bytes);
    let text = std::str::from_utf8(&bytes).map_err(|_| damaged("it is no PEM text"))?;
    let key = SigningKey::from_pem(text).map_err(|_| damaged("it holds no Ed25519 key"))?;
    if key.public() == public { Ok(key) } else { Err(damaged("it is not the journal's key")) }
}

fn held(document: &VerifiedDocument) -> Arc<formation::CommitDocument> {
    Arc::new(convert::document(document))
}

/// Reason why a signed text in the journal can't be verified.
type Unverified = Box<dyn std::error::Error>;

fn read_document(file: &JournalFile) -> Result<Option<VerifiedDocument>, Unverified> {
    let founding = file.extras.admission.as_ref().map(|admission| &admission.document);
    let Some(jws) = file.document.as_ref().or(founding) else { return Ok(None) };
    let join = file.extras.join.as_ref().ok_or("it holds a document and no cluster")?;
    let chain = StatementChain::verify_from_pin(&file.extras.statements, &join.statement)?;
    Ok(Some(VerifiedDocument::verify(jws, &chain)?))
}

fn read_recoveries(
    file: &JournalFile,
    document: Option<&VerifiedDocument>,
) -> Result<RecoveryChain, Unverified> {
    let JournalExtras { recoveries, statements, join, .. } = &file.extras;
    if recoveries.is_empty() {
        return Ok(RecoveryChain::default());
    }
    let (Some(join), Some(document)) = (join, document) else {
        return Err("it holds a recovery and no cluster".into());
    };
    let chain = StatementChain::verify_from_pin(statements, &join.statement)?;
    Ok(RecoveryChain::verify(recoveries, &chain, founded_cluster_id(document))?)
}

fn bound_of(file: BoundFile) -> (u64, SignedList) {
    let member = |member: MemberFile| SignedListMember {
        key: convert::key(&member.key),
        incarnation: convert::incarnation(&member.incarnation),
        peer_urls: member.peer_urls,
    };
    let members = file.members.into_iter().map(member).collect();
    (file.epoch, SignedList { proposal_hash: convert::hash(&file.h), members })
}

#[cfg(test)]
mod tests {
    use discovery_types::fixtures::{ClusterFixture, sign_newer_version};
    use discovery_types::jws::JwsType;

    use super::*;

    fn world() -> (tempfile::TempDir, Layout) {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        (dir, layout)
    }

    fn machine() -> formation::MachineIdentity {
        crate::host::machine::from_texts(None, Some("here"))
    }

    #[test]
    fn a_journal_is_read_back_as_it_was_written() {
        let (_dir, layout) = world();
        let (key, mut journal, extras) = create(&layout, machine()).unwrap();
        let member = SignedListMember {
            key: journal.key,
            incarnation: journal.incarnation,
            peer_urls: vec!["https://10.0.0.7:2380".to_owned()],
        };
        let h = formation::Hash([7; 32]);
        journal.signed_lists.insert(3, SignedList { proposal_hash: h, members: vec![member] });
        journal.released_epoch = 2;
        journal.boot = 9;
        journal.launch_state = LaunchState::Launching;
        journal.is_removed = true;
        let at = "2026-01-02T03:04:05Z".to_owned();
        let extras =
            JournalExtras { removed: Some(Tombstone { at, ..Tombstone::default() }), ..extras };
        write(&layout, &journal, &extras).unwrap();
        assert_eq!(read_tombstone(&layout).unwrap(), extras.removed);
        let (same_key, loaded) = read(&layout).unwrap().unwrap();
        assert_eq!(loaded.journal, journal);
        assert_eq!(loaded.extras, extras);
        assert_eq!(same_key.public(), key.public());
    }

    #[test]
    fn no_journal_is_no_error() {
        let (_dir, layout) = world();
        assert!(read(&layout).unwrap().is_none());
    }

    #[test]
    fn a_key_without_a_journal_was_never_shown_and_is_replaced() {
        let (_dir, layout) = world();
        let (first, ..) = create(&layout, machine()).unwrap();
        std::fs::remove_file(layout.journal()).unwrap();
        assert!(read(&layout).unwrap().is_none());
        let (second, ..) = create(&layout, machine()).unwrap();
        assert_ne!(first.public(), second.public());
        assert!(read(&layout).unwrap().is_some());
    }

    #[test]
    fn a_journal_without_its_key_is_refused_as_damaged() {
        let (_dir, layout) = world();
        create(&layout, machine()).unwrap();
        std::fs::remove_file(layout.agent_key()).unwrap();
        assert!(matches!(read(&layout), Err(StateError::Damaged { .. })));
    }

    #[test]
    fn another_key_beside_the_journal_is_refused() {
        let (_dir, layout) = world();
        create(&layout, machine()).unwrap();
        let other = SigningKey::generate();
        std::fs::write(layout.agent_key(), other.to_pem().as_bytes()).unwrap();
        assert!(matches!(read(&layout), Err(StateError::Damaged { .. })));
    }

    #[test]
    fn a_journal_that_is_cut_at_any_length_is_refused_as_damaged() {
        let (_dir, layout) = world();
        create(&layout, machine()).unwrap();
        let whole = std::fs::read(layout.journal()).unwrap();
        for length in 0..whole.len() {
            std::fs::write(layout.journal(), &whole[..length]).unwrap();
            assert!(matches!(read(&layout), Err(StateError::Damaged { .. })), "cut at {length}");
        }
    }

    #[test]
    fn a_journal_of_a_newer_version_is_refused() {
        let (_dir, layout) = world();
        create(&layout, machine()).unwrap();
        let text = std::fs::read_to_string(layout.journal()).unwrap();
        let newer = text.replacen("\"version\": 1", "\"version\": 2", 1);
        std::fs::write(layout.journal(), newer).unwrap();
        assert!(matches!(read(&layout), Err(StateError::Newer { found: 2, .. })));
    }

    #[test]
    fn a_signed_text_of_a_newer_program_is_not_reported_as_damage() {
        let (_dir, layout) = world();
        let (key, journal, extras) = create(&layout, machine()).unwrap();
        write(&layout, &journal, &extras).unwrap();
        let record = &ClusterFixture::new(1).records[0];
        let record = sign_newer_version(JwsType::Record, &key, record);
        let signed = SignedRecord { endorsement: record.clone(), record };
        let mut file: serde_json::Value =
            serde_json::from_slice(&std::fs::read(layout.journal()).unwrap()).unwrap();
        file["record"] = serde_json::to_value(&signed).unwrap();
        let text = file.to_string();
        std::fs::write(layout.journal(), &text).unwrap();
        let refused = read(&layout).unwrap_err();
        assert!(matches!(refused, StateError::NewerText { .. }), "{refused}");
        assert!(refused.to_string().contains("version 2"), "{refused}");
        assert!(!refused.is_retryable());
        assert_eq!(std::fs::read_to_string(layout.journal()).unwrap(), text);
    }

    #[test]
    fn the_journal_holds_no_private_key() {
        let (_dir, layout) = world();
        let (key, ..) = create(&layout, machine()).unwrap();
        let text = std::fs::read_to_string(layout.journal()).unwrap();
        let pem = key.to_pem();
        let secret = pem.lines().nth(1).unwrap();
        assert!(!text.contains(&secret[secret.len() - 40..]));
    }

    #[test]
    fn moves_are_numbered_and_former_urls_are_kept_without_the_present_one() {
        let at = |host: u8| Addresses {
            peer_url: format!("https://10.0.0.{host}:2380").parse().unwrap(),
            client_url: format!("https://10.0.0.{host}:2379").parse().unwrap(),
            listen: ListenAddresses {
                peer: ([10, 0, 0, host], 2380).into(),
                client: ([10, 0, 0, host], 2379).into(),
            },
        };
        let mut extras = JournalExtras { listen: Some(at(1).listen), ..JournalExtras::default() };
        assert_eq!(extras.current_listen(), Some(at(1).listen));
        extras.note_move(&at(1), at(2), 1_000);
        assert_eq!(extras.current_listen(), Some(at(2).listen));
        assert_eq!(
            (extras.address_number, &extras.former_peer_urls),
            (1_000, &vec![at(1).peer_url])
        );
        extras.note_move(&at(2), at(1), 900);
        assert_eq!(
            (extras.address_number, &extras.former_peer_urls),
            (1_001, &vec![at(2).peer_url])
        );
        let listens = Addresses { listen: at(3).listen, ..at(1) };
        let (second, former) = (extras.address_number, extras.former_peer_urls.clone());
        assert!(!extras.forget_former_addresses(second - 1), "an older move was recorded");
        assert_eq!(extras.former_peer_urls, former);
        let mut recorded = extras.clone();
        assert!(recorded.forget_former_addresses(second));
        assert!(recorded.former_peer_urls.is_empty());
        extras.note_move(&at(1), listens.clone(), 2_000);
        assert_eq!((extras.address_number, extras.moved.as_ref()), (1_001, Some(&listens)));
        for host in 1..20 {
            extras.note_move(&at(host), at(host + 1), 2_000);
        }
        assert_eq!(extras.former_peer_urls.len(), MAX_FORMER_URLS);
        assert_eq!(extras.former_peer_urls.last(), Some(&at(19).peer_url));
    }
}
