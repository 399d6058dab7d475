//! Resolves the password sources and the limits on failed logins.
//!
//! Owns: `[login]`. Must not know: the line format of the users file. Invariant: a users file used as a
//! source has been read, and every line is valid.

use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::{DAY, Resolver, SECOND};
use crate::users::{LARGEST_FILE, UserPasswordHashes};
use crate::{FailedLogins, PasswordSources, Passwords, toml_file};

impl Resolver<'_> {
    pub(super) fn passwords(&mut self, login: toml_file::TomlLogin) -> Passwords {
        let path = "login.sources";
        let written = login.sources.unwrap_or_else(|| vec![toml_file::TomlPasswordSource::Etcd]);
        let sources = match written[..] {
            [toml_file::TomlPasswordSource::Etcd] => PasswordSources::Etcd,
            [toml_file::TomlPasswordSource::File] => PasswordSources::File,
            [toml_file::TomlPasswordSource::File, toml_file::TomlPasswordSource::Etcd] => {
                PasswordSources::FileThenEtcd
            }
            [toml_file::TomlPasswordSource::Etcd, toml_file::TomlPasswordSource::File] => {
                PasswordSources::EtcdThenFile
            }
            _ => {
                self.findings.fault(path, "names \"etcd\", \"file\", or both, each once");
                PasswordSources::Etcd
            }
        };
        let count = |number: Option<u32>, default| number.unwrap_or(default);
        let failed = FailedLogins {
            per_user_and_address: count(login.failures_per_user_and_address, 5),
            per_user: count(login.failures_per_user, 30),
            per_address: count(login.failures_per_address, 300),
            longest_wait: self.duration(
                "login.longest_wait",
                login.longest_wait,
                Duration::from_secs(60),
                SECOND..=DAY,
            ),
        };
        let users = Arc::new(self.users_file(sources, login.users_file));
        Passwords { sources, users, failed }
    }

    fn users_file(&mut self, sources: PasswordSources, name: Option<String>) -> UserPasswordHashes {
        let path = "login.users_file";
        let is_source = sources != PasswordSources::Etcd;
        let name = match name {
            Some(name) => name,
            None if is_source => {
                self.findings.missing(path, "login.sources names a file, and none is given");
                return UserPasswordHashes::default();
            }
            None => return UserPasswordHashes::default(),
        };
        if !is_source {
            self.findings.warn(path, "has no effect, since login.sources does not name \"file\"");
        }
        let file = self.file(path, &name);
        self.warn_if_open(path, &file);
        let bytes = match read(&file) {
            Ok(bytes) => bytes,
            Err(error) => {
                self.findings.fault(path, format!("cannot read {}: {error}", file.display()));
                return UserPasswordHashes::default();
            }
        };
        match UserPasswordHashes::parse(&bytes) {
            Ok(users) => {
                // An empty file is more often an accident than intended, and would end every session of the
                // file's users at once.
                if is_source && users.is_empty() {
                    let reason = "has no users; where there are to be none, take \"file\" out of \
                        login.sources, and this key away";
                    self.findings.fault(path, format!("{} {reason}", file.display()));
                }
                users
            }
            Err(faults) => {
                for fault in faults {
                    self.findings.fault(path, format!("{}: {fault}", file.display()));
                }
                UserPasswordHashes::default()
            }
        }
    }
}

/// Reads a byte more than the size limit, so `Users::parse` detects a larger file.
fn read(path: &Path) -> std::io::Result<zeroize::Zeroizing<Vec<u8>>> {
    let file = std::fs::File::open(path)?;
    let expected = usize::try_from(file.metadata()?.len()).unwrap_or(LARGEST_FILE).min(LARGEST_FILE);
    // Allocated at its final size: a growing buffer would leave copies of hashes in freed memory.
    let mut bytes = zeroize::Zeroizing::new(Vec::with_capacity(expected + 1));
    file.take(LARGEST_FILE as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}
