//! Auth tokens of a client, simple and signed (JWT). Every input must be refused, because no member
//! issued it.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;
use std::time::Duration;

use muster_fuzz as _;
use node_state::auth::{Algorithm, Jwt, JwtOptions, SimpleTokens, TokenSecret};

static SIGNED: LazyLock<Jwt> = LazyLock::new(|| {
    let keys = Path::new(env!("CARGO_MANIFEST_DIR")).join("../node/state/src/auth/jwt/fixtures");
    let (method, ttl) = (Algorithm::HS256, Duration::from_secs(300));
    let private_key = Some(keys.join("hmac.key"));
    Jwt::load(&JwtOptions { method, public_key: None, private_key, ttl }).expect("a key")
});

libfuzzer_sys::fuzz_target!(|shown: &str| {
    let mut tokens = SimpleTokens::default();
    tokens.assign(7, TokenSecret::random().hash(), "root".into());
    assert_eq!(tokens.find(shown, Duration::ZERO, Duration::MAX), None);
    assert!(SIGNED.verify(shown).is_err());
});
