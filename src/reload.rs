//! Reload of the configuration: at SIGHUP, at `keyward reload`, and after a change of any file named in the
//! configuration.
//!
//! Owns: the triggers, and the order: read everything, prepare every part, publish every part. Must not know:
//! the content of a [`ReloadPart`], the data path's sockets. Invariants: a configuration with a fault changes
//! nothing, and each fault is logged; no part is published before all parts are prepared; the log names
//! changed keys, never secrets; keys that need a restart are named, never applied in half; each reload leaves
//! one audit record, whatever triggered it; a certificate that is not good now does not take the place of one
//! that is, and is read again once it is good; a chain that lost an intermediate is taken by an operator's
//! word only.

mod change_records;
mod files;
mod kept_texts;
mod key_table;
mod parts;
mod restart;
mod texts_in_force;
mod weaker;

use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::future::LocalBoxFuture;
use tokio::signal::unix::Signal;
use tokio::time::{MissedTickBehavior, interval};

pub use change_records::ChangeRecords;
pub use files::FileSetFingerprint;
use files::WatchedFiles;
pub use kept_texts::{kept_texts, load_for_start};
use key_table::TakesEffect;
use keyward_base::io::kept_file::{self, KeptFile, KeptFileStatus};
use keyward_base::io::service_manager;
use keyward_base::published::Published;
use keyward_config::certificate_expiry::{configured_certificates, worse_now};
use keyward_config::lost_intermediates::{LostIntermediate, lost_intermediates};
use keyward_config::reload_request::{
    AppliedReload, ReloadOutcome, ReloadRequestReceiver, ReloadState, ReloadTrigger, WeakerSetting,
};
use keyward_config::{Config, ConfigFaults, ConfigSources, ConfigWarning};
use keyward_telemetry::metrics::Metrics;
use texts_in_force::TextsInForce;

pub use key_table::ReloadPartName;
pub use parts::{RunningListenerTls, session_keys};

/// Interval of the checks for changed files. A change counts after two equal checks, so that a certificate is
/// not loaded without its key.
const LOOK: Duration = Duration::from_secs(1);

/// How long a weaker setting is shown after its reload.
const WEAKER_SHOWN: Duration = Duration::from_secs(24 * 3600);

/// A part of the configuration that can change at run time.
pub struct ReloadPart {
    prepare: Box<PreparePartFn>,
}

/// Takes the configuration in force, then the new configuration. The former serves only to describe the
/// changes.
type PreparePartFn = dyn Fn(&Config, &Config) -> Result<Option<PreparedPart>, String>;

/// A slow check of a new configuration, passed before any part is published.
pub struct ReloadCheck {
    run: Box<ReloadCheckFn>,
}

/// Takes the new configuration.
type ReloadCheckFn = dyn Fn(&Config) -> LocalBoxFuture<'static, Result<(), String>>;

/// A prepared part that differs from the running part.
pub struct PreparedPart {
    changes: Vec<String>,
    publish: Box<dyn FnOnce()>,
}

impl ReloadPart {
    /// Returns a part. `prepare` must not publish; an error keeps all parts unchanged.
    #[must_use]
    pub fn new(prepare: impl Fn(&Config, &Config) -> Result<Option<PreparedPart>, String> + 'static) -> Self {
        Self { prepare: Box::new(prepare) }
    }
}

impl ReloadCheck {
    /// Returns a check. An error of `run` keeps all parts unchanged.
    #[must_use]
    pub fn new(run: impl Fn(&Config) -> LocalBoxFuture<'static, Result<(), String>> + 'static) -> Self {
        Self { run: Box::new(run) }
    }
}

impl PreparedPart {
    /// Returns a prepared part. Each of `changes` is logged as a sentence without secrets; `publish` cannot
    /// fail.
    #[must_use]
    pub fn new(changes: Vec<String>, publish: impl FnOnce() + 'static) -> Self {
        Self { changes, publish: Box::new(publish) }
    }
}

