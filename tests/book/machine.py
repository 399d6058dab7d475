"""A machine for a page: a real systemd in namespaces of its own, above a copy-on-write view of this machine.

Owns: the namespaces, the names and addresses of the book, the shell. Runs as root in a mount namespace of its own. Must not know: any
page. Invariants: loopback only, in a network of its own; nothing of this machine is written; nothing outlives the machine.
"""

import base64
import os
import resource
import select
import subprocess
import tempfile
from pathlib import Path

import tools
from tools import CACHE, ROOT, Failed, expect, output, run, say, wait_for

TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target").resolve()
# The hosts of the book. The members have a network of their own (setup.sh), so that every port here is free.
HOSTS = """\
127.0.0.1 localhost etcd.example.com
10.9.0.1 keyward-1.example.com
10.9.0.2 keyward-2.example.com
10.9.0.11 etcd-1.example.com
10.9.0.12 etcd-2.example.com
10.9.0.13 etcd-3.example.com
"""
# The system that boots is this machine's own, without its services: nothing is wanted but the journal.
BOOT = """
set -e
D=$1 ROOT=$2 CACHE=$3 TARGET=$4 R=$1/root
ip link set lo up
mount -t tmpfs -o size=2g tmpfs "$D/layer"
mkdir "$D/layer/upper" "$D/layer/work"
mount -t overlay -o "lowerdir=/,upperdir=$D/layer/upper,workdir=$D/layer/work" overlay "$R"
mount -t proc proc "$R/proc"
mount --bind "$R/proc/sys" "$R/proc/sys"
mount -o remount,bind,ro "$R/proc/sys"
mount -t tmpfs tmpfs "$R/run"
mount -t tmpfs tmpfs "$R/tmp"
chmod 1777 "$R/tmp"
mount -t sysfs -o ro sysfs "$R/sys"
# The second version, whatever this machine uses: without a controller it still keeps the processes of a unit together.
mount -t cgroup2 cgroup2 "$R/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$R/dev"
for device in null zero full random urandom tty; do
  touch "$R/dev/$device"
  mount --bind "/dev/$device" "$R/dev/$device"
done
mkdir "$R/dev/pts" "$R/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$R/dev/pts"
ln -s pts/ptmx "$R/dev/ptmx"
ln -s /proc/self/fd "$R/dev/fd"
touch "$R/dev/console"
for folder in "$ROOT" "$CACHE" "$TARGET"; do
  mkdir -p "$R$folder"
  mount --bind "$folder" "$R$folder"
  mount -o remount,bind,ro "$R$folder"
done
mkdir -p "$R/srv/keyward" "$R/srv/io" "$R/var/lib/etcd"
mount --bind "$D/folder" "$R/srv/keyward"
mount --bind "$D/io" "$R/srv/io"
mount --bind "$D/data" "$R/var/lib/etcd"
rm -rf "$R"/etc/systemd/system/*.wants "$R"/usr/lib/systemd/system/*.wants "$R/var/log/journal" "$R"/etc/haproxy "$R"/etc/keyward
: >"$R/etc/fstab"
cp "$D/hosts" "$R/etc/hosts"
printf '[Unit]\\nWants=systemd-journald.service\\n' >"$R/etc/systemd/system/book.target"
mkdir -p "$R/etc/systemd/system/keyward.service.d" "$R/usr/local/bin"
cp "$D/limits" "$R/etc/systemd/system/keyward.service.d/limits.conf"
touch "$R/usr/local/bin/keyward"
mount --bind "$TARGET/ci/keyward" "$R/usr/local/bin/keyward"
cp -P "$D"/bin/* "$R/usr/local/bin/"
echo keyward-1 >"$R/etc/hostname"
cd "$R"
# Not chroot: the kernel gives no user namespace to a process in one, and the unit has PrivateUsers=.
pivot_root . mnt
exec env -i container=keyward-test PATH=/usr/sbin:/usr/bin:/sbin:/bin \\
  sh -c 'cd / && umount --lazy /mnt && exec /lib/systemd/systemd --unit=book.target'
"""


def programs():
    """The programs that the book runs beside those of Debian, by name."""
    newest = output(ROOT / "tests/get-etcd", "--list", "ci").split()[-1]
    folder = Path(subprocess.run([ROOT / "tests/get-etcd", newest], stdout=subprocess.PIPE, text=True, check=True).stdout.strip())
    prometheus = Path(output(ROOT / "tests/get-prometheus").split("\n")[-2])
    found = {name: folder / name for name in ("etcd", "etcdctl")}
    return {**found, "promtool": prometheus / "promtool", "prometheus": prometheus / "prometheus", "helm": tools.helm()}


class Groups:
    """The control groups of the machines: one each, so that no systemd sees the processes of another."""

    def mount(self):
        """In this program's own mount namespace, which takes the mount with it."""
        self.top = Path(tempfile.mkdtemp(prefix="keyward-book-"))
        run("mount", "-t", "cgroup2", "cgroup2", self.top)
        lines = Path("/proc/self/cgroup").read_text().split("\n")
        self.own = self.top / next(line for line in lines if line.startswith("0::")).removeprefix("0::/")

    def unmount(self):
        run("umount", self.top)
        self.top.rmdir()

    def make(self, name):
        group = self.own / name
        group.mkdir()
        return group

    def remove(self, group):
        """The folders of ended processes, from the innermost."""
        for folder, _, _ in os.walk(group, topdown=False):
            wait_for(lambda: remove_folder(folder), f"{folder} is empty")


GROUPS = Groups()


def remove_folder(folder):
    try:
        os.rmdir(folder)
    except OSError:
        return False
    return True


