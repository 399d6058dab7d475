//! One watch stream of etcd-client and the watches on it.
//!
//! Owns: which watch a response is about, where a watch is opened again. Invariant: a watch is opened again where the application
//! saw it end, never before: what etcd-client does by itself (nothing) stays visible.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use crate::etcd_client::{
    Error, Event, EventType, WatchClient, WatchFilterType, WatchOptions, WatchResponse, WatchStream,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    sync::watch::Receiver,
    time::{sleep, timeout},
};

use crate::record::{described, emit};

/// Between two tries to open a watch.
const PAUSE: Duration = Duration::from_millis(100);
/// How long the answers to the cancels at the end may take.
const FAREWELL: Duration = Duration::from_secs(5);

/// A watch of the spec file.
#[derive(Clone, Deserialize)]
pub(crate) struct Spec {
    name: String,
    key: String,
    range_end: String,
    start_revision: i64,
    prev_kv: bool,
    progress_notify: bool,
    fragment: bool,
    filters: Vec<Filter>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Filter {
    NoPut,
    NoDelete,
}

/// Counts the watches that never stood, and says `ready` when there is none left.
#[derive(Clone)]
pub(crate) struct Missing(Arc<AtomicUsize>);

impl Missing {
    pub(crate) fn new(watches: usize) -> Missing {
        if watches == 0 {
            emit("ready", json!({}));
        }
        Missing(Arc::new(AtomicUsize::new(watches)))
    }

    fn one_stands(&self) {
        if self.0.fetch_sub(1, Ordering::Relaxed) == 1 {
            emit("ready", json!({}));
        }
    }
}

struct Watch {
    spec: Spec,
    /// Where it is opened next; 0 is now.
    next: i64,
    /// The id that it has on this stream, or asks for; 0 lets etcd choose.
    id: i64,
    stood: bool,
}

impl Watch {
    fn options(&self) -> WatchOptions {
        let filters = self.spec.filters.iter().map(|filter| match filter {
            Filter::NoPut => WatchFilterType::NoPut,
            Filter::NoDelete => WatchFilterType::NoDelete,
        });
        let mut options = WatchOptions::new()
            .with_start_revision(self.next)
            .with_filters(filters.collect::<Vec<_>>())
            .with_watch_id(self.id);
        if !self.spec.range_end.is_empty() {
            options = options.with_range(self.spec.range_end.clone());
        }
        if self.spec.prev_kv {
            options = options.with_prev_key();
        }
        if self.spec.progress_notify {
            options = options.with_progress_notify();
        }
        if self.spec.fragment {
            options = options.with_fragment();
        }
        options
    }
}

/// Watches that share one stream. Several choose their ids, so that the application knows what belongs to which; a single one
/// leaves the id to etcd.
pub(crate) struct Shared {
    client: WatchClient,
    watches: Vec<Watch>,
    last_id: i64,
    /// Watches whose create is not answered, in the order of their requests.
    unanswered: VecDeque<usize>,
    missing: Missing,
}

impl Shared {
    pub(crate) fn new(client: WatchClient, specs: Vec<Spec>, missing: Missing) -> Shared {
        let watches =
            specs.into_iter().map(|spec| Watch { next: spec.start_revision, spec, id: 0, stood: false });
        Shared { client, watches: watches.collect(), last_id: 0, unanswered: VecDeque::new(), missing }
    }

    /// Goes on until told to stop; then cancels its watches.
    pub(crate) async fn run(mut self, mut stop: Receiver<bool>) {
        loop {
            let opened = tokio::select! {
                opened = self.open() => opened,
                _ = stop.wait_for(|stop| *stop) => return,
            };
            let mut stream = match opened {
                Ok(stream) => stream,
                Err(error) => {
                    let (code, message) = described(&error);
                    emit("error", json!({ "op": "watch", "code": code, "message": message }));
                    sleep(PAUSE).await;
                    continue;
                }
            };
            let ended = tokio::select! {
                ended = self.follow(&mut stream) => Some(ended),
                _ = stop.wait_for(|stop| *stop) => None,
            };
            let (code, message) = match ended {
                Some(Ok(())) => ("OK".to_owned(), "the stream ended".to_owned()),
                Some(Err(error)) => described(&error),
                None => return self.farewell(stream).await,
            };
            for watch in &self.watches {
                emit("ended", json!({ "watch": watch.spec.name, "code": code, "message": message }));
            }
            sleep(PAUSE).await;
        }
    }