/// The reload task: the configuration file, the checks and the parts.
pub struct Reload {
    sources: ConfigSources,
    /// The configuration in force: as last read, except for keys that need a restart. Names all watched
    /// files.
    current: Config,
    state: Arc<Published<ReloadState>>,
    /// The warnings told already.
    warnings: Vec<String>,
    trials: Vec<ReloadCheck>,
    parts: Vec<ReloadPart>,
    metrics: Arc<Metrics>,
    /// The audit records, if the audit log has records of admin events.
    records: Option<ChangeRecords>,
    /// The state of the files in use at the start.
    at_start: Option<FileSetFingerprint>,
    /// When a certificate begins for which the last reload was refused.
    again_at: Option<SystemTime>,
    /// The texts read for the configuration in force.
    texts: TextsInForce,
    /// What a restart is to know of the texts.
    kept_texts: Option<KeptFile>,
    /// The changes that weaken, of the last day.
    weaker: Vec<WeakerSetting>,
}

/// The names of the files of `sources`, and of the files named in `config`.
fn file_names(sources: &ConfigSources, config: &Config) -> Vec<PathBuf> {
    let named = config.files.iter().map(|file| &**file);
    sources.file().into_iter().chain(named).map(Path::to_owned).collect()
}

/// The present state of the files of `sources` and of the files named in `config`.
pub async fn fingerprint(sources: &ConfigSources, config: &Config) -> FileSetFingerprint {
    let names = file_names(sources, config);
    // A blocking thread, so that a hanging file system does not block the control runtime.
    tokio::task::spawn_blocking(move || FileSetFingerprint::of(names)).await.unwrap_or_default()
}

impl Reload {
    /// Returns a reload task for the configuration of `sources`, read as `started` at the start. Changed keys
    /// that need a restart, and the faults of a refused reload, are published in `state`.
    #[must_use]
    pub fn new(
        sources: ConfigSources,
        started: &Config,
        trials: Vec<ReloadCheck>,
        parts: Vec<ReloadPart>,
        state: Arc<Published<ReloadState>>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let (current, warnings) = (started.clone(), Vec::new());
        Self {
            sources,
            current,
            state,
            warnings,
            trials,
            parts,
            metrics,
            records: None,
            at_start: None,
            again_at: None,
            texts: TextsInForce::default(),
            kept_texts: None,
            weaker: Vec::new(),
        }
    }

    /// Sets the state of the files in use, from before their first reading: a file changed during the start
    /// is read again. Without it the files are those at the begin of [`run`](Self::run).
    #[must_use]
    pub fn with_files_at_start(self, files: FileSetFingerprint) -> Self {
        Self { at_start: Some(files), ..self }
    }

    /// Sets the file from which a restart knows the texts in force ([`kept_texts`]).
    #[must_use]
    pub fn with_kept_texts(self, file: Option<KeptFileStatus>) -> Self {
        Self { kept_texts: file.map(KeptFile::new), ..self }
    }

    /// Sets the records: each reload leaves one.
    #[must_use]
    pub fn with_records(self, records: Option<ChangeRecords>) -> Self {
        Self { records, ..self }
    }

    /// Sets the warnings told at the start: a reload tells only further ones.
    #[must_use]
    pub fn with_told_warnings(self, warnings: &[ConfigWarning]) -> Self {
        Self { warnings: warnings.iter().map(ConfigWarning::to_string).collect(), ..self }
    }

    /// Waits for triggers and reloads, for ever. Answers each of `requests` with the outcome; each of
    /// `hangups` is a SIGHUP.
    pub async fn run(mut self, mut requests: ReloadRequestReceiver, mut hangups: Signal) {
        let mut looks = interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let at_start = match self.at_start.take() {
            Some(files) => files,
            None => self.print().await,
        };
        let mut watched = WatchedFiles::new(at_start);
        self.take_texts(self.read_texts().await);
        loop {
            let mut request = None;
            // Every arm is cancel-safe.
            let asked = tokio::select! {
                hangup = hangups.recv() => match hangup {
                    Some(()) => Some(ReloadTrigger::Signal),
                    None => return,
                },
                Some(received) = requests.recv() => {
                    Some(request.insert(received).trigger())
                }
                _ = looks.tick() => None,
                () = kept_file::keep(self.kept_texts.as_mut()) => None,
            };
            let print = self.print().await;
            let has_begun = self.again_at.is_some_and(|at| at <= SystemTime::now());
            if watched.is_due(&print) || asked.is_some() || has_begun {
                // The state before the reading: a file changed meanwhile is read again.
                watched.loaded(print);
                service_manager::report_reloading().await;
                let outcome = self.read_again(asked.unwrap_or(ReloadTrigger::ChangedFile)).await;
                service_manager::report_ready().await;
                if outcome.is_applied() {
                    // The new configuration may name different files.
                    let named = self.print().await;
                    watched.take_new_files(named);
                }
                if let Some(request) = request {
                    request.answer(outcome);
                }
            }
        }
    }

