//! The first configuration: what only a member without a log is told.
//!
//! Whoever has a log takes its cluster's members from its store. Then `--initial-cluster` may be
//! missing or long out of date, and nobody looks at it. Texts are etcd's
//! (`etcdserver/api/membership`, `etcdserver/config`).

use super::{Config, ConfigError, PeerUrl, validate::NO_PEER_CERTIFICATE};
use crate::identity::{Incarnation, InitialCluster, MemberDocument};

impl Config {
    /// The first configuration, with ids and bindings.
    ///
    /// # Errors
    /// If the settings that describe it contradict each other, or don't name this member.
    pub fn initial(&self) -> Result<InitialCluster, ConfigError> {
        named(self)
            .and_then(|()| advertised(self))
            .and_then(|()| document(self))
            .map_err(ConfigError::Relation)?;
        let members: Vec<(String, Vec<String>)> = self
            .initial_cluster
            .iter()
            .map(|(name, urls)| (name.clone(), urls.iter().map(ToString::to_string).collect()))
            .collect();
        Ok(InitialCluster::new(&members, &self.initial_cluster_token, self.document.as_ref()))
    }

    /// Whether the settings say which members a running cluster has, this one among them. Where this
    /// one is reached was said when it was added.
    ///
    /// # Errors
    /// If they contradict each other, or don't name this member.
    pub(crate) fn check_join(&self) -> Result<(), ConfigError> {
        named(self).map_err(ConfigError::Relation)
    }

    /// The incarnation that the member document, if there is one, binds this member to.
    #[must_use]
    pub fn bound_incarnation(&self) -> Option<Incarnation> {
        Some(self.document.as_ref()?.member(&self.name)?.incarnation)
    }
}

/// The members can be told apart, and this one is among them.
fn named(config: &Config) -> Result<(), String> {
    if !config.initial_cluster.iter().any(|(name, _)| *name == config.name) {
        return Err(format!(
            "couldn't find local name \"{}\" in the initial cluster configuration",
            config.name
        ));
    }
    if config.peer_tls.is_none()
        && config.initial_cluster.iter().flat_map(|(_, urls)| urls).any(PeerUrl::is_https)
    {
        return Err(NO_PEER_CERTIFICATE.to_owned());
    }
    let all: Vec<&PeerUrl> = config.initial_cluster.iter().flat_map(|(_, urls)| urls).collect();
    let duplicate = all.iter().enumerate().any(|(n, url)| all[..n].contains(url));
    if duplicate {
        return Err(format!("initial cluster {} has duplicate url", shown(config)));
    }
    Ok(())
}

fn shown(config: &Config) -> String {
    let mut parts: Vec<String> = config
        .initial_cluster
        .iter()
        .flat_map(|(name, urls)| urls.iter().map(move |url| format!("{name}={url}")))
        .collect();
    parts.sort_unstable();
    parts.join(",")
}

/// The others are told the same of this member as it says itself.
fn advertised(config: &Config) -> Result<(), String> {
    let own = config.initial_cluster.iter().find(|(name, _)| *name == config.name);
    let own = own.map(|(_, urls)| urls.as_slice()).unwrap_or_default();
    let missing = |of: &[PeerUrl], from: &[PeerUrl]| {
        of.iter().find(|url| !from.iter().any(|other| url.reaches_same(other))).cloned()
    };
    let list =
        |urls: &[PeerUrl]| urls.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let advertised = &config.advertise_peer_urls;
    if let Some(url) = missing(own, advertised) {
        return Err(format!(
            "--initial-cluster has {}={url} but missing from --initial-advertise-peer-urls={}",
            config.name,
            list(advertised)
        ));
    }
    if let Some(url) = missing(advertised, own) {
        return Err(format!(
            "--initial-advertise-peer-urls has {url} but missing from --initial-cluster={}",
            shown(config)
        ));
    }
    Ok(())
}

/// The document must speak of the same cluster as the command line.
fn document(config: &Config) -> Result<(), String> {
    let Some(document) = &config.document else {
        return Ok(());
    };
    let own = document.members.get(document.seat as usize - 1).map(|member| member.name.as_str());
    if own != Some(config.name.as_str()) {
        return Err(format!(
            "--muster-document is for member \"{}\", not for \"{}\"",
            own.unwrap_or_default(),
            config.name
        ));
    }
    if document.document != config.initial_cluster_token {
        return Err("--muster-document and --initial-cluster-token differ".to_owned());
    }
    if !same_members(config, document) {
        return Err("--muster-document and --initial-cluster do not name the same members, in the same order, with the same URLs".to_owned());
    }
    Ok(())
}

fn same_members(config: &Config, document: &MemberDocument) -> bool {
    let sorted = |mut urls: Vec<String>| {
        urls.sort_unstable();
        urls
    };
    config.initial_cluster.len() == document.members.len()
        && config.initial_cluster.iter().zip(&document.members).all(|((name, urls), record)| {
            *name == record.name
                && sorted(urls.iter().map(ToString::to_string).collect())
                    == sorted(record.peer_urls.clone())
        })
}
