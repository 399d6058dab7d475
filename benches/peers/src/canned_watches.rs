//! The watches of the canned member.
//!
//! Owns: the watches by key, their ids and events. Must not know: connections, other calls. Invariant: a watch
//! receives the events after its Created only; earlier revisions have no events.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use bytes::Bytes;
use h2::SendStream;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{PutRequest, ResponseHeader, WatchRequest, WatchResponse};
use keyward::pb::mvccpb::{Event, KeyValue};
use keyward::rpc::frame;
use prost::Message as _;

use crate::Failure;
use crate::grpc_client::MessageStream;

/// The downstream half of a watch stream.
pub(crate) type EventStream = Rc<RefCell<SendStream<Bytes>>>;

struct CannedWatch {
    stream: EventStream,
    id: i64,
}

/// The watches of all streams.
#[derive(Default)]
pub(crate) struct CannedWatches {
    by_key: RefCell<HashMap<Bytes, Vec<CannedWatch>>>,
}

/// etcd's watch id of an answer to a progress request.
const ALL_WATCHES: i64 = -1;

fn send(stream: &EventStream, response: &WatchResponse) -> Result<(), h2::Error> {
    stream.borrow_mut().send_data(frame::encode(&response.encode_to_vec()), false)
}

impl CannedWatches {
    /// Answers the requests of one stream until the client half-closes the stream.
    pub(crate) async fn serve(
        &self,
        requests: &mut MessageStream,
        stream: &EventStream,
        header: impl Fn() -> ResponseHeader,
    ) -> Result<(), Failure> {
        let next_id = Cell::new(0);
        while let Some(message) = requests.next().await? {
            let header = Some(header());
            match WatchRequest::decode(message)?.request_union {
                Some(RequestUnion::CreateRequest(create)) => {
                    let id = if create.watch_id == 0 {
                        next_id.replace(next_id.get() + 1)
                    } else {
                        create.watch_id
                    };
                    let created = WatchResponse { header, watch_id: id, created: true, ..Default::default() };
                    send(stream, &created)?;
                    let watch = CannedWatch { stream: Rc::clone(stream), id };
                    self.by_key.borrow_mut().entry(create.key).or_default().push(watch);
                }
                Some(RequestUnion::CancelRequest(cancel)) => {
                    let id = cancel.watch_id;
                    self.retain(|watch| watch.id != id || !Rc::ptr_eq(&watch.stream, stream));
                    let canceled =
                        WatchResponse { header, watch_id: id, canceled: true, ..Default::default() };
                    send(stream, &canceled)?;
                }
                Some(RequestUnion::ProgressRequest(_)) => {
                    send(stream, &WatchResponse { header, watch_id: ALL_WATCHES, ..Default::default() })?;
                }
                None => {}
            }
        }
        Ok(())
    }

    /// Drops the watches of an ended stream.
    pub(crate) fn forget(&self, stream: &EventStream) {
        self.retain(|watch| !Rc::ptr_eq(&watch.stream, stream));
    }

    /// Sends the event of a Put to every watch of the key.
    pub(crate) fn deliver(&self, put: PutRequest, header: &ResponseHeader) {
        let by_key = self.by_key.borrow();
        let Some(watches) = by_key.get(put.key.as_ref()) else { return };
        let kv = KeyValue {
            key: put.key,
            create_revision: header.revision,
            mod_revision: header.revision,
            version: 1,
            value: put.value,
            lease: put.lease,
        };
        let event = Event { r#type: 0, kv: Some(kv), prev_kv: None };
        let mut response =
            WatchResponse { header: Some(*header), events: vec![event], ..WatchResponse::default() };
        for watch in watches {
            response.watch_id = watch.id;
            // The task of a reset stream forgets the watch.
            drop(send(&watch.stream, &response));
        }
    }

    fn retain(&self, keep: impl Fn(&CannedWatch) -> bool) {
        self.by_key.borrow_mut().retain(|_, watches| {
            watches.retain(&keep);
            !watches.is_empty()
        });
    }
}
