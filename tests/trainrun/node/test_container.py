"""Jobs in containers, against a stand-in for the engine (fake_docker.py): no real engine runs here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainrun.node.commands import run
from trainrun.node.container import folders_of, prepare_container
from trainrun.node.container_command import ContainerNode, container_command, devices_here
from trainrun.node.container_pull import pull
from trainrun.node.docker_root import move_to_instance_store
from trainrun.node.launch import TorchrunLaunch
from trainrun.node.outcome import StepFailed
from trainrun.node.places import Places
from trainrun.node.processes import kill_descendants
from trainrun.node.software import Software
from trainrun.spec import ClusterSpec, JobSpec, MountSpec, RunSpec, StorageSpec, VolumeSpec

DIGEST = "sha256:" + "1" * 64
IMAGE = f"registry.test/train@{DIGEST}"
ECR = "123456789012.dkr.ecr.us-east-1.amazonaws.com/train:1"


@pytest.fixture(autouse=True)
def only_own_processes_are_killed(monkeypatch):
    """An agent kills all below itself when a launch is over; pytest has children of its own, such as jsii's kernel."""

    def kill(pid: int) -> None:
        if pid != os.getpid():
            kill_descendants(pid)

    monkeypatch.setattr("trainrun.node.launch.kill_descendants", kill)


