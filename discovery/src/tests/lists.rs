//! Tests of the lists of clusters and tokens: pages and filters.

use discovery_types::api::{ClusterQuery, ClusterState, ClusterStates, GrantQuery};
use discovery_types::client::DiscoveryClient;

use super::access::owner_authorization;
use super::support::{TestInstallation, send_with};

/// Returns the names of all clusters that fit `query`, in pages of two.
async fn names(admin: &DiscoveryClient, query: &ClusterQuery) -> Vec<String> {
    let (mut names, mut after) = (Vec::new(), None);
    loop {
        let query = ClusterQuery { after, limit: Some(2), ..query.clone() };
        let page = admin.list_clusters(&query).await.unwrap();
        assert!(page.clusters.len() <= 2);
        names.extend(page.clusters.iter().map(|cluster| cluster.name.to_string()));
        after = page.next;
        if after.is_none() {
            return names;
        }
    }
}

#[tokio::test]
async fn the_pages_of_a_list_hold_each_cluster_that_fits_the_filters_once() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    for name in ["one", "two", "three", "four"] {
        world.cluster(&admin, name, 1).await;
    }
    let created = async |name: &str| {
        let query = ClusterQuery { name: Some(name.parse().unwrap()), ..ClusterQuery::default() };
        admin.list_clusters(&query).await.unwrap().clusters.remove(0)
    };
    let two = created("two").await;
    admin.abandon(two.cluster, "no longer wanted").await.unwrap();
    // The name is free again.
    world.cluster(&admin, "two", 1).await;
    world.draft(&admin, "draft", 1).await;

    let all = ClusterQuery::default();
    assert_eq!(names(&admin, &all).await, ["draft", "two", "four", "three", "two", "one"]);
    let of = |states: &[ClusterState]| ClusterQuery {
        state: Some(ClusterStates::new(states.iter().copied())),
        ..ClusterQuery::default()
    };
    assert_eq!(names(&admin, &of(&[ClusterState::Abandoned])).await, ["two"]);
    let some = of(&[ClusterState::Draft, ClusterState::Abandoned]);
    assert_eq!(names(&admin, &some).await, ["draft", "two"]);
    assert!(names(&admin, &of(&[ClusterState::Formed])).await.is_empty());
    let named = ClusterQuery { name: Some("two".parse().unwrap()), ..ClusterQuery::default() };
    assert_eq!(names(&admin, &named).await, ["two", "two"]);

    let three = created("three").await.created_at_ms.unsigned_abs();
    let older = ClusterQuery { created_before_ms: Some(three), ..ClusterQuery::default() };
    assert_eq!(names(&admin, &older).await, ["two", "one"]);
    let first = admin.list_clusters(&ClusterQuery { limit: Some(1), ..all.clone() }).await.unwrap();
    let both = ClusterQuery { after: first.next, ..older.clone() };
    let listed = admin.list_clusters(&both).await.unwrap().clusters;
    assert_eq!(listed.len(), 2, "a position that is newer leaves the filter in force");
    let newer = ClusterQuery { created_from_ms: Some(three), ..of(&[ClusterState::Open]) };
    assert_eq!(names(&admin, &newer).await, ["two", "four", "three"]);
    service.stop().await;
}

#[tokio::test]
async fn the_pages_of_a_list_hold_each_token_once() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let (one, two) = (world.cluster(&admin, "one", 1).await, world.cluster(&admin, "two", 1).await);
    let mut made = Vec::new();
    for statement in [&one, &two, &one, &one] {
        made.push(world.token(&admin, statement).await.id());
    }
    made.reverse();
    let all = [(None, made.clone()), (Some(one.cluster), vec![made[0], made[1], made[3]])];
    for (cluster, tokens) in all {
        let (mut listed, mut after) = (Vec::new(), None);
        loop {
            let query = GrantQuery { after, limit: Some(2) };
            let page = admin.list_grants(cluster, &query).await.unwrap();
            for view in &page.grants {
                let name = view.cluster_name.as_ref().map(ToString::to_string);
                let own = if view.grant.cluster == one.cluster { "one" } else { "two" };
                assert_eq!(name.as_deref(), Some(own));
                listed.push(view.grant.id);
            }
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        assert_eq!(listed, tokens);
    }
    service.stop().await;
}

#[tokio::test]
async fn a_query_that_asks_for_no_page_is_refused_with_a_reason() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let authorization = owner_authorization(&world, &service).await;
    let headers = [("authorization", authorization.as_str())];
    for (query, reason) in [
        ("limit=0", "A page of 0 items"),
        ("limit=1001", "A page of 1001 items"),
        ("limit=many", "invalid digit"),
        ("after=1", "not a position in this list"),
        ("after=1.x", "not a position in this list"),
        ("state=open,well", "`well` is not a state of a cluster"),
        ("state=", "`` is not a state of a cluster"),
        ("sate=open", "sate"),
        ("created_from_ms=-1", "invalid digit"),
        (
            "created_from_ms=9223372036854775808",
            "created_from_ms: 9223372036854775808 is too large",
        ),
        ("created_before_ms=9223372036854776", "at most 9223372036854775"),
    ] {
        let (path, key) = (format!("/v1/clusters?{query}"), Some(&*world.owner));
        let (status, body) =
            send_with(&world, &service, key, "GET", &path, &headers, String::new()).await;
        assert_eq!(status, 400, "{query}: {body}");
        assert!(body.contains(reason), "{query}: {body}");
    }
    service.stop().await;
}
