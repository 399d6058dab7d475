"""Names: the packaged program finds its member wherever etcdctl finds it, at name servers of many kinds.

Each case is a resolv.conf (in a mount namespace) and name servers on loopback at port 53 (in a network namespace); the same servers are tried once
more by cluster.dns. Must not know: the lookups. Runs as root; `names.py PROGRAM` tries any program.
"""

import collections
import concurrent.futures
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent))
from tools import OUT, Failed, etcd, expect, free_port, http_status, no_mounts, say

A, AAAA = 1, 28
FORMERR, SERVFAIL, NXDOMAIN, NOTIMP, REFUSED = 1, 2, 3, 4, 5
SILENT, TRUNCATED, CHAIN = "silent", "truncated", "chain"
NAME = "m1.example.test"
# No case of those that etcdctl serves takes it as long, and no program twice as long and two seconds.
LONGEST = 60


class Late:
    """The address, after a time."""

    def __init__(self, seconds):
        self.seconds = seconds


def aaaa(reaction):
    return lambda kind, number, tcp, name: reaction if kind == AAAA else None


def always(reaction):
    return lambda *_: reaction


# For each case the name servers, in order, and lines of resolv.conf. A reaction is None for the address, a code, or one of those above.
PLAIN = always(None)
CASES = {
    "plain": ([PLAIN], ""),
    "AAAA NXDOMAIN": ([aaaa(NXDOMAIN)], ""),
    "AAAA SERVFAIL": ([aaaa(SERVFAIL)], ""),
    "AAAA REFUSED": ([aaaa(REFUSED)], ""),
    "AAAA NOTIMP": ([aaaa(NOTIMP)], ""),
    "AAAA FORMERR": ([aaaa(FORMERR)], ""),
    "AAAA silent": ([aaaa(SILENT)], ""),
    "AAAA 3 s late": ([aaaa(Late(3))], ""),
    "all 3 s late": ([always(Late(3))], ""),
    "all 6 s late": ([always(Late(6))], ""),
    "truncated": ([lambda kind, number, tcp, name: None if tcp else TRUNCATED], ""),
    "CNAME chain, TTL 0": ([always(CHAIN)], ""),
    "first of two silent": ([always(SILENT), PLAIN], ""),
    "first of two refuses": ([always(REFUSED), PLAIN], ""),
    "first of two fails": ([always(SERVFAIL), PLAIN], ""),
    "first of two is nobody": ([None, PLAIN], ""),
    "half of the packets lost": ([lambda kind, number, tcp, name: SILENT if number % 2 else None], ""),
    "SERVFAIL every other": ([lambda kind, number, tcp, name: SERVFAIL if number % 2 else None], ""),
    "search list": ([lambda kind, number, tcp, name: None if name == b"m1.b.test" else NXDOMAIN], "search a.test b.test\noptions ndots:5"),
    "silent": ([always(SILENT)], ""),
    "REFUSED": ([always(REFUSED)], ""),
    "hosts file": ([always(SILENT)], "hosts"),
}


def answer(packet, reaction):
    end = 12
    while packet[end]:
        end += 1 + packet[end]
    kind = struct.unpack(">H", packet[end + 1:end + 3])[0]
    record = lambda owner, kind, ttl, data: owner + struct.pack(">HHIH", kind, 1, ttl, len(data)) + data
    address, records = socket.inet_aton("127.0.0.1"), []
    if reaction == CHAIN and kind == A:
        one = b"\3one\4test\0"
        records = [record(b"\xc0\x0c", 5, 0, one), record(one, A, 0, address)]
    elif reaction is None and kind == A:
        records = [record(b"\xc0\x0c", A, 60, address)]
    code = reaction if isinstance(reaction, int) else 0
    flags = 0x8180 | code | (0x200 if reaction == TRUNCATED else 0)
    return packet[:2] + struct.pack(">HHHHH", flags, 1, len(records), 0, 0) + packet[12:end + 5] + b"".join(records)


def asked(packet):
    labels, at = [], 12
    while packet[at]:
        labels.append(packet[at + 1:at + 1 + packet[at]])
        at += 1 + packet[at]
    return struct.unpack(">H", packet[at + 1:at + 3])[0], b".".join(labels).lower()


def serve(address, script):
    """A name server at port 53 of the address, until the end of the process."""
    count = collections.Counter()
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind((address, 53))
    tcp = socket.create_server((address, 53))

    def react(packet, over_tcp):
        kind, name = asked(packet)
        # The questions for both families come in any order.
        count[kind] += 1
        return script(kind, count[kind], over_tcp, name)

    def datagrams():
        while True:
            packet, peer = udp.recvfrom(4096)
            reaction = react(packet, False)
            if isinstance(reaction, Late):
                threading.Timer(reaction.seconds, udp.sendto, (answer(packet, None), peer)).start()
            elif reaction != SILENT:
                udp.sendto(answer(packet, reaction), peer)

    def streams():
        while True:
            with tcp.accept()[0] as stream:
                length = struct.unpack(">H", stream.recv(2))[0]
                packet = stream.recv(length)
                reaction = react(packet, True)
                if reaction != SILENT and not isinstance(reaction, Late):
                    content = answer(packet, reaction)
                    stream.sendall(struct.pack(">H", len(content)) + content)

    for loop in (datagrams, streams):
        threading.Thread(target=loop, daemon=True).start()


