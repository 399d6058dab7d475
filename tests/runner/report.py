"""What a run says: where it stands, how long it will take, what failed, and how to repeat that.

Owns: the counts, the times of earlier runs, the transcript. Must not know: what a step does.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

# Lines of a failed step that are shown again at the end, and their length.
REASON_LINES, REASON_WIDTH, PANICS, PANIC_LINES = 30, 800, 10, 12
SLOWEST = 10

LIBTEST = re.compile(r"^test result: .* (\d+) passed; (\d+) failed;", re.MULTILINE)
NEXTEST = re.compile(r"^ *Summary \[.*\] +(?:\d+/)?\d+ tests? run: (\d+) passed([^\n]*)", re.MULTILINE)
NEXTEST_BAD = re.compile(r"(\d+) (?:failed|timed out|exec failed)")
FAILED_TEST = re.compile(
    r"^test (?P<libtest>\S+) \.\.\. FAILED$|^ +(?:FAIL|TIMEOUT|ABORT|SIG[A-Z]+) \[[^\]]*\] +(?:\([^)]*\) +)?\S+ (?P<nextest>\S+)$", re.MULTILINE)


def counts(text):
    """The tests that passed and failed, by what libtest, nextest and our own runners print."""
    passed = failed = 0
    for ok, bad in LIBTEST.findall(text):
        passed, failed = passed + int(ok), failed + int(bad)
    for ok, rest in NEXTEST.findall(text):
        passed, failed = passed + int(ok), failed + sum(map(int, NEXTEST_BAD.findall(rest)))
    return passed, failed


def failed_tests(text):
    """The names of the tests that failed, each once, in their order."""
    return list(dict.fromkeys(found["libtest"] or found["nextest"] for found in FAILED_TEST.finditer(text)))


def reasons(text):
    """The panics in the output of a failed step, without their stacks, or else its last lines."""
    kept, left, panics, lines = [], 0, 0, text.splitlines()
    for line in lines:
        if "panicked at" in line:
            left, panics = PANIC_LINES, panics + 1
        # nextest indents what a test prints.
        if line.lstrip().startswith("stack backtrace:"):
            left = 0
        if left > 0 and panics <= PANICS:
            kept.append(line[:REASON_WIDTH])
        left -= 1
    return kept or [line[:REASON_WIDTH] for line in lines[-REASON_LINES:]]


def test_times(junit):
    """Seconds and name of every test in a JUnit report of nextest."""
    cases = xml.etree.ElementTree.parse(junit).iter("testcase") if junit.exists() else ()
    return [(float(case.get("time") or 0), case.get("name")) for case in cases]


def minutes(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def limit_in_ci(limit):
    """The minutes after which a command is ended: at a terminal none, there is Ctrl-C."""
    return limit if os.environ.get("CI") == "true" else None


class Times:
    """How long each step took the last time, on this machine."""

    def __init__(self, file):
        self.file = file
        try:
            self.known = json.loads(file.read_text())
        except (OSError, ValueError):
            self.known = {}

    def expected(self, step, mode):
        """Seconds, or the step's own estimate for a first run."""
        return self.known.get(f"{mode} {step.name}", step.minutes * 60)

    def note(self, step, mode, seconds):
        self.known[f"{mode} {step.name}"] = round(seconds, 1)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all, whoever ends this run.
        new = self.file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(self.known, indent=1, sort_keys=True) + "\n")
        new.replace(self.file)


