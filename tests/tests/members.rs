//! Changes the members of a running cluster with the agent's commands, as in etcd's guide to
//! runtime reconfiguration. A client writes all the time.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::programs::program_path;
use muster_tests::harness::{AgentlessCluster, RetryingWriter};
use muster_tests::stock_etcd;

/// Returns `muster-node`, and Debian's etcd if it is installed; the same commands must work for
/// both.
fn programs() -> Result<Vec<PathBuf>> {
    Ok([program_path("muster-node")?].into_iter().chain(stock_etcd::oldest()).collect())
}

fn urls(machines: &AgentlessCluster, numbers: &[usize]) -> Vec<String> {
    numbers.iter().map(|number| machines.all[*number].client_url.clone()).collect()
}

fn leader(machines: &AgentlessCluster) -> Result<usize> {
    let list = machines.list_members()?;
    let members = list["members"].as_array().context("members")?;
    let leads = members.iter().find(|member| member["id"] == list["leader"]);
    let name = leads.and_then(|member| member["name"].as_str()).context("a leader")?;
    machines.all.iter().position(|node| node.name == name).context("a node")
}

#[test]
fn three_grow_to_five_and_shrink_to_three_under_a_writer() -> Result<()> {
    let mut machines = AgentlessCluster::start_three(&program_path("muster-node")?, 5)?;
    let writer = RetryingWriter::start(urls(&machines, &[0, 1, 2]));
    for _ in 0..2 {
        let number = machines.add_machine();
        let (name, url) =
            (machines.all[number].name.clone(), machines.all[number].peer_url.clone());
        let plan = machines.run_member_command(&["plan", "add", &name, "--peer-urls", &url])?;
        ensure!(plan["after"]["voters"] == number + 1, "{plan}");
        let at = plan["configuration"].as_u64().context("a configuration")?.to_string();
        let add = ["add", name.as_str(), "--peer-urls", &url, "--plan-at", &at];
        let added = machines.run_member_command(&add)?;
        // `add` has changed the members since the plan was made. So the same command must now be
        // refused, because its plan is stale.
        let stale = machines.expect_refusal(&add, 1)?;
        ensure!(stale.contains("stale"), "{stale}");
        machines.join(number, &added)?;
        // Promote the member by its id, because a member has no name before its first start. The
        // command waits for that start.
        let id = added["member_id"].as_str().context("an id")?;
        machines.run_member_command(&["promote", id])?;
    }
    machines.wait_voters(&["n1", "n2", "n3", "n4", "n5"])?;
    // Remove the leader twice. Of the three members that the writer uses, at least one is left.
    for _ in 0..2 {
        let gone = leader(&machines)?;
        let name = machines.all[gone].name.clone();
        machines.run_member_command(&["remove", &name])?;
        ensure!(machines.all[gone].exit_code()? == 3, "a removed member is not started again");
        machines.all[gone].kill();
    }
    let list = machines.run_member_command(&["wait"])?;
    ensure!(list["members"].as_array().map(Vec::len) == Some(3), "{list}");
    let left = leader(&machines)?;
    writer.stop_and_check(&machines.all[left].client_url)
}

/// Before its first start, a member has no name. A command that is given the name changes nothing,
/// and says what to type: the id. The id and the peer URL work before the first start.
#[test]
fn a_member_that_never_started_is_named_by_its_id_or_peer_url() -> Result<()> {
    for program in programs()? {
        check_unnamed_member(&program).with_context(|| program.display().to_string())?;
    }
    Ok(())
}

