//! Verdicts on described calls by the policy in force on this replica.
//!
//! Owns: the choice of the rules, and the bounds of an answer. Must not know: how a call is judged.
//! Invariant: a call is judged by rules that are in force, never by an empty policy while the stored one is
//! not known.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use tokio::task::yield_now;

use keyward_access::policy::described_call::{DescribedCall, Explanation, JudgingPolicy};
use keyward_config::Config;
use keyward_gateway::caller::Identities;

/// Most calls of one command: a table of a policy's tests has some hundred.
const MOST_CALLS: usize = 10_000;
/// Most bytes of the verdicts' texts: each names the roles of its peer.
const MOST_TEXT: usize = 16 << 20;

/// The verdicts on described calls.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExplainedCalls {
    /// The policy that judged, for a reader.
    pub policy: String,
    /// The verdict on each call, in their order; the reason for a call that cannot be judged as described.
    pub verdicts: Vec<Result<Explanation, String>>,
}

impl ExplainedCalls {
    /// Judges calls by the policy in force. Other tasks of the control runtime have their turns in between.
    ///
    /// # Errors
    /// No policy is known yet, or the answer would be too long.
    pub(super) async fn judge(
        config: &Config,
        identities: &Identities,
        calls: &[DescribedCall],
    ) -> Result<Self, String> {
        let policy = identities.policy();
        if !policy.is_known() {
            return Err("the stored policy is not known yet: every call is refused as unavailable".into());
        }
        if calls.len() > MOST_CALLS {
            return Err(format!("at most {MOST_CALLS} calls are judged at once"));
        }
        let judging = JudgingPolicy::new(config, policy.document(), SystemTime::now());
        let (mut verdicts, mut bytes) = (Vec::with_capacity(calls.len()), 0);
        for call in calls {
            let verdict = judging.explain(call).map_err(|unjudged| unjudged.to_string());
            bytes += verdict.as_ref().map_or(0, |explained| explained.text.len());
            if bytes > MOST_TEXT {
                return Err("the verdicts are too long for one answer: ask for fewer calls at once".into());
            }
            verdicts.push(verdict);
            yield_now().await;
        }
        let generation = policy.generation();
        let policy = match generation.number {
            0 => "the configuration's, in force on the running replica".to_owned(),
            number => format!("generation {number}, in force on the running replica"),
        };
        Ok(Self { policy, verdicts })
    }
}
