"""Two processes on one machine (gloo) against one: the loss is over the prompts of all ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import psutil
import pyarrow.parquet as pq
import pytest
import torch
import yaml

import distributed_worker
from firedistill import SelfDistillConfig, SelfDistillTrainer
from firedistill.run.checkpoints import CheckpointError
from firedistill.run.directory import finished_step
from firedistill.run.log import read_jsonl
from killable import without_times
from tiny import ToyTask, is_training

TESTS = Path(__file__).parent


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available() or os.name == "nt", reason="needs torch.distributed with gloo"),
]
# Rollouts are scripted where one process must have the same ones as two; sampled ones depend on the process.
COMPARED = ["warmstart", "fire:scripted", "on_policy_sft:scripted", "srpo:scripted", "scope:scripted", "top_d:scripted"]
COMPARED += ["sdpg:scripted", "rlcsd:scripted", "fire:head", "on_policy_sft:head"]
SAMPLED = ["fire", "tropd", "fire:drawn"]
# A signal to one of the processes stops them after the second step; they are started again.
STOPPED = ["fire:stopped", "tropd:stopped"]


def launch(worker: str, *arguments: str, processes: int = 2, **variables: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += [str(TESTS / worker), *arguments]
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout[-200:] + result.stderr


@pytest.fixture(scope="module")
def folders(checkpoint, tmp_path_factory):
    """All runs by one process, and by two with half of the prompts each."""
    folder = tmp_path_factory.mktemp("runs")
    for kind in COMPARED:
        distributed_worker.main(kind, checkpoint, str(folder / "one" / kind), 4)
    launch("distributed_worker.py", ",".join(COMPARED + SAMPLED + STOPPED), checkpoint, str(folder / "two"), "2")
    return folder / "one", folder / "two"


def weights(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"rank{rank}.pt", weights_only=True)


@pytest.mark.parametrize("kind", COMPARED)
def test_two_ranks_equal_one_process_with_the_same_prompts(kind, folders):
    """Weights over groups and over the whole step, and the updates that a rollout batch serves, do not depend on the split."""
    one, two = (folder / kind for folder in folders)
    first, second = weights(two, 0), weights(two, 1)
    for name, value in weights(one, 0).items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], value, rtol=1e-3, atol=1e-5)
    for a, b in zip(read_jsonl(one / "metrics.jsonl"), read_jsonl(two / "metrics.jsonl"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4, abs=1e-6) and a["grad_norm"] == pytest.approx(
            b["grad_norm"], rel=1e-3
        )
        assert a["generated_tokens"] == b["generated_tokens"] and a["skipped_update"] == b["skipped_update"]


@pytest.mark.parametrize("kind", SAMPLED)
def test_two_ranks_stay_together(kind, folders):
    run = folders[1] / kind
    first, second = weights(run, 0), weights(run, 1)
    for name, value in first.items():
        assert torch.equal(value, second[name])
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3] and all(row["skipped_update"] == 0 for row in rows)
    evaluations = read_jsonl(run / "evals.jsonl")
    assert [row["n"] for row in evaluations] == [5] * len(evaluations)


@pytest.mark.parametrize("kind", COMPARED)
def test_every_rank_evaluates_its_share_and_the_sum_is_right(kind, folders):
    """At the start, where the weights are bit-identical."""
    found = []
    for folder in folders:
        row = read_jsonl(folder / kind / "evals.jsonl")[0]
        answers = pq.read_table(folder / kind / "rollouts" / "eval_000000.parquet").to_pylist()
        found.append((without_times(row), sorted((a["uid"], a["response"], a["correct"]) for a in answers)))
        assert row["n"] == 5 and row["accuracy"] == sum(a["correct"] for a in answers) / 5
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", COMPARED)
def test_rollouts_of_all_ranks_are_logged(kind, folders):
    """In the order of the prompts; in the first step, where the weights are bit-identical."""
    one, two = (pq.read_table(folder / kind / "rollouts" / "step_000001.parquet").to_pylist() for folder in folders)
    assert one == two and len({row["uid"] for row in two}) == 4


def test_ranks_sample_their_share_of_an_evaluation(folders):
    run = folders[1] / "fire"
    uids = Counter(row["uid"] for row in pq.read_table(run / "rollouts" / "sampled_000000.parquet").to_pylist())
    assert uids == {example.uid: 2 for example in ToyTask().examples("eval", 5)}
    assert read_jsonl(run / "evals.jsonl")[0]["sampled_accuracy"] >= 0


@pytest.mark.parametrize("kind", STOPPED)
def test_two_ranks_resume_from_their_checkpoint_bit_for_bit(kind, folders):
    stopped, whole = folders[1] / kind, folders[1] / kind.partition(":")[0]
    for rank in (0, 1):
        expected = weights(whole, rank)
        for name, value in weights(stopped, rank).items():
            assert torch.equal(value, expected[name])
    for name in ("metrics.jsonl", "evals.jsonl"):
        rows, expected = ([without_times(row) for row in read_jsonl(folder / name)] for folder in (stopped, whole))
        assert json.dumps(rows) == json.dumps(expected)
    assert (stopped / "checkpoint-2").is_dir() and (stopped / "adapter").is_dir()


def test_another_number_of_processes_is_another_run(folders):
    run = folders[1] / "fire:stopped"
    changes = {"per_device_train_batch_size": 4, "ddp_backend": None}
    config = SelfDistillConfig(**yaml.safe_load((run / "config.yaml").read_text()) | changes)
    trainer = SelfDistillTrainer(args=config, task=distributed_worker.UnpicklableTask())
    with pytest.raises(CheckpointError, match="per_device_train_batch_size was 2, is 4; world_size was 2, is 1"):
        trainer.checkpoint_to_resume("auto")


# ---- The command line under torchrun -----------------------------------------------------------------------------------------

LAB = ["--save_steps", "2", "--max_new_tokens", "6", "--eval_size", "0", "--attribution_examples", "0"]


def torchrun(
    run: Path, output, *arguments: str, steps=12, nodes=("--standalone", "--nproc_per_node=2"), before=(), **variables: str
) -> subprocess.Popen:
    """Two processes of `firedistill train lab`, or those of one node, as a user starts them."""
    command = [*before, sys.executable, "-P", "-m", "torch.distributed.run", *nodes, "-m", "firedistill"]
    command += ["train", "lab", "--output_dir", str(run), "--preflight", "skip", "--max_steps", str(steps), *LAB]
    command += arguments
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def wait_for(condition, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited for too long"
        time.sleep(0.05)


LONG_RUN = 80  # steps, which take longer than another launcher needs to start


@pytest.fixture(scope="module")
def orphans(tmp_path_factory):
    """A run whose launcher is killed while another launcher tries to start in the same directory; it is resumed afterwards."""
    folder = tmp_path_factory.mktemp("orphans")
    run = folder / "run"
    with (
        open(folder / "first.log", "w") as first,
        open(folder / "second.log", "w") as second,
        open(folder / "third.log", "w") as third,
    ):
        launcher = torchrun(run, first, steps=LONG_RUN)
        wait_for(lambda: (run / "checkpoint-2").is_dir())
        intruder = torchrun(run, second, steps=LONG_RUN)
        wait_for(lambda: intruder.poll() is not None or "is training in" in (folder / "second.log").read_text())
        launcher.kill()
        launcher.wait()
        wait_for(lambda: not is_training(run))
        stopped_at = len(read_jsonl(run / "metrics.jsonl"))
        resumed = torchrun(run, third, steps=LONG_RUN).wait(300)
    return run, intruder.wait(120), stopped_at, resumed, {path.stem: path.read_text() for path in folder.glob("*.log")}


def test_a_second_launcher_is_refused(orphans):
    _, intruder, _, _, logs = orphans
    assert intruder == 1 and re.search(r"firedistill train: process \d+ on host \S+ is training in", logs["second"])


def test_processes_without_a_launcher_stop_with_a_checkpoint(orphans):
    run, _, stopped_at, resumed, logs = orphans
    assert stopped_at < LONG_RUN and f"stopped by SIGTERM after step {stopped_at}" in logs["first"]
    assert "has ended; this process stops after the current step" in logs["first"]
    assert resumed == 0 and f"resuming after step {stopped_at}" in logs["third"]
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [*range(1, LONG_RUN + 1)]
    assert finished_step(run) == LONG_RUN


def test_threads_of_the_process_group_end_before_the_interpreter_does(tmp_path):
    """A thread of Gloo that still releases a tensor then would abort a run that has ended."""
    (tmp_path / "command.py").write_text("""
