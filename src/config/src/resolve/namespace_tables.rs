//! Resolves namespaces: `namespace` of a listener and of a binding, and `namespace_leases`.
//!
//! Owns: the validity of each namespace, and of all together. Must not know: the namespace of a caller.
//! Invariants (docs/decisions.md#d56): no namespace is empty; the namespaces of two users never contain each
//! other; two namespaces that some caller would have at once, or whose leases have the same ids, are a fault
//! as far as the file shows.

use std::collections::HashMap;
use std::sync::Arc;

use super::Resolver;
use crate::policy_document::{KeyTemplate, PolicyBinding, PolicyDocument};
use crate::toml_file::{TomlListener, TomlNamespaceLeases};
use crate::{Conditions, Listener};
use keyward_etcd::rpc::namespace::Namespace;
use keyward_etcd::rpc::namespace::lease_ids::LeaseScope;

impl Resolver<'_> {
    /// Takes the namespaces out of the listeners' rows.
    pub(super) fn listener_namespaces(&mut self, rows: &mut [TomlListener]) -> Vec<(Arc<str>, KeyTemplate)> {
        let rows = rows.iter_mut().enumerate();
        let rows = rows.filter_map(|(at, row)| Some((at, row.name.clone()?, row.namespace.take()?)));
        rows.filter_map(|(at, name, text)| {
            let template = self.namespace(&format!("listener[{at}].namespace"), &text)?;
            Some((Arc::from(name), template))
        })
        .collect()
    }

    /// Parses a namespace.
    pub(super) fn namespace(&mut self, path: &str, text: &str) -> Option<KeyTemplate> {
        if text.is_empty() {
            self.findings.fault(path, "is empty; leave it out for all keys");
            return None;
        }
        let template = self.checked(path, KeyTemplate::parse(text))?;
        if !template.has_ends_of_variables() {
            let reason = "needs a / after each variable: without an end, al would see the keys of alice";
            self.findings.fault(path, reason);
            return None;
        }
        Some(template)
    }

    /// The leases that callers in a namespace can name.
    pub(super) fn namespace_leases(&mut self, leases: Option<TomlNamespaceLeases>) -> LeaseScope {
        match leases {
            None | Some(TomlNamespaceLeases::Own) => LeaseScope::Own,
            Some(TomlNamespaceLeases::Any) => {
                let reason = "callers in a namespace use the leases of all others too; \"own\" ends that";
                self.findings.warn("policy.namespace_leases", reason);
                LeaseScope::Any
            }
        }
    }

    /// Checks the namespaces of all bindings with each other.
    pub(super) fn check_namespaces(&mut self, bindings: &[PolicyBinding]) {
        let named = |at: usize| bindings.get(at).and_then(|binding| binding.namespace.as_ref());
        for (at, binding) in bindings.iter().enumerate() {
            let Some(namespace) = named(at) else { continue };
            let path = format!("binding[{at}].namespace");
            for (other_at, other) in bindings.iter().enumerate() {
                let Some(other_namespace) = named(other_at).filter(|other| *other != namespace) else {
                    continue;
                };
                if implies(binding, other) && (at > other_at || !implies(other, binding)) {
                    let reason = format!(
                        "is another than that of binding[{other_at}], which binds the same callers: a caller \
                         has one namespace"
                    );
                    self.findings.fault(&path, reason);
                }
                if other_namespace.is_beginning_of(namespace) {
                    self.warn_of_containing(&path, &format!("binding[{other_at}]"));
                }
            }
        }
        self.check_lease_ids(of_bindings(bindings));
    }

    /// Finds namespaces whose leases have the same ids. The texts of variables are not known here.
    fn check_lease_ids<'k>(&mut self, namespaces: impl Iterator<Item = (String, &'k KeyTemplate)>) {
        let mut known: HashMap<i64, (String, Namespace)> = HashMap::new();
        for (path, template) in namespaces {
            let Some(namespace) = template.fixed().and_then(Namespace::new) else { continue };
            let (place, other) =
                known.entry(namespace.lease_bits()).or_insert_with(|| (path.clone(), namespace.clone()));
            if *other != namespace {
                let reason = format!("has the lease ids of {place}, by chance: choose another prefix");
                self.findings.fault(&path, reason);
            }
        }
    }

    /// Checks the namespaces of listeners with each other, and with those of bindings.
    pub(super) fn check_listener_namespaces(
        &mut self,
        namespaces: &[(Arc<str>, KeyTemplate)],
        listeners: &[Arc<Listener>],
        document: &PolicyDocument,
    ) {
        for (name, namespace) in namespaces {
            let at = listeners.iter().position(|listener| listener.name == *name).unwrap_or_default();
            let path = format!("listener[{at}].namespace");
            for (other, other_namespace) in namespaces {
                if other_namespace.is_beginning_of(namespace) {
                    self.warn_of_containing(&path, &format!("listener {other:?}"));
                }
            }
            for (at, binding) in document.bindings.iter().enumerate() {
                let Some(other) = binding.namespace.as_ref().filter(|other| *other != namespace) else {
                    continue;
                };
                if binding.listener.as_ref() == Some(name) {
                    let reason = format!(
                        "is another than that of binding[{at}] of the policy, for callers of this listener: \
                         a caller has one namespace"
                    );
                    self.findings.fault(&path, reason);
                }
                if other.is_beginning_of(namespace) {
                    self.warn_of_containing(&path, &format!("binding[{at}] of the policy"));
                } else if namespace.is_beginning_of(other) {
                    self.warn_of_containing(&format!("policy: binding[{at}].namespace"), &path);
                }
            }
        }
        let of_listeners = namespaces.iter().map(|(name, namespace)| {
            let at = listeners.iter().position(|listener| listener.name == *name).unwrap_or_default();
            (format!("listener[{at}].namespace"), namespace)
        });
        self.check_lease_ids(of_bindings(&document.bindings).chain(of_listeners));
    }

    /// A warning and no fault: an operator may want to see the keys of all users.
    fn warn_of_containing(&mut self, path: &str, other: &str) {
        let reason =
            format!("lies within the namespace of {other}, whose callers see and change these keys too");
        self.findings.warn(path, reason);
    }
}

