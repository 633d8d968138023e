//! Signatures of manifests. Without them, anybody who can write to the store could replace a
//! backup.
//!
//! The agent that saves a backup signs the manifest with its own key. Beside the signature lies the
//! proof that this key belongs to a member: the member's peer certificate, and a signature by the
//! node key. Whoever has the cluster's statements or the peer CA can verify the signature, without
//! the service and without the cluster.
//!
//! - The signed bytes contain the whole manifest. Its fields must equal the manifest's unsigned
//!   fields. Programs of older versions read only the unsigned fields.
//! - The name is a part of the manifest: an older backup under a newer name doesn't pass.
//! - All CAs that the cluster ever had count, because a backup outlives a replacement of the CAs.
//!   Whoever has the key of a CA can forge signatures by it, with any date. So the result of a
//!   verification tells whether the cluster has dropped the CA.
//! - The backup has to be begun while the certificate is valid. So a member that was removed can
//!   forge backups only with a time before its last certificate ends.
//!
//! A signature doesn't show that the store still has the newest backup.

use std::path::Path;

use discovery_types::jws::{Jws, JwsError, JwsType};
use discovery_types::key::{PublicKey, SigningKey};
use discovery_types::leaves::Validity;
use discovery_types::member_proof::{CertifiedMember, MemberProof, MemberProofError};
use discovery_types::statement::{StatementChain, StatementError, ca_der};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::manifest::Manifest;
use super::name::{BackupName, ClusterFolder};
use crate::enrol::redeem;
use crate::state::{Layout, journal};

/// Maximum size in bytes of a file of `--trust`.
const MAX_TRUST_FILE: u64 = 4 << 20;
/// Last line of a certificate in PEM.
const PEM_END: &str = "-----END CERTIFICATE-----";
/// Tolerance for a certificate that begins after the backup, in seconds: clocks may differ.
const CLOCK_TOLERANCE: i64 = 3_600;

/// Signature of a manifest, and the proof that a member's agent made it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ManifestSignature {
    /// The manifest, signed by the agent.
    pub signed: Jws,
    /// Proof that the agent belongs to a member.
    pub proof: MemberProof,
}

/// Payload that an agent signs.
#[derive(Serialize, Deserialize)]
struct SignedManifest {
    /// The cluster's id at discovery.
    cluster: Uuid,
    /// Key of the agent.
    agent: PublicKey,
    /// The manifest without its signature.
    manifest: Manifest,
}

/// Why a signature doesn't prove a manifest.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SignatureError {
    /// There is no signature.
    #[error(
        "its manifest is not signed: an older muster-agent has saved it, or a host without an agent, \
         or somebody has replaced it. --allow-unsigned takes it"
    )]
    Unsigned,
    /// The signature is wrong.
    #[error("the signature of its manifest is wrong")]
    Jws(#[source] JwsError),
    /// No member's agent made the signature.
    #[error("its manifest is signed by nobody who is a member of the cluster")]
    Signer(#[source] MemberProofError),
    /// The signed manifest is of another cluster.
    #[error("its manifest is signed for the cluster {0}")]
    OtherCluster(Uuid),
    /// The manifest was changed after it was signed.
    #[error("its manifest differs from the one that a member's agent has signed for {0}")]
    Changed(String),
    /// The backup is dated outside the validity of the signer's certificate.
    #[error("the certificate of the member that signed its manifest was not valid at that time")]
    Outdated,
}

/// Key and proof with which an agent signs manifests.
#[derive(Clone)]
pub(crate) struct BackupSigner {
    key: std::sync::Arc<SigningKey>,
    cluster: Uuid,
    proof: MemberProof,
}

impl BackupSigner {
    /// Makes the signer of the agent whose state lies in `layout`, with the newest certificate.
    /// `None` if there is no agent, or if it isn't a member yet.
    pub(crate) fn read(layout: &Layout) -> Option<Self> {
        let (key, loaded) = journal::read(layout).ok()??;
        let join = loaded.extras.join.as_ref()?;
        let proof = redeem::member_proof(layout, &loaded.extras, key.public(), join)?;
        Some(Self { key: std::sync::Arc::new(key), cluster: join.cluster, proof })
    }

    /// Returns the manifest with a signature. A manifest of another cluster is returned unsigned.
    pub(super) fn sign(&self, manifest: Manifest) -> Manifest {
        if manifest.cluster != ClusterFolder::of_cluster(self.cluster).as_str() {
            return manifest;
        }
        let signed = SignedManifest {
            cluster: self.cluster,
            agent: *self.key.public(),
            manifest: manifest.clone(),
        };
        let signed = Jws::sign(JwsType::Backup, &self.key, &signed);
        Manifest {
            signature: Some(ManifestSignature { signed, proof: self.proof.clone() }),
            ..manifest
        }
    }
}

/// Why a file of `--trust` can't be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TrustFileError {
    /// The file can't be read.
    #[error("it can't be read")]
    Read(#[source] std::io::Error),
    /// The file is too large.
    #[error("it has more than {MAX_TRUST_FILE} bytes")]
    Large,
    /// The statements are refused.
    #[error("its statements are refused")]
    Statements(#[source] StatementError),
    /// The file is something else.
    #[error(
        "it is none of these: statements.json of `muster-discovery ca issue`, the file of \
         `muster-discovery cluster export`, peer-ca.crt in agent/tls of a member's data directory"
    )]
    Other,
}

