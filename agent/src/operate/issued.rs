//! Takes the statements from `muster-discovery ca issue` that a person has copied into the `tls`
//! directory.
//!
//! A member that was down while its cluster's CAs were replaced can't connect to its peers. If its
//! agent can't get the newest statements from discovery either, a person copies them to the host,
//! together with new certificates. An owner must have signed each statement, so nobody else can
//! make one. But this agent may not know that an owner has been removed. Then it accepts that
//! owner's statements, as it does those from discovery and from the cluster's store.

use std::path::Path;

use discovery_types::leaves::Leaves;
use discovery_types::statement::{Statement, StatementChain};

use super::node_start::own_record;
use super::renewal::newest_certificates;
use crate::enrol::protocol::Protocol;
use crate::exit::{ExitError, error_chain};
use crate::state;

/// Name of the file with the statement chain, a JSON array of signed statements.
const STATEMENTS: &str = "statements.json";

/// Journals the statements and certificates in the `tls` directory if the statements continue the
/// journalled ones. If they can't be used, only logs that, because the node may run without them.
///
/// # Errors
/// If usable statements can't be journalled. The agent then has to end, and its next start takes
/// them. If it started the node now, it would do so by the older statements. These don't name the
/// CAs of the new certificates, so it would overwrite the new certificates in the `tls` directory.
pub(super) fn take_statements(protocol: &mut Protocol) -> Result<(), ExitError> {
    let path = protocol.layout.tls().join(STATEMENTS);
    let chain = match read_longer_chain(protocol, &path) {
        Ok(None) => return Ok(()),
        Ok(Some(chain)) => chain,
        Err(why) => {
            tracing::warn!("the statements in {} can't be taken: {why}", path.display());
            return Ok(());
        }
    };
    let leaves = newest_leaves(protocol, chain.newest());
    protocol.change_extras(|extras| {
        extras.statements = chain.jws();
        if leaves.is_some() {
            extras.leaves = leaves;
        }
    })?;
    tracing::info!("the statements in {} are taken", path.display());
    Ok(())
}

fn read_longer_chain(protocol: &Protocol, path: &Path) -> Result<Option<StatementChain>, String> {
    let file = state::read(path).map_err(|error| error_chain(&error))?;
    let Some(file) = file else { return Ok(None) };
    let join = protocol.extras.join.as_ref().ok_or("the journal lacks the cluster")?;
    let known = StatementChain::verify_from_pin(&protocol.extras.statements, &join.statement);
    longer_chain(known.map_err(|error| error_chain(&error))?, &file)
}

/// Returns the file's chain if it continues the chain `known`. `None` if the file has no newer
/// statement.
fn longer_chain(known: StatementChain, file: &[u8]) -> Result<Option<StatementChain>, String> {
    let found: Vec<String> = serde_json::from_slice(file).map_err(|error| error_chain(&error))?;
    let beginning = known.jws();
    if beginning.iter().zip(&found).any(|(known, found)| known.as_str() != found.as_str()) {
        return Err("they branch off from the statements that this agent knows".to_owned());
    }
    let newer = found.get(beginning.len()..).unwrap_or_default();
    if newer.is_empty() {
        return Ok(None);
    }
    let mut chain = known;
    for next in newer {
        chain.append_text(next).map_err(|error| error_chain(&error))?;
    }
    Ok(Some(chain))
}

fn newest_leaves(protocol: &Protocol, statement: &Statement) -> Option<Leaves> {
    let journalled = protocol.extras.leaves.as_ref()?;
    let record = own_record(&protocol.agent.journal, protocol.key.public()).ok()?;
    let node_key = record.csr.verify().ok()?.node_key;
    Some(newest_certificates(&protocol.layout, journalled, &node_key, statement))
}

#[cfg(test)]
mod tests {
    use discovery_types::convert;
    use discovery_types::fixtures::{ClusterFixture, TestCa};
    use discovery_types::grant::TokenKind;
    use discovery_types::key::SigningKey;
    use discovery_types::statement::CaPair;

    use super::*;
    use crate::host::machine;
    use crate::state::Layout;
    use crate::state::journal::{self, Join};

    /// Returns the texts of `chain`, continued by a statement that `signer` has signed. `seconds`
    /// is a field of that statement, so different values make different statements.
    fn texts(
        world: &ClusterFixture,
        chain: &StatementChain,
        signer: &SigningKey,
        seconds: u64,
    ) -> Vec<String> {
        let next = Statement {
            seq: chain.newest().seq + 1,
            previous: Some(chain.newest_hash()),
            deadline_seconds: seconds,
            ..world.statement.clone()
        };
        let known = chain.jws().into_iter();
        known.chain([next.sign(signer)]).map(|jws| jws.to_string()).collect()
    }

