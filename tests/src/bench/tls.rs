//! One CA and one certificate for everybody: what TLS costs doesn't depend on whose it is.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::ClientConfig;

/// Files for servers, and a configuration for clients.
#[derive(Clone, Debug)]
pub(super) struct Credentials {
    dir: PathBuf,
    pub client: Arc<ClientConfig>,
}

impl Credentials {
    /// Makes them in `dir`.
    pub(super) fn make(dir: &Path) -> Result<Self> {
        fs_err::create_dir_all(dir)?;
        let mut ca = CertificateParams::new(Vec::new())?;
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        ca.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let ca_key = KeyPair::generate()?;
        fs_err::write(dir.join("ca.crt"), ca.self_signed(&ca_key)?.pem())?;
        let issuer = Issuer::new(ca, ca_key);
        let mut leaf =
            CertificateParams::new(vec!["127.0.0.1".to_owned(), "localhost".to_owned()])?;
        leaf.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate()?;
        fs_err::write(dir.join("client.crt"), leaf.signed_by(&key, &issuer)?.pem())?;
        fs_err::write(dir.join("client.key"), key.serialize_pem())?;
        Ok(Self { dir: dir.to_owned(), client: crate::client::tls_from(dir)? })
    }

    /// The flags that make a server use them towards clients and peers.
    pub(super) fn flags(&self) -> Vec<String> {
        let path = |name: &str| self.dir.join(name).display().to_string();
        ["", "peer-"]
            .iter()
            .flat_map(|prefix| {
                [
                    format!("--{prefix}cert-file={}", path("client.crt")),
                    format!("--{prefix}key-file={}", path("client.key")),
                    format!("--{prefix}trusted-ca-file={}", path("ca.crt")),
                    format!("--{prefix}client-cert-auth"),
                ]
            })
            .collect()
    }
}
