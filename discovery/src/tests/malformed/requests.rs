//! Malformed requests, made from the served OpenAPI description.

use serde_json::Value;

use super::random::{change_value, changed_json, fitting_value, odd_value};
use crate::tests::random::Random;

/// Request that the service must refuse, or serve without harm.
pub(super) struct MalformedRequest {
    /// Request line, headers and body, as they are sent.
    pub(super) bytes: Vec<u8>,
    /// Whether the bytes are HTTP, so that the service has to answer. Otherwise it may also close
    /// the connection.
    pub(super) is_http: bool,
}

/// An operation of the API.
struct Operation {
    method: String,
    path: String,
    media_type: Option<String>,
    schema: Value,
    queries: Vec<String>,
}

/// Makes requests that nearly fit the operations of an OpenAPI description.
pub(in crate::tests) struct RequestMaker {
    operations: Vec<Operation>,
    components: Value,
    /// Ids, keys and signed texts that the service knows.
    pub(in crate::tests) known: Vec<String>,
    /// Ids of clusters that requests may change.
    pub(in crate::tests) clusters: Vec<String>,
}

impl RequestMaker {
    /// Makes requests for each operation of an OpenAPI description, except for those in `without`.
    pub(in crate::tests) fn new(description: &Value, without: &[&str]) -> Self {
        let mut operations = Vec::new();
        for (path, methods) in description["paths"].as_object().unwrap() {
            if without.contains(&path.as_str()) {
                continue;
            }
            for (method, described) in methods.as_object().unwrap() {
                let content = described["requestBody"]["content"].as_object();
                let body = content.and_then(|content| content.iter().next());
                let parameters = described["parameters"].as_array().into_iter().flatten();
                operations.push(Operation {
                    method: method.to_uppercase(),
                    path: path.clone(),
                    media_type: body.map(|(media_type, _)| media_type.clone()),
                    schema: body.map_or(Value::Null, |(_, content)| content["schema"].clone()),
                    queries: parameters
                        .filter(|parameter| parameter["in"] == "query")
                        .filter_map(|parameter| parameter["name"].as_str().map(str::to_owned))
                        .collect(),
                });
            }
        }
        assert!(operations.len() > 40, "the description lacks operations");
        let components = description["components"]["schemas"].clone();
        RequestMaker { operations, components, known: Vec::new(), clusters: Vec::new() }
    }

    /// Returns method and path of each operation.
    pub(in crate::tests) fn operations(&self) -> Vec<(String, String)> {
        let operation = |each: &Operation| (each.method.clone(), each.path.clone());
        self.operations.iter().map(operation).collect()
    }

    /// Makes a body that fits an operation's schema, and returns it with its media type.
    pub(in crate::tests) fn fitting_body(
        &self,
        number: usize,
        random: &mut Random,
    ) -> (Option<String>, String) {
        let operation = &self.operations[number];
        let body = match &operation.media_type {
            None => String::new(),
            Some(_) => {
                let (schema, components) = (&operation.schema, &self.components);
                fitting_value(schema, components, &self.known, random, 0).to_string()
            }
        };
        (operation.media_type.clone(), body)
    }

    /// Makes a request with the header `authorization`, if there is one.
    pub(super) fn next(
        &self,
        random: &mut Random,
        authorization: Option<&str>,
    ) -> MalformedRequest {
        let operation = random.pick(&self.operations);
        let mut path = self.path(operation, random);
        let mut headers = Vec::new();
        if let Some(authorization) = authorization {
            headers.push(format!("authorization: {authorization}"));
        }
        if let Some(media_type) = &operation.media_type {
            headers.push(format!("content-type: {media_type}"));
        }
        let body = self.body(operation, random);
        match random.below(32) {
            0..8 => path = odd_path(&path, random),
            8..12 => headers.push(odd_header(random)),
            12 => return broken_http(&operation.method, &path, &headers, &body, random),
            _ => {}
        }
        let method = match random.below(20) {
            0 => {
                *random.pick(&["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW", "get"])
            }
            _ => operation.method.as_str(),
        };
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\n{}content-length: {}\r\n\r\n",
            headers.iter().map(|header| format!("{header}\r\n")).collect::<String>(),
            body.len(),
        );
        MalformedRequest { bytes: [head.into_bytes(), body].concat(), is_http: true }
    }

    fn path(&self, operation: &Operation, random: &mut Random) -> String {
        let mut path = operation.path.clone();
        while let Some((before, rest)) = path.split_once('{') {
            let (_, after) = rest.split_once('}').unwrap_or_default();
            let value = match random.below(6) {
                0 => url_encoded(&text_of(&odd_value(random))),
                1 => url_encoded(random.pick(&self.known[..]).as_str()),
                _ => random.pick(&self.clusters).clone(),
            };
            path = format!("{before}{value}{after}");
        }
        let mut separator = '?';
        for query in &operation.queries {
            if random.once_in(2) {
                let value = match random.below(3) {
                    0 => url_encoded(random.pick(&self.known[..]).as_str()),
                    _ => url_encoded(&text_of(&odd_value(random))),
                };
                path.push_str(&format!("{separator}{query}={value}"));
                separator = '&';
            }
        }
        path
    }

    fn body(&self, operation: &Operation, random: &mut Random) -> Vec<u8> {
        if operation.media_type.is_none() && !random.once_in(8) {
            return Vec::new();
        }
        let mut value = fitting_value(&operation.schema, &self.components, &self.known, random, 0);
        for _ in 0..random.below(3) {
            change_value(&mut value, random);
        }
        if operation.media_type.as_deref().is_some_and(|kind| kind.ends_with("urlencoded")) {
            let pairs = value.as_object().into_iter().flatten();
            let pairs =
                pairs.map(|(name, value)| format!("{name}={}", url_encoded(&text_of(value))));
            return pairs.collect::<Vec<_>>().join("&").into_bytes();
        }
        match random.below(3) {
            0 => changed_json(&value.to_string(), random),
            _ => value.to_string().into_bytes(),
        }
    }
}

