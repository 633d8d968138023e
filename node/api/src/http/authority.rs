//! Support for clients that send a URL as authority, as in `:authority: http://10.0.0.1:2379`.
//!
//! `etcdctl` up to 3.4 sends a URL there in `endpoint status`, and wherever else it dials a single
//! endpoint. Go's gRPC accepts the URL, but the HTTP/2 library here refuses the request as
//! malformed before any of our code sees it.
//!
//! [`AuthorityRewriter`] wraps the connection below that library and turns the URL into a valid
//! name, in place. It replaces `://` by `--x`. Both have the same length, as text and in HPACK's
//! Huffman code. So neither frame lengths nor the compression state change (RFC 9113, section 4.1;
//! RFC 7541, sections 5.2 and 6, appendix B).
//!
//! A connection is examined up to its first request. Later requests are examined only if the first
//! one had to be changed.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const FRAME_HEADER: usize = 9;
const HEADERS: u8 = 1;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// Index of `:authority` in HPACK's static table.
const AUTHORITY: usize = 1;
/// Maximum number of bytes held back while a frame is incomplete. The examination ends at a longer
/// frame.
const MAX_HELD_BYTES: usize = 64 * 1024;
/// Number of bytes per read while a connection is examined.
const READ_BYTES: usize = 4 * 1024;

/// Connection whose requests possibly have a URL as authority.
#[derive(Debug)]
pub(crate) struct AuthorityRewriter<S> {
    stream: S,
    examiner: Option<AuthorityExaminer>,
    /// Examined bytes. The reader has taken the bytes before index `returned`.
    examined: Vec<u8>,
    returned: usize,
}

/// State of the examination of a connection.
#[derive(Debug, Default)]
struct AuthorityExaminer {
    /// Bytes of a frame that is incomplete.
    partial_frame: Vec<u8>,
    has_preface: bool,
    has_ended: bool,
}

/// Whether the examination of a connection continues.
enum ExamineResult {
    NeedsMore,
    Continue,
    Finished,
}

impl<S> AuthorityRewriter<S> {
    /// Wraps `stream`, which is examined from its first byte.
    pub(crate) fn new(stream: S) -> Self {
        Self {
            stream,
            examiner: Some(AuthorityExaminer::default()),
            examined: Vec::new(),
            returned: 0,
        }
    }

    fn read_examined(&mut self, out: &mut ReadBuf<'_>) {
        let left = &self.examined[self.returned..];
        let count = left.len().min(out.remaining());
        out.put_slice(&left[..count]);
        self.returned += count;
        if self.returned == self.examined.len() {
            self.examined = Vec::new();
            self.returned = 0;
        }
    }
}

impl AuthorityExaminer {
    /// Moves complete frames from `partial_frame` to `done`, with the authority corrected.
    fn examine(&mut self, done: &mut Vec<u8>) -> ExamineResult {
        if !self.has_preface {
            let seen = self.partial_frame.len().min(PREFACE.len());
            if self.partial_frame[..seen] != PREFACE[..seen] {
                return ExamineResult::Finished;
            }
            if seen < PREFACE.len() {
                return ExamineResult::NeedsMore;
            }
            self.has_preface = true;
            done.extend(self.partial_frame.drain(..PREFACE.len()));
        }
        loop {
            let Some(head) = self.partial_frame.first_chunk::<FRAME_HEADER>() else {
                return ExamineResult::NeedsMore;
            };
            let length =
                usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
            let (kind, flags, end) = (head[3], head[4], FRAME_HEADER + length);
            if end > MAX_HELD_BYTES {
                return ExamineResult::Finished;
            }
            if self.partial_frame.len() < end {
                return ExamineResult::NeedsMore;
            }
            let mended = kind == HEADERS
                && rewrite_authority(&mut self.partial_frame[FRAME_HEADER..end], flags);
            done.extend(self.partial_frame.drain(..end));
            if kind == HEADERS {
                return if mended { ExamineResult::Continue } else { ExamineResult::Finished };
            }
        }
    }
}

/// Corrects the authority in the payload of a HEADERS frame. Returns `false` if nothing was
/// corrected.
fn rewrite_authority(payload: &mut [u8], flags: u8) -> bool {
    let mut at = 0;
    if flags & PADDED != 0 {
        at += 1;
    }
    if flags & PRIORITY != 0 {
        at += 5;
    }
    find_authority(payload, at).is_some_and(|(start, end, huffman)| {
        let Some(value) = payload.get_mut(start..end) else { return false };
        if huffman { rewrite_huffman(value) } else { rewrite_text(value) }
    })
}

