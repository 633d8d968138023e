use std::sync::Arc;

use discovery_types::fixtures::{ClusterFixture, TestCa};
use discovery_types::statement::{CaPair, Statement};

use super::*;
use crate::backup::name::BackupName;

/// Returns a name with this date, and any revision.
fn name(date: &str) -> BackupName {
    format!("{date}T101500Z-r42-0000000a").parse().unwrap()
}

fn folder(world: &ClusterFixture) -> ClusterFolder {
    ClusterFolder::of_cluster(world.statement.cluster)
}

fn signer_with(world: &ClusterFixture, proof: MemberProof) -> BackupSigner {
    let key = SigningKey::from_pkcs8_der(&world.agents[0].pkcs8_der()).unwrap();
    let key = Arc::new(key);
    BackupSigner { key, cluster: world.statement.cluster, proof }
}

/// Returns a manifest that the agent of the first founder has signed.
fn signed(world: &ClusterFixture) -> Manifest {
    let signer = signer_with(world, world.member_proof(0));
    signer.sign(Manifest::fixture(&name("20261128"), &folder(world), None))
}

fn trust(world: &ClusterFixture) -> SignatureTrust {
    SignatureTrust::of_chain(&world.chain())
}

/// Encodes a manifest and parses it again, as if it had been stored.
fn stored(world: &ClusterFixture, manifest: &Manifest) -> Manifest {
    let name = manifest.name.parse().unwrap();
    Manifest::parse(&manifest.to_bytes(), &folder(world), &name).unwrap()
}

#[test]
fn a_members_signature_is_proved_by_statements_by_an_export_and_by_the_ca() {
    let world = ClusterFixture::new(3);
    let manifest = stored(&world, &signed(&world));
    let statements = world.chain().jws();
    let export = serde_json::json!({ "version": 1, "statements": statements, "later": true });
    let bundle = format!("{}{}", TestCa::new("another").pem, world.statement.peer_ca);
    for file in [
        serde_json::to_string(&statements).unwrap(),
        export.to_string(),
        world.statement.peer_ca.clone(),
        bundle,
    ] {
        let trust = SignatureTrust::parse(file.as_bytes()).unwrap();
        let signer =
            ManifestSigner { member: CertifiedMember::Founder(1), is_by_dropped_ca: false };
        assert_eq!(trust.verify(&manifest).unwrap(), signer, "{file}");
    }
    for junk in ["", "junk", "[]", "{}", "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----"] {
        assert!(SignatureTrust::parse(junk.as_bytes()).is_err(), "{junk:?}");
    }
}

#[test]
fn a_changed_manifest_is_refused_whichever_field_was_changed() {
    type Change = fn(&mut Manifest);
    let changes: [(&str, Change); 5] = [
        ("another file", |m| m.stored.sha256 = "cd".repeat(32)),
        ("another content", |m| m.snapshot.sha256 = "cd".repeat(32)),
        ("a later time", |m| m.stored_at += std::time::Duration::from_secs(1)),
        ("another member", |m| m.member.name = "db-9".to_owned()),
        ("another count", |m| m.snapshot.keys += 1),
    ];
    let world = ClusterFixture::new(3);
    for (what, change) in changes {
        let mut manifest = signed(&world);
        change(&mut manifest);
        let refused = trust(&world).verify(&stored(&world, &manifest));
        assert!(matches!(refused, Err(SignatureError::Changed(_))), "{what}: {refused:?}");
    }
}

/// Somebody copies an older backup and its manifest to a newer name, so that `newest` finds it.
#[test]
fn an_older_manifest_under_a_newer_name_is_refused() {
    let world = ClusterFixture::new(3);
    let (older, newer) = (signed(&world), name("20261205"));
    let replayed = Manifest {
        name: newer.to_string(),
        stored: crate::backup::manifest::StoredFile {
            file: newer.data_file(false),
            ..older.stored.clone()
        },
        ..older.clone()
    };
    let refused = trust(&world).verify(&stored(&world, &replayed)).unwrap_err();
    assert!(refused.to_string().contains(&older.name), "{refused}");
    // A manifest that still contains the older name isn't accepted as the newer backup's manifest.
    assert!(Manifest::parse(&older.to_bytes(), &folder(&world), &newer).is_err());
}

#[test]
fn a_stranger_can_sign_for_nobody() {
    let (world, stranger) = (ClusterFixture::new(3), ClusterFixture::new(3));
    let manifest = || Manifest::fixture(&name("20261128"), &folder(&world), None);
    let refused =
        |signer: &BackupSigner| trust(&world).verify(&signer.sign(manifest())).unwrap_err();
    // A member of another cluster claims to be of this one.
    let mut foreign = signer_with(&stranger, stranger.member_proof(0));
    foreign.cluster = world.statement.cluster;
    assert!(matches!(refused(&foreign), SignatureError::Signer(_)));
    // A member's certificate and proof are public, but belong to its agent's key.
    let thief = signer_with(&stranger, world.member_proof(0));
    let thief = BackupSigner { cluster: world.statement.cluster, ..thief };
    assert!(matches!(refused(&thief), SignatureError::Signer(_)));
    // The signature of another cluster's backup is put beside this manifest.
    let other = Manifest { signature: signed(&stranger).signature, ..manifest() };
    let other = trust(&world).verify(&other).unwrap_err();
    assert!(matches!(other, SignatureError::OtherCluster(_)), "{other}");
    // An agent signs no other cluster's backup.
    let elsewhere = signer_with(&world, world.member_proof(0));
    let raft = ClusterFolder::of_raft_cluster(7);
    assert_eq!(elsewhere.sign(Manifest::fixture(&name("20261128"), &raft, None)).signature, None);
}

