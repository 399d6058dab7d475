//! Must show 3 of the streams, its ground: each client library sees through Keyward exactly what was written, in its own words, and
//! goes on when its token has ended long ago. A library that misbehaves is noticed here, before faults are added (`chaos`).

use std::collections::BTreeMap;

use keyward::pb::etcdserverpb::{
    CompactionRequest, DeleteRangeRequest, LeaseGrantRequest, PutRequest, RangeRequest,
};

use crate::chaos::door::{Door, within};
use crate::chaos::families::{Can, FAMILIES, User};
use crate::chaos::program::{Program, Said, last_event};
use crate::chaos::record::{Event, Filter, Prev, Range, Record, Seen, Watch};
use crate::chaos::run::keyward;
use crate::harness::client::lifetime;
use crate::harness::{Auth, Cluster, Options, versions, wait};
use crate::steady::TTL;

use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
/// Etcd forgets a token up to a second after its end.
const LONGER_THAN_TOKENS: Duration = Duration::from_secs(TTL as u64 + 2);
/// Which watch is which.
const PREFIX: &str = "prefix";
const KEY: &str = "key";
const PAST: &str = "past";
const LATE: &str = "late";
const DELETES: &str = "deletes";
const PIECES: &str = "pieces";

/// What was written, straight to a member, and what etcd must tell of it.
struct Store {
    door: Door,
    keys: BTreeMap<String, Prev>,
    events: Vec<Event>,
    revision: i64,
}

impl Store {
    async fn of(cluster: &Cluster) -> Store {
        let door = Store::door(cluster).await;
        let answer = within(door.kv().range(RangeRequest { key: "/".into(), ..Default::default() })).await;
        let revision = answer.expect("root may read").into_inner().header.expect("a header").revision;
        Store { door, keys: BTreeMap::new(), events: Vec::new(), revision }
    }

    async fn door(cluster: &Cluster) -> Door {
        Door::open(cluster.address(0), "root").await
    }

    /// A token of etcd's own ends here as everywhere.
    async fn log_in_again(&mut self, cluster: &Cluster) {
        self.door = Store::door(cluster).await;
    }

    async fn lease(&self) -> i64 {
        let grant = LeaseGrantRequest { ttl: 600, ..Default::default() };
        within(self.door.lease().lease_grant(grant)).await.expect("a lease is granted").into_inner().id
    }

    async fn put(&mut self, key: &str, value: &str, lease: i64) {
        let request = PutRequest {
            key: key.to_owned().into(),
            value: value.to_owned().into(),
            lease,
            ..Default::default()
        };
        within(self.door.kv().put(request)).await.expect("root may write");
        self.revision += 1;
        let prev = self.keys.get(key).cloned();
        let version = prev.as_ref().map_or(1, |prev| prev.version + 1);
        let create = prev.as_ref().map_or(self.revision, |prev| prev.create);
        let now = Prev { value: value.into(), revision: self.revision, create, version };
        self.keys.insert(key.into(), now);
        self.events.push(Event {
            put: true,
            key: key.into(),
            value: value.into(),
            revision: self.revision,
            create,
            version,
            lease,
            prev,
        });
    }

    async fn delete(&mut self, key: &str) {
        let request = DeleteRangeRequest { key: key.to_owned().into(), ..Default::default() };
        within(self.door.kv().delete_range(request)).await.expect("root may delete");
        self.revision += 1;
        let prev = self.keys.remove(key);
        assert!(prev.is_some(), "{key} was never there");
        self.events.push(Event {
            put: false,
            key: key.into(),
            value: String::new(),
            revision: self.revision,
            create: 0,
            version: 0,
            lease: 0,
            prev,
        });
    }

    async fn compact(&self) -> i64 {
        let request = CompactionRequest { revision: self.revision, physical: true };
        within(self.door.kv().compact(request)).await.expect("root may compact");
        self.revision
    }

    /// What `watch` must show, opened at `start`.
    fn told(&self, watch: &Watch, start: i64) -> Vec<Event> {
        let wanted = self.events.iter().filter(|event| event.revision >= start && watch.wants(event));
        let told = wanted.cloned().map(|mut event| {
            event.prev = event.prev.filter(|_| watch.prev_kv);
            event
        });
        told.collect()
    }
}

/// One watch of each kind. `past` is a revision that etcd still has, `late` one that it has not.
fn watches(past: i64, late: i64) -> Vec<Watch> {
    let watch = |name: &str, range: Range, start: i64| Watch {
        name: name.into(),
        range,
        start,
        prev_kv: false,
        progress_notify: false,
        fragment: false,
        filter: None,
    };
    let all = || Range::prefix("/a/");
    vec![
        Watch { prev_kv: true, ..watch(PREFIX, all(), 0) },
        watch(KEY, Range::one("/a/one"), 0),
        watch(PAST, all(), past),
        watch(LATE, all(), late),
        Watch { filter: Some(Filter::NoPut), prev_kv: true, ..watch(DELETES, all(), 0) },
        Watch { fragment: true, ..watch(PIECES, all(), 0) },
    ]
}

