//! A value protected from accidental disclosure: masked when printed, wiped when dropped.
//!
//! Owns: the wrapper. Must not know: the secret's use. Invariants: [`Secret::expose`] is the only access, so
//! a reviewer can search for it; values are compared by their digests (the time of a bytewise comparison
//! discloses the length of a correct prefix); `serde` is missing (no secret is ever serialized).

use std::fmt;

use sha2::{Digest as _, Sha256};
use zeroize::Zeroize;

/// A password, a key, or a further value to keep out of logs, errors and dumps.
pub struct Secret<T: Zeroize>(T);

impl<T: Zeroize> Secret<T> {
    /// Takes ownership of the value. Earlier copies are left to the caller to wipe.
    #[must_use]
    pub fn new(value: T) -> Self {
        Self(value)
    }

    /// The value itself.
    #[must_use]
    pub fn expose(&self) -> &T {
        &self.0
    }
}

impl<T: Zeroize> From<T> for Secret<T> {
    fn from(value: T) -> Self {
        Self(value)
    }
}

/// Each copy is wiped on its own drop.
impl<T: Zeroize + Clone> Clone for Secret<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: Zeroize + AsRef<[u8]>> PartialEq for Secret<T> {
    fn eq(&self, other: &Self) -> bool {
        Sha256::digest(&self.0) == Sha256::digest(&other.0)
    }
}

impl<T: Zeroize> Drop for Secret<T> {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl<T: Zeroize> fmt::Debug for Secret<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl<T: Zeroize> fmt::Display for Secret<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    #[test]
    fn is_masked_however_it_is_printed() {
        let secret = Secret::new(String::from("hunter2"));
        let nested = Some(vec![secret.clone()]);
        for text in
            [format!("{secret}"), format!("{secret:?}"), format!("{secret:#?}"), format!("{nested:?}")]
        {
            assert!(!text.contains("hunter"), "{text}");
            assert!(text.contains("***"), "{text}");
        }
        assert_eq!(secret.expose(), "hunter2");
    }

    #[test]
    fn is_wiped_when_dropped() {
        struct Witness(Rc<Cell<u32>>);
        impl Zeroize for Witness {
            fn zeroize(&mut self) {
                self.0.set(self.0.get() + 1);
            }
        }
        let wiped = Rc::new(Cell::new(0));
        drop(Secret::new(Witness(Rc::clone(&wiped))));
        assert_eq!(wiped.get(), 1);
    }
}
