//! The text forms of single values: durations, sizes, addresses, endpoints, ids.
//!
//! Owns: the grammars. Must not know: the key of a value. Invariant: an error describes the grammar, never
//! the text, possibly holding a password (`https://user:password@…`).

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use http::uri::PathAndQuery;
use time::{Date, Month};
use toml::value::{Datetime, Offset};

use super::{Address, Endpoint, Scheme};
use keyward_base::pem::CertificateFingerprint;
use keyward_etcd::identity::ClusterId;
use keyward_etcd::identity::pattern::Glob;

/// The text does not match the grammar described by the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MalformedValue(&'static str);

/// Parses `"500ms"`, `"5s"`, `"2m"`, `"1h"`.
///
/// # Errors
/// The text is no duration.
pub fn duration(text: &str) -> Result<Duration, MalformedValue> {
    const FORM: MalformedValue =
        MalformedValue("a duration is a whole number with a unit: \"500ms\", \"5s\", \"2m\" or \"1h\"");
    let (number, unit) = number_and_unit(text).ok_or(FORM)?;
    let milliseconds = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(FORM),
    };
    number.checked_mul(milliseconds).map(Duration::from_millis).ok_or(FORM)
}

/// Parses `"512B"`, `"64KiB"`, `"2MiB"`, `"1GiB"` into bytes.
pub(super) fn size(text: &str) -> Result<u64, MalformedValue> {
    const FORM: MalformedValue =
        MalformedValue("a size is a whole number with a unit: \"512B\", \"64KiB\", \"2MiB\" or \"1GiB\"");
    let (number, unit) = number_and_unit(text).ok_or(FORM)?;
    let bytes = match unit {
        "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return Err(FORM),
    };
    number.checked_mul(bytes).ok_or(FORM)
}

/// Parses RFC 3339 with an offset, as in `"2026-01-31T12:00:00Z"`, into seconds of the Unix epoch.
pub(super) fn moment(text: &str) -> Result<u64, MalformedValue> {
    const FORM: MalformedValue = MalformedValue(
        "a moment is RFC 3339 with its offset: \"2026-01-31T12:00:00Z\", \"2026-01-31T13:00:00+01:00\"",
    );
    let moment: Datetime = text.parse().map_err(|_| FORM)?;
    let (Some(date), Some(time), Some(offset)) = (moment.date, moment.time, moment.offset) else {
        return Err(FORM);
    };
    let minutes = match offset {
        Offset::Z => 0,
        Offset::Custom { minutes } => i64::from(minutes),
    };
    let month = Month::try_from(date.month).map_err(|_| FORM)?;
    let date = Date::from_calendar_date(date.year.into(), month, date.day).map_err(|_| FORM)?;
    // Added by hand: TOML permits a leap second, which `time` refuses.
    let minutes = i64::from(time.hour) * 60 + i64::from(time.minute) - minutes;
    let seconds = minutes * 60 + i64::from(time.second.unwrap_or(0));
    u64::try_from(date.midnight().assume_utc().unix_timestamp() + seconds).map_err(|_| FORM)
}

fn number_and_unit(text: &str) -> Option<(u64, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    Some((number.parse().ok()?, unit))
}

/// Parses a cluster id as printed by etcdctl, with or without `0x`.
pub(super) fn cluster_id(text: &str) -> Result<ClusterId, MalformedValue> {
    const FORM: MalformedValue =
        MalformedValue("a cluster id is up to 16 hexadecimal digits, as `etcdctl --hex` shows it");
    let digits = text.strip_prefix("0x").unwrap_or(text);
    if !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(FORM);
    }
    match u64::from_str_radix(digits, 16) {
        Ok(0) | Err(_) => Err(FORM),
        Ok(id) => Ok(ClusterId(id)),
    }
}

/// Parses the domain of `_etcd-client._tcp.` records, in lower case, without the trailing dot.
pub(super) fn domain(text: &str) -> Result<String, MalformedValue> {
    host(text.strip_suffix('.').unwrap_or(text))
        .ok_or(MalformedValue("a domain is a DNS name: \"example.com\""))
}

/// Parses the name of a cluster within a domain, used as a part of a DNS label.
pub(super) fn service_name(text: &str) -> Result<String, MalformedValue> {
    const FORM: MalformedValue = MalformedValue("a name is up to 40 letters, digits and dashes");
    let well_formed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    let fits = (1..=40).contains(&text.len()) && text.bytes().all(well_formed);
    if fits { Ok(text.to_ascii_lowercase()) } else { Err(FORM) }
}

/// Parses a name server: an IP address, with a port unless 53.
pub(super) fn name_server(text: &str) -> Result<SocketAddr, MalformedValue> {
    const FORM: MalformedValue =
        MalformedValue("a name server is an IP address, with a port where that is not 53");
    let parsed = text.parse().or_else(|_| text.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, 53)));
    parsed.ok().filter(|server| server.port() != 0).ok_or(FORM)
}

