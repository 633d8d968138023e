//! Search for JSON numbers that the JSON library would change.
//!
//! The library reads numbers with a fraction or an exponent, and numbers that don't fit into 64
//! bits, as floating-point numbers. It rounds these to the nearest integer. For example, a request
//! for the lease `9007199254740993.0` would grant lease 9007199254740994. So such numbers are
//! refused.

/// Number from which on a floating-point number can stand for several integers.
const INEXACT: f64 = 9_007_199_254_740_992.0;

/// Returns the first number that the library would change.
pub(super) fn find_inexact_number(json: &[u8]) -> Option<String> {
    let mut rest = json;
    loop {
        let begin = |byte: &u8| matches!(byte, b'"' | b'-' | b'0'..=b'9');
        rest = &rest[rest.iter().position(begin)?..];
        if let [b'"', ..] = rest {
            rest = after_text(rest);
            continue;
        }
        let within = |byte: &u8| matches!(byte, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E');
        let end = rest.iter().position(|byte| !within(byte)).unwrap_or(rest.len());
        let (number, after) = rest.split_at(end);
        let number = String::from_utf8_lossy(number);
        if is_inexact(&number) {
            return Some(number.into_owned());
        }
        rest = after;
    }
}

/// Returns the part of `json` after the string at its start.
fn after_text(json: &[u8]) -> &[u8] {
    let mut at = 1;
    while let Some(ahead) =
        json.get(at..).and_then(|rest| rest.iter().position(|byte| matches!(byte, b'"' | b'\\')))
    {
        at += ahead + 1;
        if json[at - 1] == b'"' {
            return &json[at..];
        }
        at += 1;
    }
    &[]
}

fn is_inexact(number: &str) -> bool {
    if number.bytes().any(|byte| matches!(byte, b'.' | b'e' | b'E')) {
        return number.parse::<f64>().is_ok_and(|number| number.abs() >= INEXACT);
    }
    let digits = number.strip_prefix('-').unwrap_or(number);
    let is_whole = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_whole && number.parse::<i64>().is_err() && number.parse::<u64>().is_err()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inexact_number_is_found_wherever_it_is() {
        for number in [
            "9007199254740993.0",
            "123456789012345678e0",
            "9223372036854775807.5",
            "18446744073709551616",
            "-9223372036854775809",
            "1E300",
        ] {
            for json in [number.to_owned(), format!(r#"{{"a\"":"\\","b":[1,{{"c":{number}}}]}}"#)] {
                assert_eq!(find_inexact_number(json.as_bytes()).as_deref(), Some(number), "{json}");
            }
            assert_eq!(
                find_inexact_number(format!(r#"{{"a":"{number}","b\\":"\"{number}"}}"#).as_bytes()),
                None
            );
        }
        let fine =
            "0 -1 18446744073709551615 -9223372036854775808 9007199254740991.0 1.5 1e3 -0 --1 1-2";
        assert_eq!(find_inexact_number(fine.as_bytes()), None);
        for broken in [r#"""#, r#""\"#, "-", r#"{"a":"x\"#] {
            assert_eq!(find_inexact_number(broken.as_bytes()), None, "{broken}");
        }
    }
}