class Report:
    """Runs commands, shows and keeps what they print, and sums up."""

    def __init__(self, logs, times, mode):
        self.logs, self.times, self.mode = Path(logs), times, mode
        self.transcript = open(self.logs / "transcript", "a", errors="replace")
        self.passed = self.failed = 0
        self.failures, self.took, self.slowest = [], [], []
        self.cores = len(os.sched_getaffinity(0))
        # What the step of a thread has printed, and whether that is shown as it comes.
        self.of_thread = threading.local()
        self.lock = threading.Lock()
        self.is_interrupted = False

    def say(self, text):
        print(f"run: {text}", flush=True)
        self.transcript.write(f"run: {text}\n")

    def plan(self, groups, is_whole):
        """The steps to come; the times of a run that leaves tests out are those of no other."""
        self.numbers = {step.name: number for number, step in enumerate((step for group in groups for step in group), 1)}
        self.to_come, self.is_whole, self.began = list(groups), is_whole, time.monotonic()
        print(f"run: {len(self.numbers)} steps, some {minutes(self.left())} minutes by the last run; times are minutes:seconds", flush=True)

    def left(self):
        """Seconds to the end."""
        expected = [[self.times.expected(step, self.mode) for step in group] for group in self.to_come]
        return sum(max(max(group), sum(group) / self.cores) for group in expected)

    def group(self, group, run):
        """Runs steps at the same time, as many as cores. Where it is more than one, what each prints is shown whole at its end."""
        if len(group) == 1:
            self.step(group[0], run, shows=True)
        else:
            print(f"=== at the same time: {', '.join(step.name for step in group)}", flush=True)
            with ThreadPoolExecutor(self.cores) as pool:
                running = [pool.submit(self.step, step, run, shows=False) for step in group]
                try:
                    for ended in running:
                        ended.result()
                except KeyboardInterrupt:
                    # The commands under way have the signal too; no other begins.
                    self.is_interrupted = True
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
        self.to_come.remove(group)

    def step(self, step, run, shows):
        """Runs one step. One that fails without a failed test counts as one."""
        title = f"=== [{self.numbers[step.name]}/{len(self.numbers)}] {step.name}"
        print(f"{title}: {step.about} (some {minutes(self.times.expected(step, self.mode))}, {minutes(self.left())} to the end)", flush=True)
        began, self.of_thread.output, self.of_thread.shows = time.monotonic(), [], shows
        try:
            ok = run(step)
        except KeyboardInterrupt:
            if not shows:
                self.show("".join(self.of_thread.output))
            raise
        except (OSError, subprocess.SubprocessError, AssertionError, xml.etree.ElementTree.ParseError) as fault:
            self.keep(f"run: {step.name}: {fault}\n")
            ok = False
        seconds, text = time.monotonic() - began, "".join(self.of_thread.output)
        passed, failed = counts(text)
        tests = f", {passed} passed, {failed} failed" if passed or failed else ""
        with self.lock:
            if not shows:
                self.show(text)
            print(f"{title}: {'ok' if ok else 'FAILED'}{tests}, {minutes(seconds)}", flush=True)
            self.passed, self.failed = self.passed + passed, self.failed + (failed if failed or ok else 1)
            self.took.append((step.name, seconds))
            if ok and self.is_whole:
                self.times.note(step, self.mode, seconds)
            if not ok:
                self.failures.append((step.name, failed_tests(text), reasons(text)))

    def command(self, *argv, limit=None, **environment):
        """Runs a command, shows its output and keeps it for the step; whether it ended with 0. CI ends one that hangs; at a terminal there is Ctrl-C."""
        if self.is_interrupted:
            raise KeyboardInterrupt
        argv = [str(part) for part in argv]
        if limit := limit_in_ci(limit):
            argv = ["timeout", "-k", "10", f"{limit}m", *argv]
        with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                              env={**os.environ, **{name: str(value) for name, value in environment.items()}}) as running:
            try:
                for line in running.stdout:
                    self.keep(line)
            except KeyboardInterrupt:
                # The command has the signal too, and ends in order what it started.
                running.wait()
                raise
        if running.returncode in (124, 137) and argv[0] == "timeout":
            self.keep(f"run: ended after {limit} minutes: {' '.join(argv[4:])}\n")
        return running.returncode == 0

    def side_by_side(self, commands, limit=None):
        """Runs commands, as many at a time as cores, and keeps the output of each whole, as it ends; whether all ended with 0."""
        limit = limit_in_ci(limit)

        def run(argv):
            if self.is_interrupted:
                raise KeyboardInterrupt
            return subprocess.run([str(part) for part in argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                  errors="replace", timeout=limit and limit * 60)

        ok = True
        with ThreadPoolExecutor(self.cores) as pool:
            for running in as_completed([pool.submit(run, argv) for argv in commands]):
                done = running.result()
                self.keep(done.stdout)
                ok = ok and done.returncode == 0
        return ok

    def keep(self, line):
        self.of_thread.output.append(line)
        if self.of_thread.shows:
            self.show(line)

    def show(self, text):
        sys.stdout.write(text)
        sys.stdout.flush()
        self.transcript.write(text)
        self.transcript.flush()

    def note_tests(self, junit):
        self.slowest += test_times(junit)

    def end(self):
        """The last words; whether nothing failed."""
        if self.slowest:
            print("the slowest tests:")
            for seconds, name in sorted(self.slowest, reverse=True)[:SLOWEST]:
                print(f"  {seconds:7.1f} s  {name}")
        print(f"the steps, {minutes(time.monotonic() - self.began)} in all:",
              ", ".join(f"{name} {minutes(seconds)}" for name, seconds in self.took))
        # Once more, and last: what stands far above is cut off where the output of a long run is kept in part.
        for name, tests, why in self.failures:
            print(f"--- {name}", *why, sep="\n")
        for name, tests, _ in self.failures:
            again = f"again with: tests/run{' --full' if self.mode == 'full' else ''} {name}"
            print(f"failed: {name}; {again}")
            for test in tests[:20]:
                print(f"failed: {test}; {again} {test}")
        print(f"{self.passed} passed, {self.failed} failed", flush=True)
        return not self.failed