/// Returns the start and end of the authority's value, and whether it is Huffman-coded. Returns
/// `None` if the block has no literal authority. An authority in HPACK's dynamic table was
/// corrected when it was sent first.
fn find_authority(block: &[u8], mut at: usize) -> Option<(usize, usize, bool)> {
    while let Some(first) = block.get(at) {
        // Whether the field has a literal value, and how many bits of the first byte belong to the
        // field's index.
        let (literal, bits) = match first {
            0x80.. => (false, 7),
            0x40.. => (true, 6),
            0x20.. => (false, 5),
            _ => (true, 4),
        };
        let (index, after) = integer(block, at, bits)?;
        at = after;
        if !literal {
            continue;
        }
        if index == 0 {
            let (length, start) = integer(block, at, 7)?;
            at = start.checked_add(length)?;
        }
        let huffman = block.get(at)? & 0x80 != 0;
        let (length, start) = integer(block, at, 7)?;
        let end = start.checked_add(length)?;
        if index == AUTHORITY {
            return Some((start, end, huffman));
        }
        at = end;
    }
    None
}

/// Reads an HPACK integer that begins with the low `bits` bits of the byte at `at`. Also returns
/// its end.
fn integer(block: &[u8], mut at: usize, bits: u32) -> Option<(usize, usize)> {
    let full = (1 << bits) - 1;
    let mut value = usize::from(*block.get(at)?) & full;
    at += 1;
    if value < full {
        return Some((value, at));
    }
    for shift in [0, 7, 14, 21] {
        let byte = *block.get(at)?;
        at += 1;
        value += usize::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some((value, at));
        }
    }
    None
}

fn rewrite_text(value: &mut [u8]) -> bool {
    let Some(at) = [4, 5].into_iter().find(|at| value.get(*at..at + 3) == Some(b"://")) else {
        return false;
    };
    value[at..at + 3].copy_from_slice(b"--x");
    true
}

/// Huffman code of `http://`: the bits, and their number.
const HTTP: (u64, u32) = (0b1_0011_1010_0101_0011_0101_1101_1100_0110_0001_1000, 41);
/// Huffman code of `https://`: the bits, and their number.
const HTTPS: (u64, u32) = (0b10_0111_0100_1010_0110_1011_0100_0101_1100_0110_0001_1000, 46);
/// Huffman code of `://`, 19 bits.
const SLASHES: u64 = 0b101_1100_0110_0001_1000;
/// Huffman code of `--x`, which replaces `://` and is as long.
const DASHES: u64 = 0b010_1100_1011_0111_1001;

fn rewrite_huffman(value: &mut [u8]) -> bool {
    let Some(head) = value.first_chunk_mut::<6>() else { return false };
    let mut word = [0; 8];
    word[2..].copy_from_slice(head);
    let bits = u64::from_be_bytes(word);
    for (prefix, length) in [HTTP, HTTPS] {
        let below = 48 - length;
        if bits >> below == prefix {
            let mended = bits ^ ((SLASHES ^ DASHES) << below);
            head.copy_from_slice(&mended.to_be_bytes()[2..]);
            return true;
        }
    }
    false
}

