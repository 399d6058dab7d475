//! Faults of our own, for the test of the simulation's checker: each breaks one promise on purpose.
//!
//! Owns: the list, and which of them is on for this thread. Must not know: what each breaks, which is said where it is
//! asked for. Invariant: without the cargo feature `faults` there are none, and to ask costs nothing.

/// A promise to break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// A watch resumes after the header's revision of what upstream told last, not after what was delivered.
    ResumeAtHeader,
    /// A watch resumes one revision late.
    OneLate,
    /// A watch resumes one revision early, and forgets that it had it.
    OneEarly,
    /// A revision that was held back at a cut counts as delivered.
    DropHeld,
    /// A resumed watch tells its client of its Created once more.
    DoubledCreated,
    /// An id that was given downstream is given again once it is free.
    ReusedId,
    /// An id that was used upstream is used again on the same stream.
    ReusedUpstreamId,
}

impl Planted {
    /// Every one.
    pub const ALL: [Self; 7] = [
        Self::ResumeAtHeader,
        Self::OneLate,
        Self::OneEarly,
        Self::DropHeld,
        Self::DoubledCreated,
        Self::ReusedId,
        Self::ReusedUpstreamId,
    ];

    /// Whether it is on.
    #[cfg(not(feature = "faults"))]
    pub(super) const fn is_on(self) -> bool {
        false
    }

    /// Whether it is on, on this thread.
    #[cfg(feature = "faults")]
    pub(super) fn is_on(self) -> bool {
        ON.get() == Some(self)
    }

    /// Turns this one on for this thread, and every other off.
    #[cfg(feature = "faults")]
    pub fn turn_on(self) {
        ON.set(Some(self));
    }
}

#[cfg(feature = "faults")]
thread_local! {
    static ON: std::cell::Cell<Option<Planted>> = const { std::cell::Cell::new(None) };
}
