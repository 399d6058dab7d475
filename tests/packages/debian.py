"""The Debian package: its contents; then installed, run by a real systemd, installed again, removed and purged, in a Debian of its own.

Where the machine does not let the test mount, the package is installed and purged in a chroot without systemd; where nothing but root may
enter a chroot, only the contents are checked. Must not know: how the package is built.
"""

import contextlib
import gzip
import io
import os
import resource
import subprocess
import tarfile
import tempfile
from pathlib import Path

from tools import (CONFIGURATION, MOUNTS, OUT, ROOT, debian_root, etcd, expect, free_port, no_chroot, no_mounts, output, package, run, say,
                   version, wait_for)

# Not for us: a distribution's own changelog closes a bug; a static program that may be loaded anywhere looks like a library to lintian.
LINTIAN_EXCEPTIONS = "initial-upload-closes-no-bugs,shared-library-lacks-prerequisites"
# Units that would set the kernel's variables, modules and devices, which are not this Debian's; and logins at a console that is not there.
MASKED = ["systemd-sysctl", "systemd-modules-load", "systemd-remount-fs", "systemd-udevd", "systemd-udev-trigger", "console-getty",
          "systemd-tmpfiles-setup-dev", "systemd-update-utmp", "systemd-update-utmp-runlevel"]
# Boots systemd in the folder $1: in namespaces of processes, mounts, names and control groups, in the network of the test.
BOOT = """
set -e
R=$1
""" + MOUNTS + """
for device in null zero full random urandom tty; do
  touch "$R/dev/$device"
  mount --bind "/dev/$device" "$R/dev/$device"
done
ln -s pts/ptmx "$R/dev/ptmx"
touch "$R/dev/console"
cd "$R"
# Not chroot: the kernel gives no user namespace to a process in one, and the unit has PrivateUsers=.
pivot_root . mnt
exec env -i container=keyward-test PATH=/usr/sbin:/usr/bin:/sbin:/bin \\
  sh -c 'cd / && umount --lazy /mnt && exec /lib/systemd/systemd --unit=multi-user.target'
"""
CLEAN_ENVIRONMENT = ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND=noninteractive"]
EXECUTABLE = "usr/bin/keyward"


class Debian:
    """A Debian below a folder, entered with chroot: no process of it runs, and nothing is mounted."""

    def __init__(self, root):
        self.root = root
        # A device cannot be made everywhere.
        (root / "dev/null").touch()
        (root / "dev/null").chmod(0o666)

    def inside(self, argv):
        return ["chroot", str(self.root), *CLEAN_ENVIRONMENT, *map(str, argv)]

    def __call__(self, *argv, **options):
        return output(*self.inside(argv), **options)

    def code(self, *argv):
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.run(self.inside(argv), timeout=120, **quiet).returncode


