//! `etcd-token`: lets stock etcd form a cluster through the service, by etcd's own discovery
//! protocols.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Subcommand;
use discovery_types::SIZES;
use discovery_types::api::{
    EtcdMember, EtcdTokenRequest, EtcdTokenResponse, EtcdTokenState, EtcdTokenView,
};
use discovery_types::client::ClientError;
use discovery_types::etcd_token::{EtcdProtocol, EtcdToken, MAX_ETCD_TOKEN_SECONDS};
use discovery_types::grant::{GrantId, MAX_CIDRS};
use discovery_types::name::Name;
use ipnet::IpNet;
use secrecy::{ExposeSecret, SecretString};
use serde_json::json;

use super::confirm::IrreversibleAct;
use super::printer::{Printer, duration, time};
use super::session::AdminSession;
use super::token::parse_block;
use super::{CliError, RemoteArgs, pages};
use crate::server::parse_duration;

/// File name of the service's certificate in the printed environment variables.
const CERTIFICATE_FILE: &str = "muster-discovery.crt";

#[derive(Debug, clap::Args)]
pub(super) struct EtcdTokenArgs {
    #[command(flatten)]
    pub(super) remote: RemoteArgs,
    #[command(subcommand)]
    command: EtcdTokenCommand,
}

#[derive(Debug, Subcommand)]
enum EtcdTokenCommand {
    /// Make a token, and print the environment variables that etcd needs
    #[command(after_help = "\
Examples:
  muster-discovery etcd-token create demo --size 3 --protocol v3 --out etcd.env --cacert disco.crt
  muster-discovery etcd-token create demo --size 3 --protocol v2 --cidr 10.1.0.0/16 --out etcd.env

Every host gets the same two files; the path of the certificate is the one that --cacert names. A unit
of systemd reads the first by EnvironmentFile=. Each etcd has its own --name, and peer URLs that the
others reach. Use v2 with etcd 3.4 and 3.5, v3 with 3.7 and newer; 3.6 has both.

The token lets whoever has it register a member, until all members have registered or the time is over.
What etcd forms so is not a cluster of Muster's: no agent looks after it, and nobody has signed its
members. Later members join through etcd itself: etcdctl member add.")]
    Create(EtcdTokenCreateArgs),
    /// List the tokens, the newest first
    List,
    /// Show a token, and the members that registered with it
    Show {
        /// The token's id, as `etcd-token list` prints it
        id: GrantId,
    },
    /// Revoke a token: no further member can register with it
    #[command(after_help = "\
An etcd that waits for further members exits with an error. A cluster whose members have all
registered isn't changed.")]
    Revoke {
        /// The token's id, as `etcd-token list` prints it
        id: GrantId,
        /// Skip the confirmation prompt
        #[arg(long)]
        yes: bool,
    },
}

#[derive(Debug, clap::Args)]
struct EtcdTokenCreateArgs {
    /// Name of the cluster, by which admins recognise the token; etcd doesn't use it
    name: Name,
    /// Number of members that form the cluster, from 1 to 9
    #[arg(long, value_name = "N")]
    size: u8,
    /// Allow an even size (N members tolerate no more failures than N-1)
    #[arg(long)]
    allow_even: bool,
    /// Protocol that the members speak: v2 (etcd 3.4 to 3.6) or v3 (etcd 3.6 and newer)
    #[arg(long, value_name = "v2|v3")]
    protocol: EtcdProtocol,
    /// Time for which members can register, at most 24h
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "1h")]
    expires: Duration,
    /// Addresses from which members may register; may be repeated
    #[arg(long, value_name = "CIDR", value_parser = parse_block)]
    cidr: Vec<IpNet>,
    /// Write the environment variables to a new file (mode 0600) instead of stdout
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Write the service's certificate to a new file, by which etcd recognises the service
    #[arg(long, value_name = "FILE")]
    cacert: Option<PathBuf>,
}

