//! Writes a configuration for a running cluster, with the reason of each key: `keyward init`.
//!
//! Owns: the text. Must not know: how the answers were gathered. Invariants: no secret is written, only names
//! of files; a text told by a member stands in a comment without control characters, or quoted; the text is
//! valid as it is.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use time::OffsetDateTime;

use super::ServeError;
use super::config_check::look_at_cluster;
use keyward_cluster::discovery::member_flags::MemberFlags;
use keyward_cluster::discovery::survey::{ClusterSurvey, SurveyExtent};
use keyward_cluster::membership::{
    AbsenceReason, AuthSetting, Member, PeerUrls, Readiness, Role, UnreadyReason,
};
use keyward_config::{Cluster, Config, FlagSetting, Scheme};

/// Reasons for writing no configuration.
#[derive(Debug, thiserror::Error)]
pub enum NoConfiguration {
    /// The connections to members cannot be set up.
    #[error("{0}")]
    Setup(#[from] ServeError),
    /// No member answers.
    #[error("no member answers{0}")]
    NoMember(String),
    /// The password of `cluster.probe` is wrong.
    #[error("etcd refuses the name and password of --probe-user and --probe-password-file")]
    ProbeRefused,
}

/// etcd's default of `--auth-token-ttl`.
const TOKEN_TTL: Duration = Duration::from_secs(300);
/// etcd's default of `--election-timeout`.
const ELECTION_TIMEOUT: Duration = Duration::from_secs(1);
/// etcd's default of `--max-request-bytes`, and the overhead added by its gRPC server
/// (server/etcdserver/api/v3rpc/grpc.go, `grpcOverheadBytes`).
const MAX_REQUEST: u64 = 3 << 19;
const GRPC_OVERHEAD: u64 = 1 << 19;

/// Looks at the cluster of `config`, made of `flags`, and returns the text of a configuration.
///
/// # Errors
/// See [`NoConfiguration`].
pub fn configuration_of_cluster(config: &Config, flags: &[FlagSetting]) -> Result<String, NoConfiguration> {
    let survey = look_at_cluster(config, SurveyExtent::Members)?;
    let members = &survey.membership;
    if members.members.is_empty() {
        let reasons = members.unanswered.iter().map(|at| format!("\n{}: {}", at.endpoint, at.why));
        return Err(NoConfiguration::NoMember(reasons.collect::<String>() + tls_hint(&config.cluster)));
    }
    if members.is_probe_login_refused && config.cluster.probe.is_some() {
        return Err(NoConfiguration::ProbeRefused);
    }
    Ok(ConfigText { config, survey: &survey, flags }.render(OffsetDateTime::now_utc()))
}

/// The hint that a silent member may expect TLS; empty if TLS was tried.
fn tls_hint(cluster: &Cluster) -> &'static str {
    if cluster.endpoints.iter().any(|endpoint| endpoint.scheme == Scheme::Http) {
        "\n(for a cluster with TLS write https:// and give --cacert, and --cert with --key where etcd has \
         --client-cert-auth)"
    } else {
        ""
    }
}

struct ConfigText<'a> {
    config: &'a Config,
    survey: &'a ClusterSurvey,
    flags: &'a [FlagSetting],
}

