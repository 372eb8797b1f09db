"""The translation examples and what they share; nothing here needs a network or a second process of Horovod."""

import itertools
import json
import re
import struct
import subprocess
import sys
import tarfile
import types
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "pytorch"), str(EXAMPLES / "keras")]

for needed in ("sentencepiece", "sacrebleu"):
    pytest.importorskip(needed, reason="pip install 'hvd_quant[examples]'")

from common import nmt, results, subwords, translation  # noqa: E402
from common.datasets import DatasetError  # noqa: E402
from common.decoding import search  # noqa: E402
from common.subwords import BEGIN, END, PAD  # noqa: E402
from common.translation import Pairs, clean, read_mo, shadows, skeleton  # noqa: E402


# ------------------------------------------------------------------------------------------------------------- catalogues

def mo(messages, order="<"):
    """A compiled catalogue, as msgfmt makes them."""
    ids, strings = ([text.encode() for text in texts] for texts in (messages, messages.values()))
    start = 28 + 16 * len(ids)
    tables, data = b"", b""
    for texts in (ids, strings):
        for text in texts:
            tables += struct.pack(f"{order}2I", len(text), start + len(data))
            data += text + b"\0"
    return struct.pack(f"{order}7I", 0x950412DE, 0, len(ids), 28, 28 + 8 * len(ids), 0, 0) + tables + data


MESSAGES = {"": "Content-Type: text/plain; charset=UTF-8\n", "Open": "Öffnen", "menu\4Close": "Schließen",
            "one file\0many files": "eine Datei\0viele Dateien"}


@pytest.mark.parametrize("order", "<>")
def test_catalogues_are_read_as_gettext_reads_them(order):
    import gettext
    data = mo(MESSAGES, order)
    assert gettext.GNUTranslations(BytesIO(data)).pgettext("menu", "Close") == "Schließen"  # that it is one
    assert list(read_mo(data, "x.mo")) == [("Open", "Öffnen"), ("Close", "Schließen"), ("one file", "eine Datei"),
                                           ("many files", "viele Dateien")]


@pytest.mark.parametrize("data, complaint", [
    (b"", "x.mo is no gettext catalogue: it starts with nothing"), (b"PK\3\4" * 9, "starts with 504b0304"),
    (mo(MESSAGES)[:30], "x.mo is damaged"), (mo(MESSAGES)[:-3], "x.mo ends inside message 3"),
    (mo(MESSAGES).replace("Ö".encode(), b"\xff\xff"), "x.mo is damaged: .*utf-8"),
])
def test_damaged_catalogues(data, complaint):
    with pytest.raises(DatasetError, match=complaint):
        list(read_mo(data, "x.mo"))


# --------------------------------------------------------------------------------------------------------------- cleaning

@pytest.mark.parametrize("source, target, cleaned", [
    ("_Open file...", "Datei _öffnen …", ("Open file", "Datei öffnen")),
    ("&Save all files", "Alle Dateien &speichern", ("Save all files", "Alle Dateien speichern")),
    ("Search & replace", "Suchen & Ersetzen", ("Search & replace", "Suchen & Ersetzen")),
    ("Pre~view page:", "Seiten~vorschau:", ("Preview page", "Seitenvorschau")),
    ("<b>Big</b> red &amp; old", "<b>Groß</b>, rot &amp; alt", ("Big red & old", "Groß , rot & alt")),
    ("It is  done.\n", "Es ist\tgetan.", ("It is done.", "Es ist getan.")),
    ("It is done", "Es ist getan.", ("It is done", "Es ist getan")),
    ("fu\u0308r all", "u\u0308ber alle", None),  # the source isn't English
    ("For all", "U\u0308ber alle", ("For all", "Über alle")),
])
def test_what_is_cleaned(source, target, cleaned):
    assert clean(source, target) == cleaned


