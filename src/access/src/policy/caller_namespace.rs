//! The namespace of a caller, and the confinement of requests to it.
//!
//! Owns: finding the namespace by the caller's bindings and listener, and the judgement of touches. Must not
//! know: how requests are spliced, the consequence of a denial. Invariants (docs/decisions.md#d56): a caller
//! with two namespaces, or with one whose variable has no usable text, is refused and never unconfined; the
//! confinement holds in every mode of the policy, since a namespace is no grant.

use std::ops::ControlFlow;
use std::sync::Arc;

use super::grants::{VariableTexts, expand};
use keyward_config::policy_document::KeyTemplate;
use keyward_etcd::rpc::method::{Handler, Method};
use keyward_etcd::rpc::namespace::Namespace;
use keyward_etcd::rpc::schema::MessageId;
use keyward_etcd::rpc::touch::{self, Action, Touch, TouchTarget};

/// The part of the keyspace shown to a caller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CallerNamespace {
    /// All keys.
    #[default]
    Everything,
    /// The keys of this namespace.
    Within(Arc<Namespace>),
    /// Nothing: the caller has two namespaces, or a variable of its namespace has no usable text.
    Undecided,
}

/// The action of a request that leaves the caller's namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutsideNamespace(pub Action);

impl CallerNamespace {
    /// The namespace by all templates for the caller, each with the texts of the peer that it binds.
    pub(super) fn of(templates: &[(&KeyTemplate, VariableTexts<'_>)]) -> Self {
        let mut found = Self::Everything;
        for (template, texts) in templates {
            // A claim with several values would give several namespaces.
            let one = expand(template, Some(*texts)).filter(|keys| keys.len() == 1);
            let Some(namespace) = one.and_then(|keys| Namespace::new(keys.first()?)) else {
                return Self::Undecided;
            };
            match &found {
                Self::Within(other) if **other != namespace => return Self::Undecided,
                _ => found = Self::Within(Arc::new(namespace)),
            }
        }
        found
    }

    /// The namespace, if the caller has one.
    #[must_use]
    pub fn namespace(&self) -> Option<&Arc<Namespace>> {
        match self {
            Self::Within(namespace) => Some(namespace),
            Self::Everything | Self::Undecided => None,
        }
    }

    /// True if the caller's namespace hides the target of the touch: see [`hides`].
    #[must_use]
    pub fn hides(&self, method: &Method, touch: &Touch<'_>) -> bool {
        self.namespace().is_some() && hides(method, touch)
    }

    /// Judges a spliced request. `has_grants` is true if a policy is enforced and judges the request as well:
    /// then work on the cluster as a whole is left to the grants. Returns the leases that the request removes
    /// with their keys, to be judged by [`CallerNamespace::contains_keys`].
    ///
    /// # Errors
    /// The request leaves the namespace, or the namespace is undecided.
    pub fn confine(
        &self,
        method: &Method,
        message: &[u8],
        has_grants: bool,
    ) -> Result<Vec<i64>, OutsideNamespace> {
        let mut leases = Vec::new();
        let namespace = match self {
            Self::Everything => return Ok(leases),
            Self::Undecided => return Err(OutsideNamespace(Action::Read)),
            Self::Within(namespace) => namespace,
        };
        if names_store_keys(method) {
            return Err(OutsideNamespace(Action::Auth));
        }
        let mut outside = None;
        let visited = touch::visit(method, message, &mut |touch| {
            let Touch { action, target } = touch;
            let is_inside = match target {
                TouchTarget::Keys(_) if self.hides(method, &touch) => true,
                TouchTarget::Keys(range) if range.start.is_empty() => has_grants,
                TouchTarget::Keys(range) => namespace.contains(&range),
                // Neither leases nor members have keys, and clients need both.
                TouchTarget::Cluster => matches!(action, Action::Lease | Action::ClusterView) || has_grants,
                TouchTarget::KeysOfLease(lease) => {
                    // A removal; the keys in an answer are filtered. A foreign lease was replaced by none.
                    if action == Action::Write && lease != namespace.lease_bits() {
                        leases.push(lease);
                    }
                    true
                }
                // The splice left a lease of the namespace, unless leases of before count; another key on a
                // lease changes no other key.
                TouchTarget::KeysSharingLease(_) => true,
            };
            if is_inside {
                return ControlFlow::Continue(());
            }
            outside = Some(OutsideNamespace(action));
            ControlFlow::Break(())
        });
        match (outside, visited) {
            (Some(outside), _) => Err(outside),
            (None, Err(touch::UnreadableRequest)) => Err(OutsideNamespace(Action::Read)),
            (None, Ok(())) => Ok(leases),
        }
    }

    /// True if all keys are in the namespace.
    #[must_use]
    pub fn contains_keys<'k>(&self, keys: impl IntoIterator<Item = &'k [u8]>) -> bool {
        match self {
            Self::Everything => true,
            Self::Within(namespace) => keys.into_iter().all(|key| key.starts_with(namespace.prefix())),
            Self::Undecided => false,
        }
    }
}

/// True for the calls whose keys are those of the store, whatever grants say: roles are the cluster's, not
/// the namespace's.
fn names_store_keys(method: &Method) -> bool {
    matches!(
        method.body,
        MessageId::AuthRoleGrantPermissionRequest | MessageId::AuthRoleRevokePermissionRequest
    )
}

/// True if, in a namespace, the answer to a request tells nothing of the target of the touch: a list of
/// leases has only those of the namespace.
#[must_use]
pub fn hides(method: &Method, touch: &Touch<'_>) -> bool {
    method.handler == Handler::LeaseLeases && matches!(touch.target, TouchTarget::Keys(_))
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyward_etcd::identity::Peer;
    use keyward_etcd::identity::peer::JwtClaims;
    use keyward_etcd::rpc::method::lookup;

    fn of(peer: &Peer, templates: &[&str]) -> CallerNamespace {
        let templates: Vec<_> = templates.iter().map(|text| KeyTemplate::parse(text).unwrap()).collect();
        let texts = VariableTexts { peer, etcd_user: Some("e") };
        CallerNamespace::of(&templates.iter().map(|template| (template, texts)).collect::<Vec<_>>())
    }

    fn within(prefix: &str) -> CallerNamespace {
        CallerNamespace::Within(Arc::new(Namespace::new(prefix.as_bytes()).unwrap()))
    }

    fn password(name: &str) -> Peer {
        Peer::Password(name.into())
    }

    #[test]
    fn a_caller_has_one_namespace_or_none_or_is_undecided() {
        let alice = password("alice");
        assert_eq!(of(&alice, &[]), CallerNamespace::Everything);
        assert_eq!(of(&alice, &["/t/{user}/"]), within("/t/alice/"));
        assert_eq!(of(&alice, &["/t/{user}/", "/t/alice/"]), within("/t/alice/"));
        assert_eq!(of(&alice, &["/t/{etcd_user}/"]), within("/t/e/"));
        assert_eq!(of(&alice, &["/t/{user}/", "/u/"]), CallerNamespace::Undecided);
        for name in ["", ".", "..", "a/b", "a..b", "a\0", "a\\b", "a\n"] {
            assert_eq!(of(&password(name), &["/t/{user}/"]), CallerNamespace::Undecided, "{name:?}");
        }
        assert_eq!(of(&Peer::Listener("main".into()), &["/t/{user}/"]), CallerNamespace::Undecided);
        let rows = [("team", &["a", "b"][..]), ("one", &["c"])];
        let values = |values: &[&str]| values.iter().map(|value| (*value).to_owned()).collect();
        let claims: JwtClaims = rows.into_iter().map(|(name, of)| (name.to_owned(), values(of))).collect();
        let jwt = Peer::Jwt { issuer: "i".into(), subject: "s".into(), claims: claims.into() };
        assert_eq!(of(&jwt, &["/t/{claim.one}/"]), within("/t/c/"));
        assert_eq!(of(&jwt, &["/t/{claim.team}/"]), CallerNamespace::Undecided, "two values");
    }

    #[test]
    fn the_keyspace_as_a_whole_is_left_to_grants() {
        let confine = |path: &str, body: &[u8], has_grants| {
            within("/t/").confine(lookup(path).unwrap(), body, has_grants)
        };
        for path in ["Maintenance/Snapshot", "KV/Compact", "Auth/UserList", "Cluster/MemberAdd"] {
            let path = format!("/etcdserverpb.{path}");
            assert!(confine(&path, b"", false).is_err(), "{path}");
            assert_eq!(confine(&path, b"", true), Ok(Vec::new()), "{path}");
        }
        for path in ["Auth/RoleGrantPermission", "Auth/RoleRevokePermission"] {
            let path = format!("/etcdserverpb.{path}");
            assert!(confine(&path, b"", true).is_err(), "{path}");
        }
        for path in ["Cluster/MemberList", "Lease/LeaseGrant", "Lease/LeaseLeases", "KV/Txn"] {
            assert_eq!(confine(&format!("/etcdserverpb.{path}"), b"", false), Ok(Vec::new()), "{path}");
        }
        assert_eq!(confine("/etcdserverpb.Lease/LeaseRevoke", b"\x08\x07", true), Ok(vec![7]));
        // What is not spliced is outside, even with grants: /u, and /t/ up to the last key.
        assert!(confine("/etcdserverpb.KV/Range", b"\x0a\x02/u", true).is_err());
        assert!(confine("/etcdserverpb.KV/Range", b"\x0a\x04/t/a\x12\x01\0", true).is_err());
        assert!(confine("/etcdserverpb.KV/Range", b"\x0a\x04/t/a\x12\x02/t", true).is_ok(), "inverted");
        assert!(confine("/etcdserverpb.KV/Range", b"\x0a\x09", true).is_err(), "unreadable");
        let undecided = CallerNamespace::Undecided;
        assert!(undecided.confine(lookup("/etcdserverpb.KV/Txn").unwrap(), b"", true).is_err());
        assert!(!undecided.contains_keys([]) && within("/t/").contains_keys([&b"/t/a"[..]]));
        assert!(!within("/t/").contains_keys([&b"/t/a"[..], b"/t"]));
    }
}