/// CAs of a cluster, by which signatures of its members are verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SignatureTrust {
    /// The cluster's id at discovery. `None` if only the CAs are known.
    cluster: Option<Uuid>,
    /// Certificates of the peers' CAs, PEM.
    peer_cas: Vec<String>,
    /// Certificates of the peers' CAs that the cluster has dropped, PEM. Known from statements
    /// only.
    dropped_cas: Vec<String>,
}

/// The member whose agent has signed a manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ManifestSigner {
    /// The member as its certificate names it.
    pub member: CertifiedMember,
    /// Whether the certificate is by a CA that the cluster has dropped since. If that CA's key was
    /// stolen, the signature proves nothing.
    pub is_by_dropped_ca: bool,
}

/// A part of the file that `muster-discovery cluster export` writes.
#[derive(Deserialize)]
struct ExportedStatements {
    statements: Vec<Jws>,
}

impl SignatureTrust {
    /// Reads the file that an operator trusts: statements, an export of the cluster, or CAs in PEM.
    pub(crate) fn read_file(path: &Path) -> Result<Self, TrustFileError> {
        let size = std::fs::metadata(path).map_err(TrustFileError::Read)?.len();
        if size > MAX_TRUST_FILE {
            return Err(TrustFileError::Large);
        }
        Self::parse(&std::fs::read(path).map_err(TrustFileError::Read)?)
    }

    fn parse(bytes: &[u8]) -> Result<Self, TrustFileError> {
        let text = std::str::from_utf8(bytes).map_err(|_| TrustFileError::Other)?;
        if let Ok(statements) = serde_json::from_str::<Vec<Jws>>(text) {
            return Self::of_statements(&statements);
        }
        if let Ok(export) = serde_json::from_str::<ExportedStatements>(text) {
            return Self::of_statements(&export.statements);
        }
        let certificates = text.split_inclusive(PEM_END).filter(|part| part.contains(PEM_END));
        let peer_cas: Vec<String> = certificates.map(str::to_owned).collect();
        match !peer_cas.is_empty() && peer_cas.iter().all(|ca| ca_der(ca).is_some()) {
            true => Ok(Self { cluster: None, peer_cas, dropped_cas: Vec::new() }),
            false => Err(TrustFileError::Other),
        }
    }

    fn of_statements(statements: &[Jws]) -> Result<Self, TrustFileError> {
        let chain = StatementChain::verify_links(statements).map_err(TrustFileError::Statements)?;
        Ok(Self::of_chain(&chain))
    }

    /// Returns all CAs that the cluster ever trusted.
    fn of_chain(chain: &StatementChain) -> Self {
        let peer_cas: Vec<String> = chain.newest().peer_cas().map(str::to_owned).collect();
        let mut dropped_cas: Vec<String> = Vec::new();
        for ca in chain.statements().flat_map(|statement| statement.peer_cas()) {
            if !peer_cas.iter().chain(&dropped_cas).any(|known| known == ca) {
                dropped_cas.push(ca.to_owned());
            }
        }
        Self { cluster: Some(chain.newest().cluster), peer_cas, dropped_cas }
    }

    /// Returns the CAs in the journal of the agent whose state lies in `layout`. `None` if there is
    /// no agent, or if `folder` has the backups of another cluster.
    pub(crate) fn of_agent(layout: &Layout, folder: &ClusterFolder) -> Option<Self> {
        let (_, loaded) = journal::read(layout).ok()??;
        let join = loaded.extras.join?;
        let chain =
            StatementChain::verify_from_pin(&loaded.extras.statements, &join.statement).ok()?;
        (ClusterFolder::of_cluster(join.cluster) == *folder).then(|| Self::of_chain(&chain))
    }

