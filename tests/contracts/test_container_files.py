"""Dockerfile, .dockerignore and the page's container examples keep to each other and the code."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml

from taskd.config import Settings, parse_duration_s
from taskd.worker import longest_stop_s
from tests.system import dockerfile

CHECKOUT = dockerfile.CHECKOUT
PAGE = (CHECKOUT / "taskd/docs/howto/containers.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
STAGES = dockerfile.ours()
FINAL = STAGES[-1]
CONFIG = dockerfile.config_of(FINAL)


def example(key: str) -> Any:
    """The one YAML block of the page that has this key."""
    blocks = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
    [found] = [block for block in blocks if key in block]
    return found


@pytest.fixture
def worker() -> Any:
    return example("services")["services"]["worker"]


@pytest.fixture
def pod() -> Any:
    return example("kind")["spec"]["template"]["spec"]


def test_the_worker_is_process_1_and_no_root() -> None:
    assert CONFIG.entrypoint == ["taskd"]
    assert CONFIG.cmd == ["run"]
    assert CONFIG.stop_signal == "SIGTERM"
    uid, _, gid = CONFIG.user.partition(":")
    assert int(uid) > 0
    assert int(gid) > 0


def test_a_forgotten_dsn_is_no_private_database() -> None:
    assert CONFIG.env["TASKD_EMBEDDED"] == "off"
    assert CONFIG.env["TASKD_LOG_FORMAT"] == "json"
    names = {f"TASKD_{name.upper()}" for name in Settings.__slots__}
    assert {name for name in CONFIG.env if name.startswith("TASKD_")} <= names


def test_the_health_check_asks_for_this_worker_and_has_limits() -> None:
    assert CONFIG.health == ["taskd", "health", "--worker"]
    assert CONFIG.health_options.keys() == {"interval", "timeout", "start-period", "retries"}
    assert all(step.options.get("from") == "builder" for step in FINAL.all("COPY"))


def test_both_stages_have_the_same_base() -> None:
    # The environment that one makes has the other's Python at the same place.
    assert len({stage.base for stage in STAGES}) == 1


def test_the_labels_say_what_the_project_says() -> None:
    labels = {name.rpartition(".")[2]: value for name, value in CONFIG.labels.items()}
    assert labels["title"] == PROJECT["name"]
    assert labels["version"] == PROJECT["version"]
    assert labels["licenses"] == PROJECT["license"]


def test_only_locked_packages_come_over_the_network() -> None:
    runs = " && ".join(step.text for stage in STAGES for step in stage.all("RUN"))
    for line in runs.split("&&"):
        if "pip" in line.split()[0] or "/pip" in line.split()[0]:
            assert "--require-hashes" in line or "--no-index" in line, line


def test_the_context_holds_what_the_build_copies_and_nothing_else() -> None:
    sources = {
        source
        for stage in STAGES
        for step in stage.all("COPY")
        if "from" not in step.options
        for source in step.text.split()[:-1]
    }
    files = dockerfile.context()
    assert {path.partition("/")[0] for path in files} == sources
    assert not [path for path in files if "__pycache__" in path or path.endswith(".pyc")]
    assert "taskd/worker/worker.py" in files
    assert "sql/objects.tsv" in files


def test_the_last_rule_that_matches_decides_what_stays_out() -> None:
    ignored = dockerfile.Ignore("# all\n*\n!sql\n**/*.py[co]\n")
    assert ignored("tests/x.py")
    assert not ignored("sql/queries/ack.sql")
    assert ignored("sql/queries/x.pyc")


def test_continued_lines_and_comments_between_them_are_one_instruction() -> None:
    [stage] = dockerfile.read("ARG B=x\nFROM ${B} AS y\n# no\nRUN a \\\n  # why\n  && b\n")
    assert (stage.base, stage.name) == ("x", "y")
    assert stage.the("RUN").text == "a && b"
    with pytest.raises(ValueError, match="ADD"):
        dockerfile.read("FROM x\nADD y z\n")
    with pytest.raises(ValueError):
        dockerfile.config_of(dockerfile.read("FROM x\nCMD taskd run\n")[0])


def test_the_examples_let_a_stop_take_as_long_as_it_may(worker: Any, pod: Any) -> None:
    needed_s = longest_stop_s(Settings())
    assert needed_s >= Settings().drain_s + Settings().cancel_s + 5
    assert parse_duration_s(worker["stop_grace_period"]) >= needed_s
    assert pod["terminationGracePeriodSeconds"] >= needed_s
    [stop_s] = re.findall(r"--stop-timeout (\d+)", PAGE)
    assert int(stop_s) >= needed_s


def test_the_examples_take_every_right_away(worker: Any, pod: Any) -> None:
    assert worker["read_only"] is True
    assert worker["cap_drop"] == ["ALL"]
    [container] = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["securityContext"]["runAsNonRoot"] is True
    user = "{runAsUser}:{runAsGroup}".format_map(pod["securityContext"])
    assert user == CONFIG.user


def test_the_examples_read_the_dsn_from_a_secret_file(worker: Any, pod: Any) -> None:
    [secret] = worker["secrets"]
    assert worker["environment"]["TASKD_DSN_FILE"] == f"/run/secrets/{secret}"
    assert secret in example("services")["secrets"]
    [container] = pod["containers"]
    [variable], [mount] = container["env"], container["volumeMounts"]
    assert variable["name"] == "TASKD_DSN_FILE"
    assert variable["value"].startswith(mount["mountPath"] + "/")
    [volume] = pod["volumes"]
    assert volume["name"] == mount["name"]
    assert volume["secret"]["defaultMode"] == 0o440
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]


def test_no_example_kills_a_worker_because_its_database_is_away(pod: Any) -> None:
    [container] = pod["containers"]
    assert container["readinessProbe"]["exec"]["command"] == CONFIG.health
    assert not {"livenessProbe", "startupProbe"} & container.keys()


def test_every_command_of_the_examples_exists(worker: Any, pod: Any) -> None:
    from taskd.cli import cli

    [container] = pod["containers"]
    for args in (worker["command"], container["args"], CONFIG.health[1:], CONFIG.cmd):
        command = cli.get_command(None, args[0])  # type: ignore[arg-type]
        assert command is not None
        command.make_context(args[0], list(args[1:]), resilient_parsing=False).close()


def test_the_probes_over_http_ask_the_port_that_the_worker_serves() -> None:
    container = example("livenessProbe")
    [port] = container["ports"]
    assert container["args"][-2:] == ["--http", f"0.0.0.0:{port['containerPort']}"]
    asked = {
        kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")
    }
    assert all(each["port"] == port["name"] for each in asked.values())
    assert [each["path"] for each in asked.values()] == ["/livez", "/livez", "/readyz"]
