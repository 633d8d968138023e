//! The HTTP `Date` header, from which a client learns the time if its own clock is wrong.

/// Parses an IMF-fixdate into seconds since 1970. RFC 9110, section 5.6.7 lets servers send no
/// other format.
pub(super) fn http_date_seconds(text: &str) -> Option<i64> {
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let mut words = text.strip_suffix(" GMT")?.split(' ').skip(1);
    let day: i64 = words.next()?.parse().ok()?;
    let month = words.next()?;
    let month = 1 + i64::try_from(MONTHS.iter().position(|name| *name == month)?).ok()?;
    let year: i64 = words.next()?.parse().ok()?;
    let mut time = words.next()?.split(':').map(|part| part.parse::<i64>().ok());
    let (hour, minute, second) = (time.next()??, time.next()??, time.next()??);
    // A number in the text may have more digits than the format allows. The bounds checked here
    // exclude that, so the arithmetic below can't overflow.
    let fits = (0..=9999).contains(&year)
        && (1..=31).contains(&day)
        && [hour, minute, second].iter().all(|part| (0..=60).contains(part));
    if !fits {
        return None;
    }
    // Compute days from year, month and day. Years begin in March here, so a leap day is a year's
    // last day.
    let shifted = if month <= 2 { year - 1 } else { year };
    let era_year = shifted.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = era_year * 365 + era_year / 4 - era_year / 100 + day_of_year;
    let days = shifted.div_euclid(400) * 146_097 + day_of_era - 719_468;
    Some(((days * 24 + hour) * 60 + minute) * 60 + second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_read() {
        for (text, seconds) in [
            ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
            ("Sun, 06 Nov 1994 08:49:37 GMT", 784_111_777),
            ("Tue, 29 Feb 2028 23:59:59 GMT", 1_835_481_599),
        ] {
            assert_eq!(http_date_seconds(text), Some(seconds));
        }
        for junk in [
            "",
            "GMT",
            "Sun, 06 Foo 1994 08:49:37 GMT",
            "Sun, 06 Nov 1994 08:49 GMT",
            "Sun, 06 Nov 9223372036854775807 08:49:37 GMT",
            "Sun, 9223372036854775807 Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 1994 9223372036854775807:49:37 GMT",
            "Sun, 06 Nov 1994 -9:49:37 GMT",
        ] {
            assert_eq!(http_date_seconds(junk), None);
        }
    }
}
