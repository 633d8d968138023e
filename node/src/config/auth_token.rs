//! `--auth-token`: either `simple`, or `jwt` with settings for signed tokens. The syntax is etcd's
//! (server/auth/options.go).

use std::sync::Arc;
use std::time::Duration;

use node_state::auth::{Jwt, JwtOptions};

use super::{ConfigError, RawFlags, duration};

/// Default lifetime of a signed token, as in etcd.
const DEFAULT_TTL: Duration = Duration::from_secs(300);
/// Supported algorithms for signing tokens.
const METHODS: &str = "HS256, HS384, HS512, RS256, RS384, RS512, PS256, PS384, PS512, ES256, \
                       ES384, EdDSA";
const USAGE: &str =
    "--auth-token takes simple, or jwt,sign-method=METHOD,priv-key=FILE,pub-key=FILE,ttl=TIME";

/// Loads the keys that sign and verify tokens. Returns `None` if `--auth-token` selects simple
/// tokens.
pub(super) fn signed_tokens(flags: &RawFlags) -> Result<Option<Arc<Jwt>>, ConfigError> {
    let mut parts = flags.value("auth-token").split(',');
    match parts.next() {
        // An empty value means the default, `simple`.
        Some("simple" | "") => return Ok(None),
        Some("jwt") => {}
        _ => return Err(ConfigError::Relation(USAGE.to_owned())),
    }
    let options = options(parts).map_err(ConfigError::Relation)?;
    Ok(Some(Arc::new(Jwt::load(&options)?)))
}

fn options<'a>(parts: impl Iterator<Item = &'a str>) -> Result<JwtOptions, String> {
    let (mut method, mut public_key, mut private_key, mut ttl) = ("", "", "", "");
    for part in parts {
        let Some((name, value)) = part.split_once('=') else {
            return Err(format!("--auth-token: each option is NAME=VALUE: {USAGE}"));
        };
        let place = match name {
            "sign-method" => &mut method,
            "pub-key" => &mut public_key,
            "priv-key" => &mut private_key,
            "ttl" => &mut ttl,
            _ => return Err(format!("--auth-token: jwt has no option {name}: {USAGE}")),
        };
        if !place.is_empty() {
            return Err(format!("--auth-token: {name} is given twice"));
        }
        *place = value;
    }
    let method = method.parse().map_err(|_| {
        let not = if method == "ES512" { " (ES512 is not supported)" } else { "" };
        format!("--auth-token: sign-method must be one of {METHODS}{not}")
    })?;
    let ttl = match ttl {
        "" => Some(DEFAULT_TTL),
        text => duration::parse(text).filter(|ttl| *ttl >= Duration::from_secs(1)),
    };
    let ttl = ttl.ok_or("--auth-token: ttl is a time of at least a second, as 10m or 1h30m")?;
    let file = |path: &str| (!path.is_empty()).then(|| path.into());
    Ok(JwtOptions { method, public_key: file(public_key), private_key: file(private_key), ttl })
}

#[cfg(test)]
mod tests {
    use super::*;
    use node_state::auth::Algorithm;

    fn read(text: &str) -> Result<JwtOptions, String> {
        options(text.split(','))
    }

    #[test]
    fn options_may_come_in_any_order() {
        let expected = JwtOptions {
            method: Algorithm::RS256,
            public_key: Some("a".into()),
            private_key: Some("b".into()),
            ttl: Duration::from_secs(600),
        };
        assert_eq!(read("pub-key=a,priv-key=b,sign-method=RS256,ttl=10m"), Ok(expected.clone()));
        assert_eq!(read("ttl=10m,sign-method=RS256,priv-key=b,pub-key=a"), Ok(expected));
        let least = read("sign-method=EdDSA").unwrap();
        assert_eq!((least.method, least.ttl), (Algorithm::EdDSA, DEFAULT_TTL));
    }

    #[test]
    fn unusable_options_are_refused_with_advice() {
        for (text, error) in [
            ("", "each option is NAME=VALUE"),
            ("sign-method", "each option is NAME=VALUE"),
            ("priv-key=a", "sign-method must be one of HS256, HS384, "),
            ("sign-method=none", "sign-method must be one of"),
            ("sign-method=rs256", "sign-method must be one of"),
            ("sign-method=ES512", "(ES512 is not supported)"),
            ("sign-method=RS256,sign-method=RS256", "sign-method is given twice"),
            ("sign-method=RS256,alg=RS256", "jwt has no option alg"),
            ("sign-method=RS256,ttl=5", "ttl is a time"),
            ("sign-method=RS256,ttl=0s", "at least a second"),
            ("sign-method=RS256,ttl=-5m", "ttl is a time"),
        ] {
            let said = read(text).unwrap_err();
            assert!(said.contains(error), "{text}: {said}");
        }
    }
}
