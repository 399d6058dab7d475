//! What an operator sees of `keyward` on the command line: answers, faults, exit codes, and never a secret.

#[cfg(test)]
#[path = "cli/audit_replicas.rs"]
mod audit_replicas;
#[cfg(test)]
#[path = "cli/audited_reloads.rs"]
mod audited_reloads;
#[cfg(test)]
#[path = "cli/first_minutes.rs"]
mod first_minutes;
#[cfg(test)]
#[path = "cli/help.rs"]
mod help;
#[cfg(test)]
#[path = "cli/state_files.rs"]
mod state_files;
#[cfg(test)]
#[path = "cli/terminal_widths.rs"]
mod terminal_widths;

use std::io::{Read as _, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;
use std::{fs, thread};

const LIMIT: Duration = Duration::from_secs(30);
const SECRET: &str = "hunter2-c0rrect-h0rse";

fn keyward(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_keyward"));
    command.args(arguments);
    without_settings_of_this_process(&mut command);
    command
}

/// A variable of whoever runs the tests would be a setting of Keyward, or a service manager's socket.
fn without_settings_of_this_process(command: &mut Command) {
    let is_setting = |name: &std::ffi::OsString| {
        let prefixes = ["KEYWARD_", "NOTIFY_", "WATCHDOG_", "LISTEN_"];
        name.to_str().is_some_and(|name| prefixes.iter().any(|prefix| name.starts_with(prefix)))
    };
    for name in std::env::vars_os().map(|(name, _)| name).filter(is_setting) {
        command.env_remove(name);
    }
}

/// Its exit code, stdout and stderr. It is killed where it does not end by itself.
fn run(command: &mut Command) -> (i32, String, String) {
    run_with(command, Stdio::null())
}

/// The same with an input.
fn run_with(command: &mut Command, input: impl Into<Stdio>) -> (i32, String, String) {
    command.stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("keyward starts");
    let (mut out, mut err) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
    let (ended, end) = mpsc::channel();
    thread::spawn(move || {
        let (mut stdout, mut stderr) = (String::new(), String::new());
        let read = out.read_to_string(&mut stdout).and(err.read_to_string(&mut stderr));
        drop(ended.send(read.map(|_| (stdout, stderr))));
    });
    let read = end.recv_timeout(LIMIT);
    if read.is_err() {
        child.kill().expect("it is ours");
    }
    let (stdout, stderr) = read.expect("keyward ends by itself").expect("UTF-8");
    assert!(!stdout.contains(SECRET) && !stderr.contains(SECRET), "a secret was printed:\n{stdout}{stderr}");
    (child.wait().expect("it is ours").code().expect("no signal ended it"), stdout, stderr)
}

fn write(folder: &Path, name: &str, content: &str) -> String {
    let path = folder.join(name);
    fs::write(&path, content).expect("a temporary folder is writable");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("it is ours");
    path.to_str().expect("temporary folders have UTF-8 names").to_owned()
}

fn check(config: &str) -> (i32, String, String) {
    run(&mut keyward(&["check", "--config", config]))
}

/// The key path that each line begins with.
fn paths(stderr: &str) -> Vec<&str> {
    stderr.lines().map(|line| line.split_once(": ").map_or(line, |(path, _)| path)).collect()
}

#[test]
fn the_reference_is_valid() {
    let reference = concat!(env!("CARGO_MANIFEST_DIR"), "/config.toml");
    let (code, stdout, stderr) = check(reference);
    assert_eq!((code, stdout.as_str()), (0, "configuration is valid\n"), "{stderr}");
    assert_eq!(stderr.lines().filter(|line| line.starts_with("warning: ")).count(), 2, "{stderr}");
    for key in ["revocation", "session.key_files"] {
        assert!(stderr.contains(&format!("warning: {key}: ")), "{key} in {stderr}");
    }

    let (code, stdout, _) = run(keyward(&["check"]).env("KEYWARD_CONFIG", reference));
    assert_eq!((code, stdout.as_str()), (0, "configuration is valid\n"));
}

#[test]
fn three_faults_are_told_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let text = "\
        [[listener]]\n\
        name = 'a'\n\
        address = 'nowhere'\n\
        [cluster]\n\
        endpoints = ['http://127.0.0.1:2379']\n\
        tokenttl = '5s'\n\
        [limits]\n\
        connections = 'many'\n";
    let (code, stdout, stderr) = check(&write(folder.path(), "keyward.toml", text));
    assert_eq!((code, stdout.as_str()), (64, ""));
    assert_eq!(paths(&stderr), ["listener[0].address", "cluster.tokenttl", "limits.connections"], "{stderr}");
    for (line, number) in stderr.lines().zip([3, 6, 8]) {
        assert!(line.ends_with(&format!("(line {number})")), "{line}");
    }
    let config = folder.path().join("keyward.toml");
    let served = run(&mut keyward(&["serve", "--config", config.to_str().unwrap()]));
    assert_eq!(served, (code, stdout, stderr));
}

#[test]
fn a_key_file_that_cannot_be_read_is_named() {
    let folder = tempfile::tempdir().unwrap();
    // A folder: unlike a file without permissions, root cannot read it either.
    fs::create_dir(folder.path().join("server.key")).unwrap();
    let certificate = rcgen::generate_simple_self_signed(["keyward.test".to_owned()]).unwrap();
    write(folder.path(), "server.crt", &certificate.cert.pem());
    let text = "\
        [[listener]]\n\
        name = 'a'\n\
        address = '127.0.0.1:0'\n\
        tls = { cert = 'server.crt', key = 'server.key' }\n\
        [session]\n\
        key_files = ['absent.key']\n\
        [cluster]\n\
        endpoints = ['http://127.0.0.1:2379']\n";
    let (code, stdout, stderr) = check(&write(folder.path(), "keyward.toml", text));
    assert_eq!((code, stdout.as_str()), (64, ""));
    assert_eq!(paths(&stderr), ["listener[0].tls.key", "session.key_files[0]"], "{stderr}");
    for (line, name) in stderr.lines().zip(["server.key", "absent.key"]) {
        assert!(line.contains(folder.path().join(name).to_str().unwrap()), "{line}");
    }
}

#[test]
fn no_secret_is_printed_wherever_it_stands() {
    let folder = tempfile::tempdir().unwrap();
    // Each where it belongs, each in a file of the wrong kind, and each written into the configuration itself.
    let file = write(folder.path(), "secret", &format!("{SECRET}\n{SECRET}\n"));
    let pem = write(folder.path(), "secret.pem", &format!("-----BEGIN PRIVATE KEY-----\n{SECRET}\n"));
    let text = format!(
        "password = '{SECRET}'\n\
         [[listener]]\n\
         name = 'a'\n\
         address = '127.0.0.1:0'\n\
         default_user = 'app'\n\
         tls = {{ cert = '{pem}', key = '{pem}', client_ca = '{file}' }}\n\
         [cluster]\n\
         endpoints = ['http://root:{SECRET}@127.0.0.1:2379']\n\
         probe = '{SECRET}'\n\
         [session]\n\
         key_files = ['{file}', '{pem}', ['{SECRET}']]\n\
         [[user]]\n\
         name = 'app'\n\
         password = '{SECRET}'\n\
         password_file = '{file}'\n\
         [limits]\n\
         connections = '{SECRET}'\n"
    );
    let (code, _, stderr) = check(&write(folder.path(), "keyward.toml", &text));
    assert_eq!(code, 64);
    assert_eq!(paths(&stderr).len(), 10, "{stderr}");

    let broken = format!("[[user]]\nname = 'app'\npassword = '{SECRET}\n");
    let (code, _, stderr) = check(&write(folder.path(), "broken.toml", &broken));
    assert_eq!((code, stderr.lines().count()), (64, 1), "{stderr}");
}

#[test]
fn a_missing_file_and_a_wrong_command_line_end_with_64() {
    let (code, stdout, stderr) = check("/nowhere/keyward.toml");
    assert_eq!((code, stdout.as_str()), (64, ""));
    assert!(stderr.contains("/nowhere/keyward.toml"), "{stderr}");
    for wrong in [&["check"][..], &["serv"], &["--nonsense"], &[]] {
        let (code, stdout, stderr) = run(&mut keyward(wrong));
        assert_eq!((code, stdout.as_str()), (64, ""), "{wrong:?}");
        assert!(!stderr.is_empty(), "{wrong:?}");
    }
}

