//! A file that Keyward keeps over a restart, written until it is on the disk.
//!
//! Owns: the order of the writes, the attempts after a failure, and what is told meanwhile. Must not know:
//! the content. Invariants: one write at a time, so that no older content replaces a newer one; content that
//! is not on the disk is tried again, and its [`KeptFileStatus`] says so until it is.

use std::future::pending;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use futures_util::future::{BoxFuture, FutureExt as _};
use tokio::time::{Instant, sleep_until, timeout};

use super::file_replacement::replace_file;

/// Time between two attempts.
const AGAIN: Duration = Duration::from_secs(2);

/// A file with its writer.
pub struct KeptFile {
    status: KeptFileStatus,
    /// The content put last, until it is on the disk.
    waiting: Option<Arc<[u8]>>,
    write: Option<WriteUnderWay>,
    again_at: Instant,
}

/// A write that has begun.
struct WriteUnderWay {
    content: Arc<[u8]>,
    outcome: BoxFuture<'static, io::Result<()>>,
}

/// The state of a file, for those who report it. Cheap to clone: all clones are of the same file.
#[derive(Clone)]
pub struct KeptFileStatus(Arc<KeptFileFacts>);

struct KeptFileFacts {
    setting: &'static str,
    path: PathBuf,
    loss: &'static str,
    unwritten: Mutex<Option<(SystemTime, String)>>,
}

/// A file whose content is not on the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnwrittenFile {
    /// The configuration key that names the file or its folder.
    pub setting: &'static str,
    /// The file.
    pub path: PathBuf,
    /// The time of the first attempt that failed.
    pub since: SystemTime,
    /// The failure of the last attempt.
    pub error: String,
    /// The loss at a restart until then.
    pub loss: &'static str,
}

impl KeptFileStatus {
    /// A file of this configuration key; `loss` says what a restart loses while it is not written.
    #[must_use]
    pub fn new(setting: &'static str, path: PathBuf, loss: &'static str) -> Self {
        Self(Arc::new(KeptFileFacts { setting, path, loss, unwritten: Mutex::default() }))
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The configuration key that names the file or its folder.
    #[must_use]
    pub fn setting(&self) -> &'static str {
        self.0.setting
    }

    /// The failure, while the content put last is not on the disk.
    #[must_use]
    pub fn unwritten(&self) -> Option<UnwrittenFile> {
        let facts = &*self.0;
        let (since, error) = facts.unwritten.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        Some(UnwrittenFile {
            setting: facts.setting,
            path: facts.path.clone(),
            since,
            error,
            loss: facts.loss,
        })
    }

    fn note_failed(&self, error: &str) {
        let facts = &*self.0;
        let mut unwritten = facts.unwritten.lock().unwrap_or_else(PoisonError::into_inner);
        let since = unwritten.as_ref().map(|(since, _)| *since);
        if since.is_none() {
            let (path, loss) = (facts.path.display(), facts.loss);
            tracing::error!(setting = facts.setting, %path, error, loss, "not written; tried again");
        }
        *unwritten = Some((since.unwrap_or_else(SystemTime::now), error.to_owned()));
    }

    fn note_written(&self) {
        let facts = &*self.0;
        if facts.unwritten.lock().unwrap_or_else(PoisonError::into_inner).take().is_some() {
            tracing::info!(setting = facts.setting, path = %facts.path.display(), "written again");
        }
    }
}

impl WriteUnderWay {
    fn begin(path: PathBuf, content: Arc<[u8]>) -> Self {
        let written = Arc::clone(&content);
        let write = tokio::task::spawn_blocking(move || replace_file(&path, &written));
        let outcome = write.map(|ended| ended.unwrap_or_else(|panicked| Err(io::Error::other(panicked))));
        Self { content, outcome: outcome.boxed() }
    }
}

impl KeptFile {
    /// The writer of this file.
    #[must_use]
    pub fn new(status: KeptFileStatus) -> Self {
        Self { status, waiting: None, write: None, again_at: Instant::now() }
    }

    /// The state of the file.
    #[must_use]
    pub fn status(&self) -> KeptFileStatus {
        self.status.clone()
    }

    /// Takes content to be written at once in place of all content before.
    pub fn put(&mut self, content: Vec<u8>) {
        self.waiting = Some(content.into());
        self.again_at = Instant::now();
    }

    /// Writes what waits, again and again until it is on the disk, for ever. Cancel-safe.
    pub async fn keep(&mut self) {
        loop {
            // A failure is in the status.
            drop(self.step().await);
        }
    }

