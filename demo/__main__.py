"""The demo, top to bottom: deploy, boot, train, kill a node, go on, evaluate, destroy, restore.

Run by ``make demo``; ``make demo KEEP=1`` leaves the cluster up and ``make down`` ends it. Everything it writes
lies under build/; everything it starts ends with it, however it ends (`trainlocal`'s janitor sees to that).
``python -m demo --help`` lists what can be varied.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

import trainlocal
from demo.display import Display, clock, plural
from demo.report import draw_loss, write_summary
from demo.run_view import RunView
from trainlocal.environment import inherited
from trainrun.store import StoreError

ROOT = Path(__file__).resolve().parent.parent
ACCOUNT = "aws://123456789012/us-east-1"
DATA_STACK, CLUSTER_STACK = "TrainingDataStack", "TrainingClusterStack"
KILL_AT_SHARE = 0.45
"""The node dies when this share of the steps is done and a checkpoint is committed."""
DEADLINE_SECONDS = 600
LOCAL_SETTINGS = ("publish_seconds=0.5", "environment.OMP_NUM_THREADS=1")
"""Metric lines often enough to watch; one thread a rank, since all nodes share this machine's few processors."""
SAMPLE_BYTES = 240


class DemoError(Exception):
    """The demo cannot go on; the message says why and where to read more."""


class Demo:
    """One run of the demo: what the steps below share."""

    def __init__(self, options: argparse.Namespace, local: trainlocal.Local, display: Display) -> None:
        self.options = options
        self.build: Path = options.build / "demo"
        self.local = local
        self.display = display
        self.summary: dict[str, Any] = {"tier": f"{local.tier}: {local.description}", "kills": [], "instance_ids": []}
        own = inherited()
        os.environ.clear()  # for the boto3 clients of this process: nothing of the user's own account or proxies
        os.environ.update({**own, **local.environment()})
        self.cloudformation = boto3.client("cloudformation")
        self.autoscaling = boto3.client("autoscaling")
        self.deadline = time.monotonic() + DEADLINE_SECONDS
        kept = ("on_success=keep",) if options.keep else ()
        self.context = [word for setting in (*LOCAL_SETTINGS, *kept, *options.settings) for word in ("-c", setting)]

    def command(self, *arguments: str) -> str:
        """Run one of the repository's commands to its end; what it prints goes to commands.log too."""
        with self.start(*arguments) as process:
            return self.finish(process, arguments)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return self.local.popen(list(arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def finish(self, process: subprocess.Popen[str], arguments: tuple[str, ...]) -> str:
        output, _ = process.communicate()
        with (self.build / "commands.log").open("a") as log:
            log.write(f"$ {' '.join(arguments)}\n{output}\n")
        if process.returncode:
            last = "\n".join(output.splitlines()[-15:])
            raise DemoError(
                f"{' '.join(arguments[:4])} ended with {process.returncode}:\n{last}\nAll of it: {self.build}/commands.log"
            )
        return output

    def check_time(self, doing: str) -> None:
        if time.monotonic() > self.deadline:
            raise DemoError(
                f"{doing} is not done after {DEADLINE_SECONDS} s. What the nodes said is under {self.options.build}/local/nodes."
            )

    def outputs(self, stack: str) -> dict[str, str]:
        """Outputs of a stack that is complete, else nothing."""
        try:
            description = self.cloudformation.describe_stacks(StackName=stack)["Stacks"][0]
        except self.cloudformation.exceptions.ClientError:
            return {}
        if not description["StackStatus"].endswith("_COMPLETE"):
            return {}
        return {output["OutputKey"]: output["OutputValue"] for output in description.get("Outputs", [])}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m demo", description="Deploy, train, kill a node, recover, tear down; all locally."
    )
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="folder for everything that is written")
    parser.add_argument("--tier", choices=trainlocal.TIERS, help="how nodes are kept apart; default: the best here")
    parser.add_argument(
        "--keep", action="store_true", default=os.environ.get("KEEP", "") not in ("", "0"), help="leave the cluster up"
    )
    parser.add_argument("--kill", choices=["any", "rank0", "other"], default="any", help="which node to kill")
    parser.add_argument("--short", action="store_true", help="do not fail when the model has not beaten the bigram model yet")
    parser.add_argument(
        "-c", dest="settings", action="append", default=[], metavar="NAME=VALUE", help="override a setting of the cluster"
    )
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    build = options.build / "demo"
    build.mkdir(parents=True, exist_ok=True)
    for name in ("commands.log", "summary.json", "loss.png"):
        (build / name).unlink(missing_ok=True)
    tier = trainlocal.choose(options.tier)
    try:
        with Display(f"Traincluster demo on {tier.description}") as display:
            with display.phase("emulated_aws", "the emulated AWS, on a free port of 127.0.0.1"):
                local = trainlocal.start(options.build / "local", tier=tier.tier)
            with local:
                run(Demo(options, local, display))
                if options.keep:
                    local.detach()
    except KeyboardInterrupt:
        print("Interrupted. Everything that was started has been ended.", file=sys.stderr)
        return 130
    except (DemoError, trainlocal.LocalError) as error:
        print(error, file=sys.stderr)
        return 1
    except (BotoCoreError, ClientError, StoreError) as error:
        print(f"The emulated AWS does not answer as it should: {error}\nIts logs: {options.build}/local/logs", file=sys.stderr)
        return 1
    if options.keep:
        directory = options.build / "local"
        print(f"Still up: the emulated AWS at {local.endpoint}, with its nodes. To look at them:")
        print(f"  python -m trainlocal status --directory {directory}")
        print(f'  eval "$(python -m trainlocal env --directory {directory})"    # then cdk, boto3 and trainrun see it')
        print("`make down` ends it.")
    return 0