#[test]
fn a_new_key_is_usable_and_never_takes_anothers_place() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session.key");
    let file = path.to_str().unwrap();
    assert_eq!(run(&mut keyward(&["keygen", file])), (0, String::new(), String::new()));
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let key = fs::read(&path).unwrap();
    let (code, stdout, stderr) = run(&mut keyward(&["keygen", file]));
    assert_eq!((code, stdout.as_str()), (1, ""));
    assert!(stderr.contains(file), "{stderr}");
    assert_eq!(fs::read(&path).unwrap(), key);
    let text = format!(
        "listener = [{{ name = 'a', address = '127.0.0.1:0' }}]\n\
         cluster.endpoints = ['http://127.0.0.1:1']\n\
         session.key_files = ['{file}']\n"
    );
    let (code, _, stderr) = check(&write(folder.path(), "keyward.toml", &text));
    assert_eq!(
        (code, stderr.lines().filter(|line| line.contains("session.key")).count()),
        (0, 0),
        "{stderr}"
    );
}

#[test]
fn commands_need_a_process_behind_the_socket() {
    let folder = tempfile::tempdir().unwrap();
    let absent = folder.path().join("absent.sock");
    let absent = absent.to_str().unwrap();
    let config = "listener = [{ name = 'a', address = '127.0.0.1:0' }]\n\
                  cluster.endpoints = ['http://127.0.0.1:1']\n";
    let off = write(folder.path(), "off.toml", &format!("{config}admin.socket = ''\n"));
    for (arguments, code) in [
        (&["revoke", "--socket", absent][..], 64),
        (&["revoke", "alice", "--session", "7", "--socket", absent], 64),
        (&["block", "--socket", absent], 64),
        (&["block", "alice", "--config", &off], 64),
        (&["block", "alice", "--socket", absent], 69),
        (&["sessions", "--socket", absent], 69),
        (&["status", "--socket", absent], 69),
        (&["reload", "--socket", absent], 69),
        (&["log-level", "debug", "--socket", absent], 69),
        (&["log-level", "--socket", absent], 64),
        (&["status", "-o", "xml", "--socket", absent], 64),
        (&["show", "clients", "--socket", absent], 69),
        (&["show", "--socket", absent], 64),
        (&["show", "everything", "--socket", absent], 64),
        (&["show", "clients", "--filter", "user", "--socket", absent], 64),
        (&["show", "clients", "--over", "soon", "--socket", absent], 64),
        (&["kick", "7", "--socket", absent], 69),
        (&["top", "--socket", absent], 64),
        (&["kick", "--socket", absent], 64),
        (&["kick", "file:alice", "--socket", absent], 69),
        (&["kick", "file:alice", "--all", "--socket", absent], 69),
        (&["kick", "7", "--all", "--socket", absent], 64),
        (&["kick", "7", "--all", "--replica", "kw-1", "--socket", absent], 64),
        (&["status", "--all", "--socket", absent], 69),
        (&["show", "clients", "--all", "--socket", absent], 69),
        (&["pause", "--socket", absent], 64),
        (&["pause", "m1", "--socket", absent], 69),
        (&["resume", "m1", "--socket", absent], 69),
        (&["doctor", "--socket", absent], 69),
        (&["drain", "--socket", absent], 69),
    ] {
        let (ended, stdout, stderr) = run(&mut keyward(arguments));
        assert_eq!((ended, stdout.as_str()), (code, ""), "{arguments:?}: {stderr}");
        assert!(!stderr.is_empty(), "{arguments:?}");
        let names_ways = stderr.contains("no Keyward serves this socket. --socket PATH, --config FILE or");
        assert_eq!(names_ways, code == 69, "the path alone is no help: {stderr}");
    }
}

/// Somebody at the admin socket who answers with this line, or hangs up.
fn answering(folder: &Path, name: &str, line: &'static str) -> String {
    use std::io::BufRead as _;
    let path = folder.join(name);
    let socket = std::os::unix::net::UnixListener::bind(&path).expect("the folder is ours");
    thread::spawn(move || {
        let (stream, _) = socket.accept().expect("somebody asks");
        let mut asked = String::new();
        std::io::BufReader::new(&stream).read_line(&mut asked).expect("a line");
        (&stream).write_all(line.as_bytes()).expect("it listens");
    });
    path.to_str().expect("temporary folders have UTF-8 names").to_owned()
}

#[test]
fn a_script_can_tell_from_the_code_what_has_become_of_a_command() {
    let folder = tempfile::tempdir().unwrap();
    for (name, line, code) in [
        ("done", "{\"done\":\"in force\"}\n", 0),
        ("failed", "{\"failed\":\"nothing has changed\"}\n", 1),
        ("not-kept", "{\"not_kept\":\"in force here\"}\n", 74),
        ("unknown", "{\"unknown\":\"no answer\"}\n", 75),
        ("gone", "", 75),
    ] {
        let socket = answering(folder.path(), name, line);
        let (ended, stdout, stderr) = run(&mut keyward(&["block", "alice", "--socket", &socket]));
        assert_eq!((ended, stdout.is_empty()), (code, code != 0), "{name}: {stdout}{stderr}");
        assert_eq!(stderr.is_empty(), code == 0, "{name}: {stderr}");
    }
}

/// An operator may need a command just when the configuration has a fault, or its secrets are another user's to read.
#[test]
fn a_command_finds_the_socket_in_a_configuration_with_other_faults() {
    let folder = tempfile::tempdir().unwrap();
    let config = "\
        [[listener]]\n\
        name = 'a'\n\
        address = 'nowhere'\n\
        tls = { cert = 'absent.crt', key = 'absent.key' }\n\
        [cluster]\n\
        probe = { user = 'keyward', password_file = 'absent.password' }\n\
        nonsense = 1\n\
        [admin]\n\
        socket = 'admin.sock'\n";
    let config = write(folder.path(), "keyward.toml", config);
    assert_eq!(check(&config).0, 64);
    answering(folder.path(), "admin.sock", "{\"done\":\"in force\"}\n");
    let (code, stdout, stderr) = run(&mut keyward(&["block", "alice", "--config", &config]));
    assert_eq!((code, stdout.as_str()), (0, "in force\n"), "{stderr}");
    for (text, reason) in [("''", "admin.socket is off"), ("false", "admin.socket is no path")] {
        let silent = write(folder.path(), "silent.toml", &format!("[admin]\nsocket = {text}\n"));
        let (code, _, stderr) = run(&mut keyward(&["status", "--config", &silent]));
        assert!(code == 64 && stderr.contains(reason), "{code}: {stderr}");
    }
}

/// The commands only read: a Keyward may serve the default socket of this machine.
#[test]
fn a_command_without_a_path_uses_the_default_socket() {
    const DEFAULT: &str = "/run/keyward/admin.sock";
    let folder = tempfile::tempdir().unwrap();
    let unset = write(folder.path(), "unset.toml", "[cluster]\nnonsense = 1\n");
    if Path::new(DEFAULT).exists() {
        return println!("{DEFAULT} exists: its absence cannot be tried");
    }
    for arguments in [&["status"][..], &["sessions"], &["status", "--config", &unset]] {
        let (code, stdout, stderr) = run(&mut keyward(arguments));
        assert_eq!((code, stdout.as_str()), (69, ""), "{arguments:?}: {stderr}");
        assert!(stderr.starts_with(DEFAULT), "{arguments:?}: {stderr}");
        for way in ["--socket PATH", "--config FILE", "KEYWARD_ADMIN__SOCKET"] {
            assert!(stderr.contains(way), "{arguments:?}: {stderr}");
        }
    }
    let (code, _, stderr) = run(keyward(&["status"]).env("KEYWARD_CONFIG", &unset));
    assert!(code == 69 && stderr.starts_with(DEFAULT), "{code}: {stderr}");
    // The configuration of the environment names another socket.
    let named = write(folder.path(), "named.toml", "admin.socket = 'absent.sock'\n");
    let (code, _, stderr) = run(keyward(&["status"]).env("KEYWARD_CONFIG", &named));
    assert!(code == 69 && stderr.contains("/absent.sock"), "{code}: {stderr}");
}

