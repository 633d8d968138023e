//! Random JSON values that nearly fit a schema, and texts that nearly are JSON.

use serde_json::{Map, Value, json};

use crate::tests::random::Random;

/// Maximum depth of the values that a schema describes.
const MAX_DEPTH: u32 = 6;

/// Returns a text, number or other value of a kind that programs often misread.
pub(super) fn odd_value(random: &mut Random) -> Value {
    let long = "x".repeat(1 + random.below(9_000));
    let texts = [
        "",
        " ",
        "\0",
        "\u{202e}",
        "null",
        "0",
        "-1",
        "../..",
        "%00",
        "' OR 1=1 --",
        "${jndi:x}",
        "{{7*7}}",
        "𝕏",
        "a\nb",
        "A",
        "e30.e30.e30",
        "00000000-0000-0000-0000-000000000000",
        &long,
    ];
    match random.below(12) {
        0 => Value::Null,
        1 => json!(-1),
        2 => json!(i64::MIN),
        3 => json!(u64::MAX),
        4 => json!(1e308),
        5 => json!(0.5),
        6 => json!(true),
        7 => json!([]),
        8 => json!({}),
        9 => json!([[[[[[]]]]]]),
        _ => json!(random.pick(&texts)),
    }
}

/// Returns a value that `schema` describes. `components` are the document's named schemas. Strings
/// are taken from `known`, or are odd.
pub(super) fn fitting_value(
    schema: &Value,
    components: &Value,
    known: &[String],
    random: &mut Random,
    depth: u32,
) -> Value {
    if depth > MAX_DEPTH {
        return Value::Null;
    }
    let inner = |schema: &Value, random: &mut Random| {
        fitting_value(schema, components, known, random, depth + 1)
    };
    if let Some(name) = schema["$ref"].as_str() {
        let name = name.rsplit('/').next().unwrap_or_default();
        return inner(&components[name], random);
    }
    if let Some(value) = schema["enum"].as_array().filter(|values| !values.is_empty()) {
        return random.pick(value).clone();
    }
    for choice in ["oneOf", "anyOf", "allOf"] {
        if let Some(choices) = schema[choice].as_array().filter(|choices| !choices.is_empty()) {
            return inner(random.pick(choices), random);
        }
    }
    let kind = match &schema["type"] {
        Value::Array(kinds) => random.pick(kinds).as_str().unwrap_or_default(),
        kind => kind.as_str().unwrap_or_default(),
    };
    match kind {
        "object" => {
            let required = schema["required"].as_array().cloned().unwrap_or_default();
            let mut object = Map::new();
            for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
                if required.contains(&json!(name)) || random.once_in(2) {
                    object.insert(name.clone(), inner(schema, random));
                }
            }
            Value::Object(object)
        }
        "array" => (0..random.below(4)).map(|_| inner(&schema["items"], random)).collect(),
        "integer" | "number" => json!(random.below(10)),
        "boolean" => json!(random.once_in(2)),
        "string" if !known.is_empty() && !random.once_in(8) => {
            let fitting: Vec<&String> = known.iter().filter(|text| may_fit(schema, text)).collect();
            match fitting.is_empty() {
                true => json!(random.pick(known)),
                false => json!(random.pick(&fitting)),
            }
        }
        _ => odd_value(random),
    }
}

/// Whether a text may fit a schema's pattern, judged by the length or by the number of dots.
fn may_fit(schema: &Value, text: &str) -> bool {
    let Some(pattern) = schema["pattern"].as_str() else {
        return schema["format"] != "uuid" || uuid::Uuid::try_parse(text).is_ok();
    };
    let length = pattern
        .rsplit_once('{')
        .and_then(|(_, rest)| rest.strip_suffix("}$")?.parse::<usize>().ok());
    match length {
        Some(length) => text.len() == length,
        None => text.matches('.').count() == pattern.matches("\\.").count(),
    }
}

/// Replaces, removes or adds one value somewhere inside `value`.
pub(super) fn change_value(value: &mut Value, random: &mut Random) {
    match value {
        Value::Object(object) if !object.is_empty() && !random.once_in(6) => {
            let names: Vec<String> = object.keys().cloned().collect();
            let name = random.pick(&names).clone();
            match random.below(6) {
                0 => drop(object.remove(&name)),
                1 => drop(object.insert(format!("{name}x"), odd_value(random))),
                _ => change_value(&mut object[&name], random),
            }
        }
        Value::Array(items) if !items.is_empty() && !random.once_in(4) => {
            let at = random.below(items.len());
            match random.below(4) {
                0 => drop(items.remove(at)),
                1 => items.extend(vec![items[at].clone(); 1 + random.below(300)]),
                _ => change_value(&mut items[at], random),
            }
        }
        other => *other = odd_value(random),
    }
}

/// Returns bytes that nearly are the JSON `text`.
pub(super) fn changed_json(text: &str, random: &mut Random) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    let at = random.below(bytes.len().max(1));
    let deep = random.below(20_000);
    match random.below(12) {
        0 => bytes.truncate(at),
        1 => bytes.insert(at, random.below(256) as u8),
        2 => bytes = [b"\xef\xbb\xbf", &bytes[..]].concat(),
        3 => bytes.extend_from_slice(b"{}"),
        4 => bytes = text.replacen('{', "{\"jws\":\"\",\"jws\":\"\",", 1).into_bytes(),
        5 => bytes = text.replace('"', "'").into_bytes(),
        6 => bytes = text.replacen('}', ",}", 1).into_bytes(),
        7 => bytes = format!("/* */{text}").into_bytes(),
        8 => bytes = text.replacen(':', ":1e999,\"x\":", 1).into_bytes(),
        9 => bytes = text.replacen('"', "\"\\ud800", 2).into_bytes(),
        10 => bytes = "[".repeat(deep).into_bytes(),
        _ => bytes = "{\"a\":".repeat(deep).into_bytes(),
    }
    bytes
}
