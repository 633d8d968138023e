//! Kinds of signed messages.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Kind of a JWS, as its `typ` names it. A signature for one kind is invalid for any other (RFC
/// 8725, section 3.11).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum JwsType {
    /// Statement that defines a cluster; signed by an owner.
    #[serde(rename = "muster-statement+jwt")]
    Statement,
    /// Grant that allows a token's holder to redeem the token; signed by an issuer.
    #[serde(rename = "muster-grant+jwt")]
    Grant,
    /// Confirmation that a token counts after a change of the database; signed by an issuer.
    #[serde(rename = "muster-grant-confirmation+jwt")]
    GrantConfirmation,
    /// Approval of a host that may found a cluster; signed by an issuer.
    #[serde(rename = "muster-approval+jwt")]
    Approval,
    /// Record that describes a host, its keys and its addresses; signed by the agent.
    #[serde(rename = "muster-record+jwt")]
    Record,
    /// Endorsement of a record by the token's holder; signed with the token's key.
    #[serde(rename = "muster-endorsement+jwt")]
    Endorsement,
    /// Redeem envelope with a record, for one service and session; signed by the agent.
    #[serde(rename = "muster-redeem+jwt")]
    Redeem,
    /// Ack, the consent to one whole proposal; signed by the agent.
    #[serde(rename = "muster-ack+jwt")]
    Ack,
    /// Release, the promise to take no part in an epoch any more; signed by the agent.
    #[serde(rename = "muster-release+jwt")]
    Release,
    /// Commit document, a proposal with all acks; signed by the service.
    #[serde(rename = "muster-document+jwt")]
    Document,
    /// Change of the admins; signed by an owner.
    #[serde(rename = "muster-admin+jwt")]
    Admin,
    /// Retirement, the end of a formed cluster; signed by an owner.
    #[serde(rename = "muster-retire+jwt")]
    Retire,
    /// Undoing of a cluster's retirement; signed by an owner.
    #[serde(rename = "muster-unretire+jwt")]
    Unretire,
    /// Order to remove one member or to change its peer URLs; signed by an operator.
    #[serde(rename = "muster-order+jwt")]
    Order,
    /// Statement that another cluster continues a lost cluster's data; signed by an operator.
    #[serde(rename = "muster-recovery+jwt")]
    Recovery,
    /// Service statement, the URLs and TLS keys of the discovery service; signed by an owner.
    #[serde(rename = "muster-service+jwt")]
    Service,
    /// Observation of which members of a cluster can't be reached; signed by an agent.
    #[serde(rename = "muster-observation+jwt")]
    Observation,
    /// Address statement, a member's addresses after a move; signed by its agent.
    #[serde(rename = "muster-address+jwt")]
    MemberAddress,
    /// Manifest of a cluster's backup; signed by the agent that saved it.
    #[serde(rename = "muster-backup+jwt")]
    Backup,
    /// Checkpoint of a cluster's event chain, which agents keep; signed by the service.
    #[serde(rename = "muster-checkpoint+jwt")]
    Checkpoint,
    /// RFC 7523 client assertion; signed by an admin or agent.
    #[serde(rename = "muster-assertion+jwt")]
    Assertion,
    /// RFC 9068 access token; signed by the service.
    #[serde(rename = "at+jwt")]
    Access,
}

impl JwsType {
    /// Returns the value of `typ` in the JWS header.
    pub fn as_str(self) -> &'static str {
        match self {
            JwsType::Statement => "muster-statement+jwt",
            JwsType::Grant => "muster-grant+jwt",
            JwsType::GrantConfirmation => "muster-grant-confirmation+jwt",
            JwsType::Approval => "muster-approval+jwt",
            JwsType::Record => "muster-record+jwt",
            JwsType::Endorsement => "muster-endorsement+jwt",
            JwsType::Redeem => "muster-redeem+jwt",
            JwsType::Ack => "muster-ack+jwt",
            JwsType::Release => "muster-release+jwt",
            JwsType::Document => "muster-document+jwt",
            JwsType::Admin => "muster-admin+jwt",
            JwsType::Retire => "muster-retire+jwt",
            JwsType::Unretire => "muster-unretire+jwt",
            JwsType::Order => "muster-order+jwt",
            JwsType::Recovery => "muster-recovery+jwt",
            JwsType::Service => "muster-service+jwt",
            JwsType::Observation => "muster-observation+jwt",
            JwsType::MemberAddress => "muster-address+jwt",
            JwsType::Backup => "muster-backup+jwt",
            JwsType::Checkpoint => "muster-checkpoint+jwt",
            JwsType::Assertion => "muster-assertion+jwt",
            JwsType::Access => "at+jwt",
        }
    }

    /// Returns the newest payload version that this program reads. Some kinds have no version
    /// (`None`): if their payload changes, they get a new `typ`.
    pub fn version(self) -> Option<u32> {
        match self {
            // Replacement policies need version 2.
            JwsType::Grant => Some(2),
            // Additional trusted CAs need version 2.
            JwsType::Statement => Some(2),
            JwsType::Record
            | JwsType::Document
            | JwsType::Admin
            | JwsType::Order
            | JwsType::Recovery
            | JwsType::Service => Some(1),
            JwsType::GrantConfirmation
            | JwsType::Approval
            | JwsType::Endorsement
            | JwsType::Redeem
            | JwsType::Ack
            | JwsType::Release
            | JwsType::Retire
            | JwsType::Unretire
            | JwsType::Observation
            | JwsType::MemberAddress
            | JwsType::Backup
            | JwsType::Checkpoint
            | JwsType::Assertion
            | JwsType::Access => None,
        }
    }

    /// Returns the maximum length of the compact form, in bytes. A commit document contains nine
    /// records with their grants, so its limit must fit their sum.
    pub const fn max_bytes(self) -> usize {
        match self {
            JwsType::Document => super::MAX_JWS,
            JwsType::Statement => 24 * 1024,
            // The payload contains a record, its endorsement and an identity document. Base64 makes
            // them a third longer.
            JwsType::Redeem => 18 * 1024,
            JwsType::Record | JwsType::Service => 4 * 1024,
            // A manifest has up to 16 public keys and five texts that the cluster sets.
            JwsType::Backup => 12 * 1024,
            JwsType::Grant => 2 * 1024,
            JwsType::GrantConfirmation
            | JwsType::Approval
            | JwsType::Endorsement
            | JwsType::Ack
            | JwsType::Release
            | JwsType::Admin
            | JwsType::Retire
            | JwsType::Unretire
            | JwsType::Order
            | JwsType::Recovery
            | JwsType::Observation
            | JwsType::MemberAddress
            | JwsType::Checkpoint
            | JwsType::Assertion
            | JwsType::Access => 2 * 1024,
        }
    }
}

impl fmt::Display for JwsType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
