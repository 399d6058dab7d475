"""The tests of tests/run: what it removes, what it counts, how it finds what a name means."""

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent))
import folder
import report
import steps

TESTS = Path(__file__).resolve().parents[1]


class Folder(unittest.TestCase):
    def setUp(self):
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.place = Path(made.name)

    def make(self, *names):
        for name in names:
            path = self.place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def left(self):
        return sorted(str(path.relative_to(self.place)) for path in self.place.rglob("*") if path.is_file())

    def test_removes_our_own_artifacts_and_no_dependency(self):
        own = ["ci/.fingerprint/keyward-0123456789abcdef/lib", "ci/deps/libkeyward-0123456789abcdef.rlib", "ci/deps/it-0123456789abcdef",
               "ci/deps/it-0123456789abcdef.d", "ci/incremental/it-0abcdefghijkl/s/dep", "ci/build/keyward-0123456789abcdef/out/a", "ci/keyward",
               "x86_64-unknown-linux-gnu/ci/.fingerprint/keyward-0123456789abcdef/lib", "x86_64-unknown-linux-gnu/ci/deps/keyward-0123456789abcdef"]
        kept = ["ci/deps/libitoa-0123456789abcdef.rlib", "ci/deps/it_is-0123456789abcdef", "ci/.fingerprint/itertools-0123456789abcdef/lib",
                "ci/build/keyward_other-0123456789abcdef/out/a", "checkout", "x86_64-unknown-linux-gnu/ci/deps/libtokio-0123456789abcdef.rlib"]
        self.make(*own, *kept)
        self.assertEqual(folder.remove_own(self.place, {"keyward", "it"}), len(own))
        self.assertEqual(self.left(), sorted(kept))

    def test_names_of_our_own_packages_are_those_of_cargo(self):
        self.assertLessEqual({"keyward", "stale_watch", "it", "etcd", "hot_path"}, folder.own_names())

    def test_a_folder_of_another_lock_file_is_removed_unless_somebody_builds_in_it(self):
        environment = {**os.environ, "XDG_CACHE_HOME": str(self.place)}
        environment.pop("CARGO_TARGET_DIR", None)
        builds = self.place / "keyward/build"
        self.make("keyward/build/old/a", "keyward/build/in-use/a")
        held = folder.lock_of(builds / "in-use")
        self.addCleanup(held.close)
        program = f"import sys; sys.path.insert(0, {str(TESTS / 'runner')!r}); import folder; print(folder.BuildFolder(lambda _: None).path)"
        made = [Path(subprocess.run([sys.executable, "-B", "-c", program], check=True, env=environment, capture_output=True, text=True).stdout.strip())
                for _ in range(2)]
        self.assertEqual(made[0], made[1], "the same compiler, lock file and profiles: the same folder")
        self.assertEqual({path.name for path in builds.iterdir() if path.is_dir()}, {"in-use", made[0].name})

    def test_a_second_run_at_the_same_time_has_a_folder_of_its_own(self):
        name = self.place / "a"
        first = folder.lock_of(name)
        self.assertIsNone(folder.lock_of(name))
        first.close()
        second = folder.lock_of(name)
        self.assertIsNotNone(second)
        second.close()