@pytest.mark.parametrize("source, target", [
    ("%s is open", "%s ist offen"), ("{0} is open", "{0} ist offen"), ("%1 is open", "%1 ist offen"), ("%-5.2f is big", "%-5.2f ist groß"),
    ("$HOME is missing", "$HOME fehlt hier"), ("use %<foo%> now", "jetzt %<foo%> nehmen"), ("call foo() again", "foo() wieder aufrufen"),
    ("see http://a.b now", "siehe http://a.b nun"), ("the max_size_t value", "der Wert max_size_t"), ("a [b] c", "ein [b] c"),
    ("Open", "Öffnen"), ("word " * 31, "Wort " * 31), ("An old house", "x"), ("An old", "Ein altes Haus, das am Rand der Stadt steht"),
    ("Hello World", "hello world!"), ("Open the file", "Open the old file of this"), ("Das ist nicht der Fall", "Es ist anders"),
    ("Open the file", ""), ("1 + 2 + 3 + ab cd", "1 + 2 + 3 + ef gh"),
])
def test_what_is_left_out(source, target):
    assert clean(source, target) is None


# ---------------------------------------------------------------------------------------------------------------- splits

def corpus(count=400):
    """Pairs in groups: each sentence in four spellings, and with a word more, less and other."""
    words = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi".split()
    sentences = [" ".join(words) for words in itertools.islice(itertools.permutations(words, 6), 0, count * 7919, 7919)]
    forms = [str.upper, str.title, "{}!".format, "{} 7.".format, "{} tau".format, lambda s: s.partition(" ")[2],
             lambda s: "rho " + s.partition(" ")[2]]
    return [(form(s), f"{form(s)} auf Deutsch {i} {j}") for i, s in enumerate(sentences) for j, form in enumerate([str, *forms])]


def test_no_near_duplicate_of_a_training_sentence_is_tested():
    parts = translation.split(corpus(), {"test": 20, "valid": 10})
    near = set().union(*map(shadows, parts.train.source))
    for part in (parts.valid, parts.test):
        assert len(part) > 5 and not any(shadows(source) & near for source in part.source)
        assert not set(map(skeleton, part.target)) & set(map(skeleton, parts.train.target))
    assert len(set(map(skeleton, parts.train.source))) == len(parts.train)
    assert not set(map(skeleton, parts.test.source)) & set(map(skeleton, parts.valid.source))


def test_where_a_sentence_goes_depends_on_its_words_alone():
    pairs, percent = corpus(), {"test": 20, "valid": 10}
    whole, half = translation.split(pairs, percent), translation.split(pairs[::-2], percent)
    assert not set(map(skeleton, half.test.source)) & set(map(skeleton, whole.train.source))
    assert skeleton("Open 2 files, now!") == skeleton("open 17 FILES now") == ("open", "files", "now")


def test_overlap_counts_sentences_that_are_made_of_known_pieces():
    train = Pairs(["a b c d e", "c d e f"], [])
    assert translation.overlap(train, Pairs(["B c D e, f!", "a b c d", "a b c d f", "a b c"], [])) == 2 / 3


@pytest.mark.parametrize("other, near", [("open the old file now", True), ("open the file", True), ("open a file now", True),
                                         ("now open the file", True), ("close a file now", False), ("now the file open", False)])
def test_sentences_are_near_if_they_differ_by_a_word(other, near):
    assert bool(shadows("open the file now") & shadows(other)) == near


# --------------------------------------------------------------------------------------------------------- text and cache

def test_text_files(tmp_path):
    pairs = Pairs(["one two", "three\u2028four"], ["eins zwei", "drei vier"])
    translation.write(translation.Corpus(pairs, pairs, pairs), tmp_path)
    assert translation.load(tmp_path) == translation.Corpus(pairs, pairs, pairs)
    (tmp_path / "train.de").write_text("one line\n")
    with pytest.raises(DatasetError, match=r"train.en has 2 lines and .*train.de has 1"):
        translation.load(tmp_path)
    (tmp_path / "train.de").write_bytes(b"\xff\n")
    with pytest.raises(DatasetError, match="is no UTF-8 text"):
        translation.load(tmp_path)