fn check_unnamed_member(program: &Path) -> Result<()> {
    let mut machines = AgentlessCluster::start_three(program, 4)?;
    let number = machines.add_machine();
    let (name, url) = (machines.all[number].name.clone(), machines.all[number].peer_url.clone());
    let add = ["add", name.as_str(), "--peer-urls", &url];
    let mut removed = Vec::new();
    for by_id in [true, false] {
        let added = machines.run_member_command(&add)?;
        let id = added["member_id"].as_str().context("an id")?.to_owned();
        for verb in ["promote", "remove"] {
            let said = machines.expect_refusal(&[verb, &name], 2)?;
            for part in [format!("no member {name} here"), format!("{id} (not started, {url})")] {
                ensure!(said.contains(&part), "{part}: {said}");
            }
            ensure!(said.contains("say the id of one that has not started"), "{said}");
        }
        let list = machines.run_member_command(&["list"])?;
        ensure!(list["members"].as_array().map(Vec::len) == Some(4), "{list}");
        machines.run_member_command(&["remove", if by_id { &id } else { &url }])?;
        machines.wait_voters(&["n1", "n2", "n3"])?;
        removed.push(id);
    }
    // The promotion is ordered before the member's first start, and waits for it.
    let added = machines.run_member_command(&add)?;
    let id = added["member_id"].as_str().context("an id")?;
    ensure!(removed.iter().all(|old| old != id), "an id is used again: {added}");
    let mut promotion = machines.member(&["promote", &url])?;
    let mut promotion = promotion.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let said = BufReader::new(promotion.stderr.take().context("its standard error")?);
    let mut lines = said.lines().map_while(Result::ok);
    let waits = lines.any(|line| line.contains("has not started; start it"));
    ensure!(waits, "the command doesn't say that the member has to be started");
    machines.join(number, &added)?;
    ensure!(promotion.wait()?.success(), "the member isn't promoted");
    machines.wait_voters(&["n1", "n2", "n3", "n4"])
}

/// Runs `member replace`, and kills the command as soon as it prints one of `words`. Returns
/// whether the command succeeded before that, and its output.
fn replace_until(
    machines: &AgentlessCluster,
    args: &[&str],
    words: &[&str],
) -> Result<(bool, String)> {
    let mut command = machines.member(args)?;
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let printed = BufReader::new(child.stderr.take().context("its standard error")?);
    let mut text = String::new();
    for line in printed.lines() {
        let line = line?;
        text += &line;
        if words.iter().any(|words| line.contains(words)) {
            child.kill()?;
            child.wait()?;
            return Ok((false, text));
        }
    }
    Ok((child.wait()?.success(), text))
}

#[test]
fn a_failed_machine_is_replaced_although_the_command_is_killed_at_every_step() -> Result<()> {
    for program in programs()? {
        check_failed_machine_is_replaced(&program)
            .with_context(|| program.display().to_string())?;
    }
    Ok(())
}

fn check_failed_machine_is_replaced(program: &Path) -> Result<()> {
    let mut machines = AgentlessCluster::start_three(program, 4)?;
    let writer = RetryingWriter::start(urls(&machines, &[0, 1]));
    machines.all[2].kill();
    let new = machines.add_machine();
    let url = machines.all[new].peer_url.clone();
    let list = machines.list_members()?;
    let members = list["members"].as_array().context("members")?;
    let dead = members.iter().find(|member| member["name"] == "n3").context("n3")?;
    let id = dead["id"].as_str().context("an id")?.to_owned();
    let args = ["replace", &id, "n4", "--peer-urls", &url, "--patience", "90"];
    let plan = machines.run_member_command(&[&["plan"], &args[..5]].concat())?;
    ensure!(plan["warnings"].to_string().contains("the old one goes first"), "{plan}");
    // `member replace` is killed at each of these messages in turn. Each next run continues where
    // the last one stopped.
    let words = ["removing", "is removed", "is in the list", "start n4"];
    for at in 0..words.len() {
        let (ended, text) = replace_until(&machines, &args, &words[at..])?;
        ensure!(!ended, "it ended before {:?}: {text}", words[at]);
    }
    machines.join_by_list(new)?;
    let (_, text) = replace_until(&machines, &args, &["votes"])?;
    ensure!(machines.output(&args)?.status.success(), "{text}");
    machines.wait_voters(&["n1", "n2", "n4"])?;
    let list = machines.list_members()?;
    ensure!(list["members"].as_array().map(Vec::len) == Some(3), "{list}");
    writer.stop_and_check(&machines.all[0].client_url)
}

