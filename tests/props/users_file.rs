//! The users file: any bytes are read or refused with a bound on what is told and spent; a file as it is meant is read.

use std::collections::HashMap;

use keyward::identity::UserName;
use keyward::users::{UserLineFault, UserPasswordHashes, UsersFileFault};

use crate::choices::Choices;

pub(crate) const TARGETS: [fn(&[u8]); 2] = [any_bytes, lines];

/// Of a password that nobody needs to know.
const HASH: &str = "$argon2id$v=19$m=19456,t=2,p=1$c29tZXNhbHRzb21lc2FsdA$\
                    RdescudvJCsgt3ub+b+dWRWJTmaaJObG0ejGzWvDhcE";

fn any_bytes(input: &[u8]) {
    let count = input.split(|byte| *byte == b'\n').count();
    match UserPasswordHashes::parse(input) {
        Ok(users) => {
            assert!(users.len() <= count);
            assert!(users == UserPasswordHashes::parse(input).expect("as before"));
        }
        Err(faults) => {
            assert!((1..=20).contains(&faults.len()));
            for fault in faults {
                let UsersFileFault::Line { line, wrong } = fault else { panic!("of a few bytes: {fault}") };
                assert!((1..=count).contains(&line));
                assert!(!matches!(wrong, UserLineFault::Again(earlier) if earlier >= line), "{fault}");
                // Only the number of the line varies: nothing of the file is shown.
                assert!(fault.to_string().len() < 120);
            }
        }
    }
}

/// Lines that are mostly right, with what differs from that chosen.
fn lines(input: &[u8]) {
    let mut choices = Choices::new(input);
    let mut file = Vec::new();
    let mut names: HashMap<Vec<u8>, usize> = HashMap::new();
    let mut good = true;
    for _ in 0..choices.below(6) {
        match choices.below(8) {
            0 => file.extend(b"# a comment"),
            1 => file.extend(b"  \t "),
            2 => {
                good = false;
                file.extend(choices.bytes(20).iter().filter(|byte| **byte != b'\n'));
                file.push(b'\0');
            }
            3 => {
                // Another cost, another length, or a byte of the hash changed.
                good = false;
                let mut line = [b"odd:", HASH.as_bytes()].concat();
                let at = 4 + choices.below(HASH.len());
                line[at] = choices.byte().max(b' ');
                file.extend(line);
            }
            _ => {
                let name: Vec<u8> =
                    choices.bytes(5).iter().map(|byte| b"abc-_.@/"[usize::from(*byte) % 8]).collect();
                good &= !name.is_empty();
                *names.entry(name.clone()).or_default() += 1;
                file.extend([&name, &b":"[..], HASH.as_bytes()].concat());
            }
        }
        file.extend(if choices.flag() { &b"\r\n"[..] } else { b"\n" });
    }
    any_bytes(&file);
    good &= names.values().all(|times| *times == 1);
    if good {
        let users = UserPasswordHashes::parse(&file).expect("nothing is wrong with it");
        assert_eq!(users.len(), names.len());
        for name in names.keys() {
            let name = UserName::from(std::str::from_utf8(name).expect("ASCII"));
            assert!(users.line(&name).is_some());
        }
    } else if names.values().any(|times| *times > 1) {
        assert!(UserPasswordHashes::parse(&file).is_err(), "a user twice");
    }
}
