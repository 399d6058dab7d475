//! The configuration is read again: at SIGHUP, and when a file that it names has changed.
//!
//! Owns: when that happens, and the order: read whole, prepare every part, publish every part. Must not know: what a
//! part is (each of [`Part`]), the data path's sockets. Invariants: a configuration with a fault changes nothing, and
//! the log says each fault; nothing is published before everything could be prepared; a change is told by names, never
//! by a secret; what needs a restart is named, never half applied.

mod files;
mod parts;
mod restart;

use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{MissedTickBehavior, interval};

use crate::config::{self, Config, Faults, Warning};
use crate::published::Published;
use crate::telemetry::metrics::Metrics;
use files::{Print, Watched};

pub use parts::{Running, session_keys};

/// How often files are looked at. A change counts once it looked the same twice, so that a certificate is not taken
/// without its key.
const LOOK: Duration = Duration::from_secs(1);

/// One thing that can change while we run.
pub struct Part {
    prepare: Box<Prepare>,
}

/// What was loaded before, what was read now. The first only says what is new.
type Prepare = dyn Fn(&Config, &Config) -> Result<Option<Ready>, String>;

/// What a new configuration must pass before anything of it is published, and that takes time.
pub struct Trial {
    run: Box<Try>,
}

/// What was read now.
type Try = dyn Fn(&Config) -> LocalBoxFuture<'static, Result<(), String>>;

/// A part that could be prepared and differs from what runs.
pub struct Ready {
    changes: Vec<String>,
    publish: Box<dyn FnOnce()>,
}

impl Part {
    /// `prepare` publishes nothing yet; an error keeps all parts as they are.
    #[must_use]
    pub fn new(prepare: impl Fn(&Config, &Config) -> Result<Option<Ready>, String> + 'static) -> Self {
        Self { prepare: Box::new(prepare) }
    }
}

impl Trial {
    /// An error of `run` keeps all parts as they are.
    #[must_use]
    pub fn new(run: impl Fn(&Config) -> LocalBoxFuture<'static, Result<(), String>> + 'static) -> Self {
        Self { run: Box::new(run) }
    }
}

impl Ready {
    /// `changes` are told in the log, each as a sentence without a secret; `publish` cannot fail.
    #[must_use]
    pub fn new(changes: Vec<String>, publish: impl FnOnce() + 'static) -> Self {
        Self { changes, publish: Box::new(publish) }
    }
}

/// What is read again, and what follows from it.
pub struct Reload {
    path: PathBuf,
    /// What is in force: as it was last read, but for what needs a restart. Its files are all that are named.
    current: Config,
    waiting: Arc<Published<Vec<&'static str>>>,
    trials: Vec<Trial>,
    parts: Vec<Part>,
    metrics: Arc<Metrics>,
}

impl Reload {
    /// Of the configuration in `path`, of which `started` was read. Keys that were changed and need a restart are told in `waiting`.
    #[must_use]
    pub fn new(
        path: PathBuf,
        started: &Config,
        trials: Vec<Trial>,
        parts: Vec<Part>,
        waiting: Arc<Published<Vec<&'static str>>>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self { path, current: started.clone(), waiting, trials, parts, metrics }
    }

    /// Waits for reasons to read it again, for ever.
    pub async fn run(mut self) {
        let mut hangups = match signal(SignalKind::hangup()) {
            Ok(hangups) => hangups,
            Err(error) => return tracing::error!(%error, "SIGHUP cannot be received; reload is off"),
        };
        let mut looks = interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut watched = Watched::new(self.print().await);
        loop {
            // Both arms are cancel-safe.
            let asked = tokio::select! {
                hangup = hangups.recv() => match hangup {
                    Some(()) => true,
                    None => return,
                },
                _ = looks.tick() => false,
            };
            let print = self.print().await;
            if watched.is_due(&print) || asked {
                // As before the reading: what changes meanwhile is read again.
                watched.loaded(print);
                if self.read_again().await {
                    // It may name other files now.
                    let named = self.print().await;
                    watched.also(named);
                }
            }
        }
    }

    /// Of the configuration and all files that it names.
    async fn print(&self) -> Print {
        let names: Vec<PathBuf> =
            std::iter::once(&self.path).chain(self.current.files.iter()).cloned().collect();
        // A file system that hangs must not hang what else this thread does.
        tokio::task::spawn_blocking(move || Print::of(names)).await.unwrap_or_default()
    }

    /// Reads it at once. Whether what was read is what runs now.
    pub(crate) async fn read_again(&mut self) -> bool {
        let published = match self.read().await {
            Ok((config, warnings)) => {
                for warning in warnings {
                    tracing::warn!(%warning, "configuration");
                }
                self.publish(config).await
            }
            Err(faults) => {
                for fault in faults.iter() {
                    tracing::error!(%fault, "configuration not reloaded");
                }
                false
            }
        };
        let counter = if published { &self.metrics.reloads } else { &self.metrics.reloads_refused };
        counter.inc();
        published
    }

    /// A file system that hangs must not hang what else this thread does: revocations, logins, probes.
    async fn read(&self) -> Result<(Config, Vec<Warning>), Faults> {
        let path = self.path.clone();
        match tokio::task::spawn_blocking(move || config::load(&path)).await {
            Ok(read) => read,
            Err(ended) if ended.is_panic() => resume_unwind(ended.into_panic()),
            // The runtime ends.
            Err(_) => std::future::pending().await,
        }
    }

