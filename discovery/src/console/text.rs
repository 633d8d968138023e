//! Texts of pages: times, ages, durations, and untrusted text.

use askama::Template;
use askama::filters::HtmlSafe;
use discovery_types::api::ClusterState;
use discovery_types::text::printable;

/// A point in time, shown as its distance from now or as a UTC time. Its tooltip is the full time.
#[derive(Clone, Debug, PartialEq, Eq, Template)]
#[template(
    source = "<time datetime=\"{{ rfc3339 }}\" title=\"{{ rfc3339 }}\">{{ shown }}</time>",
    ext = "html"
)]
pub(super) struct ShownTime {
    rfc3339: String,
    shown: String,
}

// The derived template escapes its fields, so a page may include its HTML unescaped.
impl HtmlSafe for ShownTime {}

impl ShownTime {
    /// Makes a time of milliseconds since 1970. It is shown in UTC, to the second.
    pub(super) fn new(ms: i64, now_ms: i64) -> Self {
        let rfc3339 = match jiff::Timestamp::from_second(ms.div_euclid(1_000)) {
            Ok(time) => time.to_string(),
            Err(_) => format!("{ms} ms"),
        };
        let is_today = ms.div_euclid(86_400_000) == now_ms.div_euclid(86_400_000);
        let shown = match rfc3339.trim_end_matches('Z').split_once('T') {
            Some((_, time)) if is_today => time.to_owned(),
            Some((date, time)) => format!("{date} {time}"),
            None => rfc3339.clone(),
        };
        ShownTime { rfc3339, shown }
    }

    /// Makes a time that is shown as its distance from now: `12 s ago`, or `in 5 min`.
    pub(super) fn relative(ms: i64, now_ms: i64) -> Self {
        ShownTime { shown: distance(ms, now_ms), ..ShownTime::new(ms, now_ms) }
    }

    /// Makes a time of seconds since 1970, shown as its distance from now.
    pub(super) fn relative_seconds(seconds: u64, now_ms: i64) -> Self {
        let ms = i64::try_from(seconds).unwrap_or(i64::MAX).saturating_mul(1_000);
        ShownTime::relative(ms, now_ms)
    }
}

/// Describes how far a time is from now.
fn distance(ms: i64, now_ms: i64) -> String {
    let seconds = now_ms.saturating_sub(ms).unsigned_abs() / 1_000;
    let text = match seconds {
        0 => return "now".to_owned(),
        s if s < 120 => format!("{s} s"),
        s if s < 120 * 60 => format!("{} min", s / 60),
        s if s < 48 * 3_600 => format!("{} h", s / 3_600),
        s => format!("{} d", s / 86_400),
    };
    if ms <= now_ms { format!("{text} ago") } else { format!("in {text}") }
}

/// Formats a time in seconds with its largest whole unit: `2d`, `5h`, `90m`, `45s`.
pub(super) fn duration(seconds: u64) -> String {
    match seconds {
        s if s > 0 && s.is_multiple_of(86_400) => format!("{}d", s / 86_400),
        s if s > 0 && s.is_multiple_of(3_600) => format!("{}h", s / 3_600),
        s if s > 0 && s.is_multiple_of(60) => format!("{}m", s / 60),
        s => format!("{s}s"),
    }
}

/// Returns untrusted text as one line without control or bidirectional characters. The template
/// escapes it.
pub(super) fn plain(text: &str) -> String {
    printable(text).into_owned()
}

/// Returns untrusted texts in one line, separated by commas.
pub(super) fn plain_list(texts: impl IntoIterator<Item = impl ToString>) -> String {
    let texts: Vec<String> = texts.into_iter().map(|text| plain(&text.to_string())).collect();
    texts.join(", ")
}

/// A part of a text in which commands stand between backticks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TextPart {
    pub(super) text: String,
    /// Whether the part is a command, a path or an id.
    pub(super) is_code: bool,
}

