//! Planted faults for the test of the simulation's checker: each fault breaks a promise on purpose.
//!
//! Owns: the list, and the fault active on the current thread. Must not know: the effect of a fault,
//! implemented at each call of `is_on`. Invariant: without the cargo feature `faults` no fault can be active,
//! and the check costs no time.

/// A promise to break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlantedFault {
    /// A watch resumes after the header revision of upstream's last response, not after the delivered events.
    ResumeAtHeader,
    /// A watch resumes one revision late.
    OneLate,
    /// A watch resumes one revision early, and delivers the repeated revision.
    OneEarly,
    /// A revision held back when the stream is lost counts as delivered.
    DropHeld,
    /// A resumed watch sends a second Created to the client.
    DoubledCreated,
    /// A downstream id is assigned again once free.
    ReusedId,
    /// An upstream id is used again on the same stream.
    ReusedUpstreamId,
    /// A watch that joins a feed begins with the feed's next message.
    JoinsAhead,
    /// A feed's progress answer overtakes the messages before it.
    HastyProgress,
}

impl PlantedFault {
    /// Every planted fault.
    pub const ALL: [Self; 9] = [
        Self::ResumeAtHeader,
        Self::OneLate,
        Self::OneEarly,
        Self::DropHeld,
        Self::DoubledCreated,
        Self::ReusedId,
        Self::ReusedUpstreamId,
        Self::JoinsAhead,
        Self::HastyProgress,
    ];

    /// True if the fault is active.
    #[cfg(not(feature = "faults"))]
    pub(super) const fn is_on(self) -> bool {
        false
    }

    /// True if the fault is active on the current thread.
    #[cfg(feature = "faults")]
    pub(super) fn is_on(self) -> bool {
        ON.get() == Some(self)
    }

    /// Activates this fault on the current thread, and deactivates any other.
    #[cfg(feature = "faults")]
    pub fn turn_on(self) {
        ON.set(Some(self));
    }
}

#[cfg(feature = "faults")]
thread_local! {
    static ON: std::cell::Cell<Option<PlantedFault>> = const { std::cell::Cell::new(None) };
}
