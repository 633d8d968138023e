//! SHA-256 values and random identifiers, written as lower-case hexadecimal.

use std::fmt;
use std::str::FromStr;

use data_encoding::HEXLOWER;
use ring::rand::{SecureRandom, SystemRandom};

use crate::text::wire_text;

/// Error for a text that isn't lower-case hexadecimal of the expected length.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected {digits} lower-case hexadecimal digits")]
pub struct NotHex {
    /// Expected number of hexadecimal digits.
    pub digits: usize,
}

macro_rules! hex_bytes {
    ($(#[$doc:meta])* $name:ident, $bytes:literal, $digits:literal, $pattern:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub [u8; $bytes]);

        impl $name {
            /// Returns the raw bytes.
            pub fn as_bytes(&self) -> &[u8; $bytes] {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&HEXLOWER.encode(&self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }

        wire_text!($name, $pattern);

        impl FromStr for $name {
            type Err = NotHex;

            fn from_str(text: &str) -> Result<Self, NotHex> {
                let bad = NotHex { digits: $digits };
                let bytes = HEXLOWER.decode(text.as_bytes()).map_err(|_| bad.clone())?;
                Ok(Self(bytes.try_into().map_err(|_| bad)?))
            }
        }
    };
}

hex_bytes!(
    /// A SHA-256 value, as 32 bytes.
    Digest, 32, 64, "^[0-9a-f]{64}$"
);
hex_bytes!(
    /// Random id of one data directory of a member. It is made together with the agent's key, and
    /// both are lost with the directory.
    Incarnation, 16, 32, "^[0-9a-f]{32}$"
);
hex_bytes!(
    /// Random number that, together with the boot counter, identifies one run of an agent.
    Nonce, 16, 32, "^[0-9a-f]{32}$"
);

hex_bytes!(
    /// Id of one change of one cluster. `muster-node` commits the id together with the change, and
    /// refuses a second change with the same id.
    OperationId, 16, 32, "^[0-9a-f]{32}$"
);
hex_bytes!(
    /// Id of a member in its Raft cluster, as etcd's API has it.
    MemberId, 8, 16, "^[0-9a-f]{16}$"
);

impl MemberId {
    /// Makes the id from the number that etcd's API has.
    pub fn new(id: u64) -> Self {
        Self(id.to_be_bytes())
    }

    /// Returns the id as the number that etcd's API has.
    pub fn get(self) -> u64 {
        u64::from_be_bytes(self.0)
    }
}

impl Digest {
    /// Computes the SHA-256 of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self::of_parts(&[bytes])
    }

    /// Computes the SHA-256 of the concatenation of `parts`.
    pub fn of_parts(parts: &[&[u8]]) -> Self {
        let mut context = ring::digest::Context::new(&ring::digest::SHA256);
        for part in parts {
            context.update(part);
        }
        let mut value = [0; 32];
        value.copy_from_slice(context.finish().as_ref());
        Self(value)
    }
}

impl Incarnation {
    /// Generates a new random incarnation.
    pub fn random() -> Self {
        Self(random())
    }
}

impl Nonce {
    /// Generates a new random nonce.
    pub fn random() -> Self {
        Self(random())
    }
}

/// Returns bytes from the kernel's random generator.
pub(crate) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).expect("the kernel's random generator always answers");
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_is_sha256_of_the_concatenation() {
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(Digest::of(b"abc").to_string(), expected);
        assert_eq!(Digest::of_parts(&[b"a", b"", b"bc"]).to_string(), expected);
    }

    #[test]
    fn only_lower_case_hex_of_the_right_length_is_read() {
        let text = Digest::of(b"abc").to_string();
        assert_eq!(text.parse(), Ok(Digest::of(b"abc")));
        for bad in [text.to_uppercase(), text[2..].to_owned(), format!(" {text}"), String::new()] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
        }
    }
}
