//! The targets that a fuzzer runs, by name: each takes any bytes, and panics where a promise is broken.
//!
//! `tests/props` gives each of them random bytes and the inputs of `tests/props/corpus`; `fuzz/run` looks for inputs by
//! coverage.

use crate::{
    authorities, canonical, chains, choices::Choices, fleet, frames, gzip, hub, json, jwts, proxied, splice,
    users_file, websockets,
};

/// Takes any bytes.
pub(crate) type Target = fn(&[u8]);

/// All targets.
pub(crate) const TARGETS: &[(&str, Target)] = &[
    ("fleet", |input| one_of(input, &fleet::TARGETS)),
    ("frames", |input| one_of(input, &frames::TARGETS)),
    ("gzip", |input| one_of(input, &gzip::TARGETS)),
    ("canonical", |input| one_of(input, &canonical::TARGETS)),
    ("authorities", |input| one_of(input, &authorities::TARGETS)),
    ("chains", |input| one_of(input, &chains::TARGETS)),
    ("jwts", |input| one_of(input, &jwts::TARGETS)),
    ("json", |input| one_of(input, &json::TARGETS)),
    ("proxied", |input| one_of(input, &proxied::TARGETS)),
    ("users_file", |input| one_of(input, &users_file::TARGETS)),
    ("splice", |input| one_of(input, &splice::TARGETS)),
    ("websockets", |input| one_of(input, &websockets::TARGETS)),
    ("hub", hub::survives_anybody),
];

/// The first byte says which.
fn one_of(input: &[u8], targets: &[Target]) {
    let mut choices = Choices::new(input);
    let at = choices.below(targets.len());
    targets[at](choices.rest());
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::TARGETS;
    use crate::choices::for_any_bytes;

    #[test]
    fn any_bytes_pass() {
        for (_, target) in TARGETS {
            for_any_bytes(100, target);
        }
    }

    /// What fuzzing found worth keeping: one input a line, in hexadecimal.
    #[test]
    fn the_corpus_passes() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/props/corpus");
        for (name, target) in TARGETS {
            let path = folder.join(name);
            let lines =
                std::fs::read_to_string(&path).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
            let inputs: Vec<Vec<u8>> = lines.lines().map(bytes_of).collect();
            assert!(inputs.len() >= 10, "{name} has {} inputs", inputs.len());
            inputs.iter().for_each(|input| target(input));
        }
    }

    fn bytes_of(line: &str) -> Vec<u8> {
        let digits = line.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).expect("ASCII"));
        digits.map(|pair| u8::from_str_radix(pair, 16).expect("hexadecimal")).collect()
    }
}