/// The certificates of a removed member aren't renewed.
#[test]
fn a_removed_member_signs_nothing_that_is_dated_after_its_last_certificate() {
    let world = ClusterFixture::new(3);
    let signer = signer_with(&world, world.member_proof_until(0, 2026));
    let sign = |date| signer.sign(Manifest::fixture(&name(date), &folder(&world), None));
    assert!(trust(&world).verify(&sign("20251231")).is_ok(), "it was a member then");
    let refused = trust(&world).verify(&sign("20260102")).unwrap_err();
    assert!(matches!(refused, SignatureError::Outdated), "{refused}");
}

/// A backup outlives the CA that issued its signer's certificate. Once the cluster has dropped that
/// CA, the finding says so, because whoever has stolen its key could have signed, too.
#[test]
fn a_backup_from_before_a_replacement_of_the_cas_is_proved_and_its_dropped_ca_is_named() {
    let world = ClusterFixture::new(3);
    let manifest = signed(&world);
    let new = CaPair { peer: TestCa::new("new peers").pem, client: TestCa::new("new clients").pem };
    let mut chain = world.chain();
    let mut next = chain.newest().clone();
    let mut append = |chain: &mut StatementChain, change: &dyn Fn(&mut Statement)| {
        change(&mut next);
        (next.seq, next.previous) = (next.seq + 1, Some(chain.newest_hash()));
        next.version = next.format_version();
        chain.append(&next.sign(&world.owner)).unwrap();
    };
    append(&mut chain, &|next: &mut Statement| next.also_trusted = Some(new.clone()));
    append(&mut chain, &|next: &mut Statement| {
        next.also_trusted = Some(next.issuing_cas());
        (next.peer_ca, next.client_ca) = (new.peer.clone(), new.client.clone());
    });
    let finding = |chain: &StatementChain| {
        let trust = Some(SignatureTrust::of_chain(chain));
        SignaturePolicy { trust, allows_unsigned: false }.check(&manifest).unwrap()
    };
    assert_eq!(finding(&chain).as_str(), "valid", "both CAs are trusted");
    append(&mut chain, &|next: &mut Statement| next.also_trusted = None);
    assert_eq!(finding(&chain).as_str(), "by-dropped-ca");
    let text = finding(&chain).to_text();
    assert!(text.starts_with("signed by the founder of seat 1 with a certificate of a"), "{text}");
    let newest = SignatureTrust::parse(new.peer.as_bytes()).unwrap();
    let refused = newest.verify(&manifest).unwrap_err();
    assert!(matches!(refused, SignatureError::Signer(_)), "{refused}");
}

#[test]
fn an_unsigned_manifest_passes_only_where_that_is_allowed_and_a_wrong_signature_never() {
    let world = ClusterFixture::new(3);
    let unsigned = Manifest { signature: None, ..signed(&world) };
    let mut changed = signed(&world);
    changed.snapshot.keys += 1;
    let policy = |trust, allows_unsigned| SignaturePolicy { trust, allows_unsigned };
    let strict = policy(Some(trust(&world)), false);
    let refused = strict.check(&unsigned).unwrap_err();
    assert!(refused.to_string().contains("--allow-unsigned"), "{refused}");
    let lenient = policy(Some(trust(&world)), true);
    assert_eq!(lenient.check(&unsigned).unwrap(), SignatureFinding::Unsigned);
    assert!(lenient.check(&changed).is_err(), "the signature is there, and wrong");
    let blind = policy(None, false);
    assert_eq!(blind.check(&changed).unwrap(), SignatureFinding::Unchecked);
}

#[test]
fn a_signed_manifest_is_smaller_than_the_limits_with_the_longest_texts() {
    let world = ClusterFixture::new(3);
    let mut manifest = Manifest::fixture(&name("20261128"), &folder(&world), None);
    manifest.stored.recipients = vec!["a".repeat(62); 16];
    let long = "x".repeat(1024);
    (manifest.member.name, manifest.node_version) = (long.clone(), long.clone());
    (manifest.agent_version, manifest.cluster_name) = (long.clone(), Some(long));
    let signed = signer_with(&world, world.member_proof(0)).sign(manifest);
    assert!(trust(&world).verify(&signed).is_ok());
    assert!((signed.to_bytes().len() as u64) < crate::backup::manifest::MAX_MANIFEST_BYTES);
}
