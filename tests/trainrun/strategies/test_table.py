"""What settings go together: each refusal by its sentence, and docs/strategies.md against what is really run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from parity import Configuration

from tools.strategies_page import CELLS, KINDS, cell_of, covered, parity_modules
from trainrun.config import ConfigError
from trainrun.settings import OptimizerSettings, ShardingSettings, TrainSettings

ROOT = Path(__file__).resolve().parents[3]
CPU = ("cpu", "none")
NVME = ("nvme", "nvme")


def settings(*, offload: tuple[str, str] = ("none", "none"), muon: bool = False, **given: Any) -> TrainSettings:
    sharding = ShardingSettings(
        **{name: given.pop(name) for name in ("shard_size", "tensor_parallel") if name in given},
        offload_optimizer=offload[0],
        offload_parameters=offload[1],
        nvme_path="/local" if "nvme" in offload else "",
    )
    return TrainSettings(**given, sharding=sharding, optimizer=OptimizerSettings(name="muon" if muon else "adamw"))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"strategy": "ddp", "offload": CPU}, "but ddp keeps all of the model on its device. Set strategy to"),
        (
            {"strategy": "fsdp2", "offload": CPU},
            "but fsdp2 keeps parameters, gradients and optimizer state in one place. Set both",
        ),
        ({"strategy": "auto", "offload": CPU}, "but fsdp2, which auto would take, keeps parameters"),
        (
            {"strategy": "fsdp2", "offload": NVME},
            "but strategy is 'fsdp2', and \"nvme\" is DeepSpeed's. Set strategy to",
        ),
        ({"strategy": "auto", "offload": NVME}, "but strategy is 'auto', and \"nvme\" is DeepSpeed's. Set strategy to"),
        ({"strategy": "zero1", "offload": ("none", "cpu")}, "but zero1 keeps the parameters whole on every device."),
        ({"strategy": "zero2", "offload": ("nvme", "none")}, "is 'nvme', which only zero3 has; strategy is 'zero2'."),
        ({"strategy": "ddp", "shard_size": 2}, 'sharding.shard_size is 2, which only "fsdp2" has'),
        ({"strategy": "zero3", "shard_size": 2}, 'sharding.shard_size is 2, which only "fsdp2" has'),
        ({"strategy": "zero2", "tensor_parallel": 2}, "cannot be split by columns and rows too. Set it to 1"),
        ({"strategy": "ddp", "tensor_parallel": 2, "precision": "fp8"}, 'Set precision to "bf16", or tensor_parallel to 1.'),
        ({"strategy": "ddp", "tf32": True, "precision": "bf16"}, "tf32 is true, which is for fp32 matrix products"),
        ({"strategy": "zero1", "precision": "fp8"}, "precision is \"fp8\" and strategy is 'zero1'"),
        ({"strategy": "zero3", "muon": True}, 'optimizer.name is "muon", which updates whole matrices'),
        ({"strategy": "zero3", "compile": True}, 'compile is true and strategy is "zero3"'),
        (
            {"strategy": "zero3", "activation_checkpointing": "selective"},
            'wrong gradients. Set activation_checkpointing to "full", or strategy to "fsdp2".',
        ),
        ({"strategy": "fsdp2", "deepspeed": {"gradient_clipping": 1.0}}, "deepspeed is given, but strategy is 'fsdp2'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings(**given)
    assert [sentence in problem for problem in error.value.problems] == [True]


def test_all_that_does_not_go_together_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        settings(
            strategy="zero2", shard_size=2, tensor_parallel=2, tf32=True, precision="bf16", muon=True, offload=("none", "cpu")
        )
    assert len(error.value.problems) == 5


@pytest.mark.parametrize(
    "given",
    [
        {"strategy": "auto", "offload": ("cpu", "cpu"), "shard_size": 2, "tensor_parallel": 2},
        {"strategy": "fsdp2", "offload": ("cpu", "cpu"), "precision": "fp16", "compile": True, "muon": True},
        {"strategy": "zero3", "offload": NVME, "precision": "bf16"},
        {"strategy": "zero3", "activation_checkpointing": "full"},
        {"strategy": "zero2", "activation_checkpointing": "selective"},
        {"strategy": "zero1", "offload": CPU, "deepspeed": {"gradient_clipping": 1.0}},
    ],
)
def test_what_goes_together_is_let_pass(given: dict[str, Any]) -> None:
    settings(**given)


def test_the_table_names_only_what_tests_train() -> None:
    """A configuration in a module's PARITY is in the id of one of its tests, or in what one of them trains as a whole."""
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", str(folder)]
    listed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout.splitlines()
    for module in parity_modules():
        ids = [line.partition("[")[2].rstrip("]") for line in listed if f"/{module.__name__}.py::" in line]
        calls = re.findall(r"train_all\(\w+, dataset, (\w+)", Path(str(module.__file__)).read_text())
        whole = set().union(*(_configurations(getattr(module, name, None)) for name in calls))
        missing = [n for n, each in module.PARITY.items() if each not in whole and not any(n in _names(i) for i in ids)]
        assert not missing, f"{module.__name__} trains {missing} in no test"


def _names(identifier: str) -> set[str]:
    """The names that may stand in a test's id before or after another parameter: "2-ddp-fp32" has "ddp-fp32"."""
    parts = identifier.split("-")
    return {"-".join(parts[first:last]) for first in range(2) for last in range(len(parts) - 1, len(parts) + 1)}


def _configurations(value: Any) -> set[Configuration]:
    if isinstance(value, Configuration):
        return {value}
    return set().union(*map(_configurations, value.values())) if isinstance(value, dict) else set()


def test_no_cell_is_both_tested_and_refused() -> None:
    assert {cell for cell in covered() if cell.refusal()} == set()
    assert set(covered()) <= set(CELLS)


def test_every_strategy_is_tested_in_every_precision_that_this_machine_has() -> None:
    cells = covered()
    shown = {(cell.kind, cell.precision) for cell in cells if not cell.compiled and cell.offload == "no offload"}
    assert shown >= {(kind, precision) for kind in KINDS for precision in ("fp32", "bf16", "fp16")}


def test_a_configuration_is_found_in_its_own_cell() -> None:
    cell = cell_of(settings(strategy="fsdp2", shard_size=2, precision="bf16", compile=True, offload=("cpu", "cpu")))
    assert (cell.kind, cell.precision, cell.compiled, cell.offload) == ("fsdp2, hybrid", "bf16", True, "both to CPU")
