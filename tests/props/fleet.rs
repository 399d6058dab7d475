//! Sealed requests and answers of other replicas: whatever comes, nobody panics, and nothing opens but what was sealed.

use std::sync::LazyLock;

use keyward::admin::fleet::fleet_seal::{open_answer, open_request, seal_answer, seal_request};
use keyward::downstream::session::{Sealer, SessionKeys};
use keyward::secret::Secret;

use crate::choices::Choices;

pub(crate) const TARGETS: [fn(&[u8]); 2] = [opens_nothing_else, opens_no_change];

static SEALER: LazyLock<Sealer> = LazyLock::new(|| {
    let keys = [1, 2].map(|seed| Secret::new([seed; 32]));
    Sealer::new(SessionKeys::new(&keys).expect("keys"))
});

/// Bytes of anybody open as nothing, also behind a right beginning.
fn opens_nothing_else(input: &[u8]) {
    let (request, id) = seal_request(&SEALER, b"request").expect("sealed");
    assert!(open_request(&SEALER, input).is_none());
    assert!(open_answer(&SEALER, id, input).is_none());
    for kept in [4, 12, 36] {
        assert!(open_request(&SEALER, &[&request[..kept], input].concat()).is_none());
        assert!(open_answer(&SEALER, id, &[&request[..kept], input].concat()).is_none());
    }
}

/// A text opens as it was; with bytes changed, cut or added, it does not.
fn opens_no_change(input: &[u8]) {
    let mut choices = Choices::new(input);
    let (at, bits) = (choices.below(256) * 256 + choices.below(256), choices.below(255) + 1);
    let text = choices.rest();
    let (request, id) = seal_request(&SEALER, text).expect("sealed");
    let (opened, opened_id) = open_request(&SEALER, &request).expect("opened");
    assert_eq!((&opened[..], opened_id), (text, id));
    let answer = seal_answer(&SEALER, id, text).expect("sealed");
    assert_eq!(open_answer(&SEALER, id, &answer).as_deref(), Some(text));
    for mut message in [request, answer] {
        let at = at % message.len();
        message[at] ^= u8::try_from(bits).expect("a byte");
        assert!(open_request(&SEALER, &message).is_none() && open_answer(&SEALER, id, &message).is_none());
        message[at] ^= u8::try_from(bits).expect("a byte");
        let cut = &message[..at];
        assert!(open_request(&SEALER, cut).is_none() && open_answer(&SEALER, id, cut).is_none());
    }
}
