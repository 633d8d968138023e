//! Kinds of signed messages.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Kind of a JWS, as its `typ` says. A signature made for one purpose is worth nothing for another
/// (RFC 8725, section 3.11).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Typ {
    /// Statement that says what a cluster is; signed by an owner.
    #[serde(rename = "muster-statement+jwt")]
    Statement,
    /// Grant that lets a token's key redeem; signed by an issuer.
    #[serde(rename = "muster-grant+jwt")]
    Grant,
    /// Record that describes one seat; signed by the agent.
    #[serde(rename = "muster-record+jwt")]
    Record,
    /// Endorsement of a record by the token's holder; signed by the token's key.
    #[serde(rename = "muster-endorsement+jwt")]
    Endorsement,
    /// Record handed to one service, with the session; signed by the agent.
    #[serde(rename = "muster-redeem+jwt")]
    Redeem,
    /// Consent to one whole proposal; signed by the agent.
    #[serde(rename = "muster-ack+jwt")]
    Ack,
    /// Promise never to take part in an epoch again; signed by the agent.
    #[serde(rename = "muster-release+jwt")]
    Release,
    /// Committed list with all acks; signed by the service.
    #[serde(rename = "muster-document+jwt")]
    Document,
    /// Change of the admins; signed by an owner.
    #[serde(rename = "muster-admin+jwt")]
    Admin,
    /// Retirement, the end of a formed cluster; signed by an owner.
    #[serde(rename = "muster-retire+jwt")]
    Retire,
    /// Revocation of a formed cluster's retirement; signed by an owner.
    #[serde(rename = "muster-unretire+jwt")]
    Unretire,
    /// Order that one member goes or moves; signed by an operator.
    #[serde(rename = "muster-order+jwt")]
    Order,
    /// Statement that a lost cluster's data goes on as another cluster; signed by an operator.
    #[serde(rename = "muster-recovery+jwt")]
    Recovery,
    /// RFC 7523 client assertion; signed by an admin or agent.
    #[serde(rename = "muster-assertion+jwt")]
    Assertion,
    /// RFC 9068 access token; signed by the service.
    #[serde(rename = "at+jwt")]
    Access,
}

impl Typ {
    /// Returns the text that stands in the header.
    pub fn as_str(self) -> &'static str {
        match self {
            Typ::Statement => "muster-statement+jwt",
            Typ::Grant => "muster-grant+jwt",
            Typ::Record => "muster-record+jwt",
            Typ::Endorsement => "muster-endorsement+jwt",
            Typ::Redeem => "muster-redeem+jwt",
            Typ::Ack => "muster-ack+jwt",
            Typ::Release => "muster-release+jwt",
            Typ::Document => "muster-document+jwt",
            Typ::Admin => "muster-admin+jwt",
            Typ::Retire => "muster-retire+jwt",
            Typ::Unretire => "muster-unretire+jwt",
            Typ::Order => "muster-order+jwt",
            Typ::Recovery => "muster-recovery+jwt",
            Typ::Assertion => "muster-assertion+jwt",
            Typ::Access => "at+jwt",
        }
    }

    /// Returns the longest compact form, in bytes. A document holds nine records and their grants,
    /// so the sum must fit.
    pub fn max_bytes(self) -> usize {
        match self {
            Typ::Document => super::MAX_JWS,
            Typ::Statement => 24 * 1024,
            Typ::Redeem => 12 * 1024,
            Typ::Record => 4 * 1024,
            Typ::Grant => 2 * 1024,
            Typ::Endorsement
            | Typ::Ack
            | Typ::Release
            | Typ::Admin
            | Typ::Retire
            | Typ::Unretire
            | Typ::Order
            | Typ::Recovery
            | Typ::Assertion
            | Typ::Access => 2 * 1024,
        }
    }
}

impl fmt::Display for Typ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
