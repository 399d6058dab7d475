"""The figures of the loads of this folder's program: watches, locks, queues, leases, logins, fairness, memory."""

import json
import os
import re
import time
import urllib.request

from measures import LOAD_PATIENCE, Bench, Parts
from processes import Failed, family, resident_kib

SETTLE = 3
# The loads that log in themselves.
LOGS_IN = ["login"]
# Streams of the greedy connection, fewer than every proxy's limit, and its calls per second. h2load sends those of 10 ms
# at once.
GREEDY_STREAMS, GREEDY_RATE = 1000, 50_000
# Seconds of the greedy client before the polite calls, and after the time when the last polite call is due.
GREEDY_BEFORE, GREEDY_AFTER = 0.5, 1.5


class Loads(Bench):
    """The measures that need more than h2load."""

    def load(self, program, server, *arguments):
        argv = [self.options.folder / "peers", program, "--address", server.address]
        argv += ["--token", server.token] if server.token and program not in LOGS_IN else []
        return self.processes.start_load([*argv, *arguments])

    def member_arguments(self, server):
        member = server.site.member
        token = ["--member-token", member.token] if member.token else []
        return ["--member", member.address, *token]

    def line(self, server, load):
        said = load.stdout.readline()
        if not said:
            raise Failed(f"{server.name}: {load.stderr.read().strip()}")
        return json.loads(said)

    def turn(self, load):
        load.stdin.write("\n")
        load.stdin.flush()

    def one_turn(self, server, count, program, *arguments):
        """The sample of a load that works in a single turn, on `count` calls."""
        load = self.load(program, server, *arguments)
        try:
            self.line(server, load)
            before = self.cpu(server)
            self.turn(load)
            told = self.line(server, load)
            sample = self.costs(server, before, count)
            self.turn(load)
            self.wait_for_success(server, load)
        finally:
            self.processes.stop(load)
        sample.update(p50=told["p50_us"], p99=told["p99_us"])
        if "seconds" in told:
            sample["rate"] = count / told["seconds"]
        return sample

    def wait_for_success(self, server, load):
        if load.wait(LOAD_PATIENCE) != 0:
            raise Failed(f"{server.name}: {load.stderr.read().strip()}")

    # --- Watches

    def fan_out(self, server, streams, watches):
        load = self.load("fan-out", server, *self.member_arguments(server), "--streams", streams, "--watches", watches,
                         "--puts", self.options.puts)
        try:
            self.line(server, load)
            before = self.cpu(server)
            self.turn(load)
            told = self.line(server, load)
            expected = 10 * streams * watches * self.options.puts
            if told["events"] != expected:
                raise Failed(f"{server.name}: {told['events']} events instead of {expected}")
            sample = self.costs(server, before, told["events"])
            self.turn(load)
        finally:
            self.processes.stop(load)
        sample.update(rate=told["events"] / told["seconds"], p50=told["p50_us"], p99=told["p99_us"])
        return sample

    def first_event(self, server):
        load = self.load("first-event", server, *self.member_arguments(server), "--watches", self.options.first_events)
        try:
            before = self.cpu(server)
            told = self.line(server, load)
            sample = self.costs(server, before, self.options.first_events)
        finally:
            self.processes.stop(load)
        sample.update(p50=told["p50_us"], p99=told["p99_us"])
        return sample

    # --- Locks, queues, leases

    def lock(self, server):
        return self.one_turn(server, self.options.locks, "lock", "--rounds", self.options.locks)

    def queue(self, server):
        return self.one_turn(server, self.options.queue, "queue", "--rounds", self.options.queue)

    def keepalive(self, server):
        rounds = self.options.keepalives
        return self.one_turn(server, 1000 * rounds, "keepalive", "--connections", 10, "--leases", 100,
                             "--rounds", rounds)

    # --- Logins: a proxy of its own for each figure, so that the proxy does not know the password yet

    def login(self, server):
        """All clients of one user log in at once. Without a proxy fewer clients: etcd needs a bcrypt for each."""
        member = server.site.member
        clients = 100 if server is member else 1000
        before = authentications(member)
        sample = self.one_turn(server, clients, "login", "--login", server.site.storm_login, "--clients", clients,
                               "--at-once", clients)
        reached = authentications(member) - before
        title = f"{clients:,} logins of one user"
        return Parts({title: {**sample, "unit": "µs/login"},
                      f"{title}: until all are served": {"cost": clients / sample["rate"], "unit": "s"},
                      f"{title}: at the member": {"cost": reached, "unit": "calls"}})

    # --- Fairness: polite calls alone, then beside a greedy connection

    def fairness(self, server):
        cores = os.sched_getaffinity(0)
        own_core = {max(cores)}
        rest = cores - own_core or cores
        member = server.site.member.process.pid
        pids = {server.process.pid, member}
        try:
            for pid in pids:
                pin(pid, rest)
            pin(server.process.pid, own_core)
            if server.process.pid != member:
                prefer(member)
            # The loads inherit the cores of the script.
            os.sched_setaffinity(0, rest)
            return self.polite_and_greedy(server)
        finally:
            os.sched_setaffinity(0, cores)
            prefer(member, os.SCHED_OTHER)
            for pid in pids:
                pin(pid, cores)

    def polite_and_greedy(self, server):
        seconds, greedy, load = self.options.fairness, None, None
        try:
            load = self.load("polite", server, "--millis", int(1000 * seconds))
            self.line(server, load)
            prefer(load.pid)
            self.turn(load)
            alone = self.line(server, load)
            greedy_seconds = GREEDY_BEFORE + seconds + GREEDY_AFTER
            before, began = self.cpu(server), time.monotonic()
            greedy = self.start_h2load("greedy", server, "range", "-c", 1, "-m", GREEDY_STREAMS, "--rps", GREEDY_RATE,
                                       "-D", f"{int(1000 * greedy_seconds)}ms")
            time.sleep(GREEDY_BEFORE)
            self.turn(load)
            beside = self.line(server, load)
            report = self.report_of(greedy)
            elapsed = time.monotonic() - began
            member_cores = (self.cpu(server)[1] - before[1]) / 1e9 / elapsed
            calls = self.greedy_calls(server, report)
            sample = self.costs(server, before, calls + beside["calls"])
            self.turn(load)
            self.wait_for_success(server, load)
        finally:
            for process in filter(None, (load, greedy)):
                self.processes.stop(process)
            self.empty_log(server)
        if server is not server.site.member and member_cores > 0.95:
            raise Failed(f"{server.name}: the member was saturated ({member_cores:.2f} cores)")
        return Parts({
            "greedy connection": {**sample, "rate": calls / greedy_seconds, "member_cores": member_cores,
                                  "unit": "µs/call"},
            "polite calls, alone": polite(alone),
            "polite calls, beside": polite(beside),
            "polite calls: p99, beside × alone": {"cost": beside["p99_us"] / alone["p99_us"], "unit": "×"}})

    def greedy_calls(self, server, report):
        """Number of answers to the greedy connection, verified as all of h2load's answers."""
        self.verified_seconds(server, "range", None, report, under_way=GREEDY_STREAMS)
        return int(re.search(r"(\d+) succeeded", report).group(1))

    # --- Memory: a proxy of its own for each figure

    def idle(self, server):
        """Three figures of one run: base, per connection, per watch with a stream of its own."""
        if server is server.site.member:
            return Parts()
        time.sleep(SETTLE)
        resident = [resident_kib(server.process.pid)]
        connections, watches = self.options.idle
        load = self.load("idle", server, "--connections", connections, "--watches", watches)
        try:
            for _ in range(2):
                self.line(server, load)
                time.sleep(SETTLE)
                resident.append(resident_kib(server.process.pid))
                self.turn(load)
        finally:
            self.processes.stop(load)
        base, connected, watched = resident
        figures = {"process": base, "per connection": (connected - base) / connections,
                   "per watch": (watched - connected) / watches}
        return Parts({f"idle: {title}": {"cost": kib, "unit": "KiB"} for title, kib in figures.items()})