class Docker:
    """The stand-in, on the PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.say(images={IMAGE: DIGEST})

    def say(self, **files: Any) -> None:
        for name, content in files.items():
            (self.folder / f"{name}.json").write_text(json.dumps(content))

    def calls(self, command: str) -> list[list[str]]:
        lines = (self.folder / "log").read_text().splitlines()
        return [call for line in lines if (call := json.loads(line))[0] == command]

    @property
    def containers(self) -> list[str]:
        return [file.stem for file in self.folder.glob("*.container")]


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Docker]:
    folder, programs = tmp_path / "docker", tmp_path / "programs"
    folder.mkdir()
    programs.mkdir()
    script = Path(__file__).with_name("fake_docker.py")
    (programs / "docker").write_text(f'#!/bin/sh\nexec {sys.executable} -S {script} "$@"\n')
    (programs / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_DOCKER", str(folder))
    monkeypatch.setattr("trainrun.node.built_environment.PAUSES", (0.0, 0.0))
    subprocess.run([sys.executable, "-S", script, "serve"], check=True)
    yield Docker(folder)
    (folder / "end").touch()


@pytest.fixture
def places(tmp_path: Path) -> Places:
    made = Places(root=tmp_path / "root")
    for folder in (made.project, made.state, made.logs, made.rank_logs):
        folder.mkdir(parents=True)
    return made


def spec(*, accelerator: str = "none", storage: dict[str, Any] | None = None, **job: Any) -> RunSpec:
    return RunSpec(
        run="demo",
        region="us-east-1",
        cluster=ClusterSpec(
            name="c",
            instance_type="t",
            nodes_min=1,
            nodes_desired=1,
            nodes_max=1,
            accelerator=accelerator,
            accelerators_per_node=0 if accelerator == "none" else 1,
        ),
        job=JobSpec(**{"entry_point": "train.py", "container": IMAGE, **job}),
        storage=StorageSpec(**{"location": "s3://bucket", **(storage or {})}),
    )


def prepared(document: RunSpec, places: Places) -> tuple[Software, str]:
    return prepare_container(document, places=places, node="i-1", run=run, devices=lambda: ())


def node(**fields: Any) -> ContainerNode:
    return ContainerNode(
        **{
            "kind": "docker",
            "engine": "/usr/bin/docker",
            "image": IMAGE,
            "node": "i-1",
            "accelerator": "nvidia",
            "devices": ("/dev/infiniband/uverbs0",),
            "folders": ("/opt/traincluster/payload", "/fsx"),
            "working_directory": "/opt/traincluster/payload/project",
            "user": "0:0",
            **fields,
        }
    )


def test_the_command_gives_the_container_what_ranks_need_of_the_node_and_no_values():
    command = container_command(node(), ["python3", "-m", "x", "--y"], name="n", variables=["TOKEN", "AWS_REGION"])
    assert command == [
        *("/usr/bin/docker", "run", "--rm", "--name=n", "--label=traincluster=i-1", "--pull=never", "--init"),
        *("--network=host", "--ipc=host"),
        *("--ulimit=memlock=-1:-1", "--ulimit=stack=67108864:67108864", "--ulimit=nofile=1048576:1048576"),
        *("--cap-add=IPC_LOCK", "--gpus=all", "--device=/dev/infiniband/uverbs0"),
        *("--volume=/opt/traincluster/payload:/opt/traincluster/payload", "--volume=/fsx:/fsx"),
        *("--workdir=/opt/traincluster/payload/project", "--user=0:0", "--env=AWS_REGION", "--env=TOKEN"),
        *("--entrypoint=python3", IMAGE, "-m", "x", "--y"),
    ]


def test_podman_is_told_of_gpus_in_its_own_way_and_other_nodes_get_none():
    podman = container_command(node(kind="podman"), ["x"], name="n", variables=[])
    assert "--device=nvidia.com/gpu=all" in podman and "--gpus=all" not in podman
    neuron = container_command(node(accelerator="neuron", devices=("/dev/neuron0",)), ["x"], name="n", variables=[])
    assert "--device=/dev/neuron0" in neuron and "--gpus=all" not in neuron


def test_devices_of_neuron_and_efa_are_found(tmp_path):
    (tmp_path / "infiniband").mkdir()
    for name in ("neuron0", "neuron1", "infiniband/uverbs0", "infiniband/rdma_cm", "nvidia0", "null"):
        (tmp_path / name).touch()
    found = [path.removeprefix(f"{tmp_path}/") for path in devices_here(tmp_path)]
    assert found == ["neuron0", "neuron1", "infiniband/uverbs0"]


def test_a_container_sees_what_ranks_read_and_write_at_the_same_paths():
    storage = {
        "instance_store": "/scratch",
        "volumes": (VolumeSpec(device="/dev/sdf", path="/data"),),
        "mounts": (MountSpec(type="lustre", source="s", path="/fsx"),),
    }
    folders = folders_of(spec(storage=storage), Places(root=Path("/")))
    own = ("/opt/traincluster/payload", "/etc/traincluster", "/var/lib/traincluster", "/var/log/traincluster")
    assert folders == (*own, "/scratch", "/data", "/fsx")


def test_a_program_finds_its_variables_and_not_the_agents(docker, places, monkeypatch):
    monkeypatch.setenv("OF_THE_AGENT", "1")
    software, _ = prepared(spec(environment={"SECRET": "hunter\n2"}), places)
    environment = {**software.environment(os.environ), "SECRET": "hunter\n2", "ADDED": "x", "TRAINRUN_STATE": "/s"}
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    command = software.command([software.python, "-c", program], environment)
    assert "hunter" not in " ".join(command)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert (found["SECRET"], found["ADDED"], found["TRAINRUN_STATE"], found["OF_THE_IMAGE"]) == ("hunter\n2", "x", "/s", "1")
    assert "OF_THE_AGENT" not in found and "programs" not in found["PATH"]


def test_the_step_tells_each_part_with_its_seconds(docker, places):
    _, detail = prepared(spec(), places)
    assert [part.split()[0] for part in detail.split("; ")] == ["containers", "pull", "first"]
    assert f"{IMAGE} was there" in detail and f"python3 {sys.version.split()[0]}" in detail


def test_nothing_is_left_of_an_agent_that_was_killed(docker, places):
    software, _ = prepared(spec(), places)
    client = subprocess.Popen(software.command([software.python, "-c", "import time; time.sleep(60)"], {}))
    wait_until(lambda: software.processes() != [])
    (process,) = software.processes()
    client.kill()
    client.wait()
    assert Path(f"/proc/{process}").exists()  # as with Docker: the client is not the container
    prepared(spec(), places)
    assert not docker.containers
    wait_until(lambda: not alive(process))


def test_containers_of_other_nodes_are_left_alone(docker, places):
    theirs, _ = prepare_container(spec(), places=places, node="i-2", run=run, devices=lambda: ())
    client = subprocess.Popen(theirs.command([theirs.python, "-c", "import time; time.sleep(60)"], {}))
    wait_until(lambda: theirs.processes() != [])
    prepared(spec(), places)
    assert len(docker.containers) == 1
    theirs.clear()
    client.wait(timeout=10)


@pytest.mark.parametrize(
    ("program", "grace", "code"),
    [
        (
            "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); print('here', flush=True); time.sleep(60)",
            20.0,
            75,
        ),
        ("import signal, time; signal.signal(15, signal.SIG_IGN); print('here', flush=True); time.sleep(60)", 0.5, None),
    ],
    ids=["saves and leaves", "is deaf"],
)
def test_a_launch_is_stopped_within_its_grace_and_leaves_no_container(docker, places, program, grace, code):
    software, _ = prepared(spec(), places)
    command = [software.python, "-c", program]
    environment = software.environment(os.environ)
    with TorchrunLaunch(command, environment=environment, places=places, software=software) as launch:
        wait_until(lambda: "here" in places.torchrun_log.read_text())
        (process,) = software.processes()
        launch.stop(grace=grace)
        assert launch.exit_code() == code or (code is None and launch.exit_code() in (137, -9))
    assert not docker.containers
    wait_until(lambda: not alive(process))


def test_leaving_a_launch_ends_its_container(docker, places):
    software, _ = prepared(spec(), places)
    command = [software.python, "-c", "import time; time.sleep(60)"]
    with TorchrunLaunch(command, environment=dict(os.environ), places=places, software=software):
        wait_until(lambda: software.processes() != [])
        (process,) = software.processes()
    assert not docker.containers
    wait_until(lambda: not alive(process))


def test_ranks_in_a_container_get_signals(docker, places):
    """They are no descendants of the agent's."""
    software, _ = prepared(spec(), places)
    rank = "import signal, sys; signal.signal(10, lambda *_: sys.exit(7)); print('here', flush=True); signal.pause()"
    torchrun = (
        "import os, subprocess, sys\n"
        f"sys.exit(subprocess.run([sys.executable, '-c', {rank!r}], env={{**os.environ, 'LOCAL_RANK': '0'}}).returncode)"
    )
    with TorchrunLaunch(
        [software.python, "-c", torchrun], environment=dict(os.environ), places=places, software=software
    ) as launch:
        wait_until(lambda: "here" in places.torchrun_log.read_text())
        wait_until(lambda: software.processes() != [])  # the stand-in writes it down after the start
        launch.signal_ranks(signal.SIGUSR1)
        wait_until(lambda: launch.exit_code() == 7)


