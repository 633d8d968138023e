//! Measures the CPU time of puts with and without auth, in turns.

use std::time::Duration;

use anyhow::Result;
use node_proto::authpb::{Permission, UserAddOptions, permission};
use node_proto::etcdserverpb::auth_client::AuthClient;
use node_proto::etcdserverpb::{
    AuthDisableRequest, AuthEnableRequest, AuthRoleAddRequest, AuthRoleGrantPermissionRequest,
    AuthUserAddRequest, AuthUserGrantRoleRequest, AuthenticateRequest,
};
use tonic::Request;
use tonic::transport::Channel;

use super::FigureRecorder;
use crate::bench::cluster::BenchCluster;
use crate::bench::load::{self, Load, Work};
use crate::bench::report::median;

const ROOT: &str = "root";
const WRITER: &str = "writer";
const PASSWORD: &str = "p";
const LOAD: Load = Load {
    clients: 64,
    time: Duration::from_secs(4),
    requests: 200_000,
    work: Work::Put,
    value_bytes: 256,
    spread: false,
    seed: 1,
};

pub(super) async fn run(
    mut cluster: BenchCluster,
    rounds: usize,
    recorder: &mut FigureRecorder<'_>,
) -> Result<()> {
    let leader = cluster.leader().await?;
    let mut auth = AuthClient::new(cluster.channel(leader)?);
    users(&mut auth).await?;
    let (mut off, mut on) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        off.push(load::run(&cluster, &LOAD).await?.cpu_seconds_per_100k() * 10.0);
        auth.auth_enable(AuthEnableRequest {}).await?;
        cluster.set_token(Some(token(&mut auth, WRITER).await?));
        on.push(load::run(&cluster, &LOAD).await?.cpu_seconds_per_100k() * 10.0);
        let mut disable = Request::new(AuthDisableRequest {});
        disable.metadata_mut().insert("token", token(&mut auth, ROOT).await?.parse()?);
        auth.auth_disable(disable).await?;
        // Wait until all members have disabled authentication. Otherwise a member that still
        // requires a token could become the leader.
        cluster.wait_settled().await?;
        cluster.set_token(None);
    }
    let (off, on) = (median(off), median(on));
    recorder.record("CPU of a put, no users", off, "us");
    recorder.record("CPU of a put, with a user's token", on, "us");
    recorder.record("CPU with users / without", on / off, "");
    Ok(())
}

/// Creates `root`, and a user that may write the keys of the load.
async fn users(auth: &mut AuthClient<Channel>) -> Result<()> {
    for name in [ROOT, WRITER] {
        let request = AuthUserAddRequest {
            name: name.to_owned(),
            password: PASSWORD.to_owned(),
            options: Some(UserAddOptions { no_password: false }),
            ..AuthUserAddRequest::default()
        };
        auth.user_add(request).await?;
        auth.role_add(AuthRoleAddRequest { name: name.to_owned() }).await?;
        let (user, role) = (name.to_owned(), name.to_owned());
        auth.user_grant_role(AuthUserGrantRoleRequest { user, role }).await?;
    }
    let perm = Some(Permission {
        perm_type: permission::Type::Readwrite.into(),
        key: "/bench/".into(),
        range_end: "/bench0".into(),
    });
    let name = WRITER.to_owned();
    auth.role_grant_permission(AuthRoleGrantPermissionRequest { name, perm }).await?;
    Ok(())
}

async fn token(auth: &mut AuthClient<Channel>, name: &str) -> Result<String> {
    let (name, password) = (name.to_owned(), PASSWORD.to_owned());
    Ok(auth.authenticate(AuthenticateRequest { name, password }).await?.into_inner().token)
}