import sys, time
from pathlib import Path
from firedistill.cli import main, train

destroy = train.dist.destroy_process_group

def name_of(task):
    try:
        return (task / "comm").read_text().strip()
    except OSError:  # it has ended
        return ""

def has_thread():
    return "pt_gloo_runloop" in map(name_of, Path("/proc/self/task").iterdir())

def tell(when, patience=0):
    for _ in range(100 * patience):  # the system lists a thread for a moment after it has been joined
        if not has_thread():
            break
        time.sleep(0.01)
    print(when, has_thread(), flush=True)

def destroyed():
    destroy()
    tell("while the trainer exists:")

train.dist.destroy_process_group = destroyed
main.main(sys.argv[1:])
tell("at the end:", patience=5)
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(tmp_path / "command.py"), "train", "lab", "--max_steps", "1", *LAB, "--output_dir", str(tmp_path / "run")]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)
    told = sorted(line for line in done.stdout.splitlines() if line.endswith(("True", "False")))
    assert told == ["at the end: False"] * 2 + ["while the trainer exists: True"] * 2, done.stdout + done.stderr


def test_a_thread_that_frees_a_tensor_does_not_hold_up_the_end_of_the_process_group(tmp_path):
    """A thread of Gloo then holds the lock of the group and waits for Python's, which the end of the group must not hold."""
    (tmp_path / "command.py").write_text("""
import faulthandler, threading, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from firedistill.cli.train import end_process_group

freeing = threading.Event()

class SlowToFree(torch.Tensor):
    def __del__(self):
        freeing.set()
        time.sleep(1)

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(2, 2))
model.itself = [model]  # a cycle: freed by the garbage collector only
del model
if dist.get_rank() == 0:
    time.sleep(1)  # so that the other process no longer refers to its tensor when the thread has gathered it
    dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.ones(1))
else:
    value = torch.ones(1).as_subclass(SlowToFree)
    work = dist.all_gather([torch.zeros(1), torch.zeros(1)], value, async_op=True)
    del work, value
    assert freeing.wait(60)
faulthandler.dump_traceback_later(60, exit=True)
end_process_group()
print("ended", flush=True)
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(tmp_path / "command.py")]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["ended"] * 2, done.stderr


# ---- Other launchers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_node(tmp_path_factory) -> Path:
    """The run by two processes of one node."""
    run = tmp_path_factory.mktemp("one-node") / "run"
    with open(run.parent / "log", "w") as log:
        assert torchrun(run, log).wait(300) == 0, (run.parent / "log").read_text()[-3000:]
    return run


def same_run(one: Path, two: Path) -> bool:
    rows, expected = ([without_times(row) for row in read_jsonl(run / "metrics.jsonl")] for run in (one, two))
    weights = "adapter/adapter_model.safetensors"
    return rows == expected and (one / weights).read_bytes() == (two / weights).read_bytes()


@pytest.fixture
def machines(tmp_path):
    """Two machines: the beginning of a command on each, its address, and its network interface.

    They are network namespaces, joined by a cable. Where the system does not permit that, both are this machine.
    """
    names = [f"fd{os.getpid()}{side}" for side in "ab"]
    steps = [["netns", "add", name] for name in names]
    steps += [["link", "add", names[0], "netns", names[0], "type", "veth", "peer", names[1], "netns", names[1]]]
    for number, name in enumerate(names, start=1):
        inside = ["-n", name]
        steps += [[*inside, "addr", "add", f"10.211.77.{number}/24", "dev", name]]
        steps += [[*inside, "link", "set", device, "up"] for device in ("lo", name)]
    try:
        for step in steps:
            subprocess.run(["ip", *step], check=True, capture_output=True)
        yield [(["ip", "netns", "exec", name], f"10.211.77.{number}", name) for number, name in enumerate(names, start=1)]
    except (OSError, subprocess.CalledProcessError):
        yield [([], "127.0.0.1", "lo")] * 2
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_two_nodes_give_what_one_node_gives(machines, one_node, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"{machines[0][1]}:{free.getsockname()[1]}"
    nodes = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}", "--rdzv_id=test"]
    with open(tmp_path / "log", "w") as log:
        started = []
        for number, (before, address, interface) in enumerate(machines):  # the host's name is not the address of a namespace
            own = [*nodes, f"--local_addr={address}", f"--rdzv_conf=is_host={1 - number}"]
            started.append(torchrun(tmp_path / "run", log, before=before, nodes=own, GLOO_SOCKET_IFNAME=interface))
        assert [launcher.wait(300) for launcher in started] == [0, 0], (tmp_path / "log").read_text()[-3000:]
    assert same_run(tmp_path / "run", one_node)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'firedistill[ray]'")
def test_ray_starts_lost_workers_again_and_gives_what_torchrun_gives(one_node, tmp_path):
    run, example = tmp_path / "run", TESTS.parent / "examples" / "ray_train.py"
    command = [sys.executable, str(example), "lab", "--workers", "2", "--restarts", "1", "--output_dir", str(run)]
    command += ["--max_steps", "12", *LAB]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FIREDISTILL_TEST": str(run)}  # marks the workers
    with open(tmp_path / "log", "w") as log:
        launcher = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        wait_for(lambda: (run / "checkpoint-2").is_dir() or launcher.poll() is not None, 400)
        workers = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if "RayTrainWorker" in process.name() + "".join(process.cmdline()) and (
                    process.environ().get("FIREDISTILL_TEST") == str(run)
                ):
                    workers.append(process)
        assert len(workers) == 2, (tmp_path / "log").read_text()[-3000:]
        workers[1].kill()
        assert launcher.wait(400) == 0, (tmp_path / "log").read_text()[-3000:]
    assert same_run(run, one_node)


WITH_DEEPSPEED = {"DS_ACCELERATOR": "cpu", "FIREDISTILL_TEST_DEEPSPEED": "1"}
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed (docs/tests.md)"
)


@needs_deepspeed
@pytest.mark.parametrize("kind", COMPARED + SAMPLED)
def test_deepspeed_trains_as_ddp_does(kind, checkpoint, folders, tmp_path):
    launch("distributed_worker.py", kind, checkpoint, str(tmp_path), "2", **WITH_DEEPSPEED)
    for rank in (0, 1):
        expected = weights(folders[1] / kind, rank)
        for name, value in weights(tmp_path / kind, rank).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)
    rows, expected = (read_jsonl(folder / kind / "metrics.jsonl") for folder in (tmp_path, folders[1]))
    assert [row["generated_tokens"] for row in rows] == [row["generated_tokens"] for row in expected]
    assert [row["grad_norm"] for row in rows] == pytest.approx([row["grad_norm"] for row in expected], rel=1e-4)


@needs_deepspeed
def test_a_killed_run_with_deepspeed_resumes_bit_for_bit(tmp_path):
    (tmp_path / "zero2.json").write_text(json.dumps(distributed_worker.ZERO_2))
    options = ["--deepspeed", str(tmp_path / "zero2.json")]
    runs = [tmp_path / "whole", tmp_path / "killed"]
    with open(tmp_path / "log", "w") as log:
        whole, killed = (torchrun(run, log, *options, **WITH_DEEPSPEED) for run in runs)
        wait_for(lambda: (runs[1] / "checkpoint-4").is_dir() or killed.poll() is not None)
        for process in (*psutil.Process(killed.pid).children(), killed):
            process.kill()
        killed.wait()
        wait_for(lambda: not is_training(runs[1]))
        assert len(read_jsonl(runs[1] / "metrics.jsonl")) < 12
        resumed = torchrun(runs[1], log, *options, **WITH_DEEPSPEED)
        assert [whole.wait(300), resumed.wait(300)] == [0, 0], (tmp_path / "log").read_text()[-3000:]
    assert same_run(*runs) and "resuming after step" in (tmp_path / "log").read_text()


class StubRay:
    """Ray's modules. `given` is what the workers get."""

    init = cluster_resources = FailureConfig = RunConfig = ScalingConfig = TorchConfig = dict

    def TorchTrainer(self, work, train_loop_config, **options):
        self.given = train_loop_config
        return SimpleNamespace(fit=lambda: None)


def test_ray_workers_work_in_the_directory_of_the_command(tmp_path, monkeypatch):
    """Ray starts them in a folder of its own."""
    ray, home, session, found = StubRay(), tmp_path / "home", tmp_path / "session", []
    for name in ("ray", "ray.train", "ray.train.torch"):
        monkeypatch.setitem(sys.modules, name, ray)
    spec = importlib.util.spec_from_file_location("ray_train", TESTS.parent / "examples" / "ray_train.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    for folder in (home, session):
        folder.mkdir()
    (home / "my.yaml").write_text("task: data.jsonl")
    (home / "data.jsonl").touch()
    monkeypatch.chdir(home)
    example.main(["my.yaml", "--output_dir", "runs/ray"])

    def trainer(args):
        found.extend([Path(args.task).resolve(strict=True), Path(args.run_dir).resolve()])
        return SimpleNamespace(train=lambda: None)

    monkeypatch.setattr(example, "SelfDistillTrainer", trainer)
    monkeypatch.chdir(session)
    example.train(ray.given)
    assert found == [home / "data.jsonl", home / "runs" / "ray"]
    with pytest.raises(
        FileNotFoundError, match="this node has no directory .*gone, to which the paths in the options are relative"
    ):
        example.train(ray.given | {"directory": str(tmp_path / "gone")})


@pytest.mark.parametrize(("kind", "different"), [("fire:apart", "train_data"), ("fire:rates", "learning_rate")])
def test_processes_with_different_data_or_settings_are_refused(kind, different, checkpoint, tmp_path):
    """Each process would train on problems that the fingerprint of the run does not know, or with steps of its own."""
    run = tmp_path / kind
    (run / "adapter").mkdir(parents=True)
    (run / "metrics.jsonl").touch()  # of a run
    with pytest.raises(AssertionError, match=f"the processes have different {different}: a task must return the same examples"):
        launch("distributed_worker.py", kind, checkpoint, str(tmp_path), "2")
    assert (run / "adapter").is_dir(), "nothing of an earlier run is removed before"
