"""The bundled GPT trained by the bundled loop, in the test's own process."""

from __future__ import annotations

from trainrun.models.gpt import GPT
from trainrun.optimizer import adamw
from trainrun.run import Run


def train(run: Run) -> GPT:
    """Resume and train to the last step."""
    data = run.tokens()
    gpt = GPT(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    model, optimizer = run.prepare(gpt, adamw(gpt, run.settings.optimizer))
    state = run.state(model=model, optimizer=optimizer, data=data)
    state.resume()
    for _ in run.steps():
        for batch in data.micro_batches():
            run.backward(model.loss(batch))
        run.step(optimizer)
        state.save()
    return gpt