/// Splits a text at its backticks. A text that is one command of ours, without backticks, is one
/// part.
pub(super) fn parts(text: &str) -> Vec<TextPart> {
    let text = plain(text);
    let is_command =
        ["muster-discovery ", "muster-agent "].iter().any(|name| text.starts_with(name));
    if is_command && !text.contains('`') {
        return vec![TextPart { text, is_code: true }];
    }
    let split = text.split('`').enumerate();
    let part = |(at, text): (usize, &str)| TextPart { text: text.to_owned(), is_code: at % 2 == 1 };
    split.map(part).filter(|part| !part.text.is_empty()).collect()
}

/// Assessment of a state. It determines the color and the symbol of a badge, whose word says the
/// same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tone {
    /// All is as it should be.
    Good,
    /// Something is under way.
    Busy,
    /// Something is wrong, and a person should look at it.
    Bad,
    /// The cluster, token or change has ended in a regular way.
    Ended,
}

/// A state, as a word with a symbol.
#[derive(Clone, Debug, PartialEq, Eq, Template)]
#[template(
    source = "<span class=\"badge {{ class }}\"><span aria-hidden=\"true\">{{ symbol }}</span> {{ word }}</span>",
    ext = "html"
)]
pub(super) struct Badge {
    class: &'static str,
    symbol: &'static str,
    word: String,
}

// The derived template escapes its fields, so a page may include its HTML unescaped.
impl HtmlSafe for Badge {}

impl Badge {
    pub(super) fn new(tone: Tone, word: impl ToString) -> Self {
        let (class, symbol) = match tone {
            Tone::Good => ("good", "●"),
            Tone::Busy => ("busy", "◐"),
            Tone::Bad => ("bad", "▲"),
            Tone::Ended => ("over", "○"),
        };
        Badge { class, symbol, word: plain(&word.to_string()) }
    }

    pub(super) fn of_cluster(state: ClusterState) -> Self {
        let tone = match state {
            ClusterState::Formed => Tone::Good,
            ClusterState::Draft
            | ClusterState::Open
            | ClusterState::Preparing
            | ClusterState::Committed => Tone::Busy,
            ClusterState::Abandoned | ClusterState::Expired | ClusterState::Retired => Tone::Ended,
        };
        Badge::new(tone, state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_shown_by_its_distance_from_now() {
        const NOW: i64 = 1_700_000_000_000;
        for (ms, shown) in [
            (NOW, "now"),
            (NOW - 12_000, "12 s ago"),
            (NOW - 150_000, "2 min ago"),
            (NOW + 3 * 3_600_000, "in 3 h"),
            (NOW - 72 * 3_600_000, "3 d ago"),
        ] {
            assert_eq!(ShownTime::relative(ms, NOW).shown, shown);
        }
        let time = ShownTime::new(NOW, NOW).to_string();
        let whole = "2023-11-14T22:13:20Z";
        assert_eq!(time, format!("<time datetime=\"{whole}\" title=\"{whole}\">22:13:20</time>"));
        assert_eq!(ShownTime::new(NOW - 86_400_000, NOW).shown, "2023-11-13 22:13:20");
    }

    #[test]
    fn commands_in_a_text_are_parts_of_their_own() {
        let shown = |text: &str| -> Vec<(String, bool)> {
            parts(text).into_iter().map(|part| (part.text, part.is_code)).collect()
        };
        let part = |text: &str, is_code| (text.to_owned(), is_code);
        assert_eq!(
            shown("start `muster-agent run`, then wait"),
            [part("start ", false), part("muster-agent run", true), part(", then wait", false)]
        );
        assert_eq!(
            shown("muster-discovery process list"),
            [part("muster-discovery process list", true)]
        );
        assert_eq!(shown("look there"), [part("look there", false)]);
    }

    #[test]
    fn a_badge_escapes_its_word_and_shows_no_control_characters() {
        let badge = Badge::new(Tone::Bad, "<b>\u{202e}x\n").to_string();
        assert!(badge.contains("&#60;b&#62;\u{fffd}x "), "{badge}");
    }
}
