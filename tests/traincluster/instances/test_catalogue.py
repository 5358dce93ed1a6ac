"""The instance catalogue: what it knows, and how it answers what it does not know."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traincluster.instances import efa_sizes, instance_type, instance_type_names, regenerate, sources


@pytest.mark.parametrize(
    ("name", "accelerator", "count", "cards", "efa", "efa_on_card_0"),
    [
        ("p4d.24xlarge", "A100", 8, 4, 4, True),
        ("p4de.24xlarge", "A100", 8, 4, 4, True),
        ("p5.48xlarge", "H100", 8, 32, 32, True),
        ("p5e.48xlarge", "H200", 8, 32, 32, True),
        ("p5en.48xlarge", "H200", 8, 16, 16, True),
        ("p6-b200.48xlarge", "B200", 8, 8, 8, True),
        ("p6-b300.48xlarge", "B300", 8, 17, 16, False),
        ("trn1.32xlarge", "Trainium", 16, 8, 8, True),
        ("trn2.48xlarge", "Trainium2", 16, 16, 16, True),
        ("g5.48xlarge", "A10G", 8, 1, 1, True),
        ("inf2.48xlarge", "Inferentia2", 12, 1, 0, False),
    ],
)
def test_accelerated_types(name, accelerator, count, cards, efa, efa_on_card_0):
    found = instance_type(name)
    assert found.accelerator is not None
    assert (found.accelerator.name, found.accelerator.count) == (accelerator, count)
    assert (found.network_cards, found.max_efa_interfaces, found.efa_on_card_0) == (cards, efa, efa_on_card_0)


@pytest.mark.parametrize(
    ("name", "efa"),
    [
        ("c5n.18xlarge", 1),
        ("c6in.32xlarge", 2),
        ("c6gn.16xlarge", 1),
        ("c7gn.16xlarge", 1),
        ("c8gn.48xlarge", 2),
        ("hpc6a.48xlarge", 1),
        ("hpc6id.32xlarge", 2),
        ("hpc7a.96xlarge", 2),
        ("hpc7g.16xlarge", 1),
        ("hpc8a.96xlarge", 2),
        ("m5n.24xlarge", 1),
        ("r5n.24xlarge", 1),
        ("i3en.24xlarge", 1),
        ("c7i.2xlarge", 0),
        ("m7g.xlarge", 0),
        ("t3.large", 0),
    ],
)
def test_cpu_types(name, efa):
    found = instance_type(name)
    assert found.accelerator is None
    assert found.max_efa_interfaces == efa
    assert found.training_processes == 1


@pytest.mark.parametrize(
    ("name", "processes"),
    [("p5.48xlarge", 8), ("trn1.32xlarge", 32), ("trn2.48xlarge", 64), ("g6f.large", 1), ("m5.large", 1)],
)
def test_one_process_per_gpu_or_neuron_core(name, processes):
    assert instance_type(name).training_processes == processes


def test_burstable_types_are_in_no_cluster_group():
    assert instance_type("t3.large").burstable
    assert not any(instance_type(name).cluster_placement for name in instance_type_names() if instance_type(name).burstable)


def test_every_type_can_be_read_and_names_its_sources():
    assert len(instance_type_names()) > 1000
    for name in instance_type_names():
        found = instance_type(name)
        assert found.vcpus > 0 and found.memory_gib > 0 and found.network_cards > 0, name
        assert set(found.efa_cards) <= set(range(found.network_cards)), name
        assert found.sources and set(found.sources) <= set(sources()), name


def test_what_sources_dispute_is_in_the_notes():
    assert any("512 GiB" in note for note in instance_type("trn2.48xlarge").notes)
    assert any("DISPUTED" in note for note in instance_type("dl1.24xlarge").notes)


def test_a_type_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        instance_type("p5.48xlarge").vcpus = 1


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("p5.24xlarge", "p5.48xlarge"),
        ("c7i.2xlarg", "c7i.2xlarge"),
        ("p7.48xlarge", "p5.48xlarge"),
        ("P5.48xlarge", "p5.48xlarge"),
    ],
)
def test_unknown_type_names_near_ones(name, near):
    with pytest.raises(ValueError, match=f"{name}.*is not in the catalogue.*{near}"):
        instance_type(name)


@given(st.text(max_size=30))
def test_any_other_text_is_refused_with_advice(name):
    if name not in instance_type_names():
        with pytest.raises(ValueError, match=r"is not in the catalogue. (Did you mean|Give the full name)"):
            instance_type(name)


def test_efa_sizes_come_smallest_first():
    assert efa_sizes("c5n") == ("c5n.9xlarge", "c5n.18xlarge", "c5n.metal")
    assert efa_sizes("t3") == ()


def test_the_committed_data_is_what_the_script_makes_of_moto():
    """All but the curated types come straight from the recorded API answers."""
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    committed = json.loads(regenerate.CATALOGUE.read_text())["types"]
    curated = {name for name, record in committed.items() if record["sources"] != ["moto"]}
    assert len(curated) == 88
    for name, described in INSTANCE_TYPES.items():
        if name not in curated and not name.startswith("mac"):
            assert committed[name] == regenerate.compact(regenerate.from_describe_instance_types(described)), name
