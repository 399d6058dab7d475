"""The steps of a run, in their order.

Owns: what each step runs, what a machine must have for it, in which runs it is. Must not know: how a step is shown or counted. A step's name is one
word, so that `tests/run NAME` repeats it.
"""

import hashlib
import json
import os
import re
import subprocess
from dataclasses import dataclass
from typing import Callable

from folder import CACHE, ROOT, TABLES, manifests, tables

PROFILE = ("--profile", "ci", "--locked")
# How tests are built: with the programs of benches, and with planted faults, of which each is off until the simulation's checker is checked.
FEATURES = ("--features", "budget,faults,peers")
CARGO = (*PROFILE, *FEATURES)
EVERY_TEST = ("--workspace", "--all-targets", "--no-run")
# The unit tests of every package.
UNITS = ("--workspace", "--lib")
NEXTEST = ("--cargo-profile", *CARGO[1:])
# How the program and the tests are compiled.
COMPILER = {"RUSTC_WORKSPACE_WRAPPER": str(ROOT / "tests/rustc")}
# The etcd version of a quick run, and what it runs on real servers: one promise of each kind.
QUICK_VERSION = "3.5.35"
QUICK_TESTS = "test(/^(stories|harness_works|expiry|listeners|promotions|proofs|streams)::/)"
QUICK_CLIENTS = ("go",)
# What needs a program of Debian, by the program's row in tests/install: a client, and the tests of the ring with that client.
NEEDS_OF_PROGRAM = {"postgres": ("patroni", "patroni::"), "curl": ("curl", "documented_curl::")}
RINGS = ("touches", "transcoded", "etcd")
CHECKED = ROOT / "tests/checked-dependencies"
# In memory: each the file or the folder of its name.
MEMORY_RINGS = ("tidy", "docs", "cli", "props", "it", "sim")
# What a ring's program is told. The tests of `it`, and the slowest unit tests, mostly wait; what the simulation prints, what happened and how
# often, is a result too.
ARGUMENTS = {"units": ("--test-threads", "6"), "it": ("--test-threads", "6"), "sim": ("--nocapture",)}


@dataclass(frozen=True)
class Step:
    name: str
    about: str
    # Whether it went well, given the run.
    run: Callable
    # Of a first run on two cores; later runs go by their last time.
    minutes: float
    # In which runs: "quick" is a part of "all", and "all" of "full".
    least: str = "all"
    # Steps that must come before, also where somebody names this one.
    after: tuple = ()
    # Whether it leaves a core idle some of the time, as downloads and linkers do, and may run at the same time as its neighbours that do so too.
    is_beside: bool = False


# --- Downloads and tools: after the first run nothing of this needs a network.

def programs(run):
    """Debian's packages, all at once."""
    if run.cannot_install:
        return True
    return run.command("tests/install", "--for", *(step.name for step in run.steps))


def crates(run):
    """Also those of `fuzz/`, so that a lock file that does not fit its manifest is noticed."""
    manifests = ["Cargo.toml", "fuzz/Cargo.toml"]
    return all(run.command("tests/again", f"the crates of {manifest}", "cargo", "fetch", "--locked", "--manifest-path", manifest)
               for manifest in manifests)


def tools(run):
    return run.command("tests/get-tool", "--for", *(step.name for step in run.steps), limit=30)


