"""The container recipe and the Kubernetes manifest: valid by the published schemas, and their numbers belong together."""
import json
import re
import shutil
import subprocess

import kubernetes_validate
import yaml
from conftest import ROOT, run

MIB = 1 << 20
PROGRAM = 64 * MIB  # code, stacks, libraries: docs/deploy.md
MANIFEST = list(yaml.safe_load_all((ROOT / "docs/kubernetes.yaml").read_text()))


def find(kind, name="vlm"):
    return next(d for d in MANIFEST if d["kind"] == kind and d["metadata"]["name"] == name)


POD = find("Deployment")["spec"]["template"]
SERVER = POD["spec"]["containers"][0]
FLAGS = dict(zip(SERVER["args"][::2], SERVER["args"][1::2]))


def size(text):
    number, unit = re.fullmatch(r"(\d+)([MG])i?", text).groups()
    return int(number) * {"M": MIB, "G": 1024 * MIB}[unit]


def test_manifest_is_valid():
    for document in MANIFEST:
        kubernetes_validate.validate(document, "1.30", strict=True)


def test_limit_is_the_plan():
    plan = json.loads(run("vlm", "map", "--json", "--memory", FLAGS["--memory"]).stdout)
    needed = plan["total"] + plan["host"]["decode_workspace"] + size(FLAGS["--body-memory"]) + size(FLAGS["--picture-memory"]) + PROGRAM
    limit = size(SERVER["resources"]["limits"]["memory"])
    assert needed <= limit <= needed + 128 * MIB
    assert SERVER["resources"]["requests"]["memory"] == SERVER["resources"]["limits"]["memory"]


def test_leaving_has_time():
    drain = int(FLAGS["--drain"])
    ready, live = SERVER["readinessProbe"], SERVER["livenessProbe"]
    assert POD["spec"]["terminationGracePeriodSeconds"] >= drain + 300
    assert drain > ready["periodSeconds"] * ready["failureThreshold"] + 5  # and what proxies take to hear of it
    assert live["periodSeconds"] * live["failureThreshold"] > drain
    assert find("Deployment")["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_ports_and_selectors_agree():
    port = SERVER["ports"][0]
    assert POD["metadata"]["annotations"]["prometheus.io/port"] == str(port["containerPort"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert SERVER[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    for service in (find("Service"), find("Service", "vlm-pods")):
        assert service["spec"]["selector"].items() <= POD["metadata"]["labels"].items()
        assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    container = (ROOT / "docs/Containerfile").read_text()
    assert f"EXPOSE {port['containerPort']}" in container
    assert f"USER {POD['spec']['securityContext']['runAsUser']}:{POD['spec']['securityContext']['runAsGroup']}" in container


def test_balancer_agrees_with_the_servers_defaults():
    """docs/haproxy.cfg is written for `--drain 5` and the default limits."""
    config = (ROOT / "docs/haproxy.cfg").read_text()
    usage = run("vlm", "help").stdout.decode()
    inter, fall, at_once = map(int, re.search(r"inter (\d+)s fall (\d+) .*maxconn (\d+)", config).groups())
    queue = int(re.search(r"--max-queue N .*default (\d+)", usage)[1])
    connections = int(re.search(r"--max-connections N .*default (\d+)", usage)[1])
    assert inter * fall + 1 < 5 and "vlm serve --drain 5" in config
    assert at_once <= queue and at_once <= connections


def test_balancer_in_the_cluster_is_valid(tmp_path):
    """docs/haproxy.cfg with the lines of docs/deploy.md in the place of its servers."""
    config = (ROOT / "docs/haproxy.cfg").read_text()
    resolvers, servers = re.search(r"\n( +resolvers cluster\n.*\n) +backend servers\n(.*)\n", (ROOT / "docs/deploy.md").read_text()).groups()
    assert len(re.findall(r"    server vlm\d .*\n", config)) == 2
    (tmp_path / "haproxy.cfg").write_text(re.sub(r"    server vlm\d .*\n", "", config) + servers + "\n" + resolvers)
    haproxy = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
    assert haproxy, "haproxy is missing: apt-get install haproxy"
    done = subprocess.run([haproxy, "-c", "-f", tmp_path / "haproxy.cfg"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_container_names_every_file_that_the_build_takes():
    """COPY is by pattern; what the Makefile needs beside these must not exist."""
    container = (ROOT / "docs/Containerfile").read_text()
    copied = re.search(r"COPY (.*) \./", container)[1].split()
    embedded = {m for f in ROOT.glob("*.c") for m in re.findall(r'incbin \\?"([^"\\]+)', f.read_text())}
    for name in embedded | {p.name for p in ROOT.glob("*.[ch]")} | {"Makefile"}:
        assert any((ROOT / name).match(pattern) for pattern in copied), name
