//! The turns between a load and `run`: a load prints a line of JSON, and waits for a line of `run`.
//!
//! Must not know: the content of a line. Invariant: the wait does not block the runtime, so connections stay
//! alive.

use std::io::{self, Write as _};

use serde_json::Value;
use tokio::sync::oneshot;

use crate::Failure;

/// Prints one line.
pub(crate) fn tell(line: &Value) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{line}")?;
    stdout.flush()
}

/// Waits for the next line of `run`. An end of input is an error: `run` has ended.
pub(crate) async fn wait_for_turn() -> Result<(), Failure> {
    let (read, turn) = oneshot::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        // The receiver is gone only at the end of the process.
        drop(read.send(io::stdin().read_line(&mut line)));
    });
    match turn.await?? {
        0 => Err("the script has ended".into()),
        _ => Ok(()),
    }
}
