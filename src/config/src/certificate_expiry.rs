//! The certificates and revocation lists named by the configuration, with the times of their validity.
//!
//! Owns: collecting the certificates and lists, and reading their times. Must not know: the thresholds of a
//! warning, the names of metrics. Invariant: a chain is good from the latest begin to the earliest expiry in
//! the chain, since any certificate that is not good invalidates the chain.

use std::time::{Duration, SystemTime};

use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use x509_parser::prelude::{ASN1Time, CertificateRevocationList, FromDer as _, X509Certificate};
use x509_parser::x509::X509Name;

use crate::upstream_users::UserCredential;
use crate::{ClientTls, Config};
use keyward_base::pem::Crls;

/// The use of a configured certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CertificateUse {
    /// Presented to the clients of a listener.
    Listener,
    /// The authorities of a listener's client certificates.
    ListenerClientCa,
    /// The revocation lists of these authorities.
    ListenerCrl,
    /// Presented to members.
    Members,
    /// The authorities of the members' certificates.
    MembersCa,
    /// Presented to members on behalf of an etcd user.
    User,
    /// The authority that signs minted certificates.
    MintCa,
    /// Presented to the collector of audit records.
    AuditCollector,
    /// The authorities of this collector's certificate.
    AuditCollectorCa,
    /// Presented to the collector of spans and log records.
    TraceCollector,
    /// The authorities of this collector's certificate.
    TraceCollectorCa,
}

/// The expiry of a certificate, a chain, or a set of authorities.
#[derive(Debug, PartialEq, Eq)]
pub struct CertificateExpiry {
    /// The use of the certificate.
    pub usage: CertificateUse,
    /// The listener, the etcd user, or the table of the configuration that names the certificate.
    pub name: String,
    /// The begin of the validity.
    pub begins: SystemTime,
    /// Time of expiry; of a revocation list the time by which the next one is due.
    pub ends: SystemTime,
    /// The certificate and what is presented with it; empty for authorities and lists.
    pub chain: Vec<CertificateDer<'static>>,
}

/// The authorities of a listener's client certificates beside its revocation lists.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RevocationCoverage {
    /// The subjects of authorities without a list: no certificate under them is accepted.
    pub uncovered: Vec<String>,
    /// The issuers of lists that are no authority of the listener.
    pub foreign: Vec<String>,
}

impl CertificateUse {
    /// All uses.
    pub const ALL: [Self; 11] = [
        Self::Listener,
        Self::ListenerClientCa,
        Self::ListenerCrl,
        Self::Members,
        Self::MembersCa,
        Self::User,
        Self::MintCa,
        Self::AuditCollector,
        Self::AuditCollectorCa,
        Self::TraceCollector,
        Self::TraceCollectorCa,
    ];

    /// Label of the use in metrics.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Listener => "listener",
            Self::ListenerClientCa => "listener_client_ca",
            Self::ListenerCrl => "listener_crl",
            Self::Members => "members",
            Self::MembersCa => "members_ca",
            Self::User => "user",
            Self::MintCa => "mint_ca",
            Self::AuditCollector | Self::TraceCollector => "collector",
            Self::AuditCollectorCa | Self::TraceCollectorCa => "collector_ca",
        }
    }

    /// The key of `config.toml` that names the file. A reload follows each of these files: what is advised
    /// about a certificate that ends relies on it.
    #[must_use]
    pub fn file_key(self) -> &'static str {
        match self {
            Self::Listener => "listener.tls.cert",
            Self::ListenerClientCa => "listener.tls.client_ca",
            Self::ListenerCrl => "listener.tls.client_crl",
            Self::Members => "cluster.tls.cert",
            Self::MembersCa => "cluster.tls.ca",
            Self::User => "user.cert",
            Self::MintCa => "mint.ca",
            Self::AuditCollector => "audit.otlp.cert",
            Self::AuditCollectorCa => "audit.otlp.ca",
            Self::TraceCollector => "trace.cert",
            Self::TraceCollectorCa => "trace.ca",
        }
    }

    /// Consequence of the expiry.
    #[must_use]
    pub fn loss(self) -> &'static str {
        match self {
            Self::Listener => "clients refuse to connect",
            Self::ListenerClientCa => "no client certificate is good any more",
            Self::ListenerCrl => "what was revoked since is not known",
            Self::Members => "members refuse connections",
            Self::MembersCa => "no member is believed",
            Self::User => "members refuse this user's connections",
            Self::MintCa => "members refuse what is minted",
            Self::AuditCollector => "the collector refuses audit records",
            Self::AuditCollectorCa => "the collector of audit records is not believed",
            Self::TraceCollector => "the collector refuses spans and log records",
            Self::TraceCollectorCa => "the collector of spans and log records is not believed",
        }
    }
}

