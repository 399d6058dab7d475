//! Finds the admin socket of a running Keyward: the default path, or the path in the configuration file.
//!
//! Owns: the default path, and reading `admin.socket` alone. Must not know: any further key. Invariant: no
//! fault elsewhere in the file, or in a file named by it, prevents a command to a running Keyward: the
//! operator may need the command just then.

use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

use super::findings::ConfigFindings;
use super::source_text::SourceTexts;
use super::sources::ConfigSources;

/// The admin socket of a process whose configuration does not set `admin.socket`. systemd creates the folder
/// (`RuntimeDirectory=keyward`).
pub const DEFAULT_ADMIN_SOCKET: &str = "/run/keyward/admin.sock";

/// The unix socket for operator commands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdminSocketSetting {
    /// `admin.socket = ""`: no socket.
    Off,
    /// The key is not set: [`DEFAULT_ADMIN_SOCKET`], unless the path cannot be bound.
    Default,
    /// The path of the key. A path that cannot be bound is an error of the start.
    Path(PathBuf),
}

/// Reasons for an unknown socket path.
#[derive(Debug, thiserror::Error)]
pub enum NoSocket {
    /// The file cannot be read.
    #[error("{0}")]
    Unreadable(String),
    /// The key turns the socket off.
    #[error("admin.socket is off (\"\") in {}", .0.display())]
    Off(PathBuf),
    /// The value of the key is not a string.
    #[error("admin.socket is no path in {}", .0.display())]
    NotAPath(PathBuf),
}

/// The variable of `admin.socket`.
const VARIABLE: &str = "KEYWARD_ADMIN__SOCKET";

/// The admin socket of a process with these sources.
///
/// # Errors
/// The file cannot be read, or its `admin.socket` is no path.
pub fn admin_socket(sources: &ConfigSources) -> Result<PathBuf, NoSocket> {
    match (sources.variable(VARIABLE), sources.file()) {
        (Some(socket), _) if socket.is_empty() => Err(NoSocket::Off(VARIABLE.into())),
        (Some(socket), _) => Ok(socket.into()),
        (None, Some(path)) => socket_in_file(path),
        (None, None) => Ok(DEFAULT_ADMIN_SOCKET.into()),
    }
}

/// The admin socket named by the file, or by a file included there.
fn socket_in_file(path: &Path) -> Result<PathBuf, NoSocket> {
    // Read for the error alone: an included file that cannot be read does not prevent a command.
    super::source_text::read(path).map_err(NoSocket::Unreadable)?;
    let mut texts = SourceTexts::default();
    texts.add_files(path, &mut ConfigFindings::default());
    let included = texts.included_files().map(Path::to_owned);
    let files = std::iter::once(path.to_owned()).chain(included);
    for (path, text) in files.zip(texts.iter()) {
        return match written_socket(&text.text) {
            WrittenSocket::Unset => continue,
            WrittenSocket::NotAString => Err(NoSocket::NotAPath(path)),
            WrittenSocket::Text(socket) if socket.is_empty() => Err(NoSocket::Off(path)),
            // Relative to the file's folder, as every file name of the configuration.
            WrittenSocket::Text(socket) => Ok(path.parent().unwrap_or(Path::new("")).join(socket)),
        };
    }
    Ok(DEFAULT_ADMIN_SOCKET.into())
}

/// The key `admin.socket` in a text.
#[derive(Debug, PartialEq, Eq)]
enum WrittenSocket {
    Unset,
    NotAString,
    Text(String),
}

/// The value of `admin.socket` in a text, which may contain invalid TOML elsewhere.
fn written_socket(text: &str) -> WrittenSocket {
    let (table, _faults) = DeTable::parse_recoverable(text);
    let value = match table.get_ref().get("admin").map(|admin| admin.get_ref()) {
        Some(DeValue::Table(admin)) => admin.get("socket"),
        _ => None,
    };
    match value.map(|value| value.get_ref().as_str()) {
        None => WrittenSocket::Unset,
        Some(None) => WrittenSocket::NotAString,
        Some(Some(socket)) => WrittenSocket::Text(socket.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_socket_is_found_whatever_else_stands_there() {
        for text in [
            "[admin]\nsocket = '/run/a'\n",
            "admin.socket = '/run/a'\n",
            "admin = { socket = '/run/a', address = 7 }\nnonsense = 1\n",
            "[cluster]\nendpoints = 'http://a:1\n[admin]\nsocket = '/run/a'\n",
            "[admin]\nsocket = '/run/a'\n[cluster\nx = = 1\n",
        ] {
            assert_eq!(written_socket(text), WrittenSocket::Text("/run/a".into()), "{text}");
        }
        for text in ["", "[admin]\n", "admin = 1\n", "socket = '/run/a'\n"] {
            assert_eq!(written_socket(text), WrittenSocket::Unset, "{text}");
        }
        assert_eq!(written_socket("[admin]\nsocket = false\n"), WrittenSocket::NotAString);
        assert_eq!(written_socket("admin.socket = ''\n"), WrittenSocket::Text(String::new()));
    }
}
