//! Sealed messages between replicas: a request, and the answer to it.
//!
//! Owns: the format, and the keys derived for it. Must not know: what a message says, whether a request is
//! fresh. Invariants: a message is made and opened with a key derived from a session key in force, so that
//! replicas accept each other's messages exactly as long as each other's sessions; requests and answers have
//! different keys, and an answer opens for its request alone; received bytes never cause a panic.
//!
//! Message = `kwf1` · key id (8) · nonce (24) · XChaCha20-Poly1305 box. Associated data: the mark and the
//! key id; of an answer also the nonce of its request.

use chacha20poly1305::aead::{Aead as _, Payload};
use chacha20poly1305::{KeyInit as _, XChaCha20Poly1305, XNonce};

use keyward_downstream::session::{KeyId, Sealer};

/// Marks a sealed message, and the version of the format.
const MARK: [u8; 4] = *b"kwf1";
const NONCE: usize = 24;
/// Bytes of a message beside its text: mark, key id, nonce, and the box's tag.
pub(super) const SEAL_BYTES: usize = MARK.len() + KeyId::LENGTH + NONCE + 16;
const REQUESTS: &[u8] = b"keyward fleet request v1";
const ANSWERS: &[u8] = b"keyward fleet answer v1";

/// Names one request: its key, and its nonce, which no two requests share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestId {
    key: KeyId,
    nonce: [u8; NONCE],
}

/// The message could not be sealed: the system gives no random bytes, or the text is too long for a box.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the request cannot be sealed")]
pub struct Unsealable;

/// Seals a request with the session key that seals sessions.
///
/// # Errors
/// [`Unsealable`].
pub fn seal_request(sealer: &Sealer, text: &[u8]) -> Result<(Vec<u8>, RequestId), Unsealable> {
    let derived = sealer.derived_key(None, REQUESTS).ok_or(Unsealable)?;
    let (message, nonce) = seal(derived.key.expose(), derived.id, &[], text)?;
    Ok((message, RequestId { key: derived.id, nonce }))
}

/// Opens a request; `None` for anything that no replica with one of the session keys has sealed.
#[must_use]
pub fn open_request(sealer: &Sealer, message: &[u8]) -> Option<(Vec<u8>, RequestId)> {
    let (key, nonce, boxed) = parts(message)?;
    let derived = sealer.derived_key(Some(key), REQUESTS)?;
    Some((open(derived.key.expose(), (key, nonce), &[], boxed)?, RequestId { key, nonce }))
}

/// Seals the answer to a request, with the session key of the request.
///
/// # Errors
/// [`Unsealable`], also where the session key of the request is no longer in force.
pub fn seal_answer(sealer: &Sealer, to: RequestId, text: &[u8]) -> Result<Vec<u8>, Unsealable> {
    let derived = sealer.derived_key(Some(to.key), ANSWERS).ok_or(Unsealable)?;
    Ok(seal(derived.key.expose(), to.key, &to.nonce, text)?.0)
}

/// Opens the answer to a request; `None` for anything else.
#[must_use]
pub fn open_answer(sealer: &Sealer, to: RequestId, message: &[u8]) -> Option<Vec<u8>> {
    let (key, nonce, boxed) = parts(message)?;
    if key != to.key {
        return None;
    }
    let derived = sealer.derived_key(Some(key), ANSWERS)?;
    open(derived.key.expose(), (key, nonce), &to.nonce, boxed)
}

fn seal(
    secret: &[u8; 32],
    key: KeyId,
    context: &[u8],
    text: &[u8],
) -> Result<(Vec<u8>, [u8; NONCE]), Unsealable> {
    let mut nonce = [0; NONCE];
    getrandom::fill(&mut nonce).map_err(|_none| Unsealable)?;
    let aad = associated_data(key, context);
    let boxed = XChaCha20Poly1305::new(secret.into())
        .encrypt(&XNonce::from(nonce), Payload { msg: text, aad: &aad })
        .map_err(|_too_long| Unsealable)?;
    Ok(([&MARK[..], &key.bytes(), &nonce, &boxed].concat(), nonce))
}

