//! The last good generation of the stored policy, whatever etcd holds afterwards.
//!
//! Owns: the judgement of each reading. Must not know: etcd, tasks, clocks. Invariants
//! (docs/decisions.md#d58): the number of the generation in force never decreases; a reading with a fault
//! changes nothing; a generation comes into force whole, as a document with the digest of its pointer.

use std::sync::Arc;

use super::generation::{GenerationHeader, GenerationPointer, read_document};
use keyward_config::policy_document::PolicyDocument;

/// A generation in force.
#[derive(Debug)]
pub(super) struct GoodGeneration {
    pub(super) header: GenerationHeader,
    pub(super) text: Arc<str>,
    pub(super) document: PolicyDocument,
}

/// The reading of the pointer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PointerReading {
    /// Nothing was ever applied: there is neither a pointer nor a generation.
    NeverApplied,
    /// The pointer is missing, and generations exist.
    Missing,
    /// The pointer's value is no pointer.
    Unreadable,
    /// The pointer names a generation.
    At(GenerationPointer),
}

/// The fault of the reading last made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum StoreFault {
    #[error("the key `current` is gone")]
    PointerMissing,
    #[error("the key `current` was written by another program")]
    PointerUnreadable,
    #[error(
        "etcd names generation {found}, and generation {known} was in force before: etcd was restored from a \
         snapshot, or another program wrote the keys"
    )]
    WentBack { found: u64, known: u64 },
    #[error("generation {0} has another document than the generation of this number before")]
    Replaced(u64),
    #[error("the document of generation {0} is missing")]
    DocumentMissing(u64),
    #[error("the document of generation {0} is damaged")]
    DocumentDamaged(u64),
    #[error("the document of generation {number} has a fault here: {fault}")]
    DocumentFaulty { number: u64, fault: String },
}

impl StoreFault {
    /// The fault as the label of a metric.
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::PointerMissing => "pointer_missing",
            Self::PointerUnreadable => "pointer_unreadable",
            Self::WentBack { .. } => "went_back",
            Self::Replaced(_) => "replaced",
            Self::DocumentMissing(_) => "document_missing",
            Self::DocumentDamaged(_) => "document_damaged",
            Self::DocumentFaulty { .. } => "document_faulty",
        }
    }
}

/// The consequence of a reading.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReadingVerdict {
    /// The state in force is etcd's current state.
    Confirmed,
    /// Another generation is in force now.
    Changed,
    /// The document of this generation is needed: see [`LastGood::observe_document`].
    NeedsDocument(GenerationPointer),
    /// Nothing has changed; see [`LastGood::fault`].
    Faulty,
}

/// The last good generation, and the fault of the reading last made.
#[derive(Debug, Default)]
pub(super) struct LastGood {
    generation: Option<Arc<GoodGeneration>>,
    never_applied: bool,
    fault: Option<StoreFault>,
}

impl LastGood {
    /// The generation in force.
    pub(super) fn generation(&self) -> Option<&Arc<GoodGeneration>> {
        self.generation.as_ref()
    }

    /// The number of the generation in force; 0 without one.
    pub(super) fn number(&self) -> u64 {
        self.generation.as_ref().map_or(0, |good| good.header.generation)
    }

    /// True if etcd has said that nothing was ever applied, and no generation was known before.
    pub(super) fn is_never_applied(&self) -> bool {
        self.never_applied && self.generation.is_none()
    }

    /// The fault of the reading last made, if any.
    pub(super) fn fault(&self) -> Option<&StoreFault> {
        self.fault.as_ref()
    }

    /// Begins with a generation known from before, such as of the state file.
    pub(super) fn begin_with(&mut self, good: GoodGeneration) {
        self.generation = Some(Arc::new(good));
    }

    /// Judges the pointer.
    pub(super) fn observe_pointer(&mut self, reading: &PointerReading) -> ReadingVerdict {
        let known = self.generation.as_ref().map(|good| good.header.pointer());
        let fault = match (reading, known) {
            (PointerReading::NeverApplied, None) => {
                let is_news = !std::mem::replace(&mut self.never_applied, true);
                self.fault = None;
                return if is_news { ReadingVerdict::Changed } else { ReadingVerdict::Confirmed };
            }
            (PointerReading::NeverApplied | PointerReading::Missing, _) => StoreFault::PointerMissing,
            (PointerReading::Unreadable, _) => StoreFault::PointerUnreadable,
            (PointerReading::At(pointer), Some(known)) if *pointer == known => {
                self.fault = None;
                return ReadingVerdict::Confirmed;
            }
            (PointerReading::At(pointer), Some(known)) if pointer.generation < known.generation => {
                StoreFault::WentBack { found: pointer.generation, known: known.generation }
            }
            (PointerReading::At(pointer), Some(known)) if pointer.generation == known.generation => {
                StoreFault::Replaced(known.generation)
            }
            (PointerReading::At(pointer), _) => return ReadingVerdict::NeedsDocument(pointer.clone()),
        };
        self.fault = Some(fault);
        ReadingVerdict::Faulty
    }

