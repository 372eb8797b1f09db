"""What workers compare, in one process: the protocol, the sentences, and digests of parameters."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import hvd_quant
from hvd_quant import wire
from hvd_quant.exchange import agreement
from hvd_quant.exchange.agreement import Parameter

WEIGHT, BIAS = Parameter("fc.weight", "float32", (10, 20), "topk:ratio=0.01"), Parameter("fc.bias", "float32", (10,), "none")
SETTINGS = {"op": "Average", "bucket_bytes": 100}


def together(workers, ranks):
    """What each worker raises, or the largest number of all, from what each describes; and the rows of all their allgathers."""
    rows, barrier, gathered = [b""] * len(workers), threading.Barrier(len(workers), timeout=10), []

    def run(place):
        def gather(row):
            rows[place] = row
            barrier.wait()
            found = list(rows)
            if barrier.wait() == 0:
                gathered.append(found)
            return found

        try:
            return agreement.require_agreement(workers[place], gather, ranks, number=place)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(len(workers)) as pool:
        return list(pool.map(run, range(len(workers)))), gathered


def test_workers_that_agree_send_a_hash():
    said, gathered = together([agreement.describe([WEIGHT, BIAS], SETTINGS)] * 4, range(4))
    assert said == [3] * 4
    assert [[len(row) for row in rows] for rows in gathered] == [[40] * 4]


@pytest.mark.parametrize("odd, sentence", [
    (([WEIGHT._replace(spec="onebit"), BIAS], SETTINGS),
     "ranks 0, 5 and 7 have parameter 0 = fc.weight float32 [10, 20] compressed with topk:ratio=0.01; rank 3 has parameter 0 = "
     "fc.weight float32 [10, 20] compressed with onebit: give all of them the same model, its parameters in the same order, and the "
     "same compression"),
    (([WEIGHT, BIAS._replace(dtype="float16")], SETTINGS), "rank 3 has parameter 1 = fc.bias float16 [10] uncompressed: give"),
    (([WEIGHT, BIAS._replace(shape=())], SETTINGS), "rank 3 has parameter 1 = fc.bias float32 [] uncompressed: give"),
    (([WEIGHT, BIAS._replace(name="bias")], SETTINGS), "have parameter 1 = fc.bias float32 [10] uncompressed; rank 3 has parameter 1 = bias"),
    (([WEIGHT, BIAS._replace(note=", frozen")], SETTINGS), "rank 3 has parameter 1 = fc.bias float32 [10] uncompressed, frozen: give"),
    (([BIAS, WEIGHT], SETTINGS), "have parameter 0 = fc.weight float32 [10, 20] compressed with topk:ratio=0.01; rank 3 has parameter 0 = fc.b"),
    (([WEIGHT], SETTINGS), "have parameter 1 = fc.bias float32 [10] uncompressed; rank 3 has no parameter 1: give"),
    (([WEIGHT, BIAS, BIAS], SETTINGS), "ranks 0, 5 and 7 have no parameter 2; rank 3 has parameter 2 = fc.bias"),
    (([WEIGHT, BIAS], {**SETTINGS, "op": "Sum"}), "ranks 0, 5 and 7 have op = Average; rank 3 has op = Sum: give all of them the same arguments"),
    (([WEIGHT, BIAS], {"op": "Average"}), "ranks 0, 5 and 7 have bucket_bytes = 100; rank 3 has no bucket_bytes: give"),
    (([WEIGHT], {"op": "Sum", "bucket_bytes": 1}), "rank 3 has no parameter 1"),
])
def test_the_first_difference_is_named_by_all(odd, sentence):
    like, other = agreement.describe([WEIGHT, BIAS], SETTINGS), agreement.describe(*odd)
    said, gathered = together([like, other, like, like], [0, 3, 5, 7])
    assert len(set(said)) == 1 and said[0].startswith("workers differ: ranks 0, 5 and 7 have ") and sentence in said[0]
    assert len(gathered) == 3 and all(len({len(row) for row in rows}) == 1 for rows in gathered)


def test_three_sides():
    workers = [agreement.describe([], {"op": op}) for op in ("Average", "Sum", "Adasum", "Sum")]
    assert together(workers, range(4))[0] == ["workers differ: rank 0 has op = Average; ranks 1 and 3 have op = Sum; rank 2 has op = Adasum: "
                                              "give all of them the same arguments"] * 4


@pytest.mark.parametrize("where, what, name", [(hvd_quant, "__version__", "hvd_quant"), (wire, "WIRE_VERSION", "wire format")])
def test_versions_come_first(monkeypatch, where, what, name):
    here, version = agreement.describe([WEIGHT], {}), getattr(where, what)
    monkeypatch.setattr(where, what, 99)
    said = together([here, agreement.describe([BIAS], {})], range(2))[0]
    assert said == [f"workers differ: rank 0 has {name} = {version}; rank 1 has {name} = 99: install the same version of hvd_quant on "
                    "all of them"] * 2


def test_names_may_differ_where_only_a_part_is_compared():
    own = [[Parameter(f"dense{n}/kernel", "float32", (3,), spec, alike="kernel")] for n, spec in (("", "none"), ("_7", "none"), ("_7", "fp16"))]
    assert together([agreement.describe(one, {}) for one in own[:2]], range(2))[0] == [1] * 2
    assert "rank 1 has parameter 0 = dense_7/kernel float32 [3] compressed with fp16" in together(
        [agreement.describe(one, {}) for one in own[::2]], range(2))[0][0]


def test_parameters_that_differ():
    agreement.require_same([[1, 2, 3]] * 4, range(4), "abc", "after 10 steps")
    with pytest.raises(RuntimeError) as caught:
        agreement.require_same([[1, 2, 3], [1, 2, 3], [1, 5, 3], [1, 2, 4]], range(4), "abc", "after 10 steps")
    assert str(caught.value).startswith("parameters differ between workers after 10 steps, 2 of 3: b is one on ranks 0, 1 and 3, another on "
                                        "rank 2. The others are the same, so something beside this optimizer")
    with pytest.raises(RuntimeError, match="2 of 2: a is one on rank 0, another on rank 4, another on rank 5. Since all of them do"):
        agreement.require_same([[1, 2], [2, 3], [3, 4]], [0, 4, 5], "ab", "after 1 steps")


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "10"])
def test_steps_between_comparisons_are_whole_numbers(every):
    with pytest.raises(ValueError, match=f"verify_every={every!r} is not accepted; give the steps between two comparisons"):
        agreement.checked_every(every, elastic=False)


def test_comparisons_of_parameters_need_a_fixed_set_of_workers():
    assert agreement.checked_every(None, elastic=True) is None and agreement.checked_every(7, elastic=False) == 7
    with pytest.raises(ValueError, match="verify_every can't be used in an elastic job"):
        agreement.checked_every(7, elastic=True)


def reference(array):
    bits = np.frombuffer(array.tobytes(), f"i{array.itemsize}").astype(np.int64)
    weights, total = agreement.digest_weights(), 0
    for first in range(0, len(bits), agreement.DIGEST_ENTRIES):
        part = bits[first:first + agreement.DIGEST_ENTRIES]
        total = (total * agreement.DIGEST_FACTOR + int((part * weights[:len(part)]).sum())) % 2**64
    return total


@pytest.fixture(params=["torch", "tensorflow"])
def digest(request):
    framework = pytest.importorskip(request.param)
    module = pytest.importorskip(f"hvd_quant.{request.param}.agreement", reason="Horovod is not built for it")
    make = framework.from_numpy if request.param == "torch" else framework.Variable
    return lambda array: int(module.digest(make(array))) % 2**64


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (agreement.DIGEST_ENTRIES + 7,)], ids=str)
def test_digests_tell_bits_apart(digest, dtype, shape):
    array = np.random.default_rng(0).normal(size=shape).astype(dtype)
    first = digest(array.copy())
    assert first == reference(array)
    flat = array.reshape(-1)
    if array.size > 1:
        for place in (0, array.size // 2, array.size - 1):
            changed = flat.copy()
            changed[place] = np.nextafter(changed[place], changed.dtype.type(9))
            assert digest(changed.reshape(shape)) != first
        swapped = flat.copy()
        swapped[[0, -1]] = swapped[[-1, 0]]
        assert digest(swapped.reshape(shape)) != first
        flat[1] = np.nan
        assert digest(array.copy()) == digest(array.copy())


def test_digests_are_of_entries_in_their_order_not_of_memory():
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("hvd_quant.torch.agreement", reason="Horovod is not built for PyTorch")
    x = torch.randn(2, 3, 4, 5, dtype=torch.complex64)
    assert module.digest(x) == module.digest(x.contiguous(memory_format=torch.channels_last))
    assert module.digest(x) != module.digest(x.conj().clone())
    halves = x.real.bfloat16()
    assert module.digest(halves) == module.digest(halves.clone()) != module.digest(-halves)
