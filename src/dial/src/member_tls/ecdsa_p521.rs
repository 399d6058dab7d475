//! ECDSA over P-521 for TLS. `ring` cannot verify P-521 signatures, but etcd creates P-521 keys when run with
//! `--auto-tls`.
//!
//! Owns: the verification of a P-521 signature by `RustCrypto`'s `p521`, and the list of signature algorithms
//! offered to members. Must not know: the owner of a certificate. Invariants: the module handles only public
//! data and signs nothing; unparsable input is an invalid signature.

use std::fmt;
use std::sync::LazyLock;

use p521::ecdsa::signature::hazmat::PrehashVerifier as _;
use p521::ecdsa::{Signature, VerifyingKey};
use rustls::SignatureScheme;
use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::{AlgorithmIdentifier, InvalidSignature, SignatureVerificationAlgorithm, alg_id};
use sha2::{Digest as _, Sha384, Sha512};

/// A signature algorithm: P-521 with a hash.
struct EcdsaP521 {
    signature: AlgorithmIdentifier,
    hash: fn(&[u8]) -> Vec<u8>,
}

static SHA384: EcdsaP521 =
    EcdsaP521 { signature: alg_id::ECDSA_SHA384, hash: |message| Sha384::digest(message).to_vec() };
static SHA512: EcdsaP521 =
    EcdsaP521 { signature: alg_id::ECDSA_SHA512, hash: |message| Sha512::digest(message).to_vec() };

/// The TLS handshake algorithms of P-521 keys.
static TLS: &[&dyn SignatureVerificationAlgorithm] = &[&SHA512];

/// The algorithms of `ring`, and P-521.
pub(super) static ALGORITHMS: LazyLock<WebPkiSupportedAlgorithms> = LazyLock::new(|| {
    let ring = default_provider().signature_verification_algorithms;
    let mut all = ring.all.to_vec();
    all.extend([&SHA384 as &dyn SignatureVerificationAlgorithm, &SHA512]);
    let mut mapping = ring.mapping.to_vec();
    // TLS 1.2 schemes name only the hash: with a P-521 key, Go signs by the first ECDSA scheme offered.
    for (scheme, algorithms) in &mut mapping {
        if *scheme == SignatureScheme::ECDSA_NISTP384_SHA384 {
            let with_ours =
                algorithms.iter().copied().chain([&SHA384 as &dyn SignatureVerificationAlgorithm]);
            *algorithms = with_ours.collect::<Vec<_>>().leak();
        }
    }
    mapping.push((SignatureScheme::ECDSA_NISTP521_SHA512, TLS));
    // Leaked once per process, because rustls requires static lists.
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
    use data_encoding::HEXLOWER;

    use super::*;

    // Made by OpenSSL: two keys, and signatures of "message" by the first key.
    const OURS: &str = "\
        040075ea85a06b77e5f5d510f5f58ac1df8aad5f5cb23f2eaf54ba03da97ecf3f3db1c4375bf9f7233cea5e66593ed25\
        e1129bf94e740ef80469c9340f260ba88172780085b3d20589bc502b72df09acf783555215dfe5b2cf0af44e1ae57026\
        14484a230865be048b79ff7fbceb9985e6ac6fdd8808c9b38367928c6aabb97ef53645a4ed";
    const OTHER: &str = "\
        04010cc07f7238442e83aec71ca3bdb42ebe9e25f32910bbd72912716ded98446aaed974011fcbbd4ba2583af7bc9463\
        40d79fdeb43c7e765eeffb536997647ad1de61018737af8c0238ff2485a7a368328834832fde97d173fc9f8c7770ad2f\
        cfca62a0c1ab64fcfb22670b954feb081818407f701f0ffbc2f76664ea958a867c065b3774";
    const BY_SHA512: &str = "\
        308188024200d5babacc9509d4b8a83e1e5426a4992e02a20632d08ccbecb12462d560009e23e2f0a32c9cb0a3b544ad\
        c8a912ebadaa7ac2a1713e1f1f79c73b777fe06d0a91a0024201a8404bcdc7a9149af8466e4ef11ad16d5cf3850d92cc\
        d08abede9b8f9a93e90ffe9ec3b993f04a320ad7a757bbe763cc052aa0e2ddf46a3b96c5f808dce0bd2edd";
    const BY_SHA384: &str = "\
        308188024200f6ed7de7cdd18607e1c55abec05c000ae8ae6af94751766ab93b67e16deff5d94cf3e162320f10bb7935\
        2d8d721bdd4fceeeefb1b5679587d21fe32e90980fdc70024201d4877faf24d9519bcd53005e9acdcf66ab49e55e3db0\
        e62b5058d7daa6b6f5364009fceefdd961393847e2123ad59d18bba20351fb3031c4ac3e6eec96b553bacb";

    fn bytes(hex: &str) -> Vec<u8> {
        HEXLOWER.decode(hex.as_bytes()).unwrap()
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
        assert_eq!(schemes.len(), of_ring.len() + 1);
        let first = SignatureScheme::ECDSA_NISTP384_SHA384;
        for (scheme, with) in [(SignatureScheme::ECDSA_NISTP521_SHA512, &SHA512), (first, &SHA384)] {
            let (_, algorithms) = ALGORITHMS.mapping.iter().find(|(of, _)| *of == scheme).unwrap();
            let ours = algorithms.last().unwrap();
            assert_eq!(ours.public_key_alg_id(), alg_id::ECDSA_P521);
            assert_eq!(ours.signature_alg_id(), with.signature);
        }
    }
}
