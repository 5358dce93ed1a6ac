"""The primitives refuse to be used in a wrong order, and a run alone stops when it is asked."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainrun.models.gpt import GPT
from trainrun.optimizer import adamw, schedule
from trainrun.run import Run
from trainrun.settings import OptimizerSettings

Start = Callable[..., Run]


def prepared(run: Run) -> tuple[Any, Any, Any]:
    data = run.tokens()
    gpt = GPT(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    return (*run.prepare(gpt, adamw(gpt, run.settings.optimizer)), data)


def test_steps_need_a_resume_first(alone: Start, dataset: str) -> None:
    run = alone(f"--data={dataset}")
    model, optimizer, data = prepared(run)
    run.state(model=model, optimizer=optimizer, data=data)
    with pytest.raises(RuntimeError, match=r"Call state\.resume\(\) before run\.steps\(\)"):
        next(run.steps())


def test_a_step_needs_all_its_micro_batches(alone: Start, dataset: str) -> None:
    run = alone(f"--data={dataset}")
    model, optimizer, data = prepared(run)
    for _ in run.steps():
        run.backward(model.loss(next(data.micro_batches())))
        with pytest.raises(RuntimeError, match=r"Use all of data\.micro_batches\(\)"):
            run.step(optimizer)
        break


def test_a_loop_without_a_step_is_an_error(alone: Start, dataset: str) -> None:
    run = alone(f"--data={dataset}")
    prepared(run)
    steps = run.steps()
    next(steps)
    with pytest.raises(RuntimeError, match=r"Step 1 ended without run\.step"):
        next(steps)


def own_model(run: Run, model: Any, data: Any) -> None:
    for batch in data.micro_batches():
        run.backward(model.module.loss(batch))


def forwards_first(run: Run, model: Any, data: Any) -> None:
    losses = [model.loss(batch) for batch in data.micro_batches()]
    for loss in losses:
        run.backward(loss)


def a_list(run: Run, model: Any, data: Any) -> None:
    for batch in list(data.micro_batches()):
        run.backward(model.loss(batch))


def evaluated_with_gradients(run: Run, model: Any, data: Any) -> None:
    for batch in data.micro_batches():
        run.backward(model.loss(batch))
    model.loss(batch)


def own_backward(run: Run, model: Any, data: Any) -> None:
    for batch in data.micro_batches():
        loss = model.loss(batch)
    loss.backward()


def no_backward(run: Run, model: Any, data: Any) -> None:
    for _ in data.micro_batches():
        pass


def one_left_out(run: Run, model: Any, data: Any) -> None:
    for number, batch in enumerate(data.micro_batches()):
        if number:
            run.backward(model.loss(batch))


@pytest.mark.parametrize(
    ("micro_batch", "passes", "message"),
    [
        (4, own_model, r"Use the model that run\.prepare\(\) returned"),
        (4, forwards_first, r"Call run\.backward\(loss\) after each model\.loss"),
        (4, a_list, r"not over a list of it"),
        (4, evaluated_with_gradients, r"evaluate under torch\.no_grad\(\)"),
        (8, own_backward, r"not loss\.backward\(\)"),
        (4, no_backward, r"for 0 of this step's 2 micro-batches"),
        (4, one_left_out, r"for 1 of this step's 2 micro-batches"),
    ],
)
def test_passes_that_would_train_on_wrong_gradients_are_refused(
    alone: Start, dataset: str, micro_batch: int, passes: Callable[..., None], message: str
) -> None:
    run = alone(f"--data={dataset}", f"--micro_batch={micro_batch}")
    model, optimizer, data = prepared(run)
    next(run.steps())
    with pytest.raises(RuntimeError, match=message):
        passes(run, model, data)
        run.step(optimizer)


def test_several_calls_own_losses_and_evaluation_without_gradients_are_allowed(alone: Start, dataset: str) -> None:
    run = alone(f"--data={dataset}", "--steps=2")
    model, optimizer, data = prepared(run)
    for _ in run.steps():
        for batch in data.micro_batches():
            run.backward(model(batch.inputs).square().sum() + model.loss(batch))
            with torch.no_grad():
                model.loss(batch)
        run.step(optimizer)
        with torch.no_grad():
            model.loss(batch)
    assert run.completed == 2


def test_a_run_has_one_model_and_one_optimizer(alone: Start, dataset: str) -> None:
    run = alone(f"--data={dataset}")
    model, _, data = prepared(run)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"run\.prepare\(\) was called before"):
        run.prepare(model.module, other)
    for batch in data.micro_batches():
        run.backward(model.loss(batch))
    with pytest.raises(RuntimeError, match=r"another optimizer \(SGD\) than run\.prepare\(\) returned"):
        run.step(other)


def test_a_group_added_after_prepare_is_refused(alone: Start, dataset: str) -> None:
    run = alone(f"--data={dataset}")
    model, optimizer, data = prepared(run)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    for batch in data.micro_batches():
        run.backward(model.loss(batch))
    with pytest.raises(RuntimeError, match=r"Call add_param_group before run\.prepare\(\)"):
        run.step(optimizer)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda loss: (loss, 1), TypeError, "got a tuple"),
        (lambda loss: 0.5, TypeError, "got a float"),
        (lambda loss: loss.detach(), ValueError, "a loss without gradients"),
        (lambda loss: loss.reshape(1, 1), ValueError, r"of shape \(1, 1\)"),
    ],
)
def test_a_loss_is_one_number_with_gradients(
    alone: Start, dataset: str, wrong: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    run = alone(f"--data={dataset}")
    model, _, data = prepared(run)
    loss = model.loss(next(data.micro_batches()))
    with pytest.raises(error, match=message):
        run.backward(wrong(loss))


@pytest.mark.parametrize("way", ["signal", "file"])
def test_a_stop_ends_the_run_after_the_step_with_code_75(
    alone: Start, dataset: str, tmp_path: Path, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = alone(f"--data={dataset}", f"--checkpoint.location={tmp_path}")
    model, optimizer, data = prepared(run)
    state = run.state(model=model, optimizer=optimizer, data=data)
    state.resume()
    with pytest.raises(SystemExit) as ended:
        for step in run.steps():
            for batch in data.micro_batches():
                run.backward(model.loss(batch))
            run.step(optimizer)
            state.save()
            if step == 2 and way == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            if step == 2 and way == "file":
                (tmp_path / "state/stop").touch()
    assert ended.value.code == 75
    assert run.completed == 2
    assert (tmp_path / "run/step-000000002/COMMIT.json").exists()
    lines = [json.loads(line) for path in (tmp_path / "state/metrics").iterdir() for line in path.open()]
    assert [line["event"] for line in lines if "event" in line] == ["strategy", "started", "stopping", "committed", "stopped"]


def test_without_a_location_nothing_is_saved_and_that_is_said(
    alone: Start, dataset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = alone(f"--data={dataset}", "--steps=1")
    model, optimizer, data = prepared(run)
    state = run.state(model=model, optimizer=optimizer, data=data)
    assert state.resume() == 0
    assert not state.save(now=True)
    assert "nothing will be saved" in capsys.readouterr().err


def test_num_02_the_learning_rate_is_a_function_of_the_step() -> None:
    settings = OptimizerSettings(warmup_steps=10, final_fraction=0.1)
    rates = [schedule(step, steps=100, settings=settings) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert schedule(1, steps=1, settings=OptimizerSettings(warmup_steps=0)) == pytest.approx(0.1)


def test_groups_keep_the_proportion_of_their_rates(alone: Start, dataset: str) -> None:
    run = alone(f"--data={dataset}", "--steps=9", "--optimizer.warmup_steps=2")
    data = run.tokens()
    gpt = GPT(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    parameters = list(gpt.parameters())
    groups = [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.01}]
    model, optimizer = run.prepare(gpt, torch.optim.SGD(groups))
    for _ in run.steps():
        for batch in data.micro_batches():
            run.backward(model.loss(batch))
        run.step(optimizer)
        break
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.005])


def test_replicas_name_the_parameters_that_got_no_gradient(ranks: Any, tiny: list[str], dataset: str) -> None:
    outcomes = ranks("idle", world=2, arguments=[*tiny, f"--data={dataset}", "--strategy=ddp"])
    for outcome in outcomes:
        assert outcome.code == 0, outcome.log
        assert "2 parameters that should train got no gradient in this step: idle.weight, idle.bias." in outcome.result["error"]
