"""The model: its values do not depend on how it is cut, every token reaches its experts, gradients are right."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Tensor

from scripts.training.model import ModelShape, StageModel, _places, layers_of_stage

SHAPE = ModelShape(layers=3, width=16, heads=2, experts=4, expert_width=8, length=8)


def _batch() -> tuple[Tensor, Tensor]:
    generator = np.random.default_rng(0)
    return tuple(Tensor(generator.integers(0, 256, (4, SHAPE.length)).astype(np.int32)) for _ in range(2))


@settings(deadline=None, max_examples=50)
@given(layers=st.integers(1, 40), stages=st.integers(1, 40))
def test_each_layer_is_on_one_stage(layers: int, stages: int) -> None:
    if layers < stages:
        with pytest.raises(ValueError, match="at least one layer"):
            layers_of_stage(layers, 0, stages)
        return
    cuts = [layers_of_stage(layers, stage, stages) for stage in range(stages)]
    assert [layer for cut in cuts for layer in cut] == list(range(layers))
    assert max(map(len, cuts)) - min(map(len, cuts)) <= 1


@pytest.mark.parametrize("stages", [2, 3])
def test_the_cut_model_computes_the_same(stages: int) -> None:
    inputs, labels = _batch()
    x = inputs
    for stage in range(stages):
        x = StageModel(SHAPE, stage, stages)(x, labels)
    assert float(x.asnumpy()) == float(StageModel(SHAPE)(inputs, labels).asnumpy())


def test_names_are_unique_and_the_same_however_cut() -> None:
    whole = [p.name for p in StageModel(SHAPE).trainable_params()]
    cut = [p.name for stage in range(3) for p in StageModel(SHAPE, stage, 3).trainable_params()]
    assert len(set(whole)) == len(whole) and sorted(cut) == sorted(whole)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_every_choice_has_a_place_in_its_experts_row(data: st.DataObject) -> None:
    experts, tokens = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 20))
    pairs = st.permutations(range(experts)).map(lambda order: order[:2])
    chosen = np.array(data.draw(st.lists(pairs, min_size=tokens, max_size=tokens)), np.int32)
    token_of_place, place_of_choice = _places(chosen, experts)
    flat = token_of_place.reshape(-1)
    assert len(set(place_of_choice.reshape(-1).tolist())) == 2 * tokens
    for token in range(tokens):
        for choice in range(2):
            place = place_of_choice[token, choice]
            assert flat[place] == token and place // token_of_place.shape[1] == chosen[token, choice]
    assert (flat == tokens).sum() == flat.size - 2 * tokens


def test_the_loss_of_a_batch_is_the_mean_over_its_micro_batches() -> None:
    model = StageModel(SHAPE)
    inputs, labels = _batch()
    parts = [float(model(inputs[i : i + 1], labels[i : i + 1]).asnumpy()) for i in range(4)]
    assert float(model(inputs, labels).asnumpy()) == pytest.approx(sum(parts) / 4, rel=1e-6)


def test_gradients_agree_with_differences() -> None:
    model = StageModel(SHAPE)
    inputs, labels = _batch()
    weights = list(model.trainable_params())
    _, gradients = ms.value_and_grad(model, None, weights)(inputs, labels)
    chosen = {"head.weight", "layer1.experts.down", "layer2.attention.out", "embedding.bytes"}
    for weight, gradient in zip(weights, gradients):
        if weight.name not in chosen:
            continue
        original, gradient = weight.asnumpy().copy(), gradient.asnumpy()
        direction = gradient / np.linalg.norm(gradient)
        losses = []
        for sign in (1, -1):
            weight.set_data(Tensor(original + sign * 5e-3 * direction))
            losses.append(float(model(inputs, labels).asnumpy()))
        weight.set_data(Tensor(original))
        assert (losses[0] - losses[1]) / 1e-2 == pytest.approx(np.linalg.norm(gradient), rel=2e-2), weight.name


def test_executions_are_counted() -> None:
    model = StageModel(SHAPE)
    model(*_batch())
    model(*_batch())
    names = [n for i in range(3) for n in (f"block layer{i}", f"excluded layer{i}.up", f"excluded layer{i}.down")]
    assert model.runs() == dict.fromkeys(names, 2)