impl ConfigText<'_> {
    fn render(&self, now: OffsetDateTime) -> String {
        let parts = [
            self.head(now),
            self.listener(),
            self.cluster(),
            self.member_tls(),
            self.probe(),
            self.advertise(),
            self.session(),
            self.revocation(),
            self.policy(),
            self.limits(),
            self.admin(),
        ];
        parts.into_iter().flatten().collect::<Vec<_>>().join("\n")
    }

    fn head(&self, now: OffsetDateTime) -> Option<String> {
        let membership = &self.survey.membership;
        let cluster = membership.cluster.map_or("unknown".to_owned(), |cluster| cluster.to_string());
        let mut text = format!(
            "# Written by `keyward init` on {}, from the answers of the cluster {cluster}:\n",
            now.date()
        );
        for member in &membership.members {
            let version = member.version.map_or("unknown version".to_owned(), |version| version.to_string());
            let state = match (member.role, member.readiness) {
                (Role::Learner, _) => "a learner: gets no calls until it is promoted".to_owned(),
                (_, Readiness::Ready) if membership.leader == Some(member.id) => "leader".to_owned(),
                (_, Readiness::Ready) => "voter".to_owned(),
                (_, Readiness::NotReady(reason)) => format!("not ready: {reason}"),
            };
            let name = if member.name.is_empty() { "member" } else { &*member.name };
            let _infallible = writeln!(
                text,
                "#   {} {}, etcd {version}, at {}, {state}",
                plain(name),
                member.id,
                member.endpoint
            );
        }
        for absent in &membership.absent {
            let why = match absent.why {
                AbsenceReason::Unstarted => "was added and never started",
                AbsenceReason::NoUsableUrl => "has no client URL that Keyward can use",
                AbsenceReason::NotAllowed => "is outside of cluster.allowed_hosts",
            };
            let _infallible = writeln!(text, "#   {} {} {why}", plain(&absent.name), absent.id);
        }
        for silent in &membership.unanswered {
            let _infallible = writeln!(text, "#   no answer at {}: {}", silent.endpoint, plain(&silent.why));
        }
        if membership.peer_urls == PeerUrls::Refused {
            text += "#   The member list is refused without a login: there may be further members.\n";
        }
        text += "# config.toml in Keyward's repository describes every key. After each change:\n\
                 # keyward check --dial --config FILE\n";
        Some(text)
    }

    fn listener(&self) -> Option<String> {
        let address = self.value("listener[0].address").unwrap_or("127.0.0.1:2379");
        let mut text = lines(&[
            "[[listener]]",
            "name = \"clients\"",
            "# The address for clients, in place of the members' addresses. 0.0.0.0:2379 serves all",
            "# networks.",
            &format!("address = {}", quoted(address)),
        ]);
        let tls = self.files(&[
            ("cert", "listener[0].tls.cert"),
            ("key", "listener[0].tls.key"),
            ("client_ca", "listener[0].tls.client_ca"),
        ]);
        if tls.is_empty() {
            text += &lines(&[
                "# Without TLS clients' passwords and values are in plaintext: for this machine only.",
                "#tls = { cert = \"/etc/keyward/tls/server.crt\", key = \"/etc/keyward/tls/server.key\" }",
            ]);
        } else {
            text += "\n[listener.tls]\n";
            text += &tls;
        }
        Some(text)
    }

    fn cluster(&self) -> Option<String> {
        let survey = self.survey;
        let is_voter =
            |member: &&Arc<Member>| member.role == Role::Voter && member.readiness == Readiness::Ready;
        let found = survey.membership.members.iter().filter(is_voter);
        let mut endpoints: BTreeSet<String> = found.map(|member| member.endpoint.to_string()).collect();
        if endpoints.is_empty() {
            endpoints = self.config.cluster.endpoints.iter().map(ToString::to_string).collect();
        }
        let mut text = lines(&[
            "[cluster]",
            "# The voters that answered; Keyward learns of further members from these.",
            &format!("endpoints = {}", array(endpoints.iter().map(|endpoint| &**endpoint))),
        ]);
        if let Some(id) = survey.membership.cluster {
            text += &lines(&[
                "# Keyward uses members of this cluster only, also after a restart. A cluster restored from",
                "# a snapshot is another cluster.",
                &format!("id = {}", quoted(&id.to_string())),
            ]);
        }
        if survey.auth != AuthSetting::Off {
            text += &self.token_ttl();
        }
        let (told, known) = self.flag(|flags| flags.election_timeout);
        if let Some(longest) = told.iter().max().filter(|told| **told != ELECTION_TIMEOUT) {
            text += &lines(&[
                "# etcd's --election-timeout, as its command line says.",
                &format!("election_timeout = {}", quoted(&duration(*longest))),
            ]);
        } else if !known {
            text += &lines(&[
                "# etcd does not tell its --election-timeout; set this key if the value is not 1 s.",
                "#election_timeout = \"1s\"",
            ]);
        }
        Some(text)
    }

    fn token_ttl(&self) -> String {
        if self.survey.flags.values().any(MemberFlags::is_jwt) {
            return lines(&[
                "# etcd issues JWTs (--auth-token): set the ttl of its --auth-token here (5m by default).",
                "#token_ttl = \"300s\"",
            ]);
        }
        let (told, known) = self.flag(|flags| flags.auth_token_ttl);
        let Some(ttl) = told.iter().min() else {
            let why = match known {
                true => "The members' command lines set no --auth-token-ttl",
                false => "etcd does not tell its --auth-token-ttl",
            };
            return lines(&[
                &format!("# {why}; 300 s is the default. If ETCD_AUTH_TOKEN_TTL"),
                "# or a file sets another value, set it here: with too long a value the tokens of idle",
                "# streams expire.",
                &format!("#token_ttl = {}", quoted(&duration(TOKEN_TTL))),
            ]);
        };
        let why = match told.len() {
            1 => "# etcd's --auth-token-ttl, as its command line says.",
            _ => "# The members differ in --auth-token-ttl: this is the shortest.",
        };
        lines(&[why, &format!("token_ttl = {}", quoted(&duration(*ttl)))])
    }

    fn member_tls(&self) -> Option<String> {
        let keys = [("ca", "cluster.tls.ca"), ("cert", "cluster.tls.cert"), ("key", "cluster.tls.key")];
        let tls = self.files(&keys);
        let why = lines(&[
            "[cluster.tls]",
            "# The members' CA, and the certificate that Keyward shows, if etcd asks for one. etcd takes",
            "# the common name for the user of calls without a token.",
        ]);
        (!tls.is_empty()).then(|| why + &tls)
    }

    fn probe(&self) -> Option<String> {
        if let Some(user) = self.value("cluster.probe.user") {
            let table = lines(&[
                "[cluster.probe]",
                "# The user of Keyward's own questions about the members. It needs no role.",
                &format!("user = {}", quoted(user)),
            ]);
            return Some(table + &self.files(&[("password_file", "cluster.probe.password_file")]));
        }
        let state = match self.survey.auth {
            AuthSetting::Off => {
                return Some(lines(&[
                    "# Auth is off: whoever reaches etcd or Keyward may do all, and a login proves nothing.",
                ]));
            }
            AuthSetting::On => "Auth is on",
            AuthSetting::Unknown => "No member told whether auth is on; if it is",
        };
        Some(lines(&[
            &format!("# {state}: newer etcd tells its members to logged-in users only."),
            "# Give Keyward a user without a role (etcdctl user add keyward), its password in a file that",
            "# Keyward alone may read.",
            "#[cluster.probe]",
            "#user = \"keyward\"",
            "#password_file = \"/etc/keyward/probe.password\"",
        ]))
    }

    fn advertise(&self) -> Option<String> {
        let mut text = lines(&[
            "[advertise]",
            "# The addresses that clients learn from a member list: Keyward's, in place of the members'.",
        ]);
        text += &match self.value("advertise.client_urls") {
            Some(urls) => lines(&[&format!("client_urls = {}", array(urls.split(',').map(str::trim)))]),
            None => lines(&[
                "# Without this key: the listener's address, which must then be the address that clients",
                "# use.",
                "#client_urls = [\"https://etcd.example.com:2379\"]",
            ]),
        };
        Some(text)
    }

    fn session(&self) -> Option<String> {
        let mut text = lines(&[
            "[session]",
            "# The key of clients' logins, the same on every replica: keyward keygen session.key",
        ]);
        text += &match self.value("session.key_files") {
            Some(files) => {
                let files: Vec<String> = files.split(',').map(|file| absolute(file.trim())).collect();
                lines(&[&format!("key_files = {}", array(files.iter().map(|file| &**file)))])
            }
            None => lines(&[
                "# Without a key file every restart logs all clients out.",
                "#key_files = [\"/etc/keyward/session.key\"]",
            ]),
        };
        Some(text)
    }

    fn revocation(&self) -> Option<String> {
        Some(lines(&[
            "[revocation]",
            "# What `keyward revoke` and `keyward block` say outlives a restart: kept beside this file,",
            "# which suits one replica. Its folder must be writable; a service has",
            "# /var/lib/keyward/revocations.",
            "state_file = \"revocations\"",
            "# With more than one replica etcd keeps it, in place of state_file: the user of cluster.probe",
            "# needs a role that reads and writes the prefix.",
            "#etcd_prefix = \"/keyward/revocations/\"",
        ]))
    }

    fn policy(&self) -> Option<String> {
        let text = lines(&[
            "[policy]",
            "# Some member's version serves member lists, leases and alarms to callers without a user",
            "# (CVE-2026-33413). \"strict\" refuses such calls while auth is on; \"as-etcd\" passes them on.",
            "require_identity = \"strict\"",
        ]);
        self.survey.membership.open_holes().unguarded_methods.then_some(text)
    }

    fn limits(&self) -> Option<String> {
        let (told, _) = self.flag(|flags| flags.max_request_bytes);
        let largest = told.into_iter().max().filter(|told| *told != MAX_REQUEST)?;
        Some(lines(&[
            "[limits]",
            "# etcd's --max-request-bytes, as its command line says, and the 512 KiB that etcd adds.",
            &format!("request_size = \"{}B\"", largest.saturating_add(GRPC_OVERHEAD)),
        ]))
    }

    fn admin(&self) -> Option<String> {
        let address = quoted(self.value("admin.address")?);
        Some(lines(&["[admin]", "# Metrics and health checks.", &format!("address = {address}")]))
    }

    /// The different values of a flag; and true if every member tells all its flags on the command line.
    fn flag<T: Ord>(&self, flag: impl Fn(&MemberFlags) -> Option<T>) -> (BTreeSet<T>, bool) {
        let survey = self.survey;
        let reachable = survey
            .membership
            .members
            .iter()
            .filter(|member| member.readiness != Readiness::NotReady(UnreadyReason::Unreachable));
        let is_told =
            |member: &Arc<Member>| survey.flags.get(&member.id).is_some_and(|flags| !flags.has_config_file);
        let known = reachable.clone().all(is_told);
        let usable = survey.flags.values().filter(|flags| !flags.has_config_file);
        (usable.filter_map(flag).collect(), known)
    }

    /// The value of a key given as a flag.
    fn value(&self, key: &str) -> Option<&str> {
        self.flags.iter().find(|flag| flag.key == key).map(|flag| &*flag.value)
    }

    /// The lines of the file names given as flags.
    fn files(&self, keys: &[(&str, &str)]) -> String {
        let given = keys.iter().filter_map(|(name, key)| Some((name, self.value(key)?)));
        given.map(|(name, file)| format!("{name} = {}\n", quoted(&absolute(file)))).collect()
    }
}