impl CertificateExpiry {
    /// True if `now` is within the validity.
    #[must_use]
    pub fn is_good(&self, now: SystemTime) -> bool {
        self.begins <= now && now < self.ends
    }

    /// Configuration key naming the certificate.
    #[must_use]
    pub fn key(&self) -> String {
        let name = &self.name;
        match self.usage {
            CertificateUse::Listener => format!("listener {name}: tls.cert"),
            CertificateUse::ListenerClientCa => format!("listener {name}: tls.client_ca"),
            CertificateUse::ListenerCrl => format!("listener {name}: tls.client_crl"),
            CertificateUse::User => format!("user {name}: cert"),
            // These stand in one table each.
            usage => usage.file_key().to_owned(),
        }
    }
}

/// The certificates of `read` that are not good now, while those in force in their place are.
#[must_use]
pub fn worse_now(in_force: &Config, read: &Config, now: SystemTime) -> Vec<CertificateExpiry> {
    let good = configured_certificates(in_force);
    let is_replaced = |new: &CertificateExpiry| {
        let same = |old: &&CertificateExpiry| (old.usage, &old.name) == (new.usage, &new.name);
        good.iter().find(same).is_some_and(|old| old.is_good(now))
    };
    let mut worse = configured_certificates(read);
    worse.retain(|new| !new.is_good(now) && is_replaced(new));
    worse
}

/// All certificates named by the configuration. A use and a name occur together once.
#[must_use]
pub fn configured_certificates(config: &Config) -> Vec<CertificateExpiry> {
    let mut all = ExpiryList::default();
    for listener in &config.listeners {
        let Some(tls) = &listener.tls else { continue };
        all.add(CertificateUse::Listener, &listener.name, tls.identity.chain());
        if let Some(ca) = listener.client_ca() {
            all.add_authorities(CertificateUse::ListenerClientCa, &listener.name, ca.roots.certificates());
            all.add_lists(&listener.name, ca.crls.as_ref().map_or(&[], Crls::lists));
        }
    }
    if let Some(tls) = &config.cluster.tls {
        all.add_client_tls((CertificateUse::Members, CertificateUse::MembersCa), "cluster.tls", tls);
    }
    for (name, credential) in &config.users.named {
        if let UserCredential::Certificate(pair) = credential {
            all.add(CertificateUse::User, name.as_str(), pair.chain());
        }
    }
    if let Some(mint) = &config.users.mint {
        all.add(CertificateUse::MintCa, "mint", mint.authority.chain());
    }
    if let Some(tls) = config.audit.as_ref().and_then(|audit| audit.otlp.as_ref()?.collector.tls.as_ref()) {
        all.add_client_tls(
            (CertificateUse::AuditCollector, CertificateUse::AuditCollectorCa),
            "audit.otlp",
            tls,
        );
    }
    if let Some(tls) = config.trace.as_ref().and_then(|trace| trace.collector.tls.as_ref()) {
        all.add_client_tls((CertificateUse::TraceCollector, CertificateUse::TraceCollectorCa), "trace", tls);
    }
    all.0
}

/// The certificates collected so far.
#[derive(Default)]
struct ExpiryList(Vec<CertificateExpiry>);

impl ExpiryList {
    fn add(&mut self, usage: CertificateUse, name: &str, chain: &[CertificateDer<'static>]) {
        let times = chain
            .iter()
            .filter_map(validity_of)
            .reduce(|one, other| (one.0.max(other.0), one.1.min(other.1)));
        self.push(usage, name, times, chain);
    }

    fn push(
        &mut self,
        usage: CertificateUse,
        name: &str,
        times: Option<(SystemTime, SystemTime)>,
        chain: &[CertificateDer<'static>],
    ) {
        let chain = chain.to_vec();
        let named = |(begins, ends)| CertificateExpiry { usage, name: name.to_owned(), begins, ends, chain };
        self.0.extend(times.map(named));
    }

    /// Each authority vouches for separate certificates, so the first one to begin and the last one to expire
    /// count.
    fn add_authorities(&mut self, usage: CertificateUse, name: &str, all: &[CertificateDer<'static>]) {
        let times =
            all.iter().filter_map(validity_of).reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)));
        self.push(usage, name, times, &[]);
    }

    /// A list without a time for the next one never ends. The list that is due first counts.
    fn add_lists(&mut self, name: &str, lists: &[CertificateRevocationListDer<'static>]) {
        let times = |list: &CertificateRevocationListDer<'_>| {
            let (_, list) = CertificateRevocationList::from_der(list).ok()?;
            Some((system_time(list.last_update())?, system_time(list.next_update()?)?))
        };
        let first_due = lists.iter().filter_map(times).min_by_key(|(_, ends)| *ends);
        self.push(CertificateUse::ListenerCrl, name, first_due, &[]);
    }