class Words(unittest.TestCase):
    LIBTEST = "test a::b ... ok\ntest a::c ... FAILED\n\ntest result: FAILED. 12 passed; 1 failed; 0 ignored; 0 measured;\n"
    NEXTEST = ("        FAIL [   0.050s] ( 1/14) keyward::etcd locks::held\n     TIMEOUT [ 600.002s] ( 2/14) keyward::etcd chaos::calm\n"
               "------------\n     Summary [   2.135s] 14 tests run: 12 passed (1 slow), 1 failed, 1 timed out, 3 skipped\n"
               "        FAIL [   0.050s] ( 1/14) keyward::etcd locks::held\n")

    def test_counts_what_each_runner_prints(self):
        self.assertEqual(report.counts(self.LIBTEST), (12, 1))
        self.assertEqual(report.counts(self.NEXTEST), (12, 2))
        self.assertEqual(report.counts("     Summary [   2.1s] 1 test run: 1 passed, 289 skipped\n"), (1, 0))
        self.assertEqual(report.counts("nothing ran\n"), (0, 0))

    def test_names_each_failed_test_once(self):
        self.assertEqual(report.failed_tests(self.LIBTEST), ["a::c"])
        self.assertEqual(report.failed_tests(self.NEXTEST), ["locks::held", "chaos::calm"])

    def test_reasons_are_panics_or_the_last_lines(self):
        indented = "    thread 'a' panicked at src/a.rs:1:1:\n    left: 1\n    stack backtrace:\n      0: frame\n"
        self.assertEqual(report.reasons(indented), ["    thread 'a' panicked at src/a.rs:1:1:", "    left: 1"])
        text = "noise\nthread 'a' panicked at src/a.rs:1:1:\nleft: 1\nstack backtrace:\n  0: frame\n" + "more\n" * 40
        self.assertEqual(report.reasons(text), ["thread 'a' panicked at src/a.rs:1:1:", "left: 1"])
        self.assertEqual(report.reasons("a\n" * 50 + "error\n")[-1], "error")

    def test_commands_side_by_side_are_each_shown_whole_and_the_one_that_fails_is_noticed(self):
        with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()) as shown:
            # Each waits for the other's file: they do run at the same time, where there are two cores.
            both = "echo {0} begins; touch {1}/{0}; until test -e {1}/{2}; do sleep 0.01; done; echo {0} ends"
            commands = [("sh", "-c", both.format(one, place, other)) for one, other in (("a", "b"), ("b", "a"))]
            shows = report.Report(place, report.Times(Path(place, "times")), "all")
            shows.of_thread.output, shows.of_thread.shows = [], True
            if len(os.sched_getaffinity(0)) > 1:
                self.assertTrue(shows.side_by_side(commands))
                self.assertEqual(sorted(shows.of_thread.output), ["a begins\na ends\n", "b begins\nb ends\n"])
            self.assertFalse(shows.side_by_side([("true",), ("sh", "-c", "echo why; exit 3")]))
        self.assertIn("why\n", shown.getvalue())

    def test_steps_at_the_same_time_are_each_shown_whole_and_the_one_that_fails_is_named(self):
        with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()) as shown:
            both = "echo {0} begins; touch {1}/{0}; until test -e {1}/{2}; do sleep 0.01; done; echo {0} ends; test {0} = a"
            shows = report.Report(place, report.Times(Path(place, "times")), "all")
            if shows.cores == 1:
                return
            pair = [steps.Step(one, "waits", lambda _, text=both.format(one, place, other): shows.command("sh", "-c", text), 1, is_beside=True)
                    for one, other in (("a", "b"), ("b", "a"))]
            groups = steps.groups([steps.Step("first", "is alone", lambda _: shows.command("true"), 1), *pair], "all")
            self.assertEqual([len(group) for group in groups], [1, 2])
            shows.plan(groups, is_whole=True)
            for group in groups:
                shows.group(group, lambda step: step.run(None))
            self.assertFalse(shows.end())
        for text in ("a begins\na ends\n=== [2/3] a: ok", "b begins\nb ends\n=== [3/3] b: FAILED", "failed: b; again with: tests/run b\n", "0 passed, 1 failed"):
            self.assertIn(text, shown.getvalue())
        self.assertEqual(len(steps.groups(pair, "full")), 2)

    def test_a_command_that_fails_once_is_run_again_and_one_that_fails_is_named(self):
        with tempfile.TemporaryDirectory() as place:
            once = f"test -e {place}/there || {{ touch {place}/there; exit 7; }}"
            pause = {**os.environ, "PATH": f"{place}:{os.environ['PATH']}"}
            Path(place, "sleep").write_text("#!/bin/sh\n")
            Path(place, "sleep").chmod(0o755)
            done = subprocess.run([TESTS / "again", "a file", "sh", "-c", once], env=pause, capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stderr.count("a file")), (0, 1))
            done = subprocess.run([TESTS / "again", "a file", "sh", "-c", "exit 7"], env=pause, capture_output=True, text=True)
            self.assertEqual((done.returncode, "a file failed 3 times" in done.stderr), (7, True))


