//! The checks of the alarms, and of the members' `/health`.
//!
//! Owns: the members named by an alarm. Must not know: how the inputs were gathered. Invariant: an alarm is
//! one finding, however many members tell the alarm.

use std::collections::BTreeSet;

use super::{DoctorFindings, DoctorInputs, name_of};
use keyward_cluster::membership::{Member, Readiness, Role, UnreadyReason};
use keyward_etcd::identity::MemberId;

impl DoctorInputs<'_> {
    /// Checks the alarms of the cluster. Every member's Status tells the alarms of all members; `/health`
    /// tells an alarm without its member.
    pub(super) fn alarms(&self, findings: &mut DoctorFindings) {
        let members = &self.members.members;
        let raised = |alarm: &str| -> Option<(String, Vec<String>)> {
            let told = members.iter().flat_map(|member| self.alarm_texts(member));
            let raised = told.filter(|text| text.contains(alarm));
            let ids: Vec<Option<MemberId>> = raised.map(member_of_alarm).collect();
            let known: BTreeSet<MemberId> = ids.iter().flatten().copied().collect();
            let name =
                |id: &MemberId| self.members.get(*id).map_or_else(|| format!("member {id}"), |m| name_of(m));
            let names: Vec<String> = known.iter().map(name).collect();
            let about = match (ids.is_empty(), names.is_empty()) {
                (true, _) => return None,
                (false, true) => "cluster".to_owned(),
                (false, false) => names.join(", "),
            };
            Some((about, known.iter().map(MemberId::to_string).collect()))
        };
        if let Some((about, _)) = raised("NOSPACE") {
            // No revision is printed: a revision of before the deletion keeps the deleted values.
            let what = "the quota is used up: the whole cluster refuses writes";
            let fix = "first delete the keys that nobody needs: etcdctl del PREFIX --prefix; then compact at \
                a revision of after the deletion, as `etcdctl endpoint status -w json` names it: etcdctl \
                --command-timeout=10m compact --physical REVISION && etcdctl --command-timeout=10m defrag && \
                etcdctl alarm disarm; then auto-compaction";
            findings.error("alarm_nospace", about, what, fix);
        }
        if let Some((about, ids)) = raised("CORRUPT") {
            let what = "the data differ from those of the other members";
            let id = if let [id] = &ids[..] { id } else { "ID" };
            let replace = format!("etcdctl member remove {id}, delete its data, member add");
            let fix = format!("stop it{}; then etcdctl alarm disarm", self.or_by_list(&replace));
            findings.error("alarm_corrupt", about, what, fix);
        }
    }

    /// The texts of the alarms that a member tells.
    fn alarm_texts<'m>(&'m self, member: &'m Member) -> impl Iterator<Item = &'m str> {
        let status = member.store_status.iter().flat_map(|status| status.errors.iter().map(|text| &**text));
        status.chain(self.examined_answers(member.id).and_then(|told| told.unhealthy.as_deref()))
    }

    /// Checks the `/health` of a member for a reason beside the alarms.
    pub(super) fn unhealthy(&self, member: &Member, findings: &mut DoctorFindings) {
        let about = name_of(member);
        let unhealthy = self.examined_answers(member.id).and_then(|examined| examined.unhealthy.as_deref());
        let told = |alarm: &str| self.alarm_texts(member).any(|text| text.contains(alarm));
        let explained = told("NOSPACE")
            || told("CORRUPT")
            || member.readiness == Readiness::NotReady(UnreadyReason::NoLeader)
            || member.role == Role::Learner;
        if let Some(reason) = unhealthy.filter(|_| !explained) {
            let what = if reason.is_empty() {
                "its /health says no".into()
            } else {
                format!("its /health says {reason}")
            };
            findings.error("unhealthy", about, what, "etcdctl alarm list, and look at its log");
        }
    }
}

/// The member named by the text of an alarm, such as `memberID:1234 alarm:NOSPACE `.
fn member_of_alarm(text: &str) -> Option<MemberId> {
    let (_, rest) = text.split_once("memberID:")?;
    let digits = rest.split(|letter: char| !letter.is_ascii_digit()).next()?;
    digits.parse().ok().map(MemberId)
}
