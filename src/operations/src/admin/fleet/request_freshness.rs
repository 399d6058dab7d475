//! Freshness of an authentic request: for this process, recent, and not taken before.
//!
//! Owns: the mark of the process, the time limit, and the requests of this time. Must not know: seals,
//! commands. Invariants: a request is taken once, by the process that it names, within `RECENT` of the
//! moment at which this process told its time; no clock but this process's own is asked, so clocks may
//! differ; the memory of requests is bounded, and a full one refuses.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use super::fleet_seal::RequestId;

/// Time in which a request is taken, from the moment at which this process told its time to the asker.
const RECENT: Duration = Duration::from_secs(10);
/// Requests taken within [`RECENT`]: an operator gives some.
const MOST_REQUESTS: usize = 4096;

/// A process, by a random mark that ends with the process.
pub type ProcessMark = [u8; 16];

/// The moment at which a process told its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToldTime {
    /// The process.
    pub process: ProcessMark,
    /// Milliseconds since the process began.
    pub millis: u64,
}

/// Why an authentic request is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StaleRequest {
    /// The request is for another process.
    Elsewhere,
    /// The request is older than `RECENT`, or from a time to come.
    Late,
    /// The request was taken before.
    Replayed,
    /// Too many requests were taken of late.
    Full,
}

/// Judges requests.
#[derive(Debug)]
pub struct RequestFreshness {
    process: ProcessMark,
    began: Instant,
    taken: VecDeque<(u64, RequestId)>,
}

impl RequestFreshness {
    /// The judge of a process with this mark, which begins now.
    #[must_use]
    pub fn new(process: ProcessMark) -> Self {
        Self { process, began: Instant::now(), taken: VecDeque::new() }
    }

    /// The time of this process now.
    #[must_use]
    pub fn time(&self) -> ToldTime {
        let millis = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        ToldTime { process: self.process, millis }
    }

    /// Takes the request `id`, which was made for the process at this told time.
    ///
    /// # Errors
    /// [`StaleRequest`].
    pub fn take(&mut self, id: RequestId, made: ToldTime) -> Result<(), StaleRequest> {
        let now = self.time();
        let recent = u64::try_from(RECENT.as_millis()).unwrap_or(u64::MAX);
        if made.process != self.process {
            return Err(StaleRequest::Elsewhere);
        }
        if now.millis.checked_sub(made.millis).is_none_or(|age| age > recent) {
            return Err(StaleRequest::Late);
        }
        // A request taken longer ago than the limit would be late, whatever time it names.
        while self.taken.front().is_some_and(|(at, _)| at + recent < now.millis) {
            self.taken.pop_front();
        }
        if self.taken.iter().any(|(_, known)| *known == id) {
            return Err(StaleRequest::Replayed);
        }
        if self.taken.len() >= MOST_REQUESTS {
            return Err(StaleRequest::Full);
        }
        self.taken.push_back((now.millis, id));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::fleet::fleet_seal::seal_request;
    use keyward_base::secret::Secret;
    use keyward_downstream::session::{Sealer, SessionKeys};

    fn new_id() -> RequestId {
        let keys = SessionKeys::new(&[Secret::new([7; 32])]).expect("a key");
        seal_request(&Sealer::new(keys), b"").expect("sealed").1
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_is_taken_once_by_its_process_and_while_it_is_recent() {
        let mut here = RequestFreshness::new([1; 16]);
        tokio::time::advance(Duration::from_secs(100)).await;
        let (id, told) = (new_id(), here.time());
        let elsewhere = ToldTime { process: [2; 16], ..told };
        assert_eq!(here.take(id, elsewhere), Err(StaleRequest::Elsewhere));
        let to_come = ToldTime { millis: told.millis + 1, ..told };
        assert_eq!(here.take(id, to_come), Err(StaleRequest::Late));
        tokio::time::advance(RECENT).await;
        assert_eq!(here.take(id, told), Ok(()));
        assert_eq!(here.take(id, told), Err(StaleRequest::Replayed));
        assert_eq!(here.take(id, here.time()), Err(StaleRequest::Replayed));
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(here.take(id, told), Err(StaleRequest::Late));
        assert_eq!(here.take(new_id(), told), Err(StaleRequest::Late), "made too long ago");
        assert_eq!(here.take(new_id(), here.time()), Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn no_request_can_be_replayed_when_its_memory_ends() {
        let mut here = RequestFreshness::new([1; 16]);
        let (id, told) = (new_id(), here.time());
        assert_eq!(here.take(id, told), Ok(()));
        for _ in 0..30 {
            tokio::time::advance(Duration::from_millis(1000)).await;
            // A further request makes the memory forget.
            assert_eq!(here.take(new_id(), here.time()), Ok(()));
            assert!(here.take(id, told).is_err());
        }
        assert!(here.taken.len() <= 12, "{}", here.taken.len());
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_memory_refuses_until_requests_are_old() {
        let mut here = RequestFreshness::new([1; 16]);
        let id = new_id();
        here.taken = (0..MOST_REQUESTS).map(|_| (0, id)).collect();
        assert_eq!(here.take(new_id(), here.time()), Err(StaleRequest::Full));
        tokio::time::advance(RECENT + Duration::from_millis(1)).await;
        assert_eq!(here.take(new_id(), here.time()), Ok(()));
        assert_eq!(here.taken.len(), 1);
    }
}