/// A second replacement of a member must be refused, because another operation has removed that
/// member.
#[test]
fn a_second_replacement_of_a_member_is_refused() -> Result<()> {
    for program in programs()? {
        let mut machines = AgentlessCluster::start_three(&program, 5)?;
        let (first, second) = (machines.add_machine(), machines.add_machine());
        let url = |number: usize| machines.all[number].peer_url.clone();
        let (first_url, second_url) = (url(first), url(second));
        let list = machines.list_members()?;
        let members = list["members"].as_array().context("members")?;
        let old = members.iter().find(|member| member["name"] == "n3").context("n3")?;
        let id = old["id"].as_str().context("an id")?.to_owned();
        let args = ["replace", &id, "n4", "--peer-urls", &first_url, "--patience", "60"];
        let (_, text) = replace_until(&machines, &args, &["start "])?;
        ensure!(text.contains("as a learner"), "{text}");
        machines.join_by_list(first)?;
        machines.run_member_command(&args)?;
        // Repeating the completed command succeeds without a change.
        machines.run_member_command(&args)?;
        let text =
            machines.expect_refusal(&["replace", &id, "n5", "--peer-urls", &second_url], 1)?;
        ensure!(text.contains("another operation did"), "{text}");
        ensure!(text.contains("\"kind\":\"refused\""), "{text}");
        let list = machines.list_members()?;
        ensure!(list["members"].as_array().map(Vec::len) == Some(3), "{list}");
    }
    Ok(())
}

/// `member plan` must show the refusal that the change itself would get, and both must exit with 1.
#[test]
fn a_plan_refuses_an_invalid_peer_url_as_the_change_does() -> Result<()> {
    let machines = AgentlessCluster::start_three(&program_path("muster-node")?, 3)?;
    for change in [&["add", "n4"][..], &["update", "n2"], &["replace", "n2", "n4"]] {
        let change = [change, &["--peer-urls", "garbage"]].concat();
        let sentence = "etcdserver: given member URLs are invalid: \\\"garbage\\\"";
        let refused = machines.expect_refusal(&change, 1)?;
        ensure!(refused.contains(sentence), "{refused}");
        let planned = machines.output(&[&["plan"], &change[..]].concat())?;
        let plan_output = String::from_utf8_lossy(&planned.stdout).into_owned();
        ensure!(
            planned.status.code() == Some(1) && plan_output.contains(sentence),
            "{plan_output}"
        );
    }
    Ok(())
}

#[test]
fn machines_are_replaced_one_by_one() -> Result<()> {
    let mut machines = AgentlessCluster::start_three(&program_path("muster-node")?, 6)?;
    let all: Vec<String> = urls(&machines, &[0, 1, 2]);
    let writer = RetryingWriter::start(all.iter().cloned().chain(next_urls(&machines)).collect());
    for old in ["n1", "n2", "n3"] {
        let new = machines.add_machine();
        let (name, url) = (machines.all[new].name.clone(), machines.all[new].peer_url.clone());
        let args = ["replace", old, &name, "--peer-urls", &url, "--patience", "60"];
        let (_, text) = replace_until(&machines, &args, &["start "])?;
        ensure!(text.contains("as a learner"), "{text}");
        machines.join_by_list(new)?;
        machines.run_member_command(&args)?;
        let gone = machines.all.iter_mut().find(|node| node.name == old).context(old)?;
        ensure!(gone.exit_code()? == 3, "the removed member {old} has another exit code");
        gone.kill();
    }
    machines.wait_voters(&["n4", "n5", "n6"])?;
    writer.stop_and_check(&machines.all[5].client_url)
}

/// Returns the client URLs that the next three machines will have, in the order of their creation.
fn next_urls(machines: &AgentlessCluster) -> Vec<String> {
    let next = |url: &str, by: u8| {
        let (head, last) = url.rsplit_once('.')?;
        let (last, port) = last.split_once(':')?;
        Some(format!("{head}.{}:{port}", last.parse::<u8>().ok()? + by))
    };
    (0..3).filter_map(|n| next(&machines.all[n].client_url, 3)).collect()
}

