"""Compressors of one's own, failing workers and damaged bytes."""

import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import hvd_quant.torch as hvd
from hvd_quant import Compressor, registry, wire
from hvd_quant.torch.cargo import Cargo
from tests.parallel.torch_workers import RANK, WORLD, assert_same_everywhere, backward, flat, network, train, wrap


@pytest.fixture
def own(monkeypatch):
    """The README's compressor in array operations."""
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    blocks = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "README.md").read_text(), re.S)
    namespace = {"__name__": "readme"}
    exec(next(block for block in blocks if "class Sign(Compressor)" in block), namespace)
    return namespace["Sign"]


def test_a_compressor_of_ones_own(own):
    model = network()
    optimizer = wrap(model, "sign:min_numel=0")
    train(model, optimizer, range(5))
    assert_same_everywhere(flat(model))
    assert optimizer.compression_stats()["exchanges"] == {"allgather": [n for n, _ in model.named_parameters()][::-1]}
    resumed = optimizer.compression_state_dict()
    assert all(torch.isfinite(s["state"]["residual"]).all() and s["step"] == 5 for s in resumed["tensors"].values())
    optimizer.zero_grad()
    ((model(torch.ones(2, 30) * (float("nan") if RANK == 0 else 1))) ** 2).mean().backward()
    optimizer.synchronize()
    assert all(torch.isnan(p.grad).all() for p in model.parameters())
    for name, slot in optimizer.compression_state_dict()["tensors"].items():
        torch.testing.assert_close(slot["state"]["residual"], resumed["tensors"][name]["state"]["residual"], atol=1e-6, rtol=0)


def test_a_worker_that_can_not_encode_is_named_by_all(own, monkeypatch):
    encode = own.encode

    def fails(self, ops, grad, state, params, info):
        if info.rank == WORLD - 1 and info.step == 1:
            raise MemoryError("no room for the bits")
        return encode(self, ops, grad, state, params, info)

    monkeypatch.setattr(own, "encode", fails)
    model = network()
    optimizer = wrap(model, own(min_numel=0))
    train(model, optimizer, [0])
    optimizer.zero_grad()
    backward(model, 1)
    with pytest.raises(wire.PayloadError) as caught:
        optimizer.step()
    sentence = str(caught.value)
    assert sentence.endswith("MemoryError: no room for the bits")
    assert f"worker {WORLD - 1} failed to encode its gradient" in sentence
    assert len(set(hvd.allgather_object(sentence))) == 1
    optimizer.zero_grad()  # nothing is in flight: training could go on
    backward(model, 2)
    optimizer.step()
    assert_same_everywhere(flat(model))


@pytest.mark.parametrize("compression, method", [
    ("onebit:min_numel=0", "flatten"), ("topk:min_numel=0,exchange=sra", "flatten"), ("powersgd:min_numel=0", "whole"),
    ("topk:min_numel=0,warmup=9,momentum=0.5", "uncompressed"), ({"0.*": "none", "*": "onebit"}, "uncompressed")], ids=str)
def test_a_worker_that_fails_before_it_encodes_is_named_by_all(compression, method, monkeypatch):
    original = getattr(Cargo, method)

    def fails(cargo, *arguments):
        if cargo.info.rank == WORLD - 1 and cargo.info.step == 1 and cargo.info.name.startswith("0."):
            raise MemoryError("no room for a copy")
        return original(cargo, *arguments)

    monkeypatch.setattr(Cargo, method, fails)
    model = network()
    optimizer = wrap(model, compression, torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, [0])
    optimizer.zero_grad()
    start = time.monotonic()
    backward(model, 1)
    with pytest.raises(wire.PayloadError) as caught:
        optimizer.step()
    assert time.monotonic() - start < 5
    sentence = str(caught.value)
    assert sentence.endswith("MemoryError: no room for a copy") and f"worker {WORLD - 1} failed" in sentence
    assert len(set(hvd.allgather_object(sentence))) == 1
    train(model, optimizer, range(2, 4))
    assert_same_everywhere(flat(model))


def test_a_worker_that_sleeps_is_waited_for():
    compression = {"*.bias": "powersgd:min_numel=0", "*": "topk:min_numel=0,exchange=sra"}
    model, twin = network(), network()
    optimizer = wrap(model, compression)
    train(model, optimizer, [0])
    optimizer.zero_grad()
    if RANK == WORLD - 1:
        time.sleep(2)
    backward(model, 1)
    optimizer.step()
    train(twin, wrap(twin, compression), range(2))
    assert torch.equal(flat(model), flat(twin))


def test_after_a_failure_the_other_tensors_are_as_before(own, monkeypatch):
    encode = own.encode

    def fails(self, ops, grad, state, params, info):
        if info.rank == 0 and info.step == 2 and info.name == "0.weight":
            raise OSError("no")
        return encode(self, ops, grad, state, params, info)

    monkeypatch.setattr(own, "encode", fails)
    model = network()
    optimizer = wrap(model, own(min_numel=0))
    train(model, optimizer, range(2))
    before = optimizer.compression_state_dict()["tensors"]
    optimizer.zero_grad()
    backward(model, 2)
    gradients = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(wire.PayloadError):
        optimizer.step()
    for (name, p), gradient in zip(model.named_parameters(), gradients):
        after = optimizer.compression_state_dict()["tensors"][name]["state"]["residual"]
        torch.testing.assert_close(after, before[name]["state"]["residual"], atol=1e-6, rtol=0)
        assert torch.equal(p.grad, gradient)


