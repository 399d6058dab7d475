//! Health figures from a member's public HTTP/1.1 pages: quota, compactions, clock, `/health`.
//!
//! Owns: the requests, and parsing the relevant lines. Must not know: which figures are healthy. Invariants:
//! a request changes no state; a figure missing in a version is `None`. All of etcd 3.4 to 3.7 report the
//! quota, both revisions and `/health`.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{CONNECTION, DATE, HOST};
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::rt::TokioIo;

use crate::config::Endpoint;
use crate::dial::connect::Connector;

/// Largest page accepted; real metrics pages have some 100 KiB.
const MAX_PAGE: usize = 4 << 20;
/// Time limit on a page.
const LIMIT: Duration = Duration::from_secs(3);

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

/// Reads the pages of a member, at the given address of its name, if any. `connector` must offer HTTP/1.1.
/// Returns `None` if the member serves no metrics page, as on a gRPC-only port.
pub async fn examine(
    connector: &Connector,
    endpoint: &Endpoint,
    at: Option<IpAddr>,
) -> Option<MemberHealthFigures> {
    let began = SystemTime::now();
    let page = get(connector, endpoint, at, "/metrics").await.filter(|page| page.status == StatusCode::OK)?;
    let ours = began + began.elapsed().unwrap_or_default() / 2;
    let mut examined = read(std::str::from_utf8(&page.body).ok()?);
    examined.clock = date(&page.headers).map(|theirs| (theirs, ours));
    let health = get(connector, endpoint, at, "/health").await;
    examined.unhealthy = health.and_then(|health| unhealthy(&health.body));
    Some(examined)
}

/// A complete HTTP response.
pub struct MemberPage {
    /// The status line's code.
    pub status: StatusCode,
    headers: HeaderMap,
    /// The whole body.
    pub body: Bytes,
}

/// Fetches a page over a connection of its own, within three seconds. Returns `None` if the fetch fails, or
/// the page is larger than any real metrics page.
pub async fn get(
    connector: &Connector,
    endpoint: &Endpoint,
    at: Option<IpAddr>,
    path: &'static str,
) -> Option<MemberPage> {
    let asked = async {
        let stream = connector.connect_at(endpoint, at).await.ok()?;
        let (mut send, connection) =
            hyper::client::conn::http1::handshake::<_, Empty<Bytes>>(TokioIo::new(stream)).await.ok()?;
        let request = Request::get(path)
            .header(HOST, endpoint.authority())
            .header(CONNECTION, "close")
            .body(Empty::new())
            .ok()?;
        let exchange = async move {
            let (head, body) = send.send_request(request).await.ok()?.into_parts();
            let body = Limited::new(body, MAX_PAGE).collect().await.ok()?.to_bytes();
            Some(MemberPage { status: head.status, headers: head.headers, body })
        };
        // The connection future moves the bytes, and ends with the exchange: the exchange owns the sending
        // half.
        tokio::join!(exchange, connection).0
    };
    tokio::time::timeout(LIMIT, asked).await.ok().flatten()
}

fn read(page: &str) -> MemberHealthFigures {
    let mut examined = MemberHealthFigures::default();
    for (name, value) in page.lines().filter_map(|line| line.split_once(' ')) {
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

/// Parses RFC 9110's only current form of a date: `Sun, 06 Nov 1994 08:49:37 GMT`.
fn date(headers: &HeaderMap) -> Option<SystemTime> {
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let text = headers.get(DATE)?.to_str().ok()?;
    let mut words = text.split_once(", ")?.1.split(' ');
    let day: u64 = words.next()?.parse().ok()?;
    let name = words.next()?;
    let month = u64::try_from(MONTHS.iter().position(|month| *month == name)?).ok()?;
    let year: u64 = words.next()?.parse().ok()?;
    let mut clock = words.next()?.split(':').map(|number| number.parse::<u64>().ok());
    let (hour, minute, second) = (clock.next()??, clock.next()??, clock.next()??);
    // Count years from March: the days before a month then follow from the month's number alone.
    let (year, month) = if month < 2 { (year.checked_sub(1)?, month + 10) } else { (year, month - 2) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day;
    let seconds = days.checked_sub(719_469)? * 86_400 + hour * 3600 + minute * 60 + second;
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn a_page_tells_quota_and_compaction() {
        let page = "# TYPE etcd_debugging_mvcc_compact_revision gauge\n\
            etcd_debugging_mvcc_compact_revision 3\n\
            etcd_debugging_mvcc_current_revision 1.234567e+06\n\
            etcd_debugging_mvcc_db_compaction_last 1.795295364e+09\n\
            etcd_mvcc_db_total_size_in_bytes 20480\n\
            etcd_mvcc_db_total_size_in_use_in_bytes 16384\n\
            etcd_server_quota_backend_bytes 2.147483648e+09\n";
        let examined = read(page);
        assert_eq!((examined.quota, examined.revision), (Some(2_147_483_648), Some(1_234_567)));
        assert_eq!(
            (examined.db_size, examined.db_in_use, examined.compacted),
            (Some(20_480), Some(16_384), Some(3))
        );
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_795_295_364);
        assert_eq!(examined.compacted_at, Some(at));
        let young =
            read("etcd_debugging_mvcc_compact_revision -1\netcd_debugging_mvcc_db_compaction_last 0\n");
        assert_eq!(young, MemberHealthFigures { compacted: Some(0), ..MemberHealthFigures::default() });
        for nonsense in ["NaN", "+Inf", "-5", "x", ""] {
            assert_eq!(
                read(&format!("etcd_server_quota_backend_bytes {nonsense}\n")),
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
