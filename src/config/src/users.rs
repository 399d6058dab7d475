//! The users file: user names and argon2id hashes of passwords.
//!
//! Owns: the file format (`name:$argon2id$…`, one user per line, `#` begins a comment), hashing and verifying
//! a password. Must not know: the file's path, the times of reading, the limits on login attempts.
//! Invariants: a fault names its line, never the content; memory and time per line are bounded, so a faulty
//! file exhausts neither; verifying an unknown user costs as much as a known user. Hashing and verifying
//! block for tens of milliseconds: never on a shard.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher as _;

use argon2::password_hash::phc::{Output, PasswordHash, Salt};
use argon2::{Algorithm, Argon2, Params, Version};
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use keyward_base::secret::Secret;
use keyward_etcd::identity::UserName;

/// Room for more than a hundred thousand users; a larger file is no users file.
pub const LARGEST_FILE: usize = 16 << 20;
/// Limits of a comparison: 64 MiB of memory, and four passes over as much.
const MOST_MEMORY: u32 = 64 << 10;
const MOST_WORK: u64 = 4 * (MOST_MEMORY as u64);
const MOST_LANES: u32 = 8;
/// Maximum of reported faults per file.
const TOLD: usize = 20;
const OUTPUT: usize = 32;
const SALT: usize = 16;

/// All users of a file.
#[derive(Default)]
pub struct UserPasswordHashes {
    lines: HashMap<UserName, UserLine>,
    /// Costs of all lines, for assigning a cost to unknown names.
    costs: Vec<Params>,
    /// Randomly keyed hash, so clients cannot predict an unknown name's cost.
    unknown_user_hasher: RandomState,
}

/// Two files are equal if they have the same users with the same lines.
impl PartialEq for UserPasswordHashes {
    fn eq(&self, other: &Self) -> bool {
        let known = |(user, line): (&UserName, &UserLine)| other.line(user) == Some(line.mark);
        self.len() == other.len() && self.lines.iter().all(known)
    }
}

/// The content of a user's line. The lines of any two users differ, at least by the name.
#[derive(Clone)]
struct UserLine {
    params: Params,
    salt: Vec<u8>,
    output: Zeroizing<Vec<u8>>,
    mark: UserLineMark,
}

/// Identifies the content of a user's line: a new password or a new salt gives a new mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UserLineMark(pub u64);

/// A pending comparison. Owns its data, for execution on a different thread.
pub struct Comparison {
    params: Params,
    salt: Vec<u8>,
    output: Option<Zeroizing<Vec<u8>>>,
}

/// Cost of hashing a password, for an attacker and for Keyward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Memory in KiB.
    pub memory: u32,
    /// Passes over the memory.
    pub passes: u32,
}

/// A fault of a line, or of the file as a whole, without any content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UsersFileFault {
    /// The file is larger than any users file.
    #[error("is larger than {} MiB", LARGEST_FILE >> 20)]
    TooLarge,
    /// A faulty line.
    #[error("line {line}: {wrong}")]
    Line {
        /// Line number, counted from 1.
        line: usize,
        /// The fault.
        wrong: UserLineFault,
    },
}

/// Faults of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UserLineFault {
    /// The line is not text.
    #[error("is not UTF-8 text")]
    NotText,
    /// The line is not `name:hash`.
    #[error("is not name:hash")]
    NoHash,
    /// The name is empty, has leading or trailing blanks, or has control characters.
    #[error("has no name that a user could have")]
    Name,
    /// The hash is missing, or of a different kind.
    #[error("its hash is not an argon2id hash, version 19; `keyward hash-password` makes one")]
    NotArgon2id,
    /// The hash's parameters exceed the limits.
    #[error("its hash asks for more than 64 MiB of memory, four passes over as much, or 8 lanes")]
    TooCostly,
    /// The user has an earlier line.
    #[error("the user of line {0} again")]
    Again(usize),
}

/// Reasons for a failed hashing.
#[derive(Debug, thiserror::Error)]
pub enum HashFailure {
    /// The operating system gave no random bytes for the salt.
    #[error("no random bytes from the system")]
    NoRandomness,
    /// argon2 does not support the cost.
    #[error("argon2 does not take this cost")]
    Cost,
}

