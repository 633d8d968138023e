//! Tests of the lists of clusters and tokens: pages and filters.

use std::collections::BTreeMap;

use discovery_types::api::{ClusterQuery, ClusterState, ClusterStates, GrantQuery};
use discovery_types::client::DiscoveryClient;
use discovery_types::problem::Code;
use discovery_types::statement::Statement;
use uuid::Uuid;

use super::access::owner_authorization;
use super::random::Random;
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
    // The name `two` is free again, so the list contains two clusters of this name.
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
            let query = GrantQuery { after, limit: Some(2), policies: None };
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

/// A cluster as lists should show it.
#[derive(Clone, Debug)]
struct ListedCluster {
    id: Uuid,
    name: String,
    state: ClusterState,
    created_ms: u64,
}

/// Number of random changes of clusters, each followed by one random list.
const CHANGES: usize = 120;
/// States that the random clusters have.
const STATES: [ClusterState; 3] =
    [ClusterState::Draft, ClusterState::Open, ClusterState::Abandoned];

/// Makes, opens or abandons a random cluster, at the service and in the model.
async fn change_one(
    random: &mut Random,
    (world, admin): (&TestInstallation, &DiscoveryClient),
    model: &mut Vec<ListedCluster>,
    drafts: &mut BTreeMap<Uuid, Statement>,
) {
    let name = format!("name-{}", random.below(4));
    let live = |state: ClusterState| state == ClusterState::Open;
    let is_taken = |model: &[ListedCluster], name: &str| {
        model.iter().any(|cluster| cluster.name == name && live(cluster.state))
    };
    match random.below(3) {
        0 if !is_taken(model, &name) => {
            let statement = world.draft(admin, &name, 1).await;
            let made = admin.show_cluster(statement.cluster).await.unwrap().summary;
            model.insert(
                0,
                ListedCluster {
                    id: made.cluster,
                    name,
                    state: ClusterState::Draft,
                    created_ms: made.created_at_ms.unsigned_abs(),
                },
            );
            drafts.insert(statement.cluster, statement);
        }
        1 if !drafts.is_empty() => {
            let id = *random.pick(&drafts.keys().copied().collect::<Vec<_>>());
            let opened = admin.put_statement(id, &drafts[&id].sign(&world.owner)).await.map(|_| ());
            let at = model.iter().position(|cluster| cluster.id == id).unwrap();
            match is_taken(model, &model[at].name.clone()) {
                true => assert_eq!(opened.unwrap_err().code(), Some(Code::NameTaken)),
                false => {
                    opened.unwrap();
                    model[at].state = ClusterState::Open;
                    drafts.remove(&id);
                }
            }
        }
        _ => {
            let open: Vec<usize> = (0..model.len()).filter(|&at| live(model[at].state)).collect();
            if !open.is_empty() {
                let cluster = &mut model[*random.pick(&open)];
                admin.abandon(cluster.id, "").await.unwrap();
                cluster.state = ClusterState::Abandoned;
            }
        }
    }
}

/// Returns a query with random filters, and whether a cluster fits it.
fn random_query(
    random: &mut Random,
    model: &[ListedCluster],
) -> (ClusterQuery, impl Fn(&ListedCluster) -> bool + use<>) {
    let state = (!random.once_in(2)).then(|| {
        let chosen: Vec<ClusterState> = STATES.into_iter().filter(|_| random.once_in(2)).collect();
        if chosen.is_empty() { vec![*random.pick(&STATES)] } else { chosen }
    });
    let name = random.once_in(3).then(|| format!("name-{}", random.below(5)));
    let mut time = || {
        let at = (!model.is_empty() && random.once_in(3))
            .then(|| model[random.below(model.len())].created_ms);
        at.map(|at| at + random.below(3) as u64 - 1)
    };
    let (from, before) = (time(), time());
    let query = ClusterQuery {
        name: name.as_ref().map(|name| name.parse().unwrap()),
        state: state.clone().map(ClusterStates::new),
        created_from_ms: from,
        created_before_ms: before,
        ..ClusterQuery::default()
    };
    let fits = move |cluster: &ListedCluster| {
        name.as_ref().is_none_or(|name| *name == cluster.name)
            && state.as_ref().is_none_or(|states| states.contains(&cluster.state))
            && from.is_none_or(|from| cluster.created_ms >= from)
            && before.is_none_or(|before| cluster.created_ms < before)
    };
    (query, fits)
}

/// The order of the changes and the queries come from `LISTS_SEED`, 1 by default.
#[tokio::test]
async fn random_lists_in_pages_of_any_size_show_what_a_model_shows() {
    let seed = std::env::var("LISTS_SEED").map_or(1, |seed| seed.parse().unwrap());
    println!("LISTS_SEED={seed}");
    let mut random = Random(seed);
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let (mut model, mut drafts, mut shown) = (Vec::new(), BTreeMap::new(), 0);
    for _ in 0..CHANGES {
        change_one(&mut random, (&world, &admin), &mut model, &mut drafts).await;
        let (query, fits) = random_query(&mut random, &model);
        let limit = 1 + random.below(4) as u16;
        // In about half of the runs, a cluster is made between two pages. It is newer than the
        // remaining pages, so no page shows it.
        let mut grows = random.once_in(2);
        let expected: Vec<(Uuid, ClusterState)> =
            model.iter().filter(|cluster| fits(cluster)).map(|c| (c.id, c.state)).collect();
        let (mut listed, mut after) = (Vec::new(), None);
        loop {
            let page = ClusterQuery { after, limit: Some(limit), ..query.clone() };
            let page = admin.list_clusters(&page).await.unwrap();
            assert!(page.clusters.len() <= usize::from(limit));
            listed.extend(page.clusters.iter().map(|cluster| (cluster.cluster, cluster.state)));
            after = page.next;
            if after.is_none() {
                break;
            }
            if std::mem::take(&mut grows) {
                let made = world.draft(&admin, "between", 1).await.cluster;
                let made = admin.show_cluster(made).await.unwrap().summary;
                model.insert(
                    0,
                    ListedCluster {
                        id: made.cluster,
                        name: "between".to_owned(),
                        state: ClusterState::Draft,
                        created_ms: made.created_at_ms.unsigned_abs(),
                    },
                );
            }
        }
        assert_eq!(listed, expected, "{query:?} in pages of {limit}");
        shown += listed.len();
    }
    assert!(shown > CHANGES, "the queries show something: {shown}");
    service.stop().await;
}