/// Parses the fingerprint of a certificate.
pub(super) fn fingerprint(text: &str) -> Result<CertificateFingerprint, MalformedValue> {
    const FORM: MalformedValue = MalformedValue(
        "a fingerprint is the SHA-256 of a certificate, 64 hexadecimal digits (openssl x509 -noout \
         -fingerprint -sha256)",
    );
    CertificateFingerprint::parse(text).ok_or(FORM)
}

/// Parses a pattern of host names and addresses: characters of a host, and `*`.
pub(super) fn host_form(text: &str) -> Result<Glob, MalformedValue> {
    const FORM: MalformedValue =
        MalformedValue("a host is a DNS name or an IP address, where * stands for any run of characters");
    let well_formed =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b':' | b'*');
    let fits = (1..=253).contains(&text.len()) && text.bytes().all(well_formed);
    if fits { Ok(Glob::new(&text.to_ascii_lowercase())) } else { Err(FORM) }
}

impl FromStr for Address {
    type Err = MalformedValue;

    fn from_str(text: &str) -> Result<Self, MalformedValue> {
        const FORM: MalformedValue = MalformedValue(
            "an address is an IP address with a port (\"127.0.0.1:2379\", \"[::]:2379\") or \"unix:/path\"",
        );
        match text.strip_prefix("unix:") {
            Some(path) if path.starts_with('/') && !path.ends_with('/') => {
                Ok(Self::Unix(PathBuf::from(path)))
            }
            Some(_) => Err(FORM),
            None => text.parse::<SocketAddr>().map(Self::Tcp).map_err(|_| FORM),
        }
    }
}

impl FromStr for Endpoint {
    type Err = MalformedValue;

    /// Parses `http://host:port` or `https://host:port`, with an optional trailing `/`; the host is put into
    /// lower case.
    fn from_str(text: &str) -> Result<Self, MalformedValue> {
        const FORM: MalformedValue =
            MalformedValue("an endpoint is \"http://host:port\" or \"https://host:port\", nothing more");
        let (scheme, rest) = match (text.strip_prefix("http://"), text.strip_prefix("https://")) {
            (Some(rest), _) => (Scheme::Http, rest),
            (_, Some(rest)) => (Scheme::Https, rest),
            _ => return Err(FORM),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (host, port) = rest.rsplit_once(':').ok_or(FORM)?;
        if !port.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(FORM);
        }
        let port = port.parse().ok().filter(|&port| port != 0).ok_or(FORM)?;
        Ok(Self { scheme, host: self::host(host).ok_or(FORM)?, port })
    }
}

/// Parses the address and the path of a collector's URL; without a path: `default_path`.
pub(super) fn collector_url(
    url: &str,
    default_path: &str,
) -> Result<(Endpoint, PathAndQuery), MalformedValue> {
    const FORM: MalformedValue = MalformedValue(
        "a collector's URL is \"https://HOST:PORT\", perhaps with a path, or the same with http",
    );
    let begin = url.find("://").ok_or(FORM)? + "://".len();
    let at = url[begin..].find('/').map_or(url.len(), |slash| begin + slash);
    let (address, path) = url.split_at(at);
    let path = if path.len() > 1 { path } else { default_path };
    if path.contains('#') {
        return Err(FORM);
    }
    Ok((address.parse().map_err(|_| FORM)?, path.parse().map_err(|_| FORM)?))
}

/// Parses a DNS name, an IPv4 address, or an IPv6 address in brackets (removed from the result).
fn host(text: &str) -> Option<String> {
    if let Some(inner) = text.strip_prefix('[') {
        return inner.strip_suffix(']')?.parse::<Ipv6Addr>().ok().map(|address| address.to_string());
    }
    let well_formed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    let fits = (1..=253).contains(&text.len()) && text.bytes().all(well_formed);
    fits.then(|| text.to_ascii_lowercase())
}

