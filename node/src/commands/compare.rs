//! `muster-node compare`: compares every key of two running clusters, and their users and roles.

use std::{cmp::Ordering, path::PathBuf, time::Instant};

use clap::Args;
use serde::Serialize;

use super::{
    AlignedLines, FAILED, USAGE,
    cluster::{ClusterAddress, ClusterReadError, ClusterReader, KeyPages, LaterChanges},
    comparison::{KeyComparison, KeyDifference, shown_key},
    connection::ClientTls,
    print, print_error,
    users::{AuthComparison, compare_auth},
};

/// Addresses and TLS files of two clusters.
#[derive(Debug, Args)]
pub(super) struct ClusterPairArgs {
    /// Client URLs of the cluster from which the data comes.
    #[arg(long, value_name = "URL,...")]
    source: String,
    /// The CA that must have signed the certificates of the source's members, PEM.
    #[arg(long, value_name = "FILE")]
    source_cacert: Option<PathBuf>,
    /// The client certificate to present to the source, PEM.
    #[arg(long, value_name = "FILE", requires = "source_key")]
    source_cert: Option<PathBuf>,
    /// The private key of --source-cert, PEM.
    #[arg(long, value_name = "FILE", requires = "source_cert")]
    source_key: Option<PathBuf>,
    /// Client URLs of the cluster that should have the same data as the source.
    #[arg(long, value_name = "URL,...")]
    target: String,
    /// The CA that must have signed the certificates of the target's members, PEM.
    #[arg(long, value_name = "FILE")]
    target_cacert: Option<PathBuf>,
    /// The client certificate to present to the target, PEM.
    #[arg(long, value_name = "FILE", requires = "target_key")]
    target_cert: Option<PathBuf>,
    /// The private key of --target-cert, PEM.
    #[arg(long, value_name = "FILE", requires = "target_cert")]
    target_key: Option<PathBuf>,
}

impl ClusterPairArgs {
    pub(super) fn source(&self) -> ClusterAddress {
        let own = self.source_cert.clone().zip(self.source_key.clone());
        let ca = self.source_cacert.clone();
        ClusterAddress {
            urls: split_urls(&self.source),
            tls: ClientTls { ca_flag: "--source-cacert", ca, own },
        }
    }

    pub(super) fn target(&self) -> ClusterAddress {
        let own = self.target_cert.clone().zip(self.target_key.clone());
        let ca = self.target_cacert.clone();
        ClusterAddress {
            urls: split_urls(&self.target),
            tls: ClientTls { ca_flag: "--target-cacert", ca, own },
        }
    }
}

fn split_urls(list: &str) -> Vec<String> {
    list.split(',').map(|url| url.trim().to_owned()).collect()
}

