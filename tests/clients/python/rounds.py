"""The scenario `rounds`: a client that logs in once, holds a watch and a lease, and does one thing of each kind for each SIGUSR2.

It must not know what happens between the rounds. What etcd3 does not do by itself, such as logging in again, is not done here.
"""

import threading
import time

import etcd3
from record import connect, described, emit

LIMIT = 10
TTL = 600


class Values:
    """What a watch has shown, or why it ended."""

    def __init__(self):
        self.changed = threading.Condition()
        self.shown = set()
        self.ended = None

    def called(self, response):
        with self.changed:
            if isinstance(response, Exception):
                self.ended = response
            else:
                self.shown.update(event.value.decode() for event in response.events)
            self.changed.notify_all()

    def wait_for(self, value):
        with self.changed:
            self.changed.wait_for(lambda: value in self.shown or self.ended)
            if self.ended:
                raise self.ended


class Rounds:
    def __init__(self, client, prefix):
        self.client = client
        self.prefix = prefix
        client.put(prefix + "seed", "seed")
        self.lease = client.lease(TTL)
        next(client.refresh_lease(self.lease.id))
        self.watch = Values()
        client.add_watch_callback(prefix + "watched", self.watch.called)

    def new_watch(self):
        values = Values()
        self.client.add_watch_callback(self.prefix + "seed", values.called, start_revision=1)
        values.wait_for("seed")

    def renew(self):
        if next(self.client.refresh_lease(self.lease.id)).TTL <= 0:
            raise etcd3.exceptions.Etcd3Exception("the lease is gone")

    def round(self, number):
        did(number, "watch", lambda: self.watch.wait_for(str(number)))
        did(number, "new watch", self.new_watch)
        did(number, "read", lambda: self.client.get(self.prefix + "seed"))
        did(number, "write", lambda: self.client.put(self.prefix + "written", str(number)))
        did(number, "keepalive", self.renew)
        did(number, "grant", lambda: self.client.lease(TTL))
        emit("round", round=number)


def did(number, op, do):
    """On a thread of its own: the library's calls have no limit, and one that hangs must not hang the rest."""
    outcome = {"code": "Timeout", "message": ""}
    done = threading.Event()

    def guarded():
        try:
            do()
            outcome.update(code="OK")
        except Exception as error:  # the record must say what came, whatever the library throws
            outcome.update(described(error))
        done.set()

    begun = time.monotonic()
    threading.Thread(target=guarded, daemon=True).start()
    done.wait(LIMIT)
    emit("did", round=number, op=op, **dict(outcome), ms=int((time.monotonic() - begun) * 1000))


def run(options, signals):
    rounds = Rounds(connect(options), options.prefix)
    emit("ready")
    number = 0
    while signals.get():
        number += 1
        rounds.round(number)
