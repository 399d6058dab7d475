//! The demo's client: logs in once, keeps its token past etcd's token TTL, then opens a watch with it.
//!
//! It does so twice at the same time, directly at a member and through Keyward, and prints what each answers. Exit code
//! 0: the member refused the stale token and Keyward delivered; 1: anything else. It renews nothing by itself, as most
//! etcd clients do not once a stream is open. `deploy/demo` starts it; it knows nothing of how the servers were started.

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use keyward::pb::etcdserverpb::auth_client::AuthClient;
use keyward::pb::etcdserverpb::kv_client::KvClient;
use keyward::pb::etcdserverpb::watch_client::WatchClient;
use keyward::pb::etcdserverpb::{
    AuthenticateRequest, PutRequest, WatchCreateRequest, WatchRequest, WatchResponse, watch_request,
};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Streaming};

/// Longer than etcd's own time-outs: whoever has not answered by then will not.
const LIMIT: Duration = Duration::from_secs(10);

/// One stale token, two answers.
#[derive(Parser)]
struct Arguments {
    /// A member's client URL.
    #[arg(long)]
    direct: String,
    /// Keyward's URL.
    #[arg(long)]
    keyward: String,
    /// Where the key is put: another member.
    #[arg(long)]
    elsewhere: String,
    /// The user of all three.
    #[arg(long)]
    user: String,
    #[arg(long, env = "DEMO_PASSWORD", hide_env_values = true)]
    password: String,
    /// The key to watch.
    #[arg(long)]
    key: String,
    /// Seconds to wait: more than etcd's --auth-token-ttl.
    #[arg(long)]
    wait: u64,
}

type Failure = Box<dyn std::error::Error>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode, Failure> {
    let arguments = Arguments::parse();
    let mut direct = Way::log_in("directly", &arguments.direct, &arguments).await?;
    let mut keyward = Way::log_in("through Keyward", &arguments.keyward, &arguments).await?;
    say("login", &format!("{} at a member and at Keyward: a token from each, the same age", arguments.user))?;
    say("", "(each is good where it was issued; from here on neither is renewed by this client)")?;
    for way in [&direct, &keyward] {
        let Answer::Created(_) = way.watch(&arguments.key).await? else {
            return Err(format!("{}: a fresh token was refused", way.name).into());
        };
    }
    say("fresh token", "both accept a watch")?;
    count_down(arguments.wait).await?;
    for (title, way) in [("stale token", &mut direct), ("", &mut keyward)] {
        let answer = way.watch(&arguments.key).await?;
        say(title, &format!("{:<16} {answer}", way.name))?;
        way.answer = Some(answer);
    }
    say(
        "",
        &format!("({} may read {}: both watches with the fresh tokens did)", arguments.user, arguments.key),
    )?;
    let value = format!("put {} s after the logins", arguments.wait);
    let revision = put_elsewhere(&arguments, &value).await?;
    say("put", &format!("{} by somebody else, at another member: revision {revision}", arguments.key))?;
    let refused = direct.event(&value).await?;
    say("event", &format!("{:<16} {refused}", direct.name))?;
    let delivered = keyward.event(&value).await?;
    say("", &format!("{:<16} {delivered}", keyward.name))?;
    let shown = matches!((refused, delivered), (Event::NeverFor, Event::Delivered(at)) if at == revision);
    Ok(if shown { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// One of the two ways to the same cluster.
struct Way {
    name: &'static str,
    channel: Channel,
    token: MetadataValue<Ascii>,
    answer: Option<Answer>,
}

/// The answer to a watch's create.
enum Answer {
    Created(Box<Open>),
    Refused(String),
}

/// What a watch that was answered delivered.
enum Event {
    Delivered(i64),
    /// The watch was refused: nothing ever comes.
    NeverFor,
    /// It was accepted, and the event did not come, or something else did.
    Missing,
}

/// A live watch; dropping the requests' end would half-close it.
struct Open {
    _requests: mpsc::Sender<WatchRequest>,
    responses: Streaming<WatchResponse>,
}

impl Way {
    async fn log_in(name: &'static str, url: &str, arguments: &Arguments) -> Result<Self, Failure> {
        let (channel, token) = log_in(url, arguments).await?;
        Ok(Self { name, channel, token, answer: None })
    }

    /// Creates a watch on a stream of its own, with the one token of this way.
    async fn watch(&self, key: &str) -> Result<Answer, Failure> {
        let (requests, sent) = mpsc::channel(1);
        let create = WatchCreateRequest { key: key.to_owned().into(), ..WatchCreateRequest::default() };
        let request_union = Some(watch_request::RequestUnion::CreateRequest(create));
        requests.send(WatchRequest { request_union }).await?;
        let stream = futures_util::stream::unfold(sent, async |mut sent| Some((sent.recv().await?, sent)));
        let mut request = Request::new(Box::pin(stream));
        request.metadata_mut().insert("token", self.token.clone());
        let mut client = WatchClient::new(self.channel.clone());
        let mut responses = timeout(LIMIT, client.watch(request)).await??.into_inner();
        let first = timeout(LIMIT, responses.message()).await??;
        let first = first.ok_or_else(|| format!("{}: the watch stream ended without a word", self.name))?;
        Ok(match (first.created, first.canceled) {
            (true, false) => Answer::Created(Box::new(Open { _requests: requests, responses })),
            (_, true) if !first.cancel_reason.is_empty() => Answer::Refused(first.cancel_reason),
            _ => return Err(format!("{}: no answer to a create: {first:?}", self.name).into()),
        })
    }

    /// Waits for the put of `value`.
    async fn event(&mut self, value: &str) -> Result<Event, Failure> {
        let open = match &mut self.answer {
            Some(Answer::Created(open)) => open,
            _ => return Ok(Event::NeverFor),
        };
        let Ok(came) = timeout(LIMIT, open.responses.message()).await else { return Ok(Event::Missing) };
        let Some(response) = came? else { return Ok(Event::Missing) };
        let put = match &response.events[..] {
            [event] => event.kv.as_ref().filter(|kv| kv.value == value.as_bytes()),
            _ => None,
        };
        Ok(put.map_or(Event::Missing, |kv| Event::Delivered(kv.mod_revision)))
    }
}

impl std::fmt::Display for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Created(_) => f.write_str("created"),
            Self::Refused(reason) => write!(f, "created canceled: {reason}"),
        }
    }
}

