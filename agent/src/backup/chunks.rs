//! A file on its way to a store: read, encrypted and hashed by one thread, a few chunks at a time.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};

use bytes::Bytes;
use data_encoding::HEXLOWER;
use ring::digest;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::encryption::{BackupRecipient, copy_encrypted};
use super::progress::BackupProgress;

/// Size in bytes of each chunk except the last one.
const CHUNK_BYTES: usize = 256 << 10;
/// Maximum number of chunks that wait for the store. The reading thread blocks at this number.
const MAX_WAITING_CHUNKS: usize = 4;

/// Length and hash of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FileDigest {
    pub bytes: u64,
    /// SHA-256 of all bytes, in hexadecimal.
    pub sha256: String,
}

/// Computes the length and hash of a stream of bytes.
pub(super) struct Digester {
    hash: digest::Context,
    bytes: u64,
}

impl Default for Digester {
    fn default() -> Self {
        Self { hash: digest::Context::new(&digest::SHA256), bytes: 0 }
    }
}

impl Digester {
    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
    }

    pub(super) fn finish(self) -> FileDigest {
        let sha256 = HEXLOWER.encode(self.hash.finish().as_ref());
        FileDigest { bytes: self.bytes, sha256 }
    }
}

/// The chunks of a file that is being stored.
pub(crate) struct ChunkSource {
    chunks: mpsc::Receiver<Bytes>,
    /// The reading thread; `None` once its result was taken.
    reading: Option<JoinHandle<io::Result<FileDigest>>>,
    digest: Option<FileDigest>,
}

impl ChunkSource {
    /// Begins to read `file` from its start, and encrypts it if there are recipients.
    pub(super) fn of_file(
        mut file: File,
        recipients: Vec<BackupRecipient>,
        progress: BackupProgress,
    ) -> Self {
        let (sender, chunks) = mpsc::channel(MAX_WAITING_CHUNKS);
        let reading = tokio::task::spawn_blocking(move || {
            file.seek(SeekFrom::Start(0))?;
            let writer = ChunkWriter::new(sender);
            copy_encrypted(file, writer, &recipients, &progress)?.finish()
        });
        Self { chunks, reading: Some(reading), digest: None }
    }

    /// Returns the next chunk, or `None` once the file was read to its end. If reading stops
    /// earlier, returns an error, so a truncated file never counts as whole.
    pub(super) async fn next(&mut self) -> io::Result<Option<Bytes>> {
        if let Some(chunk) = self.chunks.recv().await {
            return Ok(Some(chunk));
        }
        if let Some(reading) = self.reading.take() {
            self.digest = Some(reading.await.map_err(io::Error::other)??);
        }
        match self.digest {
            Some(_) => Ok(None),
            None => Err(io::Error::other("the file was not read to its end")),
        }
    }

    /// Returns the digest of all chunks, once the file was read to its end.
    pub(super) fn digest(&self) -> Option<&FileDigest> {
        self.digest.as_ref()
    }
}

/// Writer that cuts its input into chunks and sends them to the channel.
struct ChunkWriter {
    sender: mpsc::Sender<Bytes>,
    buffer: Vec<u8>,
    digester: Digester,
}

impl ChunkWriter {
    fn new(sender: mpsc::Sender<Bytes>) -> Self {
        Self { sender, buffer: Vec::with_capacity(CHUNK_BYTES), digester: Digester::default() }
    }

    fn send(&mut self) -> io::Result<()> {
        let chunk = std::mem::replace(&mut self.buffer, Vec::with_capacity(CHUNK_BYTES));
        let gone = |_| io::Error::new(io::ErrorKind::BrokenPipe, "the store has given up");
        self.sender.blocking_send(chunk.into()).map_err(gone)
    }

    fn finish(mut self) -> io::Result<FileDigest> {
        if !self.buffer.is_empty() {
            self.send()?;
        }
        Ok(self.digester.finish())
    }
}

impl Write for ChunkWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(CHUNK_BYTES - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..taken]);
        self.digester.update(&bytes[..taken]);
        if self.buffer.len() == CHUNK_BYTES {
            self.send()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read_all(mut source: ChunkSource) -> (Vec<u8>, FileDigest) {
        let mut all = Vec::new();
        while let Some(chunk) = source.next().await.unwrap() {
            all.extend_from_slice(&chunk);
        }
        (all, source.digest().unwrap().clone())
    }

    #[tokio::test]
    async fn a_file_arrives_whole_with_its_digest() {
        for length in [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 5 * CHUNK_BYTES + 7] {
            let content: Vec<u8> = (0..length).map(|at| at as u8).collect();
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&content).unwrap();
            let source = ChunkSource::of_file(file, Vec::new(), BackupProgress::default());
            let (all, digest) = read_all(source).await;
            assert_eq!((all.len(), digest.bytes), (length, length as u64));
            let mut expected = Digester::default();
            expected.update(&content);
            assert_eq!((all, digest), (content, expected.finish()));
        }
    }

    #[tokio::test]
    async fn a_file_that_can_not_be_read_has_no_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        // The file is open for writing only, so reading it fails.
        let file = File::create(path).unwrap();
        let mut source = ChunkSource::of_file(file, Vec::new(), BackupProgress::default());
        assert!(source.next().await.is_err());
        assert!(source.next().await.is_err());
        assert_eq!(source.digest(), None);
    }
}
