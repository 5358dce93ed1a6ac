"""Intrinsic functions, as properties where they have any."""

from __future__ import annotations

import base64
import ipaddress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainlocal.cloud.formation.faults import FormationError
from trainlocal.cloud.formation.intrinsics import NO_VALUE, UNKNOWN, Evaluator, references

TEXT = st.text(st.characters(blacklist_characters="${}", codec="utf-8"), max_size=20)
NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9]{0,10}", fullmatch=True)


class Fixed:
    """Surroundings with made-up values."""

    def reference(self, logical: str) -> Any:
        return UNKNOWN if logical == "Later" else f"id-of-{logical}"

    def attribute(self, logical: str, name: str) -> Any:
        return f"{name}-of-{logical}"

    def imported(self, name: str) -> str:
        return f"export-{name}"

    def zones(self, region: str) -> list[str]:
        return [f"{region}a", f"{region}b"]

    def parameter_of_store(self, name: str) -> str:
        return f"stored:{name}"


def evaluator(**parameters: Any) -> Evaluator:
    return Evaluator(
        surroundings=Fixed(),
        pseudo={"AWS::Region": "eu-west-1", "AWS::NoValue": NO_VALUE},
        parameters=parameters,
        mappings={"Map": {"top": {"second": "found"}}},
        conditions={"Yes": {"Fn::Equals": ["a", "a"]}, "No": {"Fn::Not": [{"Condition": "Yes"}]}},
        resources=frozenset({"Thing", "Later"}),
    )


def value(node: Any, **parameters: Any) -> Any:
    return evaluator(**parameters).value(node)


@given(st.lists(TEXT), TEXT)
def test_join_is_pythons_join(parts: list[str], separator: str) -> None:
    assert value({"Fn::Join": [separator, parts]}) == separator.join(parts)


@given(st.lists(TEXT.filter(lambda text: "|" not in text), min_size=1))
def test_split_undoes_join(parts: list[str]) -> None:
    assert value({"Fn::Split": ["|", {"Fn::Join": ["|", parts]}]}) == parts


@given(st.lists(TEXT, min_size=1), st.data())
def test_select_takes_the_item_at_the_index_given_as_number_or_text(items: list[str], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(items) - 1))
    assert value({"Fn::Select": [index, items]}) == items[index]
    assert value({"Fn::Select": [str(index), items]}) == items[index]
    with pytest.raises(FormationError, match="nonexistent value"):
        value({"Fn::Select": [len(items), items]})


@given(NAMES, TEXT, TEXT, TEXT)
def test_sub_puts_values_in_and_leaves_the_rest_alone(name: str, before: str, after: str, given_value: str) -> None:
    text = f"{before}${{Own}}{after}${{!{name}}}"
    assert value({"Fn::Sub": [text, {"Own": given_value}]}) == f"{before}{given_value}{after}${{{name}}}"


@given(st.text())
def test_base64_is_the_encoding_of_utf_8(text: str) -> None:
    assert base64.b64decode(value({"Fn::Base64": {"Fn::Sub": ["${Own}", {"Own": text}]}})).decode() == text


@given(st.integers(16, 24), st.integers(1, 12), st.integers(4, 8))
def test_cidr_gives_disjoint_blocks_inside_the_block(prefix: int, count: int, bits: int) -> None:
    block = ipaddress.ip_network(f"10.0.0.0/{prefix}")
    if 2 ** (32 - bits - prefix) < count:
        with pytest.raises(FormationError, match="fewer than"):
            value({"Fn::Cidr": [str(block), count, bits]})
        return
    made = [ipaddress.ip_network(each) for each in value({"Fn::Cidr": [str(block), count, str(bits)]})]
    assert len(made) == count
    assert all(each.subnet_of(block) and each.prefixlen == 32 - bits for each in made)
    assert all(not a.overlaps(b) for a in made for b in made if a is not b)


KEYS = NAMES.filter(lambda name: name != "Ref")


@settings(max_examples=50)
@given(st.recursive(TEXT | st.integers() | st.booleans(), lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner)))
def test_what_holds_no_expression_stays_as_it_is(document: Any) -> None:
    assert value(document) == document


