//! Reads the admin socket's path from the configuration file of a running Keyward.
//!
//! Owns: reading `admin.socket` alone. Must not know: any further key. Invariant: no fault elsewhere in the
//! file, or in a file named by it, prevents a command to a running Keyward: the operator may need the command
//! just then.

use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

/// Reasons for an unknown socket path.
#[derive(Debug, thiserror::Error)]
pub enum NoSocket {
    /// The file cannot be read.
    #[error("{0}")]
    Unreadable(String),
    /// The key is missing, or its value is not a string.
    #[error("admin.socket is not set in {}", .0.display())]
    NotSet(PathBuf),
}

/// The value of `admin.socket` in the configuration file at `path`.
///
/// # Errors
/// The file cannot be read, or the key is not set.
pub fn admin_socket(path: &Path) -> Result<PathBuf, NoSocket> {
    let text = super::resolve::read(path).map_err(NoSocket::Unreadable)?;
    let socket = socket_in(&text).ok_or_else(|| NoSocket::NotSet(path.to_owned()))?;
    // Relative to the file's folder, as every file name of the configuration.
    Ok(path.parent().unwrap_or(Path::new("")).join(socket))
}

/// The value of `admin.socket` in a text, which may contain invalid TOML elsewhere.
fn socket_in(text: &str) -> Option<String> {
    let (table, _faults) = DeTable::parse_recoverable(text);
    let admin = table.get_ref().get("admin")?.get_ref();
    let DeValue::Table(admin) = admin else { return None };
    admin.get("socket")?.get_ref().as_str().map(str::to_owned)
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
            assert_eq!(socket_in(text).as_deref(), Some("/run/a"), "{text}");
        }
        for text in ["", "[admin]\n", "admin = 1\n", "[admin]\nsocket = 1\n", "socket = '/run/a'\n"] {
            assert_eq!(socket_in(text), None, "{text}");
        }
    }
}
