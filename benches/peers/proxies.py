"""The members and the proxies of the comparison: how each is started, as its documentation recommends.

Every proxy has one worker thread (GOMAXPROCS=1 for Go), HTTP/2 on both sides, plaintext except towards clients in the
rows with TLS, no time limit on streams, and limits raised far enough that no load of the comparison meets one. Only
Keyward writes an access log, its default.
"""

import json
import os
import secrets
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import programs
from processes import PATIENCE, Failed, accepts, free_port, wait_until

KEYWARD = """[[listener]]
name = "clients"
address = "127.0.0.1:{listen}"
{tls}
[cluster]
endpoints = ["http://127.0.0.1:{member}"]
{probe}
[admin]
address = "127.0.0.1:{admin}"

[log]
access = "{access}"

[runtime]
shards = 1

[watch]
share_from = {share_from}
"""

# https://www.envoyproxy.io/docs/envoy/latest/configuration/best_practices/edge, without the limits made for the
# internet; streams without a time limit as https://www.envoyproxy.io/docs/envoy/latest/faq/configuration/timeouts says.
ENVOY = {
    "listener": {
        "codec_type": "HTTP2",
        "stat_prefix": "etcd",
        "stream_idle_timeout": "0s",
        "request_timeout": "0s",
        "http2_protocol_options": {"max_concurrent_streams": 4096},
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}}],
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3"
                 ".HttpConnectionManager",
    },
}

# https://nginx.org/en/docs/http/ngx_http_grpc_module.html
NGINX = """daemon off;
worker_processes 1;
pid {site}/{name}.pid;
error_log {site}/{name}.log warn;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {site}/{name}-body;
  proxy_temp_path {site}/{name}-proxy;
  fastcgi_temp_path {site}/{name}-fastcgi;
  uwsgi_temp_path {site}/{name}-uwsgi;
  scgi_temp_path {site}/{name}-scgi;
  keepalive_requests 1000000000;
  keepalive_timeout 1h;
  upstream member {{
    server 127.0.0.1:{member};
    keepalive 512;
    keepalive_requests 1000000000;
  }}
  server {{
    listen 127.0.0.1:{listen} {tls}http2;
    http2_max_concurrent_streams 4096;
{certificate}    location / {{
      grpc_pass grpc://member;
      grpc_read_timeout 24h;
      grpc_send_timeout 24h;
      client_body_timeout 24h;
      client_max_body_size 0;
    }}
  }}
}}
"""

NGINX_TLS = """    ssl_certificate {tls}/server.crt;
    ssl_certificate_key {tls}/server.key;
    ssl_protocols TLSv1.2 TLSv1.3;
"""

# https://docs.haproxy.org/2.6/configuration.html ("proto h2" on both sides, one thread)
HAPROXY = """global
  nbthread 1
  maxconn 4096
  tune.h2.max-concurrent-streams 4096
defaults
  mode http
  timeout connect 5s
  timeout client 24h
  timeout server 24h
  timeout tunnel 24h
frontend clients
  bind 127.0.0.1:{listen} {protocol}
  default_backend member
backend member
  http-reuse always
  server member 127.0.0.1:{member} proto h2
"""


class Server:
    """A running member or proxy."""

    def __init__(self, name, process, port):
        self.name, self.process, self.port = name, process, port
        self.token, self.lengths, self.authority = None, None, None

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"