def shown(file):
    return file.read_text(errors="replace") if file.exists() else ""


class Machine:
    def __init__(self, name):
        self.name, self.count, self.ended = name, 0, False
        expect((TARGET / "ci/keyward").exists(), f"no {TARGET}/ci/keyward: cargo build --profile ci --bin keyward")
        self.folder = tempfile.TemporaryDirectory(prefix="keyward-book-")
        self.path = Path(self.folder.name)
        os.chmod(self.path, 0o755)
        for part in ("root", "layer", "io", "data", "bin", "folder/target/release"):
            (self.path / part).mkdir(parents=True)
        (self.path / "hosts").write_text(HOSTS)
        # The unit's limit, or what this sandbox allows.
        files = min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        (self.path / "limits").write_text(f"[Service]\nLimitNOFILE={files}\n")
        for program, place in programs().items():
            (self.path / "bin" / program).symlink_to(place)
        # The folder of the commands is a copy of the repository that they may write to.
        for entry in ROOT.iterdir():
            if entry.name not in (".git", "target"):
                (self.path / "folder" / entry.name).symlink_to(entry)
        (self.path / "folder/target/release/keyward").symlink_to("/usr/local/bin/keyward")

    def __enter__(self):
        self.log = open(self.path / "log", "w+")
        self.group = GROUPS.make(self.path.name)
        options = ["--fork", "--pid", "--mount", "--uts", "--ipc", "--cgroup", "--net", "--kill-child"]
        arguments = [str(self.path), str(ROOT), str(CACHE), str(TARGET)]
        # Into its control group first: the new namespace begins there.
        enter = ["sh", "-c", 'echo $$ >"$0" && exec setpriv --pdeathsig KILL -- unshare "$@"', str(self.group / "cgroup.procs"), *options]
        self.process = subprocess.Popen([*enter, "bash", "-c", BOOT, "boot", *arguments],
                                        stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        self.shell = None
        try:
            self.boot()
        except BaseException:
            self.__exit__()
            raise
        return self

    def boot(self):
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        self.pid = wait_for(lambda: children.read_text().split() or self.is_up(), "the namespaces are there")[0]
        answers = ["nsenter", "--target", self.pid, "--mount", "--pid", "--root", "--wdns=/", "systemctl", "show", "--property=Version"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        wait_for(lambda: subprocess.run(answers, **quiet).returncode == 0 or self.is_up(), "systemd answers")
        report, told = os.pipe()
        self.report = os.fdopen(report)
        spaces = ["--mount", "--uts", "--ipc", "--pid", "--cgroup", "--net", "--root", "--wdns=/srv/keyward"]
        environment = ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "TERM=dumb", "LANG=C.UTF-8",
                       "SYSTEMD_PAGER=", "SYSTEMD_COLORS=0", f"REPORT={told}", f"KEYWARD_BIN={TARGET / 'ci'}"]
        # Its own session: a signal to the shell's jobs reaches nothing of ours.
        self.shell = subprocess.Popen(
            ["nsenter", "--target", self.pid, *spaces, "env", "-i", *environment, "bash", "--noprofile", "--norc"],
            stdin=subprocess.PIPE, stdout=self.log, stderr=self.log, text=True, pass_fds=[told], start_new_session=True)
        os.close(told)
        code, text = self.run(". tests/book/setup.sh", 60)
        expect(code == 0, f"setup.sh: {text}")

    def is_up(self):
        """Nothing yet, or the reason of the end."""
        self.log.seek(0)
        expect(self.process.poll() is None, f"systemd did not boot: {self.log.read()[-2000:]}")

    def send(self, text, how, end):
        self.count += 1
        encoded = base64.b64encode(text.encode()).decode()
        self.shell.stdin.write(f'{how} "$(base64 -d <<<{encoded})" >/srv/io/{self.count} 2>&1 </dev/null {end}\n')
        self.shell.stdin.flush()
        return self.path / "io" / str(self.count)

    def run(self, text, limit):
        """The exit code and the output of a command."""
        if self.ended:
            return None, "the shell has ended"
        # `eval` keeps what the command sets, and survives its faults of grammar.
        file = self.send(text, "eval", "; echo $? >&$REPORT")
        if not select.select([self.report], [], [], limit)[0]:
            self.ended = True
            return None, f"no end within {limit} s: {shown(file)}"
        line = self.report.readline()
        self.ended = not line
        return int(line) if line else None, shown(file)

    def begin(self, text):
        """Starts a command that goes on, as a group of processes; the value is a function that reads its output."""
        file = self.send(text, "setsid bash -c", "& BACKGROUND+=($!)")
        return lambda: shown(file)

    def write(self, name, text):
        code, said = self.run(f"mkdir -p \"$(dirname {name})\" && base64 -d <<<{base64.b64encode(text.encode()).decode()} >{name}", 60)
        if code != 0:
            raise Failed(f"{name} cannot be written: {said}")

    def evidence(self):
        """The last lines of the services' logs."""
        inside = ["nsenter", "--target", self.pid, "--mount", "--pid", "--root", "--wdns=/"]
        ended = subprocess.run([*inside, "journalctl", "--quiet", "--no-pager", "--output=cat", "--lines=15", "--unit=keyward*", "--unit=balancer"], stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=60)
        return [ended.stdout] if ended.stdout else []

    def __exit__(self, *_):
        # The first process of the namespace takes all others with it.
        self.process.kill()
        self.process.wait()
        if self.shell:
            self.shell.kill()
            self.shell.wait()
            self.shell.stdin.close()
            self.report.close()
        self.log.close()
        GROUPS.remove(self.group)
        self.folder.cleanup()
