//! `admin`: lists and changes the admins, a chain of owner-signed changes.

use clap::Subcommand;
use discovery_types::admin::{Admin, AdminChain, AdminOperation};
use discovery_types::api::AdminList;
use discovery_types::key::{PublicKey, SigningKey};
use discovery_types::name::Name;
use discovery_types::role::{Action, Role};
use secrecy::ExposeSecret;
use serde_json::json;

use super::confirm::IrreversibleAct;
use super::printer::Printer;
use super::session::AdminSession;
use super::{CliError, RemoteArgs};
use crate::server::read_public_key;

#[derive(Debug, clap::Args)]
pub(super) struct AdminArgs {
    #[command(flatten)]
    pub(super) remote: RemoteArgs,
    #[command(subcommand)]
    command: AdminCommand,
}

#[derive(Debug, Subcommand)]
enum AdminCommand {
    /// Add an admin, and print a context for them
    #[command(after_help = "\
Example:
  muster-discovery admin add ada ed25519:… --role issuer,operator
  muster-discovery admin add safe --recovery

Roles: owner (everything), issuer (tokens), operator (abandon, join tickets, client certificates),
auditor (reads). The new admin makes a key with `key new` and sends you the public one. Clusters that
exist already don't know the new admin until an owner runs `cluster restate NAME`.

With --recovery the private key is printed once, on stdout, and stored nowhere. Print it on paper, lock it
away, and run `cluster restate --all`. `key restore` makes a file of it again.")]
    Add {
        /// Name of the admin
        name: Name,
        /// The admin's public key, or the .pub file that holds it
        #[arg(
            value_name = "PUBLIC_KEY|FILE",
            value_parser = read_public_key,
            required_unless_present = "recovery"
        )]
        public_key: Option<PublicKey>,
        /// Roles of the admin, separated by commas
        #[arg(
            long,
            value_name = "ROLE",
            value_delimiter = ',',
            required_unless_present = "recovery"
        )]
        role: Vec<Role>,
        /// Make a recovery key with the role of owner, and print it to be kept on paper
        #[arg(long, conflicts_with_all = ["public_key", "role", "replace"])]
        recovery: bool,
        /// Change the name or the roles of an existing admin's key
        #[arg(long)]
        replace: bool,
    },
    /// List the admins and their roles
    List,
    /// Revoke an admin and all their roles
    Revoke {
        /// Name or key id of the admin
        #[arg(value_name = "NAME|KEY_ID", allow_hyphen_values = true)]
        admin: String,
        /// Skip the confirmation prompt
        #[arg(long)]
        yes: bool,
    },
}

pub(super) async fn run(args: AdminArgs, printer: &mut Printer) -> Result<(), CliError> {
    let mut session = AdminSession::open(&args.remote)?;
    let (list, mut chain) = session.admins().await?;
    match args.command {
        AdminCommand::List => show(printer, &list, &chain),
        AdminCommand::Add { name, recovery: true, .. } => {
            add_recovery(&mut session, &mut chain, name, printer).await
        }
        AdminCommand::Add { name, public_key, mut role, replace, .. } => {
            let public_key = public_key
                .ok_or_else(|| CliError::Usage("the admin's public key is missing".into()))?;
            role.sort();
            role.dedup();
            let key = public_key;
            let admin = Admin { key, name, roles: role };
            match chain.find(&key.key_id()) {
                Some(known) if is_same(known, &admin) => {
                    printer.note("nothing has changed: the key is this admin's already");
                }
                known => {
                    check_add(&chain, known, &admin, replace)?;
                    change(&session, &mut chain, AdminOperation::Add(admin.clone())).await?;
                }
            }
            keep_owner(&mut session, &admin)?;
            let line = session.context.to_string();
            printer
                .print_value(&json!({ "admin": admin, "context": line }), |out| out.line(&line))?;
            printer.note(&format!(
                "{} is an admin now. Hand on the line above: muster-discovery context add '<the \
                 line>'.",
                admin.name
            ));
            printer.note(
                "Clusters that exist already learn of it by: muster-discovery cluster restate NAME",
            );
            Ok(())
        }
        AdminCommand::Revoke { admin, yes } => {
            let found = find_admin(&chain, &admin)?;
            let ends = format!(
                "From now on the service takes nothing that the key of {} signs. Orders of {0} that \
                 nobody has begun are refused once the cluster is restated.",
                found.name
            );
            IrreversibleAct { consequences: vec![ends], name: found.name.as_str() }
                .confirm(yes, printer)?;
            let last = chain.admins().iter().filter(|admin| admin.is_owner()).count() <= 2;
            change(&session, &mut chain, AdminOperation::Revoke(found.key)).await?;
            let text = format!("{} is no admin any more", found.name);
            printer.print_value(&json!({ "revoked": found }), |out| out.line(&text))?;
            if found.is_owner() && last {
                printer.warn(
                    "there is only one owner left: if that key is lost, nobody can \
                              create or retire a cluster, or name an admin",
                );
            }
            printer.note(
                "Clusters that exist already still name this admin in their statements. For each: \
                 muster-discovery cluster restate NAME",
            );
            Ok(())
        }
    }
}