/// A running `keyward serve` with an admin socket, without any member to reach.
struct Served {
    child: Child,
    folder: tempfile::TempDir,
    /// Lines of its log.
    log: mpsc::Receiver<String>,
}

impl Served {
    /// Starts it with these further lines of the configuration, and waits until it listens.
    fn start(lines: &str, change: impl FnOnce(&mut Command, &Path)) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let config = write(folder.path(), "keyward.toml", &Self::text(lines));
        let mut command = keyward(&["serve", "--config", &config]);
        change(&mut command, folder.path());
        Self::spawned(command.stdin(Stdio::null()), folder)
    }

    /// The same with this socket of a service manager as the admin address, so that the port is nobody else's.
    fn start_with_admin(socket: &std::net::TcpListener, lines: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let address = socket.local_addr().expect("its address");
        let admin = |address: &str| format!("admin = {{ address = '{address}'");
        let text = Self::text(lines);
        let text = text.replace(&admin("127.0.0.1:0"), &admin(&address.to_string()));
        let config = write(folder.path(), "keyward.toml", &text);
        Self::spawned(&mut activation(socket, &config), folder)
    }

    fn spawned(command: &mut Command, folder: tempfile::TempDir) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().expect("keyward starts");
        let stderr = std::io::BufReader::new(child.stderr.take().expect("piped"));
        let (sender, log) = mpsc::channel();
        thread::spawn(move || {
            for line in std::io::BufRead::lines(stderr) {
                drop(line.map(|line| sender.send(line)));
            }
        });
        let this = Self { child, folder, log };
        this.logged("listening");
        this
    }

    fn text(lines: &str) -> String {
        format!(
            "listener = [{{ name = 'a', address = '127.0.0.1:0' }}]\n\
             admin = {{ address = '127.0.0.1:0', socket = 'admin.sock' }}\n\
             cluster.endpoints = ['http://127.0.0.1:1']\n{lines}"
        )
    }

    /// Waits for a line of the log that contains `text`.
    fn logged(&self, text: &str) -> String {
        loop {
            let received = self.log.recv_timeout(LIMIT);
            assert!(received.is_ok(), "no {text:?} in the log");
            let line = received.unwrap_or_default();
            if line.contains(text) {
                return line;
            }
        }
    }

    fn configure(&self, lines: &str) {
        write(self.folder.path(), "keyward.toml", &Self::text(lines));
    }

    fn ask(&self, arguments: &[&str]) -> (i32, String, String) {
        let socket = self.folder.path().join("admin.sock");
        run(keyward(arguments).arg("--socket").arg(socket))
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.child.kill().and_then(|()| self.child.wait()));
    }
}

/// The datagrams to a socket, each as its lines.
struct ServiceManager(std::os::unix::net::UnixDatagram);

impl ServiceManager {
    fn bind(path: &Path) -> Self {
        let socket = std::os::unix::net::UnixDatagram::bind(path).expect("the folder is ours");
        socket.set_read_timeout(Some(LIMIT)).expect("a limit");
        Self(socket)
    }

    /// The next report for which `wanted` is true, and the reports before it.
    fn until(&self, wanted: impl Fn(&str) -> bool) -> (String, Vec<String>) {
        let (mut before, mut buffer) = (Vec::new(), [0; 4096]);
        loop {
            let received = self.0.recv(&mut buffer);
            assert!(received.is_ok(), "{received:?} after {before:?}");
            let length = received.unwrap_or_default();
            let report = String::from_utf8(buffer[..length].to_vec()).expect("UTF-8");
            if wanted(&report) {
                return (report, before);
            }
            before.push(report);
        }
    }
}

#[test]
fn the_service_manager_hears_of_readiness_reloads_life_and_the_drain() {
    let sockets = tempfile::tempdir().unwrap();
    let path = sockets.path().join("notify");
    let manager = ServiceManager::bind(&path);
    let begun = std::time::Instant::now();
    let served = Served::start("", |command, _| {
        command.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "400000").env_remove("WATCHDOG_PID");
    });
    let (_, before) = manager.until(|report| report == "READY=1\n");
    assert_eq!(before, [""; 0], "nothing comes before the listeners are open");
    let (status, _) = manager.until(|report| report.starts_with("STATUS="));
    assert!(status.starts_with("STATUS=not ready: "), "{status}");
    let alive = |report: &str| report == "WATCHDOG=1\n";
    for _ in 0..3 {
        manager.until(alive);
    }
    assert!(begun.elapsed() >= Duration::from_millis(400), "two pauses of half the limit");

    assert_eq!(served.ask(&["reload"]).0, 0);
    let (reloading, _) = manager.until(|report| report.contains("RELOADING"));
    let times = reloading.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").map(|rest| rest.trim().parse::<u64>());
    assert!(matches!(times, Some(Ok(1..))), "{reloading}");
    let (_, before) = manager.until(|report| report == "READY=1\n");
    assert!(before.iter().all(|report| alive(report)), "{before:?}");

    let (code, _, stderr) = served.ask(&["drain"]);
    assert_eq!(code, 0, "{stderr}");
    let (_, before) = manager.until(|report| report == "STOPPING=1\n");
    assert!(before.iter().all(|report| alive(report)), "{before:?}");
}

/// As supervisors other than a recent systemd have it.
#[test]
fn the_service_manager_may_listen_at_an_abstract_socket() {
    use std::os::linux::net::SocketAddrExt as _;
    let name = format!("keyward-notify-{}", std::process::id());
    let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).expect("a name");
    let socket = std::os::unix::net::UnixDatagram::bind_addr(&address).expect("nobody else has the name");
    socket.set_read_timeout(Some(LIMIT)).expect("a limit");
    let _served = Served::start("", |command, _| {
        command.env("NOTIFY_SOCKET", format!("@{name}"));
    });
    ServiceManager(socket).until(|report| report == "READY=1\n");
}

/// A watchdog's limit for another process, and no service manager at all.
#[test]
fn a_process_that_is_not_watched_reports_no_life() {
    let sockets = tempfile::tempdir().unwrap();
    let path = sockets.path().join("notify");
    let manager = ServiceManager::bind(&path);
    let served = Served::start("", |command, _| {
        command.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "2000").env("WATCHDOG_PID", "1");
    });
    assert_eq!(served.ask(&["drain"]).0, 0);
    let (_, before) = manager.until(|report| report == "STOPPING=1\n");
    assert!(before.iter().all(|report| !report.contains("WATCHDOG")), "{before:?}");
    // A path without a listener costs the reports and nothing else.
    drop(manager);
    let served = Served::start("", |command, _| {
        command.env("NOTIFY_SOCKET", &path);
    });
    served.logged("a report to the service manager failed");
    assert_eq!(served.ask(&["drain"]).0, 0);
}

