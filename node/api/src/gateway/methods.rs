//! Table of HTTP paths and their methods: the `google.api.http` options in etcd's rpc.proto,
//! v3lock.proto and v3election.proto.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use http::uri::PathAndQuery;
use prost_reflect::{DescriptorPool, MessageDescriptor};

/// Prefixes of the gateway's paths: the current one, and that of etcd 3.3.
pub(super) const PREFIXES: [&str; 2] = ["/v3/", "/v3beta/"];

/// Services with their methods. Each method has its HTTP path after the prefix, and its name.
const PATHS: &[(&str, &[(&str, &str)])] = &[
    (
        "etcdserverpb.KV",
        &[
            ("kv/range", "Range"),
            ("kv/put", "Put"),
            ("kv/deleterange", "DeleteRange"),
            ("kv/txn", "Txn"),
            ("kv/compaction", "Compact"),
        ],
    ),
    ("etcdserverpb.Watch", &[("watch", "Watch")]),
    (
        "etcdserverpb.Lease",
        &[
            ("lease/grant", "LeaseGrant"),
            ("lease/revoke", "LeaseRevoke"),
            ("kv/lease/revoke", "LeaseRevoke"),
            ("lease/keepalive", "LeaseKeepAlive"),
            ("lease/timetolive", "LeaseTimeToLive"),
            ("kv/lease/timetolive", "LeaseTimeToLive"),
            ("lease/leases", "LeaseLeases"),
            ("kv/lease/leases", "LeaseLeases"),
        ],
    ),
    (
        "etcdserverpb.Cluster",
        &[
            ("cluster/member/add", "MemberAdd"),
            ("cluster/member/remove", "MemberRemove"),
            ("cluster/member/update", "MemberUpdate"),
            ("cluster/member/list", "MemberList"),
            ("cluster/member/promote", "MemberPromote"),
        ],
    ),
    (
        "etcdserverpb.Maintenance",
        &[
            ("maintenance/alarm", "Alarm"),
            ("maintenance/status", "Status"),
            ("maintenance/defragment", "Defragment"),
            ("maintenance/hash", "Hash"),
            ("maintenance/hashkv", "HashKV"),
            ("maintenance/snapshot", "Snapshot"),
            ("maintenance/transfer-leadership", "MoveLeader"),
            ("maintenance/downgrade", "Downgrade"),
        ],
    ),
    (
        "etcdserverpb.Auth",
        &[
            ("auth/enable", "AuthEnable"),
            ("auth/disable", "AuthDisable"),
            ("auth/status", "AuthStatus"),
            ("auth/authenticate", "Authenticate"),
            ("auth/user/add", "UserAdd"),
            ("auth/user/get", "UserGet"),
            ("auth/user/list", "UserList"),
            ("auth/user/delete", "UserDelete"),
            ("auth/user/changepw", "UserChangePassword"),
            ("auth/user/grant", "UserGrantRole"),
            ("auth/user/revoke", "UserRevokeRole"),
            ("auth/role/add", "RoleAdd"),
            ("auth/role/get", "RoleGet"),
            ("auth/role/list", "RoleList"),
            ("auth/role/delete", "RoleDelete"),
            ("auth/role/grant", "RoleGrantPermission"),
            ("auth/role/revoke", "RoleRevokePermission"),
        ],
    ),
    ("v3lockpb.Lock", &[("lock/lock", "Lock"), ("lock/unlock", "Unlock")]),
    (
        "v3electionpb.Election",
        &[
            ("election/campaign", "Campaign"),
            ("election/proclaim", "Proclaim"),
            ("election/leader", "Leader"),
            ("election/observe", "Observe"),
            ("election/resign", "Resign"),
        ],
    ),
];

/// A method of the API.
#[derive(Debug)]
pub(super) struct GatewayMethod {
    /// Path of the method in gRPC.
    pub(super) path: PathAndQuery,
    pub(super) input: MessageDescriptor,
    pub(super) output: MessageDescriptor,
    /// Whether the method has a stream of requests.
    pub(super) has_request_stream: bool,
    /// Whether the method has a stream of answers.
    has_answer_stream: bool,
}

impl GatewayMethod {
    pub(super) fn is_stream(&self) -> bool {
        self.has_request_stream || self.has_answer_stream
    }
}

static METHODS: LazyLock<BTreeMap<&'static str, GatewayMethod>> = LazyLock::new(|| {
    let pool = DescriptorPool::decode(node_proto::DESCRIPTORS).expect("it was built with this");
    let mut methods = BTreeMap::new();
    for (service, paths) in PATHS {
        let declared = pool.get_service_by_name(service).expect("every service is declared");
        for (path, name) in *paths {
            let mut all = declared.methods();
            let method = all.find(|method| method.name() == *name).expect("so is every method");
            let grpc = format!("/{service}/{name}");
            let method = GatewayMethod {
                path: grpc.parse().expect("names make a path"),
                input: method.input(),
                output: method.output(),
                has_request_stream: method.is_client_streaming(),
                has_answer_stream: method.is_server_streaming(),
            };
            methods.insert(*path, method);
        }
    }
    methods
});

/// Returns the method of an HTTP path.
pub(super) fn find(path: &str) -> Option<&'static GatewayMethod> {
    let rest = PREFIXES.iter().find_map(|prefix| path.strip_prefix(prefix))?;
    METHODS.get(rest)
}

/// Whether the path's request body is a stream of JSON values, each served as it arrives.
pub(crate) fn takes_values(path: &str) -> bool {
    find(path).is_some_and(|method| method.has_request_stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_belongs_to_a_declared_method() {
        let all: usize = PATHS.iter().map(|(_, paths)| paths.len()).sum();
        assert_eq!(METHODS.len(), all, "no path twice");
        assert_eq!(find("/v3/kv/range").unwrap().path, "/etcdserverpb.KV/Range");
        assert_eq!(find("/v3beta/lock/lock").unwrap().path, "/v3lockpb.Lock/Lock");
        for path in ["/v3/kv/range/", "/v3/KV/range", "/v3alpha/kv/range", "/v3/", "/kv/range"] {
            assert!(find(path).is_none(), "{path}");
        }
        let streams: Vec<_> = METHODS
            .iter()
            .filter(|(_, method)| method.is_stream())
            .map(|(path, _)| *path)
            .collect();
        let expected = ["election/observe", "lease/keepalive", "maintenance/snapshot", "watch"];
        assert_eq!(streams, expected);
        assert!(takes_values("/v3/watch") && !takes_values("/v3/maintenance/snapshot"));
    }

    /// The methods without a path are exactly those without a path in etcd.
    #[test]
    fn every_method_has_a_path_except_those_without_one_in_etcd() {
        let pool = DescriptorPool::decode(node_proto::DESCRIPTORS).unwrap();
        let mut without = Vec::new();
        for service in pool.services() {
            for method in service.methods() {
                let grpc = format!("/{}/{}", service.full_name(), method.name());
                if !METHODS.values().any(|method| method.path == grpc.as_str()) {
                    without.push(grpc);
                }
            }
        }
        assert_eq!(without, ["/etcdserverpb.KV/RangeStream"]);
    }
}