def tool(name):
    """The path of a tool, which is built where it is missing; none where that fails."""
    done = subprocess.run(["tests/get-tool", name], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip() or None


def servers(run):
    """The etcd servers of this run, and Prometheus."""
    chosen = [QUICK_VERSION] if run.mode == "quick" else subprocess.run(["tests/get-etcd", "--list"], check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    # One after the other: Go compiles on all cores, and two at a time compile twice what they share.
    return all([*(run.command("tests/again", f"etcd {version}", "tests/get-etcd", version, limit=30) for version in chosen),
                run.command("tests/again", "Prometheus", "tests/get-prometheus", limit=30)])


def builds(run):
    found = sorted(ROOT.glob("tests/clients/*/build"))
    assert len(found) > 5, "no client is found"
    return [build for build in found if run.mode != "quick" or build.parent.name in QUICK_CLIENTS]


def clients(run):
    """They wait for the network, and most compile on one core."""
    commands = []
    for build in builds(run):
        client, names = build.parent.name, [[]]
        if "--list" in build.read_text():
            names = [[version] for version in subprocess.run([build, "--list"], check=True, stdout=subprocess.PIPE, text=True).stdout.split()]
        if any(run.lacks(program) and client == needing for program, (needing, _) in NEEDS_OF_PROGRAM.items()):
            run.say(f"{client} is left out")
        else:
            commands += [("tests/again", " ".join([client, *version]), build, *version) for version in names]
    return run.report.side_by_side(commands, limit=30)


# --- What needs no server.

def formatting(run):
    """`fuzz/` is a package of its own."""
    return all([run.command("cargo", "fmt", "--all", "--check"), run.command("cargo", "fmt", "--check", "--manifest-path", "fuzz/Cargo.toml")])


def runner(run):
    return run.command("python3", "-m", "unittest", "discover", "--start-directory", "tests/runner", "--pattern", "check_*.py")


def lints(run):
    """Warnings are faults. A whole run has what tests/rustc found while it built; at full length, and for a person, cargo looks by itself, also at
    the library as it is released."""
    ok = run.is_incremental or linted_in_build(run)
    if run.is_incremental or run.mode == "full":
        features = [FEATURES, *([()] if run.mode == "full" else [])]
        ok = all([ok, *(run.command("cargo", "clippy", *PROFILE, "--workspace", "--all-targets", *chosen, "--", "-D", "warnings") for chosen in features)])
        ok = all([ok, run.mode == "quick" or run.command("cargo", "doc", *PROFILE, "--workspace", "--no-deps", RUSTDOCFLAGS="-D warnings")])
    return ok


def linted_in_build(run):
    ok, faults = warnings("cargo", "test", *CARGO, *EVERY_TEST)
    for fault in faults:
        run.report.keep(fault)
    return ok and not faults


def warnings(*build, **options):
    """What the compiler and its neighbours in tests/rustc said of the crates of a build, each once. cargo keeps it with each crate."""
    done = subprocess.run([*build, "--message-format", "json"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          env={**os.environ, **COMPILER}, **options)
    said = [message["message"] for message in map(json.loads, done.stdout.splitlines()) if message["reason"] == "compiler-message"]
    return done.returncode == 0, list(dict.fromkeys(one["rendered"] for one in said if one["level"] in ("error", "warning")))


def dependencies(run):
    """Advisories need a database from the network that CI does not have: see deny.toml. The rest depends on files alone, and is not checked again
    for the same: to build cargo-deny takes a minute. CHECKED is the digest of those for which it was well."""
    digest = digest_of_dependencies()
    if run.mode != "full" and CHECKED.read_text().strip() == digest:
        run.say(f"the dependencies are those of {CHECKED.relative_to(ROOT)}")
        return True
    program = tool("cargo-deny")
    ok = program is not None and run.command(program, "--log-level", "warn", "check", "bans", "licenses", "sources")
    if ok:
        CHECKED.write_text(f"{digest}\n")
    return ok


def digest_of_dependencies():
    """Of what cargo-deny reads."""
    read = [json.dumps([tables(manifest, (*TABLES, "package", "features")) for manifest in manifests()], sort_keys=True).encode(),
            (ROOT / "Cargo.lock").read_bytes(), (ROOT / "deny.toml").read_bytes()]
    return hashlib.sha256(b"\0".join(read)).hexdigest()


def build(run):
    """Every test of the run at once, so that cargo compiles and links side by side."""
    chosen = EVERY_TEST if run.mode != "quick" else (*UNITS, *(word for ring in ("it", *RINGS[2:]) for word in ("--test", ring)), "--no-run")
    return run.command("cargo", "test", *CARGO, *chosen, limit=60, **COMPILER)


def units(run):
    return run.test(*UNITS, program_arguments=ARGUMENTS["units"], limit=20)


def memory_ring(name):
    def go(run):
        return run.test("--test", name, program_arguments=ARGUMENTS.get(name, ()), limit=90 if name == "sim" else 20)
    return go


def budget(run):
    """No figure depends on the load of the machine. Of the tests' own build; at full length also of one that is optimised as the release."""
    programs = [["--program", run.folder / "ci/canned_exchange"], *([[]] if run.mode == "full" else [])]
    return all([run.command("benches/budget/run", "--check", *program, limit=20) for program in programs])


def fuzz(run):
    return run.command("fuzz/run", "--executions", "10000000", limit=24 * 60)


# --- Real servers and clients.

def checks(run):
    return all([run.command(build, "--check", limit=20) for build in builds(run)])


def ring(name):
    def go(run):
        program = tool("cargo-nextest")
        if program is None:
            return False
        profile = "full" if run.mode == "full" else "ring"
        left_out = "".join(f" - test(/^{tests}/)" for tests in run.left_out_tests())
        chosen = (QUICK_TESTS if run.mode == "quick" else "all()") + left_out
        junit = run.folder / "nextest" / profile / "junit.xml"
        # That of an earlier run would be told as this one's.
        junit.unlink(missing_ok=True)
        ok = run.command(program, "nextest", "run", *NEXTEST, "--profile", profile, "--test", name, "-E", chosen,
                         "--no-tests", "pass" if run.filter else "fail", *run.filter, limit=240 if run.mode == "full" else 45, KEYWARD_TEST_EVIDENCE=run.evidence, **COMPILER)
        run.report.note_tests(junit)
        return ok
    return go


def hygiene(run):
    """No log of the run holds a secret that the run used. Some tests alone may use none, and write none."""
    done = subprocess.run(["tests/hygiene", run.evidence, run.logs / "transcript"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    run.report.keep(done.stdout)
    return done.returncode == 0 or done.returncode == 2 and (run.mode == "quick" or bool(run.filter))


# --- What users install, and read.

def packages(run):
    """Every package is built and used; at full length the release build, its size, a second build, and the ring `it` with musl."""
    full = ["--full"] if run.mode == "full" else []
    return run.command("tests/packages/run", *full, limit=240 if full else 30)


def book(run):
    """At full length also as HTML: the links and anchors of the pages are compared by the ring `docs`."""
    return run.command("tests/book/run", *(["--html"] if run.mode == "full" else []), limit=30)


def page(run):
    return run.command("tests/page/run", limit=20, KEYWARD_BIN=run.folder / "ci")


def demo(run):
    """On the build that the tests made: dev-dependencies add features, without which everything above is compiled again."""
    # The folder of a build goes with the next change of a dependency, and a later run may have no network.
    return run.command("./deploy/demo", "--once", limit=10, KEYWARD_BIN=run.folder / "ci", DEMO_CACHE=CACHE.parent)


ABOUT = {
    "tidy": "the source tree", "docs": "the documents", "cli": "the commands",
    "props": "parsers of received bytes: random inputs and the corpus", "it": "Keyward against scripted members",
    "sim": "simulation: seeds and faults; its checker sees planted faults", "touches": "requests as etcd's own types read them", "transcoded": "JSON as Go's libraries read it",
    "etcd": "real etcd servers and clients",
}

STEPS = [
    Step("format", "rustfmt", formatting, 0.1, "quick"),
    Step("runner", "the tests of tests/run itself", runner, 0.1),
    Step("programs", "installs what Debian has of what the tests use", programs, 2),
    Step("crates", "downloads the crates of Cargo.lock", crates, 0.5, "quick"),
    Step("tools", "builds cargo-nextest, which runs the tests with real servers, and other cargo tools from their crates", tools, 6, "quick", ("crates",), True),
    Step("servers", "etcd of five versions and Prometheus, from the registries of Debian, Python and Go", servers, 4, "quick", is_beside=True),
    Step("clients", "real client libraries of Go, Python, Node, Rust, Erlang; Patroni, collectors", clients, 4, "quick", ("servers",)),
    Step("dependencies", "cargo-deny: licences, sources, bans", dependencies, 0.1, "all", ("crates",)),
    Step("build", "the program and every test", build, 7, "quick", ("crates",)),
    Step("lints", "clippy and rustdoc, warnings are faults", lints, 0.1, "quick", ("crates",)),
    Step("units", "unit tests", units, 0.5, "quick"),
    *(Step(name, ABOUT[name], memory_ring(name), 1, "quick" if name == "it" else "all") for name in MEMORY_RINGS),
    Step("fuzz", "the targets of tests/props under libFuzzer", fuzz, 600, "full"),
    *(Step(name, ABOUT[name], ring(name), 15 if name == "etcd" else 0.5, "quick" if name == "etcd" else "all",
            ("tools", "servers", "clients", "build")) for name in RINGS),
    Step("hygiene", "no log of the run holds a secret that the run used", hygiene, 0.5, "quick", ("etcd",)),
    Step("page", "the status page in Chromium", page, 3, "full", ("programs", "servers", "build")),
    Step("budget", "instructions, copied bytes and allocations of a call", budget, 2, "all", ("programs", "build"), True),
    Step("packages", "every package is built and used", packages, 5, "all", ("programs", "servers", "tools"), True),
    Step("book", "every command of the book and of the README", book, 2, "all", ("programs", "servers", "build"), True),
    Step("checks", "lints and tests of the clients' own code", checks, 1, "all", ("clients",), True),
    Step("demo", "the README's first command", demo, 0.3, "all", ("build",), True),
    # The last: it leaves a program with a bug of ours in the folder.
    Step("mutants", "deliberate bugs in what a policy judges, each of which a test must find", lambda run: run.command("tests/mutants", limit=60), 10, "full"),
]
MODES = ("quick", "all", "full")


def steps_of(mode):
    return [step for step in STEPS if MODES.index(step.least) <= MODES.index(mode)]


def groups(steps, mode):
    """The steps in their order, those together that run at the same time. At full length none do: cargo builds for hours in one folder."""
    grouped = []
    for step in steps:
        last = grouped[-1] if grouped else []
        if last and step.is_beside and last[-1].is_beside and not {one.name for one in last} & set(step.after) and mode != "full":
            last.append(step)
        else:
            grouped.append([step])
    return grouped


def named(name):
    """The step of this name behind what must come before it; none where no step has it."""
    by_name = {step.name: step for step in STEPS}
    if name not in by_name:
        return []
    needed, todo = set(), [name]
    while todo:
        one = todo.pop()
        needed.add(one)
        todo += by_name[one].after
    return [step for step in STEPS if step.name in needed]


def rings_with(name):
    """The test programs that may have a test of this name: "units" and the rings, by the text of the sources."""
    last = name.strip(":").split("::")[-1]
    pattern = re.compile(rf"\b(fn|mod) \w*{re.escape(last)}")
    places = {"units": ROOT / "src", **{ring: ROOT / "tests" / ring for ring in (*MEMORY_RINGS, *RINGS)}}
    return [ring for ring, folder in places.items()
            if any(pattern.search(file.read_text()) for file in [*folder.rglob("*.rs"), *folder.parent.glob(f"{folder.name}.rs")])]
