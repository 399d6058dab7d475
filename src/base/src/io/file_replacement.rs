//! Atomic replacement of a file.
//!
//! Owns: the order of the steps. Must not know: the content. Invariant: a new file replaces the old file by a
//! rename, after the new content was synced to disk, and the rename is synced before the replacement is
//! reported.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Replaces the file; only its owner may read it. Blocks until the new file is synced to disk.
///
/// # Errors
/// The operating system's error: the old file is as before, or the new file may not survive a crash.
pub fn replace_file(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&beside, path)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}
