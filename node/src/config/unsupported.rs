//! Flags of etcd that this node can't support. A flag is refused if it would have an effect in
//! etcd. Otherwise it is ignored with a remark.

use super::{
    Config, RawFlags, Remark,
    flags::{FLAGS, FlagEffect},
    tls,
};

/// Treatment of an unsupported flag that the user gave.
enum Treatment {
    /// The flag has no effect in etcd either. The text gives the reason.
    Ignored(&'static str),
    Refused,
}

/// Checks all unsupported flags that were given. Returns remarks about those that are ignored.
///
/// # Errors
/// Fails for the first refused flag. The text says what to use instead.
pub(super) fn check(flags: &RawFlags, config: &Config) -> Result<Vec<Remark>, String> {
    let mut remarks = Vec::new();
    for flag in FLAGS {
        let FlagEffect::Unsupported(instead) = flag.effect else { continue };
        match treatment_of(flag.name, flags, config) {
            None => {}
            Some(Treatment::Ignored(because)) => {
                remarks.push(Remark::Ignored { flag: flag.name, because });
            }
            Some(Treatment::Refused) => {
                return Err(format!("--{} is not supported: {instead}", flag.name));
            }
        }
    }
    Ok(remarks)
}

fn treatment_of(flag: &str, flags: &RawFlags, config: &Config) -> Option<Treatment> {
    use Treatment::{Ignored, Refused};
    if !tls::is_given(flags, flag) {
        return None;
    }
    let value = flags.value(flag);
    let has_certificate = |flag: &str| !flags.value(flag).is_empty();
    let ruling = match flag {
        "proxy" if value == "off" => return None,
        "auto-tls" if has_certificate("cert-file") => Ignored("a certificate is given"),
        "auto-tls" if !tls::is_used_by_clients(config) => Ignored("no client URL is https"),
        "peer-auto-tls" if has_certificate("peer-cert-file") => Ignored("a certificate is given"),
        "peer-auto-tls" | "peer-client-cert-file" | "peer-client-key-file"
            if !tls::is_used_by_peers(config) =>
        {
            Ignored("no peer URL is https")
        }
        "peer-client-cert-file" if value == flags.value("peer-cert-file") => {
            Ignored("it is the certificate of --peer-cert-file")
        }
        "peer-client-key-file" if value == flags.value("peer-key-file") => {
            Ignored("it is the key of --peer-key-file")
        }
        _ => Refused,
    };
    Some(ruling)
}
