//! Requests that are proposed to consensus, each with the type of its answer.

use node_proto::command::Operation;
use node_proto::etcdserverpb::alarm_request::AlarmAction;
use node_proto::etcdserverpb::{
    AlarmRequest, AlarmResponse, AlarmType, CompactionRequest, CompactionResponse,
    DeleteRangeRequest, DeleteRangeResponse, LeaseGrantRequest, LeaseGrantResponse,
    LeaseRevokeRequest, LeaseRevokeResponse, PutRequest, PutResponse, TxnRequest, TxnResponse,
};

use node_state::apply::Response;

/// Request that changes the replicated state, and so has to be committed.
pub(crate) trait ReplicatedRequest {
    /// Type of the answer to the request.
    type Answer: prost::Message;

    fn operation(self) -> Operation;

    /// Extracts the answer from the result of apply. Returns `None` if the result belongs to
    /// another kind of request.
    fn answer(response: Response) -> Option<Self::Answer>;
}

macro_rules! proposals {
    ($($name:ident: $request:ty => $answer:ty,)*) => {
        $(impl ReplicatedRequest for $request {
            type Answer = $answer;

            fn operation(self) -> Operation {
                Operation::$name(self)
            }

            fn answer(response: Response) -> Option<$answer> {
                match response {
                    Response::$name(answer) => Some(answer),
                    _ => None,
                }
            }
        })*
    };
}

impl ReplicatedRequest for AlarmRequest {
    type Answer = AlarmResponse;

    fn operation(self) -> Operation {
        let activates = self.action() == AlarmAction::Activate;
        if activates && self.alarm() == AlarmType::Corrupt && self.member_id != 0 {
            return Operation::MarkCorrupt(self.member_id);
        }
        Operation::Alarm(self)
    }

    fn answer(response: Response) -> Option<AlarmResponse> {
        match response {
            Response::Alarm(answer) => Some(answer),
            _ => None,
        }
    }
}

proposals! {
    Put: PutRequest => PutResponse,
    DeleteRange: DeleteRangeRequest => DeleteRangeResponse,
    Txn: TxnRequest => TxnResponse,
    Compact: CompactionRequest => CompactionResponse,
    LeaseGrant: LeaseGrantRequest => LeaseGrantResponse,
    LeaseRevoke: LeaseRevokeRequest => LeaseRevokeResponse,
}