def test_references_to_resources_parameters_and_pseudo_parameters() -> None:
    assert value([{"Ref": "Thing"}, {"Ref": "P"}, {"Ref": "AWS::Region"}], P="p") == ["id-of-Thing", "p", "eu-west-1"]
    assert value({"Fn::GetAtt": ["Thing", "Arn"]}) == value({"Fn::GetAtt": "Thing.Arn"}) == "Arn-of-Thing"
    assert value({"Fn::Sub": "${Thing}/${Thing.A.B}/${P}/${AWS::Region}"}, P=1) == "id-of-Thing/A.B-of-Thing/1/eu-west-1"
    with pytest.raises(FormationError, match=r"Unresolved resource dependencies \[Nothing\]"):
        value({"Ref": "Nothing"})


def test_no_value_takes_its_property_or_item_away() -> None:
    nothing = {"Ref": "AWS::NoValue"}
    assert value({"a": nothing, "b": [nothing, 1], "c": {"Fn::If": ["No", 1, nothing]}}) == {"b": [1]}


def test_conditions_choose_and_combine() -> None:
    assert value({"Fn::If": ["Yes", "y", "n"]}) == "y"
    assert value({"Fn::If": ["No", "y", "n"]}) == "n"
    one = evaluator(P="x")
    assert one.truth({"Fn::And": [{"Condition": "Yes"}, {"Fn::Equals": [{"Ref": "P"}, "x"]}]})
    assert one.truth({"Fn::Or": [{"Condition": "No"}, {"Condition": "Yes"}]})
    assert not one.truth({"Fn::Or": [{"Condition": "No"}, {"Fn::Equals": [1, "2"]}]})
    assert one.truth({"Fn::Equals": [True, "true"]})
    with pytest.raises(FormationError, match="unresolved condition Missing"):
        value({"Fn::If": ["Missing", 1, 2]})


def test_rule_functions() -> None:
    one = evaluator()
    assert one.truth({"Fn::Contains": [["1", "2"], 2]})
    assert not one.truth({"Fn::Contains": [["1", "2"], "3"]})
    assert one.truth({"Fn::EachMemberIn": [["a"], ["a", "b"]]})
    assert not one.truth({"Fn::EachMemberEquals": [["a", "b"], "a"]})


def test_maps_zones_imports_and_the_parameter_store() -> None:
    assert value({"Fn::FindInMap": ["Map", "top", "second"]}) == "found"
    assert value({"Fn::FindInMap": ["Map", "top", "third", {"DefaultValue": "else"}]}) == "else"
    with pytest.raises(FormationError, match="Unable to get mapping for Map::top::third"):
        value({"Fn::FindInMap": ["Map", "top", "third"]})
    assert value({"Fn::GetAZs": ""}) == value({"Fn::GetAZs": {"Ref": "AWS::Region"}}) == ["eu-west-1a", "eu-west-1b"]
    assert value({"Fn::ImportValue": {"Fn::Sub": "${AWS::Region}-x"}}) == "export-eu-west-1-x"
    assert value("ami={{resolve:ssm:/a/b}}!") == "ami=stored:/a/b!"
    with pytest.raises(FormationError, match="secretsmanager"):
        value("{{resolve:secretsmanager:x}}")


def test_an_unknown_function_fails_by_name() -> None:
    with pytest.raises(FormationError, match=r"the function Fn::Transform is not emulated"):
        value({"Fn::Transform": {}})


def test_what_is_not_known_yet_makes_what_is_built_from_it_unknown() -> None:
    later = {"Ref": "Later"}
    for node in (
        {"Fn::Join": ["-", ["a", later]]},
        {"Fn::Sub": "x${Later}"},
        {"Fn::Base64": later},
        {"Fn::Split": [",", later]},
        {"Fn::Select": [0, {"Fn::Split": [",", later]}]},
    ):
        assert value(node) is UNKNOWN
    assert value({"a": [later, "b"]}) == {"a": [UNKNOWN, "b"]}


def test_references_are_found_wherever_they_hide() -> None:
    node = {
        "a": {"Fn::Sub": ["${X.Arn}-${Own}-${!Not}", {"Own": {"Ref": "Y"}}]},
        "b": [{"Fn::If": ["C", {"Ref": "Z"}, {"Fn::GetAtt": "W.Arn"}]}],
    }
    assert set(references(node)) == {("X", "Arn"), ("Y", None), ("Z", None), ("W", "Arn")}
