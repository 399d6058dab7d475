//! A user's calls as a program without a recipe library makes them: one connection, one token, one method at a time.
//!
//! Owns: the login, the token on each call, and few lines around the generated clients. Must not know what a test wants to show, nor
//! whether etcd or Keyward answers.

use std::net::SocketAddr;

use bytes::Bytes;
use keyward::pb::etcdserverpb::auth_client::AuthClient;
use keyward::pb::etcdserverpb::kv_client::KvClient;
use keyward::pb::etcdserverpb::lease_client::LeaseClient;
use keyward::pb::etcdserverpb::{
    AuthenticateRequest, DeleteRangeRequest, LeaseGrantRequest, PutRequest, RangeRequest,
};
use keyward::pb::v3electionpb::election_client::ElectionClient;
use keyward::pb::v3electionpb::{CampaignRequest, LeaderRequest, LeaderResponse};
use keyward::pb::v3lockpb::LockRequest;
use keyward::pb::v3lockpb::lock_client::LockClient;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};

use crate::harness::{evidence, password};

/// A user at an address.
#[derive(Clone)]
pub(crate) struct Caller {
    pub(crate) channel: Channel,
    token: Option<String>,
}

/// What queues under a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Lock,
    Campaign,
}

impl Kind {
    pub(crate) const BOTH: [Kind; 2] = [Kind::Lock, Kind::Campaign];

    /// The method's own name, as etcd's metrics have it.
    pub(crate) fn method(self) -> &'static str {
        match self {
            Kind::Lock => "Lock",
            Kind::Campaign => "Campaign",
        }
    }
}

impl Caller {
    /// Nobody in particular.
    pub(crate) async fn anybody(address: SocketAddr) -> Caller {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address");
        Caller { channel: endpoint.connect().await.expect("somebody listens"), token: None }
    }

    /// Logs in with the password that the harness gave.
    pub(crate) async fn log_in(address: SocketAddr, user: &str) -> Caller {
        let nobody = Caller::anybody(address).await;
        let login = AuthenticateRequest { name: user.into(), password: password(user) };
        let answer = AuthClient::new(nobody.channel.clone()).authenticate(login).await.expect("a login");
        let token = answer.into_inner().token;
        evidence::secret("a token", &token);
        Caller { token: Some(token), ..nobody }
    }

    /// Whoever has this token.
    pub(crate) async fn with_token(address: SocketAddr, token: &str) -> Caller {
        Caller { token: Some(token.to_owned()), ..Caller::anybody(address).await }
    }

    /// The same caller, token and all, at another address.
    pub(crate) async fn at(&self, address: SocketAddr) -> Caller {
        Caller { token: self.token.clone(), ..Caller::anybody(address).await }
    }

    /// A request with the caller's token.
    pub(crate) fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(token) = &self.token {
            request.metadata_mut().insert("token", token.parse().expect("a token is a header"));
        }
        request
    }

    /// The caller's token.
    pub(crate) fn token(&self) -> &str {
        self.token.as_deref().unwrap_or_default()
    }

    pub(crate) async fn grant(&self, ttl: i64) -> i64 {
        let request = self.request(LeaseGrantRequest { ttl, id: 0 });
        let granted = LeaseClient::new(self.channel.clone()).lease_grant(request).await;
        granted.expect("a lease").into_inner().id
    }

    pub(crate) async fn put(&self, key: &str, value: Vec<u8>, lease: i64) -> Result<i64, Status> {
        let put =
            PutRequest { key: key.to_owned().into(), value: value.into(), lease, ..PutRequest::default() };
        let answer = KvClient::new(self.channel.clone()).put(self.request(put)).await?;
        Ok(answer.into_inner().header.expect("a header").revision)
    }

    pub(crate) async fn delete(&self, key: impl Into<Bytes>) {
        let delete = DeleteRangeRequest { key: key.into(), ..DeleteRangeRequest::default() };
        KvClient::new(self.channel.clone()).delete_range(self.request(delete)).await.expect("deleted");
    }

    /// The keys under `prefix`, oldest first.
    pub(crate) async fn keys(&self, prefix: &str) -> Vec<String> {
        let mut end = prefix.as_bytes().to_vec();
        *end.last_mut().expect("a prefix") += 1;
        let range =
            RangeRequest { key: prefix.to_owned().into(), range_end: end.into(), ..RangeRequest::default() };
        let answer = KvClient::new(self.channel.clone()).range(self.request(range)).await.expect("a range");
        let mut kvs = answer.into_inner().kvs;
        kvs.sort_by_key(|kv| kv.create_revision);
        kvs.iter().map(|kv| String::from_utf8_lossy(&kv.key).into_owned()).collect()
    }

    /// Locks, or is elected; returns the key.
    pub(crate) async fn queue(
        &self,
        kind: Kind,
        name: &str,
        lease: i64,
        value: &str,
    ) -> Result<Bytes, Status> {
        match kind {
            Kind::Lock => {
                let request = self.request(LockRequest { name: name.to_owned().into(), lease });
                Ok(LockClient::new(self.channel.clone()).lock(request).await?.into_inner().key)
            }
            Kind::Campaign => {
                let (name, value) = (name.to_owned().into(), value.to_owned().into());
                let request = self.request(CampaignRequest { name, lease, value });
                let answer = ElectionClient::new(self.channel.clone()).campaign(request).await?;
                Ok(answer.into_inner().leader.expect("a leader").key)
            }
        }
    }

    /// Follows an election.
    pub(crate) async fn observe(&self, name: &str) -> Result<Streaming<LeaderResponse>, Status> {
        let request = self.request(LeaderRequest { name: name.to_owned().into() });
        Ok(ElectionClient::new(self.channel.clone()).observe(request).await?.into_inner())
    }
}