@pytest.fixture
def packages(monkeypatch):
    """Packages with catalogues of two languages, their downloader, and how often it was asked."""
    calls, shown = [], {"a": "1.0", "b": "2.0"}

    def download(command, folder, *_):
        calls.append(command)
        for name in shown:
            (folder / f"{name}.deb").touch()

    def archive(name):
        data = BytesIO()
        with tarfile.open(fileobj=data, mode="w") as tar:
            for language, texts in (("de", corpus(60)), ("fr", [("not wanted", "pas voulu")])):
                content = mo({source: target for source, target in texts if (len(source) % 2 == 0) == (name == "a")})
                member = tarfile.TarInfo(f"./usr/share/locale/{language}/LC_MESSAGES/x.mo")
                member.size = len(content)
                tar.addfile(member, BytesIO(content))
        data.seek(0)
        return data

    class Unpacker:
        def __init__(self, command, stdout):
            self.stdout, self.returncode = archive(Path(command[-1]).stem), 0

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(translation, "download", download)
    monkeypatch.setattr(translation.shutil, "which", lambda program: program)
    monkeypatch.setattr(translation.subprocess, "Popen", Unpacker)
    monkeypatch.setattr(translation.subprocess, "check_output", lambda command, text: f"{command[-1].stem}\t{shown[command[-1].stem]}\n")
    monkeypatch.setattr(translation, "PACKAGES", dict(shown))
    return calls, shown


def test_the_corpus_is_made_once_and_checked(packages, tmp_path, monkeypatch, capsys):
    calls, shown = packages
    with pytest.raises(DatasetError, match=r"gettext-en-de as it was made is not what it should be: its SHA-256 is ([0-9a-f]{64})") as error:
        translation.prepare(tmp_path)
    monkeypatch.setattr(translation, "SHA256", str(error.value).split("SHA-256 is ")[1][:64])
    folder = translation.prepare(tmp_path)
    assert {path.name for path in folder.iterdir()} == {*translation.FILES, "manifest.json"}  # and nothing else is left
    assert json.loads((folder / "manifest.json").read_text())["packages"] == shown
    assert "alpha" in (folder / "train.en").read_text() and "wanted" not in (folder / "train.en").read_text()
    assert translation.prepare(tmp_path) == folder and len(calls) == 2 and not capsys.readouterr().err
    (folder / "test.en").write_text("damaged\n")
    translation.prepare(tmp_path)
    assert len(calls) == 3 and translation._checksum(folder) == translation.SHA256


def test_other_versions_are_another_corpus_and_no_error(packages, tmp_path, monkeypatch, capsys):
    calls, shown = packages
    shown["b"] = "2.1"
    folder = translation.prepare(tmp_path)
    assert "b 2.1 for 2.0; don't compare" in capsys.readouterr().err
    assert translation.prepare(tmp_path) == folder and len(calls) == 1


def test_without_debian(tmp_path, monkeypatch):
    monkeypatch.setattr(translation.shutil, "which", lambda program: None)
    with pytest.raises(DatasetError, match="there is no dpkg-deb here. Give texts of your own with --train-src"):
        translation.prepare(tmp_path)


# ----------------------------------------------------------------------------------------------------- subwords and batches

@pytest.fixture(scope="module")
def toy():
    """A language of sixteen words, each with one translation, as in tests/integration/test_nmt.py."""
    words = "the a red green old new house car tree dog cat big small blue fast slow".split()
    random = np.random.default_rng(0)
    chosen = [random.choice(words, random.integers(2, 9)).tolist() for _ in range(300)]
    return Pairs([" ".join(line) for line in chosen], [" ".join(word[::-1] + "en" for word in line) for line in chosen])


@pytest.fixture(scope="module")
def vocabulary(toy, tmp_path_factory):
    return subwords.subwords(toy, 64, tmp_path_factory.mktemp("subwords"))


