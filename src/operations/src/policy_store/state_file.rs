//! The state file: the last good generation and its temporary grants, for a restart without etcd.
//!
//! Owns: the file format. Must not know: etcd, the meaning of a rule. Invariant: a file without its mark, or
//! with another document than its header names, is not believed.

use std::io;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::generation::{GenerationHeader, sha256};
use super::temporary_grant::TemporaryGrant;

/// The first line of the file.
const MARK: &str = "# keyward policy state 1";

/// The generation of the file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PolicyState {
    pub(super) header: GenerationHeader,
    pub(super) grants: Vec<TemporaryGrant>,
    pub(super) text: Arc<str>,
}

/// The second line of the file; the document follows.
#[derive(Serialize, Deserialize)]
struct StateLine {
    header: GenerationHeader,
    grants: Vec<TemporaryGrant>,
}

/// Reads the file. `None` for a missing file.
///
/// # Errors
/// The file cannot be read, or is not believed.
pub(super) fn read(path: &Path) -> io::Result<Option<PolicyState>> {
    let content = match std::fs::read_to_string(path) {
        Ok(content) => content,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let state =
        parse(&content).ok_or_else(|| io::Error::other("is not a state file of the policy, or damaged"))?;
    Ok(Some(state))
}

fn parse(content: &str) -> Option<PolicyState> {
    let (line, text) = content.strip_prefix(MARK)?.strip_prefix('\n')?.split_once('\n')?;
    let StateLine { header, grants } = serde_json::from_str(line).ok()?;
    (sha256(text) == header.sha256).then(|| PolicyState { header, grants, text: text.into() })
}

/// The content of the file.
///
/// # Errors
/// The state has no JSON.
pub(super) fn content(state: PolicyState) -> io::Result<Vec<u8>> {
    let PolicyState { header, grants, text } = state;
    let line = serde_json::to_string(&StateLine { header, grants })?;
    Ok(format!("{MARK}\n{line}\n{text}").into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_cut_or_changed_is_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("policy");
        assert_eq!(read(&path).unwrap(), None, "not there yet");
        let text = "[[role]]\nname = 'a'\n";
        let state = || PolicyState {
            header: GenerationHeader {
                generation: 3,
                sha256: sha256(text),
                comment: "two\nlines".into(),
                applied_at: 7,
                uid: None,
                sudo_user: None,
            },
            grants: Vec::new(),
            text: text.into(),
        };
        std::fs::write(&path, content(state()).unwrap()).unwrap();
        assert_eq!(read(&path).unwrap(), Some(state()));
        let whole = std::fs::read_to_string(&path).unwrap();
        for end in 0..whole.len() {
            std::fs::write(&path, &whole[..end]).unwrap();
            assert!(read(&path).is_err(), "cut at {end}");
        }
        std::fs::write(&path, whole.replace("'a'", "'b'")).unwrap();
        assert!(read(&path).is_err());
    }
}
