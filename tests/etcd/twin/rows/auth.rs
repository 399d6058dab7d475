//! Auth: users, roles, logins, and last the switch itself.

use keyward::pb::{
    authpb::{Permission, UserAddOptions, permission},
    etcdserverpb::{
        AuthDisableRequest, AuthEnableRequest, AuthRoleAddRequest, AuthRoleDeleteRequest, AuthRoleGetRequest,
        AuthRoleGrantPermissionRequest, AuthRoleListRequest, AuthRoleRevokePermissionRequest,
        AuthStatusRequest, AuthUserAddRequest, AuthUserChangePasswordRequest, AuthUserDeleteRequest,
        AuthUserGetRequest, AuthUserGrantRoleRequest, AuthUserListRequest, AuthUserRevokeRoleRequest,
        AuthenticateRequest, RangeRequest,
    },
};

use super::{Row, one, row};
use crate::{harness::password, twin::side::Who};

const STATUS: &str = "/etcdserverpb.Auth/AuthStatus";
const ENABLE: &str = "/etcdserverpb.Auth/AuthEnable";
const DISABLE: &str = "/etcdserverpb.Auth/AuthDisable";
const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";
const USER_ADD: &str = "/etcdserverpb.Auth/UserAdd";
const USER_GET: &str = "/etcdserverpb.Auth/UserGet";
const USER_DELETE: &str = "/etcdserverpb.Auth/UserDelete";
const PASSWORD: &str = "/etcdserverpb.Auth/UserChangePassword";
const GRANT_ROLE: &str = "/etcdserverpb.Auth/UserGrantRole";
const REVOKE_ROLE: &str = "/etcdserverpb.Auth/UserRevokeRole";
const ROLE_ADD: &str = "/etcdserverpb.Auth/RoleAdd";
const ROLE_GET: &str = "/etcdserverpb.Auth/RoleGet";
const ROLE_DELETE: &str = "/etcdserverpb.Auth/RoleDelete";
const GRANT: &str = "/etcdserverpb.Auth/RoleGrantPermission";
const REVOKE: &str = "/etcdserverpb.Auth/RoleRevokePermission";
const RANGE: &str = "/etcdserverpb.KV/Range";

pub(super) fn users() -> Vec<Row> {
    vec![
        row(STATUS, "", |_, _| one(&AuthStatusRequest {})),
        row(ENABLE, "while it is on", |_, _| one(&AuthEnableRequest {})),
        row(USER_ADD, "a new one", |_, _| one(&user("carol", "carol-secret"))),
        row(USER_ADD, "one that is there", |_, _| one(&user("alice", "another-secret"))),
        row(USER_ADD, "without a name", |_, _| one(&user("", "secret"))),
        row(USER_ADD, "for certificates only", |_, _| {
            let options = Some(UserAddOptions { no_password: true });
            one(&AuthUserAddRequest { options, ..user("dave", "") })
        }),
        // Kept, from here on, by whoever keeps good logins.
        row(AUTHENTICATE, "a new user", |_, _| one(&login("carol", "carol-secret"))).only(&[Who::None]),
        row(USER_GET, "alice", |_, _| one(&AuthUserGetRequest { name: "alice".into() })),
        row(USER_GET, "oneself", |_, who| one(&AuthUserGetRequest { name: who.name().into() })),
        row("/etcdserverpb.Auth/UserList", "", |_, _| one(&AuthUserListRequest {})),
        row(PASSWORD, "carol's", |_, _| {
            let (name, password) = ("carol".into(), "new-secret".into());
            one(&AuthUserChangePasswordRequest { name, password, ..AuthUserChangePasswordRequest::default() })
        }),
        row(AUTHENTICATE, "right after its change", |_, _| one(&login("carol", "carol-secret")))
            .only(&[Who::None]),
        row(PASSWORD, "nobody's", |_, _| {
            let (name, password) = ("nobody".into(), "new-secret".into());
            one(&AuthUserChangePasswordRequest { name, password, ..AuthUserChangePasswordRequest::default() })
        }),
        row(ROLE_ADD, "a new one", |_, _| one(&AuthRoleAddRequest { name: "rc".into() })),
        row(ROLE_ADD, "one that is there", |_, _| one(&AuthRoleAddRequest { name: "ra".into() })),
        row(GRANT, "to read a prefix", |_, _| one(&grant("rc"))),
        row(GRANT, "to an unknown role", |_, _| one(&grant("none"))),
        row(ROLE_GET, "alice's", |_, _| one(&AuthRoleGetRequest { role: "ra".into() })),
        row(ROLE_GET, "the new one", |_, _| one(&AuthRoleGetRequest { role: "rc".into() })),
        row(ROLE_GET, "an unknown one", |_, _| one(&AuthRoleGetRequest { role: "none".into() })),
        row("/etcdserverpb.Auth/RoleList", "", |_, _| one(&AuthRoleListRequest {})),
        row(GRANT_ROLE, "the new one", |_, _| {
            one(&AuthUserGrantRoleRequest { user: "carol".into(), role: "rc".into() })
        }),
        row(GRANT_ROLE, "an unknown one", |_, _| {
            one(&AuthUserGrantRoleRequest { user: "carol".into(), role: "none".into() })
        }),
        row(REVOKE_ROLE, "the new one", |_, _| {
            one(&AuthUserRevokeRoleRequest { name: "carol".into(), role: "rc".into() })
        }),
        row(REVOKE_ROLE, "one that was not granted", |_, _| {
            one(&AuthUserRevokeRoleRequest { name: "carol".into(), role: "ra".into() })
        }),
        row(REVOKE, "what was granted", |_, _| one(&revoke("/c/"))),
        row(REVOKE, "what was not granted", |_, _| one(&revoke("/none/"))),
        row(ROLE_DELETE, "the new one", |_, _| one(&AuthRoleDeleteRequest { role: "rc".into() })),
        row(ROLE_DELETE, "an unknown one", |_, _| one(&AuthRoleDeleteRequest { role: "none".into() })),
        row(USER_DELETE, "an unknown one", |_, _| one(&AuthUserDeleteRequest { name: "nobody".into() })),
        row(USER_DELETE, "root", |_, _| one(&AuthUserDeleteRequest { name: "root".into() })),
    ]
}