impl std::fmt::Display for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Delivered(revision) => write!(f, "delivered, revision {revision}"),
            Self::NeverFor => f.write_str("none: there is no watch"),
            Self::Missing => f.write_str("none, although the watch was accepted"),
        }
    }
}

async fn log_in(url: &str, arguments: &Arguments) -> Result<(Channel, MetadataValue<Ascii>), Failure> {
    let channel = Endpoint::from_shared(url.to_owned())?.connect_timeout(LIMIT).connect().await?;
    let login = AuthenticateRequest { name: arguments.user.clone(), password: arguments.password.clone() };
    let answer = timeout(LIMIT, AuthClient::new(channel.clone()).authenticate(login)).await??;
    let mut token: MetadataValue<Ascii> = answer.into_inner().token.parse()?;
    token.set_sensitive(true);
    Ok((channel, token))
}

/// Puts the key with a login of its own. Returns the revision.
async fn put_elsewhere(arguments: &Arguments, value: &str) -> Result<i64, Failure> {
    let (channel, token) = log_in(&arguments.elsewhere, arguments).await?;
    let (key, value) = (arguments.key.clone().into(), value.to_owned().into());
    let mut request = Request::new(PutRequest { key, value, ..PutRequest::default() });
    request.metadata_mut().insert("token", token);
    let answer = timeout(LIMIT, KvClient::new(channel).put(request)).await??.into_inner();
    Ok(answer.header.ok_or("a put was answered without a header")?.revision)
}

async fn count_down(seconds: u64) -> io::Result<()> {
    write!(io::stdout(), "    {:<14}past etcd's token TTL:", "waiting")?;
    for left in (1..=seconds).rev() {
        write!(io::stdout(), " {left}")?;
        io::stdout().flush()?;
        sleep(Duration::from_secs(1)).await;
    }
    writeln!(io::stdout())
}

fn say(title: &str, text: &str) -> io::Result<()> {
    writeln!(io::stdout(), "    {title:<14}{text}")
}
