"""The scenario `rounds` with aetcd: a client that logs in once, holds a watch and a lease, and does one thing of each kind for each
SIGUSR2.

It owns the record; it must not know Keyward, nor what happens between the rounds, and it does not judge: tests/etcd does. What
aetcd does not do by itself, such as logging in again, is not done here. The contract of the lines is in ../README.md.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from importlib import metadata

import aetcd
import grpc

STARTED = time.monotonic()
LIMIT = 10
TTL = 600


def emit(kind, **fields):
    """Prints one line at once, so that a reader sees it even if the process dies next."""
    print(json.dumps({"t": int((time.monotonic() - STARTED) * 1000), "kind": kind, **fields}), flush=True)


def described(error):
    """Code and text of an error as an application gets them: the library's own exceptions have neither."""
    # The library may wrap etcd's answer.
    for found in (error, error.__cause__, *error.args):
        if isinstance(found, grpc.aio.AioRpcError):
            words = found.code().name.split("_")
            name = {"OK": "OK", "CANCELLED": "Canceled"}.get(found.code().name, "".join(map(str.capitalize, words)))
            return {"code": name, "message": found.details()}
    return {"code": type(error).__name__, "message": str(error)}


class Values:
    """What a watch has shown, or why it ended."""

    def __init__(self):
        self.changed = asyncio.Condition()
        self.shown = set()
        self.ended = None

    async def follow(self, watch):
        try:
            async for event in watch:
                await self.change(self.shown.add, event.kv.value.decode())
            raise aetcd.ClientError("the watch ended without a word")
        except Exception as error:
            await self.change(setattr, self, "ended", error)

    async def change(self, what, *arguments):
        async with self.changed:
            what(*arguments)
            self.changed.notify_all()

    async def wait_for(self, value):
        async with self.changed:
            await self.changed.wait_for(lambda: value in self.shown or self.ended)
            if self.ended:
                raise self.ended


class Rounds:
    def __init__(self, client, prefix):
        self.client = client
        self.key = lambda name: (prefix + name).encode()
        self.watch = Values()

    async def set_up(self):
        await self.client.connect()
        await self.client.put(self.key("seed"), b"seed")
        self.lease = await self.client.lease(TTL)
        await self.renew()
        self.following = asyncio.create_task(self.watch.follow(await self.client.watch(self.key("watched"))))

    async def new_watch(self):
        async for event in await self.client.watch(self.key("seed"), start_revision=1):
            if event.kv.value == b"seed":
                return
        raise aetcd.ClientError("the watch ended without a word")

    async def renew(self):
        answer = await self.lease.refresh()
        if answer is None or answer.TTL <= 0:
            raise aetcd.ClientError("the lease is gone, or its stream ended without a word")

    async def round(self, number):
        await did(number, "watch", self.watch.wait_for(str(number)))
        await did(number, "new watch", self.new_watch())
        await did(number, "read", self.client.get(self.key("seed")))
        await did(number, "write", self.client.put(self.key("written"), str(number).encode()))
        await did(number, "keepalive", self.renew())
        await did(number, "grant", self.client.lease(TTL))
        emit("round", round=number)


async def did(number, op, doing):
    begun = time.monotonic()
    outcome = {"code": "OK", "message": ""}
    try:
        await asyncio.wait_for(doing, LIMIT)
    except asyncio.TimeoutError:
        outcome = {"code": "Timeout", "message": ""}
    except Exception as error:  # the record must say what came, whatever the library throws
        outcome = described(error)
    emit("did", round=number, op=op, **outcome, ms=int((time.monotonic() - begun) * 1000))


async def run(options):
    signals = asyncio.Queue()
    for number in (signal.SIGUSR2, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    host, port = options.endpoints.split(",")[0].rsplit(":", 1)
    with open(options.password_file, encoding="utf-8") as file:
        password = file.read().rstrip("\r\n")
    client = aetcd.Client(host=host, port=int(port), username=options.user, password=password)
    rounds = Rounds(client, options.prefix)
    await rounds.set_up()
    emit("ready")
    number = 0
    while await signals.get() == signal.SIGUSR2:
        number += 1
        await rounds.round(number)


def main():
    parser = argparse.ArgumentParser(prog="rounds")
    parser.add_argument("scenario", choices=["rounds"])
    parser.add_argument("--endpoints", required=True, help="host:port[,host:port]; the first is used, in plaintext")
    parser.add_argument("--user", required=True)
    parser.add_argument("--password-file", required=True, help="file that holds the user's password")
    parser.add_argument("--prefix", required=True, help="where the keys live")
    options = parser.parse_args()
    emit("start", client=f"aetcd {metadata.version('aetcd')}", unix_ms=int(time.time() * 1000))
    try:
        asyncio.run(run(options))
    except Exception as error:
        emit("fatal", **described(error))
        sys.exit(1)
    emit("end")


if __name__ == "__main__":
    main()
