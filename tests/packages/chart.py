"""The Helm chart: what it renders is valid for Kubernetes and for Keyward, and wrong values are refused.

Runs under the Python of `tools.schemas()`. Must not know: how an image is run.
"""

import json
import re
import tempfile
from pathlib import Path

from tools import OUT, ROOT, expect, helm, output, package, run, say, version

CHART = ROOT / "deploy" / "helm" / "keyward"
# The oldest that the chart takes, and the newest of which there are schemas.
OLDEST, NEWEST = "1.27", "1.37"
# A use of every value that adds to what is rendered.
ALL_VALUES = {
    "replicaCount": 3,
    "image": {"repository": "registry.example.com/keyward", "tag": "1.2.3", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "registry"}],
    "files": {"policy.toml": "# None.\n"},
    "secrets": [{"name": "session", "secretName": "keyward-session"}, {"name": "tls", "secretName": "keyward-tls"}],
    "service": {"type": "LoadBalancer", "port": 12379, "annotations": {"example.com/internal": "true"}},
    "podDisruptionBudget": {"enabled": True, "maxUnavailable": "34%"},
    "serviceMonitor": {"enabled": True, "interval": "15s", "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboard": {"enabled": True, "labels": {"grafana_dashboard": "1"}},
    "networkPolicy": {"enabled": True, "clients": [{"podSelector": {"matchLabels": {"etcd-client": "true"}}}],
                      "admin": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
    "headlessService": {"enabled": True},
    "extraVolumes": [{"name": "pki", "csi": {"driver": "csi.cert-manager.io", "readOnly": True}}],
    "extraVolumeMounts": [{"name": "pki", "mountPath": "/etc/keyward/pki", "readOnly": True}],
    "extraEnv": [{"name": "KEYWARD_LOG__LEVEL", "value": "debug"}],
    "initContainers": [{"name": "wait", "image": "registry.example.com/wait:1", "command": ["/wait"]}],
    "priorityClassName": "system-cluster-critical",
    "podAnnotations": {"example.com/a": "b"},
    "podLabels": {"team": "storage"},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "etcd", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd"]}]}]}}},
}
# Wrong values, and a pattern of the message of each: helm 3.22 words what a schema refuses otherwise than helm 3.17.
WRONG = [
    ({"replicaCount": 0}, "replicaCount"),
    ({"replicas": 2}, "replicas'? (is )?not allowed"),
    ({"ports": {"clients": 2379, "admin": 9999}}, "ports.admin is 9999, and no address of `configuration` ends with it"),
    ({"secrets": [{"name": "session"}]}, "secretName"),
    ({"files": {"keyward.toml": "x"}}, r"(invalid propertyName '|Property name of \")keyward\.toml"),
    ({"service": {"type": "External", "port": 1}}, "service[/.]type"),
    ({"networkPolicy": {"enabled": True, "from": []}}, "from'? (is )?not allowed"),
]


def template(values, *more, fails=False):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(values, file)
        file.flush()
        return output(helm(), "template", "prod", CHART, "--kube-version", NEWEST, "--values", file.name, *more, fails=fails)


def render(values):
    """The rendered objects, by kind and name."""
    import yaml
    objects = [document for document in yaml.safe_load_all(template(values)) if document]
    found = {(document["kind"], document["metadata"]["name"]): document for document in objects}
    expect(len(found) == len(objects), "two objects have one name")
    return found


def validate(objects):
    """Every object against the schemas of Kubernetes, unknown fields refused, and of the Prometheus operator."""
    import kubernetes_validate
    from cloudcoil.models.prometheus_operator.v1 import PrometheusRule, ServiceMonitor
    operators = {"PrometheusRule": PrometheusRule, "ServiceMonitor": ServiceMonitor}
    for (kind, name), document in objects.items():
        if kind in operators:
            # An unknown field is lost on the way.
            read = operators[kind].model_validate(document).model_dump(mode="json", by_alias=True, exclude_unset=True)
            expect(without_empty(read) == document, f"{kind} {name} has unknown fields: {document}, not {read}")
            continue
        for release in (OLDEST, NEWEST):
            kubernetes_validate.validate(document, release, strict=True)


def without_empty(value):
    if isinstance(value, dict):
        return {key: without_empty(inner) for key, inner in value.items() if inner is not None}
    return [without_empty(inner) for inner in value] if isinstance(value, list) else value


def check_pod(objects):
    """The promises of the pod that no schema knows: Kubernetes' "restricted" standard, probes, spread, one selector."""
    deployment = objects["Deployment", "prod-keyward"]["spec"]
    pod = deployment["template"]["spec"]
    container, = pod["containers"]
    expect(pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"},
           "the pod may be root")
    expect(container["securityContext"] == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
                                            "capabilities": {"drop": ["ALL"]}}, "the container has rights")
    expect(pod["automountServiceAccountToken"] is False, "the pod has a token of Kubernetes")
    expect([container[probe]["httpGet"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")] ==
           [{"path": path, "port": "admin"} for path in ("/livez", "/livez", "/readyz")], "the probes ask something else")
    labels = deployment["template"]["metadata"]["labels"]
    selectors = [deployment["selector"]["matchLabels"],
                 *(spread["labelSelector"]["matchLabels"] for spread in pod["topologySpreadConstraints"]),
                 objects["PodDisruptionBudget", "prod-keyward"]["spec"]["selector"]["matchLabels"],
                 *(document["spec"]["podSelector"]["matchLabels"] for (kind, _), document in objects.items() if kind == "NetworkPolicy"),
                 *(document["spec"]["selector"] for (kind, _), document in objects.items() if kind == "Service")]
    expect(len(selectors) >= 5 and all(selector.items() <= labels.items() for selector in selectors), f"{selectors} miss the pod {labels}")
    volumes = {volume["name"] for volume in pod["volumes"]}
    expect(volumes == {mount["name"] for mount in container["volumeMounts"]}, f"mounts and volumes {volumes} differ")
    test = objects["Pod", "prod-keyward-check"]
    tried, = test["spec"]["containers"]
    same = ("image", "imagePullPolicy", "env", "securityContext", "volumeMounts")
    expect(all(tried[field] == container[field] for field in same) and tried["args"] == ["check", "--dial"], f"helm test runs {tried}")
    expect(not any(selector.items() <= test["metadata"]["labels"].items() for selector in selectors), "a Service selects the pod of helm test")


def check_monitoring(objects):
    """The alerts and the dashboard are those of deploy/monitoring."""
    import yaml
    monitoring = ROOT / "deploy" / "monitoring"
    rules = yaml.safe_load((monitoring / "alerts.yaml").read_text())
    expect(objects["PrometheusRule", "prod-keyward"]["spec"] == rules, "the chart has other alerts")
    board = json.loads(objects["ConfigMap", "prod-keyward-dashboard"]["data"]["keyward.json"])
    expect(board == json.loads((monitoring / "dashboard.json").read_text()), "the chart has another dashboard")


def check(profile):
    say(run(helm(), "lint", "--strict", "--kube-version", NEWEST, CHART).stdout.strip().splitlines()[-1])
    wanted = version()
    chart = output(helm(), "show", "chart", CHART)
    expect(f"\nversion: {wanted}\n" in chart and f"\nappVersion: {wanted}\n" in f"\n{chart}", f"the chart is not of version {wanted}")
    defaults, full = render({}), render(ALL_VALUES)
    expect(len(defaults) == 5 and len(full) == 11, f"rendered {list(defaults)} and {list(full)}")
    for objects in (defaults, full):
        validate(objects)
        check_pod(objects)
    check_monitoring(full)
    monitor = full["ServiceMonitor", "prod-keyward"]["spec"]["selector"]["matchLabels"]
    watched = [name for (kind, name), document in full.items()
               if kind == "Service" and monitor.items() <= document["metadata"]["labels"].items()]
    expect(watched == ["prod-keyward-admin"], f"the ServiceMonitor selects {watched}")
    with tempfile.TemporaryDirectory() as folder:
        for name, text in full["ConfigMap", "prod-keyward"]["data"].items():
            (Path(folder) / name).write_text(text)
        run(OUT / "keyward", "check", "--config", Path(folder) / "keyward.toml")
    for values, reason in WRONG:
        told = template(values, fails=True)
        expect(re.search(reason, told), f"{values} is refused with: {told}")
    package("chart", profile)
    archive, = OUT.glob("keyward-*.tgz")
    run(helm(), "lint", "--strict", "--kube-version", NEWEST, archive)
    say(f"chart: {len(defaults) + len(full)} objects valid for Kubernetes {OLDEST} and {NEWEST}, {len(WRONG)} wrong values refused, "
        f"its configuration passes `keyward check`; {archive.name}")
