//! The texts of the configuration in force, and the sight of half a file.
//!
//! Owns: what a text written in place may look like while its writer has stalled. Must not know: the keys of
//! a configuration. Invariant: a text that is the beginning of the text in force, in the same file, is seen;
//! a file in another file's place is whole, since who renames a file has written it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// The ending of the names of texts; other files have certificates and secrets, and are not kept.
const ENDING: &str = "toml";
/// Bytes of a text at most: a longer one is not watched.
const LONGEST: u64 = 4 * 1024 * 1024;

/// The texts, by the names of their files.
#[derive(Default)]
pub(super) struct TextsInForce(BTreeMap<PathBuf, ConfigText>);

/// A text, and the file that has it.
#[derive(PartialEq, Eq)]
pub(super) struct ConfigText {
    device: u64,
    inode: u64,
    text: Vec<u8>,
}

impl ConfigText {
    fn read(path: &Path) -> io::Result<Option<Self>> {
        // To open a pipe waits for its writer, and takes what another reader is to have.
        let of = fs::metadata(path)?;
        if !of.is_file() || of.size() > LONGEST {
            return Ok(None);
        }
        let file = File::open(path)?;
        let mut text = Vec::new();
        file.take(LONGEST).read_to_end(&mut text)?;
        Ok(Some(Self { device: of.dev(), inode: of.ino(), text }))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.text
    }

    pub(super) fn inode(&self) -> u64 {
        self.inode
    }

    /// True if `self` is what a writer in place has written so far of a text that is at least as long as this
    /// one.
    fn is_cut(&self, in_force: &Self) -> bool {
        (self.device, self.inode) == (in_force.device, in_force.inode)
            && self.text.len() < in_force.text.len()
            && in_force.text.starts_with(&self.text)
    }
}

impl TextsInForce {
    /// Reads the texts among these files. Blocks.
    pub(super) fn read(files: impl IntoIterator<Item = PathBuf>) -> Self {
        let texts = files.into_iter().filter(|path| path.extension().is_some_and(|ending| ending == ENDING));
        let read = texts.filter_map(|path| Some((ConfigText::read(&path).ok()??, path)));
        Self(read.map(|(text, path)| (path, text)).collect())
    }

    /// The texts, by the names of their files.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&Path, &ConfigText)> {
        self.0.iter().map(|(path, text)| (&**path, text))
    }

    /// Adds the texts of `later` whose files were not named before.
    pub(super) fn with_new_files(mut self, later: Self) -> Self {
        for (path, text) in later.0 {
            self.0.entry(path).or_insert(text);
        }
        self
    }

    /// A file of `now` that has only the beginning of the text in force.
    pub(super) fn cut_short(&self, now: &Self) -> Option<&Path> {
        let cut = now.0.iter().find(|(path, text)| self.0.get(*path).is_some_and(|known| text.is_cut(known)));
        cut.and_then(|(path, _)| self.0.get_key_value(path)).map(|(path, _)| &**path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_beginning_of_the_text_in_the_same_file_is_cut_short() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let (config, secret) = (at("keyward.toml"), at("password"));
        let whole = "[listener]\n[policy]\nmode = 'enforce'\n";
        fs::write(&config, whole).unwrap();
        fs::write(&secret, "secret").unwrap();
        let read = || TextsInForce::read([config.clone(), secret.clone(), at("absent.toml")]);
        let in_force = read();
        assert_eq!(in_force.0.len(), 1, "no secret is kept");
        let is_cut = || in_force.cut_short(&read()).map(Path::to_owned);
        assert_eq!(is_cut(), None);
        for length in [0, 1, 12, whole.len() - 1] {
            fs::write(&config, &whole[..length]).unwrap();
            assert_eq!(is_cut(), Some(config.clone()), "{length}");
        }
        for text in ["[listener]\n[policy]\nmode = 'off'\n", "[other]\n", &format!("{whole}[log]\n"), whole] {
            fs::write(&config, text).unwrap();
            assert_eq!(is_cut(), None, "{text}");
        }
        // In another file, as by an editor, or Kubernetes.
        fs::write(at("new"), "[listener]\n").unwrap();
        fs::rename(at("new"), &config).unwrap();
        assert_eq!(is_cut(), None);
        // A file named since is known, and one that was known keeps the text that was read for it.
        let later = TextsInForce::read([config.clone(), at("new.toml")]);
        assert_eq!(later.0.len(), 1);
        fs::write(at("new.toml"), whole).unwrap();
        let both = in_force.with_new_files(TextsInForce::read([config.clone(), at("new.toml")]));
        fs::write(at("new.toml"), "[listener]\n").unwrap();
        let now = TextsInForce::read([config, at("new.toml")]);
        assert_eq!(both.cut_short(&now), Some(&*at("new.toml")));
    }
}
