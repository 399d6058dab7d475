//! The flags of a running member, from the command line that the member tells at `/debug/vars`.
//!
//! Owns: the flags that Keyward must know and etcd tells nowhere else. Must not know: the use of a flag.
//! Invariants: of the command line only the named flags are kept, since others may hold secrets; a flag of
//! another form than etcd's own is taken as not told.

use std::net::IpAddr;
use std::time::Duration;

use serde::Deserialize;

use super::metrics_page::get;
use keyward_config::Endpoint;
use keyward_dial::connect::Connector;

/// Flags of a member; `None` for a flag that is not on the command line. etcd takes flags from environment
/// variables and from a file as well, and tells neither.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemberFlags {
    /// `--auth-token-ttl`.
    pub auth_token_ttl: Option<Duration>,
    /// `--auth-token`, the part before the first comma: `simple` or `jwt`.
    pub auth_token: Option<String>,
    /// `--election-timeout`.
    pub election_timeout: Option<Duration>,
    /// `--max-request-bytes`.
    pub max_request_bytes: Option<u64>,
    /// True with `--config-file`: etcd then ignores all other flags.
    pub has_config_file: bool,
}

#[derive(Deserialize)]
struct DebugVariables {
    cmdline: Vec<String>,
}

/// Reads the flags of a member. `connector` must offer HTTP/1.1. `None` if the member tells no command line.
pub(super) async fn read_flags(
    connector: &Connector,
    endpoint: &Endpoint,
    at: Option<IpAddr>,
) -> Option<MemberFlags> {
    let (_, body) = get(connector, endpoint, at, "/debug/vars").await?;
    let DebugVariables { cmdline } = serde_json::from_slice(&body).ok()?;
    Some(parse(&cmdline))
}

fn parse(arguments: &[String]) -> MemberFlags {
    let mut flags = MemberFlags::default();
    let mut arguments = arguments.iter().skip(1).peekable();
    while let Some(argument) = arguments.next() {
        // Go's `flag` takes one hyphen and two, and a value behind `=` or as the next argument.
        let Some(flag) = argument.strip_prefix('-') else { continue };
        let flag = flag.strip_prefix('-').unwrap_or(flag);
        let (name, value) = match flag.split_once('=') {
            Some((name, value)) => (name, value),
            None => (flag, arguments.peek().map_or("", |next| next.as_str())),
        };
        match name {
            "auth-token-ttl" => flags.auth_token_ttl = value.parse().ok().map(Duration::from_secs),
            "auth-token" => flags.auth_token = value.split(',').next().map(str::to_owned),
            "election-timeout" => flags.election_timeout = value.parse().ok().map(Duration::from_millis),
            "max-request-bytes" => flags.max_request_bytes = value.parse().ok(),
            "config-file" => flags.has_config_file = !value.is_empty(),
            _ => {}
        }
    }
    flags
}

impl MemberFlags {
    /// True if the member issues JWTs.
    #[must_use]
    pub fn is_jwt(&self) -> bool {
        self.auth_token.as_deref() == Some("jwt")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_flags_are_kept_and_no_others() {
        let of = |arguments: &[&str]| {
            let arguments: Vec<String> = arguments.iter().map(|one| (*one).to_owned()).collect();
            parse(&arguments)
        };
        let flags = of(&[
            "etcd",
            "--auth-token-ttl=7",
            "-election-timeout",
            "2500",
            "--auth-token",
            "jwt,pub-key=/a,priv-key=/secret,sign-method=RS256",
            "--max-request-bytes=many",
            "--initial-cluster-token=hunter2",
        ]);
        let expected = MemberFlags {
            auth_token_ttl: Some(Duration::from_secs(7)),
            auth_token: Some("jwt".to_owned()),
            election_timeout: Some(Duration::from_millis(2500)),
            ..MemberFlags::default()
        };
        assert_eq!(flags, expected);
        assert!(flags.is_jwt());
        assert!(of(&["etcd", "--config-file", "/etc/etcd.yaml"]).has_config_file);
        assert_eq!(of(&["etcd"]), MemberFlags::default());
        assert_eq!(of(&["--auth-token-ttl=7"]), MemberFlags::default(), "the first is the program");
    }
}
