//! Tests of the log: failures are reported where an operator looks.

use std::io::Write;
use std::sync::{Arc, Mutex, OnceLock};

use discovery_types::csr::NodeKey;
use discovery_types::problem::Code;

use super::support::TestInstallation;

/// Captured log of the test program.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Returns the log lines that contain `text`. The first call starts the capture.
fn logged(text: &str) -> Vec<String> {
    static LOG: OnceLock<Log> = OnceLock::new();
    let log = LOG.get_or_init(|| {
        let log = Log::default();
        let writer = log.clone();
        let builder = tracing_subscriber::fmt().with_max_level(tracing::Level::WARN);
        builder.with_ansi(false).with_writer(move || writer.clone()).init();
        log
    });
    let bytes = log.0.lock().unwrap().clone();
    let all = String::from_utf8(bytes).unwrap();
    all.lines().filter(|line| line.contains(text)).map(str::to_owned).collect()
}

#[tokio::test]
async fn a_failed_request_is_logged_once_with_its_cause() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let path = format!("/v1/clusters/{}/credentials", statement.cluster);
    assert_eq!(logged(&path), [""; 0]);
    sqlx::query("UPDATE authorities SET wrapped_key = 'changed'")
        .execute(&mut world.database.connect().await)
        .await
        .unwrap();
    let csr = NodeKey::generate().csr;
    let refused = admin.issue_credentials(statement.cluster, &csr).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::Internal));
    let lines = logged(&path);
    assert_eq!(lines.len(), 1, "{lines:?}");
    for part in ["ERROR", "status=500", "can't be opened", "damaged"] {
        assert!(lines[0].contains(part), "{part}: {}", lines[0]);
    }
    service.stop().await;
}
