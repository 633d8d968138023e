//! Types that are a string on the wire, and functions that make foreign text safe to display.

use std::borrow::Cow;
use std::fmt;

/// Makes foreign text safe to display. The result is one line, and can't control a terminal, a log
/// or the writing direction. Any text from a service, a peer or a node must pass through here
/// before a person sees it.
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(is_unsafe_character) {
        return Cow::Borrowed(text);
    }
    // A CRLF becomes one space, not two.
    let shown = text.replace("\r\n", "\n");
    let shown = shown.chars().map(|c| match c {
        '\n' | '\r' | '\t' | '\u{2028}' | '\u{2029}' => ' ',
        c if is_unsafe_character(c) => char::REPLACEMENT_CHARACTER,
        c => c,
    });
    Cow::Owned(shown.collect())
}

/// Shortens a text to the maximum length that the service accepts as a reason.
pub fn truncate_reason(text: String) -> String {
    /// Maximum number of characters in a reason, as the API defines it.
    const LIMIT: usize = 300;
    match text.char_indices().nth(LIMIT) {
        Some((end, _)) => text[..end].to_owned(),
        None => text,
    }
}

/// Writes one field of a log line: `name=value`, or only the message.
pub fn log_field(to: &mut dyn fmt::Write, name: &str, value: &dyn fmt::Debug) -> fmt::Result {
    let value = format!("{value:?}");
    match name {
        "message" => write!(to, "{}", printable(&value)),
        name => write!(to, "{name}={}", printable(&value)),
    }
}

/// Whether `c` is a control character, a line or paragraph separator, or changes the direction of
/// writing.
fn is_unsafe_character(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
}

/// Implements serde for a type through its `Display` and `FromStr`. Its API schema is a string.
macro_rules! wire_text {
    ($name:ident, $pattern:expr) => {
        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                let text = std::borrow::Cow::<str>::deserialize(from)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }

        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
                let object = utoipa::openapi::ObjectBuilder::new()
                    .schema_type(utoipa::openapi::schema::Type::String)
                    .pattern(Some($pattern));
                utoipa::openapi::schema::Schema::Object(object.build()).into()
            }
        }

        impl utoipa::ToSchema for $name {
            fn name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }
        }
    };
}

pub(crate) use wire_text;

#[cfg(test)]
mod tests {
    use super::{printable, truncate_reason};

    #[test]
    fn a_reason_is_cut_between_characters() {
        assert_eq!(truncate_reason("short".to_owned()), "short");
        assert_eq!(truncate_reason("é".repeat(400)).chars().count(), 300);
    }

    #[test]
    fn a_harmless_line_stays_as_it_is() {
        for text in ["", "a plain line", "größer, 大きい, 🦀"] {
            assert_eq!(printable(text), text);
        }
    }

    #[test]
    fn characters_that_control_lines_terminals_or_direction_are_replaced() {
        assert_eq!(printable("a\r\nb\nc\td\u{2028}e"), "a b c d e");
        assert_eq!(printable("\u{1b}[2J\u{9b}1m\0\u{7f}"), "\u{fffd}[2J\u{fffd}1m\u{fffd}\u{fffd}");
        assert_eq!(printable("\u{202e}gpj.exe\u{2066}"), "\u{fffd}gpj.exe\u{fffd}");
        assert_eq!(printable("1\u{61c}2\u{200e}3\u{200f}"), "1\u{fffd}2\u{fffd}3\u{fffd}");
    }
}