    async fn publish(&mut self, read: Config) -> bool {
        let config = restart::in_force(&self.current, read.clone());
        for trial in &self.trials {
            if let Err(fault) = (trial.run)(&config).await {
                tracing::error!(%fault, "configuration not reloaded");
                return false;
            }
        }
        let prepared = self.parts.iter().map(|part| (part.prepare)(&self.current, &config));
        let ready: Vec<Option<Ready>> = match prepared.collect() {
            Ok(ready) => ready,
            Err(fault) => {
                tracing::error!(%fault, "configuration not reloaded");
                return false;
            }
        };
        let mut changed = 0;
        for Ready { changes, publish } in ready.into_iter().flatten() {
            publish();
            for change in changes {
                tracing::info!(%change, "configuration reloaded");
                changed += 1;
            }
        }
        if changed == 0 {
            tracing::info!("configuration read again: nothing has changed that can change while running");
        }
        let waiting = restart::waiting(&config, &read);
        for section in &waiting {
            tracing::warn!(section, "changed in the file; takes effect at the next start");
        }
        self.waiting.publish(waiting);
        self.current = config;
        true
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::path::Path;
    use std::rc::Rc;

    use futures_util::FutureExt as _;

    use super::*;

    fn configuration(path: &Path, prefix: &str) -> Result<(), std::io::Error> {
        let text = format!(
            "listener = [{{ name = 'a', address = '127.0.0.1:1' }}]\n\
             cluster.endpoints = ['http://127.0.0.1:2']\n\
             maintenance.etcd_prefix = '/{prefix}/'\n"
        );
        std::fs::write(path, text)
    }

    fn reload(path: &Path, parts: Vec<Part>) -> Reload {
        let (config, _) = config::load(path).unwrap();
        let trial = Trial::new(|config| {
            let prefix = format!("{:?}", config.maintenance);
            async move { if prefix.contains("tried") { Err("found wanting".into()) } else { Ok(()) } }
                .boxed_local()
        });
        let (waiting, metrics) = (Arc::new(Published::new(Vec::new())), Arc::new(Metrics::new(Vec::new())));
        Reload::new(path.to_owned(), &config, vec![trial], parts, waiting, metrics)
    }

    /// Takes down what it publishes; refuses the prefix "bad".
    fn noting(published: &Rc<RefCell<Vec<String>>>) -> Part {
        let published = Rc::clone(published);
        Part::new(move |before, now| {
            let (before, now) = (format!("{:?}", before.maintenance), format!("{:?}", now.maintenance));
            if now.contains("bad") {
                return Err("a bad prefix".into());
            }
            let published = Rc::clone(&published);
            let note = move || published.borrow_mut().push("prefix".into());
            Ok((before != now).then(|| Ready::new(vec!["prefix".into()], note)))
        })
    }

    #[tokio::test]
    async fn all_parts_are_published_or_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keyward.toml");
        configuration(&path, "one").unwrap();
        let published = Rc::new(RefCell::new(Vec::new()));
        let always = Rc::clone(&published);
        let other = Part::new(move |_, _| {
            let always = Rc::clone(&always);
            Ok(Some(Ready::new(Vec::new(), move || always.borrow_mut().push("other".into()))))
        });
        let mut reload = reload(&path, vec![other, noting(&published)]);
        configuration(&path, "two").unwrap();
        assert!(reload.read_again().await);
        assert_eq!(published.take(), ["other", "prefix"]);
        assert!(reload.read_again().await);
        assert_eq!(published.take(), ["other"], "it is compared with what was published last");

        for prefix in ["bad", "tried"] {
            configuration(&path, prefix).unwrap();
            assert!(!reload.read_again().await);
        }
        std::fs::write(&path, "nonsense").unwrap();
        assert!(!reload.read_again().await);
        std::fs::remove_file(&path).unwrap();
        assert!(!reload.read_again().await);
        assert!(published.take().is_empty(), "one part that cannot be prepared keeps all");
        assert_eq!((reload.metrics.reloads.get(), reload.metrics.reloads_refused.get()), (2, 4));
    }

    /// Parts see what is in force, however often the file says otherwise; who asks what waits is told.
    #[tokio::test]
    async fn what_waits_for_a_restart_is_told_until_it_is_taken_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keyward.toml");
        configuration(&path, "one").unwrap();
        let seen = Rc::new(RefCell::new(Vec::new()));
        let shards = Rc::clone(&seen);
        let part = Part::new(move |_, now| {
            shards.borrow_mut().push(now.runtime.shards.get());
            Ok(None)
        });
        let mut reload = reload(&path, vec![part]);
        let begun = reload.current.runtime.shards.get();
        for (line, waits) in [("runtime.shards = 7\n", &["runtime"][..]), ("", &[])] {
            for _ in 0..2 {
                configuration(&path, "one").unwrap();
                let text = std::fs::read_to_string(&path).unwrap() + line;
                std::fs::write(&path, text).unwrap();
                assert!(reload.read_again().await);
                assert_eq!(**reload.waiting.load(), waits);
            }
        }
        assert_eq!(seen.take(), [begun; 4]);
    }

    /// A file of which nothing comes, as on a file system that hangs.
    #[tokio::test]
    async fn a_file_that_hangs_holds_up_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keyward.toml");
        configuration(&path, "one").unwrap();
        let mut reload = reload(&path, Vec::new());
        std::fs::remove_file(&path).unwrap();
        let made = std::process::Command::new("mkfifo").arg(&path).status().expect("mkfifo runs");
        assert!(made.success());
        let (turned, turn) = std::sync::mpsc::channel();
        let writer = std::thread::spawn(move || {
            // What waits for the file would wait for ever: the limit is for a thread that does.
            let turned = turn.recv_timeout(Duration::from_secs(20)).is_ok();
            configuration(&path, "two").unwrap();
            turned
        });
        let others = async { turned.send(()).expect("it listens") };
        let (read, ()) = tokio::join!(reload.read_again(), others);
        assert!(read, "it is read when it comes");
        assert!(writer.join().unwrap(), "others had their turn");
    }
}
