//! Messages to the service manager, as sd_notify(3) describes them: one datagram to the Unix socket
//! that `NOTIFY_SOCKET` names. A name that begins with `@` is in the abstract namespace.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

const SOCKET_VARIABLE: &str = "NOTIFY_SOCKET";

/// What became of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Its start is finished.
    Ready,
    /// It is about to end.
    Stopping,
}

impl State {
    fn message(self) -> &'static [u8] {
        match self {
            Self::Ready => b"READY=1\n",
            Self::Stopping => b"STOPPING=1\n",
        }
    }
}

/// Tells the service manager, if there is one.
///
/// # Errors
/// If `NOTIFY_SOCKET` names no socket, or nobody receives on it.
pub fn notify(state: State) -> io::Result<()> {
    match std::env::var_os(SOCKET_VARIABLE) {
        Some(socket) if !socket.is_empty() => send(&socket, state.message()),
        _ => Ok(()),
    }
}

fn send(socket: &OsStr, message: &[u8]) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    // Datagrams are sent whole or not at all.
    UnixDatagram::unbound()?.send_to_addr(message, &address).map(|_| ())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failed step fails the test")]
mod tests {
    use super::*;

    fn received(receiver: &UnixDatagram) -> Vec<u8> {
        let mut buffer = [0; 64];
        let length = receiver.recv(&mut buffer).unwrap();
        buffer[..length].to_vec()
    }

    #[test]
    fn a_socket_in_the_abstract_namespace_is_told() {
        let name = format!("muster-notify-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name.as_bytes()).unwrap();
        let receiver = UnixDatagram::bind_addr(&address).unwrap();
        send(OsStr::new(&format!("@{name}")), State::Ready.message()).unwrap();
        assert_eq!(received(&receiver), b"READY=1\n");
    }

    #[test]
    fn a_socket_in_a_folder_is_told() {
        let path = std::env::temp_dir().join(format!("muster-notify-{}", std::process::id()));
        let receiver = UnixDatagram::bind(&path).unwrap();
        send(path.as_os_str(), State::Stopping.message()).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(received(&receiver), b"STOPPING=1\n");
        assert!(send(path.as_os_str(), State::Ready.message()).is_err());
    }
}
