//! What a script does next, drawn from its seed.
//!
//! Owns: the dice and the odds. Must not know etcd's answers. Invariant: a seed draws the same script whatever the server has been through
//! before, since revisions are drawn relative to the script's first one.

use bytes::Bytes;
use keyward::pb::etcdserverpb::{
    WatchCancelRequest, WatchCreateRequest, WatchProgressRequest, watch_request::RequestUnion,
};

use crate::model::store::Op;

/// splitmix64: small, and the same everywhere.
pub(super) struct Dice(u64);

/// What a script is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Theme {
    /// A little of everything.
    Plain,
    /// Values so large that answers are cut into fragments.
    Heavy,
    /// More revisions than one answer to a watch takes.
    Long,
}

/// What there is to draw from.
pub(super) struct Scene {
    pub(super) seed: u64,
    pub(super) theme: Theme,
    /// The first revision of the script.
    pub(super) base: i64,
    pub(super) current: i64,
    pub(super) compacted: i64,
    pub(super) lease: i64,
}

impl Dice {
    pub(super) fn new(seed: u64) -> Dice {
        Dice(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % n.max(1) as u64).expect("less than a usize")
    }

    pub(super) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub(super) fn between(&mut self, low: i64, high: i64) -> i64 {
        let span = usize::try_from(high - low + 1).unwrap_or(1);
        low + i64::try_from(self.below(span)).expect("it fits")
    }

