//! `muster-node compare` on two running clusters.

use std::path::Path;

use crate::common::{TestMember, node_command_with_timeout};
use node_proto::etcdserverpb::{
    LeaseGrantRequest, LeaseRevokeRequest, PutRequest, kv_client::KvClient,
    lease_client::LeaseClient,
};
use serde_json::Value;

/// Starts the only member of a cluster, with its files in a folder of its own below `root`.
fn started(root: &Path, folder: &str) -> TestMember {
    let folder = root.join(folder);
    std::fs::create_dir(&folder).unwrap();
    let mut member = TestMember::alone(&folder);
    member.start();
    member.wait_ready();
    member
}

/// Runs `compare --json`. Returns the exit code and the result.
fn compare(source: &TestMember, target: &TestMember, more: &[&str]) -> (Option<i32>, Value) {
    let mut command = node_command_with_timeout();
    command.args(["compare", "--json", "--source", &source.client_url]);
    let output = command.args(["--target", &target.client_url]).args(more).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    let result = serde_json::from_slice(&output.stdout).unwrap_or(Value::String(printed));
    (output.status.code(), result)
}

async fn put_with_lease(member: &TestMember, key: &'static str, id: i64) {
    let mut leases = LeaseClient::new(member.channel());
    leases.lease_grant(LeaseGrantRequest { id, ttl: 600 }).await.unwrap();
    let request = PutRequest { key: key.into(), lease: id, ..PutRequest::default() };
    KvClient::new(member.channel()).put(request).await.unwrap();
}

#[tokio::test]
async fn two_clusters_with_the_same_history_are_equal_until_one_key_changes() {
    let root = tempfile::tempdir().unwrap();
    let (source, target) = (started(root.path(), "source"), started(root.path(), "target"));
    let (code, result) = compare(&source, &target, &[]);
    assert_eq!((code, &result["equal"]), (Some(0), &true.into()), "both are empty: {result}");
    let mut revision = 0;
    for member in [&source, &target] {
        for n in 0..250 {
            revision = member.put(&format!("k{n:03}"), &n.to_string()).await.unwrap();
        }
        put_with_lease(member, "leased", 77).await;
    }
    let (code, result) = compare(&source, &target, &[]);
    assert_eq!((code, &result["equal"]), (Some(0), &true.into()), "{result}");
    for side in ["source", "target"] {
        assert_eq!(result[side]["keys"], 251, "{result}");
        assert_eq!(result[side]["leases"], 1, "{result}");
        assert_eq!(result[side]["revision"], revision + 1, "{result}");
    }

    target.put("k123", "another value").await.unwrap();
    target.put("new", "").await.unwrap();
    let (code, result) = compare(&source, &target, &[]);
    assert_eq!((code, &result["differences"]), (Some(1), &2.into()), "{result}");
    assert_eq!(result["first_differences"][0]["key"], "k123");
    assert_eq!(result["first_differences"][1]["key"], "new");
    assert!(!result.to_string().contains("another value"), "{result}");
    let at = (revision + 1).to_string();
    let (code, result) = compare(&source, &target, &["--revision", &at]);
    assert_eq!((code, &result["equal"]), (Some(0), &true.into()), "{result}");
    assert_eq!(result["target"]["later_changes"], 2);
    assert_eq!(result["target"]["first_changed_key"], "k123");
    assert_eq!(result["source"]["later_changes"], 0);
}

#[tokio::test]
async fn a_lease_that_ended_in_one_cluster_after_the_revision_is_no_difference() {
    let root = tempfile::tempdir().unwrap();
    let (source, target) = (started(root.path(), "source"), started(root.path(), "target"));
    put_with_lease(&source, "leased", 5).await;
    put_with_lease(&target, "leased", 5).await;
    let at = source.put("last", "").await.unwrap();
    assert_eq!(target.put("last", "").await.unwrap(), at);
    let revoke = LeaseRevokeRequest { id: 5 };
    LeaseClient::new(target.channel()).lease_revoke(revoke).await.unwrap();
    let (code, result) = compare(&source, &target, &["--revision", &at.to_string()]);
    assert_eq!((code, &result["equal"]), (Some(0), &true.into()), "{result}");
    assert_eq!(result["target"]["expired_keys"], 1, "{result}");
    assert_eq!(result["target"]["later_changes"], 0, "{result}");
    let (code, result) = compare(&source, &target, &[]);
    assert_eq!((code, &result["differences"]), (Some(1), &1.into()), "{result}");
    assert_eq!(result["first_differences"][0]["difference"], "only the source has it");
}

#[tokio::test]
async fn values_that_fill_more_than_one_answer_are_compared() {
    let root = tempfile::tempdir().unwrap();
    let (source, target) = (started(root.path(), "source"), started(root.path(), "target"));
    // The values have 70 MiB in total. A first page with all of these keys would be larger than the
    // command accepts.
    let value = "v".repeat(1 << 20);
    for n in 0..70 {
        source.put(&format!("large{n:02}"), &value).await.unwrap();
        let changed = format!("{}w", &value[1..]);
        let value = if n == 69 { &changed } else { &value };
        target.put(&format!("large{n:02}"), value).await.unwrap();
    }
    let (code, result) = compare(&source, &target, &[]);
    assert_eq!((code, &result["source"]["keys"]), (Some(1), &70.into()), "{result}");
    assert_eq!(result["differences"], 1, "{result}");
    assert_eq!(result["first_differences"][0]["key"], "large69");
}

#[tokio::test]
async fn wrong_usage_and_an_unreachable_cluster_have_exit_codes_of_their_own() {
    let root = tempfile::tempdir().unwrap();
    let (source, mut target) = (started(root.path(), "source"), started(root.path(), "target"));
    assert_eq!(compare(&source, &target, &["--revision", "0"]).0, Some(2));
    for (url, text) in [
        ("https://127.0.0.1:1", "an https endpoint needs --target-cacert"),
        ("ftp://127.0.0.1:1", "is not the URL of a member"),
    ] {
        let (code, printed) = compare(&source, &target, &["--target", url]);
        assert_eq!(code, Some(2), "{printed}");
        assert!(printed.to_string().contains(text), "{printed}");
    }
    target.kill();
    let (code, printed) = compare(&source, &target, &[]);
    assert_eq!(code, Some(1), "{printed}");
    assert!(printed.to_string().contains("the target cannot be read"), "{printed}");
}
