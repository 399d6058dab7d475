//! The texts that were in force before a restart, known by digests of their beginnings.
//!
//! Owns: the file in `runtime.state_dir`. Must not know: the keys of a configuration. Invariants: no text is
//! in the file, since a text may have names of secrets; a file that is not readable, or of another version,
//! knows of nothing.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use data_encoding::BASE64URL_NOPAD;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::file_names;
use super::texts_in_force::{ConfigText, TextsInForce};
use keyward_base::io::kept_file::KeptFileStatus;
use keyward_config::{Config, ConfigFaults, ConfigSources, ConfigWarning};

/// The name of the file.
const FILE: &str = "configuration.json";
/// Version of the file's format.
const VERSION: u32 = 1;
/// Bytes of a digest: a text that was cut short is to be seen, not one that was made to look like it.
const DIGEST_BYTES: usize = 9;
/// Lines of a text at most: a longer one is not kept.
const MOST_LINES: usize = 65_536;
/// The loss at a restart while the file is not on the disk.
const UNSEEN: &str = "a restart does not see that the configuration was cut short since then";

#[derive(Serialize, Deserialize)]
struct KeptTextsFile {
    version: u32,
    texts: BTreeMap<PathBuf, KeptText>,
}

#[derive(Serialize, Deserialize)]
struct KeptText {
    inode: u64,
    bytes: usize,
    /// The end of each line, with the digest of all bytes before.
    line_ends: BTreeMap<usize, String>,
}

impl KeptText {
    fn of(text: &ConfigText) -> Option<Self> {
        let (mut digest, mut line_ends) = (Sha256::new(), BTreeMap::new());
        let mut end = 0;
        for line in text.bytes().split_inclusive(|byte| *byte == b'\n') {
            digest.update(line);
            end += line.len();
            line_ends.insert(end, short(digest.clone()));
        }
        let bytes = text.bytes().len();
        (line_ends.len() <= MOST_LINES).then_some(Self { inode: text.inode(), bytes, line_ends })
    }

    /// True if `now` is in the same file, and has whole lines of this text and at most the beginning of
    /// another one.
    fn was_cut(&self, now: &ConfigText) -> bool {
        let text = now.bytes();
        if now.inode() != self.inode || text.len() >= self.bytes {
            return false;
        }
        let end = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let lines = text.get(..end).unwrap_or_default();
        let known = self.line_ends.get(&end);
        text.is_empty() || known.is_some_and(|known| *known == short(Sha256::new_with_prefix(lines)))
    }
}

fn short(digest: Sha256) -> String {
    let digest = digest.finalize();
    BASE64URL_NOPAD.encode(digest.get(..DIGEST_BYTES).unwrap_or_default())
}

/// The content of the file for these texts.
pub(super) fn content(texts: &TextsInForce) -> Vec<u8> {
    let kept = texts.iter().filter_map(|(path, text)| Some((absolute(path), KeptText::of(text)?)));
    let file = KeptTextsFile { version: VERSION, texts: kept.collect() };
    serde_json::to_vec(&file).unwrap_or_default()
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// The file for the texts of `config`; `None` without a folder for state.
#[must_use]
pub fn kept_texts(config: &Config) -> Option<KeptFileStatus> {
    let folder = config.runtime.state_dir.as_ref()?;
    Some(KeptFileStatus::new("runtime.state_dir", folder.join(FILE), UNSEEN))
}

/// Reads the configuration of a start. Blocks.
///
/// # Errors
/// All faults at once; or one of the files was written in place, and has only the beginning of the text that
/// was in force before the start.
pub fn load_for_start(sources: &ConfigSources) -> Result<(Config, Vec<ConfigWarning>), ConfigFaults> {
    let (config, warnings) = sources.load()?;
    match cut_since_last_start(sources, &config) {
        None => Ok((config, warnings)),
        Some(fault) => Err(ConfigFaults::of_sources(fault)),
    }
}

fn cut_since_last_start(sources: &ConfigSources, config: &Config) -> Option<String> {
    let path = kept_texts(config)?.path().to_owned();
    let file: KeptTextsFile = serde_json::from_slice(&fs::read(&path).ok()?).ok()?;
    if file.version != VERSION {
        return None;
    }
    let now = TextsInForce::read(file_names(sources, config));
    let was_cut = |(path, text): &(&Path, &ConfigText)| {
        file.texts.get(&absolute(path)).is_some_and(|kept| kept.was_cut(text))
    };
    let (cut, _) = now.iter().find(was_cut)?;
    let (cut, path) = (cut.display(), path.display());
    Some(format!(
        "{cut}: was written in place, and has only the beginning of the text that was in force before: \
         whoever writes it may not have ended, or the disk is full; if it is meant to be so, put it there by \
         a rename (cp {cut} {cut}.new && mv {cut}.new {cut}), or remove {path}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_cut_short_since_the_last_start_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let whole = "listener = [{ name = 'a', address = '127.0.0.1:1' }]\ncluster.endpoints = ['http://127.0.0.1:2']\n\
             runtime.state_dir = '.'\n# The policy.\npolicy.mode = 'enforce'\npolicy.file = 'policy.toml'\n";
        let head = whole.find("# The").unwrap();
        let policy = "[[role]]\nname = 'reader'\nallow = [{ actions = ['read'], everything = true }]\n";
        fs::write(at("keyward.toml"), whole).unwrap();
        fs::write(at("policy.toml"), policy).unwrap();
        let sources = ConfigSources::of_file(Some(at("keyward.toml")));
        let look = || load_for_start(&sources).err().map(|fault| fault.to_string());
        assert_eq!(look(), None, "nothing is known yet");
        let (config, _) = sources.load().unwrap();
        let known = content(&TextsInForce::read(file_names(&sources, &config)));
        fs::write(at(FILE), &known).unwrap();
        assert!(!String::from_utf8(known).unwrap().contains("enforce"), "no text is kept");
        assert_eq!(look(), None);

        // At the end of a line, and within one.
        for end in [head, head + "# The".len()] {
            fs::write(at("keyward.toml"), whole.get(..end).unwrap()).unwrap();
            let fault = load_for_start(&sources).unwrap_err().to_string();
            assert!(fault.contains("keyward.toml: was written in place"), "{fault}");
        }
        // Another text, a longer one, and the same one are whole.
        for text in
            [format!("{whole}# more\n"), whole.to_owned(), whole.replace("policy.mode = 'enforce'\n", "")]
        {
            fs::write(at("keyward.toml"), text).unwrap();
            assert_eq!(look(), None);
        }
        fs::write(at("keyward.toml"), whole).unwrap();
        // The policy's own file, also without a byte.
        for end in [0, policy.find("allow").unwrap()] {
            fs::write(at("policy.toml"), policy.get(..end).unwrap()).unwrap();
            assert!(look().is_some_and(|fault| fault.contains("policy.toml: was written")), "{end}");
        }
        fs::write(at("policy.toml"), policy).unwrap();
        // A rename says that it is whole, and so does who removes the file.
        fs::write(at("keyward.toml"), whole.get(..head).unwrap()).unwrap();
        assert!(look().is_some());
        fs::write(at("new"), whole.get(..head).unwrap()).unwrap();
        fs::rename(at("new"), at("keyward.toml")).unwrap();
        assert_eq!(look(), None);
        fs::write(at("policy.toml"), "").unwrap();
        fs::write(at(FILE), "{}").unwrap();
        assert_eq!(look(), None, "a damaged file knows of nothing");
    }
}
