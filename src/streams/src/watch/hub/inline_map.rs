//! An ordered map with room for one entry inside: most hubs have one watch on one upstream stream.
//!
//! Owns: the place of the entries. Must not know the entries.
//! Invariant: the entry inside is the only one. A second entry moves both into a tree, where they stay.

use std::collections::BTreeMap;
use std::fmt;

pub(super) struct InlineMap<K, V> {
    one: Option<(K, V)>,
    /// Values are boxed: a node of the tree has room for eleven entries.
    many: BTreeMap<K, Box<V>>,
}

impl<K: Ord, V> InlineMap<K, V> {
    pub(super) fn new() -> Self {
        Self { one: None, many: BTreeMap::new() }
    }

    pub(super) fn len(&self) -> usize {
        usize::from(self.one.is_some()) + self.many.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.one.is_none() && self.many.is_empty()
    }

    pub(super) fn get(&self, key: &K) -> Option<&V> {
        match &self.one {
            Some((one, value)) => (one == key).then_some(value),
            None => self.many.get(key).map(|value| &**value),
        }
    }

    pub(super) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        match &mut self.one {
            Some((one, value)) => (one == key).then_some(value),
            None => self.many.get_mut(key).map(|value| &mut **value),
        }
    }

    pub(super) fn contains_key(&self, key: &K) -> bool {
        self.get(key).is_some()
    }

    /// Inserts an entry, in place of the key's present one.
    pub(super) fn insert(&mut self, key: K, value: V) {
        if self.is_empty() || self.one.as_ref().is_some_and(|(one, _)| *one == key) {
            self.one = Some((key, value));
            return;
        }
        self.many.extend(self.one.take().map(|(key, value)| (key, Box::new(value))));
        self.many.insert(key, Box::new(value));
    }

    pub(super) fn remove(&mut self, key: &K) -> Option<V> {
        match self.one.take_if(|(one, _)| one == key) {
            Some((_, value)) => Some(value),
            None => self.many.remove(key).map(|value| *value),
        }
    }

    /// All entries, in the order of their keys.
    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = (&K, &V)> {
        let one = self.one.iter().map(|(key, value)| (key, value));
        one.chain(self.many.iter().map(|(key, value)| (key, &**value)))
    }

    /// As [`InlineMap::iter`], to change the values.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (&K, &mut V)> {
        let one = self.one.iter_mut().map(|(key, value)| (&*key, value));
        one.chain(self.many.iter_mut().map(|(key, value)| (key, &mut **value)))
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &K> {
        self.iter().map(|(key, _)| key)
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }

    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut V> {
        self.iter_mut().map(|(_, value)| value)
    }
}

/// As a map, wherever its entries are.
impl<K: Ord + fmt::Debug, V: fmt::Debug> fmt::Debug for InlineMap<K, V> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_map().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_map(steps in proptest::collection::vec((0..3_u8, 0..6_u64), 0..60)) {
            let (mut map, mut model) = (InlineMap::new(), BTreeMap::new());
            for (at, (action, key)) in steps.into_iter().enumerate() {
                match action {
                    0 => {
                        map.insert(key, at);
                        model.insert(key, at);
                    }
                    1 => prop_assert_eq!(map.remove(&key), model.remove(&key)),
                    _ => {
                        map.values_mut().for_each(|value| *value += 1);
                        model.values_mut().for_each(|value| *value += 1);
                    }
                }
                prop_assert_eq!(format!("{map:?}"), format!("{model:?}"));
                prop_assert_eq!(map.get(&key), model.get(&key));
                prop_assert_eq!(map.get_mut(&key), model.get_mut(&key));
                prop_assert_eq!(map.contains_key(&key), model.contains_key(&key));
                prop_assert_eq!((map.len(), map.is_empty()), (model.len(), model.is_empty()));
                prop_assert!(map.iter().eq(model.iter()) && map.iter().rev().eq(model.iter().rev()));
                prop_assert!(map.keys().eq(model.keys()) && map.values().eq(model.values()));
            }
        }
    }
}
