"""Go on training the GPT of an earlier run on another dataset, with the optimizer from its beginning.

The first start takes the weights of the run at $BASE_CHECKPOINT; every later one resumes this run's own checkpoint.
"""

from __future__ import annotations

import os
import sys

import trainrun
from trainrun.checkpoint.read import newest_good
from trainrun.evaluation import restore_gpt
from trainrun.optimizer import bundled
from trainrun.store import open_store


def main() -> None:
    run = trainrun.start()
    data = run.tokens()
    base = open_store(os.environ["BASE_CHECKPOINT"])
    _, gpt = newest_good(base, lambda commit: restore_gpt(base, commit), warn=lambda text: print(text, file=sys.stderr))
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
