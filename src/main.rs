//! Keyward.
fn main() {}