/// The names of the commands in a help text.
fn commands_of(arguments: &[&str]) -> Vec<String> {
    let (_, stdout, _) = run(&mut keyward(&[arguments, &["--help"]].concat()));
    // Of the program itself, the commands stand in groups.
    let listed = stdout.split("Options:\n").next().unwrap_or_default();
    let names = listed.lines().filter_map(|line| {
        line.strip_prefix("  ").filter(|line| !line.starts_with(' '))?.split_whitespace().next()
    });
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

#[test]
fn every_command_has_a_man_page_and_a_completion() {
    let folder = tempfile::tempdir().unwrap();
    let man = folder.path().to_str().unwrap();
    assert_eq!(run(&mut keyward(&["man", man])), (0, String::new(), String::new()));
    let (code, bash, _) = run(&mut keyward(&["completions", "bash"]));
    assert_eq!(code, 0);
    let commands = commands_of(&[]);
    for name in ["serve", "status", "reload", "log-level", "completions", "man"] {
        assert!(commands.iter().any(|command| command == name), "{name} in {commands:?}");
    }
    let below =
        |group: &'static str| commands_of(&[group]).into_iter().map(move |name| format!("{group}-{name}"));
    let nested: Vec<String> = ["policy", "audit"].into_iter().flat_map(below).collect();
    assert!(nested.contains(&"policy-apply".to_owned()), "{nested:?}");
    let top = fs::read_to_string(folder.path().join("keyward.1")).expect("the page of the program");
    for name in &commands {
        let escaped = name.replace('-', "\\-");
        assert!(top.contains(&format!("keyward\\-{escaped}(1)")), "{name} in {top}");
    }
    for name in commands.iter().chain(&nested) {
        let page = fs::read_to_string(folder.path().join(format!("keyward-{name}.1"))).expect(name);
        assert!(page.contains(".SH SYNOPSIS"), "{name}");
        assert!(bash.contains(name.rsplit_once('-').map_or(name.as_str(), |(_, last)| last)), "{name}");
    }
    let script = write(folder.path(), "keyward.bash", &bash);
    let (code, _, stderr) = run(Command::new("bash").args(["-n", &script]));
    assert_eq!((code, stderr.as_str()), (0, ""));
    for shell in ["zsh", "fish"] {
        let (code, stdout, _) = run(&mut keyward(&["completions", shell]));
        assert!(code == 0 && stdout.contains("log-level"), "{shell}");
    }
    assert_eq!(run(&mut keyward(&["completions", "csh"])).0, 64);
    assert_eq!(run(&mut keyward(&["man", "/nowhere/at/all"])).0, 1);
}

#[test]
fn reload_prints_what_has_changed_or_every_fault() {
    let served = Served::start("runtime.shards = 1\n", |_, _| {});
    served.configure("limits.connections = 70\nruntime.shards = 2\nlog.level = 'debug'\n");
    let (code, stdout, stderr) = served.ask(&["reload"]);
    let shown: Vec<&str> = stdout.lines().collect();
    assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
    for line in [
        "limits: changed, in force for new connections and calls",
        "log.level: info -> debug",
        "waits for a restart: runtime",
    ] {
        assert!(shown.contains(&line), "{line} in {stdout}");
    }
    served.configure("limits.connections = 'many'\nnonsense = 1\n");
    let (code, stdout, stderr) = served.ask(&["reload"]);
    assert_eq!((code, stdout.as_str()), (1, ""), "{stderr}");
    assert_eq!(paths(&stderr), ["limits.connections", "nonsense"], "{stderr}");
    served.logged("uid=");
    // A reload refused has left the level of the former one.
    let (code, stdout, _) = served.ask(&["log-level", "debug"]);
    assert!(code == 0 && stdout.ends_with("before: debug\n"), "{code}: {stdout}");
}

/// Every topic, also without any member and any client, in every form.
#[test]
fn every_topic_is_shown_as_a_table_and_as_json() {
    let served = Served::start("drain.timeout = '7s'\n", |_, _| {});
    for (topic, _) in keyward::admin::view::ViewTopic::ALL {
        let (code, stdout, stderr) = served.ask(&["show", topic, "-o", "json"]);
        let view: serde_json::Value = serde_json::from_str(&stdout).expect("JSON");
        assert_eq!((code, stderr.as_str(), stdout.lines().count()), (0, "", 1), "{topic}");
        assert_eq!((&view["topic"], &view["schema_version"]), (&topic.into(), &1.into()), "{view}");
        assert!(view["taken_at"].as_str().is_some_and(|at| at.ends_with('Z')), "{view}");
        for form in ["table", "wide"] {
            let (code, stdout, stderr) = served.ask(&["show", topic, "-o", form]);
            let head = stdout.lines().next().unwrap_or_default();
            let is_head = !head.is_empty() && head == head.to_uppercase();
            assert!(code == 0 && stderr.is_empty() && is_head, "{topic}: {stdout}{stderr}");
            assert!(!stdout.contains('…'), "a pipe gets whole rows: {stdout}");
        }
    }
    let shown = |arguments: &[&str]| served.ask(&[&["show"], arguments].concat());
    let (_, config, _) = shown(&["config", "--filter", "key=drain.timeout"]);
    assert!(config.contains("drain.timeout  7s"), "{config}");
    let (_, replica, _) = shown(&["replicas", "-o", "json"]);
    assert!(replica.contains(&format!("\"pid\":{}", served.child.id())), "{replica}");
    for unknown in [&["clients", "--sort", "cals"][..], &["clients", "--filter", "cals=1"]] {
        let (code, stdout, stderr) = shown(unknown);
        assert!(code == 64 && stdout.is_empty() && stderr.contains("calls, "), "{stderr}");
    }
    let (code, _, stderr) = served.ask(&["kick", "7"]);
    assert!(code == 1 && stderr.contains("no client 7"), "{stderr}");
    let (code, _, stderr) = served.ask(&["pause", "m1"]);
    assert!(code == 1 && stderr.contains("no member"), "{stderr}");
}

#[test]
fn a_policy_that_is_a_file_is_no_difference() {
    let served = Served::start("", |_, folder| {
        write(folder, "policy.toml", POLICY);
    });
    let file = served.folder.path().join("policy.toml");
    let (code, stdout, stderr) = served.ask(&["policy", "diff", file.to_str().expect("a path")]);
    assert_eq!((code, &*stdout), (64, ""), "{stderr}");
    assert!(
        stderr.contains("policy.etcd_prefix is not set") && stderr.contains("keyward policy check"),
        "{stderr}"
    );
}

#[test]
fn the_places_where_something_is_kept_are_shown() {
    let of_etcd = "revocation.etcd_prefix = '/r/'\npolicy.etcd_prefix = '/p/'\npolicy.state_file = 'generation'\n\
         audit.file = 'audit.log'\n";
    let rows = |lines: &str, prepare: &dyn Fn(&Path)| {
        let served = Served::start(lines, |_, folder| prepare(folder));
        served.ask(&["show", "config"]).1
    };
    let shown = rows(of_etcd, &|_| {});
    for (key, value) in [
        ("revocation.etcd_prefix", "/r/"),
        ("policy.etcd_prefix", "/p/"),
        ("policy.state_file", "/generation"),
        ("audit.file", "/audit.log"),
        ("maintenance.etcd_prefix", "/keyward-maintenance/"),
    ] {
        let line = shown.lines().find(|line| line.starts_with(key)).unwrap_or_default();
        assert!(line.contains(value), "{key} in {shown}");
    }
    assert!(!shown.contains("policy.file") && !shown.contains("revocation.state_file"), "{shown}");
    let of_files =
        "revocation.state_file = 'revoked'\npolicy.file = 'policy.toml'\nmaintenance.etcd_prefix = ''\n";
    let shown = rows(of_files, &|folder| {
        write(folder, "policy.toml", POLICY);
    });
    assert!(shown.contains("/policy.toml") && shown.contains("/revoked"), "{shown}");
    assert!(!shown.contains("etcd_prefix"), "{shown}");
}

/// A replica shows the others, with their own figures, and why one does not answer.
#[test]
fn replicas_stand_side_by_side() {
    let listening = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listening.local_addr().expect("its address").port();
    // A socket that does not listen keeps its port, so that no other program answers there.
    let held = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
    held.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("a port");
    let closed = held.local_addr().expect("bound").as_socket().expect("an address").port();
    let first = Served::start_with_admin(&listening, "limits.connections = 70\n");
    let second = Served::start("", |command, _| {
        let names = format!("['localhost:{port}', '127.0.0.1:{closed}']");
        command.env("KEYWARD_ADMIN__REPLICAS", names);
    });
    let (code, stdout, stderr) = second.ask(&["show", "replicas", "-o", "json"]);
    let view: serde_json::Value = serde_json::from_str(&stdout).expect("JSON");
    assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
    let row = |field: &str, value: serde_json::Value| {
        let mut rows = view["rows"].as_array().unwrap().iter();
        rows.find(|row| row[field] == value).unwrap_or_else(|| panic!("{value} in {view}"))
    };
    let (own, other) = (row("pid", second.child.id().into()), row("pid", first.child.id().into()));
    let silent = row("address", format!("127.0.0.1:{closed}").into());
    assert_eq!((&own["address"], &own["state"]), (&serde_json::Value::Null, &"not_ready".into()), "{view}");
    assert_eq!(other["state"], "not_ready", "{view}");
    assert_eq!(other["address"], format!("127.0.0.1:{port}"), "{view}");
    assert_ne!(own["configuration"], other["configuration"], "{view}");
    assert_eq!((&silent["pid"], &silent["state"]), (&serde_json::Value::Null, &"".into()), "{view}");
    assert_eq!(silent["connections"], serde_json::Value::Null, "{view}");
    assert!(silent["why"].as_str().is_some_and(|why| why.contains("refused")), "{view}");
}

/// A start of Keyward with `socket` as the only socket of a service manager.
fn activation(socket: &std::net::TcpListener, config: &str) -> Command {
    activation_after(":", socket, config)
}

/// The same after a command of the shell.
fn activation_after(before: &str, socket: &std::net::TcpListener, config: &str) -> Command {
    let own = keyward(&["serve", "--config", config]);
    let mut shell = Command::new("sh");
    let start = format!("{before} && LISTEN_PID=$$ LISTEN_FDS=1 exec \"$@\" 3<&0 </dev/null");
    shell.arg("-c").arg(start).arg("sh").arg(own.get_program()).args(own.get_args());
    without_settings_of_this_process(&mut shell);
    let copy = std::os::fd::OwnedFd::from(socket.try_clone().expect("a copy"));
    shell.stdin(copy);
    shell
}

fn activated(socket: &std::net::TcpListener, config: &str) -> Child {
    activation(socket, config).stderr(Stdio::piped()).spawn().expect("sh starts")
}

/// Sends a request at once, and reads whatever answer comes once a process accepts.
fn answer_of(address: std::net::SocketAddr) -> thread::JoinHandle<String> {
    let mut client = std::net::TcpStream::connect(address).expect("the service manager listens");
    client.set_read_timeout(Some(LIMIT)).expect("a limit");
    client.write_all(b"GET /livez HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").expect("sent");
    thread::spawn(move || {
        let mut answer = String::new();
        drop(client.read_to_string(&mut answer));
        answer
    })
}

/// Clients that connect before the first start and between two processes wait, and are served.
#[test]
fn sockets_of_the_service_manager_outlive_the_process() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = socket.local_addr().expect("its address");
    let text = Served::text("").replacen("127.0.0.1:0", &address.to_string(), 1);
    let config = write(folder.path(), "keyward.toml", &text);
    for _ in 0..2 {
        let client = answer_of(address);
        let mut child = activated(&socket, &config);
        let answer = client.join().expect("no panic");
        assert!(answer.starts_with("HTTP/1.1 "), "{answer:?}");
        let terminated = run(Command::new("kill").arg(child.id().to_string()));
        assert_eq!(terminated.0, 0, "{terminated:?}");
        assert!(child.wait().expect("it ends").success());
    }
    // A socket without a listener would let its clients wait for ever.
    let other = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let ended = activated(&other, &config).wait_with_output().expect("it ends");
    let told = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(1), "{told}");
    assert!(told.contains("no listener has the address of the received socket"), "{told}");
}