def test_subwords_are_the_same_each_time(toy, tmp_path):
    made = [subwords.subwords(toy, 64, tmp_path / name) for name in "ab"]
    files = [next((tmp_path / name).iterdir()) for name in "ab"]
    assert files[0].name == files[1].name and files[0].read_bytes() == files[1].read_bytes()
    assert str(tmp_path).encode() not in files[0].read_bytes() and len(made[0]) == 64
    assert made[0].decode(made[0].encode(toy.source)) == toy.source
    before = files[1].stat()
    subwords.subwords(toy, 64, tmp_path / "b")
    assert files[1].stat() == before  # it isn't made again
    subwords.subwords(toy.first(200), 64, tmp_path / "b")
    assert len(list((tmp_path / "b").iterdir())) == 2
    with pytest.raises(DatasetError, match="no vocabulary of 9000 subwords can be made of 300 pairs"):
        subwords.subwords(toy, 9000, tmp_path)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_workers_have_as_many_batches_of_as_many_tokens(toy, vocabulary, size):
    sentences = subwords.Sentences(toy, vocabulary, 64)
    plans = [sentences.plan(seed=1, epoch=2, size=size, max_tokens=120) for _ in range(size)]
    assert all(np.array_equal(a, b) for one, two in zip(plans[0], plans[-1]) for a, b in zip(one, two))
    everyones = np.concatenate([batch for step in plans[0] for batch in step])
    assert len(everyones) == len(set(everyones.tolist())) > 0.8 * len(toy)
    shapes = []
    for step in plans[0]:
        assert len(step) == size
        batches = [sentences.batch(chosen) for chosen in step]
        assert all(side.size <= 120 for batch in batches for side in (batch.source, batch.inputs, batch.labels))
        shapes += [batch.labels.size for batch in batches]
        assert max(batch.labels.shape[1] for batch in batches) - min(batch.labels.shape[1] for batch in batches) <= 8
    assert np.median(shapes) > 90  # and they are filled
    other = sentences.plan(seed=1, epoch=3, size=size, max_tokens=120)
    assert any(not np.array_equal(a, b) for one, two in zip(plans[0], other) for a, b in zip(one, two))
    with pytest.raises(DatasetError, match="300 training sentences are fewer than one step takes: 99 workers with batches of 1200"):
        sentences.plan(seed=1, epoch=0, size=99, max_tokens=1200)


def test_a_batch(toy, vocabulary):
    sentences = subwords.Sentences(Pairs(["red house", "a"], ["der neesuoh", "ein"]), vocabulary, 4)
    batch = sentences.batch(np.array([0, 1]))
    assert batch.source.shape[1] <= 4 and (batch.inputs[:, 0] == BEGIN).all() and batch.inputs.shape == batch.labels.shape
    for inputs, labels in zip(batch.inputs, batch.labels):
        words = labels[labels != PAD]
        assert words[-1] == END and inputs[inputs != PAD].tolist() == [BEGIN, *words[:-1]]
    assert batch.tokens == (batch.labels != PAD).sum()


def test_batches_go_on_where_they_were(toy, vocabulary):
    sentences, arguments = subwords.Sentences(toy, vocabulary, 64), {"seed": 3, "rank": 1, "size": 2, "max_tokens": 150}
    everything = list(itertools.islice(sentences.batches(**arguments), 60))  # several epochs
    for start in (0, 1, 17, 59):
        np.testing.assert_array_equal(next(sentences.batches(**arguments, start=start)).labels, everything[start].labels)


# ---------------------------------------------------------------------------------------------------------------- decoding

def language(seed, vocabulary=7):
    """A model whose next token depends on the whole sentence so far."""
    def next_scores(tokens):
        scores = np.empty((*tokens.shape[:2], vocabulary))
        for place in np.ndindex(*tokens.shape[:2]):
            key = [seed, place[0], *tokens[place]]
            scores[place] = np.random.default_rng(key).normal(size=vocabulary)
        return scores - np.log(np.exp(scores).sum(-1, keepdims=True))

    return next_scores


def test_a_beam_of_one_is_greedy():
    limits = np.array([3, 9, 6, 8])
    found = search(language(5), limits, 1)
    for i, limit in enumerate(limits):
        tokens = [BEGIN]
        while len(tokens) <= limit and (len(tokens) == 1 or tokens[-1] != END):
            tokens.append(int(language(5)(np.tile(tokens, (i + 1, 1, 1)))[i, 0].argmax()))
        assert found[i] == [token for token in tokens[1:] if token != END]
    assert len({len(tokens) for tokens in found}) > 1  # some end by themselves


@pytest.mark.parametrize("seed", range(3))
def test_a_wide_beam_finds_the_best(seed):
    limit, vocabulary, scores = 3, 5, language(seed, 5)
    best = (-np.inf, None)
    for length in range(1, limit + 1):
        for words in itertools.product(range(vocabulary), repeat=length):
            if END in words[:-1] or (length < limit and words[-1] != END):
                continue
            total = sum(scores(np.array([[[BEGIN, *words[:i]]]]))[0, 0, word] for i, word in enumerate(words))
            best = max(best, (total / length, [word for word in words if word != END]))
    assert search(scores, np.array([limit]), vocabulary ** limit) == [best[1]]


# -------------------------------------------------------------------------------------------------------------------- BLEU

