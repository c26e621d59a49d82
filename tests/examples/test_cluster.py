"""The recipes for clusters say what the ranks need to find each other."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import parse_args

from composer_dist.cli.init import PRESETS
from composer_dist.distributed.ranks.launcher_variables import torchrun_variables
from tests.kit.ports import reserved_port
from tests.kit.scripts.hosts import on_two_hosts

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"


def _directives() -> dict[str, str]:
    text = (EXAMPLES / "slurm.sbatch").read_text()
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.M))


def test_slurm_gives_every_task_a_rank_and_a_gpu() -> None:
    asked = _directives()
    nodes, tasks = int(asked["nodes"]), int(asked["ntasks-per-node"])
    assert tasks == int(asked["gpus-per-node"])
    given = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": f"gpu[1-{nodes}]"}
    given |= {"SLURM_NTASKS": str(nodes * tasks), "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})"}
    found = [
        torchrun_variables(given | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task % tasks)})
        for task in range(nodes * tasks)
    ]
    assert [one["RANK"] for one in found] == [str(rank) for rank in range(16)]
    assert [one["LOCAL_RANK"] for one in found] == [str(rank % 8) for rank in range(16)]
    same = {(one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["MASTER_ADDR"]) for one in found}
    assert same == {("16", "8", "gpu1")}


def test_slurm_s_script_is_a_shell_script_that_saves_before_it_ends() -> None:
    subprocess.run(["bash", "-n", str(EXAMPLES / "slurm.sbatch")], check=True)
    assert _directives()["signal"] == "TERM@120"
    command = (EXAMPLES / "slurm.sbatch").read_text().splitlines()[-1]
    assert command == 'srun composer-dist train "${1:-run.yaml}"'


def test_kubernetes_starts_a_torchrun_on_every_machine() -> None:
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    asked = parse_args(container["command"][1:])
    assert int(asked.nnodes) == spec["completions"] == spec["parallelism"]
    assert int(asked.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    # The first pod of an indexed job is called JOB-0, and found under the name of its service.
    host, _, port = asked.rdzv_endpoint.partition(":")
    assert host == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    name = service["metadata"]["name"]
    assert (service["spec"]["clusterIP"], pod["subdomain"], port) == ("None", name, "29400")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert (asked.module, asked.training_script) == (True, "composer_dist")
    assert asked.training_script_args[0] == "train"
    assert container["env"] == [{"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"}]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


_RANK = """
import json, sys
import torch
from torch import nn
from composer_dist import FSDP2Config, ParallelismConfig, MeshConfig
from composer_dist.checkpoint import full_model_state
from composer_dist.distributed import parallelize_model, process_group

process_group.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = "hsdp" if sys.argv[1] == "hsdp" else FSDP2Config()
done = parallelize_model(model, config, optimizer)
world, rank = process_group.world_and_rank()
model(torch.arange(32.0).view(4, 8).chunk(world)[rank]).square().mean().backward()
optimizer.step()
state = full_model_state(model)
if rank == 0:
    sizes = dict(zip(done.mesh.mesh_dim_names, done.mesh.shape))
    print(json.dumps([world, sizes, {name: value.tolist() for name, value in state.items()}]))
process_group.destroy()
"""


def _agents(count: int, per_node: int, script: Path, *arguments: str) -> Any:
    """What rank 0 prints, with one torchrun for each host, which meet at the first."""
    common = ["-m", "torch.distributed.run", f"--nnodes={count}", f"--nproc-per-node={per_node}"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with reserved_port() as port:
        meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test"]
        command = [sys.executable, *common, *meet, str(script), *arguments]
        agents = [subprocess.Popen(command, **pipes) for _ in range(count)]
        try:
            told = [agent.communicate(timeout=240) for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
    assert [agent.returncode for agent in agents] == [0] * count, told
    return json.loads("".join(out for out, _ in told))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """What every rank runs."""
    path = tmp_path / "rank.py"
    path.write_text(_RANK)
    return path


def _assert_as_alone(script: Path, state: dict[str, Any]) -> None:
    alone = subprocess.run([sys.executable, str(script), "fsdp"], capture_output=True, text=True, check=True)
    expected = json.loads(alone.stdout)[2]
    assert state.keys() == expected.keys()
    for name, values in expected.items():
        for row, wanted in zip(values, state[name], strict=True):
            assert wanted == pytest.approx(row, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("per_node", "strategy", "mesh"),
    [(1, "fsdp", {"dp_shard": 2}), (2, "hsdp", {"dp_replicate": 2, "dp_shard": 2})],
)
def test_two_agents_train_as_one_process(
    script: Path, per_node: int, strategy: str, mesh: dict[str, int]
) -> None:
    """With two ranks each, hsdp shards within a host and replicates across hosts."""
    world, sizes, state = _agents(2, per_node, script, strategy)
    assert (world, sizes) == (2 * per_node, mesh)
    _assert_as_alone(script, state)


def _torchruns(*command: str) -> list[list[str]]:
    """A torchrun on each of two hosts, which meet at the first; names that lead back tell torch nothing."""
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=10.7.0.1:29400"]
    whole = [sys.executable, "-m", "torch.distributed.run", *options, "--rdzv-id=test"]
    hosts = (("true", "10.7.0.1"), ("false", "10.7.0.2"))
    return [[*whole, f"--rdzv-conf=is_host={first}", f"--local-addr={own}", *command] for first, own in hosts]


@pytest.mark.slow
def test_two_hosts_with_networks_of_their_own_train_as_one_process_does(script: Path) -> None:
    commands = zip(("va", "vb"), _torchruns(str(script), "fsdp"), strict=True)
    told = on_two_hosts(*(["env", f"GLOO_SOCKET_IFNAME={name}", *command] for name, command in commands))
    world, sizes, state = json.loads("".join(told))
    assert (world, sizes) == (2, {"dp_shard": 2})
    _assert_as_alone(script, state)


@pytest.mark.slow
def test_a_run_on_two_hosts_finds_the_interface_between_them_by_itself(tmp_path: Path) -> None:
    found = []
    run = ["-m", "composer_dist", "train", str(PRESETS / "vision.yaml"), "trainer.max_duration=3ba"]
    on_two_hosts(*_torchruns(*run, f"out={tmp_path}/both"))
    subprocess.run([sys.executable, *run, f"out={tmp_path}/alone"], check=True, capture_output=True)
    for name in ("both", "alone"):
        rows = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        found.append([row["loss/train/total"] for row in rows if "loss/train/total" in row])
    assert len(found[0]) == 3
    assert found[0] == pytest.approx(found[1], rel=1e-4)


_RAY = """
import ray, ray_train
ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, _temp_dir={temporary!r})
print("RESULT", ray_train.main({workers}))
"""


@pytest.mark.slow
def test_ray_trains_on_two_workers_as_on_one(tmp_path: Path) -> None:
    found = []
    for workers in (1, 2):
        command = ["-c", _RAY.format(temporary=f"/tmp/ray-{tmp_path.name[-20:]}", workers=workers)]
        path = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])  # the workers' too
        options: Any = {"env": os.environ | {"PYTHONPATH": path}, "timeout": 300}
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, **options)
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(eval(done.stdout.rpartition("RESULT")[2]))
    assert found[1]["norm"] == pytest.approx(found[0]["norm"], rel=1e-4)  # of all workers together