/// Whether a library with these options can keep this watch.
fn possible(can: Can, watch: &Watch) -> bool {
    (can.fragment || !watch.fragment) && (can.filters || watch.filter.is_none())
}

fn stands_again(record: &Record) -> bool {
    let compacted = record.iter().position(|line| matches!(line.seen, Seen::Compacted { .. }));
    compacted.is_some_and(|at| record[at..].iter().any(|line| matches!(line.seen, Seen::Created { .. })))
}

fn all_stand(program: &Program) -> bool {
    let said = program.said();
    said.ready && stands_again(&said.records[LATE])
}

fn has_come_to(program: &Program, store: &Store) -> bool {
    let said = program.said();
    let possible = program.watches.iter().filter(|watch| possible(program.family.can, watch));
    possible.into_iter().all(|watch| {
        let last = store.told(watch, 0).last().map(|event| event.revision);
        last_event(&said.records[&watch.name]) >= last
    })
}

#[tokio::test]
async fn each_library_sees_what_was_written_and_outlives_its_token() {
    for version in versions() {
        let auth = Auth::On { extra_users: 0 };
        let cluster =
            Cluster::start(&version, Options { auth, token_ttl: Some(TTL), ..Options::default() }).await;
        let mut store = Store::of(&cluster).await;
        store.put("/a/x", "forgotten", 0).await;
        store.put("/a/x", "kept", 0).await;
        let compacted = store.compact().await;
        store.put("/a/y", "before", 0).await;
        let (keyward, through) = keyward(&cluster).await;
        let programs: Vec<Program> = FAMILIES
            .iter()
            .map(|family| Program::start(family, User::Alice, &through, watches(compacted, compacted - 1)))
            .collect();
        let stand = async || programs.iter().all(all_stand).then_some(());
        wait::until(SOON, "all watches stand", stand).await;
        let listed = store.revision;

        store.log_in_again(&cluster).await;
        let lease = store.lease().await;
        store.put("/a/x", "again", lease).await;
        store.put("/a/one", "one", 0).await;
        store.put("/b/x", "foreign", 0).await;
        store.delete("/a/x").await;
        lifetime(LONGER_THAN_TOKENS).await;
        store.log_in_again(&cluster).await;
        store.put("/a/x", "anew", 0).await;
        store.put("/a/one", "two", 0).await;
        store.delete("/a/x").await;
        let arrived = async || programs.iter().all(|program| has_come_to(program, &store)).then_some(());
        wait::until(SOON, "all events arrive", arrived).await;

        for program in programs {
            let (family, watches) = (program.family, program.watches.clone());
            let said = program.end().await;
            println!("{version}: {} as {}", said.client, family.name);
            for watch in watches.iter().filter(|watch| possible(family.can, watch)) {
                let begun =
                    if watch.name == LATE { late_start(&said, compacted, listed) } else { watch.start };
                let begun = if begun == 0 { listed + 1 } else { begun };
                assert_eq!(shown(&said, watch), store.told(watch, begun), "{}: {}", family.name, watch.name);
            }
            let left_out = watches.iter().filter(|watch| !possible(family.can, watch));
            for watch in left_out.clone() {
                let told = said.strange.iter().any(|line| {
                    line.contains("\"unsupported\"") && line.contains(&format!("\"{}\"", watch.name))
                });
                assert!(told, "{} says nothing of {}: {:?}", family.name, watch.name, said.strange);
            }
            assert_eq!(said.strange.len(), left_out.count(), "{}: {:?}", family.name, said.strange);
        }
        drop(keyward);
    }
}

/// The events of a watch, which must have ended only where it asked for what was compacted.
fn shown(said: &Said, watch: &Watch) -> Vec<Event> {
    let record = &said.records[&watch.name];
    let mut ends =
        record.iter().filter(|line| matches!(line.seen, Seen::Ended { .. } | Seen::Compacted { .. }));
    let expected = usize::from(watch.name == LATE);
    assert_eq!(ends.by_ref().count(), expected, "{}: {record:?}", watch.name);
    let events = record.iter().filter_map(|line| match &line.seen {
        Seen::Events { events, .. } => Some(events.clone()),
        _ => None,
    });
    events.flatten().collect()
}

/// Where the late watch went on: at etcd's compact revision where the library shows it, else behind what its application read.
fn late_start(said: &Said, compacted: i64, listed: i64) -> i64 {
    let record = &said.records[LATE];
    let told = record.iter().find_map(|line| match line.seen {
        Seen::Compacted { revision } => Some(revision),
        _ => None,
    });
    let again = record.iter().rev().find_map(|line| match line.seen {
        Seen::Opened { start } => Some(start),
        _ => None,
    });
    let expected = match told.expect("it ended as compacted") {
        Some(revision) => {
            assert_eq!(revision, compacted, "etcd's compact revision");
            compacted
        }
        None => listed + 1,
    };
    assert_eq!(again, Some(expected), "where the late watch was opened again");
    expected
}