impl Cost {
    /// The minimum advised today (RFC 9106 and OWASP): 19 MiB, two passes, some 30 ms.
    pub const DEFAULT: Self = Self { memory: 19 << 10, passes: 2 };
}

impl UserPasswordHashes {
    /// Reads a users file.
    ///
    /// # Errors
    /// The first faults, by line.
    pub fn parse(bytes: &[u8]) -> Result<Self, Vec<UsersFileFault>> {
        if bytes.len() > LARGEST_FILE {
            return Err(vec![UsersFileFault::TooLarge]);
        }
        let mut users = Self::default();
        let mut first_lines = HashMap::new();
        let mut faults = Vec::new();
        for (text, line) in bytes.split(|&byte| byte == b'\n').zip(1..) {
            let text = text.strip_suffix(b"\r").unwrap_or(text);
            if text.trim_ascii().is_empty() || text.starts_with(b"#") {
                continue;
            }
            let added = read_line(text).and_then(|(name, read)| {
                if let Some(earlier) = first_lines.insert(name.clone(), line) {
                    return Err(UserLineFault::Again(earlier));
                }
                users.costs.push(read.params.clone());
                users.lines.insert(name, read);
                Ok(())
            });
            faults.extend(added.err().map(|wrong| UsersFileFault::Line { line, wrong }));
        }
        faults.truncate(TOLD);
        if faults.is_empty() { Ok(users) } else { Err(faults) }
    }

    /// Number of users.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lines.len()
    }

    /// True if the file has no users.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// The mark of the user's line; `None` for an unknown user.
    #[must_use]
    pub fn line(&self, user: &UserName) -> Option<UserLineMark> {
        self.lines.get(user).map(|line| line.mark)
    }

    /// Returns the comparison for verifying the user's password. For an unknown user the comparison always
    /// fails, at the cost of some existing line, always the same line for the same name.
    #[must_use]
    pub fn comparison(&self, user: &UserName) -> Comparison {
        if let Some(line) = self.lines.get(user) {
            return Comparison {
                params: line.params.clone(),
                salt: line.salt.clone(),
                output: Some(line.output.clone()),
            };
        }
        let dealt = self.unknown_user_hasher.hash_one(user).checked_rem(self.costs.len() as u64);
        let dealt = dealt.and_then(|dealt| self.costs.get(usize::try_from(dealt).ok()?));
        let params = dealt.cloned().or_else(|| params(Cost::DEFAULT)).unwrap_or_default();
        Comparison { params, salt: vec![0; SALT], output: None }
    }
}

impl Comparison {
    /// True if the password is the user's. Blocks.
    #[must_use]
    pub fn matches(&self, password: &Secret<String>) -> bool {
        let expected = self.output.as_deref().map(Vec::as_slice);
        let length = expected.map_or(OUTPUT, <[u8]>::len);
        let Some(made) = derive(&self.params, &self.salt, password, length) else { return false };
        // `Output` is compared in constant time.
        match (expected.map(Output::new), Output::new(&made)) {
            (Some(Ok(expected)), Ok(made)) => expected == made,
            _ => false,
        }
    }
}

/// Hashes a password for the users file. Blocks.
///
/// # Errors
/// See [`HashFailure`].
pub fn hash(password: &Secret<String>, cost: Cost) -> Result<String, HashFailure> {
    let mut salt = [0; SALT];
    getrandom::fill(&mut salt).map_err(|_none| HashFailure::NoRandomness)?;
    let params = params(cost).ok_or(HashFailure::Cost)?;
    let made = derive(&params, &salt, password, OUTPUT).ok_or(HashFailure::Cost)?;
    let salt = Salt::new(&salt).map_err(|_wrong| HashFailure::Cost)?;
    let made = Output::new(&made).map_err(|_wrong| HashFailure::Cost)?;
    let Cost { memory, passes } = cost;
    Ok(format!("$argon2id$v=19$m={memory},t={passes},p=1${salt}${made}"))
}

fn params(cost: Cost) -> Option<Params> {
    Params::new(cost.memory, cost.passes, 1, None).ok()
}

