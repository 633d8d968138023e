//! Conversion between messages and JSON, by the JSON mapping that protobuf defines:
//!
//! - Fields are named as in the `.proto` file, or in camel case.
//! - 64-bit numbers are strings.
//! - Bytes are base64.
//! - Zero values are left out when written.
//! - Unknown fields are ignored when read.

use bytes::Bytes;
use prost::Message as _;
use prost_reflect::{DeserializeOptions, DynamicMessage, MessageDescriptor, SerializeOptions};
use tonic::Status;

use crate::rpc;

/// Converts a JSON object to an encoded message. No input means an empty message.
pub(super) fn read(kind: &MessageDescriptor, json: &[u8]) -> Result<Bytes, Status> {
    if json.is_empty() {
        return Ok(Bytes::new());
    }
    if let Some(number) = super::inexact_numbers::find_inexact_number(json) {
        let text = "can't be taken exactly: write it without fraction and exponent, within 64 bits";
        return Err(Status::invalid_argument(format!("the number {number} {text}")));
    }
    let mut json = serde_json::Deserializer::from_slice(json);
    let options = DeserializeOptions::new().deny_unknown_fields(false);
    let read = DynamicMessage::deserialize_with_options(kind.clone(), &mut json, &options);
    let message = read.map_err(|error| {
        Status::invalid_argument(format!("the body is no {} as JSON: {error}", kind.name()))
    })?;
    Ok(message.encode_to_vec().into())
}

/// Converts an encoded message to a JSON object.
pub(super) fn write(kind: &MessageDescriptor, message: Bytes) -> Result<Vec<u8>, Status> {
    let mut json = Vec::with_capacity(message.len() * 2);
    append(kind, message, &mut json)?;
    Ok(json)
}

/// Appends the JSON of `message` to `json`.
pub(super) fn append(
    kind: &MessageDescriptor,
    message: Bytes,
    json: &mut Vec<u8>,
) -> Result<(), Status> {
    let unreadable = |error: String| {
        tracing::error!(
            error,
            message.kind = kind.full_name(),
            "an answer can't be written as JSON"
        );
        Status::from(rpc::Error::StoreFailed)
    };
    let message = DynamicMessage::decode(kind.clone(), message)
        .map_err(|error| unreadable(error.to_string()))?;
    let options = SerializeOptions::new().use_proto_field_name(true);
    let mut to = serde_json::Serializer::new(json);
    message.serialize_with_options(&mut to, &options).map_err(|error| unreadable(error.to_string()))
}
