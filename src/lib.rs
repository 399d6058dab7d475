//! Keyward.
