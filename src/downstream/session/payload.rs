//! The bytes inside the box.
//!
//! Owns: their layout. Must not know: keys.
//! Invariant: padded to a multiple of [`BLOCK`], so that the token's length tells nothing of what is in it.
//!
//! proof (1) · kind of peer (1) · issued at (8) · generation (8) · id (16) · name length (2) · password length (2) ·
//! name · password · zeros. Numbers are big-endian.

use zeroize::Zeroizing;

use super::{Proof, Session, SessionId, SessionPeer};
use crate::identity::UserName;
use crate::secret::Secret;

/// A name and password of 90 bytes together fit into one.
const BLOCK: usize = 128;
const HEAD: usize = 38;
const PASSWORD_PEER: u8 = 1;
/// Of name and of password. The token has to fit into a header list of 64 KiB, many clients allow 8 KiB.
const LONGEST: usize = 4096;

impl SessionPeer {
    /// Whether it fits into a session: one that does not is not worth a look at its password.
    #[must_use]
    pub fn fits(&self) -> bool {
        let Self::Password { user, password } = self;
        user.as_str().len() <= LONGEST && password.expose().len() <= LONGEST
    }
}

/// `None` when name or password are longer than [`LONGEST`].
pub(super) fn encode(session: &Session) -> Option<Zeroizing<Vec<u8>>> {
    let SessionPeer::Password { user, password } = &session.peer;
    let (name, password) = (user.as_str().as_bytes(), password.expose().as_bytes());
    let length = (HEAD + name.len() + password.len()).next_multiple_of(BLOCK);
    // Its whole capacity at once: growing would leave copies of the password behind.
    let mut out = Zeroizing::new(Vec::with_capacity(length));
    out.push(match session.proof {
        Proof::None => 0,
        Proof::Etcd => 1,
    });
    out.push(PASSWORD_PEER);
    out.extend_from_slice(&session.issued_at.to_be_bytes());
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

/// `None` for bytes of another layout: only a release that we do not know seals such.
pub(super) fn decode(bytes: &[u8]) -> Option<Session> {
    let ([proof, PASSWORD_PEER], rest) = bytes.split_first_chunk()? else { return None };
    let proof = match proof {
        0 => Proof::None,
        1 => Proof::Etcd,
        _ => return None,
    };
    let (issued_at, rest) = rest.split_first_chunk()?;
    let (generation, rest) = rest.split_first_chunk()?;
    let (id, rest) = rest.split_first_chunk()?;
    let (name, rest) = rest.split_first_chunk()?;
    let (password, rest) = rest.split_first_chunk()?;
    let (name, rest) = rest.split_at_checked(usize::from(u16::from_be_bytes(*name)))?;
    let (password, padding) = rest.split_at_checked(usize::from(u16::from_be_bytes(*password)))?;
    if padding.iter().any(|&byte| byte != 0) {
        return None;
    }
    let peer = SessionPeer::Password {
        user: UserName::from(str::from_utf8(name).ok()?),
        password: Secret::new(str::from_utf8(password).ok()?.to_owned()),
    };
    Some(Session {
        peer,
        proof,
        issued_at: u64::from_be_bytes(*issued_at),
        generation: u64::from_be_bytes(*generation),
        id: SessionId(*id),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::login;
    use super::*;

    #[test]
    fn a_layout_of_the_future_is_not_misread() {
        let known = encode(&login("alice", "p")).unwrap();
        for (at, value) in [(0, 2), (1, 0), (1, 2), (BLOCK - 1, 1), (34, 0xff), (36, 0xff)] {
            let mut bytes = known.to_vec();
            bytes[at] = value;
            assert!(decode(&bytes).is_none(), "byte {at} is {value}");
        }
        assert!(decode(&known).is_some());
    }

    proptest! {
        #[test]
        fn no_bytes_panic_and_what_decodes_encodes_to_itself(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Some(session) = decode(&bytes) {
                let again = encode(&session).unwrap();
                prop_assert!(again.starts_with(&bytes) || bytes.starts_with(&again));
            }
        }
    }
}
