//! Join tickets: a host joins, is removed, replaces another one, or is removed because it makes no
//! progress.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::formed_cluster::{FormedCluster, LIMIT};
use muster_tests::harness::testbed::path_text;
use muster_tests::harness::{AgentProcess, Network, poll_slowly, skip, wait_for};
use muster_tests::stock_etcd;

fn check_join_and_removal(network: Network, node: Option<&Path>) -> Result<()> {
    let running = FormedCluster::start(network, 3, node)?;
    let mut newcomer = running.newcomer(3, &[])?;
    running.wait_voter(&newcomer, 4)?;
    running.wait_intent("join", "promoted")?;
    let etcdctl = running.etcdctl()?;
    etcdctl.run(&["put", "k", "v"])?;
    let own = etcdctl.with_endpoint(&newcomer.host);
    ensure!(own.run(&["get", "k", "--print-value-only"])?.trim() == "v");
    // The statement chain of owners and operators is in the cluster's store, where discovery can't
    // withhold it.
    let statements = etcdctl.run(&["get", "muster/v1/statements", "--print-value-only"])?;
    ensure!(statements.starts_with("[\"ey"), "{statements}");

    // The newcomer restarts without discovery's help, as any member does.
    ensure!(newcomer.terminate(LIMIT)? == 0, "{}", newcomer.output());
    newcomer.start()?;
    poll_slowly("the newcomer to serve again", LIMIT, || own.run(&["get", "k"]).ok())?;

    running.remove(&newcomer)?;
    let code = newcomer.exit_code(LIMIT)?;
    ensure!(code == 3, "the removed host's agent ended with {code}: {}", newcomer.output());
    running.wait_members(3)?;
    // The removed host has a tombstone. So its agent ends at each start, with the old ticket and
    // with a new one.
    newcomer.start()?;
    ensure!(newcomer.exit_code(LIMIT)? == 3, "{}", newcomer.output());
    let mut again = running.agent(3, &running.ticket("again", &[])?, &[]);
    again.start()?;
    ensure!(again.exit_code(LIMIT)? == 3, "{}", again.output());
    running.wait_members(3)?;
    Ok(())
}

#[test]
fn a_fourth_host_joins_and_is_removed_for_good() -> Result<()> {
    check_join_and_removal(Network::loopback(4), None)
}

#[test]
fn a_fourth_host_joins_from_a_machine_of_its_own() -> Result<()> {
    match Network::namespaces(4) {
        Ok(network) => check_join_and_removal(network, None),
        Err(error) => {
            skip::report_skip(format_args!("no network namespaces here: {error:#}"));
            Ok(())
        }
    }
}

#[test]
fn a_fourth_host_joins_etcd_3_4() -> Result<()> {
    let Some(etcd) = stock_etcd::oldest() else { return Ok(()) };
    check_join_and_removal(Network::loopback(4), Some(&etcd))
}

#[test]
fn a_fourth_host_joins_the_newest_etcd() -> Result<()> {
    let Some(etcd) = stock_etcd::newest(Path::new(env!("CARGO_TARGET_TMPDIR"))) else {
        return Ok(());
    };
    check_join_and_removal(Network::loopback(4), Some(&etcd))
}

/// A host arrives with the founders' bundle after the founders' cluster was committed.
#[test]
fn a_late_host_is_shown_as_asking_and_joins_once_its_bundle_file_holds_a_ticket() -> Result<()> {
    let running = FormedCluster::start(Network::loopback(4), 3, None)?;
    let bundle = running.testbed.path("late.bundle");
    fs_err::copy(running.testbed.path("demo.bundle"), &bundle)?;
    let mut late = running.agent(3, &bundle, &[]);
    late.start()?;
    let code = late.exit_code(LIMIT)?;
    let command = "token create --cluster demo --kind join --replace";
    ensure!(code == 3 && late.output().contains(command), "{code}: {}", late.output());

    late.options.args.push("--wait-for-ticket".to_owned());
    late.start()?;
    late.wait_for_output("waits for a join ticket", LIMIT)?;
    let asking = || -> Result<String> {
        let shown = running.testbed.admin_json(&["cluster", "show", "demo"])?;
        Ok(shown["asking"].to_string())
    };
    ensure!(asking()? != "[]", "{}", late.output());
    let explained = running.testbed.admin_command(&["cluster", "explain", "demo"])?;
    ensure!(explained.contains("ASKING") && explained.contains(command), "{explained}");
    ensure!(late.is_running(), "{}", late.output());

    fs_err::rename(running.ticket("late", &[])?, &bundle)?;
    running.wait_voter(&late, 4)?;
    ensure!(asking()? == "[]", "{}", asking()?);
    Ok(())
}