#[test]
fn members_change_addresses_one_by_one_with_member_wait_between() -> Result<()> {
    for program in programs()? {
        let mut machines = AgentlessCluster::start_three(&program, 6)?;
        let writer = RetryingWriter::start(urls(&machines, &[0, 1, 2]));
        for number in 0..3 {
            let name = machines.all[number].name.clone();
            let to = machines.all[number].peer_url.replace(":2380", ":12380");
            machines.run_member_command(&["move-leader", "--from", &name])?;
            ensure!(leader(&machines)? != number, "{name} still leads");
            machines.run_member_command(&["update", &name, "--peer-urls", &to])?;
            machines.all[number].move_to(&to);
            machines.all[number].stop()?;
            machines.all[number].start()?;
            let list = machines.run_member_command(&["wait", "--patience", "90"])?;
            ensure!(list.to_string().contains(&to), "{list}");
        }
        writer.stop_and_check(&machines.all[0].client_url)?;
    }
    Ok(())
}

/// A proxy to a node. The proxy closes one connection early: before it forwards the request, or
/// after the node has answered.
struct Proxy {
    url: String,
    accepted: Arc<AtomicUsize>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum LostMessage {
    Request,
    Answer,
}

impl Proxy {
    fn start(to: &str, cut: usize, loses: LostMessage) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let url = format!("http://{}", listener.local_addr()?);
        let to: SocketAddr = to.strip_prefix("http://").context("a URL")?.parse()?;
        let accepted = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&accepted);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let number = count.fetch_add(1, Ordering::SeqCst);
                let lost = (number == cut).then_some(loses);
                std::thread::spawn(move || pass(client, to, lost));
            }
        });
        Ok(Self { url, accepted })
    }
}

fn pass(mut client: TcpStream, to: SocketAddr, loses: Option<LostMessage>) -> Option<()> {
    if loses == Some(LostMessage::Request) {
        // The request is lost on its way: the client sends it, and nothing is forwarded.
        client.set_read_timeout(Some(Duration::from_millis(300))).ok()?;
        let _ = client.read(&mut [0; 1024]);
        return None;
    }
    let mut server = TcpStream::connect(to).ok()?;
    let (mut from_client, mut to_server) = (client.try_clone().ok()?, server.try_clone().ok()?);
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from_client, &mut to_server);
        let _ = to_server.shutdown(std::net::Shutdown::Both);
    });
    if loses == Some(LostMessage::Answer) {
        // The answer is lost on its way: the server's bytes are read until it pauses for 2 s, and
        // are not forwarded.
        server.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
        let mut bytes = [0; 4096];
        while server.read(&mut bytes).is_ok_and(|read| read > 0) {}
        let _ = client.shutdown(std::net::Shutdown::Both);
        return None;
    }
    let _ = std::io::copy(&mut server, &mut client);
    let _ = client.flush();
    let _ = client.shutdown(std::net::Shutdown::Both);
    Some(())
}

/// Each change is sent through a proxy that loses the request or the answer. The change must be
/// made exactly once.
#[test]
fn a_change_whose_answer_is_lost_is_made_once() -> Result<()> {
    for program in programs()? {
        let mut machines = AgentlessCluster::start_three(&program, 4)?;
        let new = machines.add_machine();
        let (first, url) = (machines.all[0].client_url.clone(), machines.all[new].peer_url.clone());
        let elsewhere = url.replace(":2380", ":12380");
        for loses in [LostMessage::Answer, LostMessage::Request] {
            // The first connection reads the member list, and the second one sends the change.
            let through = |args: &[&str]| -> Result<serde_json::Value> {
                let proxy = Proxy::start(&first, 1, loses)?;
                let output = machines.member_at(&proxy.url, args)?.output()?;
                let text = String::from_utf8_lossy(&output.stderr).into_owned();
                ensure!(output.status.success(), "{loses:?} {args:?}: {text}");
                ensure!(proxy.accepted.load(Ordering::SeqCst) > 2, "nothing was cut: {args:?}");
                Ok(serde_json::from_slice(&output.stdout)?)
            };
            let members = |count: usize| -> Result<serde_json::Value> {
                let list = machines.list_members()?;
                ensure!(list["members"].as_array().map(Vec::len) == Some(count), "{list}");
                Ok(list)
            };
            let added = through(&["add", "n4", "--peer-urls", &url])?;
            let id = added["member_id"].as_str().context("an id")?.to_owned();
            members(4)?;
            through(&["update", &id, "--peer-urls", &elsewhere])?;
            ensure!(members(4)?.to_string().contains(&elsewhere), "the update was not made");
            through(&["remove", &id])?;
            members(3)?;
        }
    }
    Ok(())
}