    /// A new stream with all watches on it.
    async fn open(&mut self) -> Result<WatchStream, Error> {
        self.unanswered = (0..self.watches.len()).collect();
        for at in 0..self.watches.len() {
            self.watches[at].id = self.fresh_id();
        }
        let first = &self.watches[0];
        let mut stream = self.client.watch(first.spec.key.clone(), Some(first.options())).await?;
        for watch in &self.watches[1..] {
            stream.watch(watch.spec.key.clone(), Some(watch.options())).await?;
        }
        Ok(stream)
    }

    /// An id is used once: etcd remembers those of watches that it ended by itself.
    fn fresh_id(&mut self) -> i64 {
        if self.watches.len() > 1 {
            self.last_id += 1;
        }
        self.last_id
    }

    async fn follow(&mut self, stream: &mut WatchStream) -> Result<(), Error> {
        while let Some(response) = stream.message().await? {
            if let Some((again, pause)) = self.received(&response) {
                sleep(pause).await;
                let id = self.fresh_id();
                let watch = &mut self.watches[again];
                watch.id = id;
                self.unanswered.push_back(again);
                stream.watch(watch.spec.key.clone(), Some(watch.options())).await?;
            }
        }
        Ok(())
    }

    /// Records one response; says which watch it ended, and the pause before that is opened again.
    fn received(&mut self, response: &WatchResponse) -> Option<(usize, Duration)> {
        let known = self.watches.iter().position(|watch| watch.id == response.watch_id());
        // Creates are answered in order, and a refused one has no id of its own.
        let at = if response.created() { self.unanswered.pop_front() } else { known };
        let revision = response.header().map(|header| header.revision());
        let Some(at) = at else {
            emit(
                "error",
                json!({ "op": "watch", "code": "Unknown", "message": format!("a response for watch id {}", response.watch_id()) }),
            );
            return None;
        };
        let watch = &mut self.watches[at];
        let name = watch.spec.name.clone();
        if response.canceled() && response.compact_revision() != 0 {
            watch.next = response.compact_revision();
            emit("compacted", json!({ "watch": name, "compact_revision": watch.next }));
            return Some((at, Duration::ZERO));
        }
        if response.canceled() {
            emit("ended", json!({ "watch": name, "code": "Unknown", "message": response.cancel_reason() }));
            return Some((at, PAUSE));
        }
        if response.created() {
            watch.id = response.watch_id();
            emit("created", json!({ "watch": name, "revision": revision }));
            if !std::mem::replace(&mut watch.stood, true) {
                self.missing.one_stands();
            }
        } else if response.events().is_empty() {
            emit("progress", json!({ "watch": name, "revision": revision }));
        } else {
            let last = response.events().iter().filter_map(|event| event.kv()).last();
            watch.next = last.map_or(watch.next, |kv| kv.mod_revision() + 1);
            let events: Vec<_> = response.events().iter().filter_map(shown).collect();
            emit("response", json!({ "watch": name, "revision": revision, "events": events }));
        }
        None
    }

    /// Cancels the watches and reads until all are gone.
    async fn farewell(self, mut stream: WatchStream) {
        let mut left = self.watches.len();
        let goodbye = async {
            for watch in &self.watches {
                stream.cancel(watch.id).await?;
            }
            while left > 0 {
                let Some(response) = stream.message().await? else { break };
                left -= usize::from(response.canceled());
            }
            Ok::<(), Error>(())
        };
        match timeout(FAREWELL, goodbye).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                let (code, message) = described(&error);
                emit("error", json!({ "op": "cancel", "code": code, "message": message }));
            }
            Err(_) => {
                emit("error", json!({ "op": "cancel", "code": "DeadlineExceeded", "message": "no answer" }))
            }
        }
    }
}

/// One event as the contract has it; `None` for one without a pair, which etcd does not send.
fn shown(event: &Event) -> Option<Value> {
    let kind = match event.event_type() {
        EventType::Put => "put",
        EventType::Delete => "delete",
    };
    let kv = event.kv()?;
    let previous = event
        .prev_kv()
        .map(|was| json!([text(was.value()), was.mod_revision(), was.create_revision(), was.version()]));
    Some(json!([
        kind,
        text(kv.key()),
        text(kv.value()),
        kv.mod_revision(),
        kv.create_revision(),
        kv.version(),
        kv.lease(),
        previous
    ]))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
