"""DeepSpeed's three batch sizes, of which two give the third: train = micro x accumulation x ranks."""

from __future__ import annotations

from dataclasses import dataclass

from trainrun.config import ConfigError
from trainrun.deepspeed_json.section import AUTO, Section, whole
from trainrun.words import counted

NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class BatchSizes:
    """Sequences of one optimizer step, of one forward pass on a rank, and forward passes; None is not known yet."""

    train: int | None = None
    micro: int | None = None
    accumulation: int | None = None
    automatic: frozenset[str] = frozenset()
    """Names of those that the file leaves to the trainer's settings."""

    def with_ranks(self, ranks: int) -> BatchSizes:
        """All three, as DeepSpeed derives them: what is given must hold, and alone a size takes one accumulation.

        Raises:
            ConfigError: no whole numbers fulfil the identity; the sentence shows it with the numbers.
        """
        train, micro, accumulation = self.train, self.micro, self.accumulation
        if accumulation is None and (train is None or micro is None) and NAMES[2] not in self.automatic:
            accumulation = 1
        if train is None and micro is not None and accumulation is not None:
            train = micro * accumulation * ranks
        if train is None:
            return BatchSizes(train, micro, accumulation, self.automatic)
        if micro is None and accumulation is not None:
            micro = train // (accumulation * ranks)
        elif accumulation is None and micro is not None:
            accumulation = train // (micro * ranks)
        if micro is None or accumulation is None:
            return BatchSizes(train, micro, accumulation, self.automatic)
        if train != micro * accumulation * ranks or train == 0:
            raise ConfigError([self._broken(ranks)])
        return BatchSizes(train, micro, accumulation, self.automatic)

    def _broken(self, ranks: int) -> str:
        assert self.train is not None
        micro = str(self.micro) if self.micro else "micro batch"
        accumulation = str(self.accumulation) if self.accumulation else "GA"
        unit = (self.micro or 1) * (self.accumulation or 1)
        fitting = (
            _fitting(self.train // unit, ranks, alone=bool(self.micro and self.accumulation)) if self.train % unit == 0 else []
        )
        fit = " or ".join(f"{count:,}" for count in fitting) or "no number of"
        noun = "rank" if fitting == [1] else "ranks"
        wanted = f"{unit * ranks}" if self.micro and self.accumulation else f"a multiple of {unit * ranks}"
        return (
            f"deepspeed.{NAMES[0]} must be {NAMES[1]} x {NAMES[2]} x ranks, but "
            f"{self.train} != {micro} * {accumulation} * {ranks}. These sizes go with {fit} {noun}; for "
            f"{counted(ranks, 'rank')} make {NAMES[0]} {wanted}."
        )


SEARCHED = 100_000
"""Numbers of ranks that are tried on either side: more than anybody has."""


def _fitting(product: int, ranks: int, *, alone: bool) -> list[int]:
    """The nearest numbers of ranks below and above that divide ``product``, or are it where nothing else can give way."""
    if alone:
        return [product]
    highest = min(ranks - 1, product)
    below = (count for count in range(highest, max(0, highest - SEARCHED), -1) if product % count == 0)
    above = (count for count in range(ranks + 1, min(product, ranks + SEARCHED) + 1) if product % count == 0)
    return [count for count in (next(below, 0), next(above, 0)) if count]


def read_batch(top: Section) -> BatchSizes:
    """The three sizes as the file gives them."""
    given = {name: top.take(whole(1), name, auto=True) for name in NAMES}
    train, micro, accumulation = (None if given[name] == AUTO else given[name] for name in NAMES)
    return BatchSizes(train, micro, accumulation, frozenset(name for name in NAMES if given[name] == AUTO))
