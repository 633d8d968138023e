//! Codes of refused changes of members, as a client receives them.

use node_proto::etcdserverpb::cluster_client::ClusterClient;
use node_proto::etcdserverpb::{
    MemberAddRequest, MemberPromoteRequest, MemberRemoveRequest, MemberUpdateRequest,
};

use super::*;

type Cluster = ClusterClient<Channel>;

/// Adds a learner at this URL.
fn addition(url: &str) -> tonic::Request<MemberAddRequest> {
    tonic::Request::new(MemberAddRequest { peer_ur_ls: vec![url.to_owned()], is_learner: true })
}

fn removal(id: u64, metadata: &[(&'static str, &str)]) -> tonic::Request<MemberRemoveRequest> {
    let mut request = tonic::Request::new(MemberRemoveRequest { id });
    for (name, value) in metadata {
        request.metadata_mut().insert(*name, value.parse().unwrap());
    }
    request
}

/// Returns the code of a refusal, and the text.
fn refusal<T: std::fmt::Debug>(answer: Result<T, Status>) -> (String, String) {
    let status = answer.expect_err("a refusal");
    let code = status.metadata().get("muster-refusal").map(|code| code.to_str().unwrap());
    (code.unwrap_or("none").to_owned(), status.message().to_owned())
}

#[tokio::test]
async fn a_refused_change_of_members_has_a_code_for_the_reason() {
    let node = ApiTestNode::start().await;
    let mut cluster: Cluster = ClusterClient::new(node.channel.clone());
    let operation = ("muster-operation", "0123456789abcdef0123456789abcdef");
    let added = cluster.member_add(addition("http://two:2380")).await.unwrap().into_inner();
    let learner = added.member.unwrap().id;
    let update =
        MemberUpdateRequest { id: learner, peer_ur_ls: vec!["http://one:2380".to_owned()] };
    let mut refusals = vec![
        refusal(cluster.member_add(addition("http://three:2380")).await),
        refusal(cluster.member_add(addition("nonsense")).await),
        refusal(cluster.member_update(update).await),
        refusal(cluster.member_promote(MemberPromoteRequest { id: learner }).await),
        refusal(cluster.member_promote(MemberPromoteRequest { id: MEMBER }).await),
        refusal(cluster.member_promote(MemberPromoteRequest { id: 99 }).await),
        refusal(cluster.member_remove(removal(MEMBER, &[])).await),
        refusal(cluster.member_remove(removal(99, &[])).await),
        refusal(cluster.member_remove(removal(learner, &[("muster-planned-at", "x")])).await),
        refusal(cluster.member_remove(removal(learner, &[("muster-planned-at", "1")])).await),
    ];
    cluster.member_remove(removal(learner, &[operation])).await.unwrap();
    refusals.push(refusal(cluster.member_remove(removal(learner, &[operation])).await));
    let codes: Vec<&str> = refusals.iter().map(|(code, _)| code.as_str()).collect();
    let expected = [
        "too-many-learners",
        "bad-peer-urls",
        "peer-url-exists",
        "learner-not-ready",
        "not-a-learner",
        "member-not-found",
        "not-enough-started",
        "member-not-found",
        "bad-metadata",
        "stale-plan",
        "carried-out",
    ];
    assert_eq!(codes, expected, "{refusals:?}");
    assert_eq!(refusals[0].1, "etcdserver: too many learner members in cluster");
}