    /// Verifies a manifest, and returns the member whose agent has signed it.
    pub(super) fn verify(&self, manifest: &Manifest) -> Result<ManifestSigner, SignatureError> {
        let ManifestSignature { signed, proof } =
            manifest.signature.as_ref().ok_or(SignatureError::Unsigned)?;
        let claimed: SignedManifest =
            signed.claims_unverified(JwsType::Backup).map_err(SignatureError::Jws)?;
        let found: SignedManifest =
            signed.verify(JwsType::Backup, &claimed.agent).map_err(SignatureError::Jws)?;
        let is_other = self.cluster.is_some_and(|cluster| cluster != found.cluster);
        if is_other || ClusterFolder::of_cluster(found.cluster).as_str() != manifest.cluster {
            return Err(SignatureError::OtherCluster(found.cluster));
        }
        let by = |cas: &[String]| {
            proof.verify_by_cas(&found.agent, found.cluster, cas.iter().map(String::as_str))
        };
        let (member, is_by_dropped_ca) = match (by(&self.peer_cas), by(&self.dropped_cas)) {
            (Ok(proven), _) => (proven.member, false),
            (Err(_), Ok(proven)) => (proven.member, true),
            (Err(error), Err(_)) => return Err(SignatureError::Signer(error)),
        };
        if found.manifest != (Manifest { signature: None, ..manifest.clone() }) {
            let signed = found.manifest.name.parse::<BackupName>();
            let signed =
                signed.map_or_else(|_| "another backup".to_owned(), |name| name.to_string());
            return Err(SignatureError::Changed(signed));
        }
        let begun = found.manifest.begun_at.as_second();
        let is_valid = Validity::of_pem(&proof.certificate).is_some_and(|life| {
            (life.begins.saturating_sub(CLOCK_TOLERANCE)..=life.ends).contains(&begun)
        });
        let signer = ManifestSigner { member, is_by_dropped_ca };
        if is_valid { Ok(signer) } else { Err(SignatureError::Outdated) }
    }
}

/// How the signatures of manifests are verified.
#[derive(Clone, Debug, Default)]
pub(crate) struct SignaturePolicy {
    /// CAs by which signatures are verified. Without CAs, no signature is verified.
    pub trust: Option<SignatureTrust>,
    /// Whether backups without a signature are accepted. A wrong signature is always refused.
    pub allows_unsigned: bool,
}

/// Result of the verification of a backup's signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SignatureFinding {
    /// The agent of this member has signed the manifest.
    Valid(ManifestSigner),
    /// The manifest isn't signed.
    Unsigned,
    /// The policy has no CAs by which the signature could be verified.
    Unchecked,
}

impl SignatureFinding {
    /// Returns the finding's name in JSON.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Valid(ManifestSigner { is_by_dropped_ca: true, .. }) => "by-dropped-ca",
            Self::Valid(_) => "valid",
            Self::Unsigned => "unsigned",
            Self::Unchecked => "unchecked",
        }
    }

    /// Describes the finding in a few words.
    pub(crate) fn to_text(self) -> String {
        match self {
            Self::Valid(ManifestSigner { member, is_by_dropped_ca }) => {
                let signer = match member {
                    CertifiedMember::Founder(seat) => format!("the founder of seat {seat}"),
                    CertifiedMember::Added(id) => format!("member {:x}", id.get()),
                };
                let doubt = match is_by_dropped_ca {
                    true => " with a certificate of a CA that the cluster has dropped",
                    false => "",
                };
                format!("signed by {signer}{doubt}")
            }
            Self::Unsigned => "NOT SIGNED".to_owned(),
            Self::Unchecked => "signature not checked".to_owned(),
        }
    }
}

impl SignaturePolicy {
    /// Verifies the signature of a manifest, as far as the policy asks for it.
    pub(super) fn check(&self, manifest: &Manifest) -> Result<SignatureFinding, SignatureError> {
        let Some(trust) = &self.trust else { return Ok(SignatureFinding::Unchecked) };
        match trust.verify(manifest) {
            Ok(member) => Ok(SignatureFinding::Valid(member)),
            Err(SignatureError::Unsigned) if self.allows_unsigned => Ok(SignatureFinding::Unsigned),
            Err(error) => Err(error),
        }
    }
}

/// Makes the policy of a command: the file that was typed, or else the journal of this host's
/// agent.
pub(crate) fn resolve_policy(
    typed: Option<&Path>,
    allows_unsigned: bool,
    data_dir: &Path,
    folder: &ClusterFolder,
) -> Result<SignaturePolicy, TrustFileError> {
    let trust = match typed {
        Some(path) => Some(SignatureTrust::read_file(path)?),
        None => {
            let layout = Layout::new_read_only(data_dir).ok();
            layout.and_then(|layout| SignatureTrust::of_agent(&layout, folder))
        }
    };
    Ok(SignaturePolicy { trust, allows_unsigned })
}

#[cfg(test)]
mod tests;
