"""Systems Manager's Run Command, and power cuts: what is done inside nodes, which the fleet has and the account does not.

moto takes note of a command and calls it done. Here a script of AWS-RunShellScript really runs in the node, and its invocation
says how it ended. Source: AWS Systems Manager API, SendCommand and GetCommandInvocation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

from moto.core.responses import ActionResult
from moto.ec2.responses import EC2Response
from moto.ssm.models import Command, SimpleSystemManagerBackend
from moto.ssm.responses import SimpleSystemManagerResponse

from trainlocal.cloud.services.amending import amend
from trainlocal.fleet.control import ask

DOCUMENT = "AWS-RunShellScript"
MOST_OUTPUT = 24_000
"""Characters of output that an invocation shows (Systems Manager API, CommandInvocation)."""

_send = SimpleSystemManagerBackend.send_command
_terminate = EC2Response.terminate_instances
_fleet: list[Path] = []


def install() -> None:
    """Has commands run, and EC2 cut the power where it is told to skip the system's shutdown."""
    amend(SimpleSystemManagerBackend, "send_command", _send_command)
    amend(SimpleSystemManagerResponse, "describe_instance_information", _describe_instances)
    amend(EC2Response, "terminate_instances", _terminate_instances)


def reach_nodes(fleet_socket: Path) -> None:
    """From now on nodes are asked through this socket, if a fleet listens there."""
    _fleet[:] = [fleet_socket]


def _send_command(self: SimpleSystemManagerBackend, **parameters: Any) -> Command:
    if parameters["document_name"] != DOCUMENT:
        raise NotImplementedError(f"the document {parameters['document_name']}; it runs {DOCUMENT}")
    named = set(parameters["instance_ids"])
    command = _send(self, **parameters)
    if not parameters["targets"]:  # moto takes none for all instances that there are
        command.instance_ids = sorted(named)
        command.invocations = [one for one in command.invocations if one["InstanceId"] in named]
    script = "\n".join(parameters["parameters"].get("commands", []))
    seconds = float((parameters["parameters"].get("executionTimeout") or ["3600"])[0])
    for invocation in command.invocations:
        invocation.update(Status="Pending", StatusDetails="Pending", ResponseCode=-1)
        Thread(target=_run, args=(invocation, script, seconds), daemon=True, name="command").start()
    return command


def _run(invocation: dict[str, Any], script: str, seconds: float) -> None:
    invocation.update(Status="InProgress", StatusDetails="InProgress")
    request = {"do": "run", "instance_id": invocation["InstanceId"], "script": script, "seconds": seconds}
    try:
        answer = ask(_fleet[0], request, seconds=seconds + 10) if _fleet else None
    except (OSError, ValueError) as error:
        answer, why = None, str(error)
    else:
        why = "no fleet runs beside this cloud"
    if answer is None:
        invocation.update(Status="Failed", StatusDetails="Undeliverable", StandardErrorContent=why)
        return
    done = answer["code"] == 0
    invocation.update(
        Status="Success" if done else "TimedOut" if answer["code"] is None else "Failed",
        StatusDetails="Success" if done else "ExecutionTimedOut" if answer["code"] is None else "Failed",
        ResponseCode=-1 if answer["code"] is None else answer["code"],
        StandardOutputContent=answer["stdout"][:MOST_OUTPUT],
        StandardErrorContent=answer["stderr"][:MOST_OUTPUT],
    )


def _describe_instances(self: SimpleSystemManagerResponse) -> ActionResult:
    try:
        nodes = ask(_fleet[0], {"do": "nodes"})["nodes"] if _fleet else []
    except (OSError, ValueError):
        nodes = []
    running = [node for node in nodes if node["state"] == "running"]
    return ActionResult(
        {
            "InstanceInformationList": [
                {"InstanceId": node["instance_id"], "PingStatus": "Online", "IPAddress": node["address"], "PlatformType": "Linux"}
                for node in running
            ]
        }
    )


def _terminate_instances(self: EC2Response) -> ActionResult:
    if self._get_bool_param("SkipOsShutdown") and not self._get_bool_param("DryRun"):
        _cut_power(self._get_param("InstanceIds", []))
    result: ActionResult = _terminate(self)
    return result


def _cut_power(instances: Sequence[str]) -> None:
    for instance in instances if _fleet else ():
        try:
            ask(_fleet[0], {"do": "kill", "instance_id": instance})
        except (OSError, ValueError):  # it does not run (any more)
            continue
