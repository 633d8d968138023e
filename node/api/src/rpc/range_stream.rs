//! `RangeStream`: a range in parts, so that neither side has to hold all of it.
//!
//! All parts are of one revision. If the request names none, this is the newest revision at the
//! start. Each part has keys. The last part also has the fields for the whole answer: `header`,
//! `count` and `more`.
//!
//! A slow client costs almost no memory: each part is read from the store when the client wants it.
//! The read is refused if its revision was compacted meanwhile, or if the caller has lost the
//! permission.
//!
//! etcd also streams a range with a sort target other than the key and no sort order, which means
//! ascending order by that target. Such an answer is gathered and sorted as a whole, and then sent
//! in parts.

use std::mem;
use std::sync::Arc;
use std::time::Instant;

use futures_util::stream;
use node_proto::etcdserverpb::range_request::{SortOrder, SortTarget};
use node_proto::etcdserverpb::{RangeRequest, RangeResponse, RangeStreamResponse};
use node_state::auth::RequestedAccess;
use node_state::mvcc::{RangeRead, RangeStep, ReadError, View};
use prost::Message as _;
use tonic::codegen::BoxStream;
use tonic::{Code, Request, Response, Status};

use super::context::{ApiContext, CallContext};
use super::error::Error;
use super::metrics::Method;
use super::required_access::CheckedRequest as _;

/// A part of a range is full at the maximum request size divided by this number. Even if one more
/// read step follows, the part stays below the 4 MiB that clients accept by default.
const PART_DIVISOR: usize = 2;

/// Checks the request, and returns the range as a stream of parts.
pub(super) async fn answer(
    context: Arc<ApiContext>,
    request: Request<RangeRequest>,
) -> Result<Response<BoxStream<RangeStreamResponse>>, Status> {
    let began = context.metrics.calls(Method::RangeStream).begin();
    context.count_client(request.metadata(), true);
    let mut call = CallContext::new(&request);
    let begun = begin(&context, &request, &mut call).await;
    let mut request = request.into_inner();
    // The store is read in ascending order of the keys anyway. Without a sort order in the request,
    // the answer isn't gathered as a whole to be sorted.
    request.set_sort_order(SortOrder::None);
    let code = Code::Cancelled;
    let (gather, sorted) = (None, None);
    let mut parts = RangeParts {
        context,
        call,
        request,
        range_read: gather,
        sorted,
        has_sent_part: false,
        began,
        code,
    };
    if let Err(status) = begun {
        parts.code = status.code();
        return Err(status);
    }
    let answers = stream::unfold(Some(parts), async |parts| {
        let mut parts = parts?;
        match parts.next().await {
            Ok((part, is_last)) => {
                let part = RangeStreamResponse { range_response: Some(part) };
                if is_last {
                    parts.code = Code::Ok;
                }
                Some((Ok(part), (!is_last).then_some(parts)))
            }
            Err(error) => {
                parts.code = error.code();
                Some((Err(error.into()), None))
            }
        }
    });
    Ok(Response::new(Box::pin(answers)))
}

async fn begin(
    context: &ApiContext,
    request: &Request<RangeRequest>,
    call: &mut CallContext,
) -> Result<(), Status> {
    let asked = request.get_ref();
    asked.check(&context.limits)?;
    check(asked)?;
    context.begin::<_, Error>(request.metadata(), asked, call).await?;
    Ok(context.barrier(asked.serializable).await?)
}

/// Refuses requests that explicitly ask for another order than key order, and requests with filters
/// by revision. The parts of a range are sent in key order, while the range is read. A request of
/// either kind would need the whole range first.
fn check(request: &RangeRequest) -> Result<(), Error> {
    let by_key =
        request.sort_order() == SortOrder::Ascend && request.sort_target() == SortTarget::Key;
    if request.sort_order() != SortOrder::None && !by_key {
        return Err(Error::StreamSorted);
    }
    let filters = [
        request.min_mod_revision,
        request.max_mod_revision,
        request.min_create_revision,
        request.max_create_revision,
    ];
    if filters.iter().any(|filter| *filter != 0) { Err(Error::StreamFiltered) } else { Ok(()) }
}