pub(super) fn logins() -> Vec<Row> {
    vec![
        row(AUTHENTICATE, "the right password", |_, _| one(&login("alice", &password("alice")))),
        row(AUTHENTICATE, "a wrong password", |_, _| one(&login("alice", "wrong"))),
        row(AUTHENTICATE, "no password", |_, _| one(&login("alice", ""))),
        row(AUTHENTICATE, "an unknown user", |_, _| one(&login("nobody", "wrong"))),
        row(AUTHENTICATE, "no user", |_, _| one(&login("", ""))),
        row(AUTHENTICATE, "a user without a password", |_, _| one(&login("dave", "wrong"))),
        row(AUTHENTICATE, "a changed password", |_, _| one(&login("carol", "new-secret"))).only(&[Who::None]),
        row(AUTHENTICATE, "the password before it", |_, _| one(&login("carol", "carol-secret")))
            .only(&[Who::None]),
        row(USER_DELETE, "the new one", |_, _| one(&AuthUserDeleteRequest { name: "carol".into() })),
        row(AUTHENTICATE, "a user that is gone", |_, _| one(&login("carol", "new-secret")))
            .only(&[Who::None]),
    ]
}

/// Auth goes off for a while. What the callers know of each other's tokens ends here.
pub(super) fn off_and_on() -> Vec<Row> {
    vec![
        row(DISABLE, "", |_, _| one(&AuthDisableRequest {})),
        row(STATUS, "while it is off", |_, _| one(&AuthStatusRequest {})).only(&[Who::None]),
        row(RANGE, "while auth is off", |_, _| one(&read())).only(&[Who::None]),
        row(AUTHENTICATE, "while auth is off", |_, _| one(&login("alice", &password("alice"))))
            .only(&[Who::None]),
        row(ENABLE, "while it is off", |_, _| one(&AuthEnableRequest {})).only(&[Who::None]),
        row(RANGE, "after auth was off", |_, _| one(&read())).only(&[Who::None, Who::Garbage, Who::Alice]),
        row(AUTHENTICATE, "after auth was off", |_, _| one(&login("alice", &password("alice"))))
            .only(&[Who::None]),
    ]
}

fn user(name: &str, password: &str) -> AuthUserAddRequest {
    AuthUserAddRequest { name: name.into(), password: password.into(), ..AuthUserAddRequest::default() }
}

fn login(name: &str, password: &str) -> AuthenticateRequest {
    AuthenticateRequest { name: name.into(), password: password.into() }
}

fn grant(role: &str) -> AuthRoleGrantPermissionRequest {
    let perm_type = permission::Type::Read.into();
    let perm = Some(Permission { perm_type, key: "/c/".into(), range_end: "/c0".into() });
    AuthRoleGrantPermissionRequest { name: role.into(), perm }
}

fn revoke(key: &str) -> AuthRoleRevokePermissionRequest {
    AuthRoleRevokePermissionRequest { role: "rc".into(), key: key.to_owned().into(), range_end: "/c0".into() }
}

fn read() -> RangeRequest {
    RangeRequest { key: "/a/k".into(), ..RangeRequest::default() }
}