/// Flags of `muster-node compare`.
#[derive(Debug, Args)]
pub(super) struct CompareArgs {
    #[command(flatten)]
    clusters: ClusterPairArgs,
    /// Read both clusters at this revision. Default: each one's newest revision.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(1..))]
    revision: Option<i64>,
    /// Print one JSON document.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum CompareError {
    #[error("the source cannot be read")]
    Source(#[source] ClusterReadError),
    #[error("the target cannot be read")]
    Target(#[source] ClusterReadError),
}

impl CompareError {
    /// Whether a wrong command line caused the error. The command then exits with the code for
    /// wrong usage.
    pub(super) fn is_usage(&self) -> bool {
        match self {
            Self::Source(error) | Self::Target(error) => error.is_usage(),
        }
    }
}

/// Result of a comparison.
#[derive(Debug, Serialize)]
pub(super) struct CompareReport {
    /// Whether keys, users and roles were all compared, and none differs.
    pub equal: bool,
    pub source: ComparedCluster,
    pub target: ComparedCluster,
    /// Number of keys that differ.
    pub differences: u64,
    pub first_differences: Vec<KeyDifference>,
    pub auth: AuthComparison,
    /// Duration of the comparison in seconds.
    pub seconds: f64,
}

/// One cluster's part in the result of a comparison.
#[derive(Debug, Serialize)]
pub(super) struct ComparedCluster {
    /// Client URL of the member that was asked.
    pub url: String,
    /// Cluster id in hexadecimal digits.
    pub cluster_id: String,
    /// Revision that was compared.
    pub revision: i64,
    /// Number of keys at the compared revision.
    pub keys: u64,
    /// Number of leases that existed when the comparison ended.
    pub leases: u64,
    /// Number of changes after the compared revision that clients have made.
    pub later_changes: u64,
    /// Key of the first change by a client after the compared revision, in the form that
    /// [`KeyDifference::key`] has.
    pub first_changed_key: Option<String>,
    /// Number of keys that have expired with their leases after the compared revision.
    pub expired_keys: u64,
}

impl ComparedCluster {
    fn new(cluster: &ClusterReader, revision: i64, keys: u64, changes: &LaterChanges) -> Self {
        Self {
            url: cluster.url.clone(),
            cluster_id: format!("{:x}", cluster.cluster_id),
            revision,
            keys,
            leases: changes.leases.len() as u64,
            later_changes: changes.by_clients,
            first_changed_key: changes.first_key.as_deref().map(shown_key),
            expired_keys: changes.expired_keys,
        }
    }

    fn describe(&self, lines: &mut AlignedLines, name: &str) {
        let Self { url, cluster_id, revision, keys, leases, .. } = self;
        lines.add(
            name,
            format!(
                "{url}, cluster {cluster_id}: {keys} keys at revision {revision}, {leases} leases"
            ),
        );
        if let Some(key) = &self.first_changed_key {
            let count = self.later_changes;
            lines.add("", format!("{count} changes by clients after that, the first of key {key}"));
        }
        if self.expired_keys > 0 {
            let count = self.expired_keys;
            lines.add("", format!("{count} keys have expired with their leases after that"));
        }
    }
}

impl CompareReport {
    /// Returns the result as lines for a person.
    pub(super) fn to_text(&self) -> String {
        let mut lines = AlignedLines::default();
        self.source.describe(&mut lines, "source");
        self.target.describe(&mut lines, "target");
        for KeyDifference { key, difference } in &self.first_differences {
            lines.add("differs", format!("{key}: {difference}"));
        }
        for difference in self.auth.first_differences() {
            lines.add("differs", difference);
        }
        lines.add("users", self.auth.to_text());
        let keys = match (self.differences, self.first_differences.len()) {
            (0, _) => "all keys are equal".to_owned(),
            (all, shown) => format!("{all} keys differ, {shown} are shown"),
        };
        let (auth, seconds) = (self.auth.outcome(), self.seconds);
        lines.add("result", format!("{keys}; users and roles are {auth} ({seconds:.1} s)"));
        lines.0.trim_end().to_owned()
    }
}

pub(super) fn run(args: &CompareArgs) -> u8 {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let compared = match runtime {
        Ok(runtime) => runtime.block_on(compare(args)),
        Err(error) => {
            print_error(&error);
            return FAILED;
        }
    };
    match compared {
        Ok(report) => {
            let text = if args.json {
                serde_json::to_string(&report).expect("text and numbers are JSON")
            } else {
                report.to_text()
            };
            match print(&text) {
                0 if !report.equal => FAILED,
                code => code,
            }
        }
        Err(error) => {
            print_error(&error);
            if error.is_usage() { USAGE } else { FAILED }
        }
    }
}

async fn compare(args: &CompareArgs) -> Result<CompareReport, CompareError> {
    let (source, target) = (args.clusters.source(), args.clusters.target());
    source.ensure_one_cluster().await.map_err(CompareError::Source)?;
    target.ensure_one_cluster().await.map_err(CompareError::Target)?;
    let source = ClusterReader::connect(&source).await.map_err(CompareError::Source)?;
    let target = ClusterReader::connect(&target).await;
    let target = target.map_err(CompareError::Target)?;
    let newest = (source.revision().await, target.revision().await);
    let source_revision = newest.0.map_err(CompareError::Source)?;
    let target_revision = newest.1.map_err(CompareError::Target)?;
    compare_clusters(
        (&source, args.revision.unwrap_or(source_revision)),
        (&target, args.revision.unwrap_or(target_revision)),
    )
    .await
}

/// Compares every key of the source with the target, each at the given revision. Users and roles
/// are compared as they are now.
///
/// One page of each cluster's keys is in memory at a time, and the ids of all leases.
pub(super) async fn compare_clusters(
    (source, source_revision): (&ClusterReader, i64),
    (target, target_revision): (&ClusterReader, i64),
) -> Result<CompareReport, CompareError> {
    let started = Instant::now();
    let changes_of_source =
        async || source.changes_after(source_revision).await.map_err(CompareError::Source);
    let changes_of_target =
        async || target.changes_after(target_revision).await.map_err(CompareError::Target);
    let before = tokio::try_join!(changes_of_source(), changes_of_target())?;
    let mut comparison = KeyComparison::new(&before.0, &before.1);
    let mut source_pages = KeyPages::new(source, source_revision);
    let mut target_pages = KeyPages::new(target, target_revision);
    loop {
        let filled = tokio::join!(source_pages.fill(), target_pages.fill());
        filled.0.map_err(CompareError::Source)?;
        filled.1.map_err(CompareError::Target)?;
        match comparison.compare(source_pages.first(), target_pages.first()) {
            None => break,
            Some(Ordering::Less) => source_pages.take(),
            Some(Ordering::Greater) => target_pages.take(),
            Some(Ordering::Equal) => {
                source_pages.take();
                target_pages.take();
            }
        }
    }
    let auth = compare_auth(source, target).await?;
    // Read the changes again, because the report also names the first key that changed during the
    // comparison.
    let after = tokio::try_join!(changes_of_source(), changes_of_target())?;
    Ok(CompareReport {
        equal: comparison.differences == 0 && auth.is_equal(),
        source: ComparedCluster::new(source, source_revision, comparison.source_keys, &after.0),
        target: ComparedCluster::new(target, target_revision, comparison.target_keys, &after.1),
        differences: comparison.differences,
        first_differences: comparison.first_differences,
        auth,
        seconds: started.elapsed().as_secs_f64(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster() -> ComparedCluster {
        ComparedCluster {
            url: "a:1".to_owned(),
            cluster_id: "a".to_owned(),
            revision: 5,
            keys: 2,
            leases: 0,
            later_changes: 0,
            first_changed_key: None,
            expired_keys: 0,
        }
    }

    /// Returns the last line of the text about a comparison with these results.
    fn last_line(differences: u64, auth: AuthComparison) -> String {
        let report = CompareReport {
            equal: differences == 0 && auth.is_equal(),
            source: cluster(),
            target: cluster(),
            differences,
            first_differences: Vec::new(),
            auth,
            seconds: 0.5,
        };
        report.to_text().lines().last().unwrap_or_default().to_owned()
    }

    #[test]
    fn the_last_line_is_about_keys_and_about_users() {
        let equal = last_line(0, AuthComparison::default());
        let expected = "all keys are equal; users and roles are equal (0.5 s)";
        assert_eq!(equal.strip_prefix("result").map(str::trim_start), Some(expected));
        let refused = last_line(0, AuthComparison::not_compared("denied".to_owned()));
        assert!(refused.contains("; users and roles are not compared ("), "{refused}");
        let differs = last_line(3, AuthComparison::default());
        assert!(differs.contains("3 keys differ, 0 are shown; users and roles are equal"));
    }
}