#[test]
fn a_ticket_serves_one_host_and_a_wiped_host_counts_as_another() -> Result<()> {
    let running = FormedCluster::start(Network::loopback(3), 1, None)?;
    let ticket = running.ticket("one", &[])?;
    let mut first = running.agent(1, &ticket, &[]);
    first.start()?;
    running.wait_voter(&first, 2)?;
    let mut second = running.agent(2, &ticket, &[]);
    second.start()?;
    ensure!(second.exit_code(LIMIT)? == 3, "{}", second.output());
    ensure!(second.output().contains("redeemed by another key"), "{}", second.output());

    // The host loses only the node's data directory. Its agent asks an operator for a replacement,
    // and starts no new node.
    first.terminate(LIMIT)?;
    fs_err::rename(first.node_dir(), first.data_dir.join("lost"))?;
    first.start()?;
    poll_slowly("a replacement to be asked for", LIMIT, || {
        first.status().ok().filter(|status| status["phase"] == "replacement_wanted")
    })
    .with_context(|| first.output())?;
    first.terminate(LIMIT)?;
    // The host loses its whole disk, and returns with its old name, address and bundle. It is
    // refused.
    fs_err::remove_dir_all(&first.data_dir)?;
    first.start()?;
    ensure!(first.exit_code(LIMIT)? == 3, "{}", first.output());
    Ok(())
}

/// A ticket was leaked after its use. The command must name the hosts that used it, and say what to
/// do.
#[test]
fn a_compromised_ticket_names_the_member_that_came_by_it() -> Result<()> {
    let running = FormedCluster::start(Network::loopback(2), 1, None)?;
    let newcomer = running.newcomer(1, &[])?;
    running.wait_voter(&newcomer, 2)?;
    running.wait_intent("join", "promoted")?;
    let list = running.testbed.admin_json(&["token", "list", "--cluster", "demo"])?;
    let id = list["grants"][0]["grant"]["id"].as_str().context("a ticket")?;
    let said = running.testbed.admin_command(&["token", "compromised", id, "--yes"])?;
    let member = running.id(&newcomer)?;
    ensure!(said.contains(&format!("intent remove demo {member:0>16}")), "{said}");
    ensure!(said.contains("127.0.0.1"), "the address that it came from: {said}");
    ensure!(said.contains("SERIAL") && said.contains("the last known one at"), "{said}");
    let shown = running.testbed.admin_json(&["token", "show", id])?;
    ensure!(
        shown["state"] == "revoked" && shown["redemptions"][0]["change"] == "promoted",
        "{shown}"
    );
    Ok(())
}

#[test]
fn a_newcomer_that_makes_no_progress_is_removed_again() -> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(4), 3, None)?;
    running.restart_agents(&[("MUSTER_STALLED_AFTER", "3")])?;
    let mut newcomer = running.newcomer(3, &[("MUSTER_CRASH_AT", "added")])?;
    newcomer.exit_code(LIMIT)?;
    running.wait_intent("join", "stalled")?;
    running.wait_members(3)?;
    newcomer.options.env.clear();
    newcomer.start()?;
    ensure!(newcomer.exit_code(LIMIT)? == 3, "{}", newcomer.output());
    let printed = newcomer.output();
    ensure!(printed.contains("was taken out of the cluster again"), "{printed}");
    Ok(())
}

#[test]
fn a_newcomer_replaces_a_dead_member() -> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(4), 3, None)?;
    let dead = running.agents.pop().context("a third agent")?;
    let name = running.name(&dead)?;
    drop(dead);
    let ticket = wait_for("discovery to know the members", LIMIT, || {
        running.ticket("replacement", &["--replace", &name]).ok()
    })?;
    let mut newcomer = running.agent(3, &ticket, &[]);
    newcomer.start()?;
    running.wait_voter(&newcomer, 3)?;
    running.wait_intent("replace", "promoted")
}

