//! gRPC server reflection, so that `grpcurl` and similar tools need no `.proto` files. It describes
//! the API's services and messages, not the protocol between members. etcd has no reflection.

use tonic::service::Routes;
use tonic_reflection::server::Builder;

const BUILT: &str = "what the descriptors say was built with this";

/// Adds both versions of the reflection service. They need no permission.
pub(super) fn add(routes: Routes) -> Routes {
    let told = || {
        Builder::configure()
            .register_encoded_file_descriptor_set(node_proto::API)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    routes
        .add_service(told().build_v1().expect(BUILT))
        .add_service(told().build_v1alpha().expect(BUILT))
}
