//! The users file: who has which password, as argon2id hashes.
//!
//! Owns: the file's form (`name:$argon2id$…`, one user a line, `#` begins a comment), the hash of a password and the
//! comparison with one. Must not know: where the file lies, when it is read, how often a client may try.
//! Invariants: a fault names its line and shows nothing of it; what a line makes us spend is bounded, so that a bad
//! file eats neither memory nor time; a name that is not there costs what one costs that is. Both hashing and comparing
//! block for tens of milliseconds: never on a shard.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher as _;

use argon2::password_hash::{Output, PasswordHash, SaltString};
use argon2::{Algorithm, Argon2, Params, Version};
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use crate::identity::UserName;
use crate::secret::Secret;

/// More than a hundred thousand users; a larger file is some other file.
pub const LARGEST_FILE: usize = 16 << 20;
/// What one comparison may take: 64 MiB, and four passes over as much.
const MOST_MEMORY: u32 = 64 << 10;
const MOST_WORK: u64 = 4 * (MOST_MEMORY as u64);
const MOST_LANES: u32 = 8;
/// Faults that are told of one file.
const TOLD: usize = 20;
const OUTPUT: usize = 32;
const SALT: usize = 16;

/// All users of one file.
#[derive(Default)]
pub struct Users {
    lines: HashMap<UserName, Line>,
    /// What comparing costs, one for each line: by these the names that are not there are dealt with.
    costs: Vec<Params>,
    /// So that nobody outside can tell which of them a name gets.
    dealer: RandomState,
}

/// What one user's line says. Two lines of one file are never the same.
#[derive(Clone)]
struct Line {
    params: Params,
    salt: Vec<u8>,
    output: Zeroizing<Vec<u8>>,
    mark: LineMark,
}

/// Tells a user's line from every other that the user ever had: another password, or another salt, is another mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LineMark(pub u64);

/// One comparison that was not made yet. It owns what it needs, so that it can be made on another thread.
pub struct Comparison {
    params: Params,
    salt: Vec<u8>,
    output: Option<Zeroizing<Vec<u8>>>,
}

/// What hashing a password costs whoever tries to guess it, and us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// KiB of memory.
    pub memory: u32,
    /// Passes over it.
    pub passes: u32,
}

/// What is wrong with a line, or with the file as a whole. Shows nothing of its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The file is not a users file at all.
    #[error("is larger than {} MiB", LARGEST_FILE >> 20)]
    TooLarge,
    /// A line that is no user.
    #[error("line {line}: {wrong}")]
    Line {
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        wrong: Wrong,
    },
}

/// What is wrong with a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Wrong {
    /// It is not text.
    #[error("is not UTF-8 text")]
    NotText,
    /// There is no `name:hash`.
    #[error("is not name:hash")]
    NoHash,
    /// The name is empty, or has blanks around it or control characters in it.
    #[error("has no name that a user could have")]
    Name,
    /// The hash is none, or of another kind.
    #[error("its hash is not an argon2id hash, version 19; `keyward hash-password` makes one")]
    NotArgon2id,
    /// Its parameters ask for more than is given.
    #[error("its hash asks for more than 64 MiB of memory, four passes over as much, or 8 lanes")]
    TooCostly,
    /// The user has an earlier line.
    #[error("the user of line {0} again")]
    Again(usize),
}

/// A password was not hashed.
#[derive(Debug, thiserror::Error)]
pub enum HashFailure {
    /// The system gave no random bytes for the salt.
    #[error("no random bytes from the system")]
    NoRandomness,
    /// The cost is outside of what argon2 takes.
    #[error("argon2 does not take this cost")]
    Cost,
}

impl Cost {
    /// The least that is advised today (RFC 9106 and OWASP): 19 MiB, two passes: some 30 ms.
    pub const DEFAULT: Self = Self { memory: 19 << 10, passes: 2 };
}

