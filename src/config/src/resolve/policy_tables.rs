//! Resolves `[policy]` and the policy: roles, groups, bindings.
//!
//! Owns: the validity of a policy as a whole. Must not know: the decision on a call. Invariants: all faults
//! of a policy are told together; a binding without any condition is a fault, since a forgotten condition
//! would give its roles to everybody.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::Resolver;
use super::map_tables::PeerNames;
use super::policy_coverage;
use crate::findings::{ConfigFaults, ConfigWarning};
use crate::policy_document::{
    ActionSet, GrantKeys, KeyTemplate, PolicyBinding, PolicyDigest, PolicyDocument, PolicyGrant, PolicyGroup,
    PolicyRole,
};
use crate::toml_file::{TomlPolicy, TomlPolicyMode, TomlRequireIdentity, TomlUnknownMethods};
use crate::toml_policy::{TomlBinding, TomlGrant, TomlGroup, TomlPolicyFile, TomlRange, TomlRole};
use crate::{
    Conditions, Listener, PolicyInEtcd, PolicyMode, PolicySettings, RequireIdentity, UnknownMethods,
    toml_parse, values,
};
use keyward_etcd::identity::pattern::PeerPattern;
use keyward_etcd::rpc::touch::Action;

/// Largest size of a policy, in bytes.
const MAX_POLICY: u64 = 8 << 20;

/// Reads a policy for a configuration with these listeners and issuers.
///
/// # Errors
/// All faults at once.
pub fn policy(
    text: &str,
    listeners: &[Arc<Listener>],
    issuers: &[Arc<str>],
) -> Result<(PolicyDocument, Vec<ConfigWarning>), ConfigFaults> {
    let (file, findings) = toml_parse::read(text);
    let mut resolver =
        Resolver { folder: Path::new(""), findings, files: Default::default(), memory_limit: None };
    let names = PeerNames::of(listeners, issuers.to_vec());
    let document = file.map(|file| resolver.policy_document(text, file, &names));
    resolver.findings.conclude(document)
}

/// Reads the pattern of a peer for a configuration with these listeners and issuers.
///
/// # Errors
/// The pattern is malformed, or names an unknown authority or issuer.
pub fn peer_pattern(
    text: &str,
    listeners: &[Arc<Listener>],
    issuers: &[Arc<str>],
) -> Result<PeerPattern, ConfigFaults> {
    let mut resolver = Resolver {
        folder: Path::new(""),
        findings: Default::default(),
        files: Default::default(),
        memory_limit: None,
    };
    let pattern = resolver.peer("peer", text, &PeerNames::of(listeners, issuers.to_vec()));
    resolver.findings.conclude(pattern).map(|(pattern, _)| pattern)
}

/// Reads a policy file.
///
/// # Errors
/// The file cannot be read, or is too large.
pub fn read_policy(path: &Path) -> Result<String, String> {
    let mut text = String::new();
    let opened = File::open(path).and_then(|file| file.take(MAX_POLICY + 1).read_to_string(&mut text));
    match opened {
        Ok(_) if text.len() as u64 > MAX_POLICY => Err(format!("{} is larger than 8 MiB", path.display())),
        Ok(_) => Ok(text),
        Err(error) => Err(format!("cannot read {}: {error}", path.display())),
    }
}

