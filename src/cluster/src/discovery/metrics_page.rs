//! A member's public HTTP/1.1 pages, `/metrics` and `/health`: the member's id and role where Status is
//! refused to the probing user, the auth revision, and the doctor's health figures.
//!
//! Owns: the requests, and parsing the relevant lines. Must not know: which figures are healthy, or why a
//! page is requested. Invariants: a request changes no state; a page lacking one of the four lines about the
//! member itself is rejected (the version is optional); a health figure missing in a version is `None`. All
//! of etcd 3.4 to 3.7 report the quota, both revisions and `/health`.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::DATE;
use http::{HeaderMap, StatusCode, response};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc2822;

use crate::membership::Role;
use crate::version::Version;
use keyward_base::io::http_exchange;
use keyward_config::Endpoint;
use keyward_dial::connect::Connector;
use keyward_etcd::identity::MemberId;

/// Largest page accepted; real metrics pages have some 100 KiB.
const MAX_PAGE: usize = 4 << 20;
/// Time limit on a page.
const LIMIT: Duration = Duration::from_secs(3);

/// The member itself, as told by its metrics page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemberMetricsPage {
    pub(super) member: MemberId,
    pub(super) is_leader: bool,
    pub(super) has_leader: bool,
    pub(super) role: Role,
    pub(super) version: Option<Version>,
}

/// A member's health figures.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemberHealthFigures {
    /// `--quota-backend-bytes`, or its default.
    pub quota: Option<u64>,
    /// Size of the database file in bytes.
    pub db_size: Option<u64>,
    /// Bytes in use within the database file.
    pub db_in_use: Option<u64>,
    /// The store's revision.
    pub revision: Option<u64>,
    /// The last compacted revision; 0 if never compacted.
    pub compacted: Option<u64>,
    /// Time of the last compaction since the member's start; reported from etcd 3.5 on.
    pub compacted_at: Option<SystemTime>,
    /// The member's clock, and Keyward's clock half-way through the request.
    pub clock: Option<(SystemTime, SystemTime)>,
    /// The reason given by `/health`, if the member is unhealthy.
    pub unhealthy: Option<String>,
}

/// Fetches the metrics page over a connection of its own, and parses the member's id and role. `connector`
/// must offer HTTP/1.1. `None` if no such page is served, as on a gRPC-only port.
pub(super) async fn fetch(
    connector: &Connector,
    endpoint: &Endpoint,
    at: Option<IpAddr>,
) -> Option<MemberMetricsPage> {
    member(&text(connector, endpoint, at).await?)
}

/// The raw text of the metrics page. `None` if no such page is served, as on a gRPC-only port.
pub async fn text(connector: &Connector, endpoint: &Endpoint, at: Option<IpAddr>) -> Option<String> {
    metrics(connector, endpoint, at).await.map(|(_, text)| text)
}

/// Reads the pages of a member for the doctor, at the given address of its name, if any. `connector` must
/// offer HTTP/1.1. `None` as for [`text`].
pub async fn examine(
    connector: &Connector,
    endpoint: &Endpoint,
    at: Option<IpAddr>,
) -> Option<MemberHealthFigures> {
    let began = SystemTime::now();
    let (headers, text) = metrics(connector, endpoint, at).await?;
    let ours = began + began.elapsed().unwrap_or_default() / 2;
    let mut examined = figures(&text);
    examined.clock = date(&headers).map(|theirs| (theirs, ours));
    let health = get(connector, endpoint, at, "/health").await;
    examined.unhealthy = health.and_then(|(_, body)| unhealthy(&body));
    Some(examined)
}

async fn metrics(
    connector: &Connector,
    endpoint: &Endpoint,
    at: Option<IpAddr>,
) -> Option<(HeaderMap, String)> {
    let (head, body) = get(connector, endpoint, at, "/metrics").await?;
    let text = String::from_utf8(body.into()).ok()?;
    (head.status == StatusCode::OK).then_some((head.headers, text))
}

/// Fetches a page over a connection of its own, within three seconds. Returns `None` if the fetch fails, or
/// the page is larger than any real metrics page.
pub(super) async fn get(
    connector: &Connector,
    endpoint: &Endpoint,
    at: Option<IpAddr>,
    path: &'static str,
) -> Option<(response::Parts, Bytes)> {
    let asked = async {
        let stream = connector.connect_at(endpoint, at).await.ok()?;
        http_exchange::get(stream, &endpoint.authority(), path, MAX_PAGE).await.ok()
    };
    tokio::time::timeout(LIMIT, asked).await.ok().flatten()
}

