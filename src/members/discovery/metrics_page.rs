//! Reads a member's metrics page: member id, leadership and learner flag, for members refusing Status to the
//! probing user.
//!
//! Owns: parsing the five relevant lines of `/metrics`. Must not know: how the page is requested, or why.
//! Invariant: a page lacking one of the four required lines is rejected (the version is optional).

use std::net::IpAddr;

use http::StatusCode;

use crate::config::Endpoint;
use crate::dial::connect::Connector;
use crate::identity::MemberId;
use crate::members::discovery::member_health;
use crate::members::membership::Role;
use crate::members::version::Version;

/// The content of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemberMetricsPage {
    pub(super) member: MemberId,
    pub(super) is_leader: bool,
    pub(super) has_leader: bool,
    pub(super) role: Role,
    pub(super) version: Option<Version>,
}

/// Fetches and parses the page over a connection of its own. `connector` must offer HTTP/1.1. `None` if no
/// such page is served, as on a gRPC-only port.
pub(super) async fn fetch(
    connector: &Connector,
    endpoint: &Endpoint,
    at: Option<IpAddr>,
) -> Option<MemberMetricsPage> {
    read(&text(connector, endpoint, at).await?)
}

/// The raw text of the page; see [`fetch`].
pub async fn text(connector: &Connector, endpoint: &Endpoint, at: Option<IpAddr>) -> Option<String> {
    let page = member_health::get(connector, endpoint, at, "/metrics").await;
    let page = page.filter(|page| page.status == StatusCode::OK)?;
    Some(std::str::from_utf8(&page.body).ok()?.to_owned())
}

/// The auth revision known to this member; exported by etcd since 3.4.8.
pub fn auth_revision(page: &str) -> Option<u64> {
    let value = page.lines().find_map(|line| line.strip_prefix("etcd_debugging_auth_revision "))?;
    // A float, as every metric; large values have an exponent.
    let value = value.parse::<f64>().ok().filter(|value| (1.0..1e15).contains(value))?;
    format!("{value:.0}").parse().ok()
}

fn read(page: &str) -> Option<MemberMetricsPage> {
    let (mut member, mut is_leader, mut has_leader, mut role, mut version) = (None, None, None, None, None);
    for line in page.lines() {
        match line.split_once(' ') {
            Some(("etcd_server_is_leader", value)) => is_leader = Some(value == "1"),
            Some(("etcd_server_has_leader", value)) => has_leader = Some(value == "1"),
            Some(("etcd_server_is_learner", "1")) => role = Some(Role::Learner),
            Some(("etcd_server_is_learner", _)) => role = Some(Role::Voter),
            Some((name, "1")) => {
                if let Some(id) = label(name, "etcd_server_id{server_id=\"") {
                    member = u64::from_str_radix(id, 16).ok().map(MemberId);
                } else if let Some(text) = label(name, "etcd_server_version{server_version=\"") {
                    version = Version::parse(text).ok();
                }
            }
            _ => {}
        }
    }
    Some(MemberMetricsPage {
        member: member?,
        is_leader: is_leader?,
        has_leader: has_leader?,
        role: role?,
        version,
    })
}

fn label<'a>(name: &'a str, start: &str) -> Option<&'a str> {
    name.strip_prefix(start)?.strip_suffix("\"}")
}

#[cfg(test)]
mod tests {
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
        let page = read(PAGE).unwrap();
        let expected = MemberMetricsPage {
            member: MemberId(0x8e9e_05c5_2164_694d),
            is_leader: false,
            has_leader: true,
            role: Role::Voter,
            version: Version::parse("3.5.1").ok(),
        };
        assert_eq!(page, expected);
        let leader =
            read(&PAGE.replace("is_leader 0", "is_leader 1").replace("is_learner 0", "is_learner 1"));
        assert_eq!(leader, Some(MemberMetricsPage { is_leader: true, role: Role::Learner, ..expected }));
    }

    #[test]
    fn a_page_that_lacks_a_line_is_no_page() {
        assert_eq!(read(""), None);
        for missing in [
            "etcd_server_id{",
            "etcd_server_has_leader ",
            "etcd_server_is_leader ",
            "etcd_server_is_learner ",
        ] {
            let page: String =
                PAGE.lines().filter(|line| !line.starts_with(missing)).flat_map(|l| [l, "\n"]).collect();
            assert_eq!(read(&page), None, "{missing}");
        }
        assert_eq!(read(&PAGE.replace("8e9e", "xyz")), None);
    }
}
