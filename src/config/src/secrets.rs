//! Password files and session key files.
//!
//! Owns: their formats. Must not know: the owner of a secret. Invariants: every buffer with file content is
//! wiped; an error names the file, never its content.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use data_encoding::{BASE64, BASE64_NOPAD, HEXLOWER_PERMISSIVE};
use zeroize::Zeroizing;

use keyward_base::secret::Secret;

/// Maximum file size: larger than any password or key.
const MAX_FILE: u64 = 4096;

/// Reasons for an unusable secret file.
#[derive(Debug)]
pub(super) enum UnusableSecret {
    Unreadable(io::Error),
    TooLarge,
    /// The expected content.
    Content(&'static str),
}

impl UnusableSecret {
    /// The error message for an operator.
    pub(super) fn of(&self, path: &Path) -> String {
        let path = path.display();
        match self {
            Self::Unreadable(error) => format!("cannot read {path}: {error}"),
            Self::TooLarge => format!("{path} is larger than {MAX_FILE} bytes"),
            Self::Content(wanted) => format!("{path} {wanted}"),
        }
    }
}

/// Reads the password: the file's single line, without the line end.
pub(super) fn password(path: &Path) -> Result<Secret<String>, UnusableSecret> {
    let bytes = read(path)?;
    let text = std::str::from_utf8(&bytes).map_err(|_| UnusableSecret::Content("is not UTF-8 text"))?;
    let line = text.strip_suffix('\n').unwrap_or(text);
    let line = line.strip_suffix('\r').unwrap_or(line);
    if line.is_empty() {
        return Err(UnusableSecret::Content("is empty; a password is expected"));
    }
    if line.contains('\n') {
        return Err(UnusableSecret::Content("has more than one line; a password alone is expected"));
    }
    Ok(Secret::new(line.to_owned()))
}

/// Reads the file's lines.
pub(super) fn lines(path: &Path) -> Result<Secret<String>, UnusableSecret> {
    let bytes = read(path)?;
    let text = std::str::from_utf8(&bytes).map_err(|_| UnusableSecret::Content("is not UTF-8 text"))?;
    if text.trim().is_empty() {
        return Err(UnusableSecret::Content("is empty"));
    }
    Ok(Secret::new(text.to_owned()))
}

/// Reads every byte of the file, including line ends, as etcd does for an HMAC secret.
pub(super) fn shared_key(path: &Path) -> Result<Secret<Vec<u8>>, UnusableSecret> {
    let bytes = read(path)?;
    // etcd accepts shorter keys, but a guessed key grants `root`.
    if bytes.len() < 16 {
        return Err(UnusableSecret::Content("is shorter than 16 bytes, which is no key"));
    }
    Ok(Secret::new(bytes.to_vec()))
}

/// Reads the key: 32 raw bytes, or one line of 64 hexadecimal digits or of base64.
pub(super) fn session_key(path: &Path) -> Result<Secret<[u8; 32]>, UnusableSecret> {
    const FORM: UnusableSecret = UnusableSecret::Content(
        "holds no key: 32 bytes are expected, raw, as 64 hexadecimal digits or as base64 \
         (head -c 32 /dev/urandom | base64)",
    );
    let bytes = read(path)?;
    let mut key = Zeroizing::new([0; 32]);
    // 32 printable characters are text: half a hexadecimal key, or a passphrase.
    if bytes.len() == 32 && !bytes.iter().all(|byte| byte.is_ascii_graphic() || *byte == b'\n') {
        key.copy_from_slice(&bytes);
    } else {
        decode(bytes.trim_ascii(), &mut key).ok_or(FORM)?;
    }
    if key.iter().all(|byte| *byte == key[0]) {
        return Err(UnusableSecret::Content("holds one byte 32 times, which is no key"));
    }
    Ok(Secret::new(*key))
}

/// Writes a new session key into a file readable by its owner only. An existing file is never replaced: its
/// key may seal every session.
///
/// # Errors
/// The operating system's error, [`io::ErrorKind::AlreadyExists`] for an existing file.
pub fn write_session_key(path: &Path) -> io::Result<()> {
    let mut key = Zeroizing::new([0; 32]);
    getrandom::fill(key.as_mut()).map_err(|error| io::Error::other(error.to_string()))?;
    let mut line = Zeroizing::new(String::with_capacity(64));
    BASE64.encode_append(key.as_ref(), &mut line);
    line.push('\n');
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(line.as_bytes())?;
    file.sync_all()
}

/// True if every user of the machine may read the file.
pub(super) fn readable_by_all(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.mode() & 0o004 != 0)
}

