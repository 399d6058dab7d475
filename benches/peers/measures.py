"""Unary calls by h2load: the figures, and the verification of h2load's report.

A sample is a dictionary: `cost` (CPU µs of the proxy per call or event, or KiB), `member` (CPU µs of the member),
`whole` (both), `rate` (per second), `p50`, `p99` (µs). A measure returns a sample, or `Parts`; a measure raises
`Failed` if one answer is wrong or missing.
"""

import re

from processes import Failed, cpu_nanoseconds

LOAD_PATIENCE = 300
HEADERS = ("content-type: application/grpc", "te: trailers", "user-agent: grpc-go/1.71.1", "grpc-timeout: 5S")
# Every proxy with TLS must agree with h2load on this protocol and cipher, so that all encrypt alike.
TLS = ("TLSv1.3", "TLS_AES_128_GCM_SHA256")
# Field 7 of a RangeRequest, `serializable`, set to true.
SERIALIZABLE = b"\x38\x01"


class Parts(dict):
    """Several samples of one measure, by the title of their rows; each sample names its `unit`."""


def message(*fields, end=b""):
    """A protobuf message of byte fields, numbered from 1, and the encoded fields `end`, in a gRPC frame."""
    body = b""
    for number, value in enumerate(fields, 1):
        length, size = b"", len(value)
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        body += bytes([number << 3 | 2]) + length + bytes([size]) + value
    body += end
    return b"\0" + len(body).to_bytes(4, "big") + body


CALLS = {
    "range": ("/etcdserverpb.KV/Range", message(b"small")),
    "serializable": ("/etcdserverpb.KV/Range", message(b"small", end=SERIALIZABLE)),
    "range64k": ("/etcdserverpb.KV/Range", message(b"large")),
    "put": ("/etcdserverpb.KV/Put", message(b"written", b"v" * 256)),
}
# The call with answers as long as this call's, where src/check.rs does not make the call itself.
LENGTHS = {"serializable": "range"}


class Bench:
    """What all measures share."""

    def __init__(self, options, processes, h2load):
        self.options, self.processes, self.h2load = options, processes, h2load

    # --- Unary calls: h2load

    def start_h2load(self, name, server, call, *load):
        """A started h2load whose report goes to NAME.log."""
        path, body = CALLS[call]
        file = self.processes.site / f"{call}.body"
        file.write_bytes(body)
        argv = [self.h2load.path, *load, "-t", 1, "-d", file]
        for header in HEADERS:
            argv += ["-H", header]
        if server.token:
            argv += ["-H", f"token: {server.token}"]
        if server.authority:
            argv += [f"--tls13-ciphers={TLS[1]}"]
        scheme = "https" if server.authority else "http"
        return self.processes.start(name, [*argv, f"{scheme}://{server.address}{path}"], self.h2load.environment)

    def report_of(self, process):
        """What an h2load has printed, after its end."""
        log = self.processes.site / f"{process.name}.log"
        try:
            process.wait(LOAD_PATIENCE)
            return log.read_text()
        finally:
            self.processes.stop(process)
            log.unlink(missing_ok=True)

    def h2load_run(self, server, call, shape, requests, times=None):
        """One run of h2load; the seconds. Every answer is counted and has the right length."""
        connections, streams = shape
        load = ["-n", requests, "-c", connections, "-m", streams]
        load += [f"--log-file={times}"] if times else []
        said = self.report_of(self.start_h2load("h2load", server, call, *load))
        if server.authority:
            self.verify_tls(server, said)
        return self.verified_seconds(server, call, requests, said)

    def verify_tls(self, server, said):
        named = [re.search(f"{what}: (.+)", said) for what in ("TLS Protocol", "Cipher", "Application protocol")]
        agreed = tuple(found and found.group(1) for found in named)
        if agreed != (*TLS, "h2"):
            raise Failed(f"{server.name}: TLS with {agreed}, not {TLS}")

    def verified_seconds(self, server, call, requests, said, under_way=0):
        """The seconds of a report of `requests` verified answers; `requests` None: of as many as were made.

        `under_way`: the number of further calls, whose answers may have arrived in part.
        """
        done = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout", said)
        answers = re.search(r"status codes: (\d+) 2xx", said)
        data = re.search(r"\((\d+)\) data", said)
        took = re.search(r"finished in ([\d.]+)(us|ms|s)", said)
        if not (done and answers and data and took):
            raise Failed(f"{server.name}: h2load says: {said[-500:]}")
        requests = int(done.group(1)) if requests is None else requests
        is_answered = requests <= int(answers.group(1)) <= requests + under_way
        if done.groups() != (str(requests), "0", "0", "0") or not is_answered:
            raise Failed(f"{server.name}: {done.group(0)}, {answers.group(0)} of {requests}")
        # A refusal has no data. A real etcd's revision, and with it an answer, may grow by some bytes.
        length = 5 + server.lengths[LENGTHS.get(call, call)]
        expected, slack = requests * length, 0 if server.site.is_canned else 4 * requests
        if not expected - slack <= int(data.group(1)) <= expected + slack + under_way * length:
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
