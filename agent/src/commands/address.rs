//! `address`: carries members' addresses from host to host by hand, if all hosts have moved and
//! discovery can't be reached.
//!
//! `show` prints a signed statement of this host's member's address. `add` verifies such statements
//! from other hosts, and gives the addresses to this host's node. Neither needs a running agent,
//! and neither changes the cluster.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use discovery_types::digest::Digest;
use discovery_types::key::SigningKey;
use discovery_types::member_address::{
    MAX_SIGNED_ADDRESS_BYTES, MemberAddress, SignedMemberAddress, VerifiedMemberAddress,
};
use discovery_types::statement::StatementChain;
use serde::Serialize;

use crate::cli::addressing::AddressFlags;
use crate::cli::{AddressAddArguments, AddressCommand, AddressShowArguments, DataDir};
use crate::commands::printer::Printer;
use crate::enrol::redeem;
use crate::exit::{ExitError, error_chain};
use crate::operate::addresses::journalled_addresses;
use crate::operate::node_start::{is_stock_etcd, own_record};
use crate::state::journal::{self, Join, VerifiedJournal};
use crate::state::{Layout, peer_addresses, state_exit_error};

/// The output of `address add --json`.
#[derive(Serialize)]
struct AddressOutput {
    peers: Vec<AddedPeer>,
}

/// A peer whose address was added.
#[derive(Serialize)]
struct AddedPeer {
    /// SHA-256 of the public key of the peer's node, in hexadecimal.
    node_key: String,
    peer_urls: Vec<String>,
}

/// Runs the command `address`.
pub(crate) fn run(typed: &AddressCommand, printer: &mut Printer<'_>) -> Result<(), ExitError> {
    match typed {
        AddressCommand::Show(typed) => show(typed, printer),
        AddressCommand::Add(typed) => add(typed, printer),
    }
}

/// This host's member, with the state that both subcommands read.
struct Member {
    layout: Layout,
    key: SigningKey,
    journal: VerifiedJournal,
    join: Join,
    chain: StatementChain,
}

impl Member {
    fn read(typed: &DataDir) -> Result<Self, ExitError> {
        let layout = Layout::new(&typed.data_dir)
            .map_err(|error| ExitError::Usage(format!("--data-dir: {error}")))?;
        if !layout.root().is_dir() {
            return Err(ExitError::Failed(format!(
                "{}: no such folder; say where the state lies with --data-dir",
                layout.root().display()
            )));
        }
        let layout = layout.claim().map_err(state_exit_error)?;
        let no_member = || {
            ExitError::Failed(format!(
                "{}: this host is no member yet, so it has no address in a cluster",
                layout.root().display()
            ))
        };
        let (key, journal) =
            journal::read(&layout).map_err(state_exit_error)?.ok_or_else(no_member)?;
        let join = journal.extras.join.clone().filter(|_| journal.document.is_some());
        let join = join.ok_or_else(no_member)?;
        let chain = StatementChain::verify_from_pin(&journal.extras.statements, &join.statement)
            .map_err(|error| ExitError::Failed(error_chain(&error)))?;
        Ok(Self { layout, key, journal, join, chain })
    }
}

fn show(typed: &AddressShowArguments, printer: &mut Printer<'_>) -> Result<(), ExitError> {
    let Member { layout, key, journal, join, .. } = Member::read(&typed.data_dir)?;
    let record = own_record(&journal.journal, key.public())?;
    let addresses = journalled_addresses(&journal.extras, &record, &AddressFlags::default())?;
    let proof = redeem::member_proof(&layout, &journal.extras, key.public(), &join);
    let proof = proof.ok_or_else(|| {
        ExitError::Failed(format!(
            "{}: the node's key or its certificate is missing",
            layout.tls().display()
        ))
    })?;
    let address = MemberAddress {
        cluster: join.cluster,
        agent: *key.public(),
        number: journal.extras.address_number,
        peer_urls: vec![addresses.peer_url],
    };
    print(printer, &address.sign(&key, proof).to_json())
}

fn add(typed: &AddressAddArguments, printer: &mut Printer<'_>) -> Result<(), ExitError> {
    let member = Member::read(&typed.data_dir)?;
    if is_stock_etcd(&member.layout) {
        return Err(ExitError::Usage(
            "this host's node is stock etcd, which finds its peers by its member list alone: give the \
             hosts their old addresses again, or recover the cluster (muster-agent recover)"
                .to_owned(),
        ));
    }
    let own = own_record(&member.journal.journal, member.key.public())?;
    let own = own.csr.verify().map_err(|error| ExitError::Failed(error_chain(&error)))?.node_key;
    let mut all = peer_addresses::read(&member.layout);
    let mut newest: BTreeMap<Digest, MemberAddress> = BTreeMap::new();
    for file in &typed.files {
        let found = read(file, &member.chain)?;
        let known = newest.get(&found.proven.node_key);
        // The files may include several statements of one member's address. Keep the newest one.
        if known.is_none_or(|known| known.number < found.address.number) {
            newest.insert(found.proven.node_key, found.address);
        }
    }
    let mut added = Vec::new();
    for (node_key, address) in newest {
        let urls = address.peer_urls;
        // Skip this host's own file: operators copy all files to all hosts.
        if node_key == own {
            continue;
        }
        added.push(AddedPeer {
            node_key: node_key.to_string(),
            peer_urls: urls.iter().map(ToString::to_string).collect(),
        });
        all.insert(node_key, urls);
    }
    peer_addresses::write(&member.layout, &all).map_err(state_exit_error)?;
    if typed.json {
        let text = serde_json::to_string(&AddressOutput { peers: added })
            .map_err(|error| ExitError::Failed(error.to_string()))?;
        return print(printer, &text);
    }
    for peer in &added {
        print(printer, &format!("The node looks for a peer at {}.", peer.peer_urls.join(", ")))?;
    }
    if added.is_empty() {
        print(printer, "The files name no other member than this one.")?;
    }
    Ok(())
}

fn read(file: &PathBuf, chain: &StatementChain) -> Result<VerifiedMemberAddress, ExitError> {
    let failed = |why: String| ExitError::Failed(format!("{}: {why}", file.display()));
    let bytes = muster_files::read_named(Path::new(file), MAX_SIGNED_ADDRESS_BYTES as u64)
        .map_err(|error| failed(error.to_string()))?;
    let signed: SignedMemberAddress = serde_json::from_slice(&bytes).map_err(|error| {
        failed(format!("it is not what `muster-agent address show` prints: {error}"))
    })?;
    signed.verify(chain.newest()).map_err(|error| failed(error_chain(&error)))
}

fn print(printer: &mut Printer<'_>, text: &str) -> Result<(), ExitError> {
    printer.line(text).map_err(|error| ExitError::Failed(error.to_string()))
}
