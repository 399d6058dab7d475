"""One machine of a Patroni cluster: Patroni, and the PostgreSQL that Patroni starts.

It owns the processes of the machine; it must not know etcd, nor Keyward, and it does not judge. PostgreSQL outlives a Patroni that is
killed, so this program adopts what Patroni leaves behind. SIGTERM is a power cut: every process of the machine is killed (SIGKILL),
then this program ends with 0. Where the test process is gone, the kernel sends that SIGTERM.

    node CONFIG.yml
"""

import ctypes
import os
import pathlib
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def parents():
    """The parent of every process of this system."""
    found = {}
    for folder in pathlib.Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text()
        except OSError:
            continue
        # The name of a program stands in brackets and may hold anything.
        state, parent = stat.rpartition(")")[2].split()[:2]
        if state != "Z":
            found[int(folder.name)] = int(parent)
    return found


def descendants():
    """Every living process below this one."""
    all_parents, found = parents(), {os.getpid()}
    while True:
        more = {child for child, parent in all_parents.items() if parent in found} - found
        if not more:
            return found - {os.getpid()}
        found |= more


def power_cut(*_):
    """Kills everything below this process, then this process ends."""
    while left := descendants():
        for process in left:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
    os._exit(0)


def main():
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    signal.signal(signal.SIGTERM, power_cut)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1) or libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM) or os.getppid() != parent:
        sys.exit("node: the kernel does not give this process its children, or the test is gone")
    patroni = subprocess.Popen([sys.executable, "-m", "patroni", sys.argv[1]], stdin=subprocess.DEVNULL)
    while True:
        child, status = os.wait()
        if child == patroni.pid:
            print(f"node: Patroni ended by itself: {os.waitstatus_to_exitcode(status)}", flush=True)
            power_cut()


if __name__ == "__main__":
    main()
