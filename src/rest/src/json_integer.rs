//! Integers written as JSON numbers, exactly: `1e3` and `5.0` are integers, and no digit is lost to a
//! float.
//!
//! Follows `protobuf-go/internal/encoding/json/decode_number.go`, so that the same texts have the same
//! values.

use super::json_fault::JsonFaultReason;

/// The most digits of an integer of 64 bits.
const MAX_DIGITS: usize = 20;

/// Reads the text of a JSON number.
///
/// # Errors The text is no JSON number, has a fraction, or has more digits than any field takes. The value
/// is not yet checked against the field's range.
pub(super) fn integer(text: &str) -> Result<i128, JsonFaultReason> {
    let parts = NumberParts::of(text).ok_or(JsonFaultReason::NotInteger)?;
    let fraction = parts.fraction.trim_end_matches('0');
    let whole = if parts.whole == "0" { "" } else { parts.whole };
    if whole.is_empty() && fraction.is_empty() {
        return Ok(0);
    }
    let exponent = parts.exponent.parse::<i32>().map_err(|_| JsonFaultReason::OutOfRange)?;
    let shift = exponent.unsigned_abs() as usize;
    let digits = if exponent >= 0 {
        let zeros = shift.checked_sub(fraction.len()).ok_or(JsonFaultReason::NotInteger)?;
        if whole.len() + shift > MAX_DIGITS {
            return Err(JsonFaultReason::OutOfRange);
        }
        format!("{whole}{fraction}{}", "0".repeat(zeros))
    } else {
        let kept = whole.len().checked_sub(shift).ok_or(JsonFaultReason::NotInteger)?;
        let (kept, dropped) = whole.split_at(kept);
        if !fraction.is_empty() || dropped.bytes().any(|digit| digit != b'0') {
            return Err(JsonFaultReason::NotInteger);
        }
        kept.to_owned()
    };
    let digits = digits.trim_start_matches('0');
    if digits.len() > MAX_DIGITS {
        return Err(JsonFaultReason::OutOfRange);
    }
    let value = digits.parse::<i128>().map_err(|_| JsonFaultReason::NotInteger)?;
    Ok(if parts.is_negative { -value } else { value })
}

/// A number's text in its parts; `exponent` is "0" where the text has none.
struct NumberParts<'a> {
    is_negative: bool,
    whole: &'a str,
    fraction: &'a str,
    exponent: &'a str,
}

impl<'a> NumberParts<'a> {
    /// Splits by the grammar of RFC 8259.
    fn of(text: &'a str) -> Option<Self> {
        let (is_negative, rest) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let (mantissa, exponent) = match rest.split_once(['e', 'E']) {
            Some((mantissa, exponent)) => (mantissa, exponent),
            None => (rest, "0"),
        };
        let (whole, fraction) = match mantissa.split_once('.') {
            Some((whole, fraction)) if is_digits(fraction) => (whole, fraction),
            Some(_) => return None,
            None => (mantissa, ""),
        };
        let has_leading_zero = whole.len() > 1 && whole.starts_with('0');
        let is_exponent = is_digits(exponent.strip_prefix(['+', '-']).unwrap_or(exponent));
        (is_digits(whole) && !has_leading_zero && is_exponent).then_some(Self {
            is_negative,
            whole,
            fraction,
            exponent,
        })
    }
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_exact() {
        let read = [
            ("0", 0),
            ("-0", 0),
            ("-0.0e7", 0),
            ("0e9", 0),
            ("5", 5),
            ("5.0", 5),
            ("-5.000", -5),
            ("1e3", 1000),
            ("1E+3", 1000),
            ("1.50e1", 15),
            ("0.5e1", 5),
            ("0.0005e5", 50),
            ("500e-2", 5),
            ("9223372036854775807", i128::from(i64::MAX)),
            ("9007199254740993.0", 9_007_199_254_740_993),
            ("-9223372036854775808", i128::from(i64::MIN)),
            ("18446744073709551615", i128::from(u64::MAX)),
            ("1.8446744073709551615e19", i128::from(u64::MAX)),
        ];
        for (text, value) in read {
            assert_eq!(integer(text), Ok(value), "{text}");
        }
    }

    #[test]
    fn fractions_and_texts_are_refused() {
        for text in ["0.5", "1.5", "5e-1", "15e-1", "1.23e1", "1e-400", "0.1e0"] {
            assert_eq!(integer(text), Err(JsonFaultReason::NotInteger), "{text}");
        }
        for text in [
            "", "-", "+1", "01", "-01", "1.", ".5", "1e", "1e+", "1e1.5", "0x1", "1 ", " 1", "1_0", "NaN",
            "--1",
        ] {
            assert_eq!(integer(text), Err(JsonFaultReason::NotInteger), "{text}");
        }
        for text in ["1e20", "123456789012345678901", "1e2147483648", "1e99999999999"] {
            assert_eq!(integer(text), Err(JsonFaultReason::OutOfRange), "{text}");
        }
    }
}
