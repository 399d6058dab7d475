//! Sets of keys, written apart from `policy`, which has its own.

/// The keys from the first on and before the second; `None` for no end.
pub(crate) type Interval = (Vec<u8>, Option<Vec<u8>>);

/// A set of keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KeySet(Vec<Interval>);

/// A key alone.
pub(crate) fn point(key: &[u8]) -> Interval {
    (key.to_vec(), Some([key, &[0]].concat()))
}

fn ends_before(end: Option<&Vec<u8>>, key: &[u8]) -> bool {
    end.is_some_and(|end| &**end < key)
}

impl KeySet {
    /// The union of intervals.
    pub(crate) fn new(mut intervals: Vec<Interval>) -> Self {
        intervals.retain(|(start, end)| end.as_ref().is_none_or(|end| end > start));
        intervals.sort();
        let mut merged: Vec<Interval> = Vec::new();
        for (start, end) in intervals {
            match merged.last_mut() {
                Some((_, last)) if !ends_before(last.as_ref(), &start) => {
                    if let Some(known) = last {
                        match end {
                            Some(end) if end <= *known => {}
                            end => *last = end,
                        }
                    }
                }
                _ => merged.push((start, end)),
            }
        }
        Self(merged)
    }

    /// The keys of this set that the other one does not have.
    pub(crate) fn minus(&self, other: &Self) -> Vec<Interval> {
        let mut rest = Vec::new();
        for (start, end) in &self.0 {
            let mut from = Some(start.clone());
            for (other_start, other_end) in &other.0 {
                let Some(at) = from.clone() else { break };
                if ends_before(other_end.as_ref(), &at) || other_end.as_ref() == Some(&at) {
                    continue;
                }
                if end.as_ref().is_some_and(|end| end <= other_start) {
                    break;
                }
                if at < *other_start {
                    rest.push((at, Some(other_start.clone())));
                }
                from = other_end.clone().filter(|after| end.as_ref().is_none_or(|end| after < end));
            }
            rest.extend(from.map(|from| (from, end.clone())));
        }
        rest
    }
}

#[test]
fn sets_are_merged_and_subtracted() {
    let interval =
        |start: &str, end: Option<&str>| (start.as_bytes().to_vec(), end.map(|end| end.as_bytes().to_vec()));
    let set = KeySet::new(vec![
        interval("c", Some("d")),
        interval("a", Some("b")),
        interval("b", Some("b5")),
        interval("x", None),
        interval("y", Some("z")),
        interval("q", Some("p")),
    ]);
    assert_eq!(set.0, [interval("a", Some("b5")), interval("c", Some("d")), interval("x", None)]);
    let all = KeySet::new(vec![interval("", None)]);
    assert_eq!(set.minus(&all), []);
    assert_eq!(
        all.minus(&set),
        [interval("", Some("a")), interval("b5", Some("c")), interval("d", Some("x"))]
    );
    let part = KeySet::new(vec![point(b"a"), interval("b4", Some("c5"))]);
    assert_eq!(
        set.minus(&part),
        [interval("a\0", Some("b4")), interval("c5", Some("d")), interval("x", None)]
    );
    assert_eq!(part.minus(&set), [interval("b5", Some("c"))]);
    assert_eq!(part.minus(&KeySet::default()), part.0);
}