/// The soft and the hard limit on open files of a process.
fn open_files_limit(process: &str) -> (String, String) {
    let limits = fs::read_to_string(format!("/proc/{process}/limits")).expect("a process");
    let line = limits.lines().find(|line| line.starts_with("Max open files")).expect("listed");
    let mut words = line.split_ascii_whitespace().skip(3).map(str::to_owned);
    (words.next().expect("the soft limit"), words.next().expect("the hard limit"))
}

/// Service managers and containers begin with a soft limit of 1,024; etcd's Go raises it, too.
#[test]
fn the_soft_limit_on_open_files_is_raised_to_the_hard_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = socket.local_addr().expect("its address");
    let text = Served::text("").replacen("127.0.0.1:0", &address.to_string(), 1);
    let config = write(folder.path(), "keyward.toml", &text);
    let served = Served::spawned(&mut activation_after("ulimit -Sn 64", &socket, &config), folder);
    served.logged("started");
    let (soft, hard) = open_files_limit(&served.child.id().to_string());
    assert_eq!(soft, hard);
    assert_eq!(hard, open_files_limit("self").1, "the hard limit is as before");
}

/// Clients that say nothing would hold two files each, and stay for an hour.
#[test]
fn clients_leave_open_files_for_the_admin_socket() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = socket.local_addr().expect("its address");
    let text =
        Served::text("limits.first_call_timeout = '1h'\n").replacen("127.0.0.1:0", &address.to_string(), 1);
    let config = write(folder.path(), "keyward.toml", &text);
    let served = Served::spawned(&mut activation_after("ulimit -n 200", &socket, &config), folder);
    let line = served.logged("limits.connections does not fit");
    assert!(line.contains("descriptors=200") && line.contains("wanted=10000"), "{line}");
    let mut clients = Vec::new();
    while clients.len() < 300 {
        // A full queue of the kernel leaves further clients without an answer.
        match std::net::TcpStream::connect_timeout(&address, Duration::from_secs(2)) {
            Ok(client) => clients.push(client),
            Err(_) => break,
        }
    }
    assert!(clients.len() > 100, "{}", clients.len());
    let (_, stdout, stderr) = served.ask(&["status"]);
    assert!(stdout.contains("not ready"), "{stdout}{stderr}");
    let (_, stdout, stderr) = served.ask(&["doctor"]);
    assert!(stdout.contains("with a limit of 200 open files"), "{stdout}{stderr}");
}

/// The configuration is a pipe, so that the start takes as long as the test wants.
#[test]
fn a_hangup_while_the_configuration_is_read_does_not_end_the_process() {
    let folder = tempfile::tempdir().expect("a folder");
    let pipe = folder.path().join("keyward.toml");
    let made = run(Command::new("mkfifo").arg("-m").arg("600").arg(&pipe));
    assert_eq!(made.0, 0, "{made:?}");
    let mut command = keyward(&["serve", "--config", pipe.to_str().expect("UTF-8")]);
    let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().expect("keyward starts");
    let begun = std::time::Instant::now();
    let is_caught = || {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).expect("a process");
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).expect("listed");
        u64::from_str_radix(caught.trim(), 16).expect("a mask") & 1 == 1
    };
    while !is_caught() && begun.elapsed() < LIMIT {
        thread::yield_now();
    }
    assert!(is_caught(), "nothing is read yet, and a hangup would end the process");
    let hangup = run(Command::new("kill").arg("-HUP").arg(child.id().to_string()));
    assert_eq!(hangup.0, 0, "{hangup:?}");
    let at_once = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).expect("a flag");
    // Without a reader the pipe cannot be opened this way: the process, which may have ended, has not opened it yet.
    let opened = loop {
        match fs::OpenOptions::new().write(true).custom_flags(at_once).open(&pipe) {
            Err(_) if child.try_wait().expect("ours").is_none() && begun.elapsed() < LIMIT => {
                thread::yield_now();
            }
            opened => break opened,
        }
    };
    let later = write(folder.path(), "later.toml", &Served::text(""));
    opened.expect("it is read").write_all(Served::text("").as_bytes()).expect("written");
    // For the reload.
    fs::rename(later, &pipe).expect("replaced");
    let stderr = std::io::BufReader::new(child.stderr.take().expect("piped"));
    let mut lines = std::io::BufRead::lines(stderr).map_while(Result::ok);
    let started = lines.by_ref().any(|line| line.contains("started"));
    drop(child.kill().and_then(|()| child.wait()));
    assert!(started, "the process ended");
}

