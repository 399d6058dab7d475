//! Compressed messages: any bytes inflate within the limit or are refused, and what was compressed comes out again.

use std::io::{Read as _, Write as _};

use bytes::Bytes;
use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;
use keyward::rpc::frame::{PREFIX, encode};
use keyward::rpc::inflate::{InflateFault, InflateStep, Inflater};

use crate::choices::Choices;

pub(crate) const TARGETS: [fn(&[u8]); 3] = [any_bytes, changed, compressed];

fn inflated(compressed: &[u8], max: usize) -> Result<Bytes, InflateFault> {
    let mut inflater = Inflater::new(Bytes::copy_from_slice(compressed), max);
    let mut added = 0;
    loop {
        match inflater.step()? {
            InflateStep::Added(count) => {
                assert!(count > 0, "a step without progress");
                added += count;
                assert!(added <= max, "{added} of {max} bytes");
            }
            InflateStep::Complete(frame) => {
                assert!((added..=max).contains(&(frame.len() - PREFIX)));
                return Ok(frame);
            }
        }
    }
}

/// As the library reads all of it at once.
fn at_once(compressed: &[u8], max: usize) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    let limit = u64::try_from(max).expect("64 bits") + 1;
    MultiGzDecoder::new(compressed).take(limit).read_to_end(&mut out).ok()?;
    (out.len() <= max).then_some(out)
}

fn any_bytes(input: &[u8]) {
    let mut choices = Choices::new(input);
    let max = 1 << choices.below(18);
    let compressed = choices.rest();
    let ours = inflated(compressed, max).ok();
    let theirs = at_once(compressed, max).filter(|_| !compressed.is_empty());
    assert_eq!(ours, theirs.map(|message| encode(&message)));
}

fn gzip(message: &[u8], level: usize) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::new(u32::try_from(level).expect("small")));
    encoder.write_all(message).expect("memory");
    encoder.finish().expect("memory")
}

/// A message that compresses well, of any size up to some hundred KiB.
fn message(choices: &mut Choices<'_>) -> Vec<u8> {
    let times = [1, 10, 1_000, 20_000][choices.below(4)];
    choices.bytes(12).repeat(times)
}

fn compressed(input: &[u8]) {
    let mut choices = Choices::new(input);
    let level = choices.below(10);
    let message = message(&mut choices);
    let mut bytes = gzip(&message, level);
    assert_eq!(inflated(&bytes, message.len()), Ok(encode(&message)));
    if let Some(short) = message.len().checked_sub(1) {
        assert_eq!(inflated(&bytes, short), Err(InflateFault::TooLarge { max: short }));
    }
    bytes.extend(gzip(choices.bytes(9), level));
    assert!(inflated(&bytes, message.len() + 9).is_ok(), "two members");
}

fn changed(input: &[u8]) {
    let mut choices = Choices::new(input);
    let level = choices.below(10);
    let message = message(&mut choices);
    let mut bytes = gzip(&message, level);
    for _ in 0..=choices.below(3) {
        let at = usize::from(choices.byte()) % bytes.len();
        bytes[at] = choices.byte();
    }
    let max = message.len();
    assert_eq!(inflated(&bytes, max).ok(), at_once(&bytes, max).map(|message| encode(&message)));
}
