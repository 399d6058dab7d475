//! The access records of watches refused, or ended, on a stream that goes on.
//!
//! Owns: counting and logging such a watch as a failed call. Must not know: why a watch is refused.
//! Invariant: the records are limited by rate, as those of refused calls.

use std::rc::Rc;

use tokio::time::Instant;

use super::AccessRecord;
use crate::client_figures::ClientError;
use keyward_etcd::identity::UserName;
use keyward_etcd::refusal::{Code, Refusal, RefusalReason};
use keyward_records::audit::record::cut_name;
use keyward_telemetry::access_settings::CallOutcome;

impl AccessRecord {
    /// Counts each watch refused on the call's stream, which goes on, and logs the watch as a failed call.
    pub fn refused_watches(&self) -> impl Fn(&Refusal, Option<&str>) + use<> {
        let (sinks, origin, method) = (Rc::clone(&self.sinks), Rc::clone(&self.origin), self.method);
        let user = self.user.take();
        self.user.set(user.clone());
        let peer = self.peer();
        move |refusal, rule| {
            sinks.metrics.refusals.count(refusal.reason() as usize);
            origin.figures.end_call(refusal.code() == Code::Canceled, || ClientError {
                code: refusal.code(),
                at: Instant::now(),
                refused_by: Some(refusal.reason().name()),
                rule: rule.map(|rule| cut_name(rule).into()),
            });
            let log = &sinks.log;
            let chosen_by =
                log.settings.get().choose(CallOutcome { is_error: true, took: None }, &log.samples);
            let Some(chosen_by) = chosen_by.filter(|_| log.refused.may_log(peer.as_deref())) else { return };
            // `rule` is the limit that was exceeded, or the rule of the policy, as in the record of a call.
            let is_limit = refusal.reason() == RefusalReason::Limit;
            tracing::info!(
                target: keyward_telemetry::ACCESS,
                method = method.path,
                code = refusal.code().name(),
                peer = peer.as_deref(),
                user = user.as_ref().map(UserName::as_str),
                reason = refusal.message(),
                refused_by = refusal.reason().name(),
                rule = rule.filter(|_| !is_limit).map(cut_name),
                limit = rule.filter(|_| is_limit).map(cut_name),
                listener = &*origin.listener,
                remote = origin.remote_text.as_ref().map(tracing::field::display),
                user_agent = origin.user_agent(),
                chosen_by,
                "watch refused"
            );
        }
    }
}
