//! Calls: how many of each method, how they ended, how long they took, and of which clients.

use prometheus_client::encoding::EncodeMetric as _;
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;

use super::{Out, Scrape, histogram, load};
use crate::rpc::Method;

impl Scrape {
    pub(super) fn calls(&self, out: &mut Out<'_>) -> std::fmt::Result {
        let name = "grpc_server_started";
        let help = "Total number of RPCs started on the server";
        let mut family = out.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for method in Method::ALL {
            let started = load(&self.0.metrics.calls(*method).started);
            let counter = ConstCounter::new(started);
            counter.encode(family.encode_family(&labels(*method))?)?;
        }
        let name = "grpc_server_handled";
        let help = "Total number of RPCs completed on the server, regardless of success or failure";
        let mut family = out.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for method in Method::ALL {
            for (code, handled) in (0..).zip(&self.0.metrics.calls(*method).handled) {
                let handled = load(handled);
                if handled > 0 {
                    let code = code_name(tonic::Code::from_i32(code));
                    let mut all = labels(*method).to_vec();
                    all.insert(0, ("grpc_code", code));
                    ConstCounter::new(handled).encode(family.encode_family(&all)?)?;
                }
            }
        }
        let name = "grpc_server_handling_seconds";
        let help = "Time from the start of an RPC to its end, of those that were ever called";
        let mut family = out.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for method in Method::ALL {
            let calls = self.0.metrics.calls(*method);
            if load(&calls.started) > 0 {
                histogram(&mut family.encode_family(&labels(*method))?, &calls.took)?;
            }
        }
        self.clients(out)
    }

    fn clients(&self, out: &mut Out<'_>) -> std::fmt::Result {
        let name = "etcd_server_client_requests";
        let help = "The total number of client requests per client version";
        let mut family = out.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (kind, version, count) in self.0.metrics.clients.all() {
            let labels = [("client_api_version", version), ("type", kind)];
            ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
        }
        let bytes = &self.0.telemetry.client_bytes;
        let help = "Bytes received from gRPC clients, frames included";
        out.counter("etcd_network_client_grpc_received_bytes", help, load(&bytes.received))?;
        let help = "Bytes sent to gRPC clients, frames included";
        out.counter("etcd_network_client_grpc_sent_bytes", help, load(&bytes.sent))
    }
}

fn labels(method: Method) -> [(&'static str, &'static str); 3] {
    let (service, method, kind) = method.labels();
    [("grpc_method", method), ("grpc_service", service), ("grpc_type", kind)]
}

/// The names that Go's gRPC gives to codes.
fn code_name(code: tonic::Code) -> &'static str {
    use tonic::Code;
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "Canceled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    }
}
