//! Messages to the service manager, as sd_notify(3) describes them: one datagram to the Unix socket
//! that `NOTIFY_SOCKET` names. A name that begins with `@` is in the abstract namespace.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

const SOCKET_VARIABLE: &str = "NOTIFY_SOCKET";
const WATCHDOG_INTERVAL_VARIABLE: &str = "WATCHDOG_USEC";
const WATCHDOG_PROCESS_VARIABLE: &str = "WATCHDOG_PID";

/// One message to the service manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State<'a> {
    /// The process has finished its start.
    Ready,
    /// The process is about to end.
    Stopping,
    /// The process is alive. Restarts the interval that [`watchdog_interval`] returns.
    Watchdog,
    /// One line about what the process does, shown by `systemctl status`. A control character in it
    /// is sent as a space, since a line break would begin another message.
    Status(&'a str),
}

impl<'a> State<'a> {
    fn message(self) -> Cow<'a, [u8]> {
        match self {
            Self::Ready => Cow::Borrowed(b"READY=1\n"),
            Self::Stopping => Cow::Borrowed(b"STOPPING=1\n"),
            Self::Watchdog => Cow::Borrowed(b"WATCHDOG=1\n"),
            Self::Status(line) => {
                let line = line.replace(char::is_control, " ");
                Cow::Owned(format!("STATUS={line}\n").into_bytes())
            }
        }
    }
}

/// Returns the interval within which the service manager expects [`State::Watchdog`] from this
/// process, as sd_watchdog_enabled(3) describes it. Returns `None` if it expects none.
#[must_use]
pub fn watchdog_interval() -> Option<Duration> {
    let variable = |name| std::env::var(name).ok();
    parse_interval(
        variable(WATCHDOG_INTERVAL_VARIABLE).as_deref(),
        variable(WATCHDOG_PROCESS_VARIABLE).as_deref(),
        std::process::id(),
    )
}

/// Returns how often to send [`State::Watchdog`]: three times in each interval, so that one late
/// message doesn't end the process. `None` if no watchdog message is expected.
#[must_use]
pub fn keep_alive_interval() -> Option<Duration> {
    watchdog_interval().map(|limit| limit / 3)
}

fn parse_interval(interval: Option<&str>, process: Option<&str>, own: u32) -> Option<Duration> {
    // Child processes inherit the interval and the process id. If the id is another process's, the
    // interval isn't meant for this process.
    if process.is_some_and(|process| process.parse() != Ok(own)) {
        return None;
    }
    let microseconds = interval?.parse().ok().filter(|interval| *interval > 0)?;
    Some(Duration::from_micros(microseconds))
}

/// Sends `state` to the service manager. Does nothing if `NOTIFY_SOCKET` is not set.
///
/// # Errors
/// If `NOTIFY_SOCKET` names no socket, or no process receives on it.
pub fn notify(state: State<'_>) -> io::Result<()> {
    match std::env::var_os(SOCKET_VARIABLE) {
        Some(socket) if !socket.is_empty() => send(&socket, &state.message()),
        _ => Ok(()),
    }
}

fn send(socket: &OsStr, message: &[u8]) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    // Ignore the number of sent bytes: datagrams are sent whole or not at all.
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
    fn a_socket_in_the_abstract_namespace_gets_the_message() {
        let name = format!("muster-notify-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name.as_bytes()).unwrap();
        let receiver = UnixDatagram::bind_addr(&address).unwrap();
        send(OsStr::new(&format!("@{name}")), &State::Ready.message()).unwrap();
        assert_eq!(received(&receiver), b"READY=1\n");
    }

    #[test]
    fn a_socket_in_a_folder_gets_the_message() {
        let path = std::env::temp_dir().join(format!("muster-notify-{}", std::process::id()));
        let receiver = UnixDatagram::bind(&path).unwrap();
        send(path.as_os_str(), &State::Stopping.message()).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(received(&receiver), b"STOPPING=1\n");
        assert!(send(path.as_os_str(), &State::Ready.message()).is_err());
    }
    #[test]
    fn a_status_is_one_message() {
        let message = State::Status("waiting: for db-2\nREADY=1").message().into_owned();
        assert_eq!(message, b"STATUS=waiting: for db-2 READY=1\n");
    }

    #[test]
    fn a_watchdog_that_is_meant_for_another_process_is_ignored() {
        let second = Some(Duration::from_secs(1));
        assert_eq!(parse_interval(Some("1000000"), None, 7), second);
        assert_eq!(parse_interval(Some("1000000"), Some("7"), 7), second);
        for (interval, process) in [
            (None, None),
            (Some("0"), None),
            (Some("soon"), None),
            (Some("1000000"), Some("8")),
            (Some("1000000"), Some("")),
        ] {
            assert_eq!(parse_interval(interval, process, 7), None, "{interval:?} {process:?}");
        }
    }
}
