//! The record: JSON lines on stdout, as the contract in `tests/clients/README.md` has them. Secrets never come here.

use std::{io::Write, sync::LazyLock, time::Instant};

use crate::etcd_client::Error;
use serde_json::{Value, json};

static STARTED: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Prints one line at once, so that a reader sees it even if the process dies next.
pub(crate) fn emit(kind: &str, fields: Value) {
    let mut line = json!({ "t": STARTED.elapsed().as_millis() as u64, "kind": kind });
    if let (Value::Object(line), Value::Object(fields)) = (&mut line, fields) {
        line.extend(fields);
    }
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{line}").and_then(|()| stdout.flush()).expect("whoever started this reads its output");
}

/// Code and text of an error as an application gets them.
pub(crate) fn described(error: &Error) -> (String, String) {
    match error {
        Error::GRpcStatus(status) => {
            let code = match format!("{:?}", status.code()).as_str() {
                "Ok" => "OK".to_owned(),
                "Cancelled" => "Canceled".to_owned(),
                other => other.to_owned(),
            };
            (code, status.message().to_owned())
        }
        other => ("Unknown".to_owned(), other.to_string()),
    }
}