#[test]
fn the_log_level_changes_until_the_next_reload() {
    let mut served = Served::start("audit.file = 'audit.log'\n", |_, _| {});
    let (code, stdout, stderr) = served.ask(&["log-level", "warn,admin=debug"]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert_eq!(stdout, "log level warn,admin=debug until the next reload or restart; before: info\n");
    let line = served.logged("changed the log level");
    assert!(line.contains("now=\"warn,admin=debug\"") && line.contains("uid="), "{line}");
    // A peer that takes no answer.
    let mut peer = std::os::unix::net::UnixStream::connect(served.folder.path().join("admin.sock")).unwrap();
    peer.shutdown(std::net::Shutdown::Read).unwrap();
    peer.write_all(b"{\"sessions\":{}}\n").unwrap();
    let line = served.logged("an admin peer left");
    assert!(line.contains("DEBUG"), "{line}");
    for (wrong, reason) in [("loud", "none of off"), ("info,h2=trace", "no module of Keyward")] {
        let (code, stdout, stderr) = served.ask(&["log-level", wrong]);
        assert!(code == 1 && stdout.is_empty() && stderr.contains(reason), "{wrong}: {code} {stderr}");
    }
    let (code, stdout, stderr) = served.ask(&["reload"]);
    assert!(code == 0, "{stderr}");
    assert!(stdout.contains("log.level: warn,admin=debug -> info"), "{stdout}");
    let (_, stdout, _) = served.ask(&["log-level", "off"]);
    assert!(stdout.ends_with("before: info\n"), "{stdout}");

    assert_eq!(served.ask(&["drain"]).0, 0);
    assert!(served.child.wait().expect("it is ours").success());
    let audited = fs::read_to_string(served.folder.path().join("audit.log")).unwrap();
    let records = audited.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let commands: Vec<String> = records
        .filter(|record| record["event"] == "admin")
        .map(|record| {
            assert!(record["uid"].is_u64(), "{record}");
            format!("{} {} {}", record["command"], record["target"], record["result"]).replace('"', "")
        })
        .collect();
    let expected = [
        "log_level warn,admin=debug done",
        "log_level loud failed",
        "log_level info,h2=trace failed",
        "reload null done",
        "log_level off done",
        "drain null done",
    ];
    assert_eq!(commands, expected);
}

const FINDING: &str = r#"{"doctor":{"findings":[{"severity":"SEVERITY","check":"c","about":"a","what":"w","fix":"f"}],"unseen":[]}}"#;

#[test]
fn a_script_can_tell_from_the_code_what_doctor_and_drain_have_found() {
    let folder = tempfile::tempdir().unwrap();
    let finding = |severity| FINDING.replace("SEVERITY", severity) + "\n";
    let progress = |phase, cut| {
        format!(
            "{{\"draining\":{{\"phase\":\"{phase}\",\"left_ms\":0,\"connections\":0,\"calls\":0,\"streams\":0,\"cut\":{cut}}}}}\n"
        )
    };
    for (name, command, line, code) in [
        ("well", "doctor", "{\"doctor\":{\"findings\":[],\"unseen\":[]}}\n".to_owned(), 0),
        ("warned", "doctor", finding("warning"), 1),
        ("ill", "doctor", finding("error"), 2),
        ("refused", "doctor", "{\"failed\":\"another user\"}\n".to_owned(), 1),
        ("hung-up", "doctor", String::new(), 75),
        ("drained", "drain", progress("ended", 0), 0),
        ("cut", "drain", progress("ended", 2), 1),
        ("gone", "drain", progress("leaving", 0), 75),
        ("silent", "drain", String::new(), 69),
    ] {
        let socket = answering(folder.path(), name, line.leak());
        let (ended, stdout, stderr) = run(&mut keyward(&[command, "--socket", &socket]));
        assert_eq!(ended, code, "{name}: {stdout}{stderr}");
    }
}

#[test]
fn an_address_that_is_taken_ends_serving_with_1() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let text = format!(
        "listener = [{{ name = 'a', address = '{address}' }}]\n\
         admin.address = '127.0.0.1:0'\n\
         cluster.endpoints = ['http://{address}']\n\
         log.format = 'json'\n"
    );
    let config = write(folder.path(), "keyward.toml", &text);
    let (code, stdout, stderr) = run(&mut keyward(&["serve", "--config", &config]));
    assert_eq!((code, stdout.as_str()), (1, ""), "{stderr}");
    let records = stderr.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let levels: Vec<String> = records.map(|record| record["level"].as_str().unwrap().to_owned()).collect();
    assert!(levels.iter().any(|level| level == "WARN"), "{stderr}");
    assert_eq!(levels.last().unwrap(), "ERROR", "{stderr}");
}

/// Input from a file, which no terminal shows.
fn input(folder: &Path, content: &str) -> fs::File {
    fs::File::open(write(folder, "input", content)).expect("it was written")
}

#[test]
fn a_password_becomes_a_line_of_the_users_file() {
    let folder = tempfile::tempdir().unwrap();
    let hash = |content: &str| run_with(&mut keyward(&["hash-password"]), input(folder.path(), content));
    let (code, stdout, stderr) = hash(&format!("{SECRET}\n"));
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert!(stdout.starts_with("$argon2id$v=19$m=19456,t=2,p=1$") && stdout.ends_with('\n'), "{stdout}");
    let users = keyward::users::UserPasswordHashes::parse(format!("alice:{stdout}").as_bytes()).unwrap();
    let matches = |password: &str| users.comparison(&"alice".into()).matches(&password.to_owned().into());
    assert!(matches(SECRET) && !matches(&SECRET[1..]));
    for wrong in ["", "\n"] {
        let (code, stdout, stderr) = hash(wrong);
        assert_eq!((code, stdout.as_str(), stderr.as_str()), (1, "", "the password is empty\n"));
    }
}

/// What the terminal shows until it has shown `end`.
fn shown(terminal: &mut fs::File, end: &str) -> String {
    let mut shown = Vec::new();
    let mut byte = [0];
    while !shown.ends_with(end.as_bytes()) {
        terminal.read_exact(&mut byte).expect("the terminal goes on");
        shown.push(byte[0]);
    }
    String::from_utf8(shown).expect("UTF-8")
}

/// A pseudo terminal: our end, and theirs.
fn pseudo_terminal() -> (fs::File, fs::File) {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
    grantpt(&ours).and_then(|()| unlockpt(&ours)).expect("it is ours");
    let name = ptsname(&ours, Vec::new()).expect("it has a name").into_string().expect("UTF-8");
    let theirs = fs::OpenOptions::new().read(true).write(true).open(name).expect("it opens");
    (fs::File::from(ours), theirs)
}

/// On a real terminal: the screen follows the replica and the keys, and the terminal is as before at the end.
#[test]
fn top_shows_a_replica_live_and_leaves_the_terminal_as_it_was() {
    use std::io::Write as _;

    use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
    let served = Served::start("", |_, _| {});
    let (mut ours, theirs) = pseudo_terminal();
    tcsetwinsize(&theirs, Winsize { ws_row: 24, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 }).expect("a size");
    let modes = || tcgetattr(&theirs).expect("a terminal").local_modes;
    let before = modes();
    let mut command = keyward(&["top", "--socket"]);
    command.arg(served.folder.path().join("admin.sock")).env("TERM", "xterm-256color");
    command.stdin(theirs.try_clone().expect("a handle")).stdout(theirs.try_clone().expect("a handle"));
    let mut child = command.stderr(Stdio::null()).spawn().expect("keyward starts");
    // The alternate screen; then words, since blanks are not drawn.
    shown(&mut ours, "\u{1b}[?1049h");
    shown(&mut ours, "calls_per_second;");
    assert!(!modes().contains(LocalModes::ICANON) && !modes().contains(LocalModes::ECHO));
    write!(ours, "m").expect("typed");
    shown(&mut ours, "ENDPOINT");
    write!(ours, "q").expect("typed");
    shown(&mut ours, "\u{1b}[?1049l");
    assert_eq!(child.wait().expect("it is ours").code(), Some(0));
    assert_eq!(modes(), before, "lines are edited and shown again");
}

