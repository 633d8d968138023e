use std::io::Write;
use std::sync::{Arc, Mutex};

use clap::{CommandFactory, Parser};
use discovery_types::key::SigningKey;
use serde_json::Value;

use super::*;

/// An output stream that a test can read.
#[derive(Clone, Default)]
struct OutputBuffer(Arc<Mutex<Vec<u8>>>);

impl Write for OutputBuffer {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl OutputBuffer {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

struct CommandOutput {
    code: u8,
    out: String,
    err: String,
}

/// Runs a command as `main` does. `HOME` in the arguments becomes the test's folder, and `~`
/// becomes a space.
fn muster(folder: &std::path::Path, line: &str) -> CommandOutput {
    let home = folder.to_str().unwrap();
    let args = line.split(' ').map(|word| word.replace("HOME", home).replace('~', " "));
    let cli = match DiscoveryCli::try_parse_from(
        std::iter::once("muster-discovery".into()).chain(args),
    ) {
        Ok(cli) => cli,
        Err(error) => return CommandOutput { code: 2, out: String::new(), err: error.to_string() },
    };
    let (out, err) = (OutputBuffer::default(), OutputBuffer::default());
    let json = cli.wants_json();
    let mut printer = Printer::new(json, Box::new(out.clone()), Box::new(err.clone()));
    let code = match cli.command.run(&mut printer) {
        Ok(()) => 0,
        Err(error) => {
            printer.print_error(&error);
            error.exit_code()
        }
    };
    CommandOutput { code, out: out.text(), err: err.text().replace(home, "HOME") }
}

fn context_line(url: &str) -> String {
    let owner = SigningKey::from_seed(&[7; 32]);
    let pin = discovery_types::digest::Digest::of(b"key");
    format!("muster-context1~urls={url}~pins={pin}~owners={}", owner.public())
}

#[test]
fn the_command_tree_is_valid() {
    DiscoveryCli::command().debug_assert();
}

/// Compares the `--help` text of every admin command with a snapshot.
#[test]
fn help_of_each_command() {
    fn walk(command: &mut clap::Command, path: &str, shown: &mut String) {
        if !command.has_subcommands() || path == "muster-discovery" {
            let help = command.render_help().to_string();
            shown.push_str(&format!("==== {path}\n{}\n", help.trim_end()));
        }
        for sub in command.get_subcommands_mut() {
            let name = sub.get_name().to_owned();
            // Skip `serve` and `init`: their arguments have tests of their own.
            if !["serve", "init", "help"].contains(&name.as_str()) {
                walk(sub, &format!("{path} {name}"), shown);
            }
        }
    }
    let mut root = DiscoveryCli::command();
    root.build();
    let mut shown = String::new();
    walk(&mut root, "muster-discovery", &mut shown);
    insta::assert_snapshot!(shown);
}

#[test]
fn key_new_writes_the_private_key_and_the_public_key_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    let ran = muster(folder.path(), "key new --out HOME/ada.pem");
    assert_eq!(ran.code, 0, "{}", ran.err);
    let key = SigningKey::load(&folder.path().join("ada.pem")).unwrap();
    assert_eq!(ran.out.trim(), key.public().to_string());
    let public = std::fs::read_to_string(folder.path().join("ada.pub")).unwrap();
    assert_eq!(public, ran.out);
    let shown = muster(folder.path(), "key show HOME/ada.pem --json");
    let shown: Value = serde_json::from_str(&shown.out).unwrap();
    assert_eq!(shown["key_id"], key.key_id().to_string());
}

#[test]
fn a_key_is_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let first = muster(folder.path(), "key new --out HOME/ada.pem");
    let again = muster(folder.path(), "key new --out HOME/ada.pem");
    assert_eq!((again.code, again.out.as_str()), (1, ""));
    assert!(again.err.contains("exists already"), "{}", again.err);
    let shown = muster(folder.path(), "key show HOME/ada.pem");
    assert_eq!(shown.out, first.out);
}