class Mutants(unittest.TestCase):
    def test_each_deliberate_bug_has_its_line_in_the_source(self):
        subprocess.run([TESTS / "mutants", "--check"], check=True)


class Steps(unittest.TestCase):
    def test_steps_have_names_of_one_word_and_need_steps_before_them(self):
        names = [step.name for step in steps.STEPS]
        self.assertEqual(len(names), len(set(names)))
        for number, step in enumerate(steps.STEPS):
            self.assertRegex(step.name, r"^[a-z]+$")
            self.assertLessEqual(set(step.after), set(names[:number]), step.name)

    def test_each_run_has_what_its_steps_need(self):
        for mode in steps.MODES:
            chosen = {step.name for step in steps.steps_of(mode)}
            for step in steps.steps_of(mode):
                self.assertLessEqual(set(step.after), chosen, f"{mode}: {step.name}")

    def test_what_a_build_warns_of_is_found_also_when_nothing_is_built_again(self):
        with tempfile.TemporaryDirectory() as place:
            for name, text in {"Cargo.toml": "[package]\nname = 'faulty'\nedition = '2024'\n[lints.clippy]\nall = 'warn'\n",
                               "src/lib.rs": "//! [`nowhere`]\npub fn one() -> u8 { return 1; }\n", "src/main.rs": "fn main() { let one = 1; }\n"}.items():
                (Path(place) / name).parent.mkdir(exist_ok=True)
                (Path(place) / name).write_text(text)
            environment = {"CARGO_TARGET_DIR": place, "CARGO_INCREMENTAL": "0"}
            with unittest.mock.patch.dict(os.environ, environment):
                found = [steps.warnings("cargo", "test", "--offline", *steps.EVERY_TEST, cwd=place) for _ in range(2)]
        for ok, faults in found:
            self.assertTrue(ok)
            for fault in ("unused variable", "unneeded `return`", "unresolved link to `nowhere`"):
                self.assertTrue(any(fault in one for one in faults), f"{fault}: {faults}")

    def test_a_name_is_a_step_or_a_test(self):
        self.assertEqual([step.name for step in steps.named("packages")], ["programs", "crates", "tools", "servers", "packages"])
        self.assertEqual(steps.named("no such step"), [])
        self.assertEqual(steps.rings_with("mutexes_and_elections_work::"), ["etcd"])
        self.assertIn("it", steps.rings_with("onest_ends"))
        self.assertEqual(steps.rings_with("nothing_is_called_so"), [])

    def test_every_test_program_has_a_step(self):
        there = {path.stem for path in TESTS.glob("*.rs")} | {path.parent.name for path in TESTS.glob("*/main.rs")}
        # The model is a part of `sim` and `etcd`.
        self.assertEqual(there - {"model"}, {*steps.MEMORY_RINGS, *steps.RINGS})

    def test_programs_to_install_are_for_steps_that_exist(self):
        users = {step for row in folder.load(TESTS / "install").PROGRAMS for step in row[2].split()}
        self.assertLessEqual(users, {step.name for step in steps.STEPS})

    def test_tools_to_build_are_for_steps_that_come_behind_them(self):
        users = {step for row in folder.load(TESTS / "get-tool").TABLE for step in row[3]}
        self.assertEqual(users, {step.name for step in steps.STEPS if "tools" in step.after})


if __name__ == "__main__":
    unittest.main()