pub(super) async fn run(args: EtcdTokenArgs, printer: &mut Printer) -> Result<(), CliError> {
    let session = AdminSession::open(&args.remote)?;
    match args.command {
        EtcdTokenCommand::Create(create) => self::create(&session, create, printer).await,
        EtcdTokenCommand::List => list(&session, printer).await,
        EtcdTokenCommand::Show { id } => show(printer, &session.client.show_etcd_token(id).await?),
        EtcdTokenCommand::Revoke { id, yes } => {
            let view = session.client.show_etcd_token(id).await?;
            let ends = format!("No further member registers for {} with {id}.", view.name);
            IrreversibleAct { consequences: vec![ends], name: &id.to_string() }
                .confirm(yes, printer)?;
            show(printer, &session.client.revoke_etcd_token(id).await?)
        }
    }
}

async fn create(
    session: &AdminSession,
    args: EtcdTokenCreateArgs,
    printer: &mut Printer,
) -> Result<(), CliError> {
    check(&args)?;
    let token = EtcdToken::generate();
    let request = EtcdTokenRequest {
        id: token.id(),
        secret_hash: token.secret_hash(),
        name: args.name.clone(),
        protocol: args.protocol,
        size: args.size,
        lifetime_seconds: args.expires.as_secs(),
        cidrs: args.cidr.clone(),
    };
    let made = session.client.put_etcd_token(&request).await?;
    let view = &made.token;
    if view.id != request.id || view.protocol != request.protocol || view.size != request.size {
        return Err(CliError::Answer("it stored another token than the one sent".into()));
    }
    let certificate = args.cacert.clone().unwrap_or_else(|| CERTIFICATE_FILE.into());
    let variables = variables(session, &token, &made, &certificate)?;
    if let Err(error) = write_files(&args, &variables, &made) {
        // A file was not written, so no etcd can use the token yet. Revoke it.
        revoke_unwritten(session, view.id, printer).await;
        return Err(error);
    }
    print_created(&args, &variables, view, printer)
}

/// Refuses arguments that the service would refuse, and output files that exist, before any
/// request.
fn check(args: &EtcdTokenCreateArgs) -> Result<(), CliError> {
    let usage = |text: String| Err(CliError::Usage(text));
    if !SIZES.contains(&args.size) {
        return usage("--size must be from 1 to 9".into());
    }
    if args.size.is_multiple_of(2) && !args.allow_even {
        let less = args.size - 1;
        return usage(format!(
            "--size {} tolerates no more failures than {less}: use an odd size, or --allow-even",
            args.size
        ));
    }
    if !(1..=MAX_ETCD_TOKEN_SECONDS).contains(&args.expires.as_secs()) {
        let longest = duration(MAX_ETCD_TOKEN_SECONDS);
        return usage(format!("--expires must be from 1s to {longest}"));
    }
    if args.cidr.len() > MAX_CIDRS {
        return usage(format!("--cidr can be given {MAX_CIDRS} times at most"));
    }
    let files = [&args.out, &args.cacert];
    match files.into_iter().flatten().find(|file| file.exists()) {
        Some(file) => Err(muster_files::Error::Exists(file.clone()).into()),
        None => Ok(()),
    }
}

/// Returns the environment variables that make etcd register with the token.
///
/// With the protocol v3, etcd writes the discovery token into each line of its log. So the
/// discovery token is only the token's id, and the whole token is the password.
fn variables(
    session: &AdminSession,
    token: &EtcdToken,
    made: &EtcdTokenResponse,
    certificate: &Path,
) -> Result<SecretString, CliError> {
    let secret = token.expose();
    let (secret, id) = (secret.expose_secret(), token.id());
    let certificate = certificate.display();
    let lines = match made.token.protocol {
        EtcdProtocol::V2 => {
            let url = session.context.urls.first();
            let url = url.ok_or_else(|| CliError::Usage("the context has no URL".into()))?;
            format!(
                "ETCD_DISCOVERY={url}/v2/{secret}\nETCD_DISCOVERY_FALLBACK=exit\n\
                 SSL_CERT_FILE={certificate}\n"
            )
        }
        EtcdProtocol::V3 => {
            let endpoints: Vec<_> =
                made.v3_endpoints.iter().map(|endpoint| format!("https://{endpoint}")).collect();
            format!(
                "ETCD_DISCOVERY_ENDPOINTS={}\nETCD_DISCOVERY_TOKEN={id}\nETCD_DISCOVERY_USER={id}\n\
                 ETCD_DISCOVERY_PASSWORD={secret}\nETCD_DISCOVERY_INSECURE_TRANSPORT=false\n\
                 ETCD_DISCOVERY_CACERT={certificate}\n",
                endpoints.join(",")
            )
        }
    };
    Ok(SecretString::from(lines))
}

