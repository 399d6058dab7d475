//! The plaintext bytes of a sealed session.
//!
//! Owns: the layout of the plaintext. Must not know: keys.
//! Invariants: the plaintext is padded to a multiple of [`BLOCK`], so that the token's length hides the
//! contents. Sessions sealed by an earlier release can still be read. A user of the users file is proved by
//! the digest of the user's line, so a session key alone is not enough to forge a session of the file's
//! users.
//!
//! 2 (1) · proof (1) · kind of peer (1) · issued at (8) · proved at (8) · generation (8) · id (16) · name
//! length (2) · password length (2) · name · password · zeros. Numbers are big-endian. The first layout had
//! neither the 2 nor "proved at", and began with a proof of 0 or 1.

use zeroize::Zeroizing;

use super::{PeerNamespace, Session, SessionId, SessionPeer, SessionProof};
use keyward_base::secret::Secret;
use keyward_etcd::identity::UserName;

/// Padding unit. A name and a password of 81 bytes together fit into one block.
const BLOCK: usize = 128;
const HEAD: usize = 47;
/// The first byte. The first layout has a proof of 0 or 1 in the same place.
const LAYOUT: u8 = 2;
/// Longest name, and longest password. The token has to fit into a header list of 64 KiB; many clients allow
/// only 8 KiB.
const LONGEST: usize = 4096;

const WITH_PASSWORD: u8 = 1;
const KNOWN_TO_FILE: u8 = 3;

impl SessionPeer {
    /// True if name and password fit into a session. If not, the login is refused without a check of the
    /// password.
    #[must_use]
    pub fn fits(&self) -> bool {
        self.user().as_str().len() <= LONGEST
            && self.password().is_none_or(|password| password.expose().len() <= LONGEST)
    }

    fn kind(&self) -> u8 {
        match self {
            Self::Password { .. } => WITH_PASSWORD,
            Self::Known { .. } => KNOWN_TO_FILE,
        }
    }

    /// True if a login can produce the pair of peer and proof. Any other pair would name a user without a
    /// matching proof.
    fn is_proved_by(&self, proof: SessionProof) -> bool {
        match (self, proof) {
            (Self::Password { .. }, SessionProof::None | SessionProof::Etcd { .. })
            | (Self::Known { namespace: PeerNamespace::File, .. }, SessionProof::File { .. }) => true,
            (Self::Password { .. } | Self::Known { .. }, _) => false,
        }
    }

    /// `None` for an unknown kind, or for a password on a kind of peer without one.
    fn read(kind: u8, name: &[u8], password: &[u8]) -> Option<Self> {
        let user = UserName::from(str::from_utf8(name).ok()?);
        match kind {
            WITH_PASSWORD => {
                let password = Secret::new(str::from_utf8(password).ok()?.to_owned());
                Some(Self::Password { user, password })
            }
            KNOWN_TO_FILE => {
                password.is_empty().then_some(Self::Known { namespace: PeerNamespace::File, user })
            }
            _ => None,
        }
    }
}

impl SessionProof {
    /// The proof's number, and the state of the password source.
    fn encoded(self) -> (u8, u64) {
        match self {
            Self::None => (0, 0),
            Self::Etcd { auth_revision } => (1, auth_revision),
            Self::File { line } => (2, line),
        }
    }

    fn read(number: u8, at: u64) -> Option<Self> {
        match (number, at) {
            (0, 0) => Some(Self::None),
            (1, auth_revision) => Some(Self::Etcd { auth_revision }),
            (2, line) => Some(Self::File { line }),
            _ => None,
        }
    }
}

/// `None` if name or password is longer than [`LONGEST`].
pub(super) fn encode(session: &Session) -> Option<Zeroizing<Vec<u8>>> {
    let name = session.peer.user().as_str().as_bytes();
    let password = session.peer.password().map_or(&[][..], |password| password.expose().as_bytes());
    let length = (HEAD + name.len() + password.len()).next_multiple_of(BLOCK);
    // Allocate the whole capacity at once: growing the buffer would leave copies of the password in memory.
    let mut out = Zeroizing::new(Vec::with_capacity(length));
    let (proof, proved_at) = session.proof.encoded();
    out.extend_from_slice(&[LAYOUT, proof, session.peer.kind()]);
    out.extend_from_slice(&session.issued_at.to_be_bytes());
    out.extend_from_slice(&proved_at.to_be_bytes());
    out.extend_from_slice(&session.generation.to_be_bytes());
    out.extend_from_slice(&session.id.0);
    for field in [name, password] {
        let length = u16::try_from(field.len()).ok().filter(|_| field.len() <= LONGEST)?;
        out.extend_from_slice(&length.to_be_bytes());
    }
    out.extend_from_slice(name);
    out.extend_from_slice(password);
    out.resize(length, 0);
    Some(out)
}