class Site:
    """A member, and the proxies in front of the member."""

    def __init__(self, options, processes, kind):
        self.options, self.processes, self.kind = options, processes, kind
        self.started = 0
        self.tls = self.make_certificates() if kind == "tls" else None
        self.is_canned = kind in ("canned", "tls")
        port = free_port()
        if self.is_canned:
            self.login = "peers:canned"
            argv = [options.folder / "peers", "canned", "--listen", f"127.0.0.1:{port}"]
        else:
            self.login = None
            url, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{free_port()}"
            argv = [programs.etcd(options.etcd).path, "--name", "m1", "--data-dir", processes.site / f"{kind}-data",
                    "--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peer,
                    "--initial-advertise-peer-urls", peer, "--initial-cluster", f"m1={peer}", "--log-level", "error",
                    "--quota-backend-bytes", 8 * 1024 ** 3]
        self.member = Server("direct", processes.start(f"member-{kind}", argv), port)
        wait_until(lambda: accepts(port), self.member.process, processes)
        if kind == "etcd-auth":
            self.turn_auth_on()
        self.verify(self.member, None if self.is_canned else "--fill")

    def make_certificates(self):
        """The folder of a CA and a server's certificate, made for this run."""
        folder = self.processes.site / "tls"
        folder.mkdir()
        argv = [self.options.folder / "peers", "certificates", "--folder", folder]
        made = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE)
        if made.returncode != 0:
            raise Failed(f"certificates: {made.stderr.strip()}")
        return folder

    def turn_auth_on(self):
        """Gives the real etcd its users: `root`, Keyward's `keyward`, and `app` and `storm` of the loads."""
        password = secrets.token_hex(16)
        self.login, self.storm_login = f"app:{password}", f"storm:{password}"
        etcdctl = Path(programs.etcd(self.options.etcd).path).parent / "etcdctl"
        steps = [["role", "add", "everything"], ["role", "grant-permission", "everything", "readwrite", "", "--prefix"]]
        for user in ("root", "keyward", "app", "storm"):
            steps.append(["user", "add", f"{user}:{password}"])
        steps += [["user", "grant-role", "root", "root"], ["user", "grant-role", "app", "everything"],
                  ["user", "grant-role", "storm", "everything"], ["auth", "enable"]]
        for step in steps:
            argv = [etcdctl, "--endpoints", self.member.address, *step]
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE)
            if done.returncode != 0:
                raise Failed(f"etcdctl {' '.join(step[:2])}: {done.stderr.strip()}")

    def verify(self, server, *extra):
        """Verifies the answers through a server; keeps its token and the lengths of its answers."""
        argv = [self.options.folder / "peers", "check", "--address", server.address]
        argv += ["--login", self.login] if self.login else []
        argv += ["--authority", server.authority] if server.authority else []
        load = self.processes.start_load(argv + [part for part in extra if part])
        said, fault = load.communicate(timeout=60)
        code = load.returncode
        self.processes.stop(load)
        if code != 0:
            raise Failed(f"{server.name}: {fault.strip()}")
        server.lengths = json.loads(said)
        server.token = server.lengths.pop("token")
        if server.lengths != (self.member.lengths or server.lengths) and self.is_canned:
            raise Failed(f"{server.name}: answers of {server.lengths} bytes, directly {self.member.lengths}")

    def start(self, name):
        """Starts one proxy and verifies its answers. `programs.Missing` if this machine has no such program."""
        self.started += 1
        unique = f"{name}-{self.kind}-{self.started}"
        port = free_port()
        argv, environment, ready = STARTS[name](self, unique, port)
        process = self.processes.start(unique, argv, environment)
        server = Server(name, process, port)
        server.authority = self.tls and self.tls / "ca.crt"
        wait_until(ready or (lambda: accepts(port)), process, self.processes)
        self.verify(server)
        return server

    def write(self, name, text):
        path = self.processes.site / name
        path.write_text(text)
        return path


def start_bare(site, _, port):
    argv = [site.options.folder / "peers", "bare", "--listen", f"127.0.0.1:{port}", "--upstream", site.member.address]
    argv += ["--tls", site.tls] if site.tls else []
    return argv, None, None


def start_keyward(site, unique, port, access="slow", share_from=4):
    admin = free_port()
    probe = ""
    if site.login:
        password = site.write(f"{unique}.password", site.login.split(":")[1] + "\n")
        password.chmod(0o600)
        probe = f'probe = {{ user = "keyward", password_file = "{password.name}" }}\n'
    tls = f'tls = {{ cert = "{site.tls}/server.crt", key = "{site.tls}/server.key" }}\n' if site.tls else ""
    config = KEYWARD.format(listen=port, member=site.member.port, admin=admin, probe=probe, access=access, tls=tls, share_from=share_from)
    argv = [site.options.folder / "keyward", "serve", "--config", site.write(f"{unique}.toml", config)]

    def ready():
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{admin}/readyz", timeout=1).status == 200
        except (OSError, urllib.error.URLError):
            return False

    return argv, None, ready


def start_keyward_without_log(site, unique, port):
    return start_keyward(site, unique, port, access="off")


def start_keyward_with_whole_log(site, unique, port):
    return start_keyward(site, unique, port, access="all")


def start_keyward_unshared(site, unique, port):
    return start_keyward(site, unique, port, share_from=0)


