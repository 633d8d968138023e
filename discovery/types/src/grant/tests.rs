use super::*;
use crate::admin::Admin;
use crate::fixtures::{ClusterFixture, policy_fixture};
use crate::role::Role;

fn verify(
    world: &ClusterFixture,
    grant: &Grant,
    by: &SigningKey,
) -> Result<VerifiedGrant, GrantError> {
    VerifiedGrant::verify(&grant.sign(by), &world.chain())
}

#[test]
fn issuers_and_owners_may_grant() {
    let world = ClusterFixture::new(3);
    assert!(verify(&world, &world.grant, &world.issuer).is_ok());
    assert!(verify(&world, &world.grant, &world.owner).is_ok());
}

#[test]
fn nobody_but_issuers_and_owners_may_grant() {
    let mut world = ClusterFixture::new(3);
    let stranger = SigningKey::generate();
    let unknown = |key: &SigningKey| GrantError::Jws(JwsError::UnknownKey(key.key_id()));
    assert_eq!(verify(&world, &world.grant, &stranger).err(), Some(unknown(&stranger)));
    world.statement.admins[1].roles = vec![Role::Operator, Role::Auditor];
    world.grant.statement = world.chain().newest_hash();
    assert_eq!(verify(&world, &world.grant, &world.issuer).err(), Some(unknown(&world.issuer)));
}

#[test]
fn an_issuer_who_left_the_newest_statement_grants_nothing_any_more() {
    let world = ClusterFixture::new(3);
    let mut chain = world.chain();
    let grant = world.grant.sign(&world.issuer);
    assert!(VerifiedGrant::verify(&grant, &chain).is_ok());
    let mut next = world.statement.clone();
    next.admins.pop();
    (next.seq, next.previous) = (1, Some(chain.newest_hash()));
    chain.append(&next.sign(&world.owner)).unwrap();
    assert!(matches!(VerifiedGrant::verify(&grant, &chain), Err(GrantError::Jws(_))));
    // A grant that was used before its issuer left stays valid.
    assert!(VerifiedGrant::verify_kept(&grant, &chain).is_ok());
    let stranger = world.grant.sign(&SigningKey::generate());
    assert!(matches!(VerifiedGrant::verify_kept(&stranger, &chain), Err(GrantError::Jws(_))));
}

#[test]
fn only_operators_and_owners_may_grant_join_tickets() {
    let mut world = ClusterFixture::new(3);
    world.grant.kind = TokenKind::Join;
    (world.grant.uses, world.grant.expires_at) = (1, world.grant.issued_at + 900);
    assert!(matches!(verify(&world, &world.grant, &world.issuer), Err(GrantError::Jws(_))));
    assert!(verify(&world, &world.grant, &world.owner).is_ok());
}

#[test]
fn a_grant_of_another_cluster_or_statement_is_refused() {
    let world = ClusterFixture::new(3);
    let grant = Grant { cluster: Uuid::now_v7(), ..world.grant.clone() };
    assert_eq!(verify(&world, &grant, &world.issuer), Err(GrantError::OtherCluster));
    let grant = Grant { statement: Digest::of(b"other"), ..world.grant.clone() };
    assert_eq!(verify(&world, &grant, &world.issuer), Err(GrantError::OtherStatement));
}

#[test]
fn lifetime_and_uses_of_a_grant_are_limited() {
    let world = ClusterFixture::new(3);
    let from = world.grant.issued_at;
    for (uses, life) in [(0, 60), (4, 60), (3, 0), (3, MAX_BOOT_SECONDS + 1)] {
        let grant = Grant { uses, expires_at: from + life, ..world.grant.clone() };
        let refused = verify(&world, &grant, &world.issuer);
        assert!(matches!(refused, Err(GrantError::Invalid(_))), "{uses} {life}");
    }
    let backwards = Grant { issued_at: 10, expires_at: 5, ..world.grant.clone() };
    let refused = verify(&world, &backwards, &world.issuer);
    assert!(matches!(refused, Err(GrantError::Invalid(_))));
}

#[test]
fn a_replacement_policy_has_limits_within_bounds_and_the_version_of_its_kind() {
    let world = policy_fixture();
    let policy = verify(&world, &world.grant, &world.owner).unwrap();
    assert!(policy.gives_seats() && policy.admits_newcomers());
    let limits = world.grant.replacement.unwrap();
    let with = |replacement| Grant { replacement, ..world.grant.clone() };
    let join = ClusterFixture::new(1).grant;
    for grant in [
        with(None),
        with(Some(ReplacementLimits { after_seconds: 29, ..limits })),
        with(Some(ReplacementLimits { after_seconds: 7 * 86_400 + 1, ..limits })),
        with(Some(ReplacementLimits { at_most: 0, ..limits })),
        with(Some(ReplacementLimits { at_most: 17, ..limits })),
        with(Some(ReplacementLimits { per_seconds: 3_599, ..limits })),
        with(Some(ReplacementLimits { per_seconds: 30 * 86_400 + 1, ..limits })),
        Grant { version: 1, ..world.grant.clone() },
        Grant { uses: 2, ..world.grant.clone() },
        Grant { expires_at: world.grant.issued_at + MAX_POLICY_SECONDS + 1, ..world.grant.clone() },
        Grant { replaces: Some(MemberId::new(1)), ..world.grant.clone() },
        Grant { kind: TokenKind::Boot, ..world.grant.clone() },
        Grant {
            version: 2,
            cluster: world.grant.cluster,
            statement: world.grant.statement,
            ..join
        },
    ] {
        let refused = verify(&world, &grant, &world.owner);
        assert!(matches!(refused, Err(GrantError::Invalid(_))), "{grant:?}");
    }
    assert!(matches!(verify(&world, &world.grant, &world.issuer), Err(GrantError::Jws(_))));
}

#[test]
fn an_operators_policy_gives_seats_only_if_the_operator_is_an_issuer_too() {
    for (roles, gives_seats) in
        [(vec![Role::Operator], false), (vec![Role::Operator, Role::Issuer], true)]
    {
        let mut world = policy_fixture();
        let operator = SigningKey::generate();
        let name = "operator".parse().unwrap();
        world.statement.admins.push(Admin { key: *operator.public(), name, roles });
        world.grant.statement = world.statement.sign(&world.owner).hash();
        let policy = verify(&world, &world.grant, &operator).unwrap();
        assert_eq!(policy.gives_seats(), gives_seats);
    }
}
