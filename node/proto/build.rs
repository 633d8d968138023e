//! Compiles the .proto texts with a pure-Rust compiler, so that nobody has to install `protoc`.

use std::path::PathBuf;

use prost::Message as _;

/// Messages with a password, a hash of one or a token: `secret.rs` has their `Debug`, which shows none.
const SECRET: [&str; 6] = [
    ".authpb.User",
    ".etcdserverpb.AuthUserAddRequest",
    ".etcdserverpb.AuthUserChangePasswordRequest",
    ".etcdserverpb.AuthenticateRequest",
    ".etcdserverpb.AuthenticateResponse",
    ".musterpb.UserPassword",
];

/// What is no client's business.
const OUR_OWN: &str = "command.proto";

type BoxError = Box<dyn std::error::Error>;

fn main() -> Result<(), BoxError> {
    println!("cargo:rerun-if-changed=proto");
    let files = ["rpc.proto", "lease.proto", "lock.proto", "election.proto", "command.proto"];
    let descriptors = protox::compile(files, ["proto/etcd", "proto/muster"])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    // For the JSON gateway and for tests of the numbers.
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    // For gRPC reflection: without what is said between members only.
    let mut told = descriptors.clone();
    told.file.retain(|file| !file.name().starts_with(OUR_OWN));
    std::fs::write(out.join("api.bin"), told.encode_to_vec())?;
    tonic_prost_build::configure()
        .bytes(".")
        .skip_debug(SECRET)
        .generate_default_stubs(true)
        .compile_fds(descriptors)?;
    Ok(())
}
