use clap::Parser;
use tonic::Code;

use super::*;

#[derive(Debug, Parser)]
#[command(args_override_self = true)]
struct TestCommandLine {
    #[command(flatten)]
    args: MoveArgs,
}

const REQUIRED: [&str; 8] = [
    "move",
    "moved file.db",
    "--source",
    "a:1,b:1",
    "--target",
    "c:1",
    "--initial-cluster",
    "one=http://c:2, two=http://d:2,one=http://e:2",
];

fn parse(more: &[&str]) -> Result<MoveArgs, clap::Error> {
    TestCommandLine::try_parse_from(REQUIRED.iter().chain(more)).map(|line| line.args)
}

#[test]
fn each_host_of_the_target_gets_its_restore_command() {
    let args = parse(&["--data-dir", "/var/lib/node"]).unwrap();
    let hosts = target_hosts(&args.initial_cluster).unwrap();
    let commands: Vec<String> = hosts.iter().map(|host| restore_command(&args, host)).collect();
    let all = "one=http://c:2,two=http://d:2,one=http://e:2";
    assert_eq!(
        commands,
        [("one", "http://c:2,http://e:2"), ("two", "http://d:2")].map(|(name, urls)| format!(
            "  muster-node snapshot restore 'moved file.db' --name {name} --data-dir /var/lib/node --initial-cluster {all} --initial-advertise-peer-urls {urls}"
        ))
    );
    let args = parse(&["--target-program", "etcd"]).unwrap();
    let command = restore_command(&args, &hosts[1]);
    assert!(command.starts_with("  etcdutl snapshot restore 'moved file.db' --name two --init"));
}

#[test]
fn an_initial_cluster_without_names_or_urls_is_refused() {
    for wrong in ["", "one", "=http://c:2", "one=c:2", "one=http://c:2,"] {
        let refused = target_hosts(wrong);
        assert!(matches!(refused, Err(MoveError::InitialCluster(_))), "{wrong}: {refused:?}");
    }
}

#[test]
fn a_target_that_cannot_be_meant_is_refused_before_the_writes_are_stopped() {
    let check = |more: &[&str]| {
        let clusters = parse(more).unwrap().clusters;
        check_target(&clusters.source(), &clusters.target())
    };
    assert!(check(&[]).is_ok());
    let same = check(&["--source", "a:1,c:1"]);
    assert!(matches!(&same, Err(MoveError::SameUrl(url)) if url == "c:1"), "{same:?}");
    let same = check(&["--source", "http://c:1"]);
    assert!(same.is_err_and(|error| error.is_usage()));
    let no_ca = check(&["--target", "https://c:1"]);
    assert!(no_ca.is_err_and(|error| error.is_usage()));
    let unreadable = check(&["--target", "https://c:1", "--target-cacert", "/nonexistent"]);
    assert!(matches!(unreadable, Err(MoveError::Compare(CompareError::Target(_)))));
}

#[test]
fn a_refusal_to_show_users_names_the_flag_for_the_right_certificate() {
    let refused = |code| {
        let (url, text) = ("a:1".to_owned(), "permission denied".to_owned());
        ClusterReadError::Refused { url, what: "users", code, text }
    };
    let error = auth_error(CompareError::Target(refused(Code::PermissionDenied)));
    let expected = "--target-cert must be the certificate of a user with the role root";
    assert_eq!(error.to_string(), expected);
    assert!(!error.is_usage());
    let error = auth_error(CompareError::Source(refused(Code::InvalidArgument)));
    assert!(error.to_string().starts_with("--source-cert must be"), "{error}");
    let other = auth_error(CompareError::Source(refused(Code::Unavailable)));
    assert!(matches!(other, MoveError::Compare(CompareError::Source(_))), "{other:?}");
}

#[test]
fn a_member_of_the_target_must_have_the_revisions_and_the_hash_of_the_others() {
    let data = |cluster_id, revision, hash: Result<(u32, i64), &str>| MemberData {
        cluster_id,
        revision,
        hash: hash.map_err(str::to_owned),
    };
    let expected = data(1, 10, Ok((77, 4)));
    let compare = |found: &MemberData| compare_member(&expected, found, 10);
    let impossible = |found: &MemberData| match compare(found) {
        MemberComparison::Impossible(reason) => reason,
        other => panic!("{other:?}"),
    };
    assert_eq!(compare(&data(1, 12, Ok((77, 4)))), MemberComparison::Same);
    assert_eq!(compare(&data(1, 12, Ok((78, 4)))), MemberComparison::Other);
    assert_eq!(compare(&data(2, 12, Ok((77, 4)))), MemberComparison::Other);
    let future = data(1, 9, Err("required revision is a future revision"));
    assert_eq!(compare(&future), MemberComparison::Other, "restored from an older snapshot");
    assert!(impossible(&data(1, 12, Ok((78, 5)))).contains("another revision"));
    assert_eq!(impossible(&data(1, 12, Err("compacted"))), "compacted");
    let without = data(1, 10, Err("no hash"));
    let compared = compare_member(&without, &data(1, 12, Ok((77, 4))), 10);
    assert_eq!(compared, MemberComparison::Impossible("no hash".to_owned()));
}

#[test]
fn the_time_since_which_writes_stopped_can_be_given_as_it_is_printed() {
    let time = Timestamp::now();
    let args = parse(&["--since", &time.to_string()]).unwrap();
    assert_eq!(args.since, Some(time));
    assert!(parse(&["--since", "yesterday"]).is_err());
}

#[test]
fn words_are_quoted_for_the_shell_only_if_they_need_it() {
    assert_eq!(shell_word("one=https://10.0.0.1:2380,b_c"), "one=https://10.0.0.1:2380,b_c");
    assert_eq!(shell_word("a b"), "'a b'");
    assert_eq!(shell_word("it's"), r"'it'\''s'");
    assert_eq!(shell_word("http://[::1]:1"), "'http://[::1]:1'");
    assert_eq!(shell_word(""), "''");
}
