//! The addresses on a load's command line: of the proxy, and of the member behind the proxy.
//!
//! Must not know: methods, the work of a load.

use std::net::SocketAddr;

use clap::Args;
use keyward::tasks::Tasks;

use crate::Failure;
use crate::grpc_client::GrpcClient;

/// The proxy, or the member itself for the figures without a proxy.
#[derive(Args)]
pub(crate) struct ProxyAddress {
    /// The proxy.
    #[arg(long)]
    pub(crate) address: SocketAddr,
    /// The token of the calls to the proxy.
    #[arg(long)]
    pub(crate) token: Option<String>,
}

/// The proxy and the member behind the proxy, for loads that write at the member directly.
#[derive(Args)]
pub(crate) struct ProxyAndMember {
    #[command(flatten)]
    pub(crate) proxy: ProxyAddress,
    /// The member behind the proxy.
    #[arg(long)]
    member: SocketAddr,
    /// The token of the calls to the member.
    #[arg(long)]
    member_token: Option<String>,
}

impl ProxyAddress {
    /// Opens a connection to the proxy.
    pub(crate) async fn connect(&self, tasks: &Tasks) -> Result<GrpcClient, Failure> {
        GrpcClient::connect(self.address, self.token.as_deref(), tasks).await
    }
}

impl ProxyAndMember {
    /// Opens a connection to the member.
    pub(crate) async fn connect_to_member(&self, tasks: &Tasks) -> Result<GrpcClient, Failure> {
        GrpcClient::connect(self.member, self.member_token.as_deref(), tasks).await
    }
}