/// Keeps an owner's key in the context, so that later commands trust its signatures.
fn keep_owner(session: &mut AdminSession, admin: &Admin) -> Result<(), CliError> {
    if admin.is_owner() && !session.context.owners.contains(&admin.key) {
        session.context.owners.push(admin.key);
        session.home.put(&session.name, &session.context)?;
    }
    Ok(())
}

/// Makes a key that is kept on paper alone, prints it, and adds it to the admin chain with the role
/// of owner.
async fn add_recovery(
    session: &mut AdminSession,
    chain: &mut AdminChain,
    name: Name,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let key = SigningKey::generate();
    let admin = Admin { key: *key.public(), name, roles: vec![Role::Owner] };
    check_add(chain, None, &admin, false)?;
    session.check_role(chain, Action::ChangeAdmins)?;
    // Print the key before the admin chain is changed. Otherwise an error in between would leave an
    // owner whose key nobody has.
    let paper = key.to_paper();
    let value = json!({ "admin": admin, "paper": paper.expose_secret() });
    printer.print_value(&value, |out| out.line(paper.expose_secret()))?;
    change(session, chain, AdminOperation::Add(admin.clone())).await?;
    keep_owner(session, &admin)?;
    printer.note(&format!(
        "{} is an owner now. The line above is its private key, and is stored nowhere: put it on paper \
         and lock it away. Try it: muster-discovery key restore --out /dev/shm/try.pem prints {}",
        admin.name,
        key.public()
    ));
    printer.note("next: muster-discovery cluster restate --all, so that clusters know it, too");
    Ok(())
}

fn is_same(one: &Admin, other: &Admin) -> bool {
    let roles = |admin: &Admin| {
        let mut roles = admin.roles.clone();
        roles.sort();
        roles
    };
    one.name == other.name && roles(one) == roles(other)
}

/// Refuses an addition that is probably a mistake: a known key without --replace, or another
/// admin's name.
fn check_add(
    chain: &AdminChain,
    known: Option<&Admin>,
    admin: &Admin,
    replace: bool,
) -> Result<(), CliError> {
    if let Some(known) = known
        && !replace
    {
        let roles: Vec<_> = known.roles.iter().map(|role| role.as_str()).collect();
        return Err(CliError::Usage(format!(
            "the key is already that of `{}` ({}): say --replace to change name and roles",
            known.name,
            roles.join(",")
        )));
    }
    let namesake = chain.admins().iter().find(|other| other.name == admin.name);
    match namesake.filter(|other| other.key != admin.key) {
        Some(other) => Err(CliError::Usage(format!(
            "`{}` is the name of another admin (key {}): choose another one",
            other.name,
            other.key.key_id()
        ))),
        None => Ok(()),
    }
}

/// Signs a change, checks that it extends the chain, and sends it.
async fn change(
    session: &AdminSession,
    chain: &mut AdminChain,
    change: AdminOperation,
) -> Result<(), CliError> {
    session.check_role(chain, Action::ChangeAdmins)?;
    let element = chain.sign_next(&session.key, change);
    chain.append(&element).map_err(CliError::Admins)?;
    let list = session.client.put_admin(&element).await?;
    let after = AdminChain::verify(&list.root_owner, &list.chain).map_err(CliError::Admins)?;
    if after.head() != chain.head() {
        return Err(CliError::Answer("its admin chain doesn't end in the change".into()));
    }
    Ok(())
}

fn find_admin(chain: &AdminChain, text: &str) -> Result<Admin, CliError> {
    let named =
        |admin: &&Admin| admin.name.as_str() == text || admin.key.key_id().to_string() == text;
    let found = chain.admins().iter().find(named).cloned();
    found.ok_or_else(|| CliError::NoAdmin(text.to_owned()))
}

fn show(printer: &mut Printer, list: &AdminList, chain: &AdminChain) -> Result<(), CliError> {
    // Show the admins from the verified chain, not the service's own list of them.
    let verified = AdminList { admins: chain.admins().to_vec(), ..list.clone() };
    let mut value = serde_json::to_value(&verified).expect("answers are plain structs");
    for (shown, admin) in value["admins"].as_array_mut().into_iter().flatten().zip(chain.admins()) {
        // Add the key id, by which `admin revoke` identifies an admin.
        shown["key_id"] = json!(admin.key.key_id());
    }
    printer.print_value(&value, |out| {
        let rows = verified.admins.iter().map(|admin| {
            let roles: Vec<_> = admin.roles.iter().map(|role| role.as_str()).collect();
            [admin.name.to_string(), roles.join(","), admin.key.key_id().to_string()]
        });
        out.table(["NAME", "ROLES", "KEY ID"], rows);
    })?;
    if list.admins != verified.admins {
        printer.warn("the service names other admins than its chain: its database was changed");
    }
    Ok(())
}
