"""What cannot be saved, or not be restored, is refused in a sentence that names it; and so are calls at the wrong place."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainrun.checkpoint.layout import read_commit
from trainrun.checkpoint.read import read_tensors
from trainrun.checkpoint.tensors import model_tensors, optimizer_values
from trainrun.config import ConfigError
from trainrun.errors import CheckpointError
from trainrun.store import open_store

Start = Callable[..., Any]


def with_buffer(tensor: torch.Tensor) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("odd", tensor)
    return module


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2)


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.ones(1).expand(5), "The model's odd is expanded"),
        (inference_tensor(), "The model's odd was made under torch.inference_mode()"),
        (torch.eye(3).to_sparse(), "The model's odd is sparse"),
        (torch.ones(2, dtype=torch.uint16), "The model's odd is of type uint16. Allowed: "),
    ],
    ids=["expanded", "inference", "sparse", "uint16"],
)
def test_a_tensor_that_could_not_be_restored_is_refused(tensor: torch.Tensor, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        model_tensors(with_buffer(tensor))


def test_a_lazy_parameter_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weight has no shape yet"):
        model_tensors(nn.LazyLinear(2))


def test_two_parameters_of_one_name_are_refused() -> None:
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    model.weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ConfigError, match=r"weight and module\.weight have the same name in a checkpoint"):
        model_tensors(model)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("a/b", torch.ones(1), "'a/b' of weight has no name"),
        (0, torch.ones(1), "0 of weight has no name"),
        ("seen", {1, 2}, "'seen' of weight is a set"),
        ("history", [torch.ones(1)], "'history' of weight is a list"),
        ("betas", (1, 2), "'betas' of weight is a tuple"),
    ],
)
def test_optimizer_state_that_would_come_back_as_something_else_is_refused(key: Any, value: Any, said: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight]["good"] = {"a": [1, None, "b", 0.5, True]}
    assert optimizer_values(optimizer, model) == {"optimizer/weight/good": {"a": [1, None, "b", 0.5, True]}}
    optimizer.state[model.weight][key] = value
    with pytest.raises(ConfigError, match=re.escape(said)):
        optimizer_values(optimizer, model)


def test_optimizer_state_of_no_parameter_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state["global"] = {"step": 1}  # type: ignore[index]
    with pytest.raises(ConfigError, match="has state under 'global'"):
        optimizer_values(optimizer, model)


class Averaged(nn.Module):
    """A model that keeps an average of something, which its user changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.average = nn.Parameter(torch.zeros(1_000_000), requires_grad=False)

    def loss(self, batch: Any) -> torch.Tensor:
        logits = self.out(self.embedding(batch.inputs))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")


def begun(alone: Start, dataset: str, tmp_path: Path, *arguments: str) -> tuple[Any, Any, Any]:
    """Run, prepared model and state, before `resume`."""
    run = alone(f"--data={dataset}", f"--checkpoint.location={tmp_path / 'runs'}", "--checkpoint.every_steps=2", *arguments)
    net = Averaged()
    model, optimizer = run.prepare(net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad]))
    return run, model, run.state(model=model, optimizer=optimizer, data=run.tokens())


def test_calls_at_the_wrong_place_are_refused(alone: Start, dataset: str, tmp_path: Path) -> None:
    run, model, state = begun(alone, dataset, tmp_path)
    with pytest.raises(RuntimeError, match=r"Call state.resume\(\) before state.save\(\)"):
        state.save(now=True)
    assert state.resume() == 0
    with pytest.raises(RuntimeError, match=r"state.resume\(\) was called before"):
        state.resume()
    with pytest.raises(RuntimeError, match=r"run.state\(\) was called before"):
        run.state(model=model, optimizer=torch.optim.SGD([torch.ones(1)]))
    said: list[str] = []

    def elsewhere() -> None:
        try:
            state.save(now=True)
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "another thread" in said[0]


def test_an_average_of_weights_is_saved_as_it_was_however_it_is_changed_next(alone: Start, dataset: str, tmp_path: Path) -> None:
    """`.data` raises no version, so that a later copy could be neither of the one step nor of the other."""
    run, model, state = begun(alone, dataset, tmp_path, "--steps=5", "--micro_batch=4")
    optimizer, data, net = run._optimizer, run._data, run._strategy.module
    state.resume()
    for step in run.steps():
        for batch in data.micro_batches():
            run.backward(model.loss(batch))
        run.step(optimizer)
        state.save()
        net.average.data.fill_(step)
    store = open_store(str(tmp_path / "runs/run"))
    for step in (2, 4):
        saved = read_tensors(store, read_commit(store, step), lambda name: name == "model/average")["model/average"]
        assert saved.unique().tolist() == [step - 1]


def test_what_can_never_be_saved_ends_the_run_at_the_first_try(alone: Start, dataset: str, tmp_path: Path) -> None:
    run, _, state = begun(alone, dataset, tmp_path, "--checkpoint.most_failures=3")
    state.resume()
    run._optimizer.state[run._strategy.module.out.weight]["seen"] = {1, 2}
    with pytest.raises(CheckpointError, match=r"no later one could: rank 0: .*'seen' of out.weight is a set"):
        state.save(now=True)


def test_leaving_the_loop_says_which_save_is_abandoned(
    alone: Start, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _, state = begun(alone, dataset, tmp_path)
    state.resume()
    run.completed = 1
    assert state.save(now=False) is False
    run.completed = 2
    assert state.save() is True
    state.close()
    assert "the save of step 2 was under way and is abandoned. Call state.wait()" in capsys.readouterr().err


def test_keep_best_needs_a_metric_that_is_a_number(
    alone: Start, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, state = begun(alone, dataset, tmp_path, "--checkpoint.keep_best=1")
    state.resume()
    with pytest.raises(ConfigError, match="keep_best is set, but the loop gives no metric"):
        state.save()
    with pytest.raises(ConfigError, match="metric is 'good'"):
        state.save(metric="good")
    assert state.save(metric=torch.tensor(float("nan"), requires_grad=True), now=True)
    assert "the metric of step 0 is nan: it does not count" in capsys.readouterr().err