def test_bleu():
    lines = ["the cat sat on the old red mat", "a dog ran to the new blue house"]
    score, signature = nmt.bleu(lines, lines)
    assert score == pytest.approx(100) and "version:" in signature and "tok:13a" in signature
    assert 0 < nmt.bleu(["the cat sat on the mat", lines[1]], lines)[0] < 90


@pytest.mark.parametrize("size", [1, 3])
def test_translations_are_gathered(vocabulary, size):
    lines = ["red house", "the", "a small old green tree", "new car", "cat"]
    shares, asked = [], []

    def translate(sources, limits, beam):
        asked.append((sources, limits, beam))
        return [[token for token in row if token not in (PAD, END)] for row in sources.tolist()]  # says what it hears

    def workers(collect):
        for rank in range(size):
            hvd = types.SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: size)
            yield nmt.translations(translate, lines, vocabulary, hvd, collect, 2, 32)

    list(workers(lambda counts: shares.append(counts) or counts))
    assert sum(len(sources) for sources, _, _ in asked) == len(lines)
    gathered = np.sum(shares, axis=0).tolist()
    assert list(workers(lambda counts: gathered)) == [lines] * size
    assert all(beam == 2 and (limits >= 10).all() for _, limits, beam in asked)


# ------------------------------------------------------------------------------------------------------------- the command

def test_the_learning_rate_rises_and_falls():
    arguments = nmt.parse("", ("transformer",), argv=["--lr", "0.4", "--warmup", "100"])
    assert [nmt.learning_rate(arguments, step) for step in (0, 49, 99, 399)] == pytest.approx([0.004, 0.2, 0.4, 0.2])


@pytest.mark.parametrize("line, complaint", [
    ("--train-src a", "of the six files --train-src, --train-tgt, .* some are missing: give all or none"),
    ("--width 100", "--width 100 is no multiple of 64"), ("--compression topk:ratio=2", "argument --compression: topk: ratio=2"),
    ("--model rnn", "argument --model: invalid choice"), ("--steps 0", "argument --steps: 0 is not positive")])
def test_one_line_says_what_is_wrong(line, complaint, capsys):
    with pytest.raises(SystemExit):
        nmt.parse("", ("transformer",), argv=line.split())
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(complaint, said)


class Counting:
    """A trainer that knows how often it has stepped, and fails at a step."""

    def __init__(self, fails_at=10**9):
        self.steps, self.fails_at, self.seen, self.agreed = 0, fails_at, [], 0

    def step(self, batch, lr):
        if self.steps == self.fails_at:
            raise KeyboardInterrupt
        self.steps += 1
        self.seen.append((batch.labels.sum(), lr))
        return 1.0 / self.steps

    def agree(self):
        self.agreed += 1

    def translate(self, sources, limits, beam):
        return [[4 + self.steps % 8] * 3 for _ in sources]

    def stats(self):
        return {"wire_bytes": 10 * len(self.seen), "dense_bytes": 100 * len(self.seen)}

    def save(self, path, run):
        path.write_text(json.dumps([self.steps, run]))

    def load(self, path):
        self.steps, run = json.loads(path.read_text())
        return run


