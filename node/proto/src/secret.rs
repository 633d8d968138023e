//! `Debug` of messages that contain a password, a password hash or a token. The output omits the
//! secret and shows to whom it belongs.

use std::fmt::{Debug, Formatter, Result};

macro_rules! debug_without_secrets {
    ($($message:ty { $($field:ident),* })*) => {
        $(impl Debug for $message {
            fn fmt(&self, f: &mut Formatter<'_>) -> Result {
                f.debug_struct(stringify!($message))
                    $(.field(stringify!($field), &self.$field))*
                    .finish_non_exhaustive()
            }
        })*
    };
}

debug_without_secrets! {
    crate::authpb::User { name, roles, options }
    crate::etcdserverpb::AuthUserAddRequest { name, options }
    crate::etcdserverpb::AuthUserChangePasswordRequest { name }
    crate::etcdserverpb::AuthenticateRequest { name }
    crate::etcdserverpb::AuthenticateResponse { header }
    crate::musterpb::UserPassword { name, no_password }
}

#[cfg(test)]
mod tests {
    use crate::command::{AuthChange, Operation};
    use crate::musterpb::{UserPassword, auth_change::Change};

    #[test]
    fn debug_shows_a_message_without_its_secret() {
        let hash = "canary".into();
        let add = UserPassword { name: "u".to_owned(), hash, no_password: false };
        let change = AuthChange { change: Some(Change::UserAdd(add)) };
        let user = crate::authpb::User { password: "canary".into(), ..Default::default() };
        let (name, password) = (String::new(), "canary".to_owned());
        let said = crate::etcdserverpb::AuthenticateRequest { name, password };
        let token = "canary".to_owned();
        let told = crate::etcdserverpb::AuthenticateResponse { header: None, token };
        let shown = format!("{:?} {user:?} {said:?} {told:?}", Operation::ChangeAuth(change));
        assert!(shown.contains("UserPassword") && !shown.contains("canary"), "{shown}");
    }
}
