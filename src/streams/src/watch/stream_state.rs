//! The upstream streams of a client stream: being opened, open, or a feed.
//!
//! Owns: the states, and their events. Must not know: the meaning of messages, the streams' order.

use std::task::{Context, Poll};

use tokio::time::Instant;

use crate::watch::feed::{FeedEvent, FeedReader};
use crate::watch::upstream_stream::{SourceOpenFailure, WatchSource, WatchSourceOpening};
use keyward_etcd::identity::MemberId;
use keyward_upstream::bidi::{BidiEvent, UnfinishedMessageTooLarge};

/// The present state of an upstream stream.
pub enum UpstreamStreamState {
    /// A member is being looked for.
    Opening(Box<WatchSourceOpening>),
    /// Messages can be sent.
    Open(Box<WatchSource>),
    /// A feed, which serves other client streams, too.
    Feed(Box<FeedReader>),
}

impl UpstreamStreamState {
    /// The end of the stream's turn to be resumed, once it is open.
    #[must_use]
    pub fn turn_ends(&self) -> Option<Instant> {
        match self {
            Self::Opening(_) | Self::Feed(_) => None,
            Self::Open(source) => source.turn_ends(),
        }
    }

    /// The next event. Cancel-safe.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<UpstreamStreamEvent> {
        match self {
            Self::Opening(opening) => opening.as_mut().as_mut().poll(cx).map(|opened| match opened {
                Ok(source) => UpstreamStreamEvent::Opened(Box::new(source)),
                Err(failed) => UpstreamStreamEvent::Failed(failed),
            }),
            Self::Open(source) => source.poll_next(cx).map(|next| match next {
                Ok(next) => UpstreamStreamEvent::Came(next),
                Err(UnfinishedMessageTooLarge) => UpstreamStreamEvent::TooMuch,
            }),
            Self::Feed(reader) => reader.poll_next(cx).map(|event| match event {
                FeedEvent::Message(message) => UpstreamStreamEvent::Came(BidiEvent::Message(message)),
                FeedEvent::End(failed) => UpstreamStreamEvent::FeedEnd(failed),
            }),
        }
    }
}

/// An event of an upstream stream.
pub enum UpstreamStreamEvent {
    /// The stream is open.
    Opened(Box<WatchSource>),
    /// The stream could not be opened.
    Failed(SourceOpenFailure),
    /// A message of the member, or the stream's end.
    Came(BidiEvent),
    /// An unfinished message of the member exceeds its limit.
    TooMuch,
    /// A feed serves this client stream no longer; the failed member, if one is to blame.
    FeedEnd(Option<MemberId>),
}