impl Resolver<'_> {
    /// Resolves `[policy]`, with the policy file. `stored` is the policy in etcd.
    pub(super) fn policy_settings(
        &mut self,
        policy: TomlPolicy,
        stored: Option<PolicyInEtcd>,
        listeners: &[Arc<Listener>],
        issuers: &[Arc<str>],
        listener_namespaces: Vec<(Arc<str>, KeyTemplate)>,
    ) -> PolicySettings {
        let mode = policy.mode.map_or(PolicyMode::Off, mode);
        let path = "policy.file";
        let file = policy.file.map(|name| self.file(path, &name));
        let document = file.as_ref().and_then(|file| {
            let text = self.checked(path, read_policy(file))?;
            match self::policy(&text, listeners, issuers) {
                Ok((document, warnings)) => {
                    for warning in warnings {
                        self.findings.warn(path, format!("{}: {warning}", file.display()));
                    }
                    Some(document)
                }
                Err(faults) => {
                    for fault in faults.iter() {
                        self.findings.fault(path, format!("{}: {fault}", file.display()));
                    }
                    None
                }
            }
        });
        if stored.is_none()
            && mode == PolicyMode::Enforce
            && document.as_ref().is_none_or(|policy| policy.bindings.is_empty())
        {
            self.findings.warn("policy.mode", "no binding gives anybody a role, so every call is refused");
        }
        let document = document.unwrap_or_default();
        let has_grants = |at: &usize| {
            document.roles.get(*at).is_some_and(|role| !(role.allow.is_empty() && role.deny.is_empty()))
        };
        let waits_for_mode =
            |binding: &PolicyBinding| binding.mode.is_none() && binding.roles.iter().any(has_grants);
        if policy.mode.is_none() && document.bindings.iter().any(waits_for_mode) {
            let reason = "is not said, and no grant of policy.file is judged: the default is \"off\"";
            self.findings.warn("policy.mode", reason);
        }
        self.check_listener_namespaces(&listener_namespaces, listeners, &document);
        let namespace_leases = self.namespace_leases(policy.namespace_leases);
        PolicySettings {
            mode,
            unknown_methods: match policy.unknown_methods {
                None | Some(TomlUnknownMethods::Refuse) => UnknownMethods::Refuse,
                Some(TomlUnknownMethods::Allow) => UnknownMethods::Allow,
            },
            require_identity: match policy.require_identity {
                None | Some(TomlRequireIdentity::Strict) => RequireIdentity::Strict,
                Some(TomlRequireIdentity::AsEtcd) => RequireIdentity::AsEtcd,
            },
            file,
            document: Arc::new(document),
            stored,
            listener_namespaces,
            namespace_leases,
            limits_mode: policy.limits_mode.map_or(PolicyMode::Enforce, self::mode),
            peer_limits: policy
                .peer_limits
                .map(|row| self.usage_limits("policy.peer_limits", row))
                .unwrap_or_default(),
            listener_limits: Vec::new(),
        }
    }

    fn policy_document(&mut self, text: &str, file: TomlPolicyFile, names: &PeerNames<'_>) -> PolicyDocument {
        let rows = file.role.into_iter().enumerate();
        let roles: Vec<_> = rows.map(|(at, row)| self.role(&format!("role[{at}]"), row)).collect();
        let rows = file.group.into_iter().enumerate();
        let groups: Vec<_> = rows.map(|(at, row)| self.group(&format!("group[{at}]"), row, names)).collect();
        self.unique("role", roles.iter().map(|role| &role.name));
        self.unique("group", groups.iter().map(|group| &group.name));
        let mut document =
            PolicyDocument { roles, groups, bindings: Vec::new(), digest: PolicyDigest::of(text) };
        for (at, row) in file.binding.into_iter().enumerate() {
            let binding = self.binding(&format!("binding[{at}]"), row, &document, names);
            document.bindings.push(binding);
        }
        self.check_namespaces(&document.bindings);
        self.warn_of_unused(&document);
        document
    }

    fn unique<'a>(&mut self, kind: &str, names: impl Iterator<Item = &'a Arc<str>>) {
        let mut seen = std::collections::HashSet::new();
        for (at, name) in names.enumerate() {
            if !name.is_empty() && !seen.insert(name) {
                self.findings.fault(&format!("{kind}[{at}].name"), format!("{name:?} stands there twice"));
            }
        }
    }

    fn role(&mut self, path: &str, row: TomlRole) -> PolicyRole {
        let name = self.name(path, row.name);
        let mut grants = |kind: &str, rows: Vec<TomlGrant>| -> Vec<_> {
            let rows = rows.into_iter().enumerate();
            rows.filter_map(|(at, row)| self.grant(&format!("{path}.{kind}[{at}]"), row)).collect()
        };
        let (allow, deny) = (grants("allow", row.allow), grants("deny", row.deny));
        let mut limits = |kind: &str, row: Option<_>| {
            row.map(|row| self.usage_limits(&format!("{path}.{kind}"), row)).unwrap_or_default()
        };
        let limits_of_each = limits("limits", row.limits);
        let total_limits = limits("total_limits", row.total_limits);
        PolicyRole { name, allow, deny, limits: limits_of_each, total_limits }
    }

    fn name(&mut self, path: &str, name: Option<String>) -> Arc<str> {
        let path = format!("{path}.name");
        let name = self.required(&path, name, "a name is needed").unwrap_or_default();
        if name.contains(char::is_control) {
            self.findings.fault(&path, "holds a control character");
        }
        name.into()
    }

    fn grant(&mut self, path: &str, row: TomlGrant) -> Option<PolicyGrant> {
        let mut actions = ActionSet::default();
        let words = row.actions.unwrap_or_default();
        if words.is_empty() {
            self.findings.missing(&format!("{path}.actions"), "at least one action is needed");
        }
        for (at, word) in words.iter().enumerate() {
            match Action::ALL.into_iter().find(|action| action.name() == word) {
                Some(action) => actions.insert(action),
                None => {
                    let known = Action::ALL.map(Action::name).join(", ");
                    self.findings
                        .fault(&format!("{path}.actions[{at}]"), format!("is none of the actions {known}"));
                }
            }
        }
        let on_keys = actions.iter().any(Action::is_on_keys);
        let TomlGrant { key, prefix, range, everything, .. } = row;
        let everything = everything == Some(true);
        let said = [key.is_some(), prefix.is_some(), range.is_some(), everything];
        match said.into_iter().filter(|said| *said).count() {
            0 if on_keys => {
                let reason = "the keys are needed: `key`, `prefix`, `range`, or `everything = true`";
                self.findings.missing(path, reason);
                return None;
            }
            0 | 1 => {}
            _ => {
                self.findings.fault(path, "names keys in more than one way");
                return None;
            }
        }
        let keys = if everything {
            Some(GrantKeys::Everything)
        } else if let Some(key) = key {
            Some(GrantKeys::Key(self.key(&format!("{path}.key"), &key)?))
        } else if let Some(prefix) = prefix {
            let (path, template) = (format!("{path}.prefix"), self.key(&format!("{path}.prefix"), &prefix)?);
            if !template.has_ends_of_variables() {
                let reason = "ends a variable without a slash: the keys of `alice` begin with those of `al`";
                self.findings.warn(&path, reason);
            }
            Some(GrantKeys::Prefix(template))
        } else if let Some(range) = range {
            Some(self.key_range(&format!("{path}.range"), range)?)
        } else {
            None
        };
        if keys.is_some() && !on_keys && !actions.is_empty() {
            self.findings.warn(path, "names keys, and none of its actions is on keys");
        }
        Some(PolicyGrant { actions, keys: keys.filter(|_| on_keys) })
    }

    pub(super) fn key(&mut self, path: &str, text: &str) -> Option<KeyTemplate> {
        if text.is_empty() {
            self.findings.fault(path, "is empty; write `everything = true` for all keys");
            return None;
        }
        self.checked(path, KeyTemplate::parse(text))
    }

    fn key_range(&mut self, path: &str, range: TomlRange) -> Option<GrantKeys> {
        let from = self.required(&format!("{path}.from"), range.from, "the first key is needed");
        let to = self.required(&format!("{path}.to"), range.to, "the key behind the last one is needed");
        let (from, to) = (from?, to?);
        let (from, to) = (self.key(&format!("{path}.from"), &from)?, self.key(&format!("{path}.to"), &to)?);
        if let (Some(first), Some(end)) = (from.fixed(), to.fixed())
            && end <= first
        {
            self.findings.fault(path, "is inverted: `to` must be above `from`");
        }
        Some(GrantKeys::Range(from, to))
    }

    fn group(&mut self, path: &str, row: TomlGroup, names: &PeerNames<'_>) -> PolicyGroup {
        let name = self.name(path, row.name);
        let members = row.members.unwrap_or_default();
        if members.is_empty() {
            self.findings.warn(path, format!("group {name:?} has no members"));
        }
        let members = members.iter().enumerate();
        let members = members
            .filter_map(|(at, text)| self.peer(&format!("{path}.members[{at}]"), text, names))
            .collect();
        PolicyGroup { name, members }
    }

    fn binding(
        &mut self,
        path: &str,
        row: TomlBinding,
        document: &PolicyDocument,
        names: &PeerNames<'_>,
    ) -> PolicyBinding {
        let roles = row.roles.unwrap_or_default();
        if roles.is_empty() && row.namespace.is_none() {
            let reason = "at least one role, or a namespace, is needed";
            self.findings.missing(&format!("{path}.roles"), reason);
        }
        let roles = roles.iter().enumerate().filter_map(|(at, name)| {
            let found = document.roles.iter().position(|role| *role.name == **name);
            if found.is_none() {
                self.findings.fault(&format!("{path}.roles[{at}]"), "is the name of no role");
            }
            found
        });
        let roles = roles.collect();
        let group = row.group.and_then(|name| {
            let found = document.groups.iter().position(|group| *group.name == *name);
            if found.is_none() {
                self.findings.fault(&format!("{path}.group"), "is the name of no group");
            }
            found
        });
        let listener = row.listener.map(Arc::from);
        if listener.as_ref().is_some_and(|name| !names.has_listener(name)) {
            self.findings.fault(&format!("{path}.listener"), "names no listener");
        }
        let conditions = self.conditions(
            path,
            row.peer.as_deref(),
            (row.san_uri.as_deref(), row.san_dns.as_deref()),
            (row.issuer.as_deref(), row.claim),
            row.network.as_deref(),
            names,
        );
        let everyone = row.everyone == Some(true);
        let has_condition = conditions != Conditions::default()
            || group.is_some()
            || row.etcd_user.is_some()
            || listener.is_some();
        match (everyone, has_condition) {
            (false, false) => {
                self.findings.missing(path, "binds nobody: a condition, or `everyone = true`, is needed");
            }
            (true, true) => self.findings.fault(path, "binds everyone, and names a condition"),
            _ => self.check_conditions(path, &conditions, names),
        }
        let until_path = format!("{path}.until");
        let until = row.until.and_then(|text| self.checked(&until_path, values::moment(&text)));
        let until = until.map(|seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        if until.is_some_and(|until| until <= SystemTime::now()) {
            self.findings.warn(&until_path, "has passed: the binding gives nobody anything");
        }
        let etcd_user = row.etcd_user.map(Arc::from);
        let namespace = row.namespace.and_then(|text| self.namespace(&format!("{path}.namespace"), &text));
        PolicyBinding {
            roles,
            conditions,
            group,
            etcd_user,
            listener,
            namespace,
            until,
            mode: row.mode.map(mode),
        }
    }

    fn warn_of_unused(&mut self, document: &PolicyDocument) {
        for (at, role) in document.roles.iter().enumerate() {
            if !document.bindings.iter().any(|binding| binding.roles.contains(&at)) {
                self.findings.warn(&format!("role[{at}]"), format!("no binding gives role {:?}", role.name));
            }
            for idle in policy_coverage::idle_grants(role) {
                self.findings.warn(&format!("role[{at}].{}", idle.place), idle.reason);
            }
            let has_limits = !(role.limits.is_empty() && role.total_limits.is_empty());
            if role.allow.is_empty() && role.deny.is_empty() && !has_limits {
                self.findings.warn(&format!("role[{at}]"), format!("role {:?} has no grant", role.name));
            }
        }
        for (at, group) in document.groups.iter().enumerate() {
            if !document.bindings.iter().any(|binding| binding.group == Some(at)) {
                let reason = format!("no binding is of group {:?}", group.name);
                self.findings.warn(&format!("group[{at}]"), reason);
            }
        }
    }
}

pub(super) fn mode(word: TomlPolicyMode) -> PolicyMode {
    match word {
        TomlPolicyMode::Off => PolicyMode::Off,
        TomlPolicyMode::Shadow => PolicyMode::Shadow,
        TomlPolicyMode::Enforce => PolicyMode::Enforce,
    }
}
