"""Resources that wait for signals: groups with a CreationPolicy or a rolling update, and wait conditions."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.error
import urllib.request

import groups
import pytest
from botocore.exceptions import ClientError

from trainlocal.cloud.signals import Signal, Signals, seconds_of, wait_for_resource_signals


def in_background(act):
    """Runs a call beside the deployment that waits for it; raises what it raised when it is joined."""
    failed = []

    def guarded():
        try:
            act()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()

    def join():
        thread.join(20)
        assert not failed, failed

    return join


def events(cloud, name):
    try:
        found = cloud.client("cloudformation").describe_stack_events(StackName=name)["StackEvents"]
    except ClientError:  # there is no such stack yet
        return []
    return [(e["LogicalResourceId"], e["ResourceStatus"], e.get("ResourceStatusReason", "")) for e in reversed(found)]


def until(condition):
    deadline = time.monotonic() + 15
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def send(url, content_type="", **message):
    """Sends a signal to a handle as a node does; returns the status of the answer."""
    fields = {"Status": "SUCCESS", "UniqueId": "i-1", "Data": "ready", "Reason": "checked", **message}
    request = urllib.request.Request(url, json.dumps(fields).encode(), {"Content-Type": content_type}, method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


class TestSignalsOfResources:
    def template(self, **group):
        template = groups.cluster({}, minimum=0, desired=2)
        template["Resources"]["Group"] |= {
            "CreationPolicy": {"ResourceSignal": {"Count": 2, "Timeout": "PT3S"}},
            "UpdatePolicy": {
                "AutoScalingRollingUpdate": {
                    "MaxBatchSize": 2,
                    "MinSuccessfulInstancesPercent": 50,
                    "PauseTime": "PT3S",
                    "WaitOnResourceSignals": True,
                }
            },
            **group,
        }
        return template

    def signal(self, cloud, name, unique_id, status="SUCCESS"):
        cloud.client("cloudformation").signal_resource(
            StackName=name, LogicalResourceId="Group", UniqueId=unique_id, Status=status
        )

    def signal_when_there(self, cloud, name, *signals):
        def act():
            until(lambda: ("Group", "CREATE_IN_PROGRESS") in [e[:2] for e in events(cloud, name)])
            for unique_id, status in signals:
                self.signal(cloud, name, unique_id, status)

        return in_background(act)

    def test_a_group_is_made_when_enough_have_signalled_and_none_after(self, cloud, stack):
        join = self.signal_when_there(cloud, stack.name, ("i-1", "SUCCESS"), ("i-1", "SUCCESS"), ("i-2", "SUCCESS"))
        assert stack.create(self.template()) == "CREATE_COMPLETE"
        join()
        assert ("Group", "CREATE_IN_PROGRESS", "Received SUCCESS signal with UniqueId i-2") in events(cloud, stack.name)
        with pytest.raises(ClientError, match="Resource Group is in CREATE_COMPLETE state and can not be signaled"):
            self.signal(cloud, stack.name, "i-3")
        with pytest.raises(ClientError, match="length less than or equal to 64"):
            self.signal(cloud, stack.name, "x" * 65)

    @pytest.mark.parametrize(
        ("signals", "reason"),
        [
            ([("i-1", "SUCCESS")], "Failed to receive 1 resource signal(s) within the specified duration"),
            (
                [("i-1/check", "FAILURE")],
                "Received 1 FAILURE signal(s) out of 2. Unable to satisfy 100% MinSuccessfulInstancesPercent requirement",
            ),
        ],
        ids=["silence", "failure"],
    )
    def test_a_group_whose_instances_fail_is_rolled_back(self, cloud, stack, signals, reason):
        join = self.signal_when_there(cloud, stack.name, *signals)
        assert stack.create(self.template()) == "ROLLBACK_COMPLETE"
        join()
        assert ("Group", "CREATE_FAILED", reason) in events(cloud, stack.name)

    def test_a_rolling_update_waits_for_each_batch(self, cloud, stack):
        join = self.signal_when_there(cloud, stack.name, ("i-1", "SUCCESS"), ("i-2", "SUCCESS"))
        assert stack.create(self.template()) == "CREATE_COMPLETE"
        join()
        changed = self.template()
        changed["Resources"]["Template"]["Properties"]["LaunchTemplateData"]["InstanceType"] = "c7i.xlarge"

        def one_of_two():
            until(lambda: ("Group", "UPDATE_IN_PROGRESS", "") in events(cloud, stack.name))
            time.sleep(1.0)  # signals count from when the batch is replaced
            self.signal(cloud, stack.name, "i-3/check", "FAILURE")
            self.signal(cloud, stack.name, "i-4")

        join = in_background(one_of_two)
        assert stack.update(changed) == "UPDATE_COMPLETE"  # half of them is enough
        join()

    def test_what_is_not_emulated_is_refused_by_name(self, stack):
        policy = {"AutoScalingCreationPolicy": {"MinSuccessfulInstancesPercent": 50}}
        with pytest.raises(ClientError, match=r"AutoScalingCreationPolicy\.MinSuccessfulInstancesPercent of Group"):
            stack.create(self.template(CreationPolicy=policy))


class TestWaitConditions:
    def template(self, **properties):
        return {
            "Resources": {
                "Handle": {"Type": "AWS::CloudFormation::WaitConditionHandle"},
                "Url": {"Type": "AWS::SSM::Parameter", "Properties": {"Type": "String", "Value": {"Ref": "Handle"}}},
                "Ready": {
                    "Type": "AWS::CloudFormation::WaitCondition",
                    "DependsOn": "Url",
                    "Properties": {"Handle": {"Ref": "Handle"}, "Timeout": 2, "Count": 2, **properties},
                },
            },
            "Outputs": {"Data": {"Value": {"Fn::GetAtt": ["Ready", "Data"]}}},
        }

    def deploy(self, cloud, stack, act):
        def with_url():
            def is_waiting():
                return [e for e in events(cloud, stack.name) if e[:2] == ("Ready", "CREATE_IN_PROGRESS")]

            until(is_waiting)
            act(stack.physical("Handle"))

        join = in_background(with_url)
        status = stack.create(self.template())
        join()
        return status

    def test_it_is_there_when_all_have_signalled_and_has_what_they_said(self, cloud, stack):

        def act(url):
            # Of the sockets on which the cloud answers the newest, which a test before this one may have handed over.
            place = rf"http://127\.0\.0\.1:\d+/_traincluster/wait-condition/us-east-1/{stack.name}/Handle"
            assert re.fullmatch(place, url.partition("?")[0]), url
            assert send(url, content_type="application/json") == 403  # the URL is signed for an empty one
            assert send(url.partition("?")[0]) == 403  # without the signature it is nothing
            assert send(url, Status="MAYBE") == 400
            assert [send(url), send(url), send(url, UniqueId="i-2", Data="too")] == [200] * 3

        assert self.deploy(cloud, stack, act) == "CREATE_COMPLETE"
        assert json.loads(stack.outputs()["Data"]) == {"i-1": "ready", "i-2": "too"}
        stack.update(self.template(Timeout=3))
        assert "Update to resource type AWS::CloudFormation::WaitCondition is not supported" in stack.reasons()

    def test_a_failure_says_why(self, cloud, stack):
        reason = "check: no torch"
        status = self.deploy(cloud, stack, lambda url: send(url, Status="FAILURE", Reason=reason))
        assert status == "ROLLBACK_COMPLETE"
        assert f"WaitCondition received failed message: '{reason}' for uniqueId: i-1" in stack.reasons()

    def test_silence_ends_with_the_time(self, stack):
        assert stack.create(self.template(Timeout=1)) == "ROLLBACK_COMPLETE"
        assert "WaitCondition timed out. Received 0 conditions when expecting 2" in stack.reasons()


def test_durations():
    assert [seconds_of(text, where="x") for text in ("PT5M", "PT1H30M", "PT10S")] == [300, 5400, 10]
    with pytest.raises(ValueError, match="x: '5 minutes' is not a duration"):
        seconds_of("5 minutes", where="x")


def test_of_two_signals_of_one_id_the_first_counts():
    signals = Signals()
    assert signals.send("Group", Signal(unique_id="i-1", succeeded=True))
    assert not signals.send("Group", Signal(unique_id="i-1", succeeded=False))
    wait_for_resource_signals(signals, "Group", count=1, seconds=0.1)