def in_machine(folder, *command):
    """The command on a machine with the resolv.conf and the hosts file of the folder."""
    mounts = "mount --bind \"$0/resolv.conf\" /etc/resolv.conf && mount --bind \"$0/hosts\" /etc/hosts && exec \"$@\""
    return ["unshare", "--mount", "sh", "-c", mounts, str(folder), *map(str, command)]


def seconds_of_etcdctl(store, folder, host, port):
    """Seconds until a Put is answered, or None."""
    started = time.monotonic()
    put = [store.etcdctl, "--endpoints", f"http://{host}:{port}", "--dial-timeout", f"{LONGEST / 2}s", "--command-timeout", f"{LONGEST / 2}s", "put", "a", "b"]
    done = subprocess.run(in_machine(folder, *put), env={**os.environ, "ETCDCTL_API": "3"}, stdin=subprocess.DEVNULL, capture_output=True)
    return time.monotonic() - started if done.returncode == 0 else None


def seconds_of_keyward(program, folder, host, port, dns, limit):
    """Seconds until Keyward is ready, or None; and its log."""
    admin, clients = free_port(), free_port()
    way = "dns" if dns else "files"
    text = (f'[[listener]]\nname = "c"\naddress = "127.0.0.1:{clients}"\n[cluster]\nendpoints = ["http://{host}:{port}"]\n{dns}'
            f'[admin]\naddress = "127.0.0.1:{admin}"\nsocket = ""\n')
    configuration, log = folder / f"{way}.toml", folder / f"{way}.log"
    configuration.write_text(text)
    with open(log, "w") as written:
        process = subprocess.Popen(in_machine(folder, program, "serve", "--config", configuration), stdin=subprocess.DEVNULL, stdout=written, stderr=written)
    started = time.monotonic()
    try:
        while time.monotonic() - started < limit:
            if http_status(f"http://127.0.0.1:{admin}/readyz") == 200:
                return time.monotonic() - started, log.read_text()
            time.sleep(0.05)
        return None, log.read_text()
    finally:
        process.kill()
        process.wait()


def try_case(number, name, program, store, root):
    servers, lines = CASES[name]
    folder = root / str(number)
    folder.mkdir()
    addresses = [f"127.53.{number}.{place}" for place, _ in enumerate(servers, 1)]
    for address, script in zip(addresses, servers):
        if script is not None:
            serve(address, script)
    host = "m1" if "search" in lines else NAME
    (folder / "hosts").write_text(f"127.0.0.1 localhost {NAME if lines == 'hosts' else ''}\n")
    (folder / "resolv.conf").write_text("".join(f"nameserver {address}\n" for address in addresses) + ("" if lines == "hosts" else f"{lines}\n"))
    port = store.url.rsplit(":", 1)[1]
    direct = seconds_of_etcdctl(store, folder, host, port)
    limit = LONGEST if direct else 14
    ways = {"resolv.conf": ""}
    if not lines:
        ways["cluster.dns"] = "dns = [{}]\n".format(", ".join(f'"{address}"' for address in addresses))
    found, faults = {}, []
    for way, dns in ways.items():
        found[way], log = seconds_of_keyward(program, folder, host, port, dns, limit)
        if direct and not found[way]:
            faults.append(f"{name} by {way}: etcdctl serves after {direct:.1f} s, Keyward not within {limit} s: {log[-600:]}")
        if not found[way] and not (host in log and "name server 127.53." in log):
            faults.append(f"{name} by {way}: the log does not name the name and its server: {log[-600:]}")
    shown = lambda seconds: f"{seconds:.1f} s" if seconds else "never"
    times = ", ".join(f"by {way} {shown(seconds)}" for way, seconds in found.items())
    slow = any(seconds and direct and seconds > 2 * direct + 2 for seconds in found.values())
    return f"{name}: etcdctl {shown(direct)}, Keyward {times}{' (SLOW)' if slow else ''}", faults


def inside(program):
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    faults = []
    with tempfile.TemporaryDirectory() as folder, etcd() as store, concurrent.futures.ThreadPoolExecutor(8) as pool:
        tried = [pool.submit(try_case, number, name, program, store, Path(folder)) for number, name in enumerate(CASES, 1)]
        for one in tried:
            line, wrong = one.result()
            print(f"  {line}", flush=True)
            faults += wrong
    expect(not faults, "; ".join(faults))


def check(_profile):
    """As in tests/it/name_servers.rs, with the program as it is shipped, beside etcdctl."""
    if reason := no_mounts():
        say(f"names: NOT TRIED: no namespaces and mounts here: {reason}")
        return
    command = ["unshare", "--mount", "--net", sys.executable, Path(__file__).resolve(), OUT / "keyward", "--inside"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    expect(done.returncode == 0, done.stdout)
    print(done.stdout, end="")
    say(f"names: {len(CASES)} kinds of name servers: a member is found wherever etcdctl finds it")


if __name__ == "__main__":
    if "--inside" in sys.argv:
        try:
            inside(sys.argv[1])
        except Failed as fault:
            sys.exit(str(fault))
    else:
        sys.exit(subprocess.run(["unshare", "--mount", "--net", sys.executable, __file__, sys.argv[1], "--inside"]).returncode)
