"""The rows of the table: how each figure is measured, and verified.

A measure returns a dictionary: `cost` (CPU µs of the proxy per call or event, or KiB), `member` (CPU µs of the member),
`whole` (both), `rate` (per second), `p50`, `p99` (µs). A measure raises `Failed` if one answer is wrong or missing.
"""

import json
import re
import statistics
import time
from collections import namedtuple

from processes import Failed, cpu_nanoseconds, resident_kib

Row = namedtuple("Row", "name group site unit fresh measure")

SHAPES = {"1x1": (1, 1), "8x2": (8, 2), "8x8": (8, 8), "64x4": (64, 4)}
SUFFIX = {"canned": "", "etcd": ", etcd"}
SETTLE = 3
LOAD_PATIENCE = 300


def message(*fields):
    """A protobuf message of byte fields, numbered from 1, in a gRPC frame."""
    body = b""
    for number, value in enumerate(fields, 1):
        length, size = b"", len(value)
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        body += bytes([number << 3 | 2]) + length + bytes([size]) + value
    return b"\0" + len(body).to_bytes(4, "big") + body


CALLS = {
    "range": ("/etcdserverpb.KV/Range", message(b"small")),
    "range64k": ("/etcdserverpb.KV/Range", message(b"large")),
    "put": ("/etcdserverpb.KV/Put", message(b"written", b"v" * 256)),
}