    /// The present state of the configuration file and of all files named in the configuration.
    async fn print(&self) -> FileSetFingerprint {
        fingerprint(&self.sources, &self.current).await
    }

    /// The texts as they are in the files now.
    async fn read_texts(&self) -> TextsInForce {
        let names = file_names(&self.sources, &self.current);
        tokio::task::spawn_blocking(move || TextsInForce::read(names)).await.unwrap_or_default()
    }

    fn take_texts(&mut self, texts: TextsInForce) {
        self.texts = texts;
        if let Some(file) = &mut self.kept_texts {
            file.put(kept_texts::content(&self.texts));
        }
    }

    /// Reloads at once, and records the reload.
    pub(crate) async fn read_again(&mut self, trigger: ReloadTrigger) -> ReloadOutcome {
        let outcome = self.read_and_publish(trigger).await;
        if let Some(records) = &self.records {
            records.record_reload(trigger, &outcome);
        }
        outcome
    }

    /// A change that nobody asked to take is not taken from half a file.
    async fn whole_texts(&self, trigger: ReloadTrigger) -> Result<TextsInForce, String> {
        let texts = self.read_texts().await;
        match self.texts.cut_short(&texts) {
            Some(path) if trigger == ReloadTrigger::ChangedFile => Err(format!(
                "{}: was written in place, and has only the beginning of the text in force; the rest may \
                 be to come, or the disk is full; `keyward reload` takes it as it is",
                path.display()
            )),
            _ => Ok(texts),
        }
    }

    async fn read_and_publish(&mut self, trigger: ReloadTrigger) -> ReloadOutcome {
        let texts = match self.whole_texts(trigger).await {
            Ok(texts) => texts,
            Err(fault) => return self.refuse(vec![fault]),
        };
        let outcome = match self.read().await {
            Ok((config, warnings)) => {
                let cut = lost_intermediates(&self.current, &config);
                if let Some(fault) = cut.first().filter(|_| trigger == ReloadTrigger::ChangedFile) {
                    let fault = format!("{}; `keyward reload` takes it as it is", told_of_cut(fault));
                    return self.refuse(vec![fault]);
                }
                let published = self.publish(config).await.map_err(|fault| vec![fault]);
                let published = published.map(|applied| tell_cut(&cut, applied));
                published.map(|applied| self.tell_new_warnings(&warnings, applied))
            }
            Err(faults) => Err(faults.iter().map(ToString::to_string).collect()),
        };
        match outcome {
            Ok(applied) => {
                // The configuration may name files that the one before did not.
                let later = self.read_texts().await;
                self.take_texts(texts.with_new_files(later));
                self.metrics.reloads.inc();
                show_accepted(&self.metrics, &self.current);
                ReloadOutcome::Applied(applied)
            }
            Err(faults) => self.refuse(faults),
        }
    }

    fn refuse(&self, faults: Vec<String>) -> ReloadOutcome {
        for fault in &faults {
            tracing::error!(fault, "configuration not reloaded");
        }
        let pending_restart = self.state.load().pending_restart.clone();
        let weaker = self.weaker.clone();
        self.state.publish(ReloadState { pending_restart, faults: faults.clone(), weaker });
        self.metrics.reloads_refused.inc();
        self.metrics.config.reload_attempted(false, SystemTime::now());
        ReloadOutcome::Refused(faults)
    }

    /// Tells each change that weakens, and shows it for a day.
    fn tell_weaker(&mut self, config: &Config, applied: &mut AppliedReload) {
        let now = SystemTime::now();
        self.weaker.retain(|weaker| now.duration_since(weaker.since).is_ok_and(|age| age < WEAKER_SHOWN));
        for change in weaker::weaker(&self.current, config) {
            tracing::warn!(change, "configuration reloaded: more callers can do more");
            applied.changes.push(format!("weaker: {change}"));
            self.weaker.push(WeakerSetting { since: now, change });
        }
    }

