//! `--require`: what a host must prove beyond a token, as an admin types it.

use discovery_types::grant::Grant;
use muster_identity::{Cloud, MAX_REQUIREMENTS, Requirement};

use super::CliError;
use crate::server::parse_duration;

/// Flag of the commands that make tokens and policies.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct RequireArgs {
    /// Identity document that the host's cloud must have signed, such as
    /// aws:account=123456789012,region=eu-west-1,max-age=15m; may be repeated: one of them is
    /// enough
    #[arg(long, value_name = "CLOUD:FIELD=VALUE,…", value_parser = parse)]
    pub(super) require: Vec<Requirement>,
}

/// Fields of each cloud, as an error message lists them.
const FIELDS: &str = "aws:account=ID[,region=NAME][,max-age=TIME], \
                      gcp:project=ID[,region=NAME][,max-age=TIME] or \
                      azure:subscription=ID,tenant=ID,audience=URI";

/// Parses a requirement: a cloud and its fields. The fields for account and region may be repeated.
pub(super) fn parse(text: &str) -> Result<Requirement, String> {
    let (cloud, fields) = text.split_once(':').unwrap_or((text, ""));
    let cloud: Cloud = cloud.parse().map_err(|error| format!("{error}: {FIELDS}"))?;
    let account_field = cloud.account_name();
    let mut required = Requirement {
        cloud,
        accounts: Vec::new(),
        regions: Vec::new(),
        tenant: None,
        audience: None,
        max_age_seconds: None,
    };
    for field in fields.split(',').filter(|field| !field.is_empty()) {
        let (name, value) = field.split_once('=').unwrap_or((field, ""));
        let once = |slot: &mut Option<String>| match slot.replace(value.to_owned()) {
            None => Ok(()),
            Some(_) => Err(format!("`{name}` is given twice")),
        };
        match name {
            _ if value.is_empty() => return Err(format!("`{name}` has no value: {FIELDS}")),
            _ if name == account_field => required.accounts.push(value.to_owned()),
            "region" => required.regions.push(value.to_owned()),
            "tenant" => once(&mut required.tenant)?,
            "audience" => once(&mut required.audience)?,
            "max-age" => required.max_age_seconds = Some(parse_duration(value)?.as_secs()),
            _ => return Err(format!("`{name}` is no field of {cloud}: {FIELDS}")),
        }
    }
    required.check().map_err(|error| format!("{error}: {FIELDS}"))?;
    Ok(required)
}

/// Returns the typed requirements, if they are not too many.
pub(super) fn checked(args: &RequireArgs) -> Result<Vec<Requirement>, CliError> {
    match args.require.len() {
        0..=MAX_REQUIREMENTS => Ok(args.require.clone()),
        _ => {
            Err(CliError::Usage(format!("--require can be given {MAX_REQUIREMENTS} times at most")))
        }
    }
}

/// Returns the grant's requirements in the form that `--require` takes, or a dash if there are
/// none.
pub(super) fn typed(grant: &Grant) -> String {
    let typed: Vec<String> = grant.require.iter().map(ToString::to_string).collect();
    if typed.is_empty() { "-".to_owned() } else { typed.join(" or ") }
}

/// Returns the flags that make a host's agent get the identity document that the grant requires.
/// `None` if the requirements are for different clouds, because the flags then differ from host to
/// host.
pub(super) fn agent_flags(grant: &Grant) -> Option<String> {
    let Some(first) = grant.require.first() else { return Some(String::new()) };
    let is_same =
        |other: &Requirement| other.cloud == first.cloud && other.audience == first.audience;
    grant.require.iter().all(is_same).then(|| {
        let audience = first.audience.as_ref();
        let audience = audience.map(|uri| format!(" --identity-audience {uri}"));
        format!(" --identity-from {}{}", first.cloud, audience.unwrap_or_default())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_requirement_is_printed_as_it_was_typed() {
        for text in [
            "aws:account=123456789012",
            "aws:account=1,account=2,region=eu-west-1,region=eu-west-2,max-age=900s",
            "gcp:project=p-1,max-age=60s",
            "azure:subscription=s,tenant=t,audience=api://muster",
        ] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
        assert_eq!(parse("aws:account=1,max-age=15m").unwrap().max_age_seconds, Some(900));
    }

    #[test]
    fn a_wrong_requirement_is_refused_with_the_fields_that_there_are() {
        for (text, part) in [
            ("", "a cloud is"),
            ("alibaba:account=1", "a cloud is"),
            ("aws", "1 to 8 accounts"),
            ("aws:region=eu-west-1", "1 to 8 accounts"),
            ("aws:project=1", "`project` is no field of aws"),
            ("aws:account", "`account` has no value"),
            ("aws:account=1,max-age=soon", "`soon` is not a time"),
            ("aws:account=1,tenant=t", "for Azure, and for no other"),
            ("azure:subscription=s,tenant=t", "for Azure, and for no other"),
            ("azure:subscription=s,tenant=t,tenant=u,audience=a", "`tenant` is given twice"),
            ("azure:subscription=s,tenant=t,audience=a,max-age=1h", "none is given for Azure"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
