"""The gradient's norm, and what clipping leaves, are those of the whole gradient wherever its parts lie."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_ranks import on_each_rank
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from trainrun.ranks import Ranks
from trainrun.strategies.norm import SMALL, gradient_norm, multiply

SIZES = {"replicate": 2, "shard": 2, "tensor": 2}
PLACES: list[tuple[tuple[str, ...], tuple[Placement, ...]]] = [
    ((), ()),  # a plain tensor
    (("shard",), (Shard(0),)),
    (("tensor",), (Shard(1),)),
    (("replicate", "shard"), (Replicate(), Shard(0))),
    (("shard", "tensor"), (Shard(0), Shard(1))),
    (("shard", "tensor"), (Shard(0), Replicate())),
    (("shard", "tensor"), (_StridedShard(0, split_factor=2), Shard(0))),  # what fully_shard makes of split columns
    (("replicate", "shard", "tensor"), (Replicate(), Shard(0), Shard(1))),
    (("replicate", "shard", "tensor"), (Replicate(), Shard(0), Replicate())),
]
"""Dimensions of the mesh, and what becomes of a tensor along each."""

gradients = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(0, len(PLACES) - 1)), min_size=1, max_size=4)


def whole(shapes: list[tuple[int, int, int]]) -> list[Tensor]:
    source = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(rows, columns, generator=source) for rows, columns, _ in shapes]


def placed(tensor: Tensor, mesh: DeviceMesh, place: int) -> Tensor:
    names, placements = PLACES[place]
    if not names:
        return tensor.clone()
    own = mesh[names]
    everywhere = DTensor.from_local(tensor.clone(), own, [Replicate()] * own.ndim, run_check=False)
    return everywhere.redistribute(placements=placements)


@given(gradients, st.sampled_from([1e-3, 0.5, 3.0, 1e6]))
@settings(max_examples=15, deadline=None)
def test_norm_and_clipping_are_those_of_the_whole_gradient(shapes: list[tuple[int, int, int]], clip_norm: float) -> None:
    reference = [nn.Parameter(torch.zeros_like(tensor)) for tensor in whole(shapes)]
    for parameter, gradient in zip(reference, whole(shapes), strict=True):
        parameter.grad = gradient.clone()
    wanted = nn.utils.clip_grad_norm_(reference, clip_norm)
    sent: list[Tensor] = []

    def of_rank(ranks: Ranks) -> Tensor:
        """This rank's norm, once it has told what it adds to the sum over ranks."""
        mesh = init_device_mesh("cpu", tuple(SIZES.values()), mesh_dim_names=tuple(SIZES))
        here = [placed(gradient, mesh, shape[2]) for gradient, shape in zip(whole(shapes), shapes, strict=True)]
        with mock.patch.object(dist, "all_reduce", lambda squared: sent.append(squared.clone())):
            norm = gradient_norm(here, ranks.device)
        multiply(here, (clip_norm / (wanted + SMALL)).clamp(max=1.0))
        for gradient, parameter, shape in zip(here, reference, shapes, strict=True):
            expected = placed(parameter.grad, mesh, shape[2])
            local = (t.to_local() if isinstance(t, DTensor) else t for t in (gradient, expected))
            torch.testing.assert_close(*local, rtol=1e-5, atol=0)
        return norm

    norms = on_each_rank(math.prod(SIZES.values()), of_rank)
    if sent:
        assert len(sent) == len(norms), "one sum, however many meshes"
        torch.testing.assert_close(torch.stack(sent).sum().sqrt(), wanted, rtol=1e-5, atol=0)
    else:
        assert all(torch.equal(norm, norms[0]) for norm in norms)
        torch.testing.assert_close(norms[0], wanted)


def test_no_gradient_has_the_norm_0() -> None:
    assert gradient_norm([], torch.device("cpu")) == 0


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_one_wrong_element_makes_the_norm_wrong(wrong: float) -> None:
    assert not gradient_norm([torch.ones(3), torch.tensor([1.0, wrong])], torch.device("cpu")).isfinite()
