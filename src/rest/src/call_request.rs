//! The gRPC request made from a JSON request.
//!
//! Owns: the body, made from JSON as the call reads the body, so that nothing is read before the call
//! asks for it.
//! Must not know: the call, the rules of JSON.
//! Invariants: bytes read and not yet passed on are charged to the memory of requests; a JSON document
//! has at most twice the bytes of the largest request, and some more.

use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame};
use zeroize::Zeroize as _;

use super::json_documents::JsonDocuments;
use super::json_fault::JsonFault;
use super::json_request::message_of_json;
use super::message_fields::MessageFields;
use keyward_downstream::client_body::{ClientBody, ClientBodyError};
use keyward_downstream::request_memory::RequestMemoryCharge;
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::frame;

/// Room for names and numbers of a JSON document, beside twice the largest request: base64 takes a third
/// more than bytes.
const DOCUMENT: usize = 64 * 1024;

/// A body with one frame, made from one JSON document: the request of a unary call.
pub(super) struct UnaryJson {
    body: ClientBody,
    message: &'static MessageFields,
    largest: usize,
    document: BytesMut,
    held: RequestMemoryCharge,
    fault: DocumentFault,
    is_over: bool,
}

/// A body with a frame for each JSON document: the requests of a stream.
pub(super) struct StreamJson {
    body: ClientBody,
    message: &'static MessageFields,
    documents: JsonDocuments,
    held: RequestMemoryCharge,
    fault: DocumentFault,
    is_over: bool,
}

/// A note about a document that was refused, shared by a body and the request's owner.
#[derive(Clone, Default)]
pub(super) struct DocumentFault(Rc<Cell<bool>>);

impl DocumentFault {
    /// True after a document was refused.
    pub(super) fn was_found(&self) -> bool {
        self.0.get()
    }

    fn note(&self, fault: &JsonFault) -> Refusal {
        self.0.set(true);
        Refusal::malformed_json(fault)
    }
}

/// The largest JSON document for requests of at most `request_size` bytes.
pub(super) fn largest_document(request_size: usize) -> usize {
    request_size.saturating_mul(2).saturating_add(DOCUMENT)
}

impl UnaryJson {
    /// A body made from `body`, for requests of at most `request_size` bytes.
    pub(super) fn new(
        body: ClientBody,
        message: &'static MessageFields,
        request_size: usize,
        held: RequestMemoryCharge,
        fault: &DocumentFault,
    ) -> Self {
        let largest = largest_document(request_size);
        Self { body, message, largest, document: BytesMut::new(), held, fault: fault.clone(), is_over: false }
    }

    fn take(&mut self, data: &[u8]) -> Result<(), Refusal> {
        let length = self.document.len() + data.len();
        if length > self.largest {
            return Err(Refusal::too_large(length, self.largest));
        }
        if !self.held.charge(data.len()) {
            return Err(Refusal::TOO_MANY_REQUESTS);
        }
        self.document.extend_from_slice(data);
        Ok(())
    }
}

impl StreamJson {
    /// A body made from `body`, for requests of at most `request_size` bytes each.
    pub(super) fn new(
        body: ClientBody,
        message: &'static MessageFields,
        request_size: usize,
        held: RequestMemoryCharge,
        fault: &DocumentFault,
    ) -> Self {
        let documents = JsonDocuments::new(largest_document(request_size));
        Self { body, message, documents, held, fault: fault.clone(), is_over: false }
    }

    fn take(&mut self, data: &[u8]) -> Result<(), Refusal> {
        self.held.shrink(self.documents.held());
        if !self.held.charge(data.len()) {
            return Err(Refusal::TOO_MANY_REQUESTS);
        }
        self.documents.push(data);
        Ok(())
    }
}

/// A gRPC frame with the message of a JSON document.
fn frame_of(document: &[u8], message: &'static MessageFields) -> Result<Bytes, JsonFault> {
    let mut message = message_of_json(document, message)?;
    let framed = frame::encode(&message);
    message.as_mut().zeroize();
    Ok(framed)
}

type BodyFrame = Option<Result<Frame<Bytes>, ClientBodyError>>;

fn refused(refusal: Refusal) -> Poll<BodyFrame> {
    Poll::Ready(Some(Err(ClientBodyError::Refused(refusal))))
}

impl Body for UnaryJson {
    type Data = Bytes;
    type Error = ClientBodyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<BodyFrame> {
        let this = &mut *self;
        while !this.is_over {
            match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    let Ok(data) = frame.into_data() else { continue };
                    if let Err(refusal) = this.take(&data) {
                        this.is_over = true;
                        return refused(refusal);
                    }
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => {
                    this.is_over = true;
                    let mut document = std::mem::take(&mut this.document);
                    let framed = frame_of(&document, this.message);
                    // The document of a login holds a password.
                    document.as_mut().zeroize();
                    drop(document);
                    this.held.shrink(0);
                    return match framed {
                        Ok(framed) => Poll::Ready(Some(Ok(Frame::data(framed)))),
                        Err(fault) => refused(this.fault.note(&fault)),
                    };
                }
            }
        }
        Poll::Ready(None)
    }
}

impl Body for StreamJson {
    type Data = Bytes;
    type Error = ClientBodyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<BodyFrame> {
        let this = &mut *self;
        while !this.is_over {
            if let Some(document) = this.documents.next().transpose() {
                return match document.and_then(|document| frame_of(&document, this.message)) {
                    Ok(framed) => Poll::Ready(Some(Ok(Frame::data(framed)))),
                    Err(fault) => {
                        this.is_over = true;
                        refused(this.fault.note(&fault))
                    }
                };
            }
            let taken = match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                Some(Ok(frame)) => frame.into_data().map_or(Ok(()), |data| this.take(&data)),
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => {
                    this.is_over = true;
                    this.documents.finish().map_err(|fault| this.fault.note(&fault))
                }
            };
            if let Err(refusal) = taken {
                this.is_over = true;
                return refused(refusal);
            }
        }
        Poll::Ready(None)
    }
}
