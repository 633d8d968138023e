//! Splits a request body into its JSON objects, each as soon as it is complete.

use std::future::poll_fn;
use std::pin::Pin;

use axum::body::Body;
use bytes::{Buf as _, Bytes, BytesMut};
use hyper::body::Body as _;
use tonic::Status;

pub(super) struct Values {
    body: Body,
    /// Maximum length of one JSON object in bytes.
    max_bytes: usize,
    buffer: BytesMut,
    scan: ObjectScan,
}

/// State of the search for the end of a JSON object.
#[derive(Default)]
struct ObjectScan {
    position: usize,
    depth: usize,
    in_text: bool,
    escaped: bool,
}

impl ObjectScan {
    /// Returns the end of the first JSON object, if it has arrived. The object's contents aren't
    /// checked.
    fn end(&mut self, came: &[u8]) -> Option<usize> {
        while let Some(byte) = came.get(self.position) {
            self.position += 1;
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' if self.in_text => self.escaped = true,
                b'"' => self.in_text = !self.in_text,
                _ if self.in_text => {}
                b'{' => self.depth += 1,
                b'}' if self.depth == 1 => return Some(self.position),
                b'}' => self.depth -= 1,
                _ => {}
            }
        }
        None
    }
}

impl Values {
    pub(super) fn new(body: Body, most: usize) -> Self {
        Self { body, max_bytes: most, buffer: BytesMut::new(), scan: ObjectScan::default() }
    }

    /// Returns the next JSON object, or `None` after the last one.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        loop {
            if self.scan.position == 0 {
                let blank = self.buffer.len() - self.buffer.trim_ascii_start().len();
                self.buffer.advance(blank);
                if self.buffer.first().is_some_and(|first| *first != b'{') {
                    return Err(Status::invalid_argument("the body is no JSON object"));
                }
            }
            let end = self.scan.end(&self.buffer);
            if end.unwrap_or(self.buffer.len()) > self.max_bytes {
                let most = self.max_bytes;
                let why = format!("the body has an object of more than {most} bytes");
                return Err(Status::resource_exhausted(why));
            }
            if let Some(end) = end {
                self.scan = ObjectScan::default();
                return Ok(Some(self.buffer.split_to(end).freeze()));
            }
            if !self.read_more().await? {
                let is_over = self.buffer.is_empty();
                return if is_over { Ok(None) } else { Err(cut_off()) };
            }
        }
    }

    /// Waits for more bytes. Returns false at the end of the body.
    async fn read_more(&mut self) -> Result<bool, Status> {
        loop {
            let Some(frame) = poll_fn(|context| Pin::new(&mut self.body).poll_frame(context)).await
            else {
                return Ok(false);
            };
            let frame = frame.map_err(|error| Status::from_error(error.into_inner()))?;
            if let Ok(data) = frame.into_data() {
                self.buffer.extend_from_slice(&data);
                return Ok(true);
            }
        }
    }
}

fn cut_off() -> Status {
    Status::invalid_argument("the body ends within a JSON object")
}

#[cfg(test)]
mod tests {
    use futures_util::stream;

    use super::*;

    fn values(chunks: Vec<Vec<u8>>, most: usize) -> Values {
        let chunks = stream::iter(chunks.into_iter().map(Ok::<_, std::convert::Infallible>));
        Values::new(Body::from_stream(chunks), most)
    }

    #[tokio::test]
    async fn objects_are_separated_however_the_body_is_split() {
        let objects =
            [r#"{}"#, r#"{"a":{"b":"}{\"\\"}}"#, r#"{"c":[{},"\\"]}"#, "{ }", r#"{"d":"[{"}"#];
        let body = format!(
            " {} {}\n{}{}\t{} ",
            objects[0], objects[1], objects[2], objects[3], objects[4]
        );
        for size in 1..body.len() {
            let chunks = body.as_bytes().chunks(size).map(<[u8]>::to_vec).collect();
            let mut values = values(chunks, 100);
            for object in objects {
                assert_eq!(values.next().await.unwrap().unwrap(), object, "by {size}");
            }
            assert!(values.next().await.unwrap().is_none());
        }
    }

    #[tokio::test]
    async fn a_body_without_an_object_or_with_too_large_a_one_is_refused() {
        let refused = async |body: &str, most| {
            let chunks = body.as_bytes().chunks(2).map(<[u8]>::to_vec).collect();
            let refused = values(chunks, most).next().await.unwrap_err();
            (refused.code(), refused.message().to_owned())
        };
        for body in ["nonsense", "[]", " 1", "\"{}\"", "}"] {
            let (code, text) = refused(body, 100).await;
            assert_eq!(
                (code, &text[..]),
                (tonic::Code::InvalidArgument, "the body is no JSON object")
            );
        }
        for body in ["{", r#"{"a":""#, r#"{"a":{}"#, r#"{"\"}"#] {
            let (code, text) = refused(body, 100).await;
            let cut_off = "the body ends within a JSON object";
            assert_eq!((code, &text[..]), (tonic::Code::InvalidArgument, cut_off), "{body}");
        }
        for body in [r#"{"a":"0123456789""#, r#"{"a": 23}"#] {
            assert_eq!(refused(body, 8).await.0, tonic::Code::ResourceExhausted, "{body}");
        }
    }
}
