//! The cluster behind us: endpoints, TLS towards them, as whom it is probed.
//!
//! Owns: `[cluster]`. Must not know: listeners.
//! Invariants: endpoints are of one scheme and no two the same; TLS is there exactly where they are https.

use super::{DAY, MOMENT, Resolver, SECOND};
use crate::config::{ClientTls, Cluster, ClusterPin, Endpoint, Scheme, Serves, file, values};

fn serves(target: Option<file::Target>) -> Serves {
    match target {
        None | Some(file::Target::Any) => Serves::Any,
        Some(file::Target::Leader) => Serves::Leader,
    }
}

impl Resolver<'_> {
    pub(super) fn cluster(&mut self, cluster: file::Cluster) -> Cluster {
        let endpoints = self.endpoints(cluster.endpoints);
        let schemes = |scheme| endpoints.iter().any(|endpoint| endpoint.scheme == scheme);
        let (http, https) = (schemes(Scheme::Http), schemes(Scheme::Https));
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
                let reason =
                    "https endpoints need the CA that members verify under (system roots are not used)";
                self.findings.missing("cluster.tls.ca", reason);
                None
            }
            None => None,
        };
        let probe = cluster.probe.and_then(|probe| {
            self.login("cluster.probe.user", probe.user, "cluster.probe.password_file", probe.password_file)
        });
        let pin = cluster.id.and_then(|id| self.checked("cluster.id", values::cluster_id(&id)));
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
            pin: pin.map_or(ClusterPin::FirstAnswer, ClusterPin::Id),
            reads: serves(cluster.reads),
            writes: serves(cluster.writes),
            near: cluster.near.unwrap_or_default(),
            probe,
            endpoints,
        }
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

    fn client_tls(&mut self, tls: file::ClusterTls) -> Option<ClientTls> {
        let path = "cluster.tls";
        let ca_path = "cluster.tls.ca";
        let ca = self.required(
            ca_path,
            tls.ca,
            "the CA that members verify under is needed (system roots are not used)",
        );
        let roots = ca.and_then(|name| self.roots(ca_path, &name));
        let identity = match (tls.cert, tls.key) {
            (None, None) => None,
            (cert, key) => self.key_pair(path, cert, key),
        };
        Some(ClientTls { roots: roots?, identity })
    }
}
