"""Model averaging in one process: the bound of the paper, what is refused, and one worker."""

import itertools

import numpy as np
import pytest

from hvd_quant.exchange import averaging


@pytest.mark.parametrize("workers, steps, expected", [
    (1, 1, 1), (1, 15, 1), (1, 16, 2), (1, 10**4, 10), (1, 10**4 - 1, 9), (8, 10**6, 6), (8, 8**3 * 5**4, 5),
    (8, 8**3 * 5**4 - 1, 4), (1000, 10**6, 1), (np.int64(2), np.int64(2**3 * 3**4), 3), (1, 10**40, 10**10),
    (1, 10**40 - 1, 10**10 - 1)])
def test_the_bound_is_exact(workers, steps, expected):
    assert averaging.averaging_bound(workers, steps) == expected


@pytest.mark.parametrize("call, sentence", [
    (lambda: averaging.averaging_bound(0, 10), "workers=0 is not accepted; give a whole number, 1 or more"),
    (lambda: averaging.averaging_bound(2, 1e6), "steps=1000000.0 is not accepted"),
    (lambda: averaging.interval(0, 7), "every=0 is not accepted; give the steps between two averagings"),
    (lambda: averaging.interval(True, 7), "every=True is not accepted"),
    (lambda: averaging.interval(lambda step: step / 2, 7), r"every\(7\) returned 3.5; give the steps between two averagings"),
])
def test_intervals_are_whole_numbers(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


# --------------------------------------------------------------------------------------------------------------- PyTorch

@pytest.fixture
def torch_hvd():
    hvd = pytest.importorskip("hvd_quant.torch", reason="Horovod is not built for PyTorch")
    hvd.init()
    return hvd


def test_what_can_not_work_is_refused_in_torch(torch_hvd, monkeypatch):
    import horovod.torch
    import torch

    from hvd_quant.torch import network

    hvd, model = torch_hvd, torch.nn.Linear(3, 3)

    def sgd(params=None):
        return torch.optim.SGD(model.parameters() if params is None else params, lr=0.1)

    def wrap(optimizer=None, named=None, **how):
        return hvd.ModelAveragingOptimizer(optimizer or sgd(), named, **{"every": 2, **how})

    named, inner = list(model.named_parameters()), sgd()
    for call, error, sentence in [
            (lambda: wrap(wrap()), ValueError, "this SGD is distributed already: wrap the one that it was made from"),
            (lambda: wrap(hvd.DistributedOptimizer(sgd(), compression="topk")), ValueError, "this SGD is distributed already"),
            (lambda: wrap(horovod.torch.DistributedOptimizer(sgd())), ValueError, "this SGD is distributed already"),
            (lambda: wrap(every=0), ValueError, "every=0 is not accepted"),
            (lambda: wrap(every=lambda step: None), ValueError, r"every\(0\) returned None"),
            (lambda: wrap(named=named[:1]), ValueError, r"named_parameters lacks 1 of the optimizer's parameters"),
            (lambda: wrap(named=[("a", p) for _, p in named]), ValueError, "named_parameters has a name twice"),
            (lambda: wrap(compression=horovod.torch.Compression.fp16), TypeError, "is not accepted: give a compressor"),
            (lambda: wrap(compression="tpk"), ValueError, "there is no compressor 'tpk', did you mean 'topk'"),
            (lambda: wrap(outer=0.7), TypeError, "outer=0.7 is not accepted; give a function from a list of parameters"),
            (lambda: wrap(outer=lambda params: None), TypeError, "outer=.* returned None; give a function"),
            (lambda: wrap(inner, outer=inner), ValueError, "outer=SGD has to be another optimizer"),
            (lambda: wrap(outer=sgd([torch.zeros(3)])), ValueError, "outer=SGD has to be another optimizer"),
            (lambda: wrap().add_param_group({"params": []}), ValueError, "parameters can't be added to a model-averaging"),
            (lambda: hvd.average_parameters(3), TypeError, "average_parameters takes a module, an optimizer, or .*, not 3"),
            (lambda: hvd.average_parameters(model.parameters()), TypeError, "average_parameters takes a module, an optimizer")]:
        with pytest.raises(error, match=sentence):
            call()
    with pytest.warns(UserWarning, match="pattern 'layer' in compression= matches no parameter; the names are weight, bias"):
        wrap(named=named, compression={"layer": "topk"})
    monkeypatch.setattr(network, "ELASTIC", True)
    with pytest.raises(ValueError, match="ModelAveragingOptimizer can't be used in an elastic job: a worker that joins"):
        wrap()


def test_one_worker_in_torch(torch_hvd):
    """Averaging changes nothing; an outer optimizer steps as it does with many."""
    import torch

    def train(wrap):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 5)
        torch_hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        for step in range(4):
            optimizer.zero_grad()
            (model(torch.full((2, 5), 1.0 + step)) ** 2).mean().backward()
            optimizer.step()
        return optimizer, model.weight.detach()

    _, plain = train(lambda optimizer, model: optimizer)
    averaged, weight = train(lambda optimizer, model: torch_hvd.ModelAveragingOptimizer(
        optimizer, every=2, compression="topk:min_numel=0", model=model, average_state=True))
    assert torch.equal(weight, plain) and averaged.compression_stats()["wire_bytes"] == 0
    half, weight = train(lambda optimizer, model: torch_hvd.ModelAveragingOptimizer(
        optimizer, model.named_parameters(), every=4, outer=lambda params: torch.optim.SGD(params, lr=0.5)))
    torch.manual_seed(0)
    torch.testing.assert_close(weight, (torch.nn.Linear(5, 5).weight.detach() + plain) / 2)
    for optimizer in (averaged, half):
        optimizer.load_compression_state_dict(optimizer.compression_state_dict())
        torch_hvd.average_parameters(optimizer)