fn derive(
    params: &Params,
    salt: &[u8],
    password: &Secret<String>,
    length: usize,
) -> Option<Zeroizing<Vec<u8>>> {
    let mut made = Zeroizing::new(vec![0; length]);
    let argon2 = Argon2::new(Algorithm::Argon2id, Version::V0x13, params.clone());
    argon2.hash_password_into(password.expose().as_bytes(), salt, &mut made).ok()?;
    Some(made)
}

fn read_line(text: &[u8]) -> Result<(UserName, UserLine), UserLineFault> {
    let text = std::str::from_utf8(text).map_err(|_| UserLineFault::NotText)?;
    // A name may contain colons, a hash may not.
    let (name, hash) = text.rsplit_once(':').ok_or(UserLineFault::NoHash)?;
    if name.is_empty() || name.trim() != name || name.chars().any(char::is_control) {
        return Err(UserLineFault::Name);
    }
    let digest = Sha256::new().chain_update(name).chain_update("\n").chain_update(hash).finalize();
    let mark = digest.first_chunk().map_or(0, |first| u64::from_be_bytes(*first));
    let hash = PasswordHash::new(hash).map_err(|_| UserLineFault::NotArgon2id)?;
    if hash.algorithm != Algorithm::Argon2id.ident() || hash.version != Some(Version::V0x13.into()) {
        return Err(UserLineFault::NotArgon2id);
    }
    let (Some(salt), Some(output)) = (hash.salt, hash.hash) else { return Err(UserLineFault::NotArgon2id) };
    let params = Params::try_from(&hash).map_err(|_| UserLineFault::NotArgon2id)?;
    let work = u64::from(params.m_cost()) * u64::from(params.t_cost());
    if params.m_cost() > MOST_MEMORY || work > MOST_WORK || params.p_cost() > MOST_LANES {
        return Err(UserLineFault::TooCostly);
    }
    let salt = salt.to_vec();
    if salt.len() < argon2::MIN_SALT_LEN {
        return Err(UserLineFault::NotArgon2id);
    }
    let output = Zeroizing::new(output.as_bytes().to_vec());
    Ok((UserName::from(name), UserLine { params, salt, output, mark: UserLineMark(mark) }))
}