def run(demo: Demo) -> None:
    started = time.monotonic()
    deploy(demo)
    outputs = demo.outputs(CLUSTER_STACK)
    view = RunView(outputs["RunLocation"])
    data = f"s3://{demo.outputs(DATA_STACK)['DatasetBucketName']}/corpus"
    boot(demo, group=outputs["AutoScalingGroupName"])
    train(demo, view)
    evaluate(demo, view, data)
    if not demo.options.keep:
        tear_down(demo, view)
    summarize(demo, view, seconds=time.monotonic() - started)


def deploy(demo: Demo) -> None:
    with demo.display.phase("bootstrap", "cdk bootstrap"):
        demo.command("cdk", "bootstrap", ACCOUNT, "--app", "")
    stacks = ("cdk", "deploy", DATA_STACK, CLUSTER_STACK, "--require-approval", "never", "--progress", "events")
    arguments = (*stacks, "--output", str(demo.build / "cdk.out"), *demo.context)
    with demo.display.phase("deploy", f"cdk deploy {DATA_STACK} {CLUSTER_STACK}, and the dataset into its bucket"):
        process = demo.start(*arguments)
        while not demo.outputs(DATA_STACK):
            if process.poll() is not None:
                break
            time.sleep(0.2)
        else:
            upload_dataset(demo, demo.outputs(DATA_STACK)["DatasetBucketName"])
        demo.finish(process, arguments)


def upload_dataset(demo: Demo, bucket: str) -> None:
    """The source files of the Python standard library, as bytes: real text that every machine has."""
    library = str(Path(os.__file__).parent)
    demo.display.show("tokenizing the Python standard library")
    demo.command(
        sys.executable,
        "-m",
        "trainrun",
        "tokens",
        library,
        "--glob",
        "*.py",
        "--held-out",
        "0.02",
        "--out",
        f"s3://{bucket}/corpus",
    )


def boot(demo: Demo, *, group: str) -> None:
    wanted = demo.autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[group])["AutoScalingGroups"][0][
        "DesiredCapacity"
    ]
    demo.summary["nodes"] = wanted
    with demo.display.phase("boot", f"{wanted} nodes boot from the launch template's user data"):
        while sum(node.state == "running" for node in demo.local.nodes()) < wanted:
            demo.display.show(describe_nodes(demo))
            demo.check_time("The boot of the nodes")
            time.sleep(0.3)


