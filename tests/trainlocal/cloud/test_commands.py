"""Systems Manager's commands go to the nodes that they name, through the fleet, and tell how they ended."""

from __future__ import annotations

import time

import pytest

from trainlocal.fleet.control import ControlServer


@pytest.fixture
def fleet(cloud):
    """Answers as nodes would; remembers what it was asked."""
    asked = []

    def answer(request):
        asked.append(request)
        if request["do"] == "run":
            return {"code": 3 if "fails" in request["script"] else 0, "stdout": "said", "stderr": ""}
        return {"nodes": []}

    server = ControlServer(cloud.directory / "fleet.sock", answer)
    yield asked
    server.close()


def test_a_command_runs_where_it_was_sent_and_nowhere_else(cloud, fleet):
    ec2, ssm = cloud.client("ec2"), cloud.client("ssm")
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    made = ec2.run_instances(ImageId=image, MinCount=2, MaxCount=2, InstanceType="c7i.large")["Instances"]
    first, second = (one["InstanceId"] for one in made)
    for script, status, code in (("true", "Success", 0), ("fails", "Failed", 3)):
        sent = ssm.send_command(DocumentName="AWS-RunShellScript", InstanceIds=[first], Parameters={"commands": [script]})
        assert sent["Command"]["InstanceIds"] == [first]
        deadline = time.monotonic() + 10
        while (found := ssm.get_command_invocation(CommandId=sent["Command"]["CommandId"], InstanceId=first))["Status"] in (
            "Pending",
            "InProgress",
        ):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert (found["Status"], found["ResponseCode"], found["StandardOutputContent"]) == (status, code, "said")
        with pytest.raises(ssm.exceptions.InvocationDoesNotExist):
            ssm.get_command_invocation(CommandId=sent["Command"]["CommandId"], InstanceId=second)
    assert [request["instance_id"] for request in fleet if request["do"] == "run"] == [first, first]
    ec2.terminate_instances(InstanceIds=[first, second])
