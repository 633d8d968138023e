//! Tests of gRPC server reflection, with a client that has no `.proto` files.

use prost_reflect::DescriptorPool;
use prost_reflect::prost::Message as _;
use prost_reflect::prost_types::{FileDescriptorProto, FileDescriptorSet};

use super::*;

macro_rules! asked {
    ($node:expr, $version:ident) => {{
        use tonic_reflection::pb::$version::ServerReflectionRequest;
        use tonic_reflection::pb::$version::server_reflection_client::ServerReflectionClient;
        use tonic_reflection::pb::$version::server_reflection_request::MessageRequest;
        use tonic_reflection::pb::$version::server_reflection_response::MessageResponse;
        let mut client = ServerReflectionClient::new($node.channel.clone());
        let mut ask = async |what| {
            let request =
                ServerReflectionRequest { message_request: Some(what), ..Default::default() };
            let asked = futures_util::stream::iter([request]);
            let mut answers = client.server_reflection_info(asked).await.unwrap().into_inner();
            answers.message().await.map(|answer| answer.unwrap().message_response.unwrap())
        };
        let Ok(MessageResponse::ListServicesResponse(list)) =
            ask(MessageRequest::ListServices(String::new())).await
        else {
            panic!("no list");
        };
        let mut files = Vec::new();
        for symbol in [
            "etcdserverpb.KV",
            "v3lockpb.Lock",
            "v3electionpb.Election",
            "mvccpb.KeyValue",
            "authpb.User",
        ] {
            let Ok(MessageResponse::FileDescriptorResponse(told)) =
                ask(MessageRequest::FileContainingSymbol(symbol.to_owned())).await
            else {
                panic!("no file with {symbol}");
            };
            files.extend(told.file_descriptor_proto);
        }
        let ours = ask(MessageRequest::FileContainingSymbol("musterpb.Command".to_owned())).await;
        let names: Vec<String> = list.service.into_iter().map(|service| service.name).collect();
        (names, files, ours.map(drop).map_err(|status| status.code()))
    }};
}

#[tokio::test]
async fn reflection_describes_every_service_but_not_the_peer_protocol() {
    let node = ApiTestNode::start().await;
    for (names, files, ours) in [asked!(node, v1), asked!(node, v1alpha)] {
        for (service, ..) in Method::ALL.iter().map(|method| method.labels()) {
            assert!(names.iter().any(|name| name == service), "{service} in {names:?}");
        }
        assert!(names.iter().any(|name| name == "grpc.health.v1.Health"), "{names:?}");
        assert!(!names.iter().any(|name| name.starts_with("muster")), "{names:?}");
        assert_eq!(ours, Err(Code::NotFound));
        let file = files.iter().map(|file| FileDescriptorProto::decode(&**file).unwrap()).collect();
        let pool = DescriptorPool::from_file_descriptor_set(FileDescriptorSet { file }).unwrap();
        for (service, method, _) in Method::ALL.iter().map(|method| method.labels()) {
            let told = pool.get_service_by_name(service).unwrap();
            assert!(told.methods().any(|told| told.name() == method), "{service}/{method}");
        }
    }
}
