"""Watches what a spec file names with python-etcd3 and prints what an application saw, one JSON object a line.

It owns the record; it must not know Keyward, and it does not judge: tests/etcd does. Everything about etcd is left to the
library, as it is; the contract of the command line and of the lines is in ../README.md.
"""

import argparse
import json
import os
import queue
import signal
import threading
import time
from importlib import metadata

import etcd3
import grpc
import rounds
from record import connect, described, emit

# Between two tries to open a watch, in seconds.
PAUSE = 0.1
# How long the library may take to send its cancels at the end, in seconds.
FAREWELL = 5

def shown(event):
    """One event as the contract has it. The library gives an event without a previous pair an empty one."""
    previous = None
    if event.prev_mod_revision:
        previous = [event.prev_value.decode(), event.prev_mod_revision, event.prev_create_revision, event.prev_version]
    kind = "put" if isinstance(event, etcd3.events.PutEvent) else "delete"
    own = [event.key.decode(), event.value.decode(), event.mod_revision, event.create_revision, event.version, event.lease]
    return [kind, *own, previous]


class Watch:
    """One watch of the spec, over all its openings."""

    def __init__(self, client, spec, ended):
        self.client = client
        self.spec = spec
        self.ended = ended
        self.name = spec["name"]
        self.next = spec["start_revision"]
        self.id = None

    def unsupported(self):
        if self.spec["fragment"]:
            return "etcd3 0.12.0 has no option for fragments"
        if self.spec["filters"]:
            return "etcd3 0.12.0 assigns filters to a repeated field, which protobuf refuses"
        return None

    def open(self):
        """Opens it at its next revision, again and again until it stands. Not from a callback: that is the library's thread."""
        while True:
            opening = Opening(self)
            try:
                self.id = self.client.add_watch_callback(
                    self.spec["key"],
                    opening.called,
                    range_end=self.spec["range_end"] or None,
                    start_revision=self.next or None,
                    progress_notify=self.spec["progress_notify"],
                    prev_kv=self.spec["prev_kv"],
                )
            except (grpc.RpcError, etcd3.exceptions.Etcd3Exception) as error:
                opening.settle(stands=False)
                emit("error", op="watch", watch=self.name, **described(error))
                time.sleep(PAUSE)
                continue
            emit("created", watch=self.name)
            opening.settle(stands=True)
            return

    def received(self, response):
        if isinstance(response, etcd3.exceptions.RevisionCompactedError):
            self.next = response.compacted_revision
            emit("compacted", watch=self.name, compact_revision=response.compacted_revision)
            self.ended.put(self)
        elif isinstance(response, Exception):
            emit("ended", watch=self.name, **described(response))
            self.ended.put(self)
        elif response.events:
            self.next = response.events[-1].mod_revision + 1
            events = [shown(event) for event in response.events]
            emit("response", watch=self.name, revision=response.header.revision, events=events)
        else:
            emit("progress", watch=self.name, revision=response.header.revision)


class Opening:
    """The callback of one opening. It holds what comes before `created` is printed, and drops what comes for an opening that
    failed: the library may tell one failure both by an exception and by a callback."""

    def __init__(self, watch):
        self.watch = watch
        self.settled = threading.Event()
        self.stands = False

    def settle(self, stands):
        self.stands = stands
        self.settled.set()

    def called(self, response):
        self.settled.wait()
        if self.stands:
            self.watch.received(response)


def run(options, ended):
    client = connect(options)
    with open(options.spec, encoding="utf-8") as file:
        watches = [Watch(client, spec, ended) for spec in json.load(file)["watches"]]
    for watch in watches:
        if why := watch.unsupported():
            emit("unsupported", watch=watch.name, why=why)
        else:
            watch.open()
    emit("ready")
    while watch := ended.get():
        watch.open()
    # The library's queue of requests is short and blocks when its stream is gone.
    farewell = threading.Thread(target=lambda: [client.cancel_watch(w.id) for w in watches if w.id is not None], daemon=True)
    farewell.start()
    farewell.join(FAREWELL)


def main():
    parser = argparse.ArgumentParser(prog="watchers")
    parser.add_argument("scenario", choices=["watchers", "rounds"])
    parser.add_argument("--endpoints", required=True, help="host:port[,host:port]; the first is used")
    parser.add_argument("--user", default="", help="etcd user; none: no login")
    parser.add_argument("--password-file", help="file that holds the user's password")
    parser.add_argument("--cacert", help="CA that signs the server's certificate; TLS where given")
    parser.add_argument("--gzip", action="store_true", help="compress requests with gzip")
    parser.add_argument("--spec", help="what to watch, of watchers")
    parser.add_argument("--prefix", help="where the keys live, of rounds")
    options = parser.parse_args()
    if not (options.spec if options.scenario == "watchers" else options.prefix):
        parser.error("watchers needs --spec, rounds needs --prefix")

    # Before the first thread, so that all of them leave the signal to `sigwait`.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
    ended = queue.SimpleQueue()
    emit("start", client=f"python etcd3 {metadata.version('etcd3')}", unix_ms=int(time.time() * 1000))

    scenario = run if options.scenario == "watchers" else rounds.run

    def guarded():
        try:
            scenario(options, ended)
        except Exception as error:  # the record must say why the program cannot go on, whatever the library throws
            emit("fatal", **described(error))
            os._exit(1)

    worker = threading.Thread(target=guarded, daemon=True)
    worker.start()
    # Each SIGUSR2 is a round; `watchers` gets none.
    while signal.sigwait({signal.SIGTERM, signal.SIGUSR2}) == signal.SIGUSR2:
        ended.put(signal.SIGUSR2)
    ended.put(None)
    worker.join(FAREWELL)
    emit("end")
    os._exit(0)  # the library's thread never ends by itself


if __name__ == "__main__":
    main()