impl<S: AsyncRead + Unpin> AsyncRead for AuthorityRewriter<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if !this.examined.is_empty() {
                this.read_examined(out);
                return Poll::Ready(Ok(()));
            }
            let Some(look) = &mut this.examiner else {
                return Pin::new(&mut this.stream).poll_read(cx, out);
            };
            if look.has_ended {
                return Poll::Ready(Ok(()));
            }
            let mut chunk = [0; READ_BYTES];
            let mut read = ReadBuf::new(&mut chunk);
            ready!(Pin::new(&mut this.stream).poll_read(cx, &mut read))?;
            look.partial_frame.extend_from_slice(read.filled());
            look.has_ended = read.filled().is_empty();
            let mut next = look.examine(&mut this.examined);
            while matches!(next, ExamineResult::Continue) {
                next = look.examine(&mut this.examined);
            }
            if look.has_ended || matches!(next, ExamineResult::Finished) {
                this.examined.append(&mut look.partial_frame);
                if !look.has_ended {
                    this.examiner = None;
                }
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for AuthorityRewriter<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, data)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, data)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// Encodes text with Huffman code. Knows only the characters that the tests use (RFC 7541,
    /// appendix B).
    fn huffman(text: &str) -> Vec<u8> {
        let code = |char: char| match char {
            '0' => (0x0, 5),
            '1' => (0x1, 5),
            '2' => (0x2, 5),
            '3' => (0x19, 6),
            '7' => (0x1d, 6),
            '9' => (0x1f, 6),
            '-' => (0x16, 6),
            '.' => (0x17, 6),
            '/' => (0x18, 6),
            ':' => (0x5c, 7),
            'h' => (0x27, 6),
            'p' => (0x2b, 6),
            's' => (0x8, 5),
            't' => (0x9, 5),
            'x' => (0x79, 7),
            other => panic!("{other}"),
        };
        let (mut bits, mut count, mut out) = (0_u64, 0, Vec::new());
        for char in text.chars() {
            let (value, length) = code(char);
            bits = bits << length | value;
            count += length;
            while count >= 8 {
                count -= 8;
                out.push(u8::try_from(bits >> count & 0xff).unwrap());
            }
        }
        if count > 0 {
            let padding = 8 - count;
            out.push(u8::try_from((bits << padding | ((1 << padding) - 1)) & 0xff).unwrap());
        }
        out
    }

    fn literal(value: &[u8], coded: bool) -> Vec<u8> {
        let mut out = vec![0x41, u8::try_from(value.len()).unwrap() | if coded { 0x80 } else { 0 }];
        out.extend_from_slice(value);
        out
    }

    fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
        let mut out = vec![0, 0, u8::try_from(payload.len()).unwrap(), kind, 4, 0, 0, 0, 1];
        out.extend_from_slice(payload);
        out
    }

    fn request(authority: &[u8], coded: bool) -> Vec<u8> {
        // The fields are :method POST, :scheme http, :path by name index with a value, then the
        // authority.
        let mut block = vec![0x83, 0x86, 0x44, 2, b'/', b'x'];
        block.extend(literal(authority, coded));
        frame(HEADERS, &block)
    }

    async fn through(bytes: &[u8], step: usize) -> Vec<u8> {
        let (mut client, server) = tokio::io::duplex(step);
        let bytes = bytes.to_vec();
        let writer = tokio::spawn(async move {
            for chunk in bytes.chunks(step) {
                client.write_all(chunk).await.unwrap();
            }
        });
        let mut out = Vec::new();
        AuthorityRewriter::new(server).read_to_end(&mut out).await.unwrap();
        writer.await.unwrap();
        out
    }

    fn connection(authority: &[u8], coded: bool) -> Vec<u8> {
        [PREFACE, &frame(4, &[]), &request(authority, coded), &frame(0, b"data")].concat()
    }

    #[tokio::test]
    async fn a_url_becomes_a_name_of_the_same_length() {
        for (url, name) in [
            ("http://127.0.0.1:2379", "http--x127.0.0.1:2379"),
            ("https://127.0.0.1:2379", "https--x127.0.0.1:2379"),
        ] {
            for step in [1, 7, 4_096] {
                let plain = through(&connection(url.as_bytes(), false), step).await;
                assert_eq!(plain, connection(name.as_bytes(), false), "{url} by {step}");
                let coded = through(&connection(&huffman(url), true), step).await;
                assert_eq!(coded, connection(&huffman(name), true), "{url} by {step}");
            }
            assert!(name.parse::<http::uri::Authority>().is_ok());
        }
    }

    #[tokio::test]
    async fn the_second_request_with_a_url_as_authority_is_corrected_too() {
        let twice = |authority: &[u8]| {
            [connection(authority, true), request(authority, true), frame(0, b"x")].concat()
        };
        let out = through(&twice(&huffman("http://127.0.0.1:2379")), 5).await;
        assert_eq!(out, twice(&huffman("http--x127.0.0.1:2379")));
    }

    #[tokio::test]
    async fn the_bytes_of_other_clients_are_unchanged() {
        let name = huffman("127.0.0.1:2379");
        let good = [connection(&name, true), request(&huffman("http://127.0.0.1"), true)].concat();
        let others: [&[u8]; 5] = [
            &good,
            b"GET /version HTTP/1.1\r\nHost: http://x\r\n\r\n",
            b"PRI",
            &PREFACE[..20],
            &good[..50],
        ];
        for bytes in others {
            for step in [1, 4_096] {
                assert_eq!(through(bytes, step).await, bytes);
            }
        }
    }

    #[tokio::test]
    async fn malformed_header_blocks_are_unchanged() {
        for payload in [&[0x41][..], &[0x41, 0xff, 0xff, 0xff, 0xff, 0xff], &[0x40, 0x7f], &[0xff]]
        {
            let bytes = [PREFACE, &frame(HEADERS, payload)].concat();
            assert_eq!(through(&bytes, 3).await, bytes);
        }
    }
}