#[test]
fn a_terminal_does_not_show_the_password() {
    use std::io::Write as _;

    for (again, expected) in [(SECRET, 0), ("another", 1)] {
        let (mut ours, theirs) = pseudo_terminal();
        let mut command = keyward(&["hash-password"]);
        command.stdin(theirs.try_clone().expect("a handle")).stdout(Stdio::piped());
        let child = command.stderr(theirs).spawn().expect("keyward starts");
        drop(command);
        let mut seen = shown(&mut ours, "Password: ");
        writeln!(ours, "{SECRET}").expect("typed");
        seen += &shown(&mut ours, "Once more: ");
        writeln!(ours, "{again}").expect("typed");
        let ended = child.wait_with_output().expect("it ends");
        assert_eq!(ended.status.code(), Some(expected));
        assert_eq!(ended.stdout.is_empty(), expected != 0);
        assert_eq!(seen, "Password: \r\nOnce more: ", "nothing that was typed");
    }
}

#[test]
fn the_version_is_the_packages() {
    let (code, stdout, _) = run(&mut keyward(&["--version"]));
    assert_eq!((code, stdout), (0, format!("keyward {}\n", env!("CARGO_PKG_VERSION"))));
}

const POLICY: &str = "[[role]]\nname = 'team'\n[[role.allow]]\nactions = ['read', 'write']\nprefix = '/teams/{user}/'\n\
                      [[role.deny]]\nactions = ['write']\nkey = '/teams/{user}/frozen'\n\
                      [[binding]]\npeer = 'password:*'\nroles = ['team']\nmode = 'shadow'\n";

/// A valid configuration with a policy file beside.
fn with_policy(folder: &Path, policy: &str) -> (String, String) {
    let config = "[[listener]]\nname = 'clients'\naddress = '127.0.0.1:2379'\n\
                  [cluster]\nendpoints = ['http://127.0.0.1:1']\n";
    (write(folder, "config.toml", config), write(folder, "policy.toml", policy))
}

#[test]
fn faults_and_idle_grants_of_a_policy_are_told_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let faulty = "[[role]]\nname = 'r'\n[[role.allow]]\nactions = ['fly']\nkey = 'a'\n\
                  [[role.allow]]\nactions = ['read']\nrange = { from = 'b', to = 'a' }\n\
                  [[binding]]\npeer = 'password:*'\nroles = ['missing']\n";
    let (config, policy) = with_policy(folder.path(), faulty);
    let check = |policy: &str| run(&mut keyward(&["policy", "check", policy, "--config", &config]));
    let (code, stdout, stderr) = check(&policy);
    assert_eq!((code, &*stdout), (64, ""), "{stderr}");
    for fault in ["role[0].allow[0].actions[0]", "role[0].allow[1].range", "binding[0].roles[0]"] {
        assert!(stderr.contains(fault), "{fault} in {stderr}");
    }
    let idle = format!(
        "{POLICY}[[role]]\nname = 'x'\n[[role.allow]]\nactions = ['read']\nprefix = '/x/'\n\
                        [[role.allow]]\nactions = ['read']\nkey = '/x/y'\n"
    );
    let (code, stdout, stderr) = check(&write(folder.path(), "idle.toml", &idle));
    assert_eq!((code, &*stdout), (0, "policy is valid\n"), "{stderr}");
    assert!(stderr.contains("role[1].allow[1]: gives nothing that allow[0] does not give"), "{stderr}");
    assert!(stderr.contains("no binding gives role \"x\""), "{stderr}");
}

#[test]
fn a_verdict_is_explained_by_its_grant_or_its_lack() {
    let folder = tempfile::tempdir().expect("a folder");
    let (config, policy) = with_policy(folder.path(), POLICY);
    let explain = |arguments: &[&str]| {
        let all = [&["policy", "explain"], arguments, &["--policy", &policy, "--config", &config]].concat();
        run(&mut keyward(&all))
    };
    let (code, stdout, _) = explain(&["password:al", "Put", "/teams/al/x"]);
    assert_eq!(
        (code, &*stdout),
        (
            0,
            "peer     password:al\nroles    team\nmode     shadow\nwrite    key \"/teams/al/x\": allowed by team.allow[0]\nverdict  allowed\n"
        )
    );
    let (code, stdout, _) = explain(&["password:al", "Put", "/teams/bo/x", "-o", "json"]);
    let told: serde_json::Value = serde_json::from_str(&stdout).expect("JSON");
    assert_eq!((code, &told["allowed"], &told["lines"][1]), (1, &false.into(), &"roles    team".into()));
    let (code, stdout, _) = explain(&["password:al", "Put", "/teams/al/frozen"]);
    assert!(code == 1 && stdout.contains("refused: team.deny[0]"), "{stdout}");
    let (code, stdout, _) = explain(&["password:al", "DeleteRange", "/teams/bo/", "--prefix"]);
    assert!(
        code == 1 && stdout.contains("keys from \"/teams/bo/\" to \"/teams/bo0\": refused: no_grant: write"),
        "{stdout}"
    );
    let (code, stdout, _) = explain(&["listener:clients", "Status"]);
    assert!(code == 1 && stdout.contains("roles    none") && stdout.contains("no_role"), "{stdout}");
    let (code, stdout, _) = explain(&["password:al", "LeaseRevoke", "/teams/al/x"]);
    assert!(
        code == 1 && stdout.contains("key \"/teams/al/x\" of the lease: allowed"),
        "the role has no lease action: {stdout}"
    );
    for bad in [["password:*", "Put"], ["nobody", "Put"], ["password:al", "Fly"], ["password:al", "Txn"]] {
        let (code, stdout, stderr) = explain(&bad);
        assert_eq!((code, &*stdout), (64, ""), "{bad:?}: {stderr}");
    }
}

#[test]
fn the_etcd_user_of_an_explained_call_is_that_of_the_rules() {
    let folder = tempfile::tempdir().expect("a folder");
    let policy = POLICY.replace("peer = 'password:*'", "etcd_user = 'app'").replace("{user}", "app");
    let (config, policy) = with_policy(folder.path(), &policy);
    let listed = fs::read_to_string(&config).expect("the configuration");
    let rules = "[[user]]\nname = 'app'\npassword_file = 'app.password'\n[[map]]\npeer = 'file:al'\nas = 'app'\n\
                 [[map]]\npeer = 'password:al'\nas = 'app'\n[[map]]\npeer = 'password:bad'\ndeny = true\n";
    write(folder.path(), "app.password", "x");
    let config = write(folder.path(), "mapped.toml", &format!("{listed}{rules}"));
    let explain = |arguments: &[&str]| {
        let all = [&["policy", "explain"], arguments, &["--policy", &policy, "--config", &config]].concat();
        run(&mut keyward(&all))
    };
    for peer in ["file:al", "password:al"] {
        let (code, stdout, stderr) = explain(&[peer, "Put", "/teams/app/x"]);
        assert!(code == 0 && stdout.contains("user     app, by the rules of [[map]]\n"), "{stdout}{stderr}");
    }
    let (code, stdout, _) = explain(&["file:al", "Put", "/teams/app/x", "--etcd-user", "other"]);
    assert!(code == 1 && !stdout.contains("user  "), "{stdout}");
    let (code, stdout, _) = explain(&["password:bad", "Put", "/teams/app/x"]);
    assert!(code == 1 && stdout.contains("user     none: the rules of [[map]] refuse this peer"), "{stdout}");
    let (code, stdout, _) = explain(&["file:bo", "Put", "/teams/app/x"]);
    assert!(code == 1 && stdout.contains("user     none: no rule of [[map]] takes this peer"), "{stdout}");
    assert!(stdout.contains("--etcd-user names the user"), "{stdout}");
    let (_, stdout, _) = explain(&["password:app", "Put", "/teams/app/x"]);
    assert!(stdout.ends_with("verdict  allowed\n") && !stdout.contains("user  "), "{stdout}");
}

#[test]
fn the_keys_of_a_lease_are_judged_if_a_key_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let (config, policy) =
        with_policy(folder.path(), &POLICY.replace("'read', 'write']", "'read', 'write', 'lease']"));
    let explain = |arguments: &[&str]| {
        let all = [&["policy", "explain"], arguments, &["--policy", &policy, "--config", &config]].concat();
        run(&mut keyward(&all))
    };
    let (code, stdout, _) = explain(&["password:al", "LeaseKeepAlive"]);
    let told = "keys of the lease: not judged; name a key of the lease to judge its keys\nverdict  allowed\n";
    assert!(code == 0 && stdout.ends_with(told), "{stdout}");
    let (code, stdout, _) = explain(&["password:al", "LeaseKeepAlive", "/teams/bo/x"]);
    assert!(code == 1 && stdout.contains("key \"/teams/bo/x\" of the lease: refused: no_grant"), "{stdout}");
    let (code, stdout, _) = explain(&["listener:clients", "LeaseKeepAlive"]);
    assert!(code == 1 && stdout.contains("refused: no_role"), "{stdout}");
}