def describe_nodes(demo: Demo, view: RunView | None = None) -> str:
    lines = []
    for node in demo.local.nodes():
        agent = view.nodes.get(node.instance_id, {}) if view else {}
        lines.append(
            f"  {node.instance_id}  {node.address:<12} {node.state:<8} {agent.get('step', '')} {agent.get('state', '')}".rstrip()
        )
    return "\n".join(lines)


def train(demo: Demo, view: RunView) -> None:
    """Watch the run to its end and kill a node on the way."""
    with demo.display.phase("train", "training across the nodes"):
        killed_at = 0.0
        told = 0
        while view.result is None:
            demo.check_time("Training")
            time.sleep(0.5)
            view.refresh()
            resumed = [event for event in view.events if event["event"] == "resumed" and event["time"] > killed_at]
            show_training(demo, view, recovering=bool(killed_at) and not resumed)
            if not killed_at and view.commits and view.step >= KILL_AT_SHARE * view.steps[-1]["steps"]:
                killed_at = kill_one(demo, view)
            resumptions = view.resumptions(after=killed_at) if killed_at else []
            for event in resumptions[told:]:
                tell_resumption(demo, event, seconds=event["time"] - killed_at)
            told = len(resumptions)
    if view.result["state"] != "succeeded":
        raise DemoError(
            f"The run ended as {view.result['state']}: {view.result['reason']}. See {demo.options.build}/local/nodes."
        )
    if not told:
        raise DemoError(
            "Training was over before a node was killed and its work taken up: the run is too short for this machine."
        )


def kill_one(demo: Demo, view: RunView) -> float:
    """SIGKILL one node. Any will do: the one that holds rank 0 and the rendezvous is fair game."""
    running = [node for node in demo.local.nodes() if node.state == "running"]
    wanted = {"any": running}
    wanted["rank0"] = [node for node in running if node.instance_id == view.rank0]
    wanted["other"] = [node for node in running if node.instance_id != view.rank0]
    victim = random.choice(wanted[demo.options.kill])
    now = time.time()
    demo.local.kill(victim.instance_id)
    held_rank_0 = victim.instance_id == view.rank0
    demo.summary["kills"].append(
        {"instance_id": victim.instance_id, "at_step": view.step, "held_rank_0": held_rank_0, "steps_lost": 0}
    )
    which = "which held rank 0" if held_rank_0 else "which did not hold rank 0"
    demo.display.note(f"  killed node {victim.instance_id}, {which}, at step {view.step}: its group replaces it")
    return now


def tell_resumption(demo: Demo, event: dict[str, Any], *, seconds: float) -> None:
    kill = demo.summary["kills"][0]
    kill["steps_lost"] += event["steps_lost"]
    kill.setdefault("seconds_to_resume", round(seconds, 1))
    kill["seconds_to_full_strength"] = round(seconds, 1)
    ranks = "1 rank goes" if event["world"] == 1 else f"{event['world']} ranks go"
    text = f"  {seconds:.1f} s after the kill: {ranks} on from the commit of step {event['step']}"
    demo.display.note(f"{text}, {plural(event['steps_lost'], 'step')} lost")


def show_training(demo: Demo, view: RunView, *, recovering: bool) -> None:
    for node in demo.local.nodes():
        if node.instance_id not in demo.summary["instance_ids"]:
            demo.summary["instance_ids"].append(node.instance_id)
    nodes = describe_nodes(demo, view)
    if not view.steps or recovering:
        demo.display.show(f"  recovering\n{nodes}" if recovering else nodes)
        return
    last = view.steps[-1]
    share = last["step"] / last["steps"]
    commits = f"{plural(len(view.commits), 'commit')}" + (f", newest at step {view.commits[-1]}" if view.commits else "")
    parts = [
        f"step {last['step']}/{last['steps']} ({share:.0%})",
        f"loss {last['loss']:.3f}",
        f"{last['tokens_per_second'] / 1000:.1f}k tokens/s",
        f"left {clock(last['seconds_left'])}",
        plural(last["world"], "rank"),
        commits,
    ]
    line = "  " + "  ".join(parts)
    demo.display.show(f"{line}\n{nodes}" if demo.display.console.is_terminal else line, share=share)


