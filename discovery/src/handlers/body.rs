//! Extractors for request bodies, with limits on size and time. Errors are problem documents.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use actix_web::dev::Payload;
use actix_web::http::header;
use actix_web::{FromRequest, HttpRequest, web};
use discovery_types::api::MAX_BODY_BYTES;
use discovery_types::problem::Code;
use discovery_types::strict;
use futures_util::StreamExt;
use serde::de::DeserializeOwned;

use crate::error::ApiError;

/// Time limit for a request's body.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// A JSON body of at most `LIMIT` bytes.
pub(crate) struct JsonBody<T, const LIMIT: usize = MAX_BODY_BYTES>(pub T);

impl<T: DeserializeOwned + 'static, const LIMIT: usize> FromRequest for JsonBody<T, LIMIT> {
    type Error = ApiError;
    type Future = Pin<Box<dyn Future<Output = Result<Self, ApiError>>>>;

    fn from_request(request: &HttpRequest, payload: &mut Payload) -> Self::Future {
        let request = request.clone();
        let payload = payload.take();
        Box::pin(async move {
            expect_type(&request, "application/json")?;
            let bytes = read(web::Payload::from_request(&request, &mut { payload }).await, LIMIT);
            let bytes = bytes.await?;
            strict::from_slice(&bytes).map(JsonBody).map_err(|error| unreadable_request(&error))
        })
    }
}

/// A form body of at most [`MAX_BODY_BYTES`] bytes.
pub(crate) struct FormBody<T>(pub T);

impl<T: DeserializeOwned + 'static> FromRequest for FormBody<T> {
    type Error = ApiError;
    type Future = Pin<Box<dyn Future<Output = Result<Self, ApiError>>>>;

    fn from_request(request: &HttpRequest, payload: &mut Payload) -> Self::Future {
        let request = request.clone();
        let payload = payload.take();
        Box::pin(async move {
            expect_type(&request, "application/x-www-form-urlencoded")?;
            let payload = web::Payload::from_request(&request, &mut { payload }).await;
            let bytes = read(payload, MAX_BODY_BYTES).await?;
            let text = std::str::from_utf8(&bytes).map_err(|error| unreadable_request(&error))?;
            // `Query` parses the same format as a form body: application/x-www-form-urlencoded.
            let form =
                web::Query::<T>::from_query(text).map_err(|error| unreadable_request(&error))?;
            Ok(FormBody(form.into_inner()))
        })
    }
}

/// Maximum length in bytes of a word that an error repeats from a request. A UUID has 36 bytes.
/// Keys, and the secrets of tokens, have 43 or more.
const MAX_SHOWN_WORD: usize = 40;

/// Error for a request that can't be parsed. Long words are hidden, because they may be secrets.
pub(crate) fn unreadable_request(error: &impl ToString) -> ApiError {
    let next = "Correct the request; /openapi.json says what is expected.";
    let text: String = error.to_string().chars().filter(|c| !c.is_control()).collect();
    let detail = hide_long_words(&text).chars().take(300).collect::<String>();
    ApiError::new(Code::InvalidRequest, detail, next)
}

/// Replaces each word longer than [`MAX_SHOWN_WORD`] by `…`, because it may be a secret. A parser's
/// error repeats the text that it can't parse, and clients log errors.
fn hide_long_words(text: &str) -> String {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "_-+/=.".contains(c);
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        shown.push_str(if word.len() > MAX_SHOWN_WORD { "…" } else { word });
        let between = after.find(is_part).unwrap_or(after.len());
        shown.push_str(&after[..between]);
        rest = &after[between..];
    }
    shown
}

fn expect_type(request: &HttpRequest, expected: &str) -> Result<(), ApiError> {
    let found = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let found = found.and_then(|value| value.split(';').next()).unwrap_or_default();
    if found.trim().eq_ignore_ascii_case(expected) {
        return Ok(());
    }
    let next = format!("Send it as {expected}.");
    Err(ApiError::new(Code::MediaType, format!("The body must be {expected}."), next))
}

async fn read(
    payload: Result<web::Payload, actix_web::Error>,
    limit: usize,
) -> Result<Vec<u8>, ApiError> {
    let mut payload = payload.map_err(|error| unreadable_request(&error))?;
    let whole = async {
        let mut bytes = Vec::new();
        while let Some(chunk) = payload.next().await {
            let chunk = chunk.map_err(|error| unreadable_request(&error))?;
            if bytes.len() + chunk.len() > limit {
                let next = "Send less.";
                let detail = format!("A body may have {limit} bytes here.");
                return Err(ApiError::new(Code::TooLarge, detail, next));
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok(bytes)
    };
    tokio::time::timeout(BODY_TIMEOUT, whole).await.unwrap_or_else(|_| {
        let seconds = BODY_TIMEOUT.as_secs();
        let detail = format!("The body wasn't here after {seconds} s.");
        Err(ApiError::new(Code::RequestTimeout, detail, "Send it again, faster."))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_repeats_no_word_as_long_as_a_secret() {
        let secret = "7hwftpk26ffdgwuxpt3vzaz44bvbgqxmm5w2s7qioitziev3zhna";
        let uuid = "01a21a4a-f3a3-7225-841b-6b2be54a53ed";
        for (text, shown) in [
            (
                format!("unknown field `{secret}`, expected `jws`"),
                "unknown field `…`, expected `jws`".to_owned(),
            ),
            (format!("no `{uuid}` here"), format!("no `{uuid}` here")),
            (format!("{secret}é{secret} mst_boot_x_{secret}"), "…é… …".to_owned()),
            ("x".repeat(40), "x".repeat(40)),
            (String::new(), String::new()),
        ] {
            assert_eq!(hide_long_words(&text), shown);
        }
    }
}