impl Users {
    /// Reads a users file.
    ///
    /// # Errors
    /// The first faults, by line.
    pub fn parse(bytes: &[u8]) -> Result<Self, Vec<Fault>> {
        if bytes.len() > LARGEST_FILE {
            return Err(vec![Fault::TooLarge]);
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
                    return Err(Wrong::Again(earlier));
                }
                users.costs.push(read.params.clone());
                users.lines.insert(name, read);
                Ok(())
            });
            faults.extend(added.err().map(|wrong| Fault::Line { line, wrong }));
        }
        faults.truncate(TOLD);
        if faults.is_empty() { Ok(users) } else { Err(faults) }
    }

    /// How many users there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lines.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// The mark of the user's line; none where the file does not know the user.
    #[must_use]
    pub fn line(&self, user: &UserName) -> Option<LineMark> {
        self.lines.get(user).map(|line| line.mark)
    }

    /// Whether both know the same users, by the same lines.
    #[must_use]
    pub fn says_the_same(&self, other: &Self) -> bool {
        let known = |(user, line): (&UserName, &Line)| other.line(user) == Some(line.mark);
        self.len() == other.len() && self.lines.iter().all(known)
    }

    /// What has to be compared to know whether a password is this user's. A user who is not there is compared too, with
    /// nothing, at the cost of some other user's line: always the same one for the same name.
    #[must_use]
    pub fn comparison(&self, user: &UserName) -> Comparison {
        if let Some(line) = self.lines.get(user) {
            return Comparison {
                params: line.params.clone(),
                salt: line.salt.clone(),
                output: Some(line.output.clone()),
            };
        }
        let dealt = self.dealer.hash_one(user).checked_rem(self.costs.len() as u64);
        let dealt = dealt.and_then(|dealt| self.costs.get(usize::try_from(dealt).ok()?));
        let params = dealt.cloned().or_else(|| params(Cost::DEFAULT)).unwrap_or_default();
        Comparison { params, salt: vec![0; SALT], output: None }
    }
}

