//! Services that are declared and not served yet: each method answers gRPC `Unimplemented`.

use node_proto::etcdserverpb::auth_server;
use node_proto::v3electionpb::election_server::{self, ElectionServer};
use node_proto::v3lockpb::lock_server::{self, LockServer};

pub(super) struct Auth;
pub(super) struct Lock;
pub(super) struct Election;

#[tonic::async_trait]
impl auth_server::Auth for Auth {}

#[tonic::async_trait]
impl lock_server::Lock for Lock {}

#[tonic::async_trait]
impl election_server::Election for Election {}

pub(super) fn lock() -> LockServer<Lock> {
    LockServer::new(Lock)
}

pub(super) fn election() -> ElectionServer<Election> {
    ElectionServer::new(Election)
}