#[test]
fn key_new_refuses_a_folder_as_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let ran = muster(folder.path(), "key new --out HOME/");
    assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{}", ran.err);
    assert!(ran.err.contains("names a folder"), "{}", ran.err);
}

#[test]
fn json_can_be_requested_before_or_after_the_command() {
    for line in [
        "--json cluster list",
        "cluster --json list",
        "cluster list --json",
        "--json init --owner x --dir y --url z",
        "--json backup --managed-postgres a --ledger b --out c",
    ] {
        let words = std::iter::once("muster-discovery").chain(line.split(' '));
        match DiscoveryCli::try_parse_from(words) {
            Ok(cli) => assert!(cli.wants_json(), "{line}"),
            // Only one error is expected: clap reads the owner's key while it parses the arguments,
            // and there is no file `x`.
            Err(error) => assert!(error.to_string().contains("--owner"), "{line}: {error}"),
        }
    }
    let refused = muster(tempfile::tempdir().unwrap().path(), "--json cluster no-such-command");
    assert!(refused.err.contains("no-such-command"), "{}", refused.err);
}

#[test]
fn status_is_accepted_and_restate_needs_either_a_cluster_or_all() {
    for line in ["cluster status demo", "cluster restate --all"] {
        let words = std::iter::once("muster-discovery").chain(line.split(' '));
        assert!(DiscoveryCli::try_parse_from(words).is_ok(), "{line}");
    }
    for line in ["cluster restate", "cluster restate demo --all"] {
        let words = std::iter::once("muster-discovery").chain(line.split(' '));
        assert!(DiscoveryCli::try_parse_from(words).is_err(), "{line}");
    }
}

#[test]
fn a_secret_among_the_arguments_is_refused_and_never_repeated() {
    let pem = SigningKey::generate().to_pem();
    let token = discovery_types::token::Token::generate(discovery_types::grant::TokenKind::Boot);
    let token = secrecy::ExposeSecret::expose_secret(&token.expose()).to_owned();
    for secret in [pem.as_str(), &token, &format!("muster1 urls=https://a:1 {token}")] {
        let arguments = ["init", "--owner", secret].map(OsString::from);
        let refused = refuse_secrets(arguments.into_iter()).unwrap_err();
        assert_eq!(refused.exit_code(), 2);
        assert!(!refused.to_string().contains(&secret[..20]), "{refused}");
    }
    assert!(refuse_secrets(["key", "new"].map(OsString::from).into_iter()).is_ok());
}

#[test]
fn init_accepts_the_pub_file_of_the_first_owner() {
    let folder = tempfile::tempdir().unwrap();
    muster(folder.path(), "key new --out HOME/owner.pem");
    let line = "init --owner HOME/owner.pub --dir HOME/keys --url https://disco.example:8443";
    let ran = muster(folder.path(), line);
    assert_eq!(ran.code, 0, "{}", ran.err);
    let public = std::fs::read_to_string(folder.path().join("owner.pub")).unwrap();
    assert!(ran.out.contains(&format!("owners={}", public.trim())), "{}", ran.out);
    let line = "init --owner HOME/owner.pem --dir HOME/other --url https://disco.example:8443";
    let ran = muster(folder.path(), line);
    assert_eq!(ran.code, 2, "a private key");
    assert!(!ran.err.contains("PRIVATE"), "{}", ran.err);
}

#[test]
fn another_context_of_the_same_name_is_replaced_only_with_replace() {
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (context_line("https://a.example:1"), context_line("https://b.example:1"));
    for (line, code) in [
        (format!("context add --home HOME {one}"), 0),
        (format!("context add --home HOME {one}"), 0),
        (format!("context add --home HOME {two}"), 1),
        (format!("context add --home HOME {two} --name second"), 0),
    ] {
        let ran = muster(folder.path(), &line);
        assert_eq!(ran.code, code, "{}", ran.err);
        let shown = muster(folder.path(), "context show default --home HOME");
        assert!(shown.out.contains("https://a.example:1"), "{}", shown.out);
    }
    let ran = muster(folder.path(), &format!("context add --home HOME {two} --replace"));
    assert_eq!(ran.code, 0, "{}", ran.err);
    let shown = muster(folder.path(), "context show default --home HOME");
    assert!(shown.out.contains("https://b.example:1"), "{}", shown.out);
}

