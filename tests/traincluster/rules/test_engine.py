"""The engine: what holds for every rule, and how findings reach the user."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import aws_cdk as cdk
import pytest
from hypothesis import given
from hypothesis import strategies as st

from constructs import Construct
from traincluster.instances import InstanceType, instance_type, instance_type_names
from traincluster.rules import MODULES, Finding, Rule, check, engine, find_rule, rules
from traincluster.rules.capacity import CapacityFacts
from traincluster.rules.identity import IdentityFacts
from traincluster.rules.job import JobFacts
from traincluster.rules.lustre import Deployment, LustreFacts, LustreStorage
from traincluster.rules.network import ShellAccess
from traincluster.rules.report import acknowledge, known, report

ROOT = Path(__file__).parents[3]
A_RULE = st.sampled_from(rules())
TYPES = st.sampled_from(instance_type_names()).map(instance_type)
st.register_type_strategy(InstanceType, TYPES)


ARNS = ("arn:aws:iam::123456789012:policy/p", "arn:aws-cn:resource-groups:cn-north-1:123456789012:group/g")
WELL_FORMED: dict[type, dict[str, st.SearchStrategy]] = {
    IdentityFacts: {"arns": st.sampled_from([(), *((("capacity", arn),) for arn in ARNS)])},
    CapacityFacts: {"types": st.lists(TYPES, min_size=1, max_size=3).map(tuple)},
    JobFacts: {field.name: st.integers(1, 10**4) for field in fields(JobFacts)},
    LustreFacts: {
        "deployment": st.sampled_from(typing.get_args(Deployment)),
        "storage": st.sampled_from(typing.get_args(LustreStorage)),
    },
    ShellAccess: {"sources": st.ip_addresses(v=4).map(lambda address: (f"{address}/32",))},
}
"""Values that are checked before they become facts."""


@dataclass(frozen=True)
class Facts:
    """What the rules of this test read."""

    size: int | None = None


@pytest.fixture
def own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rules beside the library's, for one test."""
    monkeypatch.setattr(engine, "_rules", dict(engine._rules))

    @engine.rule("size-is-small", summary="The size is small.", source="this test", levels=("error", "warning"))
    def size_is_small(facts: Facts) -> Iterator[Finding]:
        if facts.size is not None and facts.size > 3:
            level = "error" if facts.size > 9 else "warning"
            yield Finding(level, "size-is-small", f"size is {facts.size}. Allowed: up to 3.", "Make it smaller.")

    @engine.rule("size-is-odd", summary="The size is odd.", source="this test", levels=("error",))
    def size_is_odd(facts: Facts) -> Iterator[Finding]:
        if facts.size is not None and facts.size % 2 == 0:
            yield Finding("error", "size-is-odd", f"size is {facts.size}, an even number.", "Add one.")


def test_the_rules_are_many_and_each_is_described():
    assert len(rules()) > 40
    for each in rules():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", each.name)
        assert each.summary and each.source and each.levels
        assert each.check.__module__ in {module.__name__ for module in MODULES}


@given(st.data(), A_RULE)
def test_no_rule_trips_over_what_is_unknown(data: st.DataObject, each: Rule):
    """Every fact that may be unknown is, and the others are any: findings may come of those, but no exception."""
    hints = typing.get_type_hints(each.facts)
    unknown = {name: st.none() for name, hint in hints.items() if type(None) in typing.get_args(hint)}
    texts = {name: st.text("abc/-", min_size=1) for name, hint in hints.items() if hint is str}  # never the word None itself
    facts = data.draw(st.builds(each.facts, **{**texts, **WELL_FORMED.get(each.facts, {}), **unknown}))
    for finding in each.check(facts):
        assert finding.rule == each.name and finding.level in each.levels
        assert "None" not in finding.message + finding.fix
    if set(unknown) == set(hints):
        assert list(each.check(facts)) == []


