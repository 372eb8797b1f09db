"""Workers that are about to train different things, and workers whose parameters have come apart."""

import horovod.torch as horovod
import pytest
import torch

import hvd_quant
import hvd_quant.torch as hvd
from tests.parallel.torch_workers import RANK, TOPK, WORLD, assert_same_everywhere, backward, flat, network, train, wrap

ODD = RANK == WORLD - 1
MOST = "rank 0 has" if WORLD == 2 else f"ranks {', '.join(map(str, range(WORLD - 2)))} and {WORLD - 2} have"


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def named(model, prefix=""):
    return [(prefix + name, p) for name, p in model.named_parameters()]


def wrapped(model=None, names=None, compression=TOPK, optimizer=None, wrapper=hvd.DistributedOptimizer, **how):
    model = model or network()
    return wrapper(optimizer or sgd(model), names or named(model), compression=compression, **how)


def frozen():
    model = network()
    model[2].bias.requires_grad_(False)
    return model


def backwards():
    model = network()
    return {"optimizer": torch.optim.SGD(list(model.parameters())[::-1], lr=0.1, momentum=0.9), "names": named(model)}


def grouped(*places):
    model = network()
    parameters = list(model.parameters())
    return {"model": model, "groups": [[parameters[place] for place in places]]}


FIRST = "parameter 0 = 0.weight float32 [40, 30] compressed with " + hvd_quant.get_compressor(TOPK).spec
CASES = {  # what most workers do, what the last one does, and how the two are told
    "spec": ({}, lambda: {"compression": "onebit"}, FIRST, "parameter 0 = 0.weight float32 [40, 30] compressed with onebit"),
    "knob": ({}, lambda: {"compression": {"*bias": "none", "*": TOPK}}, "parameter 1 = 0.bias float32 [40] compressed with", "uncompressed"),
    "dense": ({}, lambda: {"compression": "none"}, FIRST, "parameter 0 = 0.weight float32 [40, 30] uncompressed"),
    "both dense": ({"compression": "none"}, lambda: {"compression": horovod.Compression.fp16}, "[40, 30] uncompressed", "with FP16Compressor"),
    "Adasum": ({"compression": "none"}, lambda: {"compression": "none", "op": hvd.Adasum}, "op = Average", "op = Adasum"),
    "inside hosts": ({}, lambda: {"compression": TOPK + ",hierarchical=true"}, FIRST, "hierarchical=true"),
    "type": ({}, lambda: {"model": network().half()}, FIRST, "parameter 0 = 0.weight float16 [40, 30]"),
    "shape": ({}, lambda: {"model": torch.nn.Sequential(torch.nn.Linear(31, 40))}, FIRST, "parameter 0 = 0.weight float32 [40, 31]"),
    "name": ({}, lambda: {"model": (model := network()), "names": named(model, "module.")}, FIRST, "parameter 0 = module.0.weight"),
    "more": ({}, lambda: {"model": network().append(torch.nn.Linear(30, 2))}, "no parameter 4", "parameter 4 = 3.weight float32 [2, 30]"),
    "fewer": ({}, lambda: {"model": network()[:2]}, "parameter 2 = 2.weight float32 [30, 40]", "no parameter 2"),
    "order": ({}, backwards, FIRST, "parameter 0 = 2.bias float32 [30]"),
    "frozen": ({}, lambda: {"model": frozen()}, "parameter 3 = 2.bias float32 [30]", ", frozen"),
    "optimizer": ({}, lambda: {"model": (m := network()), "optimizer": torch.optim.Adam(m.parameters())}, "optimizer = SGD", "optimizer = Adam"),
    "bucket_bytes": ({}, lambda: {"bucket_bytes": 1000}, "bucket_bytes = 26214400", "bucket_bytes = 1000"),
    "op": ({}, lambda: {"op": hvd.Sum}, "op = Average", "op = Sum"),
    "passes": ({}, lambda: {"backward_passes_per_step": 2}, "backward_passes_per_step = 1", "backward_passes_per_step = 2"),
    "predivide": ({}, lambda: {"gradient_predivide_factor": 2.0}, "gradient_predivide_factor = 1.0", "gradient_predivide_factor = 2.0"),
    "groups": ({}, lambda: grouped(0, 1), "groups = 0", "groups = [['0.weight', '0.bias']]"),
    "verify_every": ({}, lambda: {"verify_every": 5}, "verify_every = None", "verify_every = 5"),
    "wrapper": ({}, lambda: {"wrapper": hvd.ModelAveragingOptimizer, "every": 2}, "wrapper = DistributedOptimizer", "ModelAveragingOptimizer"),
    "every": ({"wrapper": hvd.ModelAveragingOptimizer, "every": 2}, lambda: {"wrapper": hvd.ModelAveragingOptimizer, "every": 3},
              "every = 2", "every = 3"),
}