#[test]
fn key_new_refuses_a_pub_file_and_an_existing_public_key() {
    let folder = tempfile::tempdir().unwrap();
    let ran = muster(folder.path(), "key new --out HOME/ada.pub");
    assert_eq!((ran.code, ran.out.as_str()), (2, ""));
    std::fs::write(folder.path().join("ada.pub"), "another's").unwrap();
    let ran = muster(folder.path(), "key new --out HOME/ada.pem");
    assert_eq!((ran.code, ran.out.as_str()), (1, ""));
    assert!(!folder.path().join("ada.pem").exists());
}

#[test]
fn a_context_is_added_from_a_line_or_a_file_and_printed_again() {
    let folder = tempfile::tempdir().unwrap();
    let line = context_line("https://disco.example:8443");
    let file = folder.path().join("context.txt");
    std::fs::write(&file, format!("{}\n", line.replace('~', " "))).unwrap();
    let added = muster(folder.path(), &format!("context add --home HOME/a {line}"));
    assert_eq!(added.code, 0, "{}", added.err);
    let added = muster(folder.path(), "context add --home HOME/b HOME/context.txt --name prod");
    assert_eq!(added.code, 0, "{}", added.err);
    for (home, name) in [("a", "default"), ("b", "prod")] {
        let shown = muster(folder.path(), &format!("context show --home HOME/{home}"));
        assert_eq!(shown.out.trim(), line.replace('~', " "));
        let list = muster(folder.path(), &format!("context list --json --home HOME/{home}"));
        let list: Value = serde_json::from_str(&list.out).unwrap();
        assert_eq!(list["current"], name);
    }
}

#[test]
fn a_join_bundle_is_not_taken_for_a_context() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("x"), "muster1 urls=https://a:1 mst_boot_secret").unwrap();
    let ran = muster(folder.path(), "context add --home HOME HOME/x");
    assert_eq!(ran.code, 1);
    assert_eq!(
        ran.err.trim(),
        "error: HOME/x: expected one line that begins with `muster-context1`: \
         this is a join bundle, for a host and not for an admin"
    );
}

#[test]
fn without_a_context_or_a_key_the_next_step_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let ran = muster(folder.path(), "cluster list --home HOME --key HOME/none.pem");
    assert_eq!(ran.code, 1);
    assert!(ran.err.contains("next: ask whoever ran `muster-discovery init`"), "{}", ran.err);
    let line = context_line("https://127.0.0.1:1");
    muster(folder.path(), &format!("context add --home HOME {line}"));
    let ran = muster(folder.path(), "cluster list --home HOME --key HOME/none.pem");
    assert_eq!(ran.code, 1);
    assert!(ran.err.contains("there is no key at HOME/none.pem"), "{}", ran.err);
    assert!(ran.err.contains("key new --out FILE"), "{}", ran.err);
}

#[test]
fn a_service_that_is_down_is_named_and_json_errors_stay_off_stdout() {
    let folder = tempfile::tempdir().unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    drop(listener);
    muster(folder.path(), "key new --out HOME/admin.pem");
    muster(folder.path(), &format!("context add --home HOME {}", context_line(&url)));
    let ran = muster(folder.path(), "cluster list --home HOME --json --key HOME/admin.pem");
    assert_eq!((ran.code, ran.out.as_str()), (1, ""));
    let error: Value = serde_json::from_str(&ran.err).unwrap();
    let message = error["error"].as_str().unwrap();
    assert!(message.contains(&url) && message.contains("can't be reached"), "{message}");
    assert!(error["next"].as_str().unwrap().contains("context list"));
}

