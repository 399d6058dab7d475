//! WebSocket: one reading of a client's frames however the bytes arrive, with nothing held but a head or a control frame.

use bytes::BytesMut;
use keyward::rest::websocket_frames::{
    LONGEST_CONTROL, MessagesRead, WebSocketFault, WebSocketPart, WebSocketReader,
};

use crate::choices::{Choices, for_any_bytes};

/// For fuzzers.
pub(crate) const TARGETS: [fn(&[u8]); 1] = [one_reading_however_it_is_cut];

/// The longest head of a frame.
const HEAD: usize = 14;

/// The parts, with the data of a message joined, and the fault at their end.
fn read<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> (Vec<WebSocketPart>, Option<WebSocketFault>) {
    let (mut reader, mut input) = (WebSocketReader::default(), BytesMut::new());
    let (mut parts, mut message) = (Vec::new(), Vec::new());
    for piece in pieces {
        input.extend_from_slice(piece);
        loop {
            match reader.next(&mut input, MessagesRead::All) {
                Ok(None) => break,
                Ok(Some(WebSocketPart::Data(data))) => {
                    assert!(!data.is_empty() && reader.is_in_message());
                    message.extend_from_slice(&data);
                }
                Ok(Some(WebSocketPart::MessageEnd)) => {
                    assert!(!reader.is_in_message());
                    parts.push(WebSocketPart::Data(std::mem::take(&mut message).into()));
                }
                Ok(Some(control)) => parts.push(control),
                Err(fault) => return (parts, Some(fault)),
            }
        }
        assert!(input.len() < HEAD + LONGEST_CONTROL, "{} bytes are held", input.len());
    }
    (parts, None)
}

fn one_reading_however_it_is_cut(input: &[u8]) {
    let mut choices = Choices::new(input);
    let at_once = 1 + choices.below(20);
    let bytes = choices.rest();
    assert_eq!(read(bytes.chunks(at_once)), read(std::iter::once(bytes)));
}

#[test]
fn any_bytes_have_one_reading() {
    for_any_bytes(2000, one_reading_however_it_is_cut);
}