    /// Judges the value of the generation's key after [`ReadingVerdict::NeedsDocument`].
    pub(super) fn observe_document(
        &mut self,
        pointer: &GenerationPointer,
        value: Option<&[u8]>,
        parse: impl FnOnce(&str) -> Result<PolicyDocument, String>,
    ) -> ReadingVerdict {
        let number = pointer.generation;
        let read = value.ok_or(StoreFault::DocumentMissing(number)).and_then(|value| {
            let (header, text) = read_document(pointer, value).ok_or(StoreFault::DocumentDamaged(number))?;
            let document = parse(&text).map_err(|fault| StoreFault::DocumentFaulty { number, fault })?;
            Ok(GoodGeneration { header, text, document })
        });
        match read {
            // The caller has judged the pointer before; a lower number is refused here once more.
            Ok(good) if number > self.number() => {
                self.generation = Some(Arc::new(good));
                self.fault = None;
                ReadingVerdict::Changed
            }
            Ok(_) => {
                self.fault = Some(StoreFault::WentBack { found: number, known: self.number() });
                ReadingVerdict::Faulty
            }
            Err(fault) => {
                self.fault = Some(fault);
                ReadingVerdict::Faulty
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::policy_store::generation::sha256;

    /// etcd, as far as this file reads it, and the texts ever applied.
    #[derive(Default)]
    struct ModelStore {
        pointer: Option<Vec<u8>>,
        generations: BTreeMap<u64, Vec<u8>>,
    }

    #[derive(Clone, Debug)]
    enum Step {
        Apply(u8),
        Rollback(u8),
        GarbagePointer,
        PointerTo(u8),
        DeletePointer,
        DeleteAll,
        DamageDocument(u8),
        DeleteDocument(u8),
        SwapDocuments(u8, u8),
    }

    fn header(number: u64, text: &str) -> GenerationHeader {
        GenerationHeader {
            generation: number,
            sha256: sha256(text),
            comment: String::new(),
            applied_at: 0,
            uid: None,
            sudo_user: None,
        }
    }

    impl ModelStore {
        fn apply(&mut self, number: u64, text: &str) {
            let header = header(number, text);
            self.generations.insert(number, header.value(text).unwrap().to_vec());
            self.pointer = Some(header.pointer().value().to_vec());
        }

        fn pointer(&self) -> PointerReading {
            match &self.pointer {
                None if self.generations.is_empty() => PointerReading::NeverApplied,
                None => PointerReading::Missing,
                Some(value) => {
                    GenerationPointer::read(value).map_or(PointerReading::Unreadable, PointerReading::At)
                }
            }
        }

        fn observed_by(&self, good: &mut LastGood) -> ReadingVerdict {
            match good.observe_pointer(&self.pointer()) {
                ReadingVerdict::NeedsDocument(pointer) => {
                    let value = self.generations.get(&pointer.generation).map(Vec::as_slice);
                    good.observe_document(&pointer, value, parse)
                }
                verdict => verdict,
            }
        }
    }

    /// Every text parses, except for texts with "bad".
    fn parse(text: &str) -> Result<PolicyDocument, String> {
        if text.contains("bad") { Err("bad".into()) } else { Ok(PolicyDocument::default()) }
    }

    fn step() -> impl Strategy<Value = Step> {
        let small = || 0_u8..6;
        prop_oneof![
            4 => small().prop_map(Step::Apply),
            2 => small().prop_map(Step::Rollback),
            1 => Just(Step::GarbagePointer),
            1 => small().prop_map(Step::PointerTo),
            1 => Just(Step::DeletePointer),
            1 => Just(Step::DeleteAll),
            1 => small().prop_map(Step::DamageDocument),
            1 => small().prop_map(Step::DeleteDocument),
            1 => (small(), small()).prop_map(|(one, other)| Step::SwapDocuments(one, other)),
        ]
    }

    proptest! {
        #[test]
        fn the_last_good_generation_stays_whatever_is_written(steps in prop::collection::vec(step(), 1..40)) {
            let (mut store, mut good) = (ModelStore::default(), LastGood::default());
            let mut applied: BTreeMap<u64, Vec<String>> = BTreeMap::new();
            let mut number = 0;
            for step in steps {
                let before = (good.number(), good.generation().map(|good| Arc::clone(&good.text)));
                match step {
                    Step::Apply(text) | Step::Rollback(text) => {
                        number += 1;
                        // Text 0 has a fault.
                        let text = if text == 0 { "bad".to_owned() } else { format!("# {text}") };
                        store.apply(number, &text);
                        applied.entry(number).or_default().push(text);
                    }
                    Step::GarbagePointer => store.pointer = Some(b"{}".to_vec()),
                    Step::PointerTo(at) => {
                        let pointer = GenerationPointer { generation: u64::from(at) + 1, sha256: "00".into() };
                        store.pointer = Some(pointer.value().to_vec());
                    }
                    Step::DeletePointer => store.pointer = None,
                    Step::DeleteAll => store = ModelStore::default(),
                    Step::DamageDocument(at) => {
                        if let Some(value) = store.generations.get_mut(&u64::from(at)) { value.pop(); }
                    }
                    Step::DeleteDocument(at) => { store.generations.remove(&u64::from(at)); }
                    Step::SwapDocuments(one, other) => {
                        let (one, other) = (u64::from(one), u64::from(other));
                        if let (Some(first), Some(second)) =
                            (store.generations.get(&one).cloned(), store.generations.get(&other).cloned())
                        {
                            store.generations.insert(one, second);
                            store.generations.insert(other, first);
                        }
                    }
                }
                let verdict = store.observed_by(&mut good);
                let now = (good.number(), good.generation().map(|good| Arc::clone(&good.text)));
                prop_assert!(now.0 >= before.0, "{} after {}", now.0, before.0);
                match verdict {
                    ReadingVerdict::Faulty => {
                        prop_assert!(good.fault().is_some());
                        prop_assert_eq!(now, before);
                    }
                    ReadingVerdict::Confirmed => {
                        prop_assert!(good.fault().is_none());
                        prop_assert_eq!(now, before);
                    }
                    ReadingVerdict::Changed => prop_assert!(good.fault().is_none()),
                    ReadingVerdict::NeedsDocument(_) => prop_assert!(false, "the document was shown"),
                }
                if let Some(in_force) = good.generation() {
                    let texts = applied.get(&in_force.header.generation);
                    prop_assert!(texts.is_some_and(|texts| texts.iter().any(|text| **text == *in_force.text)));
                }
            }
        }
    }

    #[test]
    fn nothing_applied_differs_from_everything_deleted() {
        let (mut store, mut good) = (ModelStore::default(), LastGood::default());
        assert_eq!(store.observed_by(&mut good), ReadingVerdict::Changed);
        assert!(good.is_never_applied());
        assert_eq!(store.observed_by(&mut good), ReadingVerdict::Confirmed);
        store.apply(1, "# a");
        assert_eq!(store.observed_by(&mut good), ReadingVerdict::Changed);
        assert!(!good.is_never_applied());
        let store = ModelStore::default();
        assert_eq!(store.observed_by(&mut good), ReadingVerdict::Faulty);
        assert_eq!((good.number(), good.fault()), (1, Some(&StoreFault::PointerMissing)));
    }

    #[test]
    fn a_restored_cluster_is_a_fault_until_a_higher_generation() {
        let (mut store, mut good) = (ModelStore::default(), LastGood::default());
        store.apply(7, "# new");
        assert_eq!(store.observed_by(&mut good), ReadingVerdict::Changed);
        store.apply(5, "# old");
        assert_eq!(store.observed_by(&mut good), ReadingVerdict::Faulty);
        assert_eq!(good.fault().map(StoreFault::label), Some("went_back"));
        store.apply(7, "# other");
        assert_eq!(store.observed_by(&mut good), ReadingVerdict::Faulty);
        assert_eq!(good.fault().map(StoreFault::label), Some("replaced"));
        store.apply(8, "# other");
        assert_eq!(store.observed_by(&mut good), ReadingVerdict::Changed);
        assert_eq!(good.generation().map(|good| &*good.text), Some("# other"));
    }
}
