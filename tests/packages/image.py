"""The container image: built without a daemon, and run as the chart's Deployment runs it, in front of a real etcd.

Runs as root in a mount namespace of its own. Must not know: how an image is built.
"""

import json
import os
import resource
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import chart
from tools import CONFIGURATION, OUT, expect, etcd, free_port, http_status, output, package, run, say, version, wait_for

# The chart's Secret is in use, and the container stops soon.
MORE_CONFIGURATION = """
[session]
key_files = ["/etc/keyward/session/session.key"]

[drain]
wait = "100ms"
"""


def options(folder):
    """What podman keeps, below a folder."""
    return (f"--root {folder}/store --runroot {folder}/run --storage-driver vfs --cgroup-manager cgroupfs "
            f"--runtime {shutil.which('crun')}")


class Podman:
    """Images and containers below a folder of the test, without a daemon, a cgroup or a network of their own."""

    def __init__(self, folder):
        self.options = options(folder).split()

    def __call__(self, *argv, **options):
        return output("podman", "--log-level", "fatal", *self.options, *argv, **options)

    def start(self, image, container, pod, mounts):
        """Runs the container of a pod: its arguments, environment, user and rights."""
        rights, limits = container["securityContext"], []
        # podman asks for more than a sandbox may give.
        for name, kind in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC)):
            limits += ["--ulimit", "{0}={1}:{1}".format(name, min(1024, resource.getrlimit(kind)[0]))]
        return self(
            "run", "--detach", "--network", "host", "--cgroups", "disabled", *limits,
            # Nobody but the test asks for the health: systemd would, with its timers.
            "--health-interval", "disable",
            *(["--read-only", "--read-only-tmpfs=false"] if rights["readOnlyRootFilesystem"] else []),
            *(f"--cap-drop={name}" for name in rights["capabilities"]["drop"]),
            *([] if rights["allowPrivilegeEscalation"] else ["--security-opt", "no-new-privileges"]),
            "--user", "{runAsUser}:{runAsGroup}".format(**pod["securityContext"]),
            *(f"--env={variable['name']}={variable['value']}" for variable in container["env"]), *mounts,
            image, *container["args"]).strip()

    def health(self, container):
        """The exit code of the image's health check."""
        command = ["podman", *self.options, "healthcheck", "run", container]
        return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode


def mounts_of(container, objects, folder):
    """The volumes of the pod: the ConfigMap and the Secret from folders, each emptyDir as a tmpfs of the user's group."""
    flags = []
    for mount in container["volumeMounts"]:
        if mount["name"] in ("run", "state"):
            flags += ["--mount", f"type=tmpfs,destination={mount['mountPath']},tmpfs-mode=0777"]
            continue
        expect(mount["readOnly"], f"{mount} can be written to")
        source = Path(folder) / mount["name"]
        source.mkdir()
        if mount["name"] == "config":
            for name, text in objects["ConfigMap", "prod-keyward"]["data"].items():
                (source / name).write_text(text)
        else:
            run(OUT / "keyward", "keygen", source / "session.key")
            # As Kubernetes does with fsGroup and defaultMode.
            shutil.chown(source / "session.key", group=65532)
            (source / "session.key").chmod(0o440)
        flags += ["--volume", f"{source}:{mount['mountPath']}:ro"]
    return flags


def check_layers():
    """The layers of the archive have the program, its licence and the folder of the admin socket, and nothing else."""
    found = {}
    with tarfile.open(OUT / "keyward-image.tar") as archive:
        image, = json.load(archive.extractfile("manifest.json"))
        for layer in image["Layers"]:
            with tarfile.open(fileobj=archive.extractfile(layer)) as files:
                found.update({entry.name.rstrip("/"): (entry.isfile(), entry.mode & 0o7777, entry.uid, entry.gid) for entry in files})
    parents = {str(parent) for name in found for parent in Path(name).parents}
    ends = {name: entry for name, entry in found.items() if name not in parents}
    wanted = {"usr/bin/keyward": (True, 0o755, 0, 0), "usr/share/doc/keyward/LICENSE": (True, 0o644, 0, 0),
              "run/keyward": (False, 0o700, 65532, 65532)}
    expect(ends == wanted, f"the layers have {ends}")
    others = {name for name in found if name not in ends and found[name][2:] != (0, 0)}
    expect(not others, f"not of root: {others}")


def check(profile):
    with tempfile.TemporaryDirectory() as folder, etcd() as store:
        # Others may enter: the user of the container is nobody here.
        os.chmod(folder, 0o755)
        podman = Podman(folder)
        package("image", profile, PODMAN_OPTIONS=options(folder))
        podman("image", "rm", "--all", "--force")
        # The archive is what is shipped: from here on there is nothing else.
        check_layers()
        podman("load", "--quiet", "--input", OUT / "keyward-image.tar")
        image = f"localhost/keyward:{version()}"
        clients, admin = free_port(), free_port()
        objects = chart.render({
            "ports": {"clients": clients, "admin": admin}, "secrets": [{"name": "session", "secretName": "keyward-session"}],
            "configuration": CONFIGURATION.format(clients=clients, admin=admin, etcd=store.url) + MORE_CONFIGURATION})
        pod = objects["Deployment", "prod-keyward"]["spec"]["template"]["spec"]
        container, = pod["containers"]
        settings = json.loads(podman("image", "inspect", image))[0]["Config"]
        user = "{runAsUser}:{runAsGroup}".format(**pod["securityContext"])
        expect(settings["User"] == user, f"the image's user is {settings['User']}, the pod's {user}")
        mounts = mounts_of(container, objects, folder)
        running = podman.start(image, container, pod, mounts)
        try:
            use(podman, running, container, store, clients, admin)
        except BaseException:
            print(podman("logs", running), flush=True)
            raise
        finally:
            podman("rm", "--force", running)
    say("image: built from deploy/Dockerfile, run as the chart runs it (user 65532, read-only root, no capability): a Put and a Range "
        "through it, probes 200, health check 0 with etcd and 1 without, SIGTERM ends it with 0")


def use(podman, running, container, store, clients, admin):
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        path = container[probe]["httpGet"]["path"]
        wait_for(lambda: http_status(f"http://127.0.0.1:{admin}{path}") == 200, f"{path} is 200")
    store.use(clients, "from-image")
    expect(podman.health(running) == 0, "the health check fails while Keyward serves")
    store.process.terminate()
    wait_for(lambda: podman.health(running) == 1, "the health check fails without etcd")
    podman("stop", "--time", "60", running)
    code = podman("inspect", "--format", "{{.State.ExitCode}}", running).strip()
    expect(code == "0", f"SIGTERM ended the container with exit code {code}")