    /// Logs the warnings that were not told before, and adds them to the outcome.
    fn tell_new_warnings(&mut self, warnings: &[ConfigWarning], applied: AppliedReload) -> AppliedReload {
        let all: Vec<String> = warnings.iter().map(ConfigWarning::to_string).collect();
        let told = std::mem::replace(&mut self.warnings, all.clone());
        let mended = told.iter().filter(|one| !all.contains(one)).count();
        // Before the others, since this record ends what doctor tells of those before.
        if mended > 0 {
            tracing::info!(mended, "configuration: warnings stand no longer");
        }
        let (standing, new): (Vec<_>, Vec<_>) = all.into_iter().partition(|one| told.contains(one));
        for warning in &new {
            tracing::warn!(warning, "configuration");
        }
        if !standing.is_empty() {
            let standing = standing.len();
            tracing::warn!(standing, "configuration: warnings stand as before; keyward check prints them");
        }
        AppliedReload { warnings: new, standing: standing.len(), ..applied }
    }

    /// Reads on a blocking thread: a hanging file system must not block revocations, logins and probes on the
    /// control runtime.
    async fn read(&self) -> Result<(Config, Vec<ConfigWarning>), ConfigFaults> {
        let sources = self.sources.clone();
        match tokio::task::spawn_blocking(move || sources.load()).await {
            Ok(read) => read,
            Err(ended) if ended.is_panic() => resume_unwind(ended.into_panic()),
            // The runtime is shutting down.
            Err(_) => std::future::pending().await,
        }
    }

    /// A certificate that is not good now does not take the place of one that is: clients or members would
    /// refuse it.
    fn keep_good_certificates(&mut self, config: &Config) -> Result<(), String> {
        let now = SystemTime::now();
        let worse = worse_now(&self.current, config, now);
        let begins = worse.iter().filter(|certificate| now < certificate.begins);
        self.again_at = begins.map(|certificate| certificate.begins).max();
        let Some(certificate) = worse.first() else { return Ok(()) };
        let why = if now < certificate.begins { "is not good yet" } else { "has ended" };
        let key = certificate.key();
        Err(format!("{key}: the new certificate {why}, and the one in force is good: it stays in force"))
    }

    /// Publishes every part, or none: returns the fault that keeps all parts unchanged.
    async fn publish(&mut self, read: Config) -> Result<AppliedReload, String> {
        let config = restart::in_force(&self.current, read.clone());
        self.keep_good_certificates(&config)?;
        for trial in &self.trials {
            (trial.run)(&config).await?;
        }
        let prepared = self.parts.iter().map(|part| (part.prepare)(&self.current, &config));
        let ready: Vec<Option<PreparedPart>> = prepared.collect::<Result<_, _>>()?;
        let publish = || publish_parts(ready);
        let mut applied = match &self.records {
            Some(records) => records.of_reload(publish),
            None => publish(),
        };
        if applied.changes.is_empty() {
            tracing::info!("configuration read again: nothing has changed that can change while running");
        } else {
            tracing::info!(digest = &*read.digest, "the configuration with this digest is in force");
        }
        let waiting = key_table::changed(TakesEffect::Restart, &config, &read);
        for section in &waiting {
            tracing::warn!(section, "changed in the file; takes effect at the next start");
        }
        applied.waiting = waiting.iter().map(ToString::to_string).collect();
        self.tell_weaker(&config, &mut applied);
        let weaker = self.weaker.clone();
        self.state.publish(ReloadState { pending_restart: waiting, faults: Vec::new(), weaker });
        self.current = config;
        Ok(applied)
    }
}

/// A chain that lost an intermediate, as a sentence.
fn told_of_cut(cut: &LostIntermediate) -> String {
    format!(
        "{}: the new chain ends below {:?}, which the one in force has: peers refuse it; the file may be cut \
         short",
        cut.key, cut.subject
    )
}

/// Tells the chains that lost an intermediate by an operator's word.
fn tell_cut(cut: &[LostIntermediate], mut applied: AppliedReload) -> AppliedReload {
    for change in cut.iter().map(told_of_cut) {
        tracing::warn!(change, "configuration reloaded: a chain of certificates is shorter");
        applied.changes.push(change);
    }
    applied
}

/// Publishes the parts, and tells each change.
fn publish_parts(ready: Vec<Option<PreparedPart>>) -> AppliedReload {
    let mut applied = AppliedReload::default();
    for PreparedPart { changes, publish } in ready.into_iter().flatten() {
        publish();
        for change in changes {
            tracing::info!(change, "configuration reloaded");
            applied.changes.push(change);
        }
    }
    applied
}