struct RangeParts {
    context: Arc<ApiContext>,
    call: CallContext,
    request: RangeRequest,
    /// State of the read; `None` before it begins.
    range_read: Option<RangeRead>,
    /// Unsent rest of a range that was sorted as a whole.
    sorted: Option<RangeResponse>,
    /// Whether a part of the range was sent. The other parts must then be of the same revision;
    /// otherwise the read is refused.
    has_sent_part: bool,
    began: Instant,
    code: Code,
}

impl RangeParts {
    /// Returns the next part of the range, and whether it is the last.
    async fn next(&mut self) -> Result<(RangeResponse, bool), Error> {
        loop {
            if self.context.stop.is_cancelled() {
                return Err(Error::Stopped);
            }
            self.context.ensure_not_corrupt()?;
            let view = self.context.store.view();
            self.context.access.authorise_on(
                self.call.credentials(),
                &view,
                RequestedAccess::Range(&self.request),
            )?;
            let full = self.full_part_bytes();
            if let Some(sorted) = &mut self.sorted {
                return Ok(split_off_part(sorted, full));
            }
            match self.read_part(&view).await {
                Ok(Ok(part)) => {
                    self.has_sent_part = true;
                    self.context.metrics.calls(Method::RangeStream).count_out(1);
                    return Ok(part);
                }
                Ok(Err(ReadError::Superseded)) if !self.has_sent_part => self.range_read = None,
                Ok(Err(error)) => return Err(error.into()),
                Err(error) => return Err(error),
            }
            drop(view);
            tokio::task::yield_now().await;
        }
    }

    /// Returns the size in bytes at which a part of the range is full.
    fn full_part_bytes(&self) -> usize {
        self.context.limits.max_request_bytes / PART_DIVISOR
    }

    /// Reads from `view` until a part of the range is full. If the answer must be sorted, reads the
    /// whole range.
    async fn read_part(
        &mut self,
        view: &View,
    ) -> Result<Result<(RangeResponse, bool), ReadError>, Error> {
        let store = &self.context.store;
        let full = self.full_part_bytes();
        let is_by_key = self.request.sort_target() == SortTarget::Key;
        let gather = match &mut self.range_read {
            Some(gather) => match gather.check_not_compacted(view.compact_revision()) {
                Ok(()) => gather,
                Err(error) => return Ok(Err(error)),
            },
            none => match store.begin_range(view, &self.request) {
                Ok(gather) => none.insert(gather),
                Err(error) => return Ok(Err(error)),
            },
        };
        loop {
            let step = store.step_range(view, gather);
            self.call.charge(gather.bytes())?;
            match step {
                Ok(RangeStep::Done(mut part)) => {
                    let revision = part.header.map_or(0, |header| header.revision);
                    part.header = Some(self.context.header(revision));
                    if is_by_key {
                        return Ok(Ok((part, true)));
                    }
                    return Ok(Ok(split_off_part(self.sorted.insert(part), full)));
                }
                Ok(RangeStep::Unfinished) if is_by_key && gather.bytes() >= full => {
                    let kvs = gather.take();
                    if !kvs.is_empty() {
                        return Ok(Ok((RangeResponse { kvs, ..RangeResponse::default() }, false)));
                    }
                }
                Ok(RangeStep::Unfinished) => {}
                Err(error) => return Ok(Err(error)),
            }
            tokio::task::yield_now().await;
        }
    }
}

/// Takes the next part, of about `full` bytes, from a sorted answer. Also returns whether that part
/// is the last.
fn split_off_part(sorted: &mut RangeResponse, full: usize) -> (RangeResponse, bool) {
    let mut bytes = 0;
    let fits = sorted.kvs.iter().take_while(|kv| {
        bytes += kv.encoded_len();
        bytes <= full
    });
    let count = fits.count().max(1);
    if count >= sorted.kvs.len() {
        return (mem::take(sorted), true);
    }
    let rest = sorted.kvs.split_off(count);
    let kvs = mem::replace(&mut sorted.kvs, rest);
    (RangeResponse { kvs, ..RangeResponse::default() }, false)
}

impl Drop for RangeParts {
    fn drop(&mut self) {
        self.context.metrics.calls(Method::RangeStream).end(self.code, self.began);
    }
}
