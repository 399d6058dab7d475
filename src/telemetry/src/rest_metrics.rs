//! The labels of requests on the HTTP face.
//!
//! Owns: the label set. Must not know: routes.

use prometheus_client::encoding::{EncodeLabel as _, EncodeLabelSet, LabelSetEncoder};

/// The labels of a request without gRPC.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RestLabels {
    /// The kind of path, from a closed set.
    pub path: &'static str,
    /// The HTTP status of the answer.
    pub status: u16,
}

impl EncodeLabelSet for RestLabels {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> Result<(), std::fmt::Error> {
        ("path", self.path).encode(encoder.encode_label())?;
        ("status", u32::from(self.status)).encode(encoder.encode_label())
    }
}
