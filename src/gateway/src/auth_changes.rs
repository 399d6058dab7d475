//! Consequences of a successful change of users, roles, or auth as a whole.
//!
//! Owns: the notes about the change. Must not know: how the change is made, what other parts make of a note.

use crate::call::Call;
use keyward_cluster::membership::AuthSetting;
use keyward_etcd::identity::UserName;
use keyward_etcd::rpc::body_shape;
use keyward_etcd::rpc::schema::MessageId;

/// Notes a success. Calls of the connection that any voter can serve go to the member that knows the
/// change; verified passwords of a changed user are forgotten (docs/decisions.md#d12); the auth state
/// follows AuthEnable and AuthDisable (docs/decisions.md#d48).
pub fn note(call: &Call<'_>, message: &[u8]) {
    if let Some(member) = call.record.member.get() {
        call.client.pin_home(member);
    }
    let gateway = call.gateway;
    let named = match call.method.body {
        MessageId::AuthEnableRequest => return gateway.upstream.report_auth(AuthSetting::On),
        MessageId::AuthDisableRequest => return gateway.upstream.report_auth(AuthSetting::Off),
        MessageId::AuthUserChangePasswordRequest
        | MessageId::AuthUserDeleteRequest
        | MessageId::AuthUserAddRequest => body_shape::user_name(message),
        _ => None,
    };
    if let Some(name) = named {
        gateway.logins.forget_user(&UserName::from(name));
    }
}