#[test]
fn a_table_of_verdicts_is_compared_with_the_policy() {
    let folder = tempfile::tempdir().expect("a folder");
    let (config, policy) = with_policy(folder.path(), POLICY);
    let test = |table: &str| {
        let table = write(folder.path(), "table.toml", table);
        run(&mut keyward(&["policy", "test", &table, "--policy", &policy, "--config", &config]))
    };
    let row = |key: &str, expect: &str| {
        format!("[[test]]\npeer = 'password:al'\nmethod = 'Put'\nkey = '{key}'\nexpect = '{expect}'\n")
    };
    let right = row("/teams/al/x", "allow") + &row("/teams/al/frozen", "deny");
    assert_eq!(test(&right).0, 0);
    let table = write(folder.path(), "table.toml", &(right.clone() + &row("/teams/bo/x", "allow")));
    let files = ["--policy", &policy, "--config", &config, "-o", "json"];
    let (code, stdout, _) = run(&mut keyward(&[&["policy", "test", &table], &files[..]].concat()));
    let told: serde_json::Value = serde_json::from_str(&stdout).expect("JSON");
    assert_eq!((code, &told["calls"], &told["as_expected"]), (1, &3.into(), &false.into()));
    let checked = ["policy", "check", &policy, "--config", &config, "-o", "json"];
    let (code, stdout, _) = run(&mut keyward(&checked));
    let told: serde_json::Value = serde_json::from_str(&stdout).expect("JSON");
    assert_eq!((code, &told["reachable"], &told["warnings"]), (0, &true.into(), &serde_json::json!([])));
    let (code, stdout, _) = test(&(right + &row("/teams/bo/x", "allow")));
    assert_eq!(code, 1);
    assert!(stdout.contains("test[2]") && stdout.contains("3 calls: 1 not as expected"), "{stdout}");
    for bad in [
        "",
        "[[test]]\npeer = 'password:al'\n",
        &row("x", "maybe"),
        "[[test]]\nexpect = 'deny'\nkeey = 'x'\n",
    ] {
        assert_eq!(test(bad).0, 64, "{bad}");
    }
}

#[test]
fn a_policy_is_learned_from_records_and_refused_calls_teach_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let (config, _) = with_policy(folder.path(), POLICY);
    let record = |fields: &str| {
        format!(
            "{{\"time\":\"2999-01-01T00:00:00.000000Z\",\"code\":\"OK\",\"peer\":\"password:al\",{fields}}}\n"
        )
    };
    let put = "\"event\":\"change\",\"method\":\"/etcdserverpb.KV/Put\"";
    let log = [
        record(&format!("{put},\"lease\":\"7a\",\"ranges\":[{{\"action\":\"write\",\"key\":\"/t/al/x\"}}]")),
        record(&format!("{put},\"refused\":true,\"ranges\":[{{\"action\":\"write\",\"key\":\"/secret\"}}]")),
        record(
            "\"event\":\"change\",\"method\":\"/etcdserverpb.Lease/LeaseRevoke\",\"actions\":[\"lease\"],\"ranges\":[{\"action\":\"write\",\"keys_of_lease\":\"7a\"}]",
        ),
        // A call that shadow let pass, and one that it let pass and etcd denied.
        record(
            "\"event\":\"refusal\",\"method\":\"/etcdserverpb.KV/Range\",\"verdict\":\"would_refuse\",\"ranges\":[{\"action\":\"read\",\"key\":\"/passed\"}]",
        ),
        record(
            "\"event\":\"refusal\",\"method\":\"/etcdserverpb.KV/Range\",\"verdict\":\"would_refuse\",\"ranges\":[{\"action\":\"read\",\"key\":\"/denied\"}]",
        )
        .replace("\"OK\"", "\"PermissionDenied\""),
        // A compaction as an earlier version recorded it.
        record("\"event\":\"change\",\"method\":\"/etcdserverpb.KV/Compact\",\"actions\":[\"maintenance\"]"),
    ];
    let log = write(folder.path(), "audit.log", &log.concat());
    let (code, policy, stderr) = run(&mut keyward(&["policy", "learn", "--since", "24h", &log]));
    assert_eq!(code, 0, "{stderr}");
    let told = "no record of reads within --since: \"reads\" is not in audit.events, or there were none";
    assert!(stderr.contains(told), "{stderr}");
    assert!(policy.contains("\"compact\"") && !policy.contains("maintenance"), "{policy}");
    assert!(
        policy.contains("key = \"/t/al/x\"") && policy.contains("\"lease\"") && !policy.contains("secret"),
        "{policy}"
    );
    assert!(policy.contains("key = \"/passed\"") && !policy.contains("/denied"), "{policy}");
    for (what, older) in
        [("opened watches", "watches opened"), ("begun renewals of leases", "renewals begun")]
    {
        let told = format!("{older} before may be missing here, and keyward policy shadow names them");
        assert!(stderr.contains(what) && stderr.contains(&told), "{stderr}");
    }
    // A client whose lease is older than the log, and one that only renews and observes.
    let renewal = "\"event\":\"begin\",\"method\":\"/etcdserverpb.Lease/LeaseKeepAlive\",\"actions\":[\"lease\"],\"lease\":\"7b\",\"ranges\":[{\"action\":\"write\",\"keys_of_lease\":\"7b\"}]";
    let observe = "\"event\":\"begin\",\"method\":\"/v3electionpb.Election/Observe\",\"ranges\":[{\"action\":\"lock\",\"key\":\"/e/\",\"end\":\"/e0\"}]";
    let put = format!("{put},\"lease\":\"7b\",\"ranges\":[{{\"action\":\"write\",\"key\":\"/alive\"}}]");
    for (records, grants) in [
        (vec![put], "[\"write\"]\nkey = \"/alive\""),
        (vec![renewal.to_owned(), observe.to_owned()], "[\"lock\"]\nprefix = \"/e/\""),
    ] {
        let lines: String = records.iter().map(|fields| record(fields)).collect();
        let log = write(folder.path(), "older.log", &lines);
        let (code, policy, stderr) = run(&mut keyward(&["policy", "learn", &log]));
        assert_eq!(code, 0, "{stderr}");
        assert!(policy.contains("actions = [\"lease\"]") && policy.contains(grants), "{policy}");
        assert_eq!(stderr.contains("no record of begun renewals"), !policy.contains("/e/"), "{stderr}");
    }
    // A lease without a put is named with its peer; one of a lock has its key below the lock.
    let renewals = ["7c", "7d"].map(|lease| renewal.replace("7b", lease));
    let lock = "\"event\":\"change\",\"method\":\"/v3lockpb.Lock/Lock\",\"lease\":\"7d\",\"ranges\":[{\"action\":\"lock\",\"key\":\"/l/\",\"end\":\"/l0\"}]";
    let lines: String = renewals.iter().map(String::as_str).chain([lock]).map(record).collect();
    let leases = write(folder.path(), "leases.log", &lines);
    let (code, policy, stderr) = run(&mut keyward(&["policy", "learn", &leases]));
    let told = "no record puts a key with a lease that was renewed or revoked: 7c of \"password:al\"; if it has keys";
    assert!(code == 0 && stderr.contains(told) && stderr.contains("learn again"), "{stderr}");
    assert!(policy.contains(&format!("# Warning: {told}")), "{policy}");
    let learned = write(folder.path(), "learned.toml", &policy);
    assert_eq!(run(&mut keyward(&["policy", "check", &learned, "--config", &config])).0, 0);
    assert_eq!(run(&mut keyward(&["policy", "learn", "--peer", "password:bo", &log])).0, 1);
}
