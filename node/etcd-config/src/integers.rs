//! Parsing of integers, with the forms of Go's `strconv` for base 0 and those of YAML.

/// Parses a signed integer: decimal, or with the prefix `0x`, `0o`, `0` or `0b`. Digits may be
/// separated by `_`.
pub fn parse_int(text: &str) -> Option<i64> {
    let (is_negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let magnitude = i128::from(parse_uint(digits)?);
    i64::try_from(if is_negative { -magnitude } else { magnitude }).ok()
}

/// Parses an unsigned integer in the forms that [`parse_int`] accepts.
pub fn parse_uint(text: &str) -> Option<u64> {
    let lower = text.to_ascii_lowercase();
    let prefixed = [("0x", 16), ("0o", 8), ("0b", 2), ("0", 8)]
        .into_iter()
        .find_map(|(prefix, radix)| Some((lower.strip_prefix(prefix)?, radix)))
        .filter(|(digits, _)| !digits.is_empty());
    // In a number with a prefix, `_` may follow the prefix. A decimal number may not begin with
    // `_`.
    let (digits, radix) = match prefixed {
        Some((digits, radix)) => (digits.strip_prefix('_').unwrap_or(digits), radix),
        None => (lower.as_str(), 10),
    };
    let is_separated = digits.split('_').all(|group| !group.is_empty());
    // A sign after the prefix is invalid, but Rust's parser would accept it.
    let has_sign = digits.starts_with(['+', '-']);
    if !is_separated || has_sign {
        return None;
    }
    u64::from_str_radix(&digits.replace('_', ""), radix).ok()
}

/// From this number on, Go's JSON encoder writes an exponent. A flag for an integer can't have such
/// a value.
const MAX_PLAIN_FLOAT: f64 = 1e21;

/// Returns the decimal digits of a whole number in any form of YAML 1.1: `10_000`, `0x2710`,
/// `1e+05`, `5.0`.
pub fn yaml_whole_number(text: &str) -> Option<String> {
    let text = text.replace('_', "");
    let integer = parse_int(&text).map(|number| number.to_string());
    let integer = integer.or_else(|| parse_uint(&text).map(|number| number.to_string()));
    if integer.is_some() {
        return integer;
    }
    // Only these characters are allowed, because Rust's parser would also accept "inf" and "nan".
    let is_float = text.bytes().all(|byte| byte.is_ascii_digit() || b"+-.eE".contains(&byte));
    let number = text.parse::<f64>().ok().filter(|_| is_float)?;
    let is_whole = number.fract() == 0.0 && number.abs() < MAX_PLAIN_FLOAT;
    is_whole.then(|| number.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_read_in_gos_forms() {
        for (text, number) in [
            ("0", Some(0)),
            ("10000", Some(10_000)),
            ("10_000", Some(10_000)),
            ("0x2710", Some(10_000)),
            ("0X27_10", Some(10_000)),
            ("0x_2710", Some(10_000)),
            ("0o23420", Some(10_000)),
            ("023420", Some(10_000)),
            ("0b101", Some(5)),
            ("+5", Some(5)),
            ("-5", Some(-5)),
            ("-9223372036854775808", Some(i64::MIN)),
            ("9223372036854775808", None),
            ("", None),
            ("0x", None),
            ("_1", None),
            ("1_", None),
            ("1__0", None),
            ("08", None),
            ("--5", None),
            ("0x-5", None),
            ("1e3", None),
            (" 1", None),
        ] {
            assert_eq!(parse_int(text), number, "{text:?}");
        }
        assert_eq!(parse_uint("18446744073709551615"), Some(u64::MAX));
        for wrong in ["+5", "-5", "-0", "18446744073709551616"] {
            assert_eq!(parse_uint(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn whole_numbers_are_read_in_yamls_forms() {
        for (text, digits) in [
            ("8.589934592e+09", Some("8589934592")),
            ("1e+05", Some("100000")),
            ("1E5", Some("100000")),
            ("5.0", Some("5")),
            ("10_000", Some("10000")),
            ("0x2710", Some("10000")),
            ("0o17", Some("15")),
            ("-1", Some("-1")),
            ("18446744073709551615", Some("18446744073709551615")),
            ("1.5", None),
            ("1e21", None),
            ("inf", None),
            ("1m", None),
            ("", None),
        ] {
            assert_eq!(yaml_whole_number(text).as_deref(), digits, "{text:?}");
        }
    }
}