class Bench:
    """What all measures share."""

    def __init__(self, options, processes, h2load):
        self.options, self.processes, self.h2load = options, processes, h2load

    # --- Unary calls: h2load

    def h2load_run(self, server, call, shape, requests, times=None):
        """One run of h2load; the seconds. Every answer is counted and has the right length."""
        path, body = CALLS[call]
        file = self.processes.site / f"{call}.body"
        file.write_bytes(body)
        connections, streams = shape
        argv = [self.h2load.path, "-n", requests, "-c", connections, "-m", streams, "-t", 1, "-d", file]
        for header in ("content-type: application/grpc", "te: trailers", "user-agent: grpc-go/1.71.1", "grpc-timeout: 5S"):
            argv += ["-H", header]
        if server.token:
            argv += ["-H", f"token: {server.token}"]
        if times:
            argv += [f"--log-file={times}"]
        process = self.processes.start("h2load", [*argv, f"http://{server.address}{path}"], self.h2load.environment)
        log = self.processes.site / "h2load.log"
        try:
            process.wait(LOAD_PATIENCE)
            said = log.read_text()
        finally:
            self.processes.stop(process)
            log.unlink(missing_ok=True)
        return self.verified_seconds(server, call, requests, said)

    def verified_seconds(self, server, call, requests, said):
        done = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout", said)
        answers = re.search(r"status codes: (\d+) 2xx", said)
        data = re.search(r"\((\d+)\) data", said)
        took = re.search(r"finished in ([\d.]+)(us|ms|s)", said)
        if not (done and answers and data and took):
            raise Failed(f"{server.name}: h2load says: {said[-500:]}")
        if done.groups() != (str(requests), "0", "0", "0") or int(answers.group(1)) != requests:
            raise Failed(f"{server.name}: {done.group(0)}, {answers.group(0)} of {requests}")
        # A refusal has no data. A real etcd's revision, and with it an answer, may grow by some bytes.
        expected = requests * (5 + server.lengths[call])
        slack = 4 * requests if server.site.kind == "etcd" else 0
        if abs(int(data.group(1)) - expected) > slack:
            raise Failed(f"{server.name}: answers of {data.group(1)} bytes instead of {expected}")
        return float(took.group(1)) * {"us": 1e-6, "ms": 1e-3, "s": 1}[took.group(2)]

    def unary(self, server, call, shape):
        connections, streams = shape
        warm = max(500, 2 * connections * streams)
        rate = warm / max(self.h2load_run(server, call, shape, warm), 0.001)
        requests = max(warm, int(rate * self.options.seconds))
        requests -= requests % connections
        times = self.processes.site / "h2load.times" if connections * streams == 1 else None
        before = self.cpu(server)
        seconds = self.h2load_run(server, call, shape, requests, times)
        sample = self.costs(server, before, requests)
        sample["rate"] = requests / seconds
        if times:
            micros = sorted(int(line.split("\t")[2]) for line in times.read_text().splitlines())
            times.unlink()
            sample["p50"], sample["p99"] = micros[len(micros) // 2], micros[len(micros) * 99 // 100]
        self.empty_log(server)
        return sample

    def cpu(self, server):
        member = server.site.member
        own = 0 if server is member else cpu_nanoseconds(server.process.pid)
        return own, cpu_nanoseconds(member.process.pid)

    def costs(self, server, before, count):
        after = self.cpu(server)
        sample = {"member": (after[1] - before[1]) / count / 1000, "whole": (sum(after) - sum(before)) / count / 1000}
        if server is not server.site.member:
            sample["cost"] = (after[0] - before[0]) / count / 1000
        return sample

    def empty_log(self, server):
        """The access log of one figure is not kept for the next."""
        (self.processes.site / f"{server.process.name}.log").open("wb").close()

    # --- Watches: the program of this folder

    def load(self, program, server, *arguments):
        argv = [self.options.folder / "peers", program, "--address", server.address]
        argv += ["--token", server.token] if server.token else []
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

    def lock(self, server):
        rounds = self.options.locks
        load = self.load("lock", server, "--rounds", rounds)
        try:
            self.line(server, load)
            before = self.cpu(server)
            self.turn(load)
            told = self.line(server, load)
            sample = self.costs(server, before, rounds)
            self.turn(load)
        finally:
            self.processes.stop(load)
        sample.update(p50=told["p50_us"], p99=told["p99_us"])
        return sample

    # --- Memory: a proxy of its own for each figure

    def idle(self, server):
        """Three figures of one run: base, per connection, per watch with a stream of its own."""
        if server is server.site.member:
            return {}
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
        return {"base": base, "connection": (connected - base) / connections, "watch": (watched - connected) / watches}


def rows(bench):
    """All rows, in the order of the table. A row before a real etcd says so in its name."""
    options, found = bench.options, []

    def add(name, group, measure, site="canned", unit="µs/call", fresh=False):
        found.append(Row(name, group, site, unit, fresh, measure))

    def calls(call, title, shapes, site):
        for shape in shapes:
            add(f"{title} {shape}{SUFFIX[site]}", "unary", lambda server, s=SHAPES[shape]: bench.unary(server, call, s), site)

    for site in options.behind:
        calls("range", "Range 256 B", ["1x1", "8x8", "64x4"] if options.quick else SHAPES, site)
        if not options.quick:
            calls("put", "Put 256 B", SHAPES, site)
            calls("range64k", "Range 64 KiB", ["1x1", "8x8", "64x4"], site)
    for site in dict.fromkeys(options.behind + ([] if options.quick else ["etcd"])):
        add(f"watch, 1,000 streams{SUFFIX[site]}", "watch", lambda server: bench.fan_out(server, 100, 1), site, "µs/event")
        add(f"watch, 100 per stream{SUFFIX[site]}", "watch", lambda server: bench.fan_out(server, 1, 100), site, "µs/event")
    if not options.quick:
        add("first event, etcd", "first-event", bench.first_event, "etcd", "µs/watch")
        add("Lock and Unlock, etcd", "lock", bench.lock, "etcd", "µs/round")
    add("idle", "idle", bench.idle, unit="KiB", fresh=True)
    return found


def split_idle(samples):
    """The three figures of each idle run as rows of their own."""
    titles = {"base": "idle: process", "connection": "idle: per connection", "watch": "idle: per watch"}
    for peer in list(samples.get("idle", {})):
        for sample in samples["idle"][peer]:
            for key, title in titles.items():
                if key in sample:
                    samples.setdefault(title, {}).setdefault(peer, []).append({"cost": sample[key]})
    samples.pop("idle", None)


def median(values):
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else None


def spread(values):
    """Half the range over the median: ± of the median."""
    values = [value for value in values if value is not None]
    middle = median(values)
    return (max(values) - min(values)) / 2 / middle if middle and len(values) > 1 else None
