"""Asks each PostgreSQL of a Patroni cluster which role it has, over SQL and over Patroni's REST API, many times a second.

It owns the questions; it must not know etcd, nor Keyward, and it does not judge: tests/etcd does. Each answer is one JSON line with
`node`, `by` (`sql` or `rest`), `from` and `to` (the time before the question and after the answer, in milliseconds of the
clock), and `primary`: true, false, or null where nobody answered. `timeline` is PostgreSQL's, where told.
Before the first line, `kind` is `start`. SIGTERM ends it.

    observe --user USER --password-file FILE NAME=SQL_PORT,REST_PORT...
"""

import argparse
import json
import pathlib
import signal
import sys
import threading
import time
import urllib.error
import urllib.request

import psycopg

PERIOD = 0.1
LIMIT = 2
ENDED = threading.Event()
LOCK = threading.Lock()
QUESTION = "select not pg_is_in_recovery(), (select timeline_id from pg_control_checkpoint())"


def now():
    return int(time.time() * 1000)


def say(**fields):
    """One line at once, so that a reader sees it even if the process dies next."""
    with LOCK:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()


class Sql:
    """Over one connection, made anew where it broke."""

    def __init__(self, port, user, password):
        self.where = {"host": "127.0.0.1", "port": port, "user": user, "password": password, "dbname": "postgres",
                      "connect_timeout": LIMIT, "autocommit": True, "options": f"-c statement_timeout={LIMIT * 1000}"}
        self.connection = None

    def ask(self):
        try:
            if self.connection is None:
                self.connection = psycopg.connect(**self.where)
            return self.connection.execute(QUESTION).fetchone()
        except psycopg.Error:
            if self.connection is not None:
                self.connection.close()
                self.connection = None
            return None, None


class Rest:
    """Patroni's own word. Its roles were called master and replica before version 4."""

    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}/patroni"

    def ask(self):
        try:
            with urllib.request.urlopen(self.url, timeout=LIMIT) as answer:
                told = json.load(answer)
        except urllib.error.HTTPError as answer:
            # Patroni answers 503 while PostgreSQL does not run.
            told = json.loads(answer.read() or b"{}")
        except (OSError, ValueError):
            return None, None
        if told.get("state") != "running":
            return None, told.get("timeline")
        return told.get("role") in ("primary", "master"), told.get("timeline")


def observe(node, by, source):
    while not ENDED.wait(PERIOD):
        start = now()
        primary, timeline = source.ask()
        say(node=node, by=by, **{"from": start, "to": now()}, primary=primary, timeline=timeline)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--user", required=True)
    parser.add_argument("--password-file", required=True, type=pathlib.Path)
    parser.add_argument("nodes", nargs="+")
    asked = parser.parse_args()
    password = asked.password_file.read_text().strip()
    signal.signal(signal.SIGTERM, lambda *_: ENDED.set())
    say(kind="start", patroni=__import__("patroni.version").version.__version__)
    threads = []
    for node in asked.nodes:
        name, ports = node.split("=")
        sql, rest = map(int, ports.split(","))
        for by, source in (("sql", Sql(sql, asked.user, password)), ("rest", Rest(rest))):
            threads.append(threading.Thread(target=observe, args=(name, by, source)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
