//! A stand-in for the metadata service of a cloud.

use std::io::{Read, Write};
use std::net::TcpListener;

use anyhow::Result;

/// Answers every request with this text. That is enough for a test in which an agent makes only one
/// kind of request. Returns the server's URL.
pub(super) fn serve(body: String) -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let url = format!("http://{}", listener.local_addr()?);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut stream = stream;
            let mut request = [0; 4096];
            let _ = stream.read(&mut request);
            let length = body.len();
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close");
            let _ = write!(stream, "{head}\r\n\r\n{body}");
        }
    });
    Ok(url)
}