    fn add_client_tls(&mut self, (own, ca): (CertificateUse, CertificateUse), name: &str, tls: &ClientTls) {
        self.add_authorities(ca, name, tls.authorities());
        if let Some(identity) = &tls.identity {
            self.add(own, name, identity.chain());
        }
    }
}

fn validity_of(der: &CertificateDer<'_>) -> Option<(SystemTime, SystemTime)> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let validity = certificate.validity();
    Some((system_time(validity.not_before)?, system_time(validity.not_after)?))
}

/// A time before 1970 is 1970.
fn system_time(time: ASN1Time) -> Option<SystemTime> {
    let since = u64::try_from(time.timestamp()).unwrap_or(0);
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(since))
}

impl RevocationCoverage {
    /// Compares the names of authorities with those of the lists' issuers.
    #[must_use]
    pub fn of(authorities: &[CertificateDer<'_>], lists: &[CertificateRevocationListDer<'_>]) -> Self {
        let authorities = authorities.iter().filter_map(|der| X509Certificate::from_der(der).ok());
        let authorities: Vec<_> = authorities.map(|(_, parsed)| parsed).collect();
        let lists = lists.iter().filter_map(|der| CertificateRevocationList::from_der(der).ok());
        let lists: Vec<_> = lists.map(|(_, parsed)| parsed).collect();
        let is_same = |one: &X509Name<'_>, other: &X509Name<'_>| one.as_raw() == other.as_raw();
        // A client's own certificate that is trusted by itself issues none.
        let uncovered = authorities.iter().filter(|authority| {
            authority.is_ca() && !lists.iter().any(|list| is_same(authority.subject(), list.issuer()))
        });
        let foreign = lists
            .iter()
            .filter(|list| !authorities.iter().any(|authority| is_same(authority.subject(), list.issuer())));
        Self {
            uncovered: uncovered.map(|authority| authority.subject().to_string()).collect(),
            foreign: foreign.map(|list| list.issuer().to_string()).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{
        BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType, IsCa,
        KeyIdMethod, KeyPair, SerialNumber, date_time_ymd,
    };

    use super::*;

    fn authority(name: &str) -> CertifiedIssuer<'static, KeyPair> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
    }

    fn list(issuer: &CertifiedIssuer<'static, KeyPair>, due: i32) -> CertificateRevocationListDer<'static> {
        let params = CertificateRevocationListParams {
            this_update: date_time_ymd(2026, 1, 1),
            next_update: date_time_ymd(due, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: Vec::new(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        params.signed_by(issuer).unwrap().into()
    }

    #[test]
    fn each_authority_needs_a_list_and_each_list_its_authority() {
        let (one, other, stranger) = (authority("one"), authority("other"), authority("stranger"));
        let own = CertificateParams::new(["client".to_owned()]).unwrap();
        let own = own.self_signed(&KeyPair::generate().unwrap()).unwrap();
        let authorities = [one.der().clone(), other.der().clone(), own.der().clone()];
        let coverage =
            |lists: &[CertificateRevocationListDer<'_>]| RevocationCoverage::of(&authorities, lists);
        assert_eq!(coverage(&[list(&one, 2030), list(&other, 2030)]), RevocationCoverage::default());
        let partly = coverage(&[list(&one, 2030), list(&stranger, 2030)]);
        let names = |names: &[String], name: &str| names.len() == 1 && names[0].contains(name);
        assert!(names(&partly.uncovered, "other") && names(&partly.foreign, "stranger"), "{partly:?}");
    }

    #[test]
    fn of_several_times_those_count_that_end_the_use() {
        let with = |from: i32, until: i32| {
            let mut params = CertificateParams::new(["a".to_owned()]).unwrap();
            (params.not_before, params.not_after) = (date_time_ymd(from, 1, 1), date_time_ymd(until, 1, 1));
            params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
        };
        let both = [with(2020, 2030), with(2022, 2040)];
        let mut all = ExpiryList::default();
        all.add(CertificateUse::Listener, "a", &both);
        all.add_authorities(CertificateUse::ListenerClientCa, "a", &both);
        let one = authority("one");
        all.add_lists("a", &[list(&one, 2031), list(&one, 2029)]);
        let year = |year: i32| SystemTime::from(date_time_ymd(year, 1, 1));
        let times: Vec<_> = all.0.iter().map(|one| (one.begins, one.ends)).collect();
        assert_eq!(times, [(year(2022), year(2030)), (year(2020), year(2040)), (year(2026), year(2029))]);
        assert!(
            !all.0[0].is_good(year(2021)) && all.0[0].is_good(year(2022)) && !all.0[0].is_good(year(2030))
        );
    }
}
