//! The proof that a policy allowed a request.
//!
//! Owns: the permit. Must not know: rules, callers. Invariant (docs/decisions.md#d30): a request to a member
//! is sent only with a permit, and only `policy` makes one: for a client's request after its decision, or for
//! a request of Keyward's own.

use super::interval_set::GrantId;

/// Permission to send a request to a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permit(PermitBasis);

/// The reason for a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PermitBasis {
    /// The policy allows the request, by this grant for the first key or action.
    Granted(GrantId),
    /// The policy does not judge the caller, or only counts denials.
    Unjudged,
    /// Keyward asks for itself.
    OwnRequest,
}

impl Permit {
    pub(super) const UNJUDGED: Self = Self(PermitBasis::Unjudged);

    pub(super) fn granted(grant: GrantId) -> Self {
        Self(PermitBasis::Granted(grant))
    }

    /// The permit for a request of Keyward itself, such as reading a revision: its answer never reaches a
    /// client as it is.
    #[must_use]
    pub fn for_own_request() -> Self {
        Self(PermitBasis::OwnRequest)
    }

    /// The grant that allowed the request, if the policy judged the request.
    #[must_use]
    pub fn grant(self) -> Option<GrantId> {
        match self.0 {
            PermitBasis::Granted(grant) => Some(grant),
            PermitBasis::Unjudged | PermitBasis::OwnRequest => None,
        }
    }
}
