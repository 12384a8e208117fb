"""compose.yaml, the unit of systemd and the manifest of Kubernetes agree with the server and the image."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile import Dockerfile

from streamserve.config import ENV_PREFIX, ServerConfig, SupervisorConfig
from streamserve.config.sections import options
from streamserve.supervisor.supervisor import DRAIN_MARGIN_S, STOP_GRACE_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
RESOURCES = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "streamserve.yaml").read_text()))
UNIT = DEPLOY / "systemd" / "streamserve.service"
# The end of streams, then of frontends that hang, then of the engine.
LONGEST_STOP_S = SupervisorConfig().drain_timeout + DRAIN_MARGIN_S + 2 * STOP_GRACE_S
# Read by others than streamserve.config.
OTHER_VARIABLES = {"STREAMSERVE_CACHE"}
VARIABLES = {ENV_PREFIX + item.name.upper() for _, item in options()} | OTHER_VARIABLES
FILES = [ROOT / "compose.yaml", ROOT / "Dockerfile", *(path for path in DEPLOY.rglob("*") if path.is_file())]


def resource(kind: str) -> dict[str, Any]:
    (found,) = [one for one in RESOURCES if one["kind"] == kind]
    return found


def pod() -> dict[str, Any]:
    return resource("Deployment")["spec"]["template"]["spec"]


def container() -> dict[str, Any]:
    (only,) = pod()["containers"]
    return only


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str
    parser.read(UNIT)
    return parser["Service"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_variables_are_those_of_options(path: Path) -> None:
    named = set(re.findall(r"\bSTREAMSERVE_[A-Z_]+\b", path.read_text()))
    builds = {"STREAMSERVE_VENV_HOME", "STREAMSERVE_TORCH"} if path.name == "Dockerfile" else set()
    # A comment of the manifest tells of the variable that Kubernetes would make.
    assert named - builds <= VARIABLES


class TestCompose:
    def test_targets_are_stages(self) -> None:
        stages = {stage.name for stage in Dockerfile.parse((ROOT / "Dockerfile").read_text()).stages}
        gpu = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())
        for file in (COMPOSE, gpu):
            assert file["services"]["streamserve"]["build"]["target"] in stages
        assert gpu["services"].keys() <= COMPOSE["services"].keys()

    def test_the_server_has_the_time_to_stop(self) -> None:
        assert seconds(COMPOSE["services"]["streamserve"]["stop_grace_period"]) >= LONGEST_STOP_S

    def test_all_of_it_is_there_again_after_a_reboot(self) -> None:
        """A server that was told to stop has ended with 0, which is no failure."""
        assert {service["restart"] for service in COMPOSE["services"].values()} == {"unless-stopped"}

    def test_no_shared_memory_is_asked_for(self) -> None:
        for service in COMPOSE["services"].values():
            assert not {"ipc", "shm_size", "privileged", "network_mode"} & service.keys()

    def test_images_of_others_are_pinned_to_a_version(self) -> None:
        images = [service["image"] for service in COMPOSE["services"].values() if "build" not in service]
        assert len(images) == 2
        for image in images:
            assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+", image), image

    def test_nothing_is_open_to_the_network(self) -> None:
        for service in COMPOSE["services"].values():
            assert all(port.startswith("127.0.0.1:") for port in service["ports"])

    def test_what_is_mounted_is_there(self) -> None:
        for service in COMPOSE["services"].values():
            for volume in service["volumes"]:
                source = volume.partition(":")[0]
                assert source in COMPOSE["volumes"] or (ROOT / source).is_dir(), source


class TestPrometheusAndGrafana:
    def test_prometheus_asks_the_server(self) -> None:
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        (job,) = config["scrape_configs"]
        (targets,) = job["static_configs"]
        assert targets["targets"] == [f"streamserve:{ServerConfig().port}"]
        for name in config["rule_files"]:
            assert (DEPLOY / "prometheus" / name).is_file()

    def test_grafana_finds_prometheus_and_the_dashboard(self) -> None:
        provisioning = DEPLOY / "grafana" / "provisioning"
        (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())[
            "datasources"
        ]
        assert source["url"] == "http://prometheus:9090"
        assert source["type"] == "prometheus"
        (provider,) = yaml.safe_load((provisioning / "dashboards" / "streamserve.yaml").read_text())[
            "providers"
        ]
        service = COMPOSE["services"]["grafana"]
        mounts = dict(volume.split(":")[:2][::-1] for volume in service["volumes"])
        folder = ROOT / mounts[provider["options"]["path"]]
        home = service["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
        assert (folder / Path(home).name).is_file()


class TestKubernetes:
    def test_probes_ask_for_what_they_mean(self) -> None:
        probes = {name: container()[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
        paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
        assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/live"}
        start_s = probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"]
        assert start_s >= SupervisorConfig().startup_timeout

    def test_the_server_has_the_time_to_stop(self) -> None:
        (drain_s,) = [
            float(one["value"]) for one in container()["env"] if one["name"].endswith("DRAIN_TIMEOUT")
        ]
        before_s = container()["lifecycle"]["preStop"]["sleep"]["seconds"]
        longer = drain_s - SupervisorConfig().drain_timeout
        assert pod()["terminationGracePeriodSeconds"] >= before_s + longer + LONGEST_STOP_S

    def test_it_computes_on_what_it_requests(self) -> None:
        resources = container()["resources"]
        assert "cpu" not in resources["limits"]
        (threads,) = [one["value"] for one in container()["env"] if one["name"].endswith("CPU_THREADS")]
        assert threads == resources["requests"]["cpu"]

    def test_the_service_does_not_become_an_option(self) -> None:
        """Kubernetes tells pods of services by variables, and NAME_PORT would be read as --port."""
        assert resource("Service")["metadata"]["name"] == "streamserve"
        assert "STREAMSERVE_PORT" in VARIABLES
        assert pod()["enableServiceLinks"] is False

    def test_selectors_find_the_pods(self) -> None:
        labels = resource("Deployment")["spec"]["template"]["metadata"]["labels"]
        assert resource("Service")["spec"]["selector"] == labels
        for kind in ("Deployment", "PodDisruptionBudget"):
            assert resource(kind)["spec"]["selector"]["matchLabels"] == labels
        assert (
            resource("Deployment")["spec"]["replicas"]
            > resource("PodDisruptionBudget")["spec"]["maxUnavailable"]
        )

    def test_the_root_is_read_only_and_what_is_written_is_a_volume(self) -> None:
        assert container()["securityContext"]["readOnlyRootFilesystem"] is True
        mounts = {mount["mountPath"]: mount["name"] for mount in container()["volumeMounts"]}
        assert mounts.keys() == {"/cache", "/tmp"}
        assert set(mounts.values()) == {volume["name"] for volume in pod()["volumes"]}

    def test_the_user_is_that_of_the_image(self) -> None:
        user = re.search(r"^USER (\d+):(\d+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
        assert user is not None
        context = pod()["securityContext"]
        assert context["runAsNonRoot"] is True
        assert [str(context[name]) for name in ("runAsUser", "runAsGroup", "fsGroup")] == [
            user[1],
            user[2],
            user[2],
        ]


class TestSystemd:
    def test_the_server_has_the_time_to_stop(self) -> None:
        assert float(unit()["TimeoutStopSec"]) >= LONGEST_STOP_S

    def test_it_is_started_again_and_is_not_root(self) -> None:
        assert unit()["Restart"] == "on-failure"
        assert unit()["User"] == "streamserve"
        # mixed: the rest is left to the supervisor.
        assert unit()["KillMode"] == "mixed"

    def test_nothing_is_forbidden_that_it_needs(self) -> None:
        for name in ("MemoryDenyWriteExecute", "ProcSubset"):
            assert name not in unit()

    def test_every_setting_is_said_once(self) -> None:
        names = re.findall(r"^([A-Z]\w+)=", UNIT.read_text(), re.MULTILINE)
        assert {name for name in names if names.count(name) > 1} == {"Environment"}


def seconds(text: str) -> float:
    """What compose.yaml means by 50s."""
    return float(text.removesuffix("s"))
