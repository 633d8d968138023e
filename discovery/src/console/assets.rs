//! Style sheet, script and icon. They are compiled in, and their paths change with their content.

use std::sync::LazyLock;

use actix_web::HttpResponse;
use actix_web::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use actix_web::web::Path;
use discovery_types::digest::Digest;

use super::error::ConsoleError;

/// A file that pages refer to.
struct Asset {
    path: String,
    media_type: &'static str,
    content: &'static str,
}

/// Number of hexadecimal digits of the content's hash in the path.
const HASH_DIGITS: usize = 16;

impl Asset {
    fn new(name: &str, media_type: &'static str, content: &'static str) -> Self {
        let hash = Digest::of(content.as_bytes()).to_string();
        let path = format!("/assets/{}-{name}", &hash[..HASH_DIGITS]);
        Asset { path, media_type, content }
    }
}

static STYLE: LazyLock<Asset> = LazyLock::new(|| {
    Asset::new("console.css", "text/css; charset=utf-8", include_str!("console.css"))
});
static SCRIPT: LazyLock<Asset> = LazyLock::new(|| {
    Asset::new("console.js", "text/javascript; charset=utf-8", include_str!("console.js"))
});
static ICON: LazyLock<Asset> =
    LazyLock::new(|| Asset::new("console.svg", "image/svg+xml", include_str!("console.svg")));

pub(super) fn style_path() -> &'static str {
    &STYLE.path
}

pub(super) fn script_path() -> &'static str {
    &SCRIPT.path
}

pub(super) fn icon_path() -> &'static str {
    &ICON.path
}

/// Returns a file that pages refer to. Anybody may read it.
pub(super) async fn get(name: Path<String>) -> Result<HttpResponse, ConsoleError> {
    let path = format!("/assets/{name}");
    let all: [&LazyLock<Asset>; 3] = [&STYLE, &SCRIPT, &ICON];
    let found = all.into_iter().find(|asset| asset.path == path);
    let asset = found.ok_or_else(ConsoleError::no_page)?;
    Ok(HttpResponse::Ok()
        .insert_header((CONTENT_TYPE, asset.media_type))
        .insert_header((CACHE_CONTROL, "public, max-age=31536000, immutable"))
        .body(asset.content))
}