def test_a_course_goes_on_where_it_was(toy, vocabulary, tmp_path, capsys):
    task = nmt.Task(subwords.Sentences(toy, vocabulary, 64), toy.first(5), toy.first(4), vocabulary)
    alone = types.SimpleNamespace(rank=lambda: 0, size=lambda: 1)

    def train(trainer, *line):
        arguments = nmt.parse("", ("transformer",), argv=["--steps", "50", "--evaluate-every", "20", "--max-tokens", "99", *line])
        return nmt.train(trainer, "topk", arguments, task, alone, lambda counts: counts)

    whole, first, second = Counting(), Counting(fails_at=45), Counting()
    wanted = train(whole)
    folder = ["--checkpoint", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        train(first, *folder)
    assert [path.name for path in (tmp_path / "topk").iterdir()] == ["00000040-0of1"]
    run = train(second, *folder)
    assert second.seen == whole.seen[40:] and whole.agreed == 3
    assert [(point.step, point.wire_bytes, value) for point, value in run.tests] == [
        (point.step, point.wire_bytes, value) for point, value in wanted.tests] and run.dense_bytes == wanted.dense_bytes == 5000
    assert [point.step for point, _ in run.tests] == [20, 40, 50] and run.more == wanted.more and "nrefs:1" in run.more["signature"]
    assert train(Counting(), *folder).tests == run.tests  # all is done
    assert results.Run.from_json(json.loads(json.dumps(run.to_json()))) == run
    shown = capsys.readouterr()
    assert "BLEU of the test set" in shown.out and shown.out.count(toy.source[0] + " | ") and "tokens/s=" in shown.err and "BLEU=" in shown.err


def test_results_of_bleu(tmp_path, capsys):
    from rich.console import Console
    runs = [results.Run(name, [results.Point(9, 1.0, 90)], [(results.Point(10 * i, i, 100 * i), value * i) for i in (1, 2)], 4000, results.BLEU)
            for name, value in (("none", 5.0), ("topk", 4.5))]
    figures, drawing = results.save(runs, {}, "Title", tmp_path)
    assert json.loads(figures.read_text())["runs"][1]["bleu"] == 9.0 and drawing.exists()
    Console(width=120).print(results.table(runs, "Title"))
    shown = capsys.readouterr().out
    assert "bleu" in shown and "9.00 " in shown and "-1.00" in shown


def test_the_step_that_all_workers_have_is_taken(tmp_path):
    def worker(rank, elsewhere):
        return nmt.Checkpoints(tmp_path, types.SimpleNamespace(rank=lambda: rank, size=lambda: 2),
                               lambda counts: [a + b for a, b in zip(counts, elsewhere)])

    worker(0, [0, 0]).write(20, lambda path: path.write_text("x"))
    (tmp_path / "00000040-0of2").write_text("x")  # ended before the other had written
    assert worker(0, [0, 20]).latest().name == "00000020-0of2" and worker(1, [40, 0]).latest() is None


# -------------------------------------------------------------------------------------------------------------- the models

@pytest.mark.parametrize("model", ["transformer", "rnn"])
@pytest.mark.parametrize("tied", [False, True])
def test_models(model, tied):
    torch = pytest.importorskip("torch")
    pytorch_nmt = pytest.importorskip("pytorch_nmt", exc_type=ImportError)
    line = ["--model", model, "--width", "64", *["--tied"] * tied]
    torch.manual_seed(0)
    net = pytorch_nmt.build(nmt.parse("", ("transformer", "rnn"), tied=True, argv=line), 50).eval()
    assert sum(p.shape == (50, 64) for p in net.parameters()) == (1 if tied else 3)
    source, inputs = torch.tensor([[5, 6, 7, END], [8, END, PAD, PAD]]), torch.tensor([[BEGIN, 9, 10], [BEGIN, 11, PAD]])
    features = net.decode(inputs, net.encode(source))
    assert features.shape == (2, 3, 64)
    alone = net.decode(inputs[1:, :2], net.encode(source[1:, :2]))
    torch.testing.assert_close(features[1:, :2], alone, rtol=1e-4, atol=1e-5)  # padding changes nothing
    later = net.decode(torch.tensor([[BEGIN, 9, 33], [BEGIN, 11, 12]]), net.encode(source))
    torch.testing.assert_close(later[:, :2], features[:, :2], rtol=1e-4, atol=1e-5)  # nor does what comes later
    wanted = inputs != PAD
    torch.testing.assert_close(net(source, inputs, wanted), net.output(features[wanted]))


def test_the_keras_model():
    code = """if True:
        import sys; sys.path[:0] = sys.argv[1:]
        import numpy as np, keras_nmt
        from common import nmt
        arguments = nmt.parse("", ("transformer",), argv=["--width", "64", "--layers", "1"])
        net = keras_nmt.Transformer(50, arguments)
        source, inputs = np.array([[5, 6, 7, 3], [8, 3, 0, 0]]), np.array([[2, 9, 10], [2, 11, 0]])
        features = net.decode(inputs, *net.encode(source)).numpy()
        alone = net.decode(inputs[1:, :2], *net.encode(source[1:, :2])).numpy()
        later = net.decode(np.array([[2, 9, 33], [2, 11, 12]]), *net.encode(source)).numpy()
        np.testing.assert_allclose(features[1:, :2], alone, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(features[:, :2], later[:, :2], rtol=1e-4, atol=1e-5)
    """
    pytest.importorskip("tensorflow")
    done = subprocess.run([sys.executable, "-c", code, str(EXAMPLES), str(EXAMPLES / "keras")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