/// Shows in the metrics that `config`, read just now, is in force, and the expiry of its certificates.
pub fn show_accepted(metrics: &Metrics, config: &Config) {
    metrics.config.reload_attempted(true, SystemTime::now());
    let certificates = configured_certificates(config).into_iter();
    metrics.config.put_certificates(certificates.map(|at| (at.usage.label(), at.name, at.ends)));
    metrics.config.put_limits(&[
        ("limits.connections", config.limits.connections),
        ("limits.replay_buffer", config.limits.replay_buffer),
        ("limits.unread_buffer", config.limits.unread.buffer),
        ("watch.buffer", config.watch.buffer),
        ("memory budgets", config.memory_budget()),
    ]);
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
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

    fn reload(path: &Path, parts: Vec<ReloadPart>) -> Reload {
        let (config, _) = keyward_config::load(path).unwrap();
        let trial = ReloadCheck::new(|config| {
            let prefix = format!("{:?}", config.maintenance);
            async move { if prefix.contains("tried") { Err("found wanting".into()) } else { Ok(()) } }
                .boxed_local()
        });
        let (state, metrics) = (Arc::default(), Arc::new(Metrics::new(Vec::new())));
        Reload::new(
            ConfigSources::of_file(Some(path.to_owned())),
            &config,
            vec![trial],
            parts,
            state,
            metrics,
        )
    }

    /// A part that records its publications and refuses the prefix "bad".
    fn noting(published: &Rc<RefCell<Vec<String>>>) -> ReloadPart {
        let published = Rc::clone(published);
        ReloadPart::new(move |before, now| {
            let (before, now) = (format!("{:?}", before.maintenance), format!("{:?}", now.maintenance));
            if now.contains("bad") {
                return Err("a bad prefix".into());
            }
            let published = Rc::clone(&published);
            let note = move || published.borrow_mut().push("prefix".into());
            Ok((before != now).then(|| PreparedPart::new(vec!["prefix".into()], note)))
        })
    }

    #[tokio::test]
    async fn all_parts_are_published_or_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keyward.toml");
        configuration(&path, "one").unwrap();
        let published = Rc::new(RefCell::new(Vec::new()));
        let always = Rc::clone(&published);
        let other = ReloadPart::new(move |_, _| {
            let always = Rc::clone(&always);
            Ok(Some(PreparedPart::new(Vec::new(), move || always.borrow_mut().push("other".into()))))
        });
        let mut reload = reload(&path, vec![other, noting(&published)]);
        configuration(&path, "two").unwrap();
        assert!(reload.read_again(ReloadTrigger::Signal).await.is_applied());
        let text = reload.metrics.text().unwrap();
        assert!(text.contains("\nkeyward_config_last_reload_successful 1\n"), "{text}");
        assert_eq!(published.take(), ["other", "prefix"]);
        assert!(reload.read_again(ReloadTrigger::Signal).await.is_applied());
        assert_eq!(published.take(), ["other"], "it is compared with what was published last");

        for prefix in ["bad", "tried"] {
            configuration(&path, prefix).unwrap();
            assert!(!reload.read_again(ReloadTrigger::Signal).await.is_applied());
        }
        std::fs::write(&path, "nonsense").unwrap();
        assert!(!reload.read_again(ReloadTrigger::Signal).await.is_applied());
        std::fs::remove_file(&path).unwrap();
        assert!(!reload.read_again(ReloadTrigger::Signal).await.is_applied());
        assert!(published.take().is_empty(), "one part that cannot be prepared keeps all");
        let text = reload.metrics.text().unwrap();
        assert!(text.contains("\nkeyward_config_last_reload_successful 0\n"), "{text}");
        let faults = reload.state.load().faults.clone();
        assert!(faults[0].starts_with("cannot read ") && faults[0].contains("keyward.toml"), "{faults:?}");
        configuration(&path, "two").unwrap();
        assert!(reload.read_again(ReloadTrigger::Signal).await.is_applied());
        assert!(reload.state.load().faults.is_empty());
        assert_eq!((reload.metrics.reloads.get(), reload.metrics.reloads_refused.get()), (3, 4));
    }

    /// A writer in place that stalls, or whose disk is full, leaves valid TOML without its tail.
    #[tokio::test]
    async fn half_a_file_is_not_taken_by_itself_and_what_weakens_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keyward.toml");
        let head = "listener = [{ name = 'a', address = '127.0.0.1:1' }]\ncluster.endpoints = ['http://127.0.0.1:2']\n";
        let whole = format!("{head}[policy]\nmode = 'enforce'\n[policy.peer_limits]\nwatches = 7\n");
        std::fs::write(&path, &whole).unwrap();
        let mut reload = reload(&path, Vec::new());
        reload.texts = reload.read_texts().await;
        std::fs::write(&path, head).unwrap();
        let outcome = reload.read_again(ReloadTrigger::ChangedFile).await;
        assert!(
            matches!(&outcome, ReloadOutcome::Refused(faults) if faults[0].contains("only the beginning")),
            "{outcome:?}"
        );
        assert_eq!(reload.current.policy.mode, keyward_config::PolicyMode::Enforce);
        std::fs::write(&path, &whole).unwrap();
        assert!(reload.read_again(ReloadTrigger::ChangedFile).await.is_applied());
        assert!(reload.state.load().weaker.is_empty());
        // An operator's word counts.
        std::fs::write(&path, head).unwrap();
        let outcome = reload.read_again(ReloadTrigger::Signal).await;
        let ReloadOutcome::Applied(applied) = &outcome else { panic!("{outcome:?}") };
        let told = ["policy.mode: enforce -> off", "[policy.peer_limits].watches: 7 -> none"];
        let changes: Vec<_> = reload.state.load().weaker.iter().map(|weaker| weaker.change.clone()).collect();
        assert_eq!(changes, told);
        assert!(told.iter().all(|told| applied.changes.contains(&format!("weaker: {told}"))), "{applied:?}");
    }

    /// A file that was cut behind the first certificate is whole for every parser.
    #[tokio::test]
    async fn a_chain_that_lost_its_intermediate_is_taken_by_an_operators_word_only() {
        use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keyward.toml");
        let text = "listener = [{ name = 'a', address = '127.0.0.1:1', tls = { cert = 'a.crt', key = 'a.key' } }]\n\
                    cluster.endpoints = ['http://127.0.0.1:2']\n";
        std::fs::write(&path, text).unwrap();
        let authority = |name: &str| {
            let mut params = CertificateParams::default();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.distinguished_name.push(DnType::CommonName, name);
            params
        };
        let root = CertifiedIssuer::self_signed(authority("root"), KeyPair::generate().unwrap()).unwrap();
        let below =
            CertifiedIssuer::signed_by(authority("below"), KeyPair::generate().unwrap(), &root).unwrap();
        let renew = |others: &str| {
            let key = KeyPair::generate().unwrap();
            let leaf = CertificateParams::new(["a".to_owned()]).unwrap().signed_by(&key, &below).unwrap();
            std::fs::write(folder.path().join("a.crt"), leaf.pem() + others).unwrap();
            std::fs::write(folder.path().join("a.key"), key.serialize_pem()).unwrap();
        };
        renew(&below.pem());
        let mut reload = reload(&path, Vec::new());
        renew("");
        let outcome = reload.read_again(ReloadTrigger::ChangedFile).await;
        let ReloadOutcome::Refused(faults) = &outcome else { panic!("{outcome:?}") };
        assert!(
            faults[0].starts_with("listener a: tls.cert: ") && faults[0].contains("CN=below"),
            "{faults:?}"
        );
        assert!(reload.state.load().faults == *faults, "doctor tells it");
        renew(&below.pem());
        assert!(reload.read_again(ReloadTrigger::ChangedFile).await.is_applied());
        renew("");
        let outcome = reload.read_again(ReloadTrigger::Signal).await;
        let ReloadOutcome::Applied(applied) = &outcome else { panic!("{outcome:?}") };
        assert!(applied.changes.iter().any(|change| change.contains("CN=below")), "{applied:?}");
        assert!(reload.read_again(ReloadTrigger::ChangedFile).await.is_applied(), "that one is in force");
    }

    /// The new pair is read again by itself once it is good: at the time that is noted.
    #[tokio::test]
    async fn a_certificate_that_is_not_good_now_does_not_replace_one_that_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keyward.toml");
        let text = "listener = [{ name = 'a', address = '127.0.0.1:1', tls = { cert = 'a.crt', key = 'a.key' } }]\n\
                    cluster.endpoints = ['http://127.0.0.1:2']\n";
        std::fs::write(&path, text).unwrap();
        let now = SystemTime::now();
        let day = Duration::from_secs(24 * 3600);
        let pair = |begins: SystemTime, ends: SystemTime| {
            let key = rcgen::KeyPair::generate().unwrap();
            let mut params = rcgen::CertificateParams::new(["a".to_owned()]).unwrap();
            (params.not_before, params.not_after) = (begins.into(), ends.into());
            std::fs::write(folder.path().join("a.crt"), params.self_signed(&key).unwrap().pem()).unwrap();
            std::fs::write(folder.path().join("a.key"), key.serialize_pem()).unwrap();
        };
        pair(now - day, now + day);
        let mut reload = reload(&path, Vec::new());
        for (begins, ends, told) in
            [(now + day, now + 2 * day, "is not good yet"), (now - 2 * day, now - day, "has ended")]
        {
            pair(begins, ends);
            let outcome = reload.read_again(ReloadTrigger::Signal).await;
            assert!(
                matches!(&outcome, ReloadOutcome::Refused(faults) if faults[0].contains(told)),
                "{outcome:?}"
            );
            let again = reload.again_at.map(|at| at.duration_since(now).unwrap_or_default().as_secs() / 3600);
            assert_eq!(again, (begins > now).then_some(23));
        }
        pair(now - day, now + 2 * day);
        assert!(reload.read_again(ReloadTrigger::Signal).await.is_applied() && reload.again_at.is_none());
        // One that has ended may be replaced by any: nothing becomes worse.
        let mut ended = reload.current.clone();
        pair(now - 2 * day, now - day);
        ended.listeners = keyward_config::load(&path).unwrap().0.listeners;
        reload.current = ended;
        pair(now + day, now + 2 * day);
        assert!(reload.read_again(ReloadTrigger::Signal).await.is_applied());
    }

    /// Parts see the configuration in force even if the file is read repeatedly; `waiting` lists the keys
    /// that need a restart.
    #[tokio::test]
    async fn what_waits_for_a_restart_is_told_until_it_is_taken_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keyward.toml");
        configuration(&path, "one").unwrap();
        let seen = Rc::new(RefCell::new(Vec::new()));
        let shards = Rc::clone(&seen);
        let part = ReloadPart::new(move |_, now| {
            shards.borrow_mut().push(now.runtime.shards.get());
            Ok(None)
        });
        let mut reload = reload(&path, vec![part]);
        let begun = reload.current.runtime.shards.get();
        // Without the key the number of shards is that of the machine's cores.
        let other = format!("runtime.shards = {}\n", begun + 1);
        for (line, waits) in [(other.as_str(), &["runtime"][..]), ("", &[])] {
            for _ in 0..2 {
                configuration(&path, "one").unwrap();
                let text = std::fs::read_to_string(&path).unwrap() + line;
                std::fs::write(&path, text).unwrap();
                assert!(reload.read_again(ReloadTrigger::Signal).await.is_applied());
                assert_eq!(reload.state.load().pending_restart, waits);
            }
        }
        assert_eq!(seen.take(), [begun; 4]);
    }

    #[tokio::test]
    async fn a_standing_warning_is_told_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keyward.toml");
        configuration(&path, "one").unwrap();
        let (_, warnings) = keyward_config::load(&path).unwrap();
        let mut reload = reload(&path, Vec::new()).with_told_warnings(&warnings);
        let text = std::fs::read_to_string(&path).unwrap() + "policy.mode = 'enforce'\n";
        for (text, new) in [(text.clone(), 1), (text, 0)] {
            std::fs::write(&path, text).unwrap();
            let ReloadOutcome::Applied(applied) = reload.read_again(ReloadTrigger::Signal).await else {
                panic!("refused")
            };
            assert_eq!((applied.warnings.len(), applied.standing), (new, warnings.len() + 1 - new));
        }
    }

    /// A fifo without a writer, like a file on a hanging file system.
    #[tokio::test]
    async fn a_file_that_hangs_holds_up_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keyward.toml");
        configuration(&path, "one").unwrap();
        let mut reload = reload(&path, Vec::new());
        std::fs::remove_file(&path).unwrap();
        // Without a child process, which would have copies of the sockets of other tests until it runs
        // `mkfifo`.
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let (turned, turn) = std::sync::mpsc::channel();
        let writer = std::thread::spawn(move || {
            // A reading on the runtime's thread would leave no turn to others: the test would wait for ever.
            turn.recv().unwrap();
            configuration(&path, "two").unwrap();
        });
        let others = async { turned.send(()).expect("it listens") };
        let (read, ()) = tokio::join!(reload.read_again(ReloadTrigger::Signal), others);
        assert!(read.is_applied(), "it is read when it comes");
        writer.join().unwrap();
    }
}