/// The samples of a page in the Prometheus text format: name with labels, and value.
fn samples(page: &str) -> impl Iterator<Item = (&str, &str)> {
    page.lines().filter_map(|line| line.split_once(' '))
}

/// The auth revision known to this member; exported by etcd since 3.4.8.
pub fn auth_revision(page: &str) -> Option<u64> {
    let (_, value) = samples(page).find(|(name, _)| *name == "etcd_debugging_auth_revision")?;
    whole(value).filter(|revision| (1..1_000_000_000_000_000).contains(revision))
}

fn member(page: &str) -> Option<MemberMetricsPage> {
    let (mut id, mut is_leader, mut has_leader, mut role, mut version) = (None, None, None, None, None);
    for sample in samples(page) {
        match sample {
            ("etcd_server_is_leader", value) => is_leader = Some(value == "1"),
            ("etcd_server_has_leader", value) => has_leader = Some(value == "1"),
            ("etcd_server_is_learner", "1") => role = Some(Role::Learner),
            ("etcd_server_is_learner", _) => role = Some(Role::Voter),
            (name, "1") => {
                if let Some(digits) = label(name, "etcd_server_id{server_id=\"") {
                    id = u64::from_str_radix(digits, 16).ok().map(MemberId);
                } else if let Some(text) = label(name, "etcd_server_version{server_version=\"") {
                    version = Version::parse(text).ok();
                }
            }
            _ => {}
        }
    }
    Some(MemberMetricsPage {
        member: id?,
        is_leader: is_leader?,
        has_leader: has_leader?,
        role: role?,
        version,
    })
}

fn label<'a>(name: &'a str, start: &str) -> Option<&'a str> {
    name.strip_prefix(start)?.strip_suffix("\"}")
}

fn figures(page: &str) -> MemberHealthFigures {
    let mut examined = MemberHealthFigures::default();
    for (name, value) in samples(page) {
        let place = match name {
            "etcd_server_quota_backend_bytes" => &mut examined.quota,
            "etcd_mvcc_db_total_size_in_bytes" => &mut examined.db_size,
            "etcd_mvcc_db_total_size_in_use_in_bytes" => &mut examined.db_in_use,
            "etcd_debugging_mvcc_current_revision" => &mut examined.revision,
            // -1 means "never".
            "etcd_debugging_mvcc_compact_revision" => {
                examined.compacted = if value == "-1" { Some(0) } else { whole(value) };
                continue;
            }
            "etcd_debugging_mvcc_db_compaction_last" => {
                let seconds = whole(value).filter(|seconds| *seconds > 0);
                examined.compacted_at = seconds
                    .and_then(|seconds| SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds)));
                continue;
            }
            _ => continue,
        };
        *place = whole(value);
    }
    examined
}

/// Parses a whole number. Prometheus writes floats, large numbers with an exponent.
fn whole(value: &str) -> Option<u64> {
    let value = value.parse::<f64>().ok().filter(|value| (0.0..1e18).contains(value))?;
    format!("{value:.0}").parse().ok()
}

/// Returns the reason of an unhealthy member: `{"health":"false","reason":"ALARM NOSPACE"}`. etcd 3.4 gives
/// no reason.
fn unhealthy(body: &[u8]) -> Option<String> {
    let said: serde_json::Value = serde_json::from_slice(body).ok()?;
    let healthy = said.get("health")?.as_str()? == "true";
    let reason = said.get("reason").and_then(|reason| reason.as_str()).unwrap_or_default();
    (!healthy).then(|| reason.to_owned())
}