fn write_files(
    args: &EtcdTokenCreateArgs,
    variables: &SecretString,
    made: &EtcdTokenResponse,
) -> Result<(), CliError> {
    if let Some(out) = &args.out {
        muster_files::create(out, variables.expose_secret().as_bytes(), 0o600)?;
    }
    if let Some(file) = &args.cacert {
        muster_files::create(file, made.service_certificate.as_bytes(), 0o644)?;
    }
    Ok(())
}

async fn revoke_unwritten(session: &AdminSession, id: GrantId, printer: &mut Printer) {
    let revoked: Result<_, ClientError> = session.client.revoke_etcd_token(id).await;
    if let Err(error) = revoked {
        printer.warn(&format!("the token {id} was made, and can't be revoked: {error}"));
    }
}

fn print_created(
    args: &EtcdTokenCreateArgs,
    variables: &SecretString,
    view: &EtcdTokenView,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let mut value = json!({
        "id": view.id,
        "name": view.name,
        "protocol": view.protocol,
        "size": view.size,
        "expires_at_ms": view.expires_at_ms,
    });
    match &args.out {
        Some(file) => {
            value["file"] = json!(file);
            printer.print_value(&value, |out| out.line(&file.display().to_string()))?;
        }
        None => {
            value["variables"] = json!(variables.expose_secret());
            printer.print_value(&value, |out| out.line(variables.expose_secret().trim_end()))?;
        }
    }
    printer.note(&format!(
        "token {}: {} member(s), until {}",
        view.id,
        view.size,
        time(view.expires_at_ms)
    ));
    if args.cacert.is_none() {
        printer.note(&format!(
            "etcd needs the service's certificate in the file {CERTIFICATE_FILE}: --cacert FILE \
             writes it; it is tls.crt in the key directory, too"
        ));
    }
    if view.cidrs.is_empty() {
        printer.warn(
            "whoever has the token can register a member from anywhere: bind it to your network with \
             --cidr",
        );
    }
    Ok(())
}

async fn list(session: &AdminSession, printer: &mut Printer) -> Result<(), CliError> {
    let list = pages::etcd_tokens(session, printer).await?.items;
    printer.print_value(&json!({ "etcd_tokens": list }), |out| {
        let header = ["ID", "NAME", "PROTOCOL", "STATE", "MEMBERS", "EXPIRES"];
        out.table(header, list.iter().map(row));
    })
}

fn row(view: &EtcdTokenView) -> [String; 6] {
    let listed = view.members.iter().filter(|member| !member.lapsed).count();
    [
        view.id.to_string(),
        view.name.to_string(),
        view.protocol.as_str().into(),
        view.state.as_str().into(),
        format!("{listed} of {}", view.size),
        time(view.expires_at_ms),
    ]
}

fn show(printer: &mut Printer, view: &EtcdTokenView) -> Result<(), CliError> {
    printer.print_value(view, |out| {
        let cidrs = view.cidrs.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        out.fields(&[
            ("id", view.id.to_string()),
            ("name", view.name.to_string()),
            ("state", view.state.as_str().into()),
            ("protocol", view.protocol.as_str().into()),
            ("size", view.size.to_string()),
            ("made by", view.made_by.clone()),
            ("made", time(view.made_at_ms)),
            ("expires", time(view.expires_at_ms)),
            ("addresses", if cidrs.is_empty() { "any".into() } else { cidrs }),
        ]);
        if view.state == EtcdTokenState::Void {
            out.line("Made before the last change of the database: make another one.");
        }
        if !view.members.is_empty() {
            let header = ["MEMBER", "NAME", "PEER URLS", "ADDRESS", "REGISTERED", "PLACE"];
            out.table(header, view.members.iter().map(member_row));
        }
    })
}

fn member_row(member: &EtcdMember) -> [String; 6] {
    [
        member.id.to_string(),
        member.name.clone(),
        member.peer_urls.join(","),
        member.address.clone(),
        time(member.at_ms),
        if member.lapsed { "lapsed: it stopped waiting".into() } else { "yes".into() },
    ]
}
