//! Judges a configuration before a start: `keyward check`.
//!
//! Owns: the report with its stable JSON fields, and the single look at the cluster. Must not know: the
//! checks themselves. Invariants: no listener is bound, nothing is written; no finding contains a secret; a
//! finding has the name and the fix that doctor gives it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use super::ServeError;
use super::member_connections::connector_of_look;
use super::serving_conditions;
use keyward_base::tasks::Tasks;
use keyward_cluster::discovery::survey::{ClusterSurvey, SurveyExtent, survey};
use keyward_cluster::membership::{ControlChannels, MembersHandle};
use keyward_config::{Config, ConfigFaults, ConfigWarning};
use keyward_dial::connect::Connector;
use keyward_operations::admin::doctor::{
    DoctorReport, Finding, Severity, SurveyedConditions, judge_configuration,
};

/// Time limit of the look at a cluster with silent members. A lookup of their names may take ten seconds.
const DIAL: Duration = Duration::from_secs(15);

/// The verdict on a configuration. The JSON form is for programs: fields are added, never renamed.
#[derive(Debug, Serialize)]
pub struct ConfigReport {
    /// `errors`, `warnings` or `fine`: the worst finding.
    pub verdict: ConfigVerdict,
    /// True if the configuration can be loaded: `keyward serve` would start with it.
    pub valid: bool,
    /// The findings, worst first. A fault of the configuration has the check `fault`, advice about a valid
    /// configuration the check `configuration`; all others have doctor's names.
    pub findings: Vec<Finding>,
    /// Inputs that could not be read, with the reason.
    pub unseen: Vec<String>,
}

/// The worst finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ConfigVerdict {
    /// No finding.
    Fine,
    /// Warnings only.
    Warnings,
    /// At least one error.
    Errors,
}

impl ConfigReport {
    /// The report on a configuration that cannot be loaded.
    #[must_use]
    pub fn of_faults(faults: &ConfigFaults) -> Self {
        let finding = |fault: &keyward_config::ConfigFault| Finding {
            severity: Severity::Error,
            check: "fault".to_owned(),
            about: fault.path.clone(),
            what: fault
                .place
                .as_ref()
                .map_or_else(|| fault.reason.clone(), |place| format!("{} ({place})", fault.reason)),
            fix: String::new(),
        };
        Self::of(false, DoctorReport { findings: faults.iter().map(finding).collect(), unseen: Vec::new() })
    }

    /// Judges a valid configuration, and the cluster if `dial`.
    ///
    /// # Errors
    /// The connections to members cannot be set up.
    pub fn of_config(
        config: &Arc<Config>,
        warnings: &[ConfigWarning],
        dial: bool,
    ) -> Result<Self, ServeError> {
        let seen = dial.then(|| look_with_conditions(config)).transpose()?;
        let mut report =
            judge_configuration(config, seen.as_ref().map(|(survey, conditions)| (survey, conditions)));
        // A finding of doctor's says more than the warning about the same key.
        let named: Vec<String> = report.findings.iter().map(|finding| finding.about.clone()).collect();
        let warnings = warnings.iter().filter(|warning| !named.contains(&warning.path));
        report.findings.extend(warnings.map(|warning| Finding {
            severity: Severity::Warning,
            check: "configuration".to_owned(),
            about: warning.path.clone(),
            what: warning.reason.clone(),
            fix: String::new(),
        }));
        report.findings.sort();
        if let Some(why) = seen.and_then(|(survey, _)| survey.login_failure) {
            report.unseen.push(format!("the password of cluster.probe: {why}"));
        }
        Ok(Self::of(true, report))
    }

    fn of(valid: bool, report: DoctorReport) -> Self {
        let verdict = match report.worst() {
            None | Some(Severity::Note) => ConfigVerdict::Fine,
            Some(Severity::Warning) => ConfigVerdict::Warnings,
            Some(Severity::Error) => ConfigVerdict::Errors,
        };
        Self { verdict, valid, findings: report.findings, unseen: report.unseen }
    }
}

/// Looks at the cluster, and at everything that `keyward serve` would wait for there.
fn look_with_conditions(config: &Arc<Config>) -> Result<(ClusterSurvey, SurveyedConditions), ServeError> {
    let further = async |survey: &ClusterSurvey, access, connector: &Connector, tasks: &Tasks| {
        serving_conditions::look(config, survey, access, connector, tasks).await
    };
    let (survey, conditions) = look_and(config, SurveyExtent::MembersAndStores, further)?;
    Ok((survey, conditions?))
}

/// Looks at the configured cluster once, on a runtime of its own.
///
/// # Errors
/// The connections to members cannot be set up.
pub(super) fn look_at_cluster(config: &Config, extent: SurveyExtent) -> Result<ClusterSurvey, ServeError> {
    Ok(look_and(config, extent, async |_: &_, _, _: &_, _: &_| ())?.0)
}

/// As [`look_at_cluster`], with further questions to the members.
fn look_and<T>(
    config: &Config,
    extent: SurveyExtent,
    further: impl AsyncFnOnce(&ClusterSurvey, (MembersHandle, ControlChannels), &Connector, &Tasks) -> T,
) -> Result<(ClusterSurvey, T), ServeError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build_local(tokio::runtime::LocalOptions::default())?;
    let connector = connector_of_look(&config.cluster)?;
    let tasks = Tasks::default();
    let seen = runtime.block_on(async {
        let (survey, members, channels) =
            survey(&config.cluster, connector.clone(), (DIAL, extent), &tasks).await;
        let more = further(&survey, (members, channels), &connector, &tasks).await;
        (survey, more)
    });
    // A read of a file may still hang in a thread.
    runtime.shutdown_background();
    Ok(seen)
}

/// Formats the findings for a terminal; nothing without findings.
impl fmt::Display for ConfigReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Finding { severity, about, what, fix, .. } in &self.findings {
            writeln!(f, "{severity}: {about}: {what}")?;
            if !fix.is_empty() {
                writeln!(f, "    fix: {fix}")?;
            }
        }
        for unseen in &self.unseen {
            writeln!(f, "not looked at: {unseen}")?;
        }
        Ok(())
    }
}
