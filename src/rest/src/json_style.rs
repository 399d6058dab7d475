//! The forms of JSON written by etcd's gateways.

/// The gateway whose form a reply takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JsonStyle {
    /// grpc-gateway v1 with `jsonpb`, in etcd 3.4 and 3.5.
    GatewayV1,
    /// grpc-gateway v2 with `protojson`, in etcd 3.6 and 3.7.
    GatewayV2,
}

/// The place of a message in a response body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JsonPlace {
    /// The message is the whole body.
    Body,
    /// The message is the `result` of a stream's line, which both gateways write through `encoding/json`.
    StreamResult,
}

impl JsonStyle {
    /// True if `<`, `>`, `&`, U+2028 and U+2029 are escaped, as `encoding/json` does. `protojson` does not;
    /// a stream's line is compacted by `encoding/json` in both gateways.
    #[must_use]
    pub fn escapes_html(self, place: JsonPlace) -> bool {
        self == Self::GatewayV1 || place == JsonPlace::StreamResult
    }
}