/// Two tickets to replace one member are redeemed before any agent of the cluster acts on either
/// ticket.
fn check_one_of_two_replaces(old_runs: bool, node: Option<&Path>) -> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(5), 3, node)?;
    let old = running.agents.pop().context("a third agent")?;
    let name = running.name(&old)?;
    let tickets = wait_for("discovery to know the members", LIMIT, || {
        let ticket = |file: &str| running.ticket(file, &["--replace", &name]).ok();
        ticket("first").zip(ticket("second"))
    })?;
    // Dropping the agent also kills its node.
    let mut old = old_runs.then_some(old);
    running.agents.iter_mut().chain(&mut old).for_each(AgentProcess::kill);
    let mut newcomers = Vec::new();
    for (host, ticket) in [(3, &tickets.0), (4, &tickets.1)] {
        let mut newcomer = running.agent(host, ticket, &[]);
        newcomer.start()?;
        newcomer.wait_for_output("waiting for the cluster to add this host", LIMIT)?;
        newcomers.push(newcomer);
    }
    for agent in running.agents.iter_mut().chain(&mut old) {
        agent.start()?;
    }
    let states = |running: &FormedCluster| {
        let mut states: Vec<String> =
            running.intents().ok()?.into_iter().map(|(_, state)| state).collect();
        states.sort_unstable();
        Some(states)
    };
    poll_slowly("one newcomer to be promoted and one to be refused", LIMIT, || {
        (states(&running)? == ["promoted", "refused"]).then_some(())
    })
    .with_context(|| format!("{:?} {:?}", running.intents(), running.members()))?;
    running.wait_members(3)?;
    let (mut refused, mut come) = (0, 0);
    for newcomer in &mut newcomers {
        if running.is_voter(newcomer) {
            come += 1;
            continue;
        }
        ensure!(newcomer.exit_code(LIMIT)? == 3, "{}", newcomer.output());
        let printed = newcomer.output();
        ensure!(printed.contains("was removed by another operation"), "{printed}");
        refused += 1;
    }
    ensure!((come, refused) == (1, 1), "{come} have come, {refused} are refused");
    Ok(())
}

#[test]
fn of_two_tickets_to_replace_a_running_member_only_one_succeeds() -> Result<()> {
    check_one_of_two_replaces(true, None)
}

#[test]
fn of_two_tickets_to_replace_a_dead_member_only_one_succeeds() -> Result<()> {
    check_one_of_two_replaces(false, None)
}

#[test]
fn of_two_tickets_to_replace_a_running_etcd_3_4_member_only_one_succeeds() -> Result<()> {
    stock_etcd::oldest().map_or(Ok(()), |etcd| check_one_of_two_replaces(true, Some(&etcd)))
}

/// `muster-node` and etcd refuse each other's peer protocol. A newcomer with etcd would be a
/// learner that never works.
#[test]
fn a_host_with_stock_etcd_uses_no_ticket_of_a_cluster_of_muster_node() -> Result<()> {
    let Some(etcd) = stock_etcd::oldest() else { return Ok(()) };
    let running = FormedCluster::start(Network::loopback(4), 3, None)?;
    poll_slowly("discovery to know the members", LIMIT, || {
        let shown = running.testbed.admin_json(&["cluster", "show", "demo"]).ok()?;
        (shown["directory"]["confirmed"] == true).then_some(())
    })?;
    let ticket = running.ticket("other", &[])?;
    let mut newcomer = running.agent(3, &ticket, &[]);
    newcomer.options.args = vec!["--node-binary".to_owned(), path_text(&etcd)?.to_owned()];
    newcomer.start()?;
    ensure!(newcomer.exit_code(LIMIT)? == 3, "{}", newcomer.output());
    let printed = newcomer.output();
    ensure!(
        printed.contains("would run etcd, and the cluster's members run muster-node"),
        "{printed}"
    );
    ensure!(running.intents()?.is_empty(), "{:?}", running.intents());
    // The refusal has not used the ticket up, so the host can still join with `muster-node`.
    newcomer.options.args.clear();
    newcomer.start()?;
    running.wait_voter(&newcomer, 4)
}
