//! Bytes as base64 in a JSON document.
//!
//! Owns: which texts are taken. Must not know: fields, documents. Invariant: a text is taken if one of etcd's
//! two gateways takes the text; then both read the same bytes.
//!
//! The gateway of etcd 3.4 and 3.5 takes standard base64 with padding; that of 3.6 and 3.7 the URL-safe
//! alphabet, too, and decides by the text's length, with its line breaks, whether padding is needed. Both
//! leave out line breaks, and do not look at the loose bits of the last character (Go's `encoding/base64`,
//! and `unmarshalBytes` of protobuf-go's `encoding/protojson/decode.go`).

use std::borrow::Cow;
use std::sync::LazyLock;

use data_encoding::{BASE64, BASE64_NOPAD, BASE64URL, BASE64URL_NOPAD, Encoding};

/// With padding, and without.
struct Alphabet {
    padded: Encoding,
    unpadded: Encoding,
}

static STANDARD: LazyLock<Alphabet> = LazyLock::new(|| Alphabet::of(&BASE64, &BASE64_NOPAD));
static URL_SAFE: LazyLock<Alphabet> = LazyLock::new(|| Alphabet::of(&BASE64URL, &BASE64URL_NOPAD));

impl Alphabet {
    fn of(padded: &Encoding, unpadded: &Encoding) -> Self {
        Self { padded: with_loose_bits(padded), unpadded: with_loose_bits(unpadded) }
    }
}

fn with_loose_bits(strict: &Encoding) -> Encoding {
    let mut specification = strict.specification();
    specification.check_trailing_bits = false;
    // A specification that is valid with the check is valid without.
    specification.encoding().unwrap_or_else(|_| strict.clone())
}

/// Reads a text; `None` if the text is not base64.
pub(super) fn bytes_of_base64(text: &str) -> Option<Vec<u8>> {
    let is_url_safe = text.contains(['-', '_']);
    let alphabet = if is_url_safe { &*URL_SAFE } else { &*STANDARD };
    let characters = without_line_breaks(text);
    // The decoder takes padded texts in sequence, `YQ==Yg==`, for one text; Go refuses them.
    if characters.trim_end_matches('=').contains('=') {
        return None;
    }
    let has_padding = text.len().is_multiple_of(4);
    let as_3_6 = if has_padding { &alphabet.padded } else { &alphabet.unpadded };
    let decoded = as_3_6.decode(characters.as_bytes());
    let decoded = match decoded {
        Err(_) if !is_url_safe && !has_padding => alphabet.padded.decode(characters.as_bytes()),
        decoded => decoded,
    };
    decoded.ok()
}

fn without_line_breaks(text: &str) -> Cow<'_, str> {
    let is_break = ['\r', '\n'];
    if text.contains(is_break) { text.replace(is_break, "").into() } else { text.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_of_the_gateways_takes_is_taken() {
        let taken: &[(&str, &[u8])] = &[
            ("", b""),
            ("YQ==", b"a"),
            ("YQ", b"a"),
            ("-_8", b"\xfb\xff"),
            ("-_8=", b"\xfb\xff"),
            ("+/8=", b"\xfb\xff"),
            // Loose bits.
            ("YR==", b"a"),
            ("YR", b"a"),
            // By 3.4 and 3.5: `base64`, Ruby, Perl.
            ("YQ==\n", b"a"),
            ("YQ=\n=\r\n", b"a"),
            ("Zm9v\nYg==", b"foob"),
            ("\n", b""),
            // By 3.6 and 3.7.
            ("Zm9v\nYg", b"foob"),
            ("Y\nQ", b"a"),
            ("-_8\r\n", b"\xfb\xff"),
        ];
        for (text, bytes) in taken {
            assert_eq!(bytes_of_base64(text).as_deref(), Some(*bytes), "{text:?}");
        }
        let refused = [
            "YQ=", "Y", "YQ==Yg==", "====", "=", "+-AA", "secret!", "YQ ==",
            // As long as a text with padding, and without.
            "Zm8\n", // Padding in the URL-safe form at a length without.
            "-_8=\n",
        ];
        for text in refused {
            assert_eq!(bytes_of_base64(text), None, "{text:?}");
        }
    }
}
