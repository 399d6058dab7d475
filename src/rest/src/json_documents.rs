//! A stream of JSON documents, cut into documents as its bytes arrive.
//!
//! Owns: the end of each document. Must not know: the meaning of a document; its grammar is checked by its
//! reader.
//! Documents follow one another with or without white space, as for Go's `json.Decoder`. Every byte is
//! looked at once, however the bytes arrive.
//! Invariant: a document is an object. A stream that begins a document otherwise has a fault, as the reader
//! would refuse such a document.

use bytes::{Buf as _, Bytes, BytesMut};

use super::MAX_JSON_DEPTH;
use super::json_fault::{JsonFault, JsonFaultReason};

/// Cuts a stream into documents.
///
/// The caller takes documents with [`next`](Self::next) until there is none before it pushes more: then at
/// most one document and one push are held.
#[derive(Debug)]
pub struct JsonDocuments {
    pending: BytesMut,
    /// The bytes at the beginning of `pending` that have been looked at.
    scanned: usize,
    /// Open objects and arrays at `scanned`; 0 is between documents.
    depth: usize,
    string: StringState,
    longest: usize,
    fault: Option<JsonFaultReason>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StringState {
    Outside,
    Inside,
    AfterBackslash,
}

impl JsonDocuments {
    /// Accepts documents of at most `longest` bytes.
    #[must_use]
    pub fn new(longest: usize) -> Self {
        Self {
            pending: BytesMut::new(),
            scanned: 0,
            depth: 0,
            string: StringState::Outside,
            longest,
            fault: None,
        }
    }

    /// Takes the next bytes of the stream.
    pub fn push(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
    }

    /// Returns the number of bytes held and not returned yet.
    #[must_use]
    pub fn held(&self) -> usize {
        self.pending.len()
    }

    /// Returns the next document, or `None` while its end has not arrived.
    ///
    /// # Errors The bytes are no objects in sequence, or an object is too deep or too long. Every later
    /// call returns the same fault.
    #[expect(clippy::should_implement_trait, reason = "None means: push more; an iterator would have ended")]
    pub fn next(&mut self) -> Result<Option<Bytes>, JsonFault> {
        match self.fault {
            None => self.scan().map_err(|reason| self.refuse(reason)),
            Some(reason) => Err(self.refuse(reason)),
        }
    }

    /// Ends the stream.
    ///
    /// # Errors
    /// The stream ends within a document, or had a fault before.
    pub fn finish(&mut self) -> Result<(), JsonFault> {
        if self.fault.is_none() && self.depth > 0 {
            self.fault = Some(JsonFaultReason::Incomplete);
        }
        self.fault.map_or(Ok(()), |reason| Err(self.refuse(reason)))
    }

    fn refuse(&mut self, reason: JsonFaultReason) -> JsonFault {
        self.fault = Some(reason);
        self.pending = BytesMut::new();
        JsonFault { path: String::new(), reason }
    }

    fn scan(&mut self) -> Result<Option<Bytes>, JsonFaultReason> {
        if self.depth == 0 {
            let spaces = self.pending.iter().take_while(|byte| b" \t\r\n".contains(byte)).count();
            self.pending.advance(spaces);
            match self.pending.first() {
                None => return Ok(None),
                Some(b'{') => {}
                Some(_) => return Err(JsonFaultReason::WrongType),
            }
        }
        while self.scanned < self.pending.len() {
            let byte = self.pending[self.scanned];
            self.scanned += 1;
            // Before the depth: the fault is the same however the bytes arrive.
            if self.scanned > self.longest {
                return Err(JsonFaultReason::TooLong);
            }
            match (self.string, byte) {
                (StringState::AfterBackslash, _) | (StringState::Outside, b'"') => {
                    self.string = StringState::Inside;
                }
                (StringState::Inside, b'\\') => self.string = StringState::AfterBackslash,
                (StringState::Inside, b'"') => self.string = StringState::Outside,
                (StringState::Outside, b'{' | b'[') => {
                    self.depth += 1;
                    if self.depth > MAX_JSON_DEPTH {
                        return Err(JsonFaultReason::TooDeep);
                    }
                }
                (StringState::Outside, b'}' | b']') => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        let length = std::mem::take(&mut self.scanned);
                        return Ok(Some(self.pending.split_to(length).freeze()));
                    }
                }
                _ => {}
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(documents: &mut JsonDocuments, bytes: &[u8]) -> Vec<String> {
        documents.push(bytes);
        let mut found = Vec::new();
        while let Some(document) = documents.next().unwrap() {
            found.push(String::from_utf8(document.to_vec()).unwrap());
        }
        found
    }

    #[test]
    fn documents_end_where_their_objects_end() {
        let stream = r#" {"a":"}{\"\\"}{"b":[{}]}
            {}  "#;
        let wanted = [r#"{"a":"}{\"\\"}"#, r#"{"b":[{}]}"#, "{}"];
        let mut whole = JsonDocuments::new(100);
        assert_eq!(cut(&mut whole, stream.as_bytes()), wanted);
        assert_eq!(whole.finish(), Ok(()));
        let mut single = JsonDocuments::new(100);
        let bytes: Vec<_> = stream.bytes().flat_map(|byte| cut(&mut single, &[byte])).collect();
        assert_eq!(bytes, wanted);
        assert_eq!(single.finish(), Ok(()));
    }

    #[test]
    fn half_a_document_is_a_fault_at_the_end_only() {
        let mut documents = JsonDocuments::new(100);
        assert_eq!(cut(&mut documents, br#"{} {"a":"#), ["{}"]);
        assert_eq!(documents.finish().unwrap_err().reason, JsonFaultReason::Incomplete);
        assert_eq!(documents.next().unwrap_err().reason, JsonFaultReason::Incomplete);
    }

    #[test]
    fn a_fault_stays() {
        for (bytes, reason) in [
            (&b"null"[..], JsonFaultReason::WrongType),
            (b" [", JsonFaultReason::WrongType),
            (b"{\"key\":\"0123456789", JsonFaultReason::TooLong),
            (b"{\"key\":\"0123456789\"}", JsonFaultReason::TooLong),
        ] {
            let mut documents = JsonDocuments::new(17);
            documents.push(bytes);
            assert_eq!(documents.next().unwrap_err().reason, reason);
            documents.push(b"{}");
            assert_eq!(documents.next().unwrap_err().reason, reason);
            assert_eq!(documents.finish().unwrap_err().reason, reason);
        }
        let mut documents = JsonDocuments::new(1000);
        documents.push(&b"{\"x\":".repeat(MAX_JSON_DEPTH));
        assert_eq!(documents.next(), Ok(None));
        documents.push(b"[");
        assert_eq!(documents.next().unwrap_err().reason, JsonFaultReason::TooDeep);
    }

    #[test]
    fn the_limit_is_of_one_document() {
        let mut documents = JsonDocuments::new(7);
        assert_eq!(cut(&mut documents, &b" {\"a\":1}  ".repeat(50)).len(), 50);
        assert_eq!(cut(&mut documents, &b" ".repeat(50)), Vec::<String>::new());
    }
}