fn decode(text: &[u8], key: &mut [u8; 32]) -> Option<()> {
    // The padding of base64 may be absent. `decode_mut` panics for a result of a different length than `key`.
    let (encoding, text) = match text.len() {
        64 => (HEXLOWER_PERMISSIVE, text),
        _ => (BASE64_NOPAD, text.strip_suffix(b"=").unwrap_or(text)),
    };
    let fits = encoding.decode_len(text.len()).is_ok_and(|length| length == key.len());
    (fits && encoding.decode_mut(text, key).is_ok()).then_some(())
}

/// Reads into one buffer of the maximum size: a growing buffer would leave copies in freed memory.
fn read(path: &Path) -> Result<Zeroizing<Vec<u8>>, UnusableSecret> {
    let file = File::open(path).map_err(UnusableSecret::Unreadable)?;
    let mut bytes = Zeroizing::new(Vec::with_capacity(8192));
    file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(UnusableSecret::Unreadable)?;
    if bytes.len() as u64 > MAX_FILE { Err(UnusableSecret::TooLarge) } else { Ok(bytes) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::PathBuf;

    use super::*;

    fn file(content: impl AsRef<[u8]>) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        std::fs::write(&path, content).unwrap();
        (folder, path)
    }

    #[test]
    fn a_password_is_one_line_as_it_is() {
        for (content, expected) in
            [("pw", "pw"), ("pw\n", "pw"), ("pw\r\n", "pw"), (" p w \n", " p w "), ("pässwört\n", "pässwört")]
        {
            let (_folder, path) = file(content);
            assert_eq!(password(&path).unwrap().expose(), expected);
        }
        for bad in [&b""[..], b"\n", b"\r\n", b"one\ntwo\n", b"\xff\xfe", &[b'x'; 5000]] {
            let (_folder, path) = file(bad);
            assert!(password(&path).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_session_key_has_32_bytes_in_three_forms() {
        let key: [u8; 32] = std::array::from_fn(|index| u8::try_from(index * 7).unwrap());
        let hex = HEXLOWER_PERMISSIVE.encode(&key);
        let base64 = BASE64.encode(&key);
        let forms = [
            key.to_vec(),
            hex.clone().into_bytes(),
            format!("{}\n", hex.to_uppercase()).into_bytes(),
            format!("{base64}\n").into_bytes(),
            base64.trim_end_matches('=').as_bytes().to_vec(),
        ];
        for form in forms {
            let (_folder, path) = file(&form);
            assert_eq!(session_key(&path).unwrap().expose(), &key, "{form:?}");
        }
        let short = BASE64.encode(&key[..31]);
        let bad = [
            &hex[..62],
            &hex[..32],
            "",
            "\n",
            "not base64 at all!",
            &short,
            &"00".repeat(32),
            &format!("{hex}{hex}"),
        ];
        for form in bad {
            let (_folder, path) = file(form);
            assert!(session_key(&path).is_err(), "{form:?}");
        }
        let (_folder, path) = file([0; 33]);
        assert!(session_key(&path).is_err());
    }

    #[test]
    fn a_new_key_is_its_owners_and_replaces_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        write_session_key(&one).unwrap();
        write_session_key(&other).unwrap();
        assert_ne!(session_key(&one).unwrap().expose(), session_key(&other).unwrap().expose());
        assert_eq!(std::fs::metadata(&one).unwrap().mode() & 0o777, 0o600);
        let before = std::fs::read(&one).unwrap();
        assert_eq!(write_session_key(&one).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read(&one).unwrap(), before);
    }

    #[test]
    fn a_file_that_others_may_read_is_noticed() {
        let (_folder, path) = file("pw");
        for (mode, expected) in [(0o600, false), (0o640, false), (0o644, true)] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(readable_by_all(&path), expected, "{mode:o}");
        }
    }

    #[test]
    fn a_reason_never_holds_the_content() {
        let (_folder, path) = file("one-hunter2\ntwo-hunter2\n");
        for useless in [password(&path).unwrap_err(), session_key(&path).unwrap_err()] {
            let text = format!("{} {useless:?}", useless.of(&path));
            assert!(!text.contains("hunter2"), "{text}");
            assert!(text.contains(&path.display().to_string()), "{text}");
        }
    }
}