/// The namespaces of bindings, with their paths.
fn of_bindings(bindings: &[PolicyBinding]) -> impl Iterator<Item = (String, &KeyTemplate)> {
    let bindings = bindings.iter().enumerate();
    bindings
        .filter_map(|(at, binding)| Some((format!("binding[{at}].namespace"), binding.namespace.as_ref()?)))
}

/// True if every caller bound by `one` is bound by `other` too, as far as their texts show.
fn implies(one: &PolicyBinding, other: &PolicyBinding) -> bool {
    fn same<T: PartialEq>(one: &Option<T>, other: &Option<T>) -> bool {
        other.is_none() || one == other
    }
    let Conditions { peer, san_uri, san_dns, issuer, claims, network } = &other.conditions;
    let conditions = &one.conditions;
    same(&conditions.peer, peer)
        && same(&conditions.san_uri, san_uri)
        && same(&conditions.san_dns, san_dns)
        && same(&conditions.issuer, issuer)
        && same(&conditions.network, network)
        && claims.iter().all(|claim| conditions.claims.contains(claim))
        && same(&one.group, &other.group)
        && same(&one.etcd_user, &other.etcd_user)
        && same(&one.listener, &other.listener)
}

#[cfg(test)]
mod tests {
    use crate::Config;
    use crate::findings::ConfigFaults;
    use keyward_etcd::rpc::namespace::lease_ids::LeaseScope;

    fn bindings(rows: &[(&str, &str)]) -> String {
        let row =
            |(who, namespace): &(&str, &str)| format!("[[binding]]\n{who}\nnamespace = '{namespace}'\n");
        rows.iter().map(row).collect()
    }

    /// The paths of the faults, and of the warnings if there are none, about namespaces.
    fn told(rows: &[(&str, &str)]) -> Result<Vec<String>, Vec<String>> {
        let about = |path: &str| path.ends_with(".namespace").then(|| path.to_owned());
        match crate::policy(&bindings(rows), &[], &[]) {
            Ok((_, warnings)) => Ok(warnings.iter().filter_map(|warning| about(&warning.path)).collect()),
            Err(faults) => Err(faults.iter().map(|fault| fault.path.clone()).collect()),
        }
    }

    const A: &str = "peer = 'password:a'";
    const B: &str = "peer = 'password:b'";

    #[test]
    fn a_namespace_that_cannot_keep_users_apart_is_a_fault() {
        for bad in ["", "/t/{user}", "/t/{user}-x/", "/t/{user}{etcd_user}/", "/t/{users}/", "/t/{"] {
            assert_eq!(told(&[(A, bad)]), Err(vec!["binding[0].namespace".to_owned()]), "{bad:?}");
        }
        for good in ["/t/{user}/", "/t/{claim.team}/{user}/", "{user}/", "t", "\\xff\\xff", "/t/{{x}}"] {
            assert_eq!(told(&[(A, good)]), Ok(Vec::new()), "{good:?}");
        }
    }