    pub(super) fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())].clone()
    }

    pub(super) fn theme(&mut self) -> Theme {
        match self.below(40) {
            0..4 => Theme::Heavy,
            4..6 => Theme::Long,
            _ => Theme::Plain,
        }
    }

    fn value(&mut self, scene: &Scene) -> Bytes {
        if scene.theme == Theme::Heavy && !self.one_in(4) {
            return vec![b'x'; LARGE].into();
        }
        format!("value {}", self.below(1000)).into()
    }

    fn put(&mut self, scene: &Scene, key: Bytes) -> Op {
        let lease = if scene.lease != 0 && self.one_in(4) { scene.lease } else { 0 };
        Op::Put { key, value: self.value(scene), lease }
    }

    /// The operations of one write: a put, a delete of a key or of a range, or several of them on keys that do not meet.
    pub(super) fn write(&mut self, scene: &Scene) -> Vec<Op> {
        match self.below(10) {
            0..4 => {
                let key = self.any_key(scene);
                vec![self.put(scene, key)]
            }
            4 => vec![Op::Delete { key: self.any_key(scene), range_end: Bytes::new() }],
            5 => {
                let (low, high) = self.two_keys(scene);
                let range_end = if self.one_in(3) { scene.prefix_end() } else { high };
                vec![Op::Delete { key: low, range_end }]
            }
            _ => self.transaction(scene),
        }
    }

    fn transaction(&mut self, scene: &Scene) -> Vec<Op> {
        let mut ops: Vec<Op> = Vec::new();
        for n in 0..KEYS {
            match self.below(4) {
                // Together under the size of a request.
                0 | 1 if scene.theme != Theme::Heavy => ops.push(self.put(scene, scene.key(n))),
                2 => ops.push(Op::Delete { key: scene.key(n), range_end: Bytes::new() }),
                _ => {}
            }
        }
        if self.one_in(3) {
            ops.reverse();
        }
        if self.one_in(4) {
            let other = scene.other_key(self.below(2));
            ops.push(Op::Put { key: other, value: "other".into(), lease: 0 });
        }
        if self.one_in(4) {
            // No transaction names these otherwise.
            ops.push(Op::Delete { key: scene.key(KEYS), range_end: scene.prefix_end() });
        }
        if ops.is_empty() { vec![self.put(scene, scene.key(0))] } else { ops }
    }

    /// A watch of all that the script writes, from its beginning.
    pub(super) fn whole(&mut self, scene: &Scene, watch_id: i64) -> RequestUnion {
        RequestUnion::CreateRequest(WatchCreateRequest {
            key: scene.prefix(),
            range_end: scene.prefix_end(),
            start_revision: scene.base,
            prev_kv: true,
            watch_id,
            fragment: !self.one_in(6),
            ..WatchCreateRequest::default()
        })
    }

    fn any_key(&mut self, scene: &Scene) -> Bytes {
        if self.one_in(5) {
            return scene.other_key(self.below(2));
        }
        let keys = if scene.theme == Theme::Heavy { HEAVY_KEYS } else { KEYS };
        scene.key(self.below(keys))
    }

    /// Two keys in order.
    fn two_keys(&mut self, scene: &Scene) -> (Bytes, Bytes) {
        let low = self.below(KEYS - 1);
        (scene.key(low), scene.key(low + 1 + self.below(KEYS - low - 1)))
    }

    /// A revision to compact at; sometimes one that cannot be.
    pub(super) fn compaction(&mut self, scene: &Scene) -> i64 {
        match self.below(8) {
            0 => scene.compacted,
            1 => scene.current + 1,
            2..4 => scene.current,
            _ => self.between(scene.compacted.max(1), scene.current),
        }
    }

    /// Requests of one stream: mostly one, sometimes several in one go. `taken` are the ids that it has.
    pub(super) fn requests(&mut self, scene: &Scene, taken: &[i64]) -> Vec<RequestUnion> {
        if !self.one_in(6) {
            return vec![self.request(scene, taken)];
        }
        // Only what does not depend on which of two loops of the server is quicker: the last may start in the past.
        let count = 2 + self.below(3);
        let mut requests: Vec<_> = (1..count)
            .map(|_| {
                let mut create = self.create(scene, taken);
                if (1..=scene.current).contains(&create.start_revision) || create.start_revision < 0 {
                    create.start_revision = 0;
                }
                match self.below(4) {
                    0 => self.cancel(taken),
                    _ => RequestUnion::CreateRequest(create),
                }
            })
            .collect();
        requests.push(self.request(scene, taken));
        requests
    }

    fn request(&mut self, scene: &Scene, taken: &[i64]) -> RequestUnion {
        match self.below(10) {
            0..6 => RequestUnion::CreateRequest(self.create(scene, taken)),
            6 | 7 => self.cancel(taken),
            _ => RequestUnion::ProgressRequest(WatchProgressRequest {}),
        }
    }

    fn cancel(&mut self, taken: &[i64]) -> RequestUnion {
        let unknown = taken.is_empty() || self.one_in(6);
        let watch_id = if unknown { self.between(50, 60) } else { self.pick(taken) };
        RequestUnion::CancelRequest(WatchCancelRequest { watch_id })
    }

    fn create(&mut self, scene: &Scene, taken: &[i64]) -> WatchCreateRequest {
        let (key, range_end) = self.range(scene);
        let often = if scene.theme == Theme::Heavy { 1 } else { 3 };
        WatchCreateRequest {
            key,
            range_end,
            start_revision: self.start(scene),
            progress_notify: self.one_in(3),
            filters: match self.below(9) {
                0 => vec![0],
                1 => vec![1],
                2 if self.one_in(3) => vec![1, 0],
                3 if self.one_in(3) => vec![7],
                _ => Vec::new(),
            },
            prev_kv: self.one_in(2),
            watch_id: match self.below(10) {
                0..7 => 0,
                7 if !taken.is_empty() => self.pick(taken),
                _ => self.pick(&[-3, -1, 1, 2, 3, 5, 9]),
            },
            fragment: self.one_in(often),
        }
    }

    fn start(&mut self, scene: &Scene) -> i64 {
        let past = if scene.theme == Theme::Plain { 0..6 } else { 0..10 };
        match self.below(20) {
            _ if past.contains(&self.below(20)) => self.between(scene.compacted.max(1), scene.current),
            0..12 => 0,
            12 => scene.compacted,
            13..15 => self.between(1, (scene.compacted - 1).max(1)),
            15..17 => self.between(scene.current + 1, scene.current + 4),
            17 => i64::MAX - 2,
            18 => self.pick(&[-1, -2, -7, i64::MIN]),
            _ => scene.base,
        }
    }

    /// `key` and `range_end`: all forms that there are, also those that are refused.
    fn range(&mut self, scene: &Scene) -> (Bytes, Bytes) {
        let key = scene.key(self.below(KEYS));
        let (low, high) = self.two_keys(scene);
        let text = |text: &'static str| Bytes::from_static(text.as_bytes());
        match self.below(24) {
            0..5 => (key, Bytes::new()),
            5..11 => (scene.prefix(), scene.prefix_end()),
            11..13 => (low, high),
            13 => (key, text("\0")),
            14 => (text("\0"), text("\0")),
            15 => (Bytes::new(), self.pick(&[text(""), text("\0"), text("z")])),
            16 => (high, low),
            17 => (key.clone(), key),
            18 => (key.clone(), [key.as_ref(), b"\0"].concat().into()),
            19 => (text("/a/"), self.pick(&[text("/a0"), text("/a0\0"), text("/b")])),
            20 => (key, self.pick(&[text("/"), text("/a"), text("/a/")])),
            21 => (scene.other_key(0), Bytes::new()),
            22 => (text("/b/"), text("/b0")),
            _ => (text("/c/"), self.pick(&[text("/c0"), text(""), text("/d")])),
        }
    }
}

/// Keys that transactions name.
const KEYS: usize = 6;
/// Keys of a script with large values: together they pass the size of one answer.
pub(super) const HEAVY_KEYS: usize = 14;
/// Under `--max-request-bytes`.
const LARGE: usize = 50 * 1024;

impl Scene {
    /// What alice may read.
    pub(super) fn prefix(&self) -> Bytes {
        format!("/a/{}/", self.seed).into()
    }

    pub(super) fn prefix_end(&self) -> Bytes {
        format!("/a/{}0", self.seed).into()
    }

    pub(super) fn key(&self, n: usize) -> Bytes {
        format!("/a/{}/k{n:02}", self.seed).into()
    }

    /// What she may not read, or not always.
    fn other_key(&self, n: usize) -> Bytes {
        format!("/{}/{}/k", ["b", "c"][n % 2], self.seed).into()
    }

    /// Fills a heavy script's keys.
    pub(super) fn large(&self, n: usize) -> Op {
        Op::Put { key: self.key(n), value: vec![b'y'; LARGE].into(), lease: 0 }
    }
}
