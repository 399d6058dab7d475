//! The times at which refused logins are answered.
//!
//! Owns: the schedule of the answers. Must not know: user names, passwords, password sources, clocks (time is
//! an argument).
//! Invariants: the time of a refusal depends on the client's network, on the number of logins tried and on
//! the usual cost of a check, never on the cost of the refused check. Otherwise the time would reveal users:
//! etcd refuses an unknown user without a bcrypt, and comparing with a line of the users file costs another
//! amount than comparing with a password at etcd. Each refusal has a slot several times as long as a check,
//! so even many logins at once on a busy machine are checked before the answer is due. A login with the right
//! password waits for no slot.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::gateway::exchange::PATIENCE;
use crate::gateway::login::limits::ClientNetwork;

/// Shortest slot: several bcrypts of etcd's default cost on a busy machine, and half of `etcdctl`'s time
/// limit of a login.
const LEAST_SLOT: Duration = Duration::from_secs(1);
/// Longest slot. Slots have few possible lengths, so a length reveals no single check.
const LONGEST_SLOT: Duration = Duration::from_secs(4);
/// Shortest slot in units of the cost of a check.
const CHECKS_IN_A_SLOT: u32 = 4;
/// Refusals of different networks that may share a slot: a member makes two checks at a time.
const NETWORKS_IN_A_SLOT: u32 = 4;
/// After so many refusals in a row no two refusals share a slot, since members that only refuse are asked
/// more slowly (see `credentials::breaker`, with a later start).
const REFUSALS_IN_A_ROW: u32 = 16;
/// Number of networks at which networks without a future slot are forgotten.
const PRUNED_AT: usize = 64;

/// The schedule of refusals.
#[derive(Debug)]
pub(super) struct RefusalSchedule {
    /// Average cost of a check that ran alone and was not cut short.
    check_cost: Duration,
    /// The end of the last slot of each network.
    networks: HashMap<ClientNetwork, Instant>,
    prune_at: usize,
    /// Start of the next slot, whatever the network.
    next_slot: Instant,
    refusals_in_a_row: u32,
}

/// The slot of a login, used only if the login is refused.
#[derive(Debug)]
#[must_use = "a slot that is not used is given back"]
pub(super) struct RefusalSlot {
    network: ClientNetwork,
    end: Instant,
    length: Duration,
    /// Delay added to the slots of the networks after this slot.
    step: Duration,
}