def authentications(member):
    """Number of Authenticate calls that the member has handled, by etcd's own metric."""
    with urllib.request.urlopen(f"http://{member.address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.findall(r'^grpc_server_handled_total\{[^}]*grpc_method="Authenticate"[^}]*\} (\S+)$', text, re.MULTILINE)
    if not found:
        raise Failed("the member counts no Authenticate")
    return int(sum(map(float, found)))


def polite(told):
    return {"rate": told["calls"] / told["seconds"], "p50": told["p50_us"], "p99": told["p99_us"], "unit": "-"}


def pin(pid, cores):
    """Restricts a process with all of its threads and descendants to `cores`."""
    for_each_thread(pid, lambda thread: os.sched_setaffinity(thread, cores))


def prefer(pid, policy=os.SCHED_FIFO):
    """Lets a process run before all others of its core, where this script may decide that (root); or no longer."""
    try:
        for_each_thread(pid, lambda thread: os.sched_setscheduler(
            thread, policy, os.sched_param(0 if policy == os.SCHED_OTHER else 1)))
    except PermissionError:
        pass


def for_each_thread(pid, change):
    """Calls `change` for every thread of a process and of its descendants."""
    for one in family(pid):
        for thread in os.listdir(f"/proc/{one}/task"):
            try:
                change(int(thread))
            except ProcessLookupError:
                pass
