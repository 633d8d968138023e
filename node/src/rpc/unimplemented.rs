//! Services that are declared and not served yet: each method answers gRPC `Unimplemented`.

use node_proto::etcdserverpb::auth_server;

pub(super) struct Auth;

#[tonic::async_trait]
impl auth_server::Auth for Auth {}
