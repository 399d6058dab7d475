//! One child process: its log file, its signals, its end.
//!
//! Owns: the child and the file that it writes to. Must not know what the program is. Invariants: a child does not outlive the
//! test process, however that ends, and not the `Process` that owns it; a signal goes only to a child that was not reaped, so never
//! to a stranger that got the same id; when a test fails, the end of the log is printed.

use std::{
    cell::Cell,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{LazyLock, Mutex, mpsc},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

use super::{evidence, wait};

/// How much of a log is printed when a test fails.
const TAIL_LINES: usize = 40;
const TAIL_WIDTH: usize = 400;
/// Longer than a log's writer takes to gather records.
const MOMENT: Duration = Duration::from_millis(100);
/// How long the threads of a process may take to stand after SIGSTOP.
const STANDS: Duration = Duration::from_secs(10);

type Order = (Command, mpsc::Sender<io::Result<Child>>);

/// The thread that starts every child. The kernel's parent-death signal fires when the *thread* that started the child ends, so
/// the tests' own threads will not do: a cluster may be handed from one to another.
static STARTER: LazyLock<Mutex<mpsc::Sender<Order>>> = LazyLock::new(|| {
    let (orders, inbox) = mpsc::channel::<Order>();
    thread::Builder::new()
        .name("starter".into())
        .spawn(move || {
            for (mut command, reply) in inbox {
                if let Err(mpsc::SendError(Ok(mut child))) = reply.send(command.spawn()) {
                    child.kill().expect("a child that nobody asked for can be killed");
                }
            }
        })
        .expect("a thread can be started");
    Mutex::new(orders)
});

/// A running program, killed on drop.
pub(crate) struct Process {
    name: String,
    log: PathBuf,
    child: Mutex<Child>,
}

impl Process {
    /// Starts `program` with its output in `log` (appended, so that a restart keeps what was said before).
    pub(crate) fn start<I: AsRef<std::ffi::OsStr>>(
        name: &str,
        program: &Path,
        args: impl IntoIterator<Item = I>,
        env: &[(&str, &str)],
        log: &Path,
    ) -> Process {
        let out = File::options().create(true).append(true).open(log).expect("the log file can be opened");
        let err = out.try_clone().expect("the log file can be shared");
        Process::start_with_stderr(name, program, args, env, log, (out, err.into()))
    }

    /// The same where stdout and stderr lead elsewhere; the output is what stands in `log`.
    pub(crate) fn start_with_stderr<I: AsRef<std::ffi::OsStr>>(
        name: &str,
        program: &Path,
        args: impl IntoIterator<Item = I>,
        env: &[(&str, &str)],
        log: &Path,
        (out, err): (File, Stdio),
    ) -> Process {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(program).args(args).envs(env.iter().copied());
        command.stdin(Stdio::null()).stdout(out).stderr(err);
        let (reply, child) = mpsc::channel();
        STARTER.lock().expect("no holder panics").send((command, reply)).expect("the starter runs");
        let child = child.recv().expect("the starter answers").expect("setpriv (util-linux) can be run");
        Process { name: name.into(), log: log.into(), child: Mutex::new(child) }
    }

    /// The process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.lock().expect("no holder panics").id()
    }

    /// How it ended; `None` while it runs.
    pub(crate) fn exit(&self) -> Option<ExitStatus> {
        self.child.lock().expect("no holder panics").try_wait().expect("a child can be waited for")
    }

    /// Sends `signal`; nothing happens where the process has ended. Returns after a SIGSTOP when every thread stands: one thread takes the
    /// signal and stops the others, and on a busy machine these run on until it has its turn.
    pub(crate) fn signal(&self, signal: Signal) {
        let mut child = self.child.lock().expect("no holder panics");
        if child.try_wait().expect("a child can be waited for").is_none() {
            let id = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process id");
            kill_process(id, signal).expect("a child that was not reaped takes signals");
            if signal == Signal::STOP {
                let begun = Instant::now();
                while has_running_thread(child.id()) {
                    assert!(begun.elapsed() < STANDS, "process {} goes on after SIGSTOP", child.id());
                    thread::yield_now();
                }
            }
        }
    }

    /// Kills it (SIGKILL) and returns when it is gone.
    pub(crate) fn kill(&self) {
        let mut child = self.child.lock().expect("no holder panics");
        if child.try_wait().expect("a child can be waited for").is_none() {
            child.kill().expect("a child can be killed");
            child.wait().expect("a child can be waited for");
        }
    }

    /// Waits for its end by itself or by a signal sent before.
    pub(crate) async fn ended(&self, within: Duration) -> ExitStatus {
        wait::until(within, &format!("{} ends", self.name), async || self.exit()).await
    }

    /// The same once nothing has come for a moment: Keyward's log is written by a thread of its own, some 20 ms later.
    pub(crate) fn settled_output(&self) -> String {
        let mut before = self.output();
        for _ in 0..20 {
            thread::park_timeout(MOMENT);
            let now = self.output();
            if now.len() == before.len() {
                break;
            }
            before = now;
        }
        before
    }

    /// Everything that it wrote so far, over all its starts.
    pub(crate) fn output(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Waits until `find` sees in the output what it looks for, and returns that.
    pub(crate) async fn wrote<T>(&self, within: Duration, what: &str, find: impl Fn(&str) -> Option<T>) -> T {
        self.wrote_or_ended(within, what, |output, _| find(output)).await
    }

    /// The same for one that may end: `find` is given how it ended, and then its whole output. It is asked where one of both has changed,
    /// since outputs are long and looks are many.
    pub(crate) async fn wrote_or_ended<T>(
        &self,
        within: Duration,
        what: &str,
        find: impl Fn(&str, Option<ExitStatus>) -> Option<T>,
    ) -> T {
        let seen = Cell::new(None);
        let look = async || {
            let exit = self.exit();
            let now = (fs::metadata(&self.log).map_or(0, |log| log.len()), exit.is_some());
            if seen.replace(Some(now)) == Some(now) {
                return None;
            }
            find(&self.output(), exit)
        };
        wait::until(within, &format!("{} writes {what}", self.name), look).await
    }

    /// The end of the output, for a person to read.
    pub(crate) fn tail(&self) -> String {
        let output = self.output();
        let lines: Vec<&str> = output.lines().collect();
        let last = &lines[lines.len().saturating_sub(TAIL_LINES)..];
        let shown: Vec<String> = last.iter().map(|line| line.chars().take(TAIL_WIDTH).collect()).collect();
        format!("--- {} (last {} of {} lines)\n{}\n", self.name, shown.len(), lines.len(), shown.join("\n"))
    }
}

/// True while a thread of the process neither stands nor has ended.
fn has_running_thread(process: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    threads.into_iter().any(|thread| {
        let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        // The state follows the name, which is in parentheses and may hold any character.
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        !matches!(state, None | Some('T' | 't' | 'Z' | 'X'))
    })
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        evidence::log(&self.name, &self.log);
        if thread::panicking() {
            eprint!("{}", self.tail());
        }
    }
}
