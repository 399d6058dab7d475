//! Users of a real etcd, and auth on.
//!
//! Invariant: auth is on only after every user was added. The password of every user is [`PASSWORD`].

use std::net::SocketAddr;

use clap::Args;
use keyward::pb::etcdserverpb::{
    AuthEnableRequest, AuthEnableResponse, AuthRoleAddRequest, AuthRoleAddResponse, AuthUserAddRequest,
    AuthUserAddResponse, AuthUserGrantRoleRequest, AuthUserGrantRoleResponse,
};
use keyward::tasks::Tasks;

use crate::Failure;
use crate::canned::PASSWORD;
use crate::grpc_client::GrpcClient;

/// etcd's name of the first user, and of the role with the right to everything.
const ROOT: &str = "root";

/// The setup of one cluster.
#[derive(Args)]
pub(crate) struct EnableAuth {
    /// A member.
    #[arg(long)]
    address: SocketAddr,
    /// The users beside root, all with root's role.
    #[arg(long, value_delimiter = ',')]
    users: Vec<String>,
}

impl EnableAuth {
    /// Adds the users, then turns auth on.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let tasks = Tasks::default();
        let member = GrpcClient::connect(self.address, None, &tasks).await?;
        let role = AuthRoleAddRequest { name: ROOT.to_owned() };
        let _: AuthRoleAddResponse = member.call("/etcdserverpb.Auth/RoleAdd", &role).await?;
        for user in self.users.iter().map(String::as_str).chain([ROOT]) {
            let added = AuthUserAddRequest {
                name: user.to_owned(),
                password: PASSWORD.to_owned(),
                ..AuthUserAddRequest::default()
            };
            let _: AuthUserAddResponse = member.call("/etcdserverpb.Auth/UserAdd", &added).await?;
            let granted = AuthUserGrantRoleRequest { user: user.to_owned(), role: ROOT.to_owned() };
            let _: AuthUserGrantRoleResponse =
                member.call("/etcdserverpb.Auth/UserGrantRole", &granted).await?;
        }
        let _: AuthEnableResponse =
            member.call("/etcdserverpb.Auth/AuthEnable", &AuthEnableRequest {}).await?;
        Ok(())
    }
}
