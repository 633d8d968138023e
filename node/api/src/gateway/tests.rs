use axum::http::HeaderValue;
use muster_shares::memory::{MemoryBounds, MemoryBudget};
use node_proto::etcdserverpb::{RangeRequest, RangeResponse, kv_server};
use node_proto::mvccpb::KeyValue;
use tower::ServiceExt as _;

use super::*;

#[test]
fn only_the_token_and_prefixed_headers_become_metadata() {
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("authorization", "token.1"),
        ("grpc-metadata-hasleader", "true"),
        ("grpc-metadata-token", "token.2"),
        ("hasleader", "true"),
        ("token", "token.3"),
        ("content-type", "application/json"),
        ("grpc-timeout", "1S"),
        ("grpc-metadata-", "nameless"),
    ] {
        headers.append(name, HeaderValue::from_static(value));
    }
    let mut passed: Vec<_> = metadata(&headers)
        .into_headers()
        .iter()
        .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
        .collect();
    passed.sort();
    assert_eq!(passed, ["authorization: token.1", "hasleader: true", "token: token.2"]);
}

const VALUE_BYTES: usize = 1 << 20;

/// KV service that answers every range with one large value.
struct LargeValueService;

#[tonic::async_trait]
impl kv_server::Kv for LargeValueService {
    async fn range(
        &self,
        request: tonic::Request<RangeRequest>,
    ) -> Result<tonic::Response<RangeResponse>, Status> {
        assert!(
            request.extensions().get::<rpc::CertificateUser>().is_none(),
            "it has shown no token"
        );
        let kvs = vec![KeyValue { value: vec![0; VALUE_BYTES].into(), ..KeyValue::default() }];
        Ok(tonic::Response::new(RangeResponse { kvs, ..RangeResponse::default() }))
    }
}

#[tokio::test]
async fn an_answer_is_charged_until_it_was_read() {
    let grpc = tonic::service::Routes::new(kv_server::KvServer::new(LargeValueService));
    let router = router(grpc.prepare().into_axum_router(), 1 << 20);
    let bounds = MemoryBounds { per_connection: 4 << 20, total: 4 << 20, guaranteed: 0 };
    let account = MemoryBudget::new(bounds).open_account([127, 0, 0, 1].into());
    let ask = async || {
        let request = Request::post("/v3/kv/range")
            .extension(account.clone())
            .extension(rpc::CertificateUser("root".into()));
        let request = request.body(axum::body::Body::from("{}")).unwrap();
        router.clone().oneshot(request).await.unwrap()
    };
    let first = ask().await;
    assert_eq!((first.status(), account.held() > VALUE_BYTES), (StatusCode::OK, true));
    assert_eq!(ask().await.status(), StatusCode::TOO_MANY_REQUESTS);
    drop(first);
    assert_eq!(account.held(), 0);
    assert_eq!(ask().await.status(), StatusCode::OK);
}
