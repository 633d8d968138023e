//! The kinds of signed message.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a JWS is, as its `typ` says (RFC 8725, section 3.11: a signature made for one purpose is
/// worth nothing for another).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Typ {
    /// What a cluster is; by an owner.
    #[serde(rename = "muster-statement+jwt")]
    Statement,
    /// That a token's key may redeem; by an issuer.
    #[serde(rename = "muster-grant+jwt")]
    Grant,
    /// What one seat is; by the agent.
    #[serde(rename = "muster-record+jwt")]
    Record,
    /// That the token's holder means this record; by the token's key.
    #[serde(rename = "muster-endorsement+jwt")]
    Endorsement,
    /// A record handed to one service, with the session; by the agent.
    #[serde(rename = "muster-redeem+jwt")]
    Redeem,
    /// Consent to one whole proposal; by the agent.
    #[serde(rename = "muster-ack+jwt")]
    Ack,
    /// A promise never to take part in an epoch again; by the agent.
    #[serde(rename = "muster-release+jwt")]
    Release,
    /// The committed list with all consents; by the service.
    #[serde(rename = "muster-document+jwt")]
    Document,
    /// A change of who the admins are; by an owner.
    #[serde(rename = "muster-admin+jwt")]
    Admin,
    /// The end of a formed cluster; by an owner.
    #[serde(rename = "muster-retire+jwt")]
    Retire,
    /// That the end of a formed cluster is taken back; by an owner.
    #[serde(rename = "muster-unretire+jwt")]
    Unretire,
    /// That one member is to go or to move; by an operator.
    #[serde(rename = "muster-order+jwt")]
    Order,
    /// That a lost cluster's data goes on as another cluster; by an operator.
    #[serde(rename = "muster-recovery+jwt")]
    Recovery,
    /// RFC 7523 client assertion; by an admin or agent.
    #[serde(rename = "muster-assertion+jwt")]
    Assertion,
    /// RFC 9068 access token; by the service.
    #[serde(rename = "at+jwt")]
    Access,
}

impl Typ {
    /// The text that stands in the header.
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

    /// Longest compact form. A document holds nine records and their grants; the sum must fit.
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
