//! A CA and one certificate for all servers and clients, for tests where the identity doesn't
//! matter.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::ClientConfig;

/// Certificate files for servers, and a TLS configuration for clients.
#[derive(Clone, Debug)]
pub struct Credentials {
    dir: PathBuf,
    /// TLS configuration of a client that presents the certificate.
    pub client: Arc<ClientConfig>,
}

impl Credentials {
    /// Creates CA, certificate and key in `dir`, for servers on these hosts.
    pub fn make(dir: &Path, hosts: &[String]) -> Result<Self> {
        fs_err::create_dir_all(dir)?;
        let mut ca = CertificateParams::new(Vec::new())?;
        // The CA needs a name of its own. Otherwise the certificate's issuer would equal its
        // subject, and some programs would consider it self-signed.
        ca.distinguished_name.push(DnType::CommonName, "tests' CA");
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        ca.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let ca_key = KeyPair::generate()?;
        fs_err::write(dir.join("ca.crt"), ca.self_signed(&ca_key)?.pem())?;
        let issuer = Issuer::new(ca, ca_key);
        let mut leaf = CertificateParams::new(hosts)?;
        leaf.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate()?;
        fs_err::write(dir.join("client.crt"), leaf.signed_by(&key, &issuer)?.pem())?;
        fs_err::write(dir.join("client.key"), key.serialize_pem())?;
        Ok(Self { dir: dir.to_owned(), client: crate::client::tls_from(dir)? })
    }

    /// Returns the path of the CA's certificate.
    pub fn ca(&self) -> PathBuf {
        self.dir.join("ca.crt")
    }

    /// Returns flags for a server that presents the certificate to clients, and requests no
    /// certificate from them.
    pub fn flags(&self) -> Vec<String> {
        self.certificate_flags("")
    }

    /// Returns flags for mutual TLS with clients and peers.
    pub fn mutual_flags(&self) -> Vec<String> {
        let mutual = |prefix: &str| {
            let mut flags = self.certificate_flags(prefix);
            flags.push(format!("--{prefix}trusted-ca-file={}", self.ca().display()));
            flags.push(format!("--{prefix}client-cert-auth"));
            flags
        };
        ["", "peer-"].into_iter().flat_map(mutual).collect()
    }

    fn certificate_flags(&self, prefix: &str) -> Vec<String> {
        let path = |name: &str| self.dir.join(name).display().to_string();
        vec![
            format!("--{prefix}cert-file={}", path("client.crt")),
            format!("--{prefix}key-file={}", path("client.key")),
        ]
    }
}
