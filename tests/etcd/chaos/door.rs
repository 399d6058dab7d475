//! gRPC calls as an etcd user, to a member or to Keyward.
//!
//! Owns: connecting and logging in. Must not know which of the two answers.

use std::net::SocketAddr;
use std::time::Duration;

use keyward::pb::etcdserverpb::AuthenticateRequest;
use keyward::pb::etcdserverpb::auth_client::AuthClient;
use keyward::pb::etcdserverpb::kv_client::KvClient;
use keyward::pb::etcdserverpb::lease_client::LeaseClient;
use keyward::pb::etcdserverpb::watch_client::WatchClient;
use tokio::time::timeout;
use tonic::metadata::AsciiMetadataValue;
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use crate::harness::{evidence, password, wait};

/// Past every timeout of etcd itself (7 s for a write without a quorum).
const LIMIT: Duration = Duration::from_secs(12);
const LOGIN: Duration = Duration::from_secs(60);

/// Puts a user's token into each call.
#[derive(Clone)]
pub(crate) struct Token(AsciiMetadataValue);

impl Interceptor for Token {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert("token", self.0.clone());
        Ok(request)
    }
}

type As = InterceptedService<Channel, Token>;

/// A connection on which a user is logged in.
#[derive(Clone)]
pub(crate) struct Door {
    channel: Channel,
    token: Token,
}

impl Door {
    /// Connects and logs in, once.
    pub(crate) async fn login(address: SocketAddr, user: &str) -> Result<Door, Status> {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address makes a URL");
        let channel = endpoint.connect_timeout(LIMIT).connect_lazy();
        let request = AuthenticateRequest { name: user.into(), password: password(user) };
        let answer = within(AuthClient::new(channel.clone()).authenticate(request)).await?.into_inner();
        evidence::secret("a token", &answer.token);
        let token = Token(answer.token.parse().map_err(|_| Status::internal("a token that is no header"))?);
        Ok(Door { channel, token })
    }

    /// The same until it works.
    pub(crate) async fn open(address: SocketAddr, user: &str) -> Door {
        wait::until(LOGIN, "a login", async || Door::login(address, user).await.ok()).await
    }

    pub(crate) fn kv(&self) -> KvClient<As> {
        KvClient::with_interceptor(self.channel.clone(), self.token.clone())
            .max_decoding_message_size(usize::MAX)
    }

    pub(crate) fn lease(&self) -> LeaseClient<As> {
        LeaseClient::with_interceptor(self.channel.clone(), self.token.clone())
    }

    pub(crate) fn auth(&self) -> AuthClient<As> {
        AuthClient::with_interceptor(self.channel.clone(), self.token.clone())
    }

    pub(crate) fn watch(&self) -> WatchClient<As> {
        WatchClient::with_interceptor(self.channel.clone(), self.token.clone())
            .max_decoding_message_size(usize::MAX)
    }
}

/// A call's answer, or that there was none in time: then nobody knows whether it was done.
pub(crate) async fn within<T>(call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    timeout(LIMIT, call).await.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer in time")))
}