    /// Returns the state of an agent whose journal has the cluster's first statement and the
    /// certificates `leaves`.
    fn protocol(world: &mut ClusterFixture, layout: &Layout, leaves: &Leaves) -> Protocol {
        let (_, mut journal, mut extras) =
            journal::create(layout, machine::from_texts(None, Some("here"))).unwrap();
        let (signed, chain) = (world.signed(0), world.chain());
        let key = world.agents.remove(0);
        journal.record = Some(convert::own_record(&signed, key.public()).unwrap());
        extras.join = Some(Join {
            urls: Vec::new(),
            pins: Vec::new(),
            cluster: world.statement.cluster,
            statement: chain.newest_hash(),
            kind: TokenKind::Boot,
        });
        extras.statements = chain.jws();
        extras.leaves = Some(leaves.clone());
        Protocol::new(layout.clone(), key, journal, extras, None)
    }

    /// Returns the chain with the three statements that replace the CAs by `new`.
    fn with_replaced_cas(world: &ClusterFixture, new: &CaPair) -> StatementChain {
        let (mut chain, old) = (world.chain(), world.statement.issuing_cas());
        for (issuing, other) in [(&old, Some(new)), (new, Some(&old)), (new, None)] {
            world.append_cas(&mut chain, issuing, other);
        }
        chain
    }

    fn file(texts: &[String]) -> Vec<u8> {
        serde_json::to_vec(texts).unwrap()
    }

    #[test]
    fn a_copy_that_broke_off_changes_nothing_and_a_whole_one_is_journalled_with_its_certificates() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        let mut world = ClusterFixture::new(1);
        let (peer, client) = (TestCa::new("peers"), TestCa::new("clients"));
        let new = CaPair { peer: peer.pem.clone(), client: client.pem.clone() };
        let chain = with_replaced_cas(&world, &new);
        let (old, csr) = (world.leaves(0), world.records[0].csr.clone());
        let leaves = Leaves { peer: peer.issue(&csr), client: client.issue(&csr) };
        let mut protocol = protocol(&mut world, &layout, &old);
        let whole = serde_json::to_vec(&chain.jws()).unwrap();
        let copy = |name: &str, bytes: &[u8]| {
            std::fs::write(layout.tls().join(name), bytes).unwrap();
        };
        copy("peer.crt", leaves.peer.as_bytes());
        copy("client.crt", leaves.client.as_bytes());
        copy(STATEMENTS, &whole[..whole.len() / 2]);
        take_statements(&mut protocol).unwrap();
        assert_eq!(protocol.extras.statements, world.chain().jws());
        assert_eq!(protocol.extras.leaves.as_ref(), Some(&old));

        // The journal can't be written yet, so the agent must not take the statements.
        copy(STATEMENTS, &whole);
        std::fs::remove_file(layout.journal()).unwrap();
        std::fs::create_dir(layout.journal()).unwrap();
        let end = take_statements(&mut protocol).unwrap_err();
        assert_eq!(end.code(), 1, "a restart of the agent tries again: {end}");
        assert_eq!(protocol.extras.statements, world.chain().jws());
        assert_eq!(protocol.extras.leaves, Some(old));

        std::fs::remove_dir(layout.journal()).unwrap();
        take_statements(&mut protocol).unwrap();
        assert_eq!(protocol.extras.statements, chain.jws());
        let journal = std::fs::read(layout.journal()).unwrap();
        let journal: serde_json::Value = serde_json::from_slice(&journal).unwrap();
        assert_eq!(journal["statements"], serde_json::to_value(chain.jws()).unwrap());
        assert_eq!(journal["leaves"], serde_json::to_value(&leaves).unwrap());
    }

    #[test]
    fn statements_that_a_person_brings_are_taken_if_owners_have_continued_the_known_ones() {
        let world = ClusterFixture::new(1);
        let first = world.chain();
        let second = texts(&world, &first, &world.owner, 61);
        let chain = longer_chain(first.clone(), &file(&second)).unwrap().expect("it is longer");
        assert_eq!(chain.jws().iter().map(ToString::to_string).collect::<Vec<_>>(), second);

        for old in [&second[..], &second[..1], &[]] {
            assert!(longer_chain(chain.clone(), &file(old)).unwrap().is_none(), "{old:?}");
        }
        let other = texts(&world, &first, &world.owner, 62);
        let error = longer_chain(chain, &file(&other)).unwrap_err();
        assert!(error.contains("they branch off"), "{error}");
        for signer in [&world.issuer, &SigningKey::generate()] {
            assert!(
                longer_chain(first.clone(), &file(&texts(&world, &first, signer, 61))).is_err()
            );
        }
        assert!(longer_chain(first, b"no JSON").is_err());
    }
}
