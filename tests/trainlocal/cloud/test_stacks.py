"""Stacks from creation to deletion: order, rollback, updates in place and by replacement, exports, change sets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from botocore.exceptions import ClientError

TOPIC = "AWS::SNS::Topic"
PARAMETER = "AWS::SSM::Parameter"


def parameter(value: Any, **more: Any) -> dict[str, Any]:
    return {"Type": PARAMETER, "Properties": {"Type": "String", "Value": value}, **more}


# Refused by the API when it is created: the key to be named does not exist.
BROKEN = {"Type": "AWS::KMS::Alias", "Properties": {"AliasName": "alias/x", "TargetKeyId": "no-such-key"}}


def test_resources_are_made_after_what_they_need_and_removed_before_it(cloud, stack) -> None:
    template = {
        "Resources": {
            "Last": parameter({"Fn::GetAtt": ["Middle", "Value"]}),
            "Middle": parameter({"Fn::Sub": "of ${First}"}),
            "First": parameter("1"),
            "After": parameter("x", DependsOn=["Last"]),
        },
        "Outputs": {"Name": {"Value": {"Ref": "Last"}}, "Value": {"Value": {"Fn::GetAtt": ["Last", "Value"]}}},
    }
    assert stack.create(template) == "CREATE_COMPLETE"
    made = [logical for logical, status in stack.events() if status == "CREATE_COMPLETE"]
    assert made == ["First", "Middle", "Last", "After", stack.name]
    first = stack.physical("First")
    assert stack.outputs() == {"Name": stack.physical("Last"), "Value": f"of {first}"}
    assert first.startswith(f"{stack.name}-First-")

    identifier = stack.described()["StackId"]
    stack.delete()
    removed = [logical for logical, status in stack.events(identifier) if status == "DELETE_COMPLETE"]
    assert removed == ["After", "Last", "Middle", "First", stack.name]
    with pytest.raises(ClientError, match="does not exist"):
        stack.described()
    assert not [name for name in cloud.resources().get("AWS::SSM::Parameter", []) if name.startswith(stack.name)]


def test_a_failed_creation_takes_back_what_it_made_and_says_why(cloud, stack) -> None:
    template = {
        "Resources": {
            "Good": parameter("x"),
            "Kept": parameter("x", DeletionPolicy="Retain"),
            "Gone": parameter("x", DeletionPolicy="RetainExceptOnCreate"),
            "Bad": {**BROKEN, "DependsOn": ["Good", "Kept", "Gone"]},
        }
    }
    assert stack.create(template) == "ROLLBACK_COMPLETE"
    assert "no-such-key" in stack.reasons()
    events = stack.events()
    assert ("Bad", "CREATE_FAILED") in events
    assert ("Good", "DELETE_COMPLETE") in events
    assert ("Kept", "DELETE_SKIPPED") in events
    assert ("Gone", "DELETE_COMPLETE") in events
    names = [name for name in cloud.resources()["AWS::SSM::Parameter"] if name.startswith(stack.name)]
    assert len(names) == 1 and "-Kept-" in names[0]
    with pytest.raises(ClientError, match="ROLLBACK_COMPLETE state and can not be updated"):
        stack.update(template)


def test_a_failed_creation_can_be_kept_for_a_look(stack) -> None:
    template = {"Resources": {"Good": parameter("x"), "Bad": {**BROKEN, "DependsOn": ["Good"]}}}
    assert stack.create(template, DisableRollback=True) == "CREATE_FAILED"
    assert stack.physical("Good")


def test_unemulated_types_and_properties_fail_by_name_before_anything_is_made(cloud, stack) -> None:
    template = {
        "Resources": {
            "Good": parameter("x"),
            "Cluster": {"Type": "AWS::EKS::Cluster", "Properties": {}},
            "Topic": {"Type": TOPIC, "Properties": {"TracingConfig": "Active"}},
        }
    }
    with pytest.raises(ClientError) as raised:
        stack.create(template)
    message = raised.value.response["Error"]["Message"]
    assert "AWS::EKS::Cluster (Cluster) is not emulated" in message
    assert "Topic.TracingConfig is not emulated" in message
    with pytest.raises(ClientError, match="does not exist"):
        stack.described()


def test_an_update_changes_in_place_replaces_adds_and_removes(cloud, stack) -> None:
    ssm = cloud.client("ssm")
    named = {"Type": PARAMETER, "Properties": {"Type": "String", "Value": "v", "Name": f"/{stack.name}/one"}}
    stack.create({"Resources": {"Place": parameter("1"), "Moves": named, "Goes": parameter("x"), "Same": parameter("s")}})
    place, same = stack.physical("Place"), stack.physical("Same")
    moved = {"Type": PARAMETER, "Properties": {"Type": "String", "Value": "v", "Name": f"/{stack.name}/two"}}
    assert (
        stack.update(
            {
                "Resources": {
                    "Place": parameter("2"),
                    "Moves": moved,
                    "Same": parameter("s"),
                    "Comes": parameter({"Fn::Sub": "at ${Moves}"}),
                }
            }
        )
        == "UPDATE_COMPLETE"
    )
    assert stack.physical("Place") == place
    assert ssm.get_parameter(Name=place)["Parameter"]["Value"] == "2"
    assert stack.physical("Same") == same
    assert stack.physical("Moves") == f"/{stack.name}/two"
    assert ssm.get_parameter(Name=stack.physical("Comes"))["Parameter"]["Value"] == f"at /{stack.name}/two"
    events = stack.events()
    assert ("Same", "UPDATE_IN_PROGRESS") not in events
    # The replacement is there before its predecessor goes.
    assert events.index(("Moves", "UPDATE_COMPLETE")) < events.index(("Moves", "DELETE_COMPLETE"))
    assert ("Goes", "DELETE_COMPLETE") in events
    with pytest.raises(ClientError, match="ParameterNotFound"):
        ssm.get_parameter(Name=f"/{stack.name}/one")


def test_a_failed_update_is_taken_back(cloud, stack) -> None:
    ssm = cloud.client("ssm")
    one = {"Type": PARAMETER, "Properties": {"Type": "String", "Value": "v", "Name": f"/{stack.name}/one"}}
    two = {"Type": PARAMETER, "Properties": {"Type": "String", "Value": "v", "Name": f"/{stack.name}/two"}}
    before = {"Resources": {"Place": parameter("1"), "Moves": one, "Goes": parameter("g")}, "Outputs": {"O": {"Value": "old"}}}
    stack.create(before)
    place, goes = stack.physical("Place"), stack.physical("Goes")
    after = {
        "Resources": {
            "Place": parameter("2"),
            "Moves": two,
            "Comes": parameter("c"),
            "Bad": {**BROKEN, "DependsOn": ["Place", "Moves", "Comes"]},
        },
        "Outputs": {"O": {"Value": "new"}},
    }
    assert stack.update(after) == "UPDATE_ROLLBACK_COMPLETE"
    assert "no-such-key" in stack.reasons()
    assert ssm.get_parameter(Name=place)["Parameter"]["Value"] == "1"
    assert stack.physical("Moves") == f"/{stack.name}/one"
    assert stack.physical("Goes") == goes
    assert stack.outputs() == {"O": "old"}
    names = [name for name in cloud.resources()["AWS::SSM::Parameter"] if stack.name in name]
    assert sorted(names) == sorted([place, goes, f"/{stack.name}/one"])
    body = cloud.client("cloudformation").get_template(StackName=stack.name)["TemplateBody"]
    assert body == before
    assert stack.update({**before, "Outputs": {"O": {"Value": "again"}}}) == "UPDATE_COMPLETE"


def test_a_named_resource_cannot_be_replaced_by_one_of_the_same_name(stack) -> None:
    def group(name: str, description: str) -> dict[str, Any]:
        return {
            "Resources": {
                "Vpc": {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.9.0.0/16"}},
                "Group": {
                    "Type": "AWS::EC2::SecurityGroup",
                    "Properties": {"GroupDescription": description, "GroupName": name, "VpcId": {"Ref": "Vpc"}},
                },
            }
        }

    stack.create(group("fixed", "one"))
    assert stack.update(group("fixed", "two")) == "UPDATE_ROLLBACK_COMPLETE"
    assert "custom-named resource requires replacing" in stack.reasons()
    assert stack.update(group("other", "two")) == "UPDATE_COMPLETE"
    stack.delete()


def test_what_is_retained_stays_when_it_is_removed_or_replaced(cloud, stack) -> None:
    ssm = cloud.client("ssm")

    def template(name: str) -> dict[str, Any]:
        moving = {"Type": PARAMETER, "Properties": {"Type": "String", "Value": "v", "Name": f"/{stack.name}/{name}"}}
        return {
            "Resources": {"Moves": {**moving, "UpdateReplacePolicy": "Retain"}, "Stays": parameter("s", DeletionPolicy="Retain")}
        }

    stack.create(template("one"))
    stays = stack.physical("Stays")
    stack.update(template("two"))
    stack.delete()
    assert ssm.get_parameter(Name=f"/{stack.name}/one") and ssm.get_parameter(Name=stays)
    with pytest.raises(ClientError, match="ParameterNotFound"):
        ssm.get_parameter(Name=f"/{stack.name}/two")


def test_an_export_in_use_can_be_neither_changed_nor_deleted(cloud, stack, other_stack) -> None:
    def exporting(value: str) -> dict[str, Any]:
        export = {"Value": value, "Export": {"Name": {"Fn::Sub": "${AWS::StackName}-e"}}}
        return {"Resources": {"P": parameter("x")}, "Outputs": {"E": export}}

    name = f"{stack.name}-e"
    importing = {"Resources": {"P": parameter({"Fn::ImportValue": name})}}
    stack.create(exporting("one"))
    assert other_stack.create(importing) == "CREATE_COMPLETE"
    formation = cloud.client("cloudformation")
    assert formation.list_imports(ExportName=name)["Imports"] == [other_stack.name]
    assert (name, "one") in [(each["Name"], each["Value"]) for each in formation.list_exports()["Exports"]]

    assert stack.update(exporting("two")) == "UPDATE_ROLLBACK_COMPLETE"
    assert stack.outputs() == {"E": "one"}
    stack.delete()
    assert stack.described()["StackStatus"] == "DELETE_FAILED"
    assert f"Cannot delete export {name} as it is in use by {other_stack.name}" in stack.described()["StackStatusReason"]

    other_stack.delete()
    stack.delete()
    with pytest.raises(ClientError, match="does not exist"):
        stack.described()


def test_an_import_that_nobody_exports_fails(stack) -> None:
    assert stack.create({"Resources": {"P": parameter({"Fn::ImportValue": "nothing"})}}) == "ROLLBACK_COMPLETE"
    assert "No export named nothing found" in stack.reasons()


def test_conditions_decide_what_exists(cloud, stack) -> None:
    template = {
        "Parameters": {"On": {"Type": "String", "AllowedValues": ["yes", "no"]}},
        "Conditions": {"IsOn": {"Fn::Equals": [{"Ref": "On"}, "yes"]}},
        "Resources": {"Always": parameter("a"), "Maybe": parameter("m", Condition="IsOn")},
        "Outputs": {"Maybe": {"Condition": "IsOn", "Value": {"Ref": "Maybe"}}},
    }

    def on(value: str) -> list[dict[str, str]]:
        return [{"ParameterKey": "On", "ParameterValue": value}]

    stack.create(template, Parameters=on("no"))
    assert stack.outputs() == {}
    stack.update(template, Parameters=on("yes"))
    assert list(stack.outputs()) == ["Maybe"]
    stack.update(template, Parameters=on("no"))
    assert stack.outputs() == {}
    resources = cloud.client("cloudformation").list_stack_resources(StackName=stack.name)["StackResourceSummaries"]
    assert [each["LogicalResourceId"] for each in resources] == ["Always"]


def test_rules_are_checked_before_anything_is_made(stack) -> None:
    rule = {
        "Assertions": [
            {"Assert": {"Fn::Contains": [["a"], {"Ref": "P"}]}, "AssertDescription": "P must be a"},
        ]
    }
    template = {
        "Parameters": {"P": {"Type": "String", "Default": "b"}},
        "Rules": {"R": rule},
        "Resources": {"T": parameter("x")},
    }
    with pytest.raises(ClientError, match="P must be a"):
        stack.create(template)


def test_tags_of_the_stack_reach_its_resources_and_follow_changes(cloud, stack) -> None:
    ec2 = cloud.client("ec2")
    own = [{"Key": "own", "Value": "1"}, {"Key": "both", "Value": "resource"}]
    template = {"Resources": {"Vpc": {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.8.0.0/16", "Tags": own}}}}
    stack.create(template, Tags=[{"Key": "team", "Value": "a"}, {"Key": "both", "Value": "stack"}])
    vpc = stack.physical("Vpc")

    def tags() -> dict[str, str]:
        return {tag["Key"]: tag["Value"] for tag in ec2.describe_vpcs(VpcIds=[vpc])["Vpcs"][0]["Tags"]}

    assert tags() == {
        "own": "1",
        "both": "resource",
        "team": "a",
        "aws:cloudformation:stack-name": stack.name,
        "aws:cloudformation:stack-id": stack.described()["StackId"],
        "aws:cloudformation:logical-id": "Vpc",
    }
    stack.update(template, Tags=[{"Key": "cost", "Value": "b"}])
    assert tags()["cost"] == "b" and "team" not in tags()
    stack.delete()


def test_a_change_set_tells_what_it_would_do_and_does_it(cloud, stack) -> None:
    formation = cloud.client("cloudformation")

    def change_set(name: str, kind: str, template: dict[str, Any]) -> dict[str, Any]:
        formation.create_change_set(
            StackName=stack.name, ChangeSetName=name, ChangeSetType=kind, TemplateBody=json.dumps(template)
        )
        described: dict[str, Any] = formation.describe_change_set(StackName=stack.name, ChangeSetName=name)
        return described

    def changes(described: dict[str, Any]) -> dict[str, tuple[str, str | None]]:
        found = [change["ResourceChange"] for change in described["Changes"]]
        return {each["LogicalResourceId"]: (each["Action"], each.get("Replacement")) for each in found}

    named = {"Type": PARAMETER, "Properties": {"Type": "String", "Value": "v", "Name": f"/{stack.name}/one"}}
    follower = parameter({"Ref": "Moves"})
    first = {"Resources": {"Place": parameter("1"), "Moves": named, "Follows": follower, "Goes": parameter("g")}}
    created = change_set("one", "CREATE", first)
    assert stack.described()["StackStatus"] == "REVIEW_IN_PROGRESS"
    assert {action for action, _ in changes(created).values()} == {"Add"}
    formation.execute_change_set(StackName=stack.name, ChangeSetName="one")
    assert stack.settled() == "CREATE_COMPLETE"
    with pytest.raises(ClientError, match="cannot be executed in its current status"):
        formation.execute_change_set(StackName=stack.name, ChangeSetName="one")

    moved = {"Type": PARAMETER, "Properties": {"Type": "String", "Value": "v", "Name": f"/{stack.name}/two"}}
    second = {"Resources": {"Place": parameter("2"), "Moves": moved, "Follows": follower, "Comes": parameter("c")}}
    assert changes(change_set("two", "UPDATE", second)) == {
        "Place": ("Modify", "False"),
        "Moves": ("Modify", "True"),
        "Follows": ("Modify", "False"),
        "Comes": ("Add", None),
        "Goes": ("Remove", None),
    }
    assert cloud.client("ssm").get_parameter(Name=stack.physical("Place"))["Parameter"]["Value"] == "1"
    formation.execute_change_set(StackName=stack.name, ChangeSetName="two")
    assert stack.settled() == "UPDATE_COMPLETE"
    assert cloud.client("ssm").get_parameter(Name=stack.physical("Follows"))["Parameter"]["Value"] == f"/{stack.name}/two"

    nothing = change_set("three", "UPDATE", second)
    assert (nothing["Status"], nothing["ExecutionStatus"]) == ("FAILED", "UNAVAILABLE")
    assert "didn't contain changes" in nothing["StatusReason"]
    formation.delete_change_set(StackName=stack.name, ChangeSetName="three")
    formation.delete_change_set(StackName=stack.name, ChangeSetName="never-there")
    with pytest.raises(ClientError, match="ChangeSetNotFound"):
        formation.describe_change_set(StackName=stack.name, ChangeSetName="three")


def test_an_unchanged_stack_is_not_updated(stack) -> None:
    template = {"Resources": {"P": parameter("x")}}
    stack.create(template)
    with pytest.raises(ClientError, match="No updates are to be performed"):
        stack.update(template)


def test_a_protected_stack_is_not_deleted(cloud, stack) -> None:
    stack.create({"Resources": {"P": parameter("x")}}, EnableTerminationProtection=True)
    with pytest.raises(ClientError, match="TerminationProtection is enabled"):
        stack.delete()
    cloud.client("cloudformation").update_termination_protection(StackName=stack.name, EnableTerminationProtection=False)
    stack.delete()


def test_a_deletion_that_fails_says_so_and_can_leave_the_obstacle(cloud, stack) -> None:
    stack.create({"Resources": {"Bucket": {"Type": "AWS::S3::Bucket"}, "P": parameter({"Ref": "Bucket"})}})
    bucket = stack.physical("Bucket")
    cloud.client("s3").put_object(Bucket=bucket, Key="k", Body=b"x")
    stack.delete()
    described = stack.described()
    assert described["StackStatus"] == "DELETE_FAILED"
    assert "[Bucket]" in described["StackStatusReason"]
    stack.delete(RetainResources=["Bucket"])
    assert bucket in cloud.resources()["AWS::S3::Bucket"]
    with pytest.raises(ClientError, match="does not exist"):
        stack.described()


def test_templates_come_from_s3_and_parameters_from_the_store(cloud, stack) -> None:
    s3, ssm = cloud.client("s3"), cloud.client("ssm")
    s3.create_bucket(Bucket=f"{stack.name}-templates")
    ssm.put_parameter(Name=f"/{stack.name}/v", Value="stored", Type="String")
    template = {
        "Parameters": {
            "Stored": {"Type": "AWS::SSM::Parameter::Value<String>", "Default": f"/{stack.name}/v"},
            "Secret": {"Type": "String", "NoEcho": True, "Default": "hidden"},
        },
        "Resources": {"P": parameter({"Fn::Sub": "${Stored}+{{resolve:ssm:/" + stack.name + "/v}}"})},
    }
    s3.put_object(Bucket=f"{stack.name}-templates", Key="t.json", Body=json.dumps(template).encode())
    url = f"{cloud.endpoint}/{stack.name}-templates/t.json"
    cloud.client("cloudformation").create_stack(StackName=stack.name, TemplateURL=url)
    assert stack.settled() == "CREATE_COMPLETE"
    assert ssm.get_parameter(Name=stack.physical("P"))["Parameter"]["Value"] == "stored+stored"
    shown = {each["ParameterKey"]: each for each in stack.described()["Parameters"]}
    assert shown["Stored"]["ParameterValue"] == f"/{stack.name}/v"
    assert shown["Stored"]["ResolvedValue"] == "stored"
    assert shown["Secret"]["ParameterValue"] == "****"

    ssm.put_parameter(Name=f"/{stack.name}/v", Value="newer", Type="String", Overwrite=True)
    previous = [{"ParameterKey": key, "UsePreviousValue": True} for key in ("Stored", "Secret")]
    cloud.client("cloudformation").update_stack(StackName=stack.name, UsePreviousTemplate=True, Parameters=previous)
    assert ssm.get_parameter(Name=stack.physical("P"))["Parameter"]["Value"] == "newer+newer"


def test_an_action_that_is_not_emulated_is_refused_by_name(cloud, stack) -> None:
    with pytest.raises(ClientError, match="DetectStackDrift of CloudFormation is not emulated"):
        cloud.client("cloudformation").detect_stack_drift(StackName=stack.name)


def test_regions_are_apart(cloud, stack) -> None:
    stack.create({"Resources": {"P": parameter({"Ref": "AWS::Region"})}})
    elsewhere = cloud.client("cloudformation", "eu-west-1")
    with pytest.raises(ClientError, match="does not exist"):
        elsewhere.describe_stacks(StackName=stack.name)
    template = {"Resources": {"Bucket": {"Type": "AWS::S3::Bucket"}, "P": parameter({"Fn::Select": [1, {"Fn::GetAZs": ""}]})}}
    elsewhere.create_stack(StackName=stack.name, TemplateBody=json.dumps(template))
    physical = elsewhere.describe_stack_resource(StackName=stack.name, LogicalResourceId="P")["StackResourceDetail"]
    value = cloud.client("ssm", "eu-west-1").get_parameter(Name=physical["PhysicalResourceId"])["Parameter"]["Value"]
    assert value == "eu-west-1b"
    elsewhere.delete_stack(StackName=stack.name)
    stack.delete()
