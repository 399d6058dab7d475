//! The compression of a client's messages.
//!
//! Must not know: frames, how a message is inflated.

use http::HeaderMap;

use crate::refusal::Refusal;

/// A client's compression of a call's messages (`grpc-encoding`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encoding {
    /// Messages are not compressed.
    #[default]
    Identity,
    /// A message may be compressed with gzip, as told by the flag of its frame.
    Gzip,
}

impl Encoding {
    /// Reads `grpc-encoding`.
    ///
    /// # Errors
    /// An encoding besides gzip, refused in grpc-go's words: etcd has registered only gzip, since 3.5.
    pub fn of(headers: &HeaderMap) -> Result<Self, Refusal> {
        match headers.get("grpc-encoding").map(|value| value.as_bytes()) {
            None | Some(b"" | b"identity") => Ok(Self::Identity),
            Some(b"gzip") => Ok(Self::Gzip),
            Some(other) => Err(Refusal::compressed(&String::from_utf8_lossy(other))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::refusal::Code;

    #[test]
    fn gzip_alone_is_known() {
        let of = |value: &'static str| {
            Encoding::of(&HeaderMap::from_iter([(
                http::HeaderName::from_static("grpc-encoding"),
                http::HeaderValue::from_static(value),
            )]))
        };
        assert_eq!(Encoding::of(&HeaderMap::new()).ok(), Some(Encoding::Identity));
        assert_eq!(of("identity").ok(), Some(Encoding::Identity));
        assert_eq!(of("gzip").ok(), Some(Encoding::Gzip));
        for unknown in ["deflate", "GZIP", "snappy", "gzip,identity"] {
            assert_eq!(of(unknown).expect_err("unknown").code(), Code::Unimplemented, "{unknown}");
        }
    }
}
