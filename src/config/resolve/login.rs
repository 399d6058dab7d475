//! Who checks passwords, and how often a wrong one may come.
//!
//! Owns: `[login]`. Must not know: what a line of the users file means.
//! Invariant: where the file is a source it has been read and is valid, line by line.

use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::{DAY, Resolver, SECOND};
use crate::config::{FailedLogins, PasswordSources, Passwords, file};
use crate::users::{LARGEST_FILE, Users};

impl Resolver<'_> {
    pub(super) fn passwords(&mut self, login: file::Passwords) -> Passwords {
        let path = "login.sources";
        let written = login.sources.unwrap_or_else(|| vec![file::PasswordSource::Etcd]);
        let sources = match written[..] {
            [file::PasswordSource::Etcd] => PasswordSources::Etcd,
            [file::PasswordSource::File] => PasswordSources::File,
            [file::PasswordSource::File, file::PasswordSource::Etcd] => PasswordSources::FileThenEtcd,
            [file::PasswordSource::Etcd, file::PasswordSource::File] => PasswordSources::EtcdThenFile,
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

    fn users_file(&mut self, sources: PasswordSources, name: Option<String>) -> Users {
        let path = "login.users_file";
        let is_source = sources != PasswordSources::Etcd;
        let name = match name {
            Some(name) => name,
            None if is_source => {
                self.findings.missing(path, "login.sources names a file, and none is given");
                return Users::default();
            }
            None => return Users::default(),
        };
        if !is_source {
            self.findings.warn(path, "has no effect, since login.sources does not name \"file\"");
        }
        let file = self.file(&name);
        self.warn_if_open(path, &file);
        let bytes = match read(&file) {
            Ok(bytes) => bytes,
            Err(error) => {
                self.findings.fault(path, format!("cannot read {}: {error}", file.display()));
                return Users::default();
            }
        };
        match Users::parse(&bytes) {
            Ok(users) => {
                // Emptied by accident far more often than on purpose: it would end every session of its users at once.
                if is_source && users.is_empty() {
                    let reason = "has no users; where there are to be none, take \"file\" out of login.sources, and this key away";
                    self.findings.fault(path, format!("{} {reason}", file.display()));
                }
                users
            }
            Err(faults) => {
                for fault in faults {
                    self.findings.fault(path, format!("{}: {fault}", file.display()));
                }
                Users::default()
            }
        }
    }
}

/// One byte more than a users file has tells that it is too large.
fn read(path: &Path) -> std::io::Result<zeroize::Zeroizing<Vec<u8>>> {
    let file = std::fs::File::open(path)?;
    let expected = usize::try_from(file.metadata()?.len()).unwrap_or(LARGEST_FILE).min(LARGEST_FILE);
    // Of one size from the beginning: growing would leave hashes behind.
    let mut bytes = zeroize::Zeroizing::new(Vec::with_capacity(expected + 1));
    file.take(LARGEST_FILE as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}
