//! Connections to the admin socket of a Keyward that may be believed.
//!
//! Owns: the check who serves the socket. Must not know: commands, answers. Invariant: nothing is sent to a
//! process of another user than root, this user, or the owner of the socket's folder: in a folder where
//! others may write, somebody else may serve, and would get texts of policies and answer as if a block were
//! in force.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;

const ROOT: u32 = 0;

/// Connects to the Keyward serving the socket. Blocks.
///
/// # Errors
/// The operating system's error; `PermissionDenied` if another user serves the socket.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(path)?;
    let server = user_of_peer(&stream)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let owner = std::fs::metadata(folder)?.uid();
    let is_believed = is_believed(server, owner, user_of_peer(&UnixStream::pair()?.0)?);
    if is_believed {
        return Ok(stream);
    }
    let reason = format!(
        "is served by user {server}, who is neither root nor you nor the owner of {}: nothing was sent",
        folder.display()
    );
    Err(io::Error::new(io::ErrorKind::PermissionDenied, reason))
}

fn is_believed(server: u32, folder_owner: u32, own: u32) -> bool {
    [ROOT, folder_owner, own].contains(&server)
}

/// The user of the process that listens at the other end. On a thread of its own: the library asks on behalf
/// of a runtime, and the caller may be inside of one, or not.
fn user_of_peer(stream: &UnixStream) -> io::Result<u32> {
    let stream = stream.try_clone()?;
    let asked = thread::scope(|scope| {
        scope
            .spawn(move || {
                stream.set_nonblocking(true)?;
                let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
                let _inside = runtime.enter();
                let stream = tokio::net::UnixStream::from_std(stream)?;
                let user = stream.peer_cred()?.uid();
                stream.into_std()?.set_nonblocking(false)?;
                Ok(user)
            })
            .join()
    });
    asked.unwrap_or_else(|_| Err(io::Error::other("the socket's server cannot be told")))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn root_this_user_and_the_owner_of_the_folder_are_believed() {
        let (keyward, nobody) = (998, 65534);
        assert!(is_believed(keyward, keyward, ROOT), "the package's service");
        assert!(is_believed(ROOT, nobody, nobody), "a socket of the service manager");
        assert!(is_believed(keyward, ROOT, keyward));
        assert!(!is_believed(nobody, ROOT, ROOT), "in /tmp");
        assert!(!is_believed(nobody, keyward, ROOT));
    }

    #[test]
    fn a_connection_that_is_believed_blocks_and_carries_bytes() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).expect("bound");
        let mut client = connect(&path).expect("its own user's");
        let (mut server, _) = listener.accept().expect("a client");
        client.write_all(b"?").expect("sent");
        let mut byte = [0];
        server.read_exact(&mut byte).expect("there");
        let late = thread::spawn(move || server.write_all(b"!"));
        client.read_exact(&mut byte).expect("waited for");
        assert_eq!(byte, *b"!");
        late.join().expect("no panic").expect("written");
        drop(listener);
        assert_eq!(connect(&path).expect_err("nobody there").kind(), io::ErrorKind::ConnectionRefused);
    }
}
