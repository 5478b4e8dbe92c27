"""The files of examples/cluster are read by what reads them: bash, YAML, kubectl where it is, and the rules of joining."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from jshard.cli import parse
from jshard.cli.launch import command_of, split
from jshard.launch.cluster_env import found
from jshard.runs.names import restarts

ROOT = Path(__file__).parent.parent.parent
CLUSTER = ROOT / "examples" / "cluster"


@pytest.mark.parametrize("script", sorted(path.name for path in CLUSTER.iterdir() if path.suffix in (".sh", ".sbatch")))
def test_cluster_scripts_are_bash(script):
    assert subprocess.run(["bash", "-n", CLUSTER / script], capture_output=True, text=True).stderr == ""


def test_cluster_slurm_asks_for_one_process_on_each_node():
    said = dict(
        line.removeprefix("#SBATCH --").split("=", 1)
        for line in (CLUSTER / "slurm.sbatch").read_text().splitlines()
        if line.startswith("#SBATCH")
    )
    assert (said["nodes"], said["ntasks-per-node"], said["signal"]) == ("2", "1", "TERM@120")


def test_cluster_jobset_finds_its_processes(monkeypatch):
    monkeypatch.chdir(ROOT)
    jobset = yaml.safe_load((CLUSTER / "jobset.yaml").read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each.get("value", "0") for each in container["env"]}
    assert restarts(environment) == 0 and restarts({**environment, "JSHARD_RESTART": "2"}) == 2
    membership = found({**environment, "KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"})
    assert membership is not None
    assert (membership.processes, membership.rank) == (job["template"]["spec"]["completions"], 1)
    assert membership.address == ("digits-workers-0-0.digits", container["ports"][0]["containerPort"])
    assert membership.address[0] == f"{jobset['metadata']['name']}-{job['name']}-0-0.{jobset['metadata']['name']}"
    _, program = split(container["command"])
    assert command_of(program)[1:] == ["-m", "jshard", *program]


@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not here; install it to have jobset.yaml read by it"
)
def test_cluster_jobset_is_read_by_kubectl():
    command = ["kubectl", "label", "--local", "-f", CLUSTER / "jobset.yaml", "read=yes", "-o", "name"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "jobset.jobset.x-k8s.io/digits"), done.stderr


def test_the_page_on_processes_names_programs_that_can_be_launched(monkeypatch, tmp_path):
    page = (ROOT / "docs" / "many-processes.md").read_text()
    lines = [line.removeprefix("$ jshard ").split() for line in page.splitlines() if line.startswith("$ jshard launch")]
    assert len(lines) == 4
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    for words in lines:
        own, program = split(words)
        assert parse(words).words == program
        assert command_of(program)[1:]
        assert own[0] == "launch"


def test_nothing_between_processes_is_pickled():
    for module in (ROOT / "jshard").rglob("*.py"):
        text = module.read_text()
        for node in ast.walk(ast.parse(text)) if re.search("pickle|dill|marshal|shelve", text) else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "cloudpickle", "dill", "marshal", "shelve"} & {
                name.split(".")[0] for name in names
            }, module
