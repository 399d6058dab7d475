# What the hidden set-up of a page may use: etcd members, certificates, Keyward as a service. Sourced by the shell of a page.
# Must not know: any page.

PKI=/srv/pki
mkdir -p "$PKI"

# The members' network, beside this machine's.
ip netns add members && ip link add inside type veth peer name outside netns members &&
  ip addr add 10.9.0.1/24 dev inside && ip addr add 10.9.0.2/24 dev inside && ip addr add 10.9.0.3/24 dev inside &&
  ip link set inside up && ip -n members link set lo up && ip -n members link set outside up || return 1
for number in 1 2 3; do ip -n members addr add "10.9.0.1$number/24" dev outside || return 1; done

# Tries a command until it succeeds, for two minutes and more.
until_ok() {
  local tries=0
  until "$@" >/dev/null 2>&1; do
    ((tries++ < 600)) || { echo "never succeeded: $*"; "$@"; return 1; }
    sleep 0.2
  done
}

# authority NAME: a CA in $PKI/NAME.crt and .key
authority() {
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj "/CN=$1" \
    -addext keyUsage=critical,keyCertSign,cRLSign -keyout "$PKI/$1.key" -out "$PKI/$1.crt" 2>/dev/null
}

# issue CA NAME SUBJECT EXTENSIONS [DAYS]: a certificate in $PKI/NAME.crt and .key
issue() {
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "$3" -keyout "$PKI/$2.key" -out "$PKI/$2.csr" 2>/dev/null &&
    openssl x509 -req -in "$PKI/$2.csr" -CA "$PKI/$1.crt" -CAkey "$PKI/$1.key" -CAcreateserial -days "${5:-365}" \
      -extfile <(printf '%b\n' "$4") -out "$PKI/$2.crt" 2>/dev/null
}

# The certificates of the book: of the members, and of Keyward towards its clients.
certificates() {
  local names='DNS:etcd.example.com,DNS:keyward-1.example.com,DNS:keyward-2.example.com,IP:127.0.0.1'
  authority etcd-ca && authority ca &&
    issue etcd-ca member /CN=member "subjectAltName=DNS:etcd-1.example.com,DNS:etcd-2.example.com,DNS:etcd-3.example.com,DNS:etcd.example.com" &&
    issue ca server /CN=etcd.example.com "subjectAltName=$names" "${1:-365}"
}

# member NUMBER SCHEME CLUSTER [FLAG...]: starts a member; the first is the unit `etcd`, the others are `etcd-2` and `etcd-3`.
member() {
  local number=$1 scheme=$2 cluster=$3 unit=etcd tls=()
  shift 3
  ((number == 1)) || unit=etcd-$number
  [[ $scheme == http ]] || tls=(--cert-file "$PKI/member.crt" --key-file "$PKI/member.key")
  systemd-run --quiet --no-block --unit="$unit" --collect --property=Type=notify --property=NetworkNamespacePath=/run/netns/members -- \
    etcd --name "m$number" --data-dir "/var/lib/etcd/m$number" --unsafe-no-fsync --bcrypt-cost 4 \
    --listen-client-urls "$scheme://10.9.0.1$number:2379" --advertise-client-urls "$scheme://etcd-$number.example.com:2379" \
    --listen-peer-urls "http://10.9.0.1$number:2380" --initial-advertise-peer-urls "http://etcd-$number.example.com:2380" \
    --listen-metrics-urls "http://10.9.0.1$number:2381" --initial-cluster "$cluster" "${tls[@]}" "$@"
}

# members COUNT SCHEME [FLAG...]: a cluster, with auth off; `direct` speaks to its first member.
members() {
  local count=$1 scheme=$2 cluster='' number
  shift 2
  for number in $(seq "$count"); do cluster+=,m$number=http://etcd-$number.example.com:2380; done
  for number in $(seq "$count"); do member "$number" "$scheme" "${cluster#,}" "$@"; done
  DIRECT=(--endpoints "$scheme://etcd-1.example.com:2379")
  [[ $scheme == http ]] || DIRECT+=(--cacert "$PKI/etcd-ca.crt")
  for number in $(seq "$count"); do
    until_ok etcdctl "${DIRECT[@]}" --endpoints "$scheme://etcd-$number.example.com:2379" endpoint health || return 1
  done
}

# Whatever the page exports for clients of Keyward.
direct() { env -u ETCDCTL_ENDPOINTS -u ETCDCTL_CACERT -u ETCDCTL_USER etcdctl "${DIRECT[@]}" "$@"; }

# Auth on at etcd: root, alice with her keys below /a/, and Keyward's own user with the role that the example asks for.
auth_on() {
  direct user add root:secret && direct user grant-role root root &&
    direct role add alice && direct role grant-permission alice readwrite --prefix /a/ &&
    direct user add alice:secret && direct user grant-role alice alice &&
    direct role add keyward && direct role grant-permission keyward readwrite /keyward/ --prefix &&
    direct user add keyward:probe-secret && direct user grant-role keyward keyward &&
    direct auth enable && DIRECT+=(--user root:secret)
} >/dev/null

# The files that deploy/keyward.toml names.
keyward_files() {
  id keyward >/dev/null 2>&1 || useradd --system --no-create-home --shell /usr/sbin/nologin keyward
  install -d -m 0750 -g keyward /etc/keyward /etc/keyward/tls &&
    cp "$PKI"/{server.crt,server.key,etcd-ca.crt} /etc/keyward/tls/ && printf 'probe-secret\n' >/etc/keyward/probe.password &&
    rm -f /etc/keyward/session.key && keyward keygen /etc/keyward/session.key && own_files
} >/dev/null

own_files() { chgrp -R keyward /etc/keyward && find /etc/keyward -type f -exec chmod 0640 {} +; }

# service [FILE]: Keyward by its own unit, with deploy/keyward.toml or another file.
service() {
  cp "${1:-deploy/keyward.toml}" /etc/keyward/keyward.toml && own_files &&
    cp deploy/systemd/keyward.service /etc/systemd/system/ && systemctl daemon-reload && systemctl start keyward && ready
}

ready() { until_ok curl -sSf "${1:-http://127.0.0.1:2389}/readyz"; }

# The whole site of the runbooks: three members with TLS and auth, and Keyward with the production example.
site() {
  certificates && members "${1:-3}" https "${@:2}" && auth_on && keyward_files && service && clients
}

# How a client of the site reaches etcd through Keyward.
clients() {
  export ETCDCTL_ENDPOINTS=https://etcd.example.com:2379 ETCDCTL_CACERT=$PKI/ca.crt ETCDCTL_USER=root:secret
}

# Ends what runs in the background of the page, and waits.
end_background() {
  local group
  for group in "${BACKGROUND[@]}"; do kill -- "-$group" 2>/dev/null; done
  wait "${BACKGROUND[@]}" 2>/dev/null
  BACKGROUND=()
}