impl Comparison {
    /// Whether the password is the user's. Blocks.
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

/// The hash of a password, as a users file has it. Blocks.
///
/// # Errors
/// See [`HashFailure`].
pub fn hash(password: &Secret<String>, cost: Cost) -> Result<String, HashFailure> {
    let mut salt = [0; SALT];
    getrandom::fill(&mut salt).map_err(|_none| HashFailure::NoRandomness)?;
    let params = params(cost).ok_or(HashFailure::Cost)?;
    let made = derive(&params, &salt, password, OUTPUT).ok_or(HashFailure::Cost)?;
    let salt = SaltString::encode_b64(&salt).map_err(|_wrong| HashFailure::Cost)?;
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

fn read_line(text: &[u8]) -> Result<(UserName, Line), Wrong> {
    let text = std::str::from_utf8(text).map_err(|_| Wrong::NotText)?;
    // A hash has no colon, a name may.
    let (name, hash) = text.rsplit_once(':').ok_or(Wrong::NoHash)?;
    if name.is_empty() || name.trim() != name || name.chars().any(char::is_control) {
        return Err(Wrong::Name);
    }
    let digest = Sha256::new().chain_update(name).chain_update("\n").chain_update(hash).finalize();
    let mark = digest.first_chunk().map_or(0, |first| u64::from_be_bytes(*first));
    let hash = PasswordHash::new(hash).map_err(|_| Wrong::NotArgon2id)?;
    if hash.algorithm != Algorithm::Argon2id.ident() || hash.version != Some(Version::V0x13.into()) {
        return Err(Wrong::NotArgon2id);
    }
    let (Some(salt), Some(output)) = (hash.salt, hash.hash) else { return Err(Wrong::NotArgon2id) };
    let params = Params::try_from(&hash).map_err(|_| Wrong::NotArgon2id)?;
    let work = u64::from(params.m_cost()) * u64::from(params.t_cost());
    if params.m_cost() > MOST_MEMORY || work > MOST_WORK || params.p_cost() > MOST_LANES {
        return Err(Wrong::TooCostly);
    }
    let mut room = [0; 64];
    let salt = salt.decode_b64(&mut room).map_err(|_| Wrong::NotArgon2id)?.to_vec();
    if salt.len() < argon2::MIN_SALT_LEN {
        return Err(Wrong::NotArgon2id);
    }
    let output = Zeroizing::new(output.as_bytes().to_vec());
    Ok((UserName::from(name), Line { params, salt, output, mark: LineMark(mark) }))
}

impl fmt::Debug for Users {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Users").field("len", &self.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHEAP: Cost = Cost { memory: 8, passes: 1 };
    /// Of "password" with the salt "somesalt", by the reference implementation's own test.
    const REFERENCE: &str =
        "$argon2id$v=19$m=65536,t=2,p=1$c29tZXNhbHQ$CTFhFdXPJO1aFaMaO6Mm5c8y7cJHAph8ArZWb2GRPPc";

    fn secret(text: &str) -> Secret<String> {
        Secret::new(text.to_owned())
    }

    fn faults(text: impl AsRef<[u8]>) -> Vec<Fault> {
        Users::parse(text.as_ref()).expect_err("faulty")
    }

    #[test]
    fn a_password_matches_its_own_hash_and_no_other() {
        let alice = hash(&secret("a"), CHEAP).unwrap();
        assert_ne!(alice, hash(&secret("a"), CHEAP).unwrap(), "each has a salt of its own");
        let text = format!("# people\n\nalice:{alice}\r\nb:o b:{}\n", hash(&secret("ü "), CHEAP).unwrap());
        let users = Users::parse(text.as_bytes()).unwrap();
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
        let users = Users::parse(format!("alice:{REFERENCE}").as_bytes()).unwrap();
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
            ("alice", Wrong::NoHash),
            ("alice:", Wrong::NotArgon2id),
            ("alice:hunter2", Wrong::NotArgon2id),
            (&format!(":{good}"), Wrong::Name),
            (&format!(" alice:{good}"), Wrong::Name),
            (&format!("al\tice:{good}"), Wrong::Name),
            (&format!("alice:{other}"), Wrong::NotArgon2id),
            (&format!("alice:{old}"), Wrong::NotArgon2id),
            (&format!("alice:{good} "), Wrong::NotArgon2id),
            (&format!("alice:{cut}"), Wrong::NotArgon2id),
            ("alice:$2b$10$N9qo8uLOickgx2ZMRZoMyeIjZAgcfl7p92ldGxad68LJZdL17lhWy", Wrong::NotArgon2id),
            (&format!("alice:{memory}"), Wrong::TooCostly),
            (&format!("alice:{passes}"), Wrong::TooCostly),
            (&format!("alice:{lanes}"), Wrong::TooCostly),
            (&format!("bob:{good}"), Wrong::Again(1)),
        ] {
            let found = faults(format!("bob:{good}\n# a comment\n{line}\n"));
            assert_eq!(found, [Fault::Line { line: 3, wrong }], "{line}");
            let told = format!("{} {found:?}", found[0]);
            assert!(told.contains("line 3: ") && !told.contains('$') && !told.contains("hunter"), "{told}");
        }
        assert_eq!(faults(b"a\xff:b"), [Fault::Line { line: 1, wrong: Wrong::NotText }]);
        assert_eq!(faults(vec![b'#'; LARGEST_FILE + 1]), [Fault::TooLarge]);
        assert_eq!(faults("a\n".repeat(1000)).len(), TOLD, "not a thousand lines of log");
    }

    #[test]
    fn another_line_is_another_mark() {
        let mark = |line: &str| Users::parse(line.as_bytes()).unwrap().line(&"alice".into());
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
        let users = Users::parse(format!("alice:{cheap}\nbob:{dear}\n").as_bytes()).unwrap();
        let dealt = |name: &str| users.comparison(&name.into()).params.m_cost();
        let names: Vec<String> = (0..64).map(|n| format!("nobody{n}")).collect();
        let costs: Vec<u32> = names.iter().map(|name| dealt(name)).collect();
        assert!(costs.contains(&8) && costs.contains(&16) && costs.iter().all(|cost| [8, 16].contains(cost)));
        assert_eq!(costs, names.iter().map(|name| dealt(name)).collect::<Vec<_>>(), "always the same");
        let nobody = Users::default().comparison(&"alice".into());
        assert_eq!(nobody.params.m_cost(), Cost::DEFAULT.memory);
    }

    #[test]
    fn debug_shows_no_hash() {
        let users = Users::parse(format!("alice:{}", hash(&secret("a"), CHEAP).unwrap()).as_bytes()).unwrap();
        assert_eq!(format!("{users:?}"), "Users { len: 1 }");
    }
}
