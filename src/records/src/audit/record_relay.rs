//! The way of records from a process to its successor, which alone writes the audit file.
//!
//! Owns: the form of records on the socket between both, and both ends. Must not know: the chain, the file.
//! Invariants: the sender is told of a batch once the receiver has written its records, or counted them as
//! lost; a batch of which the sender was not told is still the sender's, so that the end of either process
//! leads to a second copy of a record and never to a gap.

use std::io::{self, BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use super::queue::AuditQueue;

/// The pause between two questions whether the sender goes on waiting.
const LOOK: Duration = Duration::from_millis(100);
/// Time limit for the receiver to take bytes from the socket.
const TAKE: Duration = Duration::from_secs(5);
/// Bytes of a record at most: far more than any has.
const LONGEST: u64 = 16 << 20;
/// The receiver's word for a batch that is done with.
const DONE: u8 = b'.';

/// The end of the process that was succeeded.
pub(super) struct RelaySender(UnixStream);

impl RelaySender {
    /// The sender, and the socket of the receiver.
    ///
    /// # Errors
    /// The process has too many open files.
    pub(super) fn pair() -> io::Result<(Self, OwnedFd)> {
        let (own, other) = UnixStream::pair()?;
        own.set_write_timeout(Some(TAKE))?;
        own.set_read_timeout(Some(LOOK))?;
        Ok((Self(own), other.into()))
    }

    /// Sends records, each a JSON object without a line break, and waits until the receiver is done with
    /// them.
    ///
    /// # Errors
    /// The receiver is gone, takes nothing, or `goes_on` is false.
    pub(super) fn send<'a>(
        &mut self,
        bodies: impl Iterator<Item = &'a [u8]>,
        goes_on: impl Fn() -> bool,
    ) -> io::Result<()> {
        let mut bytes = Vec::new();
        for body in bodies {
            bytes.extend_from_slice(body);
            bytes.push(b'\n');
        }
        bytes.push(b'\n');
        self.0.write_all(&bytes)?;
        let mut word = [0];
        loop {
            match self.0.read(&mut word) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => return Ok(()),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    if !goes_on() {
                        return Err(ErrorKind::TimedOut.into());
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// Takes the records of the process before into the queue, in a thread of its own, until that process ends.
///
/// # Errors
/// The operating system gives no thread.
pub(super) fn receive(from: OwnedFd, queue: Arc<AuditQueue>) -> io::Result<()> {
    let socket = UnixStream::from(from);
    let run = move || match take_batches(&socket, &queue) {
        Ok(records) => tracing::info!(records, "the process before has handed its last audit records on"),
        Err(error) => tracing::warn!(%error, "the process before hands no more audit records on"),
    };
    thread::Builder::new().name("audit relay".into()).spawn(run)?;
    Ok(())
}

/// Returns the number of records, at the end of the process before.
fn take_batches(socket: &UnixStream, queue: &Arc<AuditQueue>) -> io::Result<u64> {
    let (mut lines, mut count) = (BufReader::new(socket), 0);
    loop {
        // Disconnected once the writer has done with every record of the batch.
        let (waits, done) = mpsc::channel();
        loop {
            let mut line = Vec::new();
            (&mut lines).take(LONGEST).read_until(b'\n', &mut line)?;
            match line.split_last() {
                None => return Ok(count),
                Some((b'\n', [])) => break,
                Some((b'\n', body)) => {
                    queue.place_in_debt().fill_for(body.to_vec(), Some(waits.clone()));
                    count += 1;
                }
                Some(_) => return Err(ErrorKind::UnexpectedEof.into()),
            }
        }
        drop(waits);
        _ = done.recv();
        let mut writer = socket;
        writer.write_all(&[DONE])?;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use keyward_telemetry::metrics::Metrics;

    fn queue() -> Arc<AuditQueue> {
        Arc::new(AuditQueue::new(1 << 20, Metrics::new(Vec::new()).audit))
    }

    #[test]
    fn a_batch_is_the_senders_until_the_receiver_has_written_it() {
        let (mut sender, other) = RelaySender::pair().unwrap();
        let queue = queue();
        receive(other, Arc::clone(&queue)).unwrap();
        let (sent, outcome) = mpsc::channel();
        let bodies: [&[u8]; 2] = [b"{\"a\":1}", b"{}"];
        let sending = thread::spawn(move || {
            sent.send(sender.send(bodies.into_iter(), || true)).unwrap();
            sender
        });
        let mut taken = Vec::new();
        let mut batches = Vec::new();
        while taken.len() < 2 {
            let mut batch = queue.take(Instant::now() + Duration::from_secs(60));
            taken.append(&mut batch.bodies);
            batches.push(batch);
        }
        assert_eq!(taken, bodies);
        assert!(outcome.try_recv().is_err(), "nothing was written yet");
        drop(batches);
        outcome.recv().unwrap().unwrap();
        let mut sender = sending.join().unwrap();
        sender.send(std::iter::empty(), || true).expect("a batch without records is done at once");
    }

    #[test]
    fn a_sender_without_a_receiver_or_without_patience_has_its_batch_still() {
        let (mut sender, other) = RelaySender::pair().unwrap();
        let unheard = sender.send([&b"{}"[..]].into_iter(), || false).unwrap_err();
        assert_eq!(unheard.kind(), ErrorKind::TimedOut);
        drop(other);
        sender.send([&b"{}"[..]].into_iter(), || true).unwrap_err();
    }
}
