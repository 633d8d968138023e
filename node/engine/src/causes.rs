//! Formats an error and its causes as one line.

use std::{error::Error, fmt::Write as _};

/// Returns the text of an error, followed by the texts of its causes.
#[must_use]
pub fn error_chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        // Some errors already contain their cause's text, so it is not added again.
        if !text.ends_with(&cause_text) {
            let _ = write!(text, ": {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct OuterError(#[source] std::io::Error);

    #[test]
    fn an_error_is_formatted_with_its_causes() {
        let error = OuterError(std::io::Error::other("inner"));
        assert_eq!(error_chain(&error), "outer: inner");
    }
}
