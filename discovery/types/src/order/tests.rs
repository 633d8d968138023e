use super::*;
use crate::fixtures::ClusterFixture;
use crate::role::Role;

fn order(world: &ClusterFixture) -> Order {
    Order {
        version: 1,
        id: Nonce::random(),
        cluster: world.statement.cluster,
        statement: world.chain().newest_hash(),
        change: OrderedChange::Remove { member: MemberId::new(7) },
        planned_at: Some(12),
        issued_at: 1_000,
        expires_at: 1_900,
        reason: "its disk is gone".into(),
    }
}

fn update(urls: &[&str]) -> OrderedChange {
    let peer_urls = urls.iter().map(|url| url.parse().unwrap()).collect();
    OrderedChange::Update { member: MemberId::new(7), peer_urls }
}

fn verify(world: &ClusterFixture, order: &Order) -> Result<VerifiedOrder, OrderError> {
    VerifiedOrder::verify(&order.sign(&world.owner), &world.chain())
}

#[test]
fn only_owners_and_operators_may_sign_an_order() {
    let mut world = ClusterFixture::new(3);
    world.statement.admins[1].roles = vec![Role::Operator];
    let wanted = order(&world);
    for key in [&world.owner, &world.issuer] {
        assert!(VerifiedOrder::verify(&wanted.sign(key), &world.chain()).is_ok());
    }
    for role in [Role::Issuer, Role::Auditor] {
        world.statement.admins[1].roles = vec![role];
        let wanted = order(&world);
        let refused = VerifiedOrder::verify(&wanted.sign(&world.issuer), &world.chain());
        assert!(matches!(refused, Err(OrderError::Jws(JwsError::UnknownKey(_)))), "{role}");
    }
    let stranger = SigningKey::generate();
    assert!(VerifiedOrder::verify(&order(&world).sign(&stranger), &world.chain()).is_err());
    // An order signed by the service or by an agent is refused.
    for key in [&world.service, &world.agents[0]] {
        assert!(VerifiedOrder::verify(&order(&world).sign(key), &world.chain()).is_err());
    }
}

#[test]
fn another_kind_of_message_is_no_order() {
    let world = ClusterFixture::new(3);
    let jws = Jws::sign(JwsType::Retire, &world.owner, &order(&world));
    assert!(matches!(VerifiedOrder::verify(&jws, &world.chain()), Err(OrderError::Jws(_))));
}

#[test]
fn an_order_of_another_cluster_or_statement_is_refused() {
    let world = ClusterFixture::new(3);
    let other = Order { cluster: Uuid::now_v7(), ..order(&world) };
    assert_eq!(verify(&world, &other).err(), Some(OrderError::OtherCluster));
    let other = Order { statement: Digest::of(b"other"), ..order(&world) };
    assert_eq!(verify(&world, &other).err(), Some(OrderError::OtherStatement));
}

#[test]
fn lifetime_and_reason_of_an_order_are_limited() {
    let world = ClusterFixture::new(3);
    assert!(verify(&world, &order(&world)).is_ok());
    let invalid = [
        Order { expires_at: 1_901, ..order(&world) },
        Order { expires_at: 1_000, ..order(&world) },
        Order { expires_at: 999, ..order(&world) },
        Order { reason: "x".repeat(501), ..order(&world) },
        Order { reason: "two\nlines".into(), ..order(&world) },
    ];
    for order in invalid {
        let refused = verify(&world, &order);
        assert!(matches!(refused, Err(OrderError::Invalid(_))), "{order:?}");
    }
}

#[test]
fn a_member_moves_only_to_urls_that_the_statement_allows() {
    let mut world = ClusterFixture::new(3);
    let moved = |world: &ClusterFixture, urls: &[&str]| {
        verify(world, &Order { change: update(urls), ..order(world) })
    };
    let good = "https://10.0.0.9:2380";
    assert!(moved(&world, &[good]).is_ok());
    assert!(matches!(moved(&world, &[]), Err(OrderError::Invalid(_))));
    assert!(matches!(moved(&world, &[good, good]), Err(OrderError::Invalid(_))));
    let loopback = "https://127.0.0.1:2380";
    assert!(matches!(moved(&world, &[loopback]), Err(OrderError::Urls(_))));
    assert!(matches!(moved(&world, &["https://10.0.0.9:80"]), Err(OrderError::Urls(_))));
    world.statement.permissions.loopback = true;
    assert!(moved(&world, &[loopback]).is_ok());
}

#[test]
fn an_order_has_its_documented_json() {
    let world = ClusterFixture::new(3);
    let text = serde_json::to_value(order(&world)).unwrap();
    assert_eq!(text["change"], serde_json::json!({"remove": {"member": "0000000000000007"}}));
    let text = serde_json::to_value(update(&["https://10.0.0.9:2380"])).unwrap();
    assert_eq!(text["update"]["peer_urls"], serde_json::json!(["https://10.0.0.9:2380"]));
}
