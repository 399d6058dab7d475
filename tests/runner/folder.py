"""The folder of cargo's builds: in the user's cache, so that a dependency is compiled once and not for every checkout.

Owns: the folder's name, its lock, and what is removed. Must not know: steps and tests. Invariants: one folder per compiler, lock file, dependencies
and profiles, so that nothing in it is stale; a run holds the lock of its folder, and only a folder whose lock nobody holds is removed; the artifacts of
our own packages are those of one checkout, because another path gives them other names beside the old ones.
"""

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

try:
    import tomllib
except ImportError:  # before Python 3.11; pip carries the same library
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keyward"
# The tables of a Cargo.toml that decide how a dependency is compiled.
TABLES = ("workspace", "dependencies", "dev-dependencies", "build-dependencies", "target", "profile")
# What decides how our own packages are linted, and cargo does not know.
LINTS = ("tests/rustc", "clippy.toml")
# Runs at the same time, each in a checkout of its own. More share nothing anyway: a machine compiles one at a time.
MOST_FOLDERS = 8


def load(program):
    """A program of Python, whose name has no ending, as a module."""
    loader = importlib.machinery.SourceFileLoader(program.name, str(program))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(program.name, loader))
    loader.exec_module(module)
    return module


def manifests():
    """The manifests of our packages."""
    return [tomllib.loads(file.read_text()) for file in [ROOT / "Cargo.toml", *sorted(ROOT.glob("src/*/Cargo.toml"))]]


def tables(manifest, names):
    """What these tables of a manifest say of others' packages; where our own stand does not matter."""
    found = {name: manifest.get(name) for name in names}
    for name in found:
        if name.endswith("dependencies"):
            found[name] = {package: told for package, told in (found[name] or {}).items() if not package.startswith("keyward")}
    return found


def key():
    """Names what the dependencies are compiled with: compiler, flags, lock file, features and profiles."""
    parts = [
        subprocess.run(["rustc", "-vV"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout,
        os.environ.get("RUSTFLAGS", "").encode(),
        (ROOT / "Cargo.lock").read_bytes(),
        json.dumps([tables(manifest, TABLES) for manifest in manifests()], sort_keys=True).encode(),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def own_names():
    """The crate names of our own packages, as they stand in cargo's file names."""
    listed = subprocess.run(["cargo", "metadata", "--format-version", "1", "--no-deps", "--locked"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    packages = json.loads(listed.stdout)["packages"]
    names = {package["name"] for package in packages} | {target["name"] for package in packages for target in package["targets"]}
    return {form for name in names for form in (name, name.replace("-", "_"))}


def lock_of(folder):
    """Takes the folder's lock; None where somebody holds it."""
    file = open(folder.with_name(f"{folder.name}.lock"), "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def remove_own(folder, names):
    """Removes what was built of our own packages, in every profile and target of this folder; the value is the number of files and folders."""
    artifact = re.compile(rf"(lib)?({'|'.join(map(re.escape, sorted(names)))})-[0-9a-z]{{13,16}}(\..*)?")
    count = 0
    for fingerprints in [*folder.glob("*/.fingerprint"), *folder.glob("*/*/.fingerprint")]:
        profile = fingerprints.parent
        for part in (".fingerprint", "deps", "build", "incremental", "examples"):
            for path in (profile / part).glob("*"):
                if artifact.fullmatch(path.name):
                    remove(path)
                    count += 1
        for path in profile.iterdir():
            if path.is_file() and path.stem.removeprefix("lib") in names:
                remove(path)
                count += 1
    return count


def remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class BuildFolder:
    """The folder that this run builds in, held until the run ends. The environment's CARGO_TARGET_DIR wins, and is left as it is."""

    def __init__(self, say):
        named = os.environ.get("CARGO_TARGET_DIR")
        if named:
            self.path, self.lock = (ROOT / named).resolve(), None
            return
        builds, name = CACHE / "build", key()
        builds.mkdir(parents=True, exist_ok=True)
        for number in range(MOST_FOLDERS):
            self.path = builds / (f"{name}-{number}" if number else name)
            if lock := lock_of(self.path):
                break
        else:
            raise SystemExit(f"run: {MOST_FOLDERS} runs are in {builds}")
        self.lock = lock
        self.path.mkdir(exist_ok=True)
        self.remove_others(builds, name, say)
        self.belong_to_this_checkout(say)

    def remove_others(self, builds, key, say):
        """Removes the folders of other compilers, lock files and profiles, but those that somebody builds in."""
        for other in sorted(builds.iterdir()):
            if other.is_dir() and not other.name.startswith(key) and (lock := lock_of(other)):
                say(f"removing {other}: built with another compiler, lock file or profile")
                shutil.rmtree(other, ignore_errors=True)
                # The lock file stays: somebody may wait for it, and would hold the lock of nothing.
                lock.close()

    def belong_to_this_checkout(self, say):
        """And to its lints, whose findings cargo keeps with the artifacts."""
        owner, lints = self.path / "checkout", hashlib.sha256(b"\0".join((ROOT / file).read_bytes() for file in LINTS))
        ours = f"{ROOT}, lints {lints.hexdigest()[:16]}"
        if owner.exists() and owner.read_text() != ours:
            count = remove_own(self.path, own_names())
            say(f"removed {count} artifacts of our own packages, built for {owner.read_text()}; the dependencies stay")
        owner.write_text(ours)

    def leave_dependencies(self, say):
        """Removes what was built of our own packages: for a checkout that nobody builds in again, as CI's."""
        if self.lock:
            say(f"removed {remove_own(self.path, own_names())} artifacts of our own packages; the dependencies stay in {self.path}")
