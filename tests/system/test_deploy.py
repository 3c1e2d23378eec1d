"""deploy/: the unit, the image, the chart and the cluster start a server that takes their flags."""

import json
import re
import shlex
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from examples import ROOT

from headrace.config.flags import from_flags
from headrace.frontend.health import PATHS as HEALTH_PATHS
from headrace.routes import PING

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm/headrace"


def test_unit_starts_a_server_that_drains_in_time() -> None:
    unit = (DEPLOY / "headrace.service").read_text()
    (command,) = re.findall(r"^ExecStart=\S+/launch_server (.*)$", unit, re.MULTILINE)
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert 0 < from_flags(command.split()).drain_timeout < int(stop_s)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")
def test_unit_is_accepted_by_systemd(tmp_path: Any) -> None:
    unit = tmp_path / "headrace.service"
    text = (DEPLOY / "headrace.service").read_text()
    unit.write_text(text.replace("/opt/headrace/bin/launch_server", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_image_runs_a_server_as_another_user_than_root() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    (entrypoint,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    program, *flags = json.loads(entrypoint)
    assert program == "launch_server"
    assert from_flags(flags).host == "0.0.0.0"
    assert re.search(r"^USER [1-9]\d*", text, re.MULTILINE)
    (health,) = re.findall(r"http://127\.0\.0\.1:8000(/\w+)", text)
    assert health in HEALTH_PATHS


def test_chart_probes_paths_that_are_served() -> None:
    text = (CHART / "templates/deployment.yaml").read_text()
    probes = re.findall(
        r"^ +(\w+)Probe:.*\n +httpGet: {path: (/\w+), port: http}$", text, re.MULTILINE
    )
    expected = {"startup": "/startup", "readiness": "/ready", "liveness": "/health"}
    assert dict(probes) == expected
    assert {*expected.values(), PING} == set(HEALTH_PATHS)


def test_kuberay_cluster_has_room_for_the_engines_of_its_server() -> None:
    text = (DEPLOY / "kuberay/headrace.yaml").read_text()
    cluster, server, service = yaml.safe_load_all(text)
    (workers,), head = cluster["spec"]["workerGroupSpecs"], cluster["spec"]["headGroupSpec"]
    assert f"ray=={cluster['spec']['rayVersion']}\n" in (ROOT / "constraints.txt").read_text()
    (container,) = server["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    subprocess.run(["bash", "-n", "-c", script], check=True)
    (command,) = re.findall(r"launch_server (.*?) &", script.replace("\\\n", ""))
    config = from_flags(shlex.split(command))
    assert config.num_placed_engines == workers["replicas"]
    assert int(workers["rayStartParams"]["num-cpus"]) == config.num_workers + 1
    assert head["rayStartParams"]["num-cpus"] == "0" and "--num-cpus=0 " in script
    paths = {probe["httpGet"]["path"] for name, probe in container.items() if "Probe" in name}
    assert paths <= {*HEALTH_PATHS} - {"/health"}
    labels = server["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == server["spec"]["selector"]["matchLabels"] == labels
    assert {port["name"] for port in container["ports"]} == {
        port["targetPort"] for port in service["spec"]["ports"]
    }


def test_chart_has_the_version_of_the_package() -> None:
    from headrace import __version__

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is missing")
def test_chart_renders_with_all_values(tmp_path: Any) -> None:
    values = {
        "model": "model.gguf",
        "models": {"claim": "models"},
        "args": ["--max-num-seqs", "128"],
        "keys": {"secret": "keys"},
        "disruptionBudget": {"enabled": True},
        "serviceMonitor": {"enabled": True},
    }
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    command = ["helm", "template", "llm", CHART, "--values", tmp_path / "values.yaml"]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kinds = {document["kind"]: document for document in yaml.safe_load_all(rendered) if document}
    assert set(kinds) == {"Deployment", "Service", "PodDisruptionBudget", "ServiceMonitor"}
    (container,) = kinds["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert from_flags(container["args"]).max_num_seqs == 128
