"""Starts and stops processes, and reads what the kernel knows about them.

Every process started here is stopped here, by its own process id, also after Ctrl-C or a failure of the script. Where
setpriv exists, the kernel ends the processes if the script itself is killed.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PATIENCE = 30


class Failed(Exception):
    """One line that says what went wrong."""


class Processes:
    """The running processes, in order of their start."""

    def __init__(self, site):
        self.site = site
        self.running = []

    def start(self, name, argv, environment=None):
        """Starts a server whose output goes to NAME.log."""
        log = open(self.site / f"{name}.log", "ab")
        try:
            process = subprocess.Popen(guarded(argv), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       env={**os.environ, **(environment or {})}, cwd=self.site, start_new_session=True)
        finally:
            log.close()
        process.name = name
        self.running.append(process)
        return process

    def start_load(self, argv):
        """Starts a load that takes turns with the script by lines."""
        load = subprocess.Popen(guarded(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True, start_new_session=True)
        load.name = "load"
        self.running.append(load)
        return load

    def stop(self, process):
        if process in self.running:
            self.running.remove(process)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                # Children first: a killed master cannot stop its workers.
                for pid in reversed(family(process.pid)):
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
                process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe:
                pipe.close()

    def stop_all(self):
        for process in reversed(list(self.running)):
            self.stop(process)

    def log_of(self, process):
        path = self.site / f"{process.name}.log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""


def guarded(argv):
    argv = [str(part) for part in argv]
    return ["setpriv", "--pdeathsig", "TERM", "--", *argv] if shutil.which("setpriv") else argv


def free_port(taken=set()):
    """A port of the loopback that no other call has returned."""
    while True:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        if port not in taken:
            taken.add(port)
            return port


def wait_until(condition, process, processes):
    """Waits for a condition of a started process."""
    until = time.monotonic() + PATIENCE
    while not condition():
        if process.poll() is not None:
            raise Failed(f"{process.name} ended by itself:\n{processes.log_of(process)}")
        if time.monotonic() > until:
            raise Failed(f"{process.name} is not ready after {PATIENCE} s:\n{processes.log_of(process)}")
        time.sleep(0.1)


def accepts(port):
    try:
        with socket.create_connection(("127.0.0.1", port), 1):
            return True
    except OSError:
        return False


def family(pid):
    """The process and its descendants."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found.extend(int(child) for child in task.read_text().split())
            except OSError:
                pass
    return found


def cpu_nanoseconds(pid):
    """CPU time of the process and its descendants: the first field of each task's schedstat."""
    total = 0
    for one in family(pid):
        for task in Path(f"/proc/{one}/task").glob("*/schedstat"):
            try:
                total += int(task.read_text().split()[0])
            except OSError:
                pass
    return total


def resident_kib(pid):
    """Resident memory of the process and its descendants."""
    total = 0
    for one in family(pid):
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError as fault:
            raise Failed(f"process {one} of the proxy has ended") from fault
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Rss:"))
    return total


class Machine:
    """Whether the machine does other work than the comparison: /proc/loadavg before, /proc/stat meanwhile."""

    def __init__(self, processes):
        self.processes = processes
        self.load = os.getloadavg()[0]
        self.cores = os.cpu_count() or 1
        self.begin = self.read()

    def read(self):
        first = Path("/proc/stat").read_text().split("\n")[0]
        user, nice, system, _idle, _iowait, _irq, _softirq, steal, *_ = map(int, first.split()[1:])
        own = sum(os.times()[:4])
        for process in self.processes.running:
            for pid in family(process.pid):
                try:
                    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                    own += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                except OSError:
                    pass
        busy = (user + nice + system) / os.sysconf("SC_CLK_TCK")
        return {"at": time.monotonic(), "foreign": busy - own, "steal": steal / os.sysconf("SC_CLK_TCK")}

    def unquiet(self):
        """The reasons why absolute figures of the run cannot be trusted."""
        now = self.read()
        seconds = max(now["at"] - self.begin["at"], 0.001)
        foreign = (now["foreign"] - self.begin["foreign"]) / seconds
        steal = (now["steal"] - self.begin["steal"]) / seconds
        reasons = []
        if self.load > 0.5:
            reasons.append(f"load average {self.load:.1f} before the run")
        if foreign > 0.1:
            reasons.append(f"{foreign:.2f} cores busy with other work during the run")
        if steal > 0.02:
            reasons.append(f"{steal:.2f} cores stolen by the host during the run")
        return reasons
