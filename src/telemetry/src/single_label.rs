//! Label sets of a single label, used by most metric families.
//!
//! Must not know: any metric.

/// A label set of a single label, with a value from a closed set.
pub type SingleLabel = [(&'static str, String); 1];

/// A label set of a single label.
#[must_use]
pub fn one(name: &'static str, value: impl Into<String>) -> SingleLabel {
    [(name, value.into())]
}