class Machine(Debian):
    """A Debian with a running systemd, below a folder."""

    def __init__(self, root):
        self.root = root
        with tempfile.NamedTemporaryFile() as log:
            self.process = subprocess.Popen(
                ["unshare", "--fork", "--pid", "--mount", "--uts", "--ipc", "--cgroup", "--kill-child", "bash", "-c", BOOT, "boot", root],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            try:
                children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
                self.pid = wait_for(lambda: children.read_text().split() or self.ended(log), "the namespaces are there")[0]
                wait_for(lambda: self.code("systemctl", "show", "--property=Version") == 0 or self.ended(log), "systemd answers")
            except BaseException:
                self.stop()
                raise
        # "degraded" where a unit of Debian's own failed, which is not the matter here.
        self.code("systemctl", "is-system-running", "--wait")

    def ended(self, log):
        expect(self.process.poll() is None, f"systemd did not boot: {Path(log.name).read_text()}")

    def inside(self, argv):
        return ["nsenter", "--target", self.pid, "--mount", "--uts", "--ipc", "--pid", "--cgroup", "--root", "--wdns=/",
                *CLEAN_ENVIRONMENT, *map(str, argv)]

    def property(self, name):
        return self("systemctl", "show", "--value", f"--property={name}", "keyward").strip()

    def stop(self):
        # systemd, the first process of its namespace, takes all others with it.
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def debian_folder():
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "debian"
        root.mkdir()
        os.chmod(folder, 0o755)
        run("tar", "--extract", "--file", debian_root(), "--directory", root, "--exclude=./dev/*")
        yield root


@contextlib.contextmanager
def machine():
    with debian_folder() as root:
        for unit in MASKED:
            (root / "etc/systemd/system" / f"{unit}.service").symlink_to("/dev/null")
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if limit < 65536:
            say(f"deb: this sandbox has at most {limit} file descriptors, and so has the unit here")
            (root / "etc/systemd/system/keyward.service.d").mkdir()
            (root / "etc/systemd/system/keyward.service.d/sandbox.conf").write_text(f"[Service]\nLimitNOFILE={limit}\n")
        started = Machine(root)
        try:
            yield started
        except BaseException:
            subprocess.run(started.inside(["journalctl", "--no-pager", "--lines=60"]), stdin=subprocess.DEVNULL)
            raise
        finally:
            started.stop()


def all_files(root):
    """Every path, but for what dpkg, systemd and the programs for users keep about all packages."""
    left_out = {"proc", "sys", "dev", "run", "tmp", "srv", "var/lib/dpkg", "var/log", "var/cache", "var/tmp", "var/lib/systemd/catalog"}
    found = set()
    for folder, folders, files in os.walk(root):
        inside = os.path.relpath(folder, root)
        folders[:] = [name for name in folders if os.path.normpath(os.path.join(inside, name)) not in left_out]
        found.update(os.path.normpath(os.path.join(inside, name)) for name in [*folders, *files])
    # Copies made before a change: passwd- of passwd.
    return {path for path in found if not (path.startswith("etc/") and path.endswith("-"))}


def mode(root, path):
    found = (root / path).stat()
    return f"{found.st_mode & 0o7777:04o} {found.st_uid}:{found.st_gid}"


def put_example_files(root):
    """The certificates, keys and passwords that the example configuration names."""
    folder = root / "etc/keyward"
    (folder / "tls").mkdir()
    run("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30", "-subj", "/CN=test",
        "-addext", "subjectAltName=DNS:etcd.example.com", "-keyout", folder / "tls/server.key", "-out", folder / "tls/server.crt")
    (folder / "tls/etcd-ca.crt").write_bytes((folder / "tls/server.crt").read_bytes())
    (folder / "probe.password").write_text("a password\n")
    run(OUT / "keyward", "keygen", folder / "session.key")
    owner = folder.stat()
    for path in [folder / "tls", *folder.glob("tls/*"), folder / "probe.password", folder / "session.key"]:
        os.chown(path, 0, owner.st_gid)
        path.chmod(0o750 if path.is_dir() else 0o640)
    return [folder / "tls", folder / "probe.password", folder / "session.key"]


def install(debian, name):
    debian("dpkg", "--install", f"/srv/{name}")
    root = debian.root
    user = debian("getent", "passwd", "keyward").strip().split(":")
    group = debian("getent", "group", "keyward").split(":")[2]
    expect(user[3] == group and user[5:] == ["/nonexistent", "/usr/sbin/nologin"], f"the user is {user}")
    modes = {path: mode(root, path) for path in ("usr/bin/keyward", "etc/keyward", "etc/keyward/keyward.toml")}
    wanted = {"usr/bin/keyward": "0755 0:0", "etc/keyward": f"0750 0:{group}", "etc/keyward/keyward.toml": f"0640 0:{group}"}
    expect(modes == wanted, f"modes and owners are {modes}")
    told = debian("systemd-analyze", "verify", "keyward.service")
    expect(told == "", f"systemd-analyze verify: {told}")
    expect(debian.code("systemctl", "is-enabled", "keyward") == 1, "the service is enabled before it is configured")


def check_example(debian):
    as_keyward = ["setpriv", "--reuid=keyward", "--regid=keyward", "--init-groups"]
    debian(*as_keyward, "keyward", "check", "--config", "/etc/keyward/keyward.toml")


def serve(debian, store, name):
    """The service runs, is reloaded, outlives a second installation, stops, and ends with its program."""
    expect(debian.property("ActiveState") == "inactive", "the service runs before it is configured")
    clients = free_port()
    configuration = debian.root / "etc/keyward/keyward.toml"
    configuration.write_text(CONFIGURATION.format(clients=clients, admin=free_port(), etcd=store.url))
    debian("systemctl", "start", "keyward")
    wait_for(lambda: debian.code("keyward", "status") == 0, "keyward status is 0")
    store.use(clients, "from-deb")
    wait_for(lambda: debian.property("StatusText").startswith("serving"), "systemd's status line says serving")
    debian("systemctl", "reload", "keyward")
    written = configuration.read_text()
    before = debian.property("MainPID")
    debian("dpkg", "--install", f"/srv/{name}")
    expect(configuration.read_text() == written, "a second installation changes the configuration")
    wait_for(lambda: debian.property("MainPID") not in ("0", before), "a second installation starts the new program")
    wait_for(lambda: debian.code("keyward", "status") == 0, "keyward status is 0 again")
    store.use(clients, "from-deb-again")
    debian("systemctl", "stop", "keyward")
    ended = (debian.property("Result"), debian.property("ExecMainStatus"))
    expect(ended == ("success", "0"), f"the service stopped with {ended}")
    debian("systemctl", "start", "keyward")
    debian("dpkg", "--remove", "keyward")
    expect(debian.property("ActiveState") == "inactive", "the service outlives its program")


def purge(debian, ours, before):
    root = debian.root
    expect(not (root / "usr/bin/keyward").exists() and (root / "etc/keyward/keyward.toml").exists(), "removed too little or too much")
    for path in ours:
        run("rm", "-r", path)
    debian("dpkg", "--purge", "keyward")
    expect(debian.code("getent", "passwd", "keyward") == 2 and debian.code("getent", "group", "keyward") == 2, "the user is still there")
    left = sorted(all_files(root) - before)
    expect(not left and not before - all_files(root), f"left after the purge: {left}; gone: {sorted(before - all_files(root))}")


def check_contents(deb):
    """Every file is the one that was built, of root and with the mode of its place; the maintainers' scripts are whole."""
    run("lintian", "--allow-root", "--tag-display-limit", "0", "--suppress-tags", LINTIAN_EXCEPTIONS, "--fail-on", "error,warning", deb)
    packed = subprocess.run(["dpkg-deb", "--fsys-tarfile", deb], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        entries = {entry.name.removeprefix("./").rstrip("/"): entry for entry in archive}
        files = {name: archive.extractfile(entry).read() for name, entry in entries.items() if entry.isfile()}
    for name, entry in entries.items():
        wanted = 0o755 if entry.isdir() or name == EXECUTABLE else 0o644
        expect((entry.uid, entry.gid, entry.mode) == (0, 0, wanted) and (entry.isdir() or entry.isfile()),
               f"/{name} has mode {entry.mode:o} and owner {entry.uid}:{entry.gid}")
    documents, built = "usr/share/doc/keyward", OUT / "completions"
    sources = {
        EXECUTABLE: OUT / "keyward", "etc/keyward/keyward.toml": ROOT / "deploy/keyward.toml",
        f"{documents}/examples/config.toml": ROOT / "config.toml", f"{documents}/examples/policy.toml": ROOT / "deploy/policy.toml",
        "usr/share/bash-completion/completions/keyward": built / "keyward.bash", "usr/share/zsh/vendor-completions/_keyward": built / "_keyward",
        "usr/share/fish/vendor_completions.d/keyward.fish": built / "keyward.fish",
        **{f"usr/lib/systemd/system/{unit.name}": unit for unit in (ROOT / "deploy/systemd").iterdir()},
        **{f"usr/share/man/man1/{page.name}.gz": page for page in (OUT / "man").glob("*.1")},
    }
    made = {f"{documents}/copyright", f"{documents}/changelog.Debian.gz"}
    expect(set(files) == {*sources, *made}, f"too many or too few files: {set(files) ^ {*sources, *made}}")
    expect(len(sources) > 30, f"only {len(sources)} files")
    for name, source in sources.items():
        content = gzip.decompress(files[name]) if name.endswith(".gz") else files[name]
        expect(content == source.read_bytes(), f"/{name} is not {source}")
    fields = {name: output("dpkg-deb", "--field", deb, name).strip() for name in ("Version", "Architecture", "Depends")}
    expect(fields == {"Version": f"{version()}-1", "Architecture": "amd64", "Depends": "adduser"}, f"the control file has {fields}")
    with tempfile.TemporaryDirectory() as folder:
        run("dpkg-deb", "--control", deb, folder)
        expect((Path(folder) / "conffiles").read_text().split() == ["/etc/keyward/keyward.toml"], "other configuration files")
        for name in ("postinst", "prerm", "postrm"):
            script = Path(folder) / name
            run("sh", "-n", script)
            text = script.read_text()
            expect("systemd" in text and "#DEBHELPER#" not in text, f"{name} does nothing for the unit:\n{text}")


def check(profile):
    package("deb", profile)
    deb, = OUT.glob("keyward_*_amd64.deb")
    check_contents(deb)
    say(f"deb: {deb.name} is clean for lintian; its files are those that were built, with mode and owner; its scripts are whole")
    if reason := no_chroot():
        say(f"deb: NOT INSTALLED: no chroot here: {reason}")
        return
    if reason := no_mounts():
        with debian_folder() as root:
            use(Debian(root), deb)
        say(f"deb: NOT STARTED: no namespaces and mounts here: {reason}")
        return
    with machine() as debian, etcd() as store:
        use(debian, deb, store)
    say("deb: started by a real systemd: a Put and a Range through it, reload, a second installation, stop with 0")


def use(debian, deb, store=None):
    """Installs the package, runs the service where the Debian has a running systemd, and purges it."""
    (debian.root / "srv" / deb.name).write_bytes(deb.read_bytes())
    before = all_files(debian.root)
    install(debian, deb.name)
    ours = put_example_files(debian.root)
    check_example(debian)
    if store:
        serve(debian, store, deb.name)
    else:
        debian("dpkg", "--remove", "keyward")
    purge(debian, ours, before)
    say("deb: installed in a Debian of its own, checked by systemd-analyze, removed; after the purge no file and no user is left")
