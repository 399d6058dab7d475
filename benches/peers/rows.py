"""The rows of the table, in their order. A row before a real etcd says so in its name."""

from collections import namedtuple

# `fresh`: each figure has a started proxy of its own. `peers`: the proxies measured, and `direct`.
Row = namedtuple("Row", "name group site unit fresh peers measure")

SHAPES = {"1x1": (1, 1), "8x2": (8, 2), "8x8": (8, 8), "64x4": (64, 4)}
SUFFIX = {"canned": "", "etcd": ", etcd"}
GROUPS = ["unary", "tls", "watch", "first-event", "lock", "queue", "keepalive", "login", "fairness", "idle"]
# The proxies that end TLS in this comparison.
WITH_TLS = ["bare", "keyward", "keyward-nolog", "keyward-logall", "envoy", "nginx", "haproxy"]
# grpc-proxy answers keepalives on a schedule of its own, at thirds of the TTL: a round would last longer than a lease.
PASSING_KEEPALIVES = ["direct", *WITH_TLS, "gateway"]


class RowList(list):
    """The rows of the chosen groups."""

    def __init__(self, options):
        super().__init__()
        self.options = options

    def add(self, name, group, measure, site="canned", unit="µs/call", fresh=False, peers=None):
        chosen = [peer for peer in ["direct", *self.options.peers]
                  if (peers is None or peer in peers) and (group == "watch" or peer != "keyward-unshared")]
        if group in self.options.rows:
            self.append(Row(name, group, site, unit, fresh, chosen, measure))

    def is_whole(self, group):
        """True if the slow rows of the group are measured: with --quick only those of a group named by --rows."""
        return not self.options.quick or group in self.options.named


def rows(bench):
    found = RowList(bench.options)
    add_unary(found, bench)
    add_streams(found, bench)
    if found.is_whole("login"):
        found.add("logins of one user", "login", bench.login, "etcd-auth", "µs/login", fresh=True,
                  peers=["direct", "keyward"])
    if found.is_whole("fairness"):
        found.add("beside a greedy connection", "fairness", bench.fairness)
    found.add("idle", "idle", bench.idle, unit="KiB", fresh=True)
    return found


def add_unary(found, bench):
    options = bench.options

    def calls(call, title, shapes, site, group="unary", peers=None):
        for shape in shapes:
            found.add(f"{title} {shape}{SUFFIX.get(site, '')}", group,
                      lambda server, s=SHAPES[shape]: bench.unary(server, call, s), site, peers=peers)

    for site in options.behind:
        calls("range", "Range 256 B", ["1x1", "8x8", "64x4"] if options.quick else SHAPES, site)
        if not options.quick:
            calls("put", "Put 256 B", SHAPES, site)
        calls("range64k", "Range 64 KiB", ["8x8"] if options.quick else ["1x1", "8x8", "64x4"], site)
    if "etcd" not in options.behind and not options.quick:
        calls("range", "Range 256 B", ["8x8", "64x4"], "etcd")
        calls("put", "Put 256 B", ["8x8"], "etcd")
    if "etcd" in options.behind or not options.quick:
        calls("serializable", "serializable Range 256 B", ["8x8"], "etcd")
    if found.is_whole("tls"):
        calls("range", "TLS, Range 256 B", ["8x8", "64x4"], "tls", "tls", WITH_TLS)


def add_streams(found, bench):
    options, add = bench.options, found.add
    for site in dict.fromkeys(options.behind + ([] if options.quick else ["etcd"])):
        for title, streams, watches in [("watch, 1,000 streams", 100, 1), ("watch, 100 per stream", 1, 100)]:
            add(f"{title}{SUFFIX[site]}", "watch",
                lambda server, s=streams, w=watches: bench.fan_out(server, s, w), site, "µs/event")
    for group, name, measure, unit in [("first-event", "first event", bench.first_event, "µs/watch"),
                                       ("lock", "Lock and Unlock", bench.lock, "µs/round"),
                                       ("queue", "queue round trip", bench.queue, "µs/round")]:
        if found.is_whole(group):
            add(f"{name}, etcd", group, measure, "etcd", unit)
    for site in ["canned"] + (["etcd"] if found.is_whole("keepalive") else []):
        add(f"keepalives, 1,000 leases{SUFFIX[site]}", "keepalive", bench.keepalive, site, "µs/keepalive",
            peers=PASSING_KEEPALIVES)