def start_keyward_unread(site, unique, port):
    """With a record for every call, and its stderr a FIFO that nobody reads: a log that takes nothing more."""
    argv, environment, ready = start_keyward_with_whole_log(site, unique, port)
    fifo = site.processes.site / f"{unique}.fifo"
    os.mkfifo(fifo)
    # Opened for reading too: else the opening itself would wait for a reader.
    return ["sh", "-c", 'exec "$@" 2<>"$0"', fifo, *argv], environment, ready


def start_envoy(site, unique, port):
    endpoint = {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": site.member.port}}}}
    many = {"max_connections": 65536, "max_pending_requests": 65536, "max_requests": 1048576}
    options = {"@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
               "explicit_http_config": {"http2_protocol_options": {}}}
    cluster = {"name": "member", "type": "STATIC", "connect_timeout": "5s", "circuit_breakers": {"thresholds": [many]},
               "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options},
               "load_assignment": {"cluster_name": "member", "endpoints": [{"lb_endpoints": [endpoint]}]}}
    route = {"match": {"prefix": "/"}, "route": {"cluster": "member", "timeout": "0s"}}
    hosts = [{"name": "all", "domains": ["*"], "routes": [route]}]
    manager = {**ENVOY["listener"], "route_config": {"name": "all", "virtual_hosts": hosts}}
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    listener = {"name": "clients", "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
                "filter_chains": [{"filters": filters, **(envoy_tls(site.tls) if site.tls else {})}]}
    config = {"static_resources": {"listeners": [listener], "clusters": [cluster]}}
    argv = [programs.envoy().path, "--concurrency", "1", "--disable-hot-restart", "--log-level", "error",
            "--config-path", site.write(f"{unique}.json", json.dumps(config))]
    return argv, None, None


def envoy_tls(folder):
    # https://www.envoyproxy.io/docs/envoy/latest/api-v3/extensions/transport_sockets/tls/v3/tls.proto
    files = {"certificate_chain": {"filename": f"{folder}/server.crt"},
             "private_key": {"filename": f"{folder}/server.key"}}
    context = {"@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
               "common_tls_context": {"alpn_protocols": ["h2"], "tls_certificates": [files],
                                      "tls_params": {"tls_maximum_protocol_version": "TLSv1_3"}}}
    return {"transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": context}}


def start_nginx(site, unique, port):
    program = programs.from_debian("nginx", "nginx")
    config = NGINX.format(site=site.processes.site, name=unique, listen=port, member=site.member.port,
                          tls="ssl " if site.tls else "",
                          certificate=NGINX_TLS.format(tls=site.tls) if site.tls else "")
    argv = [program.path, "-p", site.processes.site, "-e", site.processes.site / f"{unique}.log",
            "-c", site.write(f"{unique}.conf", config)]
    # nginx as root gives its worker to another user, who may not enter the temporary folder.
    if os.geteuid() == 0:
        argv += ["-g", "user root;"]
    return argv, program.environment, None


def start_haproxy(site, unique, port):
    program = programs.from_debian("haproxy", "haproxy")
    protocol = f"ssl crt {site.tls}/server.pem alpn h2" if site.tls else "proto h2"
    config = HAPROXY.format(listen=port, member=site.member.port, protocol=protocol)
    return [program.path, "-db", "-f", site.write(f"{unique}.cfg", config)], program.environment, None


def start_grpc_proxy(site, unique, port):
    argv = [programs.etcd(site.options.etcd).path, "grpc-proxy", "start", "--endpoints", site.member.address,
            "--listen-addr", f"127.0.0.1:{port}", "--advertise-client-url", f"127.0.0.1:{port}",
            "--data-dir", site.processes.site / f"{unique}-data"]
    return argv, {"GOMAXPROCS": "1"}, None


def start_gateway(site, _, port):
    argv = [programs.etcd(site.options.etcd).path, "gateway", "start", "--endpoints", site.member.address,
            "--listen-addr", f"127.0.0.1:{port}"]
    return argv, {"GOMAXPROCS": "1"}, None


# In the order of the table. `bare` is always there: the yardstick.
STARTS = {
    "bare": start_bare,
    "keyward": start_keyward,
    "keyward-nolog": start_keyward_without_log,
    "keyward-logall": start_keyward_with_whole_log,
    "keyward-unshared": start_keyward_unshared,
    "keyward-unread": start_keyward_unread,
    "envoy": start_envoy,
    "nginx": start_nginx,
    "haproxy": start_haproxy,
    "grpc-proxy": start_grpc_proxy,
    "gateway": start_gateway,
}