    #[test]
    fn two_namespaces_of_the_same_callers_are_a_fault() {
        let second = Err(vec!["binding[1].namespace".to_owned()]);
        assert_eq!(told(&[(A, "/a/"), (A, "/b/")]), second);
        assert_eq!(told(&[("everyone = true", "/a/"), (B, "/b/")]), second);
        let narrow = "peer = 'password:a'\nnetwork = '10.0.0.0/8'";
        assert_eq!(told(&[(A, "/a/"), (narrow, "/b/")]), second);
        assert_eq!(told(&[(narrow, "/b/"), (A, "/a/")]), Err(vec!["binding[0].namespace".to_owned()]));
        assert_eq!(told(&[(A, "/a/"), (A, "/a/")]), Ok(Vec::new()), "the same twice");
        assert_eq!(told(&[(A, "/a/"), (B, "/b/")]), Ok(Vec::new()));
    }

    /// The leases of either would be those of the other.
    #[test]
    fn two_namespaces_with_the_same_lease_ids_are_a_fault() {
        let second = Err(vec!["binding[1].namespace".to_owned()]);
        assert_eq!(told(&[(A, "/139399/"), (B, "/151745/")]), second);
        assert_eq!(told(&[(A, "/139399/"), (B, "/151746/")]), Ok(Vec::new()));
        let faults = config("namespace = '/139399/'", &bindings(&[(A, "/151745/")])).unwrap_err();
        let paths: Vec<_> = faults.iter().map(|fault| fault.path.clone()).collect();
        assert_eq!(paths, ["listener[0].namespace"]);
    }

    #[test]
    fn leases_of_all_others_are_a_warning() {
        let (read, _) = config("namespace = '/l/'", "").unwrap();
        assert_eq!(read.policy.namespace_leases, LeaseScope::Own);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        let text = "[[listener]]\nname = 'one'\naddress = '127.0.0.1:1'\nnamespace = '/l/'\n\
             [cluster]\nendpoints = ['http://127.0.0.1:2']\n[policy]\nnamespace_leases = 'any'\n";
        std::fs::write(&path, text).unwrap();
        let (read, warnings) = crate::load(&path).unwrap();
        assert_eq!(read.policy.namespace_leases, LeaseScope::Any);
        assert!(warnings.iter().any(|warning| warning.path == "policy.namespace_leases"), "{warnings:?}");
    }

    #[test]
    fn a_namespace_within_another_is_a_warning() {
        let first = Ok(vec!["binding[0].namespace".to_owned()]);
        assert_eq!(told(&[(A, "/a/b/"), (B, "/a/")]), first);
        assert_eq!(told(&[(A, "/t/{user}/"), (B, "/t/")]), first);
        assert_eq!(told(&[(A, "/t/a"), (B, "/t/ab")]), Ok(vec!["binding[1].namespace".to_owned()]));
    }

    fn config(listener: &str, policy: &str) -> Result<(Config, Vec<String>), ConfigFaults> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("policy.toml"), policy).unwrap();
        let text = format!(
            "[[listener]]\nname = 'one'\naddress = '127.0.0.1:1'\n{listener}\n\
             [cluster]\nendpoints = ['http://127.0.0.1:2']\n[policy]\nfile = 'policy.toml'\n"
        );
        let path = folder.path().join("config.toml");
        std::fs::write(&path, text).unwrap();
        let (config, warnings) = crate::load(&path)?;
        let about = warnings.iter().map(|warning| warning.path.clone());
        Ok((config, about.filter(|path| path.ends_with("namespace")).collect()))
    }

    #[test]
    fn a_listener_has_a_namespace_beside_bindings() {
        let (read, warnings) = config("namespace = '/l/'", &bindings(&[(A, "/a/")])).unwrap();
        assert_eq!(read.policy.listener_namespaces.len(), 1);
        assert!(warnings.is_empty(), "{warnings:?}");
        let (_, warnings) = config("namespace = '/l/'", &bindings(&[(A, "/l/a/")])).unwrap();
        assert_eq!(warnings, ["policy: binding[0].namespace"]);
        let here = format!("{A}\nlistener = 'one'");
        let faults = config("namespace = '/l/'", &bindings(&[(&here, "/a/")])).unwrap_err();
        let paths: Vec<_> = faults.iter().map(|fault| fault.path.clone()).collect();
        assert_eq!(paths, ["listener[0].namespace"]);
        assert!(config("namespace = '/l/{user}'", "").is_err());
        assert!(config("namespace = ''", "").is_err());
    }
}