    /// Waits until the content put last is on the disk, or an attempt to write it has failed.
    ///
    /// # Errors
    /// The failure, or no end within `limit`. The file is written by [`Self::keep`] later.
    pub async fn written(&mut self, limit: Duration) -> io::Result<()> {
        let attempt = async {
            while let Some(content) = self.waiting.clone() {
                let is_under_way = |write: &WriteUnderWay| Arc::ptr_eq(&write.content, &content);
                let is_of_content = self.write.as_ref().is_none_or(is_under_way);
                self.again_at = Instant::now();
                let outcome = self.step().await;
                if is_of_content {
                    return outcome;
                }
            }
            Ok(())
        };
        match timeout(limit, attempt).await {
            Ok(outcome) => outcome,
            Err(_) => {
                self.status.note_failed("the disk does not answer");
                Err(io::Error::new(io::ErrorKind::TimedOut, "the disk does not answer"))
            }
        }
    }

    /// Waits for the end of one write. Waits for ever if nothing is to be written. Cancel-safe.
    async fn step(&mut self) -> io::Result<()> {
        let write = match &mut self.write {
            Some(under_way) => under_way,
            none => {
                let Some(content) = self.waiting.clone() else { return pending().await };
                sleep_until(self.again_at).await;
                none.insert(WriteUnderWay::begin(self.status.path().to_owned(), content))
            }
        };
        let outcome = (&mut write.outcome).await;
        let is_last = self.waiting.as_ref().is_some_and(|waiting| Arc::ptr_eq(waiting, &write.content));
        self.write = None;
        match &outcome {
            Ok(()) if is_last => {
                self.waiting = None;
                self.status.note_written();
            }
            Ok(()) => {}
            Err(error) => {
                self.status.note_failed(&error.to_string());
                if is_last {
                    self.again_at = Instant::now() + AGAIN;
                }
            }
        }
        outcome
    }
}

/// As [`KeptFile::keep`]; without a file it waits for ever. Cancel-safe.
pub async fn keep(file: Option<&mut KeptFile>) {
    match file {
        Some(file) => file.keep().await,
        None => pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn kept(path: PathBuf) -> (KeptFile, KeptFileStatus) {
        let status = KeptFileStatus::new("runtime.state_dir", path, "a restart forgets");
        (KeptFile::new(status.clone()), status)
    }

    const LIMIT: Duration = Duration::from_secs(3600);

    #[tokio::test(start_paused = true)]
    async fn what_could_not_be_written_is_written_as_soon_as_there_is_room() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("absent").join("state");
        let (mut file, status) = kept(path.clone());
        file.put(b"one".to_vec());
        assert_eq!(file.written(LIMIT).await.unwrap_err().kind(), io::ErrorKind::NotFound);
        let unwritten = status.unwritten().unwrap();
        assert_eq!((unwritten.setting, &unwritten.path), ("runtime.state_dir", &path));
        // Tried in vain once more, then with room.
        timeout(AGAIN * 3 / 2, file.keep()).await.unwrap_err();
        assert_eq!(status.unwritten().unwrap().since, unwritten.since);
        fs::create_dir(folder.path().join("absent")).unwrap();
        timeout(AGAIN, file.keep()).await.unwrap_err();
        assert_eq!((fs::read(&path).unwrap(), status.unwritten()), (b"one".to_vec(), None));
        // Newer content is tried at once.
        file.put(b"two".to_vec());
        file.written(LIMIT).await.unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert!(file.keep().now_or_never().is_none() && file.write.is_none(), "nothing is left to do");
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_that_hangs_holds_up_newer_content_and_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let (mut file, status) = kept(path.clone());
        // A write whose disk does not answer.
        let (answer, disk) = tokio::sync::oneshot::channel();
        file.put(b"one".to_vec());
        let content = file.waiting.clone().unwrap();
        let outcome = async move { disk.await.map_err(io::Error::other)? }.boxed();
        file.write = Some(WriteUnderWay { content, outcome });
        assert_eq!(file.written(LIMIT).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        file.put(b"two".to_vec());
        timeout(AGAIN * 3, file.keep()).await.unwrap_err();
        assert_eq!(status.unwritten().unwrap().error, "the disk does not answer");
        assert!(!path.exists(), "one write at a time");
        answer.send(Ok(())).unwrap();
        file.written(LIMIT).await.unwrap();
        assert_eq!((fs::read(&path).unwrap(), status.unwritten()), (b"two".to_vec(), None));
    }
}