/// Parses the `Date` header.
fn date(headers: &HeaderMap) -> Option<SystemTime> {
    let date = OffsetDateTime::parse(headers.get(DATE)?.to_str().ok()?, &Rfc2822).ok()?;
    Some(date.into())
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    const PAGE: &str = "# HELP etcd_server_id Server or member ID in hexadecimal format. \
        1 for 'server_id' label.\n\
        # TYPE etcd_server_id gauge\n\
        etcd_server_id{server_id=\"8e9e05c52164694d\"} 1\n\
        etcd_server_has_leader 1\n\
        etcd_server_is_leader 0\n\
        etcd_server_is_learner 0\n\
        etcd_server_version{server_version=\"3.5.1\"} 1\n";

    #[test]
    fn the_auth_revision_is_read_in_whatever_form_a_float_has() {
        let page = |value: &str| format!("{PAGE}etcd_debugging_auth_revision {value}\n");
        assert_eq!(auth_revision(&page("12")), Some(12));
        assert_eq!(auth_revision(&page("1.234567e+06")), Some(1_234_567));
        for none in ["0", "-1", "NaN", "+Inf", "x", ""] {
            assert_eq!(auth_revision(&page(none)), None, "{none}");
        }
        assert_eq!(auth_revision(PAGE), None);
    }

    #[test]
    fn the_page_tells_who_it_is_and_whether_it_leads() {
        let page = member(PAGE).unwrap();
        let expected = MemberMetricsPage {
            member: MemberId(0x8e9e_05c5_2164_694d),
            is_leader: false,
            has_leader: true,
            role: Role::Voter,
            version: Version::parse("3.5.1").ok(),
        };
        assert_eq!(page, expected);
        let leader =
            member(&PAGE.replace("is_leader 0", "is_leader 1").replace("is_learner 0", "is_learner 1"));
        assert_eq!(leader, Some(MemberMetricsPage { is_leader: true, role: Role::Learner, ..expected }));
    }

    #[test]
    fn a_page_that_lacks_a_line_is_no_page() {
        assert_eq!(member(""), None);
        for missing in [
            "etcd_server_id{",
            "etcd_server_has_leader ",
            "etcd_server_is_leader ",
            "etcd_server_is_learner ",
        ] {
            let page: String =
                PAGE.lines().filter(|line| !line.starts_with(missing)).flat_map(|l| [l, "\n"]).collect();
            assert_eq!(member(&page), None, "{missing}");
        }
        assert_eq!(member(&PAGE.replace("8e9e", "xyz")), None);
    }

    #[test]
    fn a_page_tells_quota_and_compaction() {
        let page = "# TYPE etcd_debugging_mvcc_compact_revision gauge\n\
            etcd_debugging_mvcc_compact_revision 3\n\
            etcd_debugging_mvcc_current_revision 1.234567e+06\n\
            etcd_debugging_mvcc_db_compaction_last 1.795295364e+09\n\
            etcd_mvcc_db_total_size_in_bytes 20480\n\
            etcd_mvcc_db_total_size_in_use_in_bytes 16384\n\
            etcd_server_quota_backend_bytes 2.147483648e+09\n";
        let examined = figures(page);
        assert_eq!((examined.quota, examined.revision), (Some(2_147_483_648), Some(1_234_567)));
        assert_eq!(
            (examined.db_size, examined.db_in_use, examined.compacted),
            (Some(20_480), Some(16_384), Some(3))
        );
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_795_295_364);
        assert_eq!(examined.compacted_at, Some(at));
        let young =
            figures("etcd_debugging_mvcc_compact_revision -1\netcd_debugging_mvcc_db_compaction_last 0\n");
        assert_eq!(young, MemberHealthFigures { compacted: Some(0), ..MemberHealthFigures::default() });
        for nonsense in ["NaN", "+Inf", "-5", "x", ""] {
            assert_eq!(
                figures(&format!("etcd_server_quota_backend_bytes {nonsense}\n")),
                MemberHealthFigures::default()
            );
        }
    }

    #[test]
    fn health_is_told_where_it_is_bad() {
        assert_eq!(unhealthy(br#"{"health":"true","reason":""}"#), None);
        assert_eq!(unhealthy(br#"{"health":"true"}"#), None);
        assert_eq!(unhealthy(br#"{"health":"false"}"#), Some(String::new()));
        assert_eq!(
            unhealthy(br#"{"health":"false","reason":"ALARM NOSPACE"}"#),
            Some("ALARM NOSPACE".to_owned())
        );
        assert_eq!(unhealthy(b"404 page not found"), None);
    }

    #[test]
    fn a_clock_is_read_from_the_date() {
        for (text, seconds) in [
            ("Thu, 01 Jan 1970 00:00:00 GMT", Some(0)),
            ("Sun, 06 Nov 1994 08:49:37 GMT", Some(784_111_777)),
            ("Tue, 29 Feb 2000 00:00:01 GMT", Some(951_782_401)),
            ("Sat, 21 Nov 2026 21:04:34 GMT", Some(1_795_295_074)),
            ("yesterday", None),
            ("Sun, 06 Foo 1994 08:49:37 GMT", None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(DATE, HeaderValue::from_static(text));
            let expected = seconds.map(|seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
            assert_eq!(date(&headers), expected, "{text}");
        }
    }
}