@pytest.mark.parametrize(
    ("document", "faults", "words"),
    [
        (spec(accelerator="nvidia"), {}, "lacks the NVIDIA Container Toolkit"),
        (spec(container_python="/opt/none/python"), {}, "Set container_python"),
        (spec(), {"info": [1, "Cannot connect to the Docker daemon"]}, "Does the container engine run"),
    ],
    ids=["no toolkit", "no Python", "no engine"],
)
def test_what_keeps_programs_from_running_is_told_before_the_launch(docker, places, document, faults, words):
    docker.say(faults=faults)
    with pytest.raises(StepFailed, match=words):
        prepared(document, places)
    assert not docker.containers


def test_an_image_without_any_engine_is_told(places, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(StepFailed, match="neither docker nor podman"):
        prepared(spec(), places)


class TestPull:
    """Images from registries."""

    def pull(self, image: str, docker: Docker, **arguments: Any) -> str:
        folder = docker.folder / "credentials"
        try:
            return pull(image, engine="docker", folder=folder, run=run, **arguments).detail
        finally:
            assert not folder.exists()  # credentials do not stay

    def test_what_is_named_by_its_digest_is_not_pulled_again(self, docker):
        assert "was there" in self.pull(IMAGE, docker)
        assert not docker.calls("pull")

    def test_a_tag_is_pulled_again_and_its_digest_told(self, docker):
        docker.say(images={"train:1": "sha256:old"}, registry={"train:1": "sha256:new"})
        assert "sha256:new" in self.pull("train:1", docker)

    def test_a_tag_that_cannot_be_pulled_is_taken_as_it_is_and_that_is_told(self, docker):
        docker.say(images={"train:1": "sha256:old"})
        assert "may not be the newest" in self.pull("train:1", docker)

    def test_a_registry_that_fails_is_asked_again(self, docker, monkeypatch):
        docker.say(registry={"train:1": "sha256:new"}, faults={"pull": [[1, "toomanyrequests"], [1, "i/o timeout"]]})
        monkeypatch.setattr("time.sleep", lambda _: None)
        assert "sha256:new" in self.pull("train:1", docker)
        assert len(docker.calls("pull")) == 3

    def test_an_image_that_is_not_there_is_asked_for_once(self, docker):
        with pytest.raises(StepFailed, match="Correct the name, the tag or the digest"):
            self.pull("train:none", docker)
        assert len(docker.calls("pull")) == 1

    def test_a_registry_that_wants_a_login_is_told_of(self, docker):
        docker.say(faults={"pull": [1, "pull access denied for private, repository does not exist"]})
        with pytest.raises(StepFailed, match="wants a login, which nodes have for ECR only"):
            self.pull("private:1", docker)

    def test_ecr_is_logged_in_to_by_a_pipe(self, docker):
        docker.say(registry={ECR: DIGEST}, passwords={ECR.partition("/")[0]: "from-ecr"})
        assert DIGEST in self.pull(ECR, docker, password=lambda _: "from-ecr")
        assert "from-ecr" not in (docker.folder / "log").read_text()

    def test_a_wrong_password_for_ecr_is_told_with_what_to_look_at(self, docker):
        docker.say(registry={ECR: DIGEST}, passwords={ECR.partition("/")[0]: "from-ecr"})
        with pytest.raises(StepFailed, match="May the nodes' role pull from train"):
            self.pull(ECR, docker, password=lambda _: "expired")

    def test_the_password_is_ecrs(self, docker, aws):
        registry = ECR.partition("/")[0]
        docker.say(registry={ECR: DIGEST}, passwords={registry: f"{registry.partition('.')[0]}-auth-token"})
        assert DIGEST in self.pull(ECR, docker)


class TestDataRoot:
    """Docker's images on the instance store."""

    def move(self, tmp_path: Path, *, root: str = "/var/lib/docker", containers: str = "", refuses: bool = False) -> str:
        self.restarts = 0

        def engine(*command: str, **_: Any) -> str:
            if command[0] == "systemctl":
                self.restarts += 1
                if refuses and self.restarts == 1:
                    raise StepFailed("systemctl restart docker failed with status 1")
            return {"info": root, "ps": containers}.get(command[1], "")

        self.file = tmp_path / "docker/daemon.json"
        return move_to_instance_store("/scratch", run=engine, configuration=self.file).detail

    def test_it_moves_and_keeps_what_else_is_configured(self, tmp_path):
        (tmp_path / "docker").mkdir()
        (tmp_path / "docker/daemon.json").write_text('{"runtimes": {"nvidia": {}}}')
        assert self.move(tmp_path) == "/scratch/docker, was /var/lib/docker"
        assert json.loads(self.file.read_text()) == {"runtimes": {"nvidia": {}}, "data-root": "/scratch/docker"}
        assert self.restarts == 1

    def test_it_stays_where_it_is_when_it_is_there_or_containers_run(self, tmp_path):
        assert self.move(tmp_path, root="/scratch/docker") == "/scratch/docker"
        assert "since containers run" in self.move(tmp_path, containers="abc\n")
        assert self.restarts == 0 and not self.file.exists()

    def test_docker_that_does_not_start_there_gets_its_configuration_back(self, tmp_path):
        assert "stays where it is" in self.move(tmp_path, refuses=True)
        assert not self.file.exists() and self.restarts == 2


def test_nodes_train_in_containers_and_leave_none(docker, start_cluster: Callable[..., Any]):
    cluster = start_cluster(job={"container": IMAGE})
    cluster.wait_for_world(2)
    assert len(docker.containers) == 2
    (cluster.shared / "enough").touch()
    cluster.wait("the run ends", lambda: "result.json" in cluster.objects("result.json"), seconds=60)
    for node in cluster.nodes.values():
        node.process.wait(timeout=30)
        assert any(e["step"] == "software" and e["state"] == "done" and "docker" in e["detail"] for e in node.events())
    assert not docker.containers


def wait_until(condition: Callable[[], bool], *, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent's notice does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