/// Returns a string's text, or another value's JSON.
fn text_of(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Percent-encodes what a URL can't contain.
pub(in crate::tests) fn url_encoded(text: &str) -> String {
    let encoded = |byte: u8| match byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    text.bytes().map(encoded).collect()
}

fn odd_path(path: &str, random: &mut Random) -> String {
    match random.below(10) {
        0 => format!("/{path}"),
        1 => format!("{path}/"),
        2 => format!("/v1/..{path}"),
        3 => format!("/{}", path[1..].replace('/', "%2F")),
        4 => format!("{path}%00"),
        5 => format!("{path}%zz"),
        6 => format!("{path}?a=1&a=2&&=&%"),
        7 => format!("{path}?limit={}", "9".repeat(1 + random.below(60))),
        8 => format!("https://127.0.0.1{path}"),
        _ => format!("/{}", "a/".repeat(1 + random.below(2_000))),
    }
}

fn odd_header(random: &mut Random) -> String {
    let long = "x".repeat(1 + random.below(6_000));
    let headers = [
        "content-type: text/plain",
        "content-type: application/json; charset=utf-16",
        "content-encoding: gzip",
        "accept: application/xml",
        "authorization: Bearer e30.e30.e30",
        "authorization: Basic YTpi",
        "expect: 200-ok",
        "range: bytes=0-0,1-1",
        "if-none-match: *",
        "prefer: return=minimal, wait=99999999999999999999",
        "x-forwarded-for: 127.0.0.1",
        "x-http-method-override: DELETE",
        "upgrade: h2c",
        "cookie: a=b",
    ];
    match random.below(4) {
        0 => format!("x-long: {long}"),
        1 => {
            (0..random.below(60)).map(|i| format!("x-{i}: {i}\r\n")).collect::<String>() + "x-y: z"
        }
        _ => (*random.pick(&headers)).to_owned(),
    }
}

/// Returns a request whose framing isn't HTTP. Its connection can't be used afterwards.
fn broken_http(
    method: &str,
    path: &str,
    headers: &[String],
    body: &[u8],
    random: &mut Random,
) -> MalformedRequest {
    let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
    let start = format!("{method} {path}");
    let length = body.len();
    let heads = [
        format!("{start} HTTP/1.1\r\n{headers}content-length: -1\r\n\r\n"),
        format!("{start} HTTP/1.1\r\n{headers}content-length: 99999999999999999999\r\n\r\n"),
        format!("{start} HTTP/1.1\r\n{headers}content-length: 1\r\ncontent-length: 2\r\n\r\n"),
        format!(
            "{start} HTTP/1.1\r\n{headers}transfer-encoding: chunked\r\ncontent-length: {length}\r\n\r\n"
        ),
        format!(
            "{start} HTTP/1.1\r\n{headers}transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n"
        ),
        format!("{start} HTTP/1.1\r\n{headers}transfer-encoding: xchunked\r\n\r\n"),
        format!("{start} HTTP/1.1\r\n{headers} folded: header\r\n\r\n"),
        format!("{start} HTTP/1.1\r\n{headers}na me: x\r\n\r\n"),
        format!("{start} HTTP/1.1\r\n{headers}x: a\0b\r\n\r\n"),
        format!("{start} HTTP/1.1\n\n"),
        format!("{start} HTTP/9.9\r\n{headers}\r\n"),
        format!("{start}\r\n\r\n"),
        format!("{start} HTTP/1.1\r\n{}\r\n", "x: y\r\n".repeat(2_000)),
        format!("{method} /{} HTTP/1.1\r\n\r\n", "a".repeat(200_000)),
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(),
        "\r\n\r\n\r\n".to_owned(),
        (0..200).map(|_| char::from(32 + random.below(90) as u8)).collect(),
    ];
    let head = random.pick(&heads).clone();
    MalformedRequest { bytes: [head.into_bytes(), body.to_vec()].concat(), is_http: false }
}