#[test]
fn invalid_arguments_are_a_usage_error_before_any_request() {
    let folder = tempfile::tempdir().unwrap();
    muster(folder.path(), "key new --out HOME/admin.pem");
    let line = context_line("https://127.0.0.1:1");
    muster(folder.path(), &format!("context add --home HOME {line}"));
    let usage = [
        "cluster create demo --size 4",
        "cluster create demo --size 0",
        "cluster create demo --size 11",
        "cluster create Demo --size 3",
        "cluster create demo",
        "cluster create demo --size 3 --deadline soon",
        "cluster frobnicate demo",
        "token create",
        "token create --cluster demo --cidr 10.0.0.0/99",
        "token revoke XYZ",
        "admin add ada ed25519:short --role issuer",
        "admin add ada HOME/admin.pub --role root",
        "admin add ada HOME/admin.pub",
        "db accept",
    ];
    for command in usage {
        let line = format!("{command} --home HOME --key HOME/admin.pem");
        let ran = muster(folder.path(), &line);
        assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{command}: {}", ran.err);
    }
}

#[test]
fn an_existing_bundle_file_is_refused_before_any_request() {
    let folder = tempfile::tempdir().unwrap();
    muster(folder.path(), "key new --out HOME/admin.pem");
    let line = context_line("https://127.0.0.1:1");
    muster(folder.path(), &format!("context add --home HOME {line}"));
    std::fs::write(folder.path().join("demo.bundle"), "old").unwrap();
    let ran = muster(
        folder.path(),
        "token create --cluster demo --out HOME/demo.bundle --home HOME --key HOME/admin.pem",
    );
    assert_eq!(ran.code, 1);
    assert!(ran.err.contains("demo.bundle exists already"), "{}", ran.err);
    assert_eq!(std::fs::read_to_string(folder.path().join("demo.bundle")).unwrap(), "old");
}

#[test]
fn control_characters_in_foreign_text_are_not_printed() {
    let (out, err) = (OutputBuffer::default(), OutputBuffer::default());
    let mut printer = Printer::new(false, Box::new(out.clone()), Box::new(err.clone()));
    printer
        .print_value(&(), |text| {
            text.line("a\u{1b}[2Jb\nforged: \u{202e}line");
            text.table(["X"], [["c\r\u{7}d\ne".to_owned()]]);
        })
        .unwrap();
    printer.warn("f\u{9b}g\r\nerror: forged");
    printer.print_error(&super::CliError::Answer("h\nnext: forged".to_owned()));
    let all = out.text() + &err.text();
    assert!(!all.contains(|c: char| (c.is_control() && c != '\n') || c == '\u{202e}'), "{all:?}");
    assert!(
        !all.lines()
            .any(|line| ["forged", "error: f", "next:"].iter().any(|f| line.starts_with(f)))
    );
    assert!(all.contains("a\u{fffd}[2Jb forged: ") && all.contains("h next: forged"), "{all:?}");
    assert!(all.contains("a\u{fffd}[2Jb") && all.contains("d e"), "{all:?}");
}

#[test]
fn a_databases_password_on_the_command_line_is_refused_and_not_repeated() {
    let check = |argument: &str| refuse_secrets(std::iter::once(argument.into()));
    for argument in [
        "postgres://u:secretpw@db.example.org/muster",
        "postgresql://u:secretpw@db.example.org:5432/muster",
        "--database-url=postgres://u:secretpw@db/muster",
        "POSTGRES://u:secretpw@db/muster",
        "postgres://u:secret?pw@db/muster",
        "postgres://db/muster?sslmode=require&password=secretpw",
        "postgres://u@db/muster?password=secretpw",
    ] {
        let refused = check(argument).unwrap_err();
        assert_eq!(refused.exit_code(), 2);
        let text = refused.to_string();
        assert!(!text.contains("secretpw") && text.contains("MUSTER_DATABASE_URL"), "{text}");
    }
    for argument in [
        "postgres://u@db.example.org:5432/muster",
        "postgres://u:@db.example.org/muster",
        "--database-url=postgres://muster@%2Frun%2Fpg:5432/muster?sslmode=disable",
        "postgres://db:5432/muster?passfile=/etc/muster/pgpass",
    ] {
        assert!(check(argument).is_ok(), "{argument}");
    }
}
