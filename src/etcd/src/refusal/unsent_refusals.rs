//! The statuses of calls of which no member saw a byte.
//!
//! Owns: the codes and the texts. Must not know: why nothing was sent. Invariant: only the text by which
//! clients send a write again at once says that another attempt may succeed at once.

use super::{Code, Refusal, RefusalReason, refusal};

impl Refusal {
    /// No byte of the call was sent. With exactly this text clientv3 retries even a write.
    pub const NOTHING_SENT: Self =
        refusal(RefusalReason::NoMember, Code::Unavailable, "there is no connection available");
    /// No byte of the call was sent: every ready member refused the certificate with which Keyward acts as
    /// this user. Not the text with which clientv3 sends a write again at once: a repetition finds the same,
    /// until somebody replaces the certificate.
    pub const CERTIFICATE_NOT_ACCEPTED: Self = refusal(
        RefusalReason::NoMember,
        Code::Unavailable,
        "keyward: the members do not accept this user's certificate",
    );
}