def assert_told(call, most, odd):
    """All workers raise the same sentence, and nothing is in flight then."""
    hvd.barrier()
    with pytest.raises(ValueError) as caught:
        call()
    sentence = str(caught.value)
    assert set(hvd.allgather_object(sentence)) == {sentence}
    assert sentence.startswith(f"workers differ: {MOST} ") and f"; rank {WORLD - 1} has " in sentence
    told = sentence.split("; rank")
    assert most in told[0] and odd in told[1]


@pytest.mark.parametrize("like, other, most, odd", CASES.values(), ids=list(CASES))
def test_what_differs_is_told_by_all_where_they_wrap(like, other, most, odd):
    arguments = {"model": network(), **(other() if ODD else like)}
    arguments.setdefault("optimizer", sgd(arguments["model"]))
    assert_told(lambda: wrapped(**arguments), most, odd)


def test_what_differs_is_told_where_a_compressor_is_bound():
    assert_told(lambda: hvd.Compression.topk(ratio=0.02 if ODD else 0.03).bind(network().named_parameters()), "ratio=0.03", "ratio=0.02")


def test_another_version_is_told(monkeypatch):
    monkeypatch.setattr(hvd_quant, "__version__", "9.9" if ODD else "0.1.0")
    assert_told(wrapped, "hvd_quant = 0.1.0", "hvd_quant = 9.9: install the same version")


def test_process_sets_compare_among_themselves():
    """Workers of different sets may train different things."""
    sets = [hvd.add_process_set(ranks) for ranks in ([0], list(range(1, WORLD)))]
    try:
        for rank_set in sets:
            wrapped(compression="onebit" if RANK == 0 else TOPK, process_set=rank_set)
    finally:
        for rank_set in sets:
            hvd.remove_process_set(rank_set)


# ------------------------------------------------------------------------------------------------------------ verify_every

def trained_until_caught(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        if step == 2 and ODD:
            with torch.no_grad():
                model[2].weight[3, 4] += 1e-7
        try:
            optimizer.step()
        except RuntimeError as error:
            return step, str(error)


@pytest.mark.parametrize("how", [{}, {"compression": "none"}, {"compression": "powersgd:rank=2"}],
                         ids=["topk", "none", "powersgd"])
def test_a_parameter_that_comes_apart_is_named_by_all(how):
    model = network()
    step, sentence = trained_until_caught(model, wrapped(model, verify_every=4, **how), 10)
    assert step == 3, sentence
    assert set(hvd.allgather_object(sentence)) == {sentence}
    most = "rank 0" if WORLD == 2 else MOST.removesuffix(" have")
    assert sentence.startswith(f"parameters differ between workers after 4 steps, 1 of 4: 2.weight is one on {most}, another on rank "
                               f"{WORLD - 1}. ")


def test_what_was_not_broadcast_is_guessed():
    model = network(seed=RANK)
    with pytest.raises(RuntimeError, match="after 1 steps, 4 of 4: 0.weight is one on rank 0, another on .*: broadcast them"):
        train(model, wrapped(model, verify_every=1), range(2))


@pytest.mark.parametrize("compression", ["none", TOPK, TOPK + ",merge=replace,average_every=3", "topk:ratio=0.1,min_numel=0,momentum=0.9"])
def test_there_is_no_false_alarm(compression):
    """With a merge parameters differ, and are compared when they are averaged, in steps 3, 6, 9 and 12."""
    compared, gather = [], horovod.mpi_ops.allgather
    model = network()
    optimizer = wrap(model, compression, verify_every=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(horovod.mpi_ops, "allgather", lambda tensor, name=None, **how: compared.append(name) or gather(tensor, name, **how))
        train(model, optimizer, range(12))
    assert sum(name.startswith("hvd_quant.verify.") for name in compared) == (4 if "merge" in compression else 6)
    optimizer.average_parameters()
    assert_same_everywhere(flat(model))


def test_a_perturbed_parameter_is_found_with_a_merge_when_it_stays_apart():
    """Averaging brings together what is averaged, so only what isn't can be found."""
    model = network()
    optimizer = wrap(model, {"0.*": TOPK + ",merge=replace,average_every=2", "*": TOPK}, verify_every=1)
    step, sentence = trained_until_caught(model, optimizer, 10)
    assert step == 3 and "1 of 4: 2.weight is one on" in sentence


def test_model_averaging_compares_after_averaging(monkeypatch):
    model = network()
    optimizer = hvd.ModelAveragingOptimizer(sgd(model), model.named_parameters(), every=2, verify_every=2, compression=TOPK)
    train(model, optimizer, range(8))
    copy = optimizer._averager._outer.step

    def apart():
        copy()
        if ODD:
            optimizer._averager._parts[1].anchor.data[0] += 1

    monkeypatch.setattr(optimizer._averager._outer, "step", apart)
    with pytest.raises(RuntimeError, match="after 6 averagings, 1 of 4: 0.bias is one on rank"):
        train(model, optimizer, range(8, 16))
