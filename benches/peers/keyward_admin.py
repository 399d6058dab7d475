"""A started Keyward: its configuration with raised limits, and its own figures.

Must not know: any load. Invariant: only the limits that a caller names differ from the configuration of the comparison.
"""

import re
import tomllib
import urllib.request

from processes import Failed, free_port, wait_until
from proxies import Server, start_keyward

METRIC = re.compile(r"^keyward_(\w+)(?:\{.*\})? (\S+)$", re.MULTILINE)


def start(site, limits=None, shards=1, further=""):
    """Starts a Keyward of `site` with `limits`, keys of the table [limits], and `further` lines, and verifies its answers."""
    site.started += 1
    unique, port = f"keyward-{site.kind}-{site.started}", free_port()
    argv, environment, ready = start_keyward(site, unique, port)
    path = config_path(site, unique)
    lines = "".join(f"{key} = {value}\n" for key, value in (limits or {}).items())
    text = path.read_text().replace("shards = 1\n", f"shards = {shards}\n")
    path.write_text(text + (f"\n[limits]\n{lines}" if lines else "") + f"\n{further}")
    process = site.processes.start(unique, argv, environment)
    server = Server("keyward", process, port)
    server.site = site
    wait_until(ready, process, site.processes)
    site.verify(server)
    return server


def config_path(site, unique):
    return site.processes.site / f"{unique}.toml"


def read_metrics(server):
    """The text of /metrics of a started Keyward."""
    config = tomllib.loads(config_path(server.site, server.process.name).read_text())
    try:
        with urllib.request.urlopen(f"http://{config['admin']['address']}/metrics", timeout=10) as answer:
            return answer.read().decode()
    except OSError as fault:
        raise Failed(f"{server.name}: no metrics: {fault}") from fault


def metrics(server):
    """The metrics without the prefix, as a dictionary; the series of one metric are summed."""
    found = {}
    for name, value in METRIC.findall(read_metrics(server)):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def lost_records(server):
    """The records of the log dropped because nobody took them."""
    return int(metrics(server).get("log_records_lost_total", 0))


def per_member(server, metric):
    """The values of one metric by member."""
    values = re.findall(rf"^keyward_{metric}\{{.*\}} (\S+)$", read_metrics(server), re.MULTILINE)
    return [float(value) for value in values]