def evaluate(demo: Demo, view: RunView, data: str) -> None:
    checkpoint = view.location
    with demo.display.phase("evaluate", "evaluation of the restored checkpoint on held-out text"):
        answer = demo.command(sys.executable, "-m", "trainrun", "evaluate", "--checkpoint", checkpoint, "--data", data, "--json")
        scores = json.loads(answer.splitlines()[-1])
    model, bigram, unigram = (scores[f"{name}_bits_per_byte"] for name in ("model", "bigram", "unigram"))
    demo.summary["held_out_bits_per_byte"] = model
    demo.summary["baselines"] = {"unigram": unigram, "bigram": bigram}
    demo.display.note(f"  held-out bits per byte: model {model:.3f}, bigram {bigram:.3f}, unigram {unigram:.3f}")
    if model >= bigram and not demo.options.short:
        raise DemoError("The model does not beat the bigram model: it has not learned.")
    with demo.display.phase("generate", "a few lines from the restored checkpoint"):
        arguments = ("--checkpoint", checkpoint, "--prompt", "def ", "--bytes", str(SAMPLE_BYTES), "--temperature", "0.5")
        sample = demo.command(sys.executable, "-m", "trainrun", "generate", *arguments)
    demo.display.note("  asked to go on from 'def ':")
    demo.display.note("\n".join(f"    {line.rstrip()}" for line in sample.splitlines() if line.strip()), style="dim")


def tear_down(demo: Demo, view: RunView) -> None:
    with demo.display.phase("destroy", f"cdk destroy {CLUSTER_STACK}"):
        demo.command("cdk", "destroy", CLUSTER_STACK, "--force", "--output", str(demo.build / "cdk.out"), *demo.context)
    left = demo.local.resources()
    demo.summary["resources_left"] = left
    kinds = [f"{len(names)} {kind.removeprefix('AWS::')}" for kind, names in left.items()]
    demo.display.note(f"  left in the account: {', '.join(kinds)}")
    demo.display.note(f"  stacks: {', '.join(left['AWS::CloudFormation::Stack'])}")
    with demo.display.phase("restore", "the last checkpoint still restores"):
        demo.command(sys.executable, "-m", "trainrun", "checkpoint", "verify", view.location)
        arguments = ("--checkpoint", view.location, "--bytes", "1", "--json")
        restored = json.loads(demo.command(sys.executable, "-m", "trainrun", "generate", *arguments).splitlines()[-1])
    check_restored(demo, view, restored)


def check_restored(demo: Demo, view: RunView, restored: dict[str, Any]) -> None:
    """The restored model is the one that rank 0 had in memory at the end, bit for bit."""
    trained = next(event["model_sha256"] for event in reversed(view.events) if event["event"] == "finished")
    demo.summary["trained_model_sha256"], demo.summary["restored_model_sha256"] = trained, restored["model_sha256"]
    if trained != restored["model_sha256"]:
        raise DemoError(f"The checkpoint of step {restored['step']} is not the model that was trained: please report this.")
    demo.display.note(f"  step {restored['step']}, bit for bit the model that was trained: sha256 {trained[:16]}...")


def summarize(demo: Demo, view: RunView, *, seconds: float) -> None:
    curve = view.loss_curve()
    demo.summary.update(
        steps=curve[-1][0],
        first_loss=curve[0][1],
        last_loss=curve[-1][1],
        steps_lost=sum(kill["steps_lost"] for kill in demo.summary["kills"]),
        checkpoints_committed=view.commits,
        seconds={**demo.display.seconds, "all": round(seconds, 1)},
    )
    write_summary(demo.build / "summary.json", demo.summary)
    draw_loss(demo.build / "loss.png", view, demo.summary)
    demo.display.note(f"done in {clock(seconds)}; see {demo.build}/summary.json and loss.png", style="bold green")


if __name__ == "__main__":
    sys.exit(main())
