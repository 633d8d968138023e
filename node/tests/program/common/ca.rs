//! A certificate authority for TLS tests. It stands for an operator's own CA.

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, date_time_ymd,
};

pub(crate) struct OperatorCa {
    issuer: Issuer<'static, KeyPair>,
    pub pem: String,
}

impl OperatorCa {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    pub(crate) fn leaf(&self, key: &KeyPair, expired: bool) -> String {
        let mut params = on_loopback();
        if expired {
            params.not_before = date_time_ymd(2020, 1, 1);
            params.not_after = date_time_ymd(2021, 1, 1);
        }
        params.signed_by(key, &self.issuer).unwrap().pem()
    }

    /// Returns a certificate for `key` with the common name `name`, or with an empty subject.
    pub(crate) fn named(&self, key: &KeyPair, name: Option<&str>) -> String {
        let mut params = on_loopback();
        params.distinguished_name = DistinguishedName::new();
        if let Some(name) = name {
            params.distinguished_name.push(DnType::CommonName, name);
        }
        params.signed_by(key, &self.issuer).unwrap().pem()
    }
}

fn on_loopback() -> CertificateParams {
    let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params
}