impl fmt::Debug for UserPasswordHashes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Users").field("len", &self.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHEAP: Cost = Cost { memory: 8, passes: 1 };
    /// The hash of "password" with the salt "somesalt", from a test of the reference implementation.
    const REFERENCE: &str =
        "$argon2id$v=19$m=65536,t=2,p=1$c29tZXNhbHQ$CTFhFdXPJO1aFaMaO6Mm5c8y7cJHAph8ArZWb2GRPPc";

    fn secret(text: &str) -> Secret<String> {
        Secret::new(text.to_owned())
    }

    fn faults(text: impl AsRef<[u8]>) -> Vec<UsersFileFault> {
        UserPasswordHashes::parse(text.as_ref()).expect_err("faulty")
    }

    #[test]
    fn a_password_matches_its_own_hash_and_no_other() {
        let alice = hash(&secret("a"), CHEAP).unwrap();
        assert_ne!(alice, hash(&secret("a"), CHEAP).unwrap(), "each has a salt of its own");
        let text = format!("# people\n\nalice:{alice}\r\nb:o b:{}\n", hash(&secret("ü "), CHEAP).unwrap());
        let users = UserPasswordHashes::parse(text.as_bytes()).unwrap();
        let matches = |user: &str, password| users.comparison(&user.into()).matches(&secret(password));
        assert_eq!(users.len(), 2);
        assert!(matches("alice", "a") && matches("b:o b", "ü "));
        for (user, password) in
            [("alice", "A"), ("alice", ""), ("b:o b", "a"), ("carol", "a"), ("carol", ""), ("", "")]
        {
            assert!(!matches(user, password), "{user} {password}");
        }
    }

    #[test]
    fn a_hash_of_another_maker_is_understood() {
        let users = UserPasswordHashes::parse(format!("alice:{REFERENCE}").as_bytes()).unwrap();
        assert!(users.comparison(&"alice".into()).matches(&secret("password")));
        assert!(!users.comparison(&"alice".into()).matches(&secret("passwort")));
    }

    #[test]
    fn a_bad_line_is_named_and_nothing_of_it_is_shown() {
        let good = hash(&secret("a"), CHEAP).unwrap();
        let other = good.replace("argon2id", "argon2i");
        let old = good.replace("v=19", "v=16");
        let memory = good.replace("m=8,", "m=65537,");
        let passes = good.replace("m=8,t=1", "m=65536,t=5");
        let lanes = good.replace("p=1", "p=9").replace("m=8,", "m=72,");
        let cut = &good[..good.len() - 30];
        for (line, wrong) in [
            ("alice", UserLineFault::NoHash),
            ("alice:", UserLineFault::NotArgon2id),
            ("alice:hunter2", UserLineFault::NotArgon2id),
            (&format!(":{good}"), UserLineFault::Name),
            (&format!(" alice:{good}"), UserLineFault::Name),
            (&format!("al\tice:{good}"), UserLineFault::Name),
            (&format!("alice:{other}"), UserLineFault::NotArgon2id),
            (&format!("alice:{old}"), UserLineFault::NotArgon2id),
            (&format!("alice:{good} "), UserLineFault::NotArgon2id),
            (&format!("alice:{cut}"), UserLineFault::NotArgon2id),
            (
                "alice:$2b$10$N9qo8uLOickgx2ZMRZoMyeIjZAgcfl7p92ldGxad68LJZdL17lhWy",
                UserLineFault::NotArgon2id,
            ),
            (&format!("alice:{memory}"), UserLineFault::TooCostly),
            (&format!("alice:{passes}"), UserLineFault::TooCostly),
            (&format!("alice:{lanes}"), UserLineFault::TooCostly),
            (&format!("bob:{good}"), UserLineFault::Again(1)),
        ] {
            let found = faults(format!("bob:{good}\n# a comment\n{line}\n"));
            assert_eq!(found, [UsersFileFault::Line { line: 3, wrong }], "{line}");
            let told = format!("{} {found:?}", found[0]);
            assert!(told.contains("line 3: ") && !told.contains('$') && !told.contains("hunter"), "{told}");
        }
        assert_eq!(faults(b"a\xff:b"), [UsersFileFault::Line { line: 1, wrong: UserLineFault::NotText }]);
        assert_eq!(faults(vec![b'#'; LARGEST_FILE + 1]), [UsersFileFault::TooLarge]);
        assert_eq!(faults("a\n".repeat(1000)).len(), TOLD, "not a thousand lines of log");
    }

    #[test]
    fn another_line_is_another_mark() {
        let mark = |line: &str| UserPasswordHashes::parse(line.as_bytes()).unwrap().line(&"alice".into());
        let lines = ["a", "a", "b"].map(|password| hash(&secret(password), CHEAP).unwrap());
        let [one, again, other] = lines.each_ref().map(|hash| mark(&format!("alice:{hash}")));
        assert!(one.is_some() && one != again && one != other && again != other);
        assert_eq!(one, mark(&format!("# moved\n\nalice:{}\nbob:{}", lines[0], lines[1])));
        assert_eq!(mark(&format!("bob:{}", lines[0])), None);
    }

    #[test]
    fn who_is_not_there_costs_what_somebody_costs_who_is() {
        let cheap = hash(&secret("a"), CHEAP).unwrap();
        let dear = hash(&secret("a"), Cost { memory: 16, passes: 3 }).unwrap();
        let users = UserPasswordHashes::parse(format!("alice:{cheap}\nbob:{dear}\n").as_bytes()).unwrap();
        let dealt = |name: &str| users.comparison(&name.into()).params.m_cost();
        let names: Vec<String> = (0..64).map(|n| format!("nobody{n}")).collect();
        let costs: Vec<u32> = names.iter().map(|name| dealt(name)).collect();
        assert!(costs.contains(&8) && costs.contains(&16) && costs.iter().all(|cost| [8, 16].contains(cost)));
        assert_eq!(costs, names.iter().map(|name| dealt(name)).collect::<Vec<_>>(), "always the same");
        let nobody = UserPasswordHashes::default().comparison(&"alice".into());
        assert_eq!(nobody.params.m_cost(), Cost::DEFAULT.memory);
    }

    #[test]
    fn debug_shows_no_hash() {
        let users =
            UserPasswordHashes::parse(format!("alice:{}", hash(&secret("a"), CHEAP).unwrap()).as_bytes())
                .unwrap();
        assert_eq!(format!("{users:?}"), "Users { len: 1 }");
    }
}
