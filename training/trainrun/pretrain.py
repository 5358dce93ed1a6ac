"""Train the bundled GPT on a token dataset::

    python -m trainrun.pretrain [settings.yaml] [--steps=1000] [--model.width=256] ...
    torchrun --nproc-per-node 8 -m trainrun.pretrain settings.yaml

Settings are the fields of `trainrun.settings.TrainSettings`. On a node of a cluster they come from the RunSpec. To train
a model of your own, copy this file and change what you need.
"""

from __future__ import annotations

import torch

import trainrun
from trainrun.models.gpt import GPT
from trainrun.optimizer import bundled


def main() -> None:
    """The loop."""
    run = trainrun.start()
    data = run.tokens()
    with torch.device("meta"):  # no memory yet: the strategy gives each rank that of its part, with the weights of gpt.initial
        gpt = GPT(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    model, optimizer = run.prepare(gpt, bundled(gpt, run.settings.optimizer))
    state = run.state(model=model, optimizer=optimizer, data=data)
    state.resume()
    for _ in run.steps():
        for batch in data.micro_batches():
            run.backward(model.loss(batch))
        run.step(optimizer)
        state.save()


if __name__ == "__main__":
    main()
