"""Fine-tune a Hugging Face model on a dataset of examples::

    python -m trainrun examples chats.jsonl --tokenizer models/llama --out data/chats
    python -m trainrun.finetune settings.yaml --data=data/chats --finetune.model=models/llama --batch_examples=32
    torchrun --nproc-per-node 8 -m trainrun.finetune settings.yaml

``finetune.task`` says what is learnt: to continue a text (Llama-class models), to guess masked tokens, or a text's class
(BERT-class, or Llama-class). Settings are the fields of `trainrun.settings.TrainSettings`. To change what a step does,
copy this file.
"""

from __future__ import annotations

import sys

import trainrun
from trainrun.checkpoint.digest import gathered
from trainrun.models.huggingface import PREFIX, Loaded, load_model
from trainrun.models.huggingface_export import export_model
from trainrun.optimizer import bundled
from trainrun.prepare import PreparedModel
from trainrun.run import Run

DEFAULTS = {"optimizer": {"learning_rate": 2e-5, "beta2": 0.999, "weight_decay": 0.01}}
"""Unless they are set: a trained model takes small steps, where those of `TrainSettings` are for training from nothing."""


def main() -> None:
    """The loop."""
    run = trainrun.start(defaults=DEFAULTS)
    data = run.examples()
    loaded = load_model(
        run.settings.finetune,
        data.description,
        sequence_length=data.sequence_length,
        seed=run.settings.seed,
        say=lambda text: print(text, file=sys.stderr) if run.ranks.first else None,
    )
    model, optimizer = run.prepare(loaded.model, bundled(loaded.model, run.settings.optimizer), weights=loaded.weights)
    state = run.state(model=model, optimizer=optimizer, data=data)
    state.resume()
    for _ in run.steps():
        for batch in data.micro_batches():
            run.backward(model.loss(batch))
        run.step(optimizer)
        state.save()
    if run.settings.finetune.export:
        export(run, model, loaded)


def export(run: Run, model: PreparedModel, loaded: Loaded) -> None:
    """Write the model as transformers reads it, by rank 0, to which the other ranks give what they have of it."""
    tensors = gathered(model.strategy.model_parts(), run.ranks)
    if not run.ranks.first:
        for _ in tensors:  # each sends what this rank has
            pass
        return
    named = ((name.removeprefix("model/").removeprefix(PREFIX), tensor) for name, tensor in tensors)
    export_model(loaded.model.model, named, run.settings.finetune.export, source=loaded.folder)
    print(f"The model was written to {run.settings.finetune.export}.", file=sys.stderr)


if __name__ == "__main__":
    main()
