"""Templates, parameters, order and property schemas: what is refused, and in which words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainlocal.cloud.formation.faults import FormationError, InsufficientCapabilities
from trainlocal.cloud.formation.graph import in_order
from trainlocal.cloud.formation.parameters import Parameter, resolve_parameters
from trainlocal.cloud.formation.source import bucket_and_key
from trainlocal.cloud.formation.template import read_template
from trainlocal.cloud.formation.validation import check_capabilities, check_template
from trainlocal.cloud.resources.schema import FLAG, TEXT, WHOLE, Many, record

SHORT = """
Parameters:
  P: {Type: String, Default: 2012-10-17}
Conditions:
  C: !Not [!Equals [!Ref P, no]]
Resources:
  T:
    Type: AWS::SNS::Topic
    DependsOn: U
    Properties:
      DisplayName: !Sub '${P}-${!x}'
      TopicName: !GetAtt U.TopicName
  U:
    Type: AWS::SNS::Topic
"""


def test_short_tags_become_functions_and_dates_stay_text() -> None:
    template = read_template(SHORT)
    declared = template.declarations["T"]
    assert declared.properties == {
        "DisplayName": {"Fn::Sub": "${P}-${!x}"},
        "TopicName": {"Fn::GetAtt": ["U", "TopicName"]},
    }
    assert declared.depends_on == ("U",)
    assert template.section("Parameters")["P"]["Default"] == "2012-10-17"
    assert template.section("Conditions")["C"] == {"Fn::Not": [{"Fn::Equals": [{"Ref": "P"}, False]}]}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("", "empty"),
        ("{", "neither well-formed JSON nor YAML"),
        ("[1]", "not an object"),
        ("{}", "At least one Resources member"),
        ('{"Resources": {"A": {}}}', "resource A has no Type"),
        ('{"Transform": "X", "Resources": {"A": {"Type": "T"}}}', "section Transform is not emulated"),
        ('{"Resources": {"A": {"Type": "T", "DeletionPolicy": "Keep"}}}', "unrecognized DeletionPolicy Keep"),
        ('{"Resources": {"A-b": {"Type": "T"}}}', "must be alphanumeric"),
    ],
)
def test_ill_formed_templates_are_refused(body: str, reason: str) -> None:
    with pytest.raises(FormationError, match=reason):
        read_template(body)


def checked(resources: dict[str, Any]) -> None:
    check_template(read_template(json.dumps({"Resources": resources})))


def test_every_unemulated_thing_is_named_at_once() -> None:
    with pytest.raises(FormationError) as raised:
        checked(
            {
                "Camera": {"Type": "AWS::Rekognition::StreamProcessor"},
                "Topic": {"Type": "AWS::SNS::Topic", "Properties": {"Colour": "red"}},
                "Template": {
                    "Type": "AWS::EC2::LaunchTemplate",
                    "Properties": {
                        "LaunchTemplateData": {"NetworkInterfaces": [{"Speed": 1}, {"Fn::If": ["C", {"Size": 1}, {}]}]}
                    },
                },
                "Role": {"Type": "AWS::IAM::Role", "Properties": {"Description": {"Fn::GetAtt": ["Topic", "Owner"]}}},
            }
        )
    for part in (
        "resource type AWS::Rekognition::StreamProcessor (Camera)",
        "property Topic.Colour is not emulated (AWS::SNS::Topic)",
        "property Template.LaunchTemplateData.NetworkInterfaces[0].Speed",
        "property Template.LaunchTemplateData.NetworkInterfaces[1].Size",
        "attribute Topic.Owner",
        "Role lacks the required property AssumeRolePolicyDocument",
    ):
        assert part in raised.value.message


def test_a_type_that_is_nearly_right_is_answered_with_the_right_one() -> None:
    with pytest.raises(FormationError, match=r"AWS::SNS::Topics \(A\) is not emulated \(AWS::SNS::Topic is\)"):
        checked({"A": {"Type": "AWS::SNS::Topics"}})


def test_loose_ends_and_circles_are_refused() -> None:
    topic = {"Type": "AWS::SNS::Topic"}
    with pytest.raises(FormationError, match=r"Unresolved resource dependencies \[B, C\]"):
        checked({"A": {**topic, "DependsOn": "B", "Properties": {"DisplayName": {"Ref": "C"}}}})
    with pytest.raises(FormationError, match=r"Circular dependency between resources: \[A, B\]"):
        checked({"A": {**topic, "DependsOn": "B"}, "B": {**topic, "DependsOn": "A"}, "C": {**topic, "DependsOn": "A"}})


def test_identities_need_capabilities() -> None:
    role = {"Type": "AWS::IAM::Role", "Properties": {"AssumeRolePolicyDocument": {}}}
    named = {"Type": "AWS::IAM::Role", "Properties": {"AssumeRolePolicyDocument": {}, "RoleName": "x"}}
    plain, with_name = (read_template(json.dumps({"Resources": {"R": each}})) for each in (role, named))
    check_capabilities(plain, ("CAPABILITY_IAM",))
    check_capabilities(with_name, ("CAPABILITY_NAMED_IAM",))
    with pytest.raises(InsufficientCapabilities, match=r"\[CAPABILITY_IAM\]"):
        check_capabilities(plain, ())
    with pytest.raises(InsufficientCapabilities, match=r"\[CAPABILITY_NAMED_IAM\]"):
        check_capabilities(with_name, ("CAPABILITY_IAM",))


@given(st.permutations(range(12)), st.data())
def test_each_comes_after_what_it_needs(ranks: list[int], data: st.DataObject) -> None:
    # Edges from higher to lower rank only, so that there is no cycle, in a random order of names.
    needed = {
        str(rank): frozenset(str(low) for low in data.draw(st.sets(st.integers(0, max(rank - 1, 0)))) if low < rank)
        for rank in ranks
    }
    order = in_order(needed)
    assert sorted(order) == sorted(needed)
    assert all(order.index(low) < order.index(name) for name, lows in needed.items() for low in lows)


def resolved(
    declared: dict[str, Any], *requested: dict[str, Any], previous: dict[str, Parameter] | None = None
) -> dict[str, Any]:
    values = resolve_parameters(declared, list(requested), previous or {}, lambda name: f"value of {name}")
    return {key: parameter.value for key, parameter in values.items()}


def test_parameters_take_given_previous_and_default_values_in_that_order() -> None:
    declared = {"P": {"Type": "String", "Default": True}}
    before = {"P": Parameter(given="old", value="old")}
    assert resolved(declared) == {"P": "true"}
    assert resolved(declared, {"ParameterKey": "P", "ParameterValue": "new"}, previous=before) == {"P": "new"}
    assert resolved(declared, {"ParameterKey": "P", "UsePreviousValue": True}, previous=before) == {"P": "old"}


def test_a_previous_value_from_the_store_is_its_name_and_is_read_anew() -> None:
    declared = {"P": {"Type": "AWS::SSM::Parameter::Value<List<String>>", "Default": "/a"}}
    before = {"P": Parameter(given="/b", value=["stale"], stored=True)}
    assert resolved(declared, {"ParameterKey": "P", "UsePreviousValue": True}, previous=before) == {"P": ["value of /b"]}


@pytest.mark.parametrize(
    ("declaration", "given_value", "reason"),
    [
        ({"AllowedValues": ["a", "b"]}, "c", r"must be one of the allowed values: \[a, b\]"),
        ({"AllowedPattern": "[a-z]+"}, "a1", "must match pattern"),
        ({"AllowedPattern": "[a-z]+", "ConstraintDescription": "may have letters only"}, "a1", "may have letters only"),
        ({"MinLength": 2}, "a", "at least 2 characters"),
        ({"MaxLength": 2}, "abc", "at most 2 characters"),
        ({"Type": "Number", "MinValue": 3}, "2", "not less than 3"),
        ({"Type": "Number", "MaxValue": 3}, "4", "not greater than 3"),
        ({"Type": "Number"}, "four", "must be a number"),
    ],
)
def test_constraints_of_parameters_are_kept(declaration: dict[str, Any], given_value: str, reason: str) -> None:
    with pytest.raises(FormationError, match=reason):
        resolved({"P": declaration}, {"ParameterKey": "P", "ParameterValue": given_value})


def test_parameters_that_are_missing_or_unknown_are_named() -> None:
    with pytest.raises(FormationError, match=r"\[A, B\] must have values"):
        resolved({"A": {}, "B": {}})
    with pytest.raises(FormationError, match=r"\[C\] do not exist in the template"):
        resolved({}, {"ParameterKey": "C", "ParameterValue": "x"})


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:4566/bucket/a/b.json", ("bucket", "a/b.json")),
        ("http://localhost:4566/bucket/a%20b", ("bucket", "a b")),
        ("https://s3.us-east-1.amazonaws.com/bucket/key", ("bucket", "key")),
        ("https://my.bucket.s3.eu-west-1.amazonaws.com/a/key", ("my.bucket", "a/key")),
        ("https://bucket.s3.amazonaws.com/key", ("bucket", "key")),
    ],
)
def test_template_urls_of_every_style(url: str, expected: tuple[str, str]) -> None:
    assert bucket_and_key(url) == expected


def test_schemas_convert_what_cloudformation_lets_pass() -> None:
    schema = record(Count=WHOLE, Name=TEXT, On=FLAG, Items=Many(record(Size=WHOLE)), required="Name")
    assert schema.convert({"Name": 3, "Count": "4", "On": "true", "Items": [{"Size": "1"}]}, "X") == {
        "Name": "3",
        "Count": 4,
        "On": True,
        "Items": [{"Size": 1}],
    }
    for wrong, reason in (
        ({}, "X lacks the required property Name"),
        ({"Name": "n", "Count": "many"}, "X.Count must be an integer"),
        ({"Name": "n", "On": "maybe"}, "X.On must be true or false"),
        ({"Name": ["n"]}, "X.Name must be a string"),
        ({"Name": "n", "Items": {}}, "X.Items must be a list"),
        ({"Name": "n", "Items": [{"Weight": 1}]}, r"X.Items\[0\].Weight is not emulated"),
    ):
        with pytest.raises(ValueError, match=reason):
            schema.convert(wrong, "X")
