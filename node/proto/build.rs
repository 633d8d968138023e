//! Compiles the .proto files with a pure-Rust compiler, so that nobody has to install `protoc`.

use std::path::PathBuf;

use prost::Message as _;

/// Messages that contain a password, a password hash or a token. Their `Debug` is implemented in
/// `secret.rs`, which omits the secret.
const SECRET: [&str; 6] = [
    ".authpb.User",
    ".etcdserverpb.AuthUserAddRequest",
    ".etcdserverpb.AuthUserChangePasswordRequest",
    ".etcdserverpb.AuthenticateRequest",
    ".etcdserverpb.AuthenticateResponse",
    ".musterpb.UserPassword",
];

/// Proto file with the messages that are not part of the client API.
const INTERNAL_PROTO: &str = "command.proto";

type BoxError = Box<dyn std::error::Error>;

fn main() -> Result<(), BoxError> {
    println!("cargo:rerun-if-changed=proto");
    let files = ["rpc.proto", "lease.proto", "lock.proto", "election.proto", "command.proto"];
    let descriptors = protox::compile(files, ["proto/etcd", "proto/muster"])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    // The JSON gateway reads `descriptors.bin`. Tests check field numbers by means of it.
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    // gRPC reflection serves `api.bin`. It lacks the messages that only members exchange.
    let mut told = descriptors.clone();
    told.file.retain(|file| !file.name().starts_with(INTERNAL_PROTO));
    std::fs::write(out.join("api.bin"), told.encode_to_vec())?;
    tonic_prost_build::configure()
        .bytes(".")
        .skip_debug(SECRET)
        .generate_default_stubs(true)
        .compile_fds(descriptors)?;
    Ok(())
}