def test_every_optimizer_of_torch_may_be_the_outer_one(torch_hvd):
    """They see θ₀ in the parameters' shapes, types and values, also where they look at it when they are made."""
    import torch

    shapes = [(6, 4), (6,)]

    def made(dtype, kind):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
        return params if kind is not getattr(torch.optim, "Muon", None) else params[:1]  # of matrices alone

    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and kind.__module__ != "torch.optim.optimizer"
             and kind not in (torch.optim.LBFGS, torch.optim.SparseAdam)]
    assert {torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adafactor} <= set(kinds)
    for kind, dtype in itertools.product(kinds, (torch.float32, torch.bfloat16)):
        params, plain, seen = made(dtype, kind), made(dtype, kind), []

        def outer(anchors, kind=kind, seen=seen):
            seen += [a.detach().clone() for a in anchors]
            return kind(anchors, lr=0.01)

        optimizer = torch_hvd.ModelAveragingOptimizer(torch.optim.SGD(params, lr=0.25), every=1, outer=outer)
        for one, p in zip(seen, params, strict=True):
            assert one.dtype == torch.float32 and torch.equal(one, p.detach().float())
        anchors = [torch.nn.Parameter(p.detach().float()) for p in plain]
        reference = kind(anchors, lr=0.01)
        for step in range(3):
            for p, q, a in zip(params, plain, anchors):
                p.grad = torch.full_like(p, 1.0 + step)
                a.grad = q.detach().float() - (q.detach() - 0.25 * p.grad).float()
            optimizer.step()
            reference.step()
            for p, q, a in zip(params, plain, anchors):
                q.data.copy_(a.data)
                assert torch.equal(p, q), kind


# ----------------------------------------------------------------------------------------------------------------- Keras

def test_what_can_not_work_is_refused_in_keras(monkeypatch):
    pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow")
    keras = pytest.importorskip("keras")
    import horovod.tensorflow

    import hvd_quant.keras as hvd
    import hvd_quant.tensorflow as hvd_tensorflow
    from hvd_quant.tensorflow import network

    SGD = keras.optimizers.SGD

    def wrap(optimizer=None, **how):
        return hvd_tensorflow.ModelAveragingOptimizer(optimizer or SGD(0.1), **{"every": 2, **how})

    inner, used = SGD(0.1), SGD(0.1)
    used.build([keras.Variable([1.0])])
    for call, error, sentence in [
            (lambda: wrap(wrap()), ValueError, "this SGD is distributed already: wrap the one that it was made from"),
            (lambda: wrap(hvd.DistributedOptimizer(SGD(0.1))), ValueError, "this SGD is distributed already"),
            (lambda: hvd.DistributedOptimizer(wrap()), ValueError, "this SGD is distributed already"),
            (lambda: wrap("sgd"), TypeError, "ModelAveragingOptimizer takes an optimizer object such as keras.*, not 'sgd'"),
            (lambda: wrap(outer="sgd"), TypeError, "outer= takes an optimizer object such as keras.*, not 'sgd'"),
            (lambda: wrap(inner, outer=inner), ValueError, "outer=SGD is in use already: give another optimizer"),
            (lambda: wrap(outer=used), ValueError, "outer=SGD is in use already: give another optimizer"),
            (lambda: wrap(outer=wrap()), ValueError, "this SGD is distributed already"),
            (lambda: wrap(every=1.5), ValueError, "every=1.5 is not accepted; give the steps between two averagings"),
            (lambda: wrap(bucket_bytes=0), ValueError, "bucket_bytes is 0"),
            (lambda: wrap(compression=horovod.tensorflow.Compression.fp16), TypeError, "is not accepted: give a compressor"),
            (lambda: wrap(compression={"*": "tpk"}), ValueError, "there is no compressor 'tpk'"),
            (lambda: wrap().compression_state_dict(), ValueError, "once it knows its variables: call optimizer.build")]:
        with pytest.raises(error, match=sentence):
            call()
    wrap().average()  # before it is built, there is nothing to average
    assert keras.saving.serialize_keras_object(wrap(inner)) == keras.saving.serialize_keras_object(inner)
    monkeypatch.setattr(network, "ELASTIC", True)
    with pytest.raises(ValueError, match="ModelAveragingOptimizer can't be used in an elastic job: a worker that joins"):
        wrap()


@pytest.mark.parametrize("compression", ["topk:merge=sum", "topk:momentum=0.9", "onebit:average_every=5", {"*.weight": "topk:merge=error"}])
def test_what_is_of_gradients_is_refused(compression):
    with pytest.raises(ValueError, match="can't be used in ModelAveragingOptimizer: a merge would let the averaged models differ"):
        averaging.checked_compression(compression, elastic=False)


@pytest.mark.parametrize("compression", ["none", "onebit", "topk:memory=ef21", {"*.weight": "qsgd"}])
def test_codes_are_accepted(compression):
    averaging.checked_compression(compression, elastic=False)