impl RefusalSchedule {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            check_cost: Duration::ZERO,
            networks: HashMap::new(),
            prune_at: PRUNED_AT,
            next_slot: now,
            refusals_in_a_row: 0,
        }
    }

    /// Learns the duration of a check that ran alone and accepted its password.
    pub(super) fn learn_accepted(&mut self, took: Duration) {
        self.check_cost = if self.check_cost.is_zero() { took } else { self.check_cost * 7 / 8 + took / 8 };
    }

    /// Learns the duration of a check that ran alone and refused its password. The check may have been cut
    /// short, so the learned cost never falls.
    pub(super) fn learn_refused(&mut self, took: Duration) {
        if took > self.check_cost {
            self.learn_accepted(took);
        }
    }

    /// Reserves the slot of a login of `network` that begins `now`.
    pub(super) fn reserve(&mut self, network: ClientNetwork, now: Instant) -> RefusalSlot {
        let length = self.slot_length();
        let step =
            if self.refusals_in_a_row < REFUSALS_IN_A_ROW { length / NETWORKS_IN_A_SLOT } else { length };
        // Callers give up after `PATIENCE`, so no slot ends later.
        let latest = now + PATIENCE;
        let begin = self.next_slot.max(now);
        self.next_slot = (begin + step).min(latest);
        if self.networks.len() >= self.prune_at {
            self.networks.retain(|_, end| *end > now);
            self.prune_at = (self.networks.len() * 2).max(PRUNED_AT);
        }
        let last = self.networks.entry(network).or_insert(now);
        *last = (begin.max(*last) + length).min(latest);
        RefusalSlot { network, end: *last, length, step }
    }

    /// Frees the slot of an accepted or unanswered login, for the next login.
    pub(super) fn release(&mut self, slot: &RefusalSlot, is_accepted: bool) {
        if is_accepted {
            self.refusals_in_a_row = 0;
        }
        if let Some(end) = self.networks.get_mut(&slot.network) {
            *end = end.checked_sub(slot.length).unwrap_or(*end);
        }
        self.next_slot = self.next_slot.checked_sub(slot.step).unwrap_or(self.next_slot);
    }

    /// The time to answer a refusal known `now`: the end of its slot, or of a later slot if the check took
    /// longer.
    pub(super) fn answer_at(&mut self, slot: &RefusalSlot, now: Instant) -> Instant {
        self.refusals_in_a_row = self.refusals_in_a_row.saturating_add(1);
        let late = now.saturating_duration_since(slot.end);
        let slots = u32::try_from(late.as_micros().div_ceil(slot.length.as_micros().max(1)));
        slot.end + slot.length.saturating_mul(slots.unwrap_or(u32::MAX))
    }

    fn slot_length(&self) -> Duration {
        let wanted = self.check_cost.saturating_mul(CHECKS_IN_A_SLOT);
        let mut length = LEAST_SLOT;
        while length < wanted && length < LONGEST_SLOT {
            length *= 2;
        }
        length
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const CHECK: Duration = Duration::from_millis(200);

    fn network(last: u8) -> ClientNetwork {
        ClientNetwork::of(Some(IpAddr::from([10, 0, 0, last])))
    }

    /// The times of the answers to simultaneous logins of `networks`, checked two at a time, each in `cost`.
    fn answered(schedule: &mut RefusalSchedule, networks: &[u8], cost: Duration) -> Vec<Duration> {
        let start = Instant::now();
        let slots: Vec<_> = networks.iter().map(|last| schedule.reserve(network(*last), start)).collect();
        let ends = (0..).map(|n| start + cost * (n / 2 + 1));
        slots.iter().zip(ends).map(|(slot, end)| schedule.answer_at(slot, end) - start).collect()
    }

    fn new() -> RefusalSchedule {
        RefusalSchedule::new(Instant::now())
    }

    #[test]
    fn refusals_of_one_network_are_answered_one_a_slot_whatever_their_checks_cost() {
        for cost in [Duration::ZERO, CHECK / 20, CHECK, SECOND] {
            let times = answered(&mut new(), &[1; 7], cost);
            assert_eq!(times, [1, 2, 3, 4, 5, 6, 7].map(|second| second * SECOND), "{cost:?}");
        }
        let many = answered(&mut new(), &[1; 100], CHECK / 2);
        assert!(many[7..].iter().all(|time| *time == PATIENCE), "nobody waits any more");
    }

    #[test]
    fn refusals_of_many_networks_share_slots_while_members_keep_up() {
        let networks: Vec<u8> = (0..16).collect();
        let cheap = answered(&mut new(), &networks, Duration::ZERO);
        assert_eq!(cheap, answered(&mut new(), &networks, CHECK));
        assert_eq!([cheap[0], cheap[1], cheap[4]], [SECOND, SECOND * 5 / 4, 2 * SECOND]);
        let mut schedule = new();
        drop(answered(&mut schedule, &networks, CHECK));
        // By now members pause after each refusal.
        schedule.next_slot = Instant::now();
        let slow = answered(&mut schedule, &[100, 101, 102, 103], 5 * CHECK);
        assert_eq!(slow, [1, 2, 3, 4].map(|second| second * SECOND));
    }

    #[test]
    fn a_check_that_takes_longer_than_its_slot_is_answered_at_the_end_of_another() {
        let (mut schedule, start) = (new(), Instant::now());
        let slot = schedule.reserve(network(1), start);
        assert_eq!(schedule.answer_at(&slot, start + SECOND), start + SECOND);
        assert_eq!(schedule.answer_at(&slot, start + SECOND + CHECK), start + 2 * SECOND);
    }

    #[test]
    fn slots_grow_with_what_checks_cost_and_in_few_steps() {
        let mut schedule = new();
        let mut lengths = Vec::new();
        for milli in 0..2000 {
            schedule.check_cost = Duration::ZERO;
            schedule.learn_accepted(Duration::from_millis(milli));
            lengths.push(schedule.slot_length().as_secs());
            assert!(
                schedule.slot_length() >= schedule.check_cost * CHECKS_IN_A_SLOT
                    || schedule.slot_length() == LONGEST_SLOT
            );
        }
        lengths.dedup();
        assert_eq!(lengths, [1, 2, 4]);
        schedule.check_cost = CHECK;
        schedule.learn_refused(CHECK / 20);
        assert_eq!(schedule.check_cost, CHECK, "it may have been cut short");
        (0..64).for_each(|_| schedule.learn_refused(2 * CHECK));
        assert!(schedule.check_cost > CHECK * 19 / 10);
    }

    #[test]
    fn a_login_that_is_accepted_puts_no_refusal_off() {
        let (mut schedule, start) = (new(), Instant::now());
        for _ in 0..100 {
            let slot = schedule.reserve(network(1), start);
            schedule.release(&slot, true);
        }
        let slot = schedule.reserve(network(1), start);
        assert_eq!(schedule.answer_at(&slot, start), start + SECOND);
    }

    #[test]
    fn networks_whose_slots_are_over_are_forgotten() {
        let (mut schedule, start) = (new(), Instant::now());
        for n in 0..10_000 {
            let address = IpAddr::from(u32::to_be_bytes(n));
            let _slot = schedule.reserve(ClientNetwork::of(Some(address)), start + n * SECOND);
        }
        assert!(schedule.networks.len() <= PRUNED_AT, "{}", schedule.networks.len());
    }
}
