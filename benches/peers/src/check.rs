//! Verifies a proxy's answers before a figure counts: the login, a Range of each length, a Put.
//!
//! Must not know: the expected lengths; `run` compares the lengths of a proxy with the member's own.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use keyward::pb::etcdserverpb::{
    AuthenticateRequest, AuthenticateResponse, PutRequest, RangeRequest, RangeResponse,
};
use keyward::tasks::Tasks;
use prost::Message as _;
use serde_json::json;

use crate::Failure;
use crate::canned::{LARGE_KEY, SMALL_KEY};
use crate::grpc_client::GrpcClient;
use crate::script_turns::tell;

/// `grpc-timeout` of a login: many logins at once wait long for etcd's bcrypt.
const LOGIN_TIMEOUT: &str = "60S";

/// Verifies one address.
#[derive(Args)]
pub(crate) struct Check {
    #[arg(long)]
    address: SocketAddr,
    /// User and password; without them no call carries a token.
    #[arg(long, value_name = "USER:PASSWORD")]
    login: Option<String>,
    /// The CA (PEM) of a proxy with TLS; without a CA the connection is plaintext.
    #[arg(long)]
    authority: Option<PathBuf>,
    /// Writes both keys first: a real etcd has none.
    #[arg(long)]
    fill: bool,
    /// The length of the small value.
    #[arg(long, default_value_t = 256)]
    small: usize,
    /// The length of the large value.
    #[arg(long, default_value_t = 64 * 1024)]
    large: usize,
}

impl Check {
    /// Prints the token, and the length of each answer's message.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let tasks = Tasks::default();
        let mut client = self.connect(None, &tasks).await?;
        let mut token = None;
        if let Some((name, password)) = self.login.as_deref().and_then(|login| login.split_once(':')) {
            token = Some(authenticate(&client, name, password).await?);
            client = self.connect(token.as_deref(), &tasks).await?;
        }
        if self.fill {
            put(&client, SMALL_KEY, self.small).await?;
            put(&client, LARGE_KEY, self.large).await?;
        }
        let small = range(&client, SMALL_KEY, self.small).await?;
        let large = range(&client, LARGE_KEY, self.large).await?;
        let written = put(&client, b"written", self.small).await?;
        tell(&json!({ "token": token, "range": small, "range64k": large, "put": written }))?;
        Ok(())
    }

    async fn connect(&self, token: Option<&str>, tasks: &Tasks) -> Result<GrpcClient, Failure> {
        match &self.authority {
            None => GrpcClient::connect(self.address, token, tasks).await,
            Some(authority) => GrpcClient::connect_by_tls(self.address, token, authority, tasks).await,
        }
    }
}

/// Logs in; the token of the answer.
pub(crate) async fn authenticate(client: &GrpcClient, name: &str, password: &str) -> Result<String, Failure> {
    let login = AuthenticateRequest { name: name.to_owned(), password: password.to_owned() };
    let message = client.call_within(LOGIN_TIMEOUT, "/etcdserverpb.Auth/Authenticate", &login).await?;
    let answer = AuthenticateResponse::decode(message)?;
    match answer.token.is_empty() {
        true => Err("a login was answered without a token".into()),
        false => Ok(answer.token),
    }
}

/// Reads one key; the length of the answer's message. The answer must be one value of `value` bytes.
pub(crate) async fn range(client: &GrpcClient, key: &'static [u8], value: usize) -> Result<usize, Failure> {
    let asked = RangeRequest { key: key.into(), ..RangeRequest::default() };
    let message = client.call_raw("/etcdserverpb.KV/Range", &asked).await?;
    let length = message.len();
    let answer = RangeResponse::decode(message)?;
    match &answer.kvs[..] {
        [kv] if kv.key == key && kv.value.len() == value => Ok(length),
        pairs => {
            let lengths: Vec<_> = pairs.iter().map(|kv| (kv.key.len(), kv.value.len())).collect();
            let key = String::from_utf8_lossy(key);
            Err(format!("Range of {key}: pairs of {lengths:?} bytes, not one value of {value}").into())
        }
    }
}

async fn put(client: &GrpcClient, key: &'static [u8], value: usize) -> Result<usize, Failure> {
    let asked = PutRequest { key: key.into(), value: vec![b'v'; value].into(), ..PutRequest::default() };
    Ok(client.call_raw("/etcdserverpb.KV/Put", &asked).await?.len())
}