fn open(
    secret: &[u8; 32],
    (key, nonce): (KeyId, [u8; NONCE]),
    context: &[u8],
    boxed: &[u8],
) -> Option<Vec<u8>> {
    let aad = associated_data(key, context);
    let cipher = XChaCha20Poly1305::new(secret.into());
    cipher.decrypt(&XNonce::from(nonce), Payload { msg: boxed, aad: &aad }).ok()
}

fn associated_data(key: KeyId, context: &[u8]) -> Vec<u8> {
    [&MARK[..], &key.bytes(), context].concat()
}

/// Key id, nonce and box of a message.
fn parts(message: &[u8]) -> Option<(KeyId, [u8; NONCE], &[u8])> {
    let rest = message.strip_prefix(&MARK)?;
    let (key, rest) = rest.split_first_chunk::<{ KeyId::LENGTH }>()?;
    let (nonce, boxed) = rest.split_first_chunk::<NONCE>()?;
    Some((KeyId::from_bytes(*key), *nonce, boxed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyward_base::secret::Secret;
    use keyward_downstream::session::SessionKeys;

    fn sealer(seeds: &[u8]) -> Sealer {
        let secrets: Vec<_> = seeds.iter().map(|&seed| Secret::new([seed; 32])).collect();
        Sealer::new(SessionKeys::new(&secrets).expect("a key"))
    }

    #[test]
    fn a_request_and_its_answer_open_for_replicas_with_the_key() {
        let (here, there) = (sealer(&[1]), sealer(&[1]));
        let (request, id) = seal_request(&here, b"who is bob").expect("sealed");
        assert_eq!(request.len(), b"who is bob".len() + SEAL_BYTES);
        assert!(!request.windows(3).any(|part| part == b"bob"), "a request is not readable on its way");
        assert_eq!(open_request(&there, &request), Some((b"who is bob".to_vec(), id)));
        let answer = seal_answer(&there, id, b"client 7").expect("sealed");
        assert_eq!(open_answer(&here, id, &answer), Some(b"client 7".to_vec()));
        let (_, another) = seal_request(&here, b"who is bob").expect("sealed");
        assert_eq!(open_answer(&here, another, &answer), None, "an answer is for one request");
        assert_eq!(open_request(&there, &answer), None, "an answer is no request");
        assert_eq!(open_answer(&here, id, &request), None, "a request is no answer");
    }

    #[test]
    fn a_change_of_any_byte_and_every_cut_is_refused() {
        let here = sealer(&[1]);
        let (request, _) = seal_request(&here, b"{}").expect("sealed");
        for at in 0..request.len() {
            for bit in 0..8 {
                let mut changed = request.clone();
                changed[at] ^= 1 << bit;
                assert_eq!(open_request(&here, &changed), None, "byte {at}, bit {bit}");
            }
            assert_eq!(open_request(&here, &request[..at]), None, "cut at {at}");
        }
        assert_eq!(open_request(&here, &[&request[..], b"x"].concat()), None);
        assert_eq!(open_request(&sealer(&[2]), &request), None, "another key");
    }

    #[test]
    fn keys_rotate_in_two_steps_as_for_sessions() {
        let (old, both, new_first, new) = (sealer(&[1]), sealer(&[1, 2]), sealer(&[2, 1]), sealer(&[2]));
        for (asking, answering, is_opened) in [
            (&old, &both, true),
            (&both, &old, true),
            (&both, &new_first, true),
            (&new_first, &both, true),
            (&new_first, &new, true),
            (&new, &new_first, true),
            (&old, &new, false),
            (&new, &old, false),
        ] {
            let (request, id) = seal_request(asking, b"?").expect("sealed");
            let opened = open_request(answering, &request);
            assert_eq!(opened.is_some(), is_opened);
            if let Some((_, opened)) = opened {
                let answer = seal_answer(answering, opened, b"!").expect("sealed");
                assert_eq!(open_answer(asking, id, &answer), Some(b"!".to_vec()));
            }
        }
    }
}
