//! One Watch stream, on the real server and in the model.
//!
//! Owns: asking both the same, and reading the real one until it has said what the model says. Must not know scripts. Invariants: a wait
//! is for an answer, and bounded; what comes beyond the answers that were expected is found by the next step, at the latest by the last,
//! which asks for something that comes after everything else.

use std::{collections::BTreeSet, pin::Pin, time::Duration};

use futures_util::stream;
use keyward::pb::etcdserverpb::{
    WatchRequest, WatchResponse, watch_client::WatchClient, watch_request::RequestUnion,
};
use tokio::{sync::mpsc, time::timeout};
use tonic::{Response, Status, Streaming, transport::Channel};

use crate::model::{
    send::Selected,
    stream::{Permit, WatchStream},
};

use super::{
    Counts,
    server::{Server, Who, signed},
    transcript::{self, difference},
};

/// For one answer: generous, since it is a limit and never a pause.
const LIMIT: Duration = Duration::from_secs(30);
/// Above the requests of one step.
const REQUESTS: usize = 64;

pub(super) struct Pair {
    pub(super) who: Who,
    pub(super) model: WatchStream,
    /// `None` after the half-close.
    requests: Option<mpsc::Sender<WatchRequest>>,
    answers: Answers,
    /// Watches that ended as compacted, and were not cancelled since.
    compacted: BTreeSet<i64>,
}

type Opened = Result<Response<Streaming<WatchResponse>>, Status>;

/// Who had to catch up in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Behind {
    Nobody,
    /// A watch that was told something, and so has been passed over once at least.
    Told,
    /// A watch that was told nothing: etcd may have its pass before it.
    Silent,
}

/// etcd sends its headers with its first answer, so that the stream opens only then.
enum Answers {
    Opening(Pin<Box<dyn Future<Output = Opened> + Send>>),
    Open(Box<Streaming<WatchResponse>>),
}

impl Pair {
    pub(super) fn open(server: &Server, who: Who) -> Pair {
        Pair::open_on(server.channel(), server, who)
    }

    /// On a connection of one's own.
    pub(super) fn open_on(channel: Channel, server: &Server, who: Who) -> Pair {
        let (requests, inbox) = mpsc::channel(REQUESTS);
        let outbound = stream::unfold(inbox, async |mut inbox: mpsc::Receiver<WatchRequest>| {
            inbox.recv().await.map(|request| (request, inbox))
        });
        let request = match server.token(who) {
            Some(token) => signed(&token, outbound),
            None => tonic::Request::new(outbound),
        };
        let mut client = WatchClient::new(channel).max_decoding_message_size(usize::MAX);
        let opening = Box::pin(async move { client.watch(request).await });
        let model = WatchStream::new(server.flavor, Server::limits());
        let answers = Answers::Opening(opening);
        Pair { who, model, requests: Some(requests), answers, compacted: BTreeSet::new() }
    }

    pub(super) fn is_half_closed(&self) -> bool {
        self.requests.is_none()
    }

    /// The client ends its side, with END_STREAM.
    pub(super) fn half_close(&mut self) {
        self.requests = None;
    }

    /// Asks both.
    pub(super) fn ask(&mut self, request: RequestUnion) {
        let request = WatchRequest { request_union: Some(request) };
        self.model.request(request.clone());
        let requests = self.requests.as_ref().expect("nothing is asked after the half-close");
        requests.try_send(request).expect("a step has few requests, and the stream takes them");
    }

    /// Lets the model come to rest, reads from etcd what the model says, and compares.
    pub(super) async fn settle(&mut self, server: &Server, counts: &mut Counts) -> Result<Behind, String> {
        let who = self.who;
        let permit: Permit<'_> = &|asked| server.permit(who, asked);
        while self.model.receive(&server.store, &server.member, permit) {}
        let behind: Vec<i64> = self.model.behind().collect();
        let early = (!behind.is_empty()).then(|| {
            let mut early = self.model.clone();
            early.sync(&server.store, &server.member);
            while early.send(&server.store, &server.member, Selected::Channel) {}
            at_rest(&mut early, server, permit)
        });
        let mut schedules = vec![at_rest(&mut self.model, server, permit)];
        schedules.extend(early);
        let (_, told) = self.read_one_of(&schedules).await?;
        transcript::count(&told, server.store.compacted(), counts);
        self.count_late_cancels(&told, counts);
        let caught_up = |id: &i64| told.iter().any(|answer| answer.watch_id == *id && !answer.created);
        Ok(match behind.iter().all(caught_up) {
            _ if behind.is_empty() => Behind::Nobody,
            true => Behind::Told,
            false => Behind::Silent,
        })
    }

    /// The next answer of etcd; `None` where none came within the limit.
    pub(super) async fn next(&mut self) -> Result<Option<WatchResponse>, String> {
        match timeout(LIMIT, self.answers.next()).await {
            Ok(Ok(answer)) => Ok(Some(answer)),
            Ok(Err(status)) => Err(format!("the stream of {:?} ended: {status:?}", self.who)),
            Err(_) => Ok(None),
        }
    }

    fn count_late_cancels(&mut self, told: &[WatchResponse], counts: &mut Counts) {
        for ended in told.iter().filter(|answer| answer.canceled && !answer.created) {
            if ended.compact_revision != 0 {
                self.compacted.insert(ended.watch_id);
            } else if self.compacted.remove(&ended.watch_id) {
                *counts.entry("canceled after compacted").or_default() += 1;
            }
        }
    }

    /// Reads until one of the model's schedules is complete, and tells which and what came. The first is the likely one.
    pub(super) async fn read_one_of(
        &mut self,
        schedules: &[Vec<WatchResponse>],
    ) -> Result<(usize, Vec<WatchResponse>), String> {
        let most = schedules.iter().map(Vec::len).max().unwrap_or(0);
        let mut told = Vec::new();
        loop {
            let is = |all: &Vec<_>| told.len() == all.len() && difference(&told, all).is_none();
            if let Some(which) = schedules.iter().position(is) {
                return Ok((which, told));
            }
            let state = if told.len() >= most {
                "all came"
            } else {
                match self.next().await? {
                    Some(answer) => {
                        told.push(answer);
                        continue;
                    }
                    None => "and nothing more came",
                }
            };
            let what = schedules.first().and_then(|likely| difference(&told, likely)).unwrap_or_default();
            return Err(format!("stream of {:?}, {state}: {what}", self.who));
        }
    }
}

fn at_rest(model: &mut WatchStream, server: &Server, permit: Permit<'_>) -> Vec<WatchResponse> {
    model.rest(&server.store, &server.member, permit);
    std::iter::from_fn(|| model.pop()).collect()
}

impl Answers {
    async fn next(&mut self) -> Result<WatchResponse, Status> {
        loop {
            match self {
                Answers::Opening(opening) => {
                    let answers = opening.as_mut().await?.into_inner();
                    *self = Answers::Open(Box::new(answers));
                }
                Answers::Open(answers) => {
                    let next = answers.message().await?;
                    return next.ok_or_else(|| Status::ok("without a status"));
                }
            }
        }
    }
}