/// `None` for bytes in an unknown layout: only an unknown release could have sealed such a session.
pub(super) fn decode(bytes: &[u8]) -> Option<Session> {
    match bytes.split_first()? {
        (&LAYOUT, rest) => {
            let ([proof, kind], rest) = rest.split_first_chunk()?;
            let (issued_at, rest) = number(rest)?;
            let (proved_at, rest) = number(rest)?;
            session(SessionProof::read(*proof, proved_at)?, *kind, issued_at, rest)
        }
        (&proof @ (0 | 1), rest) => {
            let (&kind @ WITH_PASSWORD, rest) = rest.split_first()? else { return None };
            let (issued_at, rest) = number(rest)?;
            session(SessionProof::read(proof, 0)?, kind, issued_at, rest)
        }
        _ => None,
    }
}

/// The part common to both layouts: generation, id, name, password, zeros.
fn session(proof: SessionProof, kind: u8, issued_at: u64, rest: &[u8]) -> Option<Session> {
    let (generation, rest) = number(rest)?;
    let (id, rest) = rest.split_first_chunk()?;
    let (name, rest) = rest.split_first_chunk()?;
    let (password, rest) = rest.split_first_chunk()?;
    let (name, rest) = rest.split_at_checked(usize::from(u16::from_be_bytes(*name)))?;
    let (password, padding) = rest.split_at_checked(usize::from(u16::from_be_bytes(*password)))?;
    if padding.iter().any(|&byte| byte != 0) {
        return None;
    }
    let peer = SessionPeer::read(kind, name, password)?;
    if !peer.is_proved_by(proof) {
        return None;
    }
    Some(Session { peer, proof, issued_at, generation, id: SessionId(*id), opened_by: None })
}

fn number(bytes: &[u8]) -> Option<(u64, &[u8])> {
    bytes.split_first_chunk().map(|(number, rest)| (u64::from_be_bytes(*number), rest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::{known_to_file, login};
    use super::*;

    #[test]
    fn a_layout_of_the_future_is_not_misread() {
        let known = encode(&login("alice", "p")).unwrap();
        let others = [(0, 3), (1, 0), (1, 3), (2, 0), (2, 2), (2, 4), (BLOCK - 1, 1), (43, 0xff), (45, 0xff)];
        for (at, value) in others {
            let mut bytes = known.to_vec();
            bytes[at] = value;
            assert!(decode(&bytes).is_none(), "byte {at} is {value}");
        }
        assert!(decode(&known).is_some());
    }

    #[test]
    fn a_name_that_nothing_vouches_for_is_not_opened() {
        let [by_password, by_file] = [login("alice", "pw"), known_to_file("alice")];
        let written = |session: &Session| decode(&encode(session).unwrap());
        assert!(written(&by_password).is_some() && written(&by_file).is_some());
        for proof in [SessionProof::None, SessionProof::Etcd { auth_revision: 7 }] {
            assert!(written(&Session { proof, ..known_to_file("alice") }).is_none(), "{proof:?}");
        }
        assert!(
            written(&Session { proof: SessionProof::File { line: 7 }, ..login("alice", "pw") }).is_none()
        );
    }

    #[test]
    fn the_layout_is_that_of_tokens_in_the_field() {
        let session = login("alice", "pw");
        let bytes = encode(&session).unwrap();
        let head = [
            &[2, 1, 1][..],
            &1_700_000_000_u64.to_be_bytes(),
            &7_u64.to_be_bytes(),
            &3_u64.to_be_bytes(),
            &session.id.0,
            &[0, 5, 0, 2],
            b"alicepw",
        ];
        assert!(bytes.starts_with(&head.concat()), "{:?}", &bytes[..60]);
        assert_eq!(bytes.len(), BLOCK);
    }

    proptest! {
        #[test]
        fn no_bytes_panic_and_what_decodes_encodes_to_itself(
            head in prop::array::uniform3(0..4_u8),
            middle in prop::collection::vec(any::<u8>(), 40),
            name in 0..12_u8,
            rest in prop::collection::vec(prop_oneof![Just(0), any::<u8>()], 0..200),
        ) {
            let bytes = [&head[..], &middle, &[0, name, 0, 0], &rest].concat();
            if let Some(session) = decode(&bytes) {
                let again = encode(&session).unwrap();
                if bytes[0] == LAYOUT {
                    prop_assert!(again.starts_with(&bytes) || bytes.starts_with(&again));
                }
                let known = decode(&again).unwrap();
                prop_assert_eq!(known.peer.to_string(), session.peer.to_string());
                prop_assert_eq!((known.proof, known.id), (session.proof, session.id));
            }
        }
    }
}
