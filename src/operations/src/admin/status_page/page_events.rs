//! The events of the status page: one text a second for every page that listens.
//!
//! Owns: the listeners, their limits, the time between events. Must not know: the content of an event.
//! Invariants: without a listener nothing runs and no shard is asked; the work of a second is done once for
//! all listeners; a listener that does not read is cut, and keeps no other listener waiting or out; all
//! events end with the beginning of a drain.

use std::cell::RefCell;
use std::convert::Infallible;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep};

use super::page_sample::{ClientSelection, PageSample, PageSources, PageVerdict};
use crate::admin::doctor::ExaminedFor;
use crate::admin::drain::Stage;
use keyward_base::tasks::{TaskHandle, Tasks};

/// Listeners at the same time.
const LISTENERS: usize = 8;
/// Time between two events.
const INTERVAL: Duration = Duration::from_secs(1);
/// The work of an event takes at most one of this many parts of the time.
const SHARE: u32 = 10;
/// Maximum time between two events.
const LONGEST_INTERVAL: Duration = Duration::from_secs(10);
/// Minimum time between two examinations by the doctor, which asks every member.
const EXAMINED: Duration = Duration::from_secs(30);
/// Events queued for a listener: the answer's begin, and one event.
const QUEUED: usize = 2;
/// Events not taken in a row by a listener that is cut.
const MISSED: u32 = 15;
/// The begin of an answer: a browser connects again after three seconds.
const BEGIN: Bytes = Bytes::from_static(b"retry: 3000\n\n");
/// The last event.
const END: Bytes = Bytes::from_static(b"event: end\ndata: {}\n\n");

/// The events of all listeners.
pub(super) struct PageEvents {
    sources: Rc<PageSources>,
    tasks: Tasks,
    listeners: RefCell<Vec<PageListener>>,
    sampling: RefCell<Option<TaskHandle>>,
    verdict: Rc<RefCell<LastExamination>>,
}

/// The doctor's last report, kept while nobody listens: a page opened again causes no further examination.
#[derive(Default)]
struct LastExamination {
    begun: Option<Instant>,
    running: Option<TaskHandle>,
    verdict: Option<PageVerdict>,
}

struct PageListener {
    selection: ClientSelection,
    events: mpsc::Sender<Bytes>,
    missed: u32,
    /// Dropped with the listener.
    _end: oneshot::Sender<Infallible>,
}

/// The body of an answer with events.
pub(in crate::admin) struct EventBody(mpsc::Receiver<Bytes>);

/// Resolves when the process sends no further event to a listener.
pub(in crate::admin) struct ListenerEnd(oneshot::Receiver<Infallible>);

impl ListenerEnd {
    pub(in crate::admin) async fn reached(self) {
        drop(self.0.await);
    }
}

impl Body for EventBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|event| event.map(|event| Ok(Frame::data(event))))
    }
}

impl PageEvents {
    pub(super) fn new(sources: Rc<PageSources>, tasks: Tasks) -> Self {
        Self {
            sources,
            tasks,
            listeners: RefCell::default(),
            sampling: RefCell::default(),
            verdict: Rc::default(),
        }
    }

    /// Adds a listener. At the limit the listener that missed the most events, else the oldest, makes room: a
    /// browser that reads asks again.
    pub(super) fn listen(self: &Rc<Self>, selection: ClientSelection) -> (EventBody, ListenerEnd) {
        let mut listeners = self.listeners.borrow_mut();
        listeners.retain(|listener| !listener.events.is_closed());
        if listeners.len() >= LISTENERS {
            // The last of the greatest, counted from the newest.
            let worst = (0..listeners.len()).rev().max_by_key(|at| listeners[*at].missed);
            worst.map(|at| listeners.remove(at));
        }
        let ((events, body), (end, ended)) = (mpsc::channel(QUEUED), oneshot::channel());
        // The queue is empty.
        drop(events.try_send(BEGIN));
        listeners.push(PageListener { selection, events, missed: 0, _end: end });
        let mut sampling = self.sampling.borrow_mut();
        if sampling.as_ref().is_none_or(TaskHandle::is_finished) {
            *sampling = Some(self.tasks.spawn("status page", Rc::clone(self).run()));
        }
        (EventBody(body), ListenerEnd(ended))
    }

    /// Sends events until nobody listens, or until a drain begins.
    async fn run(self: Rc<Self>) {
        let mut stages = self.sources.viewer.state.exit.listen();
        // Every arm is cancel-safe: a view that is given up changes nothing.
        tokio::select! {
            () = self.send_events() => {}
            _ = stages.wait_for(|stage| *stage != Stage::Serving) => {
                for listener in self.listeners.borrow_mut().drain(..) {
                    drop(listener.events.try_send(END));
                }
            }
        }
    }

    async fn send_events(&self) {
        let mut earlier = None;
        loop {
            let begun = Instant::now();
            self.examine();
            let sample = PageSample::take(&self.sources, earlier.take()).await;
            self.send(&sample);
            earlier = Some(sample);
            if self.listeners.borrow().is_empty() {
                return;
            }
            let pause = (begun.elapsed() * (SHARE - 1)).min(LONGEST_INTERVAL);
            sleep(pause.max(INTERVAL.saturating_sub(begun.elapsed()))).await;
            self.listeners.borrow_mut().retain(|listener| !listener.events.is_closed());
            if self.listeners.borrow().is_empty() {
                return;
            }
        }
    }

    /// Sends one event to every listener: one text for all listeners with the same selection.
    fn send(&self, sample: &PageSample) {
        let verdict = self.verdict.borrow();
        let mut texts: Vec<(ClientSelection, Bytes)> = Vec::new();
        self.listeners.borrow_mut().retain_mut(|listener| {
            let selection = &listener.selection;
            let known = texts.iter().find(|(known, _)| known == selection).map(|(_, event)| event.clone());
            let event = known.unwrap_or_else(|| {
                let text = sample.text(&self.sources, verdict.verdict.as_ref(), selection);
                let event = Bytes::from(format!("data: {text}\n\n"));
                texts.push((selection.clone(), event.clone()));
                event
            });
            match listener.events.try_send(event) {
                Ok(()) => listener.missed = 0,
                Err(mpsc::error::TrySendError::Full(_)) => listener.missed += 1,
                Err(mpsc::error::TrySendError::Closed(_)) => return false,
            }
            listener.missed < MISSED
        });
    }

    /// Begins an examination, unless one runs or has begun within [`EXAMINED`].
    fn examine(&self) {
        let mut last = self.verdict.borrow_mut();
        let is_running = last.running.as_ref().is_some_and(|running| !running.is_finished());
        if is_running || last.begun.is_some_and(|begun| begun.elapsed() < EXAMINED) {
            return;
        }
        last.begun = Some(Instant::now());
        let (sources, verdict) = (Rc::clone(&self.sources), Rc::clone(&self.verdict));
        let examination = async move {
            let report = sources.doctor.examine(ExaminedFor::Page).await;
            verdict.borrow_mut().verdict = Some(PageVerdict::of(report, sources.content));
        };
        last.running = Some(self.tasks.spawn("status page examination", examination));
    }
}