def test_all_findings_of_an_app_come_together_and_stop_the_synth(own_rules):
    app = cdk.App()
    stacks = [cdk.Stack(app, name) for name in ("One", "Other")]
    for stack in stacks:
        report(Construct(stack, "Part"), check(Facts(size=12)))
    with pytest.raises(RuntimeError) as caught:
        app.synth()
    text = str(caught.value)
    for place in ("One/Part", "Other/Part"):
        assert f"[{place}] size is 12. Allowed: up to 3. Make it smaller. [size-is-small]" in text
        assert f"[{place}] size is 12, an even number. Add one. [size-is-odd]" in text


def warnings(stack: cdk.Stack) -> list[str]:
    return [str(e.data) for one in stack.node.find_all() for e in one.node.metadata if e.type == "aws:cdk:warning"]


def test_a_warning_is_silenced_by_name_with_a_reason_which_is_kept(own_rules, stack):
    parts = [Construct(stack, name) for name in ("One", "Other")]
    acknowledge(parts[0], "size-is-small", "It has to be large.")
    for part in parts:
        report(part, check(Facts(size=5)))
    (left,) = warnings(stack)
    assert left.startswith("size is 5.") and "traincluster:size-is-small" in left
    acknowledge(parts[1], "size-is-small", "This too.")  # afterwards, it takes back what was said
    assert warnings(stack) == []
    reasons = json.dumps([e.data for part in parts for e in part.node.metadata if "acknowledged" in e.type])
    assert "It has to be large." in reasons and "This too." in reasons


def test_an_error_cannot_be_acknowledged(own_rules, stack):
    with pytest.raises(ValueError, match=r"'size-is-odd' finds errors, and only a warning can be acknowledged"):
        acknowledge(stack, "size-is-odd", "please")
    acknowledge(stack, "size-is-small", "its warnings only")
    report(stack, check(Facts(size=13)))
    with pytest.raises(RuntimeError, match=r"\[size-is-small\]"):
        cdk.App.of(stack).synth()


def test_an_unknown_rule_is_refused_with_the_nearest_name(stack):
    with pytest.raises(ValueError, match=r"There is no rule 'image-is-pined'. Did you mean 'image-is-pinned'\?"):
        acknowledge(stack, "image-is-pined", "typing error")
    with pytest.raises(ValueError, match="lists them all"):
        find_rule("~")


def test_a_reason_is_needed(stack):
    with pytest.raises(ValueError, match="without a reason"):
        acknowledge(stack, "image-is-pinned", "  ")


@given(st.sampled_from([each for each in rules() if each.can_be_acknowledged]))
def test_every_rule_that_warns_can_be_acknowledged(each: Rule):
    acknowledge(cdk.Stack(), each.name, "a reason")


def test_a_rule_that_misnames_its_finding_is_found_out(monkeypatch):
    monkeypatch.setattr(engine, "_rules", {})

    @engine.rule("one-name", summary="x", source="x", levels=("info",))
    def other(facts: Facts) -> Iterator[Finding]:
        yield Finding("info", "another-name", "x.", "x.") if facts.size == 1 else Finding("error", "one-name", "x.", "x.")

    with pytest.raises(AssertionError, match="calls its finding another-name"):
        check(Facts(size=1))
    with pytest.raises(AssertionError, match="does not declare the level error"):
        check(Facts(size=2))


def test_what_only_the_deployment_knows_is_unknown_to_rules():
    assert known(cdk.Aws.REGION) is None
    assert known(None) is None
    assert known("us-east-1") == "us-east-1"


def test_facts_are_frozen_dataclasses_of_plain_values():
    for each in rules():
        assert dataclasses.is_dataclass(each.facts) and each.facts.__dataclass_params__.frozen
        assert not any("aws_cdk" in str(hint) for hint in typing.get_type_hints(each.facts).values())


def test_the_rules_do_without_the_cdk():
    program = "import sys, traincluster.rules; assert not {'aws_cdk', 'jsii'} & set(sys.modules)"
    paths = [str(ROOT / "constructs"), str(ROOT / "training")]
    subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {program}"], check=True)


def test_the_page_of_rules_is_what_the_rules_say():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from make_docs import rules_page
    finally:
        sys.path.remove(str(ROOT / "tools"))
    assert (ROOT / "docs" / "rules.md").read_text() == rules_page()
