//! Pages of lists, which are ordered by time and id, newest first.

use std::fmt::Display;
use std::str::FromStr;

use discovery_types::api::MAX_PAGE;
use discovery_types::problem::Code;

use crate::error::ApiError;
use crate::store::ListPosition;

/// Returns the number of items on a page: the requested `limit`, or the maximum. Returns an error
/// if the limit is out of range.
pub(super) fn page_limit(limit: Option<u16>) -> Result<u16, ApiError> {
    match limit.unwrap_or(MAX_PAGE) {
        limit @ 1..=MAX_PAGE => Ok(limit),
        limit => {
            let detail = format!("A page of {limit} items can't be listed.");
            let next = format!("Ask for 1 to {MAX_PAGE} items, and for the next page after them.");
            Err(ApiError::new(Code::InvalidRequest, detail, next))
        }
    }
}

/// Cuts `rows` to `limit`. Returns whether there were more.
pub(super) fn has_next_page<T>(rows: &mut Vec<T>, limit: u16) -> bool {
    let more = rows.len() > usize::from(limit);
    rows.truncate(usize::from(limit));
    more
}

/// Parses the query's `after`, in which `Id` is the type of the items' ids. Returns `start` if
/// there is none.
pub(super) fn parse_position<Id: FromStr + Display>(
    after: Option<&str>,
    start: ListPosition,
) -> Result<ListPosition, ApiError> {
    let Some(after) = after else { return Ok(start) };
    let parts = after.split_once('.');
    let parsed = parts.and_then(|(at_us, id)| {
        let id: Id = id.parse().ok()?;
        Some(ListPosition { at_us: at_us.parse().ok()?, id: id.to_string() })
    });
    parsed.ok_or_else(|| {
        let next = "Send the value of `next` in the page before, unchanged.";
        ApiError::new(Code::InvalidRequest, "`after` is not a position in this list.", next)
    })
}
