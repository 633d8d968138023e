//! Tests of the memory that a request takes while it waits.

use actix_web::test::TestRequest;
use actix_web::web::{Data, Path, Query};
use discovery_types::api::PollRequest;
use discovery_types::digest::Nonce;
use uuid::Uuid;

use super::support::TestInstallation;
use crate::handlers::body::JsonBody;
use crate::handlers::{forming, intents};

/// Maximum size of the future of a request that can wait, in bytes. Tens of thousands of them may
/// wait at a time.
const MAX_WAITING_BYTES: usize = 2_048;

#[tokio::test]
async fn a_request_that_waits_is_small() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let app = Data::new(service.app().clone());
    let request = || TestRequest::default().to_http_request();
    let body = PollRequest { after: Some(1), boot: 1, nonce: Nonce::random(), highest_epoch: 0 };
    let query = |text: &str| TestRequest::with_uri(&format!("/?{text}")).to_http_request();
    let watched = Query::from_query(query("after=1").query_string()).unwrap();
    let listed = Query::from_query(query("after=1").query_string()).unwrap();
    let shown = Query::from_query(query("after=1").query_string()).unwrap();
    let id = Uuid::from_u128(1);
    let intent = intents::IntentPath { id, operation: "0".repeat(32).parse().unwrap() };
    let sizes = [
        (
            "poll",
            size_of_val(&forming::poll(request(), app.clone(), Path::from(id), JsonBody(body))),
        ),
        ("watch", size_of_val(&forming::watch(request(), app.clone(), Path::from(id), watched))),
        ("intents", size_of_val(&intents::list(request(), app.clone(), Path::from(id), listed))),
        ("intent", size_of_val(&intents::show(request(), app.clone(), Path::from(intent), shown))),
    ];
    println!("{sizes:?}");
    for (name, size) in sizes {
        assert!(size <= MAX_WAITING_BYTES, "{name}: {size} bytes");
    }
    service.stop().await;
}
