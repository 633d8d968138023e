//! Tests of admission over the loopback interface. The handshake of these tests ends when the
//! client's first two bytes have arrived.

use std::{net::SocketAddr, time::Instant};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket},
    sync::mpsc,
};

use super::*;

const BOUNDS: AdmissionLimits = AdmissionLimits {
    silent: 64,
    handshakes: 4,
    max_handshakes_per_network: 2,
    step_timeout: Duration::from_secs(30),
};
const QUICK: Duration = Duration::from_secs(5);

type Outcomes = mpsc::UnboundedReceiver<(IpAddr, Result<(), AdmissionError>)>;

/// Accepts connections, and sends the outcome of each admission to the receiver.
async fn open(bounds: AdmissionLimits) -> (SocketAddr, Outcomes) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (tell, told) = mpsc::unbounded_channel();
    let admission = AdmissionControl::new(bounds);
    tokio::spawn(async move {
        loop {
            let (tcp, remote) = listener.accept().await.unwrap();
            let Some(pending) = admission.register(remote.ip()) else { continue };
            let tell = tell.clone();
            tokio::spawn(async move {
                let two_bytes =
                    async |mut tcp: TcpStream| tcp.read_exact(&mut [0; 2]).await.map(drop);
                let _ = tell.send((remote.ip(), pending.admit(tcp, two_bytes).await));
            });
        }
    });
    (address, told)
}

async fn connect(from: &str, to: SocketAddr, said: &[u8]) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(format!("{from}:0").parse().unwrap()).unwrap();
    let mut stream = socket.connect(to).await.unwrap();
    stream.write_all(said).await.unwrap();
    stream
}

async fn next(told: &mut Outcomes) -> (String, Result<(), AdmissionError>) {
    let (who, outcome) = timeout(QUICK, told.recv()).await.expect("soon").unwrap();
    (who.to_string(), outcome)
}

fn is_admitted((who, outcome): &(String, Result<(), AdmissionError>)) -> bool {
    who == "127.0.0.2" && outcome.is_ok()
}

#[tokio::test]
async fn a_silent_connection_takes_no_handshake_slot_and_times_out() {
    let step = Duration::from_millis(300);
    let (address, mut told) =
        open(AdmissionLimits { handshakes: 1, step_timeout: step, ..BOUNDS }).await;
    let start = Instant::now();
    let _silent = connect("127.0.0.66", address, b"").await;
    let _client = connect("127.0.0.2", address, b"xx").await;
    assert!(matches!(next(&mut told).await, (who, Ok(())) if who == "127.0.0.2"));
    assert!(
        matches!(next(&mut told).await, (who, Err(AdmissionError::TimedOut)) if who == "127.0.0.66")
    );
    assert!(start.elapsed() >= step);
}

#[tokio::test]
async fn a_connection_that_stops_after_its_first_byte_times_out() {
    let step = Duration::from_millis(300);
    let (address, mut told) = open(AdmissionLimits { step_timeout: step, ..BOUNDS }).await;
    let _half = connect("127.0.0.66", address, b"x").await;
    assert!(matches!(next(&mut told).await, (_, Err(AdmissionError::TimedOut))));
}

#[tokio::test]
async fn a_connection_that_never_gets_a_handshake_slot_times_out() {
    let step = Duration::from_millis(300);
    let (address, mut told) =
        open(AdmissionLimits { handshakes: 0, step_timeout: step, ..BOUNDS }).await;
    let _waiting = connect("127.0.0.2", address, b"xx").await;
    assert!(matches!(next(&mut told).await, (_, Err(AdmissionError::TimedOut))));
}

#[tokio::test]
async fn a_connection_in_its_handshake_has_left_the_silent_pool() {
    let (address, mut told) = open(AdmissionLimits { silent: 1, ..BOUNDS }).await;
    let _half = connect("127.0.0.2", address, b"x").await;
    // The first connection needs a moment to move from the silent pool to the handshake pool.
    sleep(Duration::from_millis(100)).await;
    let _next = connect("127.0.0.2", address, b"xx").await;
    assert!(is_admitted(&next(&mut told).await));
}

#[tokio::test]
async fn a_host_with_one_byte_on_each_of_many_connections_delays_only_itself() {
    let (address, mut told) = open(BOUNDS).await;
    let mut half = Vec::new();
    for _ in 0..20 {
        half.push(connect("127.0.0.66", address, b"x").await);
    }
    let _client = connect("127.0.0.2", address, b"xx").await;
    assert!(matches!(next(&mut told).await, (who, Ok(())) if who == "127.0.0.2"));
    // The connections of `half` are admitted one after the other, as each sends its second byte.
    for stream in &mut half {
        stream.write_all(b"x").await.unwrap();
    }
    for _ in &half {
        assert!(matches!(next(&mut told).await, (who, Ok(())) if who == "127.0.0.66"));
    }
}

#[tokio::test]
async fn a_newcomer_evicts_the_oldest_of_many_hosts_that_hold_one_slot_each() {
    let (address, mut told) = open(BOUNDS).await;
    let mut half = Vec::new();
    for host in 10..14 {
        half.push(connect(&format!("127.0.0.{host}"), address, b"x").await);
    }
    // Wait until all four connections hold a handshake slot. The next connection must not find a
    // free one.
    sleep(Duration::from_millis(100)).await;
    let _client = connect("127.0.0.2", address, b"xx").await;
    let both = [next(&mut told).await, next(&mut told).await];
    let lost = |(who, outcome): &(String, Result<(), AdmissionError>)| {
        who == "127.0.0.10" && matches!(outcome, Err(AdmissionError::Evicted))
    };
    assert!(both.iter().any(lost) && both.iter().any(is_admitted), "{both:?}");
}

#[tokio::test]
async fn the_number_of_silent_connections_is_bounded() {
    let (address, mut told) = open(AdmissionLimits { silent: 3, ..BOUNDS }).await;
    let mut silent = Vec::new();
    for _ in 0..5 {
        silent.push(connect("127.0.0.66", address, b"").await);
    }
    for above in &mut silent[3..] {
        let end = timeout(QUICK, above.read(&mut [0])).await.expect("closed at once");
        assert!(matches!(end, Ok(0) | Err(_)));
    }
    let _client = connect("127.0.0.2", address, b"xx").await;
    let both = [next(&mut told).await, next(&mut told).await];
    let lost = |(_, outcome): &(String, Result<(), AdmissionError>)| {
        matches!(outcome, Err(AdmissionError::Evicted))
    };
    assert!(both.iter().any(lost) && both.iter().any(is_admitted), "{both:?}");
}

#[tokio::test]
async fn a_connection_that_closes_at_once_fails_without_a_wait() {
    let (address, mut told) = open(BOUNDS).await;
    drop(connect("127.0.0.2", address, b"").await);
    let (_, outcome) = next(&mut told).await;
    assert!(
        matches!(outcome, Err(AdmissionError::Failed(e)) if e.kind() == io::ErrorKind::UnexpectedEof)
    );
}
