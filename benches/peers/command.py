"""The frame of every command of this folder: options, build, file descriptors, signals, the folder of a run.

Must not know: any load. Invariant: every process that a command has started is stopped before the command ends.
"""

import argparse
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import programs
from processes import Failed, Processes

# Descriptors of a process beside its connections.
OTHER_DESCRIPTORS = 200


def add_options(parser):
    """The options that all commands have."""
    parser.add_argument("--etcd", default="3.5.35")
    parser.add_argument("--absolute", action="store_true")
    parser.add_argument("--profile", default="release")
    parser.add_argument("--built", type=Path)


def one_or_more(known):
    """A parser of names that are separated by commas."""
    def parse(text):
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(known)}")
        return chosen
    return parse


def raise_descriptors(connections):
    """Raises this process's limit, which its children inherit. A load and a proxy each hold all connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + OTHER_DESCRIPTORS
    if most not in (resource.RLIM_INFINITY, -1) and most < needed:
        raise Failed(f"{connections} connections need {needed} file descriptors, the hard limit is {most}: "
                     f"raise `ulimit -Hn`, or choose fewer connections")
    wanted = max(needed, most) if most != resource.RLIM_INFINITY else needed
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def run(options, connections, work):
    """Builds, runs `work(options, processes)`, stops every process; the exit code."""
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="keyward-peers-") as folder:
        processes = Processes(Path(folder))
        try:
            raise_descriptors(connections)
            options.folder = options.built or programs.build(options.profile)
            return work(options, processes)
        except (Failed, programs.Missing, subprocess.TimeoutExpired) as fault:
            print(f"{Path(sys.argv[0]).name}: {fault}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            processes.stop_all()


def with_log(fault, server, processes):
    """The failure, with the end of the proxy's log if the proxy has ended by itself."""
    ended = server.process.poll() is not None
    log = processes.log_of(server.process) if ended else ""
    return Failed(f"{fault}\n{server.name} has ended by itself:\n{log}".strip() if ended else str(fault))


def say_profile(options):
    if options.profile != "release":
        print(f"Built with the profile {options.profile}, which is not the shipped program: no figure counts.")


def say_unquiet(unquiet, options):
    """Says why figures are withheld; true if times and costs may be printed."""
    if unquiet:
        print("The machine is not quiet: " + "; ".join(unquiet) + ".")
        print("Absolute times and costs are printed on demand, and cannot be trusted." if options.absolute
              else "Times and costs are withheld; counts, memory, and ratios of the same round are printed.")
    return not unquiet or options.absolute
