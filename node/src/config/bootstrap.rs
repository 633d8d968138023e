//! The first configuration of a cluster. A member takes it from its flags only if it has no log
//! yet.
//!
//! A member with a log takes the members from its store. It ignores `--initial-cluster`, which may
//! be missing or out of date by then. The error texts are etcd's (`etcdserver/api/membership`,
//! `etcdserver/config`).

use node_state::identity::{Incarnation, InitialCluster, MemberDocument};

use super::{
    Config, ConfigError, PeerUrl,
    resolve::{NamedUrls, named_urls},
    validate::NO_PEER_CERTIFICATE,
};

impl Config {
    /// Returns the first configuration of the cluster, with member ids. The member document, if
    /// there is one, binds members to keys and incarnations.
    ///
    /// # Errors
    /// Fails if the settings contradict each other, or do not name this member.
    pub fn first_configuration(&self) -> Result<InitialCluster, ConfigError> {
        let list = &self.initial_cluster;
        check_names(&self.name, list)
            .and_then(|()| check_peer_tls(self))
            .and_then(|()| check_advertised_urls(&self.name, list, &self.advertise_peer_urls))
            .and_then(|()| check_document(self))
            .map_err(ConfigError::Relation)?;
        let document = self.document.as_ref();
        Ok(InitialCluster::new(&as_text(list), &self.initial_cluster_token, document))
    }

    /// Checks that the settings list the members of a running cluster, including this one. The URLs
    /// of this member are not checked, because they were set when the member was added.
    ///
    /// # Errors
    /// Fails if the settings contradict each other, or do not name this member.
    pub(crate) fn check_join(&self) -> Result<(), ConfigError> {
        check_names(&self.name, &self.initial_cluster)
            .and_then(|()| check_peer_tls(self))
            .map_err(ConfigError::Relation)
    }

    /// Returns the incarnation to which the member document binds this member, if there is such a
    /// document.
    #[must_use]
    pub fn bound_incarnation(&self) -> Option<Incarnation> {
        Some(self.document.as_ref()?.member(&self.name)?.incarnation)
    }
}

/// Returns the first configuration of a cluster that is restored from a snapshot. The arguments are
/// the flags of the same names.
///
/// # Errors
/// Fails if the flags can't be parsed, contradict each other, or do not name this member.
pub fn restored_cluster(
    name: &str,
    initial_cluster: &str,
    advertise_peer_urls: &str,
    token: &str,
) -> Result<InitialCluster, ConfigError> {
    let list = named_urls(initial_cluster)?;
    let own = PeerUrl::parse_list(advertise_peer_urls)
        .map_err(|source| ConfigError::Url { flag: "initial-advertise-peer-urls", source })?;
    check_names(name, &list)
        .and_then(|()| check_advertised_urls(name, &list, &own))
        .map_err(ConfigError::Relation)?;
    let cluster = InitialCluster::new(&as_text(&list), token, None);
    match cluster.identical_ids() {
        Some((a, b)) => Err(ConfigError::Relation(format!(
            "member exists with identical ID: {} and {}",
            a.name, b.name
        ))),
        None => Ok(cluster),
    }
}

fn as_text(list: &[NamedUrls]) -> Vec<(String, Vec<String>)> {
    list.iter()
        .map(|(name, urls)| (name.clone(), urls.iter().map(ToString::to_string).collect()))
        .collect()
}

/// Checks that no URL occurs twice in `list`, and that `list` contains this member.
fn check_names(name: &str, list: &[NamedUrls]) -> Result<(), String> {
    if !list.iter().any(|(other, _)| other == name) {
        return Err(format!(
            "couldn't find local name \"{name}\" in the initial cluster configuration"
        ));
    }
    let all: Vec<&PeerUrl> = list.iter().flat_map(|(_, urls)| urls).collect();
    let duplicate = all.iter().enumerate().any(|(n, url)| all[..n].contains(url));
    if duplicate {
        return Err(format!("initial cluster {} has duplicate url", format_cluster(list)));
    }
    Ok(())
}

fn check_peer_tls(config: &Config) -> Result<(), String> {
    let urls = config.initial_cluster.iter().flat_map(|(_, urls)| urls);
    if config.peer_tls.is_none() && urls.into_iter().any(PeerUrl::is_https) {
        return Err(NO_PEER_CERTIFICATE.to_owned());
    }
    Ok(())
}

fn format_cluster(list: &[NamedUrls]) -> String {
    let mut parts: Vec<String> = list
        .iter()
        .flat_map(|(name, urls)| urls.iter().map(move |url| format!("{name}={url}")))
        .collect();
    parts.sort_unstable();
    parts.join(",")
}

/// Checks that the initial cluster `members` gives this member the URLs that it advertises.
fn check_advertised_urls(
    name: &str,
    members: &[NamedUrls],
    advertised: &[PeerUrl],
) -> Result<(), String> {
    let own = members.iter().find(|(other, _)| other == name);
    let own = own.map(|(_, urls)| urls.as_slice()).unwrap_or_default();
    let missing = |of: &[PeerUrl], from: &[PeerUrl]| {
        of.iter().find(|url| !from.iter().any(|other| url.reaches_same(other))).cloned()
    };
    let list =
        |urls: &[PeerUrl]| urls.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    if let Some(url) = missing(own, advertised) {
        return Err(format!(
            "--initial-cluster has {name}={url} but missing from --initial-advertise-peer-urls={}",
            list(advertised)
        ));
    }
    if let Some(url) = missing(advertised, own) {
        return Err(format!(
            "--initial-advertise-peer-urls has {url} but missing from --initial-cluster={}",
            format_cluster(members)
        ));
    }
    Ok(())
}

/// Checks that the member document describes the same cluster as the command line.
fn check_document(config: &Config) -> Result<(), String> {
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
    if document.proposal_hash != config.initial_cluster_token {
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