impl Endpoint {
    /// True for the unspecified address, which is not reachable from a different machine.
    pub(super) fn is_wildcard(&self) -> bool {
        self.host.parse::<IpAddr>().is_ok_and(|address| address.is_unspecified())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collectors_url_has_the_specified_path_by_default() {
        let parsed = |url| {
            collector_url(url, "/v1/logs").map(|(address, path)| (address.to_string(), path.to_string()))
        };
        let of = |address: &str, path: &str| Ok((address.to_owned(), path.to_owned()));
        for url in ["http://c:4318", "http://c:4318/", "http://c:4318/v1/logs"] {
            assert_eq!(parsed(url), of("http://c:4318", "/v1/logs"), "{url}");
        }
        assert_eq!(parsed("https://[::1]:1/x/y?z=1"), of("https://[::1]:1", "/x/y?z=1"));
        for bad in [
            "c:4318",
            "grpc://c:1",
            "http://c/v1/logs",
            "http://u:p@c:1/",
            "http://c:1/a b",
            "http://c:1/#a",
            "",
        ] {
            assert!(collector_url(bad, "/v1/logs").is_err(), "{bad}");
        }
    }

    #[test]
    fn durations_and_sizes_need_a_unit() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("0s"), Ok(Duration::ZERO));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(duration("1h"), Ok(Duration::from_secs(3600)));
        for bad in ["", "5", "s", "5 s", "-5s", "+5s", "1.5s", "5S", "5d", "18446744073709551615h", "1m30s"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
        assert_eq!(size("512B"), Ok(512));
        assert_eq!(size("64KiB"), Ok(65_536));
        assert_eq!(size("2MiB"), Ok(2_097_152));
        assert_eq!(size("1GiB"), Ok(1_073_741_824));
        for bad in
            ["", "2", "2MB", "2mib", "MiB", "2 MiB", "99999999999999999999B", "18446744073709551615KiB"]
        {
            assert!(size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_endpoint_is_scheme_host_and_port() {
        let parsed =
            |text: &str| text.parse::<Endpoint>().map(|endpoint| (endpoint.to_string(), endpoint.host));
        let both = |url: &str, host: &str| Ok((url.to_owned(), host.to_owned()));
        assert_eq!(parsed("http://10.0.0.1:2379"), both("http://10.0.0.1:2379", "10.0.0.1"));
        assert_eq!(parsed("https://Etcd-0.etcd:2379/"), both("https://etcd-0.etcd:2379", "etcd-0.etcd"));
        assert_eq!(parsed("http://[::1]:2379"), both("http://[::1]:2379", "::1"));
        for bad in [
            "",
            "10.0.0.1:2379",
            "http://10.0.0.1",
            "http://10.0.0.1:",
            "http://10.0.0.1:0",
            "http://10.0.0.1:+1",
            "http://10.0.0.1:65536",
            "http://:2379",
            "http://::1:2379",
            "http://[::1:2379",
            "http://[127.0.0.1]:2379",
            "http://root:secret@10.0.0.1:2379",
            "http://10.0.0.1:2379/v3",
            "http://10.0.0.1:2379?x",
            "HTTP://10.0.0.1:2379",
            "unix:///run/etcd.sock",
            "http://a b:1",
            "http://ä:1",
        ] {
            assert!(bad.parse::<Endpoint>().is_err(), "{bad}");
        }
    }

    #[test]
    fn an_address_is_an_ip_address_or_a_socket_path() {
        let tcp = |text: &str| Ok(Address::Tcp(text.parse().unwrap()));
        assert_eq!("127.0.0.1:2379".parse(), tcp("127.0.0.1:2379"));
        assert_eq!("[::]:0".parse(), tcp("[::]:0"));
        assert_eq!("unix:/run/k.sock".parse(), Ok(Address::Unix(PathBuf::from("/run/k.sock"))));
        for bad in [
            "",
            ":2379",
            "localhost:2379",
            "127.0.0.1",
            "unix:",
            "unix:k.sock",
            "unix:///",
            "http://127.0.0.1:1",
        ] {
            assert!(bad.parse::<Address>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_cluster_id_is_hexadecimal() {
        assert_eq!(cluster_id("cdf818194e3a8c32"), Ok(ClusterId(0xcdf8_1819_4e3a_8c32)));
        assert_eq!(cluster_id("0x1F"), Ok(ClusterId(0x1f)));
        for bad in ["", "0", "0x", "+1", "xyz", "cdf818194e3a8c32a"] {
            assert!(cluster_id(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn moments_are_rfc_3339_with_an_offset() {
        for (text, seconds) in [
            ("1970-01-01T00:00:00Z", 0),
            ("1970-01-01T01:00:00+01:00", 0),
            ("2000-02-29T00:00:00Z", 951_782_400),
            ("2023-11-14T22:13:20.7Z", 1_700_000_000),
            ("2023-11-14 17:13:20-05:00", 1_700_000_000),
            ("2026-02-28T23:59:59Z", 1_772_323_199),
            ("2100-03-01T00:00:00Z", 4_107_542_400),
        ] {
            assert_eq!(moment(text), Ok(seconds), "{text}");
        }
        for bad in [
            "",
            "now",
            "2023-11-14",
            "22:13:20",
            "2023-11-14T22:13:20",
            "2023-02-30T00:00:00Z",
            "1969-12-31T23:59:59Z",
        ] {
            assert!(moment(bad).is_err(), "{bad}");
        }
    }
}