fn lines(lines: &[&str]) -> String {
    lines.iter().flat_map(|line| [*line, "\n"]).collect()
}

fn array<'a>(texts: impl Iterator<Item = &'a str>) -> String {
    format!("[{}]", texts.map(quoted).collect::<Vec<_>>().join(", "))
}

fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

/// A text of a member, for a comment.
fn plain(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}

/// A file name that means the same from every folder, without `..` as far as that means the same file.
fn absolute(file: &str) -> String {
    std::path::absolute(file).map_or_else(|_| file.to_owned(), |path| plain_path(&path).display().to_string())
}

/// The path without `..`. The folder above a link is that of the link's target. A link elsewhere in the path
/// stays: the name of a renewed certificate may be one.
fn plain_path(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        if part != Component::ParentDir {
            plain.push(part);
        } else if plain.is_symlink() {
            plain = std::fs::canonicalize(plain.join("..")).unwrap_or_else(|_| plain.join(".."));
        } else {
            plain.pop();
        }
    }
    plain
}

fn duration(time: Duration) -> String {
    match time.subsec_millis() {
        0 => format!("{}s", time.as_secs()),
        _ => format!("{}ms", time.as_millis()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use tokio::time::Instant;

    use super::*;
    use keyward_cluster::discovery::store_hashes::StoreHashes;
    use keyward_cluster::membership::Membership;
    use keyward_cluster::version::Version;
    use keyward_config::{ConfigSources, Endpoint};
    use keyward_etcd::identity::{ClusterId, MemberId};

    const FLAGS: [(&str, &str); 6] = [
        ("cluster.endpoints", "http://127.0.0.1:1"),
        ("listener[0].address", "127.0.0.1:2"),
        ("listener[0].name", "clients"),
        ("advertise.client_urls", "http://a:1,http://b:1"),
        ("session.key_files", "session.key"),
        ("admin.address", "127.0.0.1:3"),
    ];

    fn member(id: u64, name: &str, role: Role, version: &str) -> Arc<Member> {
        let readiness = match role {
            Role::Voter => Readiness::Ready,
            Role::Learner => Readiness::NotReady(UnreadyReason::Learner),
        };
        Arc::new(Member {
            id: MemberId(id),
            name: name.into(),
            endpoint: Endpoint { scheme: Scheme::Http, host: format!("10.0.0.{id}"), port: 2379 },
            resolved_ip: None,
            role,
            version: Version::parse(version).ok(),
            readiness,
            term: 1,
            store_status: None,
            client_urls: Arc::default(),
            suspicion: Arc::default(),
            maintenance: Arc::default(),
            load: Arc::default(),
        })
    }

    fn survey(auth: AuthSetting, flags: MemberFlags) -> ClusterSurvey {
        let membership = Membership {
            cluster: Some(ClusterId(0xc1)),
            leader: Some(MemberId(1)),
            members: vec![
                member(1, "m1", Role::Voter, "3.4.23"),
                member(2, "m2\n[x]\ny = 1", Role::Voter, "3.5.35"),
                member(3, "m3", Role::Learner, "3.5.35"),
            ],
            peer_urls: PeerUrls::Listed(Arc::default()),
            ..Membership::unknown(Instant::now())
        };
        let flags = HashMap::from([1, 2, 3].map(|id| (MemberId(id), flags.clone())));
        ClusterSurvey {
            membership,
            auth,
            examined: Vec::new(),
            flags,
            hashes: StoreHashes::default(),
            keywards: Vec::new(),
            certificates: Vec::new(),
            login_failure: None,
        }
    }

    /// The text for a survey, and the configuration loaded of it.
    fn written(survey: &ClusterSurvey) -> (String, Config) {
        let flags: Vec<FlagSetting> = FLAGS
            .into_iter()
            .map(|(key, value)| FlagSetting { flag: "--x", key, value: value.to_owned(), yields: false })
            .collect();
        let given = flags.iter().filter(|flag| flag.key != "session.key_files").cloned().collect();
        let (config, _) = ConfigSources::default().with_flags(given).load().unwrap();
        let text = ConfigText { config: &config, survey, flags: &flags }.render(OffsetDateTime::UNIX_EPOCH);
        let folder = tempfile::tempdir().unwrap();
        let key = folder.path().join("session.key");
        keyward_config::write_session_key(&key).unwrap();
        let file = folder.path().join("keyward.toml");
        let named = absolute("session.key");
        std::fs::write(&file, text.replace(&named, key.to_str().unwrap())).unwrap();
        let loaded = keyward_config::load(&file).unwrap_or_else(|faults| panic!("{faults}\n{text}"));
        (text, loaded.0)
    }

    #[tokio::test]
    async fn the_text_is_a_valid_configuration_with_what_the_members_told() {
        let flags = MemberFlags {
            auth_token_ttl: Some(Duration::from_secs(7)),
            election_timeout: Some(Duration::from_millis(2500)),
            max_request_bytes: Some(10 << 20),
            ..MemberFlags::default()
        };
        let (text, config) = written(&survey(AuthSetting::On, flags));
        assert_eq!(config.cluster.token_ttl, Duration::from_secs(7));
        assert_eq!(config.cluster.outage.election_timeout, Duration::from_millis(2500));
        assert_eq!(config.limits.request_size, (10 << 20) + (1 << 19));
        let endpoints: Vec<String> = config.cluster.endpoints.iter().map(ToString::to_string).collect();
        assert_eq!(endpoints, ["http://10.0.0.1:2379", "http://10.0.0.2:2379"], "no learner");
        assert!(text.contains("a learner: gets no calls") && text.contains("etcd 3.4.23"), "{text}");
        assert!(text.contains("CVE-2026-33413") && text.contains("#[cluster.probe]"), "{text}");
        assert!(text.lines().all(|line| line.len() <= 120), "{text}");
        // The examples are right, too.
        let example = |line: &str| line.starts_with(|first: char| first.is_ascii_lowercase() || first == '[');
        let whole: Vec<&str> = text
            .lines()
            .map(|line| line.strip_prefix('#').filter(|rest| example(rest)).unwrap_or(line))
            .collect();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keyward.toml");
        std::fs::write(&file, whole.join("\n")).unwrap();
        let faults = keyward_config::load(&file).map(|_| ()).unwrap_err();
        assert!(
            whole.len() > 20 && faults.iter().all(|fault| fault.reason.starts_with("cannot read ")),
            "{faults}"
        );
    }

    #[test]
    fn a_path_is_plain_and_means_the_same_file() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir_all(at("pki/live")).unwrap();
        std::fs::create_dir_all(at("kw/here")).unwrap();
        std::os::unix::fs::symlink(at("pki/live"), at("kw/link")).unwrap();
        std::fs::write(at("pki/ca.crt"), "ca").unwrap();
        assert_eq!(plain_path(&at("kw/here/../../pki/ca.crt")), at("pki/ca.crt"));
        assert_eq!(std::fs::read_to_string(plain_path(&at("kw/link/../ca.crt"))).unwrap(), "ca");
        assert_eq!(plain_path(&at("kw/link/x")), at("kw/link/x"), "a link without .. stays");
        assert_eq!(plain_path(Path::new("/../a")), Path::new("/a"));
    }

    #[test]
    fn a_silent_https_endpoint_gets_no_hint_to_write_https() {
        for (url, has_hint) in [("http://127.0.0.1:1", true), ("https://127.0.0.1:1", false)] {
            let flag =
                |key, value: &str| FlagSetting { flag: "--x", key, value: value.into(), yields: false };
            let flags = [("listener[0].address", "127.0.0.1:2"), ("listener[0].name", "clients")];
            let mut flags: Vec<_> = flags.map(|(key, value)| flag(key, value)).into();
            flags.push(flag("cluster.endpoints", url));
            flags.push(flag("cluster.tls.insecure_skip_verify", "true"));
            if !url.starts_with("https") {
                flags.pop();
            }
            let (config, _) = ConfigSources::default().with_flags(flags).load().unwrap();
            assert_eq!(tls_hint(&config.cluster).contains("https://"), has_hint, "{url}");
        }
    }

    #[tokio::test]
    async fn what_no_member_tells_is_left_to_the_operator() {
        let unknown = MemberFlags { has_config_file: true, ..MemberFlags::default() };
        let (text, config) = written(&survey(AuthSetting::On, unknown));
        assert_eq!(config.cluster.token_ttl, TOKEN_TTL);
        assert!(text.contains("does not tell its --auth-token-ttl") && text.contains("#election_timeout"));
        let (text, _) = written(&survey(AuthSetting::Off, MemberFlags::default()));
        assert!(text.contains("Auth is off") && !text.contains("token_ttl"), "{text}");
    }
}
