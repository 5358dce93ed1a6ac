"""The choice of a tier: by what the machine allows, always with a reason."""

import os
import sys

import pytest

from trainlocal.fleet import tiers
from trainlocal.fleet.packages import PackagesMissing, image_layer, prepare


@pytest.fixture(autouse=True)
def not_forced(monkeypatch):
    monkeypatch.delenv(tiers.FORCED, raising=False)


def test_the_choice_fits_the_user_and_says_why():
    choice = tiers.choose()
    allowed = {"plain", "isolated-root" if os.geteuid() == 0 else "isolated-user"}
    assert choice.tier in allowed
    assert choice.reason and choice.description
    if choice.tier == "plain":
        assert "no boot" in choice.description and "not to be had" in choice.reason


def test_a_machine_without_namespaces_gets_plain_processes(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    choice = tiers.choose()
    assert (choice.tier, choice.systemd) == ("plain", False)
    assert "darwin has no namespaces" in choice.reason


def test_without_the_packages_the_way_to_get_them_is_named(monkeypatch):
    def missing():
        raise PackagesMissing("cloud-init has not been unpacked yet; run: python -m trainlocal prepare")

    monkeypatch.setattr(tiers, "image_layer", missing)
    monkeypatch.setattr(sys, "platform", "linux")
    choice = tiers.choose()
    assert choice.tier == "plain" and "trainlocal prepare" in choice.reason


def test_a_machine_on_which_the_trial_fails_gets_plain_processes(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(tiers, "image_layer", lambda: tmp_path)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    choice = tiers.choose()
    assert choice.tier == "plain" and "the trial ended without a word" in choice.reason


def test_a_tier_can_be_forced_by_argument_or_environment(monkeypatch):
    assert tiers.choose("plain").reason == "it was asked for"
    monkeypatch.setenv(tiers.FORCED, "plain")
    assert tiers.choose().tier == "plain"


def test_an_unknown_tier_is_an_error_that_names_the_tiers():
    with pytest.raises(ValueError, match=r"no tier 'vm'.*isolated-root, isolated-user, plain"):
        tiers.choose("vm")


def test_a_tier_that_is_not_to_be_had_is_an_error_that_says_why():
    other = "isolated-user" if os.geteuid() == 0 else "isolated-root"
    with pytest.raises(tiers.TierUnavailable, match="not to be had on this machine"):
        tiers.choose(other)


def test_packages_that_were_not_prepared_are_named(tmp_path):
    with pytest.raises(PackagesMissing, match="python -m trainlocal prepare"):
        image_layer(tmp_path)


def test_prepare_without_apt_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PackagesMissing, match="no apt-get here"):
        prepare(tmp_path / "packages")


def test_prepare_does_nothing_when_the_layer_is_there(tmp_path, monkeypatch):
    layer = tmp_path / f"layer-{sys.implementation.cache_tag}"
    layer.mkdir()
    monkeypatch.setenv("PATH", "")  # nothing could be run
    assert prepare(tmp_path) == layer
