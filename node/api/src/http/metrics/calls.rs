//! Metrics of gRPC calls: their number per method, their results, durations and clients.

use node_state::mvcc::APPLIED_KINDS;
use prometheus_client::encoding::EncodeMetric as _;
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;

use super::{MetricWriter, MetricsCollector, load};
use crate::rpc::Method;

impl MetricsCollector {
    pub(super) fn calls(&self, out: &mut MetricWriter<'_>) -> std::fmt::Result {
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
                // As in etcd, codes with which no call has ended are shown too, as 0. Otherwise
                // `rate()` would miss the first call that ends with such a code.
                let code = code_name(tonic::Code::from_i32(code));
                let [name, service, kind] = labels(*method);
                let labels = [("grpc_code", code), name, service, kind];
                ConstCounter::new(load(handled)).encode(family.encode_family(&labels)?)?;
            }
        }
        let name = "grpc_server_handling_seconds";
        let help = "Time from the start of an RPC to its end, of those that were ever called";
        let mut family = out.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for method in Method::ALL {
            let calls = self.0.metrics.calls(*method);
            if load(&calls.started) > 0 {
                calls.took.encode(family.encode_family(&labels(*method))?)?;
            }
        }
        self.messages(out)?;
        self.requests(out)?;
        self.clients(out)
    }

    fn messages(&self, out: &mut MetricWriter<'_>) -> std::fmt::Result {
        let messages = |method: Method| self.0.metrics.calls(method).messages(method);
        let name = "grpc_server_msg_received";
        let help = "Total number of RPC stream messages received on the server";
        let mut family = out.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for method in Method::ALL {
            let received = ConstCounter::new(messages(*method).0);
            received.encode(family.encode_family(&labels(*method))?)?;
        }
        let name = "grpc_server_msg_sent";
        let help = "Total number of gRPC stream messages sent by the server";
        let mut family = out.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for method in Method::ALL {
            let sent = ConstCounter::new(messages(*method).1);
            sent.encode(family.encode_family(&labels(*method))?)?;
        }
        Ok(())
    }

    /// Writes the durations of unary calls, applied entries and ranges, under etcd's names.
    fn requests(&self, out: &mut MetricWriter<'_>) -> std::fmt::Result {
        let name = "etcd_server_request_duration_seconds";
        let help = "Response latency distribution in seconds for each type";
        let mut family = out.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for method in Method::ALL {
            let (_, name, kind) = method.labels();
            let name = if *method == Method::Compact { "Compaction" } else { name };
            let outcomes = &self.0.metrics.calls(*method).outcomes;
            for (success, durations) in OUTCOMES.into_iter().zip(outcomes) {
                if kind == "unary" && !durations.is_empty() {
                    let labels = [("success", success), ("type", name)];
                    durations.encode(family.encode_family(&labels)?)?;
                }
            }
        }
        let name = "etcd_server_apply_duration_seconds";
        let help = "The time that applying an entry took, by what it does";
        let mut family = out.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for (op, outcomes) in APPLIED_KINDS.into_iter().zip(&self.0.store.operations().applied) {
            for (success, durations) in OUTCOMES.into_iter().zip(outcomes) {
                if !durations.is_empty() {
                    let labels = [("op", op), ("success", success), ("version", "v3")];
                    durations.encode(family.encode_family(&labels)?)?;
                }
            }
        }
        let name = "etcd_server_range_duration_seconds";
        let help = "The time that reading a range took, without the wait for its revision";
        let mut family = out.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for (success, durations) in OUTCOMES.into_iter().zip(&self.0.metrics.ranges) {
            if !durations.is_empty() {
                durations.encode(family.encode_family(&[("success", success)])?)?;
            }
        }
        Ok(())
    }

    fn clients(&self, out: &mut MetricWriter<'_>) -> std::fmt::Result {
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

/// Values of the label `success`, in the order of the counters.
const OUTCOMES: [&str; 2] = ["false", "true"];

fn labels(method: Method) -> [(&'static str, &'static str); 3] {
    let (service, method, kind) = method.labels();
    [("grpc_method", method), ("grpc_service", service), ("grpc_type", kind)]
}

/// Returns the name that Go's gRPC has for a code.
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