def test_loading_a_checkpoint_between_backward_and_step():
    model = network()
    optimizer = wrap(model)
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    backward(model, 2)
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    train(model, optimizer, range(3, 5))
    assert_same_everywhere(flat(model))


def test_compression_state_is_not_loaded_amid_a_step():
    model, twin = network(), network()
    optimizer, reference = wrap(model), wrap(twin)
    train(model, optimizer, range(2))
    train(twin, reference, range(2))
    saved = optimizer.compression_state_dict()
    optimizer.zero_grad()
    backward(model, 2)
    with pytest.raises(RuntimeError, match="while gradients are being exchanged, which would change it: load it before backward"):
        optimizer.load_compression_state_dict(saved)
    optimizer.step()  # as if nobody had asked
    train(twin, reference, [2])
    assert torch.equal(flat(model), flat(twin))


@pytest.mark.parametrize("spec", ["onebit:min_numel=0", "topk:min_numel=0,merge=error", "topk:min_numel=0,exchange=sra"])
def test_what_is_kept_after_damage_is_of_what_has_arrived(spec, monkeypatch):
    """Gradients that landed before the damaged one keep what is left of them, those after it get back what was sent."""
    shapes = {"a": 5000, "b": 5000, "c": 5000}
    parameters = {name: torch.nn.Parameter(torch.zeros(numel)) for name, numel in shapes.items()}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters.values(), lr=1.0), list(parameters.items()), spec)
    encode, generator = Cargo.encode, torch.Generator().manual_seed(RANK)

    def damaged(cargo):
        payloads = [payload.clone() for payload in encode(cargo)]
        if RANK == 0 and cargo.info.name == "b":
            payloads[-1][40] ^= 4  # on its way
        return payloads

    def given():
        own = {name: torch.randn(p.shape, generator=generator) for name, p in parameters.items()}
        for name, p in parameters.items():
            p.grad = own[name].clone()
        return own

    def kept(name):
        slot = optimizer._reducer.state.slots[name]
        whole = slot.state["residual"] / WORLD
        if "owner.residual" in slot.state:
            whole[slice(*slot.owned)] += slot.state["owner.residual"]
        return hvd.allreduce(whole, name=f"kept.{name}", op=hvd.Sum)

    given()
    optimizer.step()
    before = {name: kept(name) for name in parameters}
    own = given()
    monkeypatch.setattr(Cargo, "encode", damaged)
    with pytest.raises(wire.PayloadError):
        optimizer.step()
    for name, p in parameters.items():
        mean = hvd.allreduce(own[name], name=f"mean.{name}")
        landed = not torch.equal(p.grad, own[name])
        assert landed == bool(min(hvd.allgather_object(landed))), name
        if landed and "merge" not in spec:
            torch.testing.assert_close(p.grad + kept(name), before[name] + mean, rtol=0, atol=1e-5)
        elif not landed:
            torch.testing.assert_close(kept(name), before[name], rtol=0, atol=1e-5)


def test_damaged_bytes_raise_the_same_sentence_everywhere(monkeypatch):
    for damage in ("flip", "truncate", "extend", "random"):
        model = network()
        optimizer = wrap(model, "onebit:min_numel=0")
        encode = registry.compressor_class("onebit").encode

        def bad(self, ops, grad, state, params, info):
            payload = encode(self, ops, grad, state, params, info)
            if RANK == 0 and info.name == "2.weight":
                if damage == "flip":
                    payload[40] ^= 4
                elif damage == "truncate":
                    payload = payload[:-8]
                elif damage == "extend":
                    payload = torch.cat([payload, payload[:8]])
                else:
                    payload = torch.randint(256, payload.shape, dtype=torch.uint8)
            return payload

        monkeypatch.setattr(registry.compressor_class("onebit"), "encode", bad)
        backward(model, 0)
        with pytest.raises(wire.PayloadError, match=r"[02]\.(weight|bias): ") as caught:
            optimizer.step()
        monkeypatch.undo()
        assert len(set(hvd.allgather_object(str(caught.value)))) == 1


def test_a_compressor_that_returns_no_payload_is_told():
    @dataclass(frozen=True, kw_only=True)
    class Wrong(Compressor):
        name = "wrong"

        def payload_bytes(self, info):
            return 40

        def encode(self, ops, grad, state, params, info):
            return grad

    model = network()
    optimizer = wrap(model, Wrong(min_numel=0))
    backward(model, 0)
    with pytest.raises(wire.PayloadError, match="TypeError: wrong.encode returned a 1-D torch.float32 tensor, expected a 1-D uint8"):
        optimizer.step()
