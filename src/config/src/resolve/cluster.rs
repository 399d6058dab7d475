//! Resolves the etcd cluster: endpoints, TLS towards members, the user for probes.
//!
//! Owns: `[cluster]`. Must not know: listeners. Invariants: endpoints have one scheme and no duplicates, or
//! stem from SRV records; TLS is set if and only if the endpoints are https.

use std::time::Duration;

use super::{DAY, MOMENT, Resolver, SECOND};
use crate::trust::Strictness;
use crate::{
    ClientTls, Cluster, ClusterPin, Discovery, Endpoint, MemberPreference, MemberTrust, OutageTimes, Scheme,
    Srv, toml_file, values,
};

fn serves(target: Option<toml_file::TomlMemberPreference>) -> MemberPreference {
    match target {
        None | Some(toml_file::TomlMemberPreference::Any) => MemberPreference::Any,
        Some(toml_file::TomlMemberPreference::Leader) => MemberPreference::Leader,
    }
}

impl Resolver<'_> {
    pub(super) fn cluster(&mut self, cluster: toml_file::TomlCluster) -> Cluster {
        let endpoints_told = cluster.endpoints.is_some();
        let endpoints = if cluster.srv.is_some() { Vec::new() } else { self.endpoints(cluster.endpoints) };
        let srv = cluster.srv.and_then(|srv| self.srv(srv, endpoints_told));
        let schemes = |scheme| endpoints.iter().any(|endpoint| endpoint.scheme == scheme);
        let by_dns = |scheme| srv.as_ref().is_some_and(|srv| srv.scheme == scheme);
        let both = |scheme| schemes(scheme) || by_dns(scheme);
        let (http, https) = (both(Scheme::Http), both(Scheme::Https));
        if http && https {
            let reason =
                "http and https cannot be mixed: a password meant for TLS would be sent in the clear";
            self.findings.fault("cluster.endpoints", reason);
        }
        let tls = match cluster.tls {
            Some(tls) => {
                if http && !https {
                    let reason =
                        "is set, but the endpoints are http; write https://, or leave cluster.tls out";
                    self.findings.fault("cluster.tls", reason);
                }
                self.client_tls(tls)
            }
            None if https => {
                let reason = "https endpoints need the CA that members verify under (system roots are not \
                    used), or pinned_sha256";
                self.findings.missing("cluster.tls.ca", reason);
                None
            }
            None => None,
        };
        let probe = cluster.probe.and_then(|probe| {
            self.login("cluster.probe.user", probe.user, "cluster.probe.password_file", probe.password_file)
        });
        let pin = self.pin(cluster.id, cluster.identity);
        let hedge_after =
            self.duration("cluster.hedge_after", cluster.hedge_after, Duration::ZERO, Duration::ZERO..=DAY);
        let outage = self.outage_times(cluster.election_timeout, cluster.unreachable_timeout);
        let discovery = self.discovery(srv, cluster.dns, cluster.allowed_hosts);
        Cluster {
            tls,
            connect_timeout: self.duration(
                "cluster.connect_timeout",
                cluster.connect_timeout,
                2 * SECOND,
                MOMENT..=DAY,
            ),
            idle_timeout: self.duration(
                "cluster.idle_timeout",
                cluster.idle_timeout,
                60 * SECOND,
                SECOND..=DAY,
            ),
            token_ttl: self.duration("cluster.token_ttl", cluster.token_ttl, 300 * SECOND, SECOND..=DAY),
            pin,
            reads: serves(cluster.reads),
            writes: serves(cluster.writes),
            near: cluster.near.unwrap_or_default(),
            hedge_after: Some(hedge_after).filter(|after| !after.is_zero()),
            outage,
            probe,
            endpoints,
            discovery,
        }
    }

    fn outage_times(&mut self, election: Option<String>, unreachable: Option<String>) -> OutageTimes {
        let OutageTimes { election_timeout, unreachable_timeout } = OutageTimes::default();
        // etcd rejects a longer election timeout.
        let elections = MOMENT..=50 * SECOND;
        OutageTimes {
            election_timeout: self.duration(
                "cluster.election_timeout",
                election,
                election_timeout,
                elections,
            ),
            unreachable_timeout: self.duration(
                "cluster.unreachable_timeout",
                unreachable,
                unreachable_timeout,
                SECOND..=DAY,
            ),
        }
    }

    fn pin(&mut self, id: Option<String>, identity: Option<toml_file::TomlClusterIdentity>) -> ClusterPin {
        let follows = matches!(identity, Some(toml_file::TomlClusterIdentity::Follow));
        if follows && id.is_some() {
            let reason =
                "names one cluster, and identity = \"follow\" goes wherever the endpoints lead; choose one";
            self.findings.fault("cluster.id", reason);
        }
        match id.and_then(|id| self.checked("cluster.id", values::cluster_id(&id))) {
            Some(id) => ClusterPin::Id(id),
            None if follows => ClusterPin::Follow,
            None => ClusterPin::FirstAnswer,
        }
    }

    fn srv(&mut self, srv: toml_file::TomlClusterSrv, beside_endpoints: bool) -> Option<Srv> {
        if beside_endpoints {
            let reason = "says what the endpoints are, and cluster.endpoints does so too; choose one";
            self.findings.fault("cluster.srv", reason);
        }
        let path = "cluster.srv.domain";
        let domain = self.required(path, srv.domain, "the domain that has the SRV records is needed");
        let domain = domain.and_then(|domain| self.checked(path, values::domain(&domain)));
        let name = srv.name.and_then(|name| self.checked("cluster.srv.name", values::service_name(&name)));
        let scheme = match srv.scheme {
            Some(toml_file::TomlClusterScheme::Http) => Scheme::Http,
            Some(toml_file::TomlClusterScheme::Https) | None => Scheme::Https,
        };
        Some(Srv { domain: domain?, name, scheme })
    }

    fn discovery(
        &mut self,
        srv: Option<Srv>,
        dns: Option<Vec<String>>,
        allowed: Option<Vec<String>>,
    ) -> Discovery {
        let servers = dns.iter().flatten().enumerate();
        let dns = servers
            .filter_map(|(index, text)| {
                self.checked(&format!("cluster.dns[{index}]"), values::name_server(text))
            })
            .collect();
        // By default SRV targets outside of the domain are not allowed: a forged DNS answer must not redirect
        // passwords.
        let below = |srv: &Srv| vec![srv.domain.clone(), format!("*.{}", srv.domain)];
        let allowed = allowed.or_else(|| srv.as_ref().map(below));
        let forms = allowed.iter().flatten().enumerate();
        let allowed_hosts = forms
            .filter_map(|(index, text)| {
                self.checked(&format!("cluster.allowed_hosts[{index}]"), values::host_form(text))
            })
            .collect();
        Discovery { srv, dns, allowed_hosts }
    }

    fn endpoints(&mut self, urls: Option<Vec<String>>) -> Vec<Endpoint> {
        let path = "cluster.endpoints";
        let urls = urls.unwrap_or_default();
        if urls.is_empty() {
            self.findings.missing(path, "at least one endpoint is needed, as in [\"http://10.0.0.1:2379\"]");
        }
        let mut endpoints = Vec::new();
        for (index, url) in urls.iter().enumerate() {
            let path = format!("{path}[{index}]");
            match self.checked(&path, url.parse::<Endpoint>()) {
                Some(endpoint) if endpoints.contains(&endpoint) => {
                    self.findings.warn(&path, format!("{endpoint} stands here twice"));
                }
                Some(endpoint) => endpoints.push(endpoint),
                None => {}
            }
        }
        endpoints
    }

    fn client_tls(&mut self, tls: toml_file::TomlClusterTls) -> Option<ClientTls> {
        let path = "cluster.tls";
        let identity = match (tls.cert, tls.key) {
            (None, None) => None,
            (cert, key) => self.key_pair(path, cert, key),
        };
        let path = "cluster.tls.strict_certificates";
        let strictness = self.strictness(path, tls.strict_certificates, tls.ca.is_some());
        let unverified = tls.insecure_skip_verify == Some(true);
        let trust = self.member_trust((tls.ca, strictness), tls.pinned_sha256, unverified);
        Some(ClientTls { trust: trust?, identity })
    }

    /// Exactly one kind of trust is accepted: beside a weaker kind, a stronger kind would be a false promise.
    fn member_trust(
        &mut self,
        (ca, strictness): (Option<String>, Strictness),
        pins: Option<Vec<String>>,
        unverified: bool,
    ) -> Option<MemberTrust> {
        const CA: &str = "cluster.tls.ca";
        const PINS: &str = "cluster.tls.pinned_sha256";
        const UNVERIFIED: &str = "cluster.tls.insecure_skip_verify";
        const ONE: &str =
            "does not go with another of ca, pinned_sha256 and insecure_skip_verify: choose one";
        if pins.is_some() && ca.is_some() {
            self.findings.fault(PINS, ONE);
            return None;
        }
        if unverified && (ca.is_some() || pins.is_some()) {
            self.findings.fault(UNVERIFIED, ONE);
            return None;
        }
        if unverified {
            let reason = "members are NOT verified: whoever answers at their addresses, or stands between, \
                          gets every password, token and value. For a test, or to read a fingerprint; then \
                          set pinned_sha256";
            self.findings.warn(UNVERIFIED, reason);
            return Some(MemberTrust::Unverified);
        }
        let Some(pins) = pins else {
            let reason =
                "the CA that members verify under is needed (system roots are not used), or pinned_sha256";
            let ca = self.required(CA, ca, reason)?;
            return self.roots(CA, &ca).map(|roots| MemberTrust::Authorities(roots, strictness));
        };
        if pins.is_empty() {
            self.findings.fault(PINS, "names no certificate: nobody would be believed to be a member");
            return None;
        }
        let read: Vec<_> = pins
            .iter()
            .enumerate()
            .map(|(index, text)| self.checked(&format!("{PINS}[{index}]"), values::fingerprint(text)))
            .collect();
        Some(MemberTrust::Pinned(read.into_iter().collect::<Option<Vec<_>>>()?.into()))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::resolve::parse;

    const LISTENER: &str = "[[listener]]\nname = 'a'\naddress = '127.0.0.1:1'\n[cluster]\n";

    fn cluster(lines: &str) -> Cluster {
        let (config, _) =
            parse(&format!("{LISTENER}{lines}"), Path::new("/")).unwrap_or_else(|faults| panic!("{faults}"));
        Cluster::clone(&config.cluster)
    }

    fn faults(lines: &str) -> Vec<String> {
        let faults = parse(&format!("{LISTENER}{lines}"), Path::new("/")).expect_err("a fault");
        faults.iter().map(|fault| fault.path.clone()).collect()
    }

    #[test]
    fn members_are_found_by_endpoints_or_by_srv_records() {
        let by_srv = cluster("srv = { domain = 'Example.com.', name = 'blue', scheme = 'http' }\n");
        assert_eq!((by_srv.endpoints.len(), by_srv.scheme()), (0, Scheme::Http));
        let record = |cluster: &Cluster| cluster.discovery.srv.as_ref().map(Srv::record);
        assert_eq!(record(&by_srv).as_deref(), Some("_etcd-client-blue._tcp.example.com."));
        // A forged DNS answer must not redirect passwords.
        for host in ["example.com", "m1.example.com", "a.b.Example.com"] {
            assert!(by_srv.discovery.allows(host), "{host}");
        }
        for host in ["m1.example.com.elsewhere.org", "notexample.com", "10.0.0.1", "example.org"] {
            assert!(!by_srv.discovery.allows(host), "{host}");
        }
        let secure = "srv = { domain = 'example.com' }\n";
        assert_eq!(faults(secure), ["cluster.tls.ca"], "https, unless it says http");
        assert_eq!(faults("srv = { domain = 'a b', scheme = 'http' }\n"), ["cluster.srv.domain"]);
        assert_eq!(faults("srv = { scheme = 'http' }\n"), ["cluster.srv.domain"]);
        assert_eq!(faults("srv = { domain = 'a', name = 'a.b', scheme = 'http' }\n"), ["cluster.srv.name"]);
        let both = "endpoints = ['http://a:1']\nsrv = { domain = 'a', scheme = 'http' }\n";
        assert_eq!(faults(both), ["cluster.srv"]);
    }

    #[test]
    fn a_cluster_is_named_or_followed() {
        const ENDPOINT: &str = "endpoints = ['http://a:1']\n";
        let pin = |line: &str| cluster(&format!("{ENDPOINT}{line}")).pin;
        assert_eq!(pin(""), ClusterPin::FirstAnswer);
        assert_eq!(pin("identity = 'pinned'\n"), ClusterPin::FirstAnswer);
        assert_eq!(pin("identity = 'follow'\n"), ClusterPin::Follow);
        assert!(matches!(pin("identity = 'pinned'\nid = '1f'\n"), ClusterPin::Id(_)));
        assert_eq!(faults(&format!("{ENDPOINT}identity = 'follow'\nid = '1f'\n")), ["cluster.id"]);
        assert_eq!(faults(&format!("{ENDPOINT}identity = 'any'\n")), ["cluster.identity"]);
    }

    #[test]
    fn name_servers_and_forms_of_hosts_are_checked() {
        const ENDPOINT: &str = "endpoints = ['http://a:1']\n";
        let of = |line: &str| cluster(&format!("{ENDPOINT}{line}")).discovery;
        let servers = of("dns = ['10.0.0.53', '[::1]:5353', '::1']\n").dns;
        let told: Vec<String> = servers.iter().map(ToString::to_string).collect();
        assert_eq!(told, ["10.0.0.53:53", "[::1]:5353", "[::1]:53"]);
        assert_eq!(
            faults(&format!("{ENDPOINT}dns = ['ns.example.com', '10.0.0.1:0']\n")),
            ["cluster.dns[0]", "cluster.dns[1]"]
        );
        let allowed = of("allowed_hosts = ['*.etcd.Example.com', '10.0.*']\n");
        for host in ["a.etcd.example.com", "A.ETCD.example.com", "10.0.3.4"] {
            assert!(allowed.allows(host), "{host}");
        }
        for host in ["etcd.example.com", "a.etcd.example.com.evil", "110.0.3.4", ""] {
            assert!(!allowed.allows(host), "{host}");
        }
        assert!(of("").allows("anything"));
        assert_eq!(
            faults(&format!("{ENDPOINT}allowed_hosts = ['a b', '']\n")),
            ["cluster.allowed_hosts[0]", "cluster.allowed_hosts[1]"]
        );
    }

    #[test]
    fn members_are_believed_in_one_way() {
        const ENDPOINT: &str = "endpoints = ['https://a:1']\n";
        let pin = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let trust = |lines: &str| cluster(&format!("{ENDPOINT}{lines}")).tls.unwrap().trust;
        let pinned = trust(&format!("tls.pinned_sha256 = ['{pin}']\n"));
        assert!(matches!(&pinned, MemberTrust::Pinned(pins) if pins[0].to_string() == pin), "{pinned:?}");
        let text = format!("{LISTENER}{ENDPOINT}tls.insecure_skip_verify = true\n");
        let (config, warnings) = parse(&text, Path::new("/")).unwrap();
        let tls = config.cluster.tls.as_ref().unwrap();
        assert!(tls.trust == MemberTrust::Unverified && !tls.verifies_members());
        let told: Vec<_> = warnings.iter().map(|warning| warning.path.as_str()).collect();
        assert!(told.contains(&"cluster.tls.insecure_skip_verify"), "{told:?}");
        for (lines, fault) in [
            ("tls.insecure_skip_verify = false\n".to_owned(), "cluster.tls.ca"),
            ("tls.strict_certificates = true\n".to_owned(), "cluster.tls.ca"),
            ("tls.pinned_sha256 = []\n".to_owned(), "cluster.tls.pinned_sha256"),
            ("tls.pinned_sha256 = ['ab']\n".to_owned(), "cluster.tls.pinned_sha256[0]"),
            (format!("tls = {{ ca = 'a', pinned_sha256 = ['{pin}'] }}\n"), "cluster.tls.pinned_sha256"),
            (
                "tls = { ca = 'a', insecure_skip_verify = true }\n".to_owned(),
                "cluster.tls.insecure_skip_verify",
            ),
            (
                format!("tls = {{ pinned_sha256 = ['{pin}'], insecure_skip_verify = true }}\n"),
                "cluster.tls.insecure_skip_verify",
            ),
        ] {
            assert_eq!(faults(&format!("{ENDPOINT}{lines}")), [fault], "{lines}");
        }
    }
}
