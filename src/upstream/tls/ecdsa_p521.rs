//! ECDSA over P-521, which `ring` cannot verify: etcd makes such keys where it runs with `--auto-tls`.
//!
//! Owns: the check of one signature, by `RustCrypto`'s `p521`, and the list of all signatures that members may show. Must not know: whose
//! certificate it is. Invariants: only public data is touched here, nothing is signed; whatever does not parse is no signature.

use std::fmt;
use std::sync::LazyLock;

use p521::ecdsa::signature::hazmat::PrehashVerifier as _;
use p521::ecdsa::{Signature, VerifyingKey};
use rustls::SignatureScheme;
use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::{AlgorithmIdentifier, InvalidSignature, SignatureVerificationAlgorithm, alg_id};
use sha2::{Digest as _, Sha384, Sha512};

/// One algorithm: P-521 with one hash.
struct EcdsaP521 {
    signature: AlgorithmIdentifier,
    hash: fn(&[u8]) -> Vec<u8>,
}

static SHA384: EcdsaP521 =
    EcdsaP521 { signature: alg_id::ECDSA_SHA384, hash: |message| Sha384::digest(message).to_vec() };
static SHA512: EcdsaP521 =
    EcdsaP521 { signature: alg_id::ECDSA_SHA512, hash: |message| Sha512::digest(message).to_vec() };

/// What signs a TLS handshake with such a key.
static TLS: &[&dyn SignatureVerificationAlgorithm] = &[&SHA512];

/// What `ring` verifies, and P-521.
pub(super) static ALGORITHMS: LazyLock<WebPkiSupportedAlgorithms> = LazyLock::new(|| {
    let ring = default_provider().signature_verification_algorithms;
    let mut all = ring.all.to_vec();
    all.extend([&SHA384 as &dyn SignatureVerificationAlgorithm, &SHA512]);
    let mut mapping = ring.mapping.to_vec();
    mapping.push((SignatureScheme::ECDSA_NISTP521_SHA512, TLS));
    // Once per process: rustls asks for lists that live as long as that.
    WebPkiSupportedAlgorithms { all: all.leak(), mapping: mapping.leak() }
});

impl SignatureVerificationAlgorithm for EcdsaP521 {
    fn verify_signature(
        &self,
        public_key: &[u8],
        message: &[u8],
        signature: &[u8],
    ) -> Result<(), InvalidSignature> {
        let key = VerifyingKey::from_sec1_bytes(public_key).map_err(|_| InvalidSignature)?;
        let signature = Signature::from_der(signature).map_err(|_| InvalidSignature)?;
        key.verify_prehash(&(self.hash)(message), &signature).map_err(|_| InvalidSignature)
    }

    fn public_key_alg_id(&self) -> AlgorithmIdentifier {
        alg_id::ECDSA_P521
    }

    fn signature_alg_id(&self) -> AlgorithmIdentifier {
        self.signature
    }
}

impl fmt::Debug for EcdsaP521 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EcdsaP521").field("signature", &self.signature).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Made by OpenSSL: two keys, and what the first signed of "message".
    const OURS: &str = "040075ea85a06b77e5f5d510f5f58ac1df8aad5f5cb23f2eaf54ba03da97ecf3f3db1c4375bf9f7233cea5e66593ed25e112\
        9bf94e740ef80469c9340f260ba88172780085b3d20589bc502b72df09acf783555215dfe5b2cf0af44e1ae5702614484a23\
        0865be048b79ff7fbceb9985e6ac6fdd8808c9b38367928c6aabb97ef53645a4ed";
    const OTHER: &str = "04010cc07f7238442e83aec71ca3bdb42ebe9e25f32910bbd72912716ded98446aaed974011fcbbd4ba2583af7bc946340d7\
        9fdeb43c7e765eeffb536997647ad1de61018737af8c0238ff2485a7a368328834832fde97d173fc9f8c7770ad2fcfca62a0\
        c1ab64fcfb22670b954feb081818407f701f0ffbc2f76664ea958a867c065b3774";
    const BY_SHA512: &str = "308188024200d5babacc9509d4b8a83e1e5426a4992e02a20632d08ccbecb12462d560009e23e2f0a32c9cb0a3b544adc8a9\
        12ebadaa7ac2a1713e1f1f79c73b777fe06d0a91a0024201a8404bcdc7a9149af8466e4ef11ad16d5cf3850d92ccd08abede\
        9b8f9a93e90ffe9ec3b993f04a320ad7a757bbe763cc052aa0e2ddf46a3b96c5f808dce0bd2edd";
    const BY_SHA384: &str = "308188024200f6ed7de7cdd18607e1c55abec05c000ae8ae6af94751766ab93b67e16deff5d94cf3e162320f10bb79352d8d\
        721bdd4fceeeefb1b5679587d21fe32e90980fdc70024201d4877faf24d9519bcd53005e9acdcf66ab49e55e3db0e62b5058\
        d7daa6b6f5364009fceefdd961393847e2123ad59d18bba20351fb3031c4ac3e6eec96b553bacb";

    fn bytes(hex: &str) -> Vec<u8> {
        let pairs = hex.as_bytes().chunks_exact(2);
        pairs.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
    }

    #[test]
    fn a_signature_is_good_for_its_key_message_and_hash_alone() {
        let (ours, other) = (bytes(OURS), bytes(OTHER));
        for (algorithm, wrong, signed) in [(&SHA512, &SHA384, BY_SHA512), (&SHA384, &SHA512, BY_SHA384)] {
            let signed = bytes(signed);
            let verify = |by: &EcdsaP521, key: &[u8], message: &[u8], signature: &[u8]| {
                by.verify_signature(key, message, signature).is_ok()
            };
            assert!(verify(algorithm, &ours, b"message", &signed));
            assert!(!verify(algorithm, &other, b"message", &signed));
            assert!(!verify(algorithm, &ours, b"massage", &signed));
            assert!(!verify(wrong, &ours, b"message", &signed));
            let mut bent = signed.clone();
            *bent.last_mut().unwrap() ^= 1;
            for (key, signature) in
                [(&ours[..], &bent[..]), (&ours, &[]), (&[], &signed), (&ours[..9], &signed)]
            {
                assert!(!verify(algorithm, key, b"message", signature));
            }
        }
    }

    #[test]
    fn it_is_offered_to_members_beside_what_ring_verifies() {
        let schemes = ALGORITHMS.supported_schemes();
        let of_ring = default_provider().signature_verification_algorithms.supported_schemes();
        assert!(of_ring.iter().all(|scheme| schemes.contains(scheme)));
        assert!(
            schemes.contains(&SignatureScheme::ECDSA_NISTP521_SHA512) && schemes.len() == of_ring.len() + 1
        );
    }
}
