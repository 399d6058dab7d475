"""etcd3gw's own tests, and a round of tooz's coordination on top of etcd3gw, against one port on loopback.

It owns running them, several at once since most of them wait; it must not know Keyward, and changes no test. One JSON line for each test:
`id`, `outcome` (`passed`, `failed`, `skipped`) and `detail`; at the end a line with `ran`. The exit code is 0 whatever the outcomes are.

    suite --port PORT [--only WORD]      only the tests of etcd3gw with this word in their names
"""

import argparse
import io
import json
import multiprocessing
import os
import sys
import traceback
import unittest
import uuid

WORKERS = 8
# The longest first: the whole takes as long as the longest.
SLOW = ("watch", "lease", "lock")


def tests(suite):
    for one in suite:
        if isinstance(one, unittest.TestSuite):
            yield from tests(one)
        else:
            yield one


def own_tests():
    modules = ["etcd3gw.tests.test_etcd3gw", "etcd3gw.tests.test_client"]
    return [one.id() for one in tests(unittest.defaultTestLoader.loadTestsFromNames(modules))]


def run(name):
    """Runs one test of the library, in silence: its tests print what they write."""
    sys.stdout = sys.stderr = io.StringIO()
    try:
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromName(name).run(result)
    finally:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    faults = [text for _, text in result.errors + result.failures]
    if faults or result.unexpectedSuccesses or result.testsRun == 0:
        return name, "failed", "\n".join(faults)
    if result.skipped:
        return name, "skipped", result.skipped[0][1]
    return name, "passed", ""


def coordinate(port):
    """A group with two members, and a lock that only one of them has."""
    from tooz import coordination

    url = f"etcd3+http://127.0.0.1:{port}"
    group, lock = uuid.uuid4().hex.encode(), uuid.uuid4().hex.encode()
    one, two = (coordination.get_coordinator(url, name) for name in (b"one", b"two"))
    for member in (one, two):
        member.start(start_heart=False)
    one.create_group(group).get()
    for member in (one, two):
        member.join_group(group, {"of": "tests"}).get()
    assert one.get_members(group).get() == {b"one", b"two"}
    assert two.get_member_capabilities(group, b"one").get() == {"of": "tests"}
    held, wanted = one.get_lock(lock), two.get_lock(lock)
    assert held.acquire(blocking=False) is True
    assert wanted.acquire(blocking=False) is False
    assert one.heartbeat() > 0
    assert held.release() is True
    assert wanted.acquire(blocking=False) is True
    assert wanted.release() is True
    for member in (one, two):
        member.leave_group(group).get()
    assert one.get_members(group).get() == set()
    one.delete_group(group).get()
    for member in (one, two):
        member.stop()


def tooz(port):
    try:
        coordinate(port)
        return "tooz", "passed", ""
    except Exception:
        return "tooz", "failed", traceback.format_exc()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    port = asked.port
    # Where the library's tests look for etcd.
    os.environ |= {"TOOZ_TEST_HTTP_URL": f"http://127.0.0.1:{port}", "TOOZ_TEST_ETCD_PORT": str(port)}
    names = [name for name in own_tests() if asked.only in name]
    names = sorted(names, key=lambda name: not any(word in name for word in SLOW))
    ran = 0
    with multiprocessing.Pool(WORKERS) as pool:
        coordinated = pool.apply_async(tooz, (port,)) if not asked.only else None
        for result in pool.imap_unordered(run, names):
            ran += 1
            print(json.dumps(dict(zip(("id", "outcome", "detail"), result))), flush=True)
        if coordinated:
            ran += 1
            print(json.dumps(dict(zip(("id", "outcome", "detail"), coordinated.get()))), flush=True)
    print(json.dumps({"ran": ran}), flush=True)


if __name__ == "__main__":
    main()
